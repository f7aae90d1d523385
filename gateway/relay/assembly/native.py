"""Plain answers of llama.cpp's own `/completion` and `/infill`."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.relay.assembly.events import NotAssembled
from gateway.relay.values import Value


def answer(events: Iterable[Value], asked: Value) -> Value:
    """The answer that these events make, to a request of this body. Raises: NotAssembled."""
    content: list[str] = []
    tokens: list[object] = []
    probabilities: list[object] = []
    last: Value = {}
    for event in events:
        content.append(event.get("content") or "")
        tokens += event.get("tokens") or ()
        probabilities += event.get("completion_probabilities") or ()
        last = event
    if not last.get("stop"):
        raise NotAssembled("the node's stream has no end")
    whole = last | {
        "content": "".join(content),
        # A stream has them unasked.
        "tokens": tokens if asked.get("return_tokens") is True else [],
    }
    settings = whole.get("generation_settings")
    if isinstance(settings, dict):
        whole["generation_settings"] = settings | {"stream": False}
    if probabilities:
        whole["completion_probabilities"] = probabilities
    return whole
