"""The lease interface in one process: what the proxy asks and reports, as direct calls.

Most of it is what the end of a lease teaches the fleet and the scheduler: whether the node may be
given more, how fast it is, what the request took, and who pays for it.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.config.keys import has_labels
from gateway.errors import GatewayError
from gateway.lease import (
    NOTHING_CHARGED,
    AttemptCharge,
    AttemptReport,
    Fault,
    GrantedLease,
    LeaseRequest,
    NodeQuestion,
    Tried,
    Usage,
    UsageReport,
)
from gateway.nodes.fleet import Fleet
from gateway.nodes.health import another_prefills
from gateway.nodes.lifecycle import ProbeAnswer
from gateway.nodes.node import Lease, Node
from gateway.nodes.prices import cost_of
from gateway.nodes.server_properties import ServerProperties
from gateway.nodes.speed import sample_from_clock, sample_from_timings
from gateway.schedule.candidates import nodes_of
from gateway.schedule.scheduler import LeaseRecord, Scheduler

# Outcomes that tell nothing about the node: the client left, or the gateway ended the request.
NEUTRAL_OUTCOMES = frozenset({"client_closed", "cancelled"})
# Seconds. Of responses that follow each other faster on one node, only the first is a sample of its
# speed and, where nothing was generated, of the bytes of text in a token.
SPEED_SAMPLE_INTERVAL = 0.01
# Requests whose failures are remembered until it is known who was to blame; the oldest is forgotten
# first.
MOST_FAILED_REQUESTS = 4096


class UnattributedFailure(NamedTuple):
    """A failure for which either the node or the request itself is to blame."""

    node: Node
    leased_at: float
    response_began: bool
    counted: bool = True  # whether the circuit of the node has counted it already


@dataclass(slots=True, eq=False)
class LocalLeaseService:
    """The `LeaseService` of a scheduler in the same process."""

    scheduler: Scheduler
    fleet: Fleet
    most_failed_requests: int = MOST_FAILED_REQUESTS
    may_start: Callable[[int], bool] = lambda _: True
    """Whether the request of a lease may be written now: not once its process may not lead."""
    _sampled_at: dict[str, float] = field(default_factory=dict)
    """When a response was last a sample of each node's speed."""
    _failures: OrderedDict[str, tuple[UnattributedFailure, ...]] = field(
        default_factory=OrderedDict
    )
    """By request id."""
    lease_now: Callable[[LeaseRequest, Tried, float], GrantedLease | None] = field(init=False)
    _records: dict[int, LeaseRecord] = field(init=False)  # the scheduler's, by lease id

    def __post_init__(self) -> None:
        self.lease_now, self._records = self.scheduler.lease_now, self.scheduler.records

    def start_while(self, may_start: Callable[[int], bool]) -> None:
        """Have requests written only while this says so of their leases."""
        self.may_start = may_start

    # Asked for a lease.

    async def wait_for_lease(
        self, request: LeaseRequest, tried: Tried, age: float, *, response_started: bool = False
    ) -> GrantedLease:
        """As `LeaseService.wait_for_lease`. Raises: GatewayError."""
        scheduler, began = self.scheduler, response_started
        received_at = scheduler.clock() - age
        try:
            return await scheduler.wait_for_lease(request, tried, age, response_started=began)
        except GatewayError as error:
            scheduler.decision_log.refused(request, error, received_at, scheduler.clock())
            raise

    # Asked where else a request could go.

    async def ask_nodes(
        self, what: NodeQuestion, request: LeaseRequest, tried: Tried, *, but_paused: bool = False
    ) -> bool:
        """As `LeaseService.ask_nodes`. Raises: GatewayError."""
        sync, now = self.scheduler.fleet_sync, self.scheduler.clock()
        if what == "unsupported_error":
            if (error := sync.unsupported_error(request, tried)) is not None:
                raise error
            return False
        if what == "has_cpu_node":
            labels = request.wanted.node_labels
            cpu = (one for one in self.fleet.nodes.values() if one.spec.tier == "cpu")
            nodes = [one for one in cpu if has_labels(one.spec.labels, labels)]
        else:
            nodes = [*nodes_of(sync.nodes_by_model(request, tried))]
        if what == "has_larger_context":
            return any(node.context and node.context >= tried.min_context for node in nodes)
        return any(
            node.name not in tried.failed_nodes
            and node.is_alive
            and not (but_paused and node.paused(now))
            for node in nodes
        )

    def resume_key_of(self, props: object) -> tuple[object, ...]:
        """The `resume_key` of a server that answers `/props` like this."""
        properties = ServerProperties()
        properties.read_props(props)
        return properties.resume_key()

    def most_slots_of_a_host(self) -> int:
        """The slots of the largest host: all its requests may have to move at once."""
        slots = Counter[str]()
        for node in self.fleet.nodes.values():
            if node.load is None or node.load.loaded:
                slots[node.spec.host] += node.slots_total
        return max(slots.values(), default=0)

    # Told how the attempt goes.

    def reading_began(self, lease_id: int) -> None:
        """The head of a streamed response has come: a slot reads the prompt."""
        self._records[lease_id].head_received(self.scheduler.clock())

    def content_began(self, lease_id: int) -> None:
        """The first content has come: the prompt has been read."""
        lease, now = self._records[lease_id], self.scheduler.clock()
        lease.content_received(now)
        if lease.wake:
            self._woke(lease, now)

    def content_went_on(self, lease_id: int, tokens: int) -> None:
        """As `LeaseService.content_went_on`."""
        lease = self._records[lease_id]
        self.fleet.stream_went_on(lease, tokens, lease.placement.prompt_tokens)

    def response_received(self, lease_id: int) -> None:
        """The whole response has come: the slots are free, though the client still reads it."""
        self._records[lease_id].release()

    def answered(self, lease_id: int) -> None:
        """The node answers a request that other nodes have failed: those were to blame.

        Nodes that failed after their response had begun are blamed for a complete one only.
        """
        self._blame_others(self._records[lease_id], complete=False)

    def is_silence_excused(self, lease_id: int) -> bool:
        """Whether the node reads another prompt, so that it may be silent meanwhile."""
        return another_prefills(self._records[lease_id], self.scheduler.clock())

    def pool_overflowed(self, lease_id: int) -> bool:
        """The node says that its context is full: whether its slots share that, as is known now."""
        return self.fleet.pool_full(self._records[lease_id].node)

    # Told how it ended.

    def ended(self, report: AttemptReport) -> AttemptCharge:
        """As `LeaseService.ended`."""
        lease, scheduler, charge = self._records[report.lease_id], self.scheduler, NOTHING_CHARGED
        request = lease.request
        if request.caller.yields:
            scheduler.yielding.pop(report.lease_id, None)
        if report.node_done:
            lease.release()
        else:
            lease.abandon()
        now = scheduler.clock()
        lease.grant.ended(report.outcome, report.status, now)
        if report.response_began:
            if request.size.prompt_key is not None:
                scheduler.demand_model.answer_ended(request)
            # Requests without a slot, such as token counts, don't show how fast slots come free.
            if lease.slots:
                scheduler.completion_rate.completed(now)
            if report.outcome == "ok":
                self.fleet.request_succeeded(lease.node, now, lease.taken_at)
                if report.came_plain:
                    lease.node.answered_plain(now)
                if self._failures:
                    self._blame_others(lease, complete=True)
        else:
            del self._records[report.lease_id]
            charge = self._attempt_failed(lease, report, now)
        if report.fault is not Fault.NOBODY:
            self._blame(lease, report, now)
        if report.unreachable is not None:
            self.fleet.request_answered(
                lease.node, ProbeAnswer.CONNECTION_REFUSED, report.unreachable
            )
        return charge

    def settle(self, report: UsageReport, request: LeaseRequest) -> AttemptCharge:
        """As `LeaseService.settle`."""
        scheduler, lease = self.scheduler, self._records.pop(report.lease_id)
        node, complete = lease.node, report.complete
        usage, reported = report.attempt, report.reported
        now = lease.abandoned_at or lease.released_at or scheduler.clock()
        lease.grant.settled(usage, reported=reported is not None)
        is_sample = False
        if complete:
            if lease.wakes or (lease.wake and node.sleep.waking_since is not None):
                self._woke(lease, now, usage.completion_tokens)  # A response in one piece.
            if reported is not None and not lease.adopted:
                if not lease.wake:
                    scheduler.accuracy.settled(lease.grant)
                is_sample = now - self._sampled_at.get(node.name, -1.0) >= SPEED_SAMPLE_INTERVAL
                if is_sample:
                    self._sampled_at[node.name] = now
                    self._learn_speed(lease, usage)
                    if report.sent_tokens:
                        node.degradation.learn_events(usage.completion_tokens, report.sent_tokens)
        scheduler.demand_model.learn(
            lease.placement, request, report, request.size.generates or is_sample
        )
        timed = lease.slots and not (lease.wake or lease.adopted)
        if complete and node.concurrency_limit is not None and timed:
            self.fleet.adjust_limit(
                lease, usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens
            )
        cost = _cost(lease, usage, now) if node.is_priced else 0.0
        if lease.reservation is not None:
            lease.reservation.settle(cost, happened=True, now=now)
        seconds = lease.slots * (now - lease.taken_at)
        return AttemptCharge(cost, seconds, 0, 0, 0, *_parts_of_time(lease, usage, now))

    def discard(self, _: str, /) -> None:
        """What a request's attempts took so far has brought its client nothing: its record says."""

    # What the end teaches.

    def _attempt_failed(
        self, lease: LeaseRecord, report: AttemptReport, now: float
    ) -> AttemptCharge:
        """The attempt brought no response for the client, or an error response."""
        outcome = report.outcome
        # A prompt that was sent counts as read, unless an error response refused it.
        worked = report.sent and report.status < 300
        charge = _charge_of_failed(lease, report, now) if worked else NOTHING_CHARGED
        self.scheduler.demand_model.abandoned(
            lease.placement, refund=outcome not in NEUTRAL_OUTCOMES
        )
        if lease.reservation is not None:
            lease.reservation.settle(
                charge.cost, happened=worked and outcome in NEUTRAL_OUTCOMES, now=now
            )
        if report.status >= 300 and outcome in {"ok", "context_overflow"}:
            # An error that the request has caused.
            self.fleet.request_succeeded(lease.node, now, lease.taken_at)
        elif _shows_failed_load(lease, report.status):
            self._load_failed(lease.node, report.status)
        elif outcome == "busy":
            self._node_busy(lease, report, now)
        elif outcome == "not_loaded":
            self.fleet.model_not_loaded(lease.node)
        elif outcome == "server_error":
            self._remember_failure(lease, response_began=False, counted=False)
        elif (error := report.error) is not None and error.lacks_endpoint:
            # The node can never serve the request, nor one like it.
            self.fleet.endpoint_refused(lease.node, lease.request.wanted.endpoint, error.hint)
        elif error is not None and error.key_rejected_at is not None:
            self.fleet.key_rejected(lease.node, error.key_rejected_at, report.status)
        return charge

    def _node_busy(self, lease: LeaseRecord, report: AttemptReport, now: float) -> None:
        status, error = report.status, report.error
        if error is not None and error.is_loading:
            words = "the server is loading its model"
            self.fleet.request_answered(lease.node, ProbeAnswer.LOADING, words)
        elif status in {402, 429} or (status == 503 and lease.node.concurrency_limit is not None):
            # No failure: the endpoint shows its limit like this.
            wait = None if error is None else error.retry_after
            self.fleet.node_overloaded(lease, now, wait, crowded=status != 402)
        elif status in {502, 503, 504}:
            self._count_unattributed(lease, now, response_began=False)

    def _load_failed(self, node: Node, status: int) -> None:
        """An endpoint could not load a model, which all requests are told that wait for it."""
        if node.load is not None and node.load.loaded and node.sleep.sleeping:
            why = f"its server answered {status} instead of loading it: its log says why"
            self.fleet.load_refused(node, why)
            self.fleet.read_models(node)

    def _woke(self, lease: LeaseRecord, now: float, written: int = 0) -> None:
        """Content came from a server that had slept; `written` tokens of it, in one piece."""
        speed = lease.node.speed
        # What a speed that was never measured would explain is no load.
        read = lease.placement.prompt_tokens / (speed.prefill_tps or math.inf)
        expected = read + written / (speed.decode_tps or math.inf) / max(1, lease.slots)
        self.fleet.woke(lease, now, expected)

    def _learn_speed(self, lease: Lease, usage: Usage) -> None:
        node = lease.node
        if lease.wake or (node.sleep.seen and _woke_unnoticed(lease, usage)):
            return  # Its time, and the first use of freshly loaded weights, say nothing.
        seen = lease.observed_timing()
        if lease.slots and usage.timings is not None:
            self.fleet.learn_speed(node, sample_from_timings(usage.timings, seen))
        elif seen is not None:
            each = usage.completion_tokens / lease.slots
            sample = sample_from_clock(usage.prompt_tokens, usage.cached_tokens, each, seen)
            self.fleet.learn_speed(node, sample)
        self.scheduler.fleet_sync.speed_learnt(node)

    # Who is to blame.

    def _blame(self, lease: LeaseRecord, report: AttemptReport, now: float) -> None:
        if report.outcome == "reset":
            lease.node.properties.process_ended()
        if report.fault is Fault.NODE:
            self.fleet.request_failed(lease.node, now, lease.taken_at)
        else:
            self._count_unattributed(lease, now, response_began=report.response_began)

    def _count_unattributed(self, lease: LeaseRecord, now: float, *, response_began: bool) -> None:
        """The request failed under this lease; the node or the request itself is to blame.

        The node is blamed when another node has answered the same request, or when requests of
        other callers fail there too (`Circuit.record_failure`).
        """
        self.fleet.request_failed(
            lease.node, now, lease.taken_at, caller=lease.request.caller.id, node_at_fault=False
        )
        self._remember_failure(lease, response_began=response_began)

    def _remember_failure(
        self, lease: LeaseRecord, *, response_began: bool, counted: bool = True
    ) -> None:
        failures, request_id = self._failures, lease.request.id
        failure = UnattributedFailure(lease.node, lease.taken_at, response_began, counted)
        failures[request_id] = (*failures.get(request_id, ()), failure)
        if len(failures) > self.most_failed_requests:
            failures.popitem(last=False)

    def _blame_others(self, lease: LeaseRecord, *, complete: bool) -> None:
        """The lease's node answers a request that others failed; `complete`: to its end."""
        request, node = lease.request, lease.node
        now, left = self.scheduler.clock(), []
        for failure in self._failures.pop(request.id, ()):
            if failure.response_began and not complete:
                left.append(failure)
            elif failure.node is not node:
                self.fleet.request_failed(
                    failure.node,
                    now,
                    failure.leased_at,
                    caller=request.caller.id,
                    already_counted=failure.counted,
                )
        if left:
            self._failures[request.id] = tuple(left)


def _shows_failed_load(lease: Lease, status: int) -> bool:
    """Whether the status says that an endpoint could not load the model for the request."""
    is_endpoint = lease.node.load is not None and lease.node.spec.kind == "openai"
    return is_endpoint and lease.wake > 0.0 and status >= 500 and status != 503


def _woke_unnoticed(lease: Lease, usage: Usage) -> bool:
    """Whether a server that may sleep had done so since the last probe, and was loading first."""
    sleep, content_at = lease.node.sleep, lease.first_content_at
    if content_at is None or usage.timings is None:
        return False
    read = usage.timings.get("prompt_ms")
    waited = content_at - lease.taken_at - (read / 1000 if isinstance(read, int | float) else 0.0)
    return waited > max(1.0, sleep.wake_seconds(lease.node.properties.size) / 2)


def _charge_of_failed(lease: LeaseRecord, report: AttemptReport, now: float) -> AttemptCharge:
    """What a node did for an attempt that brought no response.

    The tokens are those that the node said it had read. Where it said nothing, they are estimated
    by the time and the node's speed, and rather too low; an endpoint that is paid by the token is
    paid for the whole prompt.
    """
    request, estimate = lease.request, lease.placement.prompt_tokens
    seconds = now - lease.taken_at
    prompt, cached, completion = estimate, 0.0, 0.0
    if report.prompt_read is not None:
        prompt, cached = report.prompt_read
    elif (prefill := lease.expected_prefill) is not None and prefill > 0:
        prompt = estimate * min(1.0, seconds / prefill)
        decode_tps = lease.node.speed.decode_tps
        if not lease.stream and request.size.generates and decode_tps is not None:
            # A plain response that shows nothing before its end.
            completion = max(0.0, seconds - prefill) * decode_tps * lease.slots
            if request.size.max_tokens is not None:
                completion = min(completion, float(request.size.max_tokens * max(1, lease.slots)))
    if lease.node.spec.cost_per_million_tokens is not None:
        prompt = max(prompt, request.size.prompt_tokens)
    usage = Usage(round(prompt), round(cached), round(completion))
    return AttemptCharge(
        _cost(lease, usage, now),
        lease.slots * seconds,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        *_parts_of_time(lease, usage, now),
    )


def _parts_of_time(
    lease: LeaseRecord, usage: Usage, now: float
) -> tuple[float, float] | tuple[None, None]:
    """For how long the node read the prompt, and then wrote; None: unknown."""
    if not lease.slots:
        return None, None
    began_at, taken_at = lease.first_content_at, lease.taken_at
    if began_at is not None:
        return began_at - taken_at, now - began_at
    if lease.stream or not lease.request.size.generates:
        return now - taken_at, 0.0
    # An answer in one piece: the node itself may say it.
    read = None if usage.timings is None else usage.timings.get("prompt_ms")
    if not isinstance(read, int | float) or not 0 <= read <= (now - taken_at) * 1000:
        return None, None
    return read / 1000, now - taken_at - read / 1000


def _cost(lease: Lease, usage: Usage, now: float) -> float:
    # Without a slot no token is read or written: tokens are counted, say.
    if not lease.slots or not lease.node.is_priced:
        return 0.0
    return cost_of(
        lease.node.spec,
        lease.node.slots_total,
        prompt=usage.prompt_tokens,
        completion=usage.completion_tokens,
        slots=lease.slots,
        seconds=now - lease.taken_at,
    )
