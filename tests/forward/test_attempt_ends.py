"""Tokens and cost in the record of a request, and the speed that is learnt of its node."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import GatewayError
from gateway.events import RequestRecord, StreamResumed
from gateway.forward.attempt_ends import MOST_QUARANTINED, Quarantine
from gateway.forward.in_flight import PROGRESS_TOKENS
from gateway.lease import KeyedHash
from gateway.request.preparation import Request
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.emulator.generation import TokenTally
from tests.emulator.language_model import count_tokens
from tests.forward.answering_endpoint import over_endpoint, response
from tests.forward.proxy_over_nodes import (
    A_FIRST,
    BODIES,
    GENERATION_PATHS,
    ProxyOverNodes,
    prompt_field,
    proxy_over,
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


@in_virtual_time
async def test_a_nodes_speed_is_learnt_from_its_timings(tmp_path: Path) -> None:
    one = EmulatedNode(decode_tps=200, prefill_tps=400, answer_tokens=30)
    async with proxy_over(tmp_path, one) as proxy:
        await proxy.stream()
        await proxy.settled()
        speed = proxy.node("a").speed
        assert speed.decode_tps == pytest.approx(200, rel=0.5)
        assert speed.prefill_tps == pytest.approx(400, rel=0.5)


@pytest.mark.parametrize(
    "timings",
    [
        '{"predicted_n":1e308,"predicted_ms":-1,"prompt_n":-5,"prompt_ms":0}',
        '{"predicted_n":"many","predicted_ms":null}',
        '{"predicted_n":%s}' % ("9" * 400),
        "7",
    ],
)
@in_virtual_time
async def test_implausible_timings_are_ignored(tmp_path: Path, timings: str) -> None:
    async with proxy_over(tmp_path, one := EmulatedNode()) as proxy:
        body = f'{{"choices":[{{"message":{{"content":"x"}}}}],"timings":{timings}}}'
        one.faults.set("status", status=200, body=body)
        assert (await proxy.ask()).json()["choices"]
        await proxy.settled()
        speed = proxy.node("a").speed
        assert (speed.decode_tps, speed.prefill_tps) == (None, None)
        assert proxy.finished[0].completion_tokens <= 1 << 31


@in_virtual_time
async def test_a_request_costs_its_share_of_the_node_or_its_tokens(tmp_path: Path) -> None:
    one, two = EmulatedNode(slots=2, decode_tps=100, answer_tokens=20), EmulatedNode()
    nodes = (
        {"cost_per_hour": 3600.0, "model": "rented"},
        {"cost_per_million_tokens": {"prompt": 1e6, "completion": 2e6}, "model": "bought"},
    )
    async with proxy_over(tmp_path, one, two, nodes=nodes) as proxy:
        await proxy.ask(model="rented")
        await proxy.ask(model="bought", max_tokens=5)
        await proxy.settled()
        rented, bought = proxy.finished
        assert rented.cost == pytest.approx(rented.duration_seconds / 2, rel=0.5)
        assert bought.cost == bought.prompt_tokens + 2 * bought.completion_tokens


@in_virtual_time
async def test_a_request_without_a_slot_is_not_in_the_completion_rate(tmp_path: Path) -> None:
    async with proxy_over(tmp_path, EmulatedNode()) as proxy:
        scheduler = proxy.app.scheduler
        for _ in range(3):
            assert (await proxy.ask("/tokenize", content="a")).status_code == 200
        assert scheduler.completion_rate.total == 0
        await proxy.ask()
        await until(lambda: scheduler.completion_rate.total == 1)


# What a request counts whose client left, or whose node failed: what nodes did for it.


CHAT = GENERATION_PATHS[0]
TAG = {"x-tag": "one"}
SETTINGS: dict[str, Any] = {"headers": {"to_nodes": ["x-tag"]}}
LONG_TEXT = " ".join(f"word{i}" for i in range(2 * PROGRESS_TOKENS))
BATCH = 256


async def left_after(proxy: ProxyOverNodes, seconds: float, path: str = CHAT, **body: Any) -> None:
    """Send a request, and leave after so many seconds."""
    task = asyncio.create_task(proxy.ask(path, TAG, **body))
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def the_record(proxy: ProxyOverNodes) -> tuple[RequestRecord, TokenTally]:
    """The record of the only request, and what its nodes did for it, when both have ended."""
    await proxy.settled()
    (record,) = proxy.finished
    tally = TokenTally()
    for server in proxy.servers.values():
        await server.until(lambda one=server: one.busy == 0)  # type: ignore[misc]
        own = server.engine.tally("one")
        tally.attempts += own.attempts
        tally.read_tokens += own.read_tokens
        tally.tokens += own.tokens
    return record, tally


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
        await left_after(proxy, 5.05, path, stream=stream, max_tokens=400)
        record, tally = await the_record(proxy)
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
        await left_after(proxy, 7.3, path, **prompt_field(path, LONG_TEXT), stream=stream)
        record, tally = await the_record(proxy)
        assert record.completion_tokens == tally.tokens == 0
        assert record.slot_seconds == pytest.approx(7.3, abs=0.2)
        if one.seen[0].body.count(b"return_progress"):
            # Of the batch that it is reading it has said nothing.
            assert record.prompt_tokens == 5 * BATCH
            # It notices at the next batch that nobody listens.
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
        await proxy.settled()
        proxy.finished.clear()
        text = prompt_field(CHAT, f"another {LONG_TEXT}")
        task = asyncio.create_task(proxy.stream(CHAT, headers, **text))
        await asyncio.sleep(7.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        record, _ = await the_record(proxy)
        assert one.seen[-1].body.count(b"return_progress") == 1
        assert record.prompt_tokens == 5 * BATCH


@in_virtual_time
async def test_a_request_that_runs_tells_what_it_has_taken_by_now(tmp_path: Path) -> None:
    one = EmulatedNode(slots=2, decode_tps=10, answer_tokens=500)
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        task = asyncio.create_task(proxy.ask(CHAT, TAG, stream=True, n=2))
        await asyncio.sleep(5.05)
        (running,) = proxy.app.registry
        assert running.tokens_so_far()[1] == pytest.approx(100, abs=10)
        seconds = proxy.app.registry.slot_seconds_so_far(running.request.id)
        assert seconds == pytest.approx(2 * 5.0, abs=0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        record, _ = await the_record(proxy)
        assert record.slot_seconds == pytest.approx(seconds, abs=0.3)


@in_virtual_time
async def test_a_short_prompt_left_in_prefill_counts_by_the_time(tmp_path: Path) -> None:
    one = EmulatedNode(prefill_tps=20, decode_tps=100, answer_tokens=2)
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        text: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * 200}]}
        for _ in range(10):
            await proxy.ask(**text)
        await proxy.settled()
        proxy.finished.clear()
        await left_after(proxy, 5.0, **text)
        record, _ = await the_record(proxy)
        assert b"return_progress" not in one.seen[-1].body
        assert record.prompt_tokens == pytest.approx(100, rel=0.3)


@in_virtual_time
async def test_a_request_that_waits_counts_nothing(tmp_path: Path) -> None:
    one = EmulatedNode(slots=1, decode_tps=10, answer_tokens=100)
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        busy = asyncio.create_task(proxy.ask())
        await asyncio.sleep(0.5)
        await left_after(proxy, 1.0)
        await busy
        await proxy.settled()
        (waited,) = [record for record in proxy.finished if record.status == 499]
        assert (waited.prompt_tokens, waited.completion_tokens) == (0, 0)
        assert (waited.slot_seconds, waited.cost) == (0.0, 0.0)


@pytest.mark.parametrize("stream", [True, False])
@in_virtual_time
async def test_a_stream_that_is_cut_and_resumed_counts_once(tmp_path: Path, stream: bool) -> None:
    nodes = tuple({**entry, "cost_per_hour": 3600.0, "slots": 1} for entry in A_FIRST[:2])
    a, b = (EmulatedNode(slots=1, decode_tps=20, answer_tokens=40) for _ in range(2))
    async with proxy_over(tmp_path, a, b, nodes=nodes, **SETTINGS) as proxy:
        a.faults.next("reset", after_events=20)
        reply = await proxy.ask(headers=TAG, stream=stream)
        assert reply.status_code == 200
        record, tally = await the_record(proxy)
        assert (record.attempts, tally.attempts) == (2, 2)
        assert record.completion_tokens == 40
        assert record.prompt_tokens == proxy.servers["a"].engine.prompt_tokens
        assert tally.tokens >= 40
        # The slot time of both nodes brought the client what it has.
        assert record.slot_seconds == pytest.approx(2.0, abs=0.3)
        assert record.cost == pytest.approx(record.slot_seconds)


@in_virtual_time
async def test_a_client_that_leaves_a_resumed_stream_counts_it_once(tmp_path: Path) -> None:
    a, b = (EmulatedNode(slots=1, decode_tps=20, answer_tokens=400) for _ in range(2))
    async with proxy_over(tmp_path, a, b, nodes=A_FIRST[:2], **SETTINGS) as proxy:
        a.faults.next("reset", after_events=20)
        await left_after(proxy, 4.0, stream=True)
        record, tally = await the_record(proxy)
        assert record.status == 499
        assert record.completion_tokens == pytest.approx(80, abs=6)
        assert abs(tally.tokens - record.completion_tokens) <= 6
        assert record.prompt_tokens < 2 * a.engine.prompt_tokens


@in_virtual_time
async def test_an_attempt_that_failed_and_was_retried_costs_the_caller_nothing(
    tmp_path: Path,
) -> None:
    nodes = tuple({**entry, "cost_per_hour": 3600.0, "slots": 1} for entry in A_FIRST[:2])
    a, b = (EmulatedNode(slots=1, decode_tps=10, answer_tokens=10) for _ in range(2))
    async with proxy_over(tmp_path, a, b, nodes=nodes, resume="off", **SETTINGS) as proxy:
        a.faults.next("reset", after_events=6)
        reply = await proxy.ask(headers=TAG)
        assert reply.status_code == 200
        record, tally = await the_record(proxy)
        assert (record.attempts, tally.attempts) == (2, 2)
        assert (record.completion_tokens, record.prompt_tokens) == (10, b.engine.prompt_tokens)
        assert record.slot_seconds == pytest.approx(1.0, abs=0.15)
        assert record.cost == pytest.approx(record.slot_seconds)


@in_virtual_time
async def test_a_cancelled_request_counts_what_was_done_for_it(tmp_path: Path) -> None:
    one = EmulatedNode(decode_tps=10, answer_tokens=500)
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


@in_virtual_time
async def test_a_request_whose_time_is_up_counts_what_was_done_for_it(tmp_path: Path) -> None:
    one = EmulatedNode(prefill_tps=200, context=100_000, batch=BATCH)
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        headers = {**TAG, "x-request-timeout": "4"}
        reply = await proxy.ask(headers=headers, **prompt_field(CHAT, LONG_TEXT))
        assert reply.status_code == 504
        record, _ = await the_record(proxy)
        assert record.prompt_tokens == pytest.approx(4 * 200, abs=40)


@in_virtual_time
async def test_several_prompts_count_together_when_their_client_leaves(tmp_path: Path) -> None:
    one = EmulatedNode(slots=4, decode_tps=10, answer_tokens=500)
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        await left_after(proxy, 3.05, "/v1/completions", prompt=["one", "two", "three"])
        await proxy.settled()
        complete: list[RequestRecord] = []
        (record,) = proxy.finished
        record.when_complete(lambda: complete.append(record))
        assert complete == [record]
        assert record.completion_tokens == pytest.approx(90, abs=9)
        assert record.slot_seconds == pytest.approx(9.0, abs=0.3)


@pytest.mark.parametrize("path", GENERATION_PATHS)
@in_virtual_time
async def test_progress_that_only_the_gateway_asked_for_is_not_in_the_stream(
    tmp_path: Path, path: str
) -> None:
    assert path in BODIES
    one = EmulatedNode(prefill_tps=2000, context=100_000, batch=BATCH, answer_tokens=5)
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        long = await proxy.stream(path, **prompt_field(path, LONG_TEXT))
        short = await proxy.stream(path)
        assert b"prompt_progress" not in long.body
        assert len(long.events) == len(short.events)


@pytest.mark.slow
@in_virtual_time
async def test_who_leaves_within_the_first_batch_counts_what_was_read_of_it(
    tmp_path: Path,
) -> None:
    one = EmulatedNode(prefill_tps=200, context=100_000, batch=2048, answer_tokens=2)
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        for number in range(8):
            await proxy.ask(**prompt_field(CHAT, f"{number} {LONG_TEXT}"))
        await proxy.settled()
        proxy.finished.clear()
        # So far the node has said that it begins, and nothing more.
        await left_after(proxy, 5.0, **prompt_field(CHAT, f"another {LONG_TEXT}"))
        record, _ = await the_record(proxy)
        assert one.seen[-1].body.count(b"return_progress") == 1
        assert record.prompt_tokens == pytest.approx(5.0 * 200, rel=0.2)


# What a request counts whose node reports no tokens, or those of one answer alone.


TOKENS = 30  # of each answer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("selected", ["content", "stop", "timings/predicted_ms"])
@in_virtual_time
async def test_fields_that_a_client_selects_hide_no_tokens(
    tmp_path: Path, selected: str, stream: bool
) -> None:
    one = EmulatedNode(decode_tps=10, answer_tokens=TOKENS)
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        fields: dict[str, Any] = {"response_fields": [selected]}
        reply = await proxy.ask("/completion", TAG, stream=stream, **fields)
        assert reply.status_code == 200
        assert "error" not in reply.text
        if not stream:
            assert set(reply.json()) == {selected, "stop", "timings"}
        record, tally = await the_record(proxy)
        assert (record.completion_tokens, record.status) == (TOKENS, 200)
        assert record.prompt_tokens == tally.read_tokens
        assert record.attempts == tally.attempts == 1


@in_virtual_time
async def test_a_name_in_escapes_hides_no_tokens_either(tmp_path: Path) -> None:
    one = EmulatedNode(decode_tps=10, answer_tokens=TOKENS)
    body = rb'{"prompt": "Hello", "response\u005ffields": ["content"]}'
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        reply = await proxy.running.client.post("/completion", content=body, headers=TAG)
        assert reply.status_code == 200, reply.text
        record, tally = await the_record(proxy)
        assert record.completion_tokens == tally.tokens == TOKENS


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


LONG = 600.0


def refusal(
    quarantine: Quarantine, text: str, now: float, seconds: float = LONG
) -> GatewayError | None:
    """The error of this request, if it may go to no node."""
    try:
        quarantine.check(asking(text), now, seconds)
    except GatewayError as error:
        return error
    return None


def asking(text: str) -> Request:
    lease_request = a_request()
    name, bodies = lease_request.id, {"demo": text.encode()}
    return Request(
        name,
        name,
        "/v1/chat/completions",
        0.0,
        lease_request,
        bodies=bodies,
        model_in_body="demo",
    )


def test_a_request_that_two_nodes_died_on_is_rejected_for_a_while() -> None:
    quarantine = Quarantine(KeyedHash())
    quarantine.node_lost(asking("x"), "a", 99.0, 100.0)
    assert refusal(quarantine, "x", 101.0) is None
    quarantine.node_lost(asking("x"), "b", 101.0, 110.0)
    error = refusal(quarantine, "x", 120.0)
    assert error is not None
    assert (error.status, error.code, error.retryable) == (502, "node_failed", False)
    assert "590 s" in error.message
    assert refusal(quarantine, "x", 711.0) is None
    assert len(quarantine.entries) == 0


@each_case(
    ("losses", "seconds", "refused"),
    [
        ([("a", 1.0, 1.0), ("b", 2.0, 2.0)], LONG, True),
        ([("a", 1.0, 1.0), ("b", 2.0, 2.0)], 0.0, False),  # it is off
        ([("a", number, number) for number in range(5)], LONG, False),  # it may be the node
        ([(node, 5.0, 9.0) for node in "abc"], LONG, False),  # lost together: they count as one
        ([("a", 5.0, 9.0), ("b", 9.0, 9.0)], LONG, True),
    ],
)
def test_a_request_is_rejected_once_it_lost_one_node_after_another(
    losses: list[tuple[str, float, float]], seconds: float, refused: bool
) -> None:
    quarantine = Quarantine(KeyedHash())
    for node, leased_at, lost_at in losses:
        quarantine.node_lost(asking("x"), node, leased_at, lost_at)
    assert (refusal(quarantine, "x", 9.0, seconds) is not None) is refused


def test_a_complete_response_ends_the_quarantine() -> None:
    quarantine = Quarantine(KeyedHash())
    quarantine.node_lost(asking("x"), "a", 0.0, 1.0)
    quarantine.clear(asking("x"))
    quarantine.node_lost(asking("x"), "b", 2.0, 3.0)
    assert refusal(quarantine, "x", 0.0) is None


def test_the_oldest_entry_is_forgotten_first() -> None:
    quarantine = Quarantine(KeyedHash())
    for number in range(MOST_QUARANTINED + 10):
        quarantine.node_lost(asking(str(number)), "a", 0.0, 0.0)
    assert len(quarantine.entries) == MOST_QUARANTINED


@pytest.mark.parametrize("stream", [True, False])
@in_virtual_time
async def test_a_request_that_kills_nodes_reaches_no_third_one(
    tmp_path: Path, *, stream: bool
) -> None:
    servers = [EmulatedNode() for _ in range(4)]
    async with proxy_over(tmp_path, *servers) as proxy:
        for server in servers:
            server.faults.set("reset")
        for asked in (1, 2):
            refused = await proxy.ask(stream=stream)
            assert (refused.status_code, refused.json()["error"]["code"]) == (502, "node_failed")
            assert "2 nodes died" in refused.json()["error"]["message"]
            assert refused.headers["x-should-retry"] == "false"
            assert len(proxy.attempts) == 2, asked
        for server in servers:
            server.faults.clear()
        other = await proxy.ask(messages=[{"role": "user", "content": "harmless"}])
        assert other.status_code == 200
        assert (await proxy.ask(stream=stream)).status_code == 502


@pytest.mark.parametrize("stream", [True, False])
@in_virtual_time
async def test_a_response_that_kills_its_node_while_it_is_written_counts_as_well(
    tmp_path: Path, *, stream: bool
) -> None:
    servers = [EmulatedNode() for _ in range(3)]
    async with proxy_over(tmp_path, *servers) as proxy:
        resumed: list[StreamResumed] = []
        proxy.app.bus.subscribe(StreamResumed, resumed.append)
        for server in servers:
            server.faults.set("reset", after_events=3)
        reply = await proxy.ask(stream=stream)
        assert reply.status_code == (200 if stream else 502)
        assert reply.text.count("2 nodes died") == 1
        assert len(proxy.attempts) == 2, "it went on elsewhere, and that node died too"
        failures = [one.failure for one in resumed]
        assert failures == [None, "nodes died on this very request"]
        assert (await proxy.ask(stream=stream)).status_code == 502
        assert len(proxy.attempts) == 2
        assert (proxy.finished[0].status, proxy.finished[0].reason) == (502, "node_failed")
