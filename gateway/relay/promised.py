"""What kind of answer a node's head promises, and whether it is one."""

from __future__ import annotations

from gateway.request import Headers
from gateway.transport.errors import Garbage

_JSON_BEGINS = (b"{", b"[")


def check_plain(headers: Headers, content: bytes) -> None:
    """A plain answer that says it is JSON must begin like it. Raises: Garbage."""
    if content[:1] in _JSON_BEGINS or content.lstrip()[:1] in _JSON_BEGINS:
        return
    for name, value in headers:
        if name == b"content-type" and value.startswith(b"application/json"):
            raise Garbage("The node's answer is not JSON")


def is_event_stream(headers: Headers) -> bool:
    """Whether the head promises events that can be read. Raises: Garbage."""
    kind = encoding = b""
    for name, value in headers:
        if name == b"content-type":
            kind = value
        elif name == b"content-encoding":
            encoding = value.lower()
    if encoding not in {b"", b"identity"}:
        raise Garbage("The node compressed its stream though it was asked not to")
    return kind.startswith(b"text/event-stream")
