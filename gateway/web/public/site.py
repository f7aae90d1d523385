"""Everything on the public listener that is not relayed: models, health, and what isn't there."""

from __future__ import annotations

import time
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway import errors
from gateway.access.callers import caller_of
from gateway.config.listeners import CorsSpec
from gateway.relay import routes as relayed
from gateway.scheduling.scheduler import Scheduler
from gateway.web.public.answers import Json, cold_app, echoed
from gateway.web.public.catalogue import Catalogue, for_anthropic, listing, properties
from gateway.web.public.edge import Edge
from gateway.web.public.elsewhere import instead
from gateway.web.public.heads import EXPOSED
from gateway.web.public.preamble import exposes_nodes
from gateway.web.public.readiness import unreadiness


def public_site(edge: Edge, scheduler: Scheduler) -> ASGIApp:
    """The public listener's application, for all but the POSTs to routed paths.

    Those go from the protocol straight to `edge.serve`; here they only stand for the other
    methods to be told wrong.
    """
    site = _Site(edge, scheduler, created=int(time.time()))
    told = [
        Route(path, endpoint, methods=["GET"])
        for path, endpoint in (
            ("/v1/models", site.models),
            ("/models", site.models),
            ("/v1/models/{id:path}", site.model),
            ("/models/{id:path}", site.model),
            ("/props", site.props),
            ("/health", site.health),
            ("/v1/health", site.health),
            ("/ready", site.ready),
        )
    ]
    routed = [Route(path, _served_by_the_protocol, methods=["POST"]) for path in relayed.ROUTES]
    return cold_app([*told, *routed], edge.next_id, instead=instead)


def cors(app: ASGIApp, spec: CorsSpec) -> ASGIApp:
    """`app` for web pages of other origins as well; stands around everything else."""
    return CORSMiddleware(
        app,
        allow_origins=spec.origins,
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=spec.headers,
        allow_credentials=spec.credentials,
        expose_headers=EXPOSED,
        max_age=int(spec.max_age),
    )


async def _served_by_the_protocol(_: Request) -> Response:
    raise AssertionError("POSTs to routed paths do not come here")


@dataclass(frozen=True, slots=True)
class _Site:
    """The paths that the gateway answers itself."""

    edge: Edge
    scheduler: Scheduler
    created: int
    """What every model says of its age: seconds since 1970."""

    async def models(self, request: Request) -> Response:
        catalogue = self._catalogue(request)
        cards = [catalogue.card(name, self.created) for name in catalogue.all()]
        return Json(listing(cards, anthropic=_is_anthropic(request)))

    async def model(self, request: Request) -> Response:
        catalogue = self._catalogue(request)
        if not request.path_params["id"]:
            raise errors.not_found("/v1/models/", instead("/v1/models/"))
        name = self._checked(request, catalogue, request.path_params["id"])
        card = catalogue.card(name, self.created)
        return Json(for_anthropic(card) if _is_anthropic(request) else card)

    async def props(self, request: Request) -> Response:
        catalogue = self._catalogue(request)
        name = request.query_params.get("model") or self._default(catalogue)
        names = catalogue.all() if name is None else [self._checked(request, catalogue, name)]
        return Json(properties(catalogue.nodes(names)))

    async def health(self, _: Request) -> Response:
        return Json({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        error = unreadiness(self.edge.fleet, self.scheduler, closing=self.edge.closing)
        if error is not None:
            raise error
        return Json({"status": "ready"})

    def _catalogue(self, request: Request) -> Catalogue:
        """The models that this caller may use. Raises: GatewayError (401, 503)."""
        snapshot, client = self.edge.snapshot, request.client
        caller = caller_of(
            request.scope["headers"],
            client.host if client else None,
            snapshot.keys,
            allow_anonymous=snapshot.settings.allow_anonymous,
            loopback_listener=snapshot.loopback,
            trusted_proxies=snapshot.settings.listen.trusted_proxies,
            closed=snapshot.door.closed,
        )
        if snapshot.pages is not None and caller.anonymous:
            server = request.scope.get("server")
            own_address = server[0] if server else None
            snapshot.pages.check(request.scope["headers"], own_address, posts=False)
        if not self.edge.fleet.probed.is_set():
            raise errors.starting("The nodes are being asked what they serve.")
        return Catalogue(self.edge.fleet, snapshot.rules.names, caller)

    def _checked(self, request: Request, catalogue: Catalogue, name: str) -> str:
        """The name, if it is one of the catalogue. Raises: GatewayError (404, 503)."""
        if name in catalogue:
            return name
        if catalogue.caller.may_use(name):
            error = self.edge.fleet.catalogue.unknown(name)
            if error.code == "no_node":
                raise error.name_nodes() if self._exposes(request) else error
        raise errors.model_not_found(echoed(name), catalogue.all())

    def _exposes(self, request: Request) -> bool:
        snapshot = self.edge.snapshot
        return exposes_nodes(
            request.scope["headers"], snapshot.settings, loopback=snapshot.loopback
        )

    def _default(self, catalogue: Catalogue) -> str | None:
        name = self.edge.snapshot.settings.default_model
        return name if name is not None and name in catalogue else None


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers
