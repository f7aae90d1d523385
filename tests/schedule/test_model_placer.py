"""The model placer over emulated routers: commands that are refused, lost or overtaken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.config.scheduling import ModelPlacementSettings, ModelRule, ReplicaSettings
from gateway.nodes.router import LoadPhase
from gateway.schedule.core.model_placement import (
    Instance,
    InstanceUsage,
    ModelDemand,
    ModelPlacementPolicy,
    RouterNode,
)
from tests.each_case import each_case
from tests.emulator.recorded_router import RecordedRouter
from tests.gateways import Running, running_gateway, until
from tests.known import known
from tests.virtual import in_virtual_time

CHAT = "/v1/chat/completions"
LOAD, UNLOAD = "POST /models/load", "POST /models/unload"
QUICK: dict[str, Any] = {"model_placement": {"hysteresis": 1}}


@asynccontextmanager
async def placed(
    folder: Path, *routers: RecordedRouter, settings: Mapping[str, Any] = QUICK, **node: Any
) -> AsyncIterator[Running]:
    """A gateway over these routers, `r1` and so on."""
    async with AsyncExitStack() as stack:
        for router in routers:
            await stack.enter_async_context(router)
        nodes = [
            {"name": f"r{number}", "url": router.url, "host": f"r{number}", **node}
            for number, router in enumerate(routers, 1)
        ]
        running = await stack.enter_async_context(running_gateway(folder, nodes, settings))
        await asyncio.sleep(1.0)
        yield running
        await until(lambda: not running.held(), 60.0, running.held)


def router(*models: str, **options: Any) -> RecordedRouter:
    chosen = {"models_max": 1, "load_seconds": 2.0, "slots": 2, "decode_tps": 100, **options}
    return RecordedRouter(models or ("a", "b"), **chosen)


async def ask(running: Running, model: str, tokens: int = 20, **more: Any) -> httpx.Response:
    body = {"model": model, "max_tokens": tokens, "ignore_eos": True, **more}
    words = [{"role": "user", "content": "hi"}]
    return await running.client.post(CHAT, json={**body, "messages": words})


def phase(running: Running, name: str) -> LoadPhase:
    load = known(running.gateway.fleet.nodes[name].load)
    return load.phase


@in_virtual_time
async def test_a_model_is_loaded_once_for_all_that_wait_for_it(tmp_path: Path) -> None:
    one, other = router(), router()
    async with placed(tmp_path, one, other) as running:
        answers = await asyncio.gather(*(ask(running, "a") for _ in range(2)))
        assert [answer.status_code for answer in answers] == [200, 200]
        assert one.asked[LOAD] + other.asked[LOAD] == 1
        assert one.asked[UNLOAD] + other.asked[UNLOAD] == 0


@in_virtual_time
async def test_a_refused_load_is_the_pair_s_failure_and_the_request_goes_elsewhere(
    tmp_path: Path,
) -> None:
    one, other = router(), router()
    body = b'{"error": {"code": 500, "message": "no such\\nluck", "type": "server_error"}}'
    for each in (one, other):
        each.told[LOAD] = (500, body)
    async with placed(tmp_path, one, other) as running:
        asked = asyncio.create_task(ask(running, "a"))
        await asyncio.sleep(1.0)
        loads = [running.gateway.fleet.nodes[name].load for name in ("r1/a", "r2/a")]
        assert [load.failures for load in loads if load] == [1, 1]
        assert all("the router refused: no such luck" in load.reason for load in loads if load)
        other.told.clear()
        assert (await asked).headers["x-gateway-node"] == "r2/a"
        assert other.asked[LOAD] == 2


@in_virtual_time
async def test_a_model_that_no_node_loads_is_answered_with_the_reason(tmp_path: Path) -> None:
    one = router("b", unreadable=["a"], models_max=0)
    settings = {**QUICK, "retries": {"wait_for_node": 5}}
    async with placed(tmp_path, one, settings=settings) as running:
        began = running.gateway.clock()
        broken = await ask(running, "a")
        assert running.gateway.clock() - began < 5.0
        assert (broken.status_code, broken.json()["error"]["code"]) == (503, "no_node")
        assert "No node could load 'a': 'r1/a': the router" in broken.json()["error"]["message"]
        assert 5 <= int(broken.headers["retry-after"]) <= 10
        again = await ask(running, "a")
        assert again.status_code == 503
        assert (await ask(running, "b")).status_code == 200
        assert one.models["a"].loads == 1


@in_virtual_time
async def test_a_load_that_failed_once_is_waited_for(tmp_path: Path) -> None:
    one = router()
    async with placed(tmp_path, one) as running:
        one.models["a"].failing_loads = 1
        began = running.gateway.clock()
        assert (await ask(running, "a")).status_code == 200
        assert 10.0 < running.gateway.clock() - began < 16.0


@pytest.mark.parametrize("answer", [None, (500, b'{"error":{"message":"model limit reached"}}')])
@in_virtual_time
async def test_a_lost_command_and_a_full_router_are_no_failures_of_the_model(
    tmp_path: Path, answer: tuple[int, bytes] | None
) -> None:
    one = router()
    one.told[LOAD] = answer
    async with placed(tmp_path, one) as running:
        asked = asyncio.create_task(ask(running, "a"))
        await asyncio.sleep(7.0)
        assert 2 <= one.asked[LOAD] <= 10  # One whose connection breaks is sent twice.
        load = known(running.gateway.fleet.nodes["r1/a"].load)
        assert (load.phase, load.failures) == (LoadPhase.UNLOADED, 0)
        one.told.clear()
        assert (await asked).status_code == 200


@in_virtual_time
async def test_after_a_hand_over_only_what_waits_here_is_loaded(tmp_path: Path) -> None:
    one = router(models_max=2)
    rules = {**QUICK, "models": {"a": {"replicas": {"min": 1}}}}
    async with placed(tmp_path, one, settings=rules) as running:
        await until(lambda: phase(running, "r1/a") is LoadPhase.READY)
        await asyncio.sleep(2.0)
        running.gateway.model_placer.hand_over()
        await one.kill_model("a")
        await asyncio.sleep(30.0)
        assert phase(running, "r1/a") is LoadPhase.UNLOADED
        running.gateway.model_placer.configure(running.gateway.settings)
        assert (await ask(running, "b")).status_code == 200
        await asyncio.sleep(5.0)
        assert phase(running, "r1/a") is LoadPhase.UNLOADED


GIB = 1 << 30


BEGUN = {
    "load": LoadPhase.LOADING,
    "retire": LoadPhase.RETIRING,
    "keep": LoadPhase.READY,
    "unload": LoadPhase.UNLOADING,
}


@dataclass
class Fleet:
    """Routers whose loads and unloads end when the test says so."""

    settings: ModelPlacementSettings = field(default_factory=ModelPlacementSettings)
    models: Mapping[str, ModelRule] = field(default_factory=dict)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.policy = ModelPlacementPolicy(self.settings, self.models)
        self.instances: dict[tuple[str, str], Instance] = {}
        self.usages: dict[tuple[str, str], InstanceUsage] = {}

    def node(self, name: str, gib: int | None = None, host: str = "", **more: Any) -> None:
        memory = None if gib is None else gib * GIB
        self.policy.fleet.put_node(RouterNode(name, host or name, memory, **more))

    def model(self, model: str, gib: int | None, *nodes: str, **more: Any) -> None:
        memory = None if gib is None else gib * GIB
        more = {"load_seconds": 10.0} | more
        for node in nodes:
            self._put(Instance(node, model, memory=memory, **more))

    def change(self, node: str, model: str, **changes: Any) -> None:
        self._put(replace(self.instances[node, model], **changes))

    def ready(self, *pairs: tuple[str, str], since: float = 0.0) -> None:
        for node, model in pairs:
            self.change(node, model, phase=LoadPhase.READY, since=since)

    def use(
        self, node: str, model: str, leases: int = 0, busy: float = 0.0, last_used: float = 0.0
    ) -> None:
        self.usages[node, model] = InstanceUsage(leases, busy, last_used)

    def ask(self, model: str, every: float, lasting: float = 900.0) -> None:
        """Callers have asked for a model so often, up to now."""
        for place in range(int(lasting / every)):
            self.policy.rates.note(model, self.now - lasting + place * every)

    def look(self, *demands: ModelDemand) -> list[tuple[str, str, str]]:
        """Decide, and begin what was decided on."""
        actions = self.policy.decide(
            demands, lambda one: self.usages.get(one.key, InstanceUsage()), self.now
        )
        for action in actions:
            self.change(action.node, action.model, phase=BEGUN[action.verb], since=self.now)
        return [action[:3] for action in actions]

    def end(self, node: str, model: str) -> None:
        """A load or an unload has ended."""
        loading = self.instances[node, model].phase is LoadPhase.LOADING
        phase = LoadPhase.READY if loading else LoadPhase.UNLOADED
        self.change(node, model, phase=phase, since=self.now)

    def _put(self, instance: Instance) -> None:
        self.instances[instance.key] = instance
        self.policy.fleet.put(instance)


def waiting(model: str, count: int = 1, each: float = 0.0, **more: Any) -> ModelDemand:
    """So many requests wait, each since so long."""
    return ModelDemand(model, count, count * each, each, **more)


def rule(least: int = 0, most: int | None = None, **more: Any) -> ModelRule:
    return ModelRule(replicas=ReplicaSettings(min=least, max=most), **more)


def two_models_in_room_for_one(
    models: Mapping[str, ModelRule] | None = None, **settings: Any
) -> Fleet:
    fleet = Fleet(ModelPlacementSettings(**settings), models or {})
    fleet.node("r1", 10)
    fleet.model("a", 8, "r1")
    fleet.model("b", 8, "r1")
    fleet.ready(("r1", "a"))
    return fleet


def test_a_model_that_nobody_asks_for_makes_room_at_once() -> None:
    fleet = two_models_in_room_for_one()
    assert fleet.look(waiting("b")) == [("unload", "r1", "a")]
    assert fleet.look(waiting("b")) == []
    fleet.end("r1", "a")
    assert fleet.look(waiting("b")) == [("load", "r1", "b")]


def test_an_instance_with_leases_is_retired_and_unloaded_only_when_they_have_ended() -> None:
    fleet = two_models_in_room_for_one()
    fleet.use("r1", "a", leases=1, busy=5.0)
    assert fleet.look(waiting("b")) == [("retire", "r1", "a")]
    assert fleet.look(waiting("b", each=1.0)) == []
    fleet.use("r1", "a")
    assert fleet.look(waiting("b", each=5.0)) == [("unload", "r1", "a")]
    fleet.end("r1", "a")
    assert fleet.look(waiting("b", each=6.0)) == [("load", "r1", "b")]


def test_a_busy_model_keeps_its_place_until_the_others_have_waited_as_long_as_it_would_cost() -> (
    None
):
    fleet = two_models_in_room_for_one()
    fleet.ask("a", every=2.0)
    assert fleet.look(waiting("b", each=1.0), waiting("a", 3, each=1.0)) == []
    assert fleet.look(waiting("b", 10, each=12.0), waiting("a", 3, each=1.0)) == [
        ("unload", "r1", "a")
    ]


def test_a_model_is_loaded_in_time_for_the_starvation_bound() -> None:
    fleet = two_models_in_room_for_one(starvation=60.0)
    fleet.ask("a", every=0.1)
    assert fleet.look(waiting("b", each=47.0)) == []
    assert fleet.look(waiting("b", each=48.0)) == [("unload", "r1", "a")]


@each_case(
    ("wait", "holders", "held"),
    [
        # Those who waited too long when it was loaded are served; some three have come since.
        (90.0, waiting("a", 6, each=70.0), True),
        (90.0, waiting("a", 2, each=70.0), False),
        # A queue within its bound gives way to one past it, and rows hold no place.
        (60.0, waiting("a", 50, each=40.0), False),
        (90.0, waiting("a", 900, each=300.0, batch=True), False),
    ],
)
def test_who_holds_the_place_of_a_model_that_was_loaded_a_while_ago(
    wait: float, holders: ModelDemand, held: bool
) -> None:
    fleet = two_models_in_room_for_one(hysteresis=10.0)
    fleet.ready(("r1", "a"), since=fleet.now - 30.0)
    fleet.ask("a", every=10.0)
    unloads = [] if held else [("unload", "r1", "a")]
    assert fleet.look(waiting("b", 5, each=wait), holders) == unloads


def test_a_queue_holds_the_place_of_its_model_for_twenty_loads_at_most() -> None:
    fleet = two_models_in_room_for_one()
    fleet.ready(("r1", "a"), since=fleet.now - 199.0)
    assert fleet.look(waiting("b", each=90.0), waiting("a", 900, each=300.0)) == []
    fleet.now += 1.0
    assert fleet.look(waiting("b", each=90.0), waiting("a", 900, each=300.0)) == [
        ("unload", "r1", "a")
    ]


def test_nodes_of_one_host_share_its_memory() -> None:
    fleet = Fleet()
    fleet.node("n0", 20, host="h")
    fleet.node("n1", 20, host="h")
    for name in ("a", "b"):
        fleet.model(name, 12, "n0", "n1")
    fleet.ready(("n0", "a"))
    assert fleet.look(waiting("b")) == [("unload", "n0", "a")]


def test_a_node_holds_no_more_models_than_its_limit() -> None:
    fleet = Fleet()
    fleet.node("r1", 100, most_loaded=1)
    for name in ("a", "b"):
        fleet.model(name, 1, "r1")
    fleet.ready(("r1", "a"))
    assert fleet.look(waiting("b")) == [("unload", "r1", "a")]


def test_a_model_of_unknown_memory_is_first_loaded_alone() -> None:
    fleet = Fleet()
    fleet.node("r1", 100)
    fleet.model("a", 8, "r1")
    fleet.model("x", None, "r1")
    fleet.ready(("r1", "a"))
    assert fleet.look(waiting("x")) == [("unload", "r1", "a")]
    fleet.end("r1", "a")
    assert fleet.look(waiting("x")) == [("load", "r1", "x")]
    fleet.end("r1", "x")
    fleet.now += 20
    assert fleet.look(waiting("a")) == [("unload", "r1", "x")]


def test_a_model_larger_than_every_host_is_never_loaded() -> None:
    fleet = two_models_in_room_for_one()
    fleet.model("huge", 11, "r1")
    assert fleet.look(waiting("huge", 9, each=100.0)) == []


def test_a_failed_load_is_tried_elsewhere_and_there_only_when_it_is_due() -> None:
    fleet = Fleet()
    fleet.node("r1", 10)
    fleet.node("r2", 10)
    fleet.model("a", 8, "r1", load_seconds=1.0)
    fleet.model("a", 8, "r2", load_seconds=20.0)
    fleet.change("r1", "a", phase=LoadPhase.FAILED, retry_at=fleet.now + 30)
    assert fleet.look(waiting("a")) == [("load", "r2", "a")]
    fleet.change("r2", "a", phase=LoadPhase.FAILED, retry_at=fleet.now + 60)
    assert fleet.look(waiting("a")) == []
    fleet.now += 30
    assert fleet.look(waiting("a")) == [("load", "r1", "a")]


def test_a_pinned_model_is_loaded_and_stays() -> None:
    fleet = two_models_in_room_for_one()
    fleet.change("r1", "b", pinned=True)
    assert fleet.look() == [("unload", "r1", "a")]
    fleet.end("r1", "a")
    assert fleet.look() == [("load", "r1", "b")]
    fleet.end("r1", "b")
    fleet.now += 100
    assert fleet.look(waiting("a", 9, each=100.0)) == []


def test_there_are_never_fewer_copies_than_the_least_nor_more_than_the_most() -> None:
    fleet = Fleet(models={"a": rule(2, 2)})
    for name in ("r1", "r2", "r3"):
        fleet.node(name, 10)
    fleet.model("a", 8, "r1", "r2", "r3")
    assert [fleet.look()[0][0] for _ in range(2)] == ["load", "load"]
    assert fleet.look(waiting("a", 50, each=30.0)) == []
    fleet.ready(("r1", "a"), ("r2", "a"), ("r3", "a"))
    fleet.use("r1", "a", last_used=5.0)
    fleet.use("r2", "a", last_used=4.0)
    fleet.use("r3", "a", last_used=6.0)
    assert fleet.look() == [("unload", "r2", "a")]


def test_an_idle_model_is_unloaded_after_the_time_of_its_rules() -> None:
    fleet = two_models_in_room_for_one(models={"a": rule(idle_unload=60.0)})
    fleet.use("r1", "a", last_used=fleet.now - 59)
    assert fleet.look() == []
    fleet.now += 1
    assert fleet.look() == [("unload", "r1", "a")]


def test_two_models_that_wait_are_not_promised_the_same_memory() -> None:
    fleet = Fleet()
    fleet.node("r1", 10)
    fleet.model("a", 8, "r1")
    fleet.model("b", 8, "r1")
    assert len(fleet.look(waiting("a"), waiting("b"))) == 1


def test_the_last_copy_of_a_model_in_much_use_stays_whatever_another_queue_would_save() -> None:
    for every, left in ((1.0, True), (60.0, False)):
        fleet = Fleet()
        for name in ("r1", "r2"):
            fleet.node(name, 10)
        for model in ("a", "b"):
            fleet.model(model, 8, "r1", "r2")
        fleet.ready(("r1", "a"), ("r2", "b"))
        fleet.ask("b", every)
        assert (fleet.look(waiting("a", 60, each=5.0)) == []) is left
