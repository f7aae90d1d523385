"""The wait queue: requests sorted so that the next ones are found without looking at all.

Each class has a `PriorityLevel`. In it a request stands in two FIFOs, sorted by age: that of its
caller's account, which fairness goes by, and that of its requirements, which the guard against
starvation goes by. Requests with equal requirements can go to the same nodes, so where one finds no
room, its whole FIFO is passed over.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from gateway.request import Priority
from gateway.scheduling.fairness import VirtualTokenCounters
from gateway.scheduling.node_slots import FairnessAccount, QueuedRequest, Requirements

Fifos = dict[Requirements, list[QueuedRequest]]

by_age = attrgetter("arrival_key")


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
    """How many need several slots."""
    _arrivals: int = 0
    _warm: dict[int, dict[QueuedRequest, None]] = field(default_factory=dict)
    """By row index: the requests that have that row among their warmest."""

    def add(self, queued: QueuedRequest, account: FairnessAccount) -> None:
        """Let a request wait, on its caller's account."""
        self._arrivals += 1
        queued.enter(account, self._arrivals)
        self.levels[queued.priority].add(queued, account)
        self.count += 1
        self.wide_count += queued.slots > 1
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
        self.wide_count -= queued.slots > 1
        if queued.slots:
            for sums, tokens in zip(
                queued.groups[0][0].queued_tokens, queued.work_tokens, strict=True
            ):
                left = sums[queued.priority] - tokens
                sums[queued.priority] = max(0.0, left) if level.count else 0.0
        self._remove_warm(queued)

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
