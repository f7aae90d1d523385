"""A cloud that starts and stops machines by HTTP calls: `POST /start/NAME`, `/stop/NAME`.

The machines are emulated nodes in this process, so that all of it can run in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from socket import socket
from typing import Any

import httpx

from gateway.local.server import claim_port, claimed_port
from gateway.nodes.node import NodeState
from tests.emulator import EmulatedNode
from tests.gateways import Running, until
from tests.transport.raw import Peer, raw_server

MODEL = "demo"
HOST = "127.0.0.1"
BOOT = 0.7
"""Seconds from a call until the server listens."""
ELASTIC = {
    "start_above": 0.2, "start_after": 0.2, "stop_after": 1.0, "cooldown": 0.2, "backoff": 0.5
}  # fmt: skip


@dataclass(slots=True)
class Machine:
    """A machine that is off until it is started. It records its calls in `orders`."""

    options: dict[str, Any]
    claim: socket
    """Reserves its port while it is off."""
    orders: list[str] = field(default_factory=list)
    answers: dict[str, tuple[float, int, str]] = field(default_factory=dict)
    """For `start` or `stop`: an answer (seconds, status, body) that replaces the action."""
    _node: EmulatedNode | None = None
    _booting: asyncio.Task[None] | None = None

    async def obey(self, order: str) -> tuple[int, str]:
        """Status and body of the answer."""
        self.orders.append(order)
        if order in self.answers:
            seconds, status, body = self.answers[order]
            await asyncio.sleep(seconds)
            return status, body
        if order == "start":
            self._booting = asyncio.create_task(self._boot())
        else:
            await self.end()
        return 200, "as you like"

    async def _boot(self) -> None:
        await asyncio.sleep(BOOT)
        port = claimed_port(self.claim)
        self._node = await EmulatedNode(port=port, model=MODEL, **self.options).__aenter__()

    async def end(self) -> None:
        """Stop it, even while it starts."""
        if self._booting is not None:
            self._booting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._booting
        if self._node is not None:
            await self._node.__aexit__()
            self._node = None


@dataclass(slots=True)
class Cloud:
    """Its machines by name, to which a test adds."""

    port: int = 0
    machines: dict[str, Machine] = field(default_factory=dict)

    def machine(self, name: str, **options: Any) -> Machine:
        """Add a machine; `options` are those of the emulated node."""
        made = self.machines[name] = Machine(options, claim_port(HOST))
        return made

    def node(self, name: str, **keys: Any) -> dict[str, Any]:
        """A machine's entry in the inventory, with these further keys."""
        hook = f"http://{HOST}:{self.port}"
        return {
            "name": name,
            "url": f"http://{HOST}:{claimed_port(self.machines[name].claim)}",
            "standby": True,
            "model": MODEL,
            "slots": 2,
            "start": {"url": f"{hook}/start/{name}"},
            "stop": {"url": f"{hook}/stop/{name}"},
            **keys,
        }

    async def called(self, peer: Peer) -> None:
        _, order, name = (await peer.request()).split()[1].decode().split("/")
        status, body = await self.machines[name].obey(order)
        head = f"HTTP/1.1 {status} Whatever\r\nContent-Length: {len(body)}\r\n"
        await peer.say(f"{head}Connection: close\r\n\r\n{body}".encode())


@contextlib.asynccontextmanager
async def a_cloud() -> AsyncIterator[Cloud]:
    cloud = Cloud()
    async with raw_server(cloud.called) as server:
        cloud.port = server.port
        yield cloud
    for machine in cloud.machines.values():
        await machine.end()
        machine.claim.close()


# A gateway over standby nodes.


def settings(**elastic: Any) -> dict[str, Any]:
    """Settings with short times, except for probes: a machine that is off refuses them at once."""
    health = {"interval": 0.1, "timeout": 20.0, "slow_start": 0, "discover_interval": 0.5}
    return {"health": health, "elastic": ELASTIC | elastic}


async def ask(running: Running, text: str = "hello", tokens: int = 8) -> httpx.Response:
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL, "messages": messages, "max_tokens": tokens}
    return await running.client.post("/v1/chat/completions", json=body)


async def shown(running: Running, name: str) -> Mapping[str, Any]:
    found: dict[str, Any] = (await running.admin.get(f"/admin/nodes/{name}")).json()
    return found


async def order(running: Running, path: str) -> None:
    """Call the admin API as an operator does: `nodes/NAME/drain`, `reload`, ..."""
    (await running.admin.post(f"/admin/{path}")).raise_for_status()


async def until_state(running: Running, name: str, state: NodeState) -> None:
    node = running.gateway.fleet.nodes[name]
    await until(lambda: node.state is state, 60.0, lambda: f"{name} is {node.state}: {node.reason}")
