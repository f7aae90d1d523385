"""Forwards a request to nodes, one attempt after another, until one has answered to the end.

It knows no web framework: a `Request` comes in, a response head and bytes to read go out. A stream
that has begun is resumed on another node by `ResponseStream`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from gateway import errors
from gateway.api import outcome
from gateway.api.base import LARGEST_ANSWER_BYTES, Api, AssemblyError, ResponseAssembler
from gateway.api.json_values import SHORT_BODY_BYTES, InvalidJson, parse_object
from gateway.api.outcome import (
    LeaseTooOld,
    RequestCancelled,
    RequestEvicted,
    RequestYielded,
    ResponseOutcome,
    is_resumable,
    to_gateway_error,
)
from gateway.api.transcript import OverlapMismatch, TranscriptRecorder
from gateway.errors import GatewayError, drop_traceback
from gateway.forward.client_response import (
    JSON_HEADER_LINE,
    SSE_HEADER_LINE,
    BodyStream,
    ClientResponse,
)
from gateway.forward.context import MOST_POOL_OVERFLOWS, MOST_UNLOADED, ForwardContext
from gateway.forward.event_pipeline import (
    EventPipeline,
    TokenIdExtractor,
    UsageFilter,
    WriteToClient,
)
from gateway.forward.header_fields import with_content_type
from gateway.forward.in_flight import PROGRESS_TOKENS, Attempt, InFlightRequest
from gateway.forward.multi_prompt import MultiPromptForwarder
from gateway.forward.resume import FirstRun, NotResumable, Resumed, Resumer
from gateway.lease import NOTHING_TRIED, NodeError, NodeInfo, Tried
from gateway.request import edits
from gateway.request.body import Body, bytes_to_parse, without_large_fields
from gateway.request.preparation import Request
from gateway.request.routes import ROUTES
from gateway.transport.eager_task import ensure_task
from gateway.transport.errors import (
    ConnectFailed,
    ConnectionReset,
    ConnectTimedOut,
    InvalidResponse,
    ModelNotLoaded,
    PoolFull,
    UpstreamError,
    UpstreamTimeout,
)

JSON_TYPE = b"content-type: application/json"


@dataclass(slots=True, eq=False)
class Forwarder:
    """Forwards requests; one for the whole process."""

    context: ForwardContext

    async def forward(self, in_flight: InFlightRequest) -> ClientResponse:
        """The response to a request: one attempt after another. Raises: GatewayError."""
        if in_flight.request.prompt_list is not None:
            await ensure_task()
            return await MultiPromptForwarder(in_flight, self.forward, self.context).run()
        result = await self._attempt(in_flight, NOTHING_TRIED)
        if isinstance(result, ClientResponse):
            return result
        await ensure_task()
        attempts = self.context.settings.retries.attempts
        retries, may_cross, unloaded = self.context.retries(attempts), attempts > 1, 0
        while result.retryable:
            unloaded += result.not_loaded
            if not (
                result.not_started
                or result.pool_full
                or (result.not_loaded and unloaded <= MOST_UNLOADED)
            ):
                crosses = False
                if may_cross and result.node.tier == "gpu":
                    # Once, a request moves from GPU to CPU nodes at once and at no cost: this can't
                    # multiply an outage of the GPU nodes.
                    wanted, may_cross = in_flight.request.lease_request, False
                    crosses = await self.context.leases.ask_nodes(
                        "has_cpu_node", wanted, result.tried
                    )
                if not crosses and not await retries.granted(reached_node=result.reached_node):
                    break
            result = await self._attempt(in_flight, result.tried)
            if isinstance(result, ClientResponse):
                return result
        if result.error_response is not None:
            return result.error_response
        raise result.error

    async def resume(
        self, in_flight: InFlightRequest, recorder: TranscriptRecorder, first_run: FirstRun
    ) -> ClientResponse:
        """The rest of a response to a stored request, begun by an earlier process.

        `recorder` has what there is of it. Raises: NotResumable, GatewayError.
        """
        context, request = self.context, in_flight.request
        if first_run.model not in request.bodies:
            raise NotResumable("the model that has begun it is not served under its name any more")
        resumer = Resumer(context, in_flight, recorder, first_run)
        resumed = await resumer.begin()
        attempt = resumed.attempt
        if attempt is None:
            return ClientResponse(200, b"", resumed.first_bytes)
        api = ROUTES[request.path].api
        stream = ResponseStream(attempt, api, context, recorder, NOTHING_TRIED, resumer)
        lines, node = attempt.header_lines, attempt.lease.node
        return ClientResponse(attempt.status, lines, resumed.first_bytes, stream, node)

    async def _attempt(  # noqa: PLR0912, PLR0915 - each call costs
        self, in_flight: InFlightRequest, tried: Tried
    ) -> ClientResponse | FailedAttempt:
        """One attempt: select a node, count, exchange, judge. Raises: GatewayError."""
        context, record, clock = self.context, in_flight.record, self.context.clock
        leases, ends = context.leases, context.ends
        api = ROUTES[in_flight.request.path].api

        # Select a node.
        if in_flight.cancel_error is not None:
            raise in_flight.cancel_error
        request = in_flight.request
        if context.quarantine.entries:
            context.check_quarantine(request)
        lease_request, age = request.lease_request, clock() - request.received_at
        lease = leases.lease_now(lease_request, tried, age)
        if lease is None:
            queued_at = clock()
            try:
                lease = await leases.wait_for_lease(
                    lease_request, tried, age, response_started=in_flight.response_started
                )
            finally:
                record.waited(clock() - queued_at)

        # Count the attempt.
        attempt = Attempt(
            in_flight, lease, context.settings, leases, context.timeout_monitor, clock
        )
        if tried is NOTHING_TRIED:
            context.retry_budget.count_request(attempt.started_at)
        record.attempt_began(lease.node.name, lease.node.tier, lease.fallback)

        # Exchange the request for the response's beginning.
        try:
            recorder = None
            if (
                lease.stream
                and api.transcript_reader is not None
                and lease.node.kind == "llama.cpp"
                and lease_request.size.slots == 1
                and context.settings.resume != "off"
            ):
                most = context.settings.limits.resume_bytes
                recorder = TranscriptRecorder(api.transcript_reader, most)
            head, body, events = self._upstream_request(attempt, api, recorder)
            await attempt.open(api, head, body, events)
            if (
                events is not None
                and events.usage_filter is not None
                and context.usage_options.are_refused(
                    lease, request.path, attempt.status, attempt.content
                )
            ):
                # Once more, without asking for usage.
                head, body, events = self._upstream_request(attempt, api, recorder)
                try:
                    await attempt.open_again(api, head, body, events)
                finally:
                    if not 0 < attempt.status < 300:
                        # Something else was wrong, or the node has failed.
                        context.usage_options.note(lease, request.path, taken=None)
            converts = request.stream and not attempt.is_sse and attempt.status < 300
            converted = await _as_events(attempt) if converts else None
        except LeaseTooOld as failure:
            drop_traceback(failure)
            ends.not_started(attempt)
            return FailedAttempt(lease.node, tried, to_gateway_error(failure), not_started=True)
        except UpstreamError as failure:
            drop_traceback(failure)
            return await self._judge_failure(attempt, tried, failure)
        except BaseException:
            ends.attempt_failed(attempt, "client_closed")
            raise
        record.dispatched(request.received_at, attempt.sent_at)

        # Judge the response.
        if attempt.status >= 300:
            return await self._judge_error(attempt, tried)
        if tried is not NOTHING_TRIED:
            leases.answered(lease.id)
        if attempt.complete and not attempt.is_sse:
            return self._plain_response(attempt, api, converted)
        stream = ResponseStream(attempt, api, context, recorder if attempt.is_sse else None, tried)
        if attempt.is_sse and not request.stream:
            return await self._assemble(attempt, stream, tried)
        if attempt.is_sse:
            record.first_content_sent(clock() - request.received_at)
        return ClientResponse(
            attempt.status, attempt.header_lines, attempt.content, stream, lease.node
        )

    def _plain_response(self, attempt: Attempt, api: Api, events: bytes | None) -> ClientResponse:
        """A whole plain response; `events`: as the stream that the client asked for."""
        lines, content, node = attempt.header_lines, attempt.content, attempt.lease.node
        self.context.ends.response_completed(attempt, content)
        if events is not None:
            age = self.context.clock() - attempt.request.received_at
            attempt.in_flight.record.first_content_sent(age)
            lines = with_content_type(lines, SSE_HEADER_LINE)
            return ClientResponse(200, lines, events, BodyStream(), node)
        if api.answers_json and JSON_TYPE not in lines:
            lines = with_content_type(lines, JSON_HEADER_LINE)
        return ClientResponse(attempt.status, lines, content, None, node)

    # What is sent.

    def _upstream_request(
        self, attempt: Attempt, api: Api, recorder: TranscriptRecorder | None
    ) -> tuple[bytes, Body, EventPipeline | None]:
        """Head and body for this node, and what the events of its stream are to pass through."""
        context, in_flight, lease = self.context, attempt.in_flight, attempt.lease
        request = in_flight.request
        lease_request, kind = request.lease_request, lease.node.kind
        body: Body = request.bodies[lease.model]
        edit: edits.Edit = {}
        usage_filter = progress_filter = token_ids = None
        marks = api.added_fields_marks
        if marks and (not isinstance(body, bytes) or any(mark in body for mark in marks)):
            edit |= api.added_fields(edits.raw_fields(body), kind, context.settings) or {}
        if request.stream and not lease.stream:
            edit |= edits.PLAIN
        elif lease.stream and not request.stream:
            edit |= api.streaming_fields or {}
        elif lease.stream and kind == "openai":
            options = context.usage_options
            asking = api.usage_fields(edits.raw_fields(body))
            if asking and options.are_taken(lease, request.path) is not False:
                edit |= asking
                note = partial(options.note, lease, request.path, taken=False)
                usage_filter = UsageFilter(note)
        if (
            lease_request.size.generates
            and not lease_request.wanted.prompt_cache
            and kind == "llama.cpp"
        ):
            edit |= edits.NO_PROMPT_CACHE
        if lease.stream and (
            in_flight.prefill_progress is not None
            or lease_request.size.prompt_tokens >= PROGRESS_TOKENS
        ):
            progress = in_flight.follow_prefill()
            asking, progress_filter = progress.begin_attempt(attempt, api, body)
            edit |= asking
        if (
            recorder is not None
            and context.settings.resume == "exact"
            and api.logprobs_fields is not None
            and api.can_resume_exactly(parse_object(bytes_to_parse(body)))
        ):
            token_ids = TokenIdExtractor(api.take_token_ids, recorder.add_token_ids)
            edit |= api.logprobs_fields
        if edit:
            body = edits.apply_edit(body, edit)
        name, query = lease.served_name, lease.node.query
        if name != request.model_in_body and (
            request.model_in_body is not None or kind == "openai" or query
        ):
            body = edits.with_model(body, name)
        path = request.path.encode() if not query else lease.node.target(request.path)
        head = attempt.pool.address.request_head(
            b"POST", path, in_flight.header_lines(lease.id), len(body)
        )
        if not lease.stream:
            return head, body, None
        record = None if recorder is None else recorder.add
        events = EventPipeline(api, request, len(body), context.settings, context.clock, record)
        if usage_filter or progress_filter or token_ids:
            events.filter_by(usage_filter, progress_filter, token_ids)
        return head, body, events

    # Judging what came. Each returns a failed attempt if another one may follow.

    async def _assemble(
        self, attempt: Attempt, stream: ResponseStream, tried: Tried
    ) -> ClientResponse | FailedAttempt:
        """The plain response that the events of a stream make."""
        settings = self.context.settings
        request = attempt.request
        lease, most = attempt.lease, settings.limits.response_bytes
        node = lease.node
        try:
            fields = parse_object(without_large_fields(request.bodies[lease.model]))
            assembler = ResponseAssembler(stream.api, fields, attempt.content, most)
            while (chunk := await stream.next_chunk(assembler.add)) != b"":
                if chunk is not None:
                    assembler.add(chunk)
                if assembler.too_large:
                    # It would be too large from any node.
                    error = errors.node_failed(f"The answer is too long ({most} bytes).")
                    return FailedAttempt(node, tried, error, retryable=False)
            content = assembler.response()
        except StreamFailed as failed:
            drop_traceback(failed)
            failure = failed.failure
            out_of_time = isinstance(failure, UpstreamTimeout) and failure.limit == "total"
            if not (out_of_time or isinstance(failure, RequestCancelled)):
                self.context.ends.discard(attempt)
            pool_full = isinstance(failure, PoolFull)
            if stream.pool_overflows is not None:
                # It has counted this overflow already.
                tried = replace(tried, pool_overflows=stream.pool_overflows - pool_full)
            if pool_full:
                return _pool_full(node, tried, failed.error)
            tried = tried.failed_on(node.name)
            # An evicted request needs another node at once; any other may wait for one.
            retryable = is_resumable(failure) and (
                not isinstance(failure, RequestEvicted)
                or await self.context.leases.ask_nodes(
                    "has_other_node", request.lease_request, tried
                )
            )
            return FailedAttempt(node, tried, failed.error, retryable=retryable)
        except AssemblyError as odd:
            # The server is not quite llama.cpp's: it may still answer plainly.
            self.context.ends.discard(attempt)
            error = errors.node_failed(f"{odd}".capitalize() + ".")
            return FailedAttempt(
                node, replace(tried.failed_on(node.name), may_assemble=False), error
            )
        finally:
            stream.close()
        lines = with_content_type(attempt.header_lines, JSON_HEADER_LINE)
        return ClientResponse(200, lines, content, node=node)

    async def _judge_error(self, attempt: Attempt, tried: Tried) -> ClientResponse | FailedAttempt:
        """A node's error: pass it on, or try another node. Raises: GatewayError."""
        status, content, request = attempt.status, attempt.content, attempt.request
        node = attempt.lease.node
        kind = outcome.classify(status, content, request.lease_request.wanted.endpoint)
        if kind is ResponseOutcome.POOL_FULL and not attempt.ended_by_full_pool(status, content):
            kind = ResponseOutcome.SERVER_ERROR
        word = "ok" if kind is ResponseOutcome.PASS else kind.value
        shown = _shown_error(attempt) if kind in _SHOWING_OUTCOMES else None
        self.context.ends.attempt_failed(attempt, word, error=shown)
        response = ClientResponse(status, attempt.header_lines, content)
        if kind is ResponseOutcome.PASS:
            if status >= 500:
                raise errors.invalid_request(
                    outcome.error_message(content) or "", request.lease_request.wanted.prompt_field
                )
            return response
        if kind is ResponseOutcome.POOL_FULL:
            message = outcome.error_message(content) or "The node has no room."
            return _pool_full(node, tried, errors.node_failed(message))
        tried = tried.failed_on(node.name)
        if kind is ResponseOutcome.CONTEXT_OVERFLOW:
            return await self._judge_overflow(request, content, node, tried)
        if kind is ResponseOutcome.REFUSED:
            tried = tried.refused_by(node.name)
            if status == 501:
                tried = tried.unsupported_by(node.name, outcome.error_message(content))
                await self.context.leases.ask_nodes(
                    "unsupported_error", request.lease_request, tried
                )
            return await self._not_served(request, status, node, tried)
        if kind is ResponseOutcome.BUSY:
            if status == 402:
                tried = tried.refused_by(node.name)
            elif status == 429:
                tried = tried.limited_by(node.name, None if shown is None else shown.retry_after)
            return await self._not_served(request, status, node, tried)
        if status in tried.statuses or not await self.context.leases.ask_nodes(
            "has_other_node", request.lease_request, tried
        ):
            return response
        tried = replace(tried, statuses=(*tried.statuses, status))
        error = errors.node_failed("Every node tried failed.")
        return FailedAttempt(node, tried, error, error_response=response)

    async def _not_served(
        self, request: Request, status: int, node: NodeInfo, tried: Tried
    ) -> FailedAttempt:
        """The node does not serve this request, now or ever. Raises: GatewayError."""
        if not tried.is_limited:
            message = f"No node could serve this request (the last said {status})."
            return FailedAttempt(node, tried, errors.node_failed(message))
        wait = tried.retry_after
        error = errors.queue_full(
            "Every node that could serve this request wants none for now (429). Try again later.",
            errors.UNREPORTED_RETRY_AFTER if wait is None else wait,
        )
        # A pause is waited for if it is no longer than that before a retry.
        retryable = (
            wait is None
            or wait <= self.context.settings.retries.backoff_max
            or await self.context.leases.ask_nodes(
                "has_other_node", request.lease_request, tried, but_paused=True
            )
        )
        return FailedAttempt(node, tried, error, retryable=retryable)

    async def _judge_overflow(
        self, request: Request, content: bytes, node: NodeInfo, tried: Tried
    ) -> FailedAttempt:
        """The prompt does not fit: try a larger context once. Raises: GatewayError without one."""
        tokens, context, answer = outcome.context_overflow_sizes(content)
        context = context or node.context
        field, by_up = request.lease_request.wanted.prompt_field, node.started_by_up
        error = errors.context_length_exceeded(tokens, context, field, answer, started_by_up=by_up)
        if tried.min_context or context is None:
            raise error
        # For embeddings a batch must hold the text, and can be smaller than the context.
        needed = (tokens or 0) + (answer or 0)
        tried = replace(tried, min_context=max(needed, context + 1, (node.context or 0) + 1))
        if not await self.context.leases.ask_nodes(
            "has_larger_context", request.lease_request, tried
        ):
            raise error
        return FailedAttempt(node, tried.refused_by(node.name), error)

    async def _judge_failure(
        self, attempt: Attempt, tried: Tried, failure: UpstreamError
    ) -> FailedAttempt:
        """There is no response that could be passed on. Raises: GatewayError."""
        ends, request, node = self.context.ends, attempt.request, attempt.lease.node
        took_time = request.deadline is not None or attempt.last_content_at is not None
        ends.attempt_failed(
            attempt,
            failure.outcome,
            outcome.fault_of(failure.outcome, request_took_time=took_time),
            unreachable=str(failure) if isinstance(failure, ConnectFailed) else None,
        )
        if isinstance(failure, RequestCancelled):
            raise failure.error
        error = to_gateway_error(failure)
        if isinstance(failure, ModelNotLoaded):
            # The scheduler knows by now: the request waits until the model is loaded somewhere.
            if failure.is_gone:
                tried = tried.refused_by(node.name)
            return FailedAttempt(node, tried, error, reached_node=False, not_loaded=True)
        tried = tried.failed_on(node.name)
        if isinstance(failure, RequestEvicted):
            retryable = await self.context.leases.ask_nodes(
                "has_other_node", request.lease_request, tried
            )
            return FailedAttempt(node, tried, error, retryable=retryable)
        if isinstance(failure, ConnectionReset):
            ends.node_lost(attempt)
            self.context.check_quarantine(request)
        out_of_time = isinstance(failure, UpstreamTimeout) and failure.limit == "total"
        reached_node = not isinstance(failure, ConnectFailed | ConnectTimedOut)
        return FailedAttempt(
            node, tried, error, retryable=not out_of_time, reached_node=reached_node
        )


@dataclass(slots=True)
class FailedAttempt:
    """An attempt without a response. `error` is for the client if no other attempt may follow."""

    node: NodeInfo
    tried: Tried  # What the request has tried, this attempt included
    error: GatewayError
    retryable: bool = True
    reached_node: bool = True  # Whether the node received the request; if not, a retry adds no load
    error_response: ClientResponse | None = None
    """The node's own error, for the client if no other attempt may follow."""
    pool_full: bool = False
    """Whether its node had no room for the tokens of all its slots: the next is no retry."""
    not_loaded: bool = False  # whether its node had not loaded the model: nor is the next then
    not_started: bool = False  # whether its lease was too old, so that the next is the first


async def _as_events(attempt: Attempt) -> bytes:
    """A plain response as the stream that the client asked for. Raises: InvalidResponse."""
    fields = parse_object(without_large_fields(attempt.request.bodies[attempt.lease.model]))
    content = attempt.content
    if not attempt.complete or len(content) > LARGEST_ANSWER_BYTES:
        raise InvalidResponse("The node's answer is too long for one that is not streamed")
    try:
        if len(content) <= SHORT_BODY_BYTES:
            return attempt.api.answer_events(content, fields)
        # Megabytes take many milliseconds, of which each call in C has few.
        await ensure_task()
        return await asyncio.to_thread(attempt.api.answer_events, content, fields)
    except (InvalidJson, AttributeError, KeyError, RecursionError, TypeError):
        raise InvalidResponse("The node's answer has another form than expected") from None


def _pool_full(node: NodeInfo, tried: Tried, error: GatewayError) -> FailedAttempt:
    """The slots of the node had no room left for their tokens together: wait for room there."""
    tried = tried.overflowed_on(node.name)
    again = tried.pool_overflows <= MOST_POOL_OVERFLOWS
    return FailedAttempt(node, tried, error, retryable=again, pool_full=True)


# Outcomes of error responses that show something about the node.
_SHOWING_OUTCOMES = frozenset({ResponseOutcome.REFUSED, ResponseOutcome.BUSY})


def _shown_error(attempt: Attempt) -> NodeError | None:
    """What an error response shows about the node, beyond this request."""
    request, status, content = attempt.request, attempt.status, attempt.content
    if status == 501:
        general = (
            request.lease_request.wanted.endpoint != "chat"
            or ROUTES[request.path].api.refusal_is_general
        )
        return NodeError(lacks_endpoint=general, hint=outcome.error_message(content))
    if status == 401 and attempt.lease.node.kind == "openai":
        # For a llama.cpp server the probes find out. A client's own account may be refused, too.
        names_account = b"\nopenai-" in b"\n" + request.header_lines
        return None if names_account else NodeError(key_rejected_at=request.path)
    if status in {402, 429, 503}:
        return NodeError(
            is_loading=status == 503 and b"Loading model" in content,
            retry_after=outcome.retry_after(attempt.headers, time.time()),
        )
    return None


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
