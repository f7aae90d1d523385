from __future__ import annotations

from gateway.tools.top.picture import FleetPicture


def test_an_update_changes_what_it_names_and_leaves_the_rest() -> None:
    picture = FleetPicture()
    picture.apply("hello", {"role": "operator"})
    picture.apply(
        "snapshot",
        {
            "at": 10.0,
            "summary": {"ready": True},
            "nodes": [{"name": "a", "state": "ready", "slots_total": 2}, {"name": "b"}],
            "requests": [{"id": "r1", "tokens": 1}],
            "problems": [{"title": "t"}],
            "waiting": [["normal", "m", 1, None]],
        },
    )
    picture.apply(
        "update",
        {
            "at": 11.0,
            "nodes": [{"name": "a", "state": "down"}],
            "gone_nodes": ["b"],
            "requests": [{"id": "r2", "tokens": 2}],
            "ended_requests": ["r1"],
        },
    )
    assert picture.role == "operator"
    assert picture.at == 11.0
    assert picture.nodes == {"a": {"name": "a", "state": "down", "slots_total": 2}}
    assert picture.requests == {"r2": {"id": "r2", "tokens": 2}}
    assert picture.summary == {"ready": True}
    assert picture.problems == [{"title": "t"}]
    assert picture.waiting == [["normal", "m", 1, None]]


def test_a_snapshot_replaces_everything() -> None:
    picture = FleetPicture()
    picture.apply("snapshot", {"nodes": [{"name": "a"}], "requests": [{"id": "r"}]})
    picture.apply("snapshot", {"nodes": [{"name": "b"}]})
    assert list(picture.nodes) == ["b"]
    assert picture.requests is None, "this key may not see them any more"


def test_events_of_another_form_do_no_harm() -> None:
    picture = FleetPicture()
    picture.apply("snapshot", {"nodes": "x", "requests": [7], "waiting": [["a"]], "summary": []})
    picture.apply("update", {"at": None, "gone_nodes": {"a": 1}, "problems": None})
    picture.apply("something new", {"nodes": [{"name": "a"}]})
    assert picture.nodes == {}
    assert picture.requests == {}
    assert picture.waiting == []
