"""The admin listener's application: its paths, and the guard in front of them."""

from __future__ import annotations

import hashlib
import hmac
import itertools
from collections.abc import Iterable

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import GatewayError, truncate_echo
from gateway.fleet.fleet import Fleet
from gateway.observe.metrics import CONTENT_TYPE, Metrics
from gateway.proxy.in_flight import InFlightRegistry
from gateway.scheduling.scheduler import Scheduler
from gateway.web.admin.configuration import ConfigEndpoints, GatewayControl
from gateway.web.admin.nodes import DrainDeadlines, NodeEndpoints
from gateway.web.admin.requests import RequestEndpoints
from gateway.web.admin.status import StatusEndpoints
from gateway.web.asgi import HealthEndpoints, asgi_app, error_response
from gateway.web.origins import AllowedHosts, is_same_origin

INDEX_PAGE = """\
llama-gateway, admin listener

GET    /metrics                     Prometheus
GET    /health                      the process lives
GET    /ready                       work may be sent here
GET    /admin/status                the gateway on one page
GET    /admin/nodes                 every node
GET    /admin/nodes/{name}          one node
POST   /admin/nodes/{name}/drain    no new work; ?deadline=SECONDS ends what still runs then
POST   /admin/nodes/{name}/resume   back to work
POST   /admin/nodes/{name}/probe    ask it now; trusted again if it answers
GET    /admin/requests              what waits and runs
DELETE /admin/requests/{id}         cancel one
GET    /admin/config                the settings in force
POST   /admin/reload                read the inventory and the settings again
"""


def admin_app(
    *,
    fleet: Fleet,
    scheduler: Scheduler,
    registry: InFlightRegistry,
    metrics: Metrics,
    drain_deadlines: DrainDeadlines,
    gateway: GatewayControl,
    host: str,
    key: str | None = None,
    extra_hosts: Iterable[str] = (),
) -> ASGIApp:
    """The application of an admin listener on `host`.

    The caller owns `drain_deadlines` and closes it. Without `key` nobody needs one; whether that
    is safe, `gateway.access.exposure.admin_listener_problem` decides before the listener opens.
    """
    nodes = NodeEndpoints(fleet, drain_deadlines)
    requests = RequestEndpoints(registry, scheduler)
    configuration = ConfigEndpoints(gateway)
    health = HealthEndpoints(fleet, scheduler, lambda: gateway.closing)
    status = StatusEndpoints(fleet, scheduler, registry, gateway, metrics, health)

    async def index(_: Request) -> Response:
        return PlainTextResponse(INDEX_PAGE)

    async def scrape(_: Request) -> Response:
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})

    routes = [
        Route(path, endpoint, methods=[method])
        for method, path, endpoint in (
            ("GET", "/", index),
            ("GET", "/metrics", scrape),
            ("GET", "/health", health.health),
            ("GET", "/ready", health.ready),
            ("GET", "/admin/status", status.status),
            ("GET", "/admin/nodes", nodes.list),
            ("GET", "/admin/nodes/{name}", nodes.show),
            ("POST", "/admin/nodes/{name}/drain", nodes.drain),
            ("POST", "/admin/nodes/{name}/resume", nodes.resume),
            ("POST", "/admin/nodes/{name}/probe", nodes.probe),
            ("GET", "/admin/requests", requests.list),
            ("DELETE", "/admin/requests/{id:path}", requests.cancel),
            ("GET", "/admin/config", configuration.show),
            ("POST", "/admin/reload", configuration.reload),
        )
    ]
    numbers = itertools.count()
    guard = Middleware(AdminGuard, key=key, names=(host, *extra_hosts))
    return asgi_app(routes, lambda: f"adm_{next(numbers):x}", [guard])


KEYLESS_PATHS = frozenset({"/health", "/ready"})
"""Paths that need no key: load balancers and supervisors use them, and they reveal nothing."""


class AdminGuard:
    """Passes permitted requests to `app` and refuses all others.

    `names` are permitted hosts, besides loopback names and the address that the client connected
    to. With `key`, every path but `KEYLESS_PATHS` needs it.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, names: Iterable[str]) -> None:
        self._app = app
        self._key = None if key is None else _digest(key.encode())
        self._hosts = AllowedHosts(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._check(scope)
            if error is not None:
                response = error_response(error, scope)
                if error.status == 401:
                    response.headers["WWW-Authenticate"] = 'Bearer realm="llama-gateway admin"'
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> GatewayError | None:
        hosts = _values(scope, b"host")
        host = hosts[0] if len(hosts) == 1 else ""
        server = scope.get("server")
        if not self._hosts.allows(host, server[0] if server else None):
            return GatewayError(
                403,
                "host_not_allowed",
                f"The admin listener does not answer to the host '{truncate_echo(host)}': use its "
                "address, or add the name to admin.hosts in the settings.",
            )
        for origin in _values(scope, b"origin"):
            if not is_same_origin(origin, host):
                return GatewayError(
                    403,
                    "origin_not_allowed",
                    f"Pages of '{truncate_echo(origin)}' may not use the admin listener.",
                )
        if self._key is None or scope["path"] in KEYLESS_PATHS or self._has_key(scope):
            return None
        return GatewayError(
            401,
            "invalid_api_key",
            "No valid admin key was sent. Send the key of admin.key_file as "
            "'Authorization: Bearer ...'.",
        )

    def _has_key(self, scope: Scope) -> bool:
        values = _values(scope, b"authorization")
        scheme, _, key = (values[0] if len(values) == 1 else "").strip().partition(" ")
        same = hmac.compare_digest(_digest(key.strip().encode("latin-1")), self._key or b"")
        return same and scheme.lower() == "bearer"


def _values(scope: Scope, wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
