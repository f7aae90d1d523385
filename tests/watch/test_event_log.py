from __future__ import annotations

import json
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
    written.bus.publish(
        finished(
            x_request_id="req-1",
            queue_seconds=0.25,
            ttft=1.5,
            duration_seconds=4.0,
            attempts=2,
            prompt_tokens=10,
            cached_tokens=4,
            completion_tokens=7,
        )
    )
    (line,) = written.lines()
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "level": "info",
        "event": "request",
        "id": "req-1",
        "path": "/v1/chat/completions",
        "status": 200,
        "class": "normal",
        "model": "mistral-7b",
        "node": "a",
        "attempts": 2,
        "queue": 0.25,
        "ttft": 1.5,
        "duration": 4.0,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "completion_tokens": 7,
        "stream": True,
        "caller": "team",
    }


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


def test_the_access_log_can_be_switched_off_while_it_runs(written: Written) -> None:
    written.set_up()
    written.bus.publish(finished(x_request_id="first"))
    written.event_log.configure(0.0)
    written.bus.publish(finished(x_request_id="second"))
    written.bus.publish(NodeChanged("a", "ready", "down", "connection refused"))
    assert [line.get("id", line["event"]) for line in written.lines()] == ["first", "node"]


def test_a_share_of_the_requests_has_a_line_and_every_failed_one(written: Written) -> None:
    written.set_up(draws=[0.24, 0.25, 0.99])
    written.event_log.configure(0.25)
    for name in ("first", "second", "third"):
        written.bus.publish(finished(x_request_id=name))
    written.bus.publish(finished(x_request_id="failed", status=502, reason="node_failed"))
    assert [line["id"] for line in written.lines()] == ["first", "failed"]


def test_a_nodes_change_of_state_is_logged_with_its_reason(written: Written) -> None:
    written.set_up()
    written.bus.publish(NodeChanged("a", "ready", "down", "connection refused 3 times"))
    written.bus.publish(NodeChanged("a", "down", "ready", "answers again"))
    down, ready = written.lines()
    assert (down["level"], down["node"], down["old"], down["new"], down["reason"]) == (
        "warning",
        "a",
        "ready",
        "down",
        "connection refused 3 times",
    )
    assert ready["level"] == "info"


def test_failed_attempts_are_logged(written: Written) -> None:
    written.set_up()
    written.bus.publish(AttemptEnded("r", "a", "ok", 1.0, 200))
    written.bus.publish(AttemptEnded("r", "a", "client_closed", 1.0))
    written.bus.publish(AttemptEnded("r", "b", "reset", 0.5))
    (line,) = written.lines()
    assert (line["event"], line["node"], line["outcome"]) == ("attempt", "b", "reset")


def test_differences_between_nodes_of_a_model_are_logged_until_they_end(written: Written) -> None:
    written.set_up()
    written.bus.publish(ModelsDiffer(("demo: build: b1 on a; b2 on b", "demo: context: …")))
    written.bus.publish(ModelsDiffer(()))
    first, second, third = written.lines()
    assert (first["level"], first["difference"]) == ("warning", "demo: build: b1 on a; b2 on b")
    assert second["event"] == "nodes of one model differ"
    assert (third["level"], third["event"]) == ("info", "nodes of each model are alike again")


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


def load_change(change: str, seconds: float | None = None, **more: Any) -> ModelLoadChanged:
    values = {"reason": "3 requests wait for it", "by_others": False, **more}
    return ModelLoadChanged("r1", "m\n1", change, seconds, **values)


def test_a_load_is_a_line_with_its_seconds_its_reason_and_whose_it_is(written: Written) -> None:
    written.set_up()
    written.bus.publish(load_change("loading"))
    written.bus.publish(load_change("loaded", 12.3456))
    written.bus.publish(load_change("unloaded", reason="it idled", cause="idle"))
    written.bus.publish(load_change("unloaded", by_others=True, cause="others"))
    written.bus.publish(load_change("failed", reason="exit code 1"))
    lines = written.lines()
    assert {line["event"] for line in lines} == {"model"}
    assert [line["change"] for line in lines] == [
        "loading", "loaded", "unloaded", "unloaded", "failed"
    ]  # fmt: skip
    assert lines[1]["seconds"] == 12.346
    assert lines[1]["reason"] == "3 requests wait for it"
    assert "\n" not in lines[1]["model"]
    assert lines[2]["cause"] == "idle"
    assert [line.get("by") for line in lines] == [None] * 3 + ["others", None]
    assert [line["level"] for line in lines] == ["info"] * 4 + ["warning"]


def test_what_is_loaded_when_the_gateway_starts_is_no_line(written: Written) -> None:
    written.set_up()
    written.bus.publish(NodeChanged("r1/m", None, "unloaded", "not loaded"))
    written.bus.publish(load_change("loaded", reason="found so"))
    written.bus.publish(NodeChanged("r1/m", "unloaded", "ready", "answers its probes"))
    written.bus.publish(NodeChanged("r1/m", "ready", "down", "connection refused"))
    assert written.lines() == []


def test_what_a_model_of_a_router_is_in_by_itself_is_a_line(written: Written) -> None:
    written.set_up()
    written.bus.publish(NodeChanged("r1/m", "ready", "ejected", "3 requests in a row failed"))
    written.bus.publish(NodeChanged("r1/m", "ejected", "ready", "answers its probes"))
    assert [line["level"] for line in written.lines()] == ["warning", "info"]
