"""Carries one stream on when its node has failed: another lease, another node, the same answer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from gateway import errors
from gateway.errors import GatewayError
from gateway.events import StreamResumed
from gateway.fleet.facts import Facts
from gateway.fleet.lease import Lease
from gateway.relay import assembly
from gateway.relay.attempt import Attempt
from gateway.relay.continuation import bounds
from gateway.relay.continuation.asking import Questions
from gateway.relay.continuation.joined import Joined
from gateway.relay.continuation.onward import Onward, Unsound, Wish, onward
from gateway.relay.continuation.said import Said, SoFar
from gateway.relay.continuation.seam import Mismatch
from gateway.relay.large import PARSED, Body, parsed
from gateway.relay.live import Live
from gateway.relay.routes import ROUTES
from gateway.relay.values import Value, object_of
from gateway.relay.verdict import is_overflow
from gateway.request import Request
from gateway.transport.errors import (
    ConnectFailed,
    ConnectTimedOut,
    Errored,
    Overdue,
    Reset,
    UpstreamError,
)
from gateway.transport.taskless import in_task

if TYPE_CHECKING:
    from gateway.relay.journey import Means

TOO_LARGE = "the request is too large to be gone on with"
MOST = 2
"""Continuations of one answer."""


@dataclass(slots=True)
class Carried:
    """How an answer goes on: `first` goes out next; no attempt: it is the end."""

    first: bytes
    attempt: Attempt | None = None
    joined: Joined | None = None


class Refused(UpstreamError):  # noqa: N818 - beside `Errored`
    """The next node does not take this request; `status` tells why."""

    outcome = "refused"

    def __init__(self, status: int) -> None:
        super().__init__(f"The node answered with status {status}")
        self.status = status


class Carrier:
    """Of one request. It keeps what went out, and begins at most `MOST` continuations."""

    __slots__ = ("_kind", "_left", "_live", "_means", "_model", "_refusal", "_tried", "so_far")

    def __init__(self, means: Means, live: Live, so_far: SoFar, model: str, first: Attempt) -> None:
        self._means = means
        self._live = live
        self._model = model
        self._kind = first.lease.node.facts.kind()
        self._left = MOST
        self._tried: set[str] = set()
        """Nodes that have failed this answer."""
        self._refusal: GatewayError | None = None
        self.so_far = so_far

    async def carry_on(self, failed: Attempt) -> Carried | None:
        """Another node's continuation; None: there is none.

        Raises: GatewayError, when it is ended or refused.
        """
        await in_task()
        node = failed.lease.node.name
        self._tried.add(node)
        carried, why = await self._carried()
        goes_on = carried.attempt.lease.node.name if carried and carried.attempt else None
        if carried is None or goes_on:
            said = self.so_far.said()
            self._means.bus.publish(
                StreamResumed(self._live.request.tag, node, goes_on, said.tokens, why)
            )
        if self._refusal is not None:
            raise self._refusal
        return carried

    async def _carried(self) -> tuple[Carried | None, str | None]:
        """The continuation, or why there is none. Raises: GatewayError, when ended."""
        live = self._live
        said = self.so_far.said()
        asked: Body = live.request.bodies[self._model]
        body = object_of(parsed(asked))
        if not live.request.stream:
            body |= assembly.asked(live.request.path)
        why = TOO_LARGE if len(asked) > PARSED else bounds.why_not(body, said)
        wish = Wish(live.request.path, body, said)
        while why is None and self._left:
            if live.ended_by is not None:
                raise live.ended_by
            self._refusal = self._quarantined()
            if self._refusal is not None:
                return None, "nodes died on this very request"
            request = self._request(said)
            try:
                lease, _ = await self._means.scheduler.lease(request)
            except GatewayError as error:
                if live.ended_by is not None:
                    raise
                return None, f"no node could: {error.code}"
            try:
                carried = await self._on(lease, request, wish)
            except Unsound as error:
                why = str(error)
            except Mismatch:
                # The same once more, from exactly what was sent.
                wish.step_back = False
            except Refused as refusal:
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
        return means.settler.quarantine.refusal(self._live.request, means.clock(), seconds)

    def _failed(self, lease: Lease) -> None:
        self._left -= 1
        self._tried.add(lease.node.name)

    def _refused(self, refusal: Refused, wish: Wish, lease: Lease) -> None:
        """Perhaps the node's template refuses a message that is begun: then without it."""
        if refusal.status == 400 and not wish.raw and "messages" in wish.body:
            wish.raw = True
        else:
            self._failed(lease)

    def _request(self, said: Said) -> Request:
        """What the scheduler is asked for: the same model on a node of the same kind."""
        request, fleet = self._live.request, self._means.fleet
        others = {
            node.name
            for node in fleet.nodes.values()
            if node.name in self._tried or node.facts.kind() != self._kind
        }
        tokens = request.max_tokens
        return dataclasses.replace(
            request,
            candidates=(self._model,),
            native=True,
            stream=True,
            refused=others,
            failed=set(self._tried),
            prompt_tokens=request.prompt_tokens + said.tokens,
            text=request.text + len(said.text) + len(said.thought),
            max_tokens=None if tokens is None else max(1, tokens - said.tokens),
            expected=None,
        )

    async def _on(self, lease: Lease, request: Request, wish: Wish) -> Carried | None:
        """The continuation under this lease; None: its node is of another kind.

        Raises: UpstreamError, Unsound, Mismatch, GatewayError.
        """
        live, means = self._live, self._means
        record = live.record
        lease.stream = True
        dialect = ROUTES[request.path].dialect
        attempt = Attempt(lease, request, dialect, means.settings, means.watch, means.clock)
        live.trying(attempt)
        outcome = "client_closed"
        try:
            questions = Questions(lease, attempt.patience)
            if not await self._is_same(questions):
                outcome = "other_kind"
                return None
            way = await onward(questions.post, wish)
            if way.ending is not None:
                outcome = "ok"
                return Carried(way.ending)
            record.attempts += 1
            record.node = lease.node.name
            record.tier = lease.node.spec.tier
            record.fallback = lease.fallback
            carried = await self._opened(attempt, way)
            outcome = ""
            return carried
        except Mismatch:
            outcome = "mismatch"
            raise
        except Unsound:
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
                attempt.end()
                means.settler.tell(live, attempt, outcome)

    async def _is_same(self, questions: Questions) -> bool:
        """Whether the node is, now, what the first one was: it may have been started anew."""
        facts = Facts()
        facts.read_props(await questions.get("/props"))
        return facts.kind() == self._kind

    async def _opened(self, attempt: Attempt, way: Onward) -> Carried:
        """The continuation, when the first of it that is new has come."""
        assert way.body is not None
        attempt.dialect = ROUTES[way.path].dialect
        await attempt.open(*self._encoded(attempt.lease, way.path, way.body))
        if attempt.status >= 300:
            if is_overflow(attempt.status, attempt.content, attempt.request):
                raise Unsound("no node has room for what was said")
            raise Refused(attempt.status)
        if not attempt.streams:
            raise Errored("The node did not stream its answer")
        attempt.seam = way.seam
        joined = Joined(way.joiner)
        out = joined.feed(attempt.content)
        while not way.joiner.caught_up:
            chunk = await attempt.read()
            if not chunk:
                raise Mismatch
            out += joined.feed(chunk)
        return Carried(out, attempt, joined)

    def _encoded(self, lease: Lease, path: str, body: Value) -> tuple[bytes, bytes]:
        origin, request = lease.upstream.pool.origin, self._live.request
        if "model" in body:
            body = body | {"model": lease.node.serves(self._model) or self._model}
        data = msgspec.json.encode(body)
        head = b"POST %s%s HTTP/1.1\r\n%s%scontent-length: %d\r\n\r\n" % (
            origin.prefix, path.encode(), origin.fields, request.fields, len(data)
        )  # fmt: skip
        return head, data

    def _blame(self, attempt: Attempt, failure: UpstreamError) -> None:
        if isinstance(failure, Refused) or failure.outcome in _BLAMELESS:
            return
        if _out_of_time(failure) and self._live.request.deadline is not None:
            return  # its client would not wait longer
        lease, fleet, now = attempt.lease, self._means.fleet, self._means.clock()
        node = lease.node
        if isinstance(failure, ConnectFailed | ConnectTimedOut):
            fleet.failed(node, now, lease.taken)
        else:
            self._means.settler.doubt(self._live, lease, now, begun=True)
        if failure.outcome == Reset.outcome:
            self._means.settler.quarantine.died(self._live.request, node.name, lease.taken, now)
        if isinstance(failure, ConnectFailed):
            fleet.unreachable(node, str(failure))


_BLAMELESS = frozenset({"cancelled", "moved", "exhausted", "request_error"})


def _out_of_time(failure: UpstreamError) -> bool:
    return isinstance(failure, Overdue) and failure.limit == "total"
