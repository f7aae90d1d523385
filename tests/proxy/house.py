"""A whole gateway over emulated nodes, and what it told of every request and attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from gateway.events import AttemptEnded, RequestFinished
from gateway.fleet.node import Node
from gateway.proxy import sse
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until

MESSAGES = [{"role": "user", "content": "say something"}]
QUICK: dict[str, Any] = {
    "health": {"interval": 0.1, "timeout": 0.5, "discover_interval": 0.5, "open": 0.3,
               "open_max": 0.6, "slow_start": 0.0},
    "retries": {"backoff": 0.01, "backoff_max": 0.05, "budget_min": 1000},
}  # fmt: skip

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "say something"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 100},
    "/v1/responses": {"input": "say something"},
    "/completion": {"prompt": "say something"},
}
"""A path of each dialect with the least that it takes."""
DIALECTS = list(BODIES)


def saying(path: str, text: str) -> dict[str, Any]:
    """The part of such a body that holds the prompt."""
    if "messages" in BODIES[path]:
        return {"messages": [{"role": "user", "content": text}]}
    return {"input" if "input" in BODIES[path] else "prompt": text}


@dataclass(slots=True)
class Stream:
    """A streamed answer as its client got it."""

    status: int
    headers: httpx.Headers
    body: bytes

    @property
    def events(self) -> list[bytes]:
        """Its events; an AssertionError when half a one came."""
        found = [event for event in sse.split(self.body) if sse.payload(event)]
        assert all(event.endswith((b"\n\n", b"\n\r\n")) for event in found), self.body[-200:]
        return found

    @property
    def values(self) -> list[Any]:
        """The data of its events that are JSON."""
        payloads = [sse.payload(event) for event in self.events]
        return [msgspec.json.decode(data) for data in payloads if data != b"[DONE]"]

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Its error events."""
        return [value["error"] for value in self.values if value and value.get("error")]

    @property
    def text(self) -> str:
        """What a chat's reader sees."""
        deltas = [
            choice["delta"].get("content") or ""
            for value in self.values
            for choice in value.get("choices", ())
        ]
        return "".join(deltas)


@dataclass(slots=True)
class House:
    running: Running
    servers: dict[str, EmulatedNode]
    _finished: list[RequestFinished] = field(default_factory=list)
    _attempts: list[AttemptEnded] = field(default_factory=list)

    @property
    def finished(self) -> list[RequestFinished]:
        """What was told of every request that is over."""
        self.running.gateway.bus.flush()
        return self._finished

    @property
    def attempts(self) -> list[AttemptEnded]:
        """What was told of every attempt that is over."""
        self.running.gateway.bus.flush()
        return self._attempts

    def node(self, name: str) -> Node:
        return self.running.gateway.fleet.nodes[name]

    @property
    def outcomes(self) -> list[tuple[str, str]]:
        """Node and outcome of every attempt, in the order of their ends."""
        return [(attempt.node, attempt.outcome) for attempt in self.attempts]

    async def ask(
        self, path: str = DIALECTS[0], headers: Mapping[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        value = {**BODIES.get(path, {}), **body}
        return await self.running.client.post(path, json=value, headers=dict(headers or {}))

    async def stream(
        self, path: str = DIALECTS[0], headers: Mapping[str, str] | None = None, **body: Any
    ) -> Stream:
        value = {**BODIES.get(path, {}), "stream": True, **body}
        async with self.running.client.stream(
            "POST", path, json=value, headers=dict(headers or {})
        ) as reply:
            return Stream(reply.status_code, reply.headers, await reply.aread())

    async def rests(self, limit: float = 30.0) -> None:
        """Wait until nothing is left of all that was asked."""
        gateway = self.running.gateway
        await until(lambda: len(gateway.registry) == 0, limit)
        await until(lambda: gateway.scheduler.queue_positions() == [], limit)
        await until(lambda: all(n.leased == 0 for n in gateway.fleet.nodes.values()), limit)
        gateway.bus.flush()


@asynccontextmanager
async def a_house(
    folder: Path,
    *servers: EmulatedNode,
    nodes: tuple[Mapping[str, Any], ...] = (),
    **settings: Any,
) -> AsyncIterator[House]:
    """A gateway over these servers, called a, b, c, ...; `nodes` adds to their inventory.

    When it is left, everything must have come back and no error of our own have been logged.
    """
    async with AsyncExitStack() as stack:
        named: dict[str, EmulatedNode] = {}
        specs = []
        for number, server in enumerate(servers):
            name = "abcdefgh"[number]
            named[name] = await stack.enter_async_context(server)
            more = nodes[number] if number < len(nodes) else {}
            specs.append({"name": name, "url": server.url, "host": name, **more})
        chosen = {key: {**value, **settings.pop(key, {})} for key, value in QUICK.items()}
        running = await stack.enter_async_context(
            running_gateway(folder, specs, {**chosen, **settings})
        )
        house = House(running, named)
        bus = running.gateway.bus
        bus.subscribe(RequestFinished, house.finished.append)
        bus.subscribe(AttemptEnded, house.attempts.append)
        await until(
            lambda: all(n.probe_history.discovered_at for n in running.gateway.fleet.nodes.values())
        )
        yield house
        for server in named.values():
            server.faults.clear()
        await house.rests()
    log = (folder / "gateway.log").read_text()
    assert "Traceback" not in log, log
    leftover = [task.get_name() for task in asyncio.all_tasks() if task.get_name() in OURS]
    assert leftover == []


OURS = ("weigh nodes", "reload", "watch the files")


FIRST: tuple[Mapping[str, Any], ...] = ({"speed_hint": 100.0}, {}, {})
"""The node `a` is asked before all others."""
