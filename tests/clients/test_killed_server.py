"""`kill -9` of a real server under load, in a fleet that restarts it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.events import StreamResumed
from gateway.local.server import LocalFleet, ServerSpec
from gateway.nodes.node import NodeState
from tests.clients.site import HELLO, Site, busy, running_site
from tests.gateways import until
from tests.servers import demo_model, server_binary

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

NODES = 3
CLIENTS = 10
SETTINGS = {"health": {"interval": 0.2}}


@dataclass(slots=True)
class ClientRequest:
    """One request as its client saw it."""

    stream: bool
    tokens: int
    began: bool = False
    """Whether a byte of the answer has come."""
    over: bool = False
    complete: bool = False
    error: dict[str, Any] | None = None


@dataclass(slots=True)
class ClientLoad:
    """Clients that send one request after the other until they are stopped."""

    site: Site
    rng: random.Random
    stopped: bool = False
    requests: list[ClientRequest] = field(default_factory=list)

    async def client(self, *, streams: bool) -> None:
        while not self.stopped:
            request = ClientRequest(streams, self.rng.randrange(100, 300))
            self.requests.append(request)
            await self._ask(request)
            request.over = True

    async def _ask(self, request: ClientRequest) -> None:
        body = {
            "messages": HELLO, "max_tokens": request.tokens, "stream": request.stream,
            "temperature": 1.0, "seed": self.rng.randrange(1 << 30),
        }  # fmt: skip
        if request.stream:
            body["stream_options"] = {"include_usage": True}
        path = "/v1/chat/completions"
        if not request.stream:
            answer = await self.site.http.post(path, json=body)
            request.began = True
            value = answer.json()
            request.error = value.get("error")
            request.complete = answer.status_code == 200 and _tokens(value) == request.tokens
            return
        async with self.site.http.stream("POST", path, json=body) as stream:
            assert stream.status_code == 200, await stream.aread()
            data = b""
            async for chunk in stream.aiter_bytes():
                request.began = True
                data += chunk
        assert data.endswith(b"\n\n")  # no event is ever cut
        *events, last = [event.removeprefix(b"data: ") for event in data.split(b"\n\n")[:-1]]
        values = [json.loads(event) for event in events]
        if last == b"[DONE]":
            texts = [v for v in values if v["choices"] and v["choices"][0]["delta"].get("content")]
            assert len({value["id"] for value in values}) == 1
            request.complete = _tokens(values[-1]) == request.tokens and len(texts) > 0
        else:
            request.error = json.loads(last)["error"]


def _tokens(value: dict[str, Any]) -> Any:
    return value.get("usage", {}).get("completion_tokens")


def the_fleet(folder: Path, nodes: int, slots: int) -> LocalFleet:
    model = demo_model()
    specs = [
        ServerSpec(f"node-{n}", model, "demo", slots=slots, context=2048, threads=1, numa_node=0)
        for n in range(nodes)
    ]
    return LocalFleet(specs, folder, binary=server_binary(), base_port=0)


def torn(site: Site) -> set[str]:
    """The nodes with both a client's stream in decode and a request without a response byte."""
    begun: set[str] = set()
    waiting: set[str] = set()
    for in_flight in site.gateway.registry:
        attempt, record = in_flight.attempt, in_flight.record
        if attempt is None or record.node is None:
            continue
        if not (attempt.is_sse and attempt.content_events > 5):
            waiting.add(record.node)
        elif record.stream:
            begun.add(record.node)
    return begun & waiting


async def halt_torn(site: Site, fleet: LocalFleet) -> tuple[str, int]:
    """Halt a server while it is torn, and return its node and pid.

    While it runs, an answer that the gateway believes to be in decode may be on its way whole.
    """
    async with asyncio.timeout(240):
        while True:
            await until(lambda: torn(site), limit=120)
            name = torn(site).pop()
            pid = fleet.pids[int(name.removeprefix("node-"))]
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            process = psutil.Process(pid)
            await until(lambda process=process: process.status() == psutil.STATUS_STOPPED)
            await until_read(site, name)
            if name in torn(site):
                return name, pid
            os.kill(pid, signal.SIGCONT)


async def until_read(site: Site, name: str) -> None:
    """Wait until the gateway has read all that a halted server has sent."""
    before: object = None
    same = 0
    while same < 10:
        await asyncio.sleep(0.01)
        now = {
            id(one): one.attempt and one.attempt.content_events
            for one in site.gateway.registry
            if one.record.node == name
        }
        same = same + 1 if now == before else 0
        before = now


@pytest.mark.smoke
async def test_a_killed_server_costs_no_answer(tmp_path: Path) -> None:
    async with (
        the_fleet(tmp_path, NODES, slots=2) as fleet,
        running_site(tmp_path, fleet.inventory(), SETTINGS) as site,
    ):
        await until(
            lambda: all(n.state is NodeState.READY for n in site.gateway.fleet.nodes.values())
        )
        resumed: list[StreamResumed] = []
        site.gateway.bus.subscribe(StreamResumed, resumed.append)
        load = ClientLoad(site, random.Random(5))
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(load.client(streams=number % 2 == 0))
            await kill_one(site, fleet, load)
            load.stopped = True
        assert [request.error for request in load.requests if request.error is not None] == []
        assert all(request.complete for request in load.requests)
        assert len(load.requests) > 2 * CLIENTS
        assert len(resumed) >= 1
        assert all(event.resumed_on is not None for event in resumed)

        await site.until_idle()
        codes = [record.status for record in site.records]
        assert codes == [200] * len(load.requests)
        assert max(record.attempts for record in site.records) > 1
        assert [await busy(url) for url in fleet.urls] == [0] * NODES


async def kill_one(site: Site, fleet: LocalFleet, load: ClientLoad) -> None:
    """Kill a server at the worst moment and wait until it is back."""
    name, pid = await halt_torn(site, fleet)
    index = fleet.pids.index(pid)
    os.kill(pid, signal.SIGKILL)
    untouched = [request for request in load.requests if not request.over and not request.began]
    assert untouched
    node = site.gateway.fleet.nodes[name]
    await until(lambda: node.state is not NodeState.READY)
    await until(lambda: all(request.over for request in untouched), limit=120)
    assert all(request.complete for request in untouched)
    await until(lambda: node.state is NodeState.READY and node.leased > 0, limit=120)
    assert fleet.pids[index] not in {None, pid}
