"""Events as servers write them, and as clients read them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from gateway.api import sse
from gateway.api.base import Api, ResponseAssembler
from gateway.api.json_values import JsonObject
from gateway.api.transcript import SplicePoint
from gateway.lease import NodeInfo

IDENTITY = {"id": "first", "created": 1, "model": "m", "object": "chat.completion.chunk"}
"""The fields that identify the first stream's response."""


def answering(kind: str = "llama.cpp", context: int | None = 4096) -> NodeInfo:
    """A node that answers."""
    return NodeInfo("n", "cpu", kind, None, None, None, None, context, ())


SPLICE_POINT = SplicePoint(" one two", "", prompt_tokens=5, sent_tokens=2, prefix_tokens=2)

OVERLAPPING = SplicePoint(" one", " two", prompt_tokens=5, sent_tokens=2, prefix_tokens=1)
"""The next node has to repeat ` two`."""

USAGE = {"completion_tokens": 2, "prompt_tokens": 14, "total_tokens": 16}
TIMINGS = {"cache_n": 0, "prompt_n": 14, "predicted_n": 2}


def event(value: Any, name: str | None = None) -> bytes:
    """An event with this data."""
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return head + b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def assembled(api: Api, events: Iterable[Any], request_fields: JsonObject | None = None) -> Any:
    """The plain response that an API makes of events with these data."""
    return read_stream(api, b"".join(map(event, events)), request_fields)


def read_stream(api: Api, stream: bytes, request_fields: JsonObject | None = None) -> Any:
    """The plain response that an API makes of a stream."""
    return json.loads(ResponseAssembler(api, request_fields or {}, stream, 1 << 30).response())


def values(events: bytes) -> list[Any]:
    """The data of events that are JSON."""
    return [json.loads(sse.payload(event)) for event in sse.split(events)]


def chat_choice(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    """A chat chunk's choice."""
    return {"index": 0, "delta": delta, "finish_reason": finish}
