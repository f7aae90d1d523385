"""Plain answers of OpenAI's responses."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.relay.assembly.events import NotAssembled
from gateway.relay.values import Value


def answer(events: Iterable[Value], _: Value) -> Value:
    """The response that the last of these events holds whole. Raises: NotAssembled."""
    for event in events:
        if event.get("type") in {"response.completed", "response.incomplete", "response.failed"}:
            response = event.get("response")
            if isinstance(response, dict):
                return _as_plain(response)
    raise NotAssembled("the node's stream has no end")


def _as_plain(response: Value) -> Value:
    """With the fields that llama.cpp leaves out of it at a stream's end."""
    whole = {"completed_at": response.get("created_at"), **response}
    if isinstance(output := whole.get("output"), list):
        whole["output"] = [
            {**item, "status": "completed"}
            if item.get("type") == "reasoning" and "status" not in item
            else item
            for item in output
        ]
    return whole
