"""Stored responses whose clients wait for them while the gateway ends (SIGTERM)."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.emulator import EmulatedNode
from tests.gateway_processes import Succession, serving
from tests.gateways import until
from tests.web.test_background import ended

ASK: dict[str, Any] = {"model": "demo", "input": "tell me a story", "max_output_tokens": 40}
pytestmark = pytest.mark.slow

KEPT = {"store_responses": True, "background_at_once": 1}


def client(line: Succession, retries: int = 0) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{line.url}/v1",
        api_key="none",
        max_retries=retries,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False, timeout=60.0),
    )


async def events_of(api: AsyncOpenAI, **more: Any) -> list[Any]:
    stream = await api.responses.create(**ASK, **more, store=True, stream=True)
    return [event async for event in stream]


def logs(folder: Path) -> int:
    return len(list((folder / "state").rglob("events-*")))


async def test_what_outlasts_the_grace_ends_for_client_and_store(tmp_path: Path) -> None:
    settings = {"batches": KEPT, "shutdown": {"grace": 0.5}}
    async with EmulatedNode(slots=1, decode_tps=2, answer_tokens=1000) as node:
        async with serving(tmp_path, node, settings=settings) as line, client(line) as api:
            running = asyncio.create_task(events_of(api))
            await until(lambda: node.busy == 1)
            queued = asyncio.create_task(events_of(api))
            await until(lambda: logs(tmp_path) == 2)
            plain = asyncio.create_task(api.responses.create(**ASK, store=True))
            await until(lambda: logs(tmp_path) == 3)
            later = await api.responses.create(**ASK, background=True)
            os.kill(line.newest, signal.SIGTERM)
            seen = [(await one)[-1] for one in (running, queued)]
            assert [event.type for event in seen] == ["response.failed"] * 2
            assert all("shut down" in event.response.error.message for event in seen)
            with pytest.raises(openai.InternalServerError) as refused:
                await plain
            error = refused.value
            assert (error.status_code, error.code) == (503, "shutting_down")
            # Clients send it again by themselves: this one costs nothing, and goes on nowhere.
            assert int(error.response.headers["retry-after"]) > 0
            assert "x-should-retry" not in error.response.headers
            (plain_id,) = re.findall(r"'(resp_[0-9a-f]+)'", error.message)
            assert await line.first.wait() == 0
        ids = [*(event.response.id for event in seen), plain_id]
    async with (
        EmulatedNode(decode_tps=500, answer_tokens=1000) as other,
        serving(tmp_path, other, settings=settings) as line,
        client(line) as api,
    ):
        for id_, known in zip(ids, [*seen, None], strict=True):
            found = await api.responses.retrieve(id_)
            assert found.error is not None
            assert (found.status, found.error.code) == ("failed", "server_error")
            assert known is None or found.to_dict() == known.response.to_dict()
        assert (await ended(api, later.id)).status == "incomplete"
    # The one that was cut, and the one in the background.
    assert (node.requests, other.requests) == (1, 1)
