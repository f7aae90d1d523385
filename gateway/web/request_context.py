"""What a request's head says, read once for all requests of a connection that say the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gateway import errors
from gateway.access.callers import IdentityHeaders, identify_caller, priority_header
from gateway.access.exposure import is_local
from gateway.access.keys import KeyRing
from gateway.config.listeners import ListenSettings
from gateway.config.settings import Settings
from gateway.proxy.forwarded_headers import headers_for_node
from gateway.request import Caller, Headers


@dataclass(slots=True)
class RequestContext:
    """A head, understood."""

    caller: Caller
    fairness_key: str
    """Whom the queue is fair to."""
    session: str | None
    priority_header: str | None
    """`X-Priority`."""
    client_timeout: float | None
    """`X-Request-Timeout`: seconds the client will wait for the whole answer."""
    plain_client_timeout: float | None
    """The same for a plain answer, where official clients tell what they will wait."""
    client_has_timer: bool
    """Whether `plain_patience` is what such a client tells of a timer of its own."""
    header_lines: bytes
    """The lines that are passed on to a node."""
    wants_progress: bool
    """`X-Gateway-Progress: 1`: the client wants to know how long it will wait."""
    may_name_nodes: bool
    """Whether its reply may name nodes."""


@dataclass(slots=True)
class ContextCache:
    """The last head of a connection: most clients send the same one again and again."""

    headers: Headers = field(default_factory=list)
    config: object = None
    """The settings that it was understood by."""
    context: RequestContext | None = None
    x_request_id: str | None = None
    """Its `X-Request-ID`, if it has a sane one."""


def parse_context(
    headers: Headers,
    peer_address: str | None,
    settings: Settings,
    key_ring: KeyRing,
    identity_headers: IdentityHeaders,
    *,
    loopback: bool,
    locked: bool,
) -> RequestContext:
    """What these fields say. Raises: GatewayError 400, 401."""
    listen = settings.listen
    local = is_local(headers, loopback_listener=loopback, trusted_proxies=listen.trusted_proxies)
    caller = identify_caller(
        headers,
        peer_address,
        key_ring,
        allow_anonymous=settings.allow_anonymous,
        loopback_listener=loopback,
        trusted_proxies=listen.trusted_proxies,
        locked=locked,
        local=local,
    )
    progress = False
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() not in _PLAIN:
            raise errors.compressed_body()
        if name == b"x-gateway-progress":
            progress = value.strip().lower() in _YES
    party = identity_headers.fairness_key(headers, caller)
    patience = _patience(headers)
    of_client = _client_patience(headers)
    own_timer = of_client is not None and (patience is None or of_client < patience)
    return RequestContext(
        caller,
        party,
        identity_headers.session_key(headers, party),
        priority_header(headers),
        patience,
        of_client if own_timer else patience,
        own_timer,
        headers_for_node(headers, settings.headers.to_nodes),
        progress,
        _exposes(listen, local=local),
    )


def may_name_nodes(headers: Headers, settings: Settings, *, loopback: bool) -> bool:
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
