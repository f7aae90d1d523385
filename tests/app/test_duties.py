"""What only one process does of those that share nodes and a store: taken over again and again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.app.assembly import Gateway
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.polling import eventually

ASK = {"input": "tell me a story", "max_output_tokens": 40, "background": True}


@pytest.fixture(autouse=True)
def _members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gateway, "is_member", True)


async def begun(running: Running) -> str:
    answer = await running.client.post("/v1/responses", json=ASK)
    return str(answer.json()["id"])


async def until_ended(running: Running, id_: str) -> None:
    async def look() -> bool | None:
        found = (await running.client.get(f"/v1/responses/{id_}")).json()
        return found["status"] == "incomplete" or None

    await eventually(look)


async def test_a_process_without_duties_runs_nothing_and_each_that_has_them_goes_on(
    tmp_path: Path,
) -> None:
    node = EmulatedNode(slots=2, decode_tps=4, answer_tokens=1000)
    async with (
        node,
        running_gateway(tmp_path, [node.url]) as first,
        running_gateway(tmp_path, [node.url]) as second,
        asyncio.timeout(60),
    ):
        id_ = await begun(first)
        for number, running in enumerate((first, second, first, second)):
            assert node.requests == number
            assert node.busy == 0
            await running.gateway.begin_duties()
            await until(lambda: node.busy == 1)
            await running.gateway.end_duties()
            await until(lambda: node.busy == 0)
        await second.gateway.begin_duties()
        node.engine.decode_tps = 1e9
        await until_ended(first, id_)


async def test_what_a_process_ran_that_can_tell_nobody_is_run_by_the_next_one_at_once(
    tmp_path: Path,
) -> None:
    node = EmulatedNode(slots=2, decode_tps=4, answer_tokens=1000)
    async with (
        node,
        running_gateway(tmp_path, [node.url]) as first,
        running_gateway(tmp_path, [node.url]) as second,
        asyncio.timeout(50),  # less than a lease
    ):
        await first.gateway.begin_duties()
        id_ = await begun(first)
        await until(lambda: node.busy == 1)
        await second.gateway.begin_duties()  # The first one does not know that it was deposed.
        await until(lambda: node.requests == 2)
        node.engine.decode_tps = 1e9
        await until_ended(second, id_)


async def test_what_others_have_learnt_is_known_to_who_takes_over(tmp_path: Path) -> None:
    node = EmulatedNode(slots=2, decode_tps=1000, answer_tokens=1000)
    async with (
        node,
        running_gateway(tmp_path, [node.url]) as first,
        running_gateway(tmp_path, [node.url]) as second,
        asyncio.timeout(60),
    ):
        key = first.gateway._keyed_hash
        assert key.key != second.gateway._keyed_hash.key
        await first.gateway.begin_duties()
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        assert (await first.client.post("/v1/chat/completions", json=chat)).status_code == 200
        await first.gateway.learnt.save(5.0, whole=True)
        await first.gateway.end_duties()
        await second.gateway.begin_duties()
        assert key.key == second.gateway._keyed_hash.key
