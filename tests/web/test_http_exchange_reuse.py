"""Connections to a node are reused, and a stale one goes unnoticed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import raw_connection
from tests.gateways import running_gateway, until
from tests.transport.raw import Peer
from tests.virtual import in_virtual_time
from tests.web.raw_client import CHAT, HELLO, answer, public, request

CALM = {"health": {"interval": 60, "discover_interval": 60}, "heartbeat": "off"}


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_sequential_requests_reuse_one_connection(tmp_path: Path, stream: bool) -> None:
    async with public(tmp_path, CALM, EmulatedNode(close_after_stream=False)) as gate:
        await gate.chat(max_tokens=1)
        before = gate.node.connections_opened
        for _ in range(40):
            assert (await gate.chat(max_tokens=1, stream=stream)).status == 200
        assert gate.node.connections_opened == before


@in_virtual_time
async def test_a_node_that_closes_after_each_stream_gets_new_connections(tmp_path: Path) -> None:
    async with public(tmp_path, CALM) as gate:
        for _ in range(20):
            found = await gate.chat(max_tokens=1, stream=True)
            assert found.status == 200
            assert found.headers["x-gateway-attempts"] == "1"
            assert found.body.endswith(b"data: [DONE]\n\n")


@in_virtual_time
async def test_a_nodes_limit_of_requests_per_connection_is_not_noticed(tmp_path: Path) -> None:
    async with public(
        tmp_path, CALM, EmulatedNode(keepalive_requests=10, close_after_stream=False)
    ) as gate:
        before = gate.node.connections_opened
        for _ in range(60):
            found = await gate.chat(max_tokens=1)
            assert (found.status, found.headers["x-gateway-attempts"]) == (200, "1")
        assert 5 <= gate.node.connections_opened - before <= 7


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_a_stale_connection_is_no_attempt(tmp_path: Path, stream: bool) -> None:
    node = EmulatedNode(slots=4, close_after_stream=False)
    async with public(tmp_path, CALM, node) as gate:
        pool = gate.running.gateway.fleet.nodes["node-0"].upstream
        pool.stale_seconds = 60.0  # though this machine stood still
        await asyncio.gather(*(gate.chat(max_tokens=1) for _ in range(4)))
        node.faults.set("stale")
        for _ in range(10):
            found = await gate.chat(max_tokens=1, stream=stream)
            assert (found.status, found.headers["x-gateway-attempts"]) == (200, "1")
        assert node.faults.fired >= 10
        found_node = gate.running.gateway.fleet.nodes["node-0"]
        assert (found_node.failures, found_node.circuit.failures) == (0, 0)


@in_virtual_time
async def test_a_response_is_the_same_however_it_is_framed(tmp_path: Path) -> None:
    async with public(tmp_path, CALM) as gate:
        plain = json.loads((await gate.chat(max_tokens=5)).body)
        for fault in ("chunk_extensions", "interim", "slow_head", "trickle"):
            gate.node.faults.next(fault, seconds=0.0001)
            found = await gate.chat(max_tokens=5)
            assert found.status == 200
            assert json.loads(found.body)["choices"] == plain["choices"], fault
            assert "x-checked" not in found.headers


@in_virtual_time
async def test_a_path_prefix_of_the_node_is_kept(tmp_path: Path) -> None:
    heard: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A reverse proxy that removes a prefix."""
        peer = Peer(reader, writer)
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", node.port)

        async def back() -> None:
            while data := await upstream_reader.read(65536):
                writer.write(data)
            writer.close()

        returning = asyncio.create_task(back())
        try:
            while True:
                data = await peer.request()
                heard.append(data.split(b"\r\n", 1)[0])
                upstream_writer.write(data.replace(b" /llama/", b" /", 1))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
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


@in_virtual_time
async def test_a_body_goes_to_the_node_byte_for_byte(tmp_path: Path) -> None:
    async with public(tmp_path, CALM) as gate:
        body = b'{ "messages":[ {"role":"user","content":"\\u00e9 \xc3\xa9"} ] , "stream":true }'
        assert (await gate.ask(request(body))).status == 200
        assert gate.node.seen[-1].body == body


def asking_for(text: str) -> bytes:
    return request({"messages": [{"role": "user", "content": text}], "max_tokens": 1})


def heard(node: EmulatedNode) -> list[str]:
    return [json.loads(seen.body)["messages"][0]["content"] for seen in node.seen]


@in_virtual_time
async def test_requests_with_a_repeated_head_have_their_own_bodies(tmp_path: Path) -> None:
    texts = ["a", "bb", "c" * 200, "a", "d" * 5000, "e"]
    async with public(tmp_path, CALM) as gate, raw_connection(gate.url) as wire:
        for text in texts:
            await wire.send(asking_for(text))
            assert (await answer(wire)).status == 200
        assert heard(gate.node)[-len(texts) :] == texts


@in_virtual_time
async def test_a_repeated_head_may_arrive_in_pieces_or_with_others(tmp_path: Path) -> None:
    async with public(tmp_path, CALM) as gate, raw_connection(gate.url) as wire:
        for _ in range(3):
            await wire.send(asking_for("first"))
            assert (await answer(wire)).status == 200
        data = asking_for("in pieces")
        for cut in (5, 20, len(data) - 4):
            await wire.send(data[:cut])
            await asyncio.sleep(0.02)
            await wire.send(data[cut:])
            assert (await answer(wire)).status == 200
        await wire.send(asking_for("one") + asking_for("two") + asking_for("three"))
        await asyncio.sleep(0.02)
        await wire.send(asking_for("four"))
        for _ in range(4):
            assert (await answer(wire)).status == 200
        await wire.send(asking_for("last"))
        assert (await answer(wire)).status == 200
        pieces = ["in pieces"] * 3
        assert heard(gate.node)[-8:] == [*pieces, "one", "two", "three", "four", "last"]


@in_virtual_time
async def test_a_head_that_differs_from_the_last_is_parsed(tmp_path: Path) -> None:
    data = asking_for("hello")
    async with public(tmp_path, CALM) as gate:
        for changed, expected in (
            (data.replace(b"Host: localhost", b"Host: localhost\r\nX-Priority: batch"), 200),
            (data.replace(b"POST", b"GET "), 405),
            (data.replace(b"Content-Length: ", b"Content-Length: +"), 400),
            (data.replace(CHAT.encode(), CHAT.encode() + b"X"), 404),
        ):
            async with raw_connection(gate.url) as wire:
                for _ in range(2):
                    await wire.send(data)
                    assert (await answer(wire)).headers["x-gateway-class"] == "normal"
                await wire.send(changed)
                found = await answer(wire)
                assert found.status == expected
                assert found.headers.get("x-gateway-class") == (
                    "batch" if expected == 200 else None
                )


@in_virtual_time
async def test_a_small_request_is_served_without_a_task(tmp_path: Path) -> None:
    async with (
        public(tmp_path, CALM, EmulatedNode(embeddings=True)) as gate,
        raw_connection(gate.url) as wire,
    ):
        small = request({"input": "hello"}, path="/v1/embeddings")
        await wire.send(small)  # This opens a connection to the node.
        assert (await answer(wire)).status == 200
        gate.node.faults.next("hang")
        before = asyncio.all_tasks()
        await wire.send(small)
        await until(lambda: gate.node.requests == 2)
        assert len(gate.running.gateway.registry) == 1
        new = [repr(task.get_coro()) for task in asyncio.all_tasks() - before]
        assert [one for one in new if "EmulatedNode." not in one] == []
