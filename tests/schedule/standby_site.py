"""A gateway over standby nodes: settings, requests, and its admin API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from gateway.nodes.node import NodeState
from tests.gateways import Running, until

MODEL = "demo"
LIMIT = 60.0
QUICK: dict[str, Any] = {
    "health": {"interval": 0.1, "timeout": 20.0, "slow_start": 0, "discover_interval": 0.5},
    "elastic": {
        "start_above": 0.2,
        "start_after": 0.2,
        "stop_after": 1.0,
        "cooldown": 0.2,
        "backoff": 0.5,
    },
}


def settings(**elastic: Any) -> dict[str, Any]:
    """Settings with short times, except for probes: a machine that is off refuses them at once."""
    return {**QUICK, "elastic": {**QUICK["elastic"], **elastic}}


async def ask(
    running: Running, text: str = "hello", tokens: int = 8, **headers: str
) -> httpx.Response:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
    }
    return await running.client.post("/v1/chat/completions", json=body, headers=headers)


async def shown(running: Running, name: str) -> Mapping[str, Any]:
    found: dict[str, Any] = (await running.admin.get(f"/admin/nodes/{name}")).json()
    return found


async def order(running: Running, path: str) -> None:
    """Call the admin API as an operator does: `nodes/NAME/drain`, `reload`, ..."""
    (await running.admin.post(f"/admin/{path}")).raise_for_status()


async def until_state(running: Running, name: str, state: NodeState, limit: float = LIMIT) -> None:
    node = running.gateway.fleet.nodes[name]
    try:
        await until(lambda: node.state is state, limit)
    except AssertionError:
        raise AssertionError(f"{name} is {node.state} ({node.reason}), not {state}") from None


async def metrics(running: Running) -> str:
    return (await running.admin.get("/metrics")).text
