"""The admin listener's application: its route table, and the guard in front of it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.admin_keys import LOCAL_ADMIN, AdminIdentity, AdminKeys, AdminRole
from gateway.access.keys import without_secret
from gateway.errors import GatewayError, truncate_echo
from gateway.events import EventBus
from gateway.fleet.fleet import Fleet
from gateway.observe.audit import AuditTrail
from gateway.observe.exposition import CONTENT_TYPE
from gateway.observe.metrics import Metrics
from gateway.observe.recent_requests import RecentRequests
from gateway.proxy.in_flight import InFlightRegistry
from gateway.scheduling.scheduler import Scheduler
from gateway.usage.reports import Reporter
from gateway.web.admin.audit import AUDIT_TARGET_KEY, AuditEndpoints
from gateway.web.admin.configuration import ConfigEndpoints, GatewayControl
from gateway.web.admin.keys import KeyEndpoints
from gateway.web.admin.models import ModelEndpoints
from gateway.web.admin.node_metrics import NodeMetricsEndpoint
from gateway.web.admin.nodes import DrainDeadlines, NodeEndpoints
from gateway.web.admin.requests import RequestEndpoints
from gateway.web.admin.status import StatusEndpoints
from gateway.web.admin.usage import UsageEndpoints
from gateway.web.admin.why import WhyEndpoints
from gateway.web.asgi import HealthEndpoints, asgi_app, error_response
from gateway.web.origins import AllowedHosts, is_same_origin

Endpoint = Callable[[Request], Awaitable[Response]]

VIEWER, OPERATOR, ADMIN = AdminRole.VIEWER, AdminRole.OPERATOR, AdminRole.ADMIN


@dataclass(frozen=True, slots=True)
class AdminEndpoints:
    """Everything that the admin listener answers with."""

    pages: PlainPages
    health: HealthEndpoints
    status: StatusEndpoints
    nodes: NodeEndpoints
    node_metrics: NodeMetricsEndpoint
    models: ModelEndpoints
    requests: RequestEndpoints
    why: WhyEndpoints
    usage: UsageEndpoints
    configuration: ConfigEndpoints
    audit: AuditEndpoints
    keys: KeyEndpoints


@dataclass(frozen=True, slots=True)
class AdminRoute:
    """One path of the admin listener."""

    method: str
    path: str
    role: AdminRole | None
    """The lowest role that may use it; None: no key is needed."""
    endpoint: Callable[[AdminEndpoints], Endpoint]
    summary: str
    """For the index, one line."""
    action: str | None = None
    """Its name in the audit log; None: it changes nothing."""


ADMIN_ROUTES = (
    AdminRoute("GET", "/", None, lambda e: e.pages.index, "this list"),
    AdminRoute("GET", "/metrics", VIEWER, lambda e: e.pages.metrics, "Prometheus"),
    AdminRoute(
        "GET",
        "/metrics/nodes",
        VIEWER,
        lambda e: e.node_metrics.show,
        "Prometheus: what llama.cpp's servers say, by node",
    ),
    AdminRoute("GET", "/health", None, lambda e: e.health.health, "the process lives"),
    AdminRoute("GET", "/ready", None, lambda e: e.health.ready, "work may be sent here"),
    AdminRoute(
        "GET", "/admin/status", VIEWER, lambda e: e.status.status, "the gateway on one page"
    ),
    AdminRoute("GET", "/admin/nodes", VIEWER, lambda e: e.nodes.list, "every node"),
    AdminRoute("GET", "/admin/nodes/{name}", VIEWER, lambda e: e.nodes.show, "one node"),
    AdminRoute(
        "POST",
        "/admin/nodes/{name}/drain",
        OPERATOR,
        lambda e: e.nodes.drain,
        "no new work; ?deadline=SECONDS ends what still runs then",
        action="drain",
    ),
    AdminRoute(
        "POST",
        "/admin/nodes/{name}/resume",
        OPERATOR,
        lambda e: e.nodes.resume,
        "back to work",
        action="resume",
    ),
    AdminRoute(
        "POST",
        "/admin/nodes/{name}/probe",
        OPERATOR,
        lambda e: e.nodes.probe,
        "ask it now; trusted again if it answers",
        action="probe",
    ),
    AdminRoute("GET", "/admin/models", VIEWER, lambda e: e.models.list, "every public model name"),
    AdminRoute(
        "POST",
        "/admin/models/{name:path}/pause",
        OPERATOR,
        lambda e: e.models.pause,
        "no new requests for it: 503 `model_paused`",
        action="models.pause",
    ),
    AdminRoute(
        "POST",
        "/admin/models/{name:path}/resume",
        OPERATOR,
        lambda e: e.models.resume,
        "requests for it again",
        action="models.resume",
    ),
    AdminRoute(
        "GET", "/admin/requests", OPERATOR, lambda e: e.requests.list, "what waits and runs"
    ),
    AdminRoute(
        "GET",
        "/admin/requests/{id:path}/why",
        OPERATOR,
        lambda e: e.why.why,
        "why it went where it went, and what came of it",
    ),
    AdminRoute(
        "DELETE",
        "/admin/requests/{id:path}",
        OPERATOR,
        lambda e: e.requests.cancel,
        "cancel one",
        action="cancel",
    ),
    AdminRoute(
        "GET", "/admin/usage", OPERATOR, lambda e: e.usage.report, "what requests used and cost"
    ),
    AdminRoute(
        "GET", "/admin/config", ADMIN, lambda e: e.configuration.show, "the settings in force"
    ),
    AdminRoute(
        "POST",
        "/admin/reload",
        OPERATOR,
        lambda e: e.configuration.reload,
        "read the inventory, the settings and the certificates again",
        action="reload",
    ),
    AdminRoute("GET", "/admin/keys", ADMIN, lambda e: e.keys.list, "API keys, without secrets"),
    AdminRoute(
        "POST",
        "/admin/keys",
        ADMIN,
        lambda e: e.keys.create,
        "make one, shown only in this response",
        action="keys.create",
    ),
    AdminRoute(
        "POST",
        "/admin/keys/import",
        ADMIN,
        lambda e: e.keys.import_,
        "store keys by their hashes: all or none",
        action="keys.import",
    ),
    AdminRoute("GET", "/admin/keys/{name}", ADMIN, lambda e: e.keys.show, "one key"),
    AdminRoute(
        "PATCH",
        "/admin/keys/{name}",
        ADMIN,
        lambda e: e.keys.change,
        "change its rights",
        action="keys.change",
    ),
    AdminRoute(
        "DELETE",
        "/admin/keys/{name}",
        ADMIN,
        lambda e: e.keys.revoke,
        "revoke it",
        action="keys.revoke",
    ),
    AdminRoute(
        "POST",
        "/admin/keys/{name}/rotate",
        ADMIN,
        lambda e: e.keys.rotate,
        "a new secret; the old one works for the grace",
        action="keys.rotate",
    ),
    AdminRoute("GET", "/admin/audit", ADMIN, lambda e: e.audit.list, "who has changed what"),
    AdminRoute(
        "GET", "/openapi.json", VIEWER, lambda e: e.pages.openapi, "both listeners, for programs"
    ),
)
"""Every path of the admin listener."""

INDEX_PAGE = "llama-gateway, admin listener\n\n" + "".join(
    f"{route.method:<6} {route.path.replace(':path}', '}'):<30} {route.summary}\n"
    for route in ADMIN_ROUTES
)

KEYLESS_PATHS = frozenset(route.path for route in ADMIN_ROUTES if route.role is None)
"""Paths that need no key: load balancers, supervisors and browsers use them, and they reveal
nothing."""


@dataclass(frozen=True, slots=True)
class PlainPages:
    """Pages that are no JSON of the admin API: the index, metrics, and the OpenAPI document."""

    registry: Metrics
    document: Callable[[str | None], bytes]
    """The OpenAPI document of both listeners, or of the one that is named. Raises: GatewayError."""

    async def index(self, _: Request) -> Response:
        """The paths, as text."""
        return PlainTextResponse(INDEX_PAGE)

    async def metrics(self, _: Request) -> Response:
        """Prometheus' exposition format; streams go on while it is written."""
        text = bytearray()
        for step in self.registry.steps():
            text += step
            await asyncio.sleep(0)
        return Response(bytes(text), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        """The OpenAPI document."""
        document = self.document(request.query_params.get("listener"))
        return Response(document, media_type="application/json")


def admin_app(
    *,
    fleet: Fleet,
    scheduler: Scheduler,
    registry: InFlightRegistry,
    bus: EventBus,
    metrics: Metrics,
    drain_deadlines: DrainDeadlines,
    gateway: GatewayControl,
    audit: AuditTrail,
    reporter: Reporter | None,
    document: Callable[[str | None], bytes],
    host: str,
    keys: AdminKeys,
    extra_hosts: Iterable[str] = (),
) -> ASGIApp:
    """The application of an admin listener on `host`.

    The caller owns `drain_deadlines` and closes it. Without `keys` nobody needs one; whether that
    is safe, `gateway.access.exposure.admin_listener_problem` decides before the listener opens.
    """
    health = HealthEndpoints(fleet, scheduler, lambda: gateway.closing)
    endpoints = AdminEndpoints(
        pages=PlainPages(metrics, document),
        health=health,
        status=StatusEndpoints(fleet, scheduler, registry, gateway, metrics, health, audit),
        nodes=NodeEndpoints(fleet, drain_deadlines),
        node_metrics=NodeMetricsEndpoint(fleet, lambda: gateway.settings, gateway.clock),
        models=ModelEndpoints(fleet, scheduler, gateway),
        requests=RequestEndpoints(registry, scheduler),
        why=WhyEndpoints(scheduler, registry, RecentRequests(bus, scheduler.clock), time.time),
        usage=UsageEndpoints(reporter, time.time),
        configuration=ConfigEndpoints(gateway),
        audit=AuditEndpoints(audit),
        keys=KeyEndpoints(gateway, fleet.model_index, time.time),
    )
    by_path: dict[str, dict[str, Endpoint]] = {}
    for route in ADMIN_ROUTES:
        by_path.setdefault(route.path, {})[route.method] = _with_role(route, endpoints, audit)
    # One route for each path, so that a wrong method is told all of the path's methods.
    routes = [
        Route(path, _by_method(methods), methods=list(methods)) for path, methods in by_path.items()
    ]
    numbers = itertools.count()
    guard = Middleware(AdminGuard, keys=keys, names=(host, *extra_hosts))
    return asgi_app(routes, lambda: f"adm_{next(numbers):x}", [guard])


IDENTITY_KEY = "gateway.admin_identity"
"""Key of the caller's `AdminIdentity` in the ASGI scope."""


AUDITED_PARAMETERS = ("deadline",)
"""Parameters of queries that the audit log tells; others are unknown, and might be secrets."""


def _by_method(endpoints: Mapping[str, Endpoint]) -> Endpoint:
    """The endpoint of a path that has one for each method."""

    async def serve(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await endpoints[method](request)

    return serve


def _with_role(route: AdminRoute, endpoints: AdminEndpoints, audit: AuditTrail) -> Endpoint:
    """The route's endpoint, for callers of its role; what it changes is put into the audit log."""
    endpoint = route.endpoint(endpoints)

    async def serve(request: Request) -> Response:
        identity: AdminIdentity = request.scope[IDENTITY_KEY]
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
                    route.action,
                    _audit_target(request),
                    outcome,
                    details={
                        name: request.query_params[name]
                        for name in AUDITED_PARAMETERS
                        if name in request.query_params
                    },
                    refused=refused,
                )
        return response

    return serve


def _audit_target(request: Request) -> str:
    parameters = request.path_params
    named = parameters.get("name") or parameters.get("id") or ""
    return without_secret(str(request.scope.get(AUDIT_TARGET_KEY, named)))


def role_required(needed: AdminRole, own: AdminRole) -> GatewayError:
    """403: the caller's key has a lower role."""
    return GatewayError(
        403,
        "role_required",
        f"This needs an admin key of the role '{needed.label}'; this one has the role "
        f"'{own.label}'.",
    )


class AdminGuard:
    """Passes permitted requests to `app` and refuses all others.

    `names` are permitted hosts, besides loopback names and the address that the client connected
    to. With `keys`, every path but `KEYLESS_PATHS` needs one.
    """

    def __init__(self, app: ASGIApp, *, keys: AdminKeys, names: Iterable[str]) -> None:
        self._app = app
        self._keys = keys
        self._hosts = AllowedHosts(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            identity = self._check(scope)
        except GatewayError as error:
            response = error_response(error, scope)
            if error.status == 401:
                response.headers["WWW-Authenticate"] = 'Bearer realm="llama-gateway admin"'
            await response(scope, receive, send)
            return
        await self._app({**scope, IDENTITY_KEY: identity}, receive, send)

    def _check(self, scope: Scope) -> AdminIdentity:
        """Who sends this request. Raises: GatewayError 401, 403."""
        hosts = _values(scope, b"host")
        host = hosts[0].decode("latin-1") if len(hosts) == 1 else ""
        server = scope.get("server")
        if not self._hosts.allows(host, server[0] if server else None):
            raise GatewayError(
                403,
                "host_not_allowed",
                f"The admin listener does not answer to the host '{truncate_echo(host)}': use its "
                "address, or add the name to admin.hosts in the settings.",
            )
        for value in _values(scope, b"origin"):
            origin = value.decode("latin-1")
            if not is_same_origin(origin, host):
                raise GatewayError(
                    403,
                    "origin_not_allowed",
                    f"Pages of '{truncate_echo(origin)}' may not use the admin listener.",
                )
        if not self._keys.needed:
            return LOCAL_ADMIN
        identity = self._find(scope)
        if identity is not None:
            return identity
        if scope["path"] in KEYLESS_PATHS:
            return NOBODY
        raise GatewayError(
            401,
            "invalid_api_key",
            "No valid admin key was sent. Send one of admin.keys or that of admin.key_file as "
            "'Authorization: Bearer ...'.",
        )

    def _find(self, scope: Scope) -> AdminIdentity | None:
        values = _values(scope, b"authorization")
        scheme, _, key = (values[0] if len(values) == 1 else b"").strip().partition(b" ")
        identity = self._keys.find(key.strip().decode(errors="surrogateescape"))
        return identity if scheme.lower() == b"bearer" else None


NOBODY = AdminIdentity("", AdminRole.VIEWER)
"""The caller of a path that needs no key."""


def _values(scope: Scope, wanted: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == wanted]
