"""A brain that is real, of a gateway that has nothing else, over nodes that are played."""

from __future__ import annotations

from collections.abc import Callable

from gateway.callers.keys import KeyRing
from gateway.callers.ledger import UsageRow
from gateway.callers.limits import LimitBook
from gateway.callers.meter import Meter
from gateway.config.settings import Settings
from gateway.edges.brain import Brain
from gateway.events import EventBus, call_later
from gateway.forward.context import ForwardContext
from gateway.forward.in_flight import InFlightRegistry, TimeoutMonitor
from gateway.lease import Usage
from gateway.nodes.node import Node
from gateway.schedule.lease_service import LocalLeaseService
from gateway.schedule.scheduler import Scheduler
from gateway.terms import Caller, Priority
from gateway.transport.pool import ConnectionPool, NodeAddress
from tests.callers.build import all_accounts
from tests.schedule.build import node
from tests.virtual import now

CALLER = Caller("anonymous:1.2.3.4", "anonymous", Priority.NORMAL, anonymous=True)
CHAT = "/v1/chat/completions"
USAGE = Usage(100, 20, 50)


def a_played_node(name: str, slots: int) -> Node:
    """A node to which no connection is ever made."""
    made = node(name, slots=slots)
    made.replace_upstream(ConnectionPool(NodeAddress("127.0.0.1", 9, b"", b"host: x\r\n")), 0.0)
    return made


def a_bare_brain(
    scheduler: Scheduler,
    settings: Settings,
    bus: EventBus | None = None,
    *,
    clock: Callable[[], float] = now,
    add_row: Callable[[UsageRow], None] | None = None,
    clustered: bool = False,
) -> Brain:
    """A brain that has this scheduler, and of a gateway nothing that it does not need."""
    bus = bus or EventBus(call_later)
    leases = LocalLeaseService(scheduler, scheduler.fleet)
    context = ForwardContext(leases, settings, bus, TimeoutMonitor(clock), clock)
    meter = Meter(LimitBook(settings, clock=clock), bus, process="p", add_row=add_row)
    return Brain(
        scheduler, context, InFlightRegistry(), meter, KeyRing(), bus, None, loopback=True,
        clustered=clustered,
    )  # fmt: skip


def held_by(brain: Brain) -> dict[str, int]:
    """All counts of what a brain holds that are not zero."""
    scheduler = brain.scheduler
    counts = {
        "leases": len(scheduler.records),
        "waiting": len(scheduler.waiters),
        "registry": len(brain.registry),
        "open": len(brain.meter._open),
        "adrift": len(brain._adrift),
    }
    for one in scheduler.fleet.nodes.values():
        counts[f"leased of {one.name}"] = one.leased + len(one.leases)
    for account in all_accounts(brain.meter.book):
        counts[account.subject] = account.running + account.open + account.reserved_tokens
    for session in brain.sessions.values():
        held = len(session.requests) + len(session._leases) + len(session._asks)
        counts[f"held for {session.name}"] = held
    return {name: count for name, count in counts.items() if count}
