from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway.transport.connection import NodeConnection
from gateway.transport.errors import (
    ConnectFailed,
    ConnectionReset,
    ConnectTimedOut,
    InvalidResponse,
    LocalResourcesExhausted,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.transport.httpx_transport import PoolTransport
from gateway.transport.pool import ConnectionPool, NodeAddress
from tests.emulator import EmulatedNode
from tests.transport.raw import (
    HOWEVER_SLOW,
    Peer,
    Script,
    always,
    nobody_listens,
    once,
    raw_server,
)

LIMIT = 30.0
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello"


@asynccontextmanager
async def client_of(address: NodeAddress, read: float = LIMIT) -> AsyncIterator[httpx.AsyncClient]:
    pool = ConnectionPool(address, stale_seconds=HOWEVER_SLOW)
    timeout = httpx.Timeout(LIMIT, read=read)
    async with httpx.AsyncClient(
        transport=PoolTransport(pool), base_url=f"http://{address.host}", timeout=timeout
    ) as client:
        yield client
    pool.close()


async def test_a_response_has_status_headers_and_body() -> None:
    async with raw_server(always(OK)) as server, client_of(server.address()) as client:
        for _ in range(3):
            reply = await client.get("/x")
            assert (reply.status_code, reply.text) == (200, "hello")
            assert reply.headers["content-type"] == "text/plain"
        assert server.opened == 1


async def test_the_request_is_sent_with_its_headers_and_body() -> None:
    heard: list[bytes] = []

    async def script(peer: Peer) -> None:
        heard.append(await peer.request())
        await peer.say(OK)

    fields = b"host: node:1\r\nauthorization: Bearer k\r\n"
    async with (
        raw_server(script) as server,
        client_of(server.address(header_lines=fields)) as client,
    ):
        await client.post("/a%20b?c=d", json={"x": 1}, headers={"X-Own": "y"})
    head, _, body = heard[0].partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert lines[0] == b"post /a%20b?c=d http/1.1"
    assert lines.count(b"host: node:1") == 1
    assert sum(line.startswith(b"host:") for line in lines) == 1
    assert b"authorization: bearer k" in lines
    assert b"x-own: y" in lines
    assert b"content-length: %d" % len(body) in lines
    assert not any(line.startswith(b"connection:") for line in lines)
    assert body == b'{"x":1}'


async def test_a_generated_body_is_sent_with_its_length() -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"ab"
        yield b"cd"

    heard: list[bytes] = []

    async def script(peer: Peer) -> None:
        head = await peer.reader.readuntil(b"\r\n\r\n")
        heard.append(head + await peer.reader.readexactly(4))
        await peer.say(OK)

    async with raw_server(script) as server, client_of(server.address()) as client:
        assert (await client.post("/x", content=parts())).text == "hello"
    assert b"transfer-encoding" not in heard[0].lower()
    assert b"content-length: 4\r\n" in heard[0].lower()
    assert heard[0].endswith(b"abcd")


async def test_a_head_request_does_not_wait_for_a_body() -> None:
    async with EmulatedNode() as node:
        address = NodeAddress("127.0.0.1", node.port, b"", b"host: n\r\n")
        async with client_of(address) as client:
            reply = await client.head("/health")
            assert (reply.status_code, reply.content) == (200, b"")
            assert int(reply.headers["content-length"]) > 0
            assert (await client.get("/health")).json() == {"status": "ok"}


async def test_a_request_on_a_stale_connection_is_sent_again() -> None:
    async with EmulatedNode() as node:
        address = NodeAddress("127.0.0.1", node.port, b"", b"host: n\r\n")
        async with client_of(address) as client:
            await client.get("/health")
            node.faults.set("stale", path="*")
            assert (await client.get("/health")).status_code == 200
            assert node.faults.fired == 1


async def silent(peer: Peer) -> None:
    await peer.reader.read()


async def halfway(peer: Peer) -> None:
    await peer.request()
    await peer.say(OK[:-2])
    await peer.reader.read()


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (once(b""), httpx.ReadError),
        (once(OK[:-2]), httpx.ReadError),
        (once(b"nonsense\r\n\r\n"), httpx.RemoteProtocolError),
        (once(OK[:-5].replace(b"Content-Length: 5", b"Transfer-Encoding: chunked") + b"zz\r\n"),
         httpx.RemoteProtocolError),
        (silent, httpx.ReadTimeout),
        (halfway, httpx.ReadTimeout),
    ],
)  # fmt: skip
async def test_a_failed_response_is_httpxs_own_error(
    script: Script, kind: type[httpx.TransportError]
) -> None:
    limit = 0.2 if kind is httpx.ReadTimeout else LIMIT
    async with raw_server(script) as server, client_of(server.address(), limit) as client:
        with pytest.raises(httpx.TransportError) as raised:
            await client.get("/x")
        assert type(raised.value) is kind
        assert raised.value.request.url.path == "/x"
        await server.until(lambda: server.open == 0)


async def test_a_refused_connection_is_httpxs_own_error() -> None:
    with nobody_listens() as port:
        async with client_of(NodeAddress("127.0.0.1", port, b"", b"")) as client:
            with pytest.raises(httpx.ConnectError, match="The connection failed"):
                await client.get("/x")


async def test_a_connect_timeout_is_httpxs_own_error() -> None:
    class Loop:
        time = asyncio.get_running_loop().time

        async def create_connection(self, *_: object, **__: object) -> None:
            await asyncio.sleep(60)

    loop: Any = Loop()
    pool = ConnectionPool(NodeAddress("127.0.0.1", 1, b"", b""), loop=loop)
    async with httpx.AsyncClient(
        transport=PoolTransport(pool), base_url="http://n", timeout=0.05
    ) as client:
        with pytest.raises(httpx.ConnectTimeout):
            await client.get("/x")


async def test_a_response_that_is_not_read_to_its_end_closes_its_connection() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await peer.reader.read()

    async with raw_server(script) as server, client_of(server.address()) as client:
        async with client.stream("GET", "/x") as reply:
            async for part in reply.aiter_bytes():
                assert part == b"hello"
                break
        await server.until(lambda: server.open == 0)


async def test_a_cancelled_request_closes_its_connection() -> None:
    async with raw_server(silent) as server, client_of(server.address()) as client:
        asking = asyncio.create_task(client.get("/x"))
        await server.until(lambda: server.open == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await server.until(lambda: server.open == 0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectFailed("x"), httpx.ConnectError),
        (ConnectTimedOut("x"), httpx.ConnectTimeout),
        (LocalResourcesExhausted("x"), httpx.PoolTimeout),
        (InvalidResponse("x"), httpx.RemoteProtocolError),
        (ConnectionReset("x"), httpx.ReadError),
        (UpstreamTimeout("silence", "x"), httpx.ReadError),
    ],
)
async def test_each_failure_of_a_connection_is_the_nearest_error_of_httpx(
    error: UpstreamError, kind: type[httpx.TransportError]
) -> None:
    class FailingPool(ConnectionPool):
        async def connect(self, timeout: float) -> NodeConnection:
            raise error

    pool = FailingPool(NodeAddress("127.0.0.1", 1, b"", b""))
    async with httpx.AsyncClient(transport=PoolTransport(pool), base_url="http://n") as client:
        with pytest.raises(httpx.TransportError) as raised:
            await client.get("/x")
    assert type(raised.value) is kind
    assert raised.value.__cause__ is error
