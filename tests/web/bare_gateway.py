"""The applications of both listeners over emulated nodes, without files and signals."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import AsyncMock

import httpx
from starlette.types import ASGIApp

from gateway.admin.app import AdminEndpoints, admin_app, caller_page
from gateway.admin.configuration import CertificateRenewal, ClusterMember, ConfigFiles, ReloadResult
from gateway.admin.live import live_feed
from gateway.admin.nodes import DrainDeadlines
from gateway.admin.status import MetricsSource
from gateway.callers.keys import AdminKeys, KeyRing
from gateway.callers.ledger import Ledger
from gateway.callers.limits import LimitBook
from gateway.callers.meter import Meter
from gateway.callers.reports import CallerUsage, Reporter
from gateway.callers.standings import QuotaWatch, Standings
from gateway.callers.stored_keys import KeySync
from gateway.config.inventory import NodeSpec
from gateway.config.settings import Settings
from gateway.edges.supervisor import Edges
from gateway.events import EventBus, RequestRecord
from gateway.forward.context import ForwardContext
from gateway.forward.forwarder import Forwarder
from gateway.forward.in_flight import InFlightRegistry, TimeoutMonitor
from gateway.http.heads import HandlerConfig
from gateway.http.listener import Listener, bind_socket
from gateway.http.protocol import protocol_class
from gateway.lease import KeyedHash
from gateway.nodes.fleet import Fleet
from gateway.nodes.node import Node
from gateway.openapi import openapi_json
from gateway.request.routes import routes_of
from gateway.schedule.lease_service import LocalLeaseService
from gateway.schedule.model_placer import ModelPlacer
from gateway.schedule.scheduler import Scheduler
from gateway.store.store import Store
from gateway.watch.audit import AuditTrail
from gateway.watch.metrics import Metrics
from gateway.watch.problems import StorageCondition
from gateway.web.handler import RequestHandler
from gateway.web.site import public_app
from tests.emulator import EmulatedNode
from tests.gateways import NO_TLS
from tests.nodes.build import Running, a_fleet, a_spec
from tests.virtual import now

ADMIN = "http://127.0.0.1:8001"
CHAT = "/v1/chat/completions"
PROBE_LIMIT = 30.0
"""Seconds; generous, as a slow machine must not make a node look down."""


@dataclass
class BareGateway:
    """A gateway without files; fills `gateway.admin.configuration.GatewayControl`."""

    settings: Settings
    running: Running
    bus: EventBus
    scheduler: Scheduler
    registry: InFlightRegistry
    handler: RequestHandler
    drain_deadlines: DrainDeadlines
    key_sync: KeySync
    site: ASGIApp
    public: httpx.AsyncClient
    admin: httpx.AsyncClient
    clock: Callable[[], float] = now
    started_at: float = field(default_factory=now)
    version: str = "1.2.3"
    config_files: ConfigFiles = field(default_factory=lambda: ConfigFiles({}, {}, lambda *_: ()))
    storage: Callable[[], StorageCondition] = StorageCondition
    fleet: Fleet = field(init=False)
    audit: AuditTrail = field(default_factory=lambda: AuditTrail(now))
    certificates: CertificateRenewal = field(init=False)
    standings: Standings = field(init=False)
    model_placer: ModelPlacer = field(init=False)
    store: Store | None = None
    ledger: Ledger | None = None
    cluster: ClusterMember | None = None
    edges: Edges | None = None
    quotas: QuotaWatch = field(init=False)
    undefined_groups: Callable[[], Mapping[str, int]] = dict
    ended: list[RequestRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fleet = self.running.fleet
        self.certificates = CertificateRenewal(self.settings, self.fleet, self.audit)
        book, ring = self.handler.meter.book, self.key_sync.key_ring
        self.standings = Standings(self.key_sync, book, None)
        self.quotas = QuotaWatch(book, ring, AsyncMock())
        self.model_placer = ModelPlacer(
            self.fleet, self.scheduler, self.settings, self.bus, self.clock
        )

    def __getitem__(self, name: str) -> Node:
        return self.fleet.nodes[name]

    async def reload(self) -> ReloadResult:
        raise AssertionError("a bare gateway has no files")

    async def until(self, condition: Callable[[], bool], limit: float = 30.0) -> None:
        await self.running.until(condition, limit)

    async def chat(self, text: str = "Hello", **body: Any) -> httpx.Response:
        headers = body.pop("headers", {})
        messages = [{"role": "user", "content": text}]
        return await self.public.post(CHAT, json={"messages": messages, **body}, headers=headers)


@asynccontextmanager
async def bare_gateway(
    *nodes: NodeSpec | EmulatedNode,
    settings: dict[str, Any] | None = None,
    serving: bool = False,
    loopback: bool = True,
    admin_host: str = "127.0.0.1",
    admin_key: str | None = None,
    admin_hosts: tuple[str, ...] = (),
    reporter: Reporter | None = None,
    **fleet: Any,
) -> AsyncIterator[BareGateway]:
    """A gateway over these nodes; emulated ones are named a, b, c, ..., by their place.

    `fleet` is for `tests.nodes.build.a_fleet`; only if it is `serving` does it forward.
    """
    chosen, bus, clock = Settings(**settings or {}), EventBus(), now
    async with AsyncExitStack() as stack:
        specs = [
            a_spec("abcdefgh"[place], (await stack.enter_async_context(node)).url)
            if isinstance(node, EmulatedNode)
            else node
            for place, node in enumerate(nodes)
        ]
        started = a_fleet(*specs, **{"timeout": PROBE_LIMIT, **fleet})
        running = await stack.enter_async_context(started)
        scheduler = Scheduler(running.fleet, chosen, clock, random.Random(7))
        registry = InFlightRegistry()
        context = ForwardContext(
            LocalLeaseService(scheduler, running.fleet), chosen, bus, TimeoutMonitor(clock), clock
        )
        forwarder = Forwarder(context)
        key_ring = KeyRing()
        key_sync = KeySync(None, key_ring, None)
        key_sync.configure(chosen.keys, allow_anonymous=chosen.allow_anonymous)
        handler = RequestHandler(
            HandlerConfig(
                chosen,
                loopback=loopback,
                keyed_hash=KeyedHash(),
                key_ring=key_ring,
                catalog=running.fleet.model_index,
            ),
            forwarder=forwarder,
            queue=scheduler,
            registry=registry,
            bus=bus,
            clock=clock,
            time_slicer=context.time_slicer,
            meter=Meter(LimitBook(chosen, clock=clock, learn_pending=bus.flush), bus),
        )
        drain_deadlines = DrainDeadlines(registry)
        usage = CallerUsage(handler.meter.book, reporter, time.time, clock)
        site = public_app(handler, running.fleet, usage, None, caller_page(), created=0)
        gateway = BareGateway(
            settings=chosen,
            running=running,
            bus=bus,
            scheduler=scheduler,
            registry=registry,
            handler=handler,
            drain_deadlines=drain_deadlines,
            key_sync=key_sync,
            site=site,
            public=client(site),
            admin=client(None, ADMIN),  # The admin application needs this object.
        )
        bus.subscribe(RequestRecord, gateway.ended.append)
        source = MetricsSource(gateway, context.retries_left)
        metrics = Metrics(bus, source.nodes, source.add_to)
        live = live_feed(gateway, drain_deadlines)
        endpoints = AdminEndpoints(
            gateway,
            metrics=metrics,
            live=live,
            reporter=reporter,
            ended=None,
            document=functools.partial(openapi_json, chosen),
        )
        admin_keys = AdminKeys(chosen.admin.keys, admin_key)
        app = admin_app(endpoints, host=admin_host, keys=admin_keys, extra_hosts=admin_hosts)
        gateway.admin = client(app, ADMIN)
        if serving:
            gateway.public = await stack.enter_async_context(served(site, handler))
        else:
            await stack.enter_async_context(gateway.public)
        await stack.enter_async_context(gateway.admin)
        stack.callback(scheduler.close)
        stack.callback(drain_deadlines.close)
        yield gateway


@asynccontextmanager
async def served(site: ASGIApp, handler: RequestHandler) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the public listener, on a real socket."""
    listen, limits = handler.config.settings.listen, handler.config.settings.limits
    listener = Listener(
        site,
        bind_socket("127.0.0.1", 0),
        protocol=protocol_class(
            limits,
            handler.serve,
            routes={
                path.encode(): route for path, route in routes_of(handler.config.settings).items()
            },
        ),
        keep_alive=listen.keep_alive,
    )
    listener.open()
    try:
        async with httpx.AsyncClient(
            base_url=listener.url,
            timeout=30.0,
            trust_env=False,
            verify=NO_TLS,
            limits=httpx.Limits(max_connections=None),
        ) as http_client:
            yield http_client
    finally:
        # Requests that a test has left running are cut off.
        with suppress(TimeoutError):
            await asyncio.wait_for(listener.close(), 1.0)


def client(app: Any, url: str = ADMIN) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=url, timeout=30.0)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """OpenAI's error object; its code must equal `X-Gateway-Reason`."""
    error: dict[str, Any] = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert response.headers["x-gateway-reason"] == error["code"]
    return error
