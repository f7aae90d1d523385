"""Collectors that are dead, mute, slow, wrong or full: no request notices."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.emulator import EmulatedNode
from tests.gateway_processes import serving
from tests.gateways import Running, running_gateway, until
from tests.watch.tracing.collector import running_collector

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
GRACE = 50.0
"""Seconds that a loaded machine may take for what should take two, and less than a mute collector
takes."""


def settings(url: str, **more: Any) -> dict[str, Any]:
    return {"telemetry": {"traces": {"endpoint": url, "share": 1, **more}}}


async def ask(running: Running, count: int) -> None:
    for _ in range(count):
        assert (await running.client.post(CHAT, json=BODY)).status_code == 200


async def dropped(running: Running) -> dict[str, int]:
    async with httpx.AsyncClient(base_url=running.admin_url, trust_env=False) as admin:
        page = (await admin.get("/metrics")).text
    found = {}
    for line in page.splitlines():
        if line.startswith("llama_gateway_traces_dropped_total{"):
            name, _, value = line.rpartition(" ")
            found[name.partition('reason="')[2].rstrip('"}')] = int(value)
    return found


ANSWERS = {
    "refuses": b"HTTP/1.1 400 Bad Request\r\ncontent-length: 5\r\n\r\nwrong",
    "is no collector": b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
    "speaks no HTTP": b"\x16\x03\x01 what is this\r\n\r\n",
    "leads elsewhere": b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:9/\r\n"
    b"content-length: 0\r\n\r\n",
}


@pytest.mark.parametrize("answer", [b"", *ANSWERS.values()], ids=["hangs", *ANSWERS])
async def test_a_collector_that_takes_nothing_loses_traces_and_nothing_else(
    answer: bytes, tmp_path: Path
) -> None:
    async with running_collector() as collector, EmulatedNode(slots=4) as node:
        collector.answer = answer
        chosen = settings(collector.url, timeout=0.1)
        async with running_gateway(tmp_path, [node.url], chosen) as running:
            await ask(running, 5)
            counts = running.gateway.tracing.counts
            await until(lambda: counts.not_sent + counts.exported == 5, GRACE)
            await ask(running, 5)
            assert counts.not_sent >= 5
            assert (await dropped(running))["not_taken"] >= 5


async def test_a_collector_that_is_busy_for_a_moment_gets_them_later(tmp_path: Path) -> None:
    async with running_collector() as collector, EmulatedNode() as node:
        good = collector.answer
        collector.answer = b"HTTP/1.1 503 Busy\r\nretry-after: 0\r\ncontent-length: 0\r\n\r\n"
        async with running_gateway(tmp_path, [node.url], settings(collector.url)) as running:
            await ask(running, 1)
            await until(lambda: collector.heads, GRACE)
            collector.answer = good
            await collector.until_roots(1)
            assert running.gateway.tracing.counts.not_sent == 0
    assert len(collector.roots()) == 1, (collector.heads, collector.connections)


@pytest.mark.parametrize(
    ("answer", "taken"),
    [(b"HTTP/1.1 200 OK\r\nx: ", 0), (b"HTTP/1.1 200 OK\r\ncontent-length: 60000\r\n\r\n", 1)],
    ids=["head", "body"],
)
async def test_a_collector_that_drips_its_answer_holds_nothing_up(
    answer: bytes, taken: int, tmp_path: Path
) -> None:
    async with running_collector() as collector, EmulatedNode() as node:
        good = collector.answer
        collector.answer, collector.drips = answer, True
        chosen = settings(collector.url, timeout=1)
        async with running_gateway(tmp_path, [node.url], chosen) as running:
            counts = running.gateway.tracing.counts
            await ask(running, 1)
            await until(lambda: counts.not_sent + counts.exported == 1, GRACE)
            assert counts.exported == taken
            collector.answer, collector.drips = good, False
            async with asyncio.timeout(GRACE):
                while counts.exported == taken:  # The machine may stand still for one of them.
                    sent = counts.not_sent + counts.exported
                    await ask(running, 1)
                    await until(lambda n=sent: counts.not_sent + counts.exported > n, GRACE)


@pytest.mark.slow
async def test_a_signal_ends_a_gateway_whose_collector_is_mute(tmp_path: Path) -> None:
    async with running_collector() as collector, EmulatedNode() as node:
        collector.answer = b""
        chosen = settings(collector.url, timeout=60)
        async with serving(tmp_path / "site", node, settings=chosen) as line:
            async with httpx.AsyncClient(base_url=line.url, trust_env=False) as client:
                assert (await client.post(CHAT, json=BODY, timeout=60)).status_code == 200
            await until(lambda: collector.heads, GRACE)
            began = time.monotonic()
            os.kill(line.first.pid, signal.SIGTERM)
            assert await asyncio.wait_for(line.first.wait(), GRACE) == 0
            assert time.monotonic() - began < GRACE
