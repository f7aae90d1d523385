"""Connections to nodes: replies in any pieces, heads that repeat, limits, and errors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.transport.connection import (
    BODY_HIGH_WATER,
    MOST_HEAD_BYTES,
    KnownHead,
    LoopTimeout,
    NodeConnection,
)
from gateway.transport.errors import (
    ConnectionReset,
    InvalidResponse,
    StaleConnection,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.transport.pool import ConnectionPool, NodeAddress
from tests.each_case import each_case
from tests.gateways import until
from tests.http.recorded_transport import RecordedTransport
from tests.transport.raw import HOWEVER_SLOW, Peer, RawServer, Script, once, raw_server
from tests.virtual import in_virtual_time, now

ASK = b"GET /x HTTP/1.1\r\nhost: n\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
LIMIT = 30.0


async def connected(server: RawServer, stale_seconds: float = HOWEVER_SLOW) -> NodeConnection:
    return await ConnectionPool(server.address(), stale_seconds=stale_seconds).connect(LIMIT)


@asynccontextmanager
async def asking(
    script: Script, stale_seconds: float = HOWEVER_SLOW
) -> AsyncIterator[tuple[RawServer, NodeConnection]]:
    """A server with this script, and a connection to it that has sent `ASK`."""
    async with raw_server(script) as server:
        connection = await connected(server, stale_seconds)
        connection.send(ASK)
        try:
            yield server, connection
        finally:
            connection.close()


async def body_of(connection: NodeConnection) -> bytes:
    parts = []
    async with asyncio.timeout(LIMIT):
        await connection.read_status()
        while part := await connection.read():
            parts.append(part)
    return b"".join(parts)


async def asked(reply: bytes) -> tuple[NodeConnection, bytes]:
    """The connection after an exchange, and the body that it read."""
    async with asking(once(reply)) as (_, connection):
        return connection, await body_of(connection)


async def failure(reply: bytes) -> UpstreamError:
    with pytest.raises(UpstreamError) as raised:
        await asked(reply)
    return raised.value


# Invalid responses.


GARBAGE = [
    b"\x16\x03\x01 not HTTP at all\r\n\r\n",
    b"HTTP/9.9 200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    CHUNKED + b"zz\r\nhello\r\n",
    CHUNKED + b"3\r\nhello\r\n",
]
TOO_LONG = [
    b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: %b\r\n" % (n, b"b" * 80) for n in range(5000)),
    b"HTTP/1.1 200 OK\r\nX-Bomb: " + b"b" * 400_000,
    b"HTTP/1.1 200 OK\r\nX-Bomb: " + b"b" * (MOST_HEAD_BYTES + 1) + b"\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 4000,
]


async def test_bytes_that_are_not_http_or_an_endless_head_are_an_invalid_response() -> None:
    for reply in (*GARBAGE, *TOO_LONG):
        assert isinstance(await failure(reply), InvalidResponse), reply[:80]


CUT_OFF = [
    b"",
    b"HTTP/1.1 200 OK\r\ncontent-le",
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel",
    CHUNKED + b"5\r\nhel",
    CHUNKED + b"5\r\nhello\r\n",
    CHUNKED + b"5\r\nhello\r\n0\r\n",
]


async def test_a_response_that_is_cut_off_is_a_reset_and_not_stale() -> None:
    for reply in CUT_OFF:
        assert type(await failure(reply)) is ConnectionReset, reply


async def test_the_bytes_before_a_cut_are_read_before_it_is_raised() -> None:
    async with asking(once(CHUNKED + b"5\r\nhello\r\n5\r\nwo")) as (_, connection):
        await connection.read_status()
        await until(lambda: not connection.alive)
        assert await connection.read() == b"hellowo"
        with pytest.raises(ConnectionReset):
            await connection.read()


@pytest.mark.parametrize("failure", [ConnectionReset, UpstreamTimeout])
async def test_a_failure_of_either_side_is_no_end_of_a_body_without_framing(
    failure: type[UpstreamError],
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        await peer.request()
        peer.reset()

    async with asking(script) as (_, connection):
        assert await connection.read_status() == 200
        assert await connection.read() == b"half"
        assert connection.transport is not None
        if failure is ConnectionReset:
            connection.transport.write(ASK)
        else:
            connection.fail(UpstreamTimeout("silence", "It was silent"))
        with pytest.raises(failure):
            await connection.read()
        assert not connection.complete


# Reuse.


@pytest.mark.parametrize(
    ("said", "stale_seconds", "raised"),
    [
        (b"", HOWEVER_SLOW, StaleConnection),
        (b"", 0.0, ConnectionReset),  # so late, it had reached the node
        (OK[:12], HOWEVER_SLOW, ConnectionReset),
    ],
)
async def test_a_reused_connection_that_breaks_at_once_and_before_a_byte_is_stale(
    said: bytes, stale_seconds: float, raised: type[UpstreamError]
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK)
        await peer.request()
        if said:
            await peer.say(said)
        else:
            peer.reset()

    async with asking(script, stale_seconds) as (_, connection):
        assert await body_of(connection) == b"hello"
        connection.send(ASK)
        with pytest.raises(UpstreamError) as failed:
            await connection.read_status()
        assert type(failed.value) is raised


# Back-pressure, cancelling and failing.


async def test_a_reader_that_lags_stops_the_node() -> None:
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    sent = 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        peer.writer.transport.set_write_buffer_limits(high=0)
        await peer.request()
        await peer.say(CHUNKED)
        while sent < 1000:
            await peer.say(chunk)
            sent += 1
        await peer.say(b"0\r\n\r\n")

    async with asking(script) as (_, connection):
        await connection.read_status()
        transport = connection.transport
        assert transport is not None
        await until(lambda: not transport.is_reading())
        stood = -1
        while stood != sent:  # the kernel's buffers are still sent
            stood = sent
            await asyncio.sleep(0.1)
        assert stood < 1000
        unread = len(connection.read_nowait())
        # One more read of the socket may follow: uvloop's are of 256 KiB.
        assert unread <= 2 * BODY_HIGH_WATER + 65536
        assert unread + len(await body_of(connection)) == 1000 * 65536


async def test_a_whole_body_is_read_up_to_a_limit() -> None:
    async with asking(once(OK)) as (_, connection):
        assert await connection.read_all(5) == b"hello"
    async with asking(once(OK)) as (_, connection):
        with pytest.raises(InvalidResponse, match="larger than 4 bytes"):
            await connection.read_all(4)


@pytest.fixture
def own_heap() -> Iterator[None]:
    """Leave out what other tests have loaded, which takes half a second to collect."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("own_heap")
@pytest.mark.parametrize("stage", ["head", "body"])
async def test_a_reader_that_is_cancelled_leaves_nothing_behind(stage: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        if stage == "body":
            await peer.say(CHUNKED)
        await peer.reader.read()

    async with asking(script) as (server, connection):
        reading: asyncio.Future[object] = asyncio.ensure_future(connection.read_status())
        if stage == "body":
            await reading
            reading = asyncio.ensure_future(connection.read())
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        connection.close()
        await until(lambda: server.open == 0)
        assert not connection.alive
    gc.collect()  # An error that nobody has taken would be told now.


# Any bytes, in any pieces.


def fed(loop: asyncio.AbstractEventLoop, pieces: list[bytes]) -> NodeConnection:
    connection = NodeConnection(loop)
    connection.connection_made(RecordedTransport())
    connection.send(ASK)
    for piece in pieces:
        if connection.alive:
            connection.data_received(piece)
    if connection.alive:
        connection.connection_lost(None)
    return connection


REPLIES = [
    OK,
    CHUNKED + b"3;a=b\r\nhel\r\n2\r\nlo\r\n0\r\nX-T: 1\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 E\r\nA: b\r\n\r\n" + OK,
    b"HTTP/1.1 200 OK\r\n\r\nhello",
    b"HTTP/1.0 200\r\nContent-Length: 5\r\n\r\nhello",
]


@given(
    reply=st.sampled_from(REPLIES),
    changes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.integers(1, 200),
)
def test_a_spoilt_response_is_a_response_or_an_error(
    reply: bytes, changes: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(reply)
    for place, byte in changes:
        data[place % len(data)] = byte
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        connection = fed(loop, [bytes(data[:cut]), bytes(data[cut:])])
        if not connection.complete:
            connection.read_nowait()
            with pytest.raises(UpstreamError):
                connection.wait_for_data()
        assert not connection.alive
        assert not connection.reusable


PARTS = [b"data: {1}\n\n", b"\n\n\r\n", b"a\n\n\r\nb\r\n", b"5\r\nab\n\n\r\n", b"x" * 1100]
BODIES = st.lists(st.sampled_from(PARTS), min_size=1, max_size=8)


@given(bodies=BODIES, cuts=st.sets(st.integers(1, 3000)), framed=st.booleans())
def test_a_relay_gets_whole_chunks_whose_bytes_are_those_of_the_body(
    bodies: list[bytes], cuts: set[int], framed: bool
) -> None:
    ends = list(itertools.accumulate(len(b"%x\r\n%b\r\n" % (len(b), b)) for b in bodies))
    data = b"".join(b"%x\r\n%b\r\n" % (len(body), body) for body in bodies) + b"0\r\n\r\n"
    places = sorted({0, *ends, *(() if framed else cuts), len(data)} & set(range(len(data) + 1)))
    found: list[bytes] = []
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        connection = NodeConnection(loop)
        connection.connection_made(RecordedTransport())
        connection.send(b"")

        def relay(chunk: bytes, start: int) -> bool:
            if chunk.endswith(b"\r\n"):
                found.append(chunk[start:-2])
            return chunk.endswith(b"\r\n")

        def sink() -> bool:
            found.append(connection.read_nowait())
            return not connection.complete

        async def wait() -> None:
            connection.wait_for_data(sink, relay)

        connection.data_received(CHUNKED)
        loop.run_until_complete(wait())
        for start, end in itertools.pairwise(places):
            connection.data_received(data[start:end])
        assert (b"".join(found), connection.complete) == (b"".join(bodies), True)


STANDS_STILL = 0.3
SHORT_LIMIT = 0.2


@in_virtual_time
async def test_a_limit_ends_work_after_its_time_and_no_other() -> None:
    async def waits() -> None:
        async with LoopTimeout(3.0):
            await asyncio.Event().wait()

    began = now()
    with pytest.raises(TimeoutError):
        await waits()
    assert now() - began == pytest.approx(3.0)
    # What ends in time is not touched, and a cancelled task sees no timeout.
    async with LoopTimeout(3.0):
        await asyncio.sleep(2.9)
    with pytest.raises(KeyError):
        async with LoopTimeout(3.0):
            raise KeyError
    await asyncio.sleep(10.0)
    task = asyncio.create_task(waits())
    await asyncio.sleep(1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_after_standing_still_a_connection_that_was_made_meanwhile_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pool = ConnectionPool(NodeAddress("127.0.0.1", server.getsockname()[1], b"", b""))
        asyncio.get_running_loop().call_soon(time.sleep, STANDS_STILL)
        connection = await pool.connect(SHORT_LIMIT)
        assert connection.alive
        connection.close()
        pool.close()


HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nAccept: */*\r\n\r\n"


def message(body: bytes) -> bytes:
    return HEAD % len(body) + body


def known(data: bytes) -> KnownHead:
    head = KnownHead.from_message(data)
    assert head is not None
    return head


@given(st.data())
def test_another_byte_in_the_head_is_another_head(data: st.DataObject) -> None:
    whole = message(b"x" * 10)
    place = data.draw(st.integers(0, len(whole) - 11))
    byte = data.draw(st.binary(min_size=1, max_size=1).filter(lambda b: b[0] != whole[place]))
    changed = whole[:place] + byte + whole[place + 1 :]
    assert known(whole).match_body(message(b"other")) == b"other"
    assert known(whole).match_body(changed) is None


def test_a_length_in_another_field_is_none() -> None:
    head = b"HTTP/1.1 200 OK\r\nX: Content-Length: 7\r\nCONTENT-LENGTH: %d\r\n\r\n%b"
    assert known(head % (5, b"first")).match_body(head % (6, b"second")) == b"second"


WHOLE = message(b"hello")


@each_case(
    "data",
    [
        b"", WHOLE[:-1], WHOLE[:30], WHOLE + b"!", WHOLE + WHOLE,
        *(WHOLE.replace(b": 5", other) for other in (
            b":  5", b": +5", b": ", b": 0x5", b": 5_", b": 5, 5", b": 0000000005",
            b": " + "\u0665".encode(),
        )),
    ],
)  # fmt: skip
def test_data_that_is_not_one_whole_message_has_no_known_head(data: bytes) -> None:
    assert known(message(b"12345")).match_body(data) is None


@each_case(
    "data",
    [
        b"", b"POST / HTTP/1.1\r\nhost: a\r\n\r\n", WHOLE + b"x", WHOLE[:-1],
        WHOLE.replace(b"Accept: */*", b"Content-Length: 5"), WHOLE.replace(b"\r\n\r\n", b"\r\n\n"),
        b"POST / HTTP/1.1\r\nContent-Length: 6\n\nab\r\n\r\n",
    ],
)  # fmt: skip
def test_other_messages_are_not_learnt(data: bytes) -> None:
    assert KnownHead.from_message(data) is None
