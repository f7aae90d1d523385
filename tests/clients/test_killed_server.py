"""`kill -9` of a real server under load, in a fleet that restarts it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gateway.events import StreamResumed
from gateway.local.server import LocalFleet, ServerSpec
from gateway.nodes.node import NodeState
from tests.clients.site import HELLO, Site, busy, running_site
from tests.gateways import until
from tests.known import known
from tests.servers import demo_model, server_binary

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

NODES = 3
CLIENTS = 10
TOKENS = 300
SETTINGS = {"health": {"interval": 0.2}}


async def is_answered(site: Site, *, stream: bool) -> bool:
    """Whether a request gets its whole answer, and no event of it is cut."""
    usage: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    body = {"messages": HELLO, "max_tokens": TOKENS, "stream": stream, **usage}
    answer = await site.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    last = answer.content
    if stream:
        *events, last, end, rest = answer.content.split(b"\n\n")
        assert (end, rest, len(events) > 20) == (b"data: [DONE]", b"", True)
        assert len({json.loads(event.removeprefix(b"data: "))["id"] for event in events}) == 1
    count = json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"]
    return bool(count == TOKENS)


def torn(site: Site) -> set[str | None]:
    """The nodes with both a stream in decode and a request without a byte of a response."""
    begun: set[str | None] = set()
    waiting: set[str | None] = set()
    for one in site.gateway.registry:
        if one.attempt is not None:
            has_begun = one.attempt.is_sse and one.attempt.content_events > 5
            (begun if has_begun and one.record.stream else waiting).add(one.record.node)
    return begun & waiting


async def halted(site: Site, fleet: LocalFleet) -> tuple[str, int]:
    """Halt a server that is torn when all that it has sent is read: its node and pid."""
    async with asyncio.timeout(240):
        while True:
            await until(lambda: torn(site), limit=120)
            for name in filter(None, torn(site)):
                pid = known(fleet.pids[int(name.removeprefix("node-"))])
                os.kill(pid, signal.SIGSTOP)
                before, same = -1, 0
                while same < 10:
                    await asyncio.sleep(0.01)
                    here = [one for one in site.gateway.registry if one.record.node == name]
                    now = sum(one.attempt.content_events for one in here if one.attempt)
                    before, same = now, same + 1 if now == before else 0
                if name in torn(site):
                    return name, pid
                os.kill(pid, signal.SIGCONT)


@pytest.mark.smoke
async def test_a_killed_server_costs_no_answer(tmp_path: Path) -> None:
    options: dict[str, Any] = {"slots": 2, "context": 2048, "threads": 1, "numa_node": 0}
    specs = [ServerSpec(f"node-{n}", demo_model(), "demo", **options) for n in range(NODES)]
    async with (
        LocalFleet(specs, tmp_path, binary=server_binary(), base_port=0) as fleet,
        running_site(tmp_path, fleet.inventory(), SETTINGS) as site,
    ):
        nodes = site.gateway.fleet.nodes
        await until(lambda: all(node.state is NodeState.READY for node in nodes.values()))
        resumed: list[StreamResumed] = []
        site.gateway.bus.subscribe(StreamResumed, resumed.append)

        async def client(number: int) -> list[bool]:
            return [await is_answered(site, stream=number % 2 == 0) for _ in range(4)]

        sent = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
        name, killed = await halted(site, fleet)
        os.kill(killed, signal.SIGKILL)
        await until(lambda: nodes[name].state is not NodeState.READY)
        assert all(all(answers) for answers in await asyncio.gather(*sent))
        await until(lambda: nodes[name].state is NodeState.READY, limit=120)
        assert fleet.pids[int(name.removeprefix("node-"))] not in {None, killed}
        assert resumed
        assert all(event.resumed_on is not None for event in resumed)
        assert await is_answered(site, stream=True)
        await site.until_idle()
        assert {record.status for record in site.records} == {200}
        assert max(record.attempts for record in site.records) > 1
        assert [await busy(url) for url in fleet.urls] == [0] * NODES
