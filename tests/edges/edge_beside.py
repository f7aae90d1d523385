"""An edge beside its brain in one process: the link between them is a real socketpair."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx

from gateway.app.assembly import Gateway
from gateway.app.edge import request_handler
from gateway.edges.brain import Brain, EdgeSession
from gateway.edges.edge import EdgeServices
from gateway.edges.passing import Passing, over_channel
from gateway.edges.sockets import PassedOn, SocketChannel, ToBrain, ToEdge, channel_pair
from gateway.events import EdgeLost
from gateway.http.listener import Listener
from gateway.http.protocol import protocol_class
from gateway.web.handler import RequestHandler
from tests.gateways import NO_TLS, Running, until
from tests.known import known


def a_brain(gateway: Gateway, *, clustered: bool = False) -> Brain:
    return Brain(
        gateway.scheduler,
        gateway.proxy_context,
        gateway.registry,
        gateway.metering.meter,
        gateway.key_ring,
        gateway.bus,
        gateway.tracing,
        loopback=True,
        clustered=clustered,
    )


@dataclass(slots=True)
class Edge:
    services: EdgeServices
    session: EdgeSession
    handler: RequestHandler
    client: httpx.AsyncClient
    lost: list[str] = field(default_factory=list)  # why its link was lost, as it was told
    broken: list[tuple[str, ...]] = field(default_factory=list)
    """What broke off then, as the brain has told."""


@contextlib.asynccontextmanager
async def serving(
    running: Running, services: EdgeServices, handler: RequestHandler
) -> AsyncIterator[httpx.AsyncClient]:
    """Have the handler serve the edge's clients, of whom this is one.

    All else is passed on to the gateway's public listener.
    """
    ours, theirs = channel_pair()
    public = known(running.gateway.public_listener)

    def adopt(message: ToBrain, sock: socket.socket | None) -> None:
        assert isinstance(message, PassedOn)
        known(sock).setblocking(False)
        public.adopt(known(sock), message.origin)

    of_brain: SocketChannel[ToBrain] = SocketChannel(ours, ToBrain, adopt, lambda: None)
    of_edge: SocketChannel[ToEdge] = SocketChannel(theirs, ToEdge, lambda *_: None, lambda: None)
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    protocol = protocol_class(services.settings.limits, handler.serve)
    passing = Passing(over_channel(of_edge))
    listener = Listener(passing, sock, protocol=protocol, keep_alive=60.0)
    listener.open()
    try:
        async with httpx.AsyncClient(
            base_url=listener.url, timeout=120.0, trust_env=False, verify=NO_TLS
        ) as client:
            yield client
    finally:
        await listener.close()
        of_edge.close()
        of_brain.close()
        await services.aclose()


@contextlib.asynccontextmanager
async def an_edge(
    running: Running, brain: Brain | None = None, name: str = "edge-1"
) -> AsyncIterator[Edge]:
    """An edge of this gateway, with a listener of its own."""
    gateway = running.gateway
    brain = brain or a_brain(gateway)
    lost: list[str] = []
    broken: list[tuple[str, ...]] = []
    ours, theirs = socket.socketpair()
    brain.bus.subscribe(EdgeLost, lambda loss: broken.append(loss.requests))
    session = await brain.connect(ours, name)
    services = EdgeServices(name, clock=gateway.clock, on_lost=lost.append)
    services.relink(theirs, loopback=True)
    await services.wait_ready(10.0)
    handler = request_handler(services, services.settings)
    try:
        async with serving(running, services, handler) as client:
            try:
                yield Edge(services, session, handler, client, lost, broken)
            finally:
                session.expect_end()
    finally:
        await until(lambda: name not in brain.sessions and not brain._endings)
