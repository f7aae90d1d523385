"""Lines of batches as a whole gateway runs them, beside other work, and why they wait."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import quantiles
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import update

from gateway.callers.keys import hash_key
from gateway.lease import BatchRoom
from gateway.store.failures import StoreUnavailable
from gateway.store.schema import batches
from gateway.store.store import Store
from gateway.stored.feeder import Feeder
from gateway.stored.waits import MESSAGES, ServingNodes, why_lines_wait
from gateway.terms import Priority
from tests.callers.kills import rows_of
from tests.emulator import EmulatedNode
from tests.gateways import Running, until
from tests.stored.batch_gateway import (
    HEADERS,
    ended,
    gateway_over,
    key,
    lines,
    output,
    show,
    submit,
    virtual_gateway_over,
)
from tests.stored.measure_feeding import Site, chats_beside
from tests.stored.virtual_store import store_in_virtual_time
from tests.virtual import in_virtual_time, now


def counts(batch: dict[str, Any]) -> tuple[int, int, int]:
    """Lines: all, completed, failed."""
    found = batch["request_counts"]
    return found["total"], found["completed"], found["failed"]


def feeder_of(running: Running) -> Feeder:
    feeder = running.gateway.background.feeder
    assert feeder is not None
    return feeder


@pytest.mark.usefixtures("hurried")
async def test_all_lines_of_a_batch_are_run_once(tmp_path: Path) -> None:
    nodes = [EmulatedNode(slots=4) for _ in range(2)]
    async with gateway_over(tmp_path, *nodes) as running:
        batch = await submit(running, lines(40))
        found = await ended(running, batch)
        assert found["status"] == "completed"
        assert counts(found) == (40, 40, 0)
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


@in_virtual_time
async def test_lines_for_an_unknown_model_fail_soon(tmp_path: Path) -> None:
    async with virtual_gateway_over(tmp_path, EmulatedNode()) as running:
        found = await ended(running, await submit(running, lines(50, model="gpt-nothing")))
        assert counts(found) == (50, 0, 50)


@in_virtual_time
async def test_a_gateway_that_ends_puts_back_what_it_runs(tmp_path: Path) -> None:
    async with virtual_gateway_over(tmp_path, EmulatedNode(slots=2, decode_tps=30)) as running:
        batch = await submit(running, lines(20))
        node = running.gateway.fleet.nodes["n0"]
        await until(lambda: node.requests >= 4)
    async with virtual_gateway_over(tmp_path, EmulatedNode(slots=2, decode_tps=30)) as running:
        found = await ended(running, batch, 60.0)
        assert counts(found) == (20, 20, 0)
        results = await output(running, found["output_file_id"])
        assert len({one["custom_id"] for one in results}) == len(results) == 20


@pytest.mark.usefixtures("hurried")
@pytest.mark.slow
async def test_lines_end_while_the_store_is_away_and_are_recorded_later(tmp_path: Path) -> None:
    node = EmulatedNode(slots=2, decode_tps=40)
    async with gateway_over(tmp_path, node) as running:
        batch, feeder = await submit(running, lines(40)), feeder_of(running)
        await until(lambda: node.requests >= 2)
        away = StoreUnavailable("it is away", "wait")
        with patch.object(Store, "run", side_effect=away):
            # Those that were claimed before run to their end.
            await until(lambda: feeder.claimed == feeder.running == node.slots.busy == 0, 20.0)
            assert node.requests < 40
        found = await ended(running, batch)
        assert counts(found) == (40, 40, 0)
        assert node.requests == 40
        log = (tmp_path / "gateway.log").read_text()
        assert log.count('"lines of batches wait"') == 1


@pytest.mark.usefixtures("hurried")
async def test_lines_of_a_paused_model_wait_and_go_on(tmp_path: Path) -> None:
    nodes = [
        EmulatedNode(slots=2),
        EmulatedNode(slots=2, model="other"),
    ]
    async with gateway_over(tmp_path, *nodes) as running:
        fleet = running.gateway.fleet
        fleet.pause_model("demo", paused=True)
        with patch("gateway.errors.PAUSED_RETRY_SECONDS", 0.05):
            paused = await submit(running, lines(20, model="demo"))
            others = await submit(running, lines(20, model="other"))
            assert (await ended(running, others))["request_counts"]["completed"] == 20
            found = await show(running, paused)
            assert found["status"] == "in_progress"
            assert counts(found) == (20, 0, 0)
            fleet.pause_model("demo", paused=False)
            assert (await ended(running, paused))["request_counts"]["completed"] == 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("site", "lines_beside", "words", "busy"),
    [
        pytest.param(Site(2, 4, 0.25), 200, 300, 6.0, id="long prompts"),
        pytest.param(Site(4, 2, 0.5, line_words=300), 100, 0, 4.0, id="as many nodes as chats"),
    ],
)
@in_virtual_time
async def test_chats_do_not_notice_the_lines_of_a_batch_beside_them(
    site: Site, lines_beside: int, words: int, busy: float
) -> None:
    alone, busy_alone = await chats_beside(site, 0, words, 30)
    beside, busy_beside = await chats_beside(site, lines_beside, words, 30)
    assert busy_beside > busy > busy_alone
    assert quantiles(beside, n=20)[-1] <= 1.25 * quantiles(alone, n=20)[-1]


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
    with store_in_virtual_time(), patch("gateway.app.background.time", wall):
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


def queued_of(running: Running, caller: str = "k1") -> list[Priority]:
    """The classes in which requests of a caller wait."""
    waiters = running.gateway.scheduler.waiters
    return [one.request.caller.priority for one in waiters if one.request.caller.id == caller]


async def responded_later(running: Running, body: dict[str, Any]) -> str:
    """The id of a new response in the background."""
    made = await running.client.post("/v1/responses", json=body, headers=HEADERS)
    return str(made.json()["id"])


async def response(running: Running, id_: str) -> dict[str, Any]:
    found = await running.client.get(f"/v1/responses/{id_}", headers=HEADERS)
    shown: dict[str, Any] = found.json()
    return shown


@in_virtual_time
async def test_lines_whose_folder_is_away_wait_and_go_on(tmp_path: Path) -> None:
    node = a_node(1)
    async with a_site(tmp_path, node) as running:
        batch = await submit(running, lines(6))
        await until(lambda: node.requests == 2)
        folder, away = tmp_path / "state/batches", tmp_path / "away"
        folder.rename(away)
        folder.mkdir(mode=0o700)
        await asyncio.sleep(10.0)
        assert node.requests == 2
        folder.rmdir()
        away.rename(folder)
        found = await ended(running, batch, 120.0)
        assert counts(found) == (6, 6, 0)
        assert node.requests == 6


@in_virtual_time
async def test_lines_are_raised_to_the_usual_class_of_their_key_and_no_higher(
    tmp_path: Path,
) -> None:
    async with a_site(tmp_path, a_node(), own={"max_class": "urgent"}) as running:
        seen = set[Priority]()
        async with chats(running, 6):
            await asyncio.sleep(3.0)
            batch = await submit(running, lines(8), completion_window="30s")
            while (await show(running, batch))["status"] in {"validating", "in_progress"}:
                seen.update(queued_of(running))
                await asyncio.sleep(0.2)
        assert Priority.NORMAL in seen
        assert seen <= {Priority.NORMAL, Priority.BATCH}


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
        assert counts(found) == (5, 0, 0)
        assert found["llama_gateway"]["expired"] == 5
        errors = await output(running, found["error_file_id"])
        assert [one["error"]["code"] for one in errors] == ["batch_expired"] * 5
        await until(lambda: node.slots.busy == 0, 5.0)
        assert found["usage"]["total_tokens"] == 0
        limits = (await running.client.get("/v1/usage", headers=HEADERS)).json()["limits"]
        assert [one["used"] for one in limits] == [0], limits
    rows, _ = rows_of(f"sqlite:///{tmp_path}/gateway.db")
    assert [row for row in rows if row["key"] == "k1"] == []


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
        assert counts(found) == (20, 20, 0)


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
        assert counts(found) == (1, 1, 0)


@in_virtual_time
async def test_a_background_response_ends_at_its_deadline(tmp_path: Path) -> None:
    node = a_node(1)
    async with a_site(
        tmp_path, node, batches={"windows": {"shortest": 5, "default": 20}}
    ) as running:
        began = now()
        body = {"input": "tell", "background": True, "max_output_tokens": 4000}
        for id_ in [await responded_later(running, body) for _ in range(2)]:
            while (found := await response(running, id_))["status"] in {"queued", "in_progress"}:
                assert now() - began < 60.0
                await asyncio.sleep(0.2)
            assert found["status"] == "failed"
            assert "time was over" in found["error"]["message"]
        assert 20.0 <= now() - began <= 25.0
        await until(lambda: node.slots.busy == 0, 5.0)


@in_virtual_time
async def test_a_gateway_that_is_succeeded_leaves_late_lines_that_wait_to_the_next(
    tmp_path: Path,
) -> None:
    async with a_site(tmp_path, a_node(2)) as running, chats(running, 6, tokens=100):
        await asyncio.sleep(8.0)
        batch = await submit(running, lines(20, max_tokens=100), completion_window="60s")
        feeder = feeder_of(running)
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
        made = [await responded_later(running, body) for _ in range(2)]
        await until(lambda: node.slots.busy == 1 and len(queued_of(running)) == 1)
        running.gateway.background.stop()
        await until(lambda: not queued_of(running), 3.0)
        await asyncio.wait_for(running.gateway.background.drain(), 10.0)
        found = [await response(running, id_) for id_ in made]
        assert sorted(one["status"] in {"queued", "in_progress"} for one in found) == [False, True]


ROOM = BatchRoom(4, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("states", "is_paused", "room", "running", "reason"),
    [
        ({"ready": 1}, True, ROOM, 0, "model_paused"),
        ({"down": 2, "starting": 1}, False, ROOM, 0, "no_node"),
        ({}, False, ROOM, 0, "no_node"),
        ({"unloaded": 2, "down": 1}, False, ROOM, 0, "model_not_loaded"),
        ({"failed": 1}, False, ROOM, 0, "model_not_loaded"),
        ({"loading": 1, "unloaded": 1}, False, ROOM, 0, "model_loading"),
        ({"ready": 1}, False, BatchRoom(0, 0, 0, 0, 0), 0, "slots_reserved"),
        ({"degraded": 1, "down": 9}, False, ROOM, 0, "callers_first"),
        ({"ready": 1}, False, ROOM, 3, "other_batches"),
    ],
)
def test_lines_wait_for_what_holds_them_up_first(
    states: dict[str, int], is_paused: bool, room: BatchRoom, running: int, reason: str
) -> None:
    nodes = ServingNodes(states, 1.0, 1.0)
    assert why_lines_wait(nodes, room, running, model_paused=is_paused) == reason
    assert reason in MESSAGES


async def why(running: Running, batch: str) -> dict[str, Any]:
    """What the batch waits for, once it does."""
    async with asyncio.timeout(60.0):
        while True:
            own = (await show(running, batch))["llama_gateway"]
            if own["why_waiting"] is not None and own["why_waiting"]["reason"] != "validating":
                found: dict[str, Any] = own
                return found
            await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def callers_at_work(running: Running, number: int) -> AsyncIterator[None]:
    """So many chats run or wait."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4000}
    asking = [
        asyncio.create_task(
            running.client.post(
                "/v1/chat/completions",
                json={**body, "temperature": index},
                headers=HEADERS | {"x-priority": "normal"},
            )
        )
        for index in range(number)
    ]
    try:
        await until(lambda: len(running.gateway.registry) >= number)
        yield
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


@pytest.mark.usefixtures("hurried")
@in_virtual_time
async def test_a_starved_batch_says_since_when_callers_go_first_and_when_it_starts(
    tmp_path: Path,
) -> None:
    node = EmulatedNode(slots=2, decode_tps=20, answer_tokens=2000)
    async with virtual_gateway_over(tmp_path, node, keys=[key(max_class="normal")]) as running:
        # What the node does in a second is known.
        first = await submit(running, lines(8))
        assert (await ended(running, first))["llama_gateway"]["why_waiting"] is None
        async with callers_at_work(running, 3):
            batch = await submit(running, lines(4))
            own = await why(running, batch)
            told = own["why_waiting"]
            assert told["reason"] == "callers_first"
            assert told["message"] == MESSAGES["callers_first"]
            assert told["until"] is None
            await asyncio.sleep(3.0)
            later = (await show(running, batch))["llama_gateway"]
            assert later["why_waiting"]["since"] == told["since"], "it has waited all the time"
            # Two of three chats run for 100 s: then there is a slot that nobody waits for.
            assert own["expected_start"] is not None
            assert own["expected_end"] > own["expected_start"]
            assert own["expected_by"] == "nodes"
            listed = await running.client.get("/v1/batches", headers=HEADERS)
            (shown, _) = listed.json()["data"]
            assert shown["llama_gateway"]["why_waiting"] == told
        found = await ended(running, batch)
        assert found["request_counts"]["completed"] == 4
        assert found["llama_gateway"]["why_waiting"] is None


@pytest.mark.usefixtures("hurried")
@in_virtual_time
async def test_a_paused_batch_and_one_of_a_paused_model_say_so(tmp_path: Path) -> None:
    node = EmulatedNode(slots=1, decode_tps=10)
    async with virtual_gateway_over(tmp_path, node) as running:
        running.gateway.fleet.pause_model(node.model, paused=True)
        batch = await submit(running, lines(4))
        assert (await why(running, batch))["why_waiting"]["reason"] == "model_paused"
        answer = await running.client.post(f"/v1/batches/{batch}/pause", headers=HEADERS)
        own = answer.json()["llama_gateway"]
        assert own["why_waiting"]["reason"] == "paused"
        assert own["why_waiting"]["since"] == own["paused"]["at"]


@pytest.mark.usefixtures("hurried")
@in_virtual_time
async def test_a_batch_of_another_folder_says_where_its_files_are(tmp_path: Path) -> None:
    async with virtual_gateway_over(tmp_path, EmulatedNode()) as running:
        batch, store = await submit(running, lines(4)), running.gateway.store
        await ended(running, batch)
        elsewhere = {"folder": "another", "state": "in_progress", "ended_at": None}
        assert store is not None
        await store.run(lambda connection: connection.execute(update(batches).values(elsewhere)))
        # Another gateway of the store may run it.
        assert (await show(running, batch))["llama_gateway"]["why_waiting"] is None
        # In a cluster the leader alone runs batches, and hears which folder each member has.
        registry = running.gateway.background.batches
        assert registry is not None
        assert registry.upkeep.waits is not None
        there: list[bool] = []
        registry.upkeep.waits.is_folder_there = lambda _: there[-1]
        for is_there, reason in ((True, "folder_elsewhere"), (False, "folder_gone")):
            there.append(is_there)
            told = (await show(running, batch))["llama_gateway"]["why_waiting"]
            assert (told["reason"], told["since"]) == (reason, None)
