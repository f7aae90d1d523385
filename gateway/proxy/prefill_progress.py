"""Prefill progress: how far a node has read a prompt, for a client that asks for it.

llama.cpp reports it in events of the stream, if asked; they are removed, and the client gets its
stream as it would have been. For all other nodes the progress is estimated.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from gateway.lease import GrantedLease
from gateway.proxy import sse
from gateway.proxy.api.base import Api
from gateway.proxy.inbound import edits
from gateway.proxy.inbound.large_body import Body, without_large_fields
from gateway.proxy.inbound.request import Request
from gateway.proxy.json_values import InvalidJson, parse_object
from gateway.proxy.sse import EventFilter
from gateway.transport.errors import InvalidResponse

PROGRESS_TOKENS = 1024
"""Estimated tokens of a prompt from which on the gateway asks for its progress without being asked,
to know what was read when a client leaves. The server reports it once a batch, of 2048 tokens by
default; what was read of shorter prompts is estimated by the time."""

_REQUEST_FIELD = b'"return_progress"'

_EVENT_FIELD = b'"prompt_progress"'


class PrefillStatus(NamedTuple):
    """How far a prompt is read."""

    percent: int
    tokens: tuple[int, int] | None
    """Tokens that were read or cached, and all tokens; None: the percentage is an estimate."""


class ReadingAttempt(Protocol):
    """The part of an attempt that its progress is read from."""

    lease: GrantedLease
    started_at: float
    last_content_at: float | None

    @property
    def is_reading(self) -> bool:
        """Whether the node reads the prompt of a stream, as far as is known."""


class PrefillProgress:
    """The prefill of one request, on one node after the other."""

    __slots__ = ("_attempt", "_cached", "_client_asked", "_hidden", "_keep_next", "_tokens")

    def __init__(self, *, hidden: bool = False) -> None:
        """`hidden`: the client may not know how much of its prompt was cached; the ledger does."""
        self._hidden = hidden
        self._attempt: ReadingAttempt | None = None
        self._tokens: tuple[int, int] | None = None
        self._cached = 0
        """Tokens that the node had cached."""
        self._client_asked = False
        """Whether the client itself asks for progress events."""
        self._keep_next = False
        """Whether the next progress event stands for an event that the client must get."""

    def begin_attempt(
        self, attempt: ReadingAttempt, request: Request, api: Api, body: Body
    ) -> tuple[Body, EventFilter | None]:
        """Begin an attempt; return the body that makes its node report progress, if it can.

        Also return the filter that removes the progress events; None: there are none.
        """
        self._attempt, self._tokens, self._cached = attempt, None, 0
        fields = api.progress_fields
        if (
            attempt.lease.node.kind != "llama.cpp"
            or fields is None
            or request.lease_request.slots != 1
        ):
            return body, None
        small_fields = without_large_fields(body)
        self._client_asked = (
            _REQUEST_FIELD in small_fields
            and parse_object(small_fields).get("return_progress") is True
        )
        self._keep_next = api.progress_replaces_event
        if not self._client_asked:
            body = edits.apply_edit(body, fields)
        return body, self.strip_progress

    def strip_progress(self, events: bytes) -> bytes:
        """Take the progress out of whole events. Raises: InvalidResponse."""
        return sse.edit_matching(events, _EVENT_FIELD, self._stripped)

    def _stripped(self, event: bytes) -> bytes:
        try:
            value = parse_object(sse.payload(event))
        except InvalidJson:
            raise InvalidResponse("An event of the node's stream can't be read") from None
        progress = value.pop("prompt_progress", None)
        if isinstance(progress, dict):
            done, total = progress.get("processed"), progress.get("total")
            if isinstance(done, int) and isinstance(total, int) and 0 <= done <= total:
                self._tokens = done, total
                cached = progress.get("cache")
                self._cached = min(cached, done) if isinstance(cached, int) and cached > 0 else 0
        if self._client_asked:
            return event
        if self._keep_next:
            self._keep_next = False
            name = sse.event_name(event)
            return b"event: %b\ndata: %b\n\n" % (name, msgspec.json.encode(value))
        return b""

    def read_by(self, attempt: ReadingAttempt) -> tuple[int, int] | None:
        """Tokens that this attempt's node had read or cached when it last said so, and cached.

        None: it never said. Once content has come, all of the prompt has been read.
        """
        if self._tokens is None or self._attempt is not attempt:
            return None
        done, total = self._tokens
        return (done if attempt.last_content_at is None else total), self._cached

    def status(self, now: float) -> PrefillStatus | None:
        """How far the prompt is read; None: unknown, hidden, or no prompt is being read."""
        attempt = self._attempt
        if self._hidden or attempt is None or not attempt.is_reading:
            return None
        if self._tokens is not None:
            done, total = self._tokens
            return PrefillStatus(100 * done // max(1, total), self._tokens)
        elapsed, expected = now - attempt.started_at, attempt.lease.expected_prefill
        # A prefill that takes longer than expected may take any time.
        if expected is None or not 0.0 <= elapsed < expected:
            return None
        return PrefillStatus(int(100 * elapsed / expected), None)
