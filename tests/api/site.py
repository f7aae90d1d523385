"""A gateway over real servers, and what the tests of this folder ask of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from gateway.app import Gateway
from gateway.events import RequestFinished
from tests.gateways import NO_TLS, Running, running_gateway, until

HELLO: Any = [{"role": "user", "content": "hello there"}]
FIXED: dict[str, Any] = {"temperature": 0, "seed": 7}
"""What makes an answer of the demo model the same each time."""

UNCACHED = {"cache_prompt": False}
"""What makes its figures the same too."""


@dataclass(slots=True)
class Site:
    """A running gateway, with a record of every request that has ended."""

    running: Running
    _records: list[RequestFinished] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gateway.bus.subscribe(RequestFinished, self._records.append)

    @property
    def records(self) -> list[RequestFinished]:
        """The requests that have ended, those included whose telling was put off."""
        self.gateway.bus.flush()
        return self._records

    @property
    def gateway(self) -> Gateway:
        return self.running.gateway

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def http(self) -> httpx.AsyncClient:
        return self.running.client

    def openai(self, key: str = "unused", **options: Any) -> AsyncOpenAI:
        """The official client, as its documentation has it."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    def anthropic(self, key: str = "unused", **options: Any) -> AsyncAnthropic:
        """The official client, as its documentation has it."""
        return AsyncAnthropic(base_url=self.url, api_key=key, **options)

    @property
    def leased(self) -> dict[str, int]:
        """Slots in use by node."""
        return {node.name: node.leased for node in self.gateway.fleet.nodes.values()}

    @property
    def idle(self) -> bool:
        """Whether every counter is at zero."""
        gateway = self.gateway
        return (
            not any(self.leased.values())
            and not len(gateway.registry)
            and not gateway.scheduler.queue_positions()
            and not gateway.handler.body_memory.total_bytes
        )

    async def until_idle(self, limit: float = 60.0) -> None:
        """Wait until nothing is counted any more."""
        await until(lambda: self.idle, limit)


@asynccontextmanager
async def running_site(
    folder: Path,
    nodes: Sequence[str | Mapping[str, Any]],
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[Site]:
    """A gateway over these nodes; at its end nothing may be left that is counted."""
    async with running_gateway(folder, nodes, settings) as running:
        site = Site(running)
        yield site
        await site.until_idle()


async def busy(url: str) -> int:
    """Slots that a server itself shows busy."""
    async with httpx.AsyncClient(trust_env=False, verify=NO_TLS, timeout=60) as client:
        slots = (await client.get(f"{url}/slots")).json()
    return sum(slot["is_processing"] for slot in slots)


async def broken_off(url: str) -> bool:
    """Whether the answer of each slot that was used had more to come when it ended."""
    async with httpx.AsyncClient(trust_env=False, verify=NO_TLS, timeout=60) as client:
        slots = (await client.get(f"{url}/slots")).json()
    return all(token["has_next_token"] for slot in slots for token in slot["next_token"])


async def until_busy(url: str, wanted: int, limit: float = 60.0) -> None:
    """Wait until a server shows that many busy slots."""
    async with asyncio.timeout(limit):
        while await busy(url) != wanted:  # noqa: ASYNC110 - another process, seen by asking
            await asyncio.sleep(0.005)
