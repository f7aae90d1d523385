"""A request's caller and content never depend on how its bytes were split."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.keys import new_key
from gateway.config.listeners import LimitSettings
from gateway.http.protocol import BoundedProtocol, protocol_class
from tests.virtual import VirtualLoop
from tests.web.bare_gateway import BareGateway, bare_gateway
from tests.web.recorded_transport import RecordedTransport

KEYS = [new_key("anna"), new_key("ben")]
CREDENTIALS = {
    "anna": f"Authorization: Bearer {KEYS[0].text}\r\n",
    "ben": f"x-api-key: {KEYS[1].text}\r\n",
    "nobody": "",
    "a liar": f"Authorization: Bearer {KEYS[0].text[:-1]}\r\n",
}
PATH = "/v1/chat/completions"


@dataclass
class Served:
    """The callers of some requests, and status and message of each response."""

    callers: list[str | None]
    replies: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class Bench:
    """A public listener without sockets."""

    loop: asyncio.AbstractEventLoop
    gateway: BareGateway
    kind: type[BoundedProtocol]

    def served(self, pieces: list[bytes]) -> Served:
        return self.loop.run_until_complete(self._served(pieces))

    async def _served(self, pieces: list[bytes]) -> Served:
        self.gateway.bus.flush()
        self.gateway.ended.clear()
        connection = self.kind(self.gateway.site, 5.0, set(), set(), self.loop)
        transport = RecordedTransport()
        connection.connection_made(transport)
        for piece in pieces:
            while not transport.reads():  # noqa: ASYNC110 - a turn of the loop at a time
                await asyncio.sleep(0)
            if piece:
                connection.data_received(piece)
            else:
                await asyncio.sleep(0.01)  # Of virtual time: all pending work is done.
        await asyncio.sleep(1.0)
        assert transport.closed or not connection.backlog, "bytes wait though no request runs"
        connection.connection_lost(None)
        self.gateway.bus.flush()
        # Requests that were refused before they were identified have no caller.
        found = Served([record.caller for record in self.gateway.ended])
        rest = transport.sent
        while rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            lines = head.decode().lower().split("\r\n")
            length = next(int(x.split(":")[1]) for x in lines if x.startswith("content-length"))
            body, rest = rest[:length], rest[length:]
            found.replies.append((int(lines[0].split()[1]), json.loads(body)["error"]["message"]))
        return found


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    loop, stack = VirtualLoop(), AsyncExitStack()
    asyncio.set_event_loop(loop)
    keys = [{"id": key.id, "sha256": key.sha256} for key in KEYS]
    try:
        gateway = loop.run_until_complete(
            stack.enter_async_context(bare_gateway(settings={"keys": keys}))
        )
        kind = protocol_class(LimitSettings(header_bytes=4096), gateway.handler.serve)
        yield Bench(loop, gateway, kind)
    finally:
        loop.run_until_complete(stack.aclose())
        loop.close()
        asyncio.set_event_loop(None)


def asking(who: str, model: str, form: str) -> bytes:
    """The bytes of a request by this caller for this model."""
    body = json.dumps({"model": model, "messages": []}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n{CREDENTIALS[who]}X-Request-ID: same\r\n"
    if form == "chunked":
        half = len(body) // 2
        chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(x), x) for x in (body[:half], body[half:]))
        trailers = CREDENTIALS["anna"] + CREDENTIALS["ben"] + "Content-Length: 3\r\n"
        framed = chunks + b"0\r\n" + trailers.encode() + b"\r\n"
        return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + framed
    if form == "upgrade":
        head += "Connection: Upgrade\r\nUpgrade: h2c\r\n"
    if form == "length first":
        head = head.replace("Host", f"Content-Length: {len(body)}\r\nHost")
    else:
        head += f"Content-Length: {len(body)}\r\n"
    return f"{head}\r\n".encode() + body


requests = st.builds(
    asking,
    st.sampled_from(sorted(CREDENTIALS)),
    st.sampled_from(["a", "bb", "c" * 300]),
    st.sampled_from(["plain", "plain", "length first", "chunked", "upgrade"]),
)


@given(data=st.data(), several=st.lists(requests, min_size=1, max_size=5))
def test_splitting_the_bytes_changes_nothing(
    bench: Bench, data: st.DataObject, several: list[bytes]
) -> None:
    alone = [bench.served([one]) for one in several]
    whole = b"".join(several)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=8)))
    edges = [0]
    for one in several:
        edges.append(edges[-1] + len(one))
    if data.draw(st.booleans()):
        cuts = sorted({*cuts, *edges[1:-1]})
    pieces = []
    for begin, end in pairwise([0, *cuts, len(whole)]):
        pieces.append(whole[begin:end])
        if data.draw(st.booleans()):
            pieces.append(b"")
    found = bench.served(pieces)

    count = len(found.replies)
    assert found.replies == [reply for one in alone for reply in one.replies][:count]
    assert found.callers == [caller for one in alone for caller in one.callers][:count]
    # A client that is refused before its body is complete is disconnected.
    assert count == len(several) or found.replies[-1][0] == 401


@pytest.mark.parametrize("cut", [1, 30])
def test_half_a_head_is_never_taken_for_a_known_one(bench: Bench, cut: int) -> None:
    whole = asking("anna", "a", "length first")
    found = bench.served([whole[:cut], whole[cut:], b"", whole[cut:]])
    assert found.callers[0] == KEYS[0].id
    assert KEYS[0].id not in found.callers[1:]


def test_bytes_behind_a_request_are_not_served_as_its_caller(bench: Bench) -> None:
    spy = asking("nobody", "a", "plain")
    first = f"POST {PATH} HTTP/1.1\r\n{CREDENTIALS['anna']}X-Rest: ".encode()
    found = bench.served([first, spy, b"", spy])
    assert found.callers == [KEYS[0].id, bench.served([spy]).callers[0]]
    assert [status for status, _ in found.replies] == [404, 401]


def test_a_known_head_is_recognised_after_split_requests(bench: Bench) -> None:
    whole = asking("anna", "a", "plain")
    found = bench.served([whole, b"", whole[:50], whole[50:], b"", whole, b"", whole])
    assert found.callers == [KEYS[0].id] * 4


def test_of_a_pipeline_one_request_runs_and_the_rest_stays_bytes(bench: Bench) -> None:
    """However many requests a packet has, one runs, and the rest waits as bytes."""

    async def ask() -> tuple[int, int]:
        connection = bench.kind(bench.gateway.site, 5.0, set(), set(), bench.loop)
        transport = RecordedTransport()
        connection.connection_made(transport)
        data = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2500
        connection.data_received(data)
        begun = len(connection.tasks)
        assert not transport.reads(), "more is read though much waits"
        while connection.backlog:
            await asyncio.sleep(0)
            assert len(connection.tasks) <= 1
            assert len(connection.backlog) <= len(data)
        await asyncio.sleep(0.01)
        assert transport.reads()
        connection.connection_lost(None)
        return begun, transport.sent.count(b'"ok"')

    assert bench.loop.run_until_complete(ask()) == (1, 2500)


def test_a_client_that_reads_no_responses_gets_no_more(bench: Bench) -> None:
    async def ask() -> None:
        connection = bench.kind(bench.gateway.site, 5.0, set(), set(), bench.loop)
        transport = RecordedTransport()
        connection.connection_made(transport)
        whole = asking("anna", "a", "plain")
        connection.data_received(whole)
        await asyncio.sleep(0.01)
        answered = transport.sent.count(b"HTTP/1.1 ")
        connection.pause_writing()
        for _ in range(1000):
            if transport.reads():
                connection.data_received(whole)
        await asyncio.sleep(0.01)
        assert transport.sent.count(b"HTTP/1.1 ") == answered
        assert not transport.reads()
        held = len(connection.backlog) // len(whole)
        connection.resume_writing()
        await asyncio.sleep(1.0)
        assert transport.sent.count(b"HTTP/1.1 ") == answered + held
        assert transport.reads()
        connection.connection_lost(None)

    bench.loop.run_until_complete(ask())


def test_clients_that_read_no_responses_are_aborted_if_too_many_bytes_wait(
    bench: Bench,
) -> None:
    """Others are served, and waiting bytes are counted exactly."""
    handler = bench.gateway.handler
    kind = protocol_class(LimitSettings(), handler.serve, pipeline_bytes=300_000)
    whole = asking("anna", "a", "plain")
    requests = 100_000 // len(whole)

    async def ask() -> None:
        connections, transports = [], [RecordedTransport() for _ in range(5)]
        for transport in transports:
            connection = kind(bench.gateway.site, 5.0, set(), set(), bench.loop)
            connection.connection_made(transport)
            connection.data_received(whole * requests)
            if transport is not transports[-1]:
                connection.pause_writing()
            connections.append(connection)
        assert [transport.closed for transport in transports] == [False] * 3 + [True, False]
        held = sum(len(connection.backlog) for connection in connections)
        assert kind.pipeline_queue.waiting_bytes == held
        await asyncio.sleep(1.0)
        assert transports[-1].sent.count(b"HTTP/1.1 ") == requests
        for connection in connections:
            connection.connection_lost(None)
        assert kind.pipeline_queue.waiting_bytes == 0

    bench.loop.run_until_complete(ask())
