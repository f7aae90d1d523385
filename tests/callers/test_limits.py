"""Who is admitted, what is refused and in which words, and what survives changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.callers.fair_share import FairShare, soft_limit
from gateway.callers.keys import KeyRing, new_key
from gateway.callers.limits import (
    DEFAULT_COMPLETION_TOKENS,
    EVICTION_TRIES,
    MOST_USERS,
    LimitBook,
    OtherUse,
    Part,
    Reservation,
    UsedQuota,
)
from gateway.callers.standings import QuotaWatch
from gateway.callers.windows import WINDOW_PARTS, SlidingSum
from gateway.cluster.fencing import shares
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.lease import LeaseRequest
from gateway.store.failures import StoreUnavailable
from gateway.terms import Caller, Priority
from tests.callers.build import NOW, Clocks, a_caller, a_lease_request, all_accounts
from tests.each_case import each_case
from tests.known import known

DAY = 86400.0


class Book(LimitBook):
    def __init__(self, clocks: Clocks | None = None, **settings: Any) -> None:
        self.clocks = clocks or Clocks()
        self.deferred: list[Callable[[], None]] = []
        super().__init__(
            Settings.model_validate(settings),
            clock=self.clocks.clock,
            wall_clock=self.clocks.wall,
            learn_pending=self.settle_deferred,
            dearest_token=lambda _: 0.01,
        )

    def settle_deferred(self) -> None:
        while self.deferred:
            self.deferred.pop()()

    def admit(
        self, caller: Caller, user: str | None = None, request: LeaseRequest | None = None
    ) -> Reservation:
        accounts = self.accounts(caller, user)
        return self.reserve(accounts, request or a_lease_request(), self.clocks.wall())

    def use(self, caller: Caller, tokens: int, cost: float = 0.0, user: str | None = None) -> None:
        self.admit(caller, user).settle(tokens, cost, self.clocks.wall())

    def refusal(
        self, caller: Caller, user: str | None = None, request: LeaseRequest | None = None
    ) -> GatewayError:
        with pytest.raises(GatewayError) as raised:
            self.admit(caller, user, request)
        return raised.value

    def admitted(self, caller: Caller) -> int:
        for number in range(100):
            try:
                self.admit(caller)
            except GatewayError:
                return number
        return 100


def answers(most: int, prompt: int = 0) -> LeaseRequest:
    return a_lease_request(prompt, most)


def test_retry_after_is_when_the_oldest_request_leaves_the_window() -> None:
    book, alice = Book(), a_caller(limits={"rpm": 2})
    for seconds in (20.0, 10.0):
        book.use(alice, 0)
        book.clocks.advance(seconds)
    error = book.refusal(alice)
    assert (error.status, error.type) == (429, "rate_limit_error")
    assert (error.code, error.retry_after) == ("rate_limit_exceeded", 30.0)
    book.clocks.advance(30.0)
    book.use(alice, 0)
    assert book.refusal(alice).retry_after == 20.0


def test_all_answers_are_reserved_and_one_without_a_bound_as_far_as_the_limit_goes() -> None:
    book = Book()
    rich, poor = a_caller("rich", limits={"tpm": 10_000}), a_caller("poor", limits={"tpm": 500})
    assert book.admit(rich).tokens == DEFAULT_COMPLETION_TOKENS
    assert book.admit(poor).tokens == 500
    request = a_lease_request(30, 100, slots=3)
    accounts = book.accounts(rich)
    assert book.reserve(accounts, request, book.clocks.wall(), prompts=4).tokens == 30 + 1200
    # One without slots is a request alone.
    assert book.admit(rich, request=a_lease_request(5000, slots=0, generates=False)).tokens == 0


def test_what_has_ended_is_settled_before_a_refusal_and_once() -> None:
    book, alice = Book(), a_caller(limits={"tpm": 1000})
    running = book.admit(alice, request=answers(900))

    def end() -> None:
        for _ in range(2):
            running.release(book.clocks.wall())
            running.settle(10, 0.0, book.clocks.wall())

    book.deferred.append(end)
    book.admit(alice, request=answers(900))
    (account,) = all_accounts(book)
    assert (account.running, account.open, account.reserved_tokens) == (1, 1, 900)
    assert account.tokens.value(book.clocks.clock()) == 10


def test_the_quota_of_a_day_is_renewed_at_midnight_in_utc() -> None:
    book, alice = Book(), a_caller(limits={"tokens_per_day": 100})
    book.use(alice, 100)
    error = book.refusal(alice, request=answers(1))
    assert (error.status, error.code, error.retryable) == (429, "insufficient_quota", False)
    midnight = (NOW // DAY + 1) * DAY
    assert error.retry_after == midnight - NOW
    book.clocks.advance(midnight - NOW)
    book.admit(alice, request=answers(100))


def test_money_is_reserved_at_the_dearest_price_until_prices_are_known() -> None:
    book, alice = Book(), a_caller(limits={"budget": "5/month"})
    running = book.admit(alice, request=answers(400))
    assert running.cost == 4.0
    assert "a budget of 5 a month" in book.refusal(alice, request=answers(400)).message
    running.settle(400, 0.4, book.clocks.wall())
    assert book.admit(alice, request=answers(400)).cost == pytest.approx(0.4)
    # One that is used up refuses what costs nothing, too.
    book.use(alice, 10, 4.6)
    error = book.refusal(alice, request=a_lease_request(slots=0))
    assert (error.code, error.type) == ("insufficient_quota", "insufficient_quota")


@each_case("days", [-400.0, -31.0, -1.0])
def test_a_clock_that_is_set_back_frees_nothing_and_locks_not_for_long(days: float) -> None:
    book = Book()
    alice = a_caller(limits={"budget": "5/month", "tokens_per_day": 100, "rpm": 3})
    book.use(alice, 100, 5.0)
    book.clocks.set_wall(NOW + days * DAY)
    book.clocks.set_wall(NOW)
    assert book.refusal(alice, request=answers(1)).code == "insufficient_quota"
    # Requests a minute do not depend on it at all.
    bob = a_caller("bob", limits={"rpm": 1})
    book.use(bob, 0)
    book.clocks.set_wall(NOW + days * DAY)
    assert book.refusal(bob).retry_after == 60.0
    book.clocks.advance(60.0)
    book.use(bob, 0)


def test_a_clock_that_is_set_ahead_keeps_the_sums_of_the_right_month() -> None:
    book, alice = Book(), a_caller(limits={"budget": "5/month"})
    book.use(alice, 100, 5.0)
    book.clocks.set_wall(NOW + 40 * DAY)
    book.use(alice, 100, 5.0)
    book.clocks.set_wall(NOW)
    assert known(book.refusal(alice).retry_after) < 31 * DAY
    # What was used meanwhile counts in its own month, when that has come.
    book.clocks.set_wall(NOW + 40 * DAY)
    assert book.refusal(alice).code == "insufficient_quota"


GROUPS = {"team": {"limits": {"rpm": 3}, "user_limits": {"rpm": 1}}}


def test_all_accounts_must_have_room_and_the_message_names_the_one_that_has_none() -> None:
    book = Book(groups=GROUPS, limits={"total": {"rpm": 4}})
    chat = a_caller("chat", group="team", trust_user_headers=True)
    bob, other = a_caller("bob", group="team", limits={"rpm": 9}), a_caller("other")
    book.use(chat, 0, user="ann")
    assert "end user 'ann' of key 'chat': 1 requests" in book.refusal(chat, "ann").message
    book.use(bob, 0)
    book.use(chat, 0, user="ben")
    assert "group 'team': 3 requests" in book.refusal(bob).message
    book.use(other, 0)
    assert "all callers together: 4 requests" in book.refusal(other).message
    # What was refused counts nowhere.
    assert {one.subject: one.requests.value(book.clocks.clock()) for one in all_accounts(book)} == {
        "total": 4,
        "group:team": 3,
        "key:bob": 1,
        "user:chat/ann": 1,
        "user:chat/ben": 1,
    }


def parts_of(count: int) -> list[Part]:
    members = tuple(f"m{number}" for number in range(count))

    def part_of(member: str) -> Part:
        return Part(count, lambda total, key: shares(total, key, members)[member])

    return [part_of(member) for member in members]


@each_case(
    ("limits", "together"),
    [
        ({"concurrency": 7}, 7),
        ({"concurrency": 1}, 1),
        ({"rpm": 8}, 8),
        ({"tpm": 12_000}, 9),  # of 1,025 tokens each; a part is no whole number of them
        ({"tokens_per_day": 12_000}, 9),
        ({"budget": "120/day"}, 9),
        ({"budget": "120/month"}, 9),
    ],
)
def test_processes_that_can_not_see_each_other_admit_no_more_together_than_one_may(
    limits: dict[str, Any], together: int
) -> None:
    caller, admitted = a_caller(limits=limits), 0
    for part in parts_of(3):
        book = Book()
        book.divide(part)
        admitted += book.admitted(caller)
        assert "can't reach the others" in book.refusal(caller).message
    assert admitted == together


def test_what_is_left_of_a_day_is_divided_and_counts_as_it_was_used_afterwards() -> None:
    caller, book = a_caller(limits={"tokens_per_day": 10_000}), Book()
    book.use(caller, 4_000)
    book.divide(parts_of(2)[0])
    book.use(caller, 1_500)
    assert book.admitted(caller) == 1  # 3,000 of 6,000 are its part
    book.divide(None)
    assert book.admitted(caller) == 3


def test_classes_and_models_must_be_allowed_by_all() -> None:
    book = Book(
        groups={"team": {"limits": {"models": ["a", "b"], "max_class": "normal"}}},
        limits={"total": {"models": ["b", "c"]}},
    )
    caller = book.accounts(a_caller(group="team", limits={"max_class": "batch"})).caller
    assert caller.models == frozenset({"b"})
    assert caller.max_priority is Priority.BATCH


def test_a_request_that_began_before_a_limit_counts_once_when_it_ends() -> None:
    """Also if others are limited while it runs."""
    book, limits = Book(), {"tpm": 1000}
    running, alice = book.admit(a_caller()), a_caller(limits=limits)
    for caller in (alice, a_caller("bob", limits=limits)):
        book.accounts(caller)
    running.settle(600, 0.0, book.clocks.wall())
    assert book.refusal(alice, request=answers(500)).code == "rate_limit_exceeded"
    other = book.admit(alice, request=answers(300))
    book.accounts(a_caller("carol", limits=limits))
    other.settle(100, 0.0, book.clocks.wall())
    book.admit(alice, request=answers(300))


def test_many_end_users_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    book = Book()
    chat = a_caller("chat", user_limits={"rpm": 1}, trust_user_headers=True)
    other = a_caller("other", user_limits={"rpm": 1}, trust_user_headers=True)
    book.use(other, 0, user="ann")
    for number in range(MOST_USERS):
        book.use(chat, 0, user=f"user-{number}")
    # All of them still count: any further ones share one account, and do not displace them.
    book.use(chat, 0, user="one more")
    assert "further end users of key 'chat'" in book.refusal(chat, "and another").message
    assert book.refusal(chat, "user-0").code == "rate_limit_exceeded"
    assert book.refusal(other, "ann").code == "rate_limit_exceeded"
    assert sum(1 for _ in all_accounts(book)) == MOST_USERS + 2
    # A minute later the oldest make room.
    book.clocks.advance(61.0)
    for number in range(1000):
        book.use(chat, 0, user=f"new-{number}")
    assert sum(1 for _ in all_accounts(book)) == MOST_USERS + 2


@pytest.mark.parametrize("busy", ["have used money", "run", "run elsewhere"])
def test_users_that_count_something_do_not_stand_before_those_that_can_go(busy: str) -> None:
    """However long the oldest users stay, a new one gets an account of its own."""
    book = Book()
    chat = a_caller("chat", user_limits={"budget": "5/month", "concurrency": 2})
    names = [f"busy-{number}" for number in range(3 * EVICTION_TRIES)]
    accounts = [book.accounts(chat, name).tracked[0] for name in names]
    for name, account in zip(names, accounts, strict=True):
        if busy == "have used money":
            book.use(chat, 10, 1.0, user=name)
        elif busy == "run":
            book.admit(chat, name, request=answers(0))
        else:
            account.set_others(OtherUse(running=1))
    # They have asked for their figures, and used nothing.
    for number in range(MOST_USERS - len(names)):
        book.accounts(chat, f"idle-{number}")
    book.clocks.advance(120.0)
    own = {book.accounts(chat, f"new-{number}").tracked[0].subject for number in range(100)}
    assert len(own - {"others:chat"}) >= 100 - len(names) // EVICTION_TRIES
    # None of the busy ones has lost what counts.
    assert [book.accounts(chat, name).tracked[0] for name in names] == accounts
    assert sum(1 for _ in all_accounts(book)) <= MOST_USERS + 1


def test_what_an_earlier_process_used_and_this_one_records_counts_once() -> None:
    book, alice = Book(), a_caller(limits={"tokens_per_day": 100})
    accounts, ended_at = book.accounts(alice), book.clocks.wall()
    scopes = dict(book.unloaded())
    assert scopes
    book.count_recovered(accounts, 100, 0.0, ended_at - 1.0)
    book.use(alice, 0)  # The ledger's sums, which are to come, have it.
    book.loaded(scopes)
    book.count_recovered(accounts, 100, 0.0, ended_at - 1.0)
    assert book.refusal(alice).code == "insufficient_quota"


def test_a_request_that_was_admitted_elsewhere_is_never_refused_and_reserves() -> None:
    book = Book()
    caller = a_caller(limits={"concurrency": 1, "rpm": 1, "tpm": 1000, "prompt_tokens": 50})
    reservation, _ = [
        book.adopt(book.accounts(caller), answers(100, prompt=60), NOW - 30.0, 1) for _ in range(2)
    ]
    (account,) = all_accounts(book)
    assert (account.running, account.open) == (2, 2)
    assert account.reserved_tokens > 0
    assert account.requests.value(book.clocks.clock()) == 0, "its process has counted it as one"
    assert "concurrency" in book.refusal(caller).message
    reservation.settle(70, 0.0, book.clocks.wall())
    assert (account.running, account.open) == (1, 1)
    assert account.tokens.value(book.clocks.clock()) == 70


LIMITED = {
    "id": "alice", "sha256": new_key("alice").sha256, "name": "Alice", "group": "team",
    "limits": {"budget": "20/month", "tokens_per_day": 1000, "rpm": 5},
}  # fmt: skip


class Watched(Book):
    """A book with a watch over Alice's limits, and what it has told."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        ring = KeyRing(Settings.model_validate(settings).keys)
        self.alice = known(ring.caller("alice"))
        self.told: list[UsedQuota] = []
        self.away = False
        self.watch = QuotaWatch(self, ring, self.tell)

    async def tell(self, used: Sequence[UsedQuota]) -> None:
        if self.away:
            raise StoreUnavailable("it is away", "")
        self.told += used

    def spend(self, cost: float, tokens: int = 0) -> None:
        self.admit(self.alice, request=answers(0)).settle(tokens, cost, self.clocks.wall())

    def ask(self, tokens: int) -> None:
        """Have a request refused that may take so many tokens."""
        assert "quota" in self.refusal(self.alice, request=answers(tokens)).code

    async def look(self) -> list[tuple[str, str, bool]]:
        """What was told in this look: whose, which limit, and whether it is spent."""
        before = len(self.told)
        await self.watch.look()
        return [(one.id, one.standing.limit, one.spent) for one in self.told[before:]]


async def test_a_quota_is_told_once_when_it_is_nearly_used_up_and_once_when_it_is_spent() -> None:
    watched = Watched(keys=[LIMITED])
    watched.spend(15.9)
    assert await watched.look() == []
    watched.spend(0.1)
    assert await watched.look() == [("alice", "budget", False)]
    assert await watched.look() == []
    assert [one.share for one in watched.watch.used] == [pytest.approx(0.8)]
    watched.spend(4.0)
    assert await watched.look() == [("alice", "budget", True)]
    watched.clocks.advance(40 * DAY)
    assert await watched.look() == []
    assert watched.watch.used == []
    watched.spend(17.0)
    assert await watched.look() == [("alice", "budget", False)]
    assert len({one.name for one in watched.told}) == 2
    # Another amount is another quota; those of groups and of all callers are told, too.
    watched = Watched(
        keys=[{**LIMITED, "limits": {"budget": "18/month"}}],
        groups={"team": {"limits": {"budget": "1/day"}}},
        limits={"total": {"budget": "1/day"}},
    )
    watched.spend(17.0)
    assert sorted(await watched.look()) == [
        ("", "budget", True), ("alice", "budget", False), ("team", "budget", True),
    ]  # fmt: skip


async def test_a_quota_of_which_a_request_found_too_little_is_spent_unless_most_is_left() -> None:
    watched = Watched(keys=[LIMITED])
    watched.spend(0.0, 850)
    assert await watched.look() == [("alice", "tokens_per_day", False)]
    watched.ask(200)
    assert await watched.look() == [("alice", "tokens_per_day", True)]
    other = Watched(keys=[LIMITED])
    other.spend(0.0, 500)
    other.ask(600)
    assert await other.look() == []


async def test_what_the_store_did_not_take_is_told_again() -> None:
    watched = Watched(keys=[LIMITED])
    watched.spend(18.0)
    watched.away = True
    assert await watched.look() == []
    assert len(watched.watch.used) == 1
    watched.away = False
    assert await watched.look() == [("alice", "budget", False)]


def test_memory_is_bounded_however_much_is_added() -> None:
    total = SlidingSum(60.0, overestimate=True)
    for number in range(100_000):
        total.add(number * 0.001, 1.0)
    assert len(total.parts) <= WINDOW_PARTS + 1
    assert total.value(100.0) == pytest.approx(60_000, abs=120)


additions = st.lists(st.tuples(st.floats(0, 3), st.floats(0, 5)), max_size=200)


@given(additions, st.booleans(), st.floats(0, 80))
def test_the_sum_errs_to_one_side_by_at_most_one_part_of_the_window(
    added: list[tuple[float, float]], late: bool, after: float
) -> None:
    total, now = SlidingSum(60.0, overestimate=late), 0.0
    told = []
    for gap, amount in added:
        now += gap
        total.add(now, amount)
        told.append((now, amount))
    now += after
    part = 60.0 / WINDOW_PARTS

    def within(span: float) -> float:
        return math.fsum(amount for when, amount in told if when > now - span)

    least, greatest = (
        (within(60.0), within(60.0 + part + 1e-9))
        if late
        else (within(60.0 - part - 1e-9), within(60.0))
    )
    assert least - 1e-6 <= total.value(now) <= greatest + 1e-6


PARTIES = [f"p{number}" for number in range(5)]
moves = st.lists(st.tuples(st.sampled_from(PARTIES), st.booleans()), max_size=200)


def ask(share: FairShare, caller: str, limit: int, user: str | None = None) -> bool:
    """Take one more unit, if everything can be evicted."""
    if share.total + 1 > soft_limit(limit):
        yielding = share.victims(caller, 1, soft_limit(limit), user)
        if not yielding:
            return False
        chosen = yielding[0]
        share.remove(chosen, 1, share.users_by_size(chosen)[0])
    share.add(caller, 1, user)
    return True


@given(moves, st.integers(1, 40))
def test_nobody_is_evicted_for_a_larger_caller(wanted: list[tuple[str, bool]], limit: int) -> None:
    share = FairShare()
    for caller, more in wanted:
        if more:
            before = dict(share.by_caller)
            own = before.get(caller, 0)
            for other in share.victims(caller, 1, soft_limit(limit)):
                assert before[other] > own + 1, "it would return and evict this one"
            ask(share, caller, limit)
        elif share.held_by(caller):
            share.remove(caller, 1)
        assert share.total == sum(share.by_caller.values()) <= soft_limit(limit)
        assert all(held > 0 for held in share.by_caller.values())


@given(st.integers(8, 40), st.integers(2, 6))
def test_a_caller_with_many_users_has_one_share_and_they_divide_it(limit: int, count: int) -> None:
    share = FairShare()
    for user in range(count):
        for _ in range(limit):
            ask(share, "web", limit, f"web/{user}")
    assert share.held_by("web") == soft_limit(limit)
    users = share.by_user["web"].values()
    assert len(users) == min(count, soft_limit(limit))
    assert max(users) - min(users) <= 1
    # One after the other; this order is the worst for the last caller.
    for _ in range(limit):
        ask(share, "other", limit)
    assert abs(share.held_by("web") - share.held_by("other")) <= 1
