"""`llama-gateway why`: over a running gateway of emulated nodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.tools.cli.running import Ran, run

SECRET = "the launch code is 7391"


@asynccontextmanager
async def a_gateway(folder: Path, count: int = 2) -> AsyncIterator[Running]:
    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(EmulatedNode(slots=1, decode_tps=40, prefill_tps=4000))
            for _ in range(count)
        ]
        yield await stack.enter_async_context(
            running_gateway(folder, [node.url for node in nodes], {"store": {"url": "off"}})
        )


async def ask(gateway: Running, tag: str, tokens: int = 4) -> int:
    response = await gateway.client.post(
        "/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": SECRET}],
            "max_tokens": tokens,
        },
        headers={"x-request-id": tag},
    )
    return response.status_code


async def run_why(gateway: Running, *arguments: str) -> Ran:
    ran = await asyncio.to_thread(run, "why", *arguments, "--admin-url", gateway.admin_url)
    assert "launch" not in ran.out + ran.err
    return ran


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # no config/ of the project here


async def test_a_served_request_is_a_table_of_the_nodes_and_one_of_what_came_of_it(
    tmp_path: Path,
) -> None:
    async with a_gateway(tmp_path) as gateway:
        assert await ask(gateway, "mine") == 200
        ran = await run_why(gateway, "mine")
        raw = await run_why(gateway, "mine", "--json")
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].startswith("mine (req_")
    assert "finished, 200 after" in lines[0]
    head = next(line for line in lines if line.startswith("NODE"))
    assert head.split() == [
        *("NODE", "EXPECTED", "QUEUE", "READING", "CACHED", "WRITING"),
        *("NEIGHBOURS", "DOUBT", "SLOTS", "NOTE"),
    ]
    rows = lines[lines.index(head) + 1 :][:2]
    assert sum("chosen" in row for row in rows) == 1
    assert any(line.startswith("first token") for line in lines)
    assert any(line.startswith("end") and "ok" in line for line in lines)
    assert "EXPECTED is the sum" in ran.out
    (request,) = json.loads(raw.out)["requests"]
    assert request["summary"] in ran.out


async def test_a_waiting_request_shows_its_place_and_the_nodes(tmp_path: Path) -> None:
    async with a_gateway(tmp_path, 1) as gateway:
        tasks = [
            asyncio.create_task(ask(gateway, "first", 3000)),
            asyncio.create_task(ask(gateway, "second", 3000)),
        ]
        await until(lambda: len(gateway.gateway.scheduler.waiters) == 1)
        (waiter,) = gateway.gateway.scheduler.waiters
        ran = await run_why(gateway, waiter.request.id)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert ran.status == 0
    assert ": waiting for" in ran.out.splitlines()[0]
    assert "Place 1 of the queue" in ran.out
    assert "FREE IN" in ran.out
    assert "queued," in ran.out


async def test_an_unknown_id_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    async with a_gateway(tmp_path, 1) as gateway:
        ran = await run_why(gateway, "a/b nothing")
    assert (ran.status, ran.out) == (1, "")
    assert "No request 'a/b nothing' is remembered" in ran.err
    assert "X-Request-ID" in ran.err


def test_no_gateway_is_told() -> None:
    ran = run("why", "x", "--admin-url", "http://127.0.0.1:9")
    assert ran.status == 1
    assert "is it running?" in ran.err
