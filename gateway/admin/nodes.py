"""`/admin/nodes`: show nodes; drain, resume and probe one."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.errors import GatewayError, suggestion, truncate_echo
from gateway.forward.in_flight import InFlightRegistry, InFlightRequest
from gateway.nodes.fleet import Fleet
from gateway.nodes.node import Node
from gateway.schedule.candidates import FleetSync
from gateway.schedule.core.requests import NodeSlots
from gateway.web.asgi import JsonResponse, json_of_rows, number_parameter

LONGEST_DRAIN_DEADLINE = 7 * 24 * 3600.0  # seconds
log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class DrainDeadlines:
    """At most one drain deadline for each node. Owns timers: `close` must be called."""

    registry: InFlightRegistry
    _timers: dict[str, tuple[asyncio.Handle, float]] = field(default_factory=dict)
    """With the loop's time at which each is due: uvloop's timer of 0 seconds does not tell it."""

    def set(self, name: str, seconds: float) -> None:
        """Evict the node's requests in so many seconds; replaces an earlier deadline."""
        self.cancel(name)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, self._on_deadline, name)
        self._timers[name] = timer, loop.time() + seconds

    def cancel(self, name: str) -> None:
        """Remove the node's deadline: its requests may end by themselves."""
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer[0].cancel()

    def seconds_left(self, name: str) -> float | None:
        """Seconds until the node's deadline; None: it has none."""
        timer = self._timers.get(name)
        if timer is None:
            return None
        return max(0.0, timer[1] - asyncio.get_running_loop().time())

    def close(self) -> None:
        """Remove all deadlines."""
        for name in list(self._timers):
            self.cancel(name)

    def _on_deadline(self, name: str) -> None:
        self._timers.pop(name, None)
        left = [in_flight for in_flight in self.registry if is_running_on(in_flight, name)]
        for in_flight in left:
            in_flight.evict(node_drained(name))
        if left:
            log.warning("drain deadline", node=name, requests=len(left))


@dataclass(frozen=True, slots=True)
class NodeEndpoints:
    """The endpoints of nodes."""

    fleet: Fleet
    fleet_sync: FleetSync
    drain_deadlines: DrainDeadlines

    async def list(self, _: Request) -> Response:
        """Every node, in the inventory's order."""
        return await json_of_rows("nodes", [*self.fleet.nodes.values()], self._object)

    async def show(self, request: Request) -> Response:
        """One node."""
        return JsonResponse(self._object(self._find(request)))

    async def drain(self, request: Request) -> Response:
        """Give the node no new requests. A drain without a deadline removes an earlier one."""
        node, most = self._find(request), LONGEST_DRAIN_DEADLINE
        meaning = f"a number of seconds from 0 to {most:.0f}"
        seconds = number_parameter(request, "deadline", 0.0, most, meaning)
        self.fleet.drain(node.name)
        if seconds is None:
            self.drain_deadlines.cancel(node.name)
        else:
            self.drain_deadlines.set(node.name, seconds)
        await self.fleet.save_orders()
        return JsonResponse(self._object(node))

    async def resume(self, request: Request) -> Response:
        """End a drain."""
        node = self._find(request)
        self.drain_deadlines.cancel(node.name)
        self.fleet.resume(node.name)
        await self.fleet.save_orders()
        return JsonResponse(self._object(node))

    async def probe(self, request: Request) -> Response:
        """Probe the node now; close its circuit if it answers."""
        node = self._find(request)
        outcome = await self.fleet.probe(node.name)
        probe = {
            "answer": outcome.answer.value,
            "detail": outcome.detail,
            "seconds": round(outcome.seconds, 4),
        }
        return JsonResponse({**msgspec.structs.asdict(self._object(node)), "probe": probe})

    def _find(self, request: Request) -> Node:
        name = request.path_params["name"]
        node = self.fleet.nodes.get(name)
        # A router's model has a slash in its name, so all paths below /admin/nodes lead here.
        if not name:
            raise errors.not_found(request.scope["path"], None)
        if node is None and name.endswith(("/drain", "/resume", "/probe")):
            raise errors.method_not_allowed(request.method, "POST")
        if node is None:
            raise node_not_found(name, self.fleet.nodes)
        return node

    def _object(self, node: Node) -> NodeObject:
        left = self.drain_deadlines.seconds_left(node.name)
        pools = [pool_json(row) for row in self.fleet_sync.rows((node,))]
        spec, properties, now = node.spec, node.properties, node.clock()
        circuit, cost = node.circuit, spec.cost_per_million_tokens
        models = properties.names if spec.models is None else spec.models
        open_until = circuit.open_until
        return NodeObject(
            name=spec.name,
            url=spec.url,
            kind=spec.kind,
            tier=spec.tier,
            host=spec.host,
            labels=dict(spec.labels),
            enabled=spec.enabled,
            standby=spec.standby,
            elastic=_elastic(node, now) if spec.autoscaled else None,
            router=None if node.router is None else node.router.name,
            progress=None if node.load is None else node.load.progress,
            draining=node.draining,
            state=node.state.value,
            reason=node.reason,
            slots_total=node.slots_now,
            slots_busy=node.slots_busy,
            leased=node.leased,
            foreign=node.foreign,
            in_flight=node.in_flight + sum(one.in_flight for one in node.instances.values()),
            pool=pools[0] if pools else None,
            models=[] if node.is_router else list(models),
            context=node.context,
            prefill_tps=_rounded(node.speed.prefill_tps),
            decode_tps=_rounded(node.speed.decode_tps),
            batch_cost=None
            if node.speed.decode_tps is None
            else _rounded(node.speed.token_step / node.speed.token_base),
            calibration=_calibration(node, now),
            requests=node.requests,
            failures=node.failures,
            cost_per_hour=spec.cost_per_hour,
            cost_per_million_tokens=None if cost is None else cost.model_dump(),
            build=properties.build,
            drift=list(node.drift),
            endpoints=None if spec.endpoints is None else sorted(spec.endpoints),
            endpoints_refused=sorted(properties.all_refused),
            purpose=properties.purpose,
            circuit={
                "phase": circuit.phase(now).value,
                "failures": circuit.failures,
                "open_for": None if open_until is None else _rounded(max(0.0, open_until - now)),
            },
            deadline_in=None if left is None else round(left, 1),
        )


def pool_json(row: NodeSlots) -> dict[str, int] | None:
    """The pool of tokens that a node's slots share, and what of it is taken; None: it has none."""
    if not row.pool:
        return None
    reserved = round(row.pool_reserved)
    return {"tokens": row.pool, "reserved": reserved, "foreign": row.pool_foreign}


class NodeObject(msgspec.Struct, kw_only=True):
    """A node as the admin API shows it, in seconds, tokens and tokens/s."""

    name: Annotated[str, "by which the inventory knows it"]
    url: Annotated[str, "where it is"]
    kind: Annotated[str, "`llama.cpp` or `openai`"]
    tier: Annotated[str, "`cpu` or `gpu`"]
    host: Annotated[str, "its fate domain"]
    labels: Annotated[dict[str, str], "of the inventory"]
    enabled: Annotated[bool, "of the inventory"]
    standby: Annotated[bool, "of the inventory"]
    elastic: Annotated[dict[str, Any] | None, "of a standby node with hooks, "
        "[below](#standby-nodes)"]  # fmt: skip
    router: Annotated[str | None, "of which it is one model; null: it is a server of its own"]
    progress: Annotated[float | None, "of a model that is being loaded: the share that is done"]
    draining: Annotated[bool, "whether an operator has drained it"]
    state: Annotated[str, "`ready`, `degraded`, `mute`, `ejected`, `starting`, `loading`, "
        "`sleeping`, `down`, `draining` or `standby`; of a router's model also `unloaded`, "
        "`unloading` or `failed`"]  # fmt: skip
    reason: Annotated[str, "why it is in that state"]
    slots_total: Annotated[int, "slots that it has"]
    slots_busy: Annotated[int, "the larger of our leases and what the node reports"]
    leased: Annotated[int, "slots leased to requests of this gateway"]
    foreign: Annotated[int, "slots that others use"]
    in_flight: Annotated[int, "requests that run on it"]
    pool: Annotated[dict[str, int] | None, "where its slots share one pool of `tokens`: those "
        "`reserved` for our requests, and `foreign`, which others use"]  # fmt: skip
    models: Annotated[list[str], "public names"]
    context: Annotated[int | None, "tokens of one slot"]
    prefill_tps: Annotated[float | None, "measured tokens/s of prefill"]
    decode_tps: Annotated[float | None, "measured tokens/s of decode, of one request alone"]
    batch_cost: Annotated[float | None, "by how much each further busy slot prolongs a token, as a "
        "share"]  # fmt: skip
    calibration: Annotated[dict[str, Any] | None, "the last "
        "[calibration](../scheduling.md#a-cold-node): `outcome` (`done`, `warmed`, `given_up`, "
        "`timed_out`, `failed`), `seconds_ago`, `prefill_tps` and `decode_tps` that one has "
        "shown, and whether these are `in_use`, as a first guess"]  # fmt: skip
    requests: Annotated[int, "sent to it since the start"]
    failures: Annotated[int, "of those that it failed"]
    cost_per_hour: Annotated[float, "of the inventory"]
    cost_per_million_tokens: Annotated[dict[str, Any] | None, "of the inventory"]
    build: Annotated[str | None, "of its server"]
    drift: Annotated[list[str], "what differs from the inventory"]
    endpoints: Annotated[list[str] | None, "of the inventory"]
    endpoints_refused: Annotated[list[str], "what it has refused with 501, or is not for"]
    purpose: Annotated[str | None, "what its server was started for: `chat`, `embeddings`, "
        "`rerank` or `unknown`"]  # fmt: skip
    circuit: Annotated[dict[str, Any], "`phase`, `failures` in a row, `open_for` seconds"]
    deadline_in: Annotated[float | None, "seconds until a drain's deadline"]


def _calibration(node: Node, now: float) -> dict[str, Any] | None:
    """The last calibration; `in_use`: its speeds are the first guess that requests go by."""
    record, speed = node.calibration, node.speed
    if record.outcome is None:
        return None
    return {
        "outcome": record.outcome,
        "seconds_ago": _rounded(now - record.ended_at),
        "prefill_tps": _rounded(record.prefill_tps),
        "decode_tps": _rounded(record.decode_tps),
        "in_use": speed.calibrated is not None and not speed.samples,
    }


def _elastic(node: Node, now: float) -> dict[str, Any]:
    """The lifecycle of a standby node with hooks."""
    lifecycle = node.lifecycle
    return {
        "phase": lifecycle.phase.value,
        "seconds": _rounded(now - lifecycle.since) if math.isfinite(lifecycle.since) else None,
        "failures": lifecycle.failures,
        "retry_in": _rounded(lifecycle.retry_at - now) if lifecycle.retry_at > now else None,
        "startup_seconds": _rounded(lifecycle.startup_seconds),
    }


def node_not_found(name: str, known: dict[str, Node]) -> GatewayError:
    """404, with similar names."""
    hint = suggestion(name, known, "GET /admin/nodes lists them.")
    return GatewayError(
        404, "node_not_found", f"There is no node '{truncate_echo(name)}'. {hint}", param="name"
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def is_running_on(in_flight: InFlightRequest, name: str) -> bool:
    """Whether the request runs on the node of this name, or on a model of that router."""
    attempt = in_flight.attempt
    if attempt is None or attempt.complete:
        return False
    own = attempt.lease.node.name
    return name in {own, own.partition("/")[0]}


def node_drained(name: str) -> GatewayError:
    """503: worth a retry, as another node gets it then."""
    return GatewayError(
        503,
        "node_drained",
        f"The node '{name}' was taken out of service before it had answered. Try again.",
        retry_after=1.0,
    )
