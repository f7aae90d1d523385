from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path

import pytest
import yaml

from gateway.app.assembly import Gateway, serve
from gateway.app.event_loop import DUE_AFTER, GARBAGE_SECONDS, collect_garbage
from gateway.app.startup import Options, load_checked
from gateway.watch.logs import set_up_logging
from tests.emulator import EmulatedNode
from tests.virtual import in_virtual_time


async def test_requests_are_served_as_soon_as_the_gateway_is_ready(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.yaml"
    result: list[tuple[str, ...]] = []

    def on_ready(gateway: Gateway) -> None:
        result.append(gateway.fleet.model_index.model_names())
        gateway.stop()

    async with EmulatedNode() as node:
        node.faults.next("hang", path="/health", seconds=0.2)
        nodes.write_text(yaml.safe_dump({"nodes": [{"name": "a", "url": node.url}]}))
        options = Options(inventory_file=nodes, port=0, admin_port=0, state_dir=tmp_path)
        settings, inventory = load_checked(options)
        with (
            (tmp_path / "log").open("wb") as log,
            set_up_logging("info", "json", fd=log.fileno()) as logs,
        ):
            assert await serve(options, settings, inventory, logs, on_ready) == 0
    assert result == [(node.model,)]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="collects all garbage in steps")
@in_virtual_time
async def test_garbage_of_all_ages_is_collected_once_no_request_runs() -> None:
    def collections() -> int:
        return int(gc.get_stats()[2]["collections"])

    idle = False
    gc.freeze()
    collecting = asyncio.create_task(collect_garbage(lambda: idle))
    before = collections()
    try:
        for _ in range(DUE_AFTER):
            gc.collect(1)
        await asyncio.sleep(3 * GARBAGE_SECONDS)
        assert collections() == before
        idle = True
        await asyncio.sleep(3 * GARBAGE_SECONDS)
        assert collections() == before + 1, "once, not at each look"
    finally:
        collecting.cancel()
        gc.unfreeze()
