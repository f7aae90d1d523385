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
from gateway.proxy.inbound.body import Body, without_large_fields
from gateway.proxy.inbound.request import Request
from gateway.proxy.json_values import InvalidJson, parse_object
from gateway.proxy.sse import EventFilter
from gateway.transport.errors import InvalidResponse

PROGRESS_TOKENS = 1024
"""Estimated tokens of a prompt from which on the gateway asks for its progress without being asked,
to know what was read when a client leaves. The server reports it once a batch, of 2048 tokens by
default; what was read of shorter prompts is estimated by the time."""

DEFAULT_BATCH = 2048
"""Tokens of llama.cpp's batch, unless its operator has set another one: before its first report it
is believed to have read no more."""

_REQUEST_FIELD = b'"return_progress"'

_EVENT_FIELD = b'"prompt_progress"'


class _Report(NamedTuple):
    """What a node said of its prefill."""

    elapsed: float
    """Seconds of the attempt by then."""
    done: int
    """Tokens that were read or cached."""
    total: int


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
    def elapsed(self) -> float:
        """Seconds since it began."""

    @property
    def is_reading(self) -> bool:
        """Whether the node reads the prompt of a stream, as far as is known."""


class PrefillProgress:
    """The prefill of one request, on one node after the other."""

    __slots__ = (
        "_attempt",
        "_batch",
        "_cached",
        "_client_asked",
        "_first",
        "_hidden",
        "_keep_next",
        "_last",
    )

    def __init__(self, *, hidden: bool = False) -> None:
        """`hidden`: the client may not know how much of its prompt was cached; the ledger does."""
        self._hidden = hidden
        self._attempt: ReadingAttempt | None = None
        self._first: _Report | None = None
        self._last: _Report | None = None
        """What this attempt's node said first, and last; None: nothing."""
        self._batch = 0
        """Tokens between its last two reports; 0: there were none."""
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
        self._attempt, self._cached, self._batch = attempt, 0, 0
        self._first = self._last = None
        fields = api.progress_fields
        if (
            attempt.lease.node.kind != "llama.cpp"
            or fields is None
            or request.lease_request.size.slots != 1
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
                self._note(done, total)
                cached = progress.get("cache")
                self._cached = min(cached, done) if isinstance(cached, int) and cached > 0 else 0
        if self._client_asked:
            return event
        if self._keep_next:
            self._keep_next = False
            name = sse.event_name(event)
            return b"event: %b\ndata: %b\n\n" % (name, msgspec.json.encode(value))
        return b""

    def _note(self, done: int, total: int) -> None:
        elapsed = 0.0 if self._attempt is None else self._attempt.elapsed
        report = _Report(elapsed, done, total)
        if self._last is None:
            self._first = report
        else:
            self._batch = max(0, done - self._last.done)
        self._last = report

    def read_by(self, attempt: ReadingAttempt, elapsed: float) -> tuple[int, int] | None:
        """Tokens that this attempt's node had read or cached after so many seconds, and cached.

        None: it never said. Once content has come, all of the prompt has been read. Before, the
        node's last report is up to a batch old, which takes a CPU a minute: what it has read since
        is estimated by its speed.
        """
        last = self._last
        if last is None or self._attempt is not attempt:
            return None
        if attempt.last_content_at is not None:
            return last.total, self._cached
        since = self._tokens_per_second(attempt.lease) * max(0.0, elapsed - last.elapsed)
        # It reports each batch: had it read more, it would have said so.
        most = min(self._batch or DEFAULT_BATCH, last.total - last.done)
        return last.done + min(most, int(since)), self._cached

    def _tokens_per_second(self, lease: GrantedLease) -> float:
        """The node's speed at this prompt, else the one that is known of it; 0: unknown."""
        first, last = self._first, self._last
        assert first is not None
        assert last is not None
        if last.done > first.done and last.elapsed > first.elapsed:
            return (last.done - first.done) / (last.elapsed - first.elapsed)
        if lease.expected_prefill is None or lease.expected_prefill <= 0:
            return 0.0
        return (last.total - self._cached) / lease.expected_prefill

    def status(self, now: float) -> PrefillStatus | None:
        """How far the prompt is read; None: unknown, hidden, or no prompt is being read."""
        attempt = self._attempt
        if self._hidden or attempt is None or not attempt.is_reading:
            return None
        if self._last is not None:
            _, done, total = self._last
            return PrefillStatus(100 * done // max(1, total), (done, total))
        elapsed, expected = now - attempt.started_at, attempt.lease.expected_prefill
        # A prefill that takes longer than expected may take any time.
        if expected is None or not 0.0 <= elapsed < expected:
            return None
        return PrefillStatus(int(100 * elapsed / expected), None)
