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
from gateway.scheduling.ask import Ask, Shape
from gateway.scheduling.fairness import Account, Shares

WARMEST = 6
"""Nodes for which a waiting request is remembered as warm."""

_age = attrgetter("age")


@dataclass(slots=True, eq=False)
class Rank:
    """What waits of one class."""

    shares: Shares = field(default_factory=Shares)
    lanes: dict[Shape, list[Ask]] = field(default_factory=dict)
    count: int = 0


@dataclass(slots=True, eq=False)
class Line:
    """Everything that waits."""

    ranks: tuple[Rank, ...] = field(default_factory=lambda: tuple(Rank() for _ in Priority))
    count: int = 0
    wide: int = 0
    """How many of them need several."""
    _arrivals: int = 0
    _warm: dict[int, dict[Ask, None]] = field(default_factory=dict)

    def add(self, ask: Ask, account: Account) -> None:
        """Put `ask`, whose account it is, in line."""
        rank = self.ranks[ask.priority]
        self._arrivals += 1
        ask.age = (ask.entered, self._arrivals)
        ask.account = account
        shape = ask.shape = shape_of(ask)
        if not account.lanes:
            rank.shares.joins(account)
        _insert(account.lanes, shape, ask)
        _insert(rank.lanes, shape, ask)
        rank.count += 1
        self.count += 1
        self.wide += ask.slots > 1
        if ask.slots:
            for queued, tokens in zip(ask.groups[0][0].queued, ask.work, strict=True):
                queued[ask.priority] += tokens
        self._note(ask)

    def remove(self, ask: Ask) -> None:
        """Take `ask`, which is in line, out of it."""
        rank, account = self.ranks[ask.priority], ask.account
        assert account is not None
        _drop(account.lanes, ask)
        _drop(rank.lanes, ask)
        if not account.lanes:
            rank.shares.leaves(account)
        ask.account = None
        rank.count -= 1
        self.count -= 1
        self.wide -= ask.slots > 1
        if ask.slots:
            for queued, tokens in zip(ask.groups[0][0].queued, ask.work, strict=True):
                left = queued[ask.priority] - tokens
                queued[ask.priority] = max(0.0, left) if rank.count else 0.0
        self._forget(ask)

    def recalled(self, ask: Ask) -> None:
        """What is cached of `ask`, which is in line, has been looked up again."""
        self._forget(ask)
        self._note(ask)

    def _note(self, ask: Ask) -> None:
        ask.warmest = warmest(ask)
        for index in ask.warmest:
            self._warm.setdefault(index, {})[ask] = None

    def _forget(self, ask: Ask) -> None:
        for index in ask.warmest:
            warm = self._warm[index]
            del warm[ask]
            if not warm:
                del self._warm[index]

    def warm_at(self, index: int) -> dict[Ask, None]:
        """What waits and is warmest at the row of that index, in the order of arrival."""
        return self._warm.get(index, {})

    def __iter__(self) -> Iterator[Ask]:
        """All of it, by class and age."""
        for rank in self.ranks:
            yield from heapq.merge(*rank.lanes.values(), key=_age)


def shape_of(ask: Ask) -> Shape:
    """What the rows that have room for it depend on."""
    return ask.groups, ask.slots, ask.spares


def warmest(ask: Ask) -> tuple[int, ...]:
    """The indexes of the rows that have most of its prompt cached, or will have."""
    cached = ask.cached
    if ask.coming:
        coming, cached = ask.coming, {**ask.coming, **cached}
        for index, tokens in coming.items():
            cached[index] = max(cached[index], tokens)
    if len(cached) <= WARMEST:
        return tuple(cached)
    return tuple(sorted(cached, key=cached.__getitem__, reverse=True)[:WARMEST])


def _insert(lanes: dict[Shape, list[Ask]], shape: Shape, ask: Ask) -> None:
    lane = lanes.get(shape)
    if lane is None:
        lanes[shape] = [ask]
    elif lane[-1].age <= ask.age:
        lane.append(ask)
    else:
        insort(lane, ask, key=_age)


def _drop(lanes: dict[Shape, list[Ask]], ask: Ask) -> None:
    lane = lanes[ask.shape]
    del lane[0 if lane[0] is ask else bisect_left(lane, ask.age, key=_age)]
    if not lane:
        del lanes[ask.shape]
