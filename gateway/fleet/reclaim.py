"""Slots of abandoned requests: held until the node shows that they are idle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from gateway.fleet.health import prefill_grace
from gateway.fleet.node import Lease, Node
from gateway.fleet.probes import probe_slots
from gateway.fleet.slot_occupancy import SLOT_LINGER, LeasePhase

log = logging.getLogger(__name__)

FIRST_POLL = 0.02
"""Seconds: llama.cpp frees the slot of a stream in decode within 3 to 36 ms."""

MOST_POLL_INTERVAL = 1.0
"""Seconds; the interval doubles up to this."""

SLOTLESS_HOLD = 1.0
"""Seconds for which an abandoned request without a slot is held: the node works on, and reports
nothing of it."""

BLIND_HOLD = 0.2
"""Seconds for which the slot of a cut stream is held if the node has no `/slots`."""


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
        another = asyncio.Event()
        task = asyncio.create_task(self._watch(node, another), name=f"reclaim {node.name}")
        self._watches[node] = (task, another)

    def release_all(self, node: Node) -> None:
        """The node is gone, and so is its work."""
        for lease in abandoned_leases(node):
            lease.release()

    async def aclose(self) -> None:
        """Stop watching."""
        self._closed = True
        tasks = [task for task, _ in self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, node: Node, another: asyncio.Event) -> None:
        """Poll until no abandoned lease is left; `another`: one more has been abandoned."""
        try:
            interval, free_before = FIRST_POLL, 0
            while abandoned_leases(node):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval):
                        await another.wait()
                if another.is_set():
                    another.clear()
                    interval = FIRST_POLL
                    await asyncio.sleep(FIRST_POLL)
                interval = min(2 * interval, MOST_POLL_INTERVAL)
                free_before = await self._poll(node, free_before)
        finally:
            del self._watches[node]

    async def _poll(self, node: Node, free_before: int) -> int:
        """Release the leases whose slots two readings in a row show free.

        Returns how many free slots this reading showed and the one before did not.
        """
        if node.probe_history.down:
            self.release_all(node)
            return 0
        began = node.clock()
        busy = await probe_slots(node) if node.reports_slots else None
        free = 0 if busy is None else released_slots(len(busy), node.leases, began)
        confirmed = min(free, free_before)
        now = node.clock()
        for lease in abandoned_leases(node):
            held = now - lease.abandoned_at
            if not lease.slots:
                if held >= SLOTLESS_HOLD:
                    lease.release()
            elif lease.slots <= confirmed:
                confirmed -= lease.slots
                free -= lease.slots
                lease.release()
            elif not node.reports_slots and held >= hold_without_slots(lease):
                lease.release()
            elif held >= most_hold(lease):
                log.warning(
                    "Node %s has not shown the slot of an abandoned request idle for %.0f s: "
                    "counted as free now",
                    node.name,
                    held,
                )
                lease.release()
        return free


def abandoned_leases(node: Node) -> list[Lease]:
    """The node's abandoned leases, oldest first."""
    leases = [lease for lease in node.leases if lease.phase is LeasePhase.RECLAIM]
    return sorted(leases, key=lambda lease: lease.abandoned_at)


def released_slots(busy: int, leases: Iterable[Lease], asked_at: float) -> int:
    """How many slots of abandoned leases are free, if a reading at `asked_at` saw `busy`.

    A request counts only once it has had time to reach a slot: a live one as occupying it, an
    abandoned one as having freed it. A busy slot that no live lease accounts for may be an
    abandoned one's, so work of other clients delays the release.
    """
    abandoned = occupied = 0
    for lease in leases:
        arrived = asked_at - lease.taken_at >= SLOT_LINGER
        if lease.phase is not LeasePhase.RECLAIM:
            occupied += lease.slots if arrived else 0
        elif arrived or lease.abandoned_phase is LeasePhase.DECODE:
            abandoned += lease.slots
    return max(0, abandoned - max(0, busy - occupied))


def most_hold(lease: Lease) -> float:
    """Seconds after which an abandoned lease is released whatever the node shows."""
    return max(prefill_grace(lease), lease.node.silence_timeout)


def hold_without_slots(lease: Lease) -> float:
    """Seconds to hold an abandoned lease of a node that does not report its slots."""
    abandoned = lease.abandoned_at
    longest = most_hold(lease)
    if not lease.stream:
        if lease.expected_total is None:
            return longest
        return min(longest, max(BLIND_HOLD, lease.taken_at + lease.expected_total - abandoned))
    if lease.abandoned_phase is LeasePhase.DECODE:
        return BLIND_HOLD
    if lease.expected_prefill is None:
        return longest
    expected_end = lease.prefill_began_at + lease.expected_prefill
    return min(longest, max(BLIND_HOLD, expected_end - abandoned))
