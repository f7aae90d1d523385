"""How far a node has read a prompt, for a client that wants to know.

llama.cpp tells it in events of the stream if it is asked to; they are taken out again, and what is
left is the stream as it would have been. For all others it is reckoned.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from gateway.fleet.node import Lease, LeasePhase
from gateway.proxy import sse
from gateway.proxy.inbound import edits
from gateway.proxy.inbound.large_body import Body, without_large_fields
from gateway.proxy.json_values import InvalidJson, parse_object
from gateway.proxy.sse import EventFilter
from gateway.request import Request
from gateway.transport.errors import InvalidResponse

PROGRESS_FIELDS = {"return_progress": True}
"""What has llama.cpp tell it."""

PROGRESS_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/completion", "/infill"}
)
"""Paths on which it does; it takes no notice on `/v1/messages`."""

_WISH = b'"return_progress"'

_MARK = b'"prompt_progress"'


class PrefillStatus(NamedTuple):
    """How far it is."""

    percent: int
    tokens: tuple[int, int] | None
    """Tokens that have been read or were cached, and all of them; None: it is reckoned."""


class PrefillProgress:
    """Of one request: the reading of its prompt, by one node after the other."""

    __slots__ = ("_keeps", "_lease", "_named", "_tokens")

    def __init__(self) -> None:
        self._lease: Lease | None = None
        self._tokens: tuple[int, int] | None = None
        self._keeps = False
        """Whether the client has asked for these events itself."""
        self._named = False
        """Whether an event that also says something else is yet to come."""

    def begin_attempt(
        self, lease: Lease, request: Request, body: Body
    ) -> tuple[Body, EventFilter | None]:
        """An attempt begins: the body that asks its node for progress events, and their filter."""
        self._lease, self._tokens = lease, None
        if (
            lease.node.spec.kind != "llama.cpp"
            or request.path not in PROGRESS_PATHS
            or request.slots != 1
        ):
            return body, None
        told = without_large_fields(body)
        self._keeps = _WISH in told and parse_object(told).get("return_progress") is True
        self._named = request.path == "/v1/responses"
        return (
            body if self._keeps else edits.apply_edit(body, PROGRESS_FIELDS),
            self.strip_progress,
        )

    def strip_progress(self, events: bytes) -> bytes:
        """The events as the client would have had them unasked. Raises: Garbage."""
        return sse.edit_matching(events, _MARK, self._stripped)

    def _stripped(self, event: bytes) -> bytes:
        try:
            value = parse_object(sse.payload(event))
        except InvalidJson:
            raise InvalidResponse("An event of the node's stream can't be read") from None
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
        return b""

    def status(self, now: float) -> PrefillStatus | None:
        """How far it is; None: nobody knows, or nothing is being read."""
        lease = self._lease
        if lease is None or lease.phase is not LeasePhase.PREFILL:
            return None
        if self._tokens is not None:
            done, total = self._tokens
            return PrefillStatus(100 * done // max(1, total), self._tokens)
        placement = lease.placement
        if placement is None or lease.node.speed.prefill_tps is None:
            return None
        begun, whole = now - placement.placed_at, placement.prefill_ends - placement.placed_at
        # What takes longer than it was expected to may take any time.
        return PrefillStatus(int(100 * begun / whole), None) if 0.0 <= begun < whole else None
