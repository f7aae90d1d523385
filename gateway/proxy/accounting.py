"""The end of each attempt: what it cost, what it taught the scheduler, which node is to blame."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway import errors
from gateway.errors import GatewayError
from gateway.events import AttemptEnded, EventBus, RequestFinished
from gateway.fleet.fleet import Fleet
from gateway.fleet.node import Lease, Node
from gateway.proxy.attempt import Attempt
from gateway.proxy.in_flight import InFlightRequest, UnattributedFailure
from gateway.proxy.request import Request
from gateway.proxy.splice import SplicePoint
from gateway.proxy.usage import Usage
from gateway.scheduling.budget import cost_of
from gateway.scheduling.demand_model import ReportedTokens
from gateway.scheduling.scheduler import Scheduler
from gateway.transport.errors import ConnectionReset

NEUTRAL_OUTCOMES = frozenset({"client_closed", "cancelled"})
"""Outcomes that tell nothing about the node: the client left, or the gateway ended the request."""

_BLAMELESS_STREAM_OUTCOMES = NEUTRAL_OUTCOMES | {"moved", "total_timeout", "request_error"}
"""Outcomes of a begun response that blame no node: also a drain, a response that took all the time
the request had, and an error that every node would report."""

BLAMELESS_RESUMPTION_OUTCOMES = frozenset({"cancelled", "moved", "exhausted", "request_error"})
"""Outcomes of a resumption that blame no node."""

USAGE_EDGE_BYTES = 8 * 1024
"""`usage` stands within so many bytes of a response's beginning (embeddings) or end (the rest)."""

SPEED_SAMPLE_INTERVAL = 0.01
"""Seconds. Of responses that follow each other faster on one node, only the first is a sample of
its speed and, where nothing was generated, of the bytes of text in a token."""

MOST_LOST_NODES = 2
"""Nodes that may be lost over one request."""

MOST_QUARANTINED = 4096
"""Request bodies that are remembered; the oldest is forgotten first."""


@dataclass(slots=True)
class QuarantineEntry:
    """A request during which a node was lost."""

    lost_nodes: set[str] = field(default_factory=set)
    last_lost: float = 0.0
    """When a node was last lost during it; monotonic seconds."""

    def add(self, node: str, now: float) -> None:
        """A node was lost during the request."""
        self.lost_nodes.add(node)
        self.last_lost = now


class Quarantine:
    """Requests that nodes died on, each known by a hash of its body, never by the body itself."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: OrderedDict[int, QuarantineEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def rejection(self, request: Request, now: float, seconds: float) -> GatewayError | None:
        """Why this request may go to no node; None: it may.

        A request is rejected for `seconds` after the last loss; 0: none is ever rejected.
        """
        entry = self._entries.get(_body_hash(request)) if self._entries and seconds else None
        if entry is None or len(entry.lost_nodes) < MOST_LOST_NODES:
            return None
        left = entry.last_lost + seconds - now
        if left <= 0:
            del self._entries[_body_hash(request)]
            return None
        return errors.node_failed(
            f"{len(entry.lost_nodes)} nodes died while they served this very request, so it is "
            f"refused for {left:.0f} s more. A grammar or schema may be what they died on."
        )

    def node_lost(self, request: Request, node: str, leased_at: float, now: float) -> None:
        """The node was lost while it served this request under a lease taken at `leased_at`.

        Nodes that are lost together, such as those of one host, count as one.
        """
        key = _body_hash(request)
        entry = self._entries.setdefault(key, QuarantineEntry())
        self._entries.move_to_end(key)
        if entry.lost_nodes and leased_at < entry.last_lost:
            return
        entry.add(node, now)
        if len(self._entries) > MOST_QUARANTINED:
            self._entries.popitem(last=False)

    def clear(self, request: Request) -> None:
        """A node completed the request, so the others did not die on it."""
        if self._entries:
            self._entries.pop(_body_hash(request), None)


def _body_hash(request: Request) -> int:
    return hash((request.path, *request.bodies.values()))


@dataclass(frozen=True, slots=True)
class Accounting:
    """Ends attempts, each exactly once, and writes them into the records of their requests.

    Whatever nobody waits for is deferred: the event bus does it for many requests at once.
    """

    fleet: Fleet
    scheduler: Scheduler
    bus: EventBus
    clock: Callable[[], float]
    quarantine: Quarantine = field(default_factory=Quarantine)
    _sampled_at: dict[str, float] = field(default_factory=dict)
    """When a response was last a sample of each node's speed."""

    def response_completed(
        self, in_flight: InFlightRequest, attempt: Attempt, sample: bytes
    ) -> None:
        """A response was complete; `sample` holds its end, or all of it."""
        now = self._release(in_flight, attempt)
        lease = attempt.lease
        self.fleet.request_succeeded(lease.node, now, lease.taken_at)
        if in_flight.unattributed_failures:
            self.attribute_failures(in_flight, lease.node, complete=True)
        self.quarantine.clear(in_flight.request)
        if not attempt.is_sse:
            attempt.drop_content()
            if len(sample) > 2 * USAGE_EDGE_BYTES:
                sample = sample[:USAGE_EDGE_BYTES] + sample[-USAGE_EDGE_BYTES:]
        self.bus.defer(self._account, in_flight, attempt, "ok", now, sample)

    def response_aborted(self, in_flight: InFlightRequest, attempt: Attempt, outcome: str) -> None:
        """A response that had begun failed, or its client left.

        The tokens of a stream that were sent count; those of a response to be assembled do not.
        """
        now = self._release(in_flight, attempt)
        if outcome not in _BLAMELESS_STREAM_OUTCOMES:
            self.add_unattributed_failure(in_flight, attempt.lease, now, response_started=True)
        if outcome == ConnectionReset.outcome:
            self.node_lost(in_flight, attempt.lease, now)
        self.bus.defer(self._account, in_flight, attempt, outcome, now)

    def attempt_failed(self, in_flight: InFlightRequest, attempt: Attempt, outcome: str) -> None:
        """An attempt is over without a response for the client."""
        in_flight.end_attempt()
        self.scheduler.demand_model.abandoned(attempt.lease, refund=outcome not in NEUTRAL_OUTCOMES)
        now = self.clock()
        if attempt.lease.reservation is not None:
            _charge_failed(in_flight, attempt, outcome, now)
        self.bus.defer(self._publish, in_flight, attempt, outcome, now)

    # Who is to blame.

    def add_unattributed_failure(
        self, in_flight: InFlightRequest, lease: Lease, now: float, *, response_started: bool
    ) -> None:
        """The request failed under this lease; the node or the request itself is to blame.

        A request can make a node too slow, kill it, or have it send an unusable response, and would
        do so on every node. So the node is blamed when another node has answered the same request,
        or when requests of other callers fail there too (`Circuit.failed`).
        """
        caller = in_flight.request.caller.id
        self.fleet.request_failed(
            lease.node, now, lease.taken_at, caller=caller, node_at_fault=False
        )
        in_flight.add_unattributed_failure(UnattributedFailure(lease, response_started))

    def attribute_failures(self, in_flight: InFlightRequest, node: Node, *, complete: bool) -> None:
        """`node` answers a request that others failed: blame those. `complete`: to its end.

        Nodes that failed after their response had begun are blamed for a complete one only.
        """
        now, caller = self.clock(), in_flight.request.caller.id
        left = []
        for failure in in_flight.unattributed_failures:
            if failure.response_started and not complete:
                left.append(failure)
                continue
            lease, counted = failure.lease, failure.counted
            if lease.node is not node:
                self.fleet.request_failed(
                    lease.node, now, lease.taken_at, caller=caller, already_counted=counted
                )
        in_flight.keep_unattributed_failures(tuple(left))

    def node_lost(self, in_flight: InFlightRequest, lease: Lease, now: float) -> None:
        """The node died while it served the request."""
        self.quarantine.node_lost(in_flight.request, lease.node.name, lease.taken_at, now)

    def rejection(self, in_flight: InFlightRequest, seconds: float) -> GatewayError | None:
        """Why the request may go to no node, since others died on it within `seconds`."""
        if not self.quarantine:
            return None
        return self.quarantine.rejection(in_flight.request, self.clock(), seconds)

    # What it cost and taught.

    def _release(self, in_flight: InFlightRequest, attempt: Attempt) -> float:
        """End the attempt now; returns the time."""
        attempt.release()
        in_flight.end_attempt()
        lease_request = in_flight.request.lease_request
        if lease_request.prompt_key is not None:
            self.scheduler.demand_model.answer_ended(lease_request)
        now = self.clock()
        # Requests without a slot, such as token counts, don't show how fast slots come free.
        if attempt.lease.slots:
            self.scheduler.completion_rate.completed(now)
        return now

    def _account(
        self,
        in_flight: InFlightRequest,
        attempt: Attempt,
        outcome: str,
        now: float,
        sample: bytes = b"",
    ) -> None:
        """Count the tokens that the node reports; else those of the events that were sent.

        One event holds about one token; the prompt's tokens are then the estimate.
        """
        lease, request = attempt.lease, in_flight.request.lease_request
        opening = attempt.content if attempt.is_sse else b""
        usage = attempt.api.read_usage(sample, opening) if sample else None
        reported: ReportedTokens | None = None
        is_sample = False
        if usage is None:
            usage = Usage(request.prompt_tokens, completion_tokens=attempt.event_count)
        else:
            reported = _reported_tokens(usage, attempt.splice_point)
            name = lease.node.name
            is_sample = (
                outcome == "ok" and now - self._sampled_at.get(name, -1.0) >= SPEED_SAMPLE_INTERVAL
            )
            if is_sample:
                self._sampled_at[name] = now
                self._learn_speed(lease, usage)
        cost = _cost(lease, usage, now)
        self.scheduler.demand_model.learn(
            lease,
            request,
            reported,
            attempt.event_count,
            complete=outcome == "ok",
            learn_sizes=request.generates or is_sample,
        )
        if outcome == "ok" and lease.slots and lease.node.concurrency_limit is not None:
            self.fleet.adjust_limit(
                lease, usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens
            )
        if outcome == "ok" or in_flight.request.stream:
            _record_tokens(in_flight.record, usage, attempt.splice_point)
        if cost:
            in_flight.record.charge(cost)
        if lease.reservation is not None:
            lease.reservation.settle(cost, happened=True, now=now)
        self._publish(in_flight, attempt, outcome, now)

    def _learn_speed(self, lease: Lease, usage: Usage) -> None:
        if usage.timings is not None:
            self.fleet.learn_timings(lease.node, usage.timings, lease)
        elif lease.slots:
            self.fleet.learn_clocked(
                lease, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
            )
        self.scheduler.fleet_sync.speed_learnt(lease.node)

    def _publish(
        self, in_flight: InFlightRequest, attempt: Attempt, outcome: str, now: float
    ) -> None:
        self.bus.publish(
            AttemptEnded(
                in_flight.request.x_request_id,
                attempt.lease.node.name,
                outcome,
                now - attempt.started_at,
                attempt.status or None,
            )
        )


def _charge_failed(in_flight: InFlightRequest, attempt: Attempt, outcome: str, now: float) -> None:
    """Settle the reservation of an attempt without a response.

    A prompt that was sent counts as read, unless an error response refused it.
    """
    lease = attempt.lease
    assert lease.reservation is not None
    worked = attempt.sent_at > 0 and attempt.status < 300
    cost = (
        _cost(lease, Usage(in_flight.request.lease_request.prompt_tokens), now) if worked else 0.0
    )
    lease.reservation.settle(cost, happened=worked and outcome in NEUTRAL_OUTCOMES, now=now)


def _cost(lease: Lease, usage: Usage, now: float) -> float:
    spec = lease.node.spec
    if not spec.cost_per_hour and spec.cost_per_million_tokens is None:
        return 0.0
    return cost_of(
        spec,
        lease.node.slots_total,
        prompt=usage.prompt_tokens,
        completion=usage.completion_tokens,
        slots=lease.slots,
        seconds=now - lease.taken_at,
    )


def _reported_tokens(usage: Usage, splice_point: SplicePoint | None) -> ReportedTokens:
    """The tokens of the client's own prompt and of the whole response, resumed or not."""
    if splice_point is None:
        return usage
    prompt = splice_point.prompt_tokens
    completion = splice_point.prefix_tokens + usage.completion_tokens
    return ReportedTokens(prompt, min(usage.cached_tokens, prompt), completion)


def _record_tokens(record: RequestFinished, usage: Usage, splice_point: SplicePoint | None) -> None:
    """A resumed attempt reports the tokens of all attempts before it: they count once."""
    if splice_point is None:
        record.count_tokens(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        return
    record.count_tokens(
        splice_point.prompt_tokens,
        min(usage.cached_tokens, splice_point.prompt_tokens),
        splice_point.prefix_tokens + usage.completion_tokens,
        replace=True,
    )
