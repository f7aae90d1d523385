"""`/admin/models`: public names and pauses; `/admin/placements`: what routers load and pin."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.admin.configuration import GatewayControl
from gateway.admin.nodes import node_not_found
from gateway.admin.reports import AUDIT_ACTION_KEY, AUDIT_TARGET_KEY
from gateway.callers.windows import time_text
from gateway.config.routing import CATCH_ALL
from gateway.config.settings import Settings
from gateway.errors import GatewayError, suggestion, truncate_echo
from gateway.nodes.fleet import Fleet
from gateway.nodes.model_index import MOST_NAMES, MOST_VALUES, ModelDifference
from gateway.nodes.node import Node
from gateway.request.preparation import ModelAliases
from gateway.schedule.admission import Waiter
from gateway.schedule.model_placer import PINNED_BY, ModelPlacer, model_key, order_refused
from gateway.schedule.scheduler import Scheduler
from gateway.web.asgi import JsonResponse, json_of_rows, read_fields

Json = dict[str, Any]
MOST_PAUSED = 1000  # models that may be paused at the same time; each is a series of the metrics
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ModelEndpoints:
    """The endpoints of models."""

    fleet: Fleet
    scheduler: Scheduler
    gateway: GatewayControl

    async def list(self, _: Request) -> Response:
        """Every public name: those that nodes serve, aliases, and paused ones."""
        view = self._view()
        return await json_of_rows("models", [*view.names], view.object)

    async def pause(self, request: Request) -> Response:
        """Take no new requests for this name. What runs ends by itself, what waits is refused."""
        name = self._find(request)
        if name not in self.fleet.model_index.paused_by_name:
            if len(self.fleet.model_index.paused_by_name) >= MOST_PAUSED:
                raise errors.invalid_request(
                    f"{MOST_PAUSED} models are paused already: resume one first.", "name"
                )
            self.fleet.pause_model(name)
            refused = self._refuse_waiting()
            await self.fleet.save_orders()
            log.warning("model paused", model=name, refused=refused)
        return JsonResponse(self._view().object(name))

    async def resume(self, request: Request) -> Response:
        """End a pause."""
        name = self._find(request)
        if name in self.fleet.model_index.paused_by_name:
            self.fleet.resume_model(name)
            await self.fleet.save_orders()
            log.info("model resumed", model=name)
        return JsonResponse(self._view().object(name))

    def _view(self) -> _ModelsView:
        return _ModelsView(self.fleet, self.scheduler, self.gateway.settings)

    def _find(self, request: Request) -> str:
        name: str = request.path_params["name"]
        known = self._view().names
        if name in known:
            return name
        hint = suggestion(name, known, "GET /admin/models lists them.")
        raise GatewayError(
            404,
            "model_not_found",
            f"There is no model '{truncate_echo(name)}'. {hint}",
            param="name",
        )

    def _refuse_waiting(self) -> int:
        """Refuse those that wait for a paused model and have not been at a node; how many."""
        paused = self.fleet.model_index.paused
        waiting = [one for one in self.scheduler.waiters if _is_paused(one, paused)]
        return sum(
            self.scheduler.shed(one.request.id, errors.model_paused(one.request.wanted.model))
            for one in waiting
        )


def _is_paused(waiter: Waiter, paused: frozenset[str]) -> bool:
    request = waiter.request
    return request.wanted.model in paused or paused.issuperset(request.wanted.model_names)


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
    """The models as they are now."""

    def __init__(self, fleet: Fleet, scheduler: Scheduler, settings: Settings) -> None:
        self._index = fleet.model_index
        self._aliases = ModelAliases(settings.models)
        self._waiting = Counter(one.request.wanted.model for one in scheduler.waiters)
        self._differences = fleet.differences()
        aliases = (name for name in settings.models if name != CATCH_ALL)
        self.names = dict.fromkeys(
            (*self._index.model_names(), *aliases, *sorted(self._index.paused))
        )
        """Every public name: those of the inventory in its order, aliases, other paused ones."""

    def object(self, name: str) -> ServedModelObject:
        """The model of this name."""
        paused = self._index.paused
        targets = [one.name for one in self._aliases.resolve(name, self._index)]
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

    fleet: Fleet
    gateway: GatewayControl
    wall_clock: Callable[[], float]  # seconds since 1970

    async def list(self, _: Request) -> Response:
        """Every model of every router, and the memory of their hosts."""
        models = [node for node in self.fleet.nodes.values() if node.load is not None]
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
            self.fleet.pin_model(node, pinned=order == "pin")
            await self.fleet.save_orders()
        log.info("model ordered", node=name, model=node.spec.instance, order=order)
        return JsonResponse(self._object(node))

    def _find(self, name: str, model: str) -> Node:
        """A router's model, by its own or a public name. Raises: GatewayError (400, 404)."""
        router = self.fleet.nodes.get(name)
        if router is None:
            raise node_not_found(name, self.fleet.nodes)
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
