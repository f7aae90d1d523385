"""From a request to its reply: attempts under leases until one answers.

A function of no web framework: the web edge calls it, and so can jobs and batches.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_random_exponential,
)
from tenacity.stop import stop_base

from gateway import errors
from gateway.config.routing import RetrySettings
from gateway.errors import GatewayError, drop_traceback
from gateway.fleet.node import Lease, Node
from gateway.proxy import forwarded_headers, outcome
from gateway.proxy.api import assembly
from gateway.proxy.api.base import Api, AssemblyError
from gateway.proxy.attempt import Attempt
from gateway.proxy.context import ProxyContext
from gateway.proxy.in_flight import (
    InFlightRequest,
    RequestCancelled,
    RequestEvicted,
    UnattributedFailure,
)
from gateway.proxy.inbound import edits
from gateway.proxy.inbound.large_body import Body, bytes_to_parse
from gateway.proxy.inbound.routes import BASIC_GENERATION_PATHS, ROUTES
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
from gateway.proxy.resume import token_ids
from gateway.proxy.resume.resumer import Resumer
from gateway.proxy.resume.transcript import TRANSCRIPT_READERS, TranscriptRecorder
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


def _names_account(request: Request) -> bool:
    """Whether its client names an organization or project, which may be what is refused."""
    return b"\nopenai-" in b"\n" + request.header_lines


class AttemptFailed(Exception):  # noqa: N818 - as `Overdue` and its like
    """An attempt came to nothing. `error` is what the client gets when no other may follow."""

    def __init__(
        self,
        error: GatewayError,
        *,
        retryable: bool = True,
        reached_node: bool = True,
        error_response: ProxyResponse | None = None,
    ) -> None:
        super().__init__(error.message)
        self.error = error
        self.retryable = retryable
        self.reached_node = reached_node
        """Whether a node has had it: one that nobody has had multiplies no load."""
        self.error_response = error_response
        """A node's own error, to be passed on if nobody knows better."""


class AttemptLoop:
    """One request's way through its attempts."""

    __slots__ = ("_crossed", "_dialect", "_erring", "_live", "_means", "_settler", "_so_far")

    def __init__(self, context: ProxyContext, in_flight: InFlightRequest) -> None:
        self._means = context
        self._live = in_flight
        self._dialect: Api = ROUTES[in_flight.request.path].api
        self._erring: list[int] = []
        """Server errors that attempts ended with, whoever is to blame for them."""
        self._settler = context.accounting
        self._crossed = False
        self._so_far: TranscriptRecorder | None = None
        """Of the attempt under way, where it tells its tokens' ids."""

    async def attempt(self) -> ProxyResponse:
        """One attempt. Raises: AttemptFailed, GatewayError."""
        means, live = self._means, self._live
        request, record, clock = live.request, live.record, means.clock
        if live.cancel_error is not None:
            raise live.cancel_error
        if self._settler.quarantine and (refusal := self._quarantined()) is not None:
            raise refusal
        granted = means.scheduler.lease_now(request)
        if granted is None:
            asked = clock()
            try:
                granted = await means.scheduler.wait_for_lease(request)
            finally:
                record.queue_seconds += clock() - asked
        lease, model = granted
        record.attempts += 1
        record.node = lease.node.name
        record.tier = lease.node.spec.tier
        record.fallback = lease.fallback
        lease.stream = request.stream or (
            request.may_assemble and lease.node.spec.kind == "llama.cpp"
        )
        attempt = Attempt(
            lease, request, self._dialect, means.settings, means.timeout_monitor, clock
        )
        live.begin_attempt(attempt)
        try:
            await attempt.open(*self._encoded(attempt, model))
        except UpstreamError as error:
            attempt.release()
            raise self._failed(attempt, error) from error
        except BaseException:
            attempt.release()
            self._settler.attempt_failed(self._live, attempt, "client_closed")
            raise
        if record.overhead_seconds is None:
            record.overhead_seconds = max(
                0.0, attempt.sent_at - request.received_at - record.queue_seconds
            )
        if attempt.status >= 300:
            return self._judged(attempt)
        if not attempt.is_sse:
            return self._answered(attempt)
        rest = self._streams(attempt, model)
        if request.stream:
            return ProxyResponse(attempt.status, attempt.header_lines, attempt.content, rest)
        return await self._assembled(rest, model)

    async def retry(self) -> ProxyResponse:
        """One attempt, and one more `across`. Raises: AttemptFailed, GatewayError."""
        try:
            return await self.attempt()
        except AttemptFailed as failure:
            return await self.retry_on_cpu(failure)

    async def retry_on_cpu(self, failure: AttemptFailed) -> ProxyResponse:
        """One more attempt on a CPU node if a GPU node failed the one before.

        That way can't multiply an outage of GPU nodes: it counts as no retry and waits for
        nothing. Raises: AttemptFailed, that one where there is no such way; GatewayError.
        """
        if not (failure.retryable and self._may_cross()):
            raise failure
        return await self.attempt()

    def _may_cross(self) -> bool:
        """Whether it comes from a GPU node, for the first time, and some CPU node is in."""
        request, live, means = self._live.request, self._live, self._means
        if self._crossed or live.record.tier != "gpu" or means.settings.retries.attempts < 2:
            return False
        self._crossed = True
        return any(
            node.spec.tier == "cpu"
            and node.name not in request.failed_nodes
            and node.state in ALIVE_STATES
            for node in means.fleet.nodes.values()
        )

    def _encoded(self, attempt: Attempt, model: str) -> tuple[bytes, Body]:
        """The head and the body for this node, under the name that it knows the model by."""
        request, lease = self._live.request, attempt.lease
        origin = lease.upstream.pool.address
        body: Body = request.bodies[model]
        if lease.stream and not request.stream:
            body = edits.apply_edit(body, assembly.streaming_fields(request.path))
        if self._live.prefill_progress is not None and lease.stream:
            body = self._live.prefill_progress.begin_attempt(attempt, body)
        if lease.stream and self._means.settings.resume == "exact":
            body = self._with_ids(attempt, body)
        name = lease.node.served_name(model) or model
        if name != request.model_in_body and (
            request.model_in_body is not None or lease.node.spec.kind == "openai"
        ):
            body = edits.with_model(body, name)
        head = origin.request_head(b"POST", request.path.encode(), request.header_lines, len(body))
        return head, body

    def _quarantined(self) -> GatewayError | None:
        means = self._means
        seconds = means.settings.retries.quarantine
        return self._settler.quarantine.rejection(self._live.request, means.clock(), seconds)

    # What became of it.

    def _answered(self, attempt: Attempt) -> ProxyResponse:
        """The node answers in one piece: from here on nothing can be repeated."""
        if self._live.unattributed_failures:
            self._settler.attribute_failures(self._live, attempt.lease.node, complete=False)
        headers = attempt.header_lines
        if attempt.complete:
            content = attempt.content
            self._settler.response_completed(self._live, attempt, content)
            return ProxyResponse(attempt.status, headers, content)
        rest = ResponseStream(attempt, self._live, self._dialect, self._settler)
        return ProxyResponse(attempt.status, headers, attempt.content, rest)

    def _streams(self, attempt: Attempt, model: str) -> ResponseStream:
        """The node streams its answer, and the first of it is here."""
        live, settings = self._live, self._means.settings
        if live.unattributed_failures:
            self._settler.attribute_failures(live, attempt.lease.node, complete=False)
        if live.request.stream:
            live.record.ttft = self._means.clock() - live.request.received_at
        rest = ResponseStream(attempt, live, self._dialect, self._settler)
        reader = TRANSCRIPT_READERS.get(live.request.path)
        if reader is None or settings.resume == "off" or live.request.slots != 1:
            return rest
        if attempt.lease.node.spec.kind == "llama.cpp":
            so_far = self._so_far or TranscriptRecorder(reader, settings.limits.resume_bytes)
            so_far.add(attempt.content)
            attempt.on_output = so_far.add
            rest.resumer = Resumer(self._means, live, so_far, model, attempt)
        return rest

    def _with_ids(self, attempt: Attempt, body: Body) -> Body:
        """The body that makes the node tell its tokens' ids, which don't go out."""
        path = self._live.request.path
        reader = TRANSCRIPT_READERS.get(path)
        if reader is None or not token_ids.can_resume_exactly(
            path, parse_object(bytes_to_parse(body))
        ):
            return body
        self._so_far = TranscriptRecorder(reader, self._means.settings.limits.resume_bytes)
        attempt.filter_events = token_ids.TokenIdExtractor(
            path, self._so_far.add_token_ids, attempt.filter_events
        )
        return edits.apply_edit(body, token_ids.LOGPROBS_FIELDS[path])

    async def _assembled(self, rest: ResponseStream, model: str) -> ProxyResponse:
        """The plain answer that a stream makes. Raises: AttemptFailed."""
        live, most = self._live, self._means.settings.limits.response_bytes
        attempt = rest.source
        collected = assembly.ResponseAssembler(attempt.content, most)
        try:
            while (chunk := await rest.next_chunk(collected.add)) != b"":
                if chunk is not None:
                    collected.add(chunk)
                if collected.too_large:
                    # It would be so on any node.
                    error = errors.node_failed(f"The answer is too long ({most} bytes).")
                    raise AttemptFailed(error, retryable=False)
            content = collected.assemble(live.request.path, live.request.bodies[model])
        except StreamFailed as lost:
            live.request.failed_nodes |= {attempt.lease.node.name}
            again = is_resumable(lost.failure) and self._may_leave(lost.failure, attempt)
            raise AttemptFailed(lost.error, retryable=again) from lost
        except AssemblyError as failure:
            # A server of another make may still answer plainly.
            live.request.may_assemble = False
            live.request.failed_nodes |= {attempt.lease.node.name}
            raise AttemptFailed(errors.node_failed(f"{failure}".capitalize() + ".")) from failure
        finally:
            rest.close()
        headers = [field for field in attempt.headers if field[0] != b"content-type"]
        also = self._means.settings.headers.to_clients
        return ProxyResponse(
            200, JSON_HEADER_LINE + forwarded_headers.headers_for_client(headers, also), content
        )

    def _may_leave(self, failure: UpstreamError | None, attempt: Attempt) -> bool:
        """Whether what was to leave its node has another to go to. All else may wait for one."""
        if not isinstance(failure, RequestEvicted):
            return True
        return self._means.scheduler.has_other_node(self._live.request, attempt.lease.node)

    def _judged(self, attempt: Attempt) -> ProxyResponse:
        """An error of the node's: whose it is, and whether another node may know better."""
        status, content = attempt.status, attempt.content
        request, node = self._live.request, attempt.lease.node
        lease, fleet, now = attempt.lease, self._means.fleet, self._means.clock()
        attempt.release()
        judged = outcome.classify(status, content, request)
        self._settler.attempt_failed(
            self._live, attempt, "ok" if judged is ResponseOutcome.PASS else judged.value
        )
        answer = ProxyResponse(status, attempt.header_lines, content)
        if judged is ResponseOutcome.PASS:
            fleet.request_succeeded(node, now, lease.taken_at)
            return answer
        request.failed_nodes |= {node.name}
        if judged is ResponseOutcome.CONTEXT_OVERFLOW:
            raise self._overflow(content, lease)
        if judged is ResponseOutcome.REFUSED:
            raise self._refused(status, content, node)
        if judged is ResponseOutcome.BUSY:
            if outcome.is_model_loading(status, content):
                fleet.model_loading(node)
            elif status == 429 or (status == 503 and node.concurrency_limit is not None):
                # No failure: it is how such an endpoint shows its limit.
                fleet.node_overloaded(lease, now, outcome.retry_after(attempt.headers, time.time()))
            elif status in {502, 503, 504}:
                self._settler.add_unattributed_failure(
                    self._live, lease, now, response_started=False
                )
            raise AttemptFailed(errors.node_failed(f"Every node tried failed ({status})."))
        if status in self._erring or not self._means.scheduler.has_other_node(request, node):
            return answer
        self._erring.append(status)
        self._live.unattributed_failures += (UnattributedFailure(lease, counted=False),)
        raise AttemptFailed(errors.node_failed("Every node tried failed."), error_response=answer)

    def _refused(self, status: int, content: bytes, node: Node) -> Exception:
        """This node can't serve it, now or ever: another one, if some node can."""
        request, means = self._live.request, self._means
        request.excluded_nodes |= {node.name}
        if status == 501:
            request.unsupported_nodes |= {node.name}
            request.unsupported_hint = outcome.error_message(content)
            if request.endpoint != "chat" or request.path in BASIC_GENERATION_PATHS:
                means.fleet.endpoint_refused(node, request.endpoint, request.unsupported_hint)
            if (error := means.scheduler.unsupported_error(request)) is not None:
                return error
        elif status == 401 and node.spec.kind == "openai" and not _names_account(request):
            # A llama.cpp server says so when it is asked what it is.
            means.fleet.key_rejected(node, request.path, status)
        return AttemptFailed(
            errors.node_failed(f"No node could serve this request (the last said {status}).")
        )

    def _overflow(self, content: bytes, lease: Lease) -> Exception:
        """The prompt does not fit here: once more where there is more room, if there is."""
        request, node = self._live.request, lease.node
        tokens, context = outcome.context_overflow_sizes(content)
        context = context or node.context
        error = errors.context_length_exceeded(tokens, context, ROUTES[request.path].prompt_field)
        self._means.fleet.request_succeeded(node, self._means.clock(), lease.taken_at)
        if request.min_context or context is None:
            return error
        # For embeddings a batch must hold the text, and can be smaller than the context.
        request.min_context = max(tokens or 0, context + 1, (node.context or 0) + 1)
        if not self._means.scheduler.has_larger_context(request):
            return error
        return AttemptFailed(error)

    def _failed(self, attempt: Attempt, failure: UpstreamError) -> Exception:
        """An attempt ended without any reply that could be passed on."""
        request, node = self._live.request, attempt.lease.node
        self._settler.attempt_failed(self._live, attempt, failure.outcome)
        if isinstance(failure, RequestCancelled):
            return failure.error
        request.failed_nodes |= {node.name}
        if isinstance(failure, RequestEvicted):
            return AttemptFailed(failure.error, retryable=self._may_leave(failure, attempt))
        if isinstance(failure, LocalResourcesExhausted):
            return AttemptFailed(to_gateway_error(failure))
        out_of_time = isinstance(failure, UpstreamTimeout) and failure.limit == "total"
        now = self._means.clock()
        reached = not isinstance(failure, ConnectFailed | ConnectTimedOut)
        if not reached:
            self._means.fleet.request_failed(node, now, attempt.lease.taken_at)
        elif not out_of_time or (
            request.deadline is None and attempt.lease.last_content_at is None
        ):
            self._settler.add_unattributed_failure(
                self._live, attempt.lease, now, response_started=False
            )
        if isinstance(failure, ConnectFailed):
            self._means.fleet.connect_failed(node, str(failure))
        if isinstance(failure, ConnectionReset):
            self._settler.quarantine.node_lost(request, node.name, attempt.lease.taken_at, now)
            if (refusal := self._quarantined()) is not None:
                return refusal
        return AttemptFailed(
            to_gateway_error(failure), retryable=not out_of_time, reached_node=reached
        )


BUDGET_WINDOW = 60.0
"""Seconds of the past that the budget counts."""


BudgetCheck = Callable[[BaseException | None], bool]


class RetryBudget:
    """Keeps an outage from being multiplied: retries are at most a share of recent requests."""

    def __init__(self) -> None:
        self._requests: deque[tuple[int, int]] = deque()
        self._counted = 0
        self._retries: deque[float] = deque()

    def count_request(self, now: float) -> None:
        """Count a request that is tried for the first time."""
        second = int(now)
        requests = self._requests
        if requests and requests[-1][0] == second:
            requests[-1] = (second, requests[-1][1] + 1)
        else:
            requests.append((second, 1))
            self._forget(now)
        self._counted += 1

    def spend(self, now: float, *, share: float, minimum: int) -> bool:
        """Count a retry, if one is left."""
        if not self.remaining(now, share=share, minimum=minimum):
            return False
        self._retries.append(now)
        return True

    def remaining(self, now: float, *, share: float, minimum: int) -> int:
        """Retries that could be made now, of `share` of the last minute's requests or `least`."""
        self._forget(now)
        return max(0, max(minimum, int(share * self._counted)) - len(self._retries))

    def _forget(self, now: float) -> None:
        while self._requests and self._requests[0][0] < int(now) - BUDGET_WINDOW:
            self._counted -= self._requests.popleft()[1]
        while self._retries and self._retries[0] < now - BUDGET_WINDOW:
            self._retries.popleft()


@dataclass(slots=True, eq=False)
class Forwarder:
    """Relays requests, within one budget of retries."""

    context: ProxyContext
    retry_budget: RetryBudget = field(default_factory=RetryBudget)

    async def __call__(self, in_flight: InFlightRequest) -> ProxyResponse:
        """The reply to a live request. Raises: GatewayError."""
        if in_flight.request.prompt_list is not None:
            await ensure_task()
            return await MultiPromptForwarder(in_flight, self, self.context).run()
        self.retry_budget.count_request(self.context.clock())
        journey = AttemptLoop(self.context, in_flight)
        try:
            return await journey.attempt()
        except AttemptFailed as failure:
            return await self._again(journey, failure)

    async def _again(self, journey: AttemptLoop, first: AttemptFailed) -> ProxyResponse:
        """Once the first attempt has failed, tenacity takes over: it costs too much before."""

        def may_retry(error: BaseException) -> bool:
            # What repeats it holds it, and is held by the frames that it came through.
            drop_traceback(error)
            return isinstance(error, AttemptFailed) and error.retryable

        await ensure_task()
        drop_traceback(first)
        try:
            async for trial in retry_loop(
                self.context.settings.retries, may_retry, self._affordable
            ):
                with trial:
                    if trial.retry_state.attempt_number == 1:
                        return await journey.retry_on_cpu(first)
                    return await journey.retry()
        except AttemptFailed as failure:
            if failure.error_response is not None:
                return failure.error_response
            raise failure.error from failure
        raise AssertionError("tenacity ends by a result or an exception")

    def retries_left(self) -> int:
        """Retries that could be made now."""
        share, least = self._allowed()
        return self.retry_budget.remaining(self.context.clock(), share=share, minimum=least)

    def _affordable(self, failure: BaseException | None) -> bool:
        if isinstance(failure, AttemptFailed) and not failure.reached_node:
            return True
        share, least = self._allowed()
        return self.retry_budget.spend(self.context.clock(), share=share, minimum=least)

    def _allowed(self) -> tuple[float, int]:
        """Retries within a minute: this share of its requests, or so many.

        All that runs on one host may have to go elsewhere at once.
        """
        retries = self.context.settings.retries
        hosts: Counter[str] = Counter()
        for node in self.context.fleet.nodes.values():
            hosts[node.spec.host] += node.slots_total
        return retries.budget, max(retries.budget_min, *hosts.values(), 0)


class _OutOfBudget(stop_base):
    def __init__(self, affordable: BudgetCheck) -> None:
        self._affordable = affordable

    def __call__(self, retry_state: RetryCallState) -> bool:
        outcome = retry_state.outcome
        return not self._affordable(None if outcome is None else outcome.exception())


def retry_loop(
    settings: RetrySettings,
    may_retry: Callable[[BaseException], bool],
    budget_check: BudgetCheck,
) -> AsyncRetrying:
    """The loop of tenacity for one request; `affordable` is asked once for each further attempt.

    It is told how the attempt before it failed.
    """
    return AsyncRetrying(
        stop=stop_after_attempt(settings.attempts) | _OutOfBudget(budget_check),
        wait=wait_random_exponential(multiplier=settings.backoff, max=settings.backoff_max),
        retry=retry_if_exception(may_retry),
        reraise=True,
    )
