"""Whether work may be sent here: the answer of `/ready` on both listeners."""

from __future__ import annotations

from gateway import errors
from gateway.errors import GatewayError
from gateway.fleet.fleet import Fleet
from gateway.scheduling.fleet_sync import ALIVE_STATES
from gateway.scheduling.scheduler import Scheduler

NOT_READY_RETRY_AFTER = 5.0
"""Seconds to advise while no node is in; about one interval of the probes."""


def readiness_error(fleet: Fleet, scheduler: Scheduler, *, closing: bool) -> GatewayError | None:
    """Why no node can take or queue work; None: one can, and be it by queueing.

    A queue of length 0 is no queue: then it takes a free slot to be ready.
    """
    if closing or scheduler.closing:
        return errors.shutting_down()
    now = scheduler.clock()
    nodes = fleet.nodes.values()
    if any(node.free_slots(now) > 0 for node in nodes):
        return None
    if not any(node.state in ALIVE_STATES or node.startable for node in nodes):
        if not fleet.first_probes_done.is_set():
            return errors.starting("The nodes are being asked what they serve.")
        return errors.no_node("Every node is out.", NOT_READY_RETRY_AFTER)
    if scheduler.has_room():
        return None
    return GatewayError(
        503,
        "queue_full",
        "Every slot is taken, and so is every place in the queue.",
        retry_after=scheduler.completion_rate.retry_after(1, now),
    )
