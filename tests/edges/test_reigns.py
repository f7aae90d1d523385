"""Links are cut and replaced at random moments: no lease and no record is lost or counted twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from gateway.edges import messages
from gateway.edges.edge import EdgeServices
from gateway.errors import GatewayError
from gateway.events import RequestRecord
from gateway.lease import NOTHING_TRIED, AttemptReport, GrantedLease, Usage, UsageReport
from gateway.terms import Caller, Priority
from tests.edges.fake_brain import Ledger, StrictBrain, a_clustered_edge
from tests.lease_requests import a_lease_request
from tests.virtual import in_virtual_time, now

CALLER = Caller("anonymous:1.2.3.4", "anonymous", Priority.NORMAL, anonymous=True)
SEEDS = range(12)
SLOTS = 6


@dataclass(slots=True, eq=False)
class Script:
    """One seed's story of an edge under one brain after the other."""

    rng: random.Random
    services: EdgeServices
    brain: StrictBrain
    ledger: Ledger
    brains: list[StrictBrain] = field(default_factory=list)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    answers: Counter[str] = field(default_factory=Counter)
    charged: dict[str, set[int]] = field(default_factory=dict)
    """For each request the leases that its row is to be charged for."""
    sent: set[int] = field(default_factory=set)  # leases under which a request was written
    stopped: int = 0  # times that a lease was void when a request was to be written

    def begin(self) -> None:
        """A request comes."""
        id_ = f"req_{len(self.tasks)}"
        self.tasks[id_] = asyncio.create_task(self._request(id_))

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

    async def _request(self, id_: str) -> None:
        services, rng = self.services, self.rng
        record = RequestRecord(id_, "/v1/chat/completions", "demo", request_id=id_)
        request = a_lease_request(id_, caller=CALLER.id, stream=True)
        accounts, came_at, tried = services.meter.book.accounts(CALLER), now(), NOTHING_TRIED
        reservation = services.meter.admit(accounts, request, record)
        self.charged[id_] = set()
        try:
            await asyncio.sleep(rng.random() * 0.01)
            while True:
                lease = await services.scheduler.wait_for_lease(request, tried, now() - came_at)
                if await self._attempt(lease, id_):
                    break
        except GatewayError as error:
            record.fail(error.status, error.code)
        except asyncio.CancelledError:
            record.fail(499, "client_closed")
        finally:
            self.answers[id_] += 1
            services.meter.ended(reservation, record.finish(came_at, now()))

    async def _attempt(self, lease: GrantedLease, id_: str) -> bool:
        """Whether it has been answered."""
        leases, rng = self.services.scheduler, self.rng
        began = sent = False
        outcome = "client_closed"
        try:
            await asyncio.sleep(rng.choice([0.0, 0.1, 1.5]) * rng.random())  # a connection is made
            if not leases.may_start(lease.id):
                self.stopped += 1
                outcome = "late"
                return False
            self._check_started(lease.id, id_)
            sent = True
            await asyncio.sleep(rng.random() * 0.2)
            if rng.random() < 0.2:
                outcome = "server_error"
                return False
            leases.reading_began(lease.id)
            await asyncio.sleep(rng.random() * 0.3)
            leases.content_began(lease.id)
            began = True
            for events in range(1, rng.randrange(1, 4)):
                await asyncio.sleep(rng.random() * 0.3)
                leases.content_went_on(lease.id, 10 * events)
            if rng.random() < 0.5:
                leases.response_received(lease.id)
            await asyncio.sleep(rng.random() * 0.1)
            outcome = "ok"
            return rng.random() < 0.8  # or it is broken off, and resumed
        finally:
            leases.ended(AttemptReport(lease.id, outcome, 200, sent, not sent, began))
            if began:
                self.charged[id_].add(lease.id)
                usage = Usage(100, 20, 50)
                report = UsageReport(lease.id, usage, usage, 50, complete=outcome == "ok")

                def settle() -> None:
                    leases.settle(report, a_lease_request(id_))

                self.services.bus.defer(settle)

    def _check_started(self, lease_id: int, id_: str) -> None:
        assert lease_id not in self.sent, "one lease, two requests"
        self.sent.add(lease_id)
        assert self.services.uplink.is_open, "a request is written though there is no brain"
        assert self.brain.leases.get(lease_id) == id_, "nor does this brain know of it"

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
    assert script.answers == Counter(list(script.tasks))
    assert ledger.rows == {id_: frozenset(leases) for id_, leases in script.charged.items()}
    assert len(script.brains) > 5
    assert (script.brain.requests, script.brain.leases, script.brain.ended) == ({}, {}, {})
    held = services.scheduler
    assert not any((held._waiting, held._asked_by, held._held, held._questions, held._unsettled))
    # The seeds do meet what this is about.
    assert sum(len(one.all(messages.CarriedLease)) for one in script.brains) > 5
    assert script.stopped
    assert ledger.told_again
    await services.aclose()
