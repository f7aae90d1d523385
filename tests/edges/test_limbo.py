"""What an edge asks its brain and tells it, and how all goes on between two brains.

The edge is real, and so are the links; a brain does what the test says.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from msgspec.json import encode
from msgspec.structs import replace

from gateway import errors
from gateway.callers.keys import AnonymousAccess
from gateway.callers.limits import Reservation
from gateway.edges import carried, messages
from gateway.edges.edge import EXCUSE_SECONDS, GREETED_SECONDS, EdgeServices
from gateway.errors import GatewayError
from gateway.events import RequestRecord
from gateway.lease import (
    NOTHING_TRIED,
    AttemptReport,
    ExpectedReading,
    GrantedLease,
    QueuePosition,
    Tried,
    Usage,
    UsageReport,
)
from gateway.terms import Caller, Priority
from gateway.transport.link import EdgeLink
from gateway.transport.pool import ConnectionPool
from tests.forward.granted_lease import a_node_info
from tests.gateways import until
from tests.lease_requests import a_lease_request
from tests.virtual import in_virtual_time, now

M = TypeVar("M")
ROUTE = messages.NodeRoute("127.0.0.1", 9, b"", b"host: x\r\n", None, None, 1)


def a_key(id_: str) -> messages.KeyOnWire:
    return messages.KeyOnWire(
        id_, id_, id_.encode() * 8, Priority.NORMAL, Priority.NORMAL, None, False, None,
        (None, None, None), None, None, None,
    )  # fmt: skip


CALLER = Caller("anonymous:1.2.3.4", "anonymous", Priority.NORMAL, anonymous=True)


class FakeBrain:
    """Greets, and notes what it is told; grants, adopts and books when it is called for that."""

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.keys: tuple[messages.KeyOnWire, ...] = ()
        self.told: list[Any] = []
        self.lost: list[str] = []
        self.greets = True
        self.link: EdgeLink
        self._lease_ids = itertools.count(epoch << 33)

    async def link_to(self, services: EdgeServices) -> None:
        ours, theirs = socket.socketpair()
        self.link = EdgeLink(messages.ToBrain, self.receive, self.lost.append, now)
        await EdgeLink.over(ours, self.link)
        services.relink(theirs)

    async def lead(self, services: EdgeServices) -> None:
        """The same, and wait until it has told all that it carries."""
        await self.link_to(services)
        await until(lambda: self.all(messages.Carried))

    def cut(self) -> None:
        assert self.link._transport is not None
        self.link._transport.abort()

    def receive(self, message: Any) -> None:
        self.told.append(message)
        if isinstance(message, messages.Hello) and self.greets:
            tell = self.link.tell
            of_all = b"{}", b"k" * 32, True, 1, self.epoch, 1.0
            tell(messages.Configuration(messages.VERSION, *of_all))
            tell(messages.Keys(self.keys, (), True, AnonymousAccess(), last=True))
            tell(messages.NO_MODELS)
            tell(messages.NodeMet(a_node_info("a"), ROUTE))

    def all(self, kind: type[M]) -> list[M]:
        return [one for one in self.told if isinstance(one, kind)]

    async def last(self, kind: type[M], count: int = 1) -> M:
        await until(lambda: len(self.all(kind)) >= count, seen=lambda: f"{self.told}")
        return self.all(kind)[-1]

    def a_grant(self, ask: int, *, shares_pool: bool = False) -> messages.Granted:
        lease_id, reading = next(self._lease_ids), ExpectedReading(10, 1.0, 2.0)
        return messages.Granted(
            ask, lease_id, "a", "demo", "demo.gguf", True, reading, 1, None, shares_pool, None
        )

    def grant(self, ask: int, **more: bool) -> int:
        """Grant a lease for this ask; returns its id."""
        grant = self.a_grant(ask, **more)
        self.link.tell(grant)
        return grant.id


@dataclass(slots=True)
class At:
    """An edge under test, with its first brain."""

    services: EdgeServices
    brain: FakeBrain
    reservations: dict[str, Reservation] = field(default_factory=dict)
    records: dict[str, RequestRecord] = field(default_factory=dict)
    tasks: list[asyncio.Task[GrantedLease]] = field(default_factory=list)

    def ask(
        self, id_: str = "req_1", tried: Tried = NOTHING_TRIED, **fields: Any
    ) -> asyncio.Task[GrantedLease]:
        services, came_at = self.services, now()
        request = a_lease_request(id_, caller=CALLER.id, **fields)
        if id_ not in self.records:
            record = self.records[id_] = RequestRecord(id_, "/v1/chat/completions", "demo")
            record.request_id = id_
            accounts = services.meter.book.accounts(CALLER)
            self.reservations[id_] = services.meter.admit(accounts, request, record)
        waits = services.scheduler.wait_for_lease(request, tried, now() - came_at)
        self.tasks.append(asyncio.create_task(waits))
        return self.tasks[-1]

    async def granted(self, id_: str = "req_1", *, starts: bool = True, **more: bool) -> int:
        before = len(self.brain.all(messages.AskLease))
        asking = self.ask(id_)
        lease_id = self.brain.grant(
            (await self.brain.last(messages.AskLease, before + 1)).ask, **more
        )
        assert (await asking).id == lease_id
        if starts:
            assert self.services.scheduler.may_start(lease_id)
        return lease_id

    def ends(self, lease_id: int, id_: str = "req_1") -> None:
        scheduler = self.services.scheduler
        scheduler.ended(AttemptReport(lease_id, "ok", 200, True, True, True))
        usage = Usage(100, 20, 50)
        scheduler.settle(UsageReport(lease_id, usage, usage, 50), a_lease_request(id_))
        self.finishes(id_)

    def finishes(self, id_: str = "req_1") -> None:
        self.just_ended(id_)
        self.services.bus.flush()

    def just_ended(self, id_: str = "req_1") -> None:
        """Its response has ended, and is accounted for soon."""
        self.services.meter.ended(self.reservations[id_], self.records[id_])

    async def lose(self) -> None:
        self.brain.cut()
        await until(lambda: not self.services.uplink.is_open)

    async def next_brain(self, epoch: int = 2) -> FakeBrain:
        brain = FakeBrain(epoch)
        await brain.lead(self.services)
        return brain


@asynccontextmanager
async def an_edge() -> AsyncIterator[At]:
    at = At(EdgeServices("gw-a/edge-1", clustered=True, clock=now), FakeBrain())
    services = at.services
    await at.brain.lead(services)
    await services.wait_ready(10.0)
    await asyncio.sleep(0)
    try:
        yield at
    finally:
        for task in at.tasks:
            task.cancel()
        await asyncio.gather(*at.tasks, return_exceptions=True)
        await services.aclose()


@in_virtual_time
async def test_an_edge_waits_for_its_first_brain_as_long_as_it_takes() -> None:
    services = EdgeServices("gw-a/edge-1", clustered=True, clock=now)
    ready = asyncio.create_task(services.wait_ready())
    await asyncio.sleep(1000.0)
    assert not ready.done()
    brain = FakeBrain()
    await brain.lead(services)
    await ready
    hello = brain.told[0]
    assert (hello.name, hello.epoch) == ("gw-a/edge-1", 0)
    assert brain.told[1:] == brain.all(messages.Carried)
    await services.aclose()
    await until(lambda: brain.lost)
    assert isinstance(brain.told[-1], messages.Leaving)


# Under one brain.


@pytest.mark.parametrize("granted", [True, False])
@in_virtual_time
async def test_a_lease_that_comes_as_or_after_the_client_leaves_is_given_back_once(
    granted: bool,
) -> None:
    async with an_edge() as at:
        told, asking = len(at.brain.told), at.ask()
        grant = at.brain.a_grant((await at.brain.last(messages.AskLease)).ask)
        if granted:
            at.services.scheduler.granted(grant)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        if not granted:
            at.services.scheduler.granted(grant)
        given_back = await at.brain.last(messages.GiveBack)
        assert (given_back.lease_id, given_back.late) == (grant.id, False)
        kinds = [type(one) for one in at.brain.told[told:]]
        withdrawn = [] if granted else [messages.Withdraw]
        assert kinds == [messages.AskLease, *withdrawn, messages.GiveBack]


@in_virtual_time
async def test_a_request_that_is_ended_or_shed_while_it_waits_withdraws_its_question() -> None:
    async with an_edge() as at:
        scheduler, error = at.services.scheduler, errors.superseded()
        asking = at.ask()
        await at.brain.last(messages.AskLease)
        assert not scheduler.refuse("another", error)
        assert scheduler.refuse("req_1", error)
        with pytest.raises(GatewayError):
            await asking
        await at.brain.last(messages.Withdraw)
        assert not scheduler.refuse("req_1", error)
        # Only what has not been at a node is shed.
        at.ask("retried", Tried(failed_nodes=frozenset({"a"})))
        at.ask("part.1", admitted=True)
        at.ask("fresh")
        await at.brain.last(messages.AskLease, 4)
        shed = [scheduler.shed(id_, error) for id_ in ("retried", "part.1", "fresh", "gone")]
        assert shed == [False, False, True, False]


@in_virtual_time
async def test_whether_silence_is_excused_is_asked_and_holds_for_a_while() -> None:
    async with an_edge() as at:
        lease_id = await at.granted()

        def excused() -> bool | None:
            return at.services.scheduler.is_silence_excused(lease_id)

        for count, answer in ((1, True), (2, False)):
            assert (excused(), excused()) == (None, None)
            asked = await at.brain.last(messages.AskExcused, count)
            at.brain.link.tell(messages.NodeAnswer(asked.ask, answer))
            await until(lambda: excused() is not None)
            assert excused() is answer
            assert len(at.brain.all(messages.AskExcused)) == count
            await asyncio.sleep(EXCUSE_SECONDS)


@in_virtual_time
async def test_a_full_pool_is_believed_of_a_node_that_has_more_work() -> None:
    async with an_edge() as at:
        scheduler = at.services.scheduler
        first = await at.granted("one")
        assert not scheduler.pool_overflowed(first)
        assert (await at.brain.last(messages.LeaseNews)).what == "pool_overflowed"
        second = await at.granted("two")
        assert scheduler.pool_overflowed(first)
        scheduler.ended(AttemptReport(second, "ok", 200, True, True, False))
        assert not scheduler.pool_overflowed(first)
        assert scheduler.pool_overflowed(await at.granted("three", shares_pool=True))


@in_virtual_time
async def test_connections_to_a_node_are_kept_until_its_route_changes() -> None:
    async with an_edge() as at:
        nodes = at.services._nodes

        def connections(route: messages.NodeRoute, **more: Any) -> ConnectionPool:
            nodes.meet(messages.NodeMet(a_node_info("a", **more), route))
            found = nodes.by_name["a"].connections
            assert isinstance(found, ConnectionPool)
            return found

        before = nodes.by_name["a"].connections
        assert connections(ROUTE, context=512) is before
        after = connections(replace(ROUTE, version=2))
        assert (before.closed, after.closed) == (True, False)
        nodes.forget("a")
        assert after.closed
        # A node whose TLS files are gone is met all the same.
        without_files = connections(replace(ROUTE, tls={"ca": "/nowhere/ca.pem"}))
        assert without_files.address.tls is not None


# What waits.


@in_virtual_time
async def test_what_waits_is_asked_for_anew_with_its_whole_age_and_not_admitted_twice() -> None:
    async with an_edge() as at:
        asking = at.ask()
        first = await at.brain.last(messages.AskLease)
        assert first.opening is not None
        await asyncio.sleep(3.0)
        await at.lose()
        await asyncio.sleep(4.0)
        assert not asking.done()
        brain = await at.next_brain()
        again = await brain.last(messages.AskLease)
        assert (again.request.id, again.opening, round(again.age)) == ("req_1", None, 7)
        (carried_request,) = brain.all(messages.CarriedRequest)
        assert carried_request.opening.id == "req_1"
        assert carried_request.opening.request is not None
        assert encode(carried_request.opening.request) == encode(first.request)
        assert round(carried_request.opening.age) == 7
        assert not carried_request.released
        brain.grant(again.ask)
        assert (await asking).node.name == "a"


@in_virtual_time
async def test_nobody_waits_in_limbo_for_longer_than_in_the_queue() -> None:
    async with an_edge() as at:
        await at.lose()
        limited, patient = at.ask("limited", time_limit=20.0), at.ask("patient")
        began = now()
        with pytest.raises(GatewayError) as refused:
            await limited
        assert refused.value.code == "queue_timeout"
        assert 20.0 <= now() - began < 20.5
        with pytest.raises(GatewayError):
            await patient
        assert 300.0 <= now() - began < 300.5


@in_virtual_time
async def test_what_was_asked_about_nodes_and_the_queue_is_asked_again() -> None:
    async with an_edge() as at:
        scheduler = at.services.scheduler
        asking = asyncio.create_task(
            scheduler.ask_nodes("has_other_node", a_lease_request(), NOTHING_TRIED)
        )
        at.ask()
        await at.brain.last(messages.AskNodes)
        await at.lose()
        # Its client got the head of a response: it keeps its place.
        scheduler.keep_in_queue("req_1")
        assert scheduler.queue_position("req_1") is None
        await asyncio.sleep(60.0)
        brain = await at.next_brain()
        assert (await brain.last(messages.AskLease)).response_started
        assert scheduler.queue_position("req_1") is None
        position = await brain.last(messages.AskPosition)
        brain.link.tell(messages.Position(position.request_id, QueuePosition("req_1", 3, 1.0)))
        await until(lambda: scheduler.queue_position("req_1") is not None)
        assert not asking.done()
        asked = await brain.last(messages.AskNodes)
        brain.link.tell(messages.NodeAnswer(asked.ask, True))
        assert await asking


# What runs.


@in_virtual_time
async def test_what_runs_goes_on_and_the_next_brain_is_told_how_it_stands() -> None:
    async with an_edge() as at:
        scheduler = at.services.scheduler
        lease_id = await at.granted()
        scheduler.reading_began(lease_id)
        await at.brain.last(messages.LeaseNews)
        await at.lose()
        scheduler.content_began(lease_id)
        scheduler.content_went_on(lease_id, 30)
        assert scheduler.is_silence_excused(lease_id) is None
        await asyncio.sleep(5.0)
        brain = await at.next_brain()
        (lease,) = brain.all(messages.CarriedLease)
        assert (lease.lease_id, lease.node, lease.phase, lease.tokens, round(lease.age)) == (
            lease_id, "a", "content", 30, 5,
        )  # fmt: skip
        assert lease.request.id == "req_1"
        assert scheduler.is_silence_excused(lease_id) is None
        await brain.last(messages.AskExcused)
        at.ends(lease_id)
        await brain.last(messages.Finished)
        assert [type(one) for one in brain.told[-4:]] == [
            AttemptReport, UsageReport, messages.Released, messages.Finished
        ]  # fmt: skip


@in_virtual_time
async def test_what_ends_in_limbo_is_told_once_to_the_next_brain() -> None:
    async with an_edge() as at:
        lease_id = await at.granted()
        failed = await at.granted("req_2")
        await at.lose()
        await asyncio.sleep(2.0)
        at.ends(lease_id)
        report = AttemptReport(failed, "reset", 0, True, False, False)
        at.services.scheduler.ended(report)
        await asyncio.sleep(2.0)
        brain = await at.next_brain()
        await brain.last(messages.Finished)
        (lease,) = brain.all(messages.CarriedLease)
        assert (lease.lease_id, lease.phase, round(lease.age)) == (lease_id, "ended", 2)
        assert [one.lease_id for one in brain.all(UsageReport)] == [lease_id]
        released = {one.opening.id: one.released for one in brain.all(messages.CarriedRequest)}
        assert released == {"req_1": True, "req_2": False}
        assert brain.all(AttemptReport) == []
        last = [type(one) for one in brain.told[-3:]]
        assert last == [messages.Carried, UsageReport, messages.Finished]


@in_virtual_time
async def test_a_record_is_told_to_each_brain_until_one_has_booked_it() -> None:
    async with an_edge() as at:
        at.ends(await at.granted())
        at.ends(await at.granted("req_2"), "req_2")
        await at.brain.last(messages.Finished, 2)
        at.brain.link.tell(messages.Booked(1))
        await until(lambda: set(at.services.requests.open) == {"req_2"})
        await at.lose()
        # An edge that ends in limbo waits for that.
        waits = asyncio.create_task(at.services.wait_booked(10.0))
        await asyncio.sleep(4.0)
        brain = await at.next_brain()
        assert (await brain.last(messages.Finished)).record.request_id == "req_2"
        (lease,) = brain.all(messages.CarriedLease)
        assert (lease.request.id, lease.phase) == ("req_2", "ended")
        assert not waits.done()
        brain.link.tell(messages.Booked(1))
        await waits
        assert at.services.requests.are_booked
        brain.cut()
        last = await at.next_brain(3)
        assert last.told[1:] == last.all(messages.Carried)
        assert at.services.requests.open == {}


@in_virtual_time
async def test_what_was_discarded_is_not_charged_by_the_next_brain() -> None:
    async with an_edge() as at:
        lease_id = await at.granted()
        scheduler, usage = at.services.scheduler, Usage(100, 20, 50)
        scheduler.ended(AttemptReport(lease_id, "reset", 200, True, False, True))
        scheduler.settle(UsageReport(lease_id, usage, None, 50), a_lease_request())
        scheduler.discard("req_1")
        await at.lose()
        brain = await at.next_brain()
        assert brain.all(messages.CarriedLease) == []
        assert len(brain.all(messages.CarriedRequest)) == 1


@in_virtual_time
async def test_records_that_nobody_books_are_kept_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(carried, "MOST_UNBOOKED", 3)
    async with an_edge() as at:
        await at.lose()
        for number in range(5):
            record = RequestRecord("x", "/v1/models", request_id=f"turned_{number}")
            at.services.meter.turned(record)
            asking = at.ask(f"req_{number}")
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            at.finishes(f"req_{number}")
        requests = at.services.requests
        assert requests.dropped == 4
        assert set(requests.open) == {"req_2", "req_3", "req_4"}
        brain = await at.next_brain()
        await brain.last(messages.Turned, 3)
        ids = [one.record.request_id for one in brain.all(messages.Finished)]
        assert ids == ["req_2", "req_3", "req_4"]
        assert [one.record.request_id for one in brain.all(messages.Turned)] == [
            "turned_2", "turned_3", "turned_4"
        ]  # fmt: skip


@in_virtual_time
async def test_much_is_carried_in_short_steps_and_what_is_told_meanwhile_comes_behind() -> None:
    async with an_edge() as at:
        await at.lose()
        for number in range(1001):
            at.ask(f"req_{number}")
        await asyncio.sleep(0.01)
        brain = FakeBrain(2)
        await brain.link_to(at.services)
        while not at.services.uplink.is_open:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        assert at.services.uplink.tell != at.services.link.tell
        at.tasks[-1].cancel()  # Its turn has not come.
        at.ask("late")
        await brain.last(messages.AskLease, 1001)
        await asyncio.sleep(1.0)
        ids = [one.request.id for one in brain.all(messages.AskLease)]
        assert ids == [*(f"req_{number}" for number in range(1000)), "late"]
        assert at.services.uplink.tell == at.services.link.tell


# The fence.


@in_virtual_time
async def test_a_lease_that_became_old_before_its_request_was_written_is_given_back() -> None:
    async with an_edge() as at:
        scheduler = at.services.scheduler
        lease_id = await at.granted(starts=False)
        await asyncio.sleep(1.5)
        assert not scheduler.may_start(lease_id)
        given_back = await at.brain.last(messages.GiveBack)
        assert (given_back.lease_id, given_back.late) == (lease_id, True)
        told = len(at.brain.told)
        scheduler.ended(AttemptReport(lease_id, "late", 0, False, True, False))
        assert not scheduler.may_start(lease_id)
        at.finishes()
        await at.brain.last(messages.Finished)
        assert [type(one) for one in at.brain.told[told:]] == [messages.Released, messages.Finished]


# Which brain.


@in_virtual_time
async def test_a_brain_of_an_earlier_epoch_is_refused_and_told_nothing() -> None:
    async with an_edge() as at:
        await at.lose()
        leader = await at.next_brain(7)
        at.ask()
        await leader.last(messages.AskLease)
        leader.cut()
        old = FakeBrain(6)
        await old.link_to(at.services)
        await until(lambda: old.lost)
        (hello,) = old.told
        assert hello.epoch == 7
        assert not at.services.uplink.is_open
        brain = await at.next_brain(7)
        await brain.last(messages.AskLease)


@pytest.mark.parametrize("answers", [True, False])
@in_virtual_time
async def test_a_brain_of_another_version_or_without_an_answer_is_told_nothing(
    answers: bool,
) -> None:
    async with an_edge() as at:
        await at.lose()
        other = FakeBrain(2)
        other.greets = False
        began = now()
        await other.link_to(at.services)
        await other.last(messages.Hello)
        at.ask()
        at.services.meter.turned(RequestRecord("x", "/v1/models", request_id="turned"))
        if answers:
            newer = messages.VERSION + 1
            other.link.tell(messages.Configuration(newer, b"{}", b"k" * 32, True, 1, 2, 1.0))
        await until(lambda: other.lost)
        assert other.told == other.all(messages.Hello)
        assert at.services.epoch == 1
        assert answers or GREETED_SECONDS < now() - began < GREETED_SECONDS + 1.0


@in_virtual_time
async def test_keys_and_nodes_are_those_of_the_new_brain() -> None:
    async with an_edge() as at:
        ring, nodes = at.services.key_ring, at.services._nodes.by_name
        old = messages.Keys((a_key("old"),), (), True, ring.access, last=True)
        at.brain.link.tell(old)
        await until(lambda: ring.caller("old") is not None)
        await at.granted()
        before = nodes["a"].connections
        brain = FakeBrain(2)
        brain.keys = (a_key("new"),)
        await brain.lead(at.services)
        await until(lambda: ring.caller("new") is not None)
        assert ring.caller("old") is None
        await until(lambda: "a" in nodes)
        assert nodes["a"].connections is not before
