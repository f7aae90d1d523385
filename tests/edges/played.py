"""A brain that is real, over nodes and clients that are played.

Each request asks for its leases, and reports as a forwarder does. A node knows what it works on:
what was written to it and has not come to its end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from gateway.callers.keys import KeyRing
from gateway.callers.ledger import UsageRow
from gateway.callers.limits import LimitBook
from gateway.callers.meter import Meter
from gateway.config.settings import Settings
from gateway.edges.brain import Brain
from gateway.edges.edge import EdgeServices
from gateway.errors import GatewayError
from gateway.events import EventBus, RequestRecord, call_later
from gateway.forward.context import ForwardContext
from gateway.forward.in_flight import InFlightRegistry, TimeoutMonitor
from gateway.lease import NOTHING_TRIED, AttemptReport, GrantedLease, Usage, UsageReport
from gateway.nodes.node import Node
from gateway.schedule.lease_service import LocalLeaseService
from gateway.schedule.scheduler import Scheduler
from gateway.terms import Caller, Priority
from gateway.transport.pool import ConnectionPool, NodeAddress
from tests.callers.build import all_accounts
from tests.lease_requests import a_lease_request
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


@dataclass(frozen=True, slots=True)
class Pace:
    """How requests go; in seconds, the most of each step."""

    connect: tuple[float, ...]  # one of these
    head: float
    first: float
    more: float  # between two events of content
    most_events: int
    end: float
    received: float = 0.5  # share of responses that their clients still read when they have come
    gives_up: float = 0.0  # share of failures after which there is no other attempt
    resumed: float = 0.0  # share of responses that are broken off and resumed


@dataclass(slots=True)
class Work:
    """What a node works on."""

    node: str
    slots: int
    shows_at: float = 0.0  # when the node shows it


@dataclass(slots=True, eq=False)
class PlayedRequests:
    """Plays requests at edges."""

    pace: ClassVar[Pace]
    rng: random.Random
    works: dict[int, Work] = field(init=False, default_factory=dict)
    """By the leases under which each was written."""
    begun: dict[str, EdgeServices] = field(init=False, default_factory=dict)
    """At which edge each request has begun."""
    dead: set[EdgeServices] = field(init=False, default_factory=set)
    """Edges that tell nothing any more."""
    stopped: int = field(init=False, default=0)
    """How often a lease was void when its request was to be written."""

    def written(self, services: EdgeServices, lease: GrantedLease, id_: str) -> None:
        """Note that a request is written to its node, and look whether it may be."""
        raise NotImplementedError

    def used(self, lease: GrantedLease, id_: str) -> None:
        """Note that a response to this request began under the lease."""

    async def play(self, services: EdgeServices, id_: str) -> str:
        """Play a request; returns `ok`, or the reason of its failure."""
        self.begun[id_] = services
        record = RequestRecord(id_, CHAT, "demo", request_id=id_)
        request = a_lease_request(id_, caller=CALLER.id, stream=True)
        accounts, came_at, tried = services.meter.book.accounts(CALLER), now(), NOTHING_TRIED
        reservation = services.meter.admit(accounts, request, record)
        try:
            while True:
                lease = await services.scheduler.wait_for_lease(request, tried, now() - came_at)
                record.attempt_began(lease.node.name, lease.node.tier, None)
                outcome = await self._attempt(services, lease, id_)
                if outcome == "ok" and self.rng.random() >= self.pace.resumed:
                    break
                if outcome == "server_error":
                    tried = tried.failed_on(lease.node.name)
                    if self.rng.random() < self.pace.gives_up:
                        break
        except GatewayError as error:
            record.fail(error.status, error.code)
        except asyncio.CancelledError:
            record.fail(499, "client_closed")
        finally:
            if services not in self.dead:
                services.meter.ended(reservation, record.finish(came_at, now()))
        return record.reason or "ok"

    async def _attempt(self, services: EdgeServices, lease: GrantedLease, id_: str) -> str:
        """Play an attempt; returns how it ended."""
        leases, rng, pace = services.scheduler, self.rng, self.pace
        began = sent = False
        outcome = "client_closed"
        try:
            await asyncio.sleep(rng.choice(pace.connect) * rng.random())
            if not leases.may_start(lease.id):
                self.stopped += 1
                outcome = "late"
                return outcome
            self.written(services, lease, id_)
            sent = True
            await asyncio.sleep(rng.random() * pace.head)
            if rng.random() < 0.2:
                outcome = "server_error"
                return outcome
            leases.reading_began(lease.id)
            await asyncio.sleep(rng.random() * pace.first)
            leases.content_began(lease.id)
            began = True
            self.used(lease, id_)
            for events in range(1, rng.randrange(1, pace.most_events)):
                await asyncio.sleep(rng.random() * pace.more)
                leases.content_went_on(lease.id, 10 * events)
            if rng.random() < pace.received:
                leases.response_received(lease.id)
                self.works.pop(lease.id, None)
            await asyncio.sleep(rng.random() * pace.end)
            outcome = "ok"
            return outcome
        finally:
            if outcome != "client_closed":
                self.works.pop(lease.id, None)
            else:
                later = asyncio.get_running_loop().call_later
                later(rng.random() * 0.1, self.works.pop, lease.id, None)
            if services not in self.dead:
                is_done = not sent or outcome != "client_closed"
                leases.ended(AttemptReport(lease.id, outcome, 200, sent, is_done, began))
                if began:
                    report = UsageReport(lease.id, USAGE, USAGE, 50, complete=outcome == "ok")
                    request = a_lease_request(id_)

                    def settle() -> None:
                        leases.settle(report, request)

                    services.bus.defer(settle)
