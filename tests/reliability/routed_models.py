"""A gateway over routers (`llama-server --models-dir`), emulated or real, and their models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gateway.events import AttemptEnded
from gateway.nodes.node import Node
from tests.emulator.router import EmulatedRouter
from tests.forward.proxy_over_nodes import BODIES, Stream
from tests.gateways import Running, running_gateway, until
from tests.polling import eventually
from tests.servers import DemoServer

Router = EmulatedRouter | DemoServer
BY_HAND: dict[str, Any] = {
    "model_placement": {"commands": False},
    "retries": {"backoff": 0.01, "backoff_max": 0.05},
    "health": {"interval": 0.1, "open": 0.3},
}
"""Settings of a gateway that loads nothing: its tests do."""


@dataclass(slots=True)
class RoutedModels:
    """The gateway and its routers, `r1` and so on."""

    running: Running
    routers: tuple[Router, ...]
    _attempts: list[AttemptEnded] = field(default_factory=list)

    @property
    def outcomes(self) -> list[tuple[str, str]]:
        self.running.gateway.bus.flush()
        return [(attempt.node, attempt.outcome) for attempt in self._attempts]

    def forget_attempts(self) -> None:
        self.running.gateway.bus.flush()
        self._attempts.clear()

    def node(self, name: str) -> Node:
        return self.running.gateway.fleet.nodes[name]

    def may_work(self, name: str) -> bool:
        """Whether this instance is known, loaded and takes work."""
        node = self.running.gateway.fleet.nodes.get(name)
        return (
            node is not None
            and node.probe_history.discovered_at is not None
            and node.free_slots(node.clock()) > 0
        )

    async def load(self, name: str) -> None:
        """Load this model by the router's own API, and wait until the gateway knows."""
        router, _, model = name.partition("/")
        await command(self.routers[int(router[1:]) - 1], "load", model)
        await self.running.gateway.fleet.probe(router)
        await until(lambda: self.may_work(name))

    async def ask(self, path: str, **body: Any) -> httpx.Response:
        return await self.running.client.post(path, json={**BODIES.get(path, {}), **body})

    async def stream(self, path: str, **body: Any) -> Stream:
        reply = await self.ask(path, stream=True, **body)
        return Stream(reply.status_code, reply.headers, reply.content)

    async def busy(self, limit: float = 30.0) -> str:
        """The instance that has a request, once its response has begun."""
        busy: list[str] = []

        def look() -> bool:
            attempts = [one.attempt for one in self.running.gateway.registry]
            busy.extend(one.lease.node.name for one in attempts if one and one.content_events > 4)
            return bool(busy)

        await until(look, limit)
        return busy[0]


@asynccontextmanager
async def routed_models(
    folder: Path, *routers: Router, loaded: Iterable[str] = ("r1/a", "r2/a"), **settings: Any
) -> AsyncIterator[RoutedModels]:
    """A gateway over these routers, of which these instances are loaded.

    At the end nothing may be held for any request, and no exception may be in the log.
    """
    async with AsyncExitStack() as stack:
        for router in routers:
            if isinstance(router, EmulatedRouter):
                await stack.enter_async_context(router)
        specs = [
            {"name": f"r{number}", "url": router.url, "host": f"r{number}"}
            for number, router in enumerate(routers, 1)
        ]
        running = await stack.enter_async_context(
            running_gateway(folder, specs, {**BY_HAND, **settings})
        )
        found = RoutedModels(running, routers)
        running.gateway.bus.subscribe(AttemptEnded, found._attempts.append)
        for name in loaded:
            await found.load(name)
        yield found
        await until(lambda: not running.held(), 30.0, running.held)
    log = (folder / "gateway.log").read_text()
    assert "Traceback" not in log, log


async def command(router: Router, verb: str, model: str) -> None:
    wanted = {"load": "loaded", "unload": "unloaded"}[verb]
    async with httpx.AsyncClient(base_url=router.url, trust_env=False) as client:

        async def done() -> bool | None:
            listed = (await client.get("/v1/models")).json()["data"]
            status = next(one["status"] for one in listed if one["id"] == model)
            return status["value"] == wanted or None

        if await done() is None:
            reply = await client.post(f"/models/{verb}", json={"model": model})
            assert reply.status_code == 200, reply.text
            await asyncio.sleep(0)
        await eventually(done)
