from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import chat, post, raw_connection
from tests.virtual import in_virtual_time, now

HEALTH = b"GET /health HTTP/1.1\r\nHost: node\r\n\r\n"
PLAIN = post("/v1/completions", {"prompt": "a", "max_tokens": 1})


@in_virtual_time
async def test_a_connection_is_reused() -> None:
    async with EmulatedNode() as node, httpx.AsyncClient(base_url=node.url) as client:
        for _ in range(20):
            await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert (node.connections_opened, node.requests) == (1, 20)
        assert [request.reused for request in node.seen][:2] == [False, True]


@in_virtual_time
async def test_a_connection_closes_after_its_last_request() -> None:
    async with EmulatedNode(keepalive_requests=3) as node, raw_connection(node.url) as wire:
        for promise in (b"Keep-Alive: timeout=5, max=100", b"Keep-Alive:", b"Connection: close"):
            await wire.send(HEALTH)
            assert promise in await wire.head()
            assert await wire.until(b"}") == b'{"status":"ok"}'
        assert await wire.rest() == b""


@in_virtual_time
async def test_an_idle_connection_closes() -> None:
    async with EmulatedNode(keepalive_seconds=0.1) as node, raw_connection(node.url) as wire:
        await wire.send(HEALTH)
        await wire.until(b"}")
        began = now()
        assert await wire.rest() == b""
        assert now() - began == pytest.approx(0.1)


@in_virtual_time
async def test_the_idle_timeout_does_not_end_a_long_answer() -> None:
    async with (
        EmulatedNode(keepalive_seconds=0.05, decode_tps=20) as node,
        raw_connection(node.url) as wire,
    ):
        await wire.send(post("/v1/completions", {"prompt": "a", "max_tokens": 5}))
        assert b"200 OK" in await wire.head()


@pytest.mark.parametrize("close", [True, False])
@in_virtual_time
async def test_a_stream_ends_its_connection_by_default(close: bool) -> None:
    async with EmulatedNode(close_after_stream=close) as node, raw_connection(node.url) as wire:
        await wire.send(post("/v1/chat/completions", chat(max_tokens=1)))
        assert b"Keep-Alive: timeout=5" in await wire.head()
        await wire.until(b"\r\n0\r\n\r\n")
        if close:
            assert await wire.rest() == b""
        else:
            await wire.send(PLAIN)
            assert b"200 OK" in await wire.head()


@in_virtual_time
async def test_pipelined_requests_are_answered_in_order() -> None:
    async with EmulatedNode() as node, raw_connection(node.url) as wire:
        await wire.send(PLAIN + HEALTH + PLAIN)
        seen = [await wire.head() + await wire.until(b"}") for _ in range(3)]
        assert b"ok" in seen[1]
        assert node.requests == 2


@in_virtual_time
async def test_anything_but_http_is_a_bad_request() -> None:
    async with EmulatedNode() as node, raw_connection(node.url) as wire:
        await wire.send(b"garbage\r\n\r\n")
        assert (await wire.rest()).startswith(b"HTTP/1.1 400 Bad Request\r\n")


@in_virtual_time
async def test_a_client_that_expects_100_continue_gets_it() -> None:
    async with EmulatedNode() as node, raw_connection(node.url) as wire:
        head, _, body = PLAIN.partition(b"\r\n\r\n")
        await wire.send(head + b"\r\nExpect: 100-continue\r\n\r\n")
        assert await wire.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await wire.send(body)
        assert b"200 OK" in await wire.head()


@in_virtual_time
async def test_a_body_may_come_in_chunks() -> None:
    async with EmulatedNode() as node, httpx.AsyncClient() as client:

        async def body() -> object:
            yield b'{"prompt": '
            yield b'"a"}'

        reply = await client.post(node.url + "/v1/completions", content=body())  # type: ignore[arg-type]
        assert reply.status_code == 200


@in_virtual_time
async def test_a_client_that_does_not_read_stops_the_answer() -> None:
    async with EmulatedNode(context=10**7) as node:
        with socket.create_connection((node.host, node.port)) as client:
            body = chat(max_tokens=10**6, ignore_eos=True)
            client.sendall(post("/v1/chat/completions", body))
            await node.until(lambda: node.engine.tokens > 0)
            written = -1
            while written != node.engine.tokens:
                written = node.engine.tokens
                await asyncio.sleep(0.1)
            assert written < 100_000
            assert node.busy == 1
        await node.until(lambda: node.busy == 0)


@in_virtual_time
async def test_a_killed_node_resets_and_comes_back_on_its_port() -> None:
    async with EmulatedNode(answer_tokens=10**6, decode_tps=50) as node:
        async with raw_connection(node.url) as wire:
            await wire.send(post("/v1/chat/completions", chat()))
            await wire.until(b"\n\n")
            await node.kill()
            with pytest.raises(ConnectionResetError):
                await wire.rest()
        assert (node.busy, node.connections) == (0, 0)
        with pytest.raises(ConnectionRefusedError):
            async with raw_connection(node.url):
                pass
        await node.revive()
        async with raw_connection(node.url) as wire:
            await wire.send(HEALTH)
            assert b"200 OK" in await wire.head()


@in_virtual_time
async def test_a_refusing_node_keeps_its_open_connections() -> None:
    async with EmulatedNode() as node, raw_connection(node.url) as wire:
        await wire.send(HEALTH)
        await wire.until(b"}")
        await node.refuse()
        with pytest.raises(ConnectionRefusedError):
            async with raw_connection(node.url):
                pass
        await wire.send(HEALTH)
        assert b"200 OK" in await wire.head()
        await node.accept()
        async with raw_connection(node.url):
            pass
