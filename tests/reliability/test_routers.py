"""Real routers (`llama-server --models-dir`) behind a gateway that places their models."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gateway.events import ModelLoadChanged, RouterLeftAlone
from gateway.nodes.node import Node, NodeState
from gateway.nodes.router import FIRST_RETRY
from tests.gateways import Running, running_gateway, until
from tests.processes import free_port, wait_until_gone
from tests.servers import (
    DemoServer,
    demo_model,
    running_router,
    spawn_router,
    stop_router,
    wait_for_demo_server,
)

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.binary_only("the wheel's server has no router mode"),
]
CHAT = "/v1/chat/completions"
ONE_EACH = ("--models-max", "1")
NO_LIMIT = ("--models-max", "0")


def folder_of(folder: Path, names: Sequence[str]) -> Path:
    """A folder in which the demo model has these names."""
    folder.mkdir()
    for name in names:
        (folder / f"{name}.gguf").symlink_to(demo_model())
    return folder


@contextmanager
def routers(count: int, models: Path, *extra: str, **options: Any) -> Iterator[list[DemoServer]]:
    """So many routers over one folder or preset file."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(running_router(models, extra=extra, **options))
            for _ in range(count)
        ]


@dataclass
class Seen:
    """A gateway over routers, and what it has told of their models."""

    running: Running
    changes: list[ModelLoadChanged] = field(default_factory=list)
    left_alone: list[RouterLeftAlone] = field(default_factory=list)

    def __getitem__(self, name: str) -> Node:
        return self.running.gateway.fleet.nodes[name]

    @property
    def client(self) -> httpx.AsyncClient:
        return self.running.client

    def loads(self) -> int:
        return sum(one.change == "loaded" for one in self.changes)

    def loaded(self) -> set[str]:
        nodes = self.running.gateway.fleet.nodes.values()
        return {node.name for node in nodes if node.load is not None and node.load.loaded}

    def expect_no_blame(self, load: Load) -> None:
        """No request has failed, no load has, and nobody else is said to have done anything."""
        assert not load.failed
        assert not [one for one in self.changes if one.by_others or one.change == "failed"]

    async def until_state(self, name: str, *states: NodeState, limit: float = 60.0) -> None:
        nodes = self.running.gateway.fleet.nodes
        await until(
            lambda: name in nodes_of(self) and self[name].state in states,
            limit,
            lambda: [f"{one.name}: {one.state} {one.reason}" for one in nodes.values()],
        )


def nodes_of(seen: Seen) -> dict[str, Node]:
    return seen.running.gateway.fleet.nodes


@asynccontextmanager
async def gateway_over(
    folder: Path,
    servers: Sequence[DemoServer | Mapping[str, Any]],
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Seen]:
    """A gateway over these routers, named r1, r2 and so on."""
    nodes = [
        {"name": f"r{number}", "url": one.url} if isinstance(one, DemoServer) else one
        for number, one in enumerate(servers, 1)
    ]
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240 - nothing else runs yet
    async with running_gateway(folder, nodes, settings, **options) as running:
        seen = Seen(running)
        running.gateway.bus.subscribe(ModelLoadChanged, seen.changes.append)
        running.gateway.bus.subscribe(RouterLeftAlone, seen.left_alone.append)
        yield seen


def chat(model: str, words: str = "hi", **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": words}], "max_tokens": 200}
    return {**body, **more}


@dataclass
class Load:
    """Clients that ask for one model after the other."""

    answered: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    longest: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.answered.total() / self.seconds

    async def run(
        self, client: httpx.AsyncClient, models: Sequence[str], clients: int, seconds: float
    ) -> Load:
        """For so many seconds, then until all have their answers."""
        began = time.monotonic()

        async def ask_on(number: int) -> None:
            rng = random.Random(number)
            while time.monotonic() < began + seconds:
                model = rng.choice(models)
                asked = time.monotonic()
                answer = await client.post(CHAT, json=chat(model, f"{number} {rng.random()}"))
                waited = time.monotonic() - asked
                self.longest[model] = max(self.longest.get(model, 0.0), waited)
                if answer.status_code == 200:
                    self.answered[model] += 1
                else:
                    self.failed.append(f"{answer.status_code} {answer.text[:200]}")

        await asyncio.gather(*(ask_on(number) for number in range(clients)))
        self.seconds += time.monotonic() - began
        return self


async def test_two_models_on_two_routers_of_one_model_each_are_as_if_pinned(tmp_path: Path) -> None:
    models = folder_of(tmp_path / "models", "ab")
    pinned = {"models": {"a": {"pin": ["r1"]}, "b": {"pin": ["r2"]}}}
    with routers(2, models, *ONE_EACH) as found:
        by_hand, placed = Load(), Load()
        async with gateway_over(tmp_path / "pinned", found, pinned) as seen:
            await seen.until_state("r1/a", NodeState.READY)
            await seen.until_state("r2/b", NodeState.READY)
            await by_hand.run(seen.client, "ab", 4, 8.0)
            assert seen.loaded() == {"r1/a", "r2/b"}
        for one in found:
            await unload_all(one)
        async with gateway_over(tmp_path / "placed", found) as seen:
            await placed.run(seen.client, "ab", 4, 20.0)
            loads = seen.loads()
        assert not by_hand.failed
        assert not placed.failed
        assert loads <= 6
        assert placed.rate >= 0.9 * by_hand.rate


async def unload_all(router: DemoServer) -> None:
    async with httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=60) as client:
        while True:
            values = await listed(client)
            if set(values.values()) <= {"unloaded"}:
                return
            for name, value in values.items():
                if value != "unloaded":
                    await client.post("/models/unload", json={"model": name})
            await asyncio.sleep(0.05)


async def listed(client: httpx.AsyncClient) -> dict[str, str]:
    models = (await client.get("/v1/models")).json()["data"]
    return {model["id"]: model["status"]["value"] for model in models}


async def test_three_models_on_two_routers_wait_no_longer_than_their_bound(tmp_path: Path) -> None:
    models = folder_of(tmp_path / "models", "abc")
    with routers(2, models, *ONE_EACH) as found:
        settings = {"model_placement": {"starvation": 5, "hysteresis": 1}}
        async with gateway_over(tmp_path / "gateway", found, settings) as seen:
            load = await Load().run(seen.client, "abc", 6, 20.0)
            assert not load.failed
            assert set(load.answered) == set("abc")
            # The bound is on the wait for a load.
            assert max(load.longest.values()) < 5 + 3


def child_of(router: DemoServer, model: str) -> psutil.Process | None:
    """The process that serves this model."""
    for child in psutil.Process(router.pid).children(recursive=True):
        with suppress(psutil.Error):
            words = child.cmdline()
            if any(pair == ("--alias", model) for pair in itertools.pairwise(words)):
                return child
    return None


GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 800}


async def stream_of(
    client: httpx.AsyncClient, body: Mapping[str, Any], cut: Callable[[], object] | None = None
) -> str:
    """The text of a stream; `cut` is called once in its middle."""
    text, events = "", 0
    async with client.stream("POST", CHAT, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            events += 1
            text += "".join(one["delta"].get("content") or "" for one in event["choices"])
            if cut is not None and len(text) > 500:
                cut()
                cut = None
    assert cut is None, "the stream ended too soon"
    return text


async def test_a_stream_goes_on_elsewhere_when_its_model_s_server_is_killed(tmp_path: Path) -> None:
    models = folder_of(tmp_path / "models", "ab")
    with routers(2, models, *NO_LIMIT) as found:
        async with gateway_over(tmp_path / "gateway", found) as seen:
            body = chat("a", "a long story", **GREEDY)
            whole = await stream_of(seen.client, body)
            [name] = seen.loaded()
            router = found[int(name[1]) - 1]

            def kill() -> None:
                child = child_of(router, "a")
                assert child is not None
                child.kill()

            assert await stream_of(seen.client, body, kill) == whole


async def test_a_plain_request_is_answered_when_its_model_s_server_is_killed(
    tmp_path: Path,
) -> None:
    models = folder_of(tmp_path / "models", "ab")
    with routers(2, models, *NO_LIMIT) as found:
        async with gateway_over(tmp_path / "gateway", found) as seen:
            body = chat("a", "a long story", **GREEDY)
            whole = (await seen.client.post(CHAT, json=body)).json()
            [name] = seen.loaded()
            asked = asyncio.create_task(seen.client.post(CHAT, json=body))
            await until(lambda: any(one.last_content_at for one in seen[name].leases))
            child = child_of(found[int(name[1]) - 1], "a")
            assert child is not None
            assert not asked.done()
            child.kill()
            answer = await asked
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["message"] == whole["choices"][0]["message"]


async def test_files_that_are_no_models_fail_by_themselves(tmp_path: Path) -> None:
    models = folder_of(tmp_path / "models", "ab")
    (models / "cut.gguf").write_bytes(demo_model().read_bytes()[:3_000_000])
    (models / "none.gguf").write_text("no model")
    with routers(2, models, *NO_LIMIT) as found:
        settings = {"retries": {"wait_for_node": 5}}
        async with gateway_over(tmp_path / "gateway", found, settings) as seen:
            others = asyncio.create_task(Load().run(seen.client, "ab", 2, 8.0))
            for name in ("cut", "none"):
                answer = await seen.client.post(CHAT, json=chat(name))
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_node")
                assert f"No node could load '{name}'" in answer.json()["error"]["message"]
                assert "exit code 1): its log says why" in answer.json()["error"]["message"]
                assert 1 <= int(answer.headers["retry-after"]) <= 2 * FIRST_RETRY
                for node in (seen[f"r1/{name}"], seen[f"r2/{name}"]):
                    assert node.load is not None
                    assert 1 <= node.load.failures <= 2
            load = await others
            assert not load.failed
            assert set(load.answered) == {"a", "b"}


class Restartable:
    """A router that a test kills and starts again on its port."""

    def __init__(self, models: Path, *extra: str) -> None:
        self.port = free_port()
        self._models, self._extra = models, extra
        self.server = self._start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _start(self) -> DemoServer:
        return spawn_router(self._models, port=self.port, extra=self._extra)

    def kill(self, number: int = signal.SIGKILL) -> None:
        children = psutil.Process(self.server.pid).children(recursive=True)
        os.kill(self.server.pid, number)
        self.server.process.wait(60)
        wait_until_gone(child.pid for child in children)

    async def start(self) -> None:
        self.server.log.close()
        self.server = self._start()
        await asyncio.to_thread(wait_for_demo_server, self.server)


@asynccontextmanager
async def restartable(count: int, models: Path, *extra: str) -> AsyncIterator[list[Restartable]]:
    found: list[Restartable] = []
    try:
        found.extend(Restartable(models, *extra) for _ in range(count))
        for one in found:
            await asyncio.to_thread(wait_for_demo_server, one.server)
        yield found
    finally:
        for one in found:
            stop_router(one.server)


def nodes_for(found: Sequence[Restartable]) -> list[dict[str, Any]]:
    return [{"name": f"r{number}", "url": one.url} for number, one in enumerate(found, 1)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_router_may_be_restarted_while_another_serves(
    tmp_path: Path, number: signal.Signals
) -> None:
    models = folder_of(tmp_path / "models", "ab")
    async with (
        restartable(2, models, *NO_LIMIT) as found,
        gateway_over(tmp_path / "gateway", nodes_for(found)) as seen,
    ):
        load = Load()
        running = asyncio.create_task(load.run(seen.client, "ab", 4, 15.0))
        for router in found:
            await asyncio.sleep(3.0)
            await asyncio.to_thread(router.kill, number)
            await asyncio.sleep(2.0)
            await router.start()
        await running
        seen.expect_no_blame(load)


async def test_requests_wait_for_the_only_router_and_are_answered(tmp_path: Path) -> None:
    models = folder_of(tmp_path / "models", "ab")
    async with (
        restartable(1, models, *NO_LIMIT) as [router],
        gateway_over(tmp_path / "gateway", nodes_for([router])) as seen,
    ):
        load = Load()
        running = asyncio.create_task(load.run(seen.client, "ab", 3, 12.0))
        await asyncio.sleep(2.0)
        await asyncio.to_thread(router.kill)
        await asyncio.sleep(4.0)
        await router.start()
        before = load.answered.total()
        await until(lambda: load.answered.total() > before, 10.0)
        await running
        seen.expect_no_blame(load)
