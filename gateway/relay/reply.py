"""A node's reply on its way to the client, and how it comes to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway import errors
from gateway.errors import GatewayError
from gateway.relay.attempt import Attempt, Write
from gateway.relay.continuation.carrier import Carried, Carrier
from gateway.relay.continuation.joined import Joined
from gateway.relay.dialects import Dialect
from gateway.relay.live import Ended, Live, Moved
from gateway.relay.settle import Settler
from gateway.transport.errors import Errored, Overdue, UpstreamError

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


@dataclass(slots=True)
class Reply:
    """All of it in `content`, or its first bytes there and the others in `rest`."""

    status: int
    fields: bytes
    """The lines of its head that are passed on."""
    content: bytes
    rest: Remainder | None = None


class Source(Protocol):
    """Where the rest of a reply comes from: an attempt, or several."""

    on_fail: Callable[[], None] | None

    @property
    def failure(self) -> UpstreamError | None:
        """What has ended it."""

    @property
    def streams(self) -> bool:
        """Whether what comes is a stream of events."""


class Remainder(Protocol):
    """What follows the first bytes of a reply, as `Rest` has it."""

    @property
    def attempt(self) -> Source:
        """Where it comes from."""

    @property
    def waits(self) -> bool:
        """Whether a sign of life may stand before what is next."""

    @property
    def moved(self) -> float:
        """When anything came last; monotonic."""

    async def next(self, write: Write | None = None) -> bytes | None:
        """The next bytes. Raises: UpstreamError."""

    def close(self) -> None:
        """The client has it all, or has left."""


@dataclass(slots=True, eq=False)
class Rest:
    """What follows the first bytes. `close` must be called, whether it was read or not."""

    attempt: Attempt
    live: Live
    dialect: Dialect
    settler: Settler
    carrier: Carrier | None = None
    """Goes on elsewhere when the node fails; None: that can't be, or is not wanted."""
    over: bool = False
    _carrying: bool = False
    """Another node is being looked for."""
    _joined: Joined | None = None
    """Makes the events of a continuation those of the first stream."""

    @property
    def waits(self) -> bool:
        """Whether more is to come, so that a sign of life may stand before it."""
        return self._carrying or not (self.over or self.attempt.said_all)

    @property
    def moved(self) -> float:
        """When its node last said anything; monotonic."""
        return self.attempt.lease.last_moved or 0.0

    async def next(self, write: Write | None = None) -> bytes | None:
        """The next bytes for the client, empty at the end.

        What comes of a stream while this waits goes straight to `write`; None: it said that the
        client lags.

        A stream that fails ends with its dialect's error event, never in silence. An answer
        that is no stream can't: Raises: UpstreamError.
        """
        if self.over:
            return b""
        try:
            if self._joined is None:
                chunk = await self.attempt.read(write)
            else:
                chunk = await self._next_joined(self._joined)
        except UpstreamError as failure:
            try:
                return await self._end(failure, write)
            finally:
                errors.forget_trace(failure)
        return await self._end(None, write) if chunk == b"" else chunk

    async def _next_joined(self, joined: Joined) -> bytes:
        while chunk := await self.attempt.read():
            passed = joined.feed(chunk)
            if passed:
                self._keep(passed)
                return passed
        return b""

    def _keep(self, passed: bytes) -> None:
        if self.carrier is not None:
            self.carrier.so_far.add(passed)

    def close(self) -> None:
        """The client has it all, or has left."""
        if not self.over:
            self.over = True
            self.settler.broken(self.live, self.attempt, "client_closed")

    async def _end(self, failure: UpstreamError | None, write: Write | None) -> bytes | None:
        self.over = True
        attempt = self.attempt
        if not attempt.streams:
            if failure is None:
                self.settler.finished(self.live, attempt, attempt.content)
                return b""
            self.settler.broken(self.live, attempt, failure.outcome)
            raise failure
        tail = attempt.ending
        whole = attempt.dialect.ends_once or self.live.request.slots < 2
        if attempt.dialect.finished(tail) and not attempt.cut and (whole or failure is None):
            # What may have broken was behind all that counts.
            self.settler.finished(self.live, attempt, tail)
            return b"" if self._joined is None else self.dialect.end
        outcome = "truncated" if failure is None else failure.outcome
        if failure is None and attempt.dialect.failed(tail):
            outcome = "error_event"
        self.settler.broken(self.live, attempt, outcome)
        error = as_error(failure)
        if self.carrier is not None and may_go_on(failure):
            self._carrying = True
            try:
                carried = await self.carrier.carry_on(attempt)
            except GatewayError as ended:
                failure, error = Ended(ended), ended
            else:
                if carried is not None:
                    return self._carried(carried) or await self.next(write)
            finally:
                self._carrying = False
        if self.live.request.stream:
            self._note(error.status, error.code)
            return self.dialect.error_event(error, self.live.request.tag)
        raise Lost(error, failure)

    def _carried(self, carried: Carried) -> bytes:
        if carried.attempt is None:
            return carried.first + self.dialect.end
        self.over = False
        self.attempt, self._joined = carried.attempt, carried.joined
        self._keep(carried.first)
        return carried.first

    def _note(self, status: int, code: str) -> None:
        self.live.record.code = status
        self.live.record.reason = code


class Lost(UpstreamError):  # noqa: N818 - beside `Ended`
    """A stream of which nothing has gone out came to nothing, by `failure`; None: too early."""

    def __init__(self, error: GatewayError, failure: UpstreamError | None) -> None:
        super().__init__(error.message)
        self.error = error
        self.failure = failure


def may_go_on(failure: UpstreamError | None) -> bool:
    """Whether an answer that failed so is worth going on with; None: it ended too early."""
    if isinstance(failure, Overdue):
        return failure.limit != "total"
    if isinstance(failure, Errored) and failure.of_request:
        return False
    return not isinstance(failure, Ended)


def as_error(failure: UpstreamError | None) -> GatewayError:
    """What the client is told; None: the stream just ended."""
    if failure is None:
        return errors.node_failed("The node's stream ended too early.")
    if isinstance(failure, Ended | Moved):
        return failure.error
    if isinstance(failure, Overdue):
        return errors.node_timeout(f"{failure}.")
    if isinstance(failure, Errored) and failure.told is not None:
        return failure.told
    if isinstance(failure, Errored) and failure.status in _TOLD:
        status = failure.status
        wait = errors.UNHEARD_RETRY_AFTER if status in {429, 503, 529} else None
        return GatewayError(status, _TOLD[status], f"{failure}", retry_after=wait, retryable=False)
    return errors.node_failed(f"{failure}".rstrip(".") + ".")
