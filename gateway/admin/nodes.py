"""`/admin/nodes`, `/admin/models` and `/admin/placements`: what there is, and operators' orders.

Of nodes: drain, resume and probe one. Of public names: pause and resume one. Of routers' models:
load, unload, pin and unpin one.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.admin.configuration import GatewayControl
from gateway.admin.reports import AUDIT_ACTION_KEY, AUDIT_TARGET_KEY
from gateway.callers.windows import time_text
from gateway.config.scheduling import CATCH_ALL
from gateway.errors import GatewayError, suggestion, truncate_echo
from gateway.forward.in_flight import InFlightRegistry
from gateway.nodes.fleet import Fleet
from gateway.nodes.model_index import MOST_NAMES, MOST_VALUES, ModelDifference
from gateway.nodes.node import Node
from gateway.nodes.prompt_cache import PrefixHits
from gateway.request.preparation import ModelAliases
from gateway.schedule.candidates import FleetSync
from gateway.schedule.core.requests import NodeSlots
from gateway.schedule.model_placer import PINNED_BY, ModelPlacer, model_key, order_refused
from gateway.watch.history import NodeHistory
from gateway.web.asgi import (
    JsonResponse,
    in_steps,
    json_of_rows,
    number_parameter,
    read_fields,
)

LONGEST_DRAIN_DEADLINE = 7 * 24 * 3600.0  # seconds
Json = dict[str, Any]
log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class DrainDeadlines:
    """At most one drain deadline for each node. Owns timers: `close` must be called."""

    registry: InFlightRegistry
    _timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)

    def set(self, name: str, seconds: float) -> None:
        """Evict the node's requests in so many seconds; replaces an earlier deadline."""
        self.cancel(name)
        # uvloop's timer of 0 seconds does not tell when it is due.
        delay = max(seconds, 0.001)
        self._timers[name] = asyncio.get_running_loop().call_later(delay, self._on_deadline, name)

    def cancel(self, name: str) -> None:
        """Remove the node's deadline: its requests may end by themselves."""
        if timer := self._timers.pop(name, None):
            timer.cancel()

    def seconds_left(self, name: str) -> float | None:
        """Seconds until the node's deadline; None: it has none."""
        timer, now = self._timers.get(name), asyncio.get_running_loop().time()
        return None if timer is None else max(0.0, timer.when() - now)

    def close(self) -> None:
        for name in list(self._timers):
            self.cancel(name)

    def _on_deadline(self, name: str) -> None:
        self._timers.pop(name, None)
        left = 0
        for one in [*self.registry]:
            if one.attempt is not None and not one.attempt.complete:
                own = one.attempt.lease.node.name
                if name in {own, own.partition("/")[0]}:  # There, or on a model of that router.
                    one.evict(node_drained(name))
                    left += 1
        if left:
            log.warning("drain deadline", node=name, requests=left)


@dataclass(frozen=True, slots=True)
class NodeEndpoints:
    """The endpoints of nodes."""

    fleet: Fleet
    fleet_sync: FleetSync
    drain_deadlines: DrainDeadlines
    node_history: NodeHistory
    now: Callable[[], float]
    """Unix time."""

    async def list(self, _: Request) -> Response:
        """Every node, in the inventory's order."""
        return await json_of_rows("nodes", [*self.fleet.nodes.values()], self._object)

    async def show(self, request: Request) -> Response:
        return JsonResponse(self._object(self._find(request)))

    async def history(self, request: Request) -> Response:
        """Busy slots and speed of one node over a day."""
        node = self._find(request)
        return JsonResponse(self.node_history.as_json(node.name, self.now(), node.speed))

    async def cache(self, request: Request) -> Response:
        """Which prefixes of prompts a node has found in its cache, beside other nodes.

        A prefix is named by a part of its keyed digest: nothing of its text can be told from it.
        """
        name = request.query_params.get("node", "")
        if name not in self.fleet.nodes:
            raise not_found("node", name, self.fleet.nodes)
        by_node: dict[str, Mapping[int, PrefixHits]] = {}
        async for node in in_steps([*self.fleet.nodes.values()]):
            cache = self.fleet_sync.cache_of(node)
            by_node[node.name] = {} if cache is None else cache.hits
        return JsonResponse(heat_map(by_node, name))

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
        node = self._find(request)
        self.drain_deadlines.cancel(node.name)
        self.fleet.drain(node.name, draining=False)
        await self.fleet.save_orders()
        return JsonResponse(self._object(node))

    async def probe(self, request: Request) -> Response:
        """Probe the node now; close its circuit if it answers."""
        node = self._find(request)
        began = node.clock()
        outcome = await self.fleet.probe(node.name)
        probe = {
            "answer": outcome.answer.value,
            "detail": outcome.detail,
            "seconds": round(node.clock() - began, 4),
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
            raise not_found("node", name, self.fleet.nodes)
        return node

    def _object(self, node: Node) -> NodeObject:
        left = self.drain_deadlines.seconds_left(node.name)
        pools = [pool_json(row) for row in self.fleet_sync.rows((node,))]
        spec, properties, now = node.spec, node.properties, node.clock()
        circuit, cost = node.circuit, spec.cost_per_million_tokens
        models = properties.names if spec.models is None else spec.models
        open_until = circuit.open_until
        return NodeObject(
            **node_figures(node),
            enabled=spec.enabled,
            standby=spec.standby,
            elastic=_elastic(node, now) if spec.autoscaled else None,
            router=None if node.router is None else node.router.name,
            progress=None if node.load is None else node.load.progress,
            leased=node.leased,
            foreign=node.foreign,
            in_flight=sum(len(one.leases) for one in (node, *node.instances.values())),
            pool=pools[0] if pools else None,
            models=[] if node.is_router else list(models),
            prefill_tps=_rounded(node.speed.prefill_tps),
            decode_tps=_rounded(node.speed.decode_tps),
            batch_cost=None
            if node.speed.decode_tps is None
            else _rounded(node.speed.token_step / node.speed.token_base),
            calibration=_calibration(node, now),
            cost_per_million_tokens=None if cost is None else cost.model_dump(),
            endpoints=None if spec.endpoints is None else sorted(spec.endpoints),
            endpoints_refused=sorted(properties.all_refused),
            purpose=properties.purpose,
            circuit={
                "phase": circuit.phase(now),
                "failures": circuit.failures,
                "open_for": None if open_until is None else _rounded(max(0.0, open_until - now)),
            },
            deadline_in=None if left is None else round(left, 1),
        )


def node_figures(node: Node) -> Json:
    """What both the list of nodes and the live view tell of a node."""
    spec = node.spec
    return {
        "name": spec.name,
        "url": spec.url,
        "kind": spec.kind,
        "tier": spec.tier,
        "host": spec.host,
        "labels": dict(spec.labels),
        "context": node.context,
        "build": node.properties.build,
        "drift": list(node.drift),
        "cost_per_hour": spec.cost_per_hour,
        "slots_total": node.slots_now,
        "slots_busy": node.slots_busy,
        "state": node.state.value,
        "reason": node.reason,
        "draining": node.draining,
        "requests": node.requests,
        "failures": node.failures,
    }


def pool_json(row: NodeSlots) -> dict[str, int] | None:
    """The pool of tokens that a node's slots share, and what of it is taken; None: it has none."""
    if not row.pool:
        return None
    reserved = round(row.pool_reserved)
    return {"tokens": row.pool, "reserved": reserved, "foreign": row.pool_foreign}


MOST_COLUMNS = 64  # nodes of the map of cache hits


def heat_map(by_node: Mapping[str, Mapping[int, PrefixHits]], name: str) -> dict[str, Any]:
    """The prefixes of a node, the one that saved most first, by the nodes that found them."""
    own = sorted(by_node.get(name, {}).items(), key=lambda item: -item[1].cached_tokens)
    found = {
        other: [hits.get(first) for first, _ in own]
        for other, hits in by_node.items()
        if other != name and any(first in hits for first, _ in own)
    }
    shown: dict[str, list[PrefixHits | None]] = {name: [hit for _, hit in own]}
    shown.update(islice(found.items(), MOST_COLUMNS - 1))
    prefixes = [
        {
            "prefix": f"{first & (1 << 64) - 1:016x}"[:6],
            "tokens": round(hit.length),
            "cells": [
                cell and [cell.requests, round(cell.prompt_tokens), round(cell.cached_tokens)]
                for cell in (column[place] for column in shown.values())
            ],
        }
        for place, (first, hit) in enumerate(own)
    ]
    return {"nodes": [*shown], "prefixes": prefixes, "complete": len(found) < MOST_COLUMNS}


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


def not_found(kind: str, name: str, known: Mapping[str, object]) -> GatewayError:
    """404 for a node or model, with similar names."""
    hint = suggestion(name, known, f"GET /admin/{kind}s lists them.")
    message = f"There is no {kind} '{truncate_echo(name)}'. {hint}"
    return GatewayError(404, f"{kind}_not_found", message, param="name")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def node_drained(name: str) -> GatewayError:
    """503: worth a retry, as another node gets it then."""
    return GatewayError(
        503,
        "node_drained",
        f"The node '{name}' was taken out of service before it had answered. Try again.",
        retry_after=1.0,
    )


MOST_PAUSED = 1000  # models that may be paused at the same time; each is a series of the metrics


@dataclass(frozen=True, slots=True)
class ModelEndpoints:
    """The endpoints of models."""

    gateway: GatewayControl

    async def list(self, _: Request) -> Response:
        """Every public name: those that nodes serve, aliases, and paused ones."""
        view = _ModelsView(self.gateway)
        return await json_of_rows("models", [*view.names], view.object)

    async def pause(self, request: Request) -> Response:
        """Take no new requests for this name. What runs ends by itself, what waits is refused."""
        name, fleet = self._find(request), self.gateway.fleet
        if name not in fleet.model_index.paused_by_name:
            if len(fleet.model_index.paused_by_name) >= MOST_PAUSED:
                raise errors.invalid_request(
                    f"{MOST_PAUSED} models are paused already: resume one first.", "name"
                )
            fleet.pause_model(name, paused=True)
            # Those that wait for a paused model and have not been at a node.
            refused, paused = 0, fleet.model_index.paused
            for one in [one.request for one in self.gateway.scheduler.waiters]:
                model, others = one.wanted.model, one.wanted.model_names
                if model in paused or paused.issuperset(others):
                    refused += self.gateway.scheduler.shed(one.id, errors.model_paused(model))
            await fleet.save_orders()
            log.warning("model paused", model=name, refused=refused)
        return JsonResponse(_ModelsView(self.gateway).object(name))

    async def resume(self, request: Request) -> Response:
        name = self._find(request)
        if name in self.gateway.fleet.model_index.paused_by_name:
            self.gateway.fleet.pause_model(name, paused=False)
            await self.gateway.fleet.save_orders()
            log.info("model resumed", model=name)
        return JsonResponse(_ModelsView(self.gateway).object(name))

    def _find(self, request: Request) -> str:
        name: str = request.path_params["name"]
        known = _ModelsView(self.gateway).names
        if name in known:
            return name
        raise not_found("model", name, known)


class ServedModelObject(msgspec.Struct, kw_only=True):
    """A public name as the admin API shows it."""

    name: Annotated[str, "that clients ask for"]
    stands_for: Annotated[list[str], "of an alias: the models, in order of preference"]
    paused: Annotated[bool, "whether requests for it get 503 `model_paused`"]
    nodes: Annotated[dict[str, int], "that serve it, by state"]
    slots_total: Annotated[int, "their slots"]
    slots_busy: Annotated[int, "of these busy"]
    waiting: Annotated[int, "requests for it that wait"]
    differences: Annotated[list[str], "in what its nodes differ, in words"]


class _ModelsView:
    def __init__(self, gateway: GatewayControl) -> None:
        self._index, models = gateway.fleet.model_index, gateway.settings.models
        self._aliases = ModelAliases(models, self._index)
        self._waiting = Counter(one.request.wanted.model for one in gateway.scheduler.waiters)
        self._differences = gateway.fleet.differences()
        aliases = (name for name in models if name != CATCH_ALL)
        self.names = dict.fromkeys(
            (*self._index.model_names(), *aliases, *sorted(self._index.paused))
        )
        """Every public name: those of the inventory in its order, aliases, other paused ones."""

    def object(self, name: str) -> ServedModelObject:
        """The model of this name."""
        paused = self._index.paused
        targets = [one.name for one in self._aliases.resolve(name)]
        nodes = list(dict.fromkeys(node for one in targets for node in self._index.nodes_for(one)))
        return ServedModelObject(
            name=name,
            stands_for=[one for one in targets if one != name],
            paused=name in paused or paused.issuperset(targets),
            nodes=dict(Counter(node.state.value for node in nodes)),
            slots_total=sum(node.slots_now for node in nodes),
            slots_busy=sum(node.slots_busy for node in nodes),
            waiting=self._waiting[name],
            differences=[one.in_words() for one in self._differences if one.model in targets],
        )


def differences_json(differences: Iterable[ModelDifference]) -> list[Json]:
    """Where nodes of one model differ, as the admin API shows it; names are bounded in number."""
    return [
        {
            "model": one.model,
            "what": one.what,
            "summary": one.in_words(),
            "values": [
                {"value": value, "count": len(nodes), "nodes": list(nodes[:MOST_NAMES])}
                for value, nodes in list(one.nodes_by_value.items())[:MOST_VALUES]
            ],
        }
        for one in differences
    ]


LARGEST_ORDER = 16 << 10  # bytes of an order's body
ORDERS = ("load", "unload", "pin", "unpin")


@dataclass(frozen=True, slots=True)
class PlacementEndpoints:
    """The endpoints of models on demand."""

    gateway: GatewayControl
    wall_clock: Callable[[], float]  # seconds since 1970

    async def list(self, _: Request) -> Response:
        """Every model of every router, and the memory of their hosts."""
        models = [node for node in self.gateway.fleet.nodes.values() if node.load is not None]
        hosts = hosts_json(self.gateway.model_placer)
        return await json_of_rows("placements", models, self._object, {"hosts": hosts})

    async def order(self, request: Request) -> Response:
        """Load, unload, pin or unpin a model on a router. Raises: GatewayError (400, 404, 409)."""
        timeout = self.gateway.settings.limits.body_timeout
        fields = await read_fields(request, LARGEST_ORDER, timeout)
        order, model, name = (fields.get(key) for key in ("order", "model", "node"))
        if order not in ORDERS:
            raise errors.invalid_request("'order' must be load, unload, pin or unpin.", "order")
        if not isinstance(model, str) or not isinstance(name, str):
            raise errors.invalid_request("'model' and 'node' must be names.", "model")
        request.scope[AUDIT_ACTION_KEY] = f"placements.{order}"
        request.scope[AUDIT_TARGET_KEY] = f"{name}/{model}"
        node = self._find(name, model)
        placer, pinner = self.gateway.model_placer, self.gateway.model_placer.pinner(node)
        if order != "unpin":
            placer.order(node, "unload" if order == "unload" else "load")
        elif pinner is not None and pinner != "operator":
            raise order_refused(f"It is pinned {PINNED_BY[pinner]}: take it out there.")
        if order in {"pin", "unpin"}:
            self.gateway.fleet.pin_model(node, pinned=order == "pin")
            await self.gateway.fleet.save_orders()
        log.info("model ordered", node=name, model=node.spec.instance, order=order)
        return JsonResponse(self._object(node))

    def _find(self, name: str, model: str) -> Node:
        """A router's model, by its own or a public name. Raises: GatewayError (400, 404)."""
        router = self.gateway.fleet.nodes.get(name)
        if router is None:
            raise not_found("node", name, self.gateway.fleet.nodes)
        if not router.is_router:
            raise errors.invalid_request(
                f"The node '{name}' is no router: its models are always loaded. A server of "
                "llama.cpp is a router if it was started with --models-dir.",
                "node",
            )
        for node in router.instances.values():
            if model == node.spec.instance or model in node.public_models:
                return node
        hint = suggestion(model, router.instances, "GET /admin/placements lists its models.")
        raise GatewayError(
            404,
            "model_not_found",
            f"The router '{name}' has no model '{truncate_echo(model)}'. {hint}",
            param="model",
        )

    def _object(self, node: Node) -> PlacementObject:
        load, router, now = node.load, node.router, node.clock()
        assert load is not None
        assert router is not None
        placer, known = self.gateway.model_placer, math.isfinite(load.since)
        return PlacementObject(
            name=node.name,
            node=router.name,
            model=model_key(node),
            state=node.state.value,
            reason="it is loaded as soon as others there have made room"
            if (router.name, model_key(node)) in placer.policy.plans
            else node.reason,
            since=time_text(self.wall_clock() - now + load.since) if known else None,
            progress=load.progress,
            requests=node.requests,
            loads=load.loads,
            load_seconds=round(load.load_seconds, 3),
            expected_load_seconds=round(placer.load_seconds(node), 3),
            load_failures=load.failures,
            memory=placer.memory_of(node),
            pinned_by=placer.pinner(node),
        )


def hosts_json(placer: ModelPlacer) -> dict[str, dict[str, int | None]]:
    """The memory of hosts with routers, as the admin API shows it."""
    return {host: use._asdict() for host, use in placer.host_use().items()}


class PlacementObject(msgspec.Struct, kw_only=True):
    """A model of a router as the admin API shows it; `/admin/nodes` has the rest of it."""

    name: Annotated[str, "`router/model`: its name among the nodes"]
    node: Annotated[str, "the router"]
    model: Annotated[str, "a public name of it"]
    state: Annotated[
        str, "`unloaded`, `loading`, `ready`, `unloading`, `failed`, or that of a node"
    ]
    reason: Annotated[str, "why it is in that state"]
    since: Annotated[str | None, "when that began, UTC; null: before the gateway looked"]
    progress: Annotated[float | None, "share of the load that is done, where the router tells it"]
    requests: Annotated[int, "sent to it since the start"]
    loads: Annotated[int, "that have ended well since the start"]
    load_seconds: Annotated[float, "of these together"]
    expected_load_seconds: Annotated[float, "that a load is expected to take"]
    load_failures: Annotated[int, "loads in a row that failed"]
    memory: Annotated[int | None, "bytes that it takes once it is loaded; null: unknown"]
    pinned_by: Annotated[str | None, "who says that it is always loaded: `settings`, `preload` or "
        "`operator`"]  # fmt: skip
