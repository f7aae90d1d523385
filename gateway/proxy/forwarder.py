"""Forwards a request to nodes, one attempt after another, until one of them answers.

It knows no web framework: a `Request` comes in, a response head and bytes to read go out.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from functools import partial

from gateway import errors
from gateway.errors import GatewayError, drop_traceback
from gateway.lease import NOTHING_TRIED, NodeError, NodeInfo, Tried
from gateway.proxy import forwarded_headers, outcome
from gateway.proxy.api.base import Api, AssemblyError, ResponseAssembler
from gateway.proxy.attempt import Attempt, UpstreamRequest
from gateway.proxy.context import ProxyContext
from gateway.proxy.in_flight import (
    InFlightRequest,
    RequestCancelled,
    RequestEvicted,
)
from gateway.proxy.inbound import edits
from gateway.proxy.inbound.body import Body, bytes_to_parse, without_large_fields
from gateway.proxy.inbound.request import Request
from gateway.proxy.inbound.routes import ROUTES
from gateway.proxy.json_values import SHORT_BODY_BYTES, parse_object
from gateway.proxy.multi_prompt import MultiPromptForwarder
from gateway.proxy.outcome import ResponseOutcome
from gateway.proxy.prefill_progress import PROGRESS_TOKENS
from gateway.proxy.response_stream import (
    JSON_HEADER_LINE,
    SSE_HEADER_LINE,
    EndedStream,
    ProxyResponse,
    ResponseStream,
    StreamFailed,
    is_resumable,
    to_gateway_error,
)
from gateway.proxy.resume.plan import NotResumable
from gateway.proxy.resume.resumer import FirstRun, Resumer
from gateway.proxy.retry import MOST_POOL_OVERFLOWS
from gateway.proxy.sse import EventFilter
from gateway.proxy.transcript import TokenIdExtractor, TranscriptRecorder
from gateway.proxy.usage import UsageFilter
from gateway.transport.eager_task import ensure_task
from gateway.transport.errors import (
    ConnectFailed,
    ConnectionReset,
    ConnectTimedOut,
    PoolFull,
    UpstreamError,
    UpstreamTimeout,
)

JSON_TYPE = b"content-type: application/json"


@dataclass(slots=True, eq=False)
class Forwarder:
    """Forwards requests; one for the whole process."""

    context: ProxyContext

    async def forward(self, in_flight: InFlightRequest) -> ProxyResponse:
        """The response to a request. Raises: GatewayError."""
        if in_flight.request.prompt_list is not None:
            await ensure_task()
            return await MultiPromptForwarder(in_flight, self.forward, self.context).run()
        result = await self._attempt(in_flight, NOTHING_TRIED)
        if isinstance(result, ProxyResponse):
            return result
        return await self._retry(in_flight, result)

    async def resume(
        self, in_flight: InFlightRequest, recorder: TranscriptRecorder, first_run: FirstRun
    ) -> ProxyResponse:
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
            return ProxyResponse(200, b"", resumed.first_bytes)
        stream = ResponseStream(
            attempt,
            in_flight,
            ROUTES[request.path].api,
            context.accounting,
            resumer,
            rewriter=resumed.rewriter,
        )
        if request.lease_request.caller.yields:
            in_flight.allow_yield(attempt, resumer.can_resume)
        lines, node = attempt.header_lines, attempt.lease.node
        return ProxyResponse(attempt.status, lines, resumed.first_bytes, stream, node)

    async def _retry(self, in_flight: InFlightRequest, failed: FailedAttempt) -> ProxyResponse:
        """Further attempts, as long as the retry policy grants them. Raises: GatewayError."""
        await ensure_task()
        settings = self.context.settings.retries
        retries = self.context.retry_policy.retries(settings, settings.attempts)
        may_cross = settings.attempts > 1
        while True:
            crosses = False
            repeats = failed.pool_full and failed.retryable
            if not repeats and may_cross and failed.retryable and failed.node.tier == "gpu":
                # Once, a request moves from GPU to CPU nodes at once and at no cost: this can't
                # multiply an outage of the GPU nodes.
                lease_request = in_flight.request.lease_request
                crosses = self.context.leases.has_cpu_node(lease_request, failed.tried)
                may_cross = False
            if not (crosses or repeats) and not await retries.granted(failed):
                break
            result = await self._attempt(in_flight, failed.tried)
            if isinstance(result, ProxyResponse):
                return result
            failed = result
        if failed.error_response is not None:
            return failed.error_response
        raise failed.error

    async def _attempt(  # noqa: PLR0912 - each call costs
        self, in_flight: InFlightRequest, tried: Tried
    ) -> ProxyResponse | FailedAttempt:
        """One attempt: select a node, count, exchange, judge. Raises: GatewayError."""
        context, record, clock = self.context, in_flight.record, self.context.clock
        leases, accounting = context.leases, context.accounting
        api = ROUTES[in_flight.request.path].api

        # Select a node.
        if in_flight.cancel_error is not None:
            raise in_flight.cancel_error
        if accounting.quarantine.entries:
            self._check_quarantine(in_flight)
        request = in_flight.request
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
        if tried is NOTHING_TRIED:
            context.retry_policy.count_request()
        record.attempt_began(lease.node.name, lease.node.tier, lease.fallback)
        attempt = Attempt(lease, request, context.settings, leases, context.timeout_monitor, clock)
        in_flight.begin_attempt(attempt)

        # Exchange the request for the response's beginning.
        try:
            recorder = self._recorder(attempt, api) if lease.stream else None
            upstream = self._upstream_request(in_flight, attempt, api, recorder)
            await attempt.open(upstream)
            if isinstance(upstream.event_filter, UsageFilter) and self._refuses_usage(attempt):
                upstream = self._upstream_request(in_flight, attempt, api, recorder)
                await self._open_without_usage(attempt, upstream)
            converts = request.stream and not attempt.is_sse and attempt.status < 300
            events = await _as_events(attempt) if converts else None
        except UpstreamError as failure:
            drop_traceback(failure)
            return self._judge_failure(in_flight, attempt, tried, failure)
        except BaseException:
            accounting.attempt_failed(in_flight, attempt, "client_closed")
            raise
        record.dispatched(request.received_at, attempt.sent_at)

        # Judge the response.
        if attempt.status >= 300:
            return self._judge_error(in_flight, attempt, tried)
        if tried is not NOTHING_TRIED:
            leases.answered(lease.id)
        if attempt.complete and not attempt.is_sse:
            return self._plain_response(in_flight, attempt, api, events)
        stream = self._response_stream(in_flight, attempt, api, recorder, tried)
        if attempt.is_sse and not request.stream:
            return await self._assemble(in_flight, stream, tried)
        if attempt.is_sse:
            record.first_content_sent(clock() - request.received_at)
        return ProxyResponse(
            attempt.status, attempt.header_lines, attempt.content, stream, lease.node
        )

    def _plain_response(
        self, in_flight: InFlightRequest, attempt: Attempt, api: Api, events: bytes | None
    ) -> ProxyResponse:
        """A whole plain response; `events`: as the stream that the client asked for."""
        lines, content, node = attempt.header_lines, attempt.content, attempt.lease.node
        self.context.accounting.response_completed(in_flight, attempt, content)
        if events is not None:
            age = self.context.clock() - in_flight.request.received_at
            in_flight.record.first_content_sent(age)
            lines = self._typed(attempt, SSE_HEADER_LINE)
            return ProxyResponse(200, lines, events, EndedStream(), node)
        if api.answers_json and JSON_TYPE not in lines:
            lines = self._typed(attempt, JSON_HEADER_LINE)
        return ProxyResponse(attempt.status, lines, content, None, node)

    def _check_quarantine(self, in_flight: InFlightRequest) -> None:
        """Raises: GatewayError, if nodes have died on this very request."""
        seconds = self.context.settings.retries.quarantine
        rejection = self.context.accounting.rejection(in_flight, seconds)
        if rejection is not None:
            raise rejection

    def _response_stream(
        self,
        in_flight: InFlightRequest,
        attempt: Attempt,
        api: Api,
        recorder: TranscriptRecorder | None,
        tried: Tried,
    ) -> ResponseStream:
        """The rest of the response, which is resumed on another node if its own fails."""
        resumer = None
        if recorder is not None and attempt.is_sse:
            lease = attempt.lease
            first_run = FirstRun(lease.model, None, lease.node.resume_key)
            resumer = Resumer(self.context, in_flight, recorder, first_run, tried)
            if attempt.request.lease_request.caller.yields:
                in_flight.allow_yield(attempt, resumer.can_resume)
        return ResponseStream(attempt, in_flight, api, self.context.accounting, resumer)

    # What is sent.

    def _recorder(self, attempt: Attempt, api: Api) -> TranscriptRecorder | None:
        """What records the stream, if it can be resumed."""
        settings, node = self.context.settings, attempt.lease.node
        if settings.resume == "off" or attempt.request.lease_request.size.slots != 1:
            return None
        if api.transcript_reader is None or node.kind != "llama.cpp":
            return None
        return TranscriptRecorder(api.transcript_reader, settings.limits.resume_bytes)

    def _upstream_request(
        self,
        in_flight: InFlightRequest,
        attempt: Attempt,
        api: Api,
        recorder: TranscriptRecorder | None,
    ) -> UpstreamRequest:
        """The request for this node, which may know the model by a name of its own."""
        request, lease = attempt.request, attempt.lease
        body: Body = request.bodies[lease.model]
        event_filter: EventFilter | None = None
        marks = api.added_fields_marks
        if marks and (not isinstance(body, bytes) or any(mark in body for mark in marks)):
            kind, settings = lease.node.kind, self.context.settings
            if added := api.added_fields(edits.raw_fields(body), kind, settings):
                body = edits.apply_edit(body, added)
        if lease.stream and not request.stream:
            body = edits.apply_edit(body, api.streaming_fields or {})
        elif request.stream and not lease.stream:
            body = edits.apply_edit(body, edits.PLAIN)
        elif lease.stream and lease.node.kind == "openai":
            options = self.context.usage_options
            added = api.usage_fields(edits.raw_fields(body))
            if added and options.are_taken(lease, request.path) is not False:
                body = edits.apply_edit(body, added)
                event_filter = UsageFilter(partial(options.note, lease, request.path, taken=False))
        lease_request = request.lease_request
        reads_anew = lease_request.size.generates and not lease_request.wanted.prompt_cache
        if reads_anew and lease.node.kind == "llama.cpp":
            body = edits.apply_edit(body, edits.NO_PROMPT_CACHE)
        filters_prefill_only = False
        if lease.stream and (
            in_flight.prefill_progress is not None
            or request.lease_request.size.prompt_tokens >= PROGRESS_TOKENS
        ):
            progress = in_flight.follow_prefill()
            body, progress_filter = progress.begin_attempt(attempt, request, api, body)
            if progress_filter is not None:
                event_filter, filters_prefill_only = progress_filter, True
        if (
            recorder is not None
            and self.context.settings.resume == "exact"
            and api.logprobs_fields is not None
            and api.can_resume_exactly(parse_object(bytes_to_parse(body)))
        ):
            event_filter = TokenIdExtractor(
                api.take_token_ids, recorder.add_token_ids, event_filter
            )
            filters_prefill_only = False
            body = edits.apply_edit(body, api.logprobs_fields)
        name = lease.served_name
        if name != request.model_in_body and (
            request.model_in_body is not None or lease.node.kind == "openai"
        ):
            body = edits.with_model(body, name)
        head = attempt.pool.address.request_head(
            b"POST", request.path.encode(), in_flight.header_lines(lease.id), len(body)
        )
        on_output = None if recorder is None else recorder.add
        return UpstreamRequest(
            head, body, api, event_filter, on_output, filters_prefill_only=filters_prefill_only
        )

    def _refuses_usage(self, attempt: Attempt) -> bool:
        """Whether the node may refuse the request just because it asks for usage: note it."""
        options, lease, path = self.context.usage_options, attempt.lease, attempt.request.path
        if attempt.status < 300:
            if options.are_taken(lease, path) is None:
                options.note(lease, path, taken=True)
            return False
        if not options.may_be_refused(lease, path, attempt.status, attempt.content):
            return False
        options.note(lease, path, taken=False)
        return True

    async def _open_without_usage(self, attempt: Attempt, upstream: UpstreamRequest) -> None:
        """Send the request once more, without asking for usage. Raises: UpstreamError."""
        try:
            await attempt.open_again(upstream)
        finally:
            if not 0 < attempt.status < 300:
                # Something else was wrong, or the node has failed.
                self.context.usage_options.note(attempt.lease, attempt.request.path, taken=None)

    # Judging what came. Each returns a failed attempt if another one may follow.

    async def _assemble(
        self, in_flight: InFlightRequest, stream: ResponseStream, tried: Tried
    ) -> ProxyResponse | FailedAttempt:
        """The plain response that the events of a stream make."""
        settings = self.context.settings
        request, attempt = in_flight.request, stream.source
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
            if not _ended_by_request(failed.failure):
                self.context.accounting.discard(in_flight)
            pool_full = isinstance(failed.failure, PoolFull)
            if stream.resumer is not None:
                # It has counted this overflow already.
                overflows = stream.resumer.pool_overflows - pool_full
                tried = replace(tried, pool_overflows=overflows)
            if pool_full:
                return _pool_full(node, tried, failed.error)
            tried = tried.failed_on(node.name)
            # An evicted request needs another node at once; any other may wait for one.
            retryable = is_resumable(failed.failure) and (
                not isinstance(failed.failure, RequestEvicted)
                or self.context.leases.has_other_node(request.lease_request, tried)
            )
            return FailedAttempt(node, tried, failed.error, retryable=retryable)
        except AssemblyError as failure:
            # The server is not quite llama.cpp's: it may still answer plainly.
            self.context.accounting.discard(in_flight)
            error = errors.node_failed(f"{failure}".capitalize() + ".")
            return FailedAttempt(
                node, replace(tried.failed_on(node.name), may_assemble=False), error
            )
        finally:
            stream.close()
        return ProxyResponse(200, self._typed(attempt, JSON_HEADER_LINE), content, node=node)

    def _typed(self, attempt: Attempt, type_line: bytes) -> bytes:
        """The header lines of a response, with this line for its type."""
        headers = [field for field in attempt.headers if field[0] != b"content-type"]
        extra = self.context.settings.headers.to_clients
        return type_line + forwarded_headers.headers_for_client(headers, extra)

    def _judge_error(
        self, in_flight: InFlightRequest, attempt: Attempt, tried: Tried
    ) -> ProxyResponse | FailedAttempt:
        """A node's error: pass it on, or try another node. Raises: GatewayError."""
        status, content, request = attempt.status, attempt.content, in_flight.request
        node = attempt.lease.node
        kind = outcome.classify(status, content, request.lease_request.wanted.endpoint)
        if kind is ResponseOutcome.POOL_FULL and not attempt.ended_by_full_pool(status, content):
            kind = ResponseOutcome.SERVER_ERROR
        word = "ok" if kind is ResponseOutcome.PASS else kind.value
        shown = _shown_error(request, attempt) if kind in _SHOWING_OUTCOMES else None
        self.context.accounting.attempt_failed(in_flight, attempt, word, error=shown)
        response = ProxyResponse(status, attempt.header_lines, content)
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
            return self._judge_overflow(request, content, node, tried)
        if kind is ResponseOutcome.REFUSED:
            return self._judge_refusal(request, status, content, node, tried)
        if kind is ResponseOutcome.BUSY:
            if status == 402:
                tried = tried.refused_by(node.name)
            elif status == 429:
                tried = tried.limited_by(node.name, None if shown is None else shown.retry_after)
            return self._not_served(request, status, node, tried)
        if status in tried.statuses or not self.context.leases.has_other_node(
            request.lease_request, tried
        ):
            return response
        tried = replace(tried, statuses=(*tried.statuses, status))
        error = errors.node_failed("Every node tried failed.")
        return FailedAttempt(node, tried, error, error_response=response)

    def _judge_refusal(
        self, request: Request, status: int, content: bytes, node: NodeInfo, tried: Tried
    ) -> FailedAttempt:
        """The node can never serve this request; another node may. Raises: GatewayError."""
        tried = tried.refused_by(node.name)
        if status == 501:
            tried = tried.unsupported_by(node.name, outcome.error_message(content))
            error = self.context.leases.unsupported_error(request.lease_request, tried)
            if error is not None:
                raise error
        return self._not_served(request, status, node, tried)

    def _not_served(
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
            or self.context.leases.has_other_node(request.lease_request, tried, but_paused=True)
        )
        return FailedAttempt(node, tried, error, retryable=retryable)

    def _judge_overflow(
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
        if not self.context.leases.has_larger_context(request.lease_request, tried):
            raise error
        return FailedAttempt(node, tried.refused_by(node.name), error)

    def _judge_failure(
        self, in_flight: InFlightRequest, attempt: Attempt, tried: Tried, failure: UpstreamError
    ) -> FailedAttempt:
        """There is no response that could be passed on. Raises: GatewayError."""
        accounting, request, node = self.context.accounting, in_flight.request, attempt.lease.node
        took_time = request.deadline is not None or attempt.last_content_at is not None
        accounting.attempt_failed(
            in_flight,
            attempt,
            failure.outcome,
            outcome.fault_of(failure.outcome, request_took_time=took_time),
            unreachable=str(failure) if isinstance(failure, ConnectFailed) else None,
        )
        if isinstance(failure, RequestCancelled):
            raise failure.error
        error = to_gateway_error(failure)
        tried = tried.failed_on(node.name)
        if isinstance(failure, RequestEvicted):
            retryable = self.context.leases.has_other_node(request.lease_request, tried)
            return FailedAttempt(node, tried, error, retryable=retryable)
        if isinstance(failure, ConnectionReset):
            accounting.node_lost(in_flight, attempt)
            seconds = self.context.settings.retries.quarantine
            if (rejection := accounting.rejection(in_flight, seconds)) is not None:
                raise rejection
        out_of_time = isinstance(failure, UpstreamTimeout) and failure.limit == "total"
        reached_node = not isinstance(failure, ConnectFailed | ConnectTimedOut)
        return FailedAttempt(
            node, tried, error, retryable=not out_of_time, reached_node=reached_node
        )


@dataclass(slots=True)
class FailedAttempt:
    """An attempt without a response. `error` is for the client if no other attempt may follow."""

    node: NodeInfo
    tried: Tried
    """What the request has tried, this attempt included."""
    error: GatewayError
    retryable: bool = True
    reached_node: bool = True
    """Whether the node received the request; if not, a retry adds no load."""
    error_response: ProxyResponse | None = None
    """The node's own error, for the client if no other attempt may follow."""
    pool_full: bool = False
    """Whether its node had no room for the tokens of all its slots: the next is no retry."""


async def _as_events(attempt: Attempt) -> bytes:
    """A plain response as the stream that the client asked for. Raises: InvalidResponse."""
    body = attempt.request.bodies[attempt.lease.model]
    fields = parse_object(without_large_fields(body))
    if len(attempt.content) <= SHORT_BODY_BYTES:
        return attempt.answer_as_events(fields)
    # Megabytes take many milliseconds, of which each call in C has few.
    await ensure_task()
    return await asyncio.to_thread(attempt.answer_as_events, fields)


def _pool_full(node: NodeInfo, tried: Tried, error: GatewayError) -> FailedAttempt:
    """The slots of the node had no room left for their tokens together: wait for room there."""
    tried = tried.overflowed_on(node.name)
    again = tried.pool_overflows <= MOST_POOL_OVERFLOWS
    return FailedAttempt(node, tried, error, retryable=again, pool_full=True)


def _ended_by_request(failure: UpstreamError | None) -> bool:
    """Whether the request ended by itself: it was cancelled, or its time was up."""
    return isinstance(failure, RequestCancelled) or (
        isinstance(failure, UpstreamTimeout) and failure.limit == "total"
    )


_SHOWING_OUTCOMES = frozenset({ResponseOutcome.REFUSED, ResponseOutcome.BUSY})
"""Outcomes of error responses that show something about the node."""


def _shown_error(request: Request, attempt: Attempt) -> NodeError | None:
    """What an error response shows about the node, beyond this request."""
    status, content = attempt.status, attempt.content
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
            is_loading=outcome.is_model_loading(status, content),
            retry_after=outcome.retry_after(attempt.headers, time.time()),
        )
    return None
