from __future__ import annotations

import json

import pytest

from gateway.cli.client import LONGEST_LINE, AdminClient
from gateway.cli.terminal import CommandFailed
from gateway.cli.top.fleet import (
    LIVE_PATH,
    NODE_COLUMNS,
    FleetPicture,
    headline,
    node_lines,
    request_lines,
    slots_drawn,
)
from tests.cli.local_server import answering
from tests.cli.running import run
from tests.each_case import each_case


def test_an_update_changes_what_it_names_and_leaves_the_rest() -> None:
    picture = FleetPicture()
    picture.apply("hello", {"role": "operator"})
    nodes = [{"name": "a", "state": "ready", "slots_total": 2}, {"name": "b"}]
    kept = {"problems": [{"title": "t"}], "waiting": [["normal", "m", 1, None]]}
    first = {"at": 10.0, "summary": {"ready": True}, "nodes": nodes, "requests": [{"id": "r1"}]}
    picture.apply("snapshot", {**first, **kept})
    gone = {"gone_nodes": ["b"], "ended_requests": ["r1"]}
    changed = {"nodes": [{"name": "a", "state": "down"}], "requests": [{"id": "r2", "tokens": 2}]}
    picture.apply("update", {"at": 11.0, **changed, **gone})
    assert picture.at == 11.0
    assert picture.nodes == {"a": {"name": "a", "state": "down", "slots_total": 2}}
    assert picture.requests == {"r2": {"id": "r2", "tokens": 2}}
    assert picture.summary == {"ready": True}
    assert picture.problems == [{"title": "t"}]
    assert picture.waiting == [["normal", "m", 1, None]]
    picture.apply("snapshot", {"nodes": [{"name": "b"}]})
    assert list(picture.nodes) == ["b"]
    assert picture.requests is None, "this key may not see them any more"


# Following the feed.


def test_in_a_pipe_the_state_is_printed_once_with_the_queue() -> None:
    state = {"at": 1.0, "nodes": [{"name": "a"}], "waiting": [["normal", "demo", 70, None]]}
    event = f": hello\n\nevent: snapshot\ndata: {json.dumps(state)}\n\nevent: update\ndata: [1]\n\n"
    with answering(lambda *_: (200, {}, event.encode())) as url:
        (waiting,) = json.loads(run("top", "--json", "--admin-url", url).out)["waiting"]
        text = run("top", "--admin-url", url).out
    assert waiting == {"class": "normal", "model": "demo", "waited": 70, "expected_start": None}
    row = ["1", "normal", "demo", "1m10s", "-"]
    assert text.split("PLACE")[1].split("\n")[1].split() == row


@each_case(
    ("status", "body", "words"),
    [
        (200, b"event: x\ndata: {oops\n", "no JSON"),
        (200, b"data: " + b"x" * (LONGEST_LINE + 1), "larger"),
        (401, b"{}", "--admin-key-file"),
        (404, b'{"error": {"message": "There is nothing"}}', "404"),
    ],
)
def test_what_is_no_stream_of_events_is_told(status: int, body: bytes, words: str) -> None:
    with (
        answering(lambda *_: (status, {}, body)) as url,
        AdminClient(url, None) as admin,
        pytest.raises(CommandFailed, match=words),
    ):
        list(admin.events(LIVE_PATH))


# Tables.


def picture(**changes: object) -> FleetPicture:
    made = FleetPicture()
    made.apply("snapshot", {"at": 1000.0, "summary": {"ready": True}, **changes})
    return made


def column(title: str) -> int:
    return next(n for n, one in enumerate(NODE_COLUMNS) if one.title == title)


LABELS = {"rack": "b", "numa": "0"}
NODES: list[dict[str, object]] = [
    {"name": "a", "state": "ready", "decode_tps": 9.0, "host": "east", "labels": LABELS},
    {"name": "b", "state": "down", "decode_tps": None, "host": "west", "reason": "refused"},
    {"name": "c", "state": "ready", "decode_tps": 30.0, "host": "east", "decode_share": 0.4},
]


def test_nodes_that_need_a_look_come_first_and_other_columns_sort_by_value() -> None:
    shown = picture(nodes=NODES)
    assert [line.key for line in node_lines(shown)] == ["b", "a", "c"]
    fastest = node_lines(shown, column("WRITE/S"), descending=True)
    assert [line.key for line in fastest] == ["c", "a", "b"]
    assert fastest[0].cells[column("WRITE/S")] == "30.0 40%", "far below its own past"
    assert fastest[2].cells[column("REASON")] == "refused"
    assert slots_drawn({"cells": "r3w8foh8"}) == "RW·oH"
    assert slots_drawn({"cells": "f" * 20}) == "········+"


def test_what_nodes_and_clients_name_themselves_stays_text() -> None:
    evil = "\x1b[31m[bold]x\n\x07"
    nodes = [{"name": evil, "state": evil, "reason": evil}]
    requests = [{"id": "r", "request_id": evil, "caller": evil, "caller_name": f"{evil}!"}]
    shown = picture(nodes=nodes, requests=requests)
    cells = [cell for line in node_lines(shown) + request_lines(shown) for cell in line.cells]
    assert all(cell.isprintable() for cell in cells)
    assert any("[bold]x" in cell for cell in cells)


def test_the_headline_tells_the_gateway_in_one_line() -> None:
    work = {"slots_busy": 3, "slots_total": 6, "in_flight": 5, "queue": {"urgent": 0, "normal": 2}}
    summary = {"ready": True, **work, "states": {"ready": 2, "down": 1}}
    shown = picture(summary=summary, nodes=NODES, requests=[{"id": "r", "tokens_per_second": 12.4}])
    assert headline(shown) == (
        "ready | 2 of 3 nodes work | slots 3/6 | 2 wait, 2 normal | 5 in flight | 12 tokens/s"
    )
    members = [
        {"name": "gw-a", "role": "leader", "edges": [{"streams": 2}, {"streams": 1}]},
        {"name": "gw-b", "role": "unknown", "edges": []},
    ]
    shown = picture(summary=summary | {"cluster": {"members": members}}, nodes=NODES)
    assert headline(shown).endswith(" | gw-a leader 2+1; gw-b unknown")
    assert headline(FleetPicture()) == "waiting for the gateway"
