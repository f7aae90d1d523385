"""Stored requests run as clients' requests do, and their usage comes back with their result."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from gateway import errors
from gateway.api import sse
from gateway.callers.ledger import ROW_COLUMNS
from gateway.stored.claims import StoredRow
from gateway.stored.runner import HeldRow, Outcome, RowDeferred, RowExpired, RowRuns
from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import BODIES, ProxyOverNodes, proxy_over
from tests.gateways import until
from tests.stored.batch_gateway import HEADERS, key
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
