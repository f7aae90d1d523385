"""The admin listener's application: its paths, and who may ask them."""

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
from gateway.relay.live import Registry
from gateway.scheduling.scheduler import Scheduler
from gateway.web.admin.configuration import Configuration
from gateway.web.admin.control import Control
from gateway.web.admin.deadlines import Deadlines
from gateway.web.admin.guard import Guard
from gateway.web.admin.nodes import Nodes
from gateway.web.admin.requests import Requests
from gateway.web.admin.status import Status
from gateway.web.admin.totals import Totals
from gateway.web.public.answers import cold_app

INDEX = """\
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
    registry: Registry,
    metrics: Metrics,
    totals: Totals,
    deadlines: Deadlines,
    control: Control,
    host: str,
    key: str | None = None,
    extra_hosts: Iterable[str] = (),
) -> ASGIApp:
    """The application for an admin listener that stands on `host`.

    The caller owns `deadlines` and closes it. Without `key` nobody needs one: whether that may be
    is for `gateway.access.exposure.admin_refusal` to say before the listener opens.
    """
    nodes = Nodes(fleet, deadlines)
    requests = Requests(registry, scheduler)
    configuration = Configuration(control)
    status = Status(fleet, scheduler, registry, control, totals)

    async def index(_: Request) -> Response:
        return PlainTextResponse(INDEX)

    async def scrape(_: Request) -> Response:
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})

    routes = [
        Route(path, endpoint, methods=[method])
        for method, path, endpoint in (
            ("GET", "/", index),
            ("GET", "/metrics", scrape),
            ("GET", "/health", status.health),
            ("GET", "/ready", status.ready),
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
    guard = Middleware(Guard, key=key, names=(host, *extra_hosts))
    return cold_app(routes, lambda: f"adm_{next(numbers):x}", [guard])
