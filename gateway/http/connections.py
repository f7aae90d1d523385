"""How the connections of one listener share it: how many there are, and whose turn it is.

One address may have all connections but a reserve (`callers/fair_share.py`). When the rest is in
use, idle connections of the addresses with the most are closed for an address with fewer; when the
reserve is in use too, so are connections that still receive a body. An address that has the most
itself is refused.

A trusted proxy connects for many addresses and keeps idle connections for whoever comes next. Its
idle connections count for nobody; one that serves a request counts for the address that the proxy
forwards. So those addresses are limited, and the proxy is not.

Beyond the limit a few connections are accepted for a moment, for health checks alone, so that no
crowd hides the gateway from its monitoring.

A client may send thousands of requests in one packet (pipelining). One of them is served at a
time, the others stay bytes, and one connection with such a backlog continues in each round of the
event loop. So clients that send one request after another hardly notice.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import attrgetter
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl

from gateway import errors
from gateway.callers.callers import IPNetwork, client_address, client_network, parse_address
from gateway.callers.fair_share import RESERVE_DIVISOR, FairShare, soft_limit
from gateway.errors import GatewayError
from gateway.http.exchange import HttpExchange, Serve
from gateway.http.heads import encode_headers, rejection, x_request_id_of
from gateway.request.routes import Route, api_of_path

MOST_HEALTH_ONLY = 64  # connections beyond the limit that may ask for `HEALTH_PATHS`
HEALTH_ONLY_SECONDS = 1.0  # seconds that such a connection may last
# Paths that are served however many connections there are.
HEALTH_PATHS = frozenset({"/health", "/v1/health", "/ready"})
# Bytes that may wait on one connection before it is no longer read; one read can add 256 KB.
CONNECTION_PIPELINE_BYTES = 64 * 1024
# Bytes that may wait on all connections. Beyond, connections whose client sends requests and reads
# no responses are aborted: their bytes would wait until `limits.send_timeout`.
LISTENER_PIPELINE_BYTES = 64 * 1024 * 1024
PIPELINE_READ_BYTES = 16 * 1024  # most waiting bytes that one connection parses in its turn


_PROXIES = ""  # in place of a network


class EvictableConnection(Protocol):
    """A connection, as far as the limiter must know it."""

    idle_since: float  # when it last became idle; monotonic seconds

    @property
    def idle(self) -> bool:
        """Whether no request is in flight on it."""

    @property
    def reading_body(self) -> bool:
        """Whether it still receives the body of a request."""

    def evict(self) -> None:
        """Close it, as there are too many."""


class ConnectionAdmission(enum.Enum):
    """What a new connection may do."""

    ADMITTED = enum.auto()
    HEALTH_ONLY = enum.auto()  # ask for `HEALTH_PATHS`, for a moment
    REJECTED = enum.auto()


def too_many_connections() -> GatewayError:
    """429, for a connection that must close."""
    return errors.queue_full("Too many connections.", retry_after=1.0)


class ConnectionLimiter:
    """Admits the connections of one listener, and evicts them."""

    def __init__(self, limit: int, proxies: Sequence[IPNetwork] = ()) -> None:
        self.limit = limit
        self._soft_limit = soft_limit(limit)
        self._proxies = proxies
        self.fair_share = FairShare()
        self._admitted: dict[EvictableConnection, str] = {}
        """The network of each admitted connection, or `_PROXIES`."""
        self._by_network: dict[str, dict[EvictableConnection, None]] = {_PROXIES: {}}
        """Connections of each network, in the order of the next search."""
        self._health_only: dict[EvictableConnection, str] = {}
        """Networks of connections beyond the limit."""
        self._forwarded = 0  # requests in flight on the proxies' connections

    def __len__(self) -> int:
        """Connections of all kinds, and requests in flight on those of proxies."""
        return len(self._admitted) + len(self._health_only) + self._forwarded

    def is_trusted_proxy(self, address: str | None) -> bool:
        """Whether a peer of this address may name the address that it forwards."""
        peer = parse_address(address) if self._proxies and address is not None else None
        return peer is not None and any(peer in network for network in self._proxies)

    def admit(self, connection: EvictableConnection, address: str | None) -> ConnectionAdmission:
        """Admit a connection of this peer if there is room, or evicting others makes room."""
        proxied = self.is_trusted_proxy(address)
        network = client_network(address or "local")
        if len(self._admitted) >= self._soft_limit and not (
            self._make_room_for_proxy() if proxied else self._make_room(network)
        ):
            return self._admit_health_only(connection, network)
        if not proxied:
            self.fair_share.add(network, 1)
        counted = self._admitted[connection] = _PROXIES if proxied else network
        self._by_network.setdefault(counted, {})[connection] = None
        return ConnectionAdmission.ADMITTED

    def remove(self, connection: EvictableConnection) -> None:
        """The connection is closed or about to be. Calling it again does nothing."""
        self._health_only.pop(connection, None)
        network = self._admitted.pop(connection, None)
        if network is None:
            return
        connections = self._by_network[network]
        del connections[connection]
        if network != _PROXIES:
            self.fair_share.remove(network, 1)
            if not connections:
                del self._by_network[network]

    def count_forwarded(self, serve: Serve, address: str | None) -> Serve:
        """`serve` for a connection of this peer; a proxy's requests count for whom it forwards."""
        if not self.is_trusted_proxy(address):
            return serve

        async def serve_forwarded(route: Route, exchange: HttpExchange) -> None:
            network = client_network(
                client_address(exchange.headers, exchange.peer_address, self._proxies)
            )
            if not self._may_forward(network):
                _refuse(route, exchange)
                return
            self.fair_share.add(network, 1)
            self._forwarded += 1
            try:
                await serve(route, exchange)
            finally:
                self._forwarded -= 1
                self.fair_share.remove(network, 1)

        return serve_forwarded

    def _make_room(self, network: str) -> bool:
        """Whether this network may have one more connection; evicts others where needed."""
        held = self.fair_share.held_by(network)
        victims = self.fair_share.victims(network, 1, self._soft_limit)
        if self._evict_one_of(victims):
            return True
        if held < self.limit // RESERVE_DIVISOR and self._evict_one(_PROXIES):
            return True
        if (victims or not held) and len(self._admitted) < self.limit:
            return True
        return self._evict_one_of(victims, reading=True)

    def _make_room_for_proxy(self) -> bool:
        """Whether proxies may have one more connection; what it forwards is limited later."""
        idle = len(self._by_network[_PROXIES]) - self._forwarded
        victims = self.fair_share.callers_above(max(1, idle))
        return (
            self._evict_one_of(victims)
            or self._evict_one(_PROXIES)
            or len(self._admitted) < self.limit
            or self._evict_one_of(victims, reading=True)
        )

    def _may_forward(self, network: str) -> bool:
        """Whether one more request of this network may be served on a proxy's connection.

        With the soft limit exceeded, not if the network would then hold the most.
        """
        held = self.fair_share.held_by(network) + 1
        if held > self._soft_limit:
            return False
        if len(self._admitted) <= self._soft_limit or held <= max(1, self.limit // RESERVE_DIVISOR):
            return True
        return any(other > held for other in self.fair_share.by_caller.values())

    def _evict_one_of(self, networks: Iterable[str], *, reading: bool = False) -> bool:
        return any(self._evict_one(network, reading=reading) for network in networks)

    def _evict_one(self, network: str, *, reading: bool = False) -> bool:
        """Close the longest idle of its connections; returns whether there was one.

        `reading`: of those that receive a body, the newest. Each search examines some, and moves
        them behind the others if it finds none.
        """
        connections = self._by_network.get(network, {})
        examined = list(islice(connections, 64))
        found = [one for one in examined if (one.reading_body if reading else one.idle)]
        if found:
            ages = attrgetter("idle_since")
            victim = max(found[::-1], key=ages) if reading else min(found, key=ages)
            self.remove(victim)
            victim.evict()
            return True
        for connection in examined:
            del connections[connection]
            connections[connection] = None
        return False

    def _admit_health_only(
        self, connection: EvictableConnection, network: str
    ) -> ConnectionAdmission:
        """Admit it beyond the limit, evicting one of the network with the most if needed."""
        if len(self._health_only) >= MOST_HEALTH_ONLY:
            largest, _ = Counter(self._health_only.values()).most_common(1)[0]
            for other, holder in self._health_only.items():
                if holder == largest and other.idle:
                    self.remove(other)
                    other.evict()
                    break
            else:
                return ConnectionAdmission.REJECTED
        self._health_only[connection] = network
        return ConnectionAdmission.HEALTH_ONLY


def health_only_app(app: ASGIApp) -> ASGIApp:
    """`app` for a connection beyond the limit: one request for `HEALTH_PATHS`; all else is 429."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        if scope["path"] in HEALTH_PATHS:
            await app(scope, receive, send_last)
        else:
            error, own_id = too_many_connections(), x_request_id_of(scope["headers"])
            headers, body = rejection(error, api_of_path(scope["path"]), own_id)
            start = {"type": "http.response.start", "status": error.status, "headers": headers}
            await send_last(start)
            await send_last({"type": "http.response.body", "body": body})

    return serve


def _refuse(route: Route, exchange: HttpExchange) -> None:
    error = too_many_connections()
    if exchange.more_body:
        # The rest of the body must not be taken for the next request.
        exchange.close_after_response()
    headers, body = rejection(error, route.api, x_request_id_of(exchange.headers))
    lines = encode_headers([field for field in headers if field[0] != b"content-length"])
    exchange.respond(error.status, lines, body)


class PipelineQueue:
    """Connections of a listener with a backlog that could be parsed; they take turns."""

    def __init__(self, most_bytes: int = LISTENER_PIPELINE_BYTES) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._scheduled = False
        self._most_bytes = most_bytes
        self.waiting_bytes = 0  # bytes that wait on all connections

    @property
    def is_full(self) -> bool:
        """Whether more bytes wait than may."""
        return self.waiting_bytes > self._most_bytes

    def count(self, change: int) -> None:
        """So many more bytes wait; fewer if negative."""
        self.waiting_bytes += change

    def add(self, resume: Callable[[], None]) -> None:
        """Call `resume` when it is the connection's turn."""
        self._waiting.append(resume)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._resume_next)

    def _resume_next(self) -> None:
        try:
            self._waiting.popleft()()
        finally:
            self._scheduled = False
            self._schedule()


class PipelineFlowControl(FlowControl):
    """uvicorn's flow control; nothing resumes reading while too many bytes wait to be parsed."""

    reads_held = False

    def hold_reads(self) -> None:
        """Pause reading until `release_reads`."""
        self.reads_held = True
        self.pause_reading()

    def release_reads(self) -> None:
        """Let `resume_reading` read again."""
        self.reads_held = False

    def resume_reading(self) -> None:
        """Read again, unless reads are held."""
        if not self.reads_held:
            super().resume_reading()
