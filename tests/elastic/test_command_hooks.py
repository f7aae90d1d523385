"""Standby nodes that commands start and stop: real processes, in real time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any

import pytest

from gateway.fleet.node import NodeState
from gateway.tools.local.server import claim_port, claimed_port
from tests.elastic import machine
from tests.elastic.site import MODEL, ask, settings, until_state
from tests.gateways import running_gateway

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass
class Machines:
    """Machines that are off until a hook starts them."""

    folder: Path
    claims: list[socket] = field(default_factory=list)
    """Reserve their ports while they are off."""

    def node(self, name: str) -> dict[str, Any]:
        """Add a machine; its entry in the inventory."""
        self.claims.append(claim_port("127.0.0.1"))
        port = claimed_port(self.claims[-1])
        command = [sys.executable, str(Path(machine.__file__))]
        return {
            "name": name,
            "url": f"http://127.0.0.1:{port}",
            "standby": True,
            "model": MODEL,
            "slots": 2,
            "start": [*command, "start", str(self.folder), str(port)],
            "stop": [*command, "stop", str(self.folder), str(port)],
        }

    def orders(self) -> list[str]:
        """The calls of the hooks, in order."""
        log = self.folder / "orders"
        return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    folder = tmp_path / "machines"
    folder.mkdir()
    made = Machines(folder)
    yield made
    for claim in made.claims:
        machine.end(folder, str(claimed_port(claim)))
        claim.close()


@pytest.mark.smoke
async def test_a_request_that_only_a_standby_node_serves_starts_it_and_waits(
    tmp_path: Path, machines: Machines
) -> None:
    nodes = [machines.node("spare")]
    async with running_gateway(tmp_path, nodes, settings(), wait_ready=False) as running:
        await until_state(running, "spare", NodeState.STANDBY)
        assert (await running.client.get("/ready")).status_code == 200
        answer = await ask(running)
        assert answer.status_code == 200
        assert answer.headers["x-gateway-node"] == "spare"
        await until_state(running, "spare", NodeState.STANDBY)
    assert machines.orders() == ["start", "stop"]
