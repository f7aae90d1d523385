"""What a request's head says, read once for all requests of a connection that say the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gateway import errors
from gateway.access.anonymous import is_local
from gateway.access.callers import asked_class, caller_of
from gateway.access.keys import KeyRing
from gateway.access.parties import NamingHeaders
from gateway.config.listeners import ListenSettings
from gateway.config.settings import Settings
from gateway.relay.fields import to_node
from gateway.request import Caller, Headers


@dataclass(slots=True)
class Preamble:
    """A head, understood."""

    caller: Caller
    party: str
    """Whom the queue is fair to."""
    session: str | None
    asked: str | None
    """`X-Priority`."""
    patience: float | None
    """`X-Request-Timeout`: seconds the client will wait for the whole answer."""
    plain_patience: float | None
    """The same for a plain answer, where official clients tell what they will wait."""
    own_timer: bool
    """Whether `plain_patience` is what such a client tells of a timer of its own."""
    fields: bytes
    """The lines that are passed on to a node."""
    progress: bool
    """`X-Gateway-Progress: 1`: the client wants to know how long it will wait."""
    exposes: bool
    """Whether its reply may name nodes."""


@dataclass(slots=True)
class Memory:
    """The last head of a connection: most clients send the same one again and again."""

    headers: Headers = field(default_factory=list)
    version: object = None
    """The settings that it was understood by."""
    preamble: Preamble | None = None
    tag: str | None = None
    """Its `X-Request-ID`, if it has a sane one."""


def understood(
    headers: Headers,
    address: str | None,
    settings: Settings,
    ring: KeyRing,
    naming: NamingHeaders,
    *,
    loopback: bool,
    closed: bool,
) -> Preamble:
    """What these fields say. Raises: GatewayError 400, 401."""
    listen = settings.listen
    local = is_local(headers, loopback_listener=loopback, trusted_proxies=listen.trusted_proxies)
    caller = caller_of(
        headers,
        address,
        ring,
        allow_anonymous=settings.allow_anonymous,
        loopback_listener=loopback,
        trusted_proxies=listen.trusted_proxies,
        closed=closed,
        local=local,
    )
    progress = False
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() not in _PLAIN:
            raise errors.compressed_body()
        if name == b"x-gateway-progress":
            progress = value.strip().lower() in _YES
    party = naming.party(headers, caller)
    patience = _patience(headers)
    of_client = _client_patience(headers)
    own_timer = of_client is not None and (patience is None or of_client < patience)
    return Preamble(
        caller,
        party,
        naming.session(headers, party),
        asked_class(headers),
        patience,
        of_client if own_timer else patience,
        own_timer,
        to_node(headers, settings.headers.to_nodes),
        progress,
        _exposes(listen, local=local),
    )


def exposes_nodes(headers: Headers, settings: Settings, *, loopback: bool) -> bool:
    """Whether the reply to these fields may name nodes: as the settings say, else locally."""
    listen = settings.listen
    proxies = listen.trusted_proxies
    local = is_local(headers, loopback_listener=loopback, trusted_proxies=proxies)
    return _exposes(listen, local=local)


def _exposes(listen: ListenSettings, *, local: bool) -> bool:
    return local if listen.expose_node is None else listen.expose_node


_PLAIN = frozenset({b"", b"identity"})
_YES = frozenset({b"1", b"true", b"yes", b"on"})


def _patience(headers: Headers) -> float | None:
    for name, value in headers:
        if name == b"x-request-timeout":
            try:
                seconds = float(value)
            except ValueError:
                seconds = math.nan
            if not (math.isfinite(seconds) and seconds > 0):
                raise errors.invalid_request(
                    "'X-Request-Timeout' must be a positive number of seconds.",
                    "X-Request-Timeout",
                )
            return seconds
    return None


_SDK_TIMEOUTS = frozenset({b"x-stainless-read-timeout", b"x-stainless-timeout"})
"""What the official clients of OpenAI and Anthropic tell of themselves, in seconds."""


def _client_patience(headers: Headers) -> float | None:
    """The shortest time that an official client names; what is none is none of our business."""
    found: float | None = None
    for name, value in headers:
        if name in _SDK_TIMEOUTS:
            try:
                seconds = float(value)
            except ValueError:
                continue
            if math.isfinite(seconds) and seconds > 0:
                found = seconds if found is None else min(found, seconds)
    return found
