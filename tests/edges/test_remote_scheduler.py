"""What an edge asks its brain and tells it: each answer comes when the test says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from gateway import errors
from gateway.edges import messages
from gateway.edges.carried import EdgeRequests
from gateway.edges.edge import EXCUSE_SECONDS, Nodes, RemoteScheduler
from gateway.errors import GatewayError
from gateway.events import EventBus
from gateway.lease import (
    NOTHING_TRIED,
    AttemptReport,
    ExpectedReading,
    GrantedLease,
    Tried,
)
from gateway.transport.connection import TurnLimit
from gateway.transport.pool import ConnectionPool
from gateway.transport.resolver import Resolver
from tests.forward.granted_lease import a_node_info
from tests.lease_requests import a_lease_request
from tests.nodes.build import Clock

ROUTE = messages.NodeRoute("127.0.0.1", 9, b"", b"host: x\r\n", None, None, 1)


class Told:
    """In place of an uplink and its link: what was told, the last last."""

    def __init__(self) -> None:
        self.link = self
        self.all: list[Any] = []
        self.age = 0.0
        self.is_open = True

    def tell(self, message: Any) -> None:
        self.all.append(message)

    def postpone(self) -> None:
        pass

    def last(self, kind: type[Any]) -> Any:
        return next(one for one in reversed(self.all) if isinstance(one, kind))


class World:
    def __init__(self) -> None:
        self.clock, self.link = Clock(), Told()
        self.nodes = Nodes(Resolver(), TurnLimit())
        link: Any = self.link
        requests = EdgeRequests(link, clustered=False)
        self.scheduler = RemoteScheduler(link, self.nodes, EventBus(), self.clock, requests)
        self.nodes.meet(messages.NodeMet(a_node_info("a"), ROUTE))
        self._ids = iter(range(1, 1000))

    async def ask(self, id_: str = "req_1", tried: Tried = NOTHING_TRIED, **fields: Any) -> Any:
        request = a_lease_request(id_, **fields)
        task = asyncio.create_task(self.scheduler.wait_for_lease(request, tried, 1.5))
        await asyncio.sleep(0)
        return task

    def grant(self, *, shares_pool: bool = False) -> int:
        """Answer the last question for a lease with one; returns its id."""
        id_ = next(self._ids)
        ask = self.link.last(messages.AskLease).ask
        reading = ExpectedReading(10, 1.0, 2.0)
        self.scheduler.granted(
            messages.Granted(
                ask, id_, "a", "demo", "demo.gguf", True, reading, 1, None, shares_pool, None
            )
        )
        return id_

    async def lease(self, id_: str = "req_1", *, shares_pool: bool = False) -> GrantedLease:
        task = await self.ask(id_)
        self.grant(shares_pool=shares_pool)
        lease: GrantedLease = await task
        return lease


@pytest.mark.parametrize("granted", [True, False])
async def test_a_lease_that_comes_as_or_after_the_client_leaves_is_given_back_once(
    granted: bool,
) -> None:
    world = World()
    task = await world.ask()
    if granted:
        world.grant()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if not granted:
        world.grant()
    kinds = [type(one).__name__ for one in world.link.all]
    assert kinds == ["AskLease", *([] if granted else ["Withdraw"]), "GiveBack"]
    given_back = world.link.last(messages.GiveBack)
    assert (given_back.lease_id, given_back.late) == (1, False)


async def test_a_request_that_is_ended_or_shed_while_it_waits_withdraws_its_question() -> None:
    world = World()
    task = await world.ask()
    error = errors.superseded()
    assert not world.scheduler.refuse("another", error)
    assert world.scheduler.refuse("req_1", error)
    with pytest.raises(GatewayError):
        await task
    assert isinstance(world.link.all[-1], messages.Withdraw)
    assert not world.scheduler.refuse("req_1", error)
    # Only what has not been at a node is shed.
    tasks = [
        await world.ask("retried", Tried(failed_nodes=frozenset({"a"}))),
        await world.ask("part.1", admitted=True),
        await world.ask("fresh"),
    ]
    shed = [world.scheduler.shed(id_, error) for id_ in ("retried", "part.1", "fresh", "gone")]
    assert shed == [False, False, True, False]
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_whether_silence_is_excused_is_asked_and_holds_for_a_while() -> None:
    world = World()
    lease = await world.lease()
    scheduler = world.scheduler
    assert scheduler.is_silence_excused(lease.id) is None
    assert scheduler.is_silence_excused(lease.id) is None
    asked = [one for one in world.link.all if isinstance(one, messages.AskExcused)]
    assert len(asked) == 1
    scheduler.answered_question(messages.NodeAnswer(asked[0].ask, True))
    assert scheduler.is_silence_excused(lease.id) is True
    world.clock.passes(EXCUSE_SECONDS)
    assert scheduler.is_silence_excused(lease.id) is None
    later = world.link.last(messages.AskExcused)
    scheduler.answered_question(messages.NodeAnswer(later.ask, False))
    assert scheduler.is_silence_excused(lease.id) is False


async def test_a_full_pool_is_believed_of_a_node_that_has_more_work() -> None:
    world = World()
    first = await world.lease("one")
    assert not world.scheduler.pool_overflowed(first.id)
    assert world.link.last(messages.LeaseNews).what == "pool_overflowed"
    second = await world.lease("two")
    assert world.scheduler.pool_overflowed(first.id)
    world.scheduler.ended(AttemptReport(second.id, "ok", 200, True, True, False))
    assert not world.scheduler.pool_overflowed(first.id)
    third = await world.lease("three", shares_pool=True)
    assert world.scheduler.pool_overflowed(third.id)


async def test_connections_to_a_node_are_kept_until_its_route_changes() -> None:
    world = World()
    lease = await world.lease()
    before = lease.node.connections
    assert isinstance(before, ConnectionPool)
    nodes = world.nodes
    nodes.meet(messages.NodeMet(a_node_info("a", context=512), ROUTE))
    assert nodes.by_name["a"].connections is before
    nodes.meet(messages.NodeMet(a_node_info("a"), replace(ROUTE, version=2)))
    after = nodes.by_name["a"].connections
    assert before.closed
    assert isinstance(after, ConnectionPool)
    assert not after.closed
    nodes.forget("a")
    assert after.closed


async def test_a_node_whose_tls_files_are_gone_is_met_all_the_same() -> None:
    world = World()
    tls = {"ca": "/nowhere/ca.pem"}
    world.nodes.meet(messages.NodeMet(a_node_info("b"), replace(ROUTE, tls=tls)))
    found = world.nodes.by_name["b"].connections
    assert isinstance(found, ConnectionPool)
    assert found.address.tls is not None
