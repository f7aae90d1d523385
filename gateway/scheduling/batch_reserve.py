"""Which slots class `batch` leaves free: whole nodes where the reserve has as many slots.

A server decodes for all its slots in one step, and a prompt is read between two steps. So a request
with a neighbour waits for the neighbour's step and prompt, however many slots are free beside them.
On a node that `batch` never enters it waits for neither, and what it has cached there stays.
"""

from __future__ import annotations

from collections.abc import Sequence

ROUNDING = 1e-9
"""By so much a product may fall short of a whole number, as 0.29 of 100 does."""


def spread_reserve(share: float, totals: Sequence[int]) -> list[int]:
    """Slots that `batch` leaves free on each of several alike nodes with so many slots.

    Together they are that share of all slots, rounded down: the first nodes that fit into it whole,
    and what is left by turns on the others, the largest first. At least one node stays open to
    `batch` with one slot, whatever the share.
    """
    reserve = [0] * len(totals)
    left = int(share * sum(totals) + ROUNDING)
    open_nodes = sum(total > 0 for total in totals)
    for number, total in enumerate(totals):
        if 0 < total <= left and open_nodes > 1:
            reserve[number] = total
            left -= total
            open_nodes -= 1
    others = [number for number, total in enumerate(totals) if total - reserve[number] > 1]
    while left > 0 and others:
        others.sort(key=lambda number: reserve[number] - totals[number])
        for number in others[:left]:
            reserve[number] += 1
            left -= 1
        others = [number for number in others if totals[number] - reserve[number] > 1]
    return reserve
