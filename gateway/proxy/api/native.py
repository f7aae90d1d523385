"""llama.cpp's own `/completion`, `/infill` and the like."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.proxy import sse
from gateway.proxy.api.base import Api, AssemblyError
from gateway.proxy.json_values import JsonObject


class NativeApi(Api):
    """Events with `content`, the last with `"stop": true`."""

    name = "native"
    single_terminal_event = False
    terminal_mark = b'"stop":true'
    terminal_mark_nested = True

    def has_content(self, value: dict[str, Any]) -> bool:
        return bool(value.get("content") or value.get("tokens") or value.get("stop"))

    def is_terminal_event(self, event: bytes) -> bool:
        return self.terminal_mark in event

    def is_stream_complete(self, tail: bytes) -> bool:
        last = b""
        for event in sse.split(tail):
            last = sse.payload(event) or last
        if last == b"[DONE]":
            return True
        return b'"stop":true' in last or b'"stop": true' in last


NATIVE = NativeApi()


def assemble_native(events: Iterable[JsonObject], request_fields: JsonObject) -> JsonObject:
    """The answer that these events make, to a request of this body. Raises: NotAssembled."""
    content: list[str] = []
    tokens: list[object] = []
    probabilities: list[object] = []
    last: JsonObject = {}
    for event in events:
        content.append(event.get("content") or "")
        tokens += event.get("tokens") or ()
        probabilities += event.get("completion_probabilities") or ()
        last = event
    if not last.get("stop"):
        raise AssemblyError("the node's stream has no end")
    whole = last | {
        "content": "".join(content),
        # A stream has them unasked.
        "tokens": tokens if request_fields.get("return_tokens") is True else [],
    }
    settings = whole.get("generation_settings")
    if isinstance(settings, dict):
        whole["generation_settings"] = settings | {"stream": False}
    if probabilities:
        whole["completion_probabilities"] = probabilities
    return whole
