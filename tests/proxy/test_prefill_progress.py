"""Progress events that only the gateway asked for are removed from the stream."""

from __future__ import annotations

import pytest

from gateway.proxy.prefill_progress import PrefillProgress
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
