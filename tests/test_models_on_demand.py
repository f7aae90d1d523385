"""Real routers (`llama-server --models-dir`) behind a gateway that places their models."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gateway.events import ModelLoadChanged
from gateway.nodes.node import Node, NodeState
from gateway.nodes.router import MOST_BY_OTHERS, ModelLoad
from tests.gateway_processes import serving
from tests.gateways import Running, running_gateway, until
from tests.polling import eventually
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
def routers(count: int, models: Path, *extra: str) -> Iterator[list[DemoServer]]:
    """So many routers over one folder or preset file."""
    with ExitStack() as stack:
        found = [running_router(models, extra=extra) for _ in range(count)]
        yield [stack.enter_context(one) for one in found]


@dataclass
class Seen:
    """A gateway over routers, and what it has told of their models."""

    running: Running
    changes: list[ModelLoadChanged] = field(default_factory=list)

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    @property
    def nodes(self) -> dict[str, Node]:
        return self.running.gateway.fleet.nodes

    @property
    def client(self) -> httpx.AsyncClient:
        return self.running.client

    def all_loads(self, router: str) -> list[ModelLoad]:
        return [one.load for one in self[router].instances.values() if one.load is not None]

    def loaded(self) -> set[str]:
        return {node.name for node in self.nodes.values() if node.load and node.load.loaded}

    async def until_state(self, name: str, *states: NodeState, limit: float = 60.0) -> None:
        await until(
            lambda: name in self.nodes and self[name].state in states,
            limit,
            lambda: [f"{one.name}: {one.state} {one.reason}" for one in self.nodes.values()],
        )


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
        yield seen


@asynccontextmanager
async def placed(
    folder: Path,
    models: str,
    count: int,
    *extra: str,
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[tuple[Seen, list[DemoServer]]]:
    """A gateway over so many routers of models with these names of one letter."""
    with routers(count, folder_of(folder / "models", models), *extra) as found:
        async with gateway_over(folder / "gateway", found, settings) as seen:
            yield seen, found


def chat(model: str, words: str = "hi", **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": words}], "max_tokens": 200}
    return {**body, **more}


async def ask_on(client: httpx.AsyncClient, models: str, seconds: float) -> None:
    """Ask for one model after the other for so many seconds; all answer."""
    rng, until_then = random.Random(5), time.monotonic() + seconds
    while time.monotonic() < until_then:
        answer = await client.post(CHAT, json=chat(rng.choice(models), f"{rng.random()}"))
        assert answer.status_code == 200, answer.text


def child_of(router: DemoServer, model: str) -> psutil.Process:
    """The process that serves this model."""
    for child in psutil.Process(router.pid).children(recursive=True):
        with suppress(psutil.Error):
            words = child.cmdline()
            if any(pair == ("--alias", model) for pair in itertools.pairwise(words)):
                return child
    raise AssertionError(f"no process serves {model}")


GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 800}


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


async def test_a_model_s_server_that_hangs_for_good_is_ended_and_loaded_anew(
    tmp_path: Path,
) -> None:
    quick = {"health": {"timeout": 1, "interval": 2, "prefill_grace": 3}}
    async with placed(tmp_path, "a", 1, *NO_LIMIT, settings=quick) as (seen, found):
        assert (await seen.client.post(CHAT, json=chat("a"))).status_code == 200
        child = child_of(found[0], "a")
        child.suspend()
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await seen.client.post(CHAT, json=chat("a"))
        await seen.until_state("r1/a", NodeState.DOWN)
        await seen.until_state("r1/a", NodeState.UNLOADED)
        assert (await seen.client.post(CHAT, json=chat("a"))).status_code == 200
        assert child_of(found[0], "a") != child


class Restartable:
    """A router that a test kills and starts again on its port."""

    def __init__(self, models: Path, *extra: str) -> None:
        self.port = free_port()
        self.spawn = functools.partial(spawn_router, models, port=self.port, extra=extra)
        self.server = self.spawn()

    def kill(self) -> None:
        children = psutil.Process(self.server.pid).children(recursive=True)
        self.server.kill()
        wait_until_gone(child.pid for child in children)

    async def start(self) -> None:
        self.server.log.close()
        self.server = self.spawn()
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
    return [
        {"name": f"r{number}", "url": f"http://127.0.0.1:{one.port}"}
        for number, one in enumerate(found, 1)
    ]


def preset_of(path: Path, models: Mapping[str, Sequence[str]]) -> Path:
    """A preset file in which the demo model has these names, each with lines of its own."""
    lines = ["version = 1", "[*]", "parallel = 2", "ctx-size = 8192"]
    for name, own in models.items():
        lines += [f"[{name}]", f"model = {demo_model()}", *own]
    path.write_text("\n".join(lines) + "\n")
    return path


KINDS = {
    **dict.fromkeys(("a", "b", "c", "d"), ()),
    "embed": ("embeddings = true", "pooling = mean", "alias = vectors,e2"),
    "rank": ("embeddings = true", "pooling = rank", "reranking = true"),
}


async def test_models_of_a_preset_serve_what_they_are_for_by_all_their_names(
    tmp_path: Path,
) -> None:
    preset = preset_of(tmp_path / "models.ini", KINDS)
    with routers(1, preset, "--models-max", "20") as found:
        async with gateway_over(tmp_path / "gateway", found) as seen:
            names = {one["id"] for one in (await seen.client.get("/v1/models")).json()["data"]}
            assert names == {*KINDS, "vectors", "e2"}
            for model in ("embed", "vectors", "e2"):
                body = {"model": model, "input": ["hi", "there"]}
                vectors = await seen.client.post("/v1/embeddings", json=body)
                assert vectors.status_code == 200, vectors.text
                assert len(vectors.json()["data"]) == 2
            body = {"model": "rank", "query": "hi", "documents": ["hi", "there"]}
            ranks = await seen.client.post("/v1/rerank", json=body)
            assert ranks.status_code == 200, ranks.text
            assert len(ranks.json()["results"]) == 2
            assert (await seen.client.post(CHAT, json=chat("a"))).status_code == 200
            assert seen["r1/embed"].properties.purpose == "embeddings"
            assert seen["r1/rank"].properties.purpose == "rerank"
            refused = await seen.client.post("/v1/rerank", json={**body, "model": "a"})
            assert refused.status_code == 501
            assert "supports reranking" in refused.text


async def test_files_that_come_and_go_are_models_that_do(tmp_path: Path) -> None:
    settings, new = {"health": {"interval": 1}}, tmp_path / "models" / "new.gguf"
    async with placed(tmp_path, "a", 2, *NO_LIMIT, settings=settings) as (seen, _):
        assert (await seen.client.post(CHAT, json=chat("new"))).status_code == 404
        new.symlink_to(demo_model())
        for name in ("r1/new", "r2/new"):
            await seen.until_state(name, NodeState.UNLOADED, limit=20.0)
        assert (await seen.client.post(CHAT, json=chat("new"))).status_code == 200
        new.unlink()
        await until(lambda: not {"r1/new", "r2/new"} & seen.nodes.keys(), 30.0)
        assert (await seen.client.post(CHAT, json=chat("new"))).status_code == 404
        assert (await seen.client.post(CHAT, json=chat("a"))).status_code == 200
        assert not any(one.by_others for one in seen.changes)


async def test_500_requests_over_six_models_outlive_routers_that_are_killed(
    tmp_path: Path,
) -> None:
    preset = preset_of(tmp_path / "models.ini", KINDS)
    rng, answered, failed = random.Random(7), 0, []
    async with (
        restartable(3, preset, "--models-max", "20") as found,
        gateway_over(tmp_path / "gateway", nodes_for(found)) as seen,
    ):

        async def ask(number: int) -> None:
            nonlocal answered
            model = rng.choice(tuple(KINDS))
            path, body = CHAT, chat(model, f"number {number}", max_tokens=rng.choice((20, 300)))
            if model == "embed":
                path, body = "/v1/embeddings", {"model": model, "input": f"number {number}"}
            elif model == "rank":
                path, body = "/v1/rerank", {"model": model, "query": "a", "documents": ["a", "b"]}
            elif number % 7 == 0:
                path, body = "/tokenize", {"model": model, "content": f"number {number}"}
            elif number % 7 == 1:
                path = "/v1/messages/count_tokens"
            elif number % 2:
                body["stream"] = True
            answer = await seen.client.post(path, json=body)
            whole = answer.status_code == 200
            if body.get("stream"):
                whole = answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text
            answered += whole
            if not whole:
                failed.append(f"{path} {model} {answer.status_code} {answer.text[-300:]}")

        async def ask_on(numbers: Iterator[int]) -> None:
            for number in numbers:
                await ask(number)

        async def kill_on() -> None:
            for number in itertools.count():
                await asyncio.sleep(2.0)
                await asyncio.to_thread(found[number % 3].kill)
                await asyncio.sleep(2.0)
                await found[number % 3].start()

        killing = asyncio.create_task(kill_on())
        numbers = iter(range(500))
        await asyncio.gather(*(ask_on(numbers) for _ in range(8)))
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        assert failed == []
        assert answered == 500
        assert not seen.running.held()


async def test_sleeping_models_are_left_asleep_and_woken_by_requests(tmp_path: Path) -> None:
    settings = {"health": {"interval": 0.5, "discover_interval": 2}}
    sleepy = (*NO_LIMIT, "--sleep-idle-seconds", "1")
    async with (
        placed(tmp_path, "ab", 2, *sleepy, settings=settings) as (seen, found),
        httpx.AsyncClient(base_url=found[0].url, trust_env=False, timeout=60) as direct,
    ):
        body = chat("a", "a long story", **GREEDY)
        whole = await stream_of(seen.client, body)
        [name] = seen.loaded()
        await seen.until_state(name, NodeState.SLEEPING)
        # One that others have loaded too.
        other = "r1/b" if name == "r1/a" else "r1/a"
        await direct.post("/models/load", json={"model": other[3:]})
        await seen.until_state(other, NodeState.SLEEPING)
        values = set[str]()
        until_then = time.monotonic() + 15.0
        while time.monotonic() < until_then:
            models = (await direct.get("/v1/models")).json()["data"]
            values |= {model["status"]["value"] for model in models}
            await asyncio.sleep(0.05)
        assert values <= {"sleeping", "unloaded"}
        assert seen[name].sleep.measured is not None
        # Woken, and lost while it streams.
        router = found[int(name[1]) - 1]

        assert await stream_of(seen.client, body, lambda: child_of(router, "a").kill()) == whole
        assert [one.change for one in seen.changes].count("died") == 1


async def loaded_by_others(client: httpx.AsyncClient, model: str) -> None:
    """Load a model by hand; the router refuses while it is busy."""

    async def taken() -> bool | None:
        reply = await client.post("/models/load", json={"model": model})
        return reply.status_code == 200 or None

    await eventually(taken)


async def test_what_others_load_is_respected_and_too_much_of_it_ends_our_commands(
    tmp_path: Path,
) -> None:
    # No more than twenty times what the load took, which is some 0.1 s.
    settings = {"model_placement": {"hysteresis": 1}}
    async with (
        placed(tmp_path, "ab", 1, *ONE_EACH, settings=settings) as (seen, found),
        httpx.AsyncClient(base_url=found[0].url, trust_env=False, timeout=60) as other,
    ):
        record = seen["r1"].router_record
        await until(lambda: all(record.followed(one.listed_at) for one in seen.all_loads("r1")))
        began = time.monotonic()
        await other.post("/models/load", json={"model": "b"})
        await seen.until_state("r1/b", NodeState.READY)
        assert [one.model for one in seen.changes if one.by_others] == ["b"]
        assert (await seen.client.post(CHAT, json=chat("a"))).status_code == 200
        assert time.monotonic() - began > 1.0
        for model in ("b", "a") * MOST_BY_OTHERS:
            await loaded_by_others(other, model)
            await seen.until_state(f"r1/{model}", NodeState.READY)
            if record.stopped(seen["r1"].clock()):
                break
        assert record.stopped(seen["r1"].clock())
        # What is loaded serves on; nothing is commanded for another one.
        await until(lambda: "since others load and unload them" in seen["r1"].reason)
        spare = "a" if model == "b" else "b"
        assert (await seen.client.post(CHAT, json=chat(model))).status_code == 200
        asked = asyncio.create_task(seen.client.post(CHAT, json=chat(spare)))
        await asyncio.sleep(6.0)
        assert not asked.done()
        await other.post("/models/load", json={"model": spare})
        assert (await asked).status_code == 200


async def test_requests_of_others_are_not_cut_by_our_unloads(tmp_path: Path) -> None:
    settings = {"model_placement": {"hysteresis": 0.1, "starvation": 1}}
    async with (
        placed(tmp_path, "ab", 1, *ONE_EACH, settings=settings) as (seen, found),
        httpx.AsyncClient(base_url=found[0].url, trust_env=False, timeout=60) as other,
    ):
        await other.post("/models/load", json={"model": "a"})
        await seen.until_state("r1/a", NodeState.READY)
        for stream in (True, False):
            body = chat("a", "a long story", **GREEDY, stream=stream)
            theirs = asyncio.create_task(other.post(CHAT, json=body))
            await asyncio.sleep(0.2)
            ours = asyncio.create_task(seen.client.post(CHAT, json=chat("b")))
            answer = await theirs
            assert answer.status_code == 200
            assert "proxy error" not in answer.text
            assert (await ours).status_code == 200
            assert (await seen.client.post(CHAT, json=chat("a"))).status_code == 200


async def nodes_shown(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in (await client.get("/admin/nodes")).json()["nodes"]}


async def test_a_successor_and_a_restarted_gateway_know_the_models_of_routers(
    tmp_path: Path,
) -> None:
    models = folder_of(tmp_path / "models", "abc")
    settings = {"model_placement": {"hysteresis": 2}}
    async with restartable(2, models, *NO_LIMIT) as found:
        async with (
            serving(tmp_path / "gateway", nodes_for(found), settings=settings) as line,
            httpx.AsyncClient(base_url=line.url, trust_env=False, timeout=120) as client,
            httpx.AsyncClient(base_url=line.admin_url, trust_env=False, timeout=60) as admin,
        ):
            for name in "ab":
                assert (await client.post(CHAT, json=chat(name))).status_code == 200
            before = await nodes_shown(admin)
            loaded = {name for name, one in before.items() if one["state"] == "ready"}
            running = asyncio.create_task(ask_on(client, "ab", 10.0))
            stream = asyncio.create_task(stream_of(client, chat("a", **GREEDY)))
            await line.succeed()
            await admin.aclose()
            async with httpx.AsyncClient(base_url=line.admin_url, trust_env=False) as fresh:
                after = await nodes_shown(fresh)
                assert {name for name, one in after.items() if one["state"] == "ready"} == loaded
            # A load that is under way.
            asked = asyncio.create_task(client.post(CHAT, json=chat("c")))
            await asyncio.sleep(0.1)
            await line.succeed()
            assert (await asked).status_code == 200
            assert await stream
            await running
        for one in found:
            await asyncio.to_thread(one.kill)
        async with (
            serving(tmp_path / "gateway", nodes_for(found), settings=settings) as line,
            httpx.AsyncClient(base_url=line.url, trust_env=False, timeout=120) as client,
            httpx.AsyncClient(base_url=line.admin_url, trust_env=False, timeout=60) as admin,
        ):
            states = {one["state"] for one in (await nodes_shown(admin)).values()}
            assert states == {"down"}
            listing = (await client.get("/v1/models")).json()["data"]
            assert [one["id"] for one in listing] == ["a", "b", "c"]
            asked = asyncio.create_task(client.post(CHAT, json=chat("c")))
            await asyncio.sleep(1.0)
            assert not asked.done()
            for one in found:
                await one.start()
            assert (await asked).status_code == 200
            known = await nodes_shown(admin)
            took = [one["reason"] for name, one in known.items() if one["state"] == "unloaded"]
            # That of two was learnt before; nobody has seen the others.
            assert sum("takes about 9 s" not in reason for reason in took) >= 1
