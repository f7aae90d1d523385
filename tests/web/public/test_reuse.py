"""Connections to a node as the relay uses them: again and again, and unnoticed when they break."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.emulator import EmulatedNode
from tests.gateways import running_gateway
from tests.web.public.asking import HELLO, public, request

CALM = {"health": {"interval": 60, "discover_interval": 60}, "heartbeat": "off"}


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_one_after_the_other_open_no_further_connection(
    tmp_path: Path, stream: bool
) -> None:
    async with public(tmp_path, CALM, EmulatedNode(close_after_stream=False)) as gate:
        await gate.chat(max_tokens=1)
        before = gate.node.connections_opened
        for _ in range(40):
            assert (await gate.chat(max_tokens=1, stream=stream)).status == 200
        assert gate.node.connections_opened == before


async def test_a_node_that_closes_after_each_stream_is_asked_anew(tmp_path: Path) -> None:
    async with public(tmp_path, CALM) as gate:
        for _ in range(20):
            found = await gate.chat(max_tokens=1, stream=True)
            assert found.status == 200
            assert found.headers["x-gateway-attempts"] == "1"
            assert found.body.endswith(b"data: [DONE]\n\n")


async def test_the_limit_of_requests_on_one_connection_is_not_noticed(tmp_path: Path) -> None:
    async with public(tmp_path, CALM, EmulatedNode(keepalive_requests=10)) as gate:
        before = gate.node.connections_opened
        for _ in range(60):
            found = await gate.chat(max_tokens=1)
            assert (found.status, found.headers["x-gateway-attempts"]) == (200, "1")
        assert 5 <= gate.node.connections_opened - before <= 7


@pytest.mark.parametrize("stream", [False, True])
async def test_connections_that_break_in_the_instant_of_their_reuse_are_no_attempts(
    tmp_path: Path, stream: bool
) -> None:
    node = EmulatedNode(slots=4, close_after_stream=False)
    async with public(tmp_path, CALM, node) as gate:
        await asyncio.gather(*(gate.chat(max_tokens=1) for _ in range(4)))
        node.faults.set("stale")
        for _ in range(10):
            found = await gate.chat(max_tokens=1, stream=stream)
            assert (found.status, found.headers["x-gateway-attempts"]) == (200, "1")
        assert node.faults.fired >= 10
        found_node = gate.running.gateway.fleet.nodes["node-0"]
        assert (found_node.failures, found_node.circuit.failures) == (0, 0)


async def test_an_answer_is_the_same_however_it_is_framed(tmp_path: Path) -> None:
    async with public(tmp_path, CALM) as gate:
        plain = json.loads((await gate.chat(max_tokens=5)).body)
        for fault in ("chunk_extensions", "interim", "slow_head", "trickle"):
            gate.node.faults.next(fault, seconds=0.0001)
            found = await gate.chat(max_tokens=5)
            assert found.status == 200
            assert json.loads(found.body)["choices"] == plain["choices"], fault
            assert "x-checked" not in found.headers


async def test_a_path_prefix_of_the_node_is_kept(tmp_path: Path) -> None:
    heard: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What a reverse proxy does with a prefix: takes it off."""
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", node.port)

        async def back() -> None:
            while data := await upstream_reader.read(65536):
                writer.write(data)
            writer.close()

        returning = asyncio.create_task(back())
        try:
            while data := await reader.read(65536):
                heard.append(data.split(b"\r\n", 1)[0])
                upstream_writer.write(data.replace(b" /llama/", b" /", 1))
        finally:
            upstream_writer.close()
            returning.cancel()
            await asyncio.gather(returning, return_exceptions=True)
            writer.close()

    async with EmulatedNode() as node:
        server = await asyncio.start_server(proxy, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/llama"
        async with running_gateway(tmp_path, [url], CALM) as running:
            reply = await running.client.post("/v1/chat/completions", json=HELLO)
            assert reply.status_code == 200
        server.close()
    assert b"POST /llama/v1/chat/completions HTTP/1.1" in heard
    assert all(b" /llama/" in line for line in heard)


async def test_a_body_goes_to_the_node_byte_for_byte(tmp_path: Path) -> None:
    async with public(tmp_path, CALM) as gate:
        body = b'{ "messages":[ {"role":"user","content":"\\u00e9 \xc3\xa9"} ] , "max_tokens":1 }'
        assert (await gate.ask(request(body))).status == 200
        assert gate.node.seen[-1].body == body
