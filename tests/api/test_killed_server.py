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

import pytest

from gateway.events import StreamResumed
from gateway.fleet.node import NodeState
from gateway.tools.local.plan import ServerSpec
from gateway.tools.local.supervisor import LocalFleet
from tests.api.site import HELLO, Site, busy, running_site
from tests.gateways import until
from tests.servers import demo_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

NODES = 3
CLIENTS = 10
ANSWER = 500  # tokens, each of which outlasts the look at how many are under way
SETTINGS = {"health": {"interval": 0.2}}


@dataclass(slots=True)
class Seen:
    """What one client saw of one request."""

    stream: bool
    tokens: int
    began: bool = False
    """Whether a byte of the answer had come."""
    over: bool = False
    complete: bool = False
    error: dict[str, Any] | None = None


@dataclass(slots=True)
class Crowd:
    """Clients that ask one thing after the other until they are told to stop."""

    site: Site
    rng: random.Random
    stopped: bool = False
    seen: list[Seen] = field(default_factory=list)

    async def client(self, *, streams: bool) -> None:
        while not self.stopped:
            seen = Seen(streams, self.rng.randrange(100, 300))
            self.seen.append(seen)
            await self._ask(seen)
            seen.over = True

    async def _ask(self, seen: Seen) -> None:
        body = {
            "messages": HELLO, "max_tokens": seen.tokens, "stream": seen.stream,
            "temperature": 1.0, "seed": self.rng.randrange(1 << 30),
        }  # fmt: skip
        if seen.stream:
            body["stream_options"] = {"include_usage": True}
        path = "/v1/chat/completions"
        if not seen.stream:
            answer = await self.site.http.post(path, json=body)
            seen.began = True
            value = answer.json()
            seen.error = value.get("error")
            seen.complete = answer.status_code == 200 and _tokens(value) == seen.tokens
            return
        async with self.site.http.stream("POST", path, json=body) as stream:
            assert stream.status_code == 200, await stream.aread()
            data = b""
            async for chunk in stream.aiter_bytes():
                seen.began = True
                data += chunk
        assert data.endswith(b"\n\n")  # no event is ever cut
        *events, last = [event.removeprefix(b"data: ") for event in data.split(b"\n\n")[:-1]]
        values = [json.loads(event) for event in events]
        if last == b"[DONE]":
            texts = [v for v in values if v["choices"] and v["choices"][0]["delta"].get("content")]
            assert len({value["id"] for value in values}) == 1
            seen.complete = _tokens(values[-1]) == seen.tokens and len(texts) > 0
        else:
            seen.error = json.loads(last)["error"]


def _tokens(value: dict[str, Any]) -> Any:
    return value.get("usage", {}).get("completion_tokens")


def the_fleet(folder: Path, nodes: int, slots: int) -> LocalFleet:
    model = demo_model()
    specs = [
        ServerSpec(f"node-{n}", model, "demo", slots=slots, context=2048, threads=1, numa_node=0)
        for n in range(nodes)
    ]
    return LocalFleet(specs, folder, base_port=0)


def torn(site: Site, spared: set[str]) -> str | None:
    """A node that holds both a stream that has begun and a request that has no byte yet."""
    begun: set[str | None] = set()
    waiting: set[str | None] = set()
    for live in site.gateway.registry:
        if live.attempt is not None:
            began = live.attempt.is_sse and live.attempt.event_count > 5
            (begun if began else waiting).add(live.record.node)
    both = (begun & waiting) - spared
    return both.pop() if both else None


def under_way(site: Site) -> int:
    """Answers of which something has come."""
    attempts = [live.attempt for live in site.gateway.registry]
    return sum(attempt is not None and attempt.event_count > 0 for attempt in attempts)


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
        crowd = Crowd(site, random.Random(5))
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(crowd.client(streams=number % 2 == 0))
            killed: set[str] = set()
            await kill_one(site, fleet, crowd, killed)
            for _ in range(6):
                # What a server had begun may be over when it dies.
                if resumed:
                    break
                await kill_one(site, fleet, crowd, set())
            crowd.stopped = True
        assert [seen.error for seen in crowd.seen if seen.error is not None] == []
        assert all(seen.complete for seen in crowd.seen)
        assert len(crowd.seen) > 3 * CLIENTS
        assert len(resumed) >= 1
        assert all(event.resumed_on is not None for event in resumed)

        await site.until_idle()
        codes = [record.status for record in site.records]
        assert codes == [200] * len(crowd.seen)
        assert max(record.attempts for record in site.records) > 1
        assert [await busy(url) for url in fleet.urls] == [0] * NODES


async def kill_one(site: Site, fleet: LocalFleet, crowd: Crowd, killed: set[str]) -> None:
    """Kill one more server at its worst moment and see it return."""
    await until(lambda: torn(site, killed) is not None, limit=120)
    name = torn(site, killed)
    assert name is not None
    killed.add(name)
    index = int(name.removeprefix("node-"))
    pid = fleet.pids[index]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    untouched = [seen for seen in crowd.seen if not seen.over and not seen.began]
    assert untouched
    node = site.gateway.fleet.nodes[name]
    await until(lambda: node.state is not NodeState.READY)
    await until(lambda: all(seen.over for seen in untouched), limit=120)
    assert all(seen.complete for seen in untouched)
    await until(lambda: node.state is NodeState.READY and node.leased > 0, limit=120)
    assert fleet.pids[index] not in {None, pid}


async def test_the_only_server_is_waited_for_though_all_it_ran_failed_at_once(
    tmp_path: Path,
) -> None:
    # More slots than failures that open a circuit, which stays open beyond the end of this test.
    health = SETTINGS["health"] | {"open": 3600.0, "open_max": 3600.0}
    async with (
        the_fleet(tmp_path, 1, slots=8) as fleet,
        running_site(tmp_path, fleet.inventory(), {"health": health}) as site,
    ):
        body = {"messages": HELLO, "max_tokens": ANSWER}
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(site.http.post("/v1/chat/completions", json=body))
                for _ in range(10)
            ]
            await until(lambda: under_way(site) == 8)
            [pid] = fleet.pids
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        answers = [task.result() for task in asked]
        assert [answer.status_code for answer in answers] == [200] * 10
        assert all(_tokens(answer.json()) == ANSWER for answer in answers)
        again = [int(answer.headers["x-gateway-attempts"]) > 1 for answer in answers]
        assert sum(again) > site.gateway.settings.health.failures
