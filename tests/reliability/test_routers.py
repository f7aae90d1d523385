"""Servers of several models behind a gateway: they load by themselves, or lose a model's server.

llama-swap and Ollama load what is asked for (`models_on_demand`). llama.cpp's router
(`llama-server --models-dir`) ends a stream whose model's server dies as if it were whole, with a
line of text that is no event.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.events import AttemptEnded, ModelLoadChanged
from gateway.forward.context import MOST_UNLOADED
from gateway.nodes.node import NodeState
from tests.emulator.on_demand import EmulatedOllama, EmulatedSwap
from tests.emulator.router import UNLOAD_GRACE, EmulatedRouter
from tests.forward.proxy_over_nodes import GENERATION_PATHS, MESSAGES, ProxyOverNodes
from tests.forward.test_resume import PATHS, asked_of, check_whole
from tests.gateways import running_gateway, until
from tests.servers import DemoServer, demo_model, running_router
from tests.virtual import in_virtual_time, now

CHAT = "/v1/chat/completions"
COUNTS: dict[str, dict[str, Any]] = {
    "/tokenize": {"content": "say"},
    "/detokenize": {"tokens": [70, 71]},
    "/apply-template": {"messages": MESSAGES},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/chat/completions/input_tokens": {"messages": MESSAGES},
}
QUICK: dict[str, Any] = {"decode_tps": 20, "slots": 2}
BOTH = ("r1/a", "r2/a")
BY_HAND: dict[str, Any] = {
    "model_placement": {"commands": False},
    "retries": {"backoff": 0.01, "backoff_max": 0.05},
    "health": {"interval": 0.1, "open": 0.3},
}
"""Settings of a gateway that loads nothing: its tests do."""


@dataclass(slots=True)
class RoutedModels(ProxyOverNodes):
    """The gateway and its servers, `r1` and so on, and what has become of their models."""

    routers: tuple[EmulatedRouter | DemoServer, ...] = ()
    _changes: list[ModelLoadChanged] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # seconds of each answer
    served: Counter[str] = field(default_factory=Counter)  # answers by model

    def router_of(self, instance: str) -> EmulatedRouter:
        found = self.routers[int(instance[1]) - 1]
        assert isinstance(found, EmulatedRouter)
        return found

    @property
    def loads(self) -> dict[str, int]:
        return {
            f"r{number}/{name}": model.loads
            for number in range(1, len(self.routers) + 1)
            for name, model in self.router_of(f"r{number}").models.items()
            if model.loads
        }

    @property
    def changes(self) -> Counter[str]:
        self.app.bus.flush()
        return Counter(one.change for one in self._changes)

    def states(self) -> dict[str, str]:
        nodes = self.app.fleet.nodes.values()
        return {node.name: node.state.value for node in nodes if node.load is not None}

    async def until_state(self, name: str, state: NodeState) -> None:
        await until(lambda: self.states().get(name) == state.value, 30.0, self.states)

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

    async def chat(self, model: str, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": f"say something about {now()}"}]
        whole = {"model": model, "messages": messages, "max_tokens": 20, **body}
        return await self.running.client.post(CHAT, json=whole, timeout=600)

    async def serve(self, *models: str, seconds: float, **body: Any) -> None:
        """A client for each of these models, who asks again and again; no request may fail."""
        until_then = now() + seconds

        async def client(model: str) -> None:
            while (began := now()) < until_then:
                reply = await self.chat(model, **body)
                assert reply.status_code == 200, reply.text
                self.waits.append(now() - began)
                self.served[model] += 1

        await asyncio.gather(*map(client, models))


@asynccontextmanager
async def over(
    folder: Path,
    *servers: EmulatedRouter | DemoServer,
    settings: dict[str, Any] | None = None,
    **spec: Any,
) -> AsyncIterator[RoutedModels]:
    """A gateway over these servers. At the end nothing may be held, and no exception logged."""
    async with AsyncExitStack() as stack:
        specs = []
        for number, server in enumerate(servers, 1):
            if isinstance(server, EmulatedRouter):
                await stack.enter_async_context(server)
            specs.append({"name": f"r{number}", "url": server.url, "host": f"r{number}", **spec})
        running = await stack.enter_async_context(running_gateway(folder, specs, settings))
        found = RoutedModels(running, {}, routers=servers)
        running.gateway.bus.subscribe(AttemptEnded, found.attempts.append)
        running.gateway.bus.subscribe(ModelLoadChanged, found._changes.append)
        yield found
        await until(lambda: not running.held(), 200.0, running.held)
    log = (folder / "gateway.log").read_text()
    assert "Traceback" not in log, log


gateway_over = partial(over, kind="openai", models_on_demand=True)
"""A gateway over servers that load what is asked for."""


@asynccontextmanager
async def routed_models(
    folder: Path, *routers: EmulatedRouter, loaded: Iterable[str] = BOTH, **settings: Any
) -> AsyncIterator[RoutedModels]:
    """A gateway over these routers, of which these instances are loaded."""
    async with over(folder, *routers, settings={**BY_HAND, **settings}) as models:
        for name in loaded:
            await models.load(name)
        yield models


async def command(router: EmulatedRouter, verb: str, model: str) -> None:
    async with httpx.AsyncClient(base_url=router.url, trust_env=False) as client:
        reply = await client.post(f"/models/{verb}", json={"model": model})
    assert reply.status_code == 200, reply.text
    await until(lambda: router.models[model].state == f"{verb}ed")


def routers(count: int = 2, **options: Any) -> list[EmulatedRouter]:
    options = {"models_max": 0, "slots": 2, "decode_tps": 50, **options}
    return [EmulatedRouter(["a", "b"], **options) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("tells", [True, False])
@in_virtual_time
async def test_one_llama_swap_serves_two_models_with_few_swaps(tmp_path: Path, tells: bool) -> None:
    swap = EmulatedSwap("ab", load_seconds=2, tells_running=tells, **QUICK)
    async with gateway_over(tmp_path, swap) as gateway:
        await gateway.serve(*"abab", seconds=60, stream=tells)
        assert 2 <= sum(gateway.loads.values()) <= 6
        assert max(gateway.waits) < 20  # the hysteresis, two loads and what was running
        assert min(gateway.served.values()) > 20
        assert gateway.node("r1/a").sleep.measured == pytest.approx(2.0, abs=0.5)
        assert (gateway.node("r1/a").failures, gateway.node("r1/b").failures) == (0, 0)
        told = gateway.changes
        assert told["loaded"] == told["unloaded"] + 1 == sum(gateway.loads.values())


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.binary_only("the wheel's server has no router mode")
async def test_a_real_server_that_loads_by_itself_swaps_seldom(tmp_path: Path) -> None:
    """llama.cpp's router, which is not told to be one: it loads what is asked for by itself."""
    (folder := tmp_path / "models").mkdir()
    for name in "ab":
        (folder / f"{name}.gguf").symlink_to(demo_model())
    with running_router(folder, extra=("--models-max", "1")) as server:
        async with gateway_over(tmp_path, server, slots=2) as gateway:
            await gateway.serve(*"abab", seconds=20)
            told = gateway.changes
            assert 2 <= told["loaded"] <= 6
            assert max(gateway.waits) < 30
            assert min(gateway.served.values()) > 20
            measured = [gateway.node(f"r1/{name}").sleep.measured for name in "ab"]
            assert all(seconds is not None and seconds < 10 for seconds in measured)


@pytest.mark.slow
@in_virtual_time
async def test_no_model_waits_longer_than_the_bound(tmp_path: Path) -> None:
    swap = EmulatedSwap("abc", load_seconds=2, **QUICK)
    settings = {"model_placement": {"starvation": 30}}
    async with gateway_over(tmp_path, swap, settings=settings) as gateway:
        await gateway.serve(*"aaaaaabc", seconds=150)
        assert max(gateway.waits) < 30 + 5
        assert min(gateway.served.values()) > 10


@pytest.mark.slow
@in_virtual_time
async def test_it_is_learnt_that_ollama_holds_several_models(tmp_path: Path) -> None:
    ollama = EmulatedOllama("abcd", load_seconds=2, **QUICK)
    async with gateway_over(tmp_path, ollama) as gateway:
        await gateway.serve(*"abc", seconds=80)
        assert gateway.node("r1").router_record.most_loaded == 3
        assert gateway.loads == {"r1/a": 1, "r1/b": 1, "r1/c": 1}
        assert gateway.node("r1").reason == "a router: 3 of 4 models are loaded"
        gateway.waits.clear()
        await gateway.serve(*"abc", seconds=10)
        assert max(gateway.waits) < 2


@pytest.mark.slow
@pytest.mark.parametrize("tells_running", [True, False])
@in_virtual_time
async def test_a_slow_load_is_no_failure(tmp_path: Path, tells_running: bool) -> None:
    swap = EmulatedSwap("a", load_seconds=250, tells_running=tells_running, **QUICK)
    async with gateway_over(tmp_path, swap) as gateway:
        replies = [
            asyncio.create_task(gateway.chat("a", stream=stream)) for stream in (True, False)
        ]
        await gateway.until_state("r1/a", NodeState.SLEEPING)
        await asyncio.sleep(100)
        assert gateway.node("r1/a").reason.startswith("its load takes ")
        assert [(await reply).status_code for reply in replies] == [200, 200]
        node = gateway.node("r1/a")
        assert (node.failures, node.state) == (0, NodeState.READY)
        assert node.sleep.measured == pytest.approx(250, abs=2)
        assert node.concurrency_limit is not None
        assert node.concurrency_limit.slots == 8  # A load is no sign of crowding.
        page = (await gateway.running.admin.get("/metrics")).text
        assert 'model_loads_total{node="r1",model="a",result="ok"} 1' in page
        assert 'model_instances{model="a",node="r1",state="ready"} 1' in page


@in_virtual_time
async def test_a_load_that_fails_backs_off_and_its_request_goes_elsewhere(tmp_path: Path) -> None:
    swaps = [EmulatedSwap("a", load_seconds=2, **QUICK) for _ in range(2)]
    async with gateway_over(tmp_path, *swaps) as gateway:
        swaps[0].models["a"].failing_loads = 1
        replies = await asyncio.gather(*(gateway.chat("a") for _ in range(6)))
        assert {reply.status_code for reply in replies} == {200}
        await gateway.until_state("r2/a", NodeState.READY)
        assert gateway.node("r1/a").state is NodeState.FAILED
        assert "its server answered 502" in gateway.node("r1/a").reason
        assert gateway.node("r1/a").circuit.failures == 0
        assert gateway.changes["failed"] == 1
        await gateway.until_state("r1/a", NodeState.UNLOADED)


@pytest.mark.slow
@in_virtual_time
async def test_nothing_but_a_request_loads_a_model(tmp_path: Path) -> None:
    swap = EmulatedSwap("ab", load_seconds=2, ttl=30, **QUICK)
    settings = {"models": {"a": {"pin": ["r1"]}, "b": {"replicas": {"min": 1}}}}
    async with gateway_over(tmp_path, swap, settings=settings, calibrate=True) as gateway:
        await asyncio.sleep(60)
        assert gateway.loads == {}
        await gateway.chat("a")
        await asyncio.sleep(120)  # Probes go on, and keep nothing loaded.
        assert gateway.loads == {"r1/a": 1}
        assert swap.models["a"].state == "unloaded"
        order = {"order": "load", "model": "a", "node": "r1"}
        ordered = await gateway.running.admin.post("/admin/placements", json=order)
        assert (ordered.status_code, ordered.json()["state"]) == (200, "sleeping")
        assert ordered.json()["reason"].startswith("the next request loads it")


@in_virtual_time
async def test_what_a_client_has_left_keeps_no_other_model_waiting(tmp_path: Path) -> None:
    swap = EmulatedSwap("ab", load_seconds=2, **QUICK)
    async with gateway_over(tmp_path, swap) as gateway:
        left = asyncio.create_task(gateway.chat("a", max_tokens=900, ignore_eos=True))
        await asyncio.sleep(10)
        left.cancel()
        began = now()
        assert (await gateway.chat("b")).status_code == 200
        assert now() - began < 60  # until the server has ended it, not until its slot is believed


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
