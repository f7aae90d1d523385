"""A gateway with batches over emulated nodes, and a client of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec, Protocol, TypeVar
from unittest.mock import patch

import httpx

from gateway.callers.keys import hash_key
from gateway.store.store import Store
from gateway.stored.folder import DiskThreads
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway
from tests.polling import eventually
from tests.virtual import VirtualLoop, now

P = ParamSpec("P")
T = TypeVar("T")
KEY = "lg_k1_" + "s" * 43
HEADERS = {"authorization": f"Bearer {KEY}"}
ENDS = {"completed", "failed", "cancelled", "expired"}
CALM: dict[str, Any] = {"health": {"interval": 5, "discover_interval": 30}}


class Asker(Protocol):
    """Whoever has a client of the gateway."""

    client: httpx.AsyncClient


def key(**fields: Any) -> dict[str, Any]:
    return {"id": "k1", "name": "alice", "sha256": hash_key(KEY).sha256, **fields}


def lines(number: int, first: int = 0, **body: Any) -> list[dict[str, Any]]:
    return [
        {
            "custom_id": f"line-{index}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": f"write text {index}"}],
                "temperature": 0,
                "max_tokens": 20,
                **body,
            },
        }
        for index in range(first, first + number)
    ]


def holding_the_clock(work: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Virtual time stands still while this work, which is done by threads, goes on."""

    @wraps(work)
    async def run(*args: P.args, **keys: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop._virtual.threads += 1
        try:
            return await work(*args, **keys)
        finally:
            loop._virtual.threads -= 1

    return run


@contextlib.contextmanager
def store_in_virtual_time() -> Iterator[None]:
    """The store and the folder of a gateway, while their threads live in real time."""
    with (
        patch.object(Store, "run", holding_the_clock(Store.run)),
        patch.object(Store, "wait_opened", holding_the_clock(Store.wait_opened)),
        patch.object(DiskThreads, "run", holding_the_clock(DiskThreads.run)),
    ):
        yield


@contextlib.asynccontextmanager
async def gateway_over(
    folder: Path, *nodes: EmulatedNode, **settings: Any
) -> AsyncIterator[Running]:
    """A gateway with a store; in virtual time its wall clock is virtual too."""
    loop, chosen = asyncio.get_running_loop(), {"keys": [key()], **CALM, **settings}
    with contextlib.ExitStack() as stack:
        if isinstance(loop, VirtualLoop):
            chosen["store"] = {"url": f"sqlite:///{folder}/gateway.db"}
            ahead = time.time() - loop.time()
            wall = SimpleNamespace(time=lambda: ahead + loop.time())
            stack.enter_context(store_in_virtual_time())
            stack.enter_context(patch("gateway.app.background.time", wall))
        async with running_gateway(folder, nodes, chosen) as running:
            yield running
    log = (folder / "gateway.log").read_text()
    assert "Traceback" not in log, log


async def submit(running: Asker, items: list[dict[str, Any]], **fields: Any) -> str:
    """The id of a new batch."""
    data = "".join(json.dumps(item) + "\n" for item in items).encode()
    files = {"file": ("input.jsonl", data, "application/jsonl")}
    answer = await running.client.post(
        "/v1/files", data={"purpose": "batch"}, files=files, headers=HEADERS
    )
    assert answer.status_code == 200, answer.text
    body = {
        "input_file_id": answer.json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        **fields,
    }
    answer = await running.client.post("/v1/batches", json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def show(running: Asker, batch: str) -> dict[str, Any]:
    answer: httpx.Response = await running.client.get(f"/v1/batches/{batch}", headers=HEADERS)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def ended(running: Asker, batch: str, seconds: float = 60.0) -> dict[str, Any]:
    """The batch, once it has ended."""

    async def look() -> dict[str, Any] | None:
        found = await show(running, batch)
        return found if found["status"] in ENDS else None

    return await eventually(look, seconds)


async def time_to_first_token(
    client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]
) -> float:
    """Seconds until a client has the first content of a chat that streams."""
    began, seconds = now(), 0.0
    chat = {**body, "stream": True, "max_tokens": 20}
    async with client.stream("POST", "/v1/chat/completions", json=chat, headers=headers) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if '"content":"' in line and not seconds:
                seconds = now() - began
    return seconds


async def output(running: Asker, id_: str) -> list[dict[str, Any]]:
    answer = await running.client.get(f"/v1/files/{id_}/content", headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]
