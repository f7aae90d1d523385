"""Progress events that only the gateway asked for are removed from the stream."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.lease import GrantedLease, NodeInfo
from gateway.proxy.in_flight import PrefillProgress
from gateway.transport.errors import InvalidResponse
from tests.proxy.api.events import event

READING = event({"choices": [], "prompt_progress": {"processed": 300, "total": 400}})


def test_progress_events_are_removed() -> None:
    before, behind = event({"choices": [1]}), event({"choices": [2]})
    assert PrefillProgress().strip_progress(before + READING + READING + behind) == before + behind


def test_an_event_without_progress_passes_unchanged() -> None:
    events = event({"choices": [{"delta": {"content": "a"}}]}) + b"data: [DONE]\n\n"
    assert PrefillProgress().strip_progress(events) == events


def test_an_unreadable_progress_event_is_invalid() -> None:
    with pytest.raises(InvalidResponse):
        PrefillProgress().strip_progress(b'data: {"prompt_progress":\n\n')


def test_a_text_that_names_the_field_passes() -> None:
    events = event({"content": 'a "prompt_progress" b'})
    assert PrefillProgress().strip_progress(events) == events


def test_without_an_attempt_nothing_is_known() -> None:
    assert PrefillProgress().status(1.0) is None


# Estimates between two reports.


@dataclass
class Reading:
    """An attempt that reads a prompt of 1000 tokens."""

    lease: GrantedLease
    elapsed: float = 0.0
    started_at: float = 0.0
    last_content_at: float | None = None
    is_reading: bool = True


class Prefill:
    """The prefill of one attempt, as its node tells it."""

    def __init__(self, expected: float | None = None) -> None:
        node = NodeInfo("a", "cpu", "llama.cpp", None, None, None, None, None, ())
        lease = GrantedLease(1, node, "demo", "demo", 1, True, 60.0, expected)
        self.attempt = Reading(lease)
        self.progress = PrefillProgress()
        request = SimpleNamespace(lease_request=SimpleNamespace(slots=1))
        api = SimpleNamespace(progress_fields={}, progress_replaces_event=False)
        self.progress.begin_attempt(
            cast("Any", self.attempt), cast("Any", request), cast("Any", api), b"{}"
        )

    def tells(self, at: float, done: int, cached: int = 0) -> None:
        """The node reports its progress."""
        self.attempt.elapsed = at
        figures = {"processed": done, "total": 1000, "cache": cached}
        self.progress.strip_progress(event({"prompt_progress": figures}))

    def read_at(self, elapsed: float) -> int | None:
        """Tokens that were read by then."""
        read = self.progress.read_by(cast("Any", self.attempt), elapsed)
        return None if read is None else read[0]


def test_what_was_read_since_the_last_report_is_estimated_up_to_a_batch() -> None:
    prefill = Prefill(expected=1.0)
    assert prefill.read_at(5.0) is None
    for at, done in ((1.0, 0), (3.0, 200), (5.0, 400)):
        prefill.tells(at, done)
    assert [prefill.read_at(at) for at in (5.0, 5.5, 6.5, 7.0, 60.0)] == [400, 450, 550, 600, 600]


def test_within_the_first_batch_the_nodes_expected_speed_tells() -> None:
    prefill = Prefill(expected=8.0)
    prefill.tells(1.0, 200, cached=200)
    assert [prefill.read_at(at) for at in (1.0, 3.0, 60.0)] == [200, 400, 1000]


def test_nothing_is_estimated_where_no_speed_is_known() -> None:
    prefill = Prefill()
    prefill.tells(1.0, 100)
    assert prefill.read_at(60.0) == 100


def test_reports_that_come_at_once_count_by_the_last_one() -> None:
    prefill = Prefill()
    for done in (0, 256, 512):
        prefill.tells(4.0, done)
    assert prefill.read_at(5.0) == 512


def test_the_whole_prompt_was_read_once_content_has_come() -> None:
    prefill = Prefill()
    prefill.tells(1.0, 900)
    prefill.attempt.last_content_at = 2.0
    assert prefill.read_at(2.0) == 1000
