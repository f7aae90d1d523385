"""Batch rows give up their slots to requests that would wait, go on later, and lose no text."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.events import SlotYielded
from gateway.schedule.core import batch_slots
from gateway.stored.runner import Outcome
from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import BODIES, ProxyOverNodes, Stream, proxy_over
from tests.forward.test_resume import check_whole, metrics_of
from tests.gateways import running_gateway, until
from tests.servers import start_demo_servers
from tests.stored.batch_gateway import CALM, time_to_first_token
from tests.stored.responses_over_nodes import Kept
from tests.stored.stored_rows import to_run
from tests.stored.test_runner import usage_of
from tests.virtual import in_virtual_time

CHAT = "/v1/chat/completions"
OWNER = "anonymous:127.0.0.1"
TOKENS = 600
ROW: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}


def a_node(slots: int = 2, **options: Any) -> EmulatedNode:
    speeds: dict[str, Any] = {"prefill_tps": 500.0, "decode_tps": 10.0}
    return EmulatedNode(**{"slots": slots, "answer_tokens": 5000, **speeds, **options})


def start_row(
    proxy: ProxyOverNodes, number: int, path: str = CHAT, **body: Any
) -> asyncio.Task[Outcome]:
    row = to_run(f"row_{number}", OWNER, path)
    tokens = {"max_output_tokens": TOKENS} if path == "/v1/responses" else {"max_tokens": TOKENS}
    value = {**BODIES.get(path, {}), "temperature": 0, **tokens, **body}
    return asyncio.create_task(proxy.app.background.runner.run(row, json.dumps(value).encode()))


def message(number: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"write text number {number}"}]}


async def in_decode(proxy: ProxyOverNodes, count: int) -> None:
    """Wait until so many requests are in decode."""

    def decoding() -> int:
        return sum(
            one.attempt is not None and one.attempt.content_events > 20
            for one in proxy.app.registry
        )

    await until(lambda: decoding() == count, 120.0)


async def ttft(proxy: ProxyOverNodes) -> float:
    return await time_to_first_token(proxy.running.client, BODIES[CHAT], {})


def text_of(outcome: Outcome) -> Any:
    assert outcome.status == 200, outcome.content
    value = json.loads(outcome.content)
    if "choices" in value:
        return value["choices"]
    return value.get("content") or value["output"]


def yields_of(proxy: ProxyOverNodes) -> list[SlotYielded]:
    found: list[SlotYielded] = []
    proxy.app.bus.subscribe(SlotYielded, found.append)
    return found


@in_virtual_time
async def test_a_request_that_would_wait_gets_the_slot_of_a_batch_row(tmp_path: Path) -> None:
    async with proxy_over(tmp_path, a_node(), **CALM) as proxy:
        events = yields_of(proxy)
        idle = await ttft(proxy)
        whole = [await start_row(proxy, number, **message(number)) for number in range(2)]
        assert events == []
        rows = [start_row(proxy, 10 + number, **message(number)) for number in range(2)]
        await in_decode(proxy, 2)
        seconds = await ttft(proxy)
        assert seconds < idle + 0.5
        outcomes = await asyncio.gather(*rows)
        assert [text_of(one) for one in outcomes] == [text_of(one) for one in whole]
        (event,) = events
        assert (event.node, event.resumed_on) == ("a", "a")
        assert event.tokens > 20
        cut = next(usage for usage in map(usage_of, outcomes) if usage["attempts"] == 2)
        assert (cut["outcome"], cut["completion_tokens"]) == ("ok", TOKENS)
        assert cut["prompt_tokens"] == usage_of(whole[0])["prompt_tokens"]
        await proxy.settled()
        assert [outcome for _, outcome in proxy.outcomes].count("yielded") == 1
        assert proxy.node("a").failures == 0
        assert proxy.app.proxy_context.retries_left() == 1000
        metrics = await metrics_of(proxy)
        assert "llama_gateway_yielded_slots_total 1\n" in metrics
        assert "llama_gateway_resumed_streams_total 0\n" in metrics
        assert proxy.app.scheduler.yielding == {}


@in_virtual_time
async def test_a_sink_gets_one_whole_stream_though_its_row_was_cut(tmp_path: Path) -> None:
    async with proxy_over(tmp_path, a_node(1), **CALM) as proxy:
        events, body = yields_of(proxy), json.dumps({**BODIES[CHAT], **ROW, "stream": True})
        sinks = [Kept(), Kept()]
        first = to_run("row_1", OWNER, CHAT)
        assert (await proxy.app.background.runner.run(first, body.encode(), sinks[0])).status == 200
        second = to_run("row_2", OWNER, CHAT)
        row = asyncio.create_task(proxy.app.background.runner.run(second, body.encode(), sinks[1]))
        await in_decode(proxy, 1)
        assert await ttft(proxy) < 2.0
        assert (await row).status == 200
        whole, cut = (Stream(200, httpx.Headers(), b"".join(sink.writes)) for sink in sinks)
        check_whole(CHAT, cut, whole)
        assert len(events) == 1


@in_virtual_time
async def test_a_row_that_can_not_be_resumed_is_not_cut(tmp_path: Path) -> None:
    async with proxy_over(tmp_path, a_node(1), resume="off", **CALM) as proxy:
        events = yields_of(proxy)
        row = start_row(proxy, 1)
        await in_decode(proxy, 1)
        assert await ttft(proxy) > 30.0
        assert (await row).status == 200
        assert events == []


@in_virtual_time
async def test_a_row_is_cut_a_few_times_and_then_runs_to_its_end(tmp_path: Path) -> None:
    async with proxy_over(tmp_path, a_node(1), **CALM) as proxy:
        events = yields_of(proxy)
        whole = await start_row(proxy, 0)
        row = start_row(proxy, 1)
        await in_decode(proxy, 1)
        waits = []
        while not row.done():
            waits.append(await ttft(proxy))
            await asyncio.sleep(3.0)
        assert text_of(await row) == text_of(whole)
        assert 1 < len(events) <= 4
        assert usage_of(await row)["completion_tokens"] == TOKENS
        assert max(waits) > 10.0


@in_virtual_time
async def test_a_row_that_has_yielded_waits_while_every_node_is_out(tmp_path: Path) -> None:
    retries = {"wait_for_node": 1.0}
    async with proxy_over(tmp_path, node := a_node(1), retries=retries) as proxy:
        whole = await start_row(proxy, 0)
        row = start_row(proxy, 1)
        await in_decode(proxy, 1)
        busy = asyncio.create_task(proxy.ask(CHAT, max_tokens=1000))
        await until(lambda: len(proxy.app.scheduler.queue_positions()) == 1 and node.busy == 1)
        await asyncio.sleep(5.0)
        await node.kill()
        await busy
        await until(lambda: proxy.node("a").state.value == "down")
        await asyncio.sleep(30.0)
        assert not row.done()
        await node.revive()
        assert text_of(await row) == text_of(whole)


CONTEXT = 4096
ANSWER = 3000
"""Tokens. A quick machine writes them in two seconds."""
DECODED = 100
"""Tokens after which it is cut."""


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.real
async def test_a_row_on_a_real_server_yields_and_loses_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A row that ends so soon would be waited for.
    monkeypatch.setattr(batch_slots, "LEAST_SECONDS_LEFT", 0.1)
    settings = {"health": {"interval": 0.5}, "resume": "exact"}
    body = {
        "messages": [{"role": "user", "content": "tell me a story"}],
        "max_tokens": ANSWER, "temperature": 0, "seed": 7, "ignore_eos": True,
    }  # fmt: skip
    async with (
        start_demo_servers(1, slots=1, context=CONTEXT, extra=("--exact",)) as urls,
        running_gateway(tmp_path, urls, settings) as running,
    ):
        gateway = running.gateway
        yields: list[SlotYielded] = []
        gateway.bus.subscribe(SlotYielded, yields.append)

        def start(number: int) -> asyncio.Task[Outcome]:
            row = to_run(f"row_{number}", "anonymous:127.0.0.1", CHAT)
            return asyncio.create_task(
                gateway.background.runner.run(row, json.dumps(body).encode())
            )

        def decodes() -> bool:
            return any(
                one.attempt is not None and one.attempt.content_events > DECODED
                for one in gateway.registry
            )

        whole = await start(0)
        assert whole.status == 200
        row = start(1)
        await until(decodes, 60.0)
        short = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
        reply = await running.client.post(CHAT, json=short)
        assert reply.status_code == 200
        assert not row.done(), "the short request waited for the end of the row"
        cut = await row
        assert [event.resumed_on for event in yields] == ["node-0"]
        texts = [json.loads(one.content)["choices"] for one in (whole, cut)]
        assert texts[0] == texts[1]
        assert cut.record.completion_tokens == whole.record.completion_tokens == ANSWER
        assert cut.record.prompt_tokens == whole.record.prompt_tokens
