"""A router (`llama-server --models-dir`) whose server of a model dies, or is gone when asked.

It ends a stream as if it were whole, with a line of text that is no event.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.events import AttemptEnded
from gateway.forward.context import MOST_UNLOADED
from tests.emulator.router import UNLOAD_GRACE, EmulatedRouter
from tests.forward.proxy_over_nodes import GENERATION_PATHS, MESSAGES, ProxyOverNodes
from tests.forward.test_resume import PATHS, asked_of, check_whole
from tests.gateways import running_gateway, until
from tests.virtual import in_virtual_time, now

CHAT = "/v1/chat/completions"
COUNTS: dict[str, dict[str, Any]] = {
    "/tokenize": {"content": "say"},
    "/detokenize": {"tokens": [70, 71]},
    "/apply-template": {"messages": MESSAGES},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/chat/completions/input_tokens": {"messages": MESSAGES},
}
BOTH = ("r1/a", "r2/a")

BY_HAND: dict[str, Any] = {
    "model_placement": {"commands": False},
    "retries": {"backoff": 0.01, "backoff_max": 0.05},
    "health": {"interval": 0.1, "open": 0.3},
}
"""Settings of a gateway that loads nothing: its tests do."""


@dataclass(slots=True)
class RoutedModels(ProxyOverNodes):
    """The gateway and its routers, `r1` and so on."""

    routers: tuple[EmulatedRouter, ...] = ()

    def router_of(self, instance: str) -> EmulatedRouter:
        return self.routers[int(instance[1]) - 1]

    def may_work(self, name: str) -> bool:
        """Whether this instance is known, loaded and takes work."""
        node = self.app.fleet.nodes.get(name)
        return (
            node is not None
            and node.probe_history.discovered_at is not None
            and node.free_slots(node.clock()) > 0
        )

    async def load(self, name: str) -> None:
        """Load this model by the router's own API, and wait until the gateway knows."""
        router, _, model = name.partition("/")
        await command(self.router_of(name), "load", model)
        await self.app.fleet.probe(router)
        await until(lambda: self.may_work(name))

    async def busy(self, limit: float = 30.0) -> str:
        """The instance that has a request, once its response has begun."""
        busy: list[str] = []

        def look() -> bool:
            attempts = [one.attempt for one in self.app.registry]
            busy.extend(one.lease.node.name for one in attempts if one and one.content_events > 4)
            return bool(busy)

        await until(look, limit)
        return busy[0]


@asynccontextmanager
async def routed_models(
    folder: Path, *routers: EmulatedRouter, loaded: Iterable[str] = BOTH, **settings: Any
) -> AsyncIterator[RoutedModels]:
    """A gateway over these routers, of which these instances are loaded.

    At the end nothing may be held for any request, and no exception may be in the log.
    """
    async with AsyncExitStack() as stack:
        for router in routers:
            await stack.enter_async_context(router)
        specs = [
            {"name": f"r{number}", "url": router.url, "host": f"r{number}"}
            for number, router in enumerate(routers, 1)
        ]
        running = await stack.enter_async_context(
            running_gateway(folder, specs, {**BY_HAND, **settings})
        )
        found = RoutedModels(running, {}, routers=routers)
        running.gateway.bus.subscribe(AttemptEnded, found.attempts.append)
        for name in loaded:
            await found.load(name)
        yield found
        await until(lambda: not running.held(), 30.0, running.held)
    log = (folder / "gateway.log").read_text()
    assert "Traceback" not in log, log


async def command(router: EmulatedRouter, verb: str, model: str) -> None:
    async with httpx.AsyncClient(base_url=router.url, trust_env=False) as client:
        reply = await client.post(f"/models/{verb}", json={"model": model})
    assert reply.status_code == 200, reply.text
    await until(lambda: router.models[model].state == f"{verb}ed")


def routers(count: int = 2, **options: Any) -> list[EmulatedRouter]:
    options = {"models_max": 0, "slots": 2, "decode_tps": 50, **options}
    return [EmulatedRouter(["a", "b"], **options) for _ in range(count)]


@pytest.mark.parametrize("path", [*GENERATION_PATHS, *COUNTS])
@in_virtual_time
async def test_each_request_names_the_model_and_loads_nothing(tmp_path: Path, path: str) -> None:
    [router] = routers(1)
    aliases = {"models": {"gpt": {"use": "a"}}, "default_model": "a"}
    async with routed_models(tmp_path, router, loaded=["r1/a"], **aliases) as models:
        few: dict[str, Any] = {"max_tokens": 2} if path in GENERATION_PATHS else {}
        for name in ("a", "gpt", None):
            named: dict[str, Any] = {} if name is None else {"model": name}
            reply = await models.ask(path, **{**COUNTS.get(path, {}), **few, **named})
            assert reply.status_code == 200, reply.text
        assert router.models["b"].state == "unloaded"
        for seen in router.models["a"].node.seen:
            assert json.loads(seen.body)["model"] == "a"
            assert seen.query == "autoload=false"


@pytest.mark.parametrize("path", PATHS)
@in_virtual_time
async def test_a_stream_goes_on_on_another_router_unchanged(tmp_path: Path, path: str) -> None:
    async with routed_models(tmp_path, *routers(), loaded=[*BOTH, "r1/b", "r2/b"]) as models:
        body = {"model": "a", "ignore_eos": True, **asked_of(path, 60)}
        whole = await models.stream(path, **body)
        models.attempts.clear()
        asked = asyncio.create_task(models.stream(path, **body))
        lost = await models.busy()
        await models.router_of(lost).kill_model("a")
        check_whole(path, await asked, whole)
        other = BOTH[lost == BOTH[0]]
        assert models.outcomes == [(lost, "reset"), (other, "ok")]
        # The server of the model is to blame, and no other of its router.
        failures = {name: models.node(name).failures for name in ("r1/a", "r2/a", "r1/b", "r2/b")}
        assert failures == {"r1/b": 0, "r2/b": 0, lost: 1, other: 0}


@pytest.mark.parametrize("count", [1, 2])
@in_virtual_time
async def test_the_model_is_loaded_for_a_stream_that_goes_on(tmp_path: Path, count: int) -> None:
    several = routers(count, load_seconds=3)
    async with routed_models(
        tmp_path, *several, loaded=["r1/a"], model_placement={"hysteresis": 1}
    ) as models:
        body = {"model": "a", "ignore_eos": True, **asked_of(CHAT, 60)}
        whole = await models.stream(CHAT, **body)
        models.attempts.clear()
        asked = asyncio.create_task(models.stream(CHAT, **body))
        assert await models.busy() == "r1/a"
        await several[0].kill_model("a")
        check_whole(CHAT, await asked, whole)
        assert models.outcomes[0] == ("r1/a", "reset")
        assert models.outcomes[-1] == (f"r{count}/a", "ok")


@pytest.mark.parametrize("stream", [True, False])
@in_virtual_time
async def test_a_request_that_kills_its_server_twice_is_refused(
    tmp_path: Path, stream: bool
) -> None:
    [router] = routers(1)
    async with routed_models(
        tmp_path, router, loaded=["r1/a"], model_placement={"hysteresis": 1}
    ) as models:
        asked = asyncio.create_task(
            models.ask(CHAT, stream=stream, model="a", ignore_eos=True, max_tokens=300)
        )
        for _ in range(2):
            await router.until(lambda: router.models["a"].node.busy > 0)
            await router.kill_model("a")
            await until(lambda: not router.models["a"].node.busy)
        assert "died while they served this very request" in (await asked).text
        assert [outcome for _, outcome in models.outcomes if outcome != "not_loaded"] == [
            "reset", "reset",
        ]  # fmt: skip


def says(status: int, message: str) -> dict[str, Any]:
    error = {"code": status, "message": message, "type": "server_error"}
    return {"status": status, "body": json.dumps({"error": error})}


GONE = says(400, "model 'a' not found")
NOT_LOADED = [
    says(400, "model is not loaded"),
    says(500, "model name=a failed to load"),
    says(503, "Loading model"),
    {"status": 500, "body": "proxy error: Could not establish connection"},
]


@pytest.mark.parametrize(
    "answer", [*NOT_LOADED, GONE], ids=["refused", "failed", "loading", "no server", "gone"]
)
@in_virtual_time
async def test_a_request_that_finds_its_model_not_loaded_goes_elsewhere_and_nobody_failed(
    tmp_path: Path, answer: dict[str, Any]
) -> None:
    async with routed_models(tmp_path, *routers(), retries={"attempts": 1}) as models:
        models.router_of("r1/a").models["a"].node.faults.set("status", **answer)
        replies = [await models.ask(CHAT, model="a", max_tokens=2) for _ in range(3)]
        assert [reply.status_code for reply in replies] == [200] * 3
        assert set(models.outcomes) == {("r1/a", "not_loaded"), ("r2/a", "ok")}
        assert [models.node(name).failures for name in BOTH] == [0, 0]
        assert models.node("r1/a").circuit.fully_closed


@in_virtual_time
async def test_requests_outlast_an_unload_by_others_and_load_the_model(tmp_path: Path) -> None:
    [router] = routers(1, prefill_tps=1, load_seconds=1)
    async with routed_models(tmp_path, router, loaded=["r1/a"], model_placement={}) as models:
        long: dict[str, Any] = {"model": "a", "prompt": "word " * 20, "max_tokens": 2}
        running = asyncio.create_task(models.ask("/v1/completions", **long))
        await router.until(lambda: router.models["a"].node.busy > 0)
        # What it reads is killed after ten seconds; it is listed as loaded until then.
        began = now()
        unloading = asyncio.create_task(command(router, "unload", "a"))
        await until(lambda: router.models["a"].ending)
        asked = [asyncio.create_task(models.ask(CHAT, model="a", max_tokens=2)) for _ in range(5)]
        replies = [await reply for reply in (running, *asked)]
        await unloading
        assert [reply.status_code for reply in replies] == [200] * 6
        assert now() - began > UNLOAD_GRACE
        outcomes = [outcome for _, outcome in models.outcomes]
        assert outcomes.count("reset") == 1
        assert outcomes.count("not_loaded") <= 2


@in_virtual_time
async def test_a_model_that_is_listed_as_loaded_and_never_is_ends_a_request(tmp_path: Path) -> None:
    [router] = routers(1)
    async with routed_models(tmp_path, router, loaded=["r1/a"]) as models:
        router.models["a"].node.faults.set("status", **NOT_LOADED[0])
        reply = await models.ask(CHAT, model="a", max_tokens=2)
        assert (reply.status_code, reply.headers["x-gateway-reason"]) == (503, "no_node")
        assert "retry-after" in reply.headers
        assert models.outcomes == [("r1/a", "not_loaded")] * (1 + MOST_UNLOADED + 2)
