"""The live view of the gateway: nodes with their slots, the queue, requests in flight, problems.

It is read once for all who watch, in short steps between which other work runs: a fleet of a
thousand nodes takes some 30 ms in all. There is no text of any prompt or response in it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from gateway.config.listeners import KeySpec
from gateway.fleet.fleet import Fleet
from gateway.fleet.node import Lease, LeasePhase, Node
from gateway.observe.audit import AuditTrail
from gateway.observe.fleet_condition import (
    FleetCondition,
    ModelNodes,
    NodeCondition,
    QueueCondition,
    SpillCondition,
    TrafficCondition,
)
from gateway.observe.history import FleetHistory, Gauges
from gateway.observe.problem import Problem
from gateway.observe.problems import USABLE_STATES, find_problems
from gateway.proxy.in_flight import InFlightRegistry, InFlightRequest
from gateway.request import Priority
from gateway.scheduling.scheduler import Scheduler
from gateway.web.admin.configuration import GatewayControl
from gateway.web.admin.nodes import DrainDeadlines
from gateway.web.admin.status import days_until, ledger_json, store_json
from gateway.web.asgi import HealthEndpoints

STEP_SECONDS = 0.002
"""Seconds after which a step lets other work run."""

LOOK_EVERY = 16
"""Items after which the clock is looked at."""

MOST_CELLS = 64
"""Slots of a node that are drawn; `slots_total` counts them all."""

MOST_FILL = 8
"""How full a slot's cell can be: the parts of the expected time that have passed."""

MOST_WAITING = 100
"""Waiting requests that are shown; the depths count them all."""

MOST_COUNTED_WAITING = 1000
"""Waiting requests that are counted by caller."""

MOST_REQUESTS = 300
"""Requests in flight that are shown; `in_flight` counts them all."""

MOST_MODELS = 1000
"""Models whose nodes are counted."""

NODE_FIELDS = (
    "name", "url", "kind", "tier", "host", "labels", "models", "context", "build", "drift",
    "cost_per_hour", "slots_total", "state", "reason", "draining", "cells", "slots_busy",
    "in_flight", "prefill_tps", "decode_tps", "prefill_share", "decode_share", "cached_prompts",
    "cached_tokens", "requests", "failures", "deadline_at",
)  # fmt: skip
"""The fields of a node, in the order of its row."""

REQUEST_FIELDS = (
    "id", "request_id", "path", "class", "model", "caller", "stream", "received_at", "state",
    "position", "expected_start", "node", "attempts", "queue_seconds", "ttft", "prompt_tokens",
    "tokens", "tokens_per_second",
)  # fmt: skip
"""The fields of a request, in the order of its row."""

Row = tuple[Any, ...]

T = TypeVar("T")


class LiveState(NamedTuple):
    """The gateway at one moment."""

    at: float
    """Unix time."""
    nodes: dict[str, Row]
    """By name, in the inventory's order."""
    requests: dict[str, Row] | None
    """By id, the oldest first; None: nobody who watches may see them."""
    summary: dict[str, Any]
    waiting: list[Row]
    """Class, model, seconds waited and until the expected start, in the likely order."""
    problems: list[Problem]


@dataclass(frozen=True, slots=True)
class LiveView:
    """Reads the live view."""

    fleet: Fleet
    scheduler: Scheduler
    registry: InFlightRegistry
    gateway: GatewayControl
    health: HealthEndpoints
    history: FleetHistory
    audit: AuditTrail
    drain_deadlines: DrainDeadlines
    wall_clock: Callable[[], float] = time.time

    async def read(self, *, with_requests: bool) -> LiveState:
        """Everything, with the requests in flight if somebody may see them."""
        counts = _FleetCounts()
        nodes: dict[str, Row] = {}
        async for node in in_steps(list(self.fleet.nodes.values())):
            if self.fleet.nodes.get(node.name) is node:
                nodes[node.name] = self._node_row(node)
                counts.add(node)
        waiting, queue = self._read_queue()
        requests = await self._read_requests(waiting) if with_requests else None
        condition = self._condition(counts, queue)
        return LiveState(
            round(self.wall_clock(), 3),
            nodes,
            requests,
            self._summary(counts),
            [row[1:] for row in waiting[:MOST_WAITING]],
            find_problems(condition),
        )

    async def read_problems(self) -> list[Problem]:
        """The problems alone."""
        counts = _FleetCounts()
        async for node in in_steps(list(self.fleet.nodes.values())):
            counts.add(node)
        return find_problems(self._condition(counts, self._read_queue()[1]))

    async def gauges(self) -> Gauges:
        """What a step of the history needs of the present."""
        tokens = 0
        async for in_flight in in_steps(self.registry.top_level()):
            tokens += in_flight.tokens_so_far()[1]
        busy = 0
        async for node in in_steps(list(self.fleet.nodes.values())):
            busy += node.slots_busy
        return Gauges(sum(self.scheduler.depths().values()), busy, tokens)

    # Nodes.

    def _node_row(self, node: Node) -> Row:
        spec, properties, now = node.spec, node.properties, node.clock()
        cached = self.scheduler.fleet_sync.cache_contents(node)
        left = self.drain_deadlines.seconds_left(node.name)
        slow = node.degradation
        return (
            spec.name,
            spec.url,
            spec.kind,
            spec.tier,
            spec.host,
            dict(spec.labels),
            list(properties.names if spec.models is None else spec.models),
            node.context,
            properties.build,
            list(node.drift),
            spec.cost_per_hour,
            node.slots_total,
            node.state.value,
            node.reason,
            node.draining,
            slot_cells(node, now),
            node.slots_busy,
            node.in_flight,
            _tps(node.speed.prefill_tps),
            _tps(node.speed.decode_tps),
            round(slow.prefill.current_share, 2) if slow.prefill.shares else None,
            round(slow.decode.current_share, 2) if slow.decode.shares else None,
            cached.prompts,
            cached.tokens,
            node.requests,
            node.failures,
            None if left is None else round(self.wall_clock() + left),
        )

    # The queue and the requests.

    def _read_queue(self) -> tuple[list[Row], QueueCondition]:
        """Waiting requests, each with its id first, and what problems need to know of them."""
        scheduler, settings = self.scheduler, self.gateway.settings
        now = scheduler.clock()
        rows: list[Row] = []
        callers: Counter[str] = Counter()
        oldest = 0.0
        for waiter, wait in scheduler.predicted_waits(MOST_COUNTED_WAITING):
            request = waiter.request
            waited = max(0.0, now - waiter.queued_at)
            callers[request.caller.id] += 1
            oldest = max(oldest, waited)
            if len(rows) < MOST_REQUESTS:
                expected = round(wait, 1) if math.isfinite(wait) else None
                row = (
                    request.id,
                    request.caller.priority.label,
                    request.wanted.model,
                    round(waited),
                    expected,
                )
                rows.append(row)
        top, top_waiting = callers.most_common(1)[0] if callers else (None, 0)
        return rows, QueueCondition(
            waiting=sum(scheduler.depths().values()),
            most=settings.queue.max,
            oldest_seconds=oldest,
            most_wait=settings.queue.max_wait,
            top_caller=top,
            top_waiting=top_waiting,
            callers=len(callers),
        )

    async def _read_requests(self, waiting: list[Row]) -> dict[str, Row]:
        """The first to start of those that wait, and the oldest of those that run."""
        places = {row[0]: (position, row[4]) for position, row in enumerate(waiting, 1)}
        rows: dict[str, Row] = {}
        now, wall = self.scheduler.clock(), self.wall_clock()
        left, expected = MOST_REQUESTS, self.scheduler.demand_model.expected_prompt_tokens
        async for in_flight in in_steps(list(self.registry)):
            id_ = in_flight.request.id
            if id_ in places or in_flight.attempt is not None or in_flight.sub_requests is not None:
                estimate = expected(in_flight.request.lease_request)
                rows[id_] = _request_row(in_flight, places.get(id_), now, wall, estimate)
                left -= 1
            if not left:
                break
        return rows

    # The rest.

    def _summary(self, counts: _FleetCounts) -> dict[str, Any]:
        gateway, scheduler = self.gateway, self.scheduler
        depths, error = scheduler.depths(), self.health.readiness_error()
        has_gpu = scheduler.fleet_sync.has_gpu_tier
        return {
            "version": gateway.version,
            "started_at": round(self.wall_clock() - gateway.clock() + gateway.started_at),
            "ready": error is None,
            "reason": None if error is None else error.code,
            "in_flight": len(self.registry),
            "queue": {priority.label: depths[priority] for priority in Priority},
            "queue_max": gateway.settings.queue.max,
            "states": dict(counts.states),
            "slots_total": counts.slots_total,
            "slots_busy": counts.slots_busy,
            "models": sorted(counts.models)[:MOST_MODELS],
            "hybrid": scheduler.tier_policy.view(gateway.clock()) if has_gpu else None,
        }

    def _condition(self, counts: _FleetCounts, queue: QueueCondition) -> FleetCondition:
        gateway, recent = self.gateway, self.history.recent()
        limited_caller, limited = max(
            recent.limited.items(), key=lambda item: item[1], default=(None, 0)
        )
        return FleetCondition(
            nodes=counts.conditions,
            hosts=counts.hosts,
            in_service=counts.in_service,
            usable=counts.usable,
            models={name: ModelNodes(*both) for name, both in counts.models.items()},
            paused_models=self.fleet.model_index.paused_by_name,
            differing_models=self.fleet.differences_in_words,
            queue=queue,
            traffic=TrafficCondition(
                recent.requests,
                recent.failed,
                recent.refused,
                limited_caller,
                limited,
                len(recent.callers),
                recent.failures,
            ),
            settings_keys=_places(gateway.settings.keys, {queue.top_caller, limited_caller}),
            spill=self._spill(),
            inventory_error=gateway.inventory_error,
            settings_error=gateway.settings_error,
            keys_lost=gateway.keys_lost,
            certificate_error=gateway.certificates.error,
            certificates={
                key: days_until(expires) for key, expires in gateway.certificates.expiry.items()
            },
            store=store_json(gateway.store),
            ledger=ledger_json(gateway.ledger),
            audit_lost=self.audit.lost,
            storage=gateway.storage,
        )

    def _spill(self) -> SpillCondition | None:
        spill = self.scheduler.tier_policy.view(self.gateway.clock())["spill"]
        if not isinstance(spill, dict) or not self.scheduler.fleet_sync.has_gpu_tier:
            return None
        return SpillCondition(spill["paid"], spill["reserved"], spill["money"], spill["window"])


def _places(keys: Sequence[KeySpec], callers: Container[str | None]) -> dict[str, int]:
    """Where in the settings' `keys` those of these callers are."""
    return {key.id: place for place, key in enumerate(keys) if key.id in callers}


class _FleetCounts:
    """What the whole fleet amounts to."""

    def __init__(self) -> None:
        self.states: Counter[str] = Counter()
        self.hosts: Counter[str] = Counter()
        self.conditions: list[NodeCondition] = []
        self.models: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.in_service = self.usable = self.slots_total = self.slots_busy = 0

    def add(self, node: Node) -> None:
        """Count a node."""
        state, spec = node.state.value, node.spec
        self.states[state] += 1
        self.slots_total += node.slots_total
        self.slots_busy += node.slots_busy
        failures = node.lifecycle.failures
        usable = state in USABLE_STATES
        if node.in_service and state != "standby" and not node.draining:
            self.in_service += 1
            self.usable += usable
            self.hosts[spec.host] += 1
            for name in node.public_models:
                if name in self.models or len(self.models) < MOST_MODELS:
                    both = self.models[name]
                    both[0] += 1
                    both[1] += usable
        if state == "draining" and not node.draining:
            return  # The gateway itself stops a standby node.
        if state not in {"ready", "mute", "sleeping"} or node.drift or failures:
            self.conditions.append(
                NodeCondition(
                    spec.name, spec.host, state, node.reason, spec.tier, node.drift, failures
                )
            )


_PHASE_CELLS = {
    LeasePhase.WAITING_HEAD: "r",
    LeasePhase.PREFILL: "r",
    LeasePhase.DECODE: "w",
    LeasePhase.RECLAIM: "h",
}


def slot_cells(node: Node, now: float) -> str:
    """The node's slots: a letter each, and for one of ours a digit that says how full it is.

    `r` reading a prompt, `w` writing, `h` held after its client has left, `o` used by another
    client of the server, `f` free. 0: not known, 1 to 8: part of the expected time.
    """
    cells: list[str] = []
    leases: Iterable[Lease] = node.leases
    if len(node.leases) > 1:
        leases = sorted(node.leases, key=lambda lease: lease.taken_at)
    for lease in leases:
        letter = _PHASE_CELLS.get(lease.phase)
        if letter is not None and lease.slots:
            cells += [letter + _fill(lease, now)] * lease.slots
    cells += ["o"] * min(node.foreign, node.slots_total)
    cells += ["f"] * (node.slots_total - len(cells))
    return "".join(cells[:MOST_CELLS])


def _fill(lease: Lease, now: float) -> str:
    if lease.phase is LeasePhase.DECODE:
        expected, elapsed = lease.expected_total, now - lease.taken_at
    elif lease.phase is LeasePhase.RECLAIM:
        return "8"
    else:
        expected, elapsed = lease.expected_prefill, now - lease.taken_at
    if not expected or expected <= 0:
        return "0"
    return str(min(MOST_FILL, 1 + int(MOST_FILL * elapsed / expected)))


def _request_row(
    in_flight: InFlightRequest,
    place: tuple[int, float | None] | None,
    now: float,
    wall: float,
    expected_prompt: int,
) -> Row:
    request, record, attempt = in_flight.request, in_flight.record, in_flight.attempt
    lease_request = request.lease_request
    prompt, tokens = in_flight.tokens_so_far()
    if place is not None:
        state = "waiting"
    elif record.ttft is None and (attempt is None or attempt.last_content_at is None):
        state = "reading"
    else:
        state = "writing"
    # The record has it once the client was sent it; a resumed one keeps its first.
    began = None if record.ttft is None else request.received_at + record.ttft
    seconds = None if began is None else now - began
    return (
        request.id,
        request.x_request_id,
        request.path,
        lease_request.caller.priority.label,
        lease_request.wanted.model,
        request.caller.id,
        request.stream,
        round(wall - now + request.received_at, 1),
        state,
        None if place is None else place[0],
        None if place is None else place[1],
        record.node,
        record.attempts,
        round(record.queue_seconds, 1),
        None if record.ttft is None else round(record.ttft, 2),
        prompt or expected_prompt,
        tokens,
        _tps(tokens / seconds) if seconds is not None and seconds > 0.2 and tokens else None,
    )


def _tps(value: float | None) -> float | None:
    """Tokens a second, in as many digits as people read."""
    if value is None or not math.isfinite(value):
        return None
    return round(value, 1) if value < 100 else float(round(value))


async def in_steps(items: Sequence[T]) -> AsyncIterator[T]:
    """These items; other work runs after each `STEP_SECONDS`."""
    until = time.perf_counter() + STEP_SECONDS
    for number, item in enumerate(items):
        if number % LOOK_EVERY == LOOK_EVERY - 1 and time.perf_counter() >= until:
            await asyncio.sleep(0)
            until = time.perf_counter() + STEP_SECONDS
        yield item
