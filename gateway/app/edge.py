"""An edge as a process: it relays what clients and nodes send, as its brain decides.

`python -m gateway edge NAME OF SOCKETS LEVEL FORMAT`: over the descriptor SOCKETS
(`edges/supervisor.py`) the edge gets the connections of clients, and the link over which it is told
all that it must know; the last two are for its log. Signals are the brain's business: an edge ends
when it is told to, or when its brain has ended.

OF is `single`, or `clustered`: then the edge belongs to a member of a cluster. It gets one link
after the other, to whoever is its brain then, and it ends when that member has ended.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import cast

import structlog

from gateway.app.event_loop import collect_garbage, freeze_objects, run_event_loop
from gateway.app.startup import share_memory
from gateway.cluster.leadership import boot_clock
from gateway.config.settings import Settings
from gateway.config.watch import changed_files
from gateway.edges import sockets
from gateway.edges.edge import EdgeServices, NotReady
from gateway.edges.passing import Passing, over_channel
from gateway.forward.forwarder import Forwarder
from gateway.http.certificates import CertificateError, ListenerCertificates
from gateway.http.heads import HandlerConfig
from gateway.http.listener import ClientServer
from gateway.http.protocol import protocol_class
from gateway.request.routes import Route, routes_of
from gateway.system import connection_limits, raise_open_file_limit
from gateway.watch.logs import LogFormat, Logs, set_up_logging
from gateway.web.background import TakesStorable
from gateway.web.handler import RequestHandler

KNOWN_SECONDS = 50.0  # until the edge has been told what it must know
# Seconds until the ledger has the last records, when an edge ends: longer than a takeover lasts.
BOOKED_SECONDS = 10.0
LOAD_SECONDS = 0.1  # seconds between two looks at how busy it is
STEADY_LOOKS = 10  # looks after which that is told again though it has not changed
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
log = structlog.get_logger()


def main(arguments: Sequence[str]) -> None:
    """Serve until the brain ends it; exits with the process's status."""
    if len(arguments) != 5 or arguments[1] not in {sockets.SINGLE, sockets.CLUSTERED}:
        sys.exit("a gateway starts its edges itself: llama-gateway serve --edges N")
    name, kind, channel, level, log_format = arguments
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    channel_end = socket.socket(fileno=int(channel))
    with set_up_logging(level, cast("LogFormat", log_format)) as logs:
        clustered = kind == sockets.CLUSTERED
        status = run_event_loop(serve(name, channel_end, logs, clustered=clustered))
    sys.exit(status)


async def serve(name: str, channel: socket.socket, logs: Logs, *, clustered: bool) -> int:
    """Serve as this edge until the brain ends it; returns the exit status."""
    edge = Edge(name, channel, logs, clustered=clustered)
    try:
        await edge.services.wait_ready(None if clustered else KNOWN_SECONDS)
        edge.open()
        return await edge.run()
    except (NotReady, CertificateError) as error:
        log.error("an edge can't serve", edge=name, why=str(error))  # noqa: TRY400
        return 1
    finally:
        await edge.aclose()


def handler_config(services: EdgeServices, settings: Settings) -> HandlerConfig:
    """What an edge's handler needs of the settings in force there."""
    return HandlerConfig(
        settings,
        loopback=services.loopback,
        keyed_hash=services.keyed_hash,
        key_ring=services.key_ring,
        catalog=services.catalog,
    )


def request_handler(
    services: EdgeServices, settings: Settings, storing: TakesStorable | None = None
) -> RequestHandler:
    """What serves the requests to an edge; `storing` takes those that are to be kept."""
    context = services.context
    return RequestHandler(
        handler_config(services, settings),
        forwarder=Forwarder(context),
        queue=services.scheduler,
        registry=services.registry,
        bus=services.bus,
        clock=context.clock,
        time_slicer=context.time_slicer,
        meter=services.meter,
        storing=storing,
        tracing=services.tracing,
    )


class Edge:
    """One edge; `services` must be ready before `open`."""

    def __init__(
        self, name: str, channel: socket.socket, logs: Logs, *, clustered: bool = False
    ) -> None:
        self.services = EdgeServices(
            name,
            clustered=clustered,
            clock=boot_clock if clustered else time.monotonic,
            on_configured=self._configure,
            on_lost=lambda _: self._link_lost(),
        )
        self._links = 0  # the number of the last link
        self._logs = logs
        self._orders: asyncio.Queue[sockets.Drain | sockets.End | None] = asyncio.Queue()
        """What the brain wants; None: it has ended."""
        self._channel: sockets.SocketChannel[sockets.ToEdge] = sockets.SocketChannel(
            channel, sockets.ToEdge, self._receive, self._channel_lost
        )
        self._open_files = raise_open_file_limit()
        self._passing = Passing(over_channel(self._channel))
        self._routes: dict[bytes, Route] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._handler: RequestHandler | None = None
        self._server: ClientServer | None = None

    def open(self) -> None:
        """Begin to serve clients. Raises: CertificateError."""
        services, settings = self.services, self._settings()
        self._handler = request_handler(services, settings, self._passing)
        self._configure()
        certificates = ListenerCertificates({"listen.tls": settings.listen.tls})
        self._server = ClientServer(
            self._passing,
            protocol=protocol_class(
                settings.limits,
                self._handler.serve,
                settings.listen.trusted_proxies,
                routes=self._routes,
                turn=services.turn_limit,
            ),
            keep_alive=settings.listen.keep_alive,
            tls=certificates.context_of("listen.tls"),
        )
        self._server.open()
        registry = services.registry
        self._tasks = [
            asyncio.create_task(self._tell_load(self._server), name="tell the load"),
            asyncio.create_task(_renew(certificates), name="watch the certificates"),
            asyncio.create_task(collect_garbage(lambda: not registry), name="collect garbage"),
        ]
        freeze_objects()
        self._channel.send(sockets.Ready())

    async def run(self) -> int:
        """Serve until the brain ends this edge; returns the exit status."""
        assert self._server is not None
        work: asyncio.Task[None] | None = None
        while True:
            order = asyncio.create_task(self._orders.get())
            waits = [order] if work is None else [order, work]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not order.done():
                order.cancel()
                await self.services.wait_booked(BOOKED_SECONDS)
                return 0
            match order.result():
                case None:
                    # The brain has ended: what runs here can't be accounted for.
                    return 1
                case sockets.Drain():
                    work = asyncio.create_task(self._server.drain())
                case sockets.End():
                    work = asyncio.create_task(self._server.close())

    async def aclose(self) -> None:
        """Tell the brain the last, and end."""
        for task in self._tasks:
            task.cancel()
        await self.services.aclose()
        self._channel.close()

    def _receive(self, message: sockets.ToEdge, sock: socket.socket | None) -> None:
        match message:
            case sockets.NewClient():
                # First: the brain gives it to another edge if this one ends before.
                self._channel.send(sockets.Taken())
                if sock is None:
                    log.error("a connection was lost, as there is no descriptor left")
                elif self._server is not None:
                    sock.setblocking(False)
                    self._server.adopt(sock)
            case sockets.Reject():
                if self._handler is not None:
                    self._handler.reject_requests()
            case sockets.Drain() | sockets.End():
                self._orders.put_nowait(message)
            case sockets.NewLink():
                self._links = message.number
                if sock is not None:
                    loopback, edges = message.loopback, message.edges
                    self.services.relink(sock, loopback=loopback, edges=edges)
                else:
                    self._channel.send(sockets.LinkEnded(message.number))

    def _link_lost(self) -> None:
        if self.services.clustered:
            self._channel.send(sockets.LinkEnded(self._links))
        else:
            self._orders.put_nowait(None)

    def _channel_lost(self) -> None:
        self._orders.put_nowait(None)
        self.services.give_up("its gateway has ended")

    async def _tell_load(self, server: ClientServer) -> None:
        """Tell the brain how busy this edge is, until cancelled."""
        told, steady = sockets.EdgeLoad(0, 0, 0, 0.0, 0), STEADY_LOOKS
        while True:
            fresh = sum(one.cycle is None for one in server.connections)
            streams, connections = len(self.services.registry), len(server.connections)
            steady += 1
            if steady > STEADY_LOOKS or (streams, fresh, connections) != (
                told.streams, told.fresh, told.connections
            ):  # fmt: skip
                memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                told = sockets.EdgeLoad(streams, fresh, connections, time.process_time(), memory)
                self._channel.send(told)
                steady = 0
            await asyncio.sleep(LOAD_SECONDS)

    # Settings.

    def _settings(self) -> Settings:
        """The settings in force, with this edge's share of the limits."""
        settings, edges = self.services.settings, self.services.edges
        wanted = -(-settings.limits.connections // edges)
        connections, _ = connection_limits(self._open_files, wanted, 0)
        limits = settings.limits.model_copy(update={"connections": connections})
        return settings.model_copy(update={"limits": share_memory(limits, edges)})

    def _configure(self) -> None:
        """Put the settings in force that the brain has told."""
        if self._handler is None:
            return
        settings = self._settings()
        self._logs.configure(settings.logging.level)
        self._handler.configure(handler_config(self.services, settings))
        self._routes.clear()
        routes = routes_of(settings)
        self._routes.update((path.encode(), route) for path, route in routes.items())


async def _renew(certificates: ListenerCertificates) -> None:
    """Put certificates in force when their files change, until cancelled."""
    async for changed in changed_files(lambda: certificates.files):
        await certificates.renew(changed)
