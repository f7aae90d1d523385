"""Links are cut and replaced at random moments: no lease and no record is lost or counted twice."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from gateway.edges import messages
from gateway.edges.edge import EdgeServices
from gateway.events import RequestRecord
from gateway.lease import GrantedLease
from tests.edges.fake_brain import Ledger, StrictBrain, a_clustered_edge
from tests.edges.played import Pace, PlayedRequests
from tests.virtual import in_virtual_time, now

SEEDS = range(12)
SLOTS = 6


@dataclass(slots=True, eq=False)
class Script(PlayedRequests):
    """One seed's story of an edge under one brain after the other."""

    pace = Pace((0.0, 0.1, 1.5), 0.2, 0.3, 0.3, 4, 0.1, resumed=0.2)
    services: EdgeServices
    brain: StrictBrain
    ledger: Ledger
    brains: list[StrictBrain] = field(default_factory=list)
    tasks: dict[str, asyncio.Task[str]] = field(default_factory=dict)
    charged: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """For each request the leases that its row is to be charged for."""
    sent: set[int] = field(default_factory=set)  # leases under which a request was written

    def begin(self) -> None:
        """A request comes."""
        id_ = f"req_{len(self.tasks)}"
        self.tasks[id_] = asyncio.create_task(self.play(self.services, id_))

    def leave(self) -> None:
        """The client of some request leaves."""
        running = [task for task in self.tasks.values() if not task.done()]
        if running:
            self.rng.choice(running).cancel()

    async def replace_brain(self) -> None:
        """The brain is gone, or another one leads though its link still holds."""
        if self.rng.random() < 0.7:
            self.brain.book(self.rng.randrange(5))  # which the edge does not hear
            self.brain.cut()
            await asyncio.sleep(self.rng.random() * 0.5)
        self.brain = StrictBrain(self.brain.epoch + 1, SLOTS, self.ledger)
        self.brains.append(self.brain)
        await self.brain.link_to(self.services)

    def written(self, services: EdgeServices, lease: GrantedLease, id_: str) -> None:
        assert lease.id not in self.sent, "one lease, two requests"
        self.sent.add(lease.id)
        assert services.uplink.is_open, "a request is written though there is no brain"
        assert self.brain.leases.get(lease.id) == id_, "nor does this brain know of it"

    def used(self, lease: GrantedLease, id_: str) -> None:
        self.charged[id_].add(lease.id)

    async def run(self, seconds: float) -> None:
        """Random things happen for so long."""
        rng, ends = self.rng, now() + seconds
        while now() < ends:
            await asyncio.sleep(rng.expovariate(30.0))
            await self.go_on()
            what = rng.random()
            if what < 0.3:
                self.begin()
            elif what < 0.36:
                self.leave()
            elif what < 0.45:
                self.brain.book(rng.randrange(5))
            elif what < 0.47:
                self.services.meter.turned(RequestRecord("x", "/", request_id="turned"))
            elif what < 0.50:
                await self.replace_brain()

    async def go_on(self) -> None:
        """The brain grants what it can."""
        if not self.brain.link.lost:
            for _ in self.brain.work():
                pass

    async def come_to_rest(self) -> None:
        """Let all requests end, and all records be booked."""
        await self.replace_brain()
        async with asyncio.timeout(60.0):
            while self.services.requests.open or not self.services.requests.are_booked:
                await asyncio.sleep(0.05)
                await self.go_on()
                self.brain.book(10)


@pytest.mark.parametrize("seed", SEEDS)
@in_virtual_time
async def test_nothing_is_lost_or_doubled_whenever_links_are_replaced(seed: int) -> None:
    ledger = Ledger()
    brain = StrictBrain(1, SLOTS, ledger)
    services = await a_clustered_edge(brain)
    script = Script(random.Random(seed), services, brain, ledger, [brain])
    await script.run(20.0)
    await script.come_to_rest()
    await asyncio.gather(*script.tasks.values(), return_exceptions=True)
    assert [one.broken for one in script.brains if one.broken] == []
    assert ledger.rows == {id_: frozenset(script.charged[id_]) for id_ in script.begun}
    assert len(script.brains) > 5
    assert (script.brain.requests, script.brain.leases, script.brain.ended) == ({}, {}, {})
    held = services.scheduler
    assert not any((held._waiting, held._asked_by, held._held, held._questions, held._unsettled))
    # The seeds do meet what this is about.
    assert sum(len(one.all(messages.CarriedLease)) for one in script.brains) > 5
    assert script.stopped
    assert ledger.told_again
    await services.aclose()
