"""Brains succeed each other at random moments over the same nodes: slots and rows stay right.

Links are cut and edges die meanwhile. Brains, schedulers, accounts and edges are real; nodes and
clients are played. A node knows what it works on: what was written to it and has not come to its
end.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from dataclasses import dataclass, field

import pytest

from gateway.callers.ledger import ROW_COLUMNS, UsageRow
from gateway.callers.processes import EDGE_DIED
from gateway.cluster.fencing import LANDING_SECONDS, Fence, Session, Sharers, Tenure, member_of
from gateway.config.settings import Settings
from gateway.edges import messages
from gateway.edges.brain import ENDED_AT_ONCE
from gateway.edges.edge import EdgeServices
from gateway.edges.reign import Reign
from gateway.errors import GatewayError
from gateway.events import RequestRecord
from gateway.lease import NOTHING_TRIED, AttemptReport, ExpectedReading, GrantedLease, UsageReport
from gateway.nodes.node import LeasePhase
from gateway.terms import Priority
from gateway.transport.link import EdgeLink
from tests.edges.played import (
    CALLER,
    CHAT,
    USAGE,
    a_bare_brain,
    a_played_node,
    held_by,
)
from tests.gateways import until
from tests.known import known
from tests.lease_requests import a_lease_request
from tests.schedule.build import a_scheduler
from tests.virtual import in_virtual_time, now

SLOTS = {"x": 1, "y": 3}
MEMBERS = ("m", "n")
TERM = 2.0
RESUMED = 0.1  # of responses, which are broken off
OUTCOME, SLOT_SECONDS = ROW_COLUMNS.index("outcome"), ROW_COLUMNS.index("slot_seconds")


@dataclass(slots=True)
class Work:
    node: str
    shows_at: float  # when the node shows it


class World:
    """A member's gateway, as far as it rules edges."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.nodes = [a_played_node(*of) for of in SLOTS.items()]
        self.scheduler = a_scheduler(*self.nodes, clock=now, seed=script.rng.randrange(2**30))
        settings = Settings.model_validate(
            {"limits": {"total": {"concurrency": 1000, "tpm": 10**9}}, "queue": {"max_wait": 600}}
        )
        self.brain = a_bare_brain(self.scheduler, settings, add_row=self._add_row, clustered=True)
        self.is_dead = False
        self.lead_until = 0.0
        self.tasks: list[asyncio.Task[None]] = []
        self._ids: dict[int, tuple[object, int]] = {}

    def _add_row(self, row: UsageRow) -> None:
        if not self.is_dead:
            self.script.add_row(row)

    def may_grant(self) -> bool:
        return not self.is_dead and now() < self.lead_until

    def note_leases(self) -> None:
        for lease_id, record in self.scheduler.records.items():
            self._ids[id(record)] = record, lease_id

    async def read(self) -> None:
        """Read a node's slots, and free those of abandoned leases that are idle."""
        while True:
            await asyncio.sleep(0.02 + self.script.rng.random() * 0.1)
            self.note_leases()
            for one in self.nodes:
                asked_at = one.slots_asked()
                with one.occupancy.slots_query(now()) as query:
                    busy = self.script.busy(one.name)
                one.occupancy.record_busy(tuple(busy), query, now())
                one.slots_told(frozenset((number, b"") for number in busy), asked_at)
                self.scheduler.fleet.capacity_changed(one)
                for lease in list(one.leases):
                    known = self._ids.get(id(lease), (None, 0))
                    if lease.phase is LeasePhase.RECLAIM and known[1] not in self.script.works:
                        lease.release()


@dataclass(slots=True, eq=False)
class Script:
    """One seed's story. Each request asks for its leases, and reports as a forwarder does."""

    rng: random.Random
    works: dict[int, Work] = field(default_factory=dict)
    """By the leases under which each was written."""
    begun: dict[str, EdgeServices] = field(default_factory=dict)
    """At which edge each request has begun."""
    dead: set[EdgeServices] = field(default_factory=set)  # edges that tell nothing any more
    stopped: int = 0  # how often a lease was void when its request was to be written
    edges: dict[str, EdgeServices] = field(default_factory=dict)
    fences: dict[str, Fence] = field(default_factory=dict)
    worlds: list[World] = field(default_factory=list)
    rows: dict[str, UsageRow] = field(default_factory=dict)
    again: Counter[str] = field(default_factory=Counter)
    tasks: dict[str, asyncio.Task[str]] = field(default_factory=dict)
    epoch: int = 0

    def add_row(self, row: UsageRow) -> None:
        """As the ledger: what is there stays, but for what seemed lost."""
        known = self.rows.get(row[0])
        if known is None or (known[OUTCOME] == EDGE_DIED != row[OUTCOME]):
            self.rows[row[0]] = row
        else:
            self.again[row[0]] += 1

    def busy(self, name: str) -> frozenset[int]:
        works = self.works.items()
        return frozenset(id_ for id_, one in works if one.node == name and one.shows_at <= now())

    # Who rules.

    async def begin(self) -> World:
        """Another member comes to lead, once the term of the last one is over."""
        self.epoch += 1
        if self.worlds:
            await asyncio.sleep(max(0.0, self.worlds[-1].lead_until - now()))
        world = World(self)
        self.worlds.append(world)
        world.lead_until = now() + 1e9
        tenure = Tenure(self.epoch, now(), [Sharers(1, MEMBERS)], SLOTS)
        fleet = world.brain.scheduler.fleet
        reign = Reign("m", self.epoch, tenure, world.may_grant, now, now(), fleet)
        world.brain.begin(reign)
        world.tasks = [asyncio.create_task(self._talk(world, reign, name)) for name in MEMBERS]
        world.tasks += [asyncio.create_task(world.read())]
        for name in self.edges:
            await asyncio.sleep(self.rng.random() * 0.5)
            await self.link(name)
        return world

    async def succeed(self) -> None:
        """The leader does not renew any more, and dies or ends its reign, sooner or later."""
        world = self.worlds[-1]
        world.lead_until = now() + self.rng.random() * 0.5
        world.is_dead = dies = self.rng.random() < 0.5
        for task in world.tasks[: len(MEMBERS)]:
            task.cancel()
        if dies:
            for session in list(world.brain.sessions.values()):
                session.link.fail("its machine has died")
        elif self.rng.random() < 0.5:
            await world.brain.end()
        ends = asyncio.create_task(asyncio.sleep(self.rng.random()))
        await self.begin()
        await ends
        if not dies:
            await world.brain.end()
            await until(lambda: not held_by(world.brain), 1.0)
        world.tasks[-1].cancel()

    async def link(self, name: str) -> None:
        ours, theirs = socket.socketpair()
        await self.worlds[-1].brain.connect(ours, name)
        self.edges[name].relink(theirs)

    async def _talk(self, world: World, reign: Reign, member: str) -> None:
        await asyncio.sleep(self.rng.random() * 0.3)
        fence, tenure = self.fences[member], reign.rules
        assert isinstance(tenure, Tenure)
        assert fence.greet(reign.epoch)
        session = Session(member, "p", fence.session)
        edges = [name for name in self.edges if member_of(name) == member]
        tenure.begins(session, edges, now())
        while True:
            if tenure.has(session) and self.rng.random() < 0.8:
                term = known(tenure.tell(member, now(), now() + TERM))
                fence.told(reign.epoch, term, asked_at=now(), now=now())
            tenure.confirmed(session, fence.seen, now())
            await asyncio.sleep(0.3)

    # What clients do.

    def ask(self) -> None:
        id_ = f"req_{len(self.tasks)}"
        name = self.rng.choice(list(self.edges))
        self.tasks[id_] = asyncio.create_task(self.play(self.edges[name], id_))

    async def kill(self, name: str) -> None:
        """An edge dies, and is started again."""
        services = self.edges[name]
        self.dead.add(services)
        known(services.link._transport).abort()
        for id_, its in self.begun.items():
            if its is services:
                self.tasks[id_].cancel()
        self.worlds[-1].brain.edge_ended(name)
        await asyncio.sleep(self.rng.random())
        self.edges[name] = EdgeServices(name, clustered=True, clock=now)
        await self.link(name)

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
                if outcome == "ok" and self.rng.random() >= RESUMED:
                    break
                if outcome == "server_error":
                    tried = tried.failed_on(lease.node.name)
        except GatewayError as error:
            record.fail(error.status, error.code)
        except asyncio.CancelledError:
            record.fail(499, "client_closed")
        finally:
            if services not in self.dead:
                services.meter.ended(reservation, record.finish(came_at, now()))
        return record.reason or "ok"

    async def _attempt(self, services: EdgeServices, lease: GrantedLease, id_: str) -> str:
        leases, rng = services.scheduler, self.rng
        began = sent = False
        outcome = "client_closed"
        try:
            await asyncio.sleep(rng.choice((0.0, 0.1, 1.2)) * rng.random())
            if not leases.may_start(lease.id):
                self.stopped += 1
                outcome = "late"
                return outcome
            self.write(lease)
            sent = True
            await asyncio.sleep(rng.random() * 0.2)
            if rng.random() < 0.2:
                outcome = "server_error"
                return outcome
            leases.reading_began(lease.id)
            await asyncio.sleep(rng.random() * 0.5)
            leases.content_began(lease.id)
            began = True
            for events in range(1, rng.randrange(1, 8)):
                await asyncio.sleep(rng.random())
                leases.content_went_on(lease.id, 10 * events)
            if rng.random() < 0.5:  # its client still reads when it has come
                leases.response_received(lease.id)
                self.works.pop(lease.id, None)
                await asyncio.sleep(rng.random() * 0.1)
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

                    def settle() -> None:
                        leases.settle(report, a_lease_request(id_))

                    services.bus.defer(settle)

    def write(self, lease: GrantedLease) -> None:
        """Note that a request is written to its node, and look whether it may be."""
        assert lease.id not in self.works, "one lease, two requests"
        name, shows_at = lease.node.name, now() + self.rng.random() * LANDING_SECONDS * 0.8
        self.works[lease.id] = Work(name, shows_at)
        self.worlds[-1].note_leases()
        running = sum(one.node == name for one in self.works.values())
        assert running <= SLOTS[name], f"{running} requests on {SLOTS[name]} slots"

    async def run(self, seconds: float) -> None:
        rng, ends = self.rng, now() + seconds
        while now() < ends:
            await asyncio.sleep(rng.expovariate(8.0))
            what = rng.random()
            running = [task for task in self.tasks.values() if not task.done()]
            if what < 0.5 and len(running) < 12:
                self.ask()
            elif what < 0.6 and running:
                rng.choice(running).cancel()
            elif what < 0.65:
                name = rng.choice(list(self.edges))
                self.worlds[-1].brain.sessions[name].link.fail("the cable")
                await asyncio.sleep(rng.random())
                await self.link(name)
            elif what < 0.68:
                await self.kill(rng.choice(list(self.edges)))
            elif what < 0.73:
                await self.succeed()


def a_script(seed: int, *edges: str) -> Script:
    script = Script(random.Random(seed))
    script.fences = {member: Fence(member, SLOTS.__getitem__) for member in MEMBERS}
    script.edges = {name: EdgeServices(name, clustered=True, clock=now) for name in edges}
    return script


@pytest.mark.parametrize("seed", range(8))
@in_virtual_time
async def test_slots_and_rows_stay_right_whoever_comes_to_reign(seed: int) -> None:
    script = a_script(seed, "m/edge-1", "n/edge-1")
    await script.begin()
    await script.run(60.0)
    outcomes = dict(zip(script.tasks, await asyncio.gather(*script.tasks.values()), strict=True))
    world = script.worlds[-1]
    edges = script.edges.values()
    await until(lambda: not held_by(world.brain) and all(one.requests.are_booked for one in edges))
    told = {id_: row[OUTCOME] for id_, row in script.rows.items()}
    for id_, outcome in outcomes.items():
        if script.begun[id_] in script.dead:
            assert told.pop(id_, EDGE_DIED) in {EDGE_DIED, outcome}
        else:
            assert told.pop(id_) == outcome
    assert told == {}
    answered = [row[SLOT_SECONDS] for row in script.rows.values() if row[OUTCOME] == "ok"]
    assert all(seconds > 0.0 for seconds in answered)
    assert len(answered) > 20
    assert (len(script.dead) > 0, script.stopped > 0) == (True, True)
    assert len(script.worlds) > 3
    assert all(one.free_slots(now()) == SLOTS[one.name] for one in world.nodes)
    for task in world.tasks:
        task.cancel()
    for services in (*edges, *script.dead):
        await services.aclose()
    await world.brain.aclose()


@in_virtual_time
async def test_a_question_about_a_lease_on_a_node_that_is_not_known_is_answered() -> None:
    script, told = a_script(1), list[object]()
    world = await script.begin()
    ours, theirs = socket.socketpair()
    await world.brain.connect(ours, "m/edge-1")
    link = EdgeLink(messages.ToEdge, told.append, lambda _: None, now)
    await EdgeLink.over(theirs, link)
    request, path = a_lease_request("req_1", caller=CALLER.id, stream=True), CHAT
    record = messages.EndedRecord.of(RequestRecord("x", path, "demo", request_id="req_1"))
    opening = messages.Opening(
        "req_1", "x", path, CALLER.id, None, Priority.NORMAL, False, request, 1, "demo", True, 1.0,
        None,
    )  # fmt: skip
    reading = ExpectedReading(10, 1.0, 2.0)
    for message in (
        messages.Hello(messages.VERSION, "m/edge-1", 7),
        messages.CarriedRequest(opening, record, released=False),
        messages.CarriedLease(
            5, request, "gone", "demo", "demo", True, reading, 1, None, 1.0, "reading", 0
        ),
        messages.Carried(),
        messages.AskExcused(1, 5),
    ):
        link.tell(message)
    await until(lambda: any(isinstance(one, messages.NodeAnswer) for one in told))
    assert not link.lost
    for task in world.tasks:
        task.cancel()
    await world.brain.end()
    link.close()


@in_virtual_time
async def test_what_waited_over_a_lost_link_ends_before_it_is_asked_for_anew() -> None:
    name, count = "m/edge-1", 4 * ENDED_AT_ONCE
    script = a_script(1, name)
    world = await script.begin()
    for _ in range(count):
        script.ask()
    waiters = world.scheduler.waiters
    await until(lambda: len(waiters) > 3 * ENDED_AT_ONCE)
    world.brain.sessions[name].link.fail("the cable")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert waiters, "all at once, though there may be thousands"
    ours, theirs = socket.socketpair()
    await world.brain.connect(ours, name)
    assert not waiters
    script.edges[name].relink(theirs)
    await until(lambda: len(waiters) > 3 * ENDED_AT_ONCE)
    for task in (*script.tasks.values(), *world.tasks[:2]):
        task.cancel()
    await asyncio.gather(*script.tasks.values(), return_exceptions=True)
    await until(lambda: not waiters)
    world.tasks[-1].cancel()
    await script.edges[name].aclose()
    await world.brain.aclose()
