"""Brains that reign in turns over edges and the same nodes: what runs goes on, slots stay right.

Two gateways and an edge over emulated nodes; and random stories, in which links are cut and edges
die, too. There brains, schedulers, accounts and edges are real, and nodes and clients are played. A
node knows what it works on: what was written to it and has not come to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app.edge import request_handler
from gateway.callers.keys import KeyRing, hash_key
from gateway.callers.ledger import ROW_COLUMNS, UsageRow
from gateway.callers.limits import LimitBook
from gateway.callers.meter import Meter
from gateway.callers.processes import EDGE_DIED
from gateway.cluster.fencing import (
    LANDING_SECONDS,
    SETTLE_SECONDS,
    Fence,
    Session,
    Sharers,
    Tenure,
    Term,
    member_of,
)
from gateway.config.settings import Settings
from gateway.edges import messages
from gateway.edges.brain import ENDED_AT_ONCE, GRACE_SECONDS, Brain
from gateway.edges.edge import EdgeServices
from gateway.edges.reign import Reign
from gateway.errors import GatewayError
from gateway.events import EdgeLost, EventBus, RequestRecord, call_later
from gateway.forward.context import ForwardContext
from gateway.forward.in_flight import InFlightRegistry, TimeoutMonitor
from gateway.lease import (
    NOTHING_TRIED,
    AttemptReport,
    ExpectedReading,
    GrantedLease,
    Usage,
    UsageReport,
)
from gateway.nodes.node import LeasePhase
from gateway.schedule.lease_service import LocalLeaseService
from gateway.terms import Caller, Priority
from gateway.transport.link import EdgeLink
from gateway.transport.pool import ConnectionPool, NodeAddress
from tests.callers.build import all_accounts
from tests.edges.edge_beside import a_brain, serving
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.known import known
from tests.lease_requests import a_lease_request
from tests.schedule.build import a_scheduler, node
from tests.virtual import in_virtual_time, now

CHAT = "/v1/chat/completions"
EDGE = "m/edge-1"
KEY = "lg_alice_" + "s" * 43
ALICE = {
    "keys": [
        {"id": "alice", "sha256": hash_key(KEY).sha256, "limits": {"concurrency": 9, "tpm": 10**6}}
    ]
}
TERM = 2.0


def reign_of(
    brain: Brain,
    epoch: int,
    slots: Mapping[str, int],
    members: tuple[str, ...] = ("m",),
    may_grant: Callable[[], bool] = lambda: True,
) -> Reign:
    """Let this brain reign."""
    tenure = Tenure(epoch, now(), [Sharers(1, members)], slots)
    reign = Reign("m", epoch, tenure, may_grant, now, now(), brain.scheduler.fleet)
    brain.begin(reign)
    return reign


async def link(brain: Brain, services: EdgeServices, name: str = EDGE) -> None:
    ours, theirs = socket.socketpair()
    await brain.connect(ours, name)
    services.relink(theirs)


async def talk(reign: Reign, fence: Fence, edges: Collection[str], rng: random.Random) -> None:
    """The control link between a member with these edges and the leader; some terms get lost."""
    await asyncio.sleep(rng.random() * 0.3)
    tenure, member = reign.rules, fence.edge
    assert isinstance(tenure, Tenure)
    assert fence.greet(reign.epoch)
    session = Session(member, "p", fence.session)
    tenure.begins(session, edges, now())
    while True:
        if tenure.has(session) and rng.random() < 0.8:
            term = known(tenure.tell(member, now(), now() + TERM))
            fence.told(reign.epoch, term, asked_at=now(), now=now())
        tenure.confirmed(session, fence.seen, now())
        await asyncio.sleep(0.3)


@dataclass(slots=True, eq=False)
class Member:
    """A gateway that may come to reign."""

    running: Running
    brain: Brain
    records: list[RequestRecord] = field(default_factory=list)
    lost: list[EdgeLost] = field(default_factory=list)
    control: asyncio.Task[None] | None = None

    @property
    def leased(self) -> int:
        return sum(node.leased for node in self.running.gateway.fleet.nodes.values())

    def counted(self) -> list[tuple[int, int, int]]:
        book = self.running.gateway.metering.limit_book
        return [(one.running, one.open, one.reserved_tokens) for one in all_accounts(book)]


@dataclass(slots=True, eq=False)
class Cluster:
    """Two members, and an edge that one of them rules."""

    members: list[Member]
    services: EdgeServices
    fence: Fence
    client: httpx.AsyncClient = field(init=False)
    epoch: int = 0
    queued: list[str] = field(default_factory=list)
    """Nodes that were seen with more requests than slots."""

    async def lead(self, member: Member) -> None:
        self.epoch += 1
        nodes = member.running.gateway.fleet.nodes.values()
        reign = reign_of(member.brain, self.epoch, {one.name: one.slots_total for one in nodes})
        member.control = asyncio.create_task(talk(reign, self.fence, [EDGE], random.Random(1)))
        await self.relink(member)

    async def depose(self, member: Member) -> None:
        known(member.control).cancel()
        await member.brain.end()

    async def relink(self, member: Member) -> None:
        await link(member.brain, self.services)

    def ask(self, path: str = CHAT, **body: Any) -> asyncio.Task[httpx.Response]:
        value = {"messages": [{"role": "user", "content": "say it"}], "stream": True, **body}
        headers = {"authorization": f"Bearer {KEY}"}
        return asyncio.create_task(self.client.post(path, json=value, headers=headers))


@contextlib.asynccontextmanager
async def a_member(folder: Path, nodes: list[Any]) -> AsyncIterator[Member]:
    folder.mkdir()  # noqa: ASYNC240 - nothing else runs yet
    async with running_gateway(folder, nodes, ALICE) as running:
        gateway = running.gateway
        brain = a_brain(gateway, clustered=True)
        member = Member(running, brain)
        gateway.bus.subscribe(RequestRecord, member.records.append)
        gateway.bus.subscribe(EdgeLost, member.lost.append)
        yield member
        if member.control is not None:
            member.control.cancel()
        await brain.aclose()


@contextlib.asynccontextmanager
async def a_cluster(folder: Path, *nodes: EmulatedNode) -> AsyncIterator[Cluster]:
    """Two members over these nodes; the first one leads, and has read all nodes."""
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(a_member(folder / "a", list(nodes)))
        urls = [node.url for node in nodes]
        second = await stack.enter_async_context(a_member(folder / "b", urls))
        services = EdgeServices(EDGE, clustered=True, clock=now)
        cluster = Cluster([first, second], services, Fence("m", lambda _: 2))
        await cluster.lead(first)
        await services.wait_ready(10.0)
        handler = request_handler(services, services.settings)
        cluster.client = await stack.enter_async_context(serving(first.running, services, handler))
        watch = asyncio.create_task(_watch(cluster, nodes))
        await until(lambda: all(node.foreign == 0 for node in nodes_of(first)))
        try:
            yield cluster
        finally:
            watch.cancel()


async def _watch(cluster: Cluster, nodes: tuple[EmulatedNode, ...]) -> None:
    while True:
        cluster.queued += [node.url for node in nodes if node.queued]
        await asyncio.sleep(0.005)


def nodes_of(member: Member) -> list[Any]:
    return list(member.running.gateway.fleet.nodes.values())


def a_node(**more: Any) -> EmulatedNode:
    return EmulatedNode(**{"slots": 2, "decode_tps": 20.0, "answer_tokens": 60, **more})


@in_virtual_time
async def test_streams_and_waiting_requests_go_on_under_the_next_brain(tmp_path: Path) -> None:
    """Each prompt and each attempt of them."""
    node = a_node()
    async with a_cluster(tmp_path, node) as cluster:
        first, second = cluster.members
        prompts = cluster.ask("/v1/completions", prompt=["one", "two"], stream=False)
        asked = [prompts, cluster.ask()]
        await until(lambda: first.leased == 2 and node.busy == 2)
        await asyncio.sleep(1.0)
        await cluster.depose(first)
        assert (first.leased, first.running.held(), first.counted()) == (0, {}, [(0, 0, 0)])
        await cluster.lead(second)
        await until(lambda: second.leased == 2)
        assert second.counted()[0][1] == 2
        answers = await asyncio.gather(*asked)
        assert len(answers[0].json()["choices"]) == 2
        assert answers[1].text.endswith("data: [DONE]\n\n")
        await until(lambda: len(second.records) == 2)
        assert {(one.status, one.completion_tokens) for one in second.records} == {
            (200, 60), (200, 120)
        }  # fmt: skip
        for record in second.records:
            assert record.slot_seconds == pytest.approx(record.completion_tokens / 20, abs=0.3)
        assert (first.records, first.lost, cluster.queued) == ([], [], [])
        await until(lambda: not second.running.held())
        assert second.counted() == [(0, 0, 0)]
        assert node.peak_busy == 2
        await until(lambda: cluster.services.requests.are_booked)


@in_virtual_time
async def test_a_slot_of_which_nobody_tells_is_free_once_it_is_seen_idle(tmp_path: Path) -> None:
    node = a_node(answer_tokens=120)
    async with a_cluster(tmp_path, node) as cluster:
        first, second = cluster.members
        body = {"messages": [{"role": "user", "content": "of a machine that has died"}]}
        async with httpx.AsyncClient(base_url=node.url, timeout=60.0) as stranger:
            lost = asyncio.create_task(stranger.post(CHAT, json={**body, "max_tokens": 120}))
            await until(lambda: node.busy == 1)
            await cluster.depose(first)
            won_at = now()
            await cluster.lead(second)
            (known,) = nodes_of(second)
            assert known.foreign == 2, "until it was read"
            asked = [cluster.ask(max_tokens=20) for _ in range(3)]
            await until(lambda: second.leased == 1)
            assert now() - won_at >= SETTLE_SECONDS
            await asyncio.gather(*asked)
            assert not lost.done()
            assert node.peak_busy == 2
            await lost
        assert cluster.queued == []


@in_virtual_time
async def test_an_edge_that_knows_a_later_leader_is_refused(tmp_path: Path) -> None:
    async with a_cluster(tmp_path, a_node()) as cluster:
        first, _ = cluster.members
        heard: list[int] = []
        known(first.brain.reign).heard = heard.append
        cluster.services.epoch = 8
        await cluster.relink(first)
        await until(lambda: heard == [8])
        # One that has never spoken is no edge that was lost.
        ours, theirs = socket.socketpair()
        await first.brain.connect(ours, "m/edge-2")
        theirs.close()
        await until(lambda: "m/edge-2" not in first.brain.sessions)
        await asyncio.sleep(2 * GRACE_SECONDS)
        assert [one.edge for one in first.lost] in ([], [EDGE])


@in_virtual_time
async def test_nothing_is_granted_and_no_edge_taken_outside_a_reign(tmp_path: Path) -> None:
    async with a_cluster(tmp_path, a_node(answer_tokens=2)) as cluster:
        first, second = cluster.members
        ours, theirs = socket.socketpair()
        with theirs, pytest.raises(ConnectionRefusedError):
            await second.brain.connect(ours, EDGE)
        body = {"messages": [{"role": "user", "content": "x"}]}
        headers = {"authorization": f"Bearer {KEY}"}
        own = asyncio.create_task(second.running.client.post(CHAT, json=body, headers=headers))
        await asyncio.sleep(3.0)
        assert not own.done()
        await cluster.depose(first)
        await cluster.lead(second)
        assert (await own).status_code == 200


@in_virtual_time
async def test_a_brain_that_is_alone_grants_the_share_of_its_member(tmp_path: Path) -> None:
    node = a_node(slots=4, answer_tokens=20)
    async with a_cluster(tmp_path, node) as cluster:
        first, second = cluster.members
        cluster.fence.sharers = Sharers(2, ("m", "n"))
        fence = Fence("m", lambda _: 4)
        assert fence.greet(9)
        term = Term(1, 1, TERM, Sharers(1, ("m", "n")), may_be_alone=True)
        assert fence.told(9, term, asked_at=now(), now=now())
        await cluster.depose(first)
        fleet = second.running.gateway.fleet
        reign = Reign("m", 9, fence, lambda: fence.is_alone(now()), now, now(), fleet)
        second.brain.begin(reign)
        await cluster.relink(second)
        asked = [cluster.ask() for _ in range(4)]
        await asyncio.sleep(TERM + SETTLE_SECONDS - 0.1)
        assert second.leased == 0
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [200] * 4
        assert node.peak_busy == 2
        await second.brain.end()
        assert nodes_of(second)[0].foreign == 0


@in_virtual_time
async def test_another_node_of_the_same_name_counts_as_taken_until_it_is_read() -> None:
    first, other = node("x", slots=2), node("x", slots=2)
    fleet = a_scheduler(first, clock=now).fleet
    tenure, session = Tenure(1, now(), [Sharers(1, ("m",))], {"x": 2}), Session("m", "p", 1)
    reign = Reign("m", 1, tenure, lambda: True, now, now(), fleet)
    reign.begin()
    tenure.begins(session, [], now())
    term = known(tenure.tell(session.edge, now(), now() + 1000.0))
    assert tenure.confirmed(session, term.number, now())
    await asyncio.sleep(2 * SETTLE_SECONDS)
    first.slots_told(frozenset(), now())
    assert first.occupancy.foreign == 0
    # As by a reload: a new node is fenced as a whole.
    other.read_slots_for(first.slots_reader)
    other.occupancy.fence(1000, now())
    fleet.nodes["x"] = other
    await asyncio.sleep(2 * SETTLE_SECONDS)
    assert other.occupancy.foreign == 2
    first.slots_told(frozenset(), now())
    assert other.occupancy.foreign == 2
    other.slots_told(frozenset(), now())
    assert other.occupancy.foreign == 0
    await reign.end()


# Random stories.

CALLER = Caller("anonymous:1.2.3.4", "anonymous", Priority.NORMAL, anonymous=True)
USAGE = Usage(100, 20, 50)
SLOTS = {"x": 1, "y": 3}
MEMBERS = ("m", "n")
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
        self.nodes = [node(name, slots=slots) for name, slots in SLOTS.items()]
        for one in self.nodes:  # to which no connection is ever made
            address = NodeAddress("127.0.0.1", 9, b"", b"host: x\r\n")
            one.replace_upstream(ConnectionPool(address), 0.0)
        self.scheduler = a_scheduler(*self.nodes, clock=now, seed=script.rng.randrange(2**30))
        settings = Settings.model_validate(
            {"limits": {"total": {"concurrency": 1000, "tpm": 10**9}}, "queue": {"max_wait": 600}}
        )
        bus, leases = EventBus(call_later), LocalLeaseService(self.scheduler, self.scheduler.fleet)
        context = ForwardContext(leases, settings, bus, TimeoutMonitor(now), now)
        meter = Meter(LimitBook(settings, clock=now), bus, process="p", add_row=self._add_row)
        self.brain = Brain(
            self.scheduler, context, InFlightRegistry(), meter, KeyRing(), bus, None,
            loopback=True, clustered=True,
        )  # fmt: skip
        self.is_dead = False
        self.lead_until = 0.0
        self.tasks: list[asyncio.Task[None]] = []
        self._ids: dict[int, tuple[object, int]] = {}

    def _add_row(self, row: UsageRow) -> None:
        if not self.is_dead:
            self.script.add_row(row)

    def held(self) -> dict[str, int]:
        """All counts of what the brain holds that are not zero."""
        brain = self.brain
        counts = {
            "leases": len(self.scheduler.records),
            "waiting": len(self.scheduler.waiters),
            "registry": len(brain.registry),
            "open": len(brain.meter._open),
            "adrift": len(brain._adrift),
        }
        for one in self.nodes:
            counts[f"leased of {one.name}"] = one.leased + len(one.leases)
        for account in all_accounts(brain.meter.book):
            counts[account.subject] = account.running + account.open + account.reserved_tokens
        for session in brain.sessions.values():
            held = len(session.requests) + len(session._leases) + len(session._asks)
            counts[f"held for {session.name}"] = held
        return {name: count for name, count in counts.items() if count}

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
    tasks: dict[str, asyncio.Task[str]] = field(default_factory=dict)
    epoch: int = 0

    def add_row(self, row: UsageRow) -> None:
        """As the ledger: what is there stays, but for what seemed lost."""
        known = self.rows.get(row[0])
        if known is None or (known[OUTCOME] == EDGE_DIED != row[OUTCOME]):
            self.rows[row[0]] = row

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
        reign = reign_of(world.brain, self.epoch, SLOTS, MEMBERS, world.may_grant)
        for member, fence in self.fences.items():
            its = [name for name in self.edges if member_of(name) == member]
            world.tasks.append(asyncio.create_task(talk(reign, fence, its, self.rng)))
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
            await until(lambda: not world.held(), 1.0)
        world.tasks[-1].cancel()

    async def link(self, name: str) -> None:
        await link(self.worlds[-1].brain, self.edges[name], name)

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
    await until(lambda: not world.held() and all(one.requests.are_booked for one in edges))
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
