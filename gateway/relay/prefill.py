"""How far a node has read a prompt, for a client that wants to know.

llama.cpp tells it in events of the stream if it is asked to; they are taken out again, and what is
left is the stream as it would have been. For all others it is reckoned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from gateway.fleet.lease import Phase
from gateway.relay import edits, sse
from gateway.relay.large import Body, small
from gateway.relay.values import NoJson, object_of
from gateway.transport.errors import Garbage

if TYPE_CHECKING:
    from gateway.relay.attempt import Attempt

ASKED = {"return_progress": True}
"""What has llama.cpp tell it."""
TELLING = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/completion", "/infill"}
)
"""Paths on which it does; it takes no notice on `/v1/messages`."""

_WISH = b'"return_progress"'
_MARK = b'"prompt_progress"'


class Reading(NamedTuple):
    """How far it is."""

    percent: int
    tokens: tuple[int, int] | None
    """Tokens that have been read or were cached, and all of them; None: it is reckoned."""


class Prefill:
    """Of one request: the reading of its prompt, by one node after the other."""

    __slots__ = ("_attempt", "_keeps", "_named", "_tokens")

    def __init__(self) -> None:
        self._attempt: Attempt | None = None
        self._tokens: tuple[int, int] | None = None
        self._keeps = False
        """Whether the client has asked for these events itself."""
        self._named = False
        """Whether an event that also says something else is yet to come."""

    def begin(self, attempt: Attempt, body: Body) -> Body:
        """An attempt begins: the body that has its node tell, if it can."""
        request = attempt.request
        self._attempt, self._tokens = attempt, None
        if (
            attempt.lease.node.spec.kind != "llama.cpp"
            or request.path not in TELLING
            or request.slots != 1
        ):
            return body
        told = small(body)
        self._keeps = _WISH in told and object_of(told).get("return_progress") is True
        self._named = request.path == "/v1/responses"
        attempt.strip = self.strip
        return body if self._keeps else edits.applied(body, ASKED)

    def strip(self, events: bytes) -> bytes:
        """The events as the client would have had them unasked. Raises: Garbage."""
        return sse.edited(events, _MARK, self._stripped)

    def _stripped(self, event: bytes) -> bytes:
        try:
            value = object_of(sse.payload(event))
        except NoJson:
            raise Garbage("An event of the node's stream can't be read") from None
        told = value.pop("prompt_progress", None)
        if isinstance(told, dict):
            done, total = told.get("processed"), told.get("total")
            if isinstance(done, int) and isinstance(total, int) and 0 <= done <= total:
                self._tokens = done, total
        if self._keeps:
            return event
        if self._named:
            # The first of them stands for the event that would have been there.
            self._named = False
            name = sse.event_name(event)
            return b"event: %b\ndata: %b\n\n" % (name, msgspec.json.encode(value))
        assert self._attempt is not None
        self._attempt.unsaid += 1
        return b""

    def reading(self, now: float) -> Reading | None:
        """How far it is; None: nobody knows, or nothing is being read."""
        attempt = self._attempt
        if attempt is None or attempt.lease.phase is not Phase.PREFILL:
            return None
        if self._tokens is not None:
            done, total = self._tokens
            return Reading(100 * done // max(1, total), self._tokens)
        placement = attempt.lease.placement
        if placement is None or attempt.lease.node.speed.prefill_tps is None:
            return None
        begun, whole = now - placement.at, placement.read_by - placement.at
        # What takes longer than it was expected to may take any time.
        return Reading(int(100 * begun / whole), None) if 0.0 <= begun < whole else None
