"""`llama-gateway why` over real llama.cpp servers: what it says is what happened."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateways import Running, running_gateway, until
from tests.servers import running_demo_servers
from tests.tools.cli.running import Ran, run

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

SYSTEM = "You answer at length and with care, one step after the other. " * 40
SETTINGS = {"store": {"url": "off"}, "health": {"interval": 0.2}}


async def chat(gateway: Running, tag: str, question: str, tokens: int = 16) -> dict[str, Any]:
    """The usage of a streamed chat."""
    body = {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question},
        ],
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


async def run_why(gateway: Running, *arguments: str) -> Ran:
    ran = await asyncio.to_thread(run, "why", *arguments, "--admin-url", gateway.admin_url)
    assert (ran.status, ran.err) == (0, "")
    assert "with care" not in ran.out
    return ran


async def explained(gateway: Running, tag: str) -> dict[str, Any]:
    (request,) = json.loads((await run_why(gateway, tag, "--json")).out)["requests"]
    found: dict[str, Any] = request
    return found


@pytest.mark.smoke
async def test_a_chat_is_explained_with_what_its_server_had_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
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


async def test_a_stream_whose_server_is_killed_tells_both_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
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
