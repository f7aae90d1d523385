"""Bursts: what a thousand sockets bring at once is worked on in several turns of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial

import pytest
import uvloop

from gateway.config.listeners import LimitSettings
from gateway.http.exchange import HttpExchange
from gateway.http.protocol import BoundedProtocol, protocol_class
from gateway.request.routes import Route
from gateway.transport.connection import TURN_SECONDS, NodeConnection, TurnLimit
from tests.http.recorded_transport import RecordedTransport
from tests.transport.raw import Silent

SOCKETS = 400
WORK = 0.0002
"""Seconds of CPU time that each burst's part takes."""

MOST = 0.05
"""Seconds of CPU time of the longest turn, whatever comes."""

PARTS = (b"1\r\na\r\n", b"1\r\nb\r\n", b"0\r\n\r\n")
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
REQUEST = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"


def work() -> None:
    until = time.thread_time() + WORK
    while time.thread_time() < until:
        pass


class Burst:
    """Sockets, of which all bring something at once, and the turns that it takes."""

    def __init__(self, seconds: float) -> None:
        self.turn = TurnLimit(seconds=seconds)
        self.peers: list[socket.socket] = []
        self.longest = 0.0
        self._last = 0.0

    async def connect(self, make: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(SOCKETS):
            ours, peer = socket.socketpair()
            self.peers.append(peer)
            await loop.connect_accepted_socket(make, ours)

    async def bring(self, data: bytes, done: Callable[[], bool]) -> None:
        """Send this on all sockets, and go on until it is dealt with."""
        for peer in self.peers:
            peer.send(data)
        self._last = time.thread_time()
        while not done():
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest, self._last = max(self.longest, now - self._last), now

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


@contextlib.contextmanager
def running(seconds: float) -> Iterator[tuple[asyncio.Runner, Burst]]:
    burst = Burst(seconds)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            yield runner, burst
        finally:
            burst.close()


async def from_nodes(burst: Burst) -> None:
    loop = asyncio.get_running_loop()
    texts: dict[NodeConnection, bytes] = {}
    taken = 0

    def make() -> NodeConnection:
        connection = NodeConnection(loop, turn=burst.turn)
        texts[connection] = b""
        return connection

    def take(connection: NodeConnection) -> bool:
        nonlocal taken
        work()
        taken += 1
        texts[connection] += connection.read_nowait()
        return not connection.complete

    await burst.connect(make)
    for connection in texts:
        connection.send(b"")
        connection.wait_for_data(partial(take, connection))
    for number, part in enumerate((HEAD, *PARTS), 1):
        await burst.bring(part, lambda: taken == number * SOCKETS)  # noqa: B023
    assert set(texts.values()) == {b"ab"}
    assert all(connection.complete for connection in texts)


async def from_clients(burst: Burst) -> None:
    served = 0

    async def serve(_: Route, exchange: HttpExchange) -> None:
        nonlocal served
        work()
        served += 1
        exchange.respond(200, b"", exchange.take_body())

    limits = LimitSettings(connections=2 * SOCKETS)
    protocol = protocol_class(limits, serve, turn=burst.turn)
    connections: set[BoundedProtocol] = set()
    tasks: set[asyncio.Task[None]] = set()

    async def nothing(*_: object) -> None: ...

    await burst.connect(lambda: protocol(nothing, 60, connections, tasks))
    for goal in (SOCKETS, 2 * SOCKETS, 3 * SOCKETS):
        await burst.bring(REQUEST, lambda: served == goal)  # noqa: B023
    for peer in burst.peers:
        assert peer.recv(4096).count(b"HTTP/1.1 200 OK\r\n") == 3
    for connection in list(connections):
        connection.transport.abort()
    await asyncio.sleep(0)


async def test_what_waits_is_received_before_the_end_of_its_connection() -> None:
    loop, turn = asyncio.get_running_loop(), TurnLimit(seconds=-1)
    connection = NodeConnection(loop, turn=turn)
    connection.connection_made(Silent())
    connection.send(b"")
    turn.look(loop)
    connection.data_received(HEAD + PARTS[0])
    connection.data_received(PARTS[2])
    assert turn.is_spent
    assert not connection.status
    connection.connection_lost(None)
    assert connection.complete
    assert connection.read_nowait() == b"a"


async def test_a_socket_that_its_reader_has_resumed_stops_at_the_next_bytes_that_wait() -> None:
    loop, turn = asyncio.get_running_loop(), TurnLimit(seconds=-1)
    connection, transport = NodeConnection(loop, turn=turn), RecordedTransport()
    connection.connection_made(transport)
    connection.send(b"")
    connection.data_received(HEAD + PARTS[0])
    turn.look(loop)
    connection.data_received(PARTS[1])
    connection.unread(connection.read_nowait())
    connection.read_nowait()
    assert transport.reads()
    connection.data_received(PARTS[1])
    assert not transport.reads()
    await asyncio.sleep(0)
    assert transport.reads()
    assert connection.read_nowait() == b"bb"


@pytest.mark.parametrize("end", [BoundedProtocol.shutdown, BoundedProtocol.eof_received])
async def test_a_request_that_waits_is_served_before_its_connection_ends(
    end: Callable[[BoundedProtocol], object],
) -> None:
    async def serve(_: Route, exchange: HttpExchange) -> None:
        exchange.respond(200, b"", exchange.take_body())

    async def nothing(*_: object) -> None: ...

    loop, turn, transport = asyncio.get_running_loop(), TurnLimit(seconds=-1), RecordedTransport()
    connection = protocol_class(LimitSettings(), serve, turn=turn)(nothing, 60, set(), set())
    connection.connection_made(transport)
    turn.look(loop)
    connection.data_received(REQUEST)
    assert not connection.idle
    assert not transport.sent
    end(connection)
    assert transport.sent.startswith(b"HTTP/1.1 200 OK")
    connection.connection_lost(None)


TRIES = 5  # runs of a burst, until one shows what waiting costs


@pytest.mark.parametrize("side", [from_nodes, from_clients])
def test_a_burst_is_worked_on_in_turns_that_are_short(
    side: Callable[[Burst], Coroutine[None, None, None]],
) -> None:
    ratios = []
    for _ in range(TRIES):
        spent = {}
        for seconds in (math.inf, TURN_SECONDS):
            with running(seconds) as (runner, burst):
                began = time.thread_time()
                runner.run(side(burst))
                spent[seconds] = time.thread_time() - began
                is_bounded = burst.longest < MOST
                assert is_bounded == (seconds < math.inf), burst.longest
        ratios.append(spent[TURN_SECONDS] / spent[math.inf])
        if ratios[-1] < 2:
            return
    # Beside much other work one run of the two may take a multiple, but not each time.
    pytest.fail(f"waiting costs much: {ratios}")
