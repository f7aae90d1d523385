"""`llama-gateway why`: over a running gateway of emulated nodes, and over real servers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.cli.running import Ran, run_beside
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.servers import running_demo_servers

SECRET = "the launch code is 7391, which nobody else may know of or tell "
SETTINGS = {"store": {"url": "off"}, "health": {"interval": 0.2}}


async def ask(gateway: Running, tag: str, tokens: int = 4, repeated: int = 1) -> int:
    messages = [
        {"role": "system", "content": SECRET * repeated},
        {"role": "user", "content": f"Question {tag}?"},
    ]
    response = await gateway.client.post(
        "/v1/chat/completions",
        json={"messages": messages, "max_tokens": tokens, "temperature": 0},
        headers={"x-request-id": tag},
    )
    usage = response.json()["usage"]
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


async def run_why(gateway: Running, *arguments: str) -> Ran:
    ran = await run_beside(gateway, "why", *arguments)
    assert "launch" not in ran.out + ran.err
    return ran


async def test_a_served_request_and_a_waiting_one_are_tables_of_the_nodes(tmp_path: Path) -> None:
    node = EmulatedNode(slots=1, decode_tps=40, prefill_tps=4000)
    async with node, running_gateway(tmp_path, [node.url], SETTINGS) as gateway:
        await ask(gateway, "mine")
        ran = await run_why(gateway, "mine")
        raw = await run_why(gateway, "mine", "--json")
        unknown = await run_why(gateway, "a/b nothing")
        tasks = [asyncio.create_task(ask(gateway, name, 3000)) for name in ("first", "second")]
        await until(lambda: len(gateway.gateway.scheduler.waiters) == 1)
        (waiter,) = gateway.gateway.scheduler.waiters
        waiting = await run_why(gateway, waiter.request.id)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].startswith("mine (req_")
    assert "finished, 200 after" in lines[0]
    head = next(number for number, line in enumerate(lines) if line.startswith("NODE"))
    assert lines[head].split() == [
        *("NODE", "EXPECTED", "QUEUE", "READING", "CACHED", "WRITING"),
        *("NEIGHBOURS", "DOUBT", "SLOTS", "NOTE"),
    ]
    assert "chosen" in lines[head + 1]
    assert any(line.startswith("end") and "ok" in line for line in lines)
    (request,) = json.loads(raw.out)["requests"]
    assert request["summary"] in ran.out
    assert (unknown.status, unknown.out) == (1, "")
    assert "No request 'a/b nothing' is remembered" in unknown.err
    assert waiting.status == 0
    assert ": waiting for" in waiting.out.splitlines()[0]
    for words in ("Place 1 of the queue", "FREE IN", "queued,"):
        assert words in waiting.out


@pytest.mark.smoke
@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_chat_is_explained_with_what_its_server_had_cached(tmp_path: Path) -> None:
    with running_demo_servers(2) as servers:
        nodes = [{"name": f"n{i}", "url": one.url} for i, one in enumerate(servers)]
        async with running_gateway(tmp_path, nodes, SETTINGS) as gateway:
            for number in range(6):
                await ask(gateway, f"before-{number}", 16, repeated=40)
            cached = await ask(gateway, "it", 16, repeated=40)
            shown = (await run_why(gateway, "it")).out
            raw = await run_why(gateway, "it", "--json")
    (request,) = json.loads(raw.out)["requests"]
    (decision,) = request["decisions"]
    chosen = next(one for one in decision["nodes"] if one["chosen"])
    assert chosen["expected_seconds"] == min(one["expected_seconds"] for one in decision["nodes"])
    for one in decision["nodes"]:
        assert sum(one["terms"].values()) == pytest.approx(one["expected_seconds"], abs=0.005)
    predicted, actual = decision["predicted"], decision["actual"]
    assert actual["cached_tokens"] == cached > 100
    assert predicted["cached_tokens"] == pytest.approx(cached, abs=64)
    assert predicted["prompt_tokens"] == pytest.approx(actual["prompt_tokens"], rel=0.2)
    assert request["outcome"]["node"] == decision["node"]
    assert f"{chosen['cached_tokens']} of {predicted['prompt_tokens']}" in shown
