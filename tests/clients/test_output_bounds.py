"""What a request may make a node write, by the servers themselves: bounds, and sizes of options."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.api.tokens import BOUND_NAMES
from gateway.request.body import bytes_to_parse
from tests.forward.proxy_over_nodes import BODIES
from tests.request.test_request import prepared
from tests.servers import running_demo_servers

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/completion")
BOUNDS: list[dict[str, Any]] = [
    *({name: value} for name in BOUND_NAMES for value in (0, 3.7, -0.5)),
    {"n_predict": -1},
    *({one: 5, other: 9} for one, other in itertools.permutations(BOUND_NAMES, 2)),
    *({one: None, other: 5} for one, other in itertools.permutations(BOUND_NAMES, 2)),
    {"max_tokens": 5, "n_predict": -1},
    dict.fromkeys(BOUND_NAMES, 7),
]


def written(path: str, answer: dict[str, Any]) -> int:
    usage = answer.get("usage", {})
    count: int = usage.get("completion_tokens", usage.get("output_tokens", 0))
    return count or answer.get("tokens_predicted", 0)


@pytest.mark.parametrize("path", PATHS)
async def test_a_node_writes_what_the_gateway_reckons_with(
    chat_node: httpx.AsyncClient, path: str
) -> None:
    for bounds in BOUNDS:
        request = prepared(BODIES[path] | bounds | {"ignore_eos": True, "seed": 1}, path)
        body = bytes_to_parse(request.bodies["demo"])
        answer = await chat_node.post(path, content=body, timeout=60)
        assert answer.status_code == 200, (bounds, answer.text)
        tokens = written(path, answer.json())
        most = request.lease_request.size.max_tokens
        if path == "/v1/messages":
            # `ignore_eos` is not passed on there, and 4,096 is what it takes without a bound.
            assert tokens <= (4096 if most is None else most), bounds
        elif most is None:
            assert tokens > 100, bounds
        else:
            assert tokens == most, bounds
        names = [name for name in BOUND_NAMES if json.loads(body).get(name) is not None]
        assert len(names) <= 1, bounds


def peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


@pytest.mark.parametrize(
    "options",
    [
        {"repeat_last_n": 40_000_000, "repeat_penalty": 1.1},
        {"dry_penalty_last_n": 20_000_000, "dry_multiplier": 0.8},
        {"samplers": "d" * 32, "dry_penalty_last_n": 2_000_000, "dry_multiplier": 0.8},
    ],
    ids=lambda options: next(iter(options)),
)
async def test_a_window_of_any_size_costs_a_node_no_memory(options: dict[str, Any]) -> None:
    with running_demo_servers(1, slots=1) as [server]:
        body = {"prompt": "hello there", "n_predict": 2, "model": "demo"}
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            await client.post("/completion", json=body)
            before = peak_mib(server.pid)
            request = prepared(body | options, "/completion")
            sent = bytes_to_parse(request.bodies["demo"])
            assert (await client.post("/completion", content=sent, timeout=60)).status_code == 200
            assert peak_mib(server.pid) < before + 60
            # The server itself would take all of it.
            await client.post("/completion", json=body | options, timeout=60)
            assert peak_mib(server.pid) > before + 100
