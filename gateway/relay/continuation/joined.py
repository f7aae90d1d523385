"""The bytes of a continuation: its events in, those of the first stream out."""

from __future__ import annotations

from gateway.relay import sse
from gateway.relay.continuation.joining import Joiner
from gateway.relay.values import NoJson, object_of
from gateway.relay.verdict import message_of, status_of
from gateway.transport.errors import Errored, Garbage


class Joined:
    """Rewrites whole events, piece by piece."""

    __slots__ = ("joiner",)

    def __init__(self, joiner: Joiner) -> None:
        self.joiner = joiner

    def feed(self, events: bytes) -> bytes:
        """What of them goes to the client. Raises: Mismatch, Garbage, Errored."""
        out = []
        for event in sse.split(events):
            data = sse.payload(event)
            if not data or data == b"[DONE]":
                continue
            try:
                value = object_of(data)
                if value.get("error") or sse.event_name(event) == b"error":
                    said = message_of(data) or "The node failed in the middle of it"
                    raise Errored(said, status_of(data))
                out.append(self.joiner.feed(value))
            except (NoJson, TypeError, AttributeError):
                raise Garbage("An event of the node's stream can't be read") from None
        return b"".join(out)
