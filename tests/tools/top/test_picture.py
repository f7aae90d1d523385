from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from gateway.tools.cli.client import LONGEST_LINE, AdminClient
from gateway.tools.cli.terminal import CommandFailed
from gateway.tools.top.feed import LIVE_PATH, FeedFollower
from gateway.tools.top.picture import FleetPicture
from tests.tools.cli.local_server import serving


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


# Following the feed.


SNAPSHOT = b'event: snapshot\ndata: {"at": 1}\n\n'


class Stream:
    """Serves each request's bytes in turn; the last ones again and again."""

    def __init__(self, *answers: tuple[int, bytes]) -> None:
        self.answers = list(answers)
        self.url = ""

    def next(self) -> tuple[int, bytes]:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def stream() -> Iterator[Stream]:
    made = Stream((200, SNAPSHOT))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = made.next()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as made.url:
        yield made


def client(stream: Stream) -> AdminClient:
    return AdminClient(stream.url, None)


def test_events_come_with_their_names_and_data(stream: Stream) -> None:
    stream.answers = [(200, b": hello\n\n" + SNAPSHOT + b"event: update\ndata: [1]\n\n")]
    with client(stream) as admin:
        assert list(admin.events(LIVE_PATH)) == [("snapshot", {"at": 1})]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, b"event: x\ndata: {oops\n"), "no JSON"),
        ((200, b"data: " + b"x" * (LONGEST_LINE + 1)), "larger"),
        ((401, b"{}"), "--admin-key-file"),
        ((404, b'{"error": {"message": "There is nothing"}}'), "404"),
    ],
)
def test_what_is_no_stream_of_events_is_told(
    stream: Stream, answer: tuple[int, bytes], words: str
) -> None:
    stream.answers = [answer]
    with client(stream) as admin, pytest.raises(CommandFailed, match=words):
        list(admin.events(LIVE_PATH))


def test_the_feed_comes_back_after_a_failure_and_says_why_it_was_gone(stream: Stream) -> None:
    stream.answers = [(503, b"{}"), (200, SNAPSHOT)]
    heard = threading.Event()
    reports: list[str | None] = []

    def publish(event: str, _: Mapping[str, Any]) -> None:
        assert event == "snapshot"
        heard.set()

    with client(stream) as admin:
        follower = FeedFollower(admin, publish, reports.append)
        thread = threading.Thread(target=follower.run)
        thread.start()
        assert heard.wait(30)
        follower.stop()
        thread.join(30)
    assert not thread.is_alive()
    assert "503" in str(reports[0])
    assert None in reports
