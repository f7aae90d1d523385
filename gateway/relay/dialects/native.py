"""llama.cpp's own `/completion`, `/infill` and the like."""

from __future__ import annotations

from typing import Any

from gateway.relay import sse
from gateway.relay.dialects.base import Dialect


class Native(Dialect):
    """Events with `content`, the last with `"stop": true`."""

    name = "native"
    ends_once = False
    end_mark = b'"stop":true'
    inner_end = True

    def is_content(self, value: dict[str, Any]) -> bool:
        return bool(value.get("content") or value.get("tokens") or value.get("stop"))

    def is_end(self, event: bytes) -> bool:
        return self.end_mark in event

    def finished(self, tail: bytes) -> bool:
        last = b""
        for event in sse.split(tail):
            last = sse.payload(event) or last
        if last == b"[DONE]":
            return True
        return b'"stop":true' in last or b'"stop": true' in last


NATIVE = Native()
