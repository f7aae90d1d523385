"""The data of a stream's events, as values."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.relay import sse
from gateway.relay.values import NoJson, Value, object_of


class NotAssembled(Exception):  # noqa: N818 - says what became of it, not what went wrong
    """The events don't make a whole answer. Its text never holds any of theirs."""


def read_events(stream: bytes) -> Iterator[Value]:
    """The objects in the data of whole events, in order; the end's `[DONE]` is none.

    Raises: NotAssembled, for data that is no object, and for the node's own error event.
    """
    for event in sse.split(stream):
        data = sse.payload(event)
        if not data or data == b"[DONE]":
            continue
        try:
            value = object_of(data)
        except NoJson:
            raise NotAssembled("an event of the node's stream is no JSON object") from None
        if value.get("error"):
            raise NotAssembled("the node's stream ended with an error")
        yield value
