from __future__ import annotations

import asyncio
import socket

from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import chat, post, raw_connection
from tests.virtual import in_virtual_time

HEALTH = b"GET /health HTTP/1.1\r\nHost: node\r\n\r\n"


@in_virtual_time
async def test_a_connection_closes_after_its_last_request() -> None:
    async with EmulatedNode(keepalive_requests=3) as node, raw_connection(node.url) as wire:
        for promise in (b"Keep-Alive: timeout=5, max=100", b"Keep-Alive:", b"Connection: close"):
            await wire.send(HEALTH)
            assert promise in await wire.head()
            assert await wire.until(b"}") == b'{"status":"ok"}'
        assert await wire.rest() == b""


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
