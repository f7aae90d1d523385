"""A node's stream of events on its way to the client: one pipeline, in the order of its stages.

    frame    whole events, as bytes                                `sse.EventFramer`
    filter   without what only the gateway has asked for           `EventFilter`s
    check    up to the stream's end, without the node's errors     `EventPipeline._checked`
    rewrite  a resumed stream goes on as its first part began      `api.resuming.EventRewriter`
    record   for another node to go on with it                     `transcript.TranscriptRecorder`
    write    to the client, whose API may rewrite the events       `client_response`, `web/`

A token costs one match of a pattern, and passes untouched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from typing import Protocol

import msgspec

from gateway.api import sse
from gateway.api.base import Api, StreamEventKind
from gateway.api.json_values import InvalidJson, JsonObject, parse_object
from gateway.api.sse import EventFramer
from gateway.config.settings import Settings
from gateway.request.preparation import Request
from gateway.request.request_limits import max_event_bytes
from gateway.transport.connection import MOST_PASSED_BYTES, PassChunk
from gateway.transport.errors import InvalidResponse


class WriteToClient(Protocol):
    """Sends bytes to the client; returns whether the client lags."""

    def __call__(self, data: bytes, chunk: bytes | None = None, /) -> bool:
        """`chunk`: a chunk of HTTP that holds just these bytes, if they have come as one."""


# Removes fields or events that only the gateway asked for. Raises: InvalidResponse.
EventFilter = Callable[[bytes], bytes]
# No chunk that comes to `pass_chunk` begins with these bytes: it is shorter.
NO_EVENT = b"\n" * MOST_PASSED_BYTES
MOST_PASSED = 64  # events that pass before all stages know of them: telling them costs five chunks
# Bytes of a stream's end that are read for `usage`; an event that reaches further back counts
# whole.
STREAM_TAIL_BYTES = 4 * 1024


@dataclass(slots=True, eq=False, repr=False)
class EventPipeline:
    """The stages between one node's bytes and the client. It fails by what the events say."""

    _api: Api  # that of the path
    request: InitVar[Request]
    body_bytes: InitVar[int]  # of the request as this node gets it
    settings: InitVar[Settings]
    _clock: Callable[[], float]
    _record: Callable[[bytes], None] | None = None  # takes all events that pass
    framer: EventFramer = field(init=False)
    _ends_once: bool = field(init=False)
    _most_bytes: int = field(init=False)
    _write: WriteToClient = field(init=False)  # set by `passing_to`
    _filters: list[EventFilter] = field(default_factory=list)
    _progress_filter: EventFilter | None = None
    """The one of `_filters` that has nothing to do behind the first content."""
    usage_filter: UsageFilter | None = None
    """The one of `_filters` that knows the usage, if only the gateway has asked for it."""
    _rewrite: Callable[[bytes], bytes] | None = None
    _begin: bytes = NO_EVENT  # how an event begins that `pass_chunk` may pass
    _passed: list[bytes] = field(default_factory=list)
    """Events that `pass_chunk` has passed, of which the other stages have yet to know."""
    _dropped_events: int = 0  # whole events that the filters took out
    _opening_events: int = 0  # events before the first one with content
    opening: bytes = b""  # the events up to the chunk with the first content
    _opening_bytes: int = 0  # their bytes before they were checked
    _recent_chunks: tuple[bytes, bytes, bytes] = (b"", b"", b"")
    """The last three chunks, before they were rewritten."""
    last_content_at: float | None = None  # when content last came; None: none has
    is_over: bool = False  # whether nothing more is to be read: it has ended, or failed
    ended: bool = False  # whether the terminal event has passed
    failure: InvalidResponse | None = None  # a broken event has ended the stream
    error_data: bytes | None = None
    """The data of the node's error event, which has ended the stream."""

    def __post_init__(self, request: Request, body_bytes: int, settings: Settings) -> None:
        api, limits = self._api, settings.limits
        self._ends_once = api.single_terminal_event or request.lease_request.size.slots < 2
        self._most_bytes = max_event_bytes(body_bytes, limits, logprobs=request.logprobs)
        self.framer = EventFramer(
            self._most_bytes,
            api.ordinary_events,
            keep_comments=settings.heartbeat > 0,
            ceiling=limits.response_bytes,
        )

    def filter_by(
        self,
        usage: UsageFilter | None,
        progress: EventFilter | None,
        token_ids: TokenIdExtractor | None,
    ) -> None:
        """Take out what only the gateway has asked for; prefill progress ends with the opening."""
        self.usage_filter, self._progress_filter = usage, progress
        self._filters += [one for one in (usage, progress, token_ids) if one is not None]

    def continue_stream(
        self, rewrite: Callable[[bytes], bytes], record: Callable[[bytes], None]
    ) -> None:
        """From now on the events are rewritten to continue a stream, which `record` has begun."""
        self._rewrite, self._record = rewrite, record

    @property
    def is_plain(self) -> bool:
        """Whether what has come is no stream, whatever its head says."""
        return not self._opening_bytes and self.framer.tail.startswith((b"{", b"["))

    @property
    def content_events(self) -> int:
        """Events that have passed, from the first one with content on: about one for each token."""
        if self.last_content_at is None:
            return 0
        passed = self.framer.event_count + len(self._passed)
        return passed - self._dropped_events - self._opening_events

    @property
    def last_events(self) -> bytes:
        """The last events, whole."""
        self.settle()
        last = self._recent_chunks[2]
        data = last if len(last) > STREAM_TAIL_BYTES else b"".join(self._recent_chunks)
        return sse.last_events(data, STREAM_TAIL_BYTES)

    def feed_opening(self, chunk: bytes) -> StreamEventKind:
        """Add a chunk to `opening`; `CONTENT`: that was the last. Raises: InvalidResponse."""
        framer = self.framer
        events, special = framer.feed(chunk), framer.special_bytes
        if self._filters:
            events, special = self._filtered(events)
        self._opening_bytes += len(events)
        kind = StreamEventKind.NO_CONTENT
        for event in sse.split(events):
            kind = self._api.classify_event(event)
            if kind is StreamEventKind.ERROR:
                self.error_data = sse.payload(event)
                return kind
            if kind is StreamEventKind.CONTENT:
                self.last_content_at = self._clock()
                break
            self._opening_events += 1
        events = self._checked(events, special)
        self.opening += events
        if self._record is not None and events:
            self._record(events)
        if kind is StreamEventKind.CONTENT:
            self._recent_chunks = (b"", b"", self.opening)
            if self._progress_filter is not None:
                self._filters.remove(self._progress_filter)
        elif self._opening_bytes > self._most_bytes:
            raise InvalidResponse(f"{self._most_bytes} bytes of events came without any content")
        return kind

    def feed(self, chunk: bytes) -> bytes:
        """The part of a chunk that goes to the client, possibly none. Raises: UpstreamError."""
        if self.ended:
            return b""
        framer = self.framer
        if self._passed:
            self.settle()
        before = framer.event_count
        events, special = framer.feed(chunk), framer.special_bytes
        if self._filters:
            events, special = self._filtered(events)
        if special or self._api.terminal_mark_nested or not events.isascii():
            events = self._checked(events, special)
        if framer.event_count != before:
            self.last_content_at = self._clock()
            _, second, third = self._recent_chunks
            self._recent_chunks = (second, third, events)
        altered = self._filters or self._rewrite is not None or self._api.terminal_mark_nested
        passes = not (altered or self.is_over or framer.has_partial)
        self._begin = (passes and framer.begin) or NO_EVENT
        if events:
            if self._rewrite is not None:
                events = self._rewrite(events)
            if self._record is not None:
                self._record(events)
        return events

    def passing_to(self, write: WriteToClient) -> PassChunk:
        """What passes chunks of HTTP to `write` as they come: most of a stream, untouched."""
        self._write = write
        return self.pass_chunk

    def pass_chunk(self, chunk: bytes, start: int) -> bool:
        """Pass a chunk that holds one event like the last one, as a token comes from a node.

        `start`: where the event begins. Returns False, and does nothing, for any other.
        """
        begin, passed = self._begin, self._passed
        behind = start + len(begin)
        if (
            not chunk.startswith(begin, start)
            or not chunk.endswith(b"}\n\n\r\n")
            or chunk.find(b"\n", behind) != len(chunk) - 4
            or chunk.find(b"data:", behind) >= 0
            or len(passed) >= MOST_PASSED
        ):
            return False
        event = chunk[start:-2]
        if not chunk.isascii():
            try:
                event.decode()
            except UnicodeDecodeError:
                return False
        passed.append(event)
        self.last_content_at = self._clock()
        if self._write(event, chunk):
            self._begin = NO_EVENT  # The next chunk wakes the reader, who waits for the client.
        return True

    def settle(self) -> None:
        """Let the other stages know of the events that `pass_chunk` has passed."""
        passed = self._passed
        if passed:
            self.framer.count_passed(len(passed))
            _, *recent = (*self._recent_chunks, *passed)[-4:]
            self._recent_chunks = recent[0], recent[1], recent[2]
            if self._record is not None:
                self._record(b"".join(passed))
            passed.clear()

    def _filtered(self, events: bytes) -> tuple[bytes, int]:
        """These events as the client would have had them, and how many bytes of them are special.

        Raises: InvalidResponse.
        """
        passed = events
        for event_filter in self._filters:
            passed = event_filter(passed)
        if passed is not events:
            self._dropped_events += sse.count_events(events) - sse.count_events(passed)
        return passed, self.framer.special_bytes_in(passed)

    def _checked(self, events: bytes, special: int) -> bytes:
        """The part of these events that may pass; only the last `special` bytes are looked at.

        Raises: InvalidResponse.
        """
        api = self._api
        if api.terminal_mark_nested and events.find(api.terminal_mark) >= 0:
            special = len(events)
        if special:
            at = len(events) - special
            unchecked = events[at:] if at else events
            if unchecked == api.stream_end:
                self.is_over = self.ended = True
            else:
                valid = self._valid_part(self._cut_at_end(unchecked), may_be_empty=at > 0)
                if len(valid) != len(unchecked):
                    events = events[:at] + valid
        sse.check_utf8(events)
        return events

    def _valid_part(self, events: bytes, *, may_be_empty: bool) -> bytes:
        """These events up to the first broken one, which fails the stream behind them.

        Raises: InvalidResponse, if none comes before it, unless that `may_be_empty`.
        """
        try:
            return sse.validated(events)
        except InvalidResponse as failure:
            kept: list[bytes] = []
            with suppress(InvalidResponse):
                kept += map(sse.validated, sse.split(events))
            if not (kept or may_be_empty):
                raise
            self.is_over, self.failure = True, failure
            return b"".join(kept)

    def _cut_at_end(self, events: bytes) -> bytes:
        """These events without all behind the terminal one, and without the node's error event.

        An error event fails the stream; the client gets an error in its API's form.
        """
        api = self._api
        if api.terminal_mark not in events and b"error" not in events:
            return events
        kept = []
        for event in sse.split(events):
            if sse.is_error(event):
                self.is_over, self.error_data = True, sse.payload(event)
                break
            kept.append(event)
            if self._ends_once and api.is_terminal_event(event):
                self.is_over = self.ended = True
                break
        return b"".join(kept)


# Filters.

_USAGE_KEY = b'"usage"'
# What OpenAI adds to each chunk before the one with usage.
_NULL_USAGE = re.compile(rb', *"usage" *: *null(?= *[,}])|"usage" *: *null *,')


@dataclass(slots=True, eq=False)
class UsageFilter:
    """Takes out of a stream what reports usage, since only the gateway asked; an `EventFilter`.

    `_on_timings` is called if `timings` come with it: llama.cpp's server would have sent them
    unasked, in a chunk that the client gets.
    """

    _on_timings: Callable[[], None] = lambda: None
    event: bytes = b""  # the chunk with usage that no choice followed; empty: none has come

    def __call__(self, events: bytes) -> bytes:
        """These whole events as they would be if nobody had asked."""
        passed = events
        if _USAGE_KEY in events:
            events = _NULL_USAGE.sub(b"", events)
            passed = sse.edit_matching(events, _USAGE_KEY, self._take)
        if self.event and b'"choices"' in events.rpartition(self.event)[2]:
            self.event = b""  # some nodes report it again and again
        return passed

    def _take(self, event: bytes) -> bytes:
        try:
            value = parse_object(sse.payload(event))
        except InvalidJson:
            return event
        said = value.get("choices") or value.get("error")
        if said or not isinstance(value.get("usage"), dict):
            return event  # some nodes report it unasked, beside a choice
        self.event = event
        if "timings" in value:
            self._on_timings()
        return b""


_LOGPROBS = b'"logprobs"'


@dataclass(slots=True, eq=False)
class TokenIdExtractor:
    """Removes logprobs from events and reports the token ids in them, for `resume: exact`.

    llama.cpp reports token ids of chats and completions only with `logprobs`. The client gets its
    stream as if nobody had asked for them, at the price of parsing and encoding each event.
    """

    _take_token_ids: Callable[[JsonObject], list[int]]  # the API's
    _on_token_ids: Callable[[Iterable[int]], None]

    def __call__(self, events: bytes) -> bytes:
        """The events without logprobs. Raises: InvalidResponse."""
        return sse.edit_matching(events, _LOGPROBS, self._without_logprobs)

    def _without_logprobs(self, event: bytes) -> bytes:
        try:
            value = parse_object(sse.payload(event))
            if ids := self._take_token_ids(value):
                self._on_token_ids(ids)
        except (InvalidJson, KeyError, TypeError):
            raise InvalidResponse("An event of the node's stream can't be read") from None
        return b"data: " + msgspec.json.encode(value) + b"\n\n"
