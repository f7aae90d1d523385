"""What a request counts whose client left, or whose node failed: what nodes did for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import GatewayError
from gateway.events import RequestFinished
from gateway.proxy.in_flight import PROGRESS_TOKENS
from tests.emulator import EmulatedNode
from tests.emulator.generation import TokenTally
from tests.emulator.language_model import count_tokens
from tests.proxy.proxy_over_nodes import (
    A_FIRST,
    BODIES,
    GENERATION_PATHS,
    ProxyOverNodes,
    prompt_field,
    proxy_over,
)
from tests.virtual import in_virtual_time

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


async def the_record(proxy: ProxyOverNodes) -> tuple[RequestFinished, TokenTally]:
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


@pytest.mark.parametrize("path", [path for path in GENERATION_PATHS if path != "/completion"])
@in_virtual_time
async def test_a_plain_request_that_is_left_counts_what_was_generated(
    tmp_path: Path, path: str
) -> None:
    one = EmulatedNode(decode_tps=10, answer_tokens=500)
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        await left_after(proxy, 5.05, path, max_tokens=400, max_output_tokens=400)
        record, tally = await the_record(proxy)
        assert record.status == 499
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
            # Five batches, and what it has read of the sixth.
            assert record.prompt_tokens == pytest.approx(7.3 * 200, abs=40)
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
        assert record.prompt_tokens == pytest.approx(7.3 * 200, abs=40)


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
        complete: list[RequestFinished] = []
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
