"""How attempts end: reported to the scheduler, written into the request's record, and published.

What the scheduler and the fleet learn from it is their affair (`LeaseService.ended`, `settle`).
Requests that nodes die on are remembered for a while.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from gateway import errors
from gateway.api.outcome import LeaseTooOld, fault_of
from gateway.api.transcript import SplicePoint
from gateway.events import AttemptEnded, EventBus
from gateway.forward.in_flight import Attempt
from gateway.lease import (
    NOTHING_CHARGED,
    AttemptReport,
    Fault,
    KeyedHash,
    LeaseService,
    NodeError,
    RequestSize,
    Usage,
    UsageReport,
)
from gateway.request.body import identifying_pieces
from gateway.request.preparation import Request
from gateway.transport.errors import ConnectionReset

# `usage` stands within so many bytes of a response's beginning (embeddings) or end (the rest).
USAGE_EDGE_BYTES = 8 * 1024
# Outcomes of attempts without a response that the request's own end has brought about: the client
# left, its time was up, or somebody cancelled the request. The caller pays for them, and the
# operator for all others.
CALLERS_OUTCOMES = frozenset({"client_closed", "cancelled", "total_timeout"})
BYTES_PER_TOKEN = 4  # Bytes of a plain response that count as a token, where its node reports none
MOST_LOST_NODES = 2  # Nodes that may be lost over one request
MOST_QUARANTINED = 4096  # Request bodies that are remembered; the oldest is forgotten first


class Losses(NamedTuple):
    """The nodes that were lost during one request."""

    nodes: frozenset[str]
    last_at: float  # When a node was last lost during it; monotonic seconds


class Quarantine:
    """Requests that nodes died on, each known by a digest of its body, never by the body itself."""

    __slots__ = ("_keyed_hash", "_on_change", "entries")

    def __init__(self, keyed_hash: KeyedHash) -> None:
        self._keyed_hash = keyed_hash
        self.entries: OrderedDict[bytes, Losses] = OrderedDict()  # By the digest, the oldest first
        self._on_change: Callable[[bytes, Losses | None], None] = lambda *_: None

    def subscribe(self, on_change: Callable[[bytes, Losses | None], None]) -> None:
        """Tell of each loss, and (None) of each request that a node has completed after some."""
        self._on_change = on_change

    def __len__(self) -> int:
        return len(self.entries)

    def check(self, request: Request, now: float, seconds: float) -> None:
        """Raises: GatewayError, for `seconds` after nodes died on this request; 0: never."""
        entry = self.entries.get(self._digest(request)) if seconds else None
        if entry is None or len(entry.nodes) < MOST_LOST_NODES:
            return
        left = entry.last_at + seconds - now
        if left <= 0:
            del self.entries[self._digest(request)]
            return
        raise errors.node_failed(
            f"{len(entry.nodes)} nodes died while they served this very request, so it is "
            f"refused for {left:.0f} s more. A grammar or schema may be what they died on."
        )

    def node_lost(self, request: Request, node: str, leased_at: float, now: float) -> None:
        """The node was lost while it served this request under a lease taken at `leased_at`.

        Nodes that are lost together, such as those of one host, count as one.
        """
        key = self._digest(request)
        entry = self.entries.pop(key, None)
        if entry is None:
            entry = Losses(frozenset({node}), now)
        elif leased_at >= entry.last_at:
            entry = Losses(entry.nodes | {node}, now)
        self._keep(key, entry)
        self._on_change(key, entry)

    def clear(self, request: Request) -> None:
        """A node completed the request, so the others did not die on it."""
        key = self._digest(request)
        if self.entries.pop(key, None) is not None:
            self._on_change(key, None)

    def take(self, key: bytes, losses: Losses | None) -> None:
        """What another process has found out; None: a node has completed the request there."""
        entry = self.entries.pop(key, None)
        if losses is not None:
            # Of losses that neither knew of the other's, one counts: their node may be the same.
            knew_more = entry is not None and len(entry.nodes) > len(losses.nodes)
            self._keep(key, entry if entry is not None and knew_more else losses)

    def _keep(self, key: bytes, entry: Losses) -> None:
        self.entries[key] = entry
        if len(self.entries) > MOST_QUARANTINED:
            self.entries.popitem(last=False)

    def _digest(self, request: Request) -> bytes:
        parts: list[bytes | memoryview] = [request.path.encode()]
        for body in request.bodies.values():
            parts += (b" %d " % len(body), *identifying_pieces(body))
        return self._keyed_hash.digest(parts)


@dataclass(frozen=True, slots=True)
class AttemptEnds:
    """Ends attempts, each exactly once, and writes them into the records of their requests.

    Whatever nobody waits for is deferred: the event bus does it for many requests at once.
    """

    leases: LeaseService
    bus: EventBus
    clock: Callable[[], float]
    quarantine: Quarantine

    def response_completed(self, attempt: Attempt, sample: bytes) -> None:
        """A response was complete; `sample` holds its end, or all of it."""
        now = self._end(attempt, "ok")
        if self.quarantine.entries:
            self.quarantine.clear(attempt.request)
        size = len(sample)
        if not attempt.is_sse:
            attempt.drop_content()
            if size > 2 * USAGE_EDGE_BYTES:
                sample = sample[:USAGE_EDGE_BYTES] + sample[-USAGE_EDGE_BYTES:]
        self.bus.defer(self._account, attempt, "ok", now, sample, size)

    def response_aborted(self, attempt: Attempt, outcome: str) -> None:
        """A response that had begun failed, or its client left: the tokens so far count."""
        now = self._end(attempt, outcome, fault_of(outcome, request_took_time=True))
        if outcome == ConnectionReset.outcome:
            self.node_lost(attempt)
        # What fails now may have come to its end before.
        events = attempt.events
        sample = events.last_events if events is not None and events.ended else b""
        size = len(attempt.content)
        self.bus.defer(self._account, attempt, outcome, now, sample, size)

    def attempt_failed(
        self,
        attempt: Attempt,
        outcome: str,
        fault: Fault = Fault.NOBODY,
        *,
        error: NodeError | None = None,
        unreachable: str | None = None,
        resumes: bool = False,
    ) -> None:
        """An attempt is over without a response for the client, or with an error response.

        `error`: what that shows about the node. `unreachable`: why there was no connection.
        `resumes`: it was to resume a response, whose tokens are counted already.
        """
        attempt.close()
        charge = self.leases.ended(
            AttemptReport(
                attempt.lease.id,
                outcome,
                attempt.status,
                attempt.sent_at > 0,
                attempt.node_done,
                response_began=False,
                fault=fault,
                error=error,
                unreachable=unreachable,
                prompt_read=attempt.prompt_read(),
                resumes=resumes,
            )
        )
        if outcome in CALLERS_OUTCOMES and charge is not NOTHING_CHARGED:
            # The caller pays for an attempt that brought no response.
            self.bus.defer(attempt.in_flight.record.charge, charge, not resumes)
        self.bus.defer(self._publish, attempt, outcome, self.clock())

    def not_started(self, attempt: Attempt) -> None:
        """Nothing was sent, since the attempt's lease was too old: it does not count."""
        attempt.close()
        attempt.in_flight.record.attempt_withdrawn()
        self.leases.ended(
            AttemptReport(attempt.lease.id, LeaseTooOld.outcome, 0, False, True, False)
        )

    def discard(self, attempt: Attempt) -> None:
        """A plain response failed that was being assembled: the caller does not pay for it."""
        self.bus.defer(self._discard, attempt)

    def node_lost(self, attempt: Attempt) -> None:
        """The node died while it served the request."""
        name = attempt.lease.node.name
        if attempt.lease.node.query:
            # A router starts the server of a model again at once: each one lost counts.
            name = f"{name} {attempt.lease.id}"
        self.quarantine.node_lost(attempt.request, name, attempt.started_at, self.clock())

    def _end(self, attempt: Attempt, outcome: str, fault: Fault = Fault.NOBODY) -> float:
        """End an attempt whose response was the client's; returns the time."""
        attempt.close()
        # Positional arguments: this runs for each request.
        report = AttemptReport(
            attempt.lease.id, outcome, attempt.status, True, attempt.node_done, True
        )
        came_plain = attempt.lease.stream and not attempt.is_sse
        if came_plain or fault is not Fault.NOBODY:
            report = replace(report, fault=fault, came_plain=came_plain)
        self.leases.ended(report)
        return self.clock()

    # Deferred.

    def _account(
        self, attempt: Attempt, outcome: str, now: float, sample: bytes, size: int
    ) -> None:
        """Count the tokens that the node reports; else those of the events that were sent.

        One event holds about one token; the prompt's tokens are then the estimate. `size`: the
        bytes of a plain response, which are its tokens' estimate.
        """
        in_flight = attempt.in_flight
        request, record = in_flight.request.lease_request, in_flight.record
        opening = attempt.content if attempt.is_sse else b""
        if attempt.events is not None and (usage_filter := attempt.events.usage_filter) is not None:
            sample = usage_filter.event or sample
        usage = attempt.api.read_usage(sample, opening) if sample else None
        events, splice_point = attempt.content_events, attempt.splice_point
        is_reported = usage is not None
        if usage is None:
            prompt, cached = attempt.prompt_read() or (attempt.lease.reading.prompt_tokens, 0)
            if request.size.generates and not attempt.is_sse:
                events = _tokens_of_bytes(size, request.size)
            usage = Usage(prompt, cached, events)
        elif request.size.slots > 1 and attempt.lease.node.kind == "llama.cpp":
            usage = _of_all_answers(usage, request.size.slots, events if attempt.is_sse else None)
        whole = usage if splice_point is None else _of_whole_response(usage, splice_point)
        reported = whole if is_reported else None
        complete = outcome == "ok"
        charge = self.leases.settle(
            UsageReport(attempt.lease.id, usage, reported, events, complete), request
        )
        # A resumed attempt reports the tokens of all attempts before it: they count once.
        record.count_tokens(
            whole.prompt_tokens,
            whole.cached_tokens,
            whole.completion_tokens,
            replace=splice_point is not None,
        )
        record.charge(charge)
        self._publish(attempt, outcome, now)

    def _discard(self, attempt: Attempt) -> None:
        attempt.in_flight.record.discard_attempts()
        self.leases.discard(attempt.in_flight.request.id)

    def _publish(self, attempt: Attempt, outcome: str, now: float) -> None:
        self.bus.tell(
            AttemptEnded(
                attempt.in_flight.request.x_request_id,
                attempt.lease.node.name,
                outcome,
                now - attempt.started_at,
                attempt.status or None,
            )
        )


def _tokens_of_bytes(size: int, request: RequestSize) -> int:
    """About how many tokens a plain response of so many bytes holds."""
    tokens = size // BYTES_PER_TOKEN
    if request.max_tokens is None:
        return tokens
    return min(tokens, request.max_tokens * max(1, request.slots))


def _of_all_answers(usage: Usage, answers: int, events: int | None) -> Usage:
    """The tokens of all answers to one prompt (`n`), of which llama.cpp reports those of one.

    `events` of a stream: about one for each token of any answer, and two more for each answer.
    None: a plain response, whose first answer is taken for an ordinary one.
    """
    one = usage.completion_tokens
    completion = one * answers if events is None else max(one, events - 2 * answers)
    return Usage(usage.prompt_tokens, usage.cached_tokens, completion, usage.timings)


def _of_whole_response(usage: Usage, splice_point: SplicePoint) -> Usage:
    """The tokens of the client's own prompt and of the whole response, which was resumed."""
    prompt = splice_point.prompt_tokens
    completion = splice_point.prefix_tokens + usage.completion_tokens
    return Usage(prompt, min(usage.cached_tokens, prompt), completion)
