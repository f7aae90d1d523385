"""A gateway over a CPU node paid by the hour and a GPU node paid by tokens, with some callers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from gateway.callers.keys import new_key
from tests.emulator.node import EmulatedNode
from tests.gateways import Running, answered, running_gateway, until
from tests.known import known

ALICE, CHAT, VIP = new_key("alice"), new_key("chat"), new_key("vip")

CALLERS: list[dict[str, Any]] = [
    {
        "id": "alice",
        "sha256": ALICE.sha256,
        "name": "Alice",
        "group": "team",
        "limits": {"rpm": 100, "tokens_per_day": 100_000, "budget": "5/month", "concurrency": 4},
    },
    {"id": "chat", "sha256": CHAT.sha256, "trust_user_headers": True, "user_limits": {"rpm": 50}},
    {"id": "vip", "sha256": VIP.sha256, "class": "premium"},
]


def bearer(key: Any, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.text}", **headers}


@contextlib.asynccontextmanager
async def metered_gateway(folder: Path, **settings: Any) -> AsyncIterator[Running]:
    async with EmulatedNode(slots=2) as cpu, EmulatedNode(slots=2) as gpu:
        nodes: list[dict[str, Any]] = [
            {"name": "cpu-a", "url": cpu.url, "cost_per_hour": 0.2},
            {
                "name": "gpu-a",
                "url": gpu.url,
                "tier": "gpu",
                "cost_per_million_tokens": {"prompt": 1000, "completion": 2000},
            },
        ]
        chosen = {"keys": CALLERS, "groups": {"team": {}}, "allow_anonymous": True, **settings}
        async with running_gateway(folder, nodes, chosen) as running:
            states = running.gateway.fleet.nodes.values()
            await until(lambda: all(node.state.value == "ready" for node in states))
            yield running


async def chat(running: Running, key: Any = "", **headers: str) -> None:
    response = await running.chat(key, headers, max_tokens=8)
    assert response.status_code == 200, response.text


async def recorded(running: Running, count: int) -> None:
    """Wait until so many requests are in the ledger."""
    ledger = known(running.gateway.ledger)
    await until(lambda: ledger.written >= count)


async def own_usage(running: Running, key: Any = None, path: str = "", **headers: str) -> Any:
    """What a caller is told of its own use; `path`: behind `/v1/usage`."""
    sent = headers if key is None else bearer(key, **headers)
    return await answered(running.client, f"/v1/usage{path}", headers=sent)
