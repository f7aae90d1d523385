"""A whole gateway for tests, in this process: real listeners on free ports, real files."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from gateway.app.assembly import DEFAULT_TIMINGS, Gateway, Timings
from gateway.app.startup import Options, load_checked
from gateway.callers.keys import ApiKey
from gateway.nodes.node import NodeState
from gateway.store.database import (
    FILE_NAME,
    THIS_PROGRAM,
    connect,
    disconnect,
    locate_store,
    make_tables,
    transaction,
)
from gateway.transport.resolver import Resolver
from gateway.watch.logs import set_up_logging
from tests.emulator import EmulatedNode
from tests.virtual import VirtualLoop, now

CHAT = "/v1/chat/completions"
START_LIMIT = 60.0
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of plain HTTP: loading the machine's certificates takes 15 ms each time."""
PATIENT = {"timeout": 30.0}
"""The default for `health` in real time: a machine that is suspended for some seconds must not make
a node look down."""

QUIET = {"defaults": {"calibrate": False}}
"""For inventories: their nodes get no requests but those of the test."""


@dataclass(slots=True)
class Running:
    """A gateway that serves."""

    gateway: Gateway
    url: str
    admin_url: str
    nodes_file: Path
    settings_file: Path
    client: httpx.AsyncClient
    """Speaks to the public listener; relative URLs."""
    admin: httpx.AsyncClient
    """Speaks to the admin listener likewise."""

    async def chat(
        self, key: ApiKey | str = "", headers: Mapping[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        """A chat with this key, or without one."""
        text = key if isinstance(key, str) else key.text
        own = {"authorization": f"Bearer {text}"} if text else {}
        asked = {"messages": [{"role": "user", "content": "Hello"}], **body}
        return await self.client.post(CHAT, json=asked, headers={**own, **(headers or {})})

    def held(self) -> dict[str, int]:
        """All counts of what is held for requests that are not zero."""
        gateway = self.gateway
        counts = {
            "requests": len(gateway.registry),
            "waiting": len(gateway.scheduler.queue_positions()),
            "bodies": gateway.handler.body_memory.total_bytes,
            "shares of bodies": gateway.handler.body_memory.allocation_count,
            "editors": len(gateway.handler.latest_edits),
            "in line": gateway.scheduler.dispatcher.waiting,
            "watched": len(gateway.timeout_monitor),
        }
        for node in gateway.fleet.nodes.values():
            counts[f"leased by {node.name}"] = node.leased
            counts[f"leases of {node.name}"] = len(node.leases)
        return {name: count for name, count in counts.items() if count}

    def write_nodes(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """Replace the inventory as an editor does: by a rename."""
        _write(self.nodes_file, {**QUIET, "nodes": [dict(node) for node in nodes]})

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Replace the settings likewise."""
        _write(self.settings_file, _patient(settings))


@contextlib.asynccontextmanager
async def running_gateway(
    folder: Path,
    nodes: Sequence[str | Mapping[str, Any] | EmulatedNode],
    settings: Mapping[str, Any] | None = None,
    *,
    wait_ready: bool = True,
    clock: Callable[[], float] = now,
    rng: random.Random | None = None,
    timings: Timings = DEFAULT_TIMINGS,
    resolver: Resolver | None = None,
    **options: Any,
) -> AsyncIterator[Running]:
    """A gateway over these nodes (URLs, or mappings as in `nodes.yaml`) and settings.

    Emulated nodes are started before it and ended after it. `options` are those of
    `gateway.app.startup.Options`. With `wait_ready` it is entered once every node has been probed
    and one at least is ready.
    """
    async with contextlib.AsyncExitStack() as stack:
        specs: list[Mapping[str, Any]] = []
        for number, node in enumerate(nodes):
            if isinstance(node, Mapping):
                specs.append(dict(node))
                continue
            if isinstance(node, EmulatedNode):
                await stack.enter_async_context(node)
            url = node if isinstance(node, str) else node.url
            specs.append({"name": f"node-{number}", "url": url})
        nodes_file, settings_file = folder / "nodes.yaml", folder / "gateway.yaml"
        _write(nodes_file, {**QUIET, "nodes": specs})
        _write(settings_file, _patient(settings or {}))
        if not options and "store" not in (settings or {}):
            _put_store(folder / "state" / FILE_NAME)
        chosen = Options(
            inventory_file=nodes_file,
            settings_file=settings_file,
            **{"port": 0, "admin_port": 0, "state_dir": folder / "state", **options},
        )
        loaded, inventory = load_checked(chosen)
        log = stack.enter_context((folder / "gateway.log").open("ab"))
        logs = stack.enter_context(set_up_logging("debug", "json", fd=log.fileno()))
        gateway = Gateway(
            chosen, loaded, logs, clock=clock, rng=rng, timings=timings, resolver=resolver
        )
        await stack.enter_async_context(gateway.running(inventory))
        assert gateway.public_listener is not None
        assert gateway.admin_listener is not None
        if wait_ready:
            async with asyncio.timeout(START_LIMIT):
                await gateway.fleet.first_probes_done.wait()
            found = gateway.fleet.nodes.values()
            await until(
                lambda: any(node.state is NodeState.READY for node in found),
                START_LIMIT,
                lambda: [f"{node.name}: {node.reason}" for node in found],
            )
        url, admin_url = gateway.public_listener.url, gateway.admin_listener.url
        how: dict[str, Any] = {"timeout": 120.0, "trust_env": False, "verify": NO_TLS}
        how["limits"] = httpx.Limits(max_connections=None)
        client, admin = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=base, **how))
            for base in (url, admin_url)
        ]
        yield Running(gateway, url, admin_url, nodes_file, settings_file, client, admin)


@functools.cache
def new_store() -> bytes:
    """SQLite's file as a first start makes it."""
    with tempfile.TemporaryDirectory() as folder:
        location = locate_store(None, Path(folder))
        connection = connect(location, lambda _: None)
        with transaction(connection):
            make_tables(connection, THIS_PROGRAM, 0.0)
        disconnect(connection)
        return (Path(folder) / FILE_NAME).read_bytes()


def _put_store(path: Path) -> None:
    """Spare a gateway the making of its store; tests of the store do that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "wb") as opened:
            opened.write(new_store())


async def answered(client: httpx.AsyncClient, path: str, method: str = "GET", **more: Any) -> Any:
    """The JSON that a request is answered with, which must succeed."""
    response = await client.request(method, path, **more)
    assert response.status_code == 200, response.text
    return response.json()


async def until(
    condition: Any, limit: float = 30.0, seen: Callable[[], object] = lambda: ""
) -> None:
    """Wait until `condition()` holds; an AssertionError with `seen()` after `limit` seconds."""
    try:
        async with asyncio.timeout(limit):
            while not condition():  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {limit} s {seen()}") from None


def _patient(settings: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(asyncio.get_running_loop(), VirtualLoop):
        # The store's thread lives in real time.
        return {"store": {"url": "off"}, **settings}
    return {**settings, "health": {**PATIENT, **settings.get("health", {})}}


def _write(path: Path, value: Any) -> None:
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump(value))
    new.rename(path)
