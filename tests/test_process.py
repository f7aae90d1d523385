from __future__ import annotations

from pathlib import Path

import yaml

from gateway.app import Gateway
from gateway.observe.logs import set_up_logging
from gateway.process import serve
from gateway.startup import Options, load_checked
from tests.emulator import EmulatedNode


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
