"""Lines whose deadline is near compete in a higher class, and end with their deadline."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from gateway.access.keys import hash_key
from gateway.events import RequestFinished
from gateway.request import Priority
from tests.batches.test_feeder import HEADERS, ended, gateway_over, key, lines, output, show, submit
from tests.batches.virtual_store import store_in_virtual_time
from tests.emulator import EmulatedNode
from tests.gateways import Running, until
from tests.usage.kills import rows_of
from tests.virtual import in_virtual_time, now

CHAT = "/v1/chat/completions"
OTHER = "lg_k2_" + "t" * 43
OTHERS: dict[str, Any] = {"id": "k2", "name": "bob", "sha256": hash_key(OTHER).sha256}
OTHER_HEADERS = {"authorization": f"Bearer {OTHER}"}


def a_node(slots: int = 2, **options: Any) -> EmulatedNode:
    """A node that writes 20 tokens in a second."""
    return EmulatedNode(
        **{"slots": slots, "prefill_tps": 2000.0, "decode_tps": 20.0, "answer_tokens": 5000}
        | options
    )


@contextlib.asynccontextmanager
async def a_site(
    folder: Path, *nodes: EmulatedNode, own: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Running]:
    """A gateway with a store whose wall clock is virtual too; `own`: fields of the batch's key."""
    loop = asyncio.get_running_loop()
    begin = time.time() - loop.time()
    wall = SimpleNamespace(time=lambda: begin + loop.time())
    chosen: dict[str, Any] = {
        "store": {"url": f"sqlite:///{folder}/gateway.db"},
        "keys": [key(**(own or {})), OTHERS],
        "batches": {"windows": {"shortest": 5}},
        **settings,
    }
    with store_in_virtual_time(), patch("gateway.background.time", wall):
        async with gateway_over(folder, *nodes, **chosen) as running:
            yield running


@contextlib.asynccontextmanager
async def chats(
    running: Running, clients: int, tokens: int = 20, headers: dict[str, str] = OTHER_HEADERS
) -> AsyncIterator[list[float]]:
    """Clients that always want an answer; gives the seconds that each chat took."""
    seconds: list[float] = []

    async def one(number: int) -> None:
        while True:
            body = {
                "messages": [{"role": "user", "content": f"chat {number} at {now()}"}],
                "max_tokens": tokens,
            }
            began = now()
            answer = await running.client.post(CHAT, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            seconds.append(now() - began)

    tasks = [asyncio.create_task(one(number)) for number in range(clients)]
    try:
        yield seconds
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [one for one in results if not isinstance(one, asyncio.CancelledError)]


def finished_of(running: Running) -> list[RequestFinished]:
    found: list[RequestFinished] = []
    running.gateway.bus.subscribe(RequestFinished, found.append)
    return found


def queued_of(running: Running, caller: str = "k1") -> list[Priority]:
    """The classes in which requests of a caller wait."""
    waiters = running.gateway.scheduler.waiters
    return [one.request.caller.priority for one in waiters if one.request.caller.id == caller]


async def errors_of(running: Running, batch: dict[str, Any]) -> Counter[str]:
    assert batch["error_file_id"] is not None, batch
    return Counter(line["error"]["code"] for line in await output(running, batch["error_file_id"]))


@in_virtual_time
async def test_late_lines_are_not_starved_by_chats_of_their_class(tmp_path: Path) -> None:
    async with a_site(tmp_path, a_node(), own={"class": "batch", "max_class": "normal"}) as running:
        finished = finished_of(running)
        async with chats(running, 8):
            await asyncio.sleep(3.0)
            found = await ended(running, await submit(running, lines(12), completion_window="40s"))
        assert found["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        classes = Counter(one.priority for one in finished if one.caller == "k1")
        assert set(classes) <= {Priority.NORMAL, Priority.BATCH}
        assert classes[Priority.NORMAL] >= 10


@in_virtual_time
async def test_a_late_batch_does_not_stand_behind_lines_that_have_time(tmp_path: Path) -> None:
    async with a_site(tmp_path, a_node()) as running, chats(running, 8):
        await asyncio.sleep(3.0)
        early = await submit(running, lines(50))
        feeder = running.gateway.background.feeder
        assert feeder is not None
        await until(lambda: feeder.claimed >= 4)
        late = await submit(running, lines(8), completion_window="40s")
        found = await ended(running, late)
        assert found["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
        assert (await show(running, early))["request_counts"]["completed"] == 0


@in_virtual_time
async def test_lines_of_a_key_that_may_have_no_higher_class_wait_and_expire(tmp_path: Path) -> None:
    own = {"class": "batch", "max_class": "batch"}
    async with a_site(tmp_path, a_node(), own=own) as running:
        async with chats(running, 8):
            await asyncio.sleep(3.0)
            began = now()
            found = await ended(running, await submit(running, lines(12), completion_window="20s"))
            took = now() - began
        assert (found["status"], found["request_counts"]["completed"]) == ("expired", 0)
        assert await errors_of(running, found) == {"batch_expired": 12}
        assert 20.0 <= took <= 25.0


@in_virtual_time
async def test_lines_are_raised_to_the_usual_class_of_their_key_and_no_higher(
    tmp_path: Path,
) -> None:
    async with a_site(tmp_path, a_node(), own={"max_class": "urgent"}) as running:
        finished, seen = finished_of(running), set[Priority]()
        async with chats(running, 6):
            await asyncio.sleep(3.0)
            batch = await submit(running, lines(8), completion_window="30s")
            while (await show(running, batch))["status"] in {"validating", "in_progress"}:
                seen.update(queued_of(running))
                await asyncio.sleep(0.2)
        assert Priority.NORMAL in seen
        assert seen <= {Priority.NORMAL, Priority.BATCH}
        assert {one.priority for one in finished} <= {Priority.NORMAL, Priority.BATCH}


@in_virtual_time
async def test_late_lines_and_chats_of_another_key_get_equal_shares(tmp_path: Path) -> None:
    async with a_site(tmp_path, a_node()) as running:
        async with chats(running, 8) as theirs:
            await asyncio.sleep(3.0)
            batch = await submit(running, lines(200), completion_window="60s")
            await until(lambda: queued_of(running))
            before = len(theirs)
            await asyncio.sleep(30.0)
            of_chats = len(theirs) - before
            of_lines = (await show(running, batch))["request_counts"]["completed"]
            await running.client.post(f"/v1/batches/{batch}/cancel", headers=HEADERS)
        assert of_lines + of_chats >= 50
        assert 0.4 <= of_lines / (of_lines + of_chats) <= 0.6


@in_virtual_time
async def test_chats_of_the_same_key_wait_behind_few_late_lines(tmp_path: Path) -> None:
    async with a_site(tmp_path, a_node(4)) as running:
        batch = await submit(running, lines(300), completion_window="60s")
        await until(lambda: queued_of(running))
        most = 0
        async with chats(running, 3, headers=HEADERS) as own:
            for _ in range(100):
                await asyncio.sleep(0.2)
                most = max(most, len(queued_of(running)))
        # An answer takes a second; 3 chats and 2 late lines share 4 slots at most.
        assert len(own) >= 30
        assert max(own) <= 3.0
        assert most <= 5
        assert (await show(running, batch))["request_counts"]["completed"] >= 20


@in_virtual_time
async def test_late_lines_take_an_eighth_of_the_queue_at_most(tmp_path: Path) -> None:
    async with a_site(tmp_path, a_node(32), queue={"max": 16}) as running:
        batch = await submit(running, lines(100, max_tokens=400), completion_window="60s")
        await until(lambda: len(queued_of(running)) == 2)
        for _ in range(30):
            await asyncio.sleep(0.5)
            assert len(queued_of(running)) <= 2
        await running.client.post(f"/v1/batches/{batch}/cancel", headers=HEADERS)
        await until(lambda: not queued_of(running))


@in_virtual_time
async def test_a_line_that_runs_at_the_deadline_is_cut_and_costs_nothing(tmp_path: Path) -> None:
    node = a_node(2)
    limited = {"limits": {"tokens_per_day": 100_000}}
    async with a_site(tmp_path, node, own=limited) as running:
        began = now()
        batch = await submit(running, lines(5, max_tokens=5000), completion_window="20s")
        await until(lambda: node.slots.busy == 2)
        found = await ended(running, batch)
        assert 20.0 <= now() - began <= 25.0
        assert found["status"] == "expired"
        assert found["request_counts"] == {"total": 5, "completed": 0, "failed": 0}
        assert found["llama_gateway"]["expired"] == 5
        assert await errors_of(running, found) == {"batch_expired": 5}
        await until(lambda: node.slots.busy == 0, 5.0)
        assert found["usage"]["total_tokens"] == 0
        limits = (await running.client.get("/v1/usage", headers=HEADERS)).json()["limits"]
        assert [one["used"] for one in limits] == [0], limits
    rows, _ = rows_of(f"sqlite:///{tmp_path}/gateway.db")
    assert [row for row in rows if row["key"] == "k1"] == []


@in_virtual_time
async def test_lines_that_end_before_the_deadline_are_kept_when_others_expire(
    tmp_path: Path,
) -> None:
    async with a_site(tmp_path, a_node(2)) as running:
        batch = await submit(running, lines(100), completion_window="20s")
        found = await ended(running, batch)
        assert found["status"] == "expired"
        done = await output(running, found["output_file_id"])
        gone = await output(running, found["error_file_id"])
        assert 30 <= len(done) <= 45
        assert {one["error"]["code"] for one in gone} == {"batch_expired"}
        ids = [one["custom_id"] for one in (*done, *gone)]
        assert sorted(ids) == sorted(f"line-{number}" for number in range(100))
        assert found["request_counts"]["completed"] == len(done)


@in_virtual_time
async def test_a_paused_batch_takes_its_late_lines_out_of_the_queue(tmp_path: Path) -> None:
    node = a_node(2)
    async with a_site(tmp_path, node) as running:
        async with chats(running, 6, tokens=100):
            await asyncio.sleep(8.0)
            batch = await submit(running, lines(20), completion_window="60s")
            await until(lambda: len(queued_of(running)) == 2)
            answer = await running.client.post(f"/v1/batches/{batch}/pause", headers=HEADERS)
            assert answer.status_code == 200
            await until(lambda: not queued_of(running), 2.0)
            await asyncio.sleep(10.0)
            assert not queued_of(running)
            assert (await show(running, batch))["llama_gateway"]["running"] == 0
        await running.client.post(f"/v1/batches/{batch}/resume", headers=HEADERS)
        found = await ended(running, batch)
        assert found["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


@in_virtual_time
async def test_a_paused_batch_expires_at_its_deadline(tmp_path: Path) -> None:
    async with a_site(tmp_path, a_node(1)) as running:
        began = now()
        batch = await submit(running, lines(50), completion_window="15s")
        await asyncio.sleep(5.0)
        await running.client.post(f"/v1/batches/{batch}/pause", headers=HEADERS)
        found = await ended(running, batch)
        assert found["status"] == "expired"
        assert 15.0 <= now() - began <= 20.0
        assert 3 <= found["request_counts"]["completed"] <= 8


@in_virtual_time
async def test_a_cancelled_batch_takes_its_late_lines_out_of_the_queue(tmp_path: Path) -> None:
    async with a_site(tmp_path, a_node(2)) as running, chats(running, 6, tokens=100):
        await asyncio.sleep(8.0)
        batch = await submit(running, lines(20), completion_window="60s")
        await until(lambda: len(queued_of(running)) == 2)
        await running.client.post(f"/v1/batches/{batch}/cancel", headers=HEADERS)
        found = await ended(running, batch, 10.0)
        assert found["status"] == "cancelled"
        assert not queued_of(running)


@in_virtual_time
async def test_a_line_that_runs_when_its_deadline_comes_near_yields_no_more(
    tmp_path: Path,
) -> None:
    node = a_node(1)
    async with a_site(tmp_path, node) as running:
        # The line takes 40 s of the 100 s that it has; clients want its slot all the time.
        batch = await submit(running, lines(1, max_tokens=800), completion_window="100s")
        await until(lambda: node.slots.busy == 1)
        async with chats(running, 2, tokens=100):
            found = await ended(running, batch, 110.0)
        assert found["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


@in_virtual_time
async def test_a_background_response_ends_at_its_deadline(tmp_path: Path) -> None:
    node = a_node(1)
    async with a_site(
        tmp_path, node, batches={"windows": {"shortest": 5, "default": 20}}
    ) as running:
        began = now()
        body = {"input": "tell", "background": True, "max_output_tokens": 4000}
        made = [
            (await running.client.post("/v1/responses", json=body, headers=HEADERS)).json()
            for _ in range(2)
        ]
        for one in made:
            url = f"/v1/responses/{one['id']}"
            async with asyncio.timeout(60.0):
                while True:
                    found = (await running.client.get(url, headers=HEADERS)).json()
                    if found["status"] not in {"queued", "in_progress"}:
                        break
                    await asyncio.sleep(0.2)
            assert found["status"] == "failed"
            assert "time was over" in found["error"]["message"]
        assert 20.0 <= now() - began <= 25.0
        await until(lambda: node.slots.busy == 0, 5.0)


@in_virtual_time
async def test_a_background_request_of_class_batch_is_not_starved(tmp_path: Path) -> None:
    settings = {"windows": {"shortest": 5, "default": 60}}
    async with a_site(tmp_path, a_node(1), batches=settings) as running, chats(running, 4):
        await asyncio.sleep(2.0)
        body = {"messages": [{"role": "user", "content": "tell"}], "max_tokens": 20}
        headers = {**HEADERS, "prefer": "respond-async", "x-priority": "batch"}
        answer = await running.client.post(CHAT, json=body, headers=headers)
        url = answer.headers["location"]
        async with asyncio.timeout(70.0):
            while True:
                got = await running.client.get(url, headers=HEADERS)
                if got.status_code != 202:
                    break
                await asyncio.sleep(0.5)
        assert got.status_code == 200


@in_virtual_time
async def test_a_gateway_that_is_succeeded_leaves_late_lines_that_wait_to_the_next(
    tmp_path: Path,
) -> None:
    async with a_site(tmp_path, a_node(2)) as running, chats(running, 6, tokens=100):
        await asyncio.sleep(8.0)
        batch = await submit(running, lines(20, max_tokens=100), completion_window="60s")
        feeder = running.gateway.background.feeder
        assert feeder is not None
        await until(lambda: len(queued_of(running)) == 2 and feeder.running > 2)
        running.gateway.background.stop()
        await until(lambda: not queued_of(running), 1.0)
        assert feeder.running > 0
        await asyncio.wait_for(running.gateway.background.drain(), 10.0)
        shown = await show(running, batch)
        assert shown["request_counts"]["completed"] >= 1
        assert shown["llama_gateway"]["running"] == 0


@in_virtual_time
async def test_a_gateway_that_is_succeeded_leaves_waiting_responses_to_the_next(
    tmp_path: Path,
) -> None:
    node = a_node(1)
    async with a_site(tmp_path, node) as running:
        body = {"input": "tell", "background": True, "max_output_tokens": 100}
        made = [
            (await running.client.post("/v1/responses", json=body, headers=HEADERS)).json()
            for _ in range(2)
        ]
        await until(lambda: node.slots.busy == 1 and len(queued_of(running)) == 1)
        running.gateway.background.stop()
        await until(lambda: not queued_of(running), 3.0)
        await asyncio.wait_for(running.gateway.background.drain(), 10.0)
        found = [
            (await running.client.get(f"/v1/responses/{one['id']}", headers=HEADERS)).json()
            for one in made
        ]
        assert sorted(one["status"] in {"queued", "in_progress"} for one in found) == [False, True]
