"""Stored requests run as clients' requests do, and give up their slots to those."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import httpx
import pytest

from gateway import errors
from gateway.app.assembly import Gateway
from gateway.callers.ledger import ROW_COLUMNS
from gateway.events import SlotYielded
from gateway.schedule.core import batch_slots
from gateway.stored.claims import StoredRow
from gateway.stored.response_events import ResponseEvents
from gateway.stored.runner import HeldRow, Outcome, RowDeferred, RowRuns
from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import BODIES, ProxyOverNodes, Stream, proxy_over
from tests.forward.test_resume import check_whole, metrics_of
from tests.gateways import running_gateway, until
from tests.servers import start_demo_servers
from tests.stored.batch_gateway import CALM, HEADERS, key, time_to_first_token
from tests.stored.stored_rows import to_run
from tests.virtual import in_virtual_time

CHAT = "/v1/chat/completions"
OWNER = "anonymous:127.0.0.1"
TOKENS = 600


class Kept(ResponseEvents):
    """A sink that keeps what it gets, without a log."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    async def write(self, events: bytes) -> None:
        await asyncio.sleep(0)
        self.writes.append(events)


def a_row(path: str = CHAT, owner: str = "k1", **fields: Any) -> StoredRow:
    return to_run(**{"id_": "row_1", "owner": owner, "path": path, **fields})


async def run(
    app: Gateway, row: StoredRow | None = None, sink: Kept | None = None, **body: Any
) -> Outcome:
    row = row or a_row()
    value = {**BODIES.get(row.path, {}), "temperature": 0, "max_tokens": 20, **body}
    return await app.background.runner.run(row, json.dumps(value).encode(), sink)


def start(app: Gateway, *options: Any, **body: Any) -> asyncio.Task[Outcome]:
    return asyncio.create_task(run(app, *options, **{"max_tokens": TOKENS, **body}))


def usage_of(outcome: Outcome) -> dict[str, Any]:
    assert outcome.usage is not None
    return dict(zip(ROW_COLUMNS, outcome.usage, strict=True))


def text_of(outcome: Outcome) -> Any:
    assert outcome.status == 200, outcome.content
    return json.loads(outcome.content)["choices"]


def a_node(slots: int = 1) -> EmulatedNode:
    return EmulatedNode(slots=slots, answer_tokens=5000, prefill_tps=500.0, decode_tps=10.0)


@asynccontextmanager
async def a_proxy(
    folder: Path, node: EmulatedNode, **settings: Any
) -> AsyncIterator[tuple[ProxyOverNodes, Gateway]]:
    async with proxy_over(folder, node, **{"keys": [key()], **settings}) as proxy:
        yield proxy, proxy.app


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses"])
@in_virtual_time
async def test_a_row_has_the_response_that_a_client_would_get(tmp_path: Path, path: str) -> None:
    async with a_proxy(tmp_path, EmulatedNode()) as (proxy, app):
        outcome = await run(app, a_row(path))
        client = await proxy.ask(path, HEADERS, temperature=0, max_tokens=20)
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
        assert len(app.registry) == 0


@in_virtual_time
async def test_an_error_is_a_result_in_the_form_of_its_api(tmp_path: Path) -> None:
    async with a_proxy(tmp_path, EmulatedNode()) as (_, app):
        outcome = await run(app, model="gpt-nothing")
        assert (outcome.status, outcome.error_code) == (404, "model_not_found")
        assert json.loads(outcome.content)["error"]["code"] == "model_not_found"
        outcome = await run(app, a_row("/v1/messages"), max_tokens="many")
        assert outcome.status == 400
        assert json.loads(outcome.content)["type"] == "error"
        outcome = await app.background.runner.run(a_row(), b'{"messages": ')
        assert (outcome.status, outcome.error_code) == (400, "invalid_json")
        outcome = await run(app, a_row("/v1/audio/transcriptions"))
        assert (outcome.status, outcome.error_code) == (404, "not_found")


@in_virtual_time
async def test_a_caller_without_a_key_owns_rows_only_where_no_key_is_needed(tmp_path: Path) -> None:
    for keys, status in (([], 200), ([key()], 401)):
        async with a_proxy(tmp_path, EmulatedNode(), keys=keys) as (_, app):
            outcome = await run(app, a_row(owner=OWNER))
            assert outcome.status == status
            if status == 200:
                assert usage_of(outcome)["key"] == OWNER


@in_virtual_time
async def test_a_row_waits_while_a_limit_of_its_caller_is_reached(tmp_path: Path) -> None:
    limited = key(limits={"rpm": 1})
    async with a_proxy(tmp_path, EmulatedNode(), keys=[limited]) as (proxy, app):
        assert (await run(app)).status == 200
        with pytest.raises(RowDeferred) as deferred:
            await run(app)
        assert deferred.value.reason == "rate_limit_exceeded"
        assert deferred.value.concerns_owner
        assert 0 < deferred.value.seconds <= 60
        await asyncio.sleep(deferred.value.seconds + 1)
        assert (await run(app)).status == 200
        assert [one.status for one in proxy.finished] == [200, 200]


@in_virtual_time
async def test_a_row_waits_while_its_node_is_down_and_costs_nothing(tmp_path: Path) -> None:
    limited, node = key(limits={"concurrency": 1}), EmulatedNode()
    retries = {"wait_for_node": 0.5}
    async with a_proxy(tmp_path, node, keys=[limited], retries=retries) as (proxy, app):
        await node.kill()
        await until(lambda: proxy.node("a").state.value == "down")
        with pytest.raises(RowDeferred) as deferred:
            await run(app)
        assert deferred.value.reason == "no_node"
        assert not deferred.value.concerns_owner
        await node.revive()
        await until(lambda: proxy.node("a").state.value == "ready")
        assert (await run(app)).status == 200


@in_virtual_time
async def test_a_running_row_is_seen_and_can_be_cancelled(tmp_path: Path) -> None:
    async with a_proxy(tmp_path, node := a_node()) as (proxy, app):
        running, waiting = start(app), start(app, a_row(id_="row_2"))
        await until(lambda: len(app.registry) == 2 and node.busy == 1)
        admin = proxy.running.admin
        listed = (await admin.get("/admin/requests")).json()["requests"]
        assert [(one["id"], one["state"]) for one in listed] == [
            ("row_1", "running"), ("row_2", "waiting")
        ]  # fmt: skip
        for name in ("row_2", "row_1"):
            await admin.delete(f"/admin/requests/{name}")
        outcomes = await asyncio.gather(running, waiting)
        assert [(one.status, one.error_code) for one in outcomes] == [(503, "cancelled")] * 2
        assert usage_of(outcomes[0])["outcome"] == "cancelled"


@in_virtual_time
async def test_a_row_whose_task_is_cancelled_frees_its_slot_and_its_limits(tmp_path: Path) -> None:
    limited, node = key(limits={"concurrency": 1}), a_node()
    async with a_proxy(tmp_path, node, keys=[limited]) as (proxy, app):
        task = start(app)
        await until(lambda: node.busy == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await proxy.settled()
        assert (await run(app, max_tokens=5)).status == 200


@in_virtual_time
async def test_a_row_that_the_shutdown_ends_is_run_again(tmp_path: Path) -> None:
    async with a_proxy(tmp_path, node := a_node()) as (proxy, app):
        for sink in (None, Kept()):
            task = start(app, None, sink, stream=sink is not None)
            await until(lambda: node.busy == 1)
            await asyncio.sleep(2.0)
            app.registry.cancel_where(lambda _: True, errors.shutting_down())
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
        anything: Any = MagicMock()
        threads = SimpleNamespace(run=AsyncMock(return_value=b""))
        leases: Any = SimpleNamespace(
            put_back=lambda ids, _, **__: self.put_back.extend(ids),
            storage=SimpleNamespace(now=lambda: 0.0, threads=threads, folder=anything),
        )
        super().__init__(leases, anything, anything)
        self._trouble = anything

    async def _run(self, held: HeldRow, body: bytes | None) -> None:
        await asyncio.Event().wait()

    async def _cancelled(self, held: HeldRow) -> None:
        self.leases.put_back([held.row.id], 0.0)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_row_whose_run_is_cancelled_waits_again_though_it_had_not_begun(
    has_begun: bool,
) -> None:
    runs = Runs()
    held = runs._held["row_1"] = HeldRow(a_row())
    runs._begin(held)
    if has_begun:
        await asyncio.sleep(0)
    assert held.task is not None
    held.task.cancel()
    async with asyncio.timeout(5):
        await runs.ended()
    assert runs.put_back == ["row_1"]


def message(number: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"write text number {number}"}]}


async def in_decode(app: Gateway, count: int, tokens: int = 20) -> None:
    """Wait until so many requests have more than so many tokens."""

    def decoding() -> int:
        attempts = [one.attempt for one in app.registry]
        return sum(one is not None and one.content_events > tokens for one in attempts)

    await until(lambda: decoding() == count, 120.0)


async def ttft(proxy: ProxyOverNodes) -> float:
    return await time_to_first_token(proxy.running.client, BODIES[CHAT], HEADERS)


def yields_of(app: Gateway) -> list[SlotYielded]:
    found: list[SlotYielded] = []
    app.bus.subscribe(SlotYielded, found.append)
    return found


@in_virtual_time
async def test_a_request_that_would_wait_gets_the_slot_of_a_batch_row(tmp_path: Path) -> None:
    async with a_proxy(tmp_path, a_node(2), **CALM) as (proxy, app):
        events = yields_of(app)
        idle = await ttft(proxy)
        whole = [await start(app, **message(number)) for number in range(2)]
        assert events == []
        rows = [start(app, a_row(id_=f"row_1{n}"), **message(n)) for n in range(2)]
        await in_decode(app, 2)
        assert await ttft(proxy) < idle + 0.5
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
        assert app.proxy_context.retries_left() == 1000
        metrics = await metrics_of(proxy)
        assert "llama_gateway_yielded_slots_total 1\n" in metrics
        assert "llama_gateway_resumed_streams_total 0\n" in metrics
        assert app.scheduler.yielding == {}


@in_virtual_time
async def test_a_sink_gets_one_whole_stream_though_its_row_was_cut(tmp_path: Path) -> None:
    async with a_proxy(tmp_path, a_node(), **CALM) as (proxy, app):
        events, sinks = yields_of(app), [Kept(), Kept()]
        outcome = await start(app, None, sinks[0], stream=True)
        assert (outcome.status, outcome.content) == (200, b"")
        assert usage_of(outcome)["stream"] is True
        row = start(app, a_row(id_="row_2"), sinks[1], stream=True)
        await in_decode(app, 1)
        assert await ttft(proxy) < 2.0
        assert (await row).status == 200
        assert all(part.endswith(b"\n\n") for sink in sinks for part in sink.writes)
        whole, cut = (Stream(200, httpx.Headers(), b"".join(sink.writes)) for sink in sinks)
        check_whole(CHAT, whole, whole)
        check_whole(CHAT, cut, whole)
        assert len(events) == 1


@in_virtual_time
async def test_a_row_that_can_not_be_resumed_is_not_cut(tmp_path: Path) -> None:
    async with a_proxy(tmp_path, a_node(), resume="off", **CALM) as (proxy, app):
        events, row = yields_of(app), start(app)
        await in_decode(app, 1)
        assert await ttft(proxy) > 30.0
        assert (await row).status == 200
        assert events == []


@in_virtual_time
async def test_a_row_is_cut_a_few_times_and_then_runs_to_its_end(tmp_path: Path) -> None:
    async with a_proxy(tmp_path, a_node(), **CALM) as (proxy, app):
        events, whole = yields_of(app), await start(app)
        row = start(app)
        await in_decode(app, 1)
        waits = []
        while not row.done():
            waits.append(await ttft(proxy))
            await asyncio.sleep(3.0)
        assert text_of(await row) == text_of(whole)
        assert 1 < len(events) <= 4
        assert usage_of(await row)["completion_tokens"] == TOKENS
        assert max(waits) > 10.0


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.real
async def test_a_row_on_a_real_server_yields_and_loses_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A row that ends so soon would be waited for.
    monkeypatch.setattr(batch_slots, "LEAST_SECONDS_LEFT", 0.1)
    settings = {"health": {"interval": 0.5}, "resume": "exact"}
    answer = 3000  # A quick machine writes them in two seconds.
    async with (
        start_demo_servers(1, slots=1, context=4096, extra=("--exact",)) as urls,
        running_gateway(tmp_path, urls, settings) as running,
    ):
        app, yields = running.gateway, yields_of(running.gateway)
        body = {**message(1), "max_tokens": answer, "seed": 7, "ignore_eos": True}
        whole = await start(app, a_row(owner=OWNER), **body)
        row = start(app, a_row(owner=OWNER), **body)
        await in_decode(app, 1, tokens=100)
        reply = await running.client.post(CHAT, json={**message(2), "max_tokens": 5})
        assert reply.status_code == 200
        assert not row.done(), "the short request waited for the end of the row"
        cut = await row
        assert [event.resumed_on for event in yields] == ["node-0"]
        assert text_of(cut) == text_of(whole)
        assert cut.record.completion_tokens == whole.record.completion_tokens == answer
        assert cut.record.prompt_tokens == whole.record.prompt_tokens
