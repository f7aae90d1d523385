"""A stream whose node fails is resumed on another node, and its client sees one stream."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway import errors
from gateway.events import StreamResumed
from gateway.fleet.node import NodeState
from gateway.proxy import sse
from gateway.proxy.in_flight import InFlightRequest
from gateway.proxy.inbound.routes import ROUTES
from tests.emulator import EmulatedNode
from tests.gateways import until
from tests.proxy.proxy_over_nodes import A_FIRST, BODIES, ProxyOverNodes, Stream, proxy_over
from tests.proxy.test_response_stream import AFTER, BREAKS, check_failed
from tests.virtual import in_virtual_time

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/completion"]
TOKENS = 40
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}
QUIET = {"timeouts": {"silence": 0.3}}
BROKEN = [
    *((PATHS[0], kind, options) for kind, options in BREAKS),
    *((path, kind, {}) for path in PATHS[1:] for kind in ("close", "error_event")),
]


def nodes(count: int = 2, **options: Any) -> list[EmulatedNode]:
    return [EmulatedNode(**{"answer_tokens": 2000, **options}) for _ in range(count)]


def text_of(reply: Stream) -> str:
    """The content of a stream of any API."""
    found = []
    for value in reply.values:
        if value is None:
            continue
        found += [
            (choice.get("delta") or {}).get("content") or choice.get("text") or ""
            for choice in value.get("choices") or ()
        ]
        found.append(value.get("content") or "" if "choices" not in value else "")
        found.append((value.get("delta") or {}).get("text") or "")
    return "".join(found)


def check_whole(path: str, reply: Stream, whole: Stream) -> None:
    """Check for one stream with one end, and the text of the uninterrupted one."""
    assert reply.status == 200
    assert reply.errors == []
    assert text_of(reply) == text_of(whole)
    assert ROUTES[path].api.is_stream_complete(reply.body)
    assert reply.body.count(b"[DONE]") == whole.body.count(b"[DONE]")
    if path == "/v1/messages":
        kinds = [sse.event_name(event) for event in reply.events]
        expected = [sse.event_name(event) for event in whole.events]
        assert [k for k in kinds if b"delta" not in k or b"message" in k] == [
            k for k in expected if b"delta" not in k or b"message" in k
        ]
    elif path != "/completion":
        assert len({value["id"] for value in reply.values}) == 1
        assert len({value["created"] for value in reply.values}) == 1
        roles = [c for v in reply.values for c in v["choices"] if "role" in c.get("delta", {})]
        assert len(roles) == (path == "/v1/chat/completions")
        ends = [c for v in reply.values for c in v["choices"] if c.get("finish_reason")]
        assert len(ends) == 1


def usage_of(reply: Stream) -> Any:
    """The usage that a response reports, without the cached tokens."""
    for value in reversed(reply.values):
        if "tokens_predicted" in value:
            return value["tokens_predicted"], value["tokens_evaluated"]
        if value.get("usage"):
            usage = dict(value["usage"])
            usage.pop("prompt_tokens_details", None)
            return usage
    return None


def begun(in_flight: InFlightRequest) -> bool:
    """Whether its node has begun to write."""
    return in_flight.attempt is not None and in_flight.attempt.content_events > 4


def resumed(proxy: ProxyOverNodes) -> list[StreamResumed]:
    found: list[StreamResumed] = []
    proxy.app.bus.subscribe(StreamResumed, found.append)
    return found


def options_of(path: str) -> dict[str, Any]:
    counts = path in {"/v1/chat/completions", "/v1/completions"}
    return asked_of(path) | ({"stream_options": {"include_usage": True}} if counts else {})


def asked_of(path: str, tokens: int = TOKENS) -> dict[str, Any]:
    return {"temperature": 0, "n_predict" if path == "/completion" else "max_tokens": tokens}


@pytest.mark.parametrize(("path", "kind", "options"), BROKEN)
@in_virtual_time
async def test_a_broken_stream_is_resumed_on_another_node(
    tmp_path: Path, path: str, kind: str, options: dict[str, Any]
) -> None:
    one, two = nodes()
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST, **QUIET) as proxy:
        events = resumed(proxy)
        asked = options_of(path)
        whole = await proxy.stream(path, **asked)
        assert proxy.outcomes == [("a", "ok")]
        proxy.finished.clear()
        one.faults.next(kind, after_events=AFTER, **options)
        reply = await proxy.stream(path, **asked)
        check_whole(path, reply, whole)
        assert usage_of(reply) == usage_of(whole)
        await proxy.settled()
        (failed, (node, outcome)) = proxy.outcomes[1:]
        assert failed[0] == "a"
        assert failed[1] != "ok"
        assert (node, outcome) == ("b", "ok")
        (event,) = events
        assert (event.failed_node, event.resumed_on, event.failure) == ("a", "b", None)
        (record,) = proxy.finished
        assert (record.status, record.reason, record.node, record.attempts) == (200, None, "b", 2)
        assert record.completion_tokens == TOKENS
        assert (proxy.node("a").failures, proxy.node("b").failures) == (1, 0)
        metrics = await metrics_of(proxy)
        assert "llama_gateway_resumed_streams_total 1\n" in metrics


async def metrics_of(proxy: ProxyOverNodes) -> str:
    return proxy.app.metrics.render().decode()


@pytest.mark.parametrize("path", PATHS)
@in_virtual_time
async def test_the_text_is_the_same_wherever_the_stream_is_cut(tmp_path: Path, path: str) -> None:
    one, two = nodes(answer_tokens=12)
    async with proxy_over(
        tmp_path, one, two, nodes=A_FIRST, health={"failures": 1000}, retries={"quarantine": 0}
    ) as proxy:
        asked = options_of(path)
        asked |= asked_of(path, 12)
        whole = await proxy.stream(path, **asked)
        for after in range(1, len(whole.events)):
            one.faults.next("reset", after_events=after)
            reply = await proxy.stream(path, **asked)
            check_whole(path, reply, whole)
            assert usage_of(reply) == usage_of(whole), after


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", ["max_tokens", "stop"])
@in_virtual_time
async def test_a_limit_and_a_stop_word_hold_across_the_splice_point(
    tmp_path: Path, path: str, field: str
) -> None:
    one, two = nodes()
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
        asked = options_of(path)
        if field == "max_tokens":
            asked["n_predict" if path == "/completion" else field] = 20
        else:
            words = text_of(await proxy.stream(path, **asked)).split()
            asked["stop_sequences" if path == "/v1/messages" else field] = [" ".join(words[24:26])]
        whole = await proxy.stream(path, **asked)
        one.faults.next("reset", after_events=AFTER)
        reply = await proxy.stream(path, **asked)
        check_whole(path, reply, whole)
        assert len(text_of(whole).split()) < TOKENS


@in_virtual_time
async def test_a_third_node_takes_over_from_the_second_and_none_from_the_third(
    tmp_path: Path,
) -> None:
    servers = nodes(4)
    async with proxy_over(tmp_path, *servers, retries={"quarantine": 0}) as proxy:
        whole = await proxy.stream(**GREEDY)
        for server in servers:
            server.faults.next("close", after_events=8)
        reply = await proxy.stream(**GREEDY)
        check_failed("/v1/chat/completions", reply)
        assert text_of(whole).startswith(text_of(reply))
        assert len(proxy.attempts) == 1 + 3
        for server in servers:
            server.faults.clear()
        fleet = proxy.app.fleet
        await until(lambda: all(node.state is NodeState.READY for node in fleet.nodes.values()))
        for server in servers[:2]:
            server.faults.next("close", after_events=8)
        check_whole("/v1/chat/completions", await proxy.stream(**GREEDY), whole)


UNRESUMABLE: list[dict[str, Any]] = [
    {"n": 2},
    {"logprobs": True},
    {"grammar": 'root ::= "a"'},
    {"response_format": {"type": "json_object"}},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
]


@pytest.mark.parametrize("body", UNRESUMABLE)
@in_virtual_time
async def test_a_stream_that_can_not_be_resumed_ends_with_an_error_event(
    tmp_path: Path, body: dict[str, Any]
) -> None:
    one, two = nodes()
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
        events = resumed(proxy)
        one.faults.next("reset", after_events=AFTER)
        reply = await proxy.stream(**GREEDY, **body)
        check_failed("/v1/chat/completions", reply)
        assert two.requests == 0
        assert all(event.resumed_on is None and event.failure for event in events)


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@in_virtual_time
async def test_a_node_that_refuses_a_begun_message_continues_it_as_a_completion(
    tmp_path: Path, path: str, status: int
) -> None:
    """With 500 llama.cpp tells that a template has raised an exception, where it has a parser of
    its own for the model, as for GPT-OSS."""
    raised = "\n---\nWhile executing CallExpression at line 1, column 9 in source:\n...raise_exc\n"
    error = {"code": status, "message": f"{raised}Error: Jinja Exception: a user must speak last"}
    one, two = nodes()
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
        events = resumed(proxy)
        asked = options_of(path)
        whole = await proxy.stream(path, **asked)
        one.faults.next("reset", after_events=AFTER)
        two.faults.next("status", status=status, body=json.dumps({"error": error}))
        reply = await proxy.stream(path, **asked)
        check_whole(path, reply, whole)
        assert usage_of(reply) == usage_of(whole)
        assert [event.resumed_on for event in events] == ["b"]
        assert [seen.path for seen in two.seen if seen.path in PATHS] == [path, "/completion"]


@in_virtual_time
async def test_resuming_can_be_switched_off(tmp_path: Path) -> None:
    one, two = nodes()
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST, resume="off") as proxy:
        one.faults.next("reset", after_events=AFTER)
        check_failed("/v1/chat/completions", await proxy.stream())
        assert two.requests == 0


@in_virtual_time
async def test_a_response_longer_than_the_transcript_is_not_resumed(tmp_path: Path) -> None:
    one, two = nodes(answer_tokens=2000)
    async with proxy_over(
        tmp_path, one, two, nodes=A_FIRST, limits={"resume_bytes": 1000}
    ) as proxy:
        one.faults.next("reset", after_events=1500)
        check_failed("/v1/chat/completions", await proxy.stream())
        assert two.requests == 0


@pytest.mark.parametrize("other", [{"build": "b1-other"}, {"model": "other"}])
@in_virtual_time
async def test_no_node_of_another_kind_resumes_a_stream(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    one, two = *nodes(1), *nodes(1, **other)
    named: tuple[dict[str, Any], ...] = (
        {"speed_hint": 100.0, "model": {"m": "demo"}},
        {"model": {"m": other.get("model", "demo")}},
    )
    async with proxy_over(tmp_path, one, two, nodes=named) as proxy:
        one.faults.next("reset", after_events=AFTER)
        check_failed("/v1/chat/completions", await proxy.stream())
        assert two.requests == 0


@in_virtual_time
async def test_a_node_restarted_with_another_model_is_found_out(
    tmp_path: Path,
) -> None:
    one, two, three = nodes(3)
    order: tuple[dict[str, Any], ...] = ({"speed_hint": 100.0}, {"speed_hint": 10.0}, {})
    async with proxy_over(
        tmp_path, one, two, three, nodes=order, health={"interval": 60, "discover_interval": 600}
    ) as proxy:
        whole = await proxy.stream(**GREEDY)
        two.build = "b2-new"
        one.faults.next("reset", after_events=AFTER)
        check_whole("/v1/chat/completions", await proxy.stream(**GREEDY), whole)
        assert ("b", "other_kind") in proxy.outcomes
        assert proxy.node("b").failures == 0


@in_virtual_time
async def test_heartbeats_continue_while_a_stream_waits_for_a_node(tmp_path: Path) -> None:
    one, two = nodes()
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST, heartbeat="50ms") as proxy:
        whole = await proxy.stream(**GREEDY)
        two.faults.next("hang")
        one.faults.next("reset", after_events=AFTER)
        asked = asyncio.create_task(proxy.stream(**GREEDY))
        await until(lambda: two.requests == 1)
        await asyncio.sleep(0.3)
        two.faults.clear()
        reply = await asked
        assert reply.body.count(b":\n") >= 3
        check_whole("/v1/chat/completions", reply, whole)


@in_virtual_time
async def test_heartbeats_continue_from_the_silence_to_the_continuation(tmp_path: Path) -> None:
    one, two = nodes()
    every, silence = 0.1, 0.6
    async with proxy_over(
        tmp_path, one, two, nodes=A_FIRST, heartbeat=every, timeouts={"silence": silence}
    ) as proxy:
        whole = await proxy.stream(**GREEDY)
        one.faults.next("hang", after_events=AFTER)
        two.faults.next("hang", path="/apply-template", seconds=3 * every)
        reply = await proxy.stream(**GREEDY)
        assert ("a", "silence_timeout") in proxy.outcomes
        assert reply.body.count(b":\n") >= (silence + 3 * every) / every - 3
        check_whole("/v1/chat/completions", reply, whole)


@in_virtual_time
async def test_a_client_that_disconnects_during_a_resumption_frees_everything(
    tmp_path: Path,
) -> None:
    one, two = nodes(slots=1)
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
        two.faults.next("hang")
        one.faults.next("reset", after_events=AFTER)
        asked = asyncio.create_task(proxy.stream(**GREEDY))
        await until(lambda: two.requests == 1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: len(proxy.app.registry) == 0)
        two.faults.clear()
        await proxy.settled()
        assert proxy.outcomes[-1] == ("b", "client_closed")
        assert proxy.finished[-1].status == 499
        assert proxy.node("b").failures == 0


@in_virtual_time
async def test_a_clients_deadline_blames_no_node(tmp_path: Path) -> None:
    one, two = nodes()
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
        two.faults.next("hang")
        one.faults.next("reset", after_events=AFTER)
        reply = await proxy.stream(headers={"X-Request-Timeout": "1"}, **GREEDY)
        assert reply.errors[0]["code"] == "node_timeout"
        assert proxy.outcomes == [("a", "reset"), ("b", "total_timeout")]
        assert proxy.node("b").failures == 0
        assert proxy.finished[-1].status == 504
        two.faults.clear()


@in_virtual_time
async def test_a_cancelled_request_is_not_resumed(tmp_path: Path) -> None:
    one, two = nodes(decode_tps=100, answer_tokens=400)
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
        asked = asyncio.create_task(proxy.stream(**GREEDY))
        await until(lambda: any(begun(one) for one in proxy.app.registry))
        (in_flight,) = proxy.app.registry
        in_flight.cancel(errors.shutting_down())
        reply = await asked
        assert reply.errors[0]["code"] == "shutting_down"
        assert two.requests == 0


@in_virtual_time
async def test_requests_of_a_drained_node_are_resumed_on_another(tmp_path: Path) -> None:
    one, two = nodes(decode_tps=200)
    asked = asked_of("/v1/chat/completions", 100)
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
        whole = await proxy.stream(**asked)
        plain = (await proxy.ask(**asked)).json()
        first = asyncio.create_task(proxy.stream(**asked))
        second = asyncio.create_task(proxy.ask(**asked))
        await until(lambda: one.busy == 2)
        await until(lambda: all(begun(one) for one in proxy.app.registry))
        proxy.app.fleet.drain("a")
        proxy.app.drain_deadlines.set("a", 0.01)
        check_whole("/v1/chat/completions", await first, whole)
        answer = (await second).json()
        assert answer["choices"] == plain["choices"]
        assert answer["usage"]["completion_tokens"] == 100
        assert ("a", "moved") in proxy.outcomes
        assert proxy.node("a").failures == 0


@pytest.mark.parametrize(("path", "kind", "options"), BROKEN)
@in_virtual_time
async def test_a_plain_response_is_resumed_too(
    tmp_path: Path, path: str, kind: str, options: dict[str, Any]
) -> None:
    one, two = nodes()
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST, **QUIET) as proxy:
        asked = asked_of(path)
        whole = (await proxy.ask(path, **asked)).json()
        proxy.finished.clear()
        one.faults.next(kind, after_events=AFTER, **options)
        reply = await proxy.ask(path, **asked)
        assert reply.status_code == 200
        assert reply.headers["x-gateway-attempts"] == "2"
        assert reply.headers["content-type"].startswith("application/json")
        got = reply.json()
        for name in ("choices", "content", "tokens_predicted", "stop_reason"):
            assert got.get(name) == whole.get(name)
        if "usage" in whole:
            for name in ("completion_tokens", "prompt_tokens", "output_tokens"):
                assert got["usage"].get(name) == whole["usage"].get(name)
        (record,) = proxy.finished
        assert record.completion_tokens == TOKENS


@in_virtual_time
async def test_a_plain_response_that_can_not_be_resumed_is_retried(tmp_path: Path) -> None:
    one, two = nodes()
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
        one.faults.next("reset", after_events=AFTER)
        reply = await proxy.ask(logprobs=True, **GREEDY)
        assert reply.status_code == 200
        assert reply.headers["x-gateway-attempts"] == "2"
        choice = reply.json()["choices"][0]
        assert len(choice["logprobs"]["content"]) == TOKENS
        assert proxy.finished[-1].completion_tokens == TOKENS


INSERTED = ["nul", "no_data", "empty", "comment", "line_comment", "fields", "null"]


@pytest.mark.parametrize("what", INSERTED)
@in_virtual_time
async def test_events_without_content_do_not_prevent_a_resumption(
    tmp_path: Path, what: str
) -> None:
    one, two = nodes()
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
        whole = await proxy.stream(**GREEDY)
        one.faults.next("insert", after_events=4, what=what)
        one.faults.next("reset", after_events=AFTER)
        two.faults.set("insert", after_events=4, what=what)
        reply = await proxy.stream(**GREEDY)
        assert reply.errors == []
        assert json.dumps(text_of(reply)) == json.dumps(text_of(whole))


@pytest.mark.parametrize(
    ("path", "what", "options"),
    [
        *((path, "not_json", {}) for path in PATHS),
        (PATHS[0], "invalid_utf8", {}),
        (PATHS[0], "huge", {"size": 2 << 20}),
    ],
)
@in_virtual_time
async def test_events_that_can_not_be_read_are_sent_to_nobody(
    tmp_path: Path, path: str, what: str, options: dict[str, Any]
) -> None:
    one, two = nodes()
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
        asked = options_of(path)
        whole = await proxy.stream(path, **asked)
        one.faults.next("insert", after_events=AFTER, what=what, **options)
        reply = await proxy.stream(path, **asked)
        check_whole(path, reply, whole)
        assert proxy.outcomes[1:] == [("a", "garbage"), ("b", "ok")]
        one.faults.set("insert", after_events=AFTER, what=what, **options)
        two.faults.set("insert", after_events=AFTER, what=what, **options)
        reply = await proxy.stream(path, **asked)
        if reply.status == 200:
            check_failed(path, reply)
        else:
            assert reply.status == 502, "nothing had been sent"


@in_virtual_time
async def test_events_between_two_ends_are_sent_to_nobody(tmp_path: Path) -> None:
    one, two = nodes()
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
        whole = await proxy.stream(**GREEDY)
        one.faults.set("double_done")
        one.faults.next("insert", after_events=TOKENS, what="done")
        reply = await proxy.stream(**GREEDY)
        assert reply.body.count(b"[DONE]") == 1
        assert text_of(whole).startswith(text_of(reply))


def test_every_path_has_a_body() -> None:
    assert set(PATHS) <= set(BODIES)
