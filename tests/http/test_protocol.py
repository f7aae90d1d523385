"""A request never depends on how its bytes were split, and no client stalls its connection."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import tomllib
import tracemalloc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.version import Version
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError
from gateway.http.exchange import HttpExchange
from gateway.http.protocol import (
    MOST_CHUNKS_PER_FEED,
    MOST_EXTENSION_BYTES,
    BoundedProtocol,
    ChunkedDecoder,
    protocol_class,
)
from gateway.request.routes import Route
from gateway.transport.connection import TurnLimit
from tests.each_case import each_case
from tests.emulator.raw_connection import RawConnection, raw_connection
from tests.http.recorded_transport import RecordedTransport
from tests.virtual import in_virtual_time
from tests.web.raw_client import CHAT, HELLO, Answer, answer, public, request


def connected(kind: type[BoundedProtocol]) -> tuple[BoundedProtocol, RecordedTransport]:
    """A connection of this kind, without a socket, whose application answers every request."""

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    connection, transport = kind(answers, 5.0, set(), set()), RecordedTransport()
    connection.connection_made(transport)
    return connection, transport


async def test_of_a_pipeline_one_request_runs_and_the_rest_stays_bytes() -> None:
    """However many requests a packet has. Whose they are: tests/fuzz/head.py."""
    connection, transport = connected(protocol_class(LimitSettings()))
    data = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2500
    connection.data_received(data)
    assert len(connection.tasks) == 1
    assert not transport.reads(), "more is read though much waits"
    while connection.backlog:
        await asyncio.sleep(0)
        assert len(connection.tasks) <= 1
        assert len(connection.backlog) <= len(data)
    await asyncio.sleep(0.01)
    assert transport.reads()
    connection.connection_lost(None)
    assert transport.sent.count(b"HTTP/1.1 200 ") == 2500


@in_virtual_time
async def test_clients_that_read_no_responses_get_no_more_and_few_bytes_wait_for_them() -> None:
    """With more they are aborted, others are served, and what waits is counted exactly."""

    async def serve(_: Route, exchange: HttpExchange) -> None:
        exchange.respond(200, b"", exchange.take_body())

    turn = TurnLimit(seconds=60.0)  # a busy machine may be slow
    kind = protocol_class(LimitSettings(), serve, pipeline_bytes=300_000, turn=turn)
    whole = request()
    requests = 100_000 // len(whole)
    connections, transports = [], []
    for number in range(5):
        connection, transport = connected(kind)
        connection.data_received(whole * requests)
        if number < 4:
            connection.pause_writing()
        connections.append(connection)
        transports.append(transport)
    assert [transport.closed for transport in transports] == [False] * 3 + [True, False]
    held = sum(len(connection.backlog) for connection in connections)
    assert kind.pipeline_queue.waiting_bytes == held
    await asyncio.sleep(1.0)
    assert transports[-1].sent.count(b"HTTP/1.1 ") == requests
    assert transports[0].sent.count(b"HTTP/1.1 ") < requests
    assert not transports[0].reads()
    connections[0].resume_writing()
    await asyncio.sleep(1.0)
    assert transports[0].sent.count(b"HTTP/1.1 ") == requests
    assert transports[0].reads()
    for connection in connections:
        connection.connection_lost(None)
    assert kind.pipeline_queue.waiting_bytes == 0


IMPATIENT = {"limits": {"header_timeout": 0.3, "body_timeout": 0.3}}


def outcome_of(found: Answer) -> tuple[int, str | None]:
    return found.status, found.code


HALF_CHUNKED = (
    f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
)
HALVES = [
    b"P", request()[:60], b"\r\n\r\n", request(b"", length=100),
    request(b'{"messages": ', length=5000), HALF_CHUNKED, HALF_CHUNKED + b"2;a=",
    HALF_CHUNKED + b"2\r\n{", HALF_CHUNKED + b"2\r\n{}", HALF_CHUNKED + b"2\r\n{}\r\n0\r\nX: y",
]  # fmt: skip


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@in_virtual_time
async def test_half_a_request_and_then_silence_is_408(tmp_path: Path, used: bool) -> None:
    async with public(tmp_path, IMPATIENT) as gate:
        for half in HALVES:
            async with raw_connection(gate.url) as wire:
                if used:
                    await wire.send(request({**HELLO, "max_tokens": 1}))
                    assert (await answer(wire)).status == 200
                await wire.send(half)
                assert outcome_of(await answer(wire)) == (408, "request_timeout"), half
                assert await wire.rest() == b""
        async with raw_connection(gate.url) as silent:
            assert await silent.rest() == b""
        assert (await gate.last()).status == 408


@pytest.mark.parametrize("whole", [request() * 100, request(b"{" + b" " * 4000)])
@in_virtual_time
async def test_a_request_a_byte_at_a_time_is_408(tmp_path: Path, whole: bytes) -> None:
    async with public(tmp_path, IMPATIENT) as gate, raw_connection(gate.url) as wire:
        trickling = asyncio.create_task(_trickle(wire, whole))
        assert outcome_of(await answer(wire)) == (408, "request_timeout")
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)


@in_virtual_time
async def test_half_a_request_behind_another_or_100_continue_has_its_own_timeout(
    tmp_path: Path,
) -> None:
    async with public(tmp_path, IMPATIENT) as gate:
        async with raw_connection(gate.url) as wire:
            gate.node.faults.next("hang", seconds=1.0)
            await wire.send(request({**HELLO, "max_tokens": 1}) + request()[:60])
            assert (await answer(wire)).status == 200
            assert outcome_of(await answer(wire)) == (408, "request_timeout")
        async with raw_connection(gate.url) as wire:
            await wire.send(request(b"", "Expect: 100-continue", length=100))
            assert await wire.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
            assert outcome_of(await answer(wire)) == (408, "request_timeout")


async def _trickle(wire: RawConnection, data: bytes) -> None:
    for byte in data:
        await wire.send(bytes([byte]))
        await asyncio.sleep(0.02)


# Chunks: more of what they mean is the fuzzer's affair (tests/fuzz/head.py).

MOST = 1000


def read(pieces: Iterable[bytes]) -> tuple[bytes, bytes] | None:
    """The body and the bytes behind it; None: it is incomplete. Raises: GatewayError."""
    chunks, body, waiting = ChunkedDecoder(MOST), b"", b""
    for piece in pieces:
        waiting += piece
        while waiting and not chunks.done:
            at, part = chunks.feed(waiting)
            body, waiting = body + part, waiting[at:]
    return (body, waiting) if chunks.done else None


def in_bytes(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


@pytest.mark.parametrize(
    "data",
    [
        b"g\r\n",
        b"1_0\r\n",
        b";a\r\n",
        b"1\r\r",
        b"1;a\rb\r\n",
        b"1\r\nxy",
        b"0\r\n \r\n\r\n",
        b"0\r\n: b\r\n\r\n",
        b"1;" + b"a" * (MOST_EXTENSION_BYTES + 1),
    ],
)
def test_a_body_that_other_parsers_may_read_differently_is_refused(data: bytes) -> None:
    """Beside the forms of tests/http/smuggling.py."""
    for pieces in ([data], in_bytes(data)):
        with pytest.raises(GatewayError) as raised:
            read(pieces)
        assert raised.value.status == 400


@each_case(
    ("first", "more"),
    [
        (b"", b"1;aaaaaaaaaaaaaaa\r\nx\r\n"),
        (b"0\r\nA: ", b"x" * 20),
        (b"0\r\n", b"A: b\r\nC: d\r\n"),
    ],
)
def test_extensions_and_trailers_are_limited(first: bytes, more: bytes) -> None:
    taken = 0

    def come() -> Iterator[bytes]:
        nonlocal taken
        for part in (first, *[more] * 1000):
            taken += len(part)
            yield part

    with pytest.raises(GatewayError) as raised:
        read(come())
    assert raised.value.status == 431
    assert taken <= 2 * MOST


def test_one_call_does_a_bounded_amount_of_work() -> None:
    data = b"1\r\nx\r\n" * 50_000
    tracemalloc.start()
    try:
        offset, body = ChunkedDecoder(MOST).feed(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(body) <= MOST_CHUNKS_PER_FEED
    assert offset < 7 * MOST_CHUNKS_PER_FEED
    assert peak < len(data) / 4, "the rest of the data was copied"


# Requests that the ASGI application serves.


@dataclass
class Application:
    """Answers each request with two pieces of a body once it may; reads when it is told to."""

    scopes: list[Scope] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    may_read: asyncio.Event = field(default_factory=asyncio.Event)
    ended: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})
        await self.may_read.wait()
        self.told.append((await receive())["type"])
        self.ended += 1


@dataclass
class Asked:
    """A connection to an `Application`, and what was sent on it."""

    application: Application = field(default_factory=Application)
    transport: RecordedTransport = field(default_factory=RecordedTransport)
    open: set[BoundedProtocol] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    connection: BoundedProtocol = field(init=False)

    def __post_init__(self) -> None:
        kind = protocol_class(LimitSettings())
        self.connection = kind(self.application, 5.0, self.open, self.tasks)
        self.connection.connection_made(self.transport)


async def some_turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


ASKED = b"%b / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"


async def test_an_application_whose_slow_client_leaves_waits_for_it_no_longer() -> None:
    asked = Asked()
    asked.connection.data_received(ASKED % (b"GET", 0))
    asked.connection.pause_writing()
    asked.application.may_answer.set()
    await some_turns()
    assert (asked.transport.sent, len(asked.tasks), len(asked.open)) == (b"", 1, 1)
    asked.application.may_read.set()
    asked.connection.connection_lost(None)
    await some_turns()
    assert asked.application.told == ["http.disconnect"]
    assert (asked.transport.sent, len(asked.tasks), len(asked.open)) == (b"", 0, 0)


async def test_of_a_body_that_no_application_reads_little_is_kept() -> None:
    asked = Asked()
    asked.connection.data_received(ASKED % (b"POST", 1 << 20) + b"x" * 70_000)
    assert not asked.transport.reads()
    asked.application.may_answer.set()
    await some_turns()
    assert asked.transport.reads(), "its response is complete, and the rest may come"
    cycle = asked.connection.cycle
    assert cycle is not None
    kept = len(cycle.body)
    asked.connection.data_received(b"x" * 70_000)
    assert (len(cycle.body), asked.transport.reads()) == (kept, True)
    asked.application.may_read.set()
    await some_turns()
    asked.connection.connection_lost(None)


@pytest.mark.parametrize("how", ["drained", "begins to drain", "shut down"])
async def test_a_connection_that_ends_has_the_response_that_runs(how: str) -> None:
    asked = Asked()
    if how == "begins to drain":
        asked.connection.begin_drain()
    asked.connection.data_received(ASKED % (b"GET", 0))
    await some_turns()
    if how == "drained":
        asked.connection.drain()
    elif how == "shut down":
        asked.connection.shutdown()
    assert not asked.transport.closed
    asked.application.may_answer.set()
    asked.application.may_read.set()
    await some_turns()
    head, _, body = asked.transport.sent.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head
    assert body == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
    assert (asked.transport.closed, asked.application.ended) == (True, 1)
    asked.connection.connection_lost(None)


INSTALLED = version("uvicorn")
ROOT = Path(__file__).resolve().parents[2]


def test_the_bound_admits_the_tested_minor_version_and_no_later_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {one.name: one.specifier for one in map(Requirement, project["dependencies"])}
    tested = Version(INSTALLED)
    assert tested in required["uvicorn"]
    later = Version(f"{tested.major}.{tested.minor + 1}.0")
    assert later not in required["uvicorn"], "test it, then raise it"


def test_a_cycle_takes_what_the_protocol_gives_it() -> None:
    taken = list(inspect.signature(RequestResponseCycle).parameters)
    assert taken == [
        *("scope", "transport", "flow", "logger", "access_logger", "access_log"),
        *("default_headers", "message_event", "expect_100_continue", "keep_alive", "on_response"),
    ], f"uvicorn {INSTALLED} has changed: check gateway/http/protocol.py"
    methods = {name for name, value in vars(FlowControl).items() if callable(value)}
    assert methods == {
        *("__init__", "drain", "pause_reading", "resume_reading"),
        *("pause_writing", "resume_writing"),
    }, f"uvicorn {INSTALLED} has changed: check gateway/http/connections.py"


@given(
    parts=st.lists(st.binary(min_size=1, max_size=30), max_size=5),
    more=st.sampled_from([b"", b";a", b"; a=b"]),
    place=st.integers(0, 200),
    put=st.sampled_from([*in_bytes(b'\r\n \t;0g\0-+_\x0b"'), b"\r\n"]),
    instead=st.booleans(),
)
def test_a_body_that_is_accepted_means_the_same_to_httptools_and_however_it_is_split(
    parts: list[bytes], more: bytes, place: int, put: bytes, instead: bool
) -> None:
    data = b"".join(b"%x%b\r\n%b\r\n" % (len(part), more, part) for part in parts)
    data += b"0\r\nA: b\r\n\r\n"
    assert read(in_bytes(data)) == read([data]) == (b"".join(parts), b"")
    data = data[:place] + put + data[place + instead :]
    try:
        found = read([data])
    except GatewayError:
        return
    assert read(in_bytes(data)) == found
    if found is not None:
        body, rest = found
        head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        parsed: list[bytes] = []
        parser = httptools.HttpRequestParser(SimpleNamespace(on_body=parsed.append))
        # httptools parses extensions, and what follows.
        with contextlib.suppress(httptools.HttpParserError):
            parser.feed_data(head + data[: len(data) - len(rest)])
            assert b"".join(parsed) == body
