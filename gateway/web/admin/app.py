"""The admin listener's application: its paths, behind the guard."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway.fleet.fleet import Fleet
from gateway.observe.exposition import CONTENT_TYPE
from gateway.observe.metrics import Metrics
from gateway.proxy.in_flight import InFlightRegistry
from gateway.scheduling.scheduler import Scheduler
from gateway.web.admin.configuration import ConfigEndpoints
from gateway.web.admin.control import GatewayControl
from gateway.web.admin.guard import AdminGuard
from gateway.web.admin.nodes import DrainDeadlines, NodeEndpoints
from gateway.web.admin.requests import RequestEndpoints
from gateway.web.admin.status import StatusEndpoints
from gateway.web.asgi import HealthEndpoints, asgi_app

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
