"""The calibration of real llama.cpp servers."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from gateway.nodes import calibration
from tests.each_case import each_case
from tests.nodes.build import a_spec, learn_timings, take
from tests.nodes.test_calibration import calibrated
from tests.servers import spawn_demo_server, stop_demo_server, wait_for_demo_server

pytestmark = [pytest.mark.real, pytest.mark.slow]

WORDS = calibration.WORDS[:18]
KINDS: list[dict[str, Any]] = [
    {},
    {"embedding": True},
    {"embedding": True, "extra": ("--pooling", "rank")},
]


async def chat(client: httpx.AsyncClient, system: str, **keys: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "hello"}]
    answer = await client.post("/v1/chat/completions", json={"messages": messages, **keys})
    timings: dict[str, Any] = answer.json()["timings"]
    return timings


def direct(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=60, limits=limits)


@each_case("options", KINDS)
def test_a_cold_server_of_each_kind_shows_its_speed(options: dict[str, Any]) -> None:
    server = spawn_demo_server(slots=2, size="medium", **options)

    async def run() -> None:
        url = wait_for_demo_server(server)
        async with calibrated(a_spec(url=url)) as (running, ended):
            await running.until(lambda: bool(ended))
            assert ended[0].outcome == "done", ended
            assert (ended[0].decode_tps is None) is bool(options)
            speed = running["a"].speed
            guess = speed.expected_prefill_tps, 1 / speed.token_base
            async with direct(url) as client:
                shown = await chat(client, " ".join(WORDS * 10), max_tokens=64)
            learn_timings(speed, shown)
            assert speed.prefill_tps is not None
            assert 0.2 < guess[0] / speed.prefill_tps < 5
            if not options:
                assert speed.decode_tps is not None
                assert 0.2 < guess[1] / speed.decode_tps < 5

    try:
        asyncio.run(run())
    finally:
        stop_demo_server(server)


async def test_warm_slots_stay_warm_and_a_request_gets_its_slot_soon() -> None:
    server = spawn_demo_server(slots=2, size="medium")
    try:
        url = wait_for_demo_server(server)
        systems = [" ".join(WORDS[i:] * 20) for i in range(2)]
        async with direct(url) as client:
            for system in systems:
                await chat(client, system, max_tokens=4)
            async with calibrated(a_spec(url=url)) as (running, ended):
                await running.until(lambda: bool(ended))
                assert ended[0].outcome == "done", ended
                for system in systems:
                    timings = await chat(client, system, max_tokens=4)
                    assert timings["cache_n"] > 4 * timings["prompt_n"], timings
                # Another one is given up while it reads or writes.
                node = running["a"]
                await running.until(lambda: not node.leases)
                node.speed.forget()
                node.calibration.postpone(0.0)
                await running.until(lambda: bool(node.leases))
                take(node).release()
                await running.until(lambda: len(ended) == 2)
                assert ended[1].outcome == "given_up"
                await running.until(lambda: not node.leases, limit=5)
    finally:
        stop_demo_server(server)
