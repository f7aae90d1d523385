"""The events of a stream that nobody reads, until they are made into one answer."""

from __future__ import annotations

import msgspec

from gateway.relay.assembly.events import read_events
from gateway.relay.assembly.forms import FORMS
from gateway.relay.large import Body, small
from gateway.relay.values import object_of


class Collected:
    """Takes a stream's pieces. `most`: bytes that an answer may have."""

    __slots__ = ("_left", "_parts")

    def __init__(self, first: bytes, most: int) -> None:
        self._parts = [first]
        self._left = most - len(first)

    @property
    def full(self) -> bool:
        """Whether there are more bytes than may be."""
        return self._left < 0

    def add(self, events: bytes) -> bool:
        """These whole events have come; whether that is too much."""
        self._parts.append(events)
        self._left -= len(events)
        return self._left < 0

    def answer(self, path: str, body: Body) -> bytes:
        """The whole answer to a request of this body, as JSON. Raises: NotAssembled."""
        events = read_events(b"".join(self._parts))
        return msgspec.json.encode(FORMS[path].whole(events, object_of(small(body))))
