"""OpenAI's responses: the plain response is in the stream's last event."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.proxy.api.base import AssemblyError
from gateway.proxy.api.responses import RESPONSES
from tests.proxy.api.events import assembled

COMPLETED = {"id": "r", "object": "response", "created_at": 7, "status": "completed"}


def events(**more: Any) -> list[dict[str, Any]]:
    return [
        {"type": "response.created", "response": {"id": "r", "status": "in_progress"}},
        {"type": "response.completed", "response": COMPLETED | more},
    ]


def test_the_terminal_event_holds_the_response() -> None:
    assert assembled(RESPONSES, events()) == {"completed_at": 7, **COMPLETED}
    with pytest.raises(AssemblyError):
        assembled(RESPONSES, events()[:1])


def test_reasoning_is_completed_in_a_plain_response() -> None:
    reasoning, text = {"type": "reasoning", "id": "rs"}, {"type": "message", "status": "completed"}
    whole = assembled(RESPONSES, events(output=[reasoning, text]))
    assert whole["output"] == [{**reasoning, "status": "completed"}, text]
