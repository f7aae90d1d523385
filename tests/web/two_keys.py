"""A gateway with two keys, whose holders keep files, batches and responses there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from openai import AsyncOpenAI

from gateway.callers.keys import ApiKey, new_key
from gateway.stored.folder import ID_FILE
from tests.gateway_processes import Succession
from tests.gateways import Running, running_gateway
from tests.web.bare_gateway import error_of

DEAD = "http://127.0.0.1:9"
ALICE, BOB = new_key("alice"), new_key("bob")
KEYS = [{"id": key.id, "sha256": key.sha256} for key in (ALICE, BOB)]


@asynccontextmanager
async def gateway(folder: Path, **settings: Any) -> AsyncIterator[Running]:
    """No node is up, so that what waits for one stays."""
    async with running_gateway(
        folder, [DEAD], {"keys": KEYS, **settings}, wait_ready=False
    ) as running:
        yield running


def client(running: Running | Succession, key: ApiKey | None = ALICE) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{running.url}/v1",
        api_key="none" if key is None else key.text,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False, timeout=60.0),
    )


def kept(folder: Path) -> list[str]:
    """The names of all files in the gateway's folder, but that of its id."""
    names = [path.name for path in (folder / "state/batches").glob("*")]
    return sorted(name for name in names if not name.endswith(ID_FILE))


def reason(response: httpx.Response) -> tuple[int, str]:
    """Status and code of an error in OpenAI's form."""
    return response.status_code, error_of(response)["code"]


@asynccontextmanager
async def two_callers(
    folder: Path, **settings: Any
) -> AsyncIterator[tuple[Running, AsyncOpenAI, AsyncOpenAI]]:
    """A gateway, and clients with Alice's key and with Bob's."""
    async with (
        gateway(folder, **settings) as running,
        client(running) as alice,
        client(running, BOB) as bob,
    ):
        yield running, alice, bob
