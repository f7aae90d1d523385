"""Requests that wait or run, for the admin API, drains and the shutdown, and their prefill.

llama.cpp reports prefill progress in events of the stream, if asked; they are removed, and the
client gets its stream as it would have been. For all other nodes the progress is estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import msgspec

from gateway.api import sse
from gateway.api.base import Api
from gateway.api.json_values import InvalidJson, parse_object
from gateway.api.outcome import RequestCancelled, RequestEvicted, RequestYielded
from gateway.errors import GatewayError
from gateway.events import RequestRecord
from gateway.forward.attempt import Attempt
from gateway.forward.event_pipeline import EventFilter
from gateway.lease import GrantedLease
from gateway.request import edits
from gateway.request.body import Body, without_large_fields
from gateway.request.preparation import Request
from gateway.transport.errors import InvalidResponse

T = TypeVar("T")


class InFlightRequest(msgspec.Struct, eq=False):
    """A request on its way: its value, its record, and the attempt under way."""

    request: Request
    record: RequestRecord
    attempt: Attempt | None = None
    cancel_error: GatewayError | None = None
    prefill_progress: PrefillProgress | None = None
    """How much of the prompt has been read, for a client that asked for it."""
    sub_requests: dict[str, InFlightRequest] | None = None
    """The requests that a request of several prompts runs in, by id; None: it has one prompt."""
    on_cancel: Callable[[GatewayError], None] | None = None
    """Called on cancellation, by what runs the sub-requests."""
    response_started: bool = False
    """Whether its client has the head of a response, so that no other should displace it."""
    _yieldable: tuple[Attempt, Callable[[], bool]] | None = None
    """The attempt that may be cut for another request, and whether it could be resumed now."""

    def header_lines(self, lease_id: int) -> bytes:
        """The client's header lines for the node of this attempt, within the request's trace."""
        lines, trace = self.request.header_lines, self.record.trace
        return lines if trace is None else trace.header_lines(lines, lease_id)

    def note_response_started(self) -> None:
        """Its client has the head of a response."""
        self.response_started = True

    def cancel(self, error: GatewayError) -> None:
        """End the request; its client gets `error`, as an event if the response has begun."""
        if self.cancel_error is None:
            self.cancel_error = error
            if self.attempt is not None:
                self.attempt.fail(RequestCancelled(error))
            if self.on_cancel is not None:
                self.on_cancel(error)

    def evict(self, error: GatewayError) -> None:
        """Make it leave its node; its client gets `error` if no other node takes it."""
        if self.attempt is not None:
            self.attempt.fail(RequestEvicted(error))

    def allow_yield(self, attempt: Attempt, can_resume: Callable[[], bool]) -> None:
        """While `can_resume` says so, this attempt may be cut for another request."""
        self._yieldable = attempt, can_resume

    def yield_slot(self) -> bool:
        """Give up its slot, and wait for another to go on; whether it does.

        It does not if its response can't be resumed, or has just ended.
        """
        attempt = self.attempt
        if attempt is None or self._yieldable is None or self.cancel_error is not None:
            return False
        yieldable, can_resume = self._yieldable
        is_over = attempt.failure is not None or attempt.stream_ended or attempt.complete
        if yieldable is not attempt or is_over or not can_resume():
            return False
        attempt.fail(RequestYielded("It gave up its slot"))
        return True

    def follow_prefill(self) -> PrefillProgress:
        """How much of the prompt has been read, from now on."""
        if self.prefill_progress is None:
            self.prefill_progress = PrefillProgress()
        return self.prefill_progress

    def prompt_read(self, attempt: Attempt, elapsed: float) -> tuple[int, int] | None:
        """Tokens of the prompt that the attempt's node had read or cached, and cached.

        That is by what the node said, when the attempt was so many seconds old. None: it said
        nothing.
        """
        progress = self.prefill_progress
        return None if progress is None else progress.read_by(attempt, elapsed)

    def tokens_so_far(self) -> tuple[int, int]:
        """Tokens of its prompt that were read, and of its response, as far as is known."""
        record, attempt = self.record, self.attempt
        prompt, completion = record.prompt_tokens, record.completion_tokens
        if attempt is not None:
            if attempt.splice_point is not None:
                splice_point = attempt.splice_point
                prompt = splice_point.prompt_tokens
                completion = splice_point.prefix_tokens + attempt.content_events
            else:
                completion += attempt.content_events
                known = self.prompt_read(attempt, attempt.elapsed)
                if known is not None:
                    prompt += known[0]
                elif attempt.last_content_at is not None:
                    prompt += attempt.lease.reading.prompt_tokens
        for one in (self.sub_requests or {}).values():
            part = one.tokens_so_far()
            prompt, completion = prompt + part[0], completion + part[1]
        return prompt, completion

    def slot_seconds_so_far(self) -> float:
        """Seconds for which it has held slots by now, times their number."""
        seconds = self.record.slot_seconds
        if self.attempt is not None:
            seconds += self.attempt.slot_seconds
        parts = (self.sub_requests or {}).values()
        return seconds + sum(one.slot_seconds_so_far() for one in parts)

    def begin_attempt(self, attempt: Attempt) -> None:
        """An attempt begins; it fails at once if the request was cancelled meanwhile."""
        self.attempt = attempt
        if self.cancel_error is not None:
            attempt.fail(RequestCancelled(self.cancel_error))

    def end_attempt(self) -> None:
        """The attempt is over."""
        self.attempt = None

    def begin_sub_requests(
        self,
        sub_requests: dict[str, InFlightRequest],
        on_cancel: Callable[[GatewayError], None],
    ) -> None:
        """The request runs in these from now on; `on_cancel` cancels them."""
        self.sub_requests, self.on_cancel = sub_requests, on_cancel

    def end_sub_requests(self) -> None:
        """The sub-requests are over."""
        self.on_cancel = None


class InFlightRegistry:
    """All requests in flight by the gateway's own id."""

    def __init__(self) -> None:
        self._requests: dict[str, InFlightRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[InFlightRequest]:
        """Each request, followed by its sub-requests."""
        found: list[InFlightRequest] = []
        for one in self._requests.values():
            found.append(one)
            if one.sub_requests is not None:
                found += one.sub_requests.values()
        return iter(found)

    def top_level(self) -> list[InFlightRequest]:
        """Each request, without its sub-requests."""
        return list(self._requests.values())

    def begin(
        self, request: Request, record: RequestRecord, progress: PrefillProgress | None = None
    ) -> InFlightRequest:
        """A request was admitted; `progress`: of a client that asked for it. See `remove`."""
        in_flight = InFlightRequest(request, record, None, None, progress)
        self._requests[request.id] = in_flight
        return in_flight

    def remove(self, in_flight: InFlightRequest) -> None:
        """A request is over."""
        self._requests.pop(in_flight.request.id, None)

    def tokens_so_far(self, request_id: str) -> tuple[int, int]:
        """`InFlightRequest.tokens_so_far` of the request with the gateway's own id."""
        found = self._requests.get(request_id)
        return (0, 0) if found is None else found.tokens_so_far()

    def slot_seconds_so_far(self, request_id: str) -> float:
        """`InFlightRequest.slot_seconds_so_far` of the request with the gateway's own id."""
        found = self._requests.get(request_id)
        return 0.0 if found is None else found.slot_seconds_so_far()

    def yield_slot(self, request_id: str) -> bool:
        """`InFlightRequest.yield_slot` of the request with the gateway's own id."""
        found = self._requests.get(request_id)
        return found is not None and found.yield_slot()

    def find(self, name: str) -> InFlightRequest | None:
        """The request of this id, or with this `X-Request-ID` if only one has it."""
        found = self._requests.get(name)
        if found is None:
            named = [one for one in self if name in {one.request.x_request_id, one.request.id}]
            found = named[0] if len(named) == 1 else None
        return found

    def cancel_where(
        self, predicate: Callable[[InFlightRequest], bool], error: GatewayError
    ) -> int:
        """Cancel all requests that `predicate` accepts; returns how many."""
        cancelled = [one for one in self if predicate(one)]
        for one in cancelled:
            one.cancel(error)
        return len(cancelled)


@dataclass(slots=True)
class SupersedingMap(Generic[T]):
    """The newest item of each session, while it is queued or runs."""

    _newest: dict[str, T] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._newest)

    def replace(self, session: str, item: T) -> T | None:
        """Make `item` the newest; returns the one that it replaces, if any."""
        earlier = self._newest.get(session)
        self._newest[session] = item
        return earlier

    def discard(self, session: str, item: T) -> None:
        """Remove `item` unless it has been replaced."""
        if self._newest.get(session) is item:
            del self._newest[session]


# Estimated tokens of a prompt from which on the gateway asks for its progress without being asked,
# to know what was read when a client leaves. The server reports it once a batch, of 2048 tokens by
# default; what was read of shorter prompts is estimated by the time.
PROGRESS_TOKENS = 1024
# Tokens of llama.cpp's batch, unless its operator has set another one: before its first report it
# is believed to have read no more.
DEFAULT_BATCH = 2048
_REQUEST_FIELD = b'"return_progress"'
_EVENT_FIELD = b'"prompt_progress"'


class _Report(NamedTuple):
    """What a node said of its prefill."""

    elapsed: float  # Seconds of the attempt by then
    done: int  # Tokens that were read or cached
    total: int


class PrefillStatus(NamedTuple):
    """How far a prompt is read."""

    percent: int
    tokens: tuple[int, int] | None
    """Tokens that were read or cached, and all tokens; None: the percentage is an estimate."""


class PrefillProgress:
    """The prefill of one request, on one node after the other."""

    __slots__ = (
        "_attempt", "_batch", "_cached", "_client_asked", "_first", "_hidden", "_keep_next",
        "_last",
    )  # fmt: skip

    def __init__(self, *, hidden: bool = False) -> None:
        """`hidden`: the client may not know how much of its prompt was cached; the ledger does."""
        self._hidden = hidden
        self._attempt: Attempt | None = None
        self._first: _Report | None = None
        self._last: _Report | None = None
        """What this attempt's node said first, and last; None: nothing."""
        self._batch = 0  # Tokens between its last two reports; 0: there were none
        self._cached = 0  # Tokens that the node had cached
        self._client_asked = False  # Whether the client itself asks for progress events
        self._keep_next = False
        """Whether the next progress event stands for an event that the client must get."""

    def begin_attempt(
        self, attempt: Attempt, request: Request, api: Api, body: Body
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

    def read_by(self, attempt: Attempt, elapsed: float) -> tuple[int, int] | None:
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
        expected = lease.reading.seconds
        if expected is None or expected <= 0:
            return 0.0
        return (last.total - self._cached) / expected

    def status(self, now: float) -> PrefillStatus | None:
        """How far the prompt is read; None: unknown, hidden, or no prompt is being read."""
        attempt = self._attempt
        if self._hidden or attempt is None or not attempt.is_reading:
            return None
        if self._last is not None:
            _, done, total = self._last
            return PrefillStatus(100 * done // max(1, total), (done, total))
        elapsed, expected = now - attempt.started_at, attempt.lease.reading.seconds
        # A prefill that takes longer than expected may take any time.
        if expected is None or not 0.0 <= elapsed < expected:
            return None
        return PrefillStatus(int(100 * elapsed / expected), None)
