from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import pytest

from gateway.app.edge import main
from gateway.edges import supervisor
from gateway.edges.brain import Brain
from gateway.edges.supervisor import Edges, StartProcess
from gateway.http.exchange import ConnectionOrigin
from tests.gateways import until

LIMIT = 120.0


@dataclass(slots=True)
class Sessions:
    """A brain's sessions with its edges, which end with their processes."""

    edges: int
    late_leases: int = 0
    loopback: bool = False
    lose: list[Callable[[], None]] = field(default_factory=list)
    """For each that has begun: what its link calls when it is lost."""
    told: list[str] = field(default_factory=list)  # edges whose end is no failure
    dead: list[tuple[str, int]] = field(default_factory=list)  # edges whose processes have ended

    def expect_end(self, name: str) -> None:
        self.told.append(name)

    def edge_ended(self, name: str, pid: int) -> None:
        self.dead.append((name, pid))

    async def connect(self, link: socket.socket, name: str, lost: Callable[[], None]) -> None:
        link.close()
        self.lose.append(lost)

    async def aclose(self) -> None:
        """All sessions have ended."""


@dataclass(slots=True)
class Site:
    edges: Edges
    sessions: Sessions
    adopted: list[tuple[socket.socket, ConnectionOrigin | None]] = field(default_factory=list)
    clients: list[socket.socket] = field(default_factory=list)

    def take(self, count: int) -> list[socket.socket]:
        """Accept so many connections at once; their clients' ends."""
        for _ in range(count):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            self.clients.append(ours)
            self.edges.take(theirs)
        return self.clients[-count:]

    async def client(self) -> tuple[socket.socket, int]:
        """One more client, and the process that has taken its connection."""
        await until(self.edges.has_room, LIMIT)
        (ours,) = self.take(1)
        return ours, await pid_of(ours)


def small_edge(*how: str) -> StartProcess:
    """Starts edges that behave so, one after the other; the last way goes on."""
    ways = list(how)

    async def start(name: str, channel: socket.socket) -> Process:
        way, number = ways.pop(0) if len(ways) > 1 else ways[0], channel.fileno()
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.edges.small_edge", str(number), way),
            stdin=DEVNULL,
            pass_fds=[number],
        )

    return start


@asynccontextmanager
async def brain(
    count: int,
    *how: str,
    serves: bool = True,
    clock: Callable[[], float] = time.monotonic,
    member: str | None = None,
) -> AsyncIterator[Site]:
    sessions = Sessions(count)
    adopted: list[tuple[socket.socket, ConnectionOrigin | None]] = []
    edges = Edges(
        cast("Brain", sessions),
        lambda *both: adopted.append(both),
        clock,
        small_edge(*(how or ("",))),
        member,
    )
    site = Site(edges, sessions, adopted)
    try:
        assert await edges.start(LIMIT if serves else 0.01) is serves
        yield site
    finally:
        await edges.aclose()
        for sock in (*site.clients, *(sock for sock, _ in adopted)):
            sock.close()


async def received(sock: socket.socket) -> bytes:
    """What comes next over a socket; nothing: it was closed."""
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 64), LIMIT)


async def pid_of(sock: socket.socket) -> int:
    """The process that has taken this client."""
    return int(await received(sock))


async def all_ready(edges: Edges) -> None:
    await until(lambda: sum(one.ready for one in edges.sample()) == edges.brain.edges, LIMIT)


async def test_each_connection_goes_to_the_edge_with_the_fewest_requests() -> None:
    async with brain(3) as site:
        await all_ready(site.edges)
        clients = [await site.client() for _ in range(30)]
        assert sorted(Counter(pid for _, pid in clients).values()) == [10, 10, 10]
        # At once, before any edge has said what it has got.
        pids = [await pid_of(one) for one in site.take(30)]
        assert sorted(Counter(pids).values()) == [10, 10, 10]


async def test_what_an_edge_has_not_taken_when_it_dies_goes_to_the_next_one() -> None:
    async with brain(1, "dies", "dies", "") as site:
        _, pid = await site.client()
        assert [one.pid for one in site.edges.sample()] == [pid]
        assert site.edges.died == 2
        assert [name for name, _ in site.sessions.dead] == ["edge-1", "edge-1"]


@pytest.mark.parametrize("killed", [True, False])
async def test_an_edge_that_ends_or_whose_link_is_lost_is_started_again(killed: bool) -> None:
    async with brain(2) as site:
        await all_ready(site.edges)
        client, first = await site.client()
        before = {one.pid for one in site.edges.sample()}
        if killed:
            os.kill(first, signal.SIGKILL)
            # The brain keeps no descriptor of a connection that was taken.
            assert await received(client) == b""
        else:
            site.sessions.lose[[one.pid for one in site.edges.sample()].index(first)]()
        await until(lambda: site.edges.died == 1, LIMIT)
        # The other one has room meanwhile.
        _, pid = await site.client()
        assert pid in before - {first}
        await all_ready(site.edges)
        assert len({one.pid for one in site.edges.sample()} | before) == 3


async def test_an_edge_that_is_held_up_gets_no_more_until_it_goes_on() -> None:
    clock = [0.0]
    async with brain(2, clock=lambda: clock[0]) as site:
        await all_ready(site.edges)
        stopped, other = (one.pid for one in site.edges.sample())
        os.kill(stopped, signal.SIGSTOP)
        first = site.take(4)
        clock[0] += 1.0
        assert {await pid_of(one) for one in site.take(6)} == {other}
        os.kill(stopped, signal.SIGCONT)
        takers = Counter([await pid_of(one) for one in first])
        assert takers == {stopped: 2, other: 2}


async def test_a_request_that_is_passed_on_brings_the_clients_addresses() -> None:
    async with brain(1, "passes") as site:
        await until(lambda: bool(site.adopted), LIMIT)
        [(sock, origin)] = site.adopted
        assert origin == ConnectionOrigin(("192.0.2.7", 4711), None, tls=True)
        assert await received(sock) == b"a request"


@pytest.mark.parametrize("words", [["edge-1"], ["edge-1", "7", "8", "info", "json"]])
def test_an_edge_that_no_gateway_of_its_version_has_started_ends_at_once(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="a gateway starts its edges itself"):
        main(words)


# In a cluster.


@dataclass(slots=True)
class Links:
    """Whom edges are linked to: the links that they got, by the names of edges."""

    refusals: int = 0  # that are left
    given: list[tuple[str, socket.socket]] = field(default_factory=list)

    async def connect(self, name: str, sock: socket.socket) -> None:
        if self.refusals:
            self.refusals -= 1
            raise ConnectionRefusedError
        sock.setblocking(False)
        self.given.append((name, sock))

    async def next(self, number: int) -> tuple[str, int, int]:
        """The name, number and process of the edge that has got this link."""
        await until(lambda: len(self.given) > number, LIMIT)
        name, sock = self.given[number]
        links, pid = (await received(sock)).split()
        return name, int(links), int(pid)

    def close(self) -> None:
        for _, sock in self.given:
            sock.close()


@asynccontextmanager
async def member(count: int = 1) -> AsyncIterator[tuple[Site, Links]]:
    with contextlib.closing(Links()) as links:
        async with brain(count, "links", serves=False, member="gw-a") as site:
            yield site, links


async def test_the_edges_of_a_member_are_linked_to_each_brain_that_there_is() -> None:
    async with member(2) as (site, links):
        edges = site.edges._running.values()
        assert {edge.late for edge in edges} == {None}, "they have as long as there is no brain"
        site.edges.relink(links.connect)
        found = [await links.next(0), await links.next(1)]
        assert sorted(name for name, *_ in found) == ["gw-a/edge-1", "gw-a/edge-2"]
        assert [number for _, number, _ in found] == [1, 1]
        await all_ready(site.edges)
        assert None not in {edge.late for edge in edges}
        assert site.sessions.lose == []
        _, pid = await site.client()
        assert pid in {pid for *_, pid in found}
        with contextlib.closing(Links()) as others:
            site.edges.relink(others.connect)
            again = [await others.next(0), await others.next(1)]
            assert sorted(again) == sorted((name, 2, pid) for name, _, pid in found)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: site.edges.died == 1, LIMIT)
        [name] = [name for name, _, its in found if its == pid]
        assert site.sessions.dead == [(name, pid)]


async def test_an_edge_whose_link_is_taken_away_gets_none_until_there_is_a_brain_again() -> None:
    async with member() as (site, links):
        site.edges.relink(links.connect)
        _, _, pid = await links.next(0)
        site.edges.relink(None)
        assert await received(links.given[0][1]) == b""
        await asyncio.sleep(2 * supervisor.LINK_PAUSE)
        assert len(links.given) == 1
        site.edges.relink(links.connect)
        assert await links.next(1) == ("gw-a/edge-1", 3, pid)


async def test_an_edge_that_has_lost_its_link_gets_another_one_until_that_holds() -> None:
    async with member() as (site, links):
        site.edges.relink(links.connect)
        _, _, pid = await links.next(0)
        links.refusals = 2
        links.given[0][1].close()
        assert await links.next(1) == ("gw-a/edge-1", 4, pid)
        (edge,) = site.edges._running.values()
        assert edge.link_pause == 8 * supervisor.LINK_PAUSE
        # What is said of an earlier link changes nothing.
        site.edges._link_lost(edge, 3)
        assert edge.links == 4


@pytest.mark.parametrize("drain", [True, False])
async def test_all_edges_end_together_and_none_is_started_again(drain: bool) -> None:
    async with brain(2) as site:
        await all_ready(site.edges)
        work = asyncio.ensure_future(site.edges.end(drain=drain))
        await asyncio.sleep(0)
        assert not site.edges.has_room()
        await asyncio.wait_for(work, LIMIT)
        assert site.edges.sample() == []
        assert len(site.sessions.lose) == len(site.sessions.dead) == 2
        assert sorted(site.sessions.told) == ["edge-1", "edge-2"]
        assert site.edges.died == 0
        # One that was accepted just before is served by the brain itself.
        site.take(1)
        assert [origin for _, origin in site.adopted] == [None]
