"""What waits, kept so that the next candidates are found without looking at all of it.

A class is a `Rank`. In it a request stands twice in the order of age: in its caller's lane, which
fairness goes by, and in the lane of its shape, which ageing goes by. Requests of one shape can go
to the same nodes, so where one shape finds no room, the whole lane is passed over.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from gateway.request import Priority
from gateway.scheduling.fairness import VirtualTokenCounters
from gateway.scheduling.placement_state import FairnessAccount, QueuedRequest, Requirements

WARM_ROWS_PER_REQUEST = 6
"""Nodes for which a waiting request is remembered as warm."""

_age = attrgetter("arrival_key")


@dataclass(slots=True, eq=False)
class PriorityLevel:
    """What waits of one class."""

    counters: VirtualTokenCounters = field(default_factory=VirtualTokenCounters)
    fifos: dict[Requirements, list[QueuedRequest]] = field(default_factory=dict)
    count: int = 0


@dataclass(slots=True, eq=False)
class WaitQueue:
    """Everything that waits."""

    levels: tuple[PriorityLevel, ...] = field(
        default_factory=lambda: tuple(PriorityLevel() for _ in Priority)
    )
    count: int = 0
    wide_count: int = 0
    """How many of them need several."""
    _arrivals: int = 0
    _warm: dict[int, dict[QueuedRequest, None]] = field(default_factory=dict)

    def add(self, entry: QueuedRequest, account: FairnessAccount) -> None:
        """Put `ask`, whose account it is, in line."""
        rank = self.levels[entry.priority]
        self._arrivals += 1
        entry.arrival_key = (entry.received_at, self._arrivals)
        entry.account = account
        shape = entry.requirements = requirements_of(entry)
        if not account.fifos:
            rank.counters.add_waiting(account)
        _insert(account.fifos, shape, entry)
        _insert(rank.fifos, shape, entry)
        rank.count += 1
        self.count += 1
        self.wide_count += entry.slots > 1
        if entry.slots:
            for queued, tokens in zip(
                entry.groups[0][0].queued_tokens, entry.work_tokens, strict=True
            ):
                queued[entry.priority] += tokens
        self._note(entry)

    def remove(self, entry: QueuedRequest) -> None:
        """Take `ask`, which is in line, out of it."""
        rank, account = self.levels[entry.priority], entry.account
        assert account is not None
        _drop(account.fifos, entry)
        _drop(rank.fifos, entry)
        if not account.fifos:
            rank.counters.remove_waiting(account)
        entry.account = None
        rank.count -= 1
        self.count -= 1
        self.wide_count -= entry.slots > 1
        if entry.slots:
            for queued, tokens in zip(
                entry.groups[0][0].queued_tokens, entry.work_tokens, strict=True
            ):
                left = queued[entry.priority] - tokens
                queued[entry.priority] = max(0.0, left) if rank.count else 0.0
        self._forget(entry)

    def cached_changed(self, queued: QueuedRequest) -> None:
        """What is cached of `ask`, which is in line, has been looked up again."""
        self._forget(queued)
        self._note(queued)

    def _note(self, ask: QueuedRequest) -> None:
        ask.warmest_rows = warmest_rows(ask)
        for index in ask.warmest_rows:
            self._warm.setdefault(index, {})[ask] = None

    def _forget(self, ask: QueuedRequest) -> None:
        for index in ask.warmest_rows:
            warm = self._warm[index]
            del warm[ask]
            if not warm:
                del self._warm[index]

    def warm_for_row(self, index: int) -> dict[QueuedRequest, None]:
        """What waits and is warmest at the row of that index, in the order of arrival."""
        return self._warm.get(index, {})

    def __iter__(self) -> Iterator[QueuedRequest]:
        """All of it, by class and age."""
        for rank in self.levels:
            yield from heapq.merge(*rank.fifos.values(), key=_age)


def requirements_of(queued: QueuedRequest) -> Requirements:
    """What the rows that have room for it depend on."""
    return queued.groups, queued.slots, queued.keeps_batch_reserve


def warmest_rows(queued: QueuedRequest) -> tuple[int, ...]:
    """The indexes of the rows that have most of its prompt cached, or will have."""
    cached = queued.cached
    if queued.pending:
        coming, cached = queued.pending, {**queued.pending, **cached}
        for index, tokens in coming.items():
            cached[index] = max(cached[index], tokens)
    if len(cached) <= WARM_ROWS_PER_REQUEST:
        return tuple(cached)
    return tuple(sorted(cached, key=cached.__getitem__, reverse=True)[:WARM_ROWS_PER_REQUEST])


def _insert(
    lanes: dict[Requirements, list[QueuedRequest]], shape: Requirements, ask: QueuedRequest
) -> None:
    lane = lanes.get(shape)
    if lane is None:
        lanes[shape] = [ask]
    elif lane[-1].arrival_key <= ask.arrival_key:
        lane.append(ask)
    else:
        insort(lane, ask, key=_age)


def _drop(lanes: dict[Requirements, list[QueuedRequest]], ask: QueuedRequest) -> None:
    lane = lanes[ask.requirements]
    del lane[0 if lane[0] is ask else bisect_left(lane, ask.arrival_key, key=_age)]
    if not lane:
        del lanes[ask.requirements]
