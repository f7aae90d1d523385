"""Forwards a request to nodes, one attempt after another, until one of them answers.

It knows no web framework: a `Request` comes in, a response head and bytes to read go out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from gateway import errors
from gateway.errors import GatewayError, drop_traceback
from gateway.fleet.node import Lease, Node
from gateway.proxy import forwarded_headers, outcome
from gateway.proxy.api.base import AnsweringNode, Api, AssemblyError, ResponseAssembler
from gateway.proxy.attempt import Attempt, UpstreamRequest
from gateway.proxy.context import ProxyContext
from gateway.proxy.in_flight import (
    InFlightRequest,
    RequestCancelled,
    RequestEvicted,
    UnattributedFailure,
)
from gateway.proxy.inbound import edits
from gateway.proxy.inbound.large_body import Body, bytes_to_parse, without_large_fields
from gateway.proxy.inbound.routes import ROUTES
from gateway.proxy.json_values import parse_object
from gateway.proxy.multi_prompt import MultiPromptForwarder
from gateway.proxy.outcome import ResponseOutcome
from gateway.proxy.response_stream import (
    JSON_HEADER_LINE,
    ProxyResponse,
    ResponseStream,
    StreamFailed,
    is_resumable,
    to_gateway_error,
)
from gateway.proxy.resume.resumer import Resumer
from gateway.proxy.transcript import TokenIdExtractor, TranscriptRecorder
from gateway.request import Request
from gateway.scheduling.fleet_sync import ALIVE_STATES
from gateway.transport.eager_task import ensure_task
from gateway.transport.errors import (
    ConnectFailed,
    ConnectionReset,
    ConnectTimedOut,
    LocalResourcesExhausted,
    UpstreamError,
    UpstreamTimeout,
)


@dataclass(slots=True, eq=False)
class Forwarder:
    """Forwards requests; one for the whole process."""

    context: ProxyContext

    async def forward(self, in_flight: InFlightRequest) -> ProxyResponse:
        """The response to a request. Raises: GatewayError."""
        if in_flight.request.prompt_list is not None:
            await ensure_task()
            return await MultiPromptForwarder(in_flight, self.forward, self.context).run()
        self.context.retry_policy.count_request()
        result = await self._attempt(in_flight, NOTHING_TRIED)
        if isinstance(result, ProxyResponse):
            return result
        return await self._retry(in_flight, result)

    def answering_node(self, name: str | None) -> AnsweringNode:
        """The node of this name; a llama.cpp server, if it has left the inventory."""
        node = self.context.fleet.nodes.get(name or "")
        if node is None:
            return AnsweringNode("llama.cpp", None)
        return AnsweringNode(node.spec.kind, node.context)

    async def _retry(self, in_flight: InFlightRequest, failed: FailedAttempt) -> ProxyResponse:
        """Further attempts, as long as the retry policy grants them. Raises: GatewayError."""
        await ensure_task()
        settings = self.context.settings.retries
        retries = self.context.retry_policy.retries(settings, settings.attempts)
        may_cross = settings.attempts > 1
        while True:
            crosses = False
            if may_cross and failed.retryable and failed.node.spec.tier == "gpu":
                # Once, a request moves from GPU to CPU nodes at once and at no cost: this can't
                # multiply an outage of the GPU nodes.
                may_cross, crosses = False, self._has_cpu_node(failed.tried)
            if not crosses and not await retries.granted(failed):
                break
            result = await self._attempt(in_flight, failed.tried)
            if isinstance(result, ProxyResponse):
                return result
            failed = result
        if failed.error_response is not None:
            return failed.error_response
        raise failed.error

    async def _attempt(
        self, in_flight: InFlightRequest, tried: Tried
    ) -> ProxyResponse | FailedAttempt:
        """One attempt: select a node, count, exchange, judge. Raises: GatewayError."""
        context, record, clock = self.context, in_flight.record, self.context.clock
        scheduler, accounting = context.scheduler, context.accounting
        api = ROUTES[in_flight.request.path].api

        # Select a node.
        if in_flight.cancel_error is not None:
            raise in_flight.cancel_error
        rejection = accounting.rejection(in_flight, context.settings.retries.quarantine)
        if rejection is not None:
            raise rejection
        request = in_flight.request
        if tried is not NOTHING_TRIED:
            request = tried.to_place(request)
            in_flight.place_as(request)
        granted = scheduler.lease_now(request)
        if granted is None:
            queued_at = clock()
            try:
                granted = await scheduler.wait_for_lease(request)
            finally:
                record.waited(clock() - queued_at)
        lease, model = granted

        # Count the attempt.
        record.attempt_began(lease.node.name, lease.node.spec.tier, lease.fallback)
        attempt = Attempt(lease, request, context.settings, context.timeout_monitor, clock)
        in_flight.begin_attempt(attempt)

        # Exchange the request for the response's beginning.
        try:
            recorder = self._recorder(attempt, api) if lease.stream else None
            await attempt.open(self._upstream_request(in_flight, attempt, api, model, recorder))
        except UpstreamError as failure:
            attempt.release()
            drop_traceback(failure)
            return self._judge_failure(in_flight, attempt, tried, failure)
        except BaseException:
            attempt.release()
            accounting.attempt_failed(in_flight, attempt, "client_closed")
            raise
        record.dispatched(request.received_at, attempt.sent_at)

        # Judge the response.
        if attempt.status >= 300:
            return self._judge_error(in_flight, attempt, tried)
        if in_flight.unattributed_failures:
            accounting.attribute_failures(in_flight, lease.node, complete=False)
        if attempt.complete and not attempt.is_sse:
            response = ProxyResponse(attempt.status, attempt.header_lines, attempt.content)
            accounting.response_completed(in_flight, attempt, response.content)
            return response
        stream = self._response_stream(in_flight, attempt, api, model, recorder)
        if attempt.is_sse and not request.stream:
            return await self._assemble(in_flight, stream, model, tried)
        if attempt.is_sse:
            record.first_content_sent(clock() - request.received_at)
        return ProxyResponse(attempt.status, attempt.header_lines, attempt.content, stream)

    def _response_stream(
        self,
        in_flight: InFlightRequest,
        attempt: Attempt,
        api: Api,
        model: str,
        recorder: TranscriptRecorder | None,
    ) -> ResponseStream:
        """The rest of the response, which is resumed on another node if its own fails."""
        resumer = None
        if recorder is not None and attempt.is_sse:
            resumer = Resumer(self.context, in_flight, recorder, model, attempt)
        return ResponseStream(attempt, in_flight, api, self.context.accounting, resumer)

    # What is sent.

    def _recorder(self, attempt: Attempt, api: Api) -> TranscriptRecorder | None:
        """What records the stream, if it can be resumed."""
        settings, node = self.context.settings, attempt.lease.node
        if settings.resume == "off" or attempt.request.slots != 1:
            return None
        if api.transcript_reader is None or node.spec.kind != "llama.cpp":
            return None
        return TranscriptRecorder(api.transcript_reader, settings.limits.resume_bytes)

    def _upstream_request(
        self,
        in_flight: InFlightRequest,
        attempt: Attempt,
        api: Api,
        model: str,
        recorder: TranscriptRecorder | None,
    ) -> UpstreamRequest:
        """The request for this node, which may know the model by a name of its own."""
        request, lease = attempt.request, attempt.lease
        body: Body = request.bodies[model]
        event_filter = None
        mark = api.added_fields_mark
        if mark and (not isinstance(body, bytes) or mark in body):
            kind, settings = lease.node.spec.kind, self.context.settings
            if added := api.added_fields(edits.raw_fields(body), kind, settings):
                body = edits.apply_edit(body, added)
        if lease.stream and not request.stream:
            body = edits.apply_edit(body, api.streaming_fields or {})
        if in_flight.prefill_progress is not None and lease.stream:
            progress = in_flight.prefill_progress
            body, event_filter = progress.begin_attempt(lease, request, api, body)
        if (
            recorder is not None
            and self.context.settings.resume == "exact"
            and api.logprobs_fields is not None
            and api.can_resume_exactly(parse_object(bytes_to_parse(body)))
        ):
            event_filter = TokenIdExtractor(
                api.take_token_ids, recorder.add_token_ids, event_filter
            )
            body = edits.apply_edit(body, api.logprobs_fields)
        name = lease.node.served_name(model) or model
        if name != request.model_in_body and (
            request.model_in_body is not None or lease.node.spec.kind == "openai"
        ):
            body = edits.with_model(body, name)
        head = lease.upstream.pool.address.request_head(
            b"POST", request.path.encode(), request.header_lines, len(body)
        )
        on_output = None if recorder is None else recorder.add
        return UpstreamRequest(head, body, api, event_filter, on_output)

    # Judging what came. Each returns a failed attempt if another one may follow.

    async def _assemble(
        self, in_flight: InFlightRequest, stream: ResponseStream, model: str, tried: Tried
    ) -> ProxyResponse | FailedAttempt:
        """The plain response that the events of a stream make."""
        settings = self.context.settings
        request, attempt = in_flight.request, stream.source
        node, most = attempt.lease.node, settings.limits.response_bytes
        assembler = ResponseAssembler(stream.api, attempt.content, most)
        try:
            while (chunk := await stream.next_chunk(assembler.add)) != b"":
                if chunk is not None:
                    assembler.add(chunk)
                if assembler.too_large:
                    # It would be too large from any node.
                    error = errors.node_failed(f"The answer is too long ({most} bytes).")
                    return FailedAttempt(node, tried, error, retryable=False)
            fields = without_large_fields(request.bodies[model])
            content = assembler.assemble(parse_object(fields))
        except StreamFailed as failed:
            drop_traceback(failed)
            tried = tried.failed_on(node)
            # An evicted request needs another node at once; any other may wait for one.
            retryable = is_resumable(failed.failure) and (
                not isinstance(failed.failure, RequestEvicted)
                or self.context.scheduler.has_other_node(tried.to_place(request), node)
            )
            return FailedAttempt(node, tried, failed.error, retryable=retryable)
        except AssemblyError as failure:
            # The server is not quite llama.cpp's: it may still answer plainly.
            error = errors.node_failed(f"{failure}".capitalize() + ".")
            return FailedAttempt(node, replace(tried.failed_on(node), may_assemble=False), error)
        finally:
            stream.close()
        headers = [field for field in attempt.headers if field[0] != b"content-type"]
        lines = forwarded_headers.headers_for_client(headers, settings.headers.to_clients)
        return ProxyResponse(200, JSON_HEADER_LINE + lines, content)

    def _judge_error(
        self, in_flight: InFlightRequest, attempt: Attempt, tried: Tried
    ) -> ProxyResponse | FailedAttempt:
        """A node's error: pass it on, or try another node. Raises: GatewayError."""
        status, content, request = attempt.status, attempt.content, in_flight.request
        accounting, fleet, now = self.context.accounting, self.context.fleet, self.context.clock()
        lease, node = attempt.lease, attempt.lease.node
        attempt.release()
        kind = outcome.classify(status, content, request)
        accounting.attempt_failed(
            in_flight, attempt, "ok" if kind is ResponseOutcome.PASS else kind.value
        )
        response = ProxyResponse(status, attempt.header_lines, content)
        if kind is ResponseOutcome.PASS:
            fleet.request_succeeded(node, now, lease.taken_at)
            return response
        tried = tried.failed_on(node)
        if kind is ResponseOutcome.CONTEXT_OVERFLOW:
            return self._judge_overflow(request, content, lease, tried)
        if kind is ResponseOutcome.REFUSED:
            return self._judge_refusal(request, status, content, node, tried)
        if kind is ResponseOutcome.BUSY:
            if outcome.is_model_loading(status, content):
                fleet.model_loading(node)
            elif status == 429 or (status == 503 and node.concurrency_limit is not None):
                # No failure: the endpoint shows its limit like this.
                fleet.node_overloaded(lease, now, outcome.retry_after(attempt.headers, time.time()))
            elif status in {502, 503, 504}:
                accounting.add_unattributed_failure(in_flight, lease, now, response_started=False)
            error = errors.node_failed(f"Every node tried failed ({status}).")
            return FailedAttempt(node, tried, error)
        if status in tried.statuses or not self.context.scheduler.has_other_node(
            tried.to_place(request), node
        ):
            return response
        in_flight.add_unattributed_failure(UnattributedFailure(lease, counted=False))
        tried = replace(tried, statuses=(*tried.statuses, status))
        error = errors.node_failed("Every node tried failed.")
        return FailedAttempt(node, tried, error, error_response=response)

    def _judge_refusal(
        self, request: Request, status: int, content: bytes, node: Node, tried: Tried
    ) -> FailedAttempt:
        """The node can never serve this request; another node may. Raises: GatewayError."""
        scheduler, fleet = self.context.scheduler, self.context.fleet
        tried = tried.refused_by(node)
        if status == 501:
            hint = outcome.error_message(content)
            tried = tried.unsupported_by(node, hint)
            if request.endpoint != "chat" or ROUTES[request.path].api.refusal_is_general:
                fleet.endpoint_refused(node, request.endpoint, hint)
            if (error := scheduler.unsupported_error(tried.to_place(request))) is not None:
                raise error
        elif status == 401 and node.spec.kind == "openai" and not _names_account(request):
            # For a llama.cpp server the probes find out.
            fleet.key_rejected(node, request.path, status)
        message = f"No node could serve this request (the last said {status})."
        return FailedAttempt(node, tried, errors.node_failed(message))

    def _judge_overflow(
        self, request: Request, content: bytes, lease: Lease, tried: Tried
    ) -> FailedAttempt:
        """The prompt does not fit: try a larger context once. Raises: GatewayError without one."""
        node = lease.node
        tokens, context = outcome.context_overflow_sizes(content)
        context = context or node.context
        error = errors.context_length_exceeded(tokens, context, request.prompt_field)
        self.context.fleet.request_succeeded(node, self.context.clock(), lease.taken_at)
        if tried.min_context or context is None:
            raise error
        # For embeddings a batch must hold the text, and can be smaller than the context.
        tried = replace(tried, min_context=max(tokens or 0, context + 1, (node.context or 0) + 1))
        if not self.context.scheduler.has_larger_context(tried.to_place(request)):
            raise error
        return FailedAttempt(node, tried, error)

    def _judge_failure(
        self, in_flight: InFlightRequest, attempt: Attempt, tried: Tried, failure: UpstreamError
    ) -> FailedAttempt:
        """There is no response that could be passed on. Raises: GatewayError."""
        accounting, fleet, now = self.context.accounting, self.context.fleet, self.context.clock()
        request, lease, node = in_flight.request, attempt.lease, attempt.lease.node
        accounting.attempt_failed(in_flight, attempt, failure.outcome)
        if isinstance(failure, RequestCancelled):
            raise failure.error
        error = to_gateway_error(failure)
        tried = tried.failed_on(node)
        if isinstance(failure, RequestEvicted):
            retryable = self.context.scheduler.has_other_node(tried.to_place(request), node)
            return FailedAttempt(node, tried, error, retryable=retryable)
        if isinstance(failure, LocalResourcesExhausted):
            return FailedAttempt(node, tried, error)
        out_of_time = isinstance(failure, UpstreamTimeout) and failure.limit == "total"
        reached_node = not isinstance(failure, ConnectFailed | ConnectTimedOut)
        if not reached_node:
            fleet.request_failed(node, now, lease.taken_at)
        elif not out_of_time or (request.deadline is None and lease.last_content_at is None):
            accounting.add_unattributed_failure(in_flight, lease, now, response_started=False)
        if isinstance(failure, ConnectFailed):
            fleet.connect_failed(node, str(failure))
        if isinstance(failure, ConnectionReset):
            accounting.node_lost(in_flight, lease, now)
            seconds = self.context.settings.retries.quarantine
            if (rejection := accounting.rejection(in_flight, seconds)) is not None:
                raise rejection
        return FailedAttempt(
            node, tried, error, retryable=not out_of_time, reached_node=reached_node
        )

    # Where else the request could go.

    def _has_cpu_node(self, tried: Tried) -> bool:
        """Whether a CPU node is alive that has not failed the request."""
        return any(
            node.spec.tier == "cpu"
            and node.name not in tried.failed_nodes
            and node.state in ALIVE_STATES
            for node in self.context.fleet.nodes.values()
        )


@dataclass(slots=True)
class FailedAttempt:
    """An attempt without a response. `error` is for the client if no other attempt may follow."""

    node: Node
    tried: Tried
    """What the request has tried, this attempt included."""
    error: GatewayError
    retryable: bool = True
    reached_node: bool = True
    """Whether the node received the request; if not, a retry adds no load."""
    error_response: ProxyResponse | None = None
    """The node's own error, for the client if no other attempt may follow."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What the earlier attempts of a request have shown about nodes and about the request."""

    failed_nodes: frozenset[str] = frozenset()
    excluded_nodes: frozenset[str] = frozenset()
    unsupported_nodes: frozenset[str] = frozenset()
    unsupported_hint: str | None = None
    min_context: int = 0
    statuses: tuple[int, ...] = ()
    """Server errors of nodes; the same from two nodes is the request's own fault."""
    may_assemble: bool = True
    """False: a stream could not be assembled, so a plain response is asked for."""

    def to_place(self, request: Request) -> Request:
        """The request as the scheduler must place it now."""
        return replace(
            request,
            failed_nodes=self.failed_nodes,
            excluded_nodes=self.excluded_nodes,
            unsupported_nodes=self.unsupported_nodes,
            unsupported_hint=self.unsupported_hint,
            min_context=self.min_context,
            may_assemble=request.may_assemble and self.may_assemble,
        )

    def failed_on(self, node: Node) -> Tried:
        """The same after `node` has failed the request."""
        return replace(self, failed_nodes=self.failed_nodes | {node.name})

    def refused_by(self, node: Node) -> Tried:
        """The same after `node` has refused the request for good."""
        return replace(self, excluded_nodes=self.excluded_nodes | {node.name})

    def unsupported_by(self, node: Node, hint: str | None) -> Tried:
        """The same after `node` has said that it lacks the feature (501), with its own hint."""
        nodes = self.unsupported_nodes | {node.name}
        return replace(self, unsupported_nodes=nodes, unsupported_hint=hint)


NOTHING_TRIED = Tried()


def _names_account(request: Request) -> bool:
    """Whether the client names an organization or project, which may be what a 401 refuses."""
    return b"\nopenai-" in b"\n" + request.header_lines
