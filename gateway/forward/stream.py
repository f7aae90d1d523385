"""A response that is read as it comes: `ResponseStream`, whose stream goes on when a node fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from gateway.api.base import Api
from gateway.api.outcome import RequestCancelled, RequestYielded, is_resumable, to_gateway_error
from gateway.api.transcript import OverlapMismatch, TranscriptRecorder
from gateway.errors import GatewayError, drop_traceback
from gateway.forward.client_response import BodyStream
from gateway.forward.context import ForwardContext
from gateway.forward.event_pipeline import WriteToClient
from gateway.forward.in_flight import Attempt
from gateway.forward.resume import FirstRun, Resumed, Resumer
from gateway.lease import NOTHING_TRIED, Tried
from gateway.transport.errors import PoolFull, UpstreamError


@dataclass(slots=True, eq=False, repr=False)
class ResponseStream(BodyStream):
    """The rest of an attempt's response. `close` must be called, whether it was read or not.

    A stream is resumed on another node if its own fails.
    """

    _attempt: Attempt
    api: Api  # The API that the client uses
    _context: ForwardContext
    _recorder: TranscriptRecorder | None  # Of a stream that may be resumed
    _tried: Tried = NOTHING_TRIED
    _resumer: Resumer | None = None  # Has begun to resume it
    _resumed: bool = field(init=False)  # Whether the events continue an earlier stream's
    _resuming: bool = False
    _closed: bool = False

    def __post_init__(self) -> None:
        self._resumed = self._resumer is not None
        if self._recorder is not None:
            self._allow_yield(self._attempt)

    @property
    def is_sse(self) -> bool:
        """Whether the response is a stream of events."""
        return self._attempt.is_sse

    @property
    def failure(self) -> UpstreamError | None:
        """Why the attempt was failed, if it was."""
        return self._attempt.failure

    @property
    def is_open(self) -> bool:
        """Whether more is to come, so that a heartbeat may precede it."""
        return self._resuming or not (self._closed or self._attempt.stream_ended)

    @property
    def last_content_at(self) -> float:
        """When content last came from the node; monotonic."""
        return self._attempt.last_content_at or 0.0

    @property
    def pool_overflows(self) -> int | None:
        """How often the request has met a full pool; None: it was not tried to be resumed."""
        return None if self._resumer is None else self._resumer.pool_overflows

    def notify_failure(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the attempt is failed: the reader may wait for something else."""
        self._attempt.notify_failure(callback)

    def resumer(self) -> Resumer:
        """What resumes the stream that is recorded."""
        if self._resumer is None:
            assert self._recorder is not None
            lease = self._attempt.lease
            first_run = FirstRun(lease.model, None, lease.node.resume_key)
            in_flight = self._attempt.in_flight
            self._resumer = Resumer(
                self._context, in_flight, self._recorder, first_run, self._tried
            )
        return self._resumer

    def _allow_yield(self, attempt: Attempt) -> None:
        """Let another request have its slot while the stream could go on elsewhere."""
        in_flight = attempt.in_flight
        if in_flight.request.lease_request.caller.yields:
            in_flight.allow_yield(attempt, self._can_resume)

    def _can_resume(self) -> bool:
        """Whether the stream could be resumed from what was sent so far."""
        if self._attempt.events is not None:
            self._attempt.events.settle()
        return self.resumer().can_resume()

    async def next_chunk(self, write: WriteToClient | None = None) -> bytes | None:
        """The next bytes for the client, empty at the end.

        Chunks of a stream that arrive during the wait go straight to `write`; None: it reported
        that the client lags.

        A stream that fails ends with its API's error event. A plain response has none; Raises:
        UpstreamError.
        """
        if self._closed:
            return b""
        try:
            chunk = await self._attempt.read(write)
        except UpstreamError as failure:
            try:
                return await self._end(failure, write)
            finally:
                drop_traceback(failure)
        return await self._end(None, write) if chunk == b"" else chunk

    def close(self) -> None:
        """The client has received everything, or has left."""
        if not self._closed:
            self._closed = True
            self._context.ends.response_aborted(self._attempt, "client_closed")

    async def _end(
        self, failure: UpstreamError | None, write: WriteToClient | None
    ) -> bytes | None:
        """The attempt has ended, with `failure` or without: complete, resume or fail the stream."""
        self._closed = True
        attempt, api = self._attempt, self.api
        in_flight, ends, events = attempt.in_flight, self._context.ends, attempt.events
        if events is None:
            if failure is None:
                ends.response_completed(attempt, attempt.content)
                return b""
            ends.response_aborted(attempt, failure.outcome)
            raise failure
        rest = b""
        if not events.ended:
            with suppress(UpstreamError, OverlapMismatch):
                rest = attempt.read_unclosed()
        failure = failure or attempt.failure or attempt.cut_by_router()
        tail, answers = events.last_events, in_flight.request.lease_request.size.slots
        # Where each answer has a terminal event of its own, a failure may hide others that are due.
        ends_once = attempt.api.single_terminal_event or answers < 2
        if attempt.api.is_stream_complete(tail) and (
            ends_once or (failure is None and not events.framer.has_partial)
        ):
            ends.response_completed(attempt, tail)
            return rest + api.stream_end if self._resumed else rest
        # All answers have ended: what the node does then is no error to the client.
        is_finished = attempt.api.finished_answers(tail) >= max(1, answers)
        if is_finished and not (self._recorder is not None and self.resumer().owes_usage()):
            ends.response_completed(attempt, tail)
            return rest + api.terminal_event
        ends.response_aborted(attempt, "truncated" if failure is None else failure.outcome)
        error = to_gateway_error(failure)
        if self._recorder is not None and is_resumable(failure):
            self._resuming = True
            try:
                resumed = await self.resumer().resume(
                    attempt,
                    yielded=isinstance(failure, RequestYielded),
                    pool_full=isinstance(failure, PoolFull),
                )
            except GatewayError as ended:
                failure, error = RequestCancelled(ended), ended
            else:
                if resumed is not None:
                    return rest + self._continue(resumed) or await self.next_chunk(write)
            finally:
                self._resuming = False
        if is_finished:
            return rest + api.terminal_event
        if in_flight.request.stream:
            in_flight.record.fail(error.status, error.code)
            return rest + api.error_event(error, in_flight.request.x_request_id)
        raise StreamFailed(error, failure)

    def _continue(self, resumed: Resumed) -> bytes:
        """The first bytes of the resumed stream, from which the rest is read now."""
        if resumed.attempt is None:
            return resumed.first_bytes + self.api.stream_end
        self._closed, self._resumed, self._attempt = False, True, resumed.attempt
        assert self._recorder is not None
        self._recorder.add(resumed.first_bytes)
        self._allow_yield(resumed.attempt)
        return resumed.first_bytes


class StreamFailed(UpstreamError):  # noqa: N818 - as `RequestCancelled`
    """A stream failed of which the client has received nothing; `failure` None: it ended early."""

    def __init__(self, error: GatewayError, failure: UpstreamError | None) -> None:
        super().__init__(error.message)
        self.error = error
        self.failure = failure
