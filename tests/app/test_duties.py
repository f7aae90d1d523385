"""What only one process does of those that share nodes and a store: taken over again and again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.app.assembly import Gateway
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.polling import eventually

ASK = {"input": "tell me a story", "max_output_tokens": 40, "background": True}


@pytest.fixture(autouse=True)
def _no_duties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways without duties, which no cluster gives any."""
    made = Gateway.__init__

    def without_duties(gateway: Gateway, *given: Any, **keys: Any) -> None:
        made(gateway, *given, **keys)
        monkeypatch.setattr(Gateway, "member", "one")
        for runs in (gateway.background.feeder, gateway.background._request_runner):
            assert runs is not None
            runs.leases.is_sole = True

    monkeypatch.setattr(Gateway, "__init__", without_duties)


async def take_over(running: Running) -> None:
    await running.gateway.catch_up()
    running.gateway.begin_duties()


async def begun(running: Running) -> str:
    answer = await running.client.post("/v1/responses", json=ASK)
    return str(answer.json()["id"])


async def until_ended(running: Running, id_: str) -> None:
    async def look() -> bool | None:
        found = (await running.client.get(f"/v1/responses/{id_}")).json()
        return found["status"] == "incomplete" or None

    await eventually(look)


async def test_a_process_without_duties_runs_nothing_and_what_a_deposed_one_ran_is_run_at_once(
    tmp_path: Path,
) -> None:
    node = EmulatedNode(slots=2, decode_tps=4, answer_tokens=1000)
    async with (
        node,
        running_gateway(tmp_path, [node.url]) as first,
        running_gateway(tmp_path, [node.url]) as second,
        asyncio.timeout(50),  # less than a lease
    ):
        id_ = await begun(first)
        for number, running in enumerate((first, second, first, second)):
            assert (node.requests, node.busy) == (number, 0)
            await take_over(running)
            await until(lambda: node.busy == 1)
            await running.gateway.end_duties()
            await until(lambda: node.busy == 0)
        await take_over(second)
        await until(lambda: node.busy == 1)
        await take_over(first)  # The second one does not know that it was deposed.
        await until(lambda: node.requests == 6)
        node.engine.decode_tps = 1e9
        await until_ended(second, id_)
