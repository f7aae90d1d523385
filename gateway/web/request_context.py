"""What the head of a routed request says by the settings, parsed once for equal heads."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from gateway import errors
from gateway.access.callers import (
    IdentityHeaders,
    cache_policy_of,
    effective_priority,
    identify_caller,
    priority_header,
)
from gateway.access.exposure import is_local
from gateway.access.keys import KeyRing
from gateway.config.cache_privacy import SHARED_CACHE, CachePolicy
from gateway.config.listeners import ListenSettings
from gateway.config.settings import Settings
from gateway.lease import KeyedHash
from gateway.proxy.client_response import headers_for_node
from gateway.proxy.inbound.model_names import ModelAliases
from gateway.proxy.inbound.prepare import RequestRules
from gateway.proxy.inbound.prompt_key import VolatileLines
from gateway.request import Caller, Headers, Priority
from gateway.usage.accounts import Accounts
from gateway.usage.limits import LimitBook
from gateway.web.origins import OriginPolicy
from gateway.web.prefer import prefers_async


@dataclass(frozen=True, slots=True)
class HandlerConfig:
    """What one version of the settings means for the handler."""

    settings: Settings
    key_ring: KeyRing
    """The keys in force; one object for the life of the process."""
    identity_headers: IdentityHeaders
    rules: RequestRules
    loopback: bool
    """Whether only this machine can reach the listener."""
    origin_policy: OriginPolicy | None
    """Restricts callers without a key."""

    @classmethod
    def of(
        cls,
        settings: Settings,
        *,
        loopback: bool,
        keyed_hash: KeyedHash,
        key_ring: KeyRing,
    ) -> HandlerConfig:
        """The configuration for these settings and a listener that is `loopback` or not.

        `keyed_hash` identifies prompts. `key_ring` has been configured with these settings.
        """
        identity = settings.identity
        return cls(
            settings=settings,
            key_ring=key_ring,
            identity_headers=IdentityHeaders.of(identity.user_headers, identity.session_headers),
            rules=RequestRules(
                settings.limits,
                ModelAliases(settings.models),
                settings.default_model,
                VolatileLines(settings.prompts.volatile, settings.prompts.strip),
                keyed_hash,
            ),
            loopback=loopback,
            origin_policy=OriginPolicy.of(settings, loopback=loopback),
        )


@dataclass(slots=True)
class RequestContext:
    """A parsed head."""

    caller: Caller
    accounts: Accounts
    """On which its use counts."""
    fairness_key: str
    """Who shares fairly: the caller, or the end user that a trusted caller names."""
    session: str | None
    priority_header: str | None
    """`X-Priority`."""
    client_timeout: float | None
    """`X-Request-Timeout`: seconds that the client waits for the complete response."""
    plain_client_timeout: float | None
    """The timeout of a plain response, for which official clients send their own."""
    client_has_timer: bool
    """Whether `plain_client_timeout` is that of an official client's own timer."""
    header_lines: bytes
    """The header lines that nodes get."""
    wants_progress: bool
    """`X-Gateway-Progress: 1`: the client wants progress comments in its stream."""
    may_name_nodes: bool
    """Whether the response may name nodes."""
    usual_priority: Priority | None
    """The class of a request whose body names none; None: `X-Priority` names one."""
    cache: CachePolicy = SHARED_CACHE
    """Which nodes may serve it, and what it may learn of their prompt caches."""
    counts_no_comments: bool = False
    """Whether the client gives up a stream of comments alone, as Codex does after 300 s."""
    prefers_async: bool = False
    """`Prefer: respond-async`: the client wants to have the response later."""


class ContextCache:
    """The last head of a connection: most clients send the same one again and again."""

    __slots__ = ("_config", "_context", "_headers", "_keys_version", "_x_request_id")

    def __init__(self) -> None:
        self._headers: Headers = []
        self._config: HandlerConfig | None = None
        """The configuration by which the head was parsed."""
        self._keys_version = -1
        """The version of the key ring by which its caller was found."""
        self._context: RequestContext | None = None
        self._x_request_id: str | None = None

    def get(self, headers: Headers, config: HandlerConfig) -> RequestContext | None:
        """The context of an equal head, if it was parsed by the same configuration and keys."""
        if (
            self._config is config
            and self._keys_version == config.key_ring.version
            and self._headers == headers
        ):
            return self._context
        return None

    def store(self, headers: Headers, config: HandlerConfig, context: RequestContext) -> None:
        """Keep this head in place of the last one."""
        self._headers, self._config, self._context = headers, config, context
        self._keys_version = config.key_ring.version
        self._x_request_id = x_request_id_of(headers)

    def x_request_id_for(self, headers: Headers) -> str | None:
        """`x_request_id_of(headers)`."""
        return self._x_request_id if headers is self._headers else x_request_id_of(headers)


_X_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


def x_request_id_of(headers: Headers) -> str | None:
    """The client's `X-Request-ID`, if it is a valid one."""
    for name, value in headers:
        if name == b"x-request-id":
            return value.decode() if _X_REQUEST_ID.fullmatch(value) else None
    return None


def parse_context(
    headers: Headers,
    peer_address: str | None,
    settings: Settings,
    key_ring: KeyRing,
    identity_headers: IdentityHeaders,
    limit_book: LimitBook,
    *,
    loopback: bool,
) -> RequestContext:
    """The context that these headers describe. Raises: GatewayError 400, 401, 415, 503."""
    listen = settings.listen
    local = is_local(headers, loopback_listener=loopback, trusted_proxies=listen.trusted_proxies)
    caller = identify_caller(
        headers,
        peer_address,
        key_ring,
        allow_anonymous=settings.allow_anonymous,
        loopback_listener=loopback,
        trusted_proxies=listen.trusted_proxies,
        local=local,
    )
    wants_progress = counts_no_comments = False
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() not in _PLAIN_ENCODINGS:
            raise errors.compressed_body()
        if name == b"x-gateway-progress":
            wants_progress = value.strip().lower() in _TRUE_WORDS
        if name in _CLIENT_NAMES and _CODEX.match(value):
            counts_no_comments = True
    fairness_key = identity_headers.fairness_key(headers, caller)
    accounts = limit_book.accounts(caller, identity_headers.end_user(headers, caller))
    caller = accounts.caller
    timeout = _request_timeout(headers)
    sdk_timeout = _sdk_timeout(headers)
    has_timer = sdk_timeout is not None and (timeout is None or sdk_timeout < timeout)
    header_priority = priority_header(headers)
    return RequestContext(
        caller,
        accounts,
        fairness_key,
        identity_headers.session_key(headers, fairness_key),
        header_priority,
        timeout,
        sdk_timeout if has_timer else timeout,
        has_timer,
        headers_for_node(headers, settings.headers.to_nodes),
        wants_progress,
        _may_name_nodes(listen, local=local),
        effective_priority(None, None, None, caller) if header_priority is None else None,
        cache_policy_of(caller, settings),
        counts_no_comments,
        prefers_async(headers),
    )


def may_name_nodes(headers: Headers, settings: Settings, *, loopback: bool) -> bool:
    """Whether the response to this head may name nodes: by the settings, else to local callers."""
    listen = settings.listen
    proxies = listen.trusted_proxies
    local = is_local(headers, loopback_listener=loopback, trusted_proxies=proxies)
    return _may_name_nodes(listen, local=local)


def _may_name_nodes(listen: ListenSettings, *, local: bool) -> bool:
    return local if listen.expose_node is None else listen.expose_node


_PLAIN_ENCODINGS = frozenset({b"", b"identity"})

_CLIENT_NAMES = frozenset({b"originator", b"user-agent"})

_CODEX = re.compile(rb"\s*codex[-_ /]", re.IGNORECASE)
"""How Codex's command, its desktop program, its extension and its SDK begin their names."""

_TRUE_WORDS = frozenset({b"1", b"true", b"yes", b"on"})


def _request_timeout(headers: Headers) -> float | None:
    """`X-Request-Timeout` in seconds."""
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
"""Headers in which the official clients of OpenAI and Anthropic send their timeouts, in seconds."""


def _sdk_timeout(headers: Headers) -> float | None:
    """The shortest timeout that an official client sends; invalid values are ignored."""
    shortest: float | None = None
    for name, value in headers:
        if name in _SDK_TIMEOUTS:
            try:
                seconds = float(value)
            except ValueError:
                continue
            if math.isfinite(seconds) and seconds > 0:
                shortest = seconds if shortest is None else min(shortest, seconds)
    return shortest
