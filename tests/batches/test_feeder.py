"""A whole gateway runs the lines of batches: at all slots, beside clients, and each line once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from gateway.access.keys import hash_key
from gateway.store.failures import StoreUnavailable
from gateway.store.store import Store
from tests.batches.virtual_store import store_in_virtual_time
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.virtual import in_virtual_time

pytestmark = pytest.mark.usefixtures("hurried")

KEY = "lg_k1_" + "s" * 43
HEADERS = {"authorization": f"Bearer {KEY}"}
CALM: dict[str, Any] = {"health": {"interval": 5, "discover_interval": 30}}


def key(**fields: Any) -> dict[str, Any]:
    return {"id": "k1", "name": "alice", "sha256": hash_key(KEY).sha256, **fields}


def lines(number: int, first: int = 0, **body: Any) -> list[dict[str, Any]]:
    return [
        {
            "custom_id": f"line-{index}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": f"write text {index}"}],
                "temperature": 0,
                "max_tokens": 20,
                **body,
            },
        }
        for index in range(first, first + number)
    ]


@contextlib.asynccontextmanager
async def gateway_over(
    folder: Path, *nodes: EmulatedNode, **settings: Any
) -> AsyncIterator[Running]:
    async with contextlib.AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(node)
        specs = [{"name": f"n{number}", "url": node.url} for number, node in enumerate(nodes)]
        chosen = {"keys": [key()], **CALM, **settings}
        running = await stack.enter_async_context(running_gateway(folder, specs, chosen))
        yield running
    log = (folder / "gateway.log").read_text()
    assert "Traceback" not in log, log


@contextlib.asynccontextmanager
async def virtual_gateway_over(
    folder: Path, *nodes: EmulatedNode, **settings: Any
) -> AsyncIterator[Running]:
    """In virtual time, with a store."""
    store = {"url": f"sqlite:///{folder}/gateway.db"}
    with store_in_virtual_time():
        async with gateway_over(folder, *nodes, store=store, **settings) as running:
            yield running


async def submit(running: Running, items: list[dict[str, Any]], **fields: Any) -> str:
    """The id of a new batch."""
    data = "".join(json.dumps(item) + "\n" for item in items).encode()
    files = {"file": ("input.jsonl", data, "application/jsonl")}
    answer = await running.client.post(
        "/v1/files", data={"purpose": "batch"}, files=files, headers=HEADERS
    )
    assert answer.status_code == 200, answer.text
    body = {
        "input_file_id": answer.json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        **fields,
    }
    answer = await running.client.post("/v1/batches", json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def show(running: Running, batch: str) -> dict[str, Any]:
    answer: httpx.Response = await running.client.get(f"/v1/batches/{batch}", headers=HEADERS)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def ended(running: Running, batch: str, seconds: float = 60.0) -> dict[str, Any]:
    """The batch, once it has ended."""
    async with asyncio.timeout(seconds):
        while True:
            found = await show(running, batch)
            if found["status"] in {"completed", "failed", "cancelled", "expired"}:
                return found
            await asyncio.sleep(0.1)


async def output(running: Running, id_: str) -> list[dict[str, Any]]:
    answer = await running.client.get(f"/v1/files/{id_}/content", headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_all_lines_of_a_batch_are_run_once(tmp_path: Path) -> None:
    nodes = [EmulatedNode(slots=4) for _ in range(2)]
    async with gateway_over(tmp_path, *nodes) as running:
        batch = await submit(running, lines(40))
        found = await ended(running, batch)
        assert found["status"] == "completed"
        assert found["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        results = await output(running, found["output_file_id"])
        assert sorted(one["custom_id"] for one in results) == sorted(
            f"line-{number}" for number in range(40)
        )
        assert sum(node.requests for node in nodes) == 40
        metrics = (await running.client.get(f"{running.admin_url}/metrics")).text
        assert 'llama_gateway_batch_lines_total{outcome="done"} 40\n' in metrics


@in_virtual_time
async def test_as_many_lines_run_as_there_are_slots_and_no_more_wait(tmp_path: Path) -> None:
    node = EmulatedNode(slots=4, decode_tps=40)
    async with virtual_gateway_over(tmp_path, node) as running:
        batch = await submit(running, lines(40))
        await until(lambda: node.slots.busy == 4)
        seen: list[tuple[int, int]] = []
        scheduler = running.gateway.scheduler
        while (await show(running, batch))["request_counts"]["completed"] < 30:
            seen.append((node.slots.busy, len(scheduler.waiters)))
            await asyncio.sleep(0.02)
        assert sum(busy for busy, _ in seen) / len(seen) >= 0.95 * 4
        assert max(waiting for _, waiting in seen) <= 4
        await ended(running, batch)


async def test_a_cancelled_batch_leaves_its_slots(tmp_path: Path) -> None:
    node = EmulatedNode(slots=2, decode_tps=10, answer_tokens=5000)
    async with gateway_over(tmp_path, node) as running:
        batch = await submit(running, lines(20, max_tokens=5000))
        await until(lambda: node.slots.busy == 2)
        await running.client.post(f"/v1/batches/{batch}/cancel", headers=HEADERS)
        found = await ended(running, batch, 20.0)
        assert found["status"] == "cancelled"
        await until(lambda: node.slots.busy == 0)


@in_virtual_time
async def test_lines_of_a_revoked_key_fail(tmp_path: Path) -> None:
    other = key(id="k2", name="bob", sha256=hash_key("lg_k2_" + "t" * 43).sha256)
    node = EmulatedNode(slots=2, decode_tps=20)
    async with virtual_gateway_over(tmp_path, node, keys=[key(), other]) as running:
        batch = await submit(running, lines(20))
        await until(lambda: node.requests >= 4)
        running.gateway.key_sync.configure([], allow_anonymous=False)
        feeder = running.gateway.background.feeder
        assert feeder is not None
        await until(lambda: feeder.counts.outcomes["failed"] >= 10, 30.0)
        assert node.requests < 12
        del batch


async def test_lines_wait_while_a_limit_of_their_key_is_reached(tmp_path: Path) -> None:
    node = EmulatedNode(slots=4)
    limited = key(limits={"concurrency": 2})
    async with gateway_over(tmp_path, node, keys=[limited]) as running:
        found = await ended(running, await submit(running, lines(20)))
        assert found["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


@pytest.mark.slow
async def test_lines_go_on_when_their_nodes_are_back(tmp_path: Path) -> None:
    node = EmulatedNode(slots=2, decode_tps=50)
    quick = {"health": {"interval": 0.2, "timeout": 2.0, "open": 0.3, "open_max": 0.6}}
    async with gateway_over(
        tmp_path, node, **quick, retries={"wait_for_node": 0.5, "attempts": 1}
    ) as running:
        batch = await submit(running, lines(20))
        await until(lambda: node.requests >= 4)
        await node.kill()
        await asyncio.sleep(1.0)
        assert (await show(running, batch))["status"] == "in_progress"
        await node.revive()
        found = await ended(running, batch)
        assert found["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


async def test_lines_for_an_unknown_model_fail_soon(tmp_path: Path) -> None:
    async with gateway_over(tmp_path, EmulatedNode()) as running:
        found = await ended(running, await submit(running, lines(50, model="gpt-nothing")))
        assert found["request_counts"] == {"total": 50, "completed": 0, "failed": 50}


@in_virtual_time
async def test_a_gateway_that_ends_puts_back_what_it_runs(tmp_path: Path) -> None:
    async with virtual_gateway_over(tmp_path, EmulatedNode(slots=2, decode_tps=30)) as running:
        batch = await submit(running, lines(20))
        node = running.gateway.fleet.nodes["n0"]
        await until(lambda: node.requests >= 4)
    async with virtual_gateway_over(tmp_path, EmulatedNode(slots=2, decode_tps=30)) as running:
        found = await ended(running, batch, 60.0)
        assert found["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        results = await output(running, found["output_file_id"])
        assert len({one["custom_id"] for one in results}) == len(results) == 20


@pytest.mark.slow
async def test_lines_end_while_the_store_is_away_and_are_recorded_later(tmp_path: Path) -> None:
    node = EmulatedNode(slots=2, decode_tps=40)
    async with gateway_over(tmp_path, node) as running:
        batch, feeder = await submit(running, lines(40)), running.gateway.background.feeder
        assert feeder is not None
        await until(lambda: node.requests >= 2)
        away = StoreUnavailable("it is away", "wait")
        with patch.object(Store, "run", side_effect=away):
            # Those that were claimed before run to their end.
            await until(lambda: feeder.claimed == feeder.running == node.slots.busy == 0, 20.0)
            assert node.requests < 40
        found = await ended(running, batch)
        assert found["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        assert node.requests == 40
        log = (tmp_path / "gateway.log").read_text()
        assert log.count('"lines of batches wait"') == 1


async def test_lines_of_a_paused_model_wait_and_go_on(tmp_path: Path) -> None:
    nodes = [
        EmulatedNode(slots=2),
        EmulatedNode(slots=2, model="other"),
    ]
    async with gateway_over(tmp_path, *nodes) as running:
        fleet = running.gateway.fleet
        fleet.pause_model("demo")
        with patch("gateway.errors.PAUSED_RETRY_SECONDS", 0.05):
            paused = await submit(running, lines(20, model="demo"))
            others = await submit(running, lines(20, model="other"))
            assert (await ended(running, others))["request_counts"]["completed"] == 20
            found = await show(running, paused)
            assert found["status"] == "in_progress"
            assert found["request_counts"] == {"total": 20, "completed": 0, "failed": 0}
            fleet.resume_model("demo")
            assert (await ended(running, paused))["request_counts"]["completed"] == 20
