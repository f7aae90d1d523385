"""Lists, events and load phases of routers."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

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
from tests.each_case import each_case

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


def test_a_load_that_was_ordered_is_seen_to_end() -> None:
    load = ModelLoad(failures=5)
    load.order("load", "ordered", 0.0)
    load.command_taken(1.0)
    load.progressed(0.5)
    assert (load.phase, load.progress) == (LoadPhase.LOADING, 0.5)
    lists = (model("loading"), 1.0), (model("loaded"), 3.0), (model("sleeping"), 4.0)
    assert reports(load, *lists) == [None, ("loaded", 3.0, False), None]
    assert (load.phase, load.loads, load.failures) == (LoadPhase.READY, 1, 0)
    load.order("unload", "ordered", 5.0)
    assert reports(load, (model("loaded"), 9.0)) == [None]
    assert load.phase is LoadPhase.UNLOADING
    assert reports(load, (model("unloaded"), 9.0)) == [("unloaded", None, False)]
    # An unload that never ends is not believed for ever.
    load = ModelLoad(phase=LoadPhase.READY)
    load.order("unload", "ordered", 0.0)
    load.command_taken(1.0)
    assert reports(load, (model("loaded"), MOST_UNLOAD)) == [None]
    reports(load, (model("loaded"), MOST_UNLOAD + 1.0))
    assert load.phase is LoadPhase.READY


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
