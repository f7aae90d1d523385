"""Clients that send one head again and again, that disconnect, and that read slowly."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from gateway import errors
from gateway.forward.forwarder import Forwarder
from gateway.http.exchange import HttpExchange
from gateway.nodes.node import Node, NodeState
from tests.emulator import EmulatedNode, expected_chat_text
from tests.emulator.raw_connection import RawConnection, raw_connection
from tests.gateways import running_gateway, until
from tests.transport.raw import full_backlog
from tests.virtual import in_virtual_time, now
from tests.web.raw_client import CHAT, HELLO, Public, answer, public, request

CALM = {"health": {"interval": 60, "discover_interval": 60}, "heartbeat": "off"}


@in_virtual_time
async def test_a_head_that_differs_from_the_last_is_parsed(tmp_path: Path) -> None:
    data = request({**HELLO, "max_tokens": 1})
    async with public(tmp_path, CALM) as gate:
        for changed, expected, chosen in (
            (data.replace(b"localhost", b"localhost\r\nX-Priority: batch"), 200, "batch"),
            (data.replace(b"POST", b"GET "), 405, None),
            (data.replace(b"Content-Length: ", b"Content-Length: +"), 400, None),
            (data.replace(CHAT.encode(), CHAT.encode() + b"X"), 404, None),
        ):
            async with raw_connection(gate.url) as wire:
                for _ in range(2):
                    await wire.send(data)
                    assert (await answer(wire)).headers["x-gateway-class"] == "normal"
                await wire.send(changed)
                found = await answer(wire)
                assert (found.status, found.headers.get("x-gateway-class")) == (expected, chosen)


QUICK = {"health": {"interval": 0.2}, "heartbeat": "off"}
STREAM = {**HELLO, "stream": True}
LONG = 90_000
"""Tokens whose events, with `timings_per_token`, exceed the buffers of any socket (50 MB)."""


def the_node(gate: Public) -> Node:
    return gate.running.gateway.fleet.nodes["node-0"]


async def left(gate: Public) -> None:
    """The record says that the client disconnected, and no node is blamed."""
    record = await gate.last()
    assert (record.status, record.reason) == (499, "client_closed")
    await until(lambda: len(gate.running.gateway.registry) == 0)
    assert gate.running.gateway.handler.body_memory.total_bytes == 0
    assert (the_node(gate).circuit.failures, the_node(gate).failures) == (0, 0)
    assert the_node(gate).state is NodeState.READY


@asynccontextmanager
async def asking(gate: Public, data: bytes) -> AsyncIterator[RawConnection]:
    async with raw_connection(gate.url) as wire:
        await wire.send(data)
        yield wire


@pytest.mark.parametrize(("size", "stream"), [(10, True), (100_000, False)])
@in_virtual_time
async def test_a_client_that_leaves_before_the_nodes_head_leaves_no_connection(
    tmp_path: Path, size: int, stream: bool
) -> None:
    async with public(tmp_path, QUICK) as gate:
        gate.node.faults.next("hang")
        padded = {**HELLO, "stream": stream, "padding": "x" * size}
        async with asking(gate, request(padded)):
            await until(lambda: gate.node.requests == 1)
            (asked,) = [one for one in gate.node.open_connections if one.task is not None]
        await left(gate)
        await until(lambda: asked not in gate.node.open_connections)
        gate.node.faults.clear()
        await until(lambda: the_node(gate).leased == 0)


@in_virtual_time
async def test_a_client_that_resets_its_connection_frees_the_slot(tmp_path: Path) -> None:
    """One that just leaves: tests/forward/test_attempt_ends.py."""
    node = EmulatedNode(slots=1, decode_tps=50, answer_tokens=2000)
    async with public(tmp_path, QUICK, node) as gate:
        async with asking(gate, request(STREAM)) as wire:
            await until(lambda: gate.node.engine.tokens > 2)
            await wire.head()
            sock = wire.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            wire.writer.transport.abort()
        await until(lambda: gate.node.busy == 0)
        await left(gate)
        await until(lambda: the_node(gate).leased == 0)
        gate.node.engine.decode_tps = 1e9


@in_virtual_time
async def test_a_client_that_only_sends_no_more_gets_its_answers(tmp_path: Path) -> None:
    node = EmulatedNode(slots=2, prefill_tps=20, decode_tps=50, answer_tokens=200)
    async with public(tmp_path, {**QUICK, "ollama": True}, node) as gate:
        metrics = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
        streamed = b"data: [DONE]"
        for url, data, marks in [
            (gate.running.admin_url, metrics, [b"llama_gateway_"]),
            (gate.url, request(), [b'"choices"']),
            (gate.url, request().replace(b"HTTP/1.1", b"HTTP/1.0"), [b'"choices"']),
            (gate.url, request() + request(STREAM), [b'"choices"', streamed]),
            (gate.url, request() + b"\r\n", [b'"choices"']),
            (gate.url, request() + request()[:-5], [b'"choices"']),
            (gate.url, request(HELLO, path="/api/chat"), [b'"done":true']),
        ]:
            async with raw_connection(url) as wire:
                await wire.send(data)
                wire.writer.write_eof()
                sent = await wire.rest()
            assert sent.startswith(b"HTTP/1.1 200 OK\r\n"), (data, sent[:200])
            assert sent.count(b"HTTP/1.1 ") == len(marks), (data, sent)
            for mark in marks:
                assert mark in sent, (data, sent)


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_a_client_that_leaves_after_it_has_sent_no_more_frees_the_slot(
    tmp_path: Path, stream: bool
) -> None:
    settings = {**QUICK, "heartbeat": 2}
    async with public(tmp_path, settings) as gate:
        gate.node.faults.next("hang")
        async with asking(gate, request({**HELLO, "stream": stream})) as wire:
            wire.writer.write_eof()
            await until(lambda: gate.node.requests == 1)
            await asyncio.sleep(3)
            assert len(gate.running.gateway.registry) == 1
        left_at = now()
        await left(gate)
        assert now() - left_at < 10
        gate.node.faults.clear()


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_a_client_may_leave_while_its_node_is_being_connected(
    tmp_path: Path, stream: bool
) -> None:
    node = EmulatedNode(slots=1)
    async with public(tmp_path, CALM, node) as gate:
        await node.kill()
        with full_backlog(node.port):
            before = descriptors()
            async with asking(gate, request({**HELLO, "stream": stream})):
                await until(lambda: the_node(gate).leased == 1)
                await asyncio.sleep(0.1)
                assert the_node(gate).leased == 1
            await left(gate)
            # Nothing was sent: the slot is free at once.
            await until(lambda: the_node(gate).leased == 0, 0.5)
            await until(lambda: descriptors() <= before, 2.0)
            assert (gate.ended[0].prompt_tokens, gate.ended[0].slot_seconds) == (0, 0.0)
        await node.revive()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# A client that stops reading: what ends its request, and that nothing is left of it.


def endless() -> EmulatedNode:
    """A node that writes more than the sockets' buffers take."""
    return EmulatedNode(slots=1, context=1_000_000, decode_tps=4000, answer_tokens=100_000)


def answers_at_length(node: EmulatedNode) -> None:
    """As long as the buffers of sockets do not take."""
    answer = '{"choices": [{"message": {"role": "assistant", "content": "hi"}}]}'
    node.faults.next("status", status=200, body=answer + " " * (8 << 20))


@asynccontextmanager
async def reading_nothing(gate: Public, **body: Any) -> AsyncIterator[None]:
    async with raw_connection(gate.url) as wire:
        sock = wire.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await wire.send(request({**STREAM, "timings_per_token": True, **body}))
        await wire.head()
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        yield


async def until_it_lags(gate: Public) -> None:
    (in_flight,) = gate.running.gateway.registry
    await until(lambda: in_flight.attempt is not None and in_flight.attempt.client_lagging)


async def ended(gate: Public, status: int) -> None:
    assert (await gate.last()).status == status
    await until(lambda: (gate.node.busy, the_node(gate).leased) == (0, 0))


@pytest.mark.parametrize(("ended_by", "status"), [("the total timeout", 504), ("an operator", 503)])
@in_virtual_time
async def test_a_request_whose_client_stalls_can_be_ended(
    tmp_path: Path, ended_by: str, status: int
) -> None:
    settings = {**QUICK, "timeouts": {"total": 5.0}}
    async with public(tmp_path, settings, endless()) as gate, reading_nothing(gate):
        await until_it_lags(gate)
        if ended_by == "an operator":
            (in_flight,) = gate.running.gateway.registry
            in_flight.cancel(errors.shutting_down())
        await ended(gate, status)


@pytest.mark.parametrize("stream", [True, False])
@in_virtual_time
async def test_a_client_that_stalls_for_long_is_disconnected(tmp_path: Path, stream: bool) -> None:
    settings = {**QUICK, "limits": {"send_timeout": 0.5}}
    async with public(tmp_path, settings, node := endless()) as gate:
        if not stream:
            answers_at_length(node)
        async with reading_nothing(gate, stream=stream):
            await ended(gate, 499 if stream else 200)
            await gate.all_disconnected()
        assert the_node(gate).failures == 0


@in_virtual_time
async def test_a_client_that_reads_a_little_now_and_then_is_not_disconnected(
    tmp_path: Path,
) -> None:
    loop = asyncio.get_running_loop()
    async with public(tmp_path, {**QUICK, "limits": {"send_timeout": 5.0}}) as gate:
        answers_at_length(gate.node)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            to = urlsplit(gate.url)
            await loop.sock_connect(client, (to.hostname, to.port))
            await loop.sock_sendall(client, request())
            await ended(gate, 200)
            end, size = loop.time() + 4 * 5.0, 0
            while loop.time() < end:
                size += len(await loop.sock_recv(client, 1024))
                await asyncio.sleep(0.1)
            # So little that the kernel has accepted nothing more.
            assert size < 1 << 18
            listener = gate.running.gateway.public_listener
            assert listener is not None
            assert len(listener.connections) == 1


@pytest.mark.timeout(300)
@in_virtual_time
async def test_a_slow_client_holds_no_slot_once_its_response_is_received(tmp_path: Path) -> None:
    async with public(tmp_path, QUICK, node := endless()) as gate:
        # How much the sockets' buffers take depends on the machine.
        async with reading_nothing(gate):
            await until_it_lags(gate)
            tokens = node.engine.tokens + 200
        await ended(gate, 499)
        async with reading_nothing(gate, max_tokens=tokens):
            await until_it_lags(gate)
            await until(lambda: node.busy == 0)
            await until(lambda: the_node(gate).leased == 0, 2.0)
            assert len(gate.running.gateway.registry) == 1, "it has all been sent: no test"
            quick = json.loads((await gate.chat(max_tokens=5)).body)
            text = quick["choices"][0]["message"]["content"]
            assert text == expected_chat_text(HELLO["messages"], 5)
        await ended(gate, 499)
        assert [record.status for record in gate.ended] == [499, 200, 499]
        assert the_node(gate).failures == 0


@pytest.mark.timeout(300)
@in_virtual_time
async def test_a_slow_reader_stops_its_node_and_no_other_client(tmp_path: Path) -> None:
    node = EmulatedNode(slots=2, context=1_000_000, answer_tokens=LONG)
    # Long: the kernel opens a window that was shut by its own timers, in real time.
    settings = {**QUICK, "timeouts": {"silence": 60}}
    async with public(tmp_path, settings, node) as gate:
        async with asking(gate, request({**STREAM, "timings_per_token": True})) as slow:
            await slow.head()
            slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
            stood = -1
            while stood != node.engine.tokens:
                stood = node.engine.tokens
                await asyncio.sleep(0.1)
            assert stood < LONG, "everything went out, though nobody reads"
            live = next(iter(gate.running.gateway.registry))
            assert live.attempt is not None
            assert live.attempt._connection is not None
            assert 0 < live.attempt._connection._pending < 2_000_000
            quick = await gate.chat(max_tokens=5)
            assert quick.status == 200
            await asyncio.sleep(61.0)  # longer than a node may be silent
            assert node.busy == 1, "the node was given up for its client's slowness"
            slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
            parts = [await slow.some()]
            while not parts[-1].endswith(b"0\r\n\r\n"):
                parts.append(await slow.some())
        data = b"".join(parts)
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert data.count(b"chat.completion.chunk") >= LONG
        record = await gate.last()
        assert record.status == 200
        assert the_node(gate).failures == 0
        node.engine.answer_tokens = 10


@in_virtual_time
async def test_a_large_body_goes_to_the_node_with_all_that_it_is_to_get(tmp_path: Path) -> None:
    settings = {**QUICK, "models": {"*": {"use": "demo"}, "demo": {"strip": ["left_out"]}}}
    async with public(tmp_path, settings) as gate:
        large: dict[str, Any] = {"padding": "é" * 3_000_000}
        assert (await gate.chat(max_tokens=1, **large)).status == 200
        assert json.loads(gate.node.seen[-1].body)["padding"] == large["padding"]
        for large in ({"left_out": "a" * 100_000}, {"model": "z" * 100_000}):
            assert (await gate.chat(max_tokens=1, **large)).status == 200
            assert len(gate.node.seen[-1].body) < 1000


@pytest.mark.parametrize("size", [10, 100_000], ids=["with its head", "after its head"])
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_request_that_fails_within_the_gateway_is_500_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, at_once: bool
) -> None:
    async def fail(*_: object) -> None:
        if not at_once:
            await asyncio.sleep(0)
        raise ValueError("never so")

    monkeypatch.setattr(Forwarder, "forward", fail)
    async with running_gateway(tmp_path, [EmulatedNode()], CALM) as running:
        body = {"messages": [{"role": "user", "content": "x" * size}]}
        found = await running.client.post(CHAT, json=body)
        assert (found.status_code, found.headers["connection"]) == (500, "close")
        assert found.json()["error"]["message"] == "The gateway failed."
        await until(lambda: not running.held(), seen=running.held)
    assert failures(tmp_path) == ["ValueError"]


async def test_a_stream_that_fails_within_the_gateway_has_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("never so")

    monkeypatch.setattr(HttpExchange, "end_response", fail)
    async with running_gateway(tmp_path, [EmulatedNode()], CALM) as running:
        async with raw_connection(running.url) as wire:
            await wire.send(request({**HELLO, "max_tokens": 2, "stream": True}))
            assert (await wire.head()).startswith(b"HTTP/1.1 200 ")
            events = await wire.rest()
        assert not events.endswith(b"0\r\n\r\n")
        assert b"HTTP/1.1" not in events
        await until(lambda: not running.held(), seen=running.held)
    assert failures(tmp_path) == ["ValueError"]


def failures(folder: Path) -> list[str]:
    """The kinds of errors by which requests failed, as the log has them."""
    lines = map(json.loads, (folder / "gateway.log").read_text().splitlines())
    return [
        line["exception"].split("\n")[0] for line in lines if line["event"] == "a request failed"
    ]
