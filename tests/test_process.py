from __future__ import annotations

from pathlib import Path

import yaml

from gateway.app import Gateway
from gateway.observe.logs import set_up
from gateway.options import Options, read
from gateway.process import serve
from tests.emulator import EmulatedNode


async def test_who_is_told_that_it_serves_may_ask_at_once(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.yaml"
    told: list[tuple[str, ...]] = []

    def on_ready(gateway: Gateway) -> None:
        told.append(gateway.fleet.catalogue.model_names())
        gateway.stop()

    async with EmulatedNode() as node:
        node.faults.next("hang", path="/health", seconds=0.2)
        nodes.write_text(yaml.safe_dump({"nodes": [{"name": "a", "url": node.url}]}))
        options = Options(nodes=nodes, port=0, admin_port=0, state=tmp_path)
        settings, inventory = read(options)
        with (
            (tmp_path / "log").open("wb") as log,
            set_up("info", "json", fd=log.fileno()) as logs,
        ):
            assert await serve(options, settings, inventory, logs, on_ready) == 0
    assert told == [(node.model,)]
