"""A node's response on its way to the client, from its first bytes to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway import errors
from gateway.errors import GatewayError
from gateway.lease import NodeInfo
from gateway.proxy.accounting import Accounting
from gateway.proxy.api.base import Api
from gateway.proxy.api.resuming import StreamRewriter
from gateway.proxy.attempt import Attempt, WriteToClient
from gateway.proxy.in_flight import (
    InFlightRequest,
    RequestCancelled,
    RequestEvicted,
    RequestYielded,
)
from gateway.proxy.resume.resumer import Resumed, Resumer
from gateway.proxy.splice import OverlapMismatch
from gateway.transport.errors import (
    NodeReportedError,
    PoolFull,
    UpstreamError,
    UpstreamTimeout,
)

JSON_HEADER_LINE = b"content-type: application/json; charset=utf-8\r\n"

SSE_HEADER_LINE = b"content-type: text/event-stream\r\n"


class StreamSource(Protocol):
    """Where the rest of a response comes from: an attempt, or several."""

    @property
    def failure(self) -> UpstreamError | None:
        """Why it was failed, if it was."""

    @property
    def is_sse(self) -> bool:
        """Whether the response is a stream of events."""

    def notify_failure(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the source is failed."""


class BodyStream(Protocol):
    """The rest of a response behind its first bytes; `ResponseStream` is the model."""

    @property
    def source(self) -> StreamSource:
        """Where the bytes come from."""

    @property
    def is_open(self) -> bool:
        """Whether a heartbeat may precede the next bytes."""

    @property
    def last_content_at(self) -> float:
        """When content last came; monotonic."""

    async def next_chunk(self, write: WriteToClient | None = None) -> bytes | None:
        """The next bytes. Raises: UpstreamError."""

    def close(self) -> None:
        """The client has received everything, or has left."""


class EndedStream:
    """The rest of a stream of which nothing is left to come."""

    is_sse = True
    failure: UpstreamError | None = None
    is_open = False
    last_content_at = 0.0

    @property
    def source(self) -> EndedStream:
        """Itself: it has no attempt any more."""
        return self

    def notify_failure(self, callback: Callable[[], None]) -> None:
        """It never fails."""

    async def next_chunk(self, write: WriteToClient | None = None) -> bytes | None:
        """Nothing."""
        return b""

    def close(self) -> None:
        """Nothing is left to be closed."""


@dataclass(slots=True)
class ProxyResponse:
    """A response for the client: whole in `content`, or begun there with the rest to follow."""

    status: int
    header_lines: bytes
    """The node's header lines that are forwarded."""
    content: bytes
    body_stream: BodyStream | None = None
    node: NodeInfo | None = None
    """The node that answered; None: several, to one prompt each."""


@dataclass(slots=True, eq=False)
class ResponseStream:
    """The rest of an attempt's response. `close` must be called, whether it was read or not."""

    source: Attempt
    in_flight: InFlightRequest
    api: Api
    """The API that the client uses."""
    accounting: Accounting
    resumer: Resumer | None = None
    """Resumes the stream when its node fails; None: it can't be resumed, or should not."""
    rewriter: StreamRewriter | None = None
    """Makes the events of a resumed stream continue those of the first one."""
    closed: bool = False
    _resuming: bool = False

    @property
    def is_open(self) -> bool:
        """Whether more is to come, so that a heartbeat may precede it."""
        return self._resuming or not (self.closed or self.source.stream_ended)

    @property
    def last_content_at(self) -> float:
        """When content last came from the node; monotonic."""
        return self.source.last_content_at or 0.0

    async def next_chunk(self, write: WriteToClient | None = None) -> bytes | None:
        """The next bytes for the client, empty at the end.

        Chunks of a stream that arrive during the wait go straight to `write`; None: it reported
        that the client lags.

        A stream that fails ends with its API's error event. A plain response has none; Raises:
        UpstreamError.
        """
        if self.closed:
            return b""
        try:
            if self.rewriter is None:
                chunk = await self.source.read(write)
            else:
                chunk = await self._next_rewritten(self.rewriter)
        except UpstreamError as failure:
            try:
                return await self._end(failure, write)
            finally:
                errors.drop_traceback(failure)
        return await self._end(None, write) if chunk == b"" else chunk

    def close(self) -> None:
        """The client has received everything, or has left."""
        if not self.closed:
            self.closed = True
            self.accounting.response_aborted(self.in_flight, self.source, "client_closed")

    async def _next_rewritten(self, rewriter: StreamRewriter) -> bytes:
        while chunk := await self.source.read():
            passed = rewriter.rewrite(chunk)
            if passed:
                self._record(passed)
                return passed
        return b""

    def _record(self, events: bytes) -> None:
        if self.resumer is not None:
            self.resumer.record(events)

    async def _end(
        self, failure: UpstreamError | None, write: WriteToClient | None
    ) -> bytes | None:
        """The source has ended, with `failure` or without: complete, resume or fail the stream."""
        self.closed = True
        attempt = self.source
        if not attempt.is_sse:
            if failure is None:
                self.accounting.response_completed(self.in_flight, attempt, attempt.content)
                return b""
            self.accounting.response_aborted(self.in_flight, attempt, failure.outcome)
            raise failure
        rest, failure = self._unclosed_event(), failure or attempt.failure
        tail = attempt.last_events
        if self._is_complete(tail, failure):
            self.accounting.response_completed(self.in_flight, attempt, tail)
            return rest if self.rewriter is None else rest + self.api.stream_end
        # All answers have ended: what the node does then is no error to the client.
        is_finished = attempt.api.finished_answers(tail) >= max(1, self._answers)
        if is_finished and not (self.resumer is not None and self.resumer.owes_usage()):
            self.accounting.response_completed(self.in_flight, attempt, tail)
            return rest + self.api.terminal_event
        outcome = "truncated" if failure is None else failure.outcome
        if failure is None and attempt.api.ends_with_error(tail):
            outcome = "error_event"
        self.accounting.response_aborted(self.in_flight, attempt, outcome)
        error = to_gateway_error(failure)
        if self.resumer is not None and is_resumable(failure):
            self._resuming = True
            try:
                yielded = isinstance(failure, RequestYielded)
                pool_full = isinstance(failure, PoolFull)
                resumed = await self.resumer.resume(attempt, yielded=yielded, pool_full=pool_full)
            except GatewayError as ended:
                failure, error = RequestCancelled(ended), ended
            else:
                if resumed is not None:
                    return rest + self._continue(resumed) or await self.next_chunk(write)
            finally:
                self._resuming = False
        if is_finished:
            return rest + self.api.terminal_event
        if self.in_flight.request.stream:
            self.in_flight.record.fail(error.status, error.code)
            return rest + self.api.error_event(error, self.in_flight.request.x_request_id)
        raise StreamFailed(error, failure)

    def _unclosed_event(self) -> bytes:
        """The source's last event, if only the blank line behind it has not come."""
        rest = self.source.read_unclosed()
        if not rest or self.rewriter is None:
            return rest
        try:
            rest = self.rewriter.rewrite(rest)
        except (UpstreamError, OverlapMismatch):
            return b""
        self._record(rest)
        return rest

    @property
    def _answers(self) -> int:
        return self.in_flight.request.lease_request.size.slots

    def _is_complete(self, tail: bytes, failure: UpstreamError | None) -> bool:
        """Whether a stream that ends with `tail` has come to its end.

        Where each answer has a terminal event of its own, a failure may hide others that are due.
        """
        attempt = self.source
        if not attempt.api.is_stream_complete(tail):
            return False
        ends_once = attempt.api.single_terminal_event or self._answers < 2
        return ends_once or (failure is None and not attempt.ends_mid_event)

    def _continue(self, resumed: Resumed) -> bytes:
        """The first bytes of the resumed stream, from which the rest is read now."""
        if resumed.attempt is None:
            return resumed.first_bytes + self.api.stream_end
        self.closed = False
        self.source, self.rewriter = resumed.attempt, resumed.rewriter
        self._record(resumed.first_bytes)
        if self.resumer is not None and self.in_flight.request.lease_request.caller.yields:
            self.in_flight.allow_yield(resumed.attempt, self.resumer.can_resume)
        return resumed.first_bytes


class StreamFailed(UpstreamError):  # noqa: N818 - as `RequestCancelled`
    """A stream failed of which the client has received nothing; `failure` None: it ended early."""

    def __init__(self, error: GatewayError, failure: UpstreamError | None) -> None:
        super().__init__(error.message)
        self.error = error
        self.failure = failure


def is_resumable(failure: UpstreamError | None) -> bool:
    """Whether a stream that failed like this is worth resuming; None: it ended early."""
    if isinstance(failure, UpstreamTimeout):
        return failure.limit != "total"
    if isinstance(failure, NodeReportedError) and failure.is_request_fault:
        return False
    return not isinstance(failure, RequestCancelled)


_FORWARDED_ERRORS = {
    400: "invalid_request",
    413: "request_too_large",
    422: "invalid_request",
    429: "rate_limit_exceeded",
    503: "node_failed",
    504: "node_timeout",
    529: "node_failed",
}
"""Statuses of a node's error event that the client gets as they are, with their error codes. All
others concern only the gateway and the node."""


def to_gateway_error(failure: UpstreamError | None) -> GatewayError:
    """The error for the client; None: the stream ended early."""
    if failure is None:
        return errors.node_failed("The node's stream ended too early.")
    if isinstance(failure, RequestCancelled | RequestEvicted):
        return failure.error
    if isinstance(failure, RequestYielded):
        return errors.cut_for_others()
    if isinstance(failure, UpstreamTimeout):
        return errors.node_timeout(f"{failure}.")
    if isinstance(failure, NodeReportedError) and failure.client_error is not None:
        return failure.client_error
    if isinstance(failure, NodeReportedError) and failure.status in _FORWARDED_ERRORS:
        status = failure.status
        wait = errors.UNREPORTED_RETRY_AFTER if status in {429, 503, 529} else None
        code = _FORWARDED_ERRORS[status]
        return GatewayError(status, code, f"{failure}", retry_after=wait, retryable=False)
    return errors.node_failed(f"{failure}".rstrip(".") + ".")
