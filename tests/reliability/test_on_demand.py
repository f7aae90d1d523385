"""llama-swap and Ollama, which load models by themselves, behind a gateway (`models_on_demand`)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.events import ModelLoadChanged
from gateway.nodes.node import Node, NodeState
from tests.emulator.on_demand import EmulatedOllama, EmulatedSwap
from tests.gateways import Running, running_gateway, until
from tests.servers import DemoServer, demo_model, running_router
from tests.virtual import in_virtual_time, now

CHAT = "/v1/chat/completions"
QUICK: dict[str, Any] = {"decode_tps": 20, "slots": 2}


@dataclass(slots=True)
class Endpoints:
    """A gateway over such servers, `s1` and so on, and what has become of their models."""

    running: Running
    servers: tuple[EmulatedSwap | DemoServer, ...]
    changes: list[ModelLoadChanged] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # seconds of each answer
    served: Counter[str] = field(default_factory=Counter)  # answers by model

    def __getitem__(self, name: str) -> Node:
        return self.running.gateway.fleet.nodes[name]

    @property
    def loads(self) -> dict[str, int]:
        return {
            f"s{number}/{name}": model.loads
            for number, server in enumerate(self.servers, 1)
            if isinstance(server, EmulatedSwap)
            for name, model in server.models.items()
            if model.loads
        }

    def states(self) -> dict[str, str]:
        nodes = self.running.gateway.fleet.nodes.values()
        return {node.name: node.state.value for node in nodes if node.load is not None}

    async def ask(self, model: str, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": f"say something about {now()}"}]
        whole = {"model": model, "messages": messages, "max_tokens": 20, **body}
        return await self.running.client.post(CHAT, json=whole, timeout=600)

    async def serve(self, *models: str, seconds: float, **body: Any) -> None:
        """A client for each of these models, who asks again and again; no request may fail."""
        until_then = now() + seconds

        async def client(model: str) -> None:
            while (began := now()) < until_then:
                reply = await self.ask(model, **body)
                assert reply.status_code == 200, reply.text
                self.waits.append(now() - began)
                self.served[model] += 1

        await asyncio.gather(*map(client, models))

    async def until_state(self, name: str, state: NodeState, limit: float = 30.0) -> None:
        nodes = self.running.gateway.fleet.nodes
        await until(lambda: name in nodes and nodes[name].state is state, limit, self.states)

    def told(self) -> Counter[str]:
        self.running.gateway.bus.flush()
        return Counter(one.change for one in self.changes)


@asynccontextmanager
async def gateway_over(
    folder: Path,
    *servers: EmulatedSwap | DemoServer,
    settings: dict[str, Any] | None = None,
    **spec: Any,
) -> AsyncIterator[Endpoints]:
    """A gateway over these servers. At the end nothing may be held, and no exception logged."""
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240 - nothing else runs yet
    async with AsyncExitStack() as stack:
        for server in servers:
            if isinstance(server, EmulatedSwap):
                await stack.enter_async_context(server)
        spec = {"kind": "openai", "models_on_demand": True, **spec}
        nodes = [
            {"name": f"s{number}", "url": one.url, **spec} for number, one in enumerate(servers, 1)
        ]
        running = await stack.enter_async_context(running_gateway(folder, nodes, settings or {}))
        found = Endpoints(running, servers)
        running.gateway.bus.subscribe(ModelLoadChanged, found.changes.append)
        yield found
        await until(lambda: not running.held(), 200.0, running.held)
    log = (folder / "gateway.log").read_text()
    assert "Traceback" not in log, log


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
        assert gateway["s1/a"].sleep.measured == pytest.approx(2.0, abs=0.5)
        assert (gateway["s1/a"].failures, gateway["s1/b"].failures) == (0, 0)
        told = gateway.told()
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
            told = gateway.told()
            assert 2 <= told["loaded"] <= 6
            assert max(gateway.waits) < 30
            assert min(gateway.served.values()) > 20
            measured = [gateway[f"s1/{name}"].sleep.measured for name in "ab"]
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
        assert gateway["s1"].router_record.most_loaded == 3
        assert gateway.loads == {"s1/a": 1, "s1/b": 1, "s1/c": 1}
        assert gateway["s1"].reason == "a router: 3 of 4 models are loaded"
        gateway.waits.clear()
        await gateway.serve(*"abc", seconds=10)
        assert max(gateway.waits) < 2


@pytest.mark.slow
@pytest.mark.parametrize("tells_running", [True, False])
@in_virtual_time
async def test_a_slow_load_is_no_failure(tmp_path: Path, tells_running: bool) -> None:
    swap = EmulatedSwap("a", load_seconds=250, tells_running=tells_running, **QUICK)
    async with gateway_over(tmp_path, swap) as gateway:
        replies = [asyncio.create_task(gateway.ask("a", stream=stream)) for stream in (True, False)]
        await gateway.until_state("s1/a", NodeState.SLEEPING)
        await asyncio.sleep(100)
        assert gateway["s1/a"].reason.startswith("its load takes ")
        assert [(await reply).status_code for reply in replies] == [200, 200]
        node = gateway["s1/a"]
        assert (node.failures, node.state) == (0, NodeState.READY)
        assert node.sleep.measured == pytest.approx(250, abs=2)
        assert node.concurrency_limit is not None
        assert node.concurrency_limit.slots == 8  # A load is no sign of crowding.
        page = (await gateway.running.admin.get("/metrics")).text
        assert 'model_loads_total{node="s1",model="a",result="ok"} 1' in page
        assert 'model_instances{model="a",node="s1",state="ready"} 1' in page


@in_virtual_time
async def test_a_load_that_fails_backs_off_and_its_request_goes_elsewhere(tmp_path: Path) -> None:
    swaps = [EmulatedSwap("a", load_seconds=2, **QUICK) for _ in range(2)]
    async with gateway_over(tmp_path, *swaps) as gateway:
        swaps[0].models["a"].failing_loads = 1
        replies = await asyncio.gather(*(gateway.ask("a") for _ in range(6)))
        assert {reply.status_code for reply in replies} == {200}
        await gateway.until_state("s2/a", NodeState.READY)
        assert gateway["s1/a"].state is NodeState.FAILED
        assert "its server answered 502" in gateway["s1/a"].reason
        assert gateway["s1/a"].circuit.failures == 0
        assert gateway.told()["failed"] == 1
        await gateway.until_state("s1/a", NodeState.UNLOADED)


@pytest.mark.slow
@in_virtual_time
async def test_nothing_but_a_request_loads_a_model(tmp_path: Path) -> None:
    swap = EmulatedSwap("ab", load_seconds=2, ttl=30, **QUICK)
    settings = {"models": {"a": {"pin": ["s1"]}, "b": {"replicas": {"min": 1}}}}
    async with gateway_over(tmp_path, swap, settings=settings, calibrate=True) as gateway:
        await asyncio.sleep(60)
        assert gateway.loads == {}
        await gateway.ask("a")
        await asyncio.sleep(120)  # Probes go on, and keep nothing loaded.
        assert gateway.loads == {"s1/a": 1}
        assert swap.models["a"].state == "unloaded"
        order = {"order": "load", "model": "a", "node": "s1"}
        ordered = await gateway.running.admin.post("/admin/placements", json=order)
        assert (ordered.status_code, ordered.json()["state"]) == (200, "sleeping")
        assert ordered.json()["reason"].startswith("the next request loads it")


@in_virtual_time
async def test_what_a_client_has_left_keeps_no_other_model_waiting(tmp_path: Path) -> None:
    swap = EmulatedSwap("ab", load_seconds=2, **QUICK)
    async with gateway_over(tmp_path, swap) as gateway:
        left = asyncio.create_task(gateway.ask("a", max_tokens=900, ignore_eos=True))
        await asyncio.sleep(10)
        left.cancel()
        began = now()
        assert (await gateway.ask("b")).status_code == 200
        assert now() - began < 60  # until the server has ended it, not until its slot is believed
