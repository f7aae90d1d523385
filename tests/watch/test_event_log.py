from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.events import (
    AttemptEnded,
    InventoryChanged,
    ModelLoadChanged,
    ModelsDiffer,
    NodeChanged,
    NodeDrift,
    SettingsChanged,
)
from gateway.terms import Priority
from gateway.watch.logs import LogFormat
from tests.watch.test_metrics import finished
from tests.watch.written import Written


def test_a_request_is_one_json_line(written: Written) -> None:
    written.set_up()
    measured = {"attempts": 2, "prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 7}
    written.bus.publish(finished(queue_seconds=0.25, ttft=1.5, duration_seconds=4.0, **measured))
    (line,) = written.lines()
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "level": "info", "event": "request", "id": "r1", "path": "/v1/chat/completions",
        "status": 200, "class": "normal", "model": "mistral-7b", "node": "a", "queue": 0.25,
        "ttft": 1.5, "duration": 4.0, "stream": True, "caller": "team", **measured,
    }  # fmt: skip


def test_requests_that_differ_in_one_thing_have_lines_that_tell_it(written: Written) -> None:
    written.set_up()
    others: dict[str, Any] = {
        "path": "/v1/50%d", "model": "other", "priority": Priority.BATCH, "caller": "bob",
        "status": 404, "reason": "10%_off", "stream": False, "node": "b", "attempts": 7,
    }  # fmt: skip
    for name, value in others.items():
        written.bus.publish(finished())
        written.bus.publish(finished(**{name: value}))
    told = {**others, "priority": "batch"}
    for name, value, line in zip(told, told.values(), written.lines()[1::2], strict=True):
        assert line["class" if name == "priority" else name] == value


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_request_has_the_name_of_its_key_as_it_is_now(written: Written, form: LogFormat) -> None:
    names = {"team": 'The "Team"\n\u202e'}
    written.set_up(form=form, names=names)
    written.bus.publish(finished())
    names["team"] = "Renamed"
    written.bus.ended.forget_kinds()
    written.bus.publish(finished())
    written.bus.publish(finished(caller="anonymous:10.0.0.1"))
    first, second, third = written.text().splitlines()
    assert "\u202e" not in first
    if form == "json":
        assert json.loads(first)["caller_name"] == 'The "Team"\\n\\u202e'
    assert "Renamed" in second
    assert "caller_name" not in third


def test_a_failed_request_says_why(written: Written) -> None:
    written.set_up("warning")
    written.bus.publish(finished(status=503, reason="no_node", node=None, ttft=None))
    written.bus.publish(finished())
    (line,) = written.lines()
    assert (line["level"], line["status"], line["reason"]) == ("warning", 503, "no_node")
    assert line["node"] is None
    assert line["ttft"] is None


def test_a_share_of_the_requests_has_a_line_and_every_failed_one(written: Written) -> None:
    written.set_up(draws=[0.24, 0.25, 0.99])
    written.event_log.configure(0.25)
    for name in ("first", "second", "third"):
        written.bus.publish(finished(x_request_id=name))
    written.bus.publish(finished(x_request_id="failed", status=502, reason="node_failed"))
    assert [line["id"] for line in written.lines()] == ["first", "failed"]


def test_changes_of_nodes_and_models_are_lines_with_their_reason(written: Written) -> None:
    written.set_up()
    load = ModelLoadChanged("r1", "m\n1", "loaded", 12.3456, "3 wait for it", by_others=False)
    for event in (
        NodeChanged("a", "ready", "down", "connection refused"),
        NodeChanged("a", "down", "ready", "answers again"),
        NodeChanged("r1/m", "unloaded", "ready", "as its router has it"),
        load,
        replace(load, change="failed", by_others=True),
        AttemptEnded("r", "a", "ok", 1.0, 200),
        AttemptEnded("r", "a", "client_closed", 1.0),
        AttemptEnded("r", "b", "reset", 0.5),
        ModelsDiffer(("demo: build: b1 on a; b2 on b",)),
        ModelsDiffer(()),
    ):
        written.bus.publish(event)
    lines = written.lines()
    assert [(line["level"], line["event"]) for line in lines] == [
        ("warning", "node"), ("info", "node"), ("info", "model"), ("warning", "model"),
        ("warning", "attempt"), ("warning", "nodes of one model differ"),
        ("info", "nodes of each model are alike again"),
    ]  # fmt: skip
    assert (lines[0]["node"], lines[0]["reason"]) == ("a", "connection refused")
    assert (lines[2]["seconds"], lines[2]["reason"]) == (12.346, "3 wait for it")
    assert "\n" not in lines[2]["model"]
    assert [line.get("by") for line in lines[2:4]] == [None, "others"]
    assert lines[4]["outcome"] == "reset"


def test_drift_and_reloads_are_logged(written: Written) -> None:
    written.set_up()
    written.bus.publish(NodeDrift("a", ("slots: 2 declared, 4 said",)))
    written.bus.publish(NodeDrift("a", ()))
    written.bus.publish(InventoryChanged(added=["b"], removed=["c"]))
    written.bus.publish(InventoryChanged(error="nodes.yaml:3: a\nnodes.yaml:4: b"))
    written.bus.publish(SettingsChanged())
    written.bus.publish(SettingsChanged(needs_restart=("listen.port",)))
    written.bus.publish(SettingsChanged(error="gateway.yaml:1: c"))
    lines = written.lines()
    assert [line["level"] for line in lines] == [
        "warning", "info", "info", "error", "info", "warning", "error",
    ]  # fmt: skip
    assert lines[0]["differences"] == "slots: 2 declared, 4 said"
    assert lines[2]["added"] == ["b"]
    assert lines[3]["error"] == "nodes.yaml:3: a; nodes.yaml:4: b"
    assert lines[5]["needs_restart"] == ["listen.port"]
