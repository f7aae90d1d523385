"""A node's reply on its way to the client, and how it comes to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway import errors
from gateway.errors import GatewayError
from gateway.proxy.accounting import Accounting
from gateway.proxy.api.base import Api
from gateway.proxy.api.resuming import StreamRewriter
from gateway.proxy.attempt import Attempt, WriteToClient
from gateway.proxy.in_flight import (
    InFlightRequest,
    RequestCancelled,
    RequestEvicted,
)
from gateway.proxy.resume.resumer import Resumed, Resumer
from gateway.transport.errors import (
    NodeReportedError,
    UpstreamError,
    UpstreamTimeout,
)

_TOLD = {
    400: "invalid_request",
    413: "request_too_large",
    422: "invalid_request",
    429: "rate_limit_exceeded",
    503: "node_failed",
    504: "node_timeout",
    529: "node_failed",
}
"""Errors that a node may tell in the middle of its answer and that the client is told as they are.
Of any other it is no business of the client's what went wrong between us and the node."""


class StreamSource(Protocol):
    """Where the rest of a reply comes from: an attempt, or several."""

    on_fail: Callable[[], None] | None

    @property
    def failure(self) -> UpstreamError | None:
        """What has ended it."""

    @property
    def is_sse(self) -> bool:
        """Whether what comes is a stream of events."""


class BodyStream(Protocol):
    """What follows the first bytes of a reply, as `Rest` has it."""

    @property
    def source(self) -> StreamSource:
        """Where it comes from."""

    @property
    def is_open(self) -> bool:
        """Whether a sign of life may stand before what is next."""

    @property
    def last_content_at(self) -> float:
        """When anything came last; monotonic."""

    async def next_chunk(self, write: WriteToClient | None = None) -> bytes | None:
        """The next bytes. Raises: UpstreamError."""

    def close(self) -> None:
        """The client has it all, or has left."""


@dataclass(slots=True)
class ProxyResponse:
    """All of it in `content`, or its first bytes there and the others in `rest`."""

    status: int
    header_lines: bytes
    """The lines of its head that are passed on."""
    content: bytes
    body_stream: BodyStream | None = None


@dataclass(slots=True, eq=False)
class ResponseStream:
    """What follows the first bytes. `close` must be called, whether it was read or not."""

    source: Attempt
    in_flight: InFlightRequest
    api: Api
    accounting: Accounting
    resumer: Resumer | None = None
    """Goes on elsewhere when the node fails; None: that can't be, or is not wanted."""
    closed: bool = False
    _carrying: bool = False
    """Another node is being looked for."""
    _joined: StreamRewriter | None = None
    """Makes the events of a continuation those of the first stream."""

    @property
    def is_open(self) -> bool:
        """Whether more is to come, so that a sign of life may stand before it."""
        return self._carrying or not (self.closed or self.source.stream_ended)

    @property
    def last_content_at(self) -> float:
        """When its node last said anything; monotonic."""
        return self.source.lease.last_content_at or 0.0

    async def next_chunk(self, write: WriteToClient | None = None) -> bytes | None:
        """The next bytes for the client, empty at the end.

        What comes of a stream while this waits goes straight to `write`; None: it said that the
        client lags.

        A stream that fails ends with its dialect's error event, never in silence. An answer
        that is no stream can't: Raises: UpstreamError.
        """
        if self.closed:
            return b""
        try:
            if self._joined is None:
                chunk = await self.source.read(write)
            else:
                chunk = await self._next_joined(self._joined)
        except UpstreamError as failure:
            try:
                return await self._end(failure, write)
            finally:
                errors.drop_traceback(failure)
        return await self._end(None, write) if chunk == b"" else chunk

    async def _next_joined(self, joined: StreamRewriter) -> bytes:
        while chunk := await self.source.read():
            passed = joined.rewrite(chunk)
            if passed:
                self._keep(passed)
                return passed
        return b""

    def _keep(self, passed: bytes) -> None:
        if self.resumer is not None:
            self.resumer.recorder.add(passed)

    def close(self) -> None:
        """The client has it all, or has left."""
        if not self.closed:
            self.closed = True
            self.accounting.response_aborted(self.in_flight, self.source, "client_closed")

    async def _end(
        self, failure: UpstreamError | None, write: WriteToClient | None
    ) -> bytes | None:
        self.closed = True
        attempt = self.source
        if not attempt.is_sse:
            if failure is None:
                self.accounting.response_completed(self.in_flight, attempt, attempt.content)
                return b""
            self.accounting.response_aborted(self.in_flight, attempt, failure.outcome)
            raise failure
        tail = attempt.last_events
        whole = attempt.api.single_terminal_event or self.in_flight.request.slots < 2
        if (
            attempt.api.is_stream_complete(tail)
            and not attempt.ends_mid_event
            and (whole or failure is None)
        ):
            # What may have broken was behind all that counts.
            self.accounting.response_completed(self.in_flight, attempt, tail)
            return b"" if self._joined is None else self.api.stream_end
        outcome = "truncated" if failure is None else failure.outcome
        if failure is None and attempt.api.ends_with_error(tail):
            outcome = "error_event"
        self.accounting.response_aborted(self.in_flight, attempt, outcome)
        error = to_gateway_error(failure)
        if self.resumer is not None and is_resumable(failure):
            self._carrying = True
            try:
                carried = await self.resumer.resume(attempt)
            except GatewayError as ended:
                failure, error = RequestCancelled(ended), ended
            else:
                if carried is not None:
                    return self._carried(carried) or await self.next_chunk(write)
            finally:
                self._carrying = False
        if self.in_flight.request.stream:
            self._note(error.status, error.code)
            return self.api.error_event(error, self.in_flight.request.x_request_id)
        raise StreamFailed(error, failure)

    def _carried(self, carried: Resumed) -> bytes:
        if carried.attempt is None:
            return carried.first_bytes + self.api.stream_end
        self.closed = False
        self.source, self._joined = carried.attempt, carried.rewriter
        self._keep(carried.first_bytes)
        return carried.first_bytes

    def _note(self, status: int, code: str) -> None:
        self.in_flight.record.status = status
        self.in_flight.record.reason = code


class StreamFailed(UpstreamError):  # noqa: N818 - beside `Ended`
    """A stream of which nothing has gone out came to nothing, by `failure`; None: too early."""

    def __init__(self, error: GatewayError, failure: UpstreamError | None) -> None:
        super().__init__(error.message)
        self.error = error
        self.failure = failure


def is_resumable(failure: UpstreamError | None) -> bool:
    """Whether an answer that failed so is worth going on with; None: it ended too early."""
    if isinstance(failure, UpstreamTimeout):
        return failure.limit != "total"
    if isinstance(failure, NodeReportedError) and failure.is_request_fault:
        return False
    return not isinstance(failure, RequestCancelled)


def to_gateway_error(failure: UpstreamError | None) -> GatewayError:
    """What the client is told; None: the stream just ended."""
    if failure is None:
        return errors.node_failed("The node's stream ended too early.")
    if isinstance(failure, RequestCancelled | RequestEvicted):
        return failure.error
    if isinstance(failure, UpstreamTimeout):
        return errors.node_timeout(f"{failure}.")
    if isinstance(failure, NodeReportedError) and failure.client_error is not None:
        return failure.client_error
    if isinstance(failure, NodeReportedError) and failure.status in _TOLD:
        status = failure.status
        wait = errors.UNREPORTED_RETRY_AFTER if status in {429, 503, 529} else None
        return GatewayError(status, _TOLD[status], f"{failure}", retry_after=wait, retryable=False)
    return errors.node_failed(f"{failure}".rstrip(".") + ".")


JSON_HEADER_LINE = b"content-type: application/json; charset=utf-8\r\n"
