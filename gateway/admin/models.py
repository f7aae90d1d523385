"""`/admin/models`: the public model names, their nodes, and pausing them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.admin.configuration import GatewayControl
from gateway.config.routing import CATCH_ALL
from gateway.config.settings import Settings
from gateway.errors import GatewayError, suggestion, truncate_echo
from gateway.nodes.fleet import Fleet
from gateway.nodes.model_index import MOST_NAMES, MOST_VALUES, ModelDifference
from gateway.request.preparation import ModelAliases
from gateway.schedule.admission import Waiter
from gateway.schedule.scheduler import Scheduler
from gateway.web.asgi import JsonResponse, json_of_rows

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
