from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.nodes.on_demand import MOST_RUNNING, read_endpoint, read_running
from gateway.nodes.router import RouterRecord
from tests.each_case import each_case

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


def test_what_runs_is_read_up_to_a_bound() -> None:
    many = {"running": [{"model": str(number), "state": "ready"} for number in range(5000)]}
    assert len(read_running(many) or ()) == MOST_RUNNING


@given(JSON, st.sampled_from(["running", "models"]))
def test_no_answer_about_what_runs_breaks_it(answer: object, key: str) -> None:
    for value in (answer, {key: answer}, {key: [answer, {"model": "a", "state": answer}]}):
        found = read_running(value)
        assert found is None or all(isinstance(name, str) for name in found)


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
