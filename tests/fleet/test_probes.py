"""Probes of an emulated node over real connections."""

from __future__ import annotations

import asyncio
import gzip
import random
import socket
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock

import pytest

from gateway.config.routing import HealthSettings, TimeoutSettings
from gateway.fleet.circuit import Circuit
from gateway.fleet.node import Node, NodeSettings
from gateway.fleet.probe_history import ProbeAnswer
from gateway.fleet.probes import LARGEST_RESPONSE, check_alive, discover, probe_slots
from gateway.transport.errors import LocalResourcesExhausted
from gateway.transport.pool import open_node_pool
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.fleet.build import a_spec
from tests.transport.pool_client import pool_client
from tests.transport.raw import Peer, raw_server
from tests.virtual import in_virtual_time, now


@asynccontextmanager
async def node_at(url: str, *, timeout: float = 5.0, **keys: Any) -> AsyncIterator[Node]:
    spec = a_spec(url=url, **keys)
    rules = NodeSettings(HealthSettings(timeout=timeout), TimeoutSettings())
    upstream = open_node_pool(spec)
    try:
        yield Node(spec, upstream, rules, now, Circuit(rules.health, random.Random(7)))
    finally:
        upstream.close()


@in_virtual_time
async def test_a_healthy_server_is_up() -> None:
    async with EmulatedNode() as server, node_at(server.url) as node:
        outcome = await check_alive(node)
    assert outcome.answer is ProbeAnswer.UP
    assert outcome.seconds == 0.0  # virtual time stands still meanwhile


async def test_an_uncompressed_answer_is_asked_for() -> None:
    async def script(peer: Peer) -> None:
        heard.append(await peer.request())
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    heard: list[bytes] = []
    async with raw_server(script) as server, node_at(f"http://127.0.0.1:{server.port}/a") as node:
        assert (await check_alive(node)).up
    assert heard[0].startswith(b"GET /a/health HTTP/1.1\r\n")
    assert b"accept-encoding: identity\r\n" in heard[0]


async def test_a_node_is_asked_once_in_the_other_scheme_for_the_same_failure() -> None:
    async def script(peer: Peer) -> None:
        heard.append(await peer.reader.read(1))

    heard: list[bytes] = []
    async with raw_server(script) as server, node_at(f"http://127.0.0.1:{server.port}") as node:
        for _ in range(3):
            outcome = await check_alive(node)
            assert "broke off" in outcome.detail
            node.probe_history.record(outcome, rise=1, fall=1, sign_of_life=None)
    assert heard.count(b"G") >= 3
    assert len(heard) - heard.count(b"G") == 1


@pytest.mark.parametrize("kind", ["llama.cpp", "openai"])
async def test_plain_http_that_a_tls_server_refuses_with_400_is_told(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    monkeypatch.setattr("gateway.fleet.probes.speaks_tls", AsyncMock(return_value=True))
    async with (
        raw_server(script) as server,
        node_at(f"http://127.0.0.1:{server.port}", kind=kind) as node,
    ):
        assert (await check_alive(node)).detail.endswith("write https:// in its url")


@in_virtual_time
async def test_a_probe_on_a_connection_that_the_server_has_closed_is_sent_again() -> None:
    async with EmulatedNode() as server, node_at(server.url) as node:
        assert (await check_alive(node)).up
        server.faults.next("stale", path="*")
        assert (await check_alive(node)).up
        assert server.faults.fired == 1


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"])
async def test_a_cancelled_probe_closes_its_connection(said: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(said)
        heard.set()
        await peer.reader.read()

    heard = asyncio.Event()
    async with raw_server(script) as server, node_at(f"http://127.0.0.1:{server.port}") as node:
        probing = asyncio.create_task(check_alive(node))
        await heard.wait()
        probing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await probing
        await server.until(lambda: server.open == 0)


async def test_a_machine_without_descriptors_is_not_the_nodes_fault() -> None:
    async with node_at("http://127.0.0.1:9") as node:
        error = LocalResourcesExhausted("No connection could be opened: Too many open files")
        node.upstream.connect = AsyncMock(side_effect=error)  # type: ignore[method-assign]
        outcome = await check_alive(node)
    assert outcome.answer is ProbeAnswer.TIMED_OUT
    assert "Too many open files" in outcome.detail


@in_virtual_time
async def test_a_path_prefix_is_kept() -> None:
    async with EmulatedNode() as server, node_at(f"{server.url}/some/where") as node:
        outcome = await check_alive(node)
    assert outcome.answer is ProbeAnswer.FAILED
    assert "/health answers 404" in outcome.detail


@in_virtual_time
async def test_a_server_that_loads_its_model_is_told_from_one_that_fails() -> None:
    async with EmulatedNode() as server, node_at(server.url) as node:
        server.loading = True
        server.faults.next("loading")
        assert (await check_alive(node)).answer is ProbeAnswer.LOADING
        server.faults.next("status", path="/health", status=503, body="overloaded")
        failed = await check_alive(node)
    assert (failed.answer, failed.detail) == (ProbeAnswer.FAILED, "/health answers 503")


@in_virtual_time
async def test_a_closed_port_refuses() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        async with node_at(url) as node:
            outcome = await check_alive(node)
    assert outcome.answer is ProbeAnswer.CONNECTION_REFUSED
    assert url in outcome.detail


@in_virtual_time
async def test_a_server_that_does_not_answer_times_out() -> None:
    async with EmulatedNode() as server, node_at(server.url, timeout=0.2) as node:
        server.faults.set("mute")
        outcome = await check_alive(node)
        server.faults.clear()
    assert outcome.answer is ProbeAnswer.TIMED_OUT
    assert outcome.detail == "no answer to /health within 0.2 s"
    assert outcome.seconds == pytest.approx(0.2)


@each_case(
    "fault",
    [
        {"kind": "reset"}, {"kind": "close"}, {"kind": "garbage"},
        {"kind": "status", "status": 500}, {"kind": "status", "status": 404},
        {"kind": "wrong_length"}, {"kind": "head_bomb"},
    ],
)  # fmt: skip
@in_virtual_time
async def test_every_other_answer_is_a_failure(fault: dict[str, Any]) -> None:
    async with EmulatedNode() as server, node_at(server.url) as node:
        server.faults.set(path="control", **fault)
        outcome = await check_alive(node)
        server.faults.clear()
    assert outcome.answer is ProbeAnswer.FAILED
    assert "/health" in outcome.detail


@in_virtual_time
async def test_an_answer_that_trickles_is_cut_at_the_limit() -> None:
    async with EmulatedNode() as server, node_at(server.url, timeout=0.2) as node:
        server.faults.set("trickle", path="control", seconds=0.05)
        outcome = await check_alive(node)
        server.faults.clear()
    assert outcome.answer is ProbeAnswer.TIMED_OUT
    assert outcome.seconds == pytest.approx(0.2)


@in_virtual_time
async def test_an_endless_answer_is_cut_by_size() -> None:
    async with EmulatedNode() as server, node_at(server.url) as node:
        server.faults.next("status", path="/health", status=200, body="x" * (LARGEST_RESPONSE + 1))
        outcome = await check_alive(node)
    assert outcome.answer is ProbeAnswer.FAILED
    assert "without end" in outcome.detail


@in_virtual_time
async def test_a_compressed_answer_is_not_decompressed() -> None:
    bomb = gzip.compress(bytes(64 << 20)).decode(errors="surrogateescape")
    headers = {"content-encoding": "gzip"}
    async with EmulatedNode() as server, node_at(server.url) as node:
        server.faults.next("status", path="/health", status=200, body=bomb, headers=headers)
        tracemalloc.start()
        try:
            outcome = await check_alive(node)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert outcome.answer is ProbeAnswer.FAILED
    assert outcome.detail == "/health is compressed, though asked not to be"
    assert peak < LARGEST_RESPONSE


@in_virtual_time
async def test_a_server_tells_what_it_is() -> None:
    async with (
        EmulatedNode(slots=3, context=2048, build="b42") as server,
        node_at(server.url) as node,
    ):
        assert (await discover(node)).up
    facts = node.properties
    assert (facts.slots, facts.context, facts.models, facts.build) == (3, 2048, ("demo",), "b42")


@in_virtual_time
async def test_a_wrong_key_is_told_with_its_remedy() -> None:
    async with EmulatedNode(api_key="right") as server:
        async with node_at(server.url) as node:
            assert (await check_alive(node)).up
            outcome = await discover(node)
        assert outcome.answer is ProbeAnswer.KEY_REJECTED
        assert "401 on /v1/models" in outcome.detail
        assert "api_key_env" in outcome.detail
        async with node_at(server.url, api_key="right") as node:
            assert (await discover(node)).up


@in_virtual_time
async def test_what_is_no_json_teaches_nothing() -> None:
    async with EmulatedNode() as server, node_at(server.url) as node:
        server.faults.set("status", path="control", status=200, body="<html>")
        assert (await discover(node)).answer is ProbeAnswer.NO_MODEL
        assert await probe_slots(node) is None
        server.faults.clear()
    assert node.properties.models == ()


@in_virtual_time
async def test_another_build_may_do_what_the_old_one_refused() -> None:
    async with EmulatedNode(build="b1") as server, node_at(server.url) as node:
        await discover(node)
        node.probe_history.discovered_at = node.clock()
        node.properties.refused.add("rerank")
        await discover(node)
        assert node.properties.refused == {"rerank"}
        server.build = "b2"
        await discover(node)
        assert node.properties.refused == set()


@pytest.mark.parametrize(
    ("kinds", "purpose"),
    [
        ({}, "chat"),
        ({"embeddings": True}, "embeddings"),
        ({"embeddings": True, "rerank": True}, "rerank"),
    ],
)
@in_virtual_time
async def test_a_server_is_asked_once_what_it_was_started_for(
    kinds: dict[str, Any], purpose: str
) -> None:
    async with EmulatedNode(slots=1, **kinds) as server, node_at(server.url) as node:
        await discover(node)
        assert node.properties.purpose == purpose
        asked = server.control_requests
        await discover(node)
        assert server.control_requests == asked + 2
        assert server.requests == 0
        if purpose != "rerank":
            assert node.refusal_hints["rerank"].endswith("Start it with `--reranking`")
        server.marker = "another process"
        server.embeddings, server.rerank = False, False
        await discover(node)
        assert node.properties.purpose == "chat"


@in_virtual_time
async def test_a_sleeping_server_is_not_asked_what_it_was_started_for() -> None:
    async with (
        EmulatedNode(embeddings=True, sleep_idle_seconds=5) as server,
        node_at(server.url) as node,
    ):
        await asyncio.sleep(6)
        await discover(node)
        assert (server.sleeping, node.properties.purpose) == (True, None)
        server.active_at = now()
        node.sleep.woke()
        await discover(node)
        assert node.properties.purpose == "embeddings"


@each_case(
    ("path", "status", "embeddings"),
    [
        ("/v1/rerank", 400, False), ("/v1/rerank", 401, False), ("/v1/rerank", 500, False),
        ("/v1/rerank", 404, True), ("/v1/rerank", 405, True), ("/v1/embeddings", 404, True),
    ],
)  # fmt: skip
@in_virtual_time
async def test_a_server_that_answers_oddly_has_no_known_purpose(
    path: str, status: int, embeddings: bool
) -> None:
    async with EmulatedNode(embeddings=embeddings) as server, node_at(server.url) as node:
        server.faults.set("status", path=path, status=status, body="{}")
        await discover(node)
        assert node.properties.purpose == "unknown"
        server.faults.clear()
        await discover(node)
        assert node.properties.purpose == "unknown"


@in_virtual_time
async def test_a_server_that_does_not_answer_is_asked_again_later_and_what_is_known_is_kept() -> (
    None
):
    async with EmulatedNode(embeddings=True) as server, node_at(server.url) as node:
        server.faults.next("hang", path="/v1/embeddings")
        await discover(node)
        assert (node.properties.purpose, node.is_purpose_unknown) == ("unknown", False)
        await discover(node)
        assert node.properties.purpose == "embeddings"
        server.marker = "another process"
        server.faults.next("hang", path="/v1/embeddings")
        await discover(node)
        assert node.properties.purpose == "embeddings"
        server.embeddings = False
        await discover(node)
        assert node.properties.all_refused == {"embeddings", "rerank"}


@pytest.mark.parametrize(
    ("keys", "answer"), [({}, ProbeAnswer.NO_MODEL), ({"model": "m"}, ProbeAnswer.UP)]
)
@in_virtual_time
async def test_an_old_server_that_names_no_model_needs_one_in_the_inventory(
    keys: dict[str, Any], answer: ProbeAnswer
) -> None:
    async with EmulatedNode() as server, node_at(server.url, **keys) as node:
        server.faults.set("status", path="/v1/models", status=404)
        body = '{"default_generation_settings": {"n_ctx": 2048}}'
        server.faults.set("status", path="/props", status=200, body=body)
        outcome = await discover(node)
        server.faults.clear()
    assert (outcome.answer, node.properties.context) == (answer, 2048)
    if answer is ProbeAnswer.NO_MODEL:
        assert outcome.detail.endswith("say in the inventory what it serves (model: ...)")


@in_virtual_time
async def test_busy_slots_are_read() -> None:
    async with EmulatedNode(slots=2, decode_tps=50) as server, node_at(server.url) as node:
        assert await probe_slots(node) == ()
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 50}
        async with pool_client(node.upstream).stream("POST", "/v1/chat/completions", json=body):
            await server.until(lambda: server.busy == 1)
            [tokens] = await probe_slots(node) or ()
            assert tokens > 0


@in_virtual_time
async def test_a_server_without_slots_is_not_asked_again() -> None:
    async with EmulatedNode(endpoint_slots=False) as server, node_at(server.url) as node:
        assert node.reports_slots
        assert await probe_slots(node) is None
    assert not node.reports_slots


@in_virtual_time
async def test_no_process_has_no_busy_slot() -> None:
    async with EmulatedNode() as server, node_at(server.url) as node:
        await server.kill()
        assert await probe_slots(node) == ()


@each_case(
    ("status", "keys", "answer"),
    [
        (200, {}, ProbeAnswer.UP),
        (404, {"model": "x"}, ProbeAnswer.UP),
        (404, {}, ProbeAnswer.FAILED),
        (401, {"model": "x", "api_key": "k"}, ProbeAnswer.UP),
        (403, {"model": "x", "api_key": "k"}, ProbeAnswer.UP),
        (401, {"model": "x"}, ProbeAnswer.KEY_REJECTED),
        (401, {"api_key": "k"}, ProbeAnswer.KEY_REJECTED),
        (500, {"model": "x", "api_key": "k"}, ProbeAnswer.FAILED),
    ],
)
@in_virtual_time
async def test_another_kind_of_server_is_judged_by_its_list_of_models(
    status: int, keys: dict[str, Any], answer: ProbeAnswer
) -> None:
    async with EmulatedNode() as server, node_at(server.url, kind="openai", **keys) as node:
        server.faults.set("status", path="/health", status=404)
        body = '{"data": [{"id": "gpt"}]}'
        server.faults.set("status", path="/v1/models", status=status, body=body)
        outcome = await check_alive(node)
        server.faults.clear()
    assert outcome.answer is answer
    assert node.properties.models == (("gpt",) if status == 200 else ())
