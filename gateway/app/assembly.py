"""Builds the gateway's objects, starts them and ends them; nothing else does.

`run` does it in a process: files, event loop, signals and exit status.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import __version__, errors
from gateway.admin.app import AdminEndpoints, admin_app, caller_page
from gateway.admin.configuration import (
    CertificateRenewal,
    ConfigFiles,
    ReloadResult,
    changed_keys,
)
from gateway.admin.live import live_feed
from gateway.admin.nodes import DrainDeadlines
from gateway.admin.status import MetricsSource
from gateway.app import handover, startup
from gateway.app.background import BackgroundWork
from gateway.app.cluster import ClusterPart, Duties
from gateway.app.event_loop import (
    OwnTasks,
    collect_garbage,
    freeze_objects,
    run_event_loop,
    wait_for_first,
)
from gateway.app.learnt import LearntMemory
from gateway.app.metering import Metering
from gateway.app.startup import Options, StartError
from gateway.callers.callers import is_loopback
from gateway.callers.key_desk import group_warnings
from gateway.callers.keys import AdminKeys
from gateway.config.errors import ConfigError, Problem
from gateway.config.inventory import Inventory, load_inventory
from gateway.config.settings import RejectedFiles, Settings, changed_restart_keys, load_settings
from gateway.config.versions import FileKind
from gateway.config.watch import changed_files, file_stamps
from gateway.config.yaml_file import read_text
from gateway.edges.brain import Brain
from gateway.edges.supervisor import MOST_START_SECONDS, Edges, start_edge_process
from gateway.errors import GatewayError
from gateway.events import (
    FEW_DEFERRED,
    MOST_DEFERRED,
    EventBus,
    InventoryChanged,
    SettingsChanged,
    call_later,
)
from gateway.forward.context import ForwardContext
from gateway.forward.forwarder import Forwarder
from gateway.forward.in_flight import InFlightRegistry, TimeoutMonitor
from gateway.http.certificates import CertificateError
from gateway.http.exchange import ConnectionOrigin
from gateway.http.heads import HandlerConfig
from gateway.http.listener import Listener
from gateway.http.protocol import LINGER_SECONDS, protocol_class
from gateway.lease import KeyedHash
from gateway.nodes.calibration import Calibrator
from gateway.nodes.fleet import Fleet
from gateway.nodes.state_files import OperatorOrders, PropertiesStore
from gateway.request.routes import Route, routes_of
from gateway.schedule.autoscaler import Autoscaler
from gateway.schedule.lease_service import LocalLeaseService
from gateway.schedule.model_placer import ModelPlacer
from gateway.schedule.scheduler import Scheduler
from gateway.store.failures import StoreError
from gateway.system import SystemdNotifier, connection_limits, raise_open_file_limit
from gateway.transport.connection import TurnLimit
from gateway.transport.pool import open_node_pool
from gateway.transport.resolver import Resolver
from gateway.watch.audit import AuditTrail
from gateway.watch.event_log import EventLog
from gateway.watch.logs import Logs, set_up_logging
from gateway.watch.metrics import Metrics
from gateway.watch.request_tracing import RequestTracing
from gateway.web.handler import PROGRESS_SECONDS, RequestHandler
from gateway.web.site import Site, public_app, with_cors

NO_EDGE = (
    "no edge has begun to serve: their own errors say why; without `listen.edges` (--edges) this "
    "process serves by itself"
)
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations that are no settings, in seconds; most of each, unless it says otherwise."""

    first_probes: float = 10.0  # until the gateway reports that it is ready, probed or not
    store: float = 5.0  # to wait for the store before the gateway serves without it, or ends
    takeover: float = 1.0  # for what is read before this process takes over from another one
    final_response: float = 5.0  # for clients to read their error, once the grace is over
    successor_ready: float = handover.READY_TIMEOUT
    linger: float = LINGER_SECONDS
    progress: float = PROGRESS_SECONDS  # between two reports
    edges: float = MOST_START_SECONDS


DEFAULT_TIMINGS = Timings()


class Gateway:
    """A gateway; the admin listener controls it and signals end it."""

    version = __version__
    public_listener: Listener | None = None
    admin_listener: Listener | None = None
    cluster: ClusterPart | None
    """What it is in its cluster; None: it is a gateway of its own, and has all duties itself."""
    _cluster_sock: socket.socket | None = None  # listens for the other members
    _was_replaced = False  # another process has become this member
    _serves_routes = True  # whether requests to nodes are served here, not by edges alone
    edges: Edges | None
    """Those that serve the public listener's clients; None: this process does."""

    def __init__(
        self,
        options: Options,
        settings: Settings,
        logs: Logs,
        inherited: handover.InheritedState | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        timings: Timings = DEFAULT_TIMINGS,
        resolver: Resolver | None = None,
    ) -> None:
        self.options, self.settings, self.timings = options, settings, timings
        self._inherited = inherited or handover.InheritedState()
        self.clock, self.started_at = clock, clock()
        self.stopping, self._stop_requested = asyncio.Event(), asyncio.Event()
        self._stop_at_once = asyncio.Event()
        self._successor: subprocess.Popen[bytes] | None = None
        """The process that has taken over the sockets."""
        self._tasks, self._duties = OwnTasks(), OwnTasks()
        self._handing_over, self._notifier = asyncio.Lock(), SystemdNotifier()
        rng = rng or random.Random()
        self._keyed_hash = KeyedHash(self._inherited.hash_key)
        self._loopback, self._edge_count = (
            is_loopback(settings.listen.host), startup.count_edges(settings)
        )  # fmt: skip
        self.bus = EventBus(call_later, FEW_DEFERRED if self._edge_count else MOST_DEFERRED)
        self._resolver, self._turn_limit = resolver or Resolver(), TurnLimit()
        self.fleet = Fleet(
            connect=partial(open_node_pool, resolver=self._resolver, turn=self._turn_limit),
            settings=settings,
            bus=self.bus,
            clock=self.clock,
            rng=rng,
            orders=OperatorOrders(partial(startup.state_file, options)),
            properties_store=PropertiesStore(startup.state_file(options, "seen")),
            has_predecessor=self._inherited.ready_fd is not None,
        )
        self.registry = InFlightRegistry()
        self.scheduler = Scheduler(
            self.fleet,
            settings,
            self.clock,
            rng,
            learn_pending=self.bus.flush,
            yield_slot=self.registry.yield_slot,
        )
        self.autoscaler = Autoscaler(self.fleet, self.scheduler, self.bus, self.clock)
        self.model_placer = ModelPlacer(
            self.fleet, self.scheduler, settings, self.bus, self.clock, options.read_memory
        )
        self.calibrator = Calibrator(self.fleet, self.bus, self.clock, rng)
        self.tracing = RequestTracing(
            settings.telemetry.traces, self.scheduler.decision_log, clock=self.clock, rng=rng
        )
        self.timeout_monitor = TimeoutMonitor(self.clock)
        self.proxy_context = ForwardContext(
            LocalLeaseService(self.scheduler, self.fleet),
            settings,
            self.bus,
            self.timeout_monitor,
            self.clock,
            keyed_hash=self._keyed_hash,
        )
        self.forwarder = Forwarder(self.proxy_context)
        metering = self.metering = Metering(
            options,
            settings,
            access=self._inherited.anonymous_access,
            scheduler=self.scheduler,
            registry=self.registry,
            bus=self.bus,
            on_groups=self._put_groups_in_force,
        )
        self.store, self.ledger = metering.store, metering.ledger
        self.key_ring, self.key_sync = metering.key_ring, metering.key_sync
        self.standings, self.undefined_groups = metering.standings, metering.undefined_groups
        self.bus.subscribe(InventoryChanged, lambda _: self._warn_of_empty_pools())
        self.background = BackgroundWork(
            options,
            lambda: self.settings,
            self._handler_config(settings).rules,
            metering=self.metering,
            scheduler=self.scheduler,
            context=self.proxy_context,
            forwarder=self.forwarder,
            registry=self.registry,
            tracing=self.tracing,
            is_sole=self.member is not None,
            is_folder_there=lambda folder: (
                None if self.cluster is None else self.cluster.has_folder(folder)
            ),
        )
        self.quotas = self.background.quotas
        self.handler = RequestHandler(
            self._handler_config(settings),
            forwarder=self.forwarder,
            queue=self.scheduler,
            registry=self.registry,
            bus=self.bus,
            clock=self.clock,
            time_slicer=self.proxy_context.time_slicer,
            meter=self.metering.meter,
            progress_seconds=timings.progress,
            storing=self.background.storing(self.scheduler),
            tracing=self.tracing,
        )
        source = MetricsSource(
            self, self.proxy_context.retries_left, self.background.add_metrics, self.tracing
        )
        self.metrics = Metrics(self.bus, source.nodes, source.add_to, self._told_name)
        event_log = EventLog(self.bus, logs, name_of=self.key_ring.name_of)
        self._logs, self._event_log = logs, event_log
        self._configure_events()
        self.drain_deadlines, self.storage = DrainDeadlines(self.registry), self.background.storage
        self.audit = AuditTrail(time.time, self.store, member=self.member or "")
        self.admin_keys = AdminKeys(had_keys=self._inherited.had_admin_keys)
        self.certificates = load_certificates(settings, self.fleet, self.audit)
        self.live = live_feed(self, self.drain_deadlines)
        self.learnt = LearntMemory.of_gateway(
            self.scheduler,
            self.live.view.history,
            self.live.view.node_history,
            self.bus,
            self.key_ring,
            self._keyed_hash,
            self.store or startup.state_file(options, "learnt"),
            startup.gateway_name(options, settings),
            lambda: self.settings.prompts.remember,
            saved_prompts=self.model_placer.saved_prompts,
            has_hash_key=self._inherited.hash_key is not None,
        )
        self.config_files = FileReloader(
            options,
            settings=lambda: self.settings,
            apply_settings=self._apply_settings,
            fleet=self.fleet,
            bus=self.bus,
            audit=self.audit,
            certificates=self.certificates,
        )
        self._routes: dict[bytes, Route] = {}
        """What clients may ask of nodes; shared with the public listener's connections."""
        self._created = int(time.time())  # the `created` of every model, which no reload changes
        self.edges = self._make_edges() if self._edge_count else None
        self.cluster = self._make_cluster()
        self._public_app = self._make_public_app()

    @property
    def member(self) -> str | None:
        """The name of this gateway in its cluster; None: there is none."""
        return None if self.settings.cluster is None else self.settings.cluster.member_name

    def _told_name(self, key_id: str) -> str | None:
        return self.key_ring.name_of(key_id) if self.settings.telemetry.key_names else None

    # Start, shutdown and handover.

    @contextlib.asynccontextmanager
    async def running(
        self, inventory: Inventory, before_clients: Callable[[], None] = lambda: None
    ) -> AsyncIterator[None]:
        """Serve while inside this context. Raises: StartError."""
        open_files = raise_open_file_limit()
        try:
            if self.store is not None:
                self.store.start()
            self.public_listener, self.admin_listener = self._make_listeners(open_files)
            self._cluster_sock = handover.bind_cluster(self.settings, self._inherited)
            await self.fleet.start(inventory)
            self._tasks.start(self.config_files.watch(inventory), "watch the files")
            self._tasks.start(self.certificates.watch(), "watch the certificates")
            self._tasks.start(self.audit.run(), "write the audit log")
            self._tasks.start(self.live.run(), "read the live view")
            self._tasks.start(self._notifier.feed_watchdog(), "feed the watchdog")
            if self._inherited.ready_fd is not None:
                # The predecessor serves until this process knows its nodes.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(
                        self.fleet.first_probes_done.wait(), self.timings.first_probes
                    )
            await self.metering.load(self.timings.store)
            await self.learnt.load(self.timings.store)
            self.metering.begin(self._tasks)
            self.background.begin_writing(self._tasks)
            seconds = self.timings.edges if self.cluster is None else 0.0
            if self.edges is not None and not await self.edges.start(seconds) and seconds:
                raise StartError(NO_EDGE)
            before_clients()
            handover.open_listeners(self.public_listener, self.admin_listener)
            log.info(
                "listening",
                version=__version__,
                public=self.public_listener.url,
                admin=self.admin_listener.url,
                nodes=len(self.fleet.nodes),
                open_files=open_files,
            )
            self._warn_of_empty_pools()
            self._warn_of_undefined_groups()
            self._notifier.notify("READY=1", f"STATUS=serving on {self.public_listener.url}")
            self._inherited.notify_ready()
            self.audit.record("gateway", None, "start", __version__)
            # Not earlier: the predecessor places models, calibrates and writes the file until now.
            self._tasks.start(self.fleet.properties_store.save_loop(), "save what nodes said")
            if self.member is None:
                waits = self._inherited.wait_for_learnt
                self.begin_duties(None if self._inherited.learnt_fd is None else waits)
            if self.cluster is not None and self._cluster_sock is not None:
                for warning in startup.cluster_warnings(self.settings):
                    log.warning("cluster", warning=warning)
                # Not earlier: the predecessor is the member until now.
                self.cluster.start(self._cluster_sock, self.public_listener, self.admin_listener)
            yield
        finally:
            await self._close()

    # The duties that only one process has of those that share nodes and store.

    async def catch_up(self) -> None:
        """Read what the others have learnt and counted, within about a second."""
        seconds = self.timings.takeover
        await asyncio.gather(
            self.metering.bring_up_to_date(seconds), self.learnt.load(seconds, anew=True)
        )

    def begin_duties(self, predecessor: Callable[[], Awaitable[None]] | None = None) -> None:
        """Take them over; it can be done again when `end_duties` has ended.

        `predecessor` waits until a process that this one succeeds has written what it has learnt.
        """
        self._duties.start(self.autoscaler.run(), "start and stop standby nodes")
        self.background.begin(self._duties)
        self._duties.start(self.model_placer.run(), "load and unload models")
        self._duties.start(self.calibrator.run(), "calibrate idle nodes")
        self._duties.start(self.learnt.run(predecessor), "keep what was learnt")

    async def end_duties(self) -> None:
        """Leave them to another process, which runs again what of callers' work was running here.

        It is given back to the store, if that answers.
        """
        self.learnt.end_writing()
        await self._duties.end()

    def _make_cluster(self) -> ClusterPart | None:
        settings, store, edges = self.settings.cluster, self.store, self.edges
        if settings is None or store is None or edges is None:
            return None
        process, certificate = self.metering.process, self.certificates.member
        assert process is not None
        assert certificate is not None

        def folder_id() -> str:
            files = self.background.files
            return "" if files is None else files.storage.folder.id or ""

        duties = Duties(
            self.catch_up, self.begin_duties, self.end_duties, self._replaced, folder_id,
            lambda served: self._route(served=served),
        )  # fmt: skip
        return ClusterPart(settings, process.id, certificate, store, edges, duties)

    def _replaced(self, process: str) -> None:
        """Another process has registered as this member: a successor, unless it comes unasked."""
        if self._handing_over.locked() or self._successor is not None:
            return
        self._was_replaced = True
        log.error(
            "another process has become this member of the cluster, so this one ends",
            member=self.member,
            process=process,
            remedy="give each member a name of its own (cluster.member)",
        )
        self.stop()

    def stop(self) -> None:
        """Shut down gracefully; called again, at once."""
        if self._stop_requested.is_set():
            self._stop_at_once.set()
        self._stop_requested.set()
        self.stopping.set()

    def schedule_handover(self) -> None:
        """Start a successor, and hand the sockets over once it is ready (SIGUSR2)."""
        if not self.options.restart_command:
            log.warning("no successor", why="only 'llama-gateway serve' can be succeeded")
        elif not self.stopping.is_set() and not self._handing_over.locked():
            self._tasks.start(self._hand_over(), "handover")

    async def _hand_over(self) -> None:
        assert self.public_listener is not None
        assert self.admin_listener is not None
        async with self._handing_over:
            sockets = {"public": self.public_listener.sock, "admin": self.admin_listener.sock}
            if self._cluster_sock is not None:
                sockets["cluster"] = self._cluster_sock
            command = self.options.restart_command
            log.info("starting a successor", command=command[0])
            learnt_pipe = self.learnt.open_pipe()
            try:
                self._successor = await handover.start_successor(
                    command,
                    sockets,
                    from_systemd=self._inherited.from_systemd,
                    hash_key=self._keyed_hash.key,
                    learnt_pipe=learnt_pipe,
                    extra_environment=handover.successor_environment(
                        self.key_ring.access,
                        self.options.settings_file,
                        customised=not self.config_files.has_defaults,
                        had_admin_keys=self.admin_keys.needed,
                    ),
                    timeout=self.timings.successor_ready,
                )
            except handover.HandoverFailed as error:
                log.error("no successor", why=str(error))  # noqa: TRY400 - no traceback needed
                self.audit.record("signal", None, "handover", "", "failed")
                self.learnt.close_pipe()
                return
            finally:
                learnt_pipe.close()
            if self.cluster is not None:
                self.cluster.drain()
            self.fleet.hand_over()
            self.autoscaler.hand_over()
            self.model_placer.hand_over()
            self.calibrator.stop()
            self.background.stop()
            self.fleet.properties_store.stop_saving()
            self._notifier.notify(f"MAINPID={self._successor.pid}")
            self.audit.record("signal", None, "handover", f"pid {self._successor.pid}")
            self.stopping.set()

    async def shut_down(self) -> int:
        """Let requests in flight end within the grace; returns the exit status.

        That is 0, or 1 if a second signal cut the grace short. After a handover, the grace begins
        with a signal to end.
        """
        shutdown = self.settings.shutdown
        assert self.public_listener is not None
        if self._successor is not None:
            log.info("succeeded", pid=self._successor.pid, in_flight=len(self.registry))
            closing = asyncio.create_task(self._end_clients(self.public_listener, drain=True))
            await self.learnt.close(self.timings.store)
            # Nobody waits for this process to end, so requests keep their usual time limits.
            await wait_for_first(asyncio.wait([closing]), self._stop_requested.wait())
            self.background.end()
        else:
            self._notifier.notify("STOPPING=1")
            self.audit.record("signal", None, "stop")
            if self.cluster is not None and self.cluster.has_others:
                self.cluster.drain()
            log.info("shutting down", in_flight=len(self.registry), grace=shutdown.grace)
            self.handler.begin_shutdown()
            self.calibrator.stop()
            self.background.stop()
            await self._unless_stopped(asyncio.sleep(shutdown.delay))
            self.handler.reject_requests()
            if self.edges is not None:
                self.edges.reject()
            self.background.end()
            closing = asyncio.create_task(self._end_clients(self.public_listener, drain=False))
        try:
            if not await self._unless_stopped(asyncio.wait([closing], timeout=shutdown.grace)):
                return 1
            if not closing.done():
                await self._unless_stopped(self.background.give_up())
                left = self.registry.cancel_where(lambda _: True, errors.shutting_down())
                self.scheduler.refuse_all(errors.shutting_down)
                log.warning("the grace is over", ended=left)
                await self._unless_stopped(
                    asyncio.wait([closing], timeout=self.timings.final_response)
                )
        finally:
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
        return 1 if self._stop_at_once.is_set() or self._was_replaced else 0

    async def _end_clients(self, listener: Listener, *, drain: bool) -> None:
        """Accept no more connections, and wait until those that there are, or their requests, end.

        `drain`: until all connections have, and what waits has ended that runs here.
        """
        if self.edges is not None:
            listener.stop_accepting()
            await self.edges.end(drain=drain)
        await (listener.drain() if drain else listener.close())
        if drain:
            await self.background.drain()

    async def _unless_stopped(self, awaitable: Awaitable[Any]) -> bool:
        """Wait for it; returns False as soon as a second signal comes."""
        await wait_for_first(awaitable, self._stop_at_once.wait())
        return not self._stop_at_once.is_set()

    async def _close(self) -> None:
        if self.edges is not None:
            await self.edges.aclose()
        if self.cluster is not None:
            await self.cluster.aclose()
        if self._cluster_sock is not None:
            self._cluster_sock.close()
        await self._duties.end()
        await self._tasks.end()
        await handover.close_listeners(self.public_listener, self.admin_listener)
        await self.learnt.close(self.timings.store)
        await self.background.aclose(self.timings.store)
        self.drain_deadlines.close()
        self.timeout_monitor.close()
        self.scheduler.close()
        await self.fleet.aclose()
        self._resolver.close()
        self.fleet.properties_store.save()
        self.bus.flush()
        await self.tracing.aclose()
        if self.ledger is not None:
            await self.ledger.close(self.timings.store)
        with contextlib.suppress(StoreError, TimeoutError):
            await asyncio.wait_for(self.audit.flush(), self.timings.store)
        if self.store is not None and not await self.store.aclose(self.timings.store):
            log.warning("the store does not answer and was left as it is")
        log.info("ended")

    # Listeners.

    def _make_listeners(self, open_files: int) -> tuple[Listener, Listener]:
        listen, admin = self.settings.listen, self.settings.admin
        limits = self.settings.limits
        most_public, most_admin = connection_limits(
            open_files, limits.connections, limits.connections
        )
        if most_public < limits.connections:
            log.warning(
                "fewer connections than the settings say", most=most_public, open_files=open_files
            )
        file_key = None if admin.key_file is None else startup.read_admin_key(admin.key_file)
        self.admin_keys.configure(admin.keys, file_key)
        public_sock, admin_sock = handover.bind_listeners(self.settings, self._inherited)
        public = Listener(
            self._serve_public,
            public_sock,
            protocol=protocol_class(
                limits.model_copy(update={"connections": most_public}),
                self.handler.serve,
                listen.trusted_proxies,
                routes=self._routes,
                linger_seconds=self.timings.linger,
                turn=self._turn_limit,
            ),
            keep_alive=listen.keep_alive,
            tls=self.certificates.listeners.context_of("listen.tls"),
            edges=self.edges,
        )
        cluster = self.cluster
        endpoints = AdminEndpoints(
            self,
            metrics=self.metrics,
            live=self.live,
            reporter=self.metering.reporter,
            ended=self.metering.ended,
            document=self._openapi_document,
            standing_error=_standing_error(cluster),
            kept=self.background.kept_for_callers(),
        )
        app = admin_app(
            endpoints,
            host=admin.host,
            keys=self.admin_keys,
            extra_hosts=admin.hosts,
            relayed=None if cluster is None else partial(cluster.relayed, kind="admin"),
        )
        protocol = protocol_class(
            limits.model_copy(update={"connections": most_admin}),
            linger_seconds=self.timings.linger,
            turn=self._turn_limit,
        )
        return public, Listener(
            app,
            admin_sock,
            protocol=protocol,
            keep_alive=listen.keep_alive,
            tls=self.certificates.listeners.context_of("admin.tls"),
        )

    def _openapi_document(self, listener: str | None) -> bytes:
        from gateway.openapi import openapi_json  # whoever starts has no use for it

        ring, anonymous = self.handler.config.key_ring, self.settings.allow_anonymous
        return openapi_json(
            self.settings,
            listener,
            needs_key=len(ring) > 0 and not anonymous,
            needs_admin_key=self.admin_keys.needed,
        )

    async def _serve_public(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._public_app(scope, receive, send)

    def _make_public_app(self) -> ASGIApp:
        """The public application under these settings, and the paths that do not go there."""
        self._route(served=self._serves_routes)
        usage = self.metering.caller_usage()
        kept = self.background.kept_for_callers()
        site = Site(
            self.handler,
            self.fleet,
            usage,
            self.metering.own_requests,
            caller_page(),
            created=self._created,
            kept=kept,
            standing_error=_standing_error(self.cluster),
        )
        app = public_app(site)
        app = app if self.settings.cors is None else with_cors(app, self.settings.cors)
        return app if self.cluster is None else self.cluster.relayed(app, "public")

    def _route(self, *, served: bool) -> None:
        """Whether requests to nodes are served here that come to the public listener."""
        self._serves_routes = served
        self._routes.clear()
        if served:
            routes = routes_of(self.settings)
            self._routes.update((path.encode(), route) for path, route in routes.items())

    def _make_edges(self) -> Edges:
        brain = Brain(
            self.scheduler, self.proxy_context, self.registry, self.metering.meter, self.key_ring,
            self.bus, self.tracing, self._loopback, edges=self._edge_count,
            clustered=self.member is not None, ledger=self.ledger,
        )  # fmt: skip

        def adopt(sock: socket.socket, origin: ConnectionOrigin | None) -> None:
            assert self.public_listener is not None
            self.public_listener.adopt(sock, origin)

        clustered = self.member is not None

        async def start(name: str, channel: socket.socket) -> Process:
            logging = self.settings.logging
            words = logging.level, logging.format
            return await start_edge_process(name, channel, *words, clustered=clustered)

        is_successor = clustered and self._inherited.ready_fd is not None
        suffix = f"-{os.getpid()}" if is_successor else ""
        return Edges(brain, adopt, self.clock, start, self.member, suffix)

    def _handler_config(self, settings: Settings) -> HandlerConfig:
        if self._edge_count:
            limits = startup.share_memory(settings.limits, self._edge_count)
            settings = settings.model_copy(update={"limits": limits})
        return HandlerConfig(
            settings,
            loopback=self._loopback,
            keyed_hash=self._keyed_hash,
            key_ring=self.key_ring,
            catalog=self.fleet.model_index,
        )

    # Reload.

    def schedule_reload(self) -> None:
        """Reload both files, and read the certificates again (SIGHUP)."""
        self._tasks.start(self.config_files.reload_on_signal(), "reload")

    async def reload(self) -> ReloadResult:
        """Reload both files, and read the certificates again. Raises: ConfigError."""
        return await self.config_files.reload()

    def _apply_settings(self, settings: Settings, admin_key: str | None) -> SettingsChanged:
        """Put these settings in force, and the key of `admin.key_file`."""
        self.admin_keys.configure(settings.admin.keys, admin_key)
        old, self.settings = self.settings, settings
        change = SettingsChanged(needs_restart=changed_restart_keys(old, settings))
        self.proxy_context.usage_options.forget()
        if settings == old:
            return change
        self.scheduler.configure(settings)
        self.model_placer.configure(settings)
        self.fleet.configure(settings)
        self.metering.configure(settings)
        self._put_groups_in_force()
        if self.edges is not None:
            self.edges.brain.configure()
        self._configure_events()
        self._logs.configure(settings.logging.level)
        self.tracing.configure(settings.telemetry.traces)
        self._public_app = self._make_public_app()
        self.bus.publish(change)
        self._warn_of_empty_pools()
        self._warn_of_undefined_groups()
        return change

    def _configure_events(self) -> None:
        logging = self.settings.logging
        self.metrics.configure(gen_ai=self.settings.telemetry.gen_ai_metrics)
        self._event_log.configure(logging.access_share if logging.access else 0.0)

    def _put_groups_in_force(self) -> None:
        """Serve new requests by the settings, and by the store's groups beside theirs."""
        settings = self.metering.in_force
        self.proxy_context.configure(settings)
        self.handler.configure(self._handler_config(settings))
        self.background.configure(settings, self.handler.config.rules)

    def _warn_of_undefined_groups(self) -> None:
        for warning in group_warnings(self.undefined_groups()):
            log.warning("group", warning=warning)

    def _warn_of_empty_pools(self) -> None:
        labels = (node.spec.labels for node in self.fleet.nodes.values())
        for warning in startup.empty_pools(self.settings, labels):
            log.warning("pool", warning=warning)


class FileReloader(ConfigFiles):
    """Both files. An invalid one changes nothing, and does not keep the other from being read."""

    def __init__(
        self,
        options: Options,
        *,
        settings: Callable[[], Settings],
        apply_settings: Callable[[Settings, str | None], SettingsChanged],
        fleet: Fleet,
        bus: EventBus,
        audit: AuditTrail,
        certificates: CertificateRenewal,
    ) -> None:
        """`settings` are those in force; `apply_settings` takes the key of `admin.key_file` too."""
        super().__init__(
            startup.histories(options),
            options.overrides(os.environ),
            partial(startup.check_text, options),
        )
        self._options, self._settings, self._apply_settings = options, settings, apply_settings
        self._fleet, self._bus = fleet, bus
        self._audit, self._certificates = audit, certificates
        self._reloading = asyncio.Lock()
        self._inventory: Inventory | None = None

    @property
    def has_defaults(self) -> bool:
        """Whether the settings in force are the defaults."""
        return self._settings() == self._options.apply_to(Settings())

    async def reload(self) -> ReloadResult:
        """Reload both files, and read the certificates again.

        Raises: ConfigError; then an invalid file has changed nothing.
        """
        async with self._reloading:
            problems: list[Problem] = []
            inventory_change = settings_change = None
            try:
                settings_change = await self._reload_settings()
            except ConfigError as error:
                problems += error.problems
            try:
                inventory_change = await self._reload_inventory()
            except ConfigError as error:
                problems += error.problems
            problems += await self._certificates.reread()
            if inventory_change is None or settings_change is None or problems:
                raise ConfigError(problems)
            return ReloadResult(inventory_change, settings_change)

    async def reload_on_signal(self) -> None:
        """Reload both files, and read the certificates again; problems are only told."""
        self._audit.record("signal", None, "reload")
        await self._reload_quietly("signal", inventory=True, settings=True)
        await self._certificates.reread()

    async def watch(self, inventory: Inventory) -> None:
        """Reload each file when it changes; never ends. `inventory` is the one in force."""
        options, self._inventory = self._options, inventory
        paths = [path for path in (options.inventory_file, options.settings_file) if path]
        before = file_stamps(paths)
        # They may have been edited since the start, which may have taken minutes.
        differs = await self._differs_from(inventory)
        await self._reload_quietly("file", inventory=differs, settings=True)
        async for changed in changed_files(lambda: paths, since=before):
            # One that was refused may fit the other by now.
            await self._reload_quietly(
                "file",
                inventory=options.inventory_file in changed or self.inventory_error is not None,
                settings=options.settings_file in changed or self.settings_error is not None,
            )

    async def _differs_from(self, inventory: Inventory) -> bool:
        path = self._options.inventory_file
        try:
            text = await asyncio.to_thread(_text_of, path)
            if await asyncio.to_thread(load_inventory, path, text=text) != inventory:
                return True
        except (ConfigError, OSError):
            return True
        await self._keep("nodes", text)
        return False

    async def _keep(self, kind: FileKind, text: str | None) -> None:
        history = self.histories.get(kind)
        if text is None or history is None:
            return
        self.in_force[kind] = text
        try:
            await asyncio.to_thread(history.keep, text, time.time())
        except OSError as error:
            log.warning("no history of a file", file=str(history.file), why=str(error))

    async def _reload_quietly(self, actor: str, *, inventory: bool, settings: bool) -> None:
        async with self._reloading:
            # Each file on its own: an invalid one must not keep the other from being read.
            if settings:
                before = self._settings()
                with contextlib.suppress(ConfigError, OSError):
                    await self._reload_settings()
                changed = changed_keys(before, self._settings())
                invalid = self.settings_error is not None
                self._audit.record_settings(actor, changed, invalid=invalid)
            if inventory:
                change = None
                with contextlib.suppress(ConfigError, OSError):
                    change = await self._reload_inventory()
                self._audit.record_inventory(actor, change)

    async def _reload_inventory(self) -> InventoryChanged:
        try:
            path = self._options.inventory_file
            text = await asyncio.to_thread(_text_of, path)
            inventory = await asyncio.to_thread(load_inventory, path, text=text)
            await self._check_fit(self._settings(), inventory)
            change = self._fleet.apply(inventory)
            self._inventory = inventory
        except (ConfigError, OSError) as error:
            self.inventory_error = str(error)
            self._bus.publish(InventoryChanged(error=self.inventory_error))
            raise
        self.inventory_error = None
        self._bus.publish(change)
        await self._keep("nodes", text)
        return change

    async def _reload_settings(self) -> SettingsChanged:
        try:
            # An empty file changes nothing: it may come of an unfinished edit or a full disk.
            rejected: RejectedFiles = "nothing" if self.has_defaults else "empty"
            path = self._options.settings_file
            text = await asyncio.to_thread(_text_of, path)
            loaded = await asyncio.to_thread(load_settings, path, rejected=rejected, text=text)
            settings = self._options.apply_to(loaded)
            admin_key = await asyncio.to_thread(startup.reread_admin_key, settings.admin.key_file)
            startup.check_extras(settings, path)
            await self._check_fit(settings, self._inventory)
        except (ConfigError, OSError) as error:
            self.settings_error = str(error)
            self._bus.publish(SettingsChanged(error=self.settings_error))
            raise
        self.settings_error = None
        change = self._apply_settings(settings, admin_key)
        await self._keep("gateway", text)
        return change

    async def _check_fit(self, settings: Settings, inventory: Inventory | None) -> None:
        """Check that a file fits the other: as it is in force, else as it is on disk by now.

        Raises: ConfigError; then the file is read again when the other changes.
        """
        files = self._options.settings_file, self._options.inventory_file

        def check(settings: Settings, inventory: Inventory) -> None:
            try:
                startup.check_fit(settings, inventory, *files)
            except ConfigError as error:
                try:
                    settings, inventory = load_settings(files[0]), load_inventory(files[1])
                except (ConfigError, OSError):
                    raise error from None
                startup.check_fit(settings, inventory, *files)

        if inventory is not None:
            await asyncio.to_thread(check, settings, inventory)


def _text_of(path: Path | None) -> str | None:
    """The file's text; None: there is no file. Raises: ConfigError."""
    return None if path is None or not os.path.lexists(path) else read_text(path)


def _standing_error(cluster: ClusterPart | None) -> Callable[[], GatewayError | None]:
    """Why this gateway serves nobody now, though it runs; None: it does."""
    return (lambda: None) if cluster is None else cluster.standing_error


def load_certificates(settings: Settings, fleet: Fleet, audit: AuditTrail) -> CertificateRenewal:
    """The certificates of the settings, at the start. Raises: StartError."""
    try:
        return CertificateRenewal(settings, fleet, audit)
    except CertificateError as error:
        raise StartError(str(error), 2) from None


def run(options: Options) -> int:
    """Serve until a signal ends the process; returns its exit status. Raises: StartError."""
    inherited = handover.inherit_from_environment()
    options = inherited.apply_to(options)
    settings, inventory = startup.load_checked(options, allow_empty=not inherited.customised)
    with set_up_logging(settings.logging.level, settings.logging.format) as logs:
        return run_event_loop(serve(options, settings, inventory, logs, inherited=inherited))


async def serve(
    options: Options,
    settings: Settings,
    inventory: Inventory,
    logs: Logs,
    on_ready: Callable[[Gateway], None] | None = None,
    *,
    inherited: handover.InheritedState | None = None,
) -> int:
    """Serve until a signal ends the process; returns its exit status. Raises: StartError.

    `on_ready` is called once every node has been probed, or after `Timings.first_probes`.
    """
    for problem in inventory.warnings:
        structlog.get_logger().warning("inventory", warning=str(problem))
    gateway = Gateway(options, settings, logs, inherited)
    loop = asyncio.get_running_loop()
    collector: asyncio.Task[None] | None = None
    signals = {
        signal.SIGTERM: gateway.stop,
        signal.SIGINT: gateway.stop,
        signal.SIGHUP: gateway.schedule_reload,
        signal.SIGUSR2: gateway.schedule_handover,
    }
    for number, handler in signals.items():
        loop.add_signal_handler(number, handler)
    try:
        async with gateway.running(inventory, freeze_objects):
            collector = asyncio.create_task(collect_garbage(lambda: not gateway.registry))
            if on_ready is not None:
                probed, limit = gateway.fleet.first_probes_done, gateway.timings.first_probes
                await wait_for_first(probed.wait(), gateway.stopping.wait(), timeout=limit)
                if not gateway.stopping.is_set():
                    on_ready(gateway)
            await gateway.stopping.wait()
            return await gateway.shut_down()
    finally:
        if collector is not None:
            collector.cancel()
        for number in signals:
            loop.remove_signal_handler(number)
