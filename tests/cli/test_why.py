"""`llama-gateway why`: over a running gateway of emulated nodes, and over real servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Ran, run
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.servers import running_demo_servers

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
        json={"messages": [{"role": "user", "content": SECRET}], "max_tokens": tokens},
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
        unknown = await run_why(gateway, "a/b nothing")
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
    assert (unknown.status, unknown.out) == (1, "")
    assert "No request 'a/b nothing' is remembered" in unknown.err
    assert "X-Request-ID" in unknown.err


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


# Real servers.


def real(test: Any) -> Any:
    """Mark a test that starts real servers."""
    return pytest.mark.real(pytest.mark.slow(pytest.mark.timeout(600)(test)))


SYSTEM = "You answer at length and with care, one step after the other. " * 40
SETTINGS = {"store": {"url": "off"}, "health": {"interval": 0.2}}


async def chat(gateway: Running, tag: str, question: str, tokens: int = 16) -> dict[str, Any]:
    """The usage of a streamed chat."""
    body = {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: dict[str, Any] = {}
    request = gateway.client.stream(
        "POST", "/v1/chat/completions", json=body, headers={"x-request-id": tag}
    )
    async with request as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                usage = event.get("usage") or usage
    return usage


async def explained(gateway: Running, tag: str) -> dict[str, Any]:
    ran = await run_why(gateway, tag, "--json")
    assert "with care" not in ran.out
    (request,) = json.loads(ran.out)["requests"]
    found: dict[str, Any] = request
    return found


@pytest.mark.smoke
@real
async def test_a_chat_is_explained_with_what_its_server_had_cached(tmp_path: Path) -> None:
    with running_demo_servers(2) as servers:
        nodes = [{"name": f"n{i}", "url": one.url} for i, one in enumerate(servers)]
        async with running_gateway(tmp_path, nodes, SETTINGS) as gateway:
            for number in range(6):
                await chat(gateway, f"before-{number}", f"Question {number}?")
            usage = await chat(gateway, "it", "And what about the last one?")
            request = await explained(gateway, "it")
            shown = (await run_why(gateway, "it")).out
    (decision,) = request["decisions"]
    assert {one["name"] for one in decision["nodes"]} == {"n0", "n1"}
    chosen = next(one for one in decision["nodes"] if one["chosen"])
    assert chosen["expected_seconds"] == min(one["expected_seconds"] for one in decision["nodes"])
    for one in decision["nodes"]:
        assert sum(one["terms"].values()) == pytest.approx(one["expected_seconds"], abs=0.005)
    assert chosen["measured"] is True
    predicted, actual = decision["predicted"], decision["actual"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert actual["prompt_tokens"] == usage["prompt_tokens"]
    assert actual["completion_tokens"] == usage["completion_tokens"]
    assert actual["cached_tokens"] == cached > 100
    assert predicted["cached_tokens"] == pytest.approx(cached, abs=64)
    assert predicted["prompt_tokens"] == pytest.approx(usage["prompt_tokens"], rel=0.2)
    assert 0 < actual["ttft"] <= actual["seconds"]
    assert request["outcome"]["node"] == decision["node"]
    assert f"{chosen['cached_tokens']} of {predicted['prompt_tokens']}" in shown


@real
async def test_a_stream_whose_server_is_killed_tells_both_attempts(tmp_path: Path) -> None:
    with running_demo_servers(2) as servers:
        nodes = [{"name": f"n{i}", "url": one.url} for i, one in enumerate(servers)]
        async with running_gateway(tmp_path, nodes, SETTINGS) as gateway:
            task = asyncio.create_task(chat(gateway, "it", "Tell me all.", tokens=600))
            grants = gateway.gateway.scheduler.decision_log.grants
            await until(lambda: bool(grants) and grants[-1].first_content_at is not None)
            comparison = grants[-1].comparison
            assert comparison is not None
            name = comparison.chosen.name
            servers[int(name[1:])].kill()
            await asyncio.wait_for(task, 120)
            request = await explained(gateway, "it")
    first, second = (one for one in request["decisions"] if one["kind"] == "granted")
    assert (first["node"], first["actual"]["outcome"] == "ok") == (name, False)
    assert (second["resumes"], second["node"] != name) == (True, True)
    assert second["actual"]["outcome"] == "ok"
    assert request["state"] == "finished"
