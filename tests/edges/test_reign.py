"""Brains that reign in turns over one edge and the same nodes: what runs goes on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app.edge import request_handler
from gateway.callers.keys import hash_key
from gateway.cluster.fencing import SETTLE_SECONDS, Fence, Session, Sharers, Tenure, Term
from gateway.edges.brain import GRACE_SECONDS, Brain
from gateway.edges.edge import EdgeServices
from gateway.edges.reign import Reign
from gateway.events import EdgeLost, RequestRecord
from tests.callers.build import all_accounts
from tests.edges.edge_beside import a_brain, serving
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.known import known
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

    async def lead(self, member: Member) -> Reign:
        self.epoch += 1
        fleet = member.running.gateway.fleet
        slots = {node.name: node.slots_total for node in fleet.nodes.values()}
        tenure = Tenure(self.epoch, now(), [Sharers(1, ("m",))], slots)
        reign = Reign("m", self.epoch, tenure, lambda: True, now, now(), fleet)
        member.brain.begin(reign)
        member.control = asyncio.create_task(self._talk(reign))
        await self.relink(member)
        return reign

    async def depose(self, member: Member) -> None:
        known(member.control).cancel()
        await member.brain.end()

    async def relink(self, member: Member) -> None:
        ours, theirs = socket.socketpair()
        await member.brain.connect(ours, EDGE)
        self.services.relink(theirs)

    async def _talk(self, reign: Reign) -> None:
        """The control link between the edge's member and the leader."""
        tenure = reign.rules
        assert isinstance(tenure, Tenure)
        assert self.fence.greet(reign.epoch)
        session = Session("m", "p1", self.fence.session)
        tenure.begins(session, [EDGE], now())
        while True:
            if tenure.has(session):
                term = known(tenure.tell("m", now(), now() + TERM))
                assert self.fence.told(reign.epoch, term, asked_at=now(), now=now())
                assert tenure.confirmed(session, self.fence.seen, now())
            await asyncio.sleep(0.25)

    def ask(self, path: str = CHAT, **body: Any) -> asyncio.Task[httpx.Response]:
        value = {"messages": [{"role": "user", "content": "say it"}], "stream": True, **body}
        headers = {"authorization": f"Bearer {KEY}"}
        return asyncio.create_task(self.client.post(path, json=value, headers=headers))


def a_folder(where: Path, name: str) -> Path:
    made = where / name
    made.mkdir()
    return made


@contextlib.asynccontextmanager
async def a_member(folder: Path, nodes: list[Any]) -> AsyncIterator[Member]:
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
        first = await stack.enter_async_context(a_member(a_folder(folder, "a"), list(nodes)))
        urls = [node.url for node in nodes]
        second = await stack.enter_async_context(a_member(a_folder(folder, "b"), urls))
        services = EdgeServices(EDGE, clustered=True, clock=now)
        cluster = Cluster([first, second], services, Fence("m", lambda _: 2))
        await cluster.lead(first)
        await services.wait_ready(10.0)
        handler = request_handler(services, services.settings)
        cluster.client = await stack.enter_async_context(serving(services, handler))
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
