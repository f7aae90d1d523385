"""Slots of requests that we have left: held until the node shows that it has let them go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from gateway.fleet.evidence import prefill_limit
from gateway.fleet.lease import Phase
from gateway.fleet.occupancy import LINGER
from gateway.fleet.probes import read_slots

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.fleet.lease import Lease
    from gateway.fleet.node import Node

log = logging.getLogger(__name__)

FIRST_LOOK = 0.02
"""Seconds: llama.cpp frees the slot of a stream in decode within 3 to 36 ms."""
LONGEST_GAP = 1.0
SLOTLESS = 1.0
"""Seconds for which the place of a request without a slot is held after it was left: the node works
on, and nothing shows it."""
BLIND = 0.2
"""Seconds for which the slot of a cut stream is held where the node has no `/slots`."""


def waiting(node: Node) -> list[Lease]:
    """The node's abandoned leases, oldest first."""
    leases = [lease for lease in node.leases if lease.phase is Phase.RECLAIM]
    return sorted(leases, key=lambda lease: lease.abandoned)


def let_go(busy: int, leases: Iterable[Lease], began: float) -> int:
    """How many slots of abandoned leases are free, if a reading that `began` then saw `busy`.

    A request counts only once it has had time to reach a slot: a live one as occupying it, an
    abandoned one as having let it go. A busy slot that nobody accounts for may be an abandoned
    one, so others' work makes us wait.
    """
    abandoned = occupied = 0
    for lease in leases:
        arrived = began - lease.taken >= LINGER
        if lease.phase is not Phase.RECLAIM:
            occupied += lease.slots if arrived else 0
        elif arrived or lease.left_in is Phase.DECODE:
            abandoned += lease.slots
    return max(0, abandoned - max(0, busy - occupied))


def longest_hold(lease: Lease) -> float:
    """Seconds after which an abandoned lease is given back whatever the node shows."""
    return max(prefill_limit(lease), lease.node.silence)


def blind_hold(lease: Lease) -> float:
    """Seconds to hold an abandoned lease of a node that does not tell its slots."""
    left = lease.abandoned
    longest = longest_hold(lease)
    if not lease.stream:
        if lease.expected_total is None:
            return longest
        return min(longest, max(BLIND, lease.taken + lease.expected_total - left))
    if lease.left_in is Phase.DECODE:
        return BLIND
    if lease.expected_prefill is None:
        return longest
    return min(longest, max(BLIND, lease.prefill_began + lease.expected_prefill - left))


class Reclaimer:
    """Watches abandoned leases, with one task for each node that has any."""

    def __init__(self) -> None:
        self._watches: dict[Node, tuple[asyncio.Task[None], asyncio.Event]] = {}
        self._closed = False

    def watch(self, node: Node) -> None:
        """A lease of this node has been abandoned."""
        if self._closed:
            return
        if node in self._watches:
            self._watches[node][1].set()
            return
        again = asyncio.Event()
        task = asyncio.create_task(self._watch(node, again), name=f"reclaim {node.name}")
        self._watches[node] = (task, again)

    def give_up(self, node: Node) -> None:
        """The node is gone, and so is its work."""
        for lease in waiting(node):
            lease.give_back()

    async def aclose(self) -> None:
        """Stop watching."""
        self._closed = True
        tasks = [task for task, _ in self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, node: Node, again: asyncio.Event) -> None:
        try:
            gap, seen = FIRST_LOOK, 0
            while waiting(node):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(gap):
                        await again.wait()
                if again.is_set():
                    again.clear()
                    gap = FIRST_LOOK
                    await asyncio.sleep(FIRST_LOOK)
                gap = min(2 * gap, LONGEST_GAP)
                seen = await self._look(node, seen)
        finally:
            del self._watches[node]

    async def _look(self, node: Node, seen: int) -> int:
        """Give back what may be; how many slots this reading saw free and still held."""
        if node.probing.down:
            self.give_up(node)
            return 0
        began = node.clock()
        busy = await read_slots(node) if node.tells_slots else None
        free = 0 if busy is None else let_go(busy, node.leases, began)
        agreed = min(free, seen)
        now = node.clock()
        for lease in waiting(node):
            held = now - lease.abandoned
            if not lease.slots:
                if held >= SLOTLESS:
                    lease.give_back()
            elif lease.slots <= agreed:
                agreed -= lease.slots
                free -= lease.slots
                lease.give_back()
            elif not node.tells_slots and held >= blind_hold(lease):
                lease.give_back()
            elif held >= longest_hold(lease):
                log.warning(
                    "Node %s has not shown the slot of a request free %.0f s after it was left: "
                    "counted as free now",
                    node.name,
                    held,
                )
                lease.give_back()
        return free
