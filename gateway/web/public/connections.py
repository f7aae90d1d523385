"""A listener's connections, as those who connect share them.

An address alone may have all but a reserve (`access/holdings.py`). When that much is taken, the
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
from gateway.access.callers import IPNetwork, address_of
from gateway.access.holdings import RESERVE, Holdings, usual
from gateway.access.parties import network_of
from gateway.errors import GatewayError
from gateway.relay.routes import Route
from gateway.request import Headers
from gateway.web.public.answers import TAG, refusal
from gateway.web.public.heads import error_fields, lines_of, tag_of
from gateway.web.public.turn import Turn

LOOKED_AT = 64
"""Connections of one holder that are looked at to find an idle one; the next time the next ones."""

EXTRA = 64
"""Connections beyond the limit, for `HEALTH` alone."""

EXTRA_SECONDS = 1.0
"""How long one of these may take to ask."""

HEALTH = frozenset({"/health", "/v1/health", "/ready"})
"""Paths that are answered however many connections there are."""

RETRY = 1.0
"""Seconds to advise when there are too many connections."""


class Connection(Protocol):
    """What has to be known of a connection."""

    @property
    def idle(self) -> bool:
        """Whether nothing is under way on it."""

    @property
    def reading(self) -> bool:
        """Whether the body of a request is still coming on it."""

    @property
    def idle_since(self) -> float:
        """When it was last seen to become idle; monotonic seconds."""

    def give_way(self) -> None:
        """Close, since there are too many."""


class Seat(enum.Enum):
    """How a connection is taken."""

    OWN = enum.auto()
    EXTRA = enum.auto()
    """For a moment, to ask for `HEALTH`."""
    NONE = enum.auto()


def too_many() -> GatewayError:
    """429, for a connection that has to go."""
    return errors.queue_full("Too many connections.", RETRY)


class Connections:
    """The connections of one listener."""

    def __init__(self, limit: int, proxies: Sequence[IPNetwork] = ()) -> None:
        self.limit = limit
        self._usual = usual(limit)
        self._proxies = proxies
        self._holdings = Holdings()
        self._seats: dict[Connection, str | None] = {}
        """All but the extra ones, with their party; None: of a proxy."""
        self._of: dict[str, dict[Connection, None]] = {}
        """Each party's own, those first that are looked at next."""
        self._pool: dict[Connection, None] = {}
        """The proxies'."""
        self._extras: dict[Connection, str] = {}
        self._forwarded = 0
        """Requests that are served on the proxies'."""

    def is_proxy(self, address: str | None) -> bool:
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

    def enter(self, connection: Connection, address: str | None) -> Seat:
        """Take a connection from there, if there is room or others can make it."""
        proxied = self.is_proxy(address)
        party = network_of(address or "local")
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
        return Seat.OWN

    def leave(self, connection: Connection) -> None:
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

    def attributed(
        self, serve: Callable[[Route, Turn], Awaitable[None]]
    ) -> Callable[[Route, Turn], Awaitable[None]]:
        """`serve` for a proxy's connection: a request counts for the address it is forwarded of."""

        async def serve_forwarded(route: Route, turn: Turn) -> None:
            party = network_of(address_of(turn.headers, turn.address, self._proxies))
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
        own = self._holdings.of(party)
        larger = self._holdings.yielding(party, 1, self._usual)
        if self._one_yields(larger, _is_idle):
            return True
        if own < self.limit // RESERVE and self._yields(self._pool, _is_idle):
            return True
        if (larger or not own) and len(self._seats) < self.limit:
            return True
        return self._one_yields(larger, _is_reading)

    def _room_for_proxy(self) -> bool:
        """Whether one more of a proxy may come. What it forwards is bounded when it is known."""
        idle = len(self._pool) - self._forwarded
        larger = self._holdings.above(max(1, idle))
        return (
            self._one_yields(larger, _is_idle)
            or self._yields(self._pool, _is_idle)
            or len(self._seats) < self.limit
            or self._one_yields(larger, _is_reading)
        )

    def _may_forward(self, party: str) -> bool:
        """Whether one more request of this party may be served; if full, not the largest's."""
        more = self._holdings.of(party) + 1
        if more > self._usual:
            return False
        if len(self._seats) <= self._usual or more <= max(1, self.limit // RESERVE):
            return True
        return any(held > more for held in self._holdings.callers.values())

    def _one_yields(self, parties: Iterable[str], may: Callable[[Connection], bool]) -> bool:
        return any(self._yields(self._of.get(party), may) for party in parties)

    def _yields(
        self, own: dict[Connection, None] | None, may: Callable[[Connection], bool]
    ) -> bool:
        """Close one of a holder's connections that `may` be closed; whether there is one.

        The longest idle of some; of those of which a body is still coming, the newest.
        """
        if not own:
            return False
        looked_at = list(islice(own, LOOKED_AT))
        found = [connection for connection in looked_at if may(connection)]
        if not found:
            for connection in looked_at:
                # To the end, so that the others have their turn.
                del own[connection]
                own[connection] = None
            return False
        chosen = min(found, key=_since) if may is _is_idle else max(found[::-1], key=_since)
        self.leave(chosen)
        chosen.give_way()
        return True

    def _as_extra(self, connection: Connection, party: str) -> Seat:
        """Take it beyond the limit; where even that is full, the newest goes first."""
        if len(self._extras) >= EXTRA:
            largest, _ = Counter(self._extras.values()).most_common(1)[0]
            for other, holder in self._extras.items():
                if holder == largest and other.idle:
                    self.leave(other)
                    other.give_way()
                    break
            else:
                return Seat.NONE
        self._extras[connection] = party
        return Seat.EXTRA


def _is_idle(connection: Connection) -> bool:
    return connection.idle


def _is_reading(connection: Connection) -> bool:
    return connection.reading


def _since(connection: Connection) -> float:
    return connection.idle_since


def only_health(app: ASGIApp) -> ASGIApp:
    """`app` for an extra connection: one request for `HEALTH`; all else is 429."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        if scope["path"] in HEALTH:
            await app(scope, receive, send_last)
        else:
            tag = scope[TAG] = _tag(scope["headers"])
            response = refusal(too_many(), scope)
            response.raw_headers.append((b"x-request-id", tag.encode()))
            await response(scope, receive, send_last)

    return answer


def _refuse(route: Route, turn: Turn) -> None:
    error, tag = too_many(), _tag(turn.headers)
    if turn.more_body:
        # What is left of it must not be taken for the next request.
        turn.keep_alive = False
    fields = [*error_fields(error), (b"x-request-id", tag.encode())]
    turn.reply(error.status, lines_of(fields), route.dialect.error_body(error, tag))


def _tag(headers: Headers) -> str:
    return tag_of(headers) or f"req_{secrets.token_hex(8)}"
