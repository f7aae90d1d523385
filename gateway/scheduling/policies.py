"""How one of several rows with room is chosen: pure functions, selectable by name.

`least_finish` is the gateway's own; the others are there to compare with.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

from gateway.scheduling.ask import Ask
from gateway.scheduling.board import Row
from gateway.scheduling.finish import each

Policy = Callable[[Sequence[Row], Ask, float, random.Random], Row | None]
"""`(rows with room, ask, now, rng)`: one of the rows, or None where there is none."""


def least_finish(rows: Sequence[Row], ask: Ask, now: float, rng: random.Random) -> Row | None:
    """Where the request, and what it holds up, is expected to end first; ties at random."""
    if not rows:
        return None
    costs = each(rows, ask, now)
    least = min(costs)
    if costs.count(least) == 1:
        return rows[costs.index(least)]
    ties = [row for row, cost in zip(rows, costs, strict=True) if cost == least]
    return ties[int(rng.random() * len(ties))]


def least_loaded(rows: Sequence[Row], ask: Ask, _now: float, rng: random.Random) -> Row | None:
    """Slots in use, the newcomer's included, against slots owned; ties at random."""
    best: Row | None = None
    least = 0.0
    ties = 1
    for row in rows:
        load = (row.busy + ask.slots) / max(1, row.total)
        if best is None or load < least:
            best, least, ties = row, load, 1
        elif load == least:
            ties += 1
            if rng.random() * ties < 1.0:
                best = row
    return best


def round_robin(rows: Sequence[Row], _ask: Ask, _now: float, _rng: random.Random) -> Row | None:
    """The one that was used the longest ago."""
    return min(rows, key=lambda row: (row.used, row.index), default=None)


def prefix_hash(rows: Sequence[Row], ask: Ask, _now: float, _rng: random.Random) -> Row | None:
    """The highest by rendezvous hashing of what the request shares with its like.

    A full node passes it on to the next of the same order, as consistent hashing with bounded
    loads does (Mirrokni et al. 2018).
    """
    return max(
        rows,
        key=lambda row: _mixed(ask.affinity ^ row.mark * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF),
        default=None,
    )


def _mixed(value: int) -> int:
    # splitmix64's finaliser: every bit of the input moves every bit of the output.
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


POLICIES: Final[dict[str, Policy]] = {
    "least_finish": least_finish,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
    "prefix_hash": prefix_hash,
}
