from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tests.bench import node_replies
from tests.bench.load import Address, ChatConnection, Load, StampedConnection
from tests.bench.scenarios import chat, plain_load, stream_load
from tests.bench.upstream import Script, Upstream
from tests.virtual import in_virtual_time, now

LIMIT = 50.0
GOOD = node_replies.plain_response(node_replies.EMBEDDING)


@asynccontextmanager
async def answering(
    reply: Callable[[int], bytes], *, close: bool = False
) -> AsyncIterator[tuple[Address, list[int]]]:
    """A server whose answer is a function of the request's number.

    Yields its address and the number of requests on each connection.
    """
    served: list[int] = []
    tasks: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        mine = len(served)
        served.append(0)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await reader.readuntil(b"}")
                served[mine] += 1
                writer.write(reply(sum(served)))
                await writer.drain()
                if close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[:2], served
        await asyncio.wait({task for task in tasks if task}, timeout=LIMIT)


@asynccontextmanager
async def loading(load: Load, connections: int) -> AsyncIterator[Load]:
    try:
        await load.connect(connections)
        yield load
    finally:
        await load.close()
        await asyncio.sleep(0)


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream(nodes=2, slots=4) as upstream:
        yield upstream


def direct(upstream: Upstream) -> Address:
    return "127.0.0.1", upstream.ports[0]


async def test_every_request_is_answered_over_the_same_connections(upstream: Upstream) -> None:
    async with loading(plain_load(direct(upstream)), 3) as load:
        outcome = await load.run(50, LIMIT)
    assert (outcome.completed, outcome.errors) == (50, 0)
    assert len(outcome.took) == 50
    assert (upstream.counters.requests, upstream.counters.connections) == (50, 3)


@pytest.mark.parametrize("interval", [0.0, 0.002])
async def test_streams_come_whole(upstream: Upstream, interval: float) -> None:
    upstream.script = Script(tokens=25, interval=interval, burst=4)
    async with loading(stream_load(direct(upstream), 25), 4) as load:
        outcome = await load.run(8, LIMIT, spread=0.01)
    assert (outcome.completed, outcome.first_error) == (8, "")


class Answers(ChatConnection):
    tokens = 6


@pytest.mark.parametrize(
    ("tokens", "errors"), [(6, 0), (7, 2)], ids=["as asked for", "a token too many"]
)
async def test_streams_and_plain_chats_are_judged_by_their_text(
    upstream: Upstream, tokens: int, errors: int
) -> None:
    upstream.script = Script(tokens=tokens, interval=0.001)
    address = direct(upstream)
    plain = Load(address, chat(stream=False), connection=Answers)
    for load in (stream_load(address, 6), plain):
        async with loading(load, 1):
            outcome = await load.run(2, LIMIT)
        assert (outcome.completed, outcome.errors) == (2 - errors, errors)


async def test_stamps_survive_any_cut_of_the_body() -> None:
    connection = StampedConnection(lambda connection, problem: None, 0, 1)
    body = (
        node_replies.ROLE
        + node_replies.stamped_token(1)
        + node_replies.stamped_token(2)
        + node_replies.DONE
    )
    for i in range(0, len(body), 7):
        connection.on_body(body[i : i + 7])
    assert len(connection.ages) == 2
    assert (connection.length, connection.crc) == (len(body), True)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(
            node_replies.plain_response(node_replies.EMBEDDING, "503 Service Unavailable"),
            id="status",
        ),
        pytest.param(node_replies.plain_response(node_replies.EMBEDDING[:-1]), id="length"),
        pytest.param(node_replies.plain_response(b"{" + b" " * 398 + b"}"), id="content"),
        pytest.param(b"what is this\r\n\r\n", id="garbage"),
    ],
)
async def test_one_wrong_answer_is_one_error_and_the_rest_goes_on(bad: bytes) -> None:
    async with (
        answering(lambda number: bad if number == 3 else GOOD) as (address, _),
        loading(plain_load(address), 1) as load,
    ):
        outcome = await load.run(10, LIMIT)
    assert (outcome.completed, outcome.errors) == (9, 1)


@pytest.mark.parametrize(
    ("reply", "closes", "error"),
    [(GOOD[:-10], True, "connection lost"), (b"", False, "1 of 1 answers missing")],
    ids=["breaks off", "never comes"],
)
async def test_an_answer_that_does_not_end_is_an_error(
    reply: bytes, closes: bool, error: str
) -> None:
    async with (
        answering(lambda _: reply, close=closes) as (address, _),
        loading(plain_load(address), 1) as load,
    ):
        outcome = await load.run(1, limit=LIMIT if closes else 0.05)
    assert outcome.errors == 1
    assert error in outcome.first_error


async def test_a_server_that_closes_after_each_answer_costs_reconnects_not_errors() -> None:
    reply = GOOD.replace(b"Server:", b"Connection: close\r\nServer:")
    async with (
        answering(lambda _: reply, close=True) as (address, served),
        loading(plain_load(address), 2) as load,
    ):
        outcome = await load.run(6, LIMIT)
    assert (outcome.completed, outcome.errors, outcome.reconnects) == (6, 0, 4)
    assert served == [1] * 6


@pytest.mark.parametrize("connections", [1, 8])
@in_virtual_time
async def test_a_steady_rate_opens_a_connection_only_when_none_is_free(connections: int) -> None:
    async with (
        answering(lambda _: GOOD) as (address, served),
        loading(plain_load(address), connections) as load,
    ):
        load.clock = now
        outcome = await load.steady(rate=200, seconds=0.25, limit=LIMIT)
        assert (outcome.completed, outcome.errors) == (50, 0)
        assert outcome.seconds == pytest.approx(49 / 200)
        assert len(load.connections) == len(served)
        assert max(served) > 50 / max(2, connections)
