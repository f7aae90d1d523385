"""A client that may send any bytes, and a gateway that must work afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

from gateway.events import RequestRecord
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import LIMIT, RawConnection, raw_connection, unchunk
from tests.gateways import Running, running_gateway, until

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


@dataclass(slots=True)
class Answer:
    """A response, as it was received."""

    status: int
    headers: dict[str, str]
    body: bytes
    raw: list[tuple[str, str]] = field(default_factory=list)

    @property
    def code(self) -> str | None:
        """The error code, which head and body must agree on."""
        value = json.loads(self.body)
        if "error" in value and "code" in value["error"]:
            assert value["error"]["code"] == self.headers["x-gateway-reason"]
        return self.headers.get("x-gateway-reason")


async def answer(wire: RawConnection) -> Answer:
    """Read the next response of a connection."""
    head = (await wire.head()).decode("latin-1")
    line, *rest = head.strip().split("\r\n")
    status = HTTPStatus(int(line.split()[1]))
    assert line == f"HTTP/1.1 {status.value} {status.phrase}"
    raw = [(name.lower(), value.strip()) for name, _, value in (x.partition(":") for x in rest)]
    headers = dict(raw)
    assert len(headers) == len(raw), f"a header twice: {raw}"
    preflight = "access-control-allow-methods" in headers
    assert preflight or headers["x-request-id"], "every response has an id"
    if headers.get("transfer-encoding") == "chunked":
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += await wire.until(b"\r\n")
        body = unchunk(data)
    elif "content-length" in headers:
        async with asyncio.timeout(LIMIT):
            body = await wire.reader.readexactly(int(headers["content-length"]))
    else:
        body = await wire.rest()
    return Answer(status.value, headers, body, raw)


def request(
    body: bytes | Mapping[str, Any] = HELLO,
    *fields: str,
    method: str = "POST",
    path: str = CHAT,
    length: int | None = None,
) -> bytes:
    """The bytes of a request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *fields]
    lines.append(f"Content-Length: {len(data) if length is None else length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


@dataclass(slots=True)
class Public:
    """A gateway over one node, and its records of finished requests."""

    running: Running
    node: EmulatedNode
    ended: list[RequestRecord]

    @property
    def url(self) -> str:
        return self.running.url

    async def ask(self, data: bytes) -> Answer:
        """Send one request on a new connection."""
        async with raw_connection(self.url) as wire:
            await wire.send(data)
            return await answer(wire)

    async def chat(self, *fields: str, **body: Any) -> Answer:
        return await self.ask(request({**HELLO, **body}, *fields))

    async def last(self) -> RequestRecord:
        """The record of the last finished request, once none runs."""
        await until(lambda: not self.running.gateway.registry)
        await until(lambda: bool(self.records()))
        return self.ended[-1]

    def records(self) -> list[RequestRecord]:
        """The records of all finished requests."""
        self.running.gateway.bus.flush()
        return self.ended

    def forget(self) -> None:
        """Drop all records, and reset the node."""
        self.records()
        self.node.requests = 0
        self.node.seen.clear()
        self.ended.clear()

    async def all_disconnected(self) -> None:
        """Wait until no client is connected."""
        listener = self.running.gateway.public_listener
        assert listener is not None
        await until(lambda: not listener.connections)

    async def is_well(self) -> None:
        """Check that nothing is left of earlier requests, and that a valid one is served."""
        self.node.faults.clear()
        await until(lambda: not self.running.held(), seen=self.running.held)
        good = await self.chat(max_tokens=2)
        assert good.status == 200, good
        assert json.loads(good.body)["choices"][0]["message"]["content"]
        await until(lambda: not self.running.held(), seen=self.running.held)


@asynccontextmanager
async def public(
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    node: EmulatedNode | None = None,
    *,
    well: bool = True,
    **options: Any,
) -> AsyncIterator[Public]:
    """A gateway over an emulated node; at the end it must work, and have logged no error."""
    before = asyncio.all_tasks()
    async with node or EmulatedNode() as one:
        async with running_gateway(folder, [one.url], settings, **options) as running:
            ended: list[RequestRecord] = []
            running.gateway.bus.subscribe(RequestRecord, ended.append)
            found = Public(running, one, ended)
            yield found
            if well:
                await found.is_well()
        log = (folder / "gateway.log").read_text()
        assert "Traceback" not in log, log
        assert '"level":"error"' not in log.replace(" ", ""), log

    def left() -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks() - before - {asyncio.current_task()}

    await until(lambda: not left(), seen=left)
