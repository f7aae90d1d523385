from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.running import run_process
from tests.emulator import EmulatedNode
from tests.gateway_processes import serving


@pytest.mark.smoke
@pytest.mark.slow
async def test_in_a_pipe_the_state_is_printed_once(tmp_path: Path) -> None:
    async with EmulatedNode(model="demo") as node, serving(tmp_path, node) as gateway:
        where = ("--admin-url", gateway.admin_url)
        text = await asyncio.to_thread(run_process, ["top", *where])
        assert (text.status, text.err) == (0, "")
        assert "1 of 1 nodes work" in text.out
        assert "ready" in text.out.split("NODE")[1]
        as_json = await asyncio.to_thread(run_process, ["top", "--json", *where])
        value = json.loads(as_json.out)
        assert [node["name"] for node in value["nodes"]] == ["one"]
        assert value["requests"] == []


@pytest.mark.slow
async def test_the_queue_is_printed_too(tmp_path: Path) -> None:
    async with (
        EmulatedNode(model="demo", slots=1, decode_tps=5, answer_tokens=1000) as node,
        serving(tmp_path, node) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as client,
        asyncio.TaskGroup() as group,
    ):
        body = {"messages": [{"role": "user", "content": "hi"}]}
        asking = [
            group.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(2)
        ]
        where = ("--admin-url", gateway.admin_url)
        value: dict[str, Any] = {"waiting": []}
        async with asyncio.timeout(60):
            while not value["waiting"]:
                ran = await asyncio.to_thread(run_process, ["top", "--json", *where])
                value = json.loads(ran.out)
        text = await asyncio.to_thread(run_process, ["top", *where])
        for task in asking:
            task.cancel()
    assert [(one["class"], one["model"]) for one in value["waiting"]] == [("normal", "demo")]
    assert text.out.split("PLACE")[1].split("\n")[1].split()[:2] == ["1", "normal"]
