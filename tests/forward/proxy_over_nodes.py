"""A whole gateway over emulated nodes, with the events of all its requests and attempts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from gateway.api import sse
from gateway.app.assembly import Gateway
from gateway.events import AttemptEnded, RequestRecord
from gateway.nodes.node import Node
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.transport.raw import Peer, raw_server

MESSAGES = [{"role": "user", "content": "say something"}]
QUICK: dict[str, Any] = {
    "health": {"interval": 0.1, "timeout": 0.5, "discover_interval": 0.5, "open": 0.3,
               "open_max": 0.6, "slow_start": 0.0},
    "retries": {"backoff": 0.01, "backoff_max": 0.05, "budget_min": 1000},
}  # fmt: skip
"""Settings under which nodes fail and recover quickly."""

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "say something"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 100},
    "/v1/responses": {"input": "say something"},
    "/completion": {"prompt": "say something"},
}
"""A path of each API that generates text, with the smallest body that it takes."""
GENERATION_PATHS = list(BODIES)

A_FIRST: tuple[Mapping[str, Any], ...] = ({"speed_hint": 100.0}, {}, {})
"""Inventory entries that make the scheduler prefer node `a`."""


def prompt_field(path: str, text: str) -> dict[str, Any]:
    """The part of such a body that holds the prompt."""
    if "messages" in BODIES[path]:
        return {"messages": [{"role": "user", "content": text}]}
    return {"input" if "input" in BODIES[path] else "prompt": text}


@dataclass(slots=True)
class Stream:
    """A streamed response as the client received it."""

    status: int
    headers: httpx.Headers
    body: bytes

    @property
    def events(self) -> list[bytes]:
        """Its events. Raises: AssertionError, if one is incomplete."""
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
        return [value["error"] for value in self.values if value and value.get("error")]

    @property
    def text(self) -> str:
        deltas = [
            choice["delta"].get("content") or ""
            for value in self.values
            for choice in value.get("choices", ())
        ]
        return "".join(deltas)


@dataclass(slots=True)
class ProxyOverNodes:
    """The gateway, its nodes by name, and a client."""

    running: Running
    servers: dict[str, EmulatedNode]
    _finished: list[RequestRecord] = field(default_factory=list)
    _attempts: list[AttemptEnded] = field(default_factory=list)

    @property
    def app(self) -> Gateway:
        return self.running.gateway

    @property
    def finished(self) -> list[RequestRecord]:
        self.app.bus.flush()
        return self._finished

    @property
    def attempts(self) -> list[AttemptEnded]:
        self.app.bus.flush()
        return self._attempts

    @property
    def outcomes(self) -> list[tuple[str, str]]:
        """Node and outcome of every attempt, in the order of their ends."""
        return [(attempt.node, attempt.outcome) for attempt in self.attempts]

    def node(self, name: str) -> Node:
        return self.app.fleet.nodes[name]

    async def ask(
        self,
        path: str = GENERATION_PATHS[0],
        headers: Mapping[str, str] | None = None,
        **body: Any,
    ) -> httpx.Response:
        value = {**BODIES.get(path, {}), **body}
        return await self.running.client.post(path, json=value, headers=dict(headers or {}))

    async def stream(
        self,
        path: str = GENERATION_PATHS[0],
        headers: Mapping[str, str] | None = None,
        **body: Any,
    ) -> Stream:
        value = {**BODIES.get(path, {}), "stream": True, **body}
        async with self.running.client.stream(
            "POST", path, json=value, headers=dict(headers or {})
        ) as reply:
            return Stream(reply.status_code, reply.headers, await reply.aread())

    async def settled(self, limit: float = 30.0) -> None:
        """Wait until no request and no lease is left."""
        await until(lambda: len(self.app.registry) == 0, limit)
        await until(lambda: self.app.scheduler.queue_positions() == [], limit)
        await until(lambda: all(n.leased == 0 for n in self.app.fleet.nodes.values()), limit)
        self.app.bus.flush()


@asynccontextmanager
async def proxy_over(
    folder: Path,
    *servers: EmulatedNode,
    nodes: tuple[Mapping[str, Any], ...] = (),
    **settings: Any,
) -> AsyncIterator[ProxyOverNodes]:
    """A gateway over these nodes, named a, b, c, ...; `nodes` adds to their inventory entries.

    At the end all leases must be released and no exception may be in the log.
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
        proxy = ProxyOverNodes(running, named)
        bus = running.gateway.bus
        bus.subscribe(RequestRecord, proxy.finished.append)
        bus.subscribe(AttemptEnded, proxy.attempts.append)
        await until(
            lambda: all(n.probe_history.discovered_at for n in running.gateway.fleet.nodes.values())
        )
        yield proxy
        for server in named.values():
            server.faults.clear()
        await proxy.settled()
    log = (folder / "gateway.log").read_text()
    assert "Traceback" not in log, log
    leftover = [task.get_name() for task in asyncio.all_tasks() if task.get_name() in OWN_TASKS]
    assert leftover == []


OWN_TASKS = ("weigh nodes", "reload", "watch the files")
"""Tasks of the gateway that must end with it."""


@asynccontextmanager
async def two_nodes(
    folder: Path, *, answer_tokens: int = 32, **settings: Any
) -> AsyncIterator[tuple[ProxyOverNodes, EmulatedNode, EmulatedNode]]:
    """A gateway over two equal nodes, `a` and `b`, of which it prefers the first."""
    one, two = (EmulatedNode(answer_tokens=answer_tokens) for _ in "ab")
    async with proxy_over(folder, one, two, nodes=A_FIRST, **settings) as proxy:
        yield proxy, one, two


# An OpenAI-compatible endpoint that answers with chosen bytes.


MODELS = b'{"data": [{"id": "demo"}]}'


class Unended(bytes):
    """A response behind which the endpoint says no more, until its client leaves."""


def response(content: bytes, kind: bytes = b"application/json") -> bytes:
    """A whole response with this content."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (kind, len(content)) + content


@asynccontextmanager
async def over_endpoint(
    folder: Path, answer: Callable[[bytes], bytes], **settings: object
) -> AsyncIterator[tuple[Running, list[RequestRecord]]]:
    """The gateway, and the records of its requests.

    `answer` makes a response of a request; the connection ends behind it. The one model is `demo`.
    """

    async def serve(peer: Peer) -> None:
        request = await peer.request()
        said = answer(request) if request.startswith(b"POST") else response(MODELS)
        await peer.say(said)
        if isinstance(said, Unended):
            await peer.reader.read()

    async with raw_server(serve) as server:
        node = {"name": "a", "url": f"http://127.0.0.1:{server.port}", "kind": "openai"}
        async with running_gateway(folder, [node], settings) as running:
            records: list[RequestRecord] = []
            running.gateway.bus.subscribe(RequestRecord, records.append)
            yield running, records
