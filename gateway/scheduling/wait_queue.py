"""The wait queue: requests sorted so that the next ones are found without looking at all.

Each class has a `PriorityLevel`. In it a request stands in two FIFOs, sorted by age: that of its
caller's account, which fairness goes by, and that of its requirements, which the guard against
starvation goes by. Requests with equal requirements can go to the same nodes, so where one finds no
room, its whole FIFO is passed over.

Fairness between the callers of a class goes by virtual token counters. Each caller has a counter of
the work it was served; the lowest counter goes first. A caller that was idle starts at the lowest
counter of those that wait, so no caller saves up credit (Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024). Among callers within a small slack of the lowest counter, the one
whose request fits the free node goes (Cao et al., "Locality-aware Fair Scheduling in LLM Serving",
2025); the slack bounds what that costs the others.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from gateway.request import Priority
from gateway.scheduling.node_slots import FairnessAccount, QueuedRequest, Requirements

Fifos = dict[Requirements, list[QueuedRequest]]

by_age = attrgetter("arrival_key")

LEAST_TOKEN_WEIGHT, MOST_TOKEN_WEIGHT = 1.0, 32.0
"""Bounds of an output token's price, in prompt tokens."""

COUNTER_SLACK = 2.0
"""By how many mean charges of a request a caller may be above the lowest counter and still go."""

MOST_ACCOUNTS = 4096
"""Accounts; when there are more, those of idle callers are dropped."""

CounterKey = tuple[float, int, FairnessAccount]
"""Sorts accounts: counter, serial number, the account."""


@dataclass(slots=True, eq=False)
class VirtualTokenCounters:
    """The accounts of one class."""

    accounts: dict[str, FairnessAccount] = field(default_factory=dict)
    by_counter: list[CounterKey] = field(default_factory=list)
    """Accounts with waiting requests, the least served first."""
    start_counter: float = 0.0
    """Where a caller starts while nobody waits: at the counter of the one served last."""
    mean_charge: float = 1.0
    """The mean charge of a request."""
    _serial: int = 0

    def account(self, fairness_key: str) -> FairnessAccount:
        """The account of a caller, which has just sent a request."""
        account = self.accounts.get(fairness_key)
        if account is None:
            if len(self.accounts) >= MOST_ACCOUNTS:
                self._drop_idle()
            self._serial += 1
            account = self.accounts[fairness_key] = FairnessAccount(fairness_key, self._serial)
        if not account.fifos:
            least = self.by_counter[0][0] if self.by_counter else self.start_counter
            if account.counter < least:
                account.raise_to(least)
        return account

    def add_waiting(self, account: FairnessAccount) -> None:
        """The account has waiting requests now."""
        insort(self.by_counter, (account.counter, account.serial, account))

    def remove_waiting(self, account: FairnessAccount) -> None:
        """The account has no waiting requests any more."""
        del self.by_counter[bisect_left(self.by_counter, (account.counter, account.serial))]

    def started(self, account: FairnessAccount, charge: float) -> None:
        """Charge the account for a request that has started."""
        self.start_counter = self.by_counter[0][0] if self.by_counter else account.counter
        self.mean_charge += (charge - self.mean_charge) / 32
        if account.fifos:
            self.remove_waiting(account)
            account.started(charge)
            self.add_waiting(account)
        else:
            account.started(charge)

    def settled(self, account: FairnessAccount, correction: float) -> None:
        """A request has ended; its real price differs from its charge by `correction`."""
        if account.fifos:
            self.remove_waiting(account)
            account.settled(correction)
            self.add_waiting(account)
        else:
            account.settled(correction)

    def _drop_idle(self) -> None:
        """Drop the lower half of the idle accounts: they would start anew at the same counter."""
        idle = [one for one in self.accounts.values() if not one.fifos and not one.running]
        idle.sort(key=lambda account: account.counter)
        for account in idle[: max(len(idle) // 2, 1)]:
            del self.accounts[account.fairness_key]


@dataclass(slots=True, eq=False)
class PriorityLevel:
    """The waiting requests of one class."""

    counters: VirtualTokenCounters = field(default_factory=VirtualTokenCounters)
    fifos: Fifos = field(default_factory=dict)
    count: int = 0

    def add(self, queued: QueuedRequest, account: FairnessAccount) -> None:
        """Put a request into both FIFOs."""
        if not account.fifos:
            self.counters.add_waiting(account)
        _insert(account.fifos, queued)
        _insert(self.fifos, queued)
        self.count += 1

    def remove(self, queued: QueuedRequest, account: FairnessAccount) -> None:
        """Take it out of both."""
        _drop(account.fifos, queued)
        _drop(self.fifos, queued)
        if not account.fifos:
            self.counters.remove_waiting(account)
        self.count -= 1


@dataclass(slots=True, eq=False)
class WaitQueue:
    """Everything that waits."""

    levels: tuple[PriorityLevel, ...] = field(
        default_factory=lambda: tuple(PriorityLevel() for _ in Priority)
    )
    count: int = 0
    wide_count: int = 0
    """How many need several slots, or most of a shared pool."""
    _arrivals: int = 0
    _warm: dict[int, dict[QueuedRequest, None]] = field(default_factory=dict)
    """By row index: the requests that have that row among their warmest."""

    def add(self, queued: QueuedRequest, account: FairnessAccount) -> None:
        """Let a request wait, on its caller's account."""
        self._arrivals += 1
        queued.enter(account, self._arrivals)
        self.levels[queued.priority].add(queued, account)
        self.count += 1
        self.wide_count += queued.is_wide
        if queued.slots:
            for sums, tokens in zip(
                queued.groups[0][0].queued_tokens, queued.work_tokens, strict=True
            ):
                sums[queued.priority] += tokens
        self._add_warm(queued)

    def remove(self, queued: QueuedRequest) -> None:
        """Take out a request that waits."""
        level, account = self.levels[queued.priority], queued.account
        assert account is not None
        level.remove(queued, account)
        queued.leave()
        self.count -= 1
        self.wide_count -= queued.is_wide
        if queued.slots:
            for sums, tokens in zip(
                queued.groups[0][0].queued_tokens, queued.work_tokens, strict=True
            ):
                left = sums[queued.priority] - tokens
                sums[queued.priority] = max(0.0, left) if level.count else 0.0
        self._remove_warm(queued)

    def set_fills_pool(self, queued: QueuedRequest, *, fills: bool) -> None:
        """Whether a waiting request needs most of a shared pool has been found out anew."""
        self.wide_count -= queued.is_wide
        queued.set_fills_pool(fills=fills)
        self.wide_count += queued.is_wide

    def cached_changed(self, queued: QueuedRequest) -> None:
        """The `cached` of a waiting request has been looked up anew."""
        self._remove_warm(queued)
        self._add_warm(queued)

    def _add_warm(self, queued: QueuedRequest) -> None:
        queued.find_warmest_rows()
        for index in queued.warmest_rows:
            self._warm.setdefault(index, {})[queued] = None

    def _remove_warm(self, queued: QueuedRequest) -> None:
        for index in queued.warmest_rows:
            warm = self._warm[index]
            del warm[queued]
            if not warm:
                del self._warm[index]

    def warm_for_row(self, index: int) -> dict[QueuedRequest, None]:
        """Requests that have the row of that index among their warmest, in the order of arrival."""
        return self._warm.get(index, {})

    def __iter__(self) -> Iterator[QueuedRequest]:
        """All of them, by class and age."""
        for level in self.levels:
            yield from heapq.merge(*level.fifos.values(), key=by_age)


def _insert(fifos: Fifos, queued: QueuedRequest) -> None:
    fifo = fifos.get(queued.requirements)
    if fifo is None:
        fifos[queued.requirements] = [queued]
    elif fifo[-1].arrival_key <= queued.arrival_key:
        fifo.append(queued)
    else:
        insort(fifo, queued, key=by_age)


def _drop(fifos: Fifos, queued: QueuedRequest) -> None:
    fifo = fifos[queued.requirements]
    del fifo[0 if fifo[0] is queued else bisect_left(fifo, queued.arrival_key, key=by_age)]
    if not fifo:
        del fifos[queued.requirements]
