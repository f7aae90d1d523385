"""What an attempt came to: who is told, what it cost and taught. Also of one cut short."""

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
from gateway.proxy.splice import SplicePoint
from gateway.proxy.usage import Usage
from gateway.request import Request
from gateway.scheduling.budget import cost_of
from gateway.scheduling.demand_model import ReportedTokens
from gateway.scheduling.scheduler import Scheduler
from gateway.transport.errors import ConnectionReset

NEUTRAL_OUTCOMES = frozenset({"client_closed", "cancelled"})
"""Outcomes that say nothing about the node: the client left, or we ended it."""

_SAY_NOTHING = frozenset({"moved", "total_timeout", "request_error"})
"""Likewise: it was taken away from the node, was so long an answer that its time was over, or is
nothing that any node would answer."""

USAGE_EDGE_BYTES = 8 * 1024
"""`usage` stands within so many bytes of an answer's beginning (embeddings) or end (the rest)."""


SPEED_SAMPLE_INTERVAL = 0.01
"""Seconds: answers that follow each other faster on one node teach nothing new of its speed, nor,
where nothing was written, of how many bytes of text a token is."""


def _charge_dropped(live: InFlightRequest, attempt: Attempt, outcome: str, now: float) -> None:
    """What an attempt that came to nothing has spent of its budget.

    Once a prompt was sent, only an answer that refuses it says that it was not read.
    """
    lease = attempt.lease
    assert lease.reservation is not None
    worked = attempt.sent_at > 0 and attempt.status < 300
    cost = _cost(lease, Usage(live.request.prompt_tokens), now) if worked else 0.0
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


def _told(usage: Usage, seam: SplicePoint | None) -> ReportedTokens:
    """What the client's own question and the whole answer came to."""
    if seam is None:
        return usage
    prompt = seam.prompt_tokens
    return ReportedTokens(
        prompt, min(usage.cached_tokens, prompt), seam.prefix_tokens + usage.completion_tokens
    )


def _write(record: RequestFinished, usage: Usage, seam: SplicePoint | None) -> None:
    """A continuation knows the tokens of all that went before it: they count once."""
    if seam is not None:
        record.prompt_tokens = record.cached_tokens = record.completion_tokens = 0
        usage = Usage(
            seam.prompt_tokens,
            min(usage.cached_tokens, seam.prompt_tokens),
            usage.completion_tokens,
        )
        usage.completion_tokens += seam.prefix_tokens
    record.prompt_tokens += usage.prompt_tokens
    record.cached_tokens += usage.cached_tokens
    record.completion_tokens += usage.completion_tokens


MOST_LOST_NODES = 2
"""Nodes that may be lost over one request."""

MOST_QUARANTINED = 4096
"""Bodies that are remembered; the oldest is forgotten first."""


@dataclass(slots=True)
class QuarantineEntry:
    """A request that a node has died on."""

    lost_nodes: set[str] = field(default_factory=set)
    last_lost: float = 0.0
    """When a node last died on it; monotonic seconds."""


class Quarantine:
    """Remembers them by a hash of their body, which is never kept itself."""

    __slots__ = ("_suspects",)

    def __init__(self) -> None:
        self._suspects: OrderedDict[int, QuarantineEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._suspects)

    def rejection(self, request: Request, now: float, seconds: float) -> GatewayError | None:
        """Why this request goes to no node any more; None: it may.

        Suspicion lasts `seconds` from the last death; 0: nothing is refused.
        """
        suspect = self._suspects.get(_mark(request)) if self._suspects and seconds else None
        if suspect is None or len(suspect.lost_nodes) < MOST_LOST_NODES:
            return None
        left = suspect.last_lost + seconds - now
        if left <= 0:
            del self._suspects[_mark(request)]
            return None
        return errors.node_failed(
            f"{len(suspect.lost_nodes)} nodes died while they served this very request, so it is "
            f"refused for {left:.0f} s more. A grammar or schema may be what they died on."
        )

    def node_lost(self, request: Request, node: str, leased_at: float, now: float) -> None:
        """The node was lost while it served this request, which it had since `began`.

        Nodes that are lost together, as those of one host, count as one.
        """
        mark = _mark(request)
        suspect = self._suspects.setdefault(mark, QuarantineEntry())
        self._suspects.move_to_end(mark)
        if suspect.lost_nodes and leased_at < suspect.last_lost:
            return
        suspect.lost_nodes.add(node)
        suspect.last_lost = now
        if len(self._suspects) > MOST_QUARANTINED:
            self._suspects.popitem(last=False)

    def clear(self, request: Request) -> None:
        """A node has answered it: it is not what the others died on."""
        if self._suspects:
            self._suspects.pop(_mark(request), None)


@dataclass(frozen=True, slots=True)
class Accounting:
    """Ends attempts, each exactly once, and writes them into the records of their requests."""

    fleet: Fleet
    scheduler: Scheduler
    bus: EventBus
    clock: Callable[[], float]
    quarantine: Quarantine = field(default_factory=Quarantine)
    _taught: dict[str, float] = field(default_factory=dict)
    """When each node's speed was last learnt from."""

    def response_completed(
        self, in_flight: InFlightRequest, attempt: Attempt, sample: bytes
    ) -> None:
        """A whole answer; `sample` holds its end, or all of it."""
        now = self._ended(in_flight, attempt)
        lease = attempt.lease
        self.fleet.request_succeeded(lease.node, now, lease.taken_at)
        if in_flight.unattributed_failures:
            self.attribute_failures(in_flight, lease.node, complete=True)
        self.quarantine.clear(in_flight.request)
        if not attempt.is_sse:
            attempt.content = b""  # it is on its way, and need not wait for the accounts
            if len(sample) > 2 * USAGE_EDGE_BYTES:
                sample = sample[:USAGE_EDGE_BYTES] + sample[-USAGE_EDGE_BYTES:]
        self.bus.defer(self._account, in_flight, attempt, "ok", now, sample)

    def response_aborted(self, in_flight: InFlightRequest, attempt: Attempt, outcome: str) -> None:
        """A reply that had begun came to a bad end, or its client left.

        What went out of a stream counts; of an answer that is put together nothing has.
        """
        now = self._ended(in_flight, attempt)
        if outcome not in NEUTRAL_OUTCOMES and outcome not in _SAY_NOTHING:
            self.add_unattributed_failure(in_flight, attempt.lease, now, response_started=True)
        if outcome == ConnectionReset.outcome:
            self.quarantine.node_lost(
                in_flight.request, attempt.lease.node.name, attempt.lease.taken_at, now
            )
        self.bus.defer(self._account, in_flight, attempt, outcome, now)

    def add_unattributed_failure(
        self, in_flight: InFlightRequest, lease: Lease, now: float, *, response_started: bool
    ) -> None:
        """The request failed under this lease; who is to blame is to be seen.

        What a client asks for can make a node too slow, end it, or have it say what can't be
        passed on, and would do so on every node. So the node is blamed when another one has
        answered the same request, or when others' requests fail there as well
        (`Circuit.failed`). `begun`: the answer had begun.
        """
        caller = in_flight.request.caller.id
        self.fleet.request_failed(
            lease.node, now, lease.taken_at, caller=caller, node_at_fault=False
        )
        in_flight.unattributed_failures += (UnattributedFailure(lease, response_started),)

    def attribute_failures(self, in_flight: InFlightRequest, node: Node, *, complete: bool) -> None:
        """This node answers what others have failed: `wholly`, or as far as its first content."""
        now, caller = self.clock(), in_flight.request.caller.id
        left = []
        for doubt in in_flight.unattributed_failures:
            if doubt.response_started and not complete:
                left.append(doubt)
                continue
            lease, counted = doubt.lease, doubt.counted
            if lease.node is not node:
                self.fleet.request_failed(
                    lease.node, now, lease.taken_at, caller=caller, already_counted=counted
                )
        in_flight.unattributed_failures = tuple(left)

    def attempt_failed(self, in_flight: InFlightRequest, attempt: Attempt, outcome: str) -> None:
        """An attempt is over that came to nothing."""
        in_flight.attempt = None
        self.scheduler.demand_model.abandoned(
            attempt.lease, in_flight.request, refund=outcome not in NEUTRAL_OUTCOMES
        )
        now = self.clock()
        if attempt.lease.reservation is not None:
            _charge_dropped(in_flight, attempt, outcome, now)
        self.bus.defer(self._tell, in_flight, attempt, outcome, now)

    def _ended(self, live: InFlightRequest, attempt: Attempt) -> float:
        attempt.release()
        live.attempt = None
        if live.request.prompt_key is not None:
            self.scheduler.demand_model.answer_ended(live.request)
        now = self.clock()
        # Counting tokens, say, tells nothing of how fast slots come free.
        if attempt.lease.slots:
            self.scheduler.completion_rate.completed(now)
        return now

    def _account(
        self, live: InFlightRequest, attempt: Attempt, outcome: str, now: float, sample: bytes = b""
    ) -> None:
        """Read what the node says of its answer, else go by what went out.

        One event holds about one token; the prompt's tokens are the estimate.
        """
        lease, request = attempt.lease, live.request
        opening = attempt.content if attempt.is_sse else b""
        usage = attempt.api.read_usage(sample, opening) if sample else None
        told: ReportedTokens | None = None
        teaches = False
        if usage is None:
            usage = Usage(request.prompt_tokens, completion_tokens=attempt.event_count)
        else:
            told = _told(usage, attempt.splice_point)
            name = lease.node.name
            teaches = (
                outcome == "ok" and now - self._taught.get(name, -1.0) >= SPEED_SAMPLE_INTERVAL
            )
            if teaches:
                self._taught[name] = now
                self._learn(lease, usage)
        cost = _cost(lease, usage, now)
        self.scheduler.demand_model.learn(
            lease,
            request,
            told,
            attempt.event_count,
            complete=outcome == "ok",
            learn_sizes=request.generates or teaches,
        )
        if outcome == "ok" and lease.slots and lease.node.concurrency_limit is not None:
            self.fleet.adjust_limit(
                lease, usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens
            )
        if outcome == "ok" or request.stream:
            _write(live.record, usage, attempt.splice_point)
        live.record.cost += cost
        if lease.reservation is not None:
            lease.reservation.settle(cost, happened=True, now=now)
        self._tell(live, attempt, outcome, now)

    def _learn(self, lease: Lease, usage: Usage) -> None:
        """What the answer says of its node's speed."""
        if usage.timings is not None:
            self.fleet.learn_timings(lease.node, usage.timings, lease)
        elif lease.slots:
            self.fleet.learn_clocked(
                lease, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
            )
        self.scheduler.fleet_sync.node_changed(lease.node)

    def _tell(self, live: InFlightRequest, attempt: Attempt, outcome: str, now: float) -> None:
        self.bus.publish(
            AttemptEnded(
                live.request.x_request_id,
                attempt.lease.node.name,
                outcome,
                now - attempt.started_at,
                attempt.status or None,
            )
        )


def _mark(request: Request) -> int:
    return hash((request.path, *request.bodies.values()))
