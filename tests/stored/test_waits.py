"""Why a batch waits, since when, and when it is expected to run and to end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from gateway.lease import BatchRoom
from gateway.store.schema import batches
from gateway.stored.waits import MESSAGES, ServingNodes, why_lines_wait
from tests.emulator import EmulatedNode
from tests.gateways import Running, until
from tests.stored.batch_gateway import (
    HEADERS,
    ended,
    key,
    lines,
    show,
    submit,
    virtual_gateway_over,
)
from tests.virtual import in_virtual_time

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
async def test_a_batch_whose_key_has_reached_its_limit_says_when_it_goes_on(tmp_path: Path) -> None:
    limited = key(limits={"rpm": 2})
    node = EmulatedNode(slots=1, decode_tps=50)
    async with virtual_gateway_over(tmp_path, node, keys=[limited]) as running:
        batch = await submit(running, lines(6))
        own = await why(running, batch)
        told = own["why_waiting"]
        assert told["reason"] == "key_limit"
        assert told["until"] > told["since"]
        assert own["expected_start"] == told["until"]


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
