"""A stream whose node fails is resumed on another node, and its client sees one stream."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

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
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import A_FIRST, ProxyOverNodes, Stream, proxy_over, two_nodes
from tests.forward.test_event_pipeline import AFTER, BREAKS, check_failed
from tests.gateways import until
from tests.virtual import in_virtual_time

CHAT, ANTHROPIC = "/v1/chat/completions", "/v1/messages"
PATHS = [CHAT, "/v1/completions", ANTHROPIC, "/completion"]
EVENTS_WITHOUT_TEXT = {CHAT: 1, ANTHROPIC: 2}  # at the beginning
TOKENS = 40
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}
QUIET = {"timeouts": {"silence": 0.3}}
BROKEN = [
    *((PATHS[0], kind, options) for kind, options in BREAKS),
    *((path, kind, {}) for path in PATHS[1:] for kind in ("close", "error_event")),
]
UNREADABLE: list[tuple[str, str, dict[str, Any]]] = [
    *((path, "insert", {"what": "not_json"}) for path in PATHS),
    *((CHAT, "insert", {"what": what, "size": 2 << 20}) for what in ("invalid_utf8", "huge")),
]
"""Events that are sent to nobody."""


def nodes(count: int = 2, **options: Any) -> list[EmulatedNode]:
    return [EmulatedNode(**{"answer_tokens": 2000, **options}) for _ in range(count)]


def two_writers(
    folder: Path, **settings: Any
) -> AbstractAsyncContextManager[tuple[ProxyOverNodes, EmulatedNode, EmulatedNode]]:
    """A gateway over two nodes that write as much as is asked for; it prefers the first."""
    return two_nodes(folder, answer_tokens=2000, **settings)


def text_of(reply: Stream) -> str:
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
    if path == ANTHROPIC:
        kinds = [sse.event_name(event) for event in reply.events]
        expected = [sse.event_name(event) for event in whole.events]
        assert [k for k in kinds if b"delta" not in k or b"message" in k] == [
            k for k in expected if b"delta" not in k or b"message" in k
        ]
    elif path != "/completion":
        assert len({value["id"] for value in reply.values}) == 1
        assert len({value["created"] for value in reply.values}) == 1
        roles = [c for v in reply.values for c in v["choices"] if "role" in c.get("delta", {})]
        assert len(roles) == (path == CHAT)
        ends = [c for v in reply.values for c in v["choices"] if c.get("finish_reason")]
        assert len(ends) == 1


async def check_goes_on(
    proxy: ProxyOverNodes, path: str, fault: tuple[str, dict[str, Any]], **asked: Any
) -> Stream:
    """Stream twice, the second time with this fault of node `a`: the client sees no difference."""
    asked = asked or options_of(path)
    whole = await proxy.stream(path, **asked)
    kind, options = fault
    proxy.servers["a"].faults.next(kind, **{"after_events": AFTER, **options})
    reply = await proxy.stream(path, **asked)
    check_whole(path, reply, whole)
    assert usage_of(reply) == usage_of(whole)
    return reply


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
    return in_flight.attempt is not None and in_flight.attempt.content_events > 4


def resumed(proxy: ProxyOverNodes) -> list[StreamResumed]:
    found: list[StreamResumed] = []
    proxy.app.bus.subscribe(StreamResumed, found.append)
    return found


def options_of(path: str) -> dict[str, Any]:
    counts = path in PATHS[:2]
    return asked_of(path) | ({"stream_options": {"include_usage": True}} if counts else {})


def asked_of(path: str, tokens: int = TOKENS) -> dict[str, Any]:
    return {"temperature": 0, "n_predict" if path == "/completion" else "max_tokens": tokens}


@pytest.mark.parametrize(("path", "kind", "options"), [*BROKEN, *UNREADABLE])
@in_virtual_time
async def test_a_broken_stream_is_resumed_on_another_node(
    tmp_path: Path, path: str, kind: str, options: dict[str, Any]
) -> None:
    async with two_writers(tmp_path, **QUIET) as (proxy, *_):
        events = resumed(proxy)
        await check_goes_on(proxy, path, (kind, options))
        await proxy.settled()
        first, failed, last = proxy.outcomes
        assert (first, failed[0], last) == (("a", "ok"), "a", ("b", "ok"))
        if kind == "insert":
            assert failed[1] == "garbage"
            return  # It may have come with the first content, before any was sent.
        (event,) = events
        assert (event.failed_node, event.resumed_on, event.failure) == ("a", "b", None)
        # Without those of the node that goes on.
        assert event.tokens == AFTER - EVENTS_WITHOUT_TEXT.get(path, 0)
        _, record = proxy.finished
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
    """And ends by a limit or at a stop word on either side of the cut."""
    never = {"health": {"failures": 1000}, "retries": {"quarantine": 0}}
    async with two_writers(tmp_path, **never) as (proxy, one, _):
        words = text_of(await proxy.stream(path, **options_of(path))).split()
        stop = "stop_sequences" if path == ANTHROPIC else "stop"
        for more in ({stop: [" ".join(words[9:11])]}, asked_of(path, 12)):
            asked = options_of(path) | more
            whole = await proxy.stream(path, **asked)
            assert len(text_of(whole).split()) <= 12
            for after in range(1, len(whole.events)):
                one.faults.next("reset", after_events=after)
                reply = await proxy.stream(path, **asked)
                check_whole(path, reply, whole)
                assert usage_of(reply) == usage_of(whole), after


@in_virtual_time
async def test_a_stream_that_was_resumed_twice_is_not_resumed_again(tmp_path: Path) -> None:
    servers = nodes(4)
    async with proxy_over(tmp_path, *servers, retries={"quarantine": 0}) as proxy:
        whole = await proxy.stream(**GREEDY)
        for server in servers:
            server.faults.next("close", after_events=8)
        reply = await proxy.stream(**GREEDY)
        check_failed(CHAT, reply)
        assert text_of(whole).startswith(text_of(reply))
        assert len(proxy.attempts) == 1 + 3


@in_virtual_time
async def test_what_can_not_be_resumed_ends_a_stream_with_an_error_and_is_retried_else(
    tmp_path: Path,
) -> None:
    """Which these are: `tests/api/test_resuming.py`."""
    async with two_writers(tmp_path, retries={"quarantine": 0}) as (proxy, one, two):
        events = resumed(proxy)
        one.faults.next("reset", after_events=AFTER)
        check_failed(CHAT, await proxy.stream(**GREEDY, logprobs=True))
        assert two.requests == 0
        (event,) = events
        assert event.resumed_on is None
        assert "probabilities" in str(event.failure)
        one.faults.next("reset", after_events=AFTER)
        reply = await proxy.ask(logprobs=True, **GREEDY)
        assert (reply.status_code, reply.headers["x-gateway-attempts"]) == (200, "2")
        assert len(reply.json()["choices"][0]["logprobs"]["content"]) == TOKENS
        assert proxy.finished[-1].completion_tokens == TOKENS


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("path", [CHAT, ANTHROPIC])
@in_virtual_time
async def test_a_node_that_refuses_a_begun_message_continues_it_as_a_completion(
    tmp_path: Path, path: str, status: int
) -> None:
    """With 500 llama.cpp tells that a template has raised an exception, where it has a parser of
    its own for the model, as for GPT-OSS."""
    raised = "\n---\nWhile executing CallExpression at line 1, column 9 in source:\n...raise_exc\n"
    error = {"code": status, "message": f"{raised}Error: Jinja Exception: a user must speak last"}
    async with two_writers(tmp_path) as (proxy, _, two):
        events = resumed(proxy)
        two.faults.next("status", status=status, body=json.dumps({"error": error}))
        await check_goes_on(proxy, path, ("reset", {}))
        assert [event.resumed_on for event in events] == ["b"]
        assert [seen.path for seen in two.seen if seen.path in PATHS] == [path, "/completion"]


@pytest.mark.parametrize(
    ("settings", "after", "other"),
    [
        pytest.param({"resume": "off"}, AFTER, {}, id="it is switched off"),
        pytest.param({"limits": {"resume_bytes": 1000}}, 1500, {}, id="its text was not kept"),
        pytest.param({}, AFTER, {"build": "b1-other"}, id="the other node has another build"),
        pytest.param({}, AFTER, {"model": "other"}, id="the other node has another model"),
    ],
)
@in_virtual_time
async def test_a_stream_is_not_resumed_if(
    tmp_path: Path, settings: dict[str, Any], after: int, other: dict[str, Any]
) -> None:
    one, two = *nodes(1), *nodes(1, **other)
    named: tuple[dict[str, Any], ...] = (
        {"speed_hint": 100.0, "model": {"m": "demo"}},
        {"model": {"m": other.get("model", "demo")}},
    )
    async with proxy_over(tmp_path, one, two, nodes=named, **settings) as proxy:
        one.faults.next("reset", after_events=after)
        check_failed(CHAT, await proxy.stream())
        assert two.requests == 0


@in_virtual_time
async def test_a_node_restarted_with_another_model_is_found_out(tmp_path: Path) -> None:
    _, two, _ = servers = nodes(3)
    seldom = {"interval": 60, "discover_interval": 600}
    async with proxy_over(tmp_path, *servers, nodes=IN_ORDER, health=seldom) as proxy:
        two.build = "b2-new"
        await check_goes_on(proxy, CHAT, ("reset", {}))
        assert ("b", "other_kind") in proxy.outcomes
        assert proxy.node("b").failures == 0


@in_virtual_time
async def test_heartbeats_continue_from_the_silence_to_the_continuation(tmp_path: Path) -> None:
    beats = {"heartbeat": 0.1, "timeouts": {"silence": 0.6}}
    async with two_writers(tmp_path, **beats) as (proxy, _, two):
        two.faults.next("hang", path="/apply-template", seconds=0.3)
        two.faults.next("hang", seconds=0.3)
        reply = await check_goes_on(proxy, CHAT, ("hang", {}))
        assert ("a", "silence_timeout") in proxy.outcomes
        assert reply.body.count(b":\n") >= 12 - 3


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
async def test_requests_of_a_drained_node_are_resumed_on_another(tmp_path: Path) -> None:
    one, two = nodes(decode_tps=200)
    asked = asked_of(CHAT, 100)
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
        whole = await proxy.stream(**asked)
        plain = (await proxy.ask(**asked)).json()
        first = asyncio.create_task(proxy.stream(**asked))
        second = asyncio.create_task(proxy.ask(**asked))
        await until(lambda: one.busy == 2)
        await until(lambda: all(begun(one) for one in proxy.app.registry))
        proxy.app.fleet.drain("a")
        proxy.app.drain_deadlines.set("a", 0.01)
        check_whole(CHAT, await first, whole)
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
        whole = (await proxy.ask(path, **asked_of(path))).json()
        one.faults.next(kind, after_events=AFTER, **options)
        reply = await proxy.ask(path, **asked_of(path))
        assert (reply.status_code, reply.headers["x-gateway-attempts"]) == (200, "2")
        assert reply.headers["content-type"].startswith("application/json")
        got = reply.json()
        for name in ("choices", "content", "tokens_predicted", "stop_reason"):
            assert got.get(name) == whole.get(name)
        for name in ("completion_tokens", "prompt_tokens", "output_tokens"):
            assert got.get("usage", {}).get(name) == whole.get("usage", {}).get(name)
        assert proxy.finished[-1].completion_tokens == TOKENS


@in_virtual_time
async def test_events_without_content_do_not_prevent_a_resumption(tmp_path: Path) -> None:
    async with two_writers(tmp_path, health={"failures": 1000}) as (proxy, one, two):
        whole = await proxy.stream(**GREEDY)
        for what in ("nul", "no_data", "empty", "comment", "line_comment", "fields", "null"):
            one.faults.next("insert", after_events=4, what=what)
            one.faults.next("reset", after_events=AFTER)
            two.faults.set("insert", after_events=4, what=what)
            reply = await proxy.stream(**GREEDY)
            assert (reply.errors, text_of(reply)) == ([], text_of(whole)), what


# Retries and resumptions share one budget; a stream's first resumption needs none of it.


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


@in_virtual_time
async def test_a_failed_resumption_needs_budget_only_if_it_reached_a_node(tmp_path: Path) -> None:
    one, two, three = nodes(3)
    settings: dict[str, Any] = {"retries": NO_SHARE, "health": {"interval": 3600.0}}
    async with proxy_over(tmp_path, one, two, three, nodes=IN_ORDER, **settings) as proxy:
        whole = await proxy.stream(**GREEDY)
        spend_budget(proxy)
        one.faults.next("reset", after_events=8)
        two.faults.next("garbage")
        check_failed(CHAT, await proxy.stream(**GREEDY))
        one.faults.next("reset", after_events=8)
        await two.kill()
        check_whole(CHAT, await proxy.stream(**GREEDY), whole)
        assert proxy.outcomes[-3:] == [("a", "reset"), ("b", "connect_failed"), ("c", "ok")]


# A client that disconnects during a resumption frees its place in the queue and its slot.


@pytest.mark.parametrize("stage", ["queued", "asking", "reading", "writing"])
@in_virtual_time
async def test_a_client_that_leaves_during_a_resumption_leaves_nothing_behind(
    tmp_path: Path, stage: str
) -> None:
    one, two = nodes(slots=1, decode_tps=100.0, prefill_tps=60.0 if stage == "reading" else 1e6)
    quiet = {"interval": 60.0, "discover_interval": 600.0}
    order: tuple[dict[str, Any], ...] = ({}, {"speed_hint": 100.0})
    async with proxy_over(tmp_path, one, two, nodes=order, health=quiet) as proxy:
        gateway, held = proxy.app, asyncio.create_task(asyncio.sleep(0))
        if stage == "queued":
            other = [{"role": "user", "content": "something else"}]
            held = asyncio.create_task(proxy.ask(stream=True, max_tokens=400, messages=other))  # type: ignore[arg-type]
            await until(lambda: proxy.node("b").leased == 1)
        gateway.fleet.drain("b")  # only `a` can take the request at first
        if stage == "asking":
            two.faults.set("hang", path="/tokenize")
        one.faults.next("reset", after_events=AFTER)
        asked = asyncio.create_task(proxy.ask(stream=True, temperature=0, max_tokens=2000))
        await until(lambda: one.requests == 1)
        gateway.fleet.drain("b", draining=False)

        def is_reached() -> bool:
            if stage == "queued":
                return len(gateway.scheduler.queue_positions()) == 1
            phases = [lease.phase for lease in proxy.node("b").leases]
            if stage == "asking":
                return bool(phases) and two.control_requests > before + 1
            wanted = LeasePhase.PREFILL if stage == "reading" else LeasePhase.DECODE
            return phases == [wanted]

        before = two.control_requests
        await until(is_reached)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: len(gateway.registry) == (stage == "queued"), 1.0)
        assert gateway.scheduler.queue_positions() == []
        assert (proxy.finished[0].status, proxy.finished[0].reason) == (499, "client_closed")
        if stage == "asking":  # nothing that takes a slot was sent
            await until(lambda: proxy.node("b").leased == 0, 0.5)
        elif stage == "writing":
            await until(lambda: two.busy == 0, 0.5)
        while stage == "reading" and two.busy:  # its slot is taken until it has read all
            assert proxy.node("b").leased == 1
            await asyncio.sleep(0.005)
        two.faults.clear()
        await held
        assert proxy.node("b").failures == 0
        assert two.requests == (stage != "asking")


# Resuming by token ids: the client sees nothing of the probabilities that were asked for.


@pytest.mark.parametrize("path", PATHS)
@in_virtual_time
async def test_the_client_gets_only_the_logprobs_that_it_asked_for(
    tmp_path: Path, path: str
) -> None:
    async with two_writers(tmp_path, resume="exact") as (proxy, one, _):
        reply = await check_goes_on(proxy, path, ("reset", {}))
        assert b'"logprobs":{' not in reply.body
        assert (b'"logprobs"' in one.seen[-1].body) is (path in PATHS[:2])
        plain = await proxy.ask(path, **asked_of(path))
        assert b'"logprobs":{' not in plain.content
        if path == CHAT:
            reply = await proxy.stream(logprobs=True, max_tokens=4)
            assert reply.body.count(b'"logprobs":{') == 4


# Resume plans: by token ids, by a rendered prompt, with reasoning, by the text alone.


MESSAGES = [{"role": "user", "content": "why"}]
PLANNED = {"messages": MESSAGES, "max_tokens": 200, "temperature": 0, "stream": True}


class Template:
    """A node whose template writes reasoning in tags. Each character is a token."""

    def __init__(self, *, shows: bool = True, opens: bool = False, prefills: bool = True) -> None:
        self.shows = shows  # whether it renders reasoning
        self.opens = opens  # whether its prompt ends with an open tag
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


def begun_as(reasoning: str = "", content: str = "", **more: Any) -> Transcript:
    """What a client has of a response; each character is a token."""
    head = {"id": "x", "usage": {"input_tokens": 25}}
    pieces = {"reasoning_pieces": list(reasoning), "content_pieces": list(content)}
    counted = {"token_count": len(reasoning + content), "first_event": head}
    return Transcript(**{"open_blocks": {0: "text"}, **pieces, **counted, **more})


async def planned(
    template: Template, transcript: Transcript, path: str = CHAT, **more: Any
) -> ResumePlan:
    options = {key: more.pop(key) for key in ("as_completion", "step_back") if key in more}
    source = ResumeInput(ROUTES[path], PLANNED | more, transcript, **options)
    return await plan_resume(template.ask, source)


def body_of(plan: ResumePlan) -> dict[str, Any]:
    assert plan.body is not None
    return plan.body


ASKED = "[user]why[end][assistant]"
THINKING = begun_as("so it", open_blocks={0: "thinking"})
BOTH = begun_as("so it\n", "because", open_blocks={0: "thinking", 1: "text"}, block_index=1)
TEXT = begun_as(content="because")
EARLIER = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "no"}]
HISTORY = [*MESSAGES, {"role": "assistant", "content": EARLIER}, *MESSAGES]
THOUGHT = f"{ASKED}<think>\nhm\n</think>\n\nno[end]{ASKED}"
GOES_ON = " is</think>\n\nbecause"
SHOWS = ('"reasoning_content":" is"', '"content":"because"')
BLOCKS = (
    '"index":0,"delta":{"type":"thinking_delta","thinking":" is"}',
    '"index":1,"delta":{"type":"text_delta","text":"because"}',
)
PLANS: list[tuple[str, Template, Transcript, dict[str, Any], str, str, tuple[str, ...]]] = [
    (CHAT, Template(), THINKING, {}, f"{ASKED}<think>\nso it", GOES_ON, SHOWS),
    (CHAT, Template(opens=True), THINKING, {}, f"{ASKED}<think>\nso it", GOES_ON, SHOWS),
    (CHAT, Template(shows=False, opens=True), THINKING, {}, f"{ASKED}<think>\nso it", GOES_ON,
     SHOWS),
    (CHAT, Template(), BOTH, {}, f"{ASKED}<think>\nso it\n</think>\n\nbecause", " <b>",
     ('"content":" <b>"',)),
    # Its template refuses a begun message, or begins the next one.
    (CHAT, Template(), TEXT, {"as_completion": True}, f"{ASKED}because", " it",
     ('"content":" it"',)),
    (CHAT, Template(prefills=False), TEXT, {}, f"{ASKED}because", " it", ('"content":" it"',)),
    (ANTHROPIC, Template(prefills=False), TEXT, {}, f"{ASKED}because", " it",
     ('"index":0,"delta":{"type":"text_delta","text":" it"}',)),
    (ANTHROPIC, Template(), THINKING, {"thinking": {"type": "adaptive"}},
     f"{ASKED}<think>\nso it", GOES_ON, BLOCKS),
    (ANTHROPIC, Template(),
     begun_as("so it\n", "because", open_blocks={0: "thinking", 1: "text"}, block_index=1,
              first_event={"id": "x", "usage": {"input_tokens": len(THOUGHT)}}),
     {"messages": HISTORY}, f"{THOUGHT}<think>\nso it\n</think>\n\nbecause", " <b>",
     ('"index":1,"delta":{"type":"text_delta","text":" <b>"}',)),
]  # fmt: skip


@each_case(("path", "template", "transcript", "more", "prompt", "answer", "shown"), PLANS)
async def test_what_a_template_lets_nobody_continue_continues_as_a_completion(
    path: str, template: Template, transcript: Transcript, more: dict[str, Any], prompt: str,
    answer: str, shown: tuple[str, ...],
) -> None:  # fmt: skip
    plan = await planned(template, transcript, path, **more)
    body = body_of(plan)
    assert (plan.route.path, body["prompt"]) == ("/completion", prompt)
    begun = prompt.rpartition("[assistant]")[2].removeprefix("<think>\n" * template.opens)
    assert body["n_predict"] == 200 - len(begun)
    assert not {"messages", "thinking"} & body.keys()
    out = plan.rewriter.rewrite({"content": answer}).decode()
    assert [text for text in shown if text not in out] == []


NOT_PLANNED: list[tuple[str, Template, Transcript, dict[str, Any]]] = [
    (CHAT, Template(shows=False), THINKING, {}),
    (CHAT, Template(prefills=False), TEXT, {"tools": [{"type": "function"}]}),
    (ANTHROPIC, Template(prefills=False), TEXT, {"tools": [{"type": "function"}]}),
    (ANTHROPIC, Template(), THINKING, {"tools": [{"name": "f"}]}),
    # Its first node read another prompt.
    *((ANTHROPIC, Template(prefills=False),
       begun_as(*texts, first_event={"usage": {"input_tokens": 26}}), {})
      for texts in (("", "because"), ("so it", ""))),
]  # fmt: skip


@each_case(("path", "template", "transcript", "more"), NOT_PLANNED)
async def test_what_can_not_be_continued_truly_is_not_continued(
    path: str, template: Template, transcript: Transcript, more: dict[str, Any]
) -> None:
    with pytest.raises(NotResumable):
        await planned(template, transcript, path, **more)


async def test_a_text_continues_by_its_own_api_where_its_template_prefills() -> None:
    tools = {"tools": [{"type": "function"}]}
    for path in (CHAT, ANTHROPIC):
        assert (await planned(Template(), TEXT, path, **tools)).route.path == path
    assert (await planned(Template(prefills=False), begun_as())).route.path == CHAT
    picture = [{"type": "image", "source": {"type": "base64", "data": "eA=="}}]
    head = {"usage": {"input_tokens": 9, "cache_read_input_tokens": 3}}
    messages = [{"role": "user", "content": picture}]
    transcript = begun_as(content="be", first_event=head)
    plan = await planned(Template(), transcript, ANTHROPIC, messages=messages)
    assert (plan.route.path, plan.splice_point.prompt_tokens) == (ANTHROPIC, 12)
    assert body_of(plan)["messages"][-1] == {"role": "assistant", "content": "be"}


async def test_reasoning_is_stepped_back_into_where_it_tokenizes_otherwise() -> None:
    transcript = begun_as(reasoning_pieces=["so ", "i", "t"], token_count=3)
    plan = await planned(Words(), transcript)
    assert body_of(plan)["prompt"].endswith("<think>\nso ")
    point = plan.splice_point
    assert (point.overlap, point.sent_tokens - point.prefix_tokens) == ("it", 2)
    plan = await planned(Words(), transcript, step_back=False)
    assert body_of(plan)["prompt"].endswith("<think>\nso it")


async def test_token_ids_are_continued_from_if_they_make_the_text() -> None:
    transcript = begun_as(content="be", token_ids=[ord("b"), ord("e")])
    plan = await planned(Template(), transcript)
    assert body_of(plan)["prompt"] == [*map(ord, f"{ASKED}be")]
    assert (plan.splice_point.prompt_tokens, plan.splice_point.prefix_tokens) == (25, 2)
    transcript.token_ids.pop()
    plan = await planned(Template(), transcript)
    assert plan.route.path == CHAT, "an id is missing: continue from the text"


async def test_a_response_of_full_length_needs_no_node() -> None:
    plan = await planned(Template(), begun_as(content="a" * 200))
    assert plan.body is None
    assert plan.final_events is not None
    assert b'"length"' in plan.final_events


# How a template writes reasoning is found by having it write a sample.


def around(before: str, between: str, mark: str = "</think>", gap: str = "") -> ReasoningTemplate:
    return ReasoningTemplate(before, between, ReasoningEndMark(mark, gap))


SHOWN = ReasoningTemplate("Q<think>\n", "\n</think>\n\n", ReasoningEndMark("</think>"))
TEMPLATES: list[tuple[str, str, ReasoningTemplate | None]] = [
    ("Q<think>\n", "Q<think>\n{r}\n</think>\n\n{c}", SHOWN),
    ("Q<think>\n", "Q<think>{r}</think>{c}", around("Q<think>\n", "</think>")),
    ("Q", "Q[THINK]{r}[/THINK]{c}", around("Q[THINK]", "[/THINK]", "[/THINK]")),
    # The mark that ends this prompt begins no reasoning.
    ("<|assistant|>", "<|assistant|>\n<think>{r}</think>\n{c}",
     around("<|assistant|>\n<think>", "</think>\n", gap="\n")),
    ("<start>", "<a>{r}<end><start><b>{c}", ReasoningTemplate("<a>", "<end><start><b>", None)),
    ("Q<think>\n", "Q{c}", SHOWN),
    ("Q", "Q{c}", None),
]  # fmt: skip


@each_case(("prompt", "written", "expected"), TEMPLATES)
async def test_the_text_around_reasoning_is_found(
    prompt: str, written: str, expected: ReasoningTemplate | None
) -> None:
    async def render(messages: list[JsonObject]) -> str:
        last = messages[-1]
        return written.format(r=last["reasoning_content"], c=last["content"]) + "<end>"

    assert await find_reasoning_template(render, [], prompt) == expected
