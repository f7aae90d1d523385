"""Routers: their lists and events, the phases of loads, and their models as nodes of a fleet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.nodes.health import LONGEST_FOLLOW, HealthMonitor
from gateway.nodes.node import Node, NodeState
from gateway.nodes.router import (
    BY_OTHERS_SECONDS,
    FIRST_RETRY,
    LONGEST_EVENT,
    MOST_BY_OTHERS,
    MOST_RETRY,
    MOST_UNLOAD,
    OTHERS_PAUSE,
    EventLines,
    LoadPhase,
    ModelEvent,
    ModelLoad,
    RoutedModel,
    RouterRecord,
    read_endpoint,
    read_list,
    read_running,
)
from gateway.nodes.server_properties import parse_models
from gateway.nodes.state_files import PropertiesStore
from tests.each_case import each_case
from tests.emulator.recorded_router import RecordedRouter
from tests.nodes.build import Running, a_fleet, a_spec, inventory
from tests.virtual import in_virtual_time

ARGS = ["--parallel", "2", "--ctx-size", "8192", "--model", "/models/a.gguf"]


def listed(*entries: Any) -> list[RoutedModel]:
    return read_list(parse_models(json.dumps({"data": entries}).encode()))


def entry(value: object = "unloaded", **status: Any) -> dict[str, Any]:
    return {"id": "a", "status": {"value": value, "args": ARGS, **status}}


def model(value: object = "unloaded", **status: Any) -> RoutedModel:
    [found] = listed(entry(value, **status))
    return found


def test_a_list_tells_of_names_status_slots_context_and_file() -> None:
    [found] = listed(entry("loaded") | {"aliases": ["b", "c"]})
    assert (found.name, sorted(found.names)) == ("a", ["a", "b", "c"])
    assert (found.status, found.failed, found.exit_code) == ("loaded", False, None)
    assert (found.slots, found.context, found.file) == (2, 4096, "/models/a.gguf")
    failed = model(failed=True, exit_code=1)
    assert (failed.status, failed.failed, failed.exit_code) == ("unloaded", True, 1)
    assert model("downloading").status == "unloaded"
    assert listed({"id": "gpt"})[0].status is None


LONG = "x" * 300
ODD_ALIASES: tuple[Any, ...] = (7, {"b": 1}, [7, LONG])
ODD_STATUS: tuple[Any, ...] = (7, "loaded", [], {"exit_code": "x", "failed": "yes"})
ODD_ARGS: tuple[Any, ...] = (
    *(7, {}, [1, None, {}], ["--parallel"]),
    *(["--parallel", "-1"], ["--parallel", "9" * 30], ["--parallel", "0"]),
)


@each_case(
    ("told", "status", "names"),
    [
        *(
            (entry(value), None, {"a"})
            for value in ("odd", 7, None, ["loaded"], {"loaded": True}, "L" * 5000)
        ),
        *(
            ({"id": "a", "status": {"value": "loaded", "args": args}}, "loaded", {"a"})
            for args in ODD_ARGS
        ),
        *((entry() | {"aliases": odd}, "unloaded", {"a"}) for odd in ODD_ALIASES),
        *(({"id": "a", "status": odd}, None, {"a"}) for odd in ODD_STATUS),
    ],
)
def test_what_a_list_says_amiss_is_left_out(
    told: dict[str, Any], status: str | None, names: set[str]
) -> None:
    [found] = listed(told)
    assert (found.status, found.failed, found.exit_code) == (status, False, None)
    assert found.names == names
    if status == "loaded":
        assert (found.slots, found.context) == (None, None)


def test_models_without_a_name_that_can_be_used_are_left_out() -> None:
    for name in ("", LONG, "a\nb", "a\0", 7, None, ["a"]):
        assert listed({"id": name}, entry()) == [model()], name
    assert [one.name for one in listed(entry(), entry("loaded"))] == ["a"]
    many = listed(entry() | {"aliases": [f"a{number}" for number in range(999)]})[0]
    assert len(many.names) == 65


def test_events_are_the_same_however_they_are_cut() -> None:
    progress = {"stages": ["text_model"], "current": "text_model", "value": 0.25}
    told: list[dict[str, Any]] = [
        {"model": "a", "event": "model_status", "data": {"status": "loading"}},
        {"model": "a", "event": "status_change", "data": {"progress": progress}},
        {"model": "a", "event": "status_change", "data": {"progress": {"stage": "mmproj_model"}}},
        {"model": "*", "event": "models_reload"},
    ]
    text = b": hi\n\n" + b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in told)
    expected = [
        ModelEvent("a", None),
        ModelEvent("a", 0.25),
        ModelEvent("a", None),
        ModelEvent("*", None),
    ]
    for size in (1, 3, 17, len(text)):
        lines = EventLines()
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        assert [event for part in parts for event in lines.add(part)] == expected, size


def test_odd_events_and_endless_lines_are_passed_over() -> None:
    lines = EventLines()
    odd = (b"data: [1]", b"data: {", b"data: \xff", b"event: x", b"retry: 1", b"data:", b"")
    assert list(lines.add(b"\n".join(odd) + b"\n")) == []
    [strange] = lines.add(b'data: {"model": 7, "data": {"progress": {"value": 1e99}}}\n')
    assert strange == ModelEvent(None, None)
    for _ in range(40):
        assert list(lines.add(b"data: " + b"x" * 10_000)) == []
    assert len(lines._rest) <= LONGEST_EVENT + 10_006
    assert list(lines.add(b'"}\ndata: {"model": "a"}\n')) == [ModelEvent("a", None)]


def reports(
    load: ModelLoad, *told: tuple[RoutedModel, float], followed: bool | None = True
) -> list[object]:
    """The changes that these lists show of this load."""
    return [load.reported(one, at, at, followed=followed) for one, at in told]


def test_an_unload_that_never_ends_is_not_believed_for_ever() -> None:
    load = ModelLoad(phase=LoadPhase.READY)
    load.order("unload", "ordered", 0.0)
    load.command_taken(1.0)
    assert reports(load, (model("loaded"), MOST_UNLOAD)) == [None]
    phases = [load.phase]
    reports(load, (model("loaded"), MOST_UNLOAD + 1.0))
    assert [*phases, load.phase] == [LoadPhase.UNLOADING, LoadPhase.READY]


def test_a_list_counts_against_a_command_only_if_it_was_asked_for_after_its_answer() -> None:
    load = ModelLoad()
    load.order("load", "ordered", 0.0)
    assert reports(load, (model(), 50.0)) == [None]
    load.command_taken(60.0)
    assert load.reported(model(), 59.0, 61.0, followed=True) is None
    assert load.phase is LoadPhase.LOADING
    failed = model(failed=True, exit_code=1)
    assert load.reported(failed, 60.0, 61.0, followed=True) == ("failed", None, False)
    assert "exit code 1" in load.reason


def test_a_failed_load_is_tried_again_after_longer_each_time() -> None:
    load, now, waits = ModelLoad(), 0.0, []
    for _ in range(10):
        load.failed("why", now)
        assert not load.retry_due(load.retry_at - 0.1)
        waits.append(load.retry_at - now)
        now = load.retry_at
        assert load.retry_due(now)
        assert load.phase is LoadPhase.UNLOADED
        assert not load.retry_due(now)
    assert waits[:3] == [FIRST_RETRY, 2 * FIRST_RETRY, 4 * FIRST_RETRY]
    assert waits[-1] == MOST_RETRY


@each_case("phase", [LoadPhase.READY, LoadPhase.RETIRING, LoadPhase.LOADING])
def test_a_router_s_restart_is_nobody_s_doing(phase: LoadPhase) -> None:
    load = ModelLoad(phase=phase)
    assert reports(load, (model(), 1.0), followed=False) == [("unloaded", None, False)]
    assert (load.reason, load.cause) == ("the router was restarted", "restart")
    assert (load.failures, load.by_others_at < 0.0) == (0, True)
    # Of one without events nobody knows: so that a model that never loads is not loaded on and on.
    load = ModelLoad(phase=LoadPhase.LOADING)
    assert reports(load, (model(), 1.0), followed=None) == [("failed", None, False)]


def test_what_others_do_is_told_from_what_we_do() -> None:
    load = ModelLoad()
    assert reports(load, (model("loading"), 1.0), (model("loaded"), 2.0), (model(), 3.0)) == [
        *(("loading", None, True), ("loaded", 1.0, False), ("unloaded", None, True))
    ]
    assert (load.by_others_at, load.cause) == (3.0, "others")
    dead, killed = ModelLoad(phase=LoadPhase.READY), model(failed=True, exit_code=1)
    assert reports(dead, (killed, 1.0)) == [("died", None, False)]
    assert (dead.phase, dead.failures) == (LoadPhase.UNLOADED, 0)


def test_a_router_that_others_command_too_is_left_alone_for_a_while() -> None:
    record = RouterRecord()
    many = [record.changed_by_others(10.0 * number) for number in range(MOST_BY_OTHERS)]
    assert many == [False] * (MOST_BY_OTHERS - 1) + [True]
    now = 10.0 * MOST_BY_OTHERS
    assert record.stopped(now)
    assert not record.changed_by_others(now)  # It was told.
    assert not record.stopped(now + OTHERS_PAUSE)
    seldom = RouterRecord()
    every = BY_OTHERS_SECONDS / (MOST_BY_OTHERS - 1) + 1.0
    assert not any(seldom.changed_by_others(every * number) for number in range(50))


# Endpoints of kind `openai` that load models by themselves.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


STATES = ("ready", "starting", "stopping", "stopped", "shutdown", ["ready"], None, 7)


@each_case(
    ("answer", "expected"),
    [
        (
            {"running": [{"model": f"m{n}", "state": state} for n, state in enumerate(STATES)]},
            {"m0": True, "m1": False},
        ),
        ({"models": [{"name": "a:latest", "model": "a:latest", "size": 7}]}, {"a:latest": True}),
        ({"running": []}, {}),
        ({"models": [{"name": "a"}, {"model": ""}, {"model": "x\n"}, 7, None]}, {}),
        ({"running": {"a": 1}}, None),
        ([], None),
        (None, None),
        ("<html>", None),
    ],
)
def test_what_runs_is_read_from_both_forms(answer: object, expected: object) -> None:
    assert read_running(answer) == expected


@given(JSON)
def test_no_list_of_models_breaks_it(value: Any) -> None:
    swap = {"meta": {"llamaswap": {"aliases": value, "modelID": value}}}
    entries = [{"id": "a", **swap}, {"id": "b", "meta": value}, {"id": value}]
    models = read_endpoint({"data": entries}, {"own"}, {"a": True})
    names = [model.name for model in models]
    assert {"b", "own"} <= set(names)
    assert "a" in names or value in names  # of which it is an alias
    assert len(names) == len(set(names))


def test_aliases_belong_to_their_model_and_what_it_holds_comes_last() -> None:
    listed = {
        "data": [
            {"id": "big", "meta": {"llamaswap": {"aliases": ["hidden"]}}},
            {"id": "gpt", "meta": {"llamaswap": {"type": "alias", "modelID": "big"}}},
            {"id": "orphan", "meta": {"llamaswap": {"type": "alias", "modelID": "gone"}}},
            {"id": "llama3:latest", "status": {"value": "loaded"}},
            {"id": "loading"},
        ]
    }
    running = {"big": True, "loading": False}
    models = read_endpoint(listed, {"gpt", "secret"}, running)
    assert [(one.name, set(one.names), one.status) for one in models] == [
        ("orphan", {"orphan"}, "unloaded"),
        ("llama3:latest", {"llama3:latest", "llama3"}, "unloaded"),
        ("loading", {"loading"}, "loading"),
        ("secret", {"secret"}, "unloaded"),
        ("big", {"big", "gpt", "hidden"}, "loaded"),
    ]
    # What a list says of itself is not believed: llama-swap's counts what is ending, too.
    assert {one.status for one in read_endpoint(listed, (), None)} == {None}
    assert [one.name for one in read_endpoint(None, {"own"}, None)] == ["own"]


def test_how_many_models_it_holds_is_what_was_seen_together() -> None:
    record, seen = RouterRecord(), []
    for held in ("", "a", "ab", "b", "bc", "d", "", "e", "ef", "efg", "fgh", "x", "x"):
        record.holds(frozenset(held))
        seen.append(record.most_loaded)
    # One that goes, while another one comes, has made room for it.
    assert seen == [0, 1, 2, 2, 2, 1, 1, 1, 2, 3, 3, 1, 1]


SELDOM: dict[str, Any] = {"interval": 60.0, "discover_interval": 60.0, "timeout": 2.0}


@asynccontextmanager
async def routed(*models: str, **options: Any) -> AsyncIterator[tuple[Running, RecordedRouter]]:
    """A fleet of one router, `r`, which is probed once a minute."""
    async with (
        RecordedRouter(models, slots=2, context=4096, **options) as router,
        a_fleet(a_spec("r", router.url), **SELDOM) as fleet,
    ):
        await asyncio.sleep(1.0)
        yield fleet, router


def names(fleet: Running) -> set[str]:
    return set(fleet.fleet.nodes)


def phase(node: Node) -> LoadPhase:
    assert node.load is not None
    return node.load.phase


@in_virtual_time
async def test_each_model_of_a_router_is_a_node_and_the_router_serves_none() -> None:
    async with routed("a", "org/b") as (fleet, _):
        assert names(fleet) == {"r", "r/a", "r/org/b"}
        assert (fleet["r"].slots_total, fleet["r"].public_models) == (0, frozenset())
        assert (fleet["r/a"].slots_total, fleet["r/a"].context) == (2, 4096)
        assert fleet["r/org/b"].public_models == {"org/b"}
        assert fleet["r/a"].state is NodeState.UNLOADED
        assert fleet["r/a"].free_slots(fleet["r/a"].clock()) == 0
        assert fleet["r"].state is NodeState.READY


@in_virtual_time
async def test_what_happens_to_a_model_is_known_by_its_router_s_events() -> None:
    async with routed("a", load_seconds=4.0) as (fleet, router):
        node = fleet["r/a"]
        router._load_now("a")
        await asyncio.sleep(3.0)
        assert (node.state, node.load.progress if node.load else 0) == (NodeState.LOADING, 0.75)
        await asyncio.sleep(1.5)
        assert (node.state, node.free_slots(node.clock())) == (NodeState.READY, 2)
        assert node.sleep.measured == pytest.approx(4.0, abs=0.3)
        await router.kill_model("a")
        await asyncio.sleep(0.5)
        assert (node.state, phase(node)) == (NodeState.UNLOADED, LoadPhase.UNLOADED)
        assert "ended by itself" in node.reason


@in_virtual_time
async def test_a_router_without_events_is_read_with_each_probe() -> None:
    async with RecordedRouter(["a", "b"], models_max=0) as router:
        router.told["GET /models/sse"] = (404, b"{}")
        async with a_fleet(a_spec("r", router.url), interval=5.0, timeout=2.0) as fleet:
            await asyncio.sleep(1.0)
            router._load_now("a")
            await asyncio.sleep(6.0)
            assert fleet.state("r/a") is NodeState.READY
            router.models["b"].failing_loads = 9
            fleet.fleet.load_ordered(fleet["r/b"], "load", "test")
            router._load_now("b")
            fleet["r/b"].load.command_taken(fleet["r/b"].clock())  # type: ignore[union-attr]
            await asyncio.sleep(6.0)
            # A load that is lost is a failure here: nobody tells of restarts.
            assert fleet.state("r/b") is NodeState.FAILED


@in_virtual_time
async def test_a_router_that_is_down_takes_its_models_along_and_costs_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0
    look = HealthMonitor._may_read_list

    def counted(monitor: HealthMonitor) -> bool:
        nonlocal looks
        looks += 1
        return look(monitor)

    async with routed("a") as (fleet, router):
        router._load_now("a")
        await fleet.until_state("r/a", NodeState.READY)
        await router.kill()
        await fleet.until_state("r", NodeState.DOWN)
        assert fleet.state("r/a") is NodeState.DOWN
        monkeypatch.setattr(HealthMonitor, "_may_read_list", counted)
        fleet.fleet.read_models(fleet["r/a"])
        await asyncio.sleep(30.0)
        assert looks < 50
        async with RecordedRouter(["a"], port=router.port):
            await fleet.until_state("r/a", NodeState.UNLOADED, 200.0)
            assert "the router was restarted" in fleet["r/a"].reason


@in_virtual_time
async def test_events_are_asked_for_anew_after_a_while_and_after_an_outage() -> None:
    async with routed("a") as (fleet, router):
        assert router.asked["GET /models/sse"] == 1
        await asyncio.sleep(LONGEST_FOLLOW + 70.0)
        assert router.asked["GET /models/sse"] == 2
        # Its machine is gone: no connection ends.
        router.told = {"GET /health": (500, b"")}
        for _ in range(4):
            await fleet.fleet.probe("r")
        await asyncio.sleep(0.1)
        assert fleet.state("r") is NodeState.DOWN
        assert fleet["r"].router_record.followed(fleet["r"].clock()) is False
        router.told = {}
        await fleet.fleet.probe("r")
        await asyncio.sleep(1.0)
        assert router.asked["GET /models/sse"] == 3


@in_virtual_time
async def test_no_list_stops_the_watch() -> None:
    odd: list[Any] = [
        [1], {"data": 7}, {"data": [None]}, {"data": [{"id": "a", "status": {"value": {}}}]},
        {"data": [{"id": "a", "status": {"value": "unloaded", "args": ["x"] * 300_000}}]},
    ]  # fmt: skip
    async with routed("a") as (fleet, router):
        for told in odd:
            for path in ("GET /v1/models", "GET /v1/models?reload=1"):
                router.told[path] = (200, json.dumps(told).encode())
            await fleet.fleet.probe("r")
            await asyncio.sleep(1.0)
        assert "r/a" in names(fleet)
        router.told = {}
        router._load_now("a")
        await asyncio.sleep(1.0)
        assert fleet.state("r/a") is NodeState.READY


@in_virtual_time
async def test_the_inventory_says_which_models_are_used_and_by_which_names() -> None:
    async with routed("a", "b") as (fleet, router):
        change = fleet.fleet.apply(inventory(a_spec("r", router.url, models={"x": "b"})))
        assert change.changed == ["r"]
        await fleet.until(lambda: names(fleet) == {"r", "r/b"})
        assert fleet["r/b"].public_models == {"x"}
        # What a router has said is known at once, whatever it does now.
        fleet.fleet.apply(inventory(a_spec("r", router.url)))
        assert names(fleet) == {"r", "r/a", "r/b"}
        fleet.fleet.apply(inventory())
        assert names(fleet) == set()
        assert fleet.states("r/a")[-1] is None
        assert fleet.states("r/b")[-1] is None


@in_virtual_time
async def test_models_of_a_router_are_known_before_it_is_probed() -> None:
    async with RecordedRouter(["a", "b"]) as router:
        store = PropertiesStore()
        spec = a_spec("r", router.url)
        async with a_fleet(spec, properties_store=store, **SELDOM):
            pass
        await router.kill()
        declared = a_spec("r", router.url, models={"b": "b"})
        async with a_fleet(declared, properties_store=store, probed=False, **SELDOM) as fleet:
            assert names(fleet) == {"r", "r/b"}
            await fleet.until_state("r/b", NodeState.DOWN)


@in_virtual_time
async def test_a_drained_router_drains_its_models() -> None:
    async with routed("a") as (fleet, router):
        router._load_now("a")
        await asyncio.sleep(1.0)
        fleet.fleet.drain("r")
        assert fleet.state("r/a") is NodeState.DRAINING
        fleet.fleet.drain("r", draining=False)
        assert fleet.state("r/a") is NodeState.READY
        fleet.fleet.drain("r/a")
        assert (fleet.state("r"), fleet.state("r/a")) == (NodeState.READY, NodeState.DRAINING)
