"""Background requests outlive the gateway that runs them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.emulator import EmulatedNode
from tests.gateways import running_gateway, until

BODY = {"messages": [{"role": "user", "content": "tell me a story"}], "max_tokens": 40}


async def test_what_runs_when_the_gateway_ends_is_run_by_the_next_one(tmp_path: Path) -> None:
    path, prefer = "/v1/chat/completions", {"prefer": "respond-async"}
    async with EmulatedNode(slots=1, decode_tps=20, answer_tokens=1000) as node:
        async with running_gateway(tmp_path, [node.url]) as running:
            answers = [await running.client.post(path, json=BODY, headers=prefer) for _ in range(2)]
            await until(lambda: node.busy == 1)
        urls = [answer.headers["location"] for answer in answers]
        async with running_gateway(tmp_path, [node.url]) as running, asyncio.timeout(60):
            for url in urls:
                while (found := await running.client.get(url)).status_code == 202:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                assert found.status_code == 200
                assert found.json()["usage"]["completion_tokens"] == 40
            ledger = running.gateway.ledger
            assert ledger is not None
