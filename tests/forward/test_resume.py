"""A stream whose node fails is resumed on another node, and its client sees one stream."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway import errors
from gateway.api import sse
from gateway.api.json_values import JsonObject
from gateway.api.resuming import ReasoningEndMark
from gateway.api.transcript import Transcript
from gateway.events import StreamResumed
from gateway.forward.in_flight import InFlightRequest
from gateway.forward.resume import (
    NotResumable,
    ReasoningTemplate,
    ResumeInput,
    ResumePlan,
    find_reasoning_template,
    plan_resume,
)
from gateway.nodes.node import LeasePhase
from gateway.request.routes import ROUTES
from tests.clients.site import Site, broken_off, busy, until_busy
from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import A_FIRST, ProxyOverNodes, Stream, proxy_over, two_nodes
from tests.forward.test_attempt import nobody_answers
from tests.forward.test_event_pipeline import AFTER, BREAKS, check_failed
from tests.gateways import running_gateway, until
from tests.reliability.cutting_proxy import CutPlan, cutting_proxies
from tests.servers import start_demo_servers
from tests.virtual import in_virtual_time

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/completion"]
EVENTS_WITHOUT_TEXT = {"/v1/chat/completions": 1, "/v1/messages": 2}  # at the beginning
TOKENS = 40
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}
QUIET = {"timeouts": {"silence": 0.3}}
BROKEN = [
    *((PATHS[0], kind, options) for kind, options in BREAKS),
    *((path, kind, {}) for path in PATHS[1:] for kind in ("close", "error_event")),
]


def nodes(count: int = 2, **options: Any) -> list[EmulatedNode]:
    return [EmulatedNode(**{"answer_tokens": 2000, **options}) for _ in range(count)]


def two_writers(
    folder: Path, **settings: Any
) -> AbstractAsyncContextManager[tuple[ProxyOverNodes, EmulatedNode, EmulatedNode]]:
    """A gateway over two nodes that write as much as is asked for; it prefers the first."""
    return two_nodes(folder, answer_tokens=2000, **settings)


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
    async with two_writers(tmp_path, **QUIET) as (proxy, one, _):
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
        # Without those of the node that goes on.
        assert event.tokens == AFTER - EVENTS_WITHOUT_TEXT.get(path, 0)
        (record,) = proxy.finished
        assert (record.status, record.reason, record.node, record.attempts) == (200, None, "b", 2)
        assert (record.completion_tokens, record.resumptions) == (TOKENS, 1)
        assert (proxy.node("a").failures, proxy.node("b").failures) == (1, 0)
        metrics = await metrics_of(proxy)
        assert "llama_gateway_resumed_streams_total 1\n" in metrics


async def metrics_of(proxy: ProxyOverNodes) -> str:
    return b"".join(proxy.app.metrics.steps()).decode()


@pytest.mark.parametrize("path", PATHS)
@in_virtual_time
async def test_the_text_is_the_same_wherever_the_stream_is_cut(tmp_path: Path, path: str) -> None:
    async with two_nodes(
        tmp_path, answer_tokens=12, health={"failures": 1000}, retries={"quarantine": 0}
    ) as (proxy, one, _):
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
    async with two_writers(tmp_path) as (proxy, one, _):
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
async def test_a_stream_that_was_resumed_twice_is_not_resumed_again(tmp_path: Path) -> None:
    servers = nodes(4)
    async with proxy_over(tmp_path, *servers, retries={"quarantine": 0}) as proxy:
        whole = await proxy.stream(**GREEDY)
        for server in servers:
            server.faults.next("close", after_events=8)
        reply = await proxy.stream(**GREEDY)
        check_failed("/v1/chat/completions", reply)
        assert text_of(whole).startswith(text_of(reply))
        assert len(proxy.attempts) == 1 + 3


@in_virtual_time
async def test_a_stream_that_can_not_be_resumed_ends_with_an_error_event(tmp_path: Path) -> None:
    """Which these are: `tests/api/test_resuming.py`."""
    async with two_writers(tmp_path) as (proxy, one, two):
        events = resumed(proxy)
        one.faults.next("reset", after_events=AFTER)
        check_failed("/v1/chat/completions", await proxy.stream(**GREEDY, logprobs=True))
        assert two.requests == 0
        (event,) = events
        assert event.resumed_on is None
        assert "probabilities" in str(event.failure)


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
    async with two_writers(tmp_path) as (proxy, one, two):
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


@pytest.mark.parametrize(
    ("settings", "after"), [({"resume": "off"}, AFTER), ({"limits": {"resume_bytes": 1000}}, 1500)]
)
@in_virtual_time
async def test_resuming_can_be_switched_off_and_needs_the_whole_transcript(
    tmp_path: Path, settings: dict[str, Any], after: int
) -> None:
    async with two_writers(tmp_path, **settings) as (proxy, one, two):
        one.faults.next("reset", after_events=after)
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
async def test_heartbeats_continue_from_the_silence_to_the_continuation(tmp_path: Path) -> None:
    one, two = nodes()
    every, silence = 0.1, 0.6
    async with proxy_over(
        tmp_path, one, two, nodes=A_FIRST, heartbeat=every, timeouts={"silence": silence}
    ) as proxy:
        whole = await proxy.stream(**GREEDY)
        one.faults.next("hang", after_events=AFTER)
        two.faults.next("hang", path="/apply-template", seconds=3 * every)
        two.faults.next("hang", seconds=3 * every)
        reply = await proxy.stream(**GREEDY)
        assert ("a", "silence_timeout") in proxy.outcomes
        assert reply.body.count(b":\n") >= (silence + 6 * every) / every - 3
        check_whole("/v1/chat/completions", reply, whole)


@in_virtual_time
async def test_a_clients_deadline_blames_no_node(tmp_path: Path) -> None:
    async with two_writers(tmp_path) as (proxy, one, two):
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
    async with two_writers(tmp_path, **QUIET) as (proxy, one, _):
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
    async with two_writers(tmp_path) as (proxy, one, _):
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
    async with two_writers(tmp_path) as (proxy, one, two):
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
    async with two_writers(tmp_path) as (proxy, one, two):
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


# Retries and resumptions share one budget; a stream's first resumption needs none of it.


CHAT = "/v1/chat/completions"
IN_ORDER: tuple[dict[str, Any], ...] = ({"speed_hint": 1000.0}, {"speed_hint": 100.0}, {})
NO_SHARE = {"budget": 0.0, "budget_min": 0, "quarantine": 0}
"""The budget is then the slots of one host."""


def spend_budget(proxy: ProxyOverNodes, *, left: int = 0) -> None:
    """Spend the retry budget up to `left`."""
    context = proxy.app.proxy_context
    while context.retries_left() > left:
        assert context.retry_budget.spend(context.clock(), 0.0, 1000)


@pytest.mark.parametrize(("failing", "left"), [(1, 1), (2, 0)])
@in_virtual_time
async def test_the_first_resumption_spends_nothing_and_the_second_one_retry(
    tmp_path: Path, failing: int, left: int
) -> None:
    servers = nodes(3)
    async with proxy_over(tmp_path, *servers, nodes=IN_ORDER, retries=NO_SHARE) as proxy:
        whole = await proxy.stream(**GREEDY)
        spend_budget(proxy, left=1)
        for server in servers[:failing]:
            server.faults.next("reset", after_events=8)
        check_whole(CHAT, await proxy.stream(**GREEDY), whole)
        assert proxy.app.proxy_context.retries_left() == left


@pytest.mark.parametrize("reached", [False, True])
@in_virtual_time
async def test_a_failed_resumption_needs_budget_only_if_it_reached_a_node(
    tmp_path: Path, reached: bool
) -> None:
    one, two, three = nodes(3)
    slow = {"interval": 3600.0}
    async with proxy_over(
        tmp_path, one, two, three, nodes=IN_ORDER, retries=NO_SHARE, health=slow
    ) as proxy:
        whole = await proxy.stream(**GREEDY)
        spend_budget(proxy)
        one.faults.next("reset", after_events=8)
        if reached:
            two.faults.next("garbage")
            check_failed(CHAT, await proxy.stream(**GREEDY))
        else:
            await two.kill()
            check_whole(CHAT, await proxy.stream(**GREEDY), whole)
            assert proxy.outcomes[1:] == [("a", "reset"), ("b", "connect_failed"), ("c", "ok")]


@in_virtual_time
async def test_resumptions_after_a_mass_death_are_bounded_by_the_budget(tmp_path: Path) -> None:
    servers = [EmulatedNode(slots=6, decode_tps=100, answer_tokens=400) for _ in range(3)]
    asked = {**GREEDY, "max_tokens": 200}
    async with proxy_over(tmp_path, *servers, nodes=IN_ORDER, retries=NO_SHARE) as proxy:
        fleet, registry = proxy.app.fleet, proxy.app.registry
        fleet.drain("c")
        fleet.drain("b")
        streams = [asyncio.create_task(proxy.stream(**asked)) for _ in range(6)]
        await until(lambda: len(registry) == 6 and all(begun(one) for one in registry))
        fleet.resume("b")
        await servers[0].kill()
        await until(lambda: servers[1].busy == 6 and all(begun(one) for one in registry))
        fleet.resume("c")
        spend_budget(proxy, left=2)
        events = resumed(proxy)
        await servers[1].kill()
        replies = await asyncio.gather(*streams)
        assert sorted(len(reply.errors) for reply in replies) == [0, 0, 1, 1, 1, 1]
        assert [node for node, outcome in proxy.outcomes if outcome == "ok"] == ["c", "c"]
        failures = [event.failure for event in events if event.resumed_on is None]
        assert failures == ["the retry budget is used up"] * 4


# A client that disconnects during a resumption frees its place in the queue and its slot.


PATH = "/v1/chat/completions"
LONG_GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 2000}

Stage = Callable[[ProxyOverNodes, AsyncExitStack], Awaitable[Callable[[], bool]]]
"""Prepares a stage of the resumption; returns a check whether the request has reached it."""


async def queued(proxy: ProxyOverNodes, stack: AsyncExitStack) -> Callable[[], bool]:
    two = proxy.servers["b"]
    two.engine.decode_tps = 20.0
    held = asyncio.create_task(proxy.ask(stream=True, max_tokens=40, messages=SOMETHING))
    stack.push_async_callback(lambda: asyncio.wait([held]))
    await until(lambda: proxy.node("b").leased == 1)
    return lambda: len(proxy.app.scheduler.queue_positions()) == 1


SOMETHING = [{"role": "user", "content": "something else"}]


async def asking(proxy: ProxyOverNodes, stack: AsyncExitStack) -> Callable[[], bool]:
    two = proxy.servers["b"]
    before = two.control_requests
    two.faults.set("hang", path="/tokenize")
    return lambda: two.control_requests > before + 1 and proxy.node("b").leased == 1


async def connecting(proxy: ProxyOverNodes, stack: AsyncExitStack) -> Callable[[], bool]:
    two = proxy.servers["b"]
    await two.kill()
    await stack.enter_async_context(nobody_answers(two.port))
    return lambda: proxy.node("b").leased == 1


async def unanswered(proxy: ProxyOverNodes, stack: AsyncExitStack) -> Callable[[], bool]:
    two = proxy.servers["b"]
    two.faults.next("hang")
    return lambda: two.requests == 1


async def reading(proxy: ProxyOverNodes, stack: AsyncExitStack) -> Callable[[], bool]:
    two = proxy.servers["b"]
    two.engine.prefill_tps = 60.0
    return lambda: phase_of(proxy, "b") is LeasePhase.PREFILL


async def writing(proxy: ProxyOverNodes, stack: AsyncExitStack) -> Callable[[], bool]:
    two = proxy.servers["b"]
    two.engine.decode_tps = 100.0
    return lambda: phase_of(proxy, "b") is LeasePhase.DECODE and two.engine.tokens > 20


def phase_of(proxy: ProxyOverNodes, node: str) -> LeasePhase | None:
    """How far the only request on this node has got."""
    return next((lease.phase for lease in proxy.node(node).leases), None)


@pytest.mark.parametrize(
    ("stage", "stream"),
    [
        *((stage, True) for stage in (queued, asking, connecting, unanswered, reading, writing)),
        *((stage, False) for stage in (queued, writing)),
    ],
)
@in_virtual_time
async def test_a_disconnect_leaves_nothing_behind(
    tmp_path: Path, stage: Stage, stream: bool
) -> None:
    one, two = (EmulatedNode(slots=1, answer_tokens=2000) for _ in range(2))
    quiet = {"interval": 60.0, "discover_interval": 600.0}
    async with (
        proxy_over(tmp_path, one, two, nodes=({}, {"speed_hint": 100.0}), health=quiet) as proxy,
        AsyncExitStack() as stack,
    ):
        gateway = proxy.app
        if stage is not queued:
            # Only `a` can take the request at first.
            gateway.fleet.drain("b")
        is_reached = await stage(proxy, stack)
        one.faults.next("reset", after_events=AFTER)
        held = {one.request.id for one in gateway.registry}
        asked = asyncio.create_task(proxy.ask(stream=stream, **LONG_GREEDY))
        await until(lambda: one.requests == 1)
        if stage is not queued:
            gateway.fleet.resume("b")
        await until(is_reached)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: {one.request.id for one in gateway.registry} <= held, 1.0)
        assert gateway.scheduler.queue_positions() == []
        assert (proxy.finished[0].status, proxy.finished[0].reason) == (499, "client_closed")
        if stage in {connecting, asking}:
            # Nothing that takes a slot was sent.
            await until(lambda: proxy.node("b").leased == 0, 0.5)
        elif stage is writing:
            await until(lambda: two.busy == 0, 0.5)
        elif stage is reading:
            # The node reads on, and its slot is taken until it has.
            assert two.busy == 1
            while two.busy:
                assert proxy.node("b").leased == 1
                await asyncio.sleep(0.005)
        two.faults.clear()
        assert proxy.node("b").failures == 0
        assert two.requests == (0 if stage in {connecting, asking} else 1)
        await stack.aclose()
        if stage is connecting:
            await two.revive()


@asynccontextmanager
async def a_pair(folder: Path) -> AsyncIterator[tuple[Site, list[str], CutPlan]]:
    """Two real servers of one slot each, their own addresses, and what breaks streams off."""
    plan = CutPlan()
    async with (
        start_demo_servers(2, slots=1, context=16_384) as urls,
        cutting_proxies(urls, plan) as proxies,
        running_gateway(folder, proxies, {"health": {"interval": 0.2}}) as running,
    ):
        site = Site(running)
        await until(
            lambda: all(n.probe_history.discovered_at for n in site.gateway.fleet.nodes.values())
        )
        yield site, urls, plan
        await site.until_idle()
        for url in urls:
            await until_busy(url, 0)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_real_slots_are_free_when_the_client_has_disconnected(tmp_path: Path) -> None:
    async with a_pair(tmp_path) as (site, urls, plan):
        resumed: list[StreamResumed] = []
        site.gateway.bus.subscribe(StreamResumed, resumed.append)

        def resumed_request() -> asyncio.Task[Any]:
            plan.arm(20)
            # Each has another beginning: no server has it in its cache, and it is not quarantined.
            messages = [{"role": "user", "content": f"{plan.cuts} {LONG}"}]
            body = {"messages": messages, "max_tokens": 8000, "stream": True, "ignore_eos": True}
            return asyncio.create_task(site.http.post(PATH, json=body))

        # During prefill: the server reads on, and its slot counts as taken until it is done.
        read = True
        while read:
            asked = resumed_request()
            first = await holder(site)
            second = urls[1 - first]
            await cut(plan, asked)
            await until_busy(second, 1)
            # This process may have stood still for longer than it takes to read.
            read = bool(resumed)
            await disconnect(asked)
            while await busy(second):
                if not site.leased[f"node-{1 - first}"]:
                    assert not await busy(second), "its slot was freed too soon"
            await site.until_idle()
            resumed.clear()

        # During decode: its slot is free at once.
        asked = resumed_request()
        first = await holder(site)
        await cut(plan, asked)
        await until(lambda: bool(resumed), 50)
        assert resumed[0].resumed_on == f"node-{1 - first}"
        await until_busy(urls[first], 0)
        assert await busy(urls[1 - first]) == 1
        await disconnect(asked)
        for url in urls:
            await until_busy(url, 0)
            assert await broken_off(url)
        await site.until_idle()

        # While it waits for a slot: the request that holds the slot runs on.
        async with site.http.stream("POST", PATH, json=OTHER) as other:
            parts = other.aiter_bytes()
            await anext(parts)
            asked = resumed_request()
            await cut(plan, asked)
            await until(lambda: len(site.gateway.scheduler.queue_positions()) == 1)
            await disconnect(asked)
            await until(lambda: not site.gateway.scheduler.queue_positions())
            await anext(parts)
            await until(lambda: len(site.gateway.registry) == 1)
            assert [record.status for record in site.records] == [499] * plan.cuts
        assert sum(node.failures for node in site.gateway.fleet.nodes.values()) == plan.cuts


LONG = "river stone " * 800
OTHER = {
    "messages": [{"role": "user", "content": "hello"}], "max_tokens": 15_000, "stream": True,
    "ignore_eos": True,
}  # fmt: skip


async def holder(site: Site) -> int:
    """The number of the node that the only request runs on."""
    await until(lambda: any(site.leased.values()))
    return int(next(name for name, held in site.leased.items() if held).removeprefix("node-"))


async def cut(plan: CutPlan, asked: asyncio.Task[Any]) -> None:
    """Wait until the request's stream has been broken off."""
    await until(lambda: plan.after is None or asked.done(), 50)
    assert not asked.done()


async def disconnect(asked: asyncio.Task[Any]) -> None:
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


# Resuming by token ids: the client sees nothing of the probabilities that were asked for.


@pytest.mark.parametrize("path", PATHS)
@in_virtual_time
async def test_the_client_gets_no_logprobs_that_it_did_not_ask_for(
    tmp_path: Path, path: str
) -> None:
    async with two_writers(tmp_path, resume="exact") as (proxy, one, _):
        asked = options_of(path)
        whole = await proxy.stream(path, **asked)
        assert b'"logprobs":{' not in whole.body
        asks = {"/v1/chat/completions", "/v1/completions"}
        assert (b'"logprobs"' in one.seen[-1].body) is (path in asks)
        one.faults.next("reset", after_events=AFTER)
        reply = await proxy.stream(path, **asked)
        check_whole(path, reply, whole)
        assert usage_of(reply) == usage_of(whole)
        assert b'"logprobs":{' not in reply.body
        plain = await proxy.ask(path, **asked_of(path))
        assert b'"logprobs":{' not in plain.content


@in_virtual_time
async def test_logprobs_that_the_client_asked_for_stay(tmp_path: Path) -> None:
    (one,) = nodes(1)
    async with proxy_over(tmp_path, one, resume="exact") as proxy:
        reply = await proxy.stream(logprobs=True, max_tokens=4)
        assert reply.body.count(b'"logprobs":{') == 4
        assert len(text_of(reply).split()) == 4


# Resume plans: by token ids, by a rendered prompt, with reasoning, by the text alone.


MESSAGES = [{"role": "user", "content": "why"}]
PLANNED = {"messages": MESSAGES, "max_tokens": 200, "temperature": 0, "stream": True}


class Template:
    """A node whose template writes reasoning in tags. Each character is a token."""

    def __init__(self, *, shows: bool = True, opens: bool = False, prefills: bool = True) -> None:
        self.shows = shows
        """Whether it renders reasoning."""
        self.opens = opens
        """Whether its prompt ends with an open tag."""
        self.prefills = prefills
        """Whether it continues the assistant's last message, instead of beginning the next."""

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/apply-template":
            return {"prompt": self.render(body["messages"])}
        if path == "/detokenize":
            return {"content": "".join(map(chr, body["tokens"]))}
        assert path == "/tokenize"
        if body.get("with_pieces"):
            return {"tokens": [{"id": ord(c), "piece": c} for c in body["content"]]}
        return {"tokens": [ord(c) for c in body["content"]]}

    def render(self, messages: list[dict[str, Any]]) -> str:
        text = ""
        for message in messages:
            reasoning = message.get("reasoning_content") if self.shows else None
            text += f"[{message['role']}]"
            text += f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
            text += message["content"] + "[end]"
        if messages[-1]["role"] == "assistant" and self.prefills:
            return text.removesuffix("[end]")
        return text + "[assistant]" + ("<think>\n" if self.opens else "")


class Words(Template):
    """Each word is a token."""

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/tokenize":
            return {"tokens": [{"piece": p} for p in re.findall(r"\S+ ?|\s", body["content"])]}
        return await super().ask(path, body)


async def planned(template: Template, transcript: Transcript, **more: Any) -> ResumePlan:
    resume = ResumeInput(ROUTES["/v1/chat/completions"], PLANNED, transcript, **more)
    return await plan_resume(template.ask, resume)


def body_of(plan: ResumePlan) -> dict[str, Any]:
    """What the next node is asked for."""
    assert plan.body is not None
    return plan.body


@pytest.mark.parametrize(
    "template", [Template(), Template(opens=True), Template(shows=False, opens=True)]
)
async def test_reasoning_continues_if_the_template_or_its_prompt_shows_how_it_is_written(
    template: Template,
) -> None:
    transcript = Transcript(reasoning_pieces=["so ", "it"], token_count=2, first_event={"id": "x"})
    plan = await planned(template, transcript)
    assert plan.route.path == "/completion"
    assert body_of(plan)["prompt"] == "[user]why[end][assistant]<think>\nso it"
    out = plan.rewriter.rewrite({"content": " is</think>\n\nbecause"}).decode()
    assert '"reasoning_content":" is"' in out
    assert '"content":"because"' in out


async def test_content_continues_behind_its_reasoning() -> None:
    transcript = Transcript(
        reasoning_pieces=["so it"],
        content_pieces=list("because"),
        token_count=8,
        first_event={"id": "x"},
    )
    plan = await planned(Template(), transcript)
    prompt = "[user]why[end][assistant]<think>\nso it\n</think>\n\nbecause"
    assert body_of(plan)["prompt"] == prompt
    assert '"content":" <b>"' in plan.rewriter.rewrite({"content": " <b>"}).decode()


async def test_reasoning_that_no_template_writes_can_not_be_resumed() -> None:
    with pytest.raises(NotResumable):
        await planned(Template(shows=False), Transcript(reasoning_pieces=["so it"], token_count=1))


async def test_a_chat_continues_as_a_completion_if_its_template_refuses_a_begun_message() -> None:
    plan = await planned(
        Template(), Transcript(content_pieces=list("because"), token_count=7), as_completion=True
    )
    assert (plan.route.path, plan.splice_point.prefix) == ("/completion", "because")
    assert body_of(plan)["prompt"] == "[user]why[end][assistant]because"
    assert body_of(plan)["n_predict"] == 193
    assert "messages" not in body_of(plan)


async def test_a_chat_continues_as_a_completion_if_its_node_begins_the_next_message() -> None:
    transcript = Transcript(content_pieces=list("because"), token_count=7, first_event={"id": "x"})
    plan = await planned(Template(prefills=False), transcript)
    assert plan.route.path == "/completion"
    assert body_of(plan)["prompt"] == "[user]why[end][assistant]because"
    for path in ("/v1/chat/completions", "/v1/messages"):
        resume = ResumeInput(ROUTES[path], PLANNED | {"tools": [{"type": "function"}]}, transcript)
        with pytest.raises(NotResumable):
            await plan_resume(Template(prefills=False).ask, resume)
        assert (await plan_resume(Template().ask, resume)).route is resume.route
    nothing = Transcript(first_event={"id": "x"})
    assert (await planned(Template(prefills=False), nothing)).route.path == "/v1/chat/completions"


def message_input(transcript: Transcript, prompt_tokens: int = 25, **more: Any) -> ResumeInput:
    """The same chat as messages."""
    transcript.first_event = {"id": "x", "usage": {"input_tokens": prompt_tokens}}
    return ResumeInput(ROUTES["/v1/messages"], PLANNED | more, transcript)


async def test_messages_continue_as_a_completion_too() -> None:
    transcript = Transcript(content_pieces=list("because"), token_count=7, open_blocks={0: "text"})
    plan = await plan_resume(Template(prefills=False).ask, message_input(transcript))
    assert plan.route.path == "/completion"
    assert body_of(plan)["prompt"] == "[user]why[end][assistant]because"
    assert body_of(plan)["n_predict"] == 193
    out = plan.rewriter.rewrite({"content": " it"})
    assert b'"index":0,"delta":{"type":"text_delta","text":" it"}' in out
    with pytest.raises(NotResumable):  # its first node read another prompt
        await plan_resume(Template(prefills=False).ask, message_input(transcript, 26))


@pytest.mark.parametrize("thinking", [None, {"type": "adaptive"}])
async def test_reasoning_of_messages_continues(thinking: Any) -> None:
    transcript = Transcript(
        reasoning_pieces=list("so it"), token_count=5, open_blocks={0: "thinking"}
    )
    plan = await plan_resume(Template().ask, message_input(transcript, thinking=thinking))
    assert plan.route.path == "/completion"
    assert body_of(plan)["prompt"] == "[user]why[end][assistant]<think>\nso it"
    assert not {"messages", "thinking"} & body_of(plan).keys()
    assert body_of(plan)["preserved_tokens"] == ["</think>"]
    out = plan.rewriter.rewrite({"content": " is\n</think>\n\nbecause"})
    assert out.count(b"content_block_start") == 2, "its name and its type"
    assert b'"index":0,"delta":{"type":"thinking_delta","thinking":" is\\n"}' in out
    assert b'"index":1,"delta":{"type":"text_delta","text":"because"}' in out
    with pytest.raises(NotResumable):
        await plan_resume(Template().ask, message_input(transcript, 26))
    with pytest.raises(NotResumable):
        await plan_resume(Template().ask, message_input(transcript, tools=[{"name": "f"}]))


async def test_content_of_messages_continues_behind_its_reasoning() -> None:
    transcript = Transcript(
        reasoning_pieces=["so it\n"], content_pieces=list("because"), token_count=13
    )
    transcript.open_blocks, transcript.block_index = {0: "thinking", 1: "text"}, 1
    earlier = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "no"},
    ]
    history = [*MESSAGES, {"role": "assistant", "content": earlier}, *MESSAGES]
    prompt = "[user]why[end][assistant]<think>\nhm\n</think>\n\nno[end][user]why[end][assistant]"
    plan = await plan_resume(
        Template().ask, message_input(transcript, len(prompt), messages=history)
    )
    assert body_of(plan)["prompt"] == f"{prompt}<think>\nso it\n</think>\n\nbecause"
    assert b'"index":1,"delta":{"type":"text_delta","text":" <b>"}' in plan.rewriter.rewrite(
        {"content": " <b>"}
    )


async def test_reasoning_is_stepped_back_into_where_it_tokenizes_otherwise() -> None:
    transcript = Transcript(
        reasoning_pieces=["so ", "i", "t"], token_count=3, first_event={"id": "x"}
    )
    plan = await planned(Words(), transcript)
    assert body_of(plan)["prompt"].endswith("<think>\nso ")
    assert (
        plan.splice_point.overlap,
        plan.splice_point.sent_tokens - plan.splice_point.prefix_tokens,
    ) == ("it", 2)
    plan = await planned(Words(), transcript, step_back=False)
    assert body_of(plan)["prompt"].endswith("<think>\nso it")


async def test_token_ids_are_continued_from_if_they_make_the_text() -> None:
    transcript = Transcript(
        content_pieces=["be"],
        token_count=2,
        token_ids=[ord("b"), ord("e")],
        first_event={"id": "x"},
    )
    plan = await planned(Template(), transcript)
    assert body_of(plan)["prompt"] == [*map(ord, "[user]why[end][assistant]be")]
    assert (plan.splice_point.prompt_tokens, plan.splice_point.prefix_tokens) == (25, 2)
    transcript.token_ids.pop()
    plan = await planned(Template(), transcript)
    assert plan.route.path == "/v1/chat/completions", "an id is missing: continue from the text"


async def test_a_response_of_full_length_needs_no_node() -> None:
    plan = await planned(
        Template(),
        Transcript(content_pieces=list("a" * 200), token_count=200, first_event={"id": "x"}),
    )
    assert plan.body is None
    assert plan.final_events is not None
    assert b'"length"' in plan.final_events


async def test_messages_with_images_continue_by_their_own_api() -> None:
    picture = [{"type": "image", "source": {"type": "base64", "data": "eA=="}}]
    body = PLANNED | {"messages": [{"role": "user", "content": picture}]}
    head = {"usage": {"input_tokens": 9, "cache_read_input_tokens": 3}}
    transcript = Transcript(
        content_pieces=["be"], token_count=2, first_event=head, open_blocks={0: "text"}
    )
    plan = await plan_resume(Template().ask, ResumeInput(ROUTES["/v1/messages"], body, transcript))
    assert (plan.route.path, plan.splice_point.prompt_tokens) == ("/v1/messages", 12)
    assert body_of(plan)["messages"][-1] == {"role": "assistant", "content": "be"}


# How a template writes reasoning is found by having it write a sample.


END = "</think>"
SHOWN = ReasoningTemplate("Q<think>\n", "\n</think>\n\n", ReasoningEndMark(END))
TEMPLATES: list[tuple[str, str, ReasoningTemplate | None]] = [
    ("Q<think>\n", "Q<think>\n{r}\n</think>\n\n{c}", SHOWN),
    ("Q<think>\n", "Q<think>{r}</think>{c}",
     ReasoningTemplate("Q<think>\n", END, ReasoningEndMark(END, ""))),
    ("Q", "Q[THINK]{r}[/THINK]{c}",
     ReasoningTemplate("Q[THINK]", "[/THINK]", ReasoningEndMark("[/THINK]", ""))),
    # The mark that ends this prompt begins no reasoning.
    ("<|assistant|>", "<|assistant|>\n<think>{r}</think>\n{c}",
     ReasoningTemplate("<|assistant|>\n<think>", "</think>\n", ReasoningEndMark(END, "\n"))),
    ("<|assistant|>", "<|assistant|>{c}", None),
    ("<start>", "<a>{r}<end><start><b>{c}", ReasoningTemplate("<a>", "<end><start><b>", None)),
    ("Q<think>\n", "Q{c}", SHOWN),
    ("Q", "Q{c}", None),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "written", "expected"), TEMPLATES)
async def test_the_text_around_reasoning_is_found(
    prompt: str, written: str, expected: ReasoningTemplate | None
) -> None:
    async def render(messages: list[JsonObject]) -> str:
        last = messages[-1]
        return written.format(r=last["reasoning_content"], c=last["content"]) + "<end>"

    assert await find_reasoning_template(render, [], prompt) == expected


def test_white_space_before_the_end_mark_is_not_written_twice() -> None:
    template = ReasoningTemplate("Q<think>", "\n</think>\n\n", ReasoningEndMark(END))
    assert template.before_content("so") == "Q<think>so\n</think>\n\n"
    assert template.before_content("so\n") == "Q<think>so\n</think>\n\n"
