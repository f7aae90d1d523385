"""What a gateway has learnt outlasts the end of its process, however it comes."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.emulator import EmulatedNode
from tests.gateway_processes import LIMIT, Succession, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SPEEDS = (25.0, 50.0, 100.0, 400.0)
"""Tokens/s of the nodes; the fastest comes last."""
TOKENS = 12
FIRST = 8
"""Requests after a start that must go to the fastest node."""
IN_A_FILE = {"store": {"url": "off"}}


@asynccontextmanager
async def emulated_nodes() -> AsyncIterator[list[EmulatedNode]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                EmulatedNode(slots=1, decode_tps=tps, answer_tokens=TOKENS)
            )
            for tps in SPEEDS
        ]


def inventory(nodes: Sequence[EmulatedNode]) -> list[dict[str, str]]:
    return [
        {"name": f"at-{tps:.0f}", "url": node.url} for tps, node in zip(SPEEDS, nodes, strict=True)
    ]


async def ask(client: httpx.AsyncClient, text: str) -> str:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"]


async def learn(line: Succession) -> str:
    """Keep all nodes busy until each is measured; returns the id of the last request."""
    async with (
        httpx.AsyncClient(base_url=line.url, trust_env=False, timeout=LIMIT) as client,
        httpx.AsyncClient(base_url=line.admin_url, trust_env=False, timeout=LIMIT) as admin,
        asyncio.timeout(LIMIT),
    ):
        while True:
            await asyncio.gather(*(ask(client, f"Question {n}") for n in range(2 * len(SPEEDS))))
            shown = (await admin.get("/admin/nodes")).json()["nodes"]
            if all(node["decode_tps"] for node in shown):
                return await ask(client, "The last one")


async def until_kept(folder: Path, request_id: str) -> None:
    """Wait until the decisions about this request are in the store or the file."""
    async with asyncio.timeout(LIMIT):
        while request_id not in kept(folder / "state" / "llama-gateway"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def kept(folder: Path) -> str:
    if found := [*folder.glob("learnt-*.json")]:
        assert found[0].stat().st_mode & 0o777 == 0o600
        return found[0].read_text()
    with contextlib.closing(sqlite3.connect(folder / "gateway.db")) as store:
        return " ".join(value for (value,) in store.execute("SELECT value FROM learnt"))


async def took_the_fastest(line: Succession, nodes: Sequence[EmulatedNode]) -> None:
    before = [node.requests for node in nodes]
    async with httpx.AsyncClient(base_url=line.url, trust_env=False, timeout=LIMIT) as client:
        for number in range(FIRST):
            await ask(client, f"Another {number}")
    assert [node.requests - b for node, b in zip(nodes, before, strict=True)] == [0, 0, 0, FIRST]


async def explained(line: Succession, request_id: str) -> Any:
    async with httpx.AsyncClient(base_url=line.admin_url, trust_env=False, timeout=LIMIT) as admin:
        answer = await admin.get(f"/admin/requests/{request_id}/why")
    assert answer.status_code == 200, answer.text
    return answer.json()["requests"][0]["decisions"][-1]


@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, id="store", marks=pytest.mark.smoke), pytest.param(IN_A_FILE, id="file")],
)
async def test_the_first_requests_go_to_the_fastest_node_after_any_end_of_the_process(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    async with emulated_nodes() as nodes:
        async with serving(tmp_path, inventory(nodes), settings=settings) as line:
            last = await learn(line)
        # After SIGTERM, which wrote the rest.
        async with serving(tmp_path, inventory(nodes), settings=settings) as line:
            await took_the_fastest(line, nodes)
            assert (await explained(line, last))["actual"]["completion_tokens"] == TOKENS
            last = await learn(line)
            await until_kept(tmp_path, last)
            await line.kill()
        async with serving(tmp_path, inventory(nodes), settings=settings) as line:
            await took_the_fastest(line, nodes)
            assert (await explained(line, last))["node"] in {f"at-{tps:.0f}" for tps in SPEEDS}
            # What is learnt up to the hand-over is not lost, and its clients go on.
            last = await learn(line)
            await line.succeed()
            await took_the_fastest(line, nodes)
            handed = await explained(line, last)
            assert handed["actual"]["outcome"] == "ok"
            assert not [entry for entry in line.lines if "learnt" in entry["event"]]
