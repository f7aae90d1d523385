"""Limits: `callers/limits.py` with its accounts and windows.

An input is settings and a sequence of requests that are admitted, released and settled, beside
clocks that go on and are set. A plain list of all that happened is the oracle: no counter is ever
negative, each is what was reserved and settled, nothing is admitted beyond a limit, and nothing is
refused that fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count as count_from

from gateway.callers.limits import MINUTE, Account, LimitBook, Reservation
from gateway.callers.windows import DAY, WINDOW_PARTS
from gateway.config.keys import GroupSpec, LimitSpec
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.terms import Caller, Priority
from tests.callers.build import Clocks, all_accounts
from tests.fuzz.inputs import Divided, Target, seed
from tests.lease_requests import a_lease_request

PART = 2 * MINUTE / WINDOW_PARTS
"""Seconds by which an addition may leave a window late: that of its part, or of one beside it."""

START = 1_800_000_000.0
"""Unix time at which every input begins."""

MOST_DAYS = 4
"""Days whose sums an account keeps."""

CHECK_EVERY = 32
"""Steps between two comparisons with the list of all that happened."""

_DEFAULTS = Settings()

_COUNTS = (None, 1, 2, 3, 5, 8, 20)
_TOKENS = (None, 1, 10, 100, 1000, 5000, 100_000)
_BUDGETS = (None, "0.01/day", "1/day", "5/month", "0.5/month", "1000/month", "3/day")


@dataclass(slots=True)
class Sent:
    """A request that was admitted, and what came of it."""

    reservation: Reservation
    admitted: float
    """Monotonic."""
    subjects: tuple[str, ...]
    released: bool = False
    settled: bool = False
    ended: float = math.inf
    """Monotonic, as the book can know it."""
    day: int = 0
    tokens: int = 0
    cost: float = 0.0


def limit_spec(numbers: Iterator[int]) -> LimitSpec:
    """Limits by the next bytes."""
    return _spec(tuple(next(numbers, 0) % 7 for _ in range(7)))


@lru_cache(maxsize=1 << 14)
def _spec(chosen: tuple[int, ...]) -> LimitSpec:
    names = ("rpm", "tpm", "tokens_per_day", "budget", "concurrency", "prompt_tokens")
    kinds = (_COUNTS, _TOKENS, _TOKENS, _BUDGETS, _COUNTS, _TOKENS, _TOKENS)
    found = zip((*names, "completion_tokens"), kinds, chosen, strict=True)
    return LimitSpec.model_validate({name: kind[number] for name, kind, number in found})


class Play:
    """One input, played."""

    def __init__(self, data: bytes) -> None:
        self._numbers = iter(data)
        self._clocks = Clocks(START)
        self._sent: list[Sent] = []
        self._days: list[int] = []
        self._book = LimitBook(
            self._settings(), clock=self._clocks.clock, wall_clock=self._clocks.wall
        )
        self._callers = [
            Caller(
                name,
                name,
                Priority.NORMAL,
                group=group,
                limits=limit_spec(self._numbers),
                user_limits=limit_spec(self._numbers) if name == "a" else None,
                trust_user_headers=True,
            )
            for name, group in (("a", "g"), ("b", "g"), ("c", None))
        ]

    def _settings(self) -> Settings:
        total, group = limit_spec(self._numbers), GroupSpec(limits=limit_spec(self._numbers))
        limits = _DEFAULTS.limits.model_copy(update={"total": total})
        return _DEFAULTS.model_copy(update={"limits": limits, "groups": {"g": group}})

    def play(self) -> None:
        """Play all of it, checking after each step."""
        steps = (
            self._reserve, self._reserve, self._reserve, self._settle, self._release, self._go_on,
            self._settle, self._set_clock,
        )  # fmt: skip
        for count in count_from(1):
            number = next(self._numbers, None)
            if number is None:
                break
            steps[number % len(steps)](number // len(steps))
            if count % CHECK_EVERY == 0:
                self._check()
        self._check()
        for sent in self._sent:
            sent.reservation.settle(0, 0.0, self._clocks.wall())
        for account in all_accounts(self._book):
            assert (account.running, account.open, account.reserved_tokens) == (0, 0, 0)
            assert account.reserved_cost == 0.0

    def _reserve(self, number: int) -> None:
        caller = self._callers[number % 3]
        user = (None, "u", "v")[number // 3 % 3]
        size = next(self._numbers, 0)
        request = a_lease_request(
            "req", ("m", "n")[size % 2], model_names=("m",), caller=caller.id,
            slots=size % 3, max_tokens=(None, 1, 50, 2000)[size // 3 % 4],
            prompt_tokens=(0, 5, 60, 900)[size // 12 % 4], text_bytes=(0, 40, 400, 4000)[size // 48 % 4],
        )  # fmt: skip
        accounts = self._book.accounts(caller, user)
        try:
            reservation = self._book.reserve(
                accounts, request, self._clocks.wall(), prompts=1 + size % 2
            )
        except GatewayError as error:
            assert error.status in {400, 429}, error.status
            if error.status == 429:
                assert error.retry_after is not None
                assert 0 <= error.retry_after < math.inf
                self._check_refused(accounts.tracked)
            return
        subjects = tuple(account.subject for account in accounts.tracked)
        self._sent.append(Sent(reservation, self._clocks.monotonic, subjects))
        for account in accounts.tracked:
            self._check_admitted(account, reservation)
        for limit in self._book.rate_limits(accounts):
            assert limit is None or (0 <= limit.remaining <= limit.limit and limit.reset >= 0)

    def _check_admitted(self, account: Account, reservation: Reservation) -> None:
        """Check that the newest request is within each limit."""
        spec, now = account.spec, self._clocks.monotonic
        own = [sent for sent in self._sent if account.subject in sent.subjects]
        assert spec.concurrency is None or sum(not s.released for s in own) <= spec.concurrency
        recent = sum(now - sent.admitted < MINUTE for sent in own)
        assert spec.rpm is None or recent <= spec.rpm, "more requests a minute than allowed"
        reserved = sum(sent.reservation.tokens for sent in own if not sent.settled)
        used = sum(sent.tokens for sent in own if sent.settled and now - sent.ended < MINUTE)
        if reservation.tokens:
            assert spec.tpm is None or used + reserved <= spec.tpm, "more tokens than allowed"

    def _check_refused(self, tracked: tuple[Account, ...]) -> None:
        """Check that a limit could be the reason: one of them has something on it."""
        now = self._clocks.monotonic
        for account in tracked:
            own = [sent for sent in self._sent if account.subject in sent.subjects]
            if any(
                not s.settled or not s.released or now - s.admitted < MINUTE + PART for s in own
            ):
                return
            if any(sent.tokens or sent.cost for sent in own):
                return
        raise AssertionError("a request was refused though nothing is on its accounts")

    def _settle(self, number: int) -> None:
        if not self._sent:
            return
        sent = self._sent[number % len(self._sent)]
        tokens = (0, 1, 7, 300, sent.reservation.tokens)[next(self._numbers, 0) % 5]
        cost = (0.0, 0.1, 0.25, 2.0, tokens * 1e-4)[next(self._numbers, 0) % 5]
        late = (0.0, 0.0, 0.3, 20.0, 100.0, -50.0)[next(self._numbers, 0) % 6]
        ended_at = self._clocks.wall() - late
        sent.reservation.settle(tokens, cost, ended_at)
        sent.released = True
        if sent.settled:
            return
        sent.settled, sent.tokens, sent.cost = True, tokens, cost
        sent.ended = self._clocks.monotonic - min(MINUTE, max(0.0, late))
        sent.day = int(ended_at // DAY)
        if sent.day not in self._days:
            self._days.append(sent.day)

    def _release(self, number: int) -> None:
        if self._sent:
            sent = self._sent[number % len(self._sent)]
            sent.reservation.release(self._clocks.wall())
            sent.released = True

    def _go_on(self, number: int) -> None:
        self._clocks.advance((0.01, 0.2, 1.0, 9.0, 31.0, 61.0, 4000.0, DAY)[number % 8])

    def _set_clock(self, number: int) -> None:
        now = self._clocks.wall()
        self._clocks.set_wall(now + (-3600.0, 3600.0, -DAY, 2 * DAY)[number % 4])

    def _check(self) -> None:
        """Compare every account with the list of what happened."""
        now = self._clocks.monotonic
        for account in all_accounts(self._book):
            own = [sent for sent in self._sent if account.subject in sent.subjects]
            open_now = [sent for sent in own if not sent.settled]
            assert account.running == sum(not sent.released for sent in own)
            assert account.open == len(open_now)
            assert account.reserved_tokens == sum(sent.reservation.tokens for sent in open_now)
            cost = math.fsum(sent.reservation.cost for sent in open_now)
            assert math.isclose(account.reserved_cost, cost, rel_tol=1e-9, abs_tol=1e-9)
            requests = account.requests.value(now)
            assert _within([(sent.admitted, 1) for sent in own], now, requests)
            settled = [sent for sent in own if sent.settled]
            assert _within([(s.ended, s.tokens) for s in settled], now, account.tokens.value(now))
            if len(self._days) <= MOST_DAYS:
                for day in self._days:
                    tokens = sum(sent.tokens for sent in settled if sent.day == day)
                    assert account.tokens_by_day.get(day, 0) == tokens
                    money = math.fsum(sent.cost for sent in settled if sent.day == day)
                    assert math.isclose(account.cost_by_day.get(day, 0.0), money, abs_tol=1e-9)


def _within(added: list[tuple[float, int]], now: float, found: float) -> bool:
    """Whether a sliding sum is that of the last minute, or late by a part of its window."""
    least = sum(amount for when, amount in added if now - when < MINUTE)
    most = sum(amount for when, amount in added if now - when < MINUTE + PART)
    return least <= found <= most


def check(one: Divided) -> None:
    """Check one sequence."""
    Play(one.text).play()


_NO_LIMITS = bytes(42)
_SOME_LIMITS = bytes((3, 4, 5, 2, 2, 0, 0)) * 6

LIMITS = Target(
    "limits",
    check,
    (
        seed(_NO_LIMITS + bytes((0, 40, 0, 80, 3, 1, 1, 0, 5, 20, 3, 2, 2, 2, 45, 0, 50))),
        seed(_SOME_LIMITS + bytes((0, 40, 0, 80, 3, 1, 1, 0, 5, 20, 3, 2, 2, 2, 45, 0, 50, 7, 0, 61))),
        seed(bytes((1, 0, 0, 0, 1, 0, 0)) * 6 + bytes((0, 40) * 12 + (4, 12, 0, 40, 53, 0, 40))),
        seed(bytes((0, 3, 0, 0, 0, 0, 0)) * 6 + bytes((8, 90, 3, 3, 0, 2, 45, 16, 90, 11, 4, 4, 5))),
        seed(bytes((0, 0, 3, 3, 0, 3, 3)) * 6 + bytes((0, 250, 3, 3, 3, 0, 15, 0, 250, 61, 0, 250))),
    ),
    longest=160,
)  # fmt: skip
