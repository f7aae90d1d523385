from __future__ import annotations

import asyncio
import json
from pathlib import Path

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
