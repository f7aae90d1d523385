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

from gateway.callers.ledger import UsageRow
from gateway.config.settings import Settings
from gateway.edges.brain import EdgeSession
from gateway.edges.edge import EdgeServices
from gateway.edges.messages import VERSION, Hello
from gateway.events import EdgeLost, EventBus, RequestRecord, call_later
from gateway.lease import GrantedLease
from gateway.nodes.node import LeasePhase
from gateway.transport.link import EdgeLink
from tests.edges.played import Pace, PlayedRequests, Work, a_bare_brain, a_played_node, held_by
from tests.schedule.build import a_scheduler
from tests.virtual import now

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
    tasks: set[asyncio.Task[str]] = field(default_factory=set)
    alive: bool = True


class Simulation(PlayedRequests):
    """One seed's world."""

    pace = Pace((0.01,), 0.05, 0.1, 0.1, 4, 0.02, gives_up=0.5)

    def __init__(
        self, seed: int, *, slots: tuple[int, ...] = (1, 2), latency: float = 0.02
    ) -> None:
        super().__init__(random.Random(seed))
        self.latency = latency
        self.nodes = [a_played_node(*of) for of in zip("abcd", slots, strict=False)]
        self.bus = EventBus(call_later)
        self.scheduler = a_scheduler(*self.nodes, clock=now)
        total = {"concurrency": 1000, "tpm": 10**9}
        settings = Settings.model_validate({"limits": {"total": total}})
        self.rows: list[UsageRow] = []
        self.brain = a_bare_brain(self.scheduler, settings, self.bus, add_row=self.rows.append)
        self.edges: list[SimulatedEdge] = []
        self.records: Counter[str] = Counter()
        self.reasons: Counter[str | None] = Counter()
        self.bus.subscribe(RequestRecord, self._recorded)
        self.leases: dict[int, object] = {}
        """Of each id the scheduler's own lease, which must be the only one of that id."""
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
        self.dead.add(edge.services)
        edge.wire.break_off()
        link = edge.services.link
        link._stop()
        for task in edge.tasks:
            task.cancel()

    # What a request does.

    def begin(self, edge: SimulatedEdge) -> None:
        """A request comes to this edge."""
        id_ = f"req_{next(self._numbers)}"
        task = asyncio.create_task(self.play(edge.services, id_))
        edge.tasks.add(task)
        task.add_done_callback(edge.tasks.discard)

    def leave(self, edge: SimulatedEdge) -> None:
        """The client of some request of this edge leaves."""
        tasks = sorted(edge.tasks, key=lambda task: task.get_name())
        if tasks:
            self.rng.choice(tasks).cancel()

    def written(self, services: EdgeServices, lease: GrantedLease, id_: str) -> None:
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
        counts = {**held_by(self.brain), "works": len(self.works)}
        for edge in self.edges:
            session, scheduler = edge.session, edge.services.scheduler
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
