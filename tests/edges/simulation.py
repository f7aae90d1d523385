"""A brain and its edges with a wire between them that is slow, cut anywhere, and under control.

All of it is real but for the wire and the nodes: links, sessions, scheduler, meter. Requests are
played: each asks for its leases, reports as a forwarder does, and is left or cut at any moment. The
nodes know what they work on: what was sent to them and has not come to its end.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from gateway.callers.keys import KeyRing
from gateway.callers.ledger import UsageRow
from gateway.callers.limits import LimitBook
from gateway.callers.meter import Meter
from gateway.config.settings import Settings
from gateway.edges.brain import Brain, EdgeSession
from gateway.edges.edge import EdgeServices
from gateway.edges.messages import VERSION, Hello
from gateway.errors import GatewayError
from gateway.events import EdgeLost, EventBus, RequestRecord, call_later
from gateway.forward.context import ForwardContext
from gateway.forward.in_flight import InFlightRegistry, TimeoutMonitor
from gateway.lease import NOTHING_TRIED, AttemptReport, GrantedLease, Usage, UsageReport
from gateway.nodes.node import LeasePhase, Node
from gateway.schedule.lease_service import LocalLeaseService
from gateway.terms import Caller, Priority
from gateway.transport.link import EdgeLink
from gateway.transport.pool import ConnectionPool, NodeAddress
from tests.callers.build import all_accounts
from tests.lease_requests import a_lease_request
from tests.schedule.build import a_scheduler, node
from tests.virtual import now

CALLER = Caller("anonymous:1.2.3.4", "anonymous", Priority.NORMAL, anonymous=True)
USAGE = Usage(100, 20, 50)
GRANT_SECONDS = 1.0


class Wire(asyncio.Transport):
    """One direction of a wire: bytes come to the other side late, in order, in pieces."""

    def __init__(self, rng: random.Random, latency: float) -> None:
        super().__init__()
        self._rng, self._latency = rng, latency
        self._free_at = 0.0
        self._under_way: deque[bytes] = deque()
        self.other: Wire
        self.link: EdgeLink
        """That of the side that writes here."""
        self.cut = False

    def join(self, other: Wire, link: EdgeLink) -> None:
        self.other, self.link = other, link

    def write(self, data: bytes | bytearray | memoryview) -> None:
        loop, whole = asyncio.get_running_loop(), bytes(data)
        at = self._rng.randrange(len(whole) + 1)
        for piece in (whole[:at], whole[at:]):
            self._free_at = max(self._free_at, loop.time() + self._rng.random() * self._latency)
            self._under_way.append(piece)
            loop.call_at(self._free_at, self._arrive)

    def _arrive(self) -> None:
        piece = self._under_way.popleft()  # timers of one moment come in any order
        if piece and not self.cut and not self.other.link.lost:
            self.other.link.data_received(piece)

    def break_off(self) -> None:
        """The side that writes here is dead; the other one sees it a little later."""
        self.cut = True  # what is under way is lost, too: it may have been in its buffer
        asyncio.get_running_loop().call_later(
            self._rng.random() * self._latency, self.other.link.connection_lost, None
        )

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Everything is dealt with at once here."""

    def resume_reading(self) -> None:
        """As above."""

    def abort(self) -> None:
        self.cut = True

    def write_eof(self) -> None:
        asyncio.get_running_loop().call_at(
            max(self._free_at, asyncio.get_running_loop().time()),
            self.other.link.connection_lost,
            None,
        )


@dataclass(slots=True, eq=False)
class SimulatedEdge:
    services: EdgeServices
    session: EdgeSession
    wire: Wire
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    alive: bool = True


@dataclass(slots=True, eq=False)
class Work:
    """What a node works on."""

    node: str
    slots: int


class Simulation:
    """One seed's world."""

    def __init__(
        self, seed: int, *, slots: tuple[int, ...] = (1, 2), latency: float = 0.02
    ) -> None:
        self.rng, self.latency = random.Random(seed), latency
        self.nodes: list[Node] = [
            node(name, slots=count) for name, count in zip("abcd", slots, strict=False)
        ]
        for one in self.nodes:
            address = NodeAddress("127.0.0.1", 9, b"", b"host: x\r\n")
            one.replace_upstream(ConnectionPool(address), now())
        self.bus = EventBus(call_later)
        self.scheduler = a_scheduler(*self.nodes, clock=now)
        total = {"concurrency": 1000, "tpm": 10**9}
        settings = Settings.model_validate({"limits": {"total": total}})
        context = ForwardContext(
            LocalLeaseService(self.scheduler, self.scheduler.fleet),
            settings,
            self.bus,
            TimeoutMonitor(now),
            now,
        )
        self.rows: list[UsageRow] = []
        book = LimitBook(settings, clock=now)
        self.meter = Meter(book, self.bus, process="p", add_row=self.rows.append)
        self.brain = Brain(
            self.scheduler, context, InFlightRegistry(), self.meter, KeyRing(), self.bus, None,
            loopback=True,
        )  # fmt: skip
        self.edges: list[SimulatedEdge] = []
        self.records: Counter[str] = Counter()
        self.reasons: Counter[str | None] = Counter()
        self.bus.subscribe(RequestRecord, self._recorded)
        self.works: dict[int, Work] = {}
        """By the ids of the leases under which it was sent."""
        self.leases: dict[int, object] = {}
        """Of each id the scheduler's own lease, which must be the only one of that id."""
        self.begun: dict[str, SimulatedEdge] = {}
        self.broken: list[str] = []
        self.bus.subscribe(EdgeLost, lambda loss: self.broken.extend(loss.requests))
        self.most: Counter[str] = Counter()
        self._numbers = iter(range(10**9))
        self._names = iter(range(10**9))

    def _recorded(self, record: RequestRecord) -> None:
        self.records[record.request_id] += 1
        self.reasons[record.reason] += 1

    async def start_edge(self) -> SimulatedEdge:
        name = f"edge-{next(self._names)}"
        services = EdgeServices(name, clock=now, rng=random.Random(self.rng.random()))
        session = EdgeSession(self.brain, name, lambda: None)
        self.brain.sessions[name] = session
        to_brain, to_edge = Wire(self.rng, self.latency), Wire(self.rng, self.latency)
        to_brain.join(to_edge, services.link)
        to_edge.join(to_brain, session.link)
        session.link.connection_made(to_edge)
        services.link.connection_made(to_brain)
        services.link.tell(Hello(VERSION, name, 1))
        async with asyncio.timeout(10.0):
            await services._ready.wait()
        services.scheduler.grant_seconds = GRANT_SECONDS
        edge = SimulatedEdge(services, session, to_brain)
        self.edges.append(edge)
        return edge

    def kill(self, edge: SimulatedEdge) -> None:
        """End an edge at once; its connections to nodes close, and these notice a little later."""
        edge.alive = False
        edge.wire.break_off()
        link = edge.services.link
        link._stop()
        for task in edge.tasks:
            task.cancel()

    # What a request does.

    def begin(self, edge: SimulatedEdge) -> None:
        """A request comes to this edge."""
        id_ = f"req_{next(self._numbers)}"
        task = asyncio.create_task(self._request(edge, id_))
        edge.tasks.add(task)
        task.add_done_callback(edge.tasks.discard)

    def leave(self, edge: SimulatedEdge) -> None:
        """The client of some request of this edge leaves."""
        tasks = sorted(edge.tasks, key=lambda task: task.get_name())
        if tasks:
            self.rng.choice(tasks).cancel()

    async def _request(self, edge: SimulatedEdge, id_: str) -> None:
        self.begun[id_] = edge
        services, rng = edge.services, self.rng
        record = RequestRecord(id_, "/v1/chat/completions", "demo", request_id=id_)
        request = a_lease_request(id_, caller=CALLER.id, stream=True)
        accounts = services.meter.book.accounts(CALLER)
        reservation = services.meter.admit(accounts, request, record)
        tried = NOTHING_TRIED
        received_at = now()
        try:
            while True:
                lease = await services.scheduler.wait_for_lease(request, tried, now() - received_at)
                record.attempt_began(lease.node.name, lease.node.tier, None)
                if await self._attempt(edge, lease, id_, record):
                    break
                tried = tried.failed_on(lease.node.name)
                if rng.random() < 0.5:
                    break
        except GatewayError as error:
            record.fail(error.status, error.code)
        except asyncio.CancelledError:
            record.fail(499, "client_closed")
        finally:
            if edge.alive:
                services.meter.ended(reservation, record.finish(received_at, now()))

    async def _attempt(
        self, edge: SimulatedEdge, lease: GrantedLease, id_: str, record: RequestRecord
    ) -> bool:
        """Whether it has been answered."""
        leases, rng = edge.services.scheduler, self.rng
        began = done = sent = False
        outcome = "client_closed"
        try:
            await asyncio.sleep(rng.random() * 0.01)  # a connection is made
            self._sent(lease)
            sent = True
            await asyncio.sleep(rng.random() * 0.05)
            if rng.random() < 0.2:
                done, outcome = True, "server_error"
                return False
            leases.reading_began(lease.id)
            await asyncio.sleep(rng.random() * 0.1)
            leases.content_began(lease.id)
            began = True
            for events in range(1, rng.randrange(1, 4)):
                await asyncio.sleep(rng.random() * 0.1)
                leases.content_went_on(lease.id, 10 * events)
            if rng.random() < 0.5:
                leases.response_received(lease.id)
                self.works.pop(lease.id)
                sent = False
            await asyncio.sleep(rng.random() * 0.02)
            done, outcome = True, "ok"
            return True
        finally:
            if sent and done:
                self.works.pop(lease.id)
            elif sent:
                asyncio.get_running_loop().call_later(
                    rng.random() * 0.1, self.works.pop, lease.id, None
                )
            if edge.alive:
                self._ended(edge, lease, id_, record, outcome, began=began, done=done or not sent)

    def _ended(
        self,
        edge: SimulatedEdge,
        lease: GrantedLease,
        id_: str,
        record: RequestRecord,
        outcome: str,
        *,
        began: bool,
        done: bool,
    ) -> None:
        services = edge.services
        services.scheduler.ended(AttemptReport(lease.id, outcome, 200, True, done, began))
        if began:
            report = UsageReport(lease.id, USAGE, USAGE, 50, complete=outcome == "ok")
            request = a_lease_request(id_)

            def settle() -> None:
                services.scheduler.settle(report, request)
                record.count_tokens(100, 20, 50)

            services.bus.defer(settle)

    def _sent(self, lease: GrantedLease) -> None:
        assert lease.id not in self.works, "one lease, two requests"
        record = self.scheduler.records.get(lease.id)
        assert record is not None, "a request under a lease that the brain does not know"
        self.works[lease.id] = Work(lease.node.name, lease.slots)
        self.leases[id(record)] = lease.id
        self.check()

    # What must always hold.

    def check(self) -> None:
        busy: Counter[str] = Counter()
        for work in self.works.values():
            busy[work.node] += work.slots
        for one in self.nodes:
            assert busy[one.name] <= one.slots_total, "more requests than slots"
            assert 0 <= one.leased <= one.slots_total
            self.most[one.name] = max(self.most[one.name], busy[one.name])

    def reclaim(self) -> None:
        """As the reclaimer: free the slots of abandoned leases that are seen to be idle."""
        for one in self.nodes:
            for lease in list(one.leases):
                if (
                    lease.phase is LeasePhase.RECLAIM
                    and self.leases.get(id(lease)) not in self.works
                ):
                    lease.release()

    async def run(self, seconds: float) -> None:
        """Random things happen for so long; at least one edge dies while it works."""
        rng, begin, ends, killed = self.rng, now(), now() + seconds, False
        actions: list[tuple[float, Callable[[], object]]] = [
            (8.0, lambda: self.begin(rng.choice(self.living))),
            (2.0, lambda: self.leave(rng.choice(self.living))),
            (3.0, self.reclaim),
        ]
        while now() < ends:
            await asyncio.sleep(rng.expovariate(60.0))
            self.check()
            must = not killed and now() > begin + seconds / 2
            edge = rng.choice(self.living)
            if rng.random() < 0.02 or (must and edge.session.requests):
                killed = True
                self.kill(edge)
                await self.start_edge()
                continue
            weights = [weight for weight, _ in actions]
            rng.choices(actions, weights)[0][1]()

    @property
    def living(self) -> list[SimulatedEdge]:
        return [edge for edge in self.edges if edge.alive]

    async def come_to_rest(self) -> None:
        """Let all requests end, and look that nothing is left of them anywhere."""
        for edge in self.living:
            for task in list(edge.tasks):
                if self.rng.random() < 0.5:
                    task.cancel()
        async with asyncio.timeout(60.0):
            while not self.is_empty():
                self.reclaim()
                self.check()
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)  # for records that are under way

    def left(self) -> dict[str, int]:
        """All counts of what is held that are not zero."""
        counts = {
            "leases": len(self.scheduler.records),
            "waiting": len(self.scheduler.waiters),
            "registry": len(self.brain.registry),
            "open": len(self.meter._open),
            "works": len(self.works),
        }
        for one in self.nodes:
            counts[f"leased of {one.name}"] = one.leased + len(one.leases)
        for account in all_accounts(self.meter.book):
            counts[account.subject] = account.running + account.open + account.reserved_tokens
        for edge in self.edges:
            session, scheduler = edge.session, edge.services.scheduler
            counts[f"held for {session.name}"] = (
                len(session.requests) + len(session._leases) + len(session._asks)
            )
            if edge.alive:
                counts[f"held at {session.name}"] = len(edge.tasks) + sum(
                    len(cast("dict[object, object]", getattr(scheduler, name)))
                    for name in ("_waiting", "_asked_by", "_held", "_questions")
                )
                counts[f"open at {session.name}"] = len(edge.services.requests.open)
                counts[f"unsettled at {session.name}"] = scheduler._unsettled
        return {name: count for name, count in counts.items() if count}

    def is_empty(self) -> bool:
        return not self.left()
