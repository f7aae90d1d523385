"""A listener's connections, as those who connect share them.

An address alone may have all but a reserve (`access/fair_share.py`). When that much is taken, the
largest holder's idle connections are closed for one who has fewer, and once the reserve is used up
as well, those of which a body is still coming; who has the most is refused.

A trusted proxy connects for many addresses, and keeps idle connections for whoever comes next: its
connections are nobody's while they are idle, and the address's that it forwards while they serve
a request. Theirs is what is bounded then, and the proxy itself is not.

Beyond the limit a few connections are taken all the same, for a moment, to ask whether the gateway
is well: no crowd keeps that from whoever watches it.
"""

from __future__ import annotations

import enum
import ipaddress
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors
from gateway.access.callers import IPNetwork, client_address, client_network
from gateway.access.fair_share import RESERVE_DIVISOR, FairShare, soft_limit
from gateway.errors import GatewayError
from gateway.proxy.inbound.routes import Route
from gateway.request import Headers
from gateway.web.asgi import X_REQUEST_ID_KEY, error_response
from gateway.web.http_exchange import HttpExchange
from gateway.web.response_heads import encode_headers, error_headers, x_request_id_of

MOST_SCANNED = 64
"""Connections of one holder that are looked at to find an idle one; the next time the next ones."""

MOST_HEALTH_ONLY = 64
"""Connections beyond the limit, for `HEALTH` alone."""

HEALTH_ONLY_SECONDS = 1.0
"""How long one of these may take to ask."""

HEALTH_PATHS = frozenset({"/health", "/v1/health", "/ready"})
"""Paths that are answered however many connections there are."""

CONNECTION_RETRY_AFTER = 1.0
"""Seconds to advise when there are too many connections."""


class EvictableConnection(Protocol):
    """What has to be known of a connection."""

    @property
    def idle(self) -> bool:
        """Whether nothing is under way on it."""

    @property
    def reading_body(self) -> bool:
        """Whether the body of a request is still coming on it."""

    @property
    def idle_since(self) -> float:
        """When it was last seen to become idle; monotonic seconds."""

    def evict(self) -> None:
        """Close, since there are too many."""


class ConnectionAdmission(enum.Enum):
    """How a connection is taken."""

    ADMITTED = enum.auto()
    HEALTH_ONLY = enum.auto()
    """For a moment, to ask for `HEALTH`."""
    REJECTED = enum.auto()


def too_many_connections() -> GatewayError:
    """429, for a connection that has to go."""
    return errors.queue_full("Too many connections.", CONNECTION_RETRY_AFTER)


class ConnectionLimiter:
    """The connections of one listener."""

    def __init__(self, limit: int, proxies: Sequence[IPNetwork] = ()) -> None:
        self.limit = limit
        self._usual = soft_limit(limit)
        self._proxies = proxies
        self._holdings = FairShare()
        self._seats: dict[EvictableConnection, str | None] = {}
        """All but the extra ones, with their party; None: of a proxy."""
        self._of: dict[str, dict[EvictableConnection, None]] = {}
        """Each party's own, those first that are looked at next."""
        self._pool: dict[EvictableConnection, None] = {}
        """The proxies'."""
        self._extras: dict[EvictableConnection, str] = {}
        self._forwarded = 0
        """Requests that are served on the proxies'."""

    def is_trusted_proxy(self, address: str | None) -> bool:
        """Whether who connects from there is trusted to say whom for."""
        if not self._proxies or address is None:
            return False
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(found, ipaddress.IPv6Address):
            found = found.ipv4_mapped or found
        return any(found in network for network in self._proxies)

    def admit(self, connection: EvictableConnection, address: str | None) -> ConnectionAdmission:
        """Take a connection from there, if there is room or others can make it."""
        proxied = self.is_trusted_proxy(address)
        party = client_network(address or "local")
        if len(self._seats) >= self._usual and not (
            self._room_for_proxy() if proxied else self._room_for(party)
        ):
            return self._as_extra(connection, party)
        if proxied:
            self._seats[connection] = None
            self._pool[connection] = None
        else:
            self._seats[connection] = party
            self._of.setdefault(party, {})[connection] = None
            self._holdings.add(party, 1)
        return ConnectionAdmission.ADMITTED

    def remove(self, connection: EvictableConnection) -> None:
        """It is gone, or as good as. Calling it again does nothing."""
        self._extras.pop(connection, None)
        if connection not in self._seats:
            return
        party = self._seats.pop(connection)
        if party is None:
            del self._pool[connection]
            return
        own = self._of[party]
        del own[connection]
        if not own:
            del self._of[party]
        self._holdings.remove(party, 1)

    def count_forwarded(
        self, serve: Callable[[Route, HttpExchange], Awaitable[None]]
    ) -> Callable[[Route, HttpExchange], Awaitable[None]]:
        """`serve` for a proxy's connection: a request counts for the address it is forwarded of."""

        async def serve_forwarded(route: Route, turn: HttpExchange) -> None:
            party = client_network(client_address(turn.headers, turn.peer_address, self._proxies))
            if not self._may_forward(party):
                _refuse(route, turn)
                return
            self._holdings.add(party, 1)
            self._forwarded += 1
            try:
                await serve(route, turn)
            finally:
                self._forwarded -= 1
                self._holdings.remove(party, 1)

        return serve_forwarded

    def _room_for(self, party: str) -> bool:
        """Whether one more of this party may come; others have made room for it."""
        own = self._holdings.held_by(party)
        larger = self._holdings.victims(party, 1, self._usual)
        if self._one_yields(larger, _is_idle):
            return True
        if own < self.limit // RESERVE_DIVISOR and self._yields(self._pool, _is_idle):
            return True
        if (larger or not own) and len(self._seats) < self.limit:
            return True
        return self._one_yields(larger, _is_reading)

    def _room_for_proxy(self) -> bool:
        """Whether one more of a proxy may come. What it forwards is bounded when it is known."""
        idle = len(self._pool) - self._forwarded
        larger = self._holdings.callers_above(max(1, idle))
        return (
            self._one_yields(larger, _is_idle)
            or self._yields(self._pool, _is_idle)
            or len(self._seats) < self.limit
            or self._one_yields(larger, _is_reading)
        )

    def _may_forward(self, party: str) -> bool:
        """Whether one more request of this party may be served; if full, not the largest's."""
        more = self._holdings.held_by(party) + 1
        if more > self._usual:
            return False
        if len(self._seats) <= self._usual or more <= max(1, self.limit // RESERVE_DIVISOR):
            return True
        return any(held > more for held in self._holdings.by_caller.values())

    def _one_yields(
        self, parties: Iterable[str], may: Callable[[EvictableConnection], bool]
    ) -> bool:
        return any(self._yields(self._of.get(party), may) for party in parties)

    def _yields(
        self,
        own: dict[EvictableConnection, None] | None,
        may: Callable[[EvictableConnection], bool],
    ) -> bool:
        """Close one of a holder's connections that `may` be closed; whether there is one.

        The longest idle of some; of those of which a body is still coming, the newest.
        """
        if not own:
            return False
        looked_at = list(islice(own, MOST_SCANNED))
        found = [connection for connection in looked_at if may(connection)]
        if not found:
            for connection in looked_at:
                # To the end, so that the others have their turn.
                del own[connection]
                own[connection] = None
            return False
        chosen = min(found, key=_since) if may is _is_idle else max(found[::-1], key=_since)
        self.remove(chosen)
        chosen.evict()
        return True

    def _as_extra(self, connection: EvictableConnection, party: str) -> ConnectionAdmission:
        """Take it beyond the limit; where even that is full, the newest goes first."""
        if len(self._extras) >= MOST_HEALTH_ONLY:
            largest, _ = Counter(self._extras.values()).most_common(1)[0]
            for other, holder in self._extras.items():
                if holder == largest and other.idle:
                    self.remove(other)
                    other.evict()
                    break
            else:
                return ConnectionAdmission.REJECTED
        self._extras[connection] = party
        return ConnectionAdmission.HEALTH_ONLY


def _is_idle(connection: EvictableConnection) -> bool:
    return connection.idle


def _is_reading(connection: EvictableConnection) -> bool:
    return connection.reading_body


def _since(connection: EvictableConnection) -> float:
    return connection.idle_since


def health_only_app(app: ASGIApp) -> ASGIApp:
    """`app` for an extra connection: one request for `HEALTH`; all else is 429."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        if scope["path"] in HEALTH_PATHS:
            await app(scope, receive, send_last)
        else:
            tag = scope[X_REQUEST_ID_KEY] = _tag(scope["headers"])
            response = error_response(too_many_connections(), scope)
            response.raw_headers.append((b"x-request-id", tag.encode()))
            await response(scope, receive, send_last)

    return answer


def _refuse(route: Route, turn: HttpExchange) -> None:
    error, tag = too_many_connections(), _tag(turn.headers)
    if turn.more_body:
        # What is left of it must not be taken for the next request.
        turn.keep_alive = False
    fields = [*error_headers(error), (b"x-request-id", tag.encode())]
    turn.respond(error.status, encode_headers(fields), route.api.error_body(error, tag))


def _tag(headers: Headers) -> str:
    return x_request_id_of(headers) or f"req_{secrets.token_hex(8)}"
