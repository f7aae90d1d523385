"""A gateway without a store over given specifications of nodes, which are probed often."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp

from gateway.admin.app import caller_page
from gateway.config.inventory import NodeSpec
from gateway.events import RequestRecord
from gateway.nodes.node import Node
from gateway.web.site import Site, public_app
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.nodes.build import QUICK, a_spec

CHAT = "/v1/chat/completions"
PROBE_LIMIT = 30.0
"""Seconds; generous, as a slow machine must not make a node look down."""


class BareGateway:
    """A gateway that serves, and the records of its requests."""

    def __init__(self, running: Running) -> None:
        gateway = running.gateway
        self.bus, self.clock, self.settings = gateway.bus, gateway.clock, gateway.settings
        self.fleet, self.scheduler = gateway.fleet, gateway.scheduler
        self.registry, self.handler = gateway.registry, gateway.handler
        self.config_files, self.key_sync = gateway.config_files, gateway.key_sync
        usage = gateway.metering.caller_usage()
        site = Site(self.handler, self.fleet, usage, None, caller_page(), created=0)
        self.site: ASGIApp = public_app(site)
        self.public, self.admin = running.client, running.admin
        self.ended: list[RequestRecord] = []
        self.bus.subscribe(RequestRecord, self.ended.append)

    def __getitem__(self, name: str) -> Node:
        return self.fleet.nodes[name]

    async def until(self, condition: Callable[[], bool], limit: float = 30.0) -> None:
        await until(condition, limit)

    async def chat(self, text: str = "Hello", **body: Any) -> httpx.Response:
        headers = body.pop("headers", {})
        messages = [{"role": "user", "content": text}]
        return await self.public.post(CHAT, json={"messages": messages, **body}, headers=headers)


@asynccontextmanager
async def bare_gateway(
    *nodes: NodeSpec | EmulatedNode,
    settings: dict[str, Any] | None = None,
    admin_key: str | None = None,
    folder: Path | None = None,
    probed: bool = True,
    **health: Any,
) -> AsyncIterator[BareGateway]:
    """A gateway over these nodes; emulated ones are named a, b, c, ..., by their place.

    `folder`: for its state; `probed`: wait for the first probes.
    """
    async with AsyncExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        specs = [
            a_spec("abcdefgh"[place], (await stack.enter_async_context(node)).url)
            if isinstance(node, EmulatedNode)
            else node
            for place, node in enumerate(nodes)
        ]
        options: dict[str, Any] = {"state_dir": folder or own}
        if admin_key is not None:
            options["admin_key_file"] = own / "admin.key"
            options["admin_key_file"].write_text(admin_key)
        probes = {"health": QUICK | {"timeout": PROBE_LIMIT} | health}
        chosen = {"store": {"url": "off"}, **probes, **(settings or {})}
        entries = [as_written(spec, own) for spec in specs]
        running = await stack.enter_async_context(
            running_gateway(own, entries, chosen, wait_ready=False, rng=random.Random(7), **options)
        )
        running.gateway.version = "1.2.3"
        if probed:
            async with asyncio.timeout(30):
                await running.gateway.fleet.first_probes_done.wait()
        yield BareGateway(running)


def as_written(spec: NodeSpec, folder: Path) -> dict[str, Any]:
    """The node's entry in the inventory, with its key in a file of this folder."""
    entry = spec.model_dump(mode="json", exclude_unset=True)
    if "models" in entry:
        entry["model"] = entry.pop("models")
    if spec.api_key is not None:
        entry["api_key_file"] = f"{spec.name}.key"
        (folder / entry["api_key_file"]).write_text(spec.api_key.get_secret_value())
    return entry


def error_of(response: httpx.Response) -> dict[str, Any]:
    """OpenAI's error object; its code must equal `X-Gateway-Reason`."""
    error: dict[str, Any] = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert response.headers["x-gateway-reason"] == error["code"]
    return error
