"""Traces of a whole gateway over emulated nodes, as a collector gets them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.running import run
from tests.emulator import EmulatedNode
from tests.gateway_processes import serving
from tests.gateways import Running, running_gateway, until
from tests.watch.tracing.collector import Collector, ReceivedSpan, running_collector

CHAT = "/v1/chat/completions"
SECRET = "a word that nobody may see"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 8, **more}


@contextlib.asynccontextmanager
async def traced(
    folder: Path, *nodes: EmulatedNode, traces: dict[str, Any] | None = None, **more: Any
) -> AsyncIterator[tuple[Running, Collector]]:
    """A gateway that traces every request, and its collector."""
    async with running_collector() as collector:
        telemetry = {"traces": {"endpoint": collector.url, "share": 1, **(traces or {})}}
        settings = {"telemetry": telemetry, **more}
        async with running_gateway(folder, nodes or [EmulatedNode()], settings) as running:
            yield running, collector


def names(spans: Sequence[ReceivedSpan]) -> list[str]:
    return [span.name for span in spans]


def access_log(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "gateway.log").read_text().splitlines()
    return [json.loads(line) for line in lines if '"event":"request"' in line]


async def the_root(collector: Collector) -> ReceivedSpan:
    (root,) = await collector.roots(1)
    return root


async def stream(running: Running, **more: Any) -> str:
    answer = await running.client.post(CHAT, json=chat(stream=True, **more))
    assert answer.status_code == 200
    return answer.text


async def test_a_chat_is_one_trace_with_its_attempt(tmp_path: Path) -> None:
    began = time.time_ns()
    async with traced(tmp_path) as (running, collector):
        answer = await running.client.post(CHAT, json=chat())
        root = await the_root(collector)
    assert root.name == f"POST {CHAT}"
    assert root.parent_id == ""
    assert began <= root.start < root.end <= time.time_ns()
    usage = answer.json()["usage"]
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "llama.cpp",
        "gen_ai.request.model": "demo",
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "llama_gateway.request_id": answer.headers["x-request-id"],
        "llama_gateway.class": "normal",
        "llama_gateway.caller": root.attributes["llama_gateway.caller"],
        "llama_gateway.stream": False,
        "llama_gateway.attempts": 1,
        "llama_gateway.queue_seconds": 0.0,
        "llama_gateway.node": "node-0",
        "llama_gateway.tier": "cpu",
    }
    assert root.service == "llama-gateway"
    (attempt,) = collector.children(root)
    assert (attempt.name, attempt.kind) == ("attempt", "client")
    assert attempt.attributes["llama_gateway.node"] == "node-0"
    assert attempt.attributes["llama_gateway.outcome"] == "ok"
    assert attempt.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert names(collector.children(attempt)) == ["prefill", "decode"]
    assert not any(span.failed for span in collector.spans)


async def test_no_span_has_any_text_of_prompt_or_answer(tmp_path: Path) -> None:
    async with traced(tmp_path) as (running, collector):
        text = (await running.client.post(CHAT, json=chat())).json()["choices"][0]["message"]
        await running.client.post(CHAT, json=chat(response_format={"type": SECRET}))
        await collector.roots(2)
    assert text["content"].split()[0].encode() not in b"".join(collector.bodies)
    for word in SECRET.split():
        assert word == "a" or word.encode() not in b"".join(collector.bodies)


async def test_a_stream_of_a_killed_node_has_its_resumption(tmp_path: Path) -> None:
    one, other = (EmulatedNode(decode_tps=100, answer_tokens=40) for _ in "ab")
    async with traced(tmp_path, one, other) as (running, collector):
        body = chat(stream=True, max_tokens=40)
        async with running.client.stream("POST", CHAT, json=body) as answer:
            killed, done = None, False
            async for line in answer.aiter_lines():
                if killed is None and '"content":"' in line:
                    killed = one if one.busy else other
                    await killed.kill()
                done = done or line == "data: [DONE]"
        assert done
        root = await the_root(collector)
        rest = other if killed is one else one
        told = rest.seen[-1].headers["traceparent"]
    failed, resumed = collector.named("attempt")
    (resume,) = collector.named("resume")
    assert failed.failed
    assert resumed.attributes["llama_gateway.resumes"] is True
    assert told == f"00-{root.trace_id}-{resumed.span_id}-01"
    assert resume.parent_id == root.span_id
    assert failed.end <= resume.start + 1
    assert resume.end == collector.children(resumed)[0].end
    assert resume.attributes["llama_gateway.reason"] == failed.attributes["llama_gateway.outcome"]


async def test_who_waited_who_was_refused_and_who_left_each_have_their_trace(
    tmp_path: Path,
) -> None:
    node = EmulatedNode(slots=1, decode_tps=20, answer_tokens=5000)
    async with traced(tmp_path, node, queue={"max": 1}) as (running, collector):
        first = asyncio.create_task(stream(running, max_tokens=5000))
        await until(lambda: node.busy == 1)
        second = asyncio.create_task(stream(running, max_tokens=1))
        await until(lambda: len(running.gateway.scheduler.waiters) == 1)
        assert (await running.client.post(CHAT, json=chat())).status_code == 429
        first.cancel()
        await second
        roots = await collector.roots(3)
    by_status = {root.attributes["http.response.status_code"]: root for root in roots}
    refused, left, waited = by_status[429], by_status[499], by_status[200]
    assert refused.attributes["error.type"] == "queue_full"
    assert not refused.failed  # To a server, that is its client's matter.
    assert collector.children(refused) == []
    assert left.attributes["error.type"] == "client_closed"
    (attempt,) = collector.children(left)
    assert attempt.attributes["llama_gateway.outcome"] == "client_closed"
    assert not attempt.failed
    queue, attempt = collector.children(waited)
    assert (queue.name, attempt.name) == ("queue", "attempt")
    # The machine may stand still before the request is queued.
    assert (
        0 < queue.end - queue.start <= waited.attributes["llama_gateway.queue_seconds"] * 1e9 + 5e7
    )
    assert queue.end <= attempt.start
    assert queue.attributes["llama_gateway.ahead"] == 0


async def test_a_clients_trace_goes_on_in_the_gateway_and_on_the_node(tmp_path: Path) -> None:
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
    async with traced(tmp_path, node := EmulatedNode()) as (running, collector):
        await running.client.post(CHAT, json=chat(), headers=headers)
        root = await the_root(collector)
        seen = node.seen[-1].headers
    (attempt,) = collector.children(root)
    assert (root.trace_id, root.parent_id) == (TRACE, PARENT)
    assert seen["traceparent"] == f"00-{TRACE}-{attempt.span_id}-01"
    assert seen["tracestate"] == "vendor=1"
    assert access_log(tmp_path)[0]["trace_id"] == TRACE


@pytest.mark.parametrize("traces", [{"share": 0, "beyond_share": 0}, {"endpoint": None}])
async def test_without_a_trace_a_clients_traceparent_passes_as_it_came(
    traces: dict[str, Any], tmp_path: Path
) -> None:
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
    node = EmulatedNode()
    async with traced(tmp_path, node, traces=traces) as (running, collector):
        await running.client.post(CHAT, json=chat(), headers=headers)
        await running.client.post(CHAT, json=chat())
        first, second = (request.headers for request in node.seen)
    assert (first["traceparent"], first["tracestate"]) == (TRACEPARENT, "vendor=1")
    assert "traceparent" not in second
    assert collector.spans == []  # The gateway has ended, and would have sent them.


async def test_a_failed_request_is_traced_though_it_was_not_meant_to_be_and_so_is_its_log_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.events.MOST_DEFERRED", 1)  # As when very many requests end.
    node, traces, once = EmulatedNode(), {"share": 0, "beyond_share": 10}, {"attempts": 1}
    async with traced(tmp_path, node, traces=traces, retries=once) as (running, collector):
        assert (await running.client.post(CHAT, json=chat())).status_code == 200
        node.faults.next("reset", 10)
        answer = await running.client.post(CHAT, json=chat())
        assert answer.status_code == 502
        node.faults.next("reset", 10)
        await running.admin.post("/admin/chat", json=chat())
        refused = await running.client.post(CHAT, json={"model": 1})
        assert refused.status_code == 400
        roots = await collector.roots(2)
    assert all(root.failed for root in roots)
    assert roots[0].attributes["llama_gateway.request_id"] == answer.headers["x-request-id"]
    assert names(collector.children(roots[0])) == ["attempt"]
    logged = [line.get("trace_id") for line in access_log(tmp_path)]
    assert logged == [None, *(root.trace_id for root in roots), None]


async def test_the_collector_gets_its_header_and_no_answer_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTLP_HEADER", "Authorization: Bearer s3cret")
    traces = {"header_env": "OTLP_HEADER", "service_name": "site-a"}
    async with traced(tmp_path, traces=traces) as (running, collector):
        shown = (await running.admin.get("/admin/config")).text
        await running.client.post(CHAT, json=chat())
        root = await the_root(collector)
        await until(lambda: running.gateway.tracing.counts.exported == 1)
        page = (await running.admin.get("/metrics")).text
    assert root.service == "site-a"
    assert "Authorization: Bearer s3cret" in collector.heads[0]
    assert "OTLP_HEADER" in shown
    assert "s3cret" not in shown
    assert "s3cret" not in (tmp_path / "gateway.log").read_text()
    assert "llama_gateway_traces_exported_total 1" in page


async def test_work_without_a_waiting_client_and_chats_of_the_playground_are_traced_too(
    tmp_path: Path,
) -> None:
    line = {"custom_id": "1", "method": "POST", "url": CHAT, "body": chat()}
    async with traced(tmp_path) as (running, collector):
        uploaded = await running.client.post(
            "/v1/files",
            data={"purpose": "batch"},
            files={"file": ("in.jsonl", json.dumps(line).encode())},
        )
        batch = {"input_file_id": uploaded.json()["id"], "endpoint": CHAT}
        batch["completion_window"] = "24h"
        assert (await running.client.post("/v1/batches", json=batch)).status_code == 200
        (of_line,) = await collector.roots(1)
        asked = {"model": "demo", "input": "Hello", "background": True, "max_output_tokens": 8}
        assert (await running.client.post("/v1/responses", json=asked)).status_code == 200
        _, accepted, of_response = await collector.roots(3)
        assert (await running.admin.post("/admin/chat", json=chat())).status_code == 200
        *_, of_playground = await collector.roots(4)
    assert of_line.attributes["llama_gateway.class"] == "batch"
    assert collector.children(accepted) == []
    assert of_response.attributes["llama_gateway.request_id"].startswith("resp_")
    assert of_playground.attributes["llama_gateway.caller"] == "playground:local"
    for root in (of_line, of_response, of_playground):
        assert names(collector.children(root)) == ["attempt"]
        assert root.attributes["gen_ai.usage.output_tokens"] > 0


GRACE = 50.0
"""Seconds that a loaded machine may take for what should take two, and less than a mute collector
takes."""


async def ask(running: Running, count: int = 1) -> None:
    for _ in range(count):
        assert (await running.client.post(CHAT, json=chat())).status_code == 200


ANSWERS = {
    "refuses": b"HTTP/1.1 400 Bad Request\r\ncontent-length: 5\r\n\r\nwrong",
    "is no collector": b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
    "speaks no HTTP": b"\x16\x03\x01 what is this\r\n\r\n",
    "leads elsewhere": b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:9/\r\n"
    b"content-length: 0\r\n\r\n",
}


@pytest.mark.parametrize("answer", [b"", *ANSWERS.values()], ids=["hangs", *ANSWERS])
async def test_a_collector_that_takes_nothing_loses_traces_and_nothing_else(
    answer: bytes, tmp_path: Path
) -> None:
    async with traced(tmp_path, traces={"timeout": 0.1}) as (running, collector):
        collector.answer = answer
        await ask(running, 5)
        counts = running.gateway.tracing.counts
        await until(lambda: counts.not_sent + counts.exported == 5, GRACE)
        await ask(running, 5)
        assert counts.not_sent >= 5
        page = (await running.admin.get("/metrics")).text
        (told,) = re.findall(r'traces_dropped_total\{reason="not_taken"\} (\d+)', page)
        assert int(told) >= 5


async def test_a_collector_that_is_busy_for_a_moment_gets_them_later(tmp_path: Path) -> None:
    async with traced(tmp_path) as (running, collector):
        good = collector.answer
        collector.answer = b"HTTP/1.1 503 Busy\r\nretry-after: 0\r\ncontent-length: 0\r\n\r\n"
        await ask(running)
        await until(lambda: collector.heads, GRACE)
        collector.answer = good
        await collector.roots(1)
        assert running.gateway.tracing.counts.not_sent == 0
    assert len(await collector.roots(1)) == 1, collector.heads


@pytest.mark.parametrize(
    ("answer", "taken"),
    [(b"HTTP/1.1 200 OK\r\nx: ", 0), (b"HTTP/1.1 200 OK\r\ncontent-length: 60000\r\n\r\n", 1)],
    ids=["head", "body"],
)
async def test_a_collector_that_drips_its_answer_holds_nothing_up(
    answer: bytes, taken: int, tmp_path: Path
) -> None:
    async with traced(tmp_path, traces={"timeout": 1}) as (running, collector):
        good = collector.answer
        collector.answer, collector.drips = answer, True
        counts = running.gateway.tracing.counts
        await ask(running)
        await until(lambda: counts.not_sent + counts.exported == 1, GRACE)
        assert counts.exported == taken
        collector.answer, collector.drips = good, False
        async with asyncio.timeout(GRACE):
            while counts.exported == taken:  # The machine may stand still for one of them.
                sent = counts.not_sent + counts.exported
                await ask(running)
                await until(lambda n=sent: counts.not_sent + counts.exported > n, GRACE)


@pytest.mark.slow
async def test_a_signal_ends_a_gateway_whose_collector_is_mute(tmp_path: Path) -> None:
    async with running_collector() as collector, EmulatedNode() as node:
        collector.answer = b""
        traces = {"endpoint": collector.url, "share": 1, "timeout": 60}
        chosen = {"telemetry": {"traces": traces}}
        async with serving(tmp_path / "site", node, settings=chosen) as line:
            async with httpx.AsyncClient(base_url=line.url, trust_env=False) as client:
                assert (await client.post(CHAT, json=chat(), timeout=60)).status_code == 200
            await until(lambda: collector.heads, GRACE)
            began = time.monotonic()
            os.kill(line.first.pid, signal.SIGTERM)
            assert await asyncio.wait_for(line.first.wait(), GRACE) == 0
            assert time.monotonic() - began < GRACE


REMEDY = "-m pip install 'opentelemetry-proto<2,>=1.30', or remove the key"


def test_the_remedy_is_named_and_without_traces_nothing_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    nodes, config = tmp_path / "nodes.yaml", tmp_path / "gateway.yaml"
    nodes.write_text("nodes: [{name: a, url: 'http://127.0.0.1:9'}]")
    for traces, status in (("endpoint: 'http://127.0.0.1:4318'", 1), ("share: 0.5", 0)):
        config.write_text(f"telemetry: {{traces: {{{traces}}}}}")
        ran = run("check", "--nodes", str(nodes), "--config", str(config))
        said = " ".join(f"{ran.out} {ran.err}".split())
        assert bool(ran.status) == status, said
        assert (REMEDY in said) == ("telemetry.traces.endpoint" in said) == bool(status)
        assert "Traceback" not in said
