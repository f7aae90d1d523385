"""When what runs on a node is expected to end: kept on its row as work comes, moves on and goes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.scheduling.finish import LEAST_READ

if TYPE_CHECKING:
    from gateway.scheduling.ask import Ask
    from gateway.scheduling.board import Pool, Row
    from gateway.scheduling.fairness import Account

NO_ANSWER = 1.0
"""Tokens of an answer that is not written, as of embeddings, or next to nothing."""

OUTLIVED = 0.5
"""What outlives its forecast is expected to take this share of its time so far once more."""


@dataclass(slots=True, eq=False)
class Placement:
    """A request that has slots on a node, until `Dispatcher.finished`. Monotonic seconds."""

    ask: Ask
    row: Row
    pool: Pool
    group: int
    """Which of the request's names it is served under: an index of `ask.groups`."""
    at: float
    read_by: float
    """When its prompt is expected to have been read."""
    ends: float
    """When it is expected to end."""
    account: Account | None = None
    charge: float = 0.0
    """What its caller has been charged."""
    weight: float = 1.0
    """What a written token counted then: it must count the same when it is settled."""
    over: bool = False


def place(ask: Ask, row: Row, pool: Pool, group: int, now: float) -> Placement:
    """Let `ask` begin on `row`: its reading holds up those who write, its writing slows them down.

    Where nobody writes it is one prompt after the other, and nobody's end moves.
    """
    uncached = ask.prompt
    if ask.cached:
        uncached = max(LEAST_READ, uncached - ask.cached.get(row.index, 0.0))
    reading = uncached / row.prefill
    running = row.running
    writes = ask.completion > NO_ANSWER
    if not (writes or row.writers):
        start = max(now, row.reading_until)
    elif running:
        start = max(now, row.reading_until)
        drag = row.drag
        total = 0.0
        for other in running:
            left = other.ends - now
            other.ends += reading + (left * drag if left > 0.0 else 0.0)
            total += other.ends
        row.ends = total
    else:
        start, row.ends = now, 0.0
    row.reading_until = read_by = start + reading
    ends = read_by + ask.completion * row.per_token
    placement = Placement(ask, row, pool, group, now, read_by, ends)
    running.append(placement)
    row.writers += writes
    row.ends += ends
    return placement


def began(placement: Placement, now: float) -> None:
    """Its prompt has been read at `now`."""
    row = placement.row
    shift = now - placement.read_by
    placement.read_by = now
    placement.ends += shift
    row.ends += shift
    row.reading_until = max([one.read_by for one in row.running])


def end(placement: Placement, now: float) -> None:
    """It has gone: what it held up or slowed down goes faster."""
    row = placement.row
    running = row.running
    running.remove(placement)
    writes = placement.ask.completion > NO_ANSWER
    row.writers -= writes
    if not running:
        row.ends = row.reading_until = 0.0
        return
    if not (writes or row.writers):
        row.ends -= placement.ends
        row.reading_until = running[-1].read_by
        return
    gain = row.token_step / row.per_token
    read_by = placement.read_by
    unread = read_by - now
    total, latest = 0.0, -math.inf
    for other in running:
        ends = other.ends
        if unread > 0.0 and other.read_by < read_by:
            ends -= unread
        if gain and ends > now:
            ends -= (ends - now) * gain
        other.ends = ends
        total += ends
        if other.read_by > latest:  # noqa: PLR1730 - a call costs four times as much
            latest = other.read_by
    row.ends, row.reading_until = total, latest


def release(row: Row, slots: int, now: float) -> float | None:
    """Seconds until `slots` more than are free now are free on `row`; None: no telling."""
    if slots <= 0:
        return 0.0
    running = row.running
    if slots == 1:
        return min([_left(one, now) for one in running if one.ask.slots], default=None)
    for wait, count in sorted([(_left(one, now), one.ask.slots) for one in running]):
        slots -= count
        if slots <= 0:
            return wait
    return None


def _left(placement: Placement, now: float) -> float:
    left = placement.ends - now
    outlived = (now - placement.at) * OUTLIVED
    # One that is late is not expected any second: the longer it has taken, the longer it takes.
    return left if left > 0.0 else outlived
