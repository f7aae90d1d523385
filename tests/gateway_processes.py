"""Gateways as processes of their own, with the successors that take over from them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.emulator import EmulatedNode
from tests.gateways import QUIET
from tests.loop_watch.plugin import inherited

LIMIT = 120.0
"""Seconds for each wait."""


@dataclass(slots=True)
class Succession:
    """A line of gateway processes; all of them log to the first one's stderr."""

    first: Process
    lines: list[dict[str, Any]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    ends_with: int = 0
    """The exit status that the first process must have."""

    async def read_log(self) -> None:
        assert self.first.stderr is not None
        async for line in self.first.stderr:
            # What keeps a successor from starting comes as plain words.
            entry = json.loads(line) if line.startswith(b"{") else {"event": line.decode()}
            self.lines.append(entry)
            self.news.set()

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]

    async def until(self, event: str, count: int = 1) -> dict[str, Any]:
        """The log's line of this event that makes so many."""
        try:
            async with asyncio.timeout(LIMIT):
                while len(self.logged(event)) < count:
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            raise AssertionError(f"no '{event}' among {self.lines[-20:]}") from None
        return self.logged(event)[count - 1]

    @property
    def url(self) -> str:
        return str(self.logged("listening")[0]["public"])

    @property
    def admin_url(self) -> str:
        return str(self.logged("listening")[0]["admin"])

    @property
    def newest(self) -> int:
        succeeded = self.logged("succeeded")
        return int(succeeded[-1]["pid"]) if succeeded else self.first.pid

    async def kill(self) -> None:
        """Kill the first process, which has no successor."""
        self.first.kill()
        assert await self.status() == -signal.SIGKILL

    async def status(self) -> int:
        """The exit status of the first process, once it has ended."""
        self.ends_with = await asyncio.wait_for(self.first.wait(), LIMIT)
        return self.ends_with

    async def succeed(self) -> None:
        """Let the newest process be succeeded; returns when the new one has taken over."""
        before = len(self.logged("succeeded"))
        os.kill(self.newest, signal.SIGUSR2)
        await self.until("succeeded", before + 1)


def client_of(url: str, **options: Any) -> httpx.AsyncClient:
    """A client that waits as long as all else here does."""
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=LIMIT, **options)


@asynccontextmanager
async def serving(
    folder: Path,
    node: EmulatedNode | Sequence[Mapping[str, Any]],
    *command: str,
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    **spec: Any,
) -> AsyncIterator[Succession]:
    """A gateway over this node, ended with all its successors; `spec` is more of the inventory.

    `node` may also be all nodes of the inventory.
    """
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240 - nothing else runs yet
    config = {
        "listen": {"port": 0},
        "admin": {"port": 0},
        "health": {"interval": 0.2, "timeout": 30},
    }
    (folder / "gateway.yaml").write_text(yaml.safe_dump({**config, **(settings or {})}))
    nodes = (
        [{"name": "one", "url": node.url, **spec}]
        if isinstance(node, EmulatedNode)
        else [dict(one) for one in node]
    )
    (folder / "nodes.yaml").write_text(yaml.safe_dump({**QUIET, "nodes": nodes}))
    files = ("--nodes", str(folder / "nodes.yaml"), "--config", str(folder / "gateway.yaml"))
    process = await asyncio.create_subprocess_exec(
        *(command or (sys.executable, "-m", "gateway")), "serve", *files,
        stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, close_fds=not command,
        env={
            "XDG_STATE_HOME": str(folder / "state"), "PATH": os.environ["PATH"], **inherited(),
            **(environment or {}),
        },
    )  # fmt: skip
    line = Succession(process)
    reading = asyncio.create_task(line.read_log())
    try:
        await line.until("listening")
        yield line
    finally:
        # The log ends when the last of them has.
        with contextlib.suppress(ProcessLookupError):
            os.kill(line.newest, signal.SIGTERM)
        try:
            await asyncio.wait_for(reading, LIMIT)
        finally:
            reading.cancel()
            for pid in {process.pid, *(entry["pid"] for entry in line.logged("succeeded"))}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert await process.wait() == line.ends_with


@asynccontextmanager
async def asked(
    folder: Path, node: EmulatedNode, **settings: Any
) -> AsyncIterator[tuple[Succession, httpx.AsyncClient, httpx.AsyncClient]]:
    """A gateway over this node, a client of it, and one for operators."""
    async with (
        node,
        serving(folder, node, settings=settings) as line,
        client_of(line.url) as client,
        client_of(line.admin_url) as admin,
    ):
        yield line, client, admin
