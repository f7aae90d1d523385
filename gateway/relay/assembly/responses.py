"""Plain answers of OpenAI's responses."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.relay.assembly.events import NotAssembled, Value


def answer(events: Iterable[Value], _: Value) -> Value:
    """The response that the last of these events holds whole. Raises: NotAssembled."""
    for event in events:
        if event.get("type") in {"response.completed", "response.incomplete", "response.failed"}:
            response = event.get("response")
            if isinstance(response, dict):
                created = response.get("created_at")
                return {"completed_at": created, **response}
    raise NotAssembled("the node's stream has no end")
