"""Turns of the event loop: bursts are worked on in several, and whole responses without tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from gateway.config.listeners import LimitSettings
from gateway.http.exchange import HttpExchange
from gateway.http.protocol import BoundedProtocol, protocol_class
from gateway.request.routes import Route
from gateway.transport.connection import TURN_SECONDS, NodeConnection, TurnLimit
from gateway.transport.eager_task import EagerTask, ensure_task
from tests.http.recorded_transport import RecordedTransport

CONNECTIONS = 100
PART = 0.001
"""Seconds that each burst's part takes, of a turn of `TURN_SECONDS`."""

PARTS = (b"1\r\na\r\n", b"1\r\nb\r\n", b"0\r\n\r\n")
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
REQUEST = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"


@dataclass
class Work:
    """What is done of a burst, by a clock that nothing else moves."""

    seconds: float = 0.0
    done: int = 0
    turn: TurnLimit = field(init=False)

    def __post_init__(self) -> None:
        self.turn = TurnLimit(clock=lambda: self.seconds)

    def do(self) -> None:
        self.seconds += PART
        self.done += 1

    async def bring(self, receive: Iterable[Callable[[bytes], None]], data: bytes) -> None:
        """Bring this to all of them in one turn, and go on until it is dealt with."""
        goal = self.done + CONNECTIONS
        for one in receive:
            one(data)
        turns = [self.done]
        while self.done < goal:
            await asyncio.sleep(0)
            turns.append(self.done)
        longest = max(after - before for before, after in pairwise([goal - CONNECTIONS, *turns]))
        assert longest * PART <= 3 * TURN_SECONDS
        assert len(turns) < 2 * CONNECTIONS * PART / TURN_SECONDS, "waiting costs much"


async def test_a_burst_from_nodes_is_worked_on_in_turns_that_are_short() -> None:
    work, loop = Work(), asyncio.get_running_loop()
    connections = [NodeConnection(loop, turn=work.turn) for _ in range(CONNECTIONS)]
    texts = dict.fromkeys(connections, b"")

    def take(connection: NodeConnection) -> bool:
        work.do()
        texts[connection] += connection.read_nowait()
        return not connection.complete

    for connection in connections:
        connection.connection_made(RecordedTransport())
        connection.send(b"")
        connection.wait_for_data(partial(take, connection))
    for part in (HEAD, *PARTS):
        await work.bring([one.data_received for one in connections], part)
    assert set(texts.values()) == {b"ab"}
    assert all(connection.complete for connection in connections)


async def test_a_burst_from_clients_is_worked_on_in_turns_that_are_short() -> None:
    work = Work()

    async def serve(_: Route, exchange: HttpExchange) -> None:
        work.do()
        exchange.respond(200, b"", exchange.take_body())

    async def nothing(*_: object) -> None: ...

    protocol = protocol_class(LimitSettings(connections=2 * CONNECTIONS), serve, turn=work.turn)
    connections = [protocol(nothing, 60, set(), set()) for _ in range(CONNECTIONS)]
    transports = [RecordedTransport() for _ in connections]
    for connection, transport in zip(connections, transports, strict=True):
        connection.connection_made(transport)
    for _ in range(3):
        await work.bring([one.data_received for one in connections], REQUEST)
    for connection, transport in zip(connections, transports, strict=True):
        assert transport.sent.count(b"HTTP/1.1 200 OK\r\n") == 3
        connection.connection_lost(None)


async def test_what_waits_is_received_before_the_end_of_its_connection() -> None:
    loop, turn = asyncio.get_running_loop(), TurnLimit(seconds=-1)
    connection = NodeConnection(loop, turn=turn)
    connection.connection_made(RecordedTransport())
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


# A coroutine without a task: which waits need none, and which make a task of it. What it
# raises is told to clients and the log: tests/http/test_exchange.py.


Tasks = set[asyncio.Task[None]]


class Response:
    """A `Wakeable`, as a connection is."""

    def __init__(self) -> None:
        self.on_wake: Callable[[bool], None] | None = None

    def __await__(self) -> Generator[Response, None, None]:
        yield self

    def wake(self, *, whole: bool) -> None:
        assert self.on_wake is not None
        on_wake, self.on_wake = self.on_wake, None
        on_wake(whole)


class Witness:
    """A coroutine that notes in which task each of its steps ran."""

    def __init__(self, *waits: Callable[[], Any]) -> None:
        self.waits = waits
        self.steps: list[asyncio.Task[Any] | None] = []
        self.cancelled = False

    async def __call__(self) -> None:
        self.steps.append(asyncio.current_task())
        for wait in self.waits:
            try:
                await wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise
            self.steps.append(asyncio.current_task())


async def from_a_callback(work: Callable[[], object]) -> None:
    """Call it as the event loop calls a protocol: outside of any task."""
    done = asyncio.Event()

    def call() -> None:
        work()
        done.set()

    asyncio.get_running_loop().call_soon(call)
    async with asyncio.timeout(30):
        await done.wait()


async def settled(tasks: Tasks) -> None:
    async with asyncio.timeout(30):
        while tasks:
            await asyncio.wait(set(tasks))
            await asyncio.sleep(0)


@pytest.mark.parametrize("whole", [True, False])
async def test_a_whole_response_continues_it_at_once_and_a_part_makes_a_task_of_it(
    whole: bool,
) -> None:
    tasks: Tasks = set()
    reply = Response()
    witness = Witness(lambda: reply)
    await from_a_callback(lambda: EagerTask(tasks).run(witness()))
    assert witness.steps == [None]
    await from_a_callback(lambda: reply.wake(whole=whole))
    made = [None] if whole else [*tasks]
    await settled(tasks)
    assert witness.steps == [None, *made]


@pytest.mark.parametrize(
    "wait", [ensure_task, lambda: asyncio.sleep(0), lambda: asyncio.sleep(0.001)]
)
async def test_any_other_wait_makes_a_task_of_it(wait: Callable[[], Any]) -> None:
    tasks: Tasks = set()
    witness = Witness(wait, lambda: asyncio.wait_for(asyncio.sleep(0), 30))
    await from_a_callback(lambda: EagerTask(tasks).run(witness()))
    async with asyncio.timeout(30):
        while len(witness.steps) < 3:  # noqa: ASYNC110 - a list tells nobody
            await asyncio.sleep(0.001)
    first, second, third = witness.steps
    assert first is None
    assert second is not None
    assert third is second
    await settled(tasks)


async def test_cancelling_raises_where_it_waits() -> None:
    reply, future = Response(), asyncio.get_running_loop().create_future()
    ways: list[tuple[Callable[[], Any], Callable[[], None]]] = [
        (lambda: reply, lambda: reply.wake(whole=True)),
        (lambda: future, lambda: future.set_result(None)),
    ]
    for wait, come in ways:
        tasks: Tasks = set()
        run, witness = EagerTask(tasks), Witness(wait)
        await from_a_callback(partial(run.run, witness()))
        run.cancel()
        come()  # What comes meanwhile does not run it a second time.
        await settled(tasks)
        assert (witness.cancelled, len(witness.steps)) == (True, 1)
        run.cancel()
        assert not tasks
