"""The admin listener's application: its route table, and the guard in front of it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from gateway.admin.batches import BatchDesk
from gateway.admin.configuration import ConfigEndpoints, GatewayControl
from gateway.admin.guard import AdminGuard, identity_of, role_required
from gateway.admin.keys import KeyEndpoints
from gateway.admin.live import LiveFeed
from gateway.admin.nodes import ModelEndpoints, NodeEndpoints, PlacementEndpoints
from gateway.admin.playground import Playground
from gateway.admin.reports import AUDIT_ACTION_KEY, AUDIT_TARGET_KEY, AuditEndpoints, UsageEndpoints
from gateway.admin.status import NodeMetricsEndpoint, StatusEndpoints
from gateway.admin.why import RequestEndpoints
from gateway.callers.ended import EndedFinder
from gateway.callers.keys import AdminKeys, AdminRole, without_secret
from gateway.callers.reports import Reporter
from gateway.errors import GatewayError
from gateway.watch.metrics import CONTENT_TYPE, Metrics
from gateway.web.asgi import Endpoint, HealthEndpoints, asgi_app, routes_by_path
from gateway.web.files import FileEndpoints
from gateway.web.site import KeptForCallers, StaticPage, batch_access

VIEWER, OPERATOR, ADMIN = AdminRole.VIEWER, AdminRole.OPERATOR, AdminRole.ADMIN

STATIC_FOLDER = Path(__file__).parent / "static"
PAGE = "index.html"
PAGE_SUFFIXES = frozenset({".html", ".css", ".js", ".svg"})
FILES_PATH = "/dashboard/"  # the path of the page's files


class AdminEndpoints:
    """Everything that the admin listener of a gateway answers with."""

    def __init__(
        self,
        gateway: GatewayControl,
        *,
        metrics: Metrics,
        live: LiveFeed,
        reporter: Reporter | None,
        ended: EndedFinder | None,
        document: Callable[[str | None], bytes],
        standing_error: Callable[[], GatewayError | None] = lambda: None,
        kept: KeptForCallers = KeptForCallers(),  # noqa: B008 - immutable
    ) -> None:
        fleet, scheduler, handler = gateway.fleet, gateway.scheduler, gateway.handler
        access, view = batch_access(handler, kept), live.view
        name_of = gateway.key_sync.key_ring.name_of
        self.live = live
        self.playground = Playground(handler)
        self.pages = Pages(StaticPage(PAGE, STATIC_FOLDER, page_files()), metrics, document)
        self.health = HealthEndpoints(fleet, scheduler, lambda: handler.closing, standing_error)
        self.status = StatusEndpoints(gateway, metrics, self.health)
        self.nodes = NodeEndpoints(
            fleet, scheduler.fleet_sync, view.drain_deadlines, view.node_history, time.time
        )
        self.node_metrics = NodeMetricsEndpoint(fleet, lambda: gateway.settings, gateway.clock)
        self.models = ModelEndpoints(gateway)
        self.placements = PlacementEndpoints(gateway, time.time)
        self.requests = RequestEndpoints(
            gateway.registry, scheduler, view.history, time.time, ended, name_of
        )
        self.usage = UsageEndpoints(reporter, ended, time.time, name_of)
        self.configuration = ConfigEndpoints(gateway)
        self.audit = AuditEndpoints(gateway.audit)
        self.keys = KeyEndpoints(gateway, time.time)
        self.batches = BatchDesk(access, FileEndpoints(kept.files, access.callers))


@dataclass(frozen=True, slots=True)
class AdminRoute:
    """One path of the admin listener."""

    method: str
    path: str
    role: AdminRole | None  # the lowest role that may use it; None: no key is needed
    endpoint: Callable[[AdminEndpoints], Endpoint]
    summary: str  # for the index, one line
    action: str | None = None
    """Its name in the audit log; None: it changes nothing, and shows no text of callers."""


ADMIN_ROUTES = (
    AdminRoute("GET", "/", None, lambda e: e.pages.index,
        "the dashboard; without a browser: this list"),
    AdminRoute("GET", "/dashboard/{file:path}", None, lambda e: e.pages.dashboard.file,
        "its files, without data"),
    AdminRoute("GET", "/metrics", VIEWER, lambda e: e.pages.metrics, "Prometheus"),
    AdminRoute("GET", "/metrics/nodes", VIEWER, lambda e: e.node_metrics.show,
        "Prometheus: what llama.cpp's servers say, by node"),
    AdminRoute("GET", "/health", None, lambda e: e.health.health, "the process lives"),
    AdminRoute("GET", "/ready", None, lambda e: e.health.ready, "work may be sent here"),
    AdminRoute("GET", "/admin/status", VIEWER, lambda e: e.status.status,
        "the gateway on one page"),
    AdminRoute("GET", "/admin/live", VIEWER, lambda e: e.live.stream,
        "nodes, queue and problems as they change, as server-sent events; requests for operators"),
    AdminRoute("GET", "/admin/timeline", VIEWER, lambda e: e.requests.timeline,
        "what each slot has done in the last ten minutes; callers for operators"),
    AdminRoute("GET", "/admin/nodes", VIEWER, lambda e: e.nodes.list, "every node"),
    AdminRoute("POST", "/admin/nodes/{name:path}/drain", OPERATOR, lambda e: e.nodes.drain,
        "no new work; ?deadline=SECONDS ends what still runs then", "drain"),
    AdminRoute("POST", "/admin/nodes/{name:path}/resume", OPERATOR, lambda e: e.nodes.resume,
        "back to work", "resume"),
    AdminRoute("POST", "/admin/nodes/{name:path}/probe", OPERATOR, lambda e: e.nodes.probe,
        "ask it now; trusted again if it answers", "probe"),
    AdminRoute("GET", "/admin/nodes/{name:path}/history", VIEWER, lambda e: e.nodes.history,
        "its busy slots and speed over a day"),
    AdminRoute("GET", "/admin/nodes/{name:path}", VIEWER, lambda e: e.nodes.show, "one node"),
    AdminRoute("GET", "/admin/cache", VIEWER, lambda e: e.nodes.cache,
        "which prefixes nodes found in their prompt caches"),
    AdminRoute("GET", "/admin/models", VIEWER, lambda e: e.models.list, "every public model name"),
    AdminRoute("POST", "/admin/models/{name:path}/pause", OPERATOR, lambda e: e.models.pause,
        "no new requests for it: 503 `model_paused`", "models.pause"),
    AdminRoute("POST", "/admin/models/{name:path}/resume", OPERATOR, lambda e: e.models.resume,
        "requests for it again", "models.resume"),
    AdminRoute("GET", "/admin/placements", VIEWER, lambda e: e.placements.list,
        "what routers have loaded"),
    AdminRoute("POST", "/admin/placements", OPERATOR, lambda e: e.placements.order,
        "load, unload, pin or unpin a model on a router", "placements"),
    AdminRoute("GET", "/admin/requests", OPERATOR, lambda e: e.requests.show,
        "what waits and runs"),
    AdminRoute("GET", "/admin/requests/ended", OPERATOR, lambda e: e.usage.requests,
        "what has ended, from the ledger: the latest or the slowest first"),
    AdminRoute("GET", "/admin/requests/{id:path}/why", OPERATOR, lambda e: e.requests.why,
        "why it went where it went, and what came of it"),
    AdminRoute("DELETE", "/admin/requests/{id:path}", OPERATOR, lambda e: e.requests.cancel,
        "cancel one", "cancel"),
    AdminRoute("POST", "/admin/chat", OPERATOR, lambda e: e.playground.chat,
        "a chat, streamed, with the node and the figures", "chat"),
    AdminRoute("GET", "/admin/usage", OPERATOR, lambda e: e.usage.report,
        "what requests used and cost"),
    AdminRoute("GET", "/admin/usage/arrivals", OPERATOR, lambda e: e.usage.arrivals,
        "the requests of the busiest hour, for plans"),
    AdminRoute("GET", "/admin/batches", OPERATOR, lambda e: e.batches.list,
        "the batches of all keys, the newest first"),
    AdminRoute("POST", "/admin/batches", OPERATOR, lambda e: e.batches.create,
        "a form's file as a batch of the key that ?key= names", "batches.create"),
    AdminRoute("GET", "/admin/batches/{id}", OPERATOR, lambda e: e.batches.show,
        "one batch: how far it is, why it waits, its errors by kind"),
    AdminRoute("POST", "/admin/batches/{id}/pause", OPERATOR, lambda e: e.batches.pause,
        "begin no more of its lines for now", "batches.pause"),
    AdminRoute("POST", "/admin/batches/{id}/resume", OPERATOR, lambda e: e.batches.resume,
        "go on with them", "batches.resume"),
    AdminRoute("POST", "/admin/batches/{id}/cancel", OPERATOR, lambda e: e.batches.cancel,
        "run no more of its lines", "batches.cancel"),
    AdminRoute("GET", "/admin/batches/{id}/results", OPERATOR, lambda e: e.batches.results,
        "its lines with a response, which callers have written for: audited", "batches.results"),
    AdminRoute("GET", "/admin/batches/{id}/errors", OPERATOR, lambda e: e.batches.errors,
        "its lines with an error: audited", "batches.errors"),
    AdminRoute("GET", "/admin/config", ADMIN, lambda e: e.configuration.show,
        "the settings in force"),
    AdminRoute("GET", "/admin/config/origins", ADMIN, lambda e: e.configuration.origins,
        "where each of their values comes from"),
    AdminRoute("GET", "/admin/config/history", ADMIN, lambda e: e.configuration.history,
        "earlier versions of both files"),
    AdminRoute("GET", "/admin/config/diff", ADMIN, lambda e: e.configuration.diff,
        "?from=VERSION: what has changed since, with secrets masked"),
    AdminRoute("POST", "/admin/config/rollback", ADMIN, lambda e: e.configuration.rollback,
        "write an earlier version to its file", "config.rollback"),
    AdminRoute("POST", "/admin/reload", OPERATOR, lambda e: e.configuration.reload,
        "read the inventory, the settings and the certificates again", "reload"),
    AdminRoute("GET", "/admin/keys", ADMIN, lambda e: e.keys.list, "API keys, without secrets"),
    AdminRoute("POST", "/admin/keys", ADMIN, lambda e: e.keys.create,
        "make one, shown only in this response", "keys.create"),
    AdminRoute("POST", "/admin/keys/import", ADMIN, lambda e: e.keys.import_,
        "store keys by their hashes: all or none", "keys.import"),
    AdminRoute("GET", "/admin/keys/{name}", ADMIN, lambda e: e.keys.show, "one key"),
    AdminRoute("PATCH", "/admin/keys/{name}", ADMIN, lambda e: e.keys.change,
        "change its rights", "keys.change"),
    AdminRoute("DELETE", "/admin/keys/{name}", ADMIN, lambda e: e.keys.revoke,
        "revoke it", "keys.revoke"),
    AdminRoute("POST", "/admin/keys/{name}/rotate", ADMIN, lambda e: e.keys.rotate,
        "a new secret; the old one works for the grace", "keys.rotate"),
    AdminRoute("GET", "/admin/groups", ADMIN, lambda e: e.keys.list_groups,
        "groups of keys, and what is used of their limits"),
    AdminRoute("PUT", "/admin/groups/{name}", ADMIN, lambda e: e.keys.put_group,
        "define one in the store", "groups.set"),
    AdminRoute("DELETE", "/admin/groups/{name}", ADMIN, lambda e: e.keys.remove_group,
        "remove one of the store", "groups.remove"),
    AdminRoute("GET", "/admin/audit", ADMIN, lambda e: e.audit.list, "who has changed what"),
    AdminRoute("GET", "/openapi.json", VIEWER, lambda e: e.pages.openapi,
        "both listeners, for programs"),
)  # fmt: skip
"""Every path of the admin listener."""

INDEX_PAGE = "llama-gateway, admin listener\n\n" + "".join(
    f"{route.method:<6} {route.path.replace(':path}', '}'):<30} {route.summary}\n"
    for route in ADMIN_ROUTES
)

# Paths that need no key: load balancers, supervisors and browsers use them, and they reveal
# nothing. So do the files of the dashboard.
KEYLESS_PATHS = frozenset(
    route.path for route in ADMIN_ROUTES if route.role is None and "{" not in route.path
)


def is_keyless(path: str) -> bool:
    """Whether this path needs no key."""
    return path in KEYLESS_PATHS or path.startswith(FILES_PATH)


@dataclass(frozen=True, slots=True)
class Pages:
    """What is no JSON of the admin API: the dashboard, metrics, and the OpenAPI document."""

    dashboard: StaticPage
    registry: Metrics
    document: Callable[[str | None], bytes]
    """The OpenAPI document of both listeners, or of the one that is named. Raises: GatewayError."""

    async def index(self, request: Request) -> Response:
        """The dashboard for a browser; programs get the list of paths as text."""
        accepted = request.headers.get("accept", "").lower().split(",")
        # Browsers name it, programs do not.
        if any(one.partition(";")[0].strip() == "text/html" for one in accepted):
            response = await self.dashboard.page(request)
        else:
            response = PlainTextResponse(INDEX_PAGE)
        response.headers["vary"] = "Accept"
        return response

    async def metrics(self, request: Request) -> Response:
        """Prometheus' exposition format; streams go on while it is written."""
        text, may_name = bytearray(), identity_of(request).role >= OPERATOR
        for step in self.registry.steps(key_names=may_name):
            text += step
            await asyncio.sleep(0)
        return Response(bytes(text), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        """The OpenAPI document; making it takes as long as a hundred requests."""
        document = await asyncio.to_thread(self.document, request.query_params.get("listener"))
        return Response(document, media_type="application/json")


def admin_app(
    endpoints: AdminEndpoints,
    *,
    host: str,
    keys: AdminKeys,
    extra_hosts: Iterable[str] = (),
    relayed: Callable[[ASGIApp], ASGIApp] | None = None,
) -> ASGIApp:
    """The application of an admin listener on `host`.

    Without `keys` nobody needs one; whether that is safe, `check_startup` decides before the
    listener opens. `relayed` makes of the application, behind the guard, what another gateway
    serves a part of.
    """
    routes = routes_by_path(
        (route.method, route.path, _with_role(route, endpoints)) for route in ADMIN_ROUTES
    )
    numbers = itertools.count()
    guard = Middleware(AdminGuard, keys=keys, names=(host, *extra_hosts), is_keyless=is_keyless)
    relaying = [] if relayed is None else [Middleware(relayed)]
    return asgi_app(routes, lambda: f"adm_{next(numbers):x}", [guard, *relaying])


def _with_role(route: AdminRoute, endpoints: AdminEndpoints) -> Endpoint:
    """The route's endpoint, for callers of its role; what it changes is put into the audit log."""
    endpoint, audit = route.endpoint(endpoints), endpoints.audit.audit

    async def serve(request: Request) -> Response:
        identity, parameters = identity_of(request), request.path_params
        target = parameters.get("name") or parameters.get("id") or ""
        outcome, refused = "failed", False
        try:
            if route.role is not None and identity.role < route.role:
                raise role_required(route.role, identity.role)
            response = await endpoint(request)
            outcome = response.headers.get("x-gateway-reason", "done")
            refused = response.status_code >= 400
        except GatewayError as error:
            # What failed with a 5xx may have been done.
            outcome, refused = error.code, error.status < 500
            raise
        finally:
            if route.action is not None:
                audit.record(
                    identity.name,
                    identity.role.label,
                    str(request.scope.get(AUDIT_ACTION_KEY, route.action)),
                    without_secret(str(request.scope.get(AUDIT_TARGET_KEY, target))),
                    outcome,
                    # Other parameters are unknown, and might be secrets.
                    details={k: v for k, v in request.query_params.items() if k == "deadline"},
                    member=request.scope.get("state", {}).get("member", ""),
                    refused=refused,
                )
        return response

    return serve


# What a caller's own page needs of these files.
CALLER_PAGE_FILES = (
    *("me.html", "me.js", "ask.js", "connect.js", "format.js", "usage.js", "style.css", "icon.svg"),
    *("actions.js", "key.js", "table.js", "vendor/lit-html/directives/repeat.js"),
    *(f"vendor/lit-html/{name}.js" for name in ("directive", "directive-helpers", "lit-html")),
)


def caller_page() -> StaticPage:
    """The page of the public listener on which callers see their own use."""
    return StaticPage("me.html", STATIC_FOLDER, CALLER_PAGE_FILES)


def page_files() -> list[str]:
    """The files of the dashboard by their paths, without licences and digests."""
    found = (one for one in STATIC_FOLDER.rglob("*") if one.suffix in PAGE_SUFFIXES)
    return [one.relative_to(STATIC_FOLDER).as_posix() for one in found]
