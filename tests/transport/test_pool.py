from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

import pytest

from gateway.transport import pool as module
from gateway.transport.connection import NodeConnection
from gateway.transport.errors import (
    ConnectFailed,
    ConnectTimedOut,
    LocalResourcesExhausted,
    StaleConnection,
)
from gateway.transport.pool import IDLE_SECONDS, ConnectionPool, NodeAddress
from tests.emulator import EmulatedNode
from tests.transport.raw import Peer, RawServer, always, nobody_listens, raw_server

ASK = b"GET /health HTTP/1.1\r\nhost: n\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
LIMIT = 30.0


class Clock:
    """The loop's clock, as the pool sees it: it stands still until a test puts it forward."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._loop = pool._loop
        self.now = self._loop.time()
        pool._loop = self  # type: ignore[assignment]

    def time(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


def pool_of(node: EmulatedNode | RawServer) -> ConnectionPool:
    return ConnectionPool(NodeAddress("127.0.0.1", node.port, b"", b"host: n\r\n"))


async def exchanged(pool: ConnectionPool) -> NodeConnection:
    """One whole exchange, on an idle connection if there is one."""
    async with asyncio.timeout(LIMIT):
        while True:
            connection = pool.take_idle() or await pool.connect(LIMIT)
            connection.send(ASK)
            try:
                await connection.read_status()
            except StaleConnection:
                connection.close()
                continue
            while await connection.read():
                pass
            return connection


async def ask(pool: ConnectionPool) -> None:
    pool.release(await exchanged(pool))


async def test_requests_one_after_the_other_take_one_connection() -> None:
    async with EmulatedNode() as node:
        pool = pool_of(node)
        for _ in range(50):
            await ask(pool)
        assert (node.connections_opened, pool.connections_opened) == (1, 1)
        assert node.control_requests == 50
        pool.close()


async def test_a_node_that_closes_after_so_many_requests_is_asked_on_a_new_connection() -> None:
    async with EmulatedNode(keepalive_requests=100) as node:
        pool = pool_of(node)
        for _ in range(250):
            await ask(pool)
        assert node.connections_opened == 3
        assert node.control_requests == 250
        pool.close()


async def test_the_connection_used_last_is_used_next() -> None:
    async with raw_server(always(OK)) as server:
        pool = pool_of(server)
        first, second = await exchanged(pool), await exchanged(pool)
        assert first is not second
        pool.release(first)
        pool.release(second)
        assert [pool.take_idle(), pool.take_idle(), pool.take_idle()] == [second, first, None]
        first.close()
        second.close()


async def test_a_connection_in_use_is_nobody_elses() -> None:
    async with raw_server(always(OK)) as server:
        pool = pool_of(server)
        await asyncio.gather(*(ask(pool) for _ in range(10)))
        assert server.opened == 10
        pool.close()


async def test_what_was_idle_for_too_long_is_closed_and_forgotten() -> None:
    async with raw_server(always(OK)) as server:
        pool = pool_of(server)
        clock = Clock(pool)
        await ask(pool)
        clock.now += IDLE_SECONDS - 0.5
        await ask(pool)
        assert server.opened == 1
        clock.now += IDLE_SECONDS
        assert pool.take_idle() is None
        await server.until(lambda: server.open == 0)
        pool.close()


async def test_the_sweeper_closes_what_nobody_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.05)
    async with raw_server(always(OK)) as server:
        pool = pool_of(server)
        connections = [await exchanged(pool) for _ in range(3)]
        for connection in connections:
            pool.release(connection)
        await server.until(lambda: server.open == 0)
        await server.until(lambda: pool._sweeper is None)
        assert pool._idle == []


async def test_the_pool_gives_up_idle_connections_before_the_server_does() -> None:
    assert EmulatedNode().keepalive_seconds > IDLE_SECONDS


async def test_a_connection_that_the_node_closed_while_idle_is_not_used() -> None:
    async with EmulatedNode() as node:
        pool = pool_of(node)
        await ask(pool)
        for connection in node._connections:
            connection.close()
        await node.until(lambda: node.connections == 0)
        await ask(pool)
        assert node.connections_opened == 2
        pool.close()


@pytest.mark.usefixtures("however_slow")
async def test_connections_that_break_in_the_instant_of_their_reuse_are_not_noticed() -> None:
    async with EmulatedNode() as node:
        pool = pool_of(node)
        connections = [await exchanged(pool) for _ in range(5)]
        for connection in connections:
            pool.release(connection)
        node.faults.set("stale", path="*")
        await ask(pool)
        assert node.faults.fired == 5
        assert node.connections_opened == 6
        pool.close()


@pytest.mark.parametrize("spoilt", ["closed", "unfinished", "too many"])
async def test_what_can_not_be_used_again_is_closed(
    spoilt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK if spoilt != "unfinished" else OK[:-1])
        await peer.reader.read()

    if spoilt == "too many":
        monkeypatch.setattr(module, "IDLE_CONNECTIONS", 0)
    async with raw_server(script) as server:
        pool = pool_of(server)
        connection = await pool.connect(LIMIT)
        connection.send(ASK)
        await connection.read_status()
        await connection.read()
        if spoilt == "closed":
            pool.close()
        pool.release(connection)
        assert pool.take_idle() is None
        await server.until(lambda: server.open == 0)
        pool.close()


async def test_a_closed_pool_closes_what_is_idle_and_leaves_what_is_used() -> None:
    async with raw_server(always(OK)) as server:
        pool = pool_of(server)
        idle, used = await exchanged(pool), await exchanged(pool)
        pool.release(idle)
        pool.close()
        await server.until(lambda: server.open == 1)
        used.send(ASK)
        assert await used.read_status() == 200
        pool.release(used)
        await server.until(lambda: server.open == 0)


# Connecting.


async def test_a_refused_connection_is_told() -> None:
    with nobody_listens() as port:
        pool = ConnectionPool(NodeAddress("127.0.0.1", port, b"", b""))
        with pytest.raises(ConnectFailed, match="The connection failed"):
            await pool.connect(LIMIT)


async def test_an_unknown_name_is_told() -> None:
    pool = ConnectionPool(NodeAddress("no-such-node.invalid", 80, b"", b""))
    with pytest.raises(ConnectFailed):
        await pool.connect(LIMIT)


async def test_a_name_that_is_none_is_told() -> None:
    pool = ConnectionPool(NodeAddress("a" * 300, 80, b"", b""))
    with pytest.raises(ConnectFailed):
        await pool.connect(LIMIT)


def full_listener() -> tuple[socket.socket, list[socket.socket]]:
    """A listener whose queue is full: nobody's connection to it comes about."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    waiting = []
    for _ in range(8):
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(listener.getsockname())
        waiting.append(sock)
    return listener, waiting


async def test_a_connection_that_takes_too_long_is_told_and_given_up() -> None:
    listener, waiting = full_listener()
    try:
        pool = ConnectionPool(NodeAddress("127.0.0.1", listener.getsockname()[1], b"", b""))
        with pytest.raises(ConnectTimedOut, match=r"0\.05 s"):
            await pool.connect(0.05)
    finally:
        for sock in (listener, *waiting):
            sock.close()


async def test_a_cancelled_connect_leaves_no_socket_open() -> None:
    listener, waiting = full_listener()
    try:
        pool = ConnectionPool(NodeAddress("127.0.0.1", listener.getsockname()[1], b"", b""))
        connecting = asyncio.create_task(pool.connect(LIMIT))
        await asyncio.sleep(0.02)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        # An open one would tell of itself by a ResourceWarning, which is an error here.
    finally:
        for sock in (listener, *waiting):
            sock.close()


async def test_a_machine_without_descriptors_is_not_the_nodes_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = ConnectionPool(NodeAddress("127.0.0.1", 1, b"", b""))

    async def create_connection(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    clock = Clock(pool)
    monkeypatch.setattr(clock, "create_connection", create_connection, raising=False)
    with pytest.raises(LocalResourcesExhausted, match="Too many open files"):
        await pool.connect(LIMIT)
