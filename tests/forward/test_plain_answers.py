"""A plain response of status 2xx is an answer only in the form of its API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.events import RequestRecord
from gateway.nodes.node import PLAIN_SECONDS
from gateway.request.routes import ROUTES
from tests.api.events import read_stream, values
from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import (
    BODIES,
    GENERATION_PATHS,
    MESSAGES,
    Unended,
    over_endpoint,
    proxy_over,
    response,
)
from tests.gateways import Running, until
from tests.servers import start_demo_servers
from tests.virtual import in_virtual_time

CHAT, COMPLETIONS, ANTHROPIC, RESPONSES, NATIVE = GENERATION_PATHS

ASKED: dict[str, dict[str, Any]] = {
    **BODIES,
    "/v1/embeddings": {"input": "a"},
    "/embedding": {"content": "a"},
    "/v1/rerank": {"query": "a", "documents": ["a", "b"]},
    "/v1/messages/count_tokens": BODIES[ANTHROPIC],
    "/v1/chat/completions/input_tokens": BODIES[CHAT],
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/tokenize": {"content": "a"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": MESSAGES},
}
"""A body for each routed path but the one for audio."""

HTML = "<!DOCTYPE html><html><body>Sign in</body></html>"
NO_ANSWERS: list[tuple[str, dict[str, Any]]] = [
    ("", {"status": 204}),
    (HTML, {"headers": {"content-type": "text/html"}}),
    ('{"error": "no credit"}', {"status": 202}),
    *(
        (text, {})
        for text in (
            *("", " \n", HTML, "{}", "[]", "[1]", "null", '"yes"', "x" * 70_000),
            '{"error": {"message": "no credit", "code": 402}}',
            '{"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}',
            *('{"status": "ok"}', '[{"content": "a"}]', '{"choices": [1]}'),
            '{"choices": {}, "content": {}}',
            '{"detail": "Not Found", "choices": [], "data": [], "content": null}',
            'data: {"choices": [{"delta": {"content": "a"}}]}\n\n',
            '{"error": {"message": "' + "x" * 9000 + '", "data": [{"embedding": [1]}]}}',
        )
    ),
]


@pytest.mark.parametrize("path", ASKED)
@in_virtual_time
async def test_what_is_no_answer_of_its_api_is_the_nodes_failure(tmp_path: Path, path: str) -> None:
    kind: dict[str, Any] = {"embeddings": "embedding" in path, "rerank": "rerank" in path}
    one, two = EmulatedNode(infill=True, **kind), EmulatedNode(infill=True, **kind)
    one.faults.share_next(two.faults)
    lasting = {"failures": 1000}
    async with proxy_over(tmp_path, one, two, health=lasting) as proxy:
        whole = await proxy.ask(path, **ASKED[path])
        assert whole.status_code == 200, whole.text
        cut = [whole.text[:-1], whole.text[: len(whole.text) // 2], whole.text[:1]]
        wrong = [*NO_ANSWERS, *((text, {}) for text in cut)]
        for number, (body, options) in enumerate(wrong):
            one.faults.next("status", **{"status": 200, "body": body, "path": path, **options})
            stream = path in GENERATION_PATHS and number % 2 == 1
            reply = await proxy.ask(path, **ASKED[path], stream=stream)
            assert reply.status_code == 200, (body[:60], reply.text)
            assert reply.headers["x-gateway-attempts"] == "2", body[:60]
            assert "no credit" not in reply.text
        await proxy.settled()
        outcomes = [outcome for _, outcome in proxy.outcomes[1:]]
        count = len(outcomes) // 2
        assert outcomes == ["garbage", "ok"] * count
        assert proxy.node("a").failures + proxy.node("b").failures == count
        usual, *others = proxy.finished
        assert {record.status for record in others} == {200}
        assert {record.completion_tokens for record in others} == {usual.completion_tokens}


@in_virtual_time
async def test_where_no_node_has_an_answer_nothing_is_charged(tmp_path: Path) -> None:
    one = EmulatedNode(embeddings=True)
    async with proxy_over(tmp_path, one, retries={"attempts": 1}) as proxy:
        for path in (CHAT, "/v1/embeddings"):
            said = '{"error": {"message": "no credit"}}'
            one.faults.next("status", status=200, body=said)
            reply = await proxy.ask(path, **ASKED[path])
            assert (reply.status_code, reply.headers["x-should-retry"]) == (502, "false")
            assert "no credit" in reply.json()["error"]["message"]
        await proxy.settled()
        for record in proxy.finished:
            assert (record.prompt_tokens, record.completion_tokens, record.cost) == (0, 0, 0.0)


# A node that does not stream.

CALL = {"type": "function", "id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL_USE = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": [1, "\u00e9"]}}
USAGE = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
HEAD = {"created": 3, "model": "m", "id": "x"}
LOGPROBS = {"content": [{"token": "a", "logprob": -0.5}]}


def chat(**message: Any) -> dict[str, Any]:
    return {"message": {"role": "assistant", **message}}


def output(**part: Any) -> dict[str, Any]:
    return {"type": "message", "id": "m", "role": "assistant", "status": "completed", **part}


PLAIN: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {
        "choices": [{"index": 0, "finish_reason": "stop", **chat(content="yes \u00e9\n")}],
        "object": "chat.completion", "usage": USAGE, "timings": {"predicted_n": 7}, **HEAD,
    }),
    (CHAT, {
        "choices": [
            {"index": 0, "finish_reason": "stop", **chat(content="a", reasoning_content="b")},
            {"index": 1, "finish_reason": "tool_calls", "logprobs": LOGPROBS,
             **chat(content="", tool_calls=[CALL, {**CALL, "id": "d"}])},
        ],
        "object": "chat.completion", "usage": USAGE, **HEAD,
    }),
    (COMPLETIONS, {
        "choices": [
            {"index": 0, "finish_reason": "length", "text": "yes", "logprobs": None},
            {"index": 1, "finish_reason": "stop", "text": "", "logprobs": LOGPROBS},
        ],
        "object": "text_completion", "usage": USAGE, **HEAD,
    }),
    (ANTHROPIC, {
        "id": "x", "type": "message", "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "so", "signature": "s"},
            {"type": "text", "text": "yes"},
            TOOL_USE,
            {"type": "tool_use", "id": "u", "name": "g", "input": {}},
        ],
        "model": "m", "stop_reason": "tool_use", "stop_sequence": None,
        "usage": {"input_tokens": 5, "output_tokens": 7},
    }),
    (RESPONSES, {
        "id": "r", "object": "response", "created_at": 3, "completed_at": 4, "model": "m",
        "status": "completed",
        "output": [
            {"type": "reasoning", "id": "q", "summary": [],
             "content": [{"type": "reasoning_text", "text": "so"}], "status": "completed"},
            output(content=[{"type": "output_text", "text": "yes", "annotations": []}]),
            {"type": "function_call", "id": "c", "arguments": "{}", "status": "completed"},
        ],
        "usage": {"input_tokens": 5, "output_tokens": 7, "total_tokens": 12},
    }),
]  # fmt: skip


@asynccontextmanager
async def over_plain_node(
    folder: Path, plain: dict[str, Any], kinds: list[bytes] | None = None
) -> AsyncIterator[tuple[Running, list[dict[str, Any]], list[RequestRecord]]]:
    """A gateway over an endpoint that answers `plain` to everything, and the bodies that it gets.

    `kinds`: the types that it gives its answers; the first one holds.
    """
    bodies: list[dict[str, Any]] = []
    types = [b"application/json"] if kinds is None else kinds

    def answer(request: bytes) -> bytes:
        bodies.append(json.loads(request.partition(b"\r\n\r\n")[2]))
        return response(json.dumps(plain).encode(), types[0])

    async with over_endpoint(folder, answer) as (running, records):
        yield running, bodies, records


@pytest.mark.parametrize(("path", "plain"), PLAIN)
async def test_a_plain_answer_to_a_request_for_a_stream_is_a_stream(
    tmp_path: Path, path: str, plain: dict[str, Any]
) -> None:
    async with over_plain_node(tmp_path, plain) as (running, bodies, records):
        for count in (1, 2):
            body = {**BODIES[path], "stream": True, "stream_options": {"include_usage": True}}
            reply = await running.client.post(path, json=body)
            assert reply.headers["content-type"].startswith("text/event-stream")
            assert "x-accel-buffering" in reply.headers
            fields = {"stream_options": {"include_usage": True}}
            assert read_stream(ROUTES[path].api, reply.content, fields) == plain
            assert ROUTES[path].api.is_stream_complete(reply.content)
            await until(lambda count=count: len(records) == count)
            assert (records[-1].status, records[-1].attempts) == (200, 1)
            assert (records[-1].prompt_tokens, records[-1].completion_tokens) == (5, 7)
        reply = await running.client.post(path, json={**BODIES[path], "stream": True})
        events = values(reply.content.removesuffix(b"data: [DONE]\n\n"))
        if path in {CHAT, COMPLETIONS}:
            assert not any("usage" in event for event in events)
        if path == RESPONSES:
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
        plainly = await running.client.post(path, json=BODIES[path])
        assert plainly.json() == plain
        # From then on it is asked as it can answer.
        assert bodies[0]["stream"] is True
        assert bodies[1]["stream"] is False
        assert "stream_options" not in bodies[1]


@in_virtual_time
async def test_a_node_that_does_not_stream_may_be_silent_until_its_answer_is_whole(
    tmp_path: Path,
) -> None:
    path, plain = PLAIN[0]
    one = EmulatedNode(answer_tokens=300, decode_tps=2.0)
    seldom = {"interval": 60.0, "discover_interval": 60.0}
    once = {"attempts": 1}
    async with proxy_over(tmp_path, one, heartbeat=5.0, retries=once, health=seldom) as proxy:
        one.faults.next("status", status=200, body=json.dumps(plain))
        reply = await proxy.stream(path)
        assert reply.text == plain["choices"][0]["message"]["content"]
        # It does stream, but is not asked to.
        reply = await proxy.stream(path, max_tokens=300)
        assert reply.errors == []
        assert reply.body.startswith(b":\n")
        assert len(reply.events) == 3
        assert len(reply.text.split()) == 300
        await asyncio.sleep(PLAIN_SECONDS)
        assert len((await proxy.stream(path, max_tokens=20)).events) > 20
        assert {outcome for _, outcome in proxy.outcomes} == {"ok"}


async def test_a_plain_answer_of_megabytes_becomes_a_stream_beside_the_loop(
    tmp_path: Path,
) -> None:
    text = "word \u00e9\n" * 300_000
    items = [output(content=[{"type": "output_text", "text": text}])]
    plain: dict[str, Any] = {"output": items, "status": "x"}
    async with over_plain_node(tmp_path, plain) as (running, *_):
        body = {**BODIES[RESPONSES], "stream": True}
        reply = await running.client.post(RESPONSES, json=body)
        assert reply.status_code == 200
        assert values(reply.content)[-1]["response"] == plain
        items *= 2
        refused = await running.client.post(RESPONSES, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (502, "node_failed")


async def test_a_plain_answer_is_known_as_such_whatever_its_label(tmp_path: Path) -> None:
    vectors = {"data": [{"embedding": [0.5], "index": 0}]}
    kinds = [b""]
    async with over_plain_node(tmp_path, vectors, kinds) as (running, *_):
        for kinds[0] in (b"text/event-stream", b"text/plain", b"application/json; charset=utf-8"):
            reply = await running.client.post("/v1/embeddings", json={"input": "a"})
            assert reply.headers["content-type"] == "application/json; charset=utf-8"
            assert reply.json() == vectors
    path, plain = PLAIN[0]
    async with over_plain_node(tmp_path, plain, [b"text/event-stream"]) as (running, _, records):
        reply = await running.client.post(path, json={**BODIES[path], "stream": True})
        assert read_stream(ROUTES[path].api, reply.content, {})["choices"] == plain["choices"]
        await until(lambda: records)
        assert (records[0].attempts, records[0].completion_tokens) == (1, 7)


# The real server's own answers.


@pytest.mark.real
@pytest.mark.slow
async def test_each_plain_answer_of_the_real_server_is_one() -> None:
    async with (
        start_demo_servers(embedding=True) as (url,),
        httpx.AsyncClient(base_url=url, timeout=60) as node,
    ):
        for path, fields in [*ASKED.items(), ("/v1/responses/input_tokens", BODIES[RESPONSES])]:
            if path in {"/infill", "/v1/rerank"}:
                continue  # It needs another model.
            api = ROUTES[path].api
            bound = dict.fromkeys(("max_tokens", "max_output_tokens", "n_predict"), 8)
            reply = await node.post(path, json={**fields, **bound})
            if reply.status_code in {404, 501}:
                continue  # It is too old for this path.
            assert reply.status_code == 200, (path, reply.text)
            api.check_answer(reply.content)
            if path not in GENERATION_PATHS:
                continue
            options = {"stream_options": {"include_usage": True}, "return_tokens": True}
            events = api.answer_events(reply.content, options)
            made, plain = read_stream(api, events, options), reply.json()
            assert {**plain, **made} == plain
            assert set(plain) - set(made) <= {"timings"}


async def test_events_that_are_labelled_as_something_else_end_the_attempt_at_once(
    tmp_path: Path,
) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"
    said = Unended(head + b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n')
    body = {**BODIES[CHAT], "stream": True}
    async with over_endpoint(tmp_path, lambda _: said, retries={"attempts": 1}) as (running, _):
        reply = await running.client.post(CHAT, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (502, "node_failed")
        # An error that is not UTF-8 is still one.
        said = Unended(
            b'HTTP/1.1 500 No\r\ncontent-length: 28\r\n\r\n{"error": {"message": "\xff\xfe"}}'
        )
        assert (await running.client.post(CHAT, json=body)).status_code == 500
