"""One request's way through its attempts: a lease, an exchange, and what its outcome means."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway import errors
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.events import Bus
from gateway.fleet.fleet import Fleet
from gateway.fleet.lease import Lease
from gateway.fleet.node import Node
from gateway.relay import assembly, edits, fields, verdict
from gateway.relay.assembly import NotAssembled
from gateway.relay.attempt import Attempt
from gateway.relay.continuation import exact
from gateway.relay.continuation.carrier import Carrier
from gateway.relay.continuation.said import READERS, SoFar
from gateway.relay.dialects import Dialect
from gateway.relay.large import Body, parsed
from gateway.relay.live import Doubt, Ended, Live, Moved
from gateway.relay.reply import Lost, Reply, Rest, as_error, may_go_on
from gateway.relay.routes import PLAINEST, ROUTES
from gateway.relay.settle import Settler
from gateway.relay.steps import Steps
from gateway.relay.values import object_of
from gateway.relay.verdict import Verdict
from gateway.relay.watch import Watch
from gateway.request import Request
from gateway.scheduling.mirror import ALIVE
from gateway.scheduling.scheduler import Scheduler
from gateway.transport.errors import (
    ConnectFailed,
    ConnectTimedOut,
    Exhausted,
    Overdue,
    Reset,
    UpstreamError,
)

JSON = b"content-type: application/json; charset=utf-8\r\n"


@dataclass(slots=True, eq=False)
class Means:
    """What every request's attempts need; one for the whole process."""

    scheduler: Scheduler
    fleet: Fleet
    settings: Settings
    bus: Bus
    watch: Watch
    clock: Callable[[], float]
    steps: Steps = field(default_factory=Steps)
    """Of all requests that take long to prepare."""
    settler: Settler = field(init=False)

    def __post_init__(self) -> None:
        self.settler = Settler(self.fleet, self.scheduler, self.bus, self.clock)


def _names_account(request: Request) -> bool:
    """Whether its client names an organization or project, which may be what is refused."""
    return b"\nopenai-" in b"\n" + request.fields


class AttemptFailed(Exception):  # noqa: N818 - as `Overdue` and its like
    """An attempt came to nothing. `error` is what the client gets when no other may follow."""

    def __init__(
        self,
        error: GatewayError,
        *,
        again: bool = True,
        reached: bool = True,
        answer: Reply | None = None,
    ) -> None:
        super().__init__(error.message)
        self.error = error
        self.again = again
        self.reached = reached
        """Whether a node has had it: one that nobody has had multiplies no load."""
        self.answer = answer
        """A node's own error, to be passed on if nobody knows better."""


class Journey:
    """One request's way through its attempts."""

    __slots__ = ("_crossed", "_dialect", "_erring", "_live", "_means", "_settler", "_so_far")

    def __init__(self, means: Means, live: Live) -> None:
        self._means = means
        self._live = live
        self._dialect: Dialect = ROUTES[live.request.path].dialect
        self._erring: list[int] = []
        """Server errors that attempts ended with, whoever is to blame for them."""
        self._settler = means.settler
        self._crossed = False
        self._so_far: SoFar | None = None
        """Of the attempt under way, where it tells its tokens' ids."""

    async def attempt(self) -> Reply:
        """One attempt. Raises: AttemptFailed, GatewayError."""
        means, live = self._means, self._live
        request, record, clock = live.request, live.record, means.clock
        if live.ended_by is not None:
            raise live.ended_by
        if self._settler.quarantine and (refusal := self._quarantined()) is not None:
            raise refusal
        granted = means.scheduler.lease_now(request)
        if granted is None:
            asked = clock()
            try:
                granted = await means.scheduler.wait(request)
            finally:
                record.queue += clock() - asked
        lease, model = granted
        record.attempts += 1
        record.node = lease.node.name
        record.tier = lease.node.spec.tier
        record.fallback = lease.fallback
        lease.stream = request.stream or (request.assembled and lease.node.spec.kind == "llama.cpp")
        attempt = Attempt(lease, request, self._dialect, means.settings, means.watch, clock)
        live.trying(attempt)
        try:
            await attempt.open(*self._encoded(attempt, model))
        except UpstreamError as error:
            attempt.end()
            raise self._failed(attempt, error) from error
        except BaseException:
            attempt.end()
            self._settler.tell(self._live, attempt, "client_closed")
            raise
        if record.overhead is None:
            record.overhead = max(0.0, attempt.sent - request.received - record.queue)
        if attempt.status >= 300:
            return self._judged(attempt)
        if not attempt.streams:
            return self._answered(attempt)
        rest = self._streams(attempt, model)
        if request.stream:
            return Reply(attempt.status, attempt.fields, attempt.content, rest)
        return await self._assembled(rest, model)

    async def again(self) -> Reply:
        """One attempt, and one more `across`. Raises: AttemptFailed, GatewayError."""
        try:
            return await self.attempt()
        except AttemptFailed as failure:
            return await self.across(failure)

    async def across(self, failure: AttemptFailed) -> Reply:
        """One more attempt on a CPU node if a GPU node failed the one before.

        That way can't multiply an outage of GPU nodes: it counts as no retry and waits for
        nothing. Raises: AttemptFailed, that one where there is no such way; GatewayError.
        """
        if not (failure.again and self._may_cross()):
            raise failure
        return await self.attempt()

    def _may_cross(self) -> bool:
        """Whether it comes from a GPU node, for the first time, and some CPU node is in."""
        request, live, means = self._live.request, self._live, self._means
        if self._crossed or live.record.tier != "gpu" or means.settings.retries.attempts < 2:
            return False
        self._crossed = True
        return any(
            node.spec.tier == "cpu" and node.name not in request.failed and node.state in ALIVE
            for node in means.fleet.nodes.values()
        )

    def _encoded(self, attempt: Attempt, model: str) -> tuple[bytes, Body]:
        """The head and the body for this node, under the name that it knows the model by."""
        request, lease = self._live.request, attempt.lease
        origin = lease.upstream.pool.origin
        body: Body = request.bodies[model]
        if lease.stream and not request.stream:
            body = edits.applied(body, assembly.asked(request.path))
        if self._live.prefill is not None and lease.stream:
            body = self._live.prefill.begin(attempt, body)
        if lease.stream and self._means.settings.resume == "exact":
            body = self._with_ids(attempt, body)
        name = lease.node.serves(model) or model
        if name != request.said and (request.said is not None or lease.node.spec.kind == "openai"):
            body = edits.renamed(body, name)
        head = b"POST %s%s HTTP/1.1\r\n%s%scontent-length: %d\r\n\r\n" % (
            origin.prefix,
            request.path.encode(),
            origin.fields,
            request.fields,
            len(body),
        )
        return head, body

    def _quarantined(self) -> GatewayError | None:
        means = self._means
        seconds = means.settings.retries.quarantine
        return self._settler.quarantine.refusal(self._live.request, means.clock(), seconds)

    # What became of it.

    def _answered(self, attempt: Attempt) -> Reply:
        """The node answers in one piece: from here on nothing can be repeated."""
        if self._live.doubts:
            self._settler.answered(self._live, attempt.lease.node, wholly=False)
        headers = attempt.fields
        if attempt.complete:
            content = attempt.content
            self._settler.finished(self._live, attempt, content)
            return Reply(attempt.status, headers, content)
        rest = Rest(attempt, self._live, self._dialect, self._settler)
        return Reply(attempt.status, headers, attempt.content, rest)

    def _streams(self, attempt: Attempt, model: str) -> Rest:
        """The node streams its answer, and the first of it is here."""
        live, settings = self._live, self._means.settings
        if live.doubts:
            self._settler.answered(live, attempt.lease.node, wholly=False)
        if live.request.stream:
            live.record.ttft = self._means.clock() - live.request.received
        rest = Rest(attempt, live, self._dialect, self._settler)
        reader = READERS.get(live.request.path)
        if reader is None or settings.resume == "off" or live.request.slots != 1:
            return rest
        if attempt.lease.node.spec.kind == "llama.cpp":
            so_far = self._so_far or SoFar(reader, settings.limits.resume_bytes)
            so_far.add(attempt.content)
            attempt.keep = so_far.add
            rest.carrier = Carrier(self._means, live, so_far, model, attempt)
        return rest

    def _with_ids(self, attempt: Attempt, body: Body) -> Body:
        """The body that makes the node tell its tokens' ids, which don't go out."""
        path = self._live.request.path
        reader = READERS.get(path)
        if reader is None or not exact.fits(path, object_of(parsed(body))):
            return body
        self._so_far = SoFar(reader, self._means.settings.limits.resume_bytes)
        attempt.strip = exact.Stripper(path, self._so_far.know, attempt.strip)
        return edits.applied(body, exact.ASKED[path])

    async def _assembled(self, rest: Rest, model: str) -> Reply:
        """The plain answer that a stream makes. Raises: AttemptFailed."""
        live, most = self._live, self._means.settings.limits.response_bytes
        attempt = rest.attempt
        collected = assembly.Collected(attempt.content, most)
        try:
            while (chunk := await rest.next(collected.add)) != b"":
                if chunk is not None:
                    collected.add(chunk)
                if collected.full:
                    # It would be so on any node.
                    error = errors.node_failed(f"The answer is too long ({most} bytes).")
                    raise AttemptFailed(error, again=False)
            content = collected.answer(live.request.path, live.request.bodies[model])
        except Lost as lost:
            live.request.failed |= {attempt.lease.node.name}
            again = may_go_on(lost.failure) and self._may_leave(lost.failure, attempt)
            raise AttemptFailed(lost.error, again=again) from lost
        except NotAssembled as failure:
            # A server of another make may still answer plainly.
            live.request.assembled = False
            live.request.failed |= {attempt.lease.node.name}
            raise AttemptFailed(errors.node_failed(f"{failure}".capitalize() + ".")) from failure
        finally:
            rest.close()
        headers = [field for field in attempt.headers if field[0] != b"content-type"]
        also = self._means.settings.headers.to_clients
        return Reply(200, JSON + fields.to_client(headers, also), content)

    def _may_leave(self, failure: UpstreamError | None, attempt: Attempt) -> bool:
        """Whether what was to leave its node has another to go to. All else may wait for one."""
        if not isinstance(failure, Moved):
            return True
        return self._means.scheduler.elsewhere(self._live.request, attempt.lease.node)

    def _judged(self, attempt: Attempt) -> Reply:
        """An error of the node's: whose it is, and whether another node may know better."""
        status, content = attempt.status, attempt.content
        request, node = self._live.request, attempt.lease.node
        lease, fleet, now = attempt.lease, self._means.fleet, self._means.clock()
        attempt.end()
        judged = verdict.judge(status, content, request)
        self._settler.tell(self._live, attempt, "ok" if judged is Verdict.PASS else judged.value)
        answer = Reply(status, attempt.fields, content)
        if judged is Verdict.PASS:
            fleet.succeeded(node, now, lease.taken)
            return answer
        request.failed |= {node.name}
        if judged is Verdict.OVERFLOW:
            raise self._overflow(content, lease)
        if judged is Verdict.REFUSED:
            raise self._refused(status, content, node)
        if judged is Verdict.BUSY:
            if verdict.is_loading(status, content):
                fleet.loading(node)
            elif status == 429 or (status == 503 and node.limit is not None):
                # No failure: it is how such an endpoint shows its limit.
                fleet.overloaded(lease, now, verdict.retry_after(attempt.headers, time.time()))
            elif status in {502, 503, 504}:
                self._settler.doubt(self._live, lease, now, begun=False)
            raise AttemptFailed(errors.node_failed(f"Every node tried failed ({status})."))
        if status in self._erring or not self._means.scheduler.elsewhere(request, node):
            return answer
        self._erring.append(status)
        self._live.doubts += (Doubt(lease, counted=False),)
        raise AttemptFailed(errors.node_failed("Every node tried failed."), answer=answer)

    def _refused(self, status: int, content: bytes, node: Node) -> Exception:
        """This node can't serve it, now or ever: another one, if some node can."""
        request, means = self._live.request, self._means
        request.refused |= {node.name}
        if status == 501:
            request.unsupported |= {node.name}
            request.hint = verdict.message_of(content)
            if request.endpoint != "chat" or request.path in PLAINEST:
                means.fleet.refuses(node, request.endpoint, request.hint)
            if (error := means.scheduler.unsupported(request)) is not None:
                return error
        elif status == 401 and node.spec.kind == "openai" and not _names_account(request):
            # A llama.cpp server says so when it is asked what it is.
            means.fleet.locked(node, request.path, status)
        return AttemptFailed(
            errors.node_failed(f"No node could serve this request (the last said {status}).")
        )

    def _overflow(self, content: bytes, lease: Lease) -> Exception:
        """The prompt does not fit here: once more where there is more room, if there is."""
        request, node = self._live.request, lease.node
        tokens, context = verdict.overflow_sizes(content)
        context = context or node.context
        error = errors.context_length_exceeded(tokens, context, ROUTES[request.path].prompt)
        self._means.fleet.succeeded(node, self._means.clock(), lease.taken)
        if request.smallest_context or context is None:
            return error
        # For embeddings a batch must hold the text, and can be smaller than the context.
        request.smallest_context = max(tokens or 0, context + 1, (node.context or 0) + 1)
        if not self._means.scheduler.larger(request):
            return error
        return AttemptFailed(error)

    def _failed(self, attempt: Attempt, failure: UpstreamError) -> Exception:
        """An attempt ended without any reply that could be passed on."""
        request, node = self._live.request, attempt.lease.node
        self._settler.tell(self._live, attempt, failure.outcome)
        if isinstance(failure, Ended):
            return failure.error
        request.failed |= {node.name}
        if isinstance(failure, Moved):
            return AttemptFailed(failure.error, again=self._may_leave(failure, attempt))
        if isinstance(failure, Exhausted):
            return AttemptFailed(as_error(failure))
        out_of_time = isinstance(failure, Overdue) and failure.limit == "total"
        now = self._means.clock()
        reached = not isinstance(failure, ConnectFailed | ConnectTimedOut)
        if not reached:
            self._means.fleet.failed(node, now, attempt.lease.taken)
        elif not out_of_time or (request.deadline is None and attempt.lease.last_moved is None):
            self._settler.doubt(self._live, attempt.lease, now, begun=False)
        if isinstance(failure, ConnectFailed):
            self._means.fleet.unreachable(node, str(failure))
        if isinstance(failure, Reset):
            self._settler.quarantine.died(request, node.name, attempt.lease.taken, now)
            if (refusal := self._quarantined()) is not None:
                return refusal
        return AttemptFailed(as_error(failure), again=not out_of_time, reached=reached)
