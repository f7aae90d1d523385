"""The live view of the gateway: nodes with their slots, the queue, requests in flight, problems.

It is read once for all who watch, in short steps between which other work runs: a fleet of a
thousand nodes takes some 30 ms in all. There is no text of any prompt or response in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway import errors
from gateway.admin.configuration import GatewayControl
from gateway.admin.guard import identity_of, is_still_admitted
from gateway.admin.nodes import DrainDeadlines, hosts_json, node_figures
from gateway.admin.status import days_left, ledger_json, store_json, whole_figures
from gateway.callers.keys import AdminIdentity, AdminRole
from gateway.errors import GatewayError
from gateway.forward.in_flight import InFlightRequest
from gateway.nodes.fleet import Fleet
from gateway.nodes.node import LeasePhase, Node, NodeState
from gateway.nodes.prices import GpuCosts
from gateway.nodes.router import LoadPhase
from gateway.store.store import woken
from gateway.watch.history import (
    COLUMNS,
    STEP_SECONDS,
    FleetHistory,
    Gauges,
    HistoryPoint,
    NodeHistory,
)
from gateway.watch.problems import (
    LOST_EDGE_SECONDS,
    USABLE_STATES,
    FleetCondition,
    NodeCondition,
    Problem,
    ProblemLog,
    QueueCondition,
    find_problems,
)
from gateway.web.asgi import HealthEndpoints, encoded_rows, in_steps

MOST_CELLS = 64  # slots of a node that are drawn; `slots_total` counts them all
MOST_FILL = 8  # how full a slot's cell can be: the parts of the expected time that have passed
MOST_WAITING = 100  # waiting requests that are shown; the depths count them all
MOST_COUNTED_WAITING = 1000  # waiting requests that are counted by caller
MOST_REQUESTS = 300  # requests in flight that are shown; `in_flight` counts them all
MOST_MODELS = 1000  # models whose nodes are counted
# A load is slow after so many seconds, and so many times the usual ones.
SLOW_LOAD_SECONDS, SLOW_LOAD_FACTOR = 60.0, 4.0

Row = dict[str, Any]  # of the page's tables, by column
Waiting = tuple[str, str, str | None, int, float | None]
"""Id, class, model, seconds waited and until the expected start."""


class LiveState(NamedTuple):
    """The gateway at one moment."""

    at: float  # Unix time
    nodes: dict[str, Row]  # by name, in the inventory's order
    requests: dict[str, Row] | None
    """By id, the oldest first; None: nobody who watches may see them."""
    summary: dict[str, Any]
    waiting: list[tuple[Any, ...]]
    """Class, model, seconds waited and until the expected start, in the likely order."""
    problems: list[Problem]


@dataclass(frozen=True, slots=True)
class LiveView:
    """Reads the live view."""

    gateway: GatewayControl
    health: HealthEndpoints
    history: FleetHistory  # the last hour in numbers
    drain_deadlines: DrainDeadlines
    wall_clock: Callable[[], float] = time.time
    node_history: NodeHistory = field(default_factory=NodeHistory)  # the last day of each

    async def read(self, *, with_requests: bool) -> LiveState:
        """Everything, with the requests in flight if somebody may see them."""
        counts = _FleetCounts(self.gateway.fleet)
        nodes: dict[str, Row] = {}
        async for node in in_steps(list(self.gateway.fleet.nodes.values())):
            if self.gateway.fleet.nodes.get(node.name) is node:
                if node.load is None or node.state is not NodeState.UNLOADED or node.load.failures:
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
        counts = _FleetCounts(self.gateway.fleet)
        async for node in in_steps(list(self.gateway.fleet.nodes.values())):
            counts.add(node)
        return find_problems(self._condition(counts, self._read_queue()[1]))

    async def gauges(self) -> Gauges:
        """What a step of the history needs of the present; each node's day is told of it, too."""
        tokens = 0
        async for in_flight in in_steps(self.gateway.registry.top_level()):
            tokens += in_flight.tokens_so_far()[1]
        busy, at = 0, self.wall_clock()
        async for node in in_steps(list(self.gateway.fleet.nodes.values())):
            taken = node.slots_busy
            busy += taken
            if not node.is_router and node.state.value in USABLE_STATES:
                self.node_history.read(node.name, at, taken, node.slots_now, node.speed)
        return Gauges(sum(self.gateway.scheduler.depths().values()), busy, tokens)

    def _node_row(self, node: Node) -> Row:
        now, slow = node.clock(), node.degradation
        models = node.properties.names if node.spec.models is None else node.spec.models
        cache = self.gateway.scheduler.fleet_sync.cache_of(node)
        cached_prompts, cached_tokens = (0, 0) if cache is None else cache.contents()
        left = self.drain_deadlines.seconds_left(node.name)
        return {
            **node_figures(node),
            "models": list(models),
            "cells": slot_cells(node, now),
            "in_flight": len(node.leases),
            "prefill_tps": _tps(node.speed.prefill_tps),
            "decode_tps": _tps(node.speed.decode_tps),
            "prefill_share": round(slow.prefill.current_share, 2) if slow.prefill.shares else None,
            "decode_share": round(slow.decode.current_share, 2) if slow.decode.shares else None,
            "cached_prompts": cached_prompts,
            "cached_tokens": cached_tokens,
            "deadline_at": None if left is None else round(self.wall_clock() + left),
        } | self._load_columns(node)

    def _load_columns(self, node: Node) -> Row:
        """What is told of a router's model alone, or is told otherwise of a router."""
        if node.load is not None and node.router is not None:
            placer = self.gateway.model_placer
            return {
                "router": node.router.name,
                "progress": node.load.progress,
                "memory": placer.memory_of(node),
                "pinned_by": placer.pinner(node),
            }
        if not node.is_router:
            return {}
        # A router has the slots and the requests of its models.
        models, now = [*node.instances.values()], node.clock()
        cells = re.findall(r"[rwh]\d|.", "".join(slot_cells(node, now) for node in models))
        loaded = [node for node in models if node.load is not None and node.load.loaded]
        return {
            "models": [name for node in loaded for name in node.properties.names],
            "loadable": f"{len(loaded)} of {len(models)}",
            "cells": "".join(cells[:MOST_CELLS]),
            "slots_total": sum(node.slots_now for node in models),
            "slots_busy": sum(node.slots_busy for node in models),
            "in_flight": sum(len(node.leases) for node in models),
            "requests": sum(node.requests for node in models),
        }

    def _read_queue(self) -> tuple[list[Waiting], QueueCondition]:
        """Waiting requests, and what problems need to know of them."""
        scheduler, settings = self.gateway.scheduler, self.gateway.settings
        now = scheduler.clock()
        rows: list[Waiting] = []
        callers: Counter[str] = Counter()
        oldest = 0.0
        for waiter, wait in scheduler.predicted_waits(MOST_COUNTED_WAITING):
            request = waiter.request
            waited = max(0.0, now - waiter.queued_at)
            callers[request.caller.id] += 1
            oldest = max(oldest, waited)
            if len(rows) < MOST_REQUESTS:
                expected = round(wait, 1) if math.isfinite(wait) else None
                class_, model = request.caller.priority.label, request.wanted.model
                rows.append((request.id, class_, model, round(waited), expected))
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

    async def _read_requests(self, waiting: list[Waiting]) -> dict[str, Row]:
        """The first to start of those that wait, and the oldest of those that run."""
        places = {row[0]: (position, row[4]) for position, row in enumerate(waiting, 1)}
        rows: dict[str, Row] = {}
        async for in_flight in in_steps(list(self.gateway.registry)):
            id_ = in_flight.request.id
            if id_ in places or in_flight.attempt is not None or in_flight.sub_requests is not None:
                rows[id_] = self._request_row(in_flight, places.get(id_))
                if len(rows) == MOST_REQUESTS:
                    break
        return rows

    def _request_row(
        self, in_flight: InFlightRequest, place: tuple[int, float | None] | None
    ) -> Row:
        request, record, attempt = in_flight.request, in_flight.record, in_flight.attempt
        asked, scheduler = request.lease_request, self.gateway.scheduler
        now = scheduler.clock()
        prompt, tokens = in_flight.tokens_so_far()
        if place is not None:
            state = "waiting"
        elif record.ttft is None and (attempt is None or attempt.last_content_at is None):
            state = "reading"
        else:
            state = "writing"
        # The record has it once the client was sent it; a resumed one keeps its first.
        seconds = 0.0 if record.ttft is None else now - request.received_at - record.ttft
        return {
            "id": request.id,
            "request_id": request.x_request_id,
            "path": request.path,
            "class": asked.caller.priority.label,
            "model": asked.wanted.model,
            "caller": asked.caller.id,
            "stream": request.stream,
            "received_at": round(self.wall_clock() - now + request.received_at, 1),
            "state": state,
            "position": None if place is None else place[0],
            "expected_start": None if place is None else place[1],
            "node": record.node,
            "attempts": record.attempts,
            "queue_seconds": round(record.queue_seconds, 1),
            "ttft": None if record.ttft is None else round(record.ttft, 2),
            "prompt_tokens": prompt or scheduler.demand_model.expected_prompt_tokens(asked),
            "tokens": tokens,
            "tokens_per_second": _tps(tokens / seconds) if seconds > 0.2 and tokens else None,
            "caller_name": self.gateway.key_sync.key_ring.name_of(asked.caller.id),
        }

    def _summary(self, counts: _FleetCounts) -> dict[str, Any]:
        gateway = self.gateway
        return {
            **whole_figures(gateway, self.health),
            "started_at": round(self.wall_clock() - gateway.clock() + gateway.started_at),
            "queue_max": gateway.settings.queue.max,
            "states": dict(counts.states),
            "slots_total": counts.slots_total,
            "slots_busy": counts.slots_busy,
            "models": sorted(counts.models)[:MOST_MODELS],
            "hosts": hosts_json(gateway.model_placer),
        }

    def _condition(self, counts: _FleetCounts, queue: QueueCondition) -> FleetCondition:
        gateway, edges, scheduler = self.gateway, self.gateway.edges, self.gateway.scheduler
        spill = scheduler.tier_policy.view(gateway.clock())["spill"]
        return FleetCondition(
            nodes=counts.conditions,
            in_service=counts.in_service,
            usable=counts.usable,
            tell_slots=counts.tell_slots,
            used_by_others=counts.used_by_others,
            models=counts.models,
            unkept=[*gateway.model_placer.unkept_wishes()],
            paused_models=self.gateway.fleet.model_index.paused_by_name,
            differing_models=self.gateway.fleet.differences_in_words,
            queue=queue,
            traffic=self.history.recent(),
            settings_keys={key.id for key in gateway.settings.keys},
            name_of=gateway.key_sync.key_ring.name_of,
            quotas=gateway.quotas.used,
            undefined_groups=gateway.undefined_groups(),
            spill=spill if isinstance(spill, dict) and scheduler.fleet_sync.has_gpu_tier else None,
            inventory_error=gateway.config_files.inventory_error,
            settings_error=gateway.config_files.settings_error,
            keys_lost=gateway.key_sync.key_ring.lost,
            certificate_error=gateway.certificates.error,
            certificates=days_left(gateway),
            store=store_json(gateway.store),
            ledger=ledger_json(gateway.ledger),
            audit_lost=gateway.audit.lost,
            storage=gateway.storage(),
            lost_edges=[] if edges is None else edges.brain.lost_edges(LOST_EDGE_SECONDS),
            cluster=None if gateway.cluster is None else gateway.cluster.sample(),
        )


class _FleetCounts:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.states: Counter[str] = Counter()
        self.conditions: list[NodeCondition] = []
        self.models: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.in_service = self.usable = self.slots_total = self.slots_busy = 0
        self.tell_slots = 0
        self.used_by_others: list[str] = []

    def add(self, node: Node) -> None:
        if node.state is NodeState.UNLOADED and node.load is not None and not node.load.failures:
            # Most of the models of a large fleet.
            self._count_models(node.indexed_models, usable=True)
            return
        state, spec = node.state.value, node.spec
        self.slots_total += node.slots_now
        self.slots_busy += node.slots_busy
        if node.router is not None:
            self._add_model(node)
            return
        self.states[state] += 1
        failures = node.lifecycle.failures
        usable = state in USABLE_STATES
        if node.in_service and state != "standby" and not node.draining:
            self.in_service += 1
            self.usable += usable
            self.tell_slots += usable and (node.reports_slots or node.is_router)
            if usable and self._fleet.others_take_slots(node):
                self.used_by_others.append(spec.name)
            self._count_models(node.public_models, usable=usable)
        left_alone = node.is_router and node.router_record.stopped(node.clock())
        if state == "draining" and not node.draining:
            return  # The gateway itself stops a standby node.
        if state not in {"ready", "mute", "sleeping"} or node.drift or failures or left_alone:
            reason, drift = node.reason, node.drift
            self.conditions.append(
                NodeCondition(spec.name, spec.host, state, reason, drift, failures, left_alone)
            )

    def _count_models(self, names: Iterable[str], *, usable: bool) -> None:
        for name in names:
            if name in self.models or len(self.models) < MOST_MODELS:
                both = self.models[name]
                both[0] += 1
                both[1] += usable

    def _add_model(self, node: Node) -> None:
        """Count a router's model: it is served while it can be loaded."""
        load, state, now = node.load, node.state.value, node.clock()
        assert load is not None
        failures = 0 if load.loaded else load.failures
        if node.in_service and state != "standby" and not node.draining:
            self._count_models(node.public_models, usable=node.is_alive and not failures)
        usual = node.sleep.wake_seconds(node.properties.size)
        is_slow = load.phase is LoadPhase.LOADING and now - load.since > max(
            SLOW_LOAD_SECONDS, SLOW_LOAD_FACTOR * usual
        )
        own = is_slow or node.draining or state in {"ejected", "degraded", "mute"}
        if own or failures or node.drift:
            self.conditions.append(
                NodeCondition(
                    node.name,
                    node.host,
                    state if own else "",
                    load.reason if failures else node.reason,
                    drift=node.drift,
                    model=min(node.public_models, default=node.name),
                    load_failures=failures,
                )
            )


def slot_cells(node: Node, now: float) -> str:
    """The node's slots: a letter each, and for one of ours a digit that says how full it is.

    `r` reading a prompt, `w` writing, `h` held after its client has left, `o` used by another
    client of the server, `f` free. 0: not known, 1 to 8: part of the expected time.
    """
    cells: list[str] = []
    for lease in sorted(node.leases, key=lambda lease: lease.taken_at):
        match lease.phase:
            case LeasePhase.WAITING_HEAD | LeasePhase.PREFILL:
                cell = "r" + _fill(lease.expected_prefill, now - lease.taken_at)
            case LeasePhase.DECODE:
                cell = "w" + _fill(lease.expected_total, now - lease.taken_at)
            case LeasePhase.RECLAIM:
                cell = "h8"
            case _:
                continue
        cells += [cell] * lease.slots
    cells += ["o"] * min(node.foreign, node.slots_total)
    cells += ["f"] * (node.slots_now - len(cells))
    return "".join(cells[:MOST_CELLS])


def _fill(expected: float | None, elapsed: float) -> str:
    if not expected or expected <= 0:
        return "0"
    return str(min(MOST_FILL, 1 + int(MOST_FILL * elapsed / expected)))


def _tps(value: float | None) -> float | None:
    """Tokens a second, in as many digits as people read."""
    if value is None or not math.isfinite(value):
        return None
    return round(value, 1) if value < 100 else float(round(value))


UPDATE_SECONDS = 1.0  # seconds between two updates
LOOK_SECONDS = 2.0  # seconds between two looks for problems while nobody watches
MOST_WATCHERS = 32  # streams at the same time
STALL_SECONDS = 15.0  # seconds after which a watcher that reads nothing is cut off
LIFE_SECONDS = 900.0  # seconds after which a stream ends; the page comes back
FIRST_SECONDS = 30.0  # most seconds until a first frame is there
RETRY_AFTER = 5.0  # seconds after which a place may be free for another watcher


class LiveFeed:
    """`GET /admin/live`: the live view as server-sent events, once a second, for all who watch.

    A watcher gets an event `snapshot`, then an event `update` with what has changed. Each is
    encoded once for all watchers of a role. Nothing is queued for a watcher: one that was too slow
    for the last update gets a snapshot, and one that reads nothing for `STALL_SECONDS` is cut off.
    `run` must run as long as the gateway serves: while nobody watches, the history's steps are
    counted, and problems are looked for, which the log is told of.
    """

    def __init__(
        self,
        view: LiveView,
        *,
        update_seconds: float = UPDATE_SECONDS,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self.view = view
        self._problem_log = ProblemLog(time.monotonic)
        self._update_seconds, self._look_seconds = update_seconds, look_seconds
        self._stall_seconds = STALL_SECONDS
        self._operators = 0
        self.watchers = 0  # how many watch
        self._frame: Frame | None = None
        self._wanted = asyncio.Event()  # somebody waits for a first frame
        self._published = asyncio.Event()  # set, and replaced, with each frame
        self._closed = False

    async def run(self) -> None:
        """Close steps of the history, publish frames, and tell of problems; never ends."""
        history, clock = self.view.history, time.monotonic
        next_step = clock() + STEP_SECONDS
        try:
            while True:
                pause = self._update_seconds if self.watchers else self._look_seconds
                # Or until a first watcher wants a frame.
                await woken(self._wanted, max(0.0, min(next_step - clock(), pause)))
                point = None
                if clock() >= next_step:
                    next_step = max(next_step + STEP_SECONDS, clock())
                    gauges = await self.view.gauges()
                    point = history.close_step(self.view.wall_clock(), clock(), gauges)
                if self.watchers:
                    state = await self.view.read(with_requests=self._operators > 0)
                    before = None if self._frame is None else self._frame.state
                    self._frame = await Frame.between(before, state, point, history.as_json)
                    published, self._published = self._published, asyncio.Event()
                    published.set()
                    problems = state.problems
                else:
                    self._frame = None
                    problems = await self.view.read_problems()
                # Until each node was asked once, all of them look as if they were out.
                if self.view.gateway.fleet.first_probes_done.is_set():
                    self._problem_log.take(problems)
        finally:
            self._closed = True
            self._published.set()

    async def stream(self, request: Request) -> Response:
        """The events, for one watcher; with `once=1` a snapshot alone. Raises: GatewayError 429."""
        identity = identity_of(request)
        once = request.query_params.get("once", "0")
        if once not in {"0", "1"}:
            raise errors.invalid_request("'once' must be 0 or 1.", "once")
        if self.watchers >= MOST_WATCHERS:
            raise GatewayError(
                429,
                "too_many_watchers",
                f"{self.watchers} watch already; more would cost the requests their time.",
                retry_after=RETRY_AFTER,
            )
        # Now: until its events begin, others may ask for a place.
        self.watchers += 1
        events = self._events(identity, lambda: is_still_admitted(request), once=once == "1")
        return EventStream(events, self._stall_seconds, self._watcher_left)

    async def _watcher_left(self) -> None:
        self.watchers -= 1

    async def _events(
        self, identity: AdminIdentity, is_admitted: Callable[[], bool], *, once: bool
    ) -> AsyncGenerator[bytes, None]:
        """Hello, a snapshot, updates; they end where the key is revoked or its role changes."""
        is_operator = identity.role >= AdminRole.OPERATOR
        until = time.monotonic() + LIFE_SECONDS
        self._operators += is_operator
        try:
            hello = {
                "role": identity.role.label,
                "update_seconds": self._update_seconds,
                "history_columns": COLUMNS,
            }
            yield encode_event("hello", hello)
            seen: Frame | None = None
            while seen is None or (time.monotonic() < until and not once):
                async with asyncio.timeout(FIRST_SECONDS if seen is None else None):
                    frame = await self._next(seen, needs_requests=is_operator)
                if frame is None or not is_admitted():
                    return
                if seen is not None and frame.follows is seen.state:
                    yield frame.updates[is_operator]
                else:
                    yield await frame.snapshot(is_operator=is_operator)
                seen = frame
        finally:
            self._operators -= is_operator

    async def _next(self, seen: Frame | None, *, needs_requests: bool) -> Frame | None:
        """The next frame behind `seen` that has what a watcher may see; None: it was the last."""
        while not self._closed:
            frame, published = self._frame, self._published
            if not (
                frame is None or frame is seen or (needs_requests and frame.state.requests is None)
            ):
                return frame
            if seen is None:
                self._wanted.set()
            await published.wait()
        return None


def live_feed(gateway: GatewayControl, drain_deadlines: DrainDeadlines) -> LiveFeed:
    """The feed of a gateway, with a history of its own."""
    fleet, clock = gateway.fleet, gateway.clock
    history = FleetHistory(gateway.bus, GpuCosts(fleet, clock).of, clock=clock)
    health = HealthEndpoints(fleet, gateway.scheduler, lambda: gateway.handler.closing)
    return LiveFeed(LiveView(gateway, health, history, drain_deadlines))


@dataclass(slots=True, eq=False)
class Frame:
    """The live view at one moment, as the events that watchers get."""

    state: LiveState
    history: Callable[[], Mapping[str, Any]]
    follows: LiveState | None = None  # the state that the updates begin from
    updates: dict[bool, bytes] = field(default_factory=dict)
    """The event with what has changed since: by whether it is for operators."""
    _snapshots: dict[bool, bytes] = field(default_factory=dict, init=False)
    _encoding: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @classmethod
    async def between(
        cls,
        before: LiveState | None,
        after: LiveState,
        point: HistoryPoint | None,
        history: Callable[[], Mapping[str, Any]],
    ) -> Frame:
        """The frame of a state that follows another; `point`: a step of the history ended."""
        if before is None:
            return cls(after, history)
        nodes, gone = await changed_rows("name", before.nodes, after.nodes)
        requests, ended = await changed_rows("id", before.requests or {}, after.requests or {})
        changes = {
            "nodes": nodes,
            "gone_nodes": gone,
            "summary": after.summary if after.summary != before.summary else None,
            "point": point,
        }
        changes = {"at": after.at, **{name: value for name, value in changes.items() if value}}
        if after.waiting != before.waiting:
            changes["waiting"] = after.waiting
        own = {"requests": requests, "ended_requests": ended} if after.requests is not None else {}
        updates = {}
        for is_operator in (False, True):
            shown = changes | {name: rows for name, rows in own.items() if is_operator and rows}
            if after.problems != before.problems:
                shown["problems"] = problems_json(after, is_operator=is_operator)
            updates[is_operator] = encode_event("update", shown)
        return cls(after, history, before, updates)

    async def snapshot(self, *, is_operator: bool) -> bytes:
        """The event with everything, encoded once; a thousand nodes are encoded in steps."""
        async with self._encoding:
            if is_operator not in self._snapshots:
                state = self.state
                whole = {
                    "at": state.at,
                    "summary": state.summary,
                    "waiting": state.waiting,
                    "problems": problems_json(state, is_operator=is_operator),
                    "history": self.history(),
                    "nodes": await encoded_rows([*state.nodes.values()]),
                }
                if is_operator:
                    whole["requests"] = await encoded_rows([*(state.requests or {}).values()])
                self._snapshots[is_operator] = encode_event("snapshot", whole)
        return self._snapshots[is_operator]


def problems_json(state: LiveState, *, is_operator: bool) -> list[dict[str, Any]]:
    """The problems as a watcher may see them: with callers named only for operators."""
    return [one.as_json(may_name_callers=is_operator) for one in state.problems]


async def changed_rows(
    key_name: str, before: Mapping[str, Row], after: Mapping[str, Row]
) -> tuple[list[Row], list[str]]:
    """What has changed of rows by their keys, and the keys that have gone.

    A row that is new comes whole, another one as its key and the fields that differ.
    """
    changed: list[Row] = []
    async for key, row in in_steps(list(after.items())):
        old = before.get(key)
        if old is None:
            changed.append(row)
        elif old != row:
            change = {name: value for name, value in row.items() if value != old[name]}
            changed.append({key_name: key, **change})
    return changed, [key for key in before if key not in after]


log = structlog.get_logger()


class EventStream(StreamingResponse):
    """A response of events, each a whole one or a part.

    A client that takes none for `stall_seconds` is cut off. `on_end` is awaited at the end,
    whether the client has got everything, has left, or was never sent anything.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        stall_seconds: float,
        on_end: Callable[[], Awaitable[None]],
    ) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers)
        self._events = events
        self._stall_seconds = stall_seconds
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._on_end()

    async def stream_response(self, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        body = {"type": "http.response.body"}
        try:
            async with contextlib.aclosing(self._events) as events:
                async for event in events:
                    async with asyncio.timeout(self._stall_seconds):
                        await send({**body, "body": event, "more_body": True})
        except TimeoutError:
            # Without its end, the response closes the connection.
            log.info("a watcher was cut off", why=f"it read nothing for {self._stall_seconds} s")
            return
        await send({**body, "body": b"", "more_body": False})


def encode_event(name: str, value: object) -> bytes:
    """One event, whose data is JSON in one line."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))
