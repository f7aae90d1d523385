"""Tokens and cost in the record of a request, and the speed that is learnt of its node."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import GatewayError
from gateway.events import RequestRecord
from gateway.forward.attempt_ends import MOST_QUARANTINED, Quarantine
from gateway.forward.in_flight import PROGRESS_TOKENS
from gateway.lease import KeyedHash
from gateway.request.preparation import Request
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.emulator.generation import TokenTally
from tests.emulator.language_model import count_tokens
from tests.forward.proxy_over_nodes import (
    A_FIRST,
    GENERATION_PATHS,
    ProxyOverNodes,
    over_endpoint,
    prompt_field,
    proxy_over,
    response,
)
from tests.gateways import until
from tests.schedule.build import a_request
from tests.virtual import in_virtual_time


@pytest.mark.parametrize(
    ("path", "stream"), [*((path, True) for path in GENERATION_PATHS), (GENERATION_PATHS[0], False)]
)
@in_virtual_time
async def test_tokens_are_those_that_the_node_reports(
    tmp_path: Path, path: str, stream: bool
) -> None:
    async with proxy_over(tmp_path, one := EmulatedNode(answer_tokens=9, decode_tps=100)) as proxy:
        reply = await proxy.ask(path, stream=stream)
        assert reply.status_code == 200
        await proxy.settled()
        (record,) = proxy.finished
        assert record.completion_tokens == 9
        assert record.prompt_tokens == one.engine.prompt_tokens
        assert (record.status, record.reason, record.attempts) == (200, None, 1)
        assert record.duration_seconds == pytest.approx(0.09)
        assert (record.ttft is not None) is stream
        assert proxy.outcomes == [("a", "ok")]


# What a request counts whose client left, or whose node failed: what nodes did for it.


CHAT = GENERATION_PATHS[0]
TAG = {"x-tag": "one"}
SETTINGS: dict[str, Any] = {"headers": {"to_nodes": ["x-tag"]}}
LONG_TEXT = " ".join(f"word{i}" for i in range(2 * PROGRESS_TOKENS))
BATCH = 256


async def left_after(
    proxy: ProxyOverNodes, seconds: float, path: str = CHAT, **body: Any
) -> tuple[RequestRecord, TokenTally]:
    task = asyncio.create_task(proxy.ask(path, TAG | body.pop("headers", {}), **body))
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return await the_record(proxy)


async def the_record(proxy: ProxyOverNodes) -> tuple[RequestRecord, TokenTally]:
    """The record of the last request, and what its nodes did for it, when all have ended."""
    await proxy.settled()
    tally = TokenTally()
    for server in proxy.servers.values():
        await server.until(lambda one=server: one.busy == 0)  # type: ignore[misc]
        own = server.engine.tally("one")
        tally.attempts += own.attempts
        tally.read_tokens += own.read_tokens
        tally.tokens += own.tokens
    return proxy.finished[-1], tally


@pytest.mark.parametrize(
    ("path", "stream"),
    [("/completion", True), *itertools.product(GENERATION_PATHS[:4], (True, False))],
)
@in_virtual_time
async def test_a_request_that_is_left_counts_what_was_generated(
    tmp_path: Path, path: str, stream: bool
) -> None:
    one = EmulatedNode(decode_tps=10, answer_tokens=500)
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        record, tally = await left_after(proxy, 5.05, path, stream=stream, max_tokens=400)
        assert record.status == 499
        assert proxy.outcomes == [("a", "client_closed")]
        assert proxy.node("a").failures == 0
        assert 30 <= record.completion_tokens <= 60
        assert tally.tokens - 2 <= record.completion_tokens <= tally.tokens + 8
        assert record.prompt_tokens > 0
        assert record.slot_seconds == pytest.approx(5.0, abs=0.2)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", GENERATION_PATHS)
@in_virtual_time
async def test_a_client_that_leaves_in_prefill_counts_the_prompt_that_was_read(
    tmp_path: Path, path: str, stream: bool
) -> None:
    one = EmulatedNode(prefill_tps=200, context=100_000, batch=BATCH)
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        text = prompt_field(path, LONG_TEXT)
        record, tally = await left_after(proxy, 7.3, path, **text, stream=stream)
        assert record.completion_tokens == tally.tokens == 0
        assert record.slot_seconds == pytest.approx(7.3, abs=0.2)
        if one.seen[0].body.count(b"return_progress"):
            # Of the batch that it is reading it has said nothing; it notices at the next one that
            # nobody listens.
            assert record.prompt_tokens == 5 * BATCH
            assert record.prompt_tokens <= tally.read_tokens <= record.prompt_tokens + 2 * BATCH
        else:
            assert path == "/v1/messages"
            assert 0 < record.prompt_tokens <= count_tokens(LONG_TEXT) + 20


@in_virtual_time
async def test_progress_that_is_hidden_from_the_caller_is_counted(tmp_path: Path) -> None:
    one = EmulatedNode(prefill_tps=200, context=100_000, batch=BATCH, answer_tokens=3)
    headers = TAG | {"X-Gateway-Progress": "1"}
    async with proxy_over(tmp_path, one, cache={"hide": True}, **SETTINGS) as proxy:
        whole = await proxy.stream(CHAT, headers, **prompt_field(CHAT, LONG_TEXT))
        assert b"prefill" not in whole.body
        assert b"prompt_progress" not in whole.body
        text = prompt_field(CHAT, f"another {LONG_TEXT}")
        record, _ = await left_after(proxy, 7.3, headers=headers, stream=True, **text)
        assert one.seen[-1].body.count(b"return_progress") == 1
        assert record.prompt_tokens == 5 * BATCH


@in_virtual_time
async def test_a_short_prompt_left_in_prefill_counts_by_the_time(tmp_path: Path) -> None:
    one = EmulatedNode(prefill_tps=20, decode_tps=100, answer_tokens=2)
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        text: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * 200}]}
        for _ in range(10):
            await proxy.ask(**text)
        record, _ = await left_after(proxy, 5.0, **text)
        assert b"return_progress" not in one.seen[-1].body
        assert record.prompt_tokens == pytest.approx(100, rel=0.3)


@pytest.mark.parametrize(("stream", "resume"), [(True, "text"), (False, "text"), (False, "off")])
@in_virtual_time
async def test_a_response_that_a_second_node_makes_whole_counts_once(
    tmp_path: Path, stream: bool, resume: str
) -> None:
    nodes = tuple({**entry, "cost_per_hour": 3600.0, "slots": 1} for entry in A_FIRST[:2])
    a, b = (EmulatedNode(slots=1, decode_tps=20, answer_tokens=40) for _ in range(2))
    async with proxy_over(tmp_path, a, b, nodes=nodes, resume=resume, **SETTINGS) as proxy:
        a.faults.next("reset", after_events=20)
        assert (await proxy.ask(headers=TAG, stream=stream)).status_code == 200
        record, tally = await the_record(proxy)
        assert (record.attempts, tally.attempts) == (2, 2)
        assert record.completion_tokens == 40
        assert record.prompt_tokens == a.engine.prompt_tokens
        # The slot time of both nodes brought the client what it has, or that of the second alone.
        assert record.slot_seconds == pytest.approx(2.0, abs=0.3)
        assert record.cost == pytest.approx(record.slot_seconds)


@in_virtual_time
async def test_a_request_that_is_ended_counts_what_was_done_for_it(tmp_path: Path) -> None:
    one = EmulatedNode(decode_tps=10, prefill_tps=200, answer_tokens=500, context=100_000)
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        asked = asyncio.create_task(proxy.ask(headers=TAG))
        await asyncio.sleep(3.05)
        error = GatewayError(503, "cancelled", "An operator has cancelled it.")
        assert proxy.app.registry.cancel_where(lambda _: True, error) == 1
        assert (await asked).status_code == 503
        assert one.requests == 1, "it must not be tried again"
        record, tally = await the_record(proxy)
        assert record.completion_tokens == pytest.approx(30, abs=3)
        assert abs(tally.tokens - record.completion_tokens) <= 3
        one.engine.batch = BATCH
        in_time = TAG | {"x-request-timeout": "4"}
        assert (await proxy.ask(CHAT, in_time, **prompt_field(CHAT, LONG_TEXT))).status_code == 504
        record, _ = await the_record(proxy)
        assert record.prompt_tokens == pytest.approx(4 * 200, abs=40)


@in_virtual_time
async def test_several_prompts_count_together_when_their_client_leaves(tmp_path: Path) -> None:
    one = EmulatedNode(slots=4, decode_tps=10, answer_tokens=500)
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        prompts = ["one", "two", "three"]
        record, _ = await left_after(proxy, 3.05, "/v1/completions", prompt=prompts)
        complete: list[RequestRecord] = []
        record.when_complete(lambda: complete.append(record))
        assert complete == [record] == proxy.finished
        assert record.completion_tokens == pytest.approx(90, abs=9)
        assert record.slot_seconds == pytest.approx(9.0, abs=0.3)


# What a request counts whose node reports no tokens, or those of one answer alone.


TOKENS = 30  # of each answer


@pytest.mark.parametrize("stream", [True, False])
@in_virtual_time
async def test_fields_that_a_client_selects_hide_no_tokens(tmp_path: Path, stream: bool) -> None:
    one = EmulatedNode(decode_tps=10, answer_tokens=TOKENS)
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        for selected in ("content", "stop", "timings/predicted_ms"):
            fields: dict[str, Any] = {"response_fields": [selected]}
            reply = await proxy.ask("/completion", TAG, stream=stream, **fields)
            assert reply.status_code == 200
            assert "error" not in reply.text
            assert stream or set(reply.json()) == {selected, "stop", "timings"}
            record, _ = await the_record(proxy)
            assert (record.completion_tokens, record.status) == (TOKENS, 200)
            assert record.prompt_tokens > 0
        escaped = rb'{"prompt": "Hello", "response\u005ffields": ["content"]}'
        await proxy.running.client.post("/completion", content=escaped, headers=TAG)
        assert (await the_record(proxy))[0].completion_tokens == TOKENS


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", GENERATION_PATHS)
@in_virtual_time
async def test_all_answers_to_a_prompt_count(tmp_path: Path, path: str, stream: bool) -> None:
    one = EmulatedNode(slots=4, decode_tps=10, answer_tokens=TOKENS)
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        reply = await proxy.ask(path, TAG, stream=stream, n=3, max_tokens=100)
        assert reply.status_code == 200
        record, tally = await the_record(proxy)
        assert tally.tokens == 3 * TOKENS
        # llama.cpp reports the tokens of one answer: the others' are counted by events.
        assert record.completion_tokens == pytest.approx(tally.tokens, abs=10)
        assert record.prompt_tokens == tally.read_tokens
        assert record.slot_seconds == pytest.approx(3 * 3.0, abs=0.3)


async def test_an_answer_without_any_figure_counts_by_its_bytes(tmp_path: Path) -> None:
    message = {"role": "assistant", "content": "a" * 400}
    value = {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
    answer = response(json.dumps(value).encode())
    async with over_endpoint(tmp_path, lambda _: answer) as (running, records):
        for more in ({}, {"max_tokens": 40}):
            body = {"messages": [{"role": "user", "content": "Hello"}], **more}
            reply = await running.client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
        await until(lambda: len(records) == 2)
        whole, limited = records
        assert 100 <= whole.completion_tokens <= 130
        assert limited.completion_tokens == 40
        assert whole.prompt_tokens > 0


def asking(text: str) -> Request:
    request, path = a_request(), "/v1/chat/completions"
    bodies = {"demo": text.encode()}
    return Request(request.id, request.id, path, 0.0, request, bodies=bodies, model_in_body="demo")


def refusal(quarantine: Quarantine, now: float, seconds: float = 600.0) -> GatewayError | None:
    """The error of the request, if it may go to no node."""
    try:
        quarantine.check(asking("x"), now, seconds)
    except GatewayError as error:
        return error
    return None


@each_case(
    ("losses", "seconds", "refused"),
    [
        ([("a", 99.0, 100.0)], 600.0, False),
        ([("a", 99.0, 100.0), ("b", 101.0, 110.0)], 600.0, True),
        ([("a", 99.0, 100.0), ("b", 101.0, 110.0)], 0.0, False),  # it is off
        ([("a", number, number) for number in range(5)], 600.0, False),  # it may be the node
        ([(node, 5.0, 9.0) for node in "abc"], 600.0, False),  # lost together: they count as one
        ([("a", 5.0, 9.0), ("b", 9.0, 9.0)], 600.0, True),
        ([("a", 0.0, 1.0), None, ("b", 2.0, 3.0)], 600.0, False),  # it was answered meanwhile
    ],
)
def test_a_request_is_rejected_for_a_while_once_it_lost_one_node_after_another(
    losses: list[tuple[str, float, float] | None], seconds: float, refused: bool
) -> None:
    quarantine, lost_at = Quarantine(KeyedHash()), 0.0
    for loss in losses:
        if loss is None:
            quarantine.clear(asking("x"))
        else:
            quarantine.node_lost(asking("x"), *loss)
            lost_at = loss[2]
    error = refusal(quarantine, lost_at + 10.0, seconds)
    assert (error is not None) is refused
    if error is not None:
        assert (error.status, error.code, error.retryable) == (502, "node_failed", False)
        assert "590 s" in error.message
        assert refusal(quarantine, lost_at + 601.0) is None
        assert len(quarantine.entries) == 0


def test_the_oldest_entry_is_forgotten_first() -> None:
    quarantine = Quarantine(KeyedHash())
    for number in range(MOST_QUARANTINED + 10):
        quarantine.node_lost(asking(str(number)), "a", 0.0, 0.0)
    assert len(quarantine.entries) == MOST_QUARANTINED


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after", [None, 3])
@in_virtual_time
async def test_a_request_that_kills_nodes_reaches_no_third_one(
    tmp_path: Path, *, stream: bool, after: int | None
) -> None:
    servers = [EmulatedNode() for _ in range(4)]
    async with proxy_over(tmp_path, *servers) as proxy:
        for server in servers:
            server.faults.set("reset", after_events=after)
        refused = await proxy.ask(stream=stream)
        assert refused.text.count("2 nodes died") == 1
        assert refused.status_code == (200 if stream and after else 502)
        assert (proxy.finished[0].status, proxy.finished[0].reason) == (502, "node_failed")
        for server in servers:
            server.faults.clear()
        refused = await proxy.ask(stream=stream)
        assert (refused.status_code, refused.json()["error"]["code"]) == (502, "node_failed")
        assert refused.headers["x-should-retry"] == "false"
        assert len(proxy.attempts) == 2
        other = await proxy.ask(messages=[{"role": "user", "content": "harmless"}])
        assert other.status_code == 200
