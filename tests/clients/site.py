"""A gateway over real servers, with the clients and records that these tests need."""

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

from gateway.app.assembly import DEFAULT_TIMINGS, Gateway, Timings
from gateway.events import RequestRecord
from tests.gateways import NO_TLS, Running, running_gateway, until

HELLO: Any = [{"role": "user", "content": "hello there"}]
FIXED: dict[str, Any] = {"temperature": 0, "seed": 7}
"""Parameters that make an answer of the demo model reproducible."""

UNCACHED = {"cache_prompt": False}
"""A parameter that makes its figures reproducible too."""


@dataclass(slots=True)
class Site:
    """A running gateway, with a record of every request that has ended."""

    running: Running
    _records: list[RequestRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gateway.bus.subscribe(RequestRecord, self._records.append)

    @property
    def records(self) -> list[RequestRecord]:
        """The requests that have ended, including those whose events were still queued."""
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
        """The official client, set up as in its documentation."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    def anthropic(self, key: str = "unused", **options: Any) -> AsyncAnthropic:
        """The official client, set up as in its documentation."""
        return AsyncAnthropic(base_url=self.url, api_key=key, **options)

    @property
    def leased(self) -> dict[str, int]:
        """Slots in use by node."""
        return {node.name: node.leased for node in self.gateway.fleet.nodes.values()}

    async def until_idle(self, limit: float = 60.0) -> None:
        """Wait until nothing is held for requests."""
        await until(lambda: not self.running.held(), limit, self.running.held)


@asynccontextmanager
async def running_site(
    folder: Path,
    nodes: Sequence[str | Mapping[str, Any]],
    settings: Mapping[str, Any] | None = None,
    *,
    timings: Timings = DEFAULT_TIMINGS,
) -> AsyncIterator[Site]:
    """Run a gateway over these nodes; at its end every counter must be at zero."""
    async with running_gateway(folder, nodes, settings, timings=timings) as running:
        site = Site(running)
        yield site
        await site.until_idle()


async def busy(url: str) -> int:
    """Busy slots by the server's own `/slots`."""
    async with httpx.AsyncClient(trust_env=False, verify=NO_TLS, timeout=60) as client:
        slots = (await client.get(f"{url}/slots")).json()
    return sum(slot["is_processing"] for slot in slots)


async def broken_off(url: str) -> bool:
    """Whether the answer in each used slot was cut off before its end."""
    async with httpx.AsyncClient(trust_env=False, verify=NO_TLS, timeout=60) as client:
        slots = (await client.get(f"{url}/slots")).json()
    return all(token["has_next_token"] for slot in slots for token in slot["next_token"])


async def until_busy(url: str, wanted: int, limit: float = 60.0) -> None:
    """Wait until a server shows that many busy slots."""
    async with asyncio.timeout(limit):
        while await busy(url) != wanted:  # noqa: ASYNC110 - another process, seen by asking
            await asyncio.sleep(0.005)
