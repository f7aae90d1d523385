"""Carries one stream on when its node has failed: another lease, another node, the same answer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import msgspec

from gateway import errors
from gateway.errors import GatewayError
from gateway.events import StreamResumed
from gateway.fleet.node import Lease
from gateway.fleet.server_properties import ServerProperties
from gateway.proxy.api import assembly
from gateway.proxy.attempt import Attempt
from gateway.proxy.context import ProxyContext
from gateway.proxy.in_flight import InFlightRequest
from gateway.proxy.inbound.large_body import FULL_PARSE_BYTES, Body, bytes_to_parse
from gateway.proxy.inbound.routes import ROUTES
from gateway.proxy.json_values import InvalidJson, JsonObject, parse_object
from gateway.proxy.outcome import is_context_overflow
from gateway.proxy.resume import plan
from gateway.proxy.resume.event_rewriter import StreamRewriter
from gateway.proxy.resume.plan import NotResumable, ResumeInput, ResumePlan, plan_resume
from gateway.proxy.resume.splice import OverlapMismatch
from gateway.proxy.resume.transcript import Transcript, TranscriptRecorder
from gateway.request import Request
from gateway.transport.connection import LoopTimeout
from gateway.transport.eager_task import ensure_task
from gateway.transport.errors import (
    ConnectFailed,
    ConnectionReset,
    ConnectTimedOut,
    InvalidResponse,
    NodeReportedError,
    UpstreamError,
    UpstreamTimeout,
)

TOO_LARGE_TO_RESUME = "the request is too large to be gone on with"

MOST_RESUMES = 2
"""Continuations of one answer."""


@dataclass(slots=True)
class Resumed:
    """How an answer goes on: `first` goes out next; no attempt: it is the end."""

    first_bytes: bytes
    attempt: Attempt | None = None
    rewriter: StreamRewriter | None = None


class ResumeRefused(UpstreamError):  # noqa: N818 - beside `Errored`
    """The next node does not take this request; `status` tells why."""

    outcome = "refused"

    def __init__(self, status: int) -> None:
        super().__init__(f"The node answered with status {status}")
        self.status = status


class Resumer:
    """Of one request. It keeps what went out, and begins at most `MOST` continuations."""

    __slots__ = ("_kind", "_left", "_live", "_means", "_model", "_refusal", "_tried", "recorder")

    def __init__(
        self,
        context: ProxyContext,
        in_flight: InFlightRequest,
        recorder: TranscriptRecorder,
        model: str,
        first_attempt: Attempt,
    ) -> None:
        self._means = context
        self._live = in_flight
        self._model = model
        self._kind = first_attempt.lease.node.properties.resume_key()
        self._left = MOST_RESUMES
        self._tried: set[str] = set()
        """Nodes that have failed this answer."""
        self._refusal: GatewayError | None = None
        self.recorder = recorder

    async def resume(self, failed: Attempt) -> Resumed | None:
        """Another node's continuation; None: there is none.

        Raises: GatewayError, when it is ended or refused.
        """
        await ensure_task()
        node = failed.lease.node.name
        self._tried.add(node)
        carried, why = await self._carried()
        goes_on = carried.attempt.lease.node.name if carried and carried.attempt else None
        if carried is None or goes_on:
            said = self.recorder.transcript()
            self._means.bus.publish(
                StreamResumed(self._live.request.x_request_id, node, goes_on, said.token_count, why)
            )
        if self._refusal is not None:
            raise self._refusal
        return carried

    async def _carried(self) -> tuple[Resumed | None, str | None]:
        """The continuation, or why there is none. Raises: GatewayError, when ended."""
        live = self._live
        said = self.recorder.transcript()
        asked: Body = live.request.bodies[self._model]
        body = parse_object(bytes_to_parse(asked))
        if not live.request.stream:
            body |= assembly.streaming_fields(live.request.path)
        why = (
            TOO_LARGE_TO_RESUME
            if len(asked) > FULL_PARSE_BYTES
            else plan.unresumable_reason(body, said)
        )
        wish = ResumeInput(live.request.path, body, said)
        while why is None and self._left:
            if live.cancel_error is not None:
                raise live.cancel_error
            self._refusal = self._quarantined()
            if self._refusal is not None:
                return None, "nodes died on this very request"
            request = self._request(said)
            try:
                lease, _ = await self._means.scheduler.lease(request)
            except GatewayError as error:
                if live.cancel_error is not None:
                    raise
                return None, f"no node could: {error.code}"
            try:
                carried = await self._on(lease, request, wish)
            except NotResumable as error:
                why = str(error)
            except OverlapMismatch:
                # The same once more, from exactly what was sent.
                wish.step_back = False
            except ResumeRefused as refusal:
                self._refused(refusal, wish, lease)
            except UpstreamError:
                self._failed(lease)
            else:
                if carried is not None:
                    self._left -= 1
                    return carried, None
                self._tried.add(lease.node.name)
        return None, why or "it has failed too often"

    def _quarantined(self) -> GatewayError | None:
        """Why it goes to no other node, where so many have died on it."""
        means = self._means
        seconds = means.settings.retries.quarantine
        return means.accounting.quarantine.rejection(self._live.request, means.clock(), seconds)

    def _failed(self, lease: Lease) -> None:
        self._left -= 1
        self._tried.add(lease.node.name)

    def _refused(self, refusal: ResumeRefused, wish: ResumeInput, lease: Lease) -> None:
        """Perhaps the node's template refuses a message that is begun: then without it."""
        if refusal.status == 400 and not wish.as_completion and "messages" in wish.body:
            wish.as_completion = True
        else:
            self._failed(lease)

    def _request(self, said: Transcript) -> Request:
        """What the scheduler is asked for: the same model on a node of the same kind."""
        request, fleet = self._live.request, self._means.fleet
        others = {
            node.name
            for node in fleet.nodes.values()
            if node.name in self._tried or node.properties.resume_key() != self._kind
        }
        tokens = request.max_tokens
        return dataclasses.replace(
            request,
            model_names=(self._model,),
            llama_cpp_only=True,
            stream=True,
            excluded_nodes=others,
            failed_nodes=set(self._tried),
            prompt_tokens=request.prompt_tokens + said.token_count,
            text_bytes=request.text_bytes + len(said.text) + len(said.reasoning_text),
            max_tokens=None if tokens is None else max(1, tokens - said.token_count),
            expected_tokens=None,
        )

    async def _on(self, lease: Lease, request: Request, wish: ResumeInput) -> Resumed | None:
        """The continuation under this lease; None: its node is of another kind.

        Raises: UpstreamError, Unsound, Mismatch, GatewayError.
        """
        live, means = self._live, self._means
        record = live.record
        lease.stream = True
        dialect = ROUTES[request.path].api
        attempt = Attempt(
            lease, request, dialect, means.settings, means.timeout_monitor, means.clock
        )
        live.begin_attempt(attempt)
        outcome = "client_closed"
        try:
            questions = NodeQueries(lease, attempt.connect_timeout)
            if not await self._is_same(questions):
                outcome = "other_kind"
                return None
            way = await plan_resume(questions.post, wish)
            if way.final_events is not None:
                outcome = "ok"
                return Resumed(way.final_events)
            record.attempts += 1
            record.node = lease.node.name
            record.tier = lease.node.spec.tier
            record.fallback = lease.fallback
            carried = await self._opened(attempt, way)
            outcome = ""
            return carried
        except OverlapMismatch:
            outcome = "mismatch"
            raise
        except NotResumable:
            outcome = "unsound"
            raise
        except UpstreamError as failure:
            outcome = failure.outcome
            self._blame(attempt, failure)
            if _out_of_time(failure):
                raise errors.node_timeout(f"{failure}.") from failure
            raise
        finally:
            if outcome:
                attempt.release()
                means.accounting.attempt_failed(live, attempt, outcome)

    async def _is_same(self, questions: NodeQueries) -> bool:
        """Whether the node is, now, what the first one was: it may have been started anew."""
        facts = ServerProperties()
        facts.read_props(await questions.get("/props"))
        return facts.resume_key() == self._kind

    async def _opened(self, attempt: Attempt, way: ResumePlan) -> Resumed:
        """The continuation, when the first of it that is new has come."""
        assert way.body is not None
        attempt.api = ROUTES[way.path].api
        await attempt.open(*self._encoded(attempt.lease, way.path, way.body))
        if attempt.status >= 300:
            if is_context_overflow(attempt.status, attempt.content, attempt.request):
                raise NotResumable("no node has room for what was said")
            raise ResumeRefused(attempt.status)
        if not attempt.is_sse:
            raise NodeReportedError("The node did not stream its answer")
        attempt.splice_point = way.splice_point
        joined = StreamRewriter(way.rewriter)
        out = joined.rewrite(attempt.content)
        while not way.rewriter.caught_up:
            chunk = await attempt.read()
            if not chunk:
                raise OverlapMismatch
            out += joined.rewrite(chunk)
        return Resumed(out, attempt, joined)

    def _encoded(self, lease: Lease, path: str, body: JsonObject) -> tuple[bytes, bytes]:
        origin, request = lease.upstream.pool.address, self._live.request
        if "model" in body:
            body = body | {"model": lease.node.served_name(self._model) or self._model}
        data = msgspec.json.encode(body)
        head = origin.request_head(b"POST", path.encode(), request.header_lines, len(data))
        return head, data

    def _blame(self, attempt: Attempt, failure: UpstreamError) -> None:
        if isinstance(failure, ResumeRefused) or failure.outcome in _BLAMELESS:
            return
        if _out_of_time(failure) and self._live.request.deadline is not None:
            return  # its client would not wait longer
        lease, fleet, now = attempt.lease, self._means.fleet, self._means.clock()
        node = lease.node
        if isinstance(failure, ConnectFailed | ConnectTimedOut):
            fleet.request_failed(node, now, lease.taken_at)
        else:
            self._means.accounting.add_unattributed_failure(
                self._live, lease, now, response_started=True
            )
        if failure.outcome == ConnectionReset.outcome:
            self._means.accounting.quarantine.node_lost(
                self._live.request, node.name, lease.taken_at, now
            )
        if isinstance(failure, ConnectFailed):
            fleet.connect_failed(node, str(failure))


_BLAMELESS = frozenset({"cancelled", "moved", "exhausted", "request_error"})


def _out_of_time(failure: UpstreamError) -> bool:
    return isinstance(failure, UpstreamTimeout) and failure.limit == "total"


QUERY_TIMEOUT = 10.0
"""Seconds for one question. None of them takes a slot, or the time of a token."""

MOST_QUERY_RESPONSE_BYTES = 64 * 1024 * 1024
"""A prompt's tokens with their pieces are some 40 bytes each."""


class NodeQueries:
    """Asks the node of one lease. Its `post` is a `seam.Ask`."""

    def __init__(self, lease: Lease, connect_timeout: float) -> None:
        self._pool = lease.upstream.pool
        self._connect = connect_timeout

    async def post(self, path: str, value: JsonObject) -> JsonObject:
        """Post JSON, get JSON. Raises: UpstreamError."""
        return await self._asked(b"POST", path, msgspec.json.encode(value))

    async def get(self, path: str) -> JsonObject:
        """Get JSON. Raises: UpstreamError."""
        return await self._asked(b"GET", path, b"")

    async def _asked(self, method: bytes, path: str, body: bytes) -> JsonObject:
        lines = b"content-type: application/json\r\n"
        head = self._pool.address.request_head(method, path.encode(), lines, len(body))
        try:
            async with LoopTimeout(QUERY_TIMEOUT):
                status, answer = await self._exchange(head, body)
        except TimeoutError:
            raise UpstreamTimeout(
                "first_byte", f"{path} was not answered for {QUERY_TIMEOUT:.0f} s"
            ) from None
        if status != 200:
            raise NodeReportedError(f"The node answered {path} with status {status}")
        try:
            return parse_object(answer)
        except InvalidJson:
            raise InvalidResponse(f"The node's answer to {path} is no JSON object") from None

    async def _exchange(self, head: bytes, body: bytes) -> tuple[int, bytes]:
        pool = self._pool
        connection = await pool.exchange(head, body, dial=lambda: pool.connect(self._connect))
        try:
            answer = await connection.read_all(MOST_QUERY_RESPONSE_BYTES)
        except BaseException:
            connection.close()
            raise
        pool.release(connection)
        return connection.status, answer
