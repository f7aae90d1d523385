"""The room for work of class `batch`: slots that it could take now, and those about to come free.

Whoever feeds the scheduler with stored work asks this, so that as much is offered as fills the
slots outside the reserve, and no more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gateway.config.cache_privacy import NodeLabels
from gateway.lease import BatchRoom
from gateway.request import Endpoint, Priority
from gateway.scheduling.fleet_sync import FleetSync
from gateway.scheduling.node_slots import NodeSlots
from gateway.scheduling.waiters import Waiter


def room_for_batch(
    rows: Iterable[NodeSlots], seconds: float, now: float, *, waiting: int = 0, ahead: int = 0
) -> BatchRoom:
    """The room on these rows, and what is expected to come free within so many `seconds`.

    `waiting`: requests of class `batch` that wait for them; `ahead`: slots for which higher classes
    wait.
    """
    nodes = slots = free = soon = 0
    for row in rows:
        if not row.alive or row.reserved_for is not None:
            continue
        nodes += 1
        slots += _unreserved(row, row.capacity, busy=0)
        now_free = row.capacity - row.busy
        room = _unreserved(row, now_free, busy=row.busy)
        ending = sum(
            placement.queued.slots
            for placement in row.running
            if placement.seconds_left(now) <= seconds
        )
        free += room
        soon += _unreserved(row, now_free + ending, busy=row.busy - ending) - room
    return BatchRoom(slots, free, soon, waiting, ahead, nodes)


def _unreserved(row: NodeSlots, free: int, *, busy: int) -> int:
    """Slots that `batch` may take of a row with so many `free`; of an idle row at least one."""
    if row.kept_from_batch:
        return 0
    return max(free - row.batch_reserve, 1 if free > 0 and busy <= 0 else 0, 0)


def rows_for_batch(
    fleet_sync: FleetSync, model_names: Sequence[str], endpoint: Endpoint, labels: NodeLabels
) -> tuple[NodeSlots, ...]:
    """The rows of the first of these names that an alive node of the pool serves.

    Those of CPU nodes; of a model that only GPU nodes have, theirs.
    """
    rows: tuple[NodeSlots, ...] = ()
    for name in model_names:
        service = fleet_sync.service((name, endpoint, False, False, labels))
        rows = service.cpu.rows or service.gpu.rows
        if any(row.alive for row in rows):
            break
    return rows


def slots_waited_for(
    waiters: Iterable[Waiter], model_names: Collection[str], labels: NodeLabels
) -> tuple[int, int]:
    """Slots for which requests wait that share a model name and pool: of `batch`, of others."""
    names, waiting, ahead = frozenset(model_names), 0, 0
    for waiter in waiters:
        request = waiter.request
        same_pool = (
            not labels or not request.wanted.node_labels or labels == request.wanted.node_labels
        )
        if not same_pool or names.isdisjoint(request.wanted.model_names):
            continue
        if request.caller.priority is Priority.BATCH:
            waiting += request.size.slots
        else:
            ahead += request.size.slots
    return waiting, ahead
