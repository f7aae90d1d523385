from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.emulator import EmulatedNode
from tests.gateway_processes import serving
from tests.tools.cli.admin_api import admin_api
from tests.tools.cli.running import run_process


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


def test_a_gateway_without_a_live_view_is_told_with_a_remedy() -> None:
    with admin_api() as api:
        ran = run_process(["top", "--once", "--admin-url", api.url])
    assert ran.status == 1
    assert "older version" in ran.err


def test_no_gateway_is_told_with_a_remedy() -> None:
    ran = run_process(["top", "--admin-url", "http://127.0.0.1:9"])
    assert ran.status == 1
    assert "is it running?" in ran.err
