"""A batch row on a real server gives up its slot, and its text is the uncut one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gateway.batches.runner import Outcome, StoredRequest
from gateway.events import SlotYielded
from gateway.scheduling import batch_slots
from tests.gateways import running_gateway, until
from tests.servers import start_demo_servers

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

CHAT = "/v1/chat/completions"
CONTEXT = 4096
ANSWER = 3000
"""Tokens. A quick machine writes them in two seconds."""
DECODED = 100
"""Tokens after which it is cut."""


async def test_a_row_on_a_real_server_yields_and_loses_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A row that ends so soon would be waited for.
    monkeypatch.setattr(batch_slots, "LEAST_SECONDS_LEFT", 0.1)
    settings = {"health": {"interval": 0.5}, "resume": "exact"}
    body = {
        "messages": [{"role": "user", "content": "tell me a story"}],
        "max_tokens": ANSWER, "temperature": 0, "seed": 7, "ignore_eos": True,
    }  # fmt: skip
    async with (
        start_demo_servers(1, slots=1, context=CONTEXT, extra=("--exact",)) as urls,
        running_gateway(tmp_path, urls, settings) as running,
    ):
        gateway = running.gateway
        yields: list[SlotYielded] = []
        gateway.bus.subscribe(SlotYielded, yields.append)

        def start(number: int) -> asyncio.Task[Outcome]:
            row = StoredRequest(f"row_{number}", "anonymous:127.0.0.1", CHAT)
            return asyncio.create_task(
                gateway.background.runner.run(row, json.dumps(body).encode())
            )

        def decodes() -> bool:
            return any(
                one.attempt is not None and one.attempt.content_events > DECODED
                for one in gateway.registry
            )

        whole = await start(0)
        assert whole.status == 200
        row = start(1)
        await until(decodes, 60.0)
        short = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
        reply = await running.client.post(CHAT, json=short)
        assert reply.status_code == 200
        assert not row.done(), "the short request waited for the end of the row"
        cut = await row
        assert [event.resumed_on for event in yields] == ["node-0"]
        texts = [json.loads(one.content)["choices"] for one in (whole, cut)]
        assert texts[0] == texts[1]
        assert cut.record.completion_tokens == whole.record.completion_tokens == ANSWER
        assert cut.record.prompt_tokens == whole.record.prompt_tokens
