"""Stored requests run as clients' requests do, and give up their slots to those."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import httpx
import pytest

from gateway import errors
from gateway.api import sse
from gateway.callers.ledger import ROW_COLUMNS
from gateway.events import SlotYielded
from gateway.schedule.core import batch_slots
from gateway.stored.claims import StoredRow
from gateway.stored.runner import HeldRow, Outcome, RowDeferred, RowExpired, RowRuns
from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import BODIES, ProxyOverNodes, Stream, proxy_over
from tests.forward.test_resume import check_whole, metrics_of
from tests.gateways import running_gateway, until
from tests.servers import start_demo_servers
from tests.stored.batch_gateway import CALM, HEADERS, key, time_to_first_token
from tests.stored.responses_over_nodes import Kept
from tests.stored.stored_rows import to_run
from tests.virtual import in_virtual_time

CHAT = "/v1/chat/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20}


def a_row(path: str = CHAT, **fields: Any) -> StoredRow:
    return to_run(**{"id_": "row_1", "owner": "k1", "path": path, **fields})


async def run(
    proxy: ProxyOverNodes, row: StoredRow | None = None, sink: Kept | None = None, **body: Any
) -> Outcome:
    row = row or a_row()
    value = {**BODIES.get(row.path, {}), **GREEDY, **body}
    return await proxy.app.background.runner.run(row, json.dumps(value).encode(), sink)


def usage_of(outcome: Outcome) -> dict[str, Any]:
    assert outcome.usage is not None
    return dict(zip(ROW_COLUMNS, outcome.usage, strict=True))


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses"])
@in_virtual_time
async def test_a_row_has_the_response_that_a_client_would_get(tmp_path: Path, path: str) -> None:
    async with proxy_over(tmp_path, EmulatedNode(), keys=[key()]) as proxy:
        outcome = await run(proxy, a_row(path))
        client = await proxy.ask(path, HEADERS, **GREEDY)
        assert (outcome.status, outcome.error_code) == (client.status_code, None) == (200, None)
        ours, theirs = json.loads(outcome.content), client.json()
        assert set(ours) == set(theirs)
        texts = [
            value.get("choices") or value.get("content") or value.get("output")[0]["content"]
            for value in (ours, theirs)
        ]
        assert texts[0] == texts[1]
        row = usage_of(outcome)
        assert (row["id"], row["key"], row["class"], row["path"]) == ("row_1", "k1", "batch", path)
        assert (row["status"], row["outcome"], row["completion_tokens"]) == (200, "ok", 20)
        assert len(proxy.app.registry) == 0


@in_virtual_time
async def test_an_event_sink_gets_whole_events_to_the_end(tmp_path: Path) -> None:
    async with proxy_over(tmp_path, EmulatedNode(), keys=[key()]) as proxy:
        sink = Kept()
        outcome = await run(proxy, a_row(class_="normal"), sink, stream=True)
        assert (outcome.status, outcome.content) == (200, b"")
        assert all(part.endswith(b"\n\n") for part in sink.writes)
        assert sse.payload(list(sse.split(b"".join(sink.writes)))[-1]) == b"[DONE]"
        assert usage_of(outcome)["stream"] is True


@in_virtual_time
async def test_an_error_is_a_result_in_the_form_of_its_api(tmp_path: Path) -> None:
    async with proxy_over(tmp_path, EmulatedNode(), keys=[key()]) as proxy:
        outcome = await run(proxy, model="gpt-nothing")
        assert (outcome.status, outcome.error_code) == (404, "model_not_found")
        assert json.loads(outcome.content)["error"]["code"] == "model_not_found"
        outcome = await run(proxy, a_row("/v1/messages"), max_tokens="many")
        assert outcome.status == 400
        assert json.loads(outcome.content)["type"] == "error"
        outcome = await proxy.app.background.runner.run(a_row(), b'{"messages": ')
        assert (outcome.status, outcome.error_code) == (400, "invalid_json")
        outcome = await run(proxy, a_row("/v1/audio/transcriptions"))
        assert (outcome.status, outcome.error_code) == (404, "not_found")


@in_virtual_time
async def test_a_caller_without_a_key_owns_rows_only_where_no_key_is_needed(tmp_path: Path) -> None:
    row = a_row(owner="anonymous:127.0.0.1")
    async with proxy_over(tmp_path, EmulatedNode()) as proxy:
        assert usage_of(await run(proxy, row))["key"] == "anonymous:127.0.0.1"
    async with proxy_over(tmp_path, EmulatedNode(), keys=[key()]) as proxy:
        assert (await run(proxy, row)).status == 401


@in_virtual_time
async def test_a_row_waits_while_a_limit_of_its_caller_is_reached(tmp_path: Path) -> None:
    limited = key(limits={"rpm": 1})
    async with proxy_over(tmp_path, EmulatedNode(), keys=[limited]) as proxy:
        assert (await run(proxy)).status == 200
        with pytest.raises(RowDeferred) as deferred:
            await run(proxy)
        assert deferred.value.reason == "rate_limit_exceeded"
        assert deferred.value.concerns_owner
        assert 0 < deferred.value.seconds <= 60
        await asyncio.sleep(deferred.value.seconds + 1)
        assert (await run(proxy)).status == 200
        proxy.app.bus.flush()
        assert [one.status for one in proxy.finished] == [200, 200]


@in_virtual_time
async def test_a_row_waits_while_its_node_is_down_and_costs_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "keys": [key(limits={"concurrency": 1})],
        "retries": {"wait_for_node": 0.5},
    }
    async with proxy_over(tmp_path, node := EmulatedNode(), **options) as proxy:
        await node.kill()
        await until(lambda: proxy.node("a").state.value == "down")
        with pytest.raises(RowDeferred) as deferred:
            await run(proxy)
        assert deferred.value.reason == "no_node"
        assert not deferred.value.concerns_owner
        await node.revive()
        await until(lambda: proxy.node("a").state.value == "ready")
        assert (await run(proxy)).status == 200


@in_virtual_time
async def test_a_row_whose_deadline_passes_has_expired(tmp_path: Path) -> None:
    node = EmulatedNode(slots=1, decode_tps=10, answer_tokens=1000)
    async with proxy_over(tmp_path, node, keys=[key()]) as proxy:
        with pytest.raises(RowExpired):
            await run(proxy, a_row(deadline=time.time() - 1))
        assert node.requests == 0
        with pytest.raises(RowExpired):
            await run(proxy, a_row(deadline=time.time() + 5), max_tokens=1000)
        assert node.requests == 1
        await proxy.settled()


@in_virtual_time
async def test_a_running_row_is_seen_and_can_be_cancelled(tmp_path: Path) -> None:
    node = EmulatedNode(slots=1, decode_tps=10, answer_tokens=1000)
    async with proxy_over(tmp_path, node, keys=[key()]) as proxy:
        running = asyncio.create_task(run(proxy, max_tokens=1000))
        waiting = asyncio.create_task(run(proxy, a_row(id_="row_2")))
        await until(lambda: len(proxy.app.registry) == 2 and node.busy == 1)
        url = f"{proxy.running.admin_url}/admin/requests"
        listed = (await proxy.running.client.get(url)).json()["requests"]
        assert [(one["id"], one["state"]) for one in listed] == [
            ("row_1", "running"), ("row_2", "waiting")
        ]  # fmt: skip
        for name in ("row_2", "row_1"):
            await proxy.running.client.delete(f"{url}/{name}")
        outcomes = await asyncio.gather(running, waiting)
        assert [(one.status, one.error_code) for one in outcomes] == [(503, "cancelled")] * 2
        assert usage_of(outcomes[0])["outcome"] == "cancelled"


@in_virtual_time
async def test_a_row_whose_task_is_cancelled_frees_its_slot_and_its_limits(tmp_path: Path) -> None:
    node = EmulatedNode(slots=1, decode_tps=10, answer_tokens=1000)
    async with proxy_over(tmp_path, node, keys=[key(limits={"concurrency": 1})]) as proxy:
        task = asyncio.create_task(run(proxy, max_tokens=1000))
        await until(lambda: node.busy == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await proxy.settled()
        assert (await run(proxy, max_tokens=5)).status == 200


@in_virtual_time
async def test_a_row_that_the_shutdown_ends_is_run_again(tmp_path: Path) -> None:
    node = EmulatedNode(slots=1, decode_tps=10, answer_tokens=1000)
    async with proxy_over(tmp_path, node, keys=[key()]) as proxy:
        for sink in (None, Kept()):
            more = {} if sink is None else {"stream": True}
            task = asyncio.create_task(run(proxy, None, sink, max_tokens=1000, **more))
            await until(lambda: node.busy == 1)
            await asyncio.sleep(2.0)
            proxy.app.registry.cancel_where(lambda _: True, errors.shutting_down())
            with pytest.raises(RowDeferred) as deferred:
                await task
            assert deferred.value.reason == "shutting_down"
            if sink is not None:
                assert sink.writes
                assert not any(b"error" in part for part in sink.writes)
            await proxy.settled()


class Runs(RowRuns[HeldRow]):
    """One that holds a row whose run never ends by itself."""

    retry_seconds, failed_event = 1.0, "failed"

    def __init__(self) -> None:
        self.put_back: list[str] = []
        self.fails = False  # whether the end of a cancelled run does
        anything: Any = MagicMock()
        threads = SimpleNamespace(run=AsyncMock(return_value=b""))
        leases: Any = SimpleNamespace(
            put_back=lambda ids, _, **__: self.put_back.extend(ids),
            storage=SimpleNamespace(now=lambda: 0.0, threads=threads, folder=anything),
        )
        super().__init__(leases, anything, anything)
        self._trouble = anything

    def begin(self) -> asyncio.Task[None]:
        held = self._held["row_1"] = HeldRow(a_row())
        self._begin(held)
        assert held.task is not None
        return held.task

    async def _run(self, held: HeldRow, body: bytes | None) -> None:
        await asyncio.Event().wait()

    async def _cancelled(self, held: HeldRow) -> None:
        if self.fails:
            raise ValueError
        self.leases.put_back([held.row.id], 0.0)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_row_whose_run_is_cancelled_waits_again_though_it_had_not_begun(
    has_begun: bool,
) -> None:
    runs = Runs()
    task = runs.begin()
    if has_begun:
        await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(5):
        await runs.ended()
    assert runs.put_back == ["row_1"]


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
