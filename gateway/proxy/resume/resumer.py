"""Resumes one stream when its node has failed: another lease, another node, the same answer."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from gateway import errors
from gateway.errors import GatewayError, drop_traceback
from gateway.events import SlotYielded, StreamResumed
from gateway.lease import NOTHING_TRIED, Fault, GrantedLease, LeaseRequest, Tried
from gateway.proxy.api.resuming import StreamRewriter, wants_usage
from gateway.proxy.attempt import Attempt, UpstreamRequest
from gateway.proxy.context import ProxyContext
from gateway.proxy.in_flight import InFlightRequest
from gateway.proxy.inbound.body import FULL_PARSE_BYTES, Body, bytes_to_parse
from gateway.proxy.inbound.edits import NO_PROMPT_CACHE
from gateway.proxy.inbound.routes import ROUTES
from gateway.proxy.json_values import InvalidJson, JsonObject, parse_object
from gateway.proxy.outcome import fault_of, is_context_overflow, is_refused_request
from gateway.proxy.resume.plan import NotResumable, ResumeInput, ResumePlan, plan_resume
from gateway.proxy.retry import MOST_POOL_OVERFLOWS, Retries
from gateway.proxy.splice import OverlapMismatch, SplicePoint
from gateway.proxy.transcript import Transcript, TranscriptRecorder
from gateway.transport.connection import LoopTimeout
from gateway.transport.eager_task import ensure_task
from gateway.transport.errors import (
    DECLINED,
    ConnectFailed,
    ConnectionReset,
    ConnectTimedOut,
    InvalidResponse,
    NodeReportedError,
    PoolFull,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.transport.pool import ConnectionPool

TOO_LARGE_TO_RESUME = "the request is too large to be resumed"

MOST_RESUMES = 2
"""Resumptions of one stream."""


@dataclass(slots=True)
class Resumed:
    """How a stream continues: `first_bytes` are sent next; no attempt: they are its end."""

    first_bytes: bytes
    attempt: Attempt | None = None
    rewriter: StreamRewriter | None = None
    splice_point: SplicePoint | None = None
    """Of a response that needs no attempt, since its text is complete."""


class ResumeRefused(UpstreamError):  # noqa: N818 - as `StreamFailed`
    """The replacement node answered the resumed request with an error `status`."""

    outcome = "refused"

    def __init__(self, status: int) -> None:
        super().__init__(f"The node answered with status {status}")
        self.status = status


class ResumeFailed(NotResumable):
    """It could not be resumed this time."""


class OtherKindOfNode(Exception):  # noqa: N818 - not an error: another node is tried
    """The node has another model or build than the first one."""


class FailedStream(NamedTuple):
    """A stream or a resumption that failed, as the retry policy sees it."""

    reached_node: bool = True
    retryable: bool = True
    pool_full: bool = False
    """Whether its node had no room for the tokens of all its slots."""


class FirstRun(NamedTuple):
    """The attempt that a response began with."""

    model: str
    """The name of the model, of those that the request may have."""
    node_kind: str | None
    """`node_kind` of its node; None: unknown, so that any node will do."""
    resume_key: tuple[object, ...] | None = None
    """That of its node; None: it ran in another process."""


def node_kind(resume_key: tuple[object, ...]) -> str:
    """A word for `NodeInfo.resume_key` that may be written down."""
    return hashlib.sha256(repr(resume_key).encode()).hexdigest()[:16]


class Resumer:
    """Resumes the stream of one request from the transcript of what was sent.

    The first resumption is always granted. Each further one, whether the resumed stream has failed
    or the resumption itself, is a retry and needs the budget that all retries share. Those of
    streams that were cut because the slots of a node had no room left have a bound of their own.
    """

    __slots__ = (
        "_context",
        "_in_flight",
        "_lease_request",
        "_met_other_kind",
        "_model",
        "_node_kind",
        "_recorder",
        "_request",
        "_resume_key",
        "_retries",
        "_source",
        "_times_yielded",
        "_tried",
    )

    def __init__(
        self,
        context: ProxyContext,
        in_flight: InFlightRequest,
        recorder: TranscriptRecorder,
        first_run: FirstRun,
        tried: Tried = NOTHING_TRIED,
    ) -> None:
        """`tried`: before the stream began; only what that shows of the request's size counts."""
        self._context = context
        self._in_flight = in_flight
        self._recorder = recorder
        self._model = first_run.model
        self._request = in_flight.request
        self._resume_key = first_run.resume_key
        """None: only the next is known."""
        self._node_kind = first_run.node_kind
        self._met_other_kind = False
        """Whether a node was of another kind than the one of another process."""
        self._tried = Tried(min_context=tried.min_context, pool_overflows=tried.pool_overflows)
        """Nodes that failed this stream, or are of another kind."""
        self._lease_request: LeaseRequest
        """What is asked of the scheduler for the continuation."""
        self._retries: Retries | None = None
        """Grants the resumptions after the first one; None: none was attempted."""
        self._source: ResumeInput
        """What is resumed now, and how."""
        self._times_yielded = 0
        """How often it has given up its slot to another request."""

    @property
    def pool_overflows(self) -> int:
        """How often the request has met a full pool so far, as in `Tried`."""
        return self._tried.pool_overflows

    def record(self, events: bytes) -> None:
        """These events of a resumed stream are sent to the client."""
        self._recorder.add(events)

    def can_resume(self) -> bool:
        """Whether the stream could be resumed from what was sent so far."""
        try:
            self._resume_input()
        except NotResumable as error:
            drop_traceback(error)
            return False
        return True

    def owes_usage(self) -> bool:
        """Whether the client waits for the tokens of a response whose text is complete."""
        try:
            source = self._resume_input()
        except NotResumable as error:
            drop_traceback(error)
            return False
        return wants_usage(source.body) and not source.transcript.usage_sent

    async def resume(
        self, failed: Attempt, *, yielded: bool = False, pool_full: bool = False
    ) -> Resumed | None:
        """The stream's continuation from another node; None: it can't be resumed.

        `yielded`: its node did not fail; it was cut for another request, waits for a slot of any
        node, and no retry is counted. `pool_full`: its node had no room for the tokens of all its
        slots, and may continue it. Raises: GatewayError, when the request was cancelled, is in
        quarantine or out of time; if it has yielded, also when it can't wait for a slot.
        """
        await ensure_task()
        failed_node = failed.lease.node.name
        if yielded:
            return await self._resume_yielded(failed_node)
        if pool_full:
            self._tried = self._tried.overflowed_on(failed_node)
        else:
            self._exclude(failed_node)
        try:
            resumed = await self._resume(failed_node, pool_full=pool_full)
        except NotResumable as error:
            drop_traceback(error)
            self._publish(failed_node, None, str(error))
            return None
        if resumed.attempt is not None:
            self._publish(failed_node, resumed.attempt.lease.node.name, None)
        return resumed

    async def begin(self) -> Resumed:
        """The continuation of a response that an earlier process has begun.

        Raises: NotResumable, if no node can safely go on with it; GatewayError as `resume`, and
        502 if it could not be resumed this time.
        """
        await ensure_task()
        try:
            resumed = await self._resume("", yielded=True)
        except ResumeFailed as error:
            raise errors.node_failed(f"The response could not be resumed: {error}.") from None
        if resumed.splice_point is not None:
            point = resumed.splice_point
            self._in_flight.record.count_tokens(point.prompt_tokens, 0, point.sent_tokens)
        self._recorder.add(resumed.first_bytes)
        return resumed

    async def _resume_yielded(self, node: str) -> Resumed | None:
        """The continuation of a stream that was cut on this node for another request."""
        clock, began = self._context.clock, self._context.clock()
        self._times_yielded += 1
        tokens, resumed = self._recorder.transcript().token_count, None
        try:
            resumed = await self._resume(node, yielded=True)
        except NotResumable as error:
            drop_traceback(error)
            self._publish(node, None, str(error))
            return None
        finally:
            resumed_on = None
            if resumed is not None:
                resumed_on = node if resumed.attempt is None else resumed.attempt.lease.node.name
            tag = self._in_flight.request.x_request_id
            event = SlotYielded(tag, node, resumed_on, tokens, clock() - began)
            self._context.bus.publish(event)
        return resumed

    def _publish(self, failed_node: str, resumed_on: str | None, reason: str | None) -> None:
        tokens = self._recorder.transcript().token_count
        tag = self._in_flight.request.x_request_id
        self._context.bus.publish(StreamResumed(tag, failed_node, resumed_on, tokens, reason))

    async def _resume(
        self, failed_node: str, *, yielded: bool = False, pool_full: bool = False
    ) -> Resumed:
        """Resume as often as the retry policy grants. Raises: NotResumable, GatewayError.

        `yielded`: for the first time without asking it. `pool_full`: up to its own bound without.
        """
        self._source = self._resume_input()
        self._lease_request = self._resumed_lease_request(self._source.transcript)
        failure = FailedStream(pool_full=pool_full)
        while yielded or await self._is_granted(failure):
            result = await self._attempt(failed_node, yielded=yielded)
            if isinstance(result, Resumed):
                return result
            failure, yielded = result, False
        raise ResumeFailed(
            "the retry budget is used up"
            if self._retries is not None and self._retries.out_of_budget
            else "it has failed too often"
        )

    def _resume_input(self) -> ResumeInput:
        """The request and what was sent of its response. Raises: NotResumable."""
        transcript, route = self._recorder.transcript(), ROUTES[self._request.path]
        original: Body = self._request.bodies[self._model]
        body = parse_object(bytes_to_parse(original))
        if not self._request.stream:
            body |= route.api.streaming_fields or {}
        if not self._request.lease_request.wanted.prompt_cache:
            body |= NO_PROMPT_CACHE
        if len(original) > FULL_PARSE_BYTES:
            raise NotResumable(TOO_LARGE_TO_RESUME)
        if (reason := route.api.unresumable_reason(body, transcript)) is not None:
            raise NotResumable(reason)
        return ResumeInput(route, body, transcript)

    async def _is_granted(self, failure: FailedStream) -> bool:
        """Whether another resumption may follow `failure`; the first needs no budget."""
        if failure.pool_full:
            return self._tried.pool_overflows <= MOST_POOL_OVERFLOWS
        if self._retries is not None:
            return await self._retries.granted(failure)
        context = self._context
        self._retries = context.retry_policy.retries(context.settings.retries, MOST_RESUMES)
        return True

    async def _attempt(self, failed_node: str, *, yielded: bool) -> Resumed | FailedStream:
        """One resumption; may take several leases where a node needs the request put differently.

        Raises: NotResumable, GatewayError.
        """
        while True:
            self._check_allowed(failed_node)
            try:
                lease = await self._lease(yielded=yielded)
            except GatewayError as error:
                if self._in_flight.cancel_error is not None:
                    raise
                if self._met_other_kind:
                    raise NotResumable("no node of the kind that began it is left") from None
                if yielded:
                    raise
                raise ResumeFailed(f"no node could resume it: {error.code}") from None
            node = lease.node.name
            try:
                return await self._exchange(lease)
            except OverlapMismatch:
                # Once more, from exactly the text that was sent.
                self._source = dataclasses.replace(self._source, step_back=False)
            except OtherKindOfNode:
                self._met_other_kind = self._resume_key is None
                self._exclude(node)
            except UpstreamError as failure:
                drop_traceback(failure)
                if self._needs_completion(failure):
                    # The node's template may refuse a message that has begun: go around it.
                    self._source = dataclasses.replace(self._source, as_completion=True)
                elif isinstance(failure, PoolFull):
                    self._tried = self._tried.overflowed_on(node)
                    return FailedStream(pool_full=True)
                else:
                    self._exclude(node)
                    return FailedStream(
                        reached_node=not isinstance(failure, ConnectFailed | ConnectTimedOut)
                    )

    async def _lease(self, *, yielded: bool) -> GrantedLease:
        """A lease on a node that may resume the stream. Raises: GatewayError."""
        leases, request, lease_request = self._context.leases, self._request, self._lease_request
        queued_at = self._context.clock()
        age = queued_at - request.received_at
        if yielded:
            # It waits from now on: an old request would be overdue, and take its slot back.
            limit = lease_request.caller.time_limit
            left = None if limit is None else max(0.0, limit - age)
            caller = replace(lease_request.caller, time_limit=left)
            lease_request, age = replace(lease_request, caller=caller), 0.0
        lease = leases.lease_now(lease_request, self._tried, age)
        if lease is not None:
            return lease
        try:
            return await leases.wait_for_lease(
                lease_request,
                self._tried,
                age,
                # The client has part of a stream, which no other request should displace.
                response_started=request.stream or self._in_flight.response_started,
            )
        finally:
            if yielded:
                self._in_flight.record.waited(self._context.clock() - queued_at)

    def _check_allowed(self, failed_node: str) -> None:
        """Check that the request may go to another node. Raises: GatewayError."""
        if self._in_flight.cancel_error is not None:
            raise self._in_flight.cancel_error
        seconds = self._context.settings.retries.quarantine
        rejection = self._context.accounting.rejection(self._in_flight, seconds)
        if rejection is not None:
            self._publish(failed_node, None, "nodes died on this very request")
            raise rejection

    def _exclude(self, node: str) -> None:
        """This node is not asked again."""
        self._tried = self._tried.failed_on(node).refused_by(node)

    def _resumed_lease_request(self, transcript: Transcript) -> LeaseRequest:
        """What is asked of the scheduler: the same model on a node of the same kind."""
        request = self._request.lease_request
        caller, size, tokens = request.caller, request.size, request.size.max_tokens
        return LeaseRequest(
            request.id,
            replace(
                caller,
                admitted=caller.admitted or self._times_yielded > 0,
                times_yielded=self._times_yielded,
            ),
            replace(
                request.wanted,
                model_names=(self._model,),
                llama_cpp_only=True,
                stream=True,
                resume_key=self._resume_key,
            ),
            replace(
                size,
                prompt_tokens=size.prompt_tokens + transcript.token_count,
                text_bytes=size.text_bytes + len(transcript.text) + len(transcript.reasoning_text),
                max_tokens=None if tokens is None else max(1, tokens - transcript.token_count),
            ),
        )

    async def _exchange(self, lease: GrantedLease) -> Resumed:
        """The continuation under this lease.

        Raises: UpstreamError, OtherKindOfNode, NotResumable, OverlapMismatch, GatewayError.
        """
        context, in_flight = self._context, self._in_flight
        attempt = Attempt(
            lease,
            self._request,
            context.settings,
            context.leases,
            context.timeout_monitor,
            context.clock,
        )
        in_flight.begin_attempt(attempt)
        outcome, fault, unreachable = "client_closed", Fault.NOBODY, None
        try:
            queries = NodeQueries(attempt.pool, attempt.connect_timeout, lease.wake)
            await self._check_kind(queries)
            resume_plan = await plan_resume(queries.post, self._source)
            if resume_plan.final_events is not None:
                outcome = "ok"
                return Resumed(resume_plan.final_events, splice_point=resume_plan.splice_point)
            in_flight.record.attempt_began(lease.node.name, lease.node.tier, lease.fallback)
            resumed = await self._open(attempt, resume_plan)
            outcome = ""
            return resumed
        except OtherKindOfNode:
            outcome = "other_kind"
            raise
        except OverlapMismatch:
            outcome = "mismatch"
            raise
        except NotResumable:
            outcome = "unsound"
            raise
        except UpstreamError as failure:
            outcome = failure.outcome
            fault = fault_of(outcome, request_took_time=self._request.deadline is not None)
            unreachable = str(failure) if isinstance(failure, ConnectFailed) else None
            if outcome == ConnectionReset.outcome:
                context.accounting.node_lost(in_flight, attempt)
            if _is_out_of_time(failure):
                raise errors.node_timeout(f"{failure}.") from failure
            raise
        finally:
            if outcome:
                context.accounting.attempt_failed(
                    in_flight, attempt, outcome, fault, unreachable=unreachable, resumes=True
                )

    async def _check_kind(self, queries: NodeQueries) -> None:
        """Check that the node is still of the first one's kind; it may have been restarted.

        Raises: OtherKindOfNode, UpstreamError.
        """
        props = await queries.get("/props")
        resume_key = self._context.leases.resume_key_of(props)
        if self._resume_key is None:
            if self._node_kind not in {None, node_kind(resume_key)}:
                raise OtherKindOfNode
        elif resume_key != self._resume_key:
            raise OtherKindOfNode

    async def _open(self, attempt: Attempt, resume_plan: ResumePlan) -> Resumed:
        """The continuation, when its first new content has come.

        Raises: UpstreamError, NotResumable, OverlapMismatch.
        """
        await attempt.open(self._upstream_request(attempt, resume_plan))
        if attempt.status >= 300:
            endpoint = self._lease_request.wanted.endpoint
            if attempt.ended_by_full_pool(attempt.status, attempt.content):
                raise PoolFull("The node has no room for the tokens of its slots")
            if is_context_overflow(attempt.status, attempt.content, endpoint):
                raise NotResumable("no node has room for the response so far")
            refused = is_refused_request(attempt.status, attempt.content)
            raise ResumeRefused(400 if refused else attempt.status)
        if not attempt.is_sse:
            raise NodeReportedError("The node did not stream its answer")
        rewriter = StreamRewriter(resume_plan.rewriter)
        first_bytes = rewriter.rewrite(attempt.content)
        while not resume_plan.rewriter.caught_up:
            chunk = await attempt.read()
            if not chunk:
                raise OverlapMismatch
            first_bytes += rewriter.rewrite(chunk)
        return Resumed(first_bytes, attempt, rewriter)

    def _upstream_request(self, attempt: Attempt, resume_plan: ResumePlan) -> UpstreamRequest:
        route, body = resume_plan.route, resume_plan.body
        assert body is not None
        if "model" in body:
            body = body | {"model": attempt.lease.served_name}
        data = msgspec.json.encode(body)
        header_lines = self._in_flight.header_lines(attempt.lease.id)
        head = attempt.pool.address.request_head(
            b"POST", route.path.encode(), header_lines, len(data)
        )
        return UpstreamRequest(head, data, route.api, splice_point=resume_plan.splice_point)

    def _needs_completion(self, failure: UpstreamError) -> bool:
        """Whether a refused message can still be resumed by the path of raw completions."""
        return (
            isinstance(failure, ResumeRefused)
            and failure.status == 400
            and not self._source.as_completion
            and "messages" in self._source.body
        )


def _is_out_of_time(failure: UpstreamError) -> bool:
    return isinstance(failure, UpstreamTimeout) and failure.limit == "total"


QUERY_TIMEOUT = 10.0
"""Seconds for one query. None of them takes a slot, or as long as a token; a server that sleeps
wakes up first (`GrantedLease.wake`)."""

MOST_QUERY_RESPONSE_BYTES = 64 * 1024 * 1024
"""A prompt's tokens with their pieces are some 40 bytes each."""


_JSON_HEADER_LINE = b"content-type: application/json\r\n"


class NodeQueries:
    """Queries to one node. Its `post` is a `splice.PostToNode`."""

    def __init__(self, pool: ConnectionPool, connect_timeout: float, wake: float = 0.0) -> None:
        self._pool = pool
        self._connect_timeout = connect_timeout
        self._timeout = QUERY_TIMEOUT + wake

    async def post(self, path: str, value: JsonObject) -> JsonObject:
        """Post JSON, get JSON. Raises: UpstreamError."""
        return await self._query(b"POST", path, msgspec.json.encode(value))

    async def get(self, path: str) -> JsonObject:
        """Get JSON. Raises: UpstreamError."""
        return await self._query(b"GET", path, b"")

    async def _query(self, method: bytes, path: str, body: bytes) -> JsonObject:
        head = self._pool.address.request_head(method, path.encode(), _JSON_HEADER_LINE, len(body))
        try:
            async with (
                LoopTimeout(self._timeout),
                self._pool.response(
                    head, body, connect_timeout=self._connect_timeout
                ) as connection,
            ):
                answer = await connection.read_all(MOST_QUERY_RESPONSE_BYTES)
        except TimeoutError:
            raise UpstreamTimeout(
                "first_byte", f"{path} was not answered for {self._timeout:.0f} s"
            ) from None
        if connection.status in DECLINED or connection.status == 429:
            raise ResumeRefused(connection.status)
        if connection.status != 200:
            raise NodeReportedError(f"The node answered {path} with status {connection.status}")
        try:
            return parse_object(answer)
        except InvalidJson:
            raise InvalidResponse(f"The node's answer to {path} is no JSON object") from None
