"""Edges over real llama.cpp servers: nothing waits in a server; a dead edge's slots return."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.edges.test_processes import CHAT, EDGES, edges_of, http, relayed_by, until_ready
from tests.gateway_processes import LIMIT, serving
from tests.polling import eventually
from tests.servers import start_demo_servers

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]

BODY = {
    "messages": [{"role": "user", "content": "Once upon a time"}],
    "stream": True,
    "max_tokens": 30,
    "ignore_eos": True,
}


async def test_streams_through_edges_and_one_that_dies(tmp_path: Path) -> None:
    async with start_demo_servers(2) as urls:
        nodes = [{"name": f"n{number}", "url": url} for number, url in enumerate(urls)]
        async with (
            serving(tmp_path, nodes, settings=EDGES) as line,
            http(line.url) as client,
            http(line.admin_url) as admin,
        ):
            pids = await until_ready(admin)

            async def ask() -> str:
                answer = await client.post(CHAT, json=BODY)
                assert answer.status_code == 200, answer.text
                assert answer.text.endswith("data: [DONE]\n\n")
                return relayed_by(answer)

            # More than the four slots: some wait, in the gateway.
            by = await asyncio.gather(*(ask() for _ in range(16)))
            assert len(set(by)) == 2
            for url in urls:
                async with http(url) as node:
                    metrics = (await node.get("/metrics")).text
                assert re.search(r"^llamacpp:requests_deferred 0$", metrics, re.MULTILINE)

            endless = BODY | {"max_tokens": 2000}
            streams = [asyncio.create_task(client.post(CHAT, json=endless)) for _ in range(4)]

            async def all_slots_busy() -> bool | None:
                streaming = [one["streams"] for one in await edges_of(admin)]
                return True if streaming == [2, 2] else None

            await eventually(all_slots_busy)
            os.kill(pids[0], signal.SIGKILL)
            ends = await asyncio.gather(*streams, return_exceptions=True)
            assert sum(isinstance(one, httpx.HTTPError) for one in ends) == 2
            # Its slots are free again, and used by the others.
            await asyncio.wait_for(asyncio.gather(*(ask() for _ in range(8))), LIMIT)

            async def none_busy() -> bool | None:
                found = (await admin.get("/admin/nodes")).json()["nodes"]
                return True if not any(one["slots_busy"] for one in found) else None

            await eventually(none_busy)
