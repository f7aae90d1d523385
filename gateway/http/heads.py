"""Heads: what the head of a request says, and those of the responses that the gateway makes.

A request's head tells who sends it, from which page, and what it asks for. Where callers need no
key, so could any page that a browser of this machine shows: through a name of its own that resolves
to 127.0.0.1 (DNS rebinding), or a form that it posts (request forgery), which needs no permission.
For paths that are not routed, Starlette's middleware tells browsers which pages may read
(`site.with_cors`).
"""

from __future__ import annotations

import math
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field
from functools import lru_cache
from typing import Self

from starlette.requests import Request as HttpRequest

from gateway import errors
from gateway.api.base import Api
from gateway.callers.callers import (
    IdentityHeaders,
    cache_policy_of,
    effective_priority,
    identify_caller,
    is_local,
    is_loopback,
    parse_address,
    priority_header,
)
from gateway.callers.keys import KeyRing
from gateway.callers.limits import LimitBook, RateLimit
from gateway.catalog import ServedModels
from gateway.config.listeners import CorsSpec
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.events import RequestRecord
from gateway.forward.client_response import ClientResponse, node_error_code
from gateway.forward.header_fields import headers_for_node, with_content_type
from gateway.forward.in_flight import PrefillStatus
from gateway.lease import KeyedHash, QueuePosition
from gateway.request.body import ParsedBody
from gateway.request.preparation import ModelAliases, RequestRules, Sender
from gateway.request.prompt_key import VolatileLines
from gateway.terms import Caller, Headers, Priority


@dataclass(slots=True, eq=False)
class HandlerConfig:
    """What one version of the settings means for the handler."""

    settings: Settings
    loopback: bool  # whether only this machine can reach the listener
    keyed_hash: InitVar[KeyedHash]  # identifies prompts
    key_ring: KeyRing  # the keys in force; one object for the life of the process
    catalog: InitVar[ServedModels]  # what nodes serve
    identity_headers: IdentityHeaders = field(init=False)
    rules: RequestRules = field(init=False)
    origin_policy: OriginPolicy | None = field(init=False)  # restricts callers without a key

    def __post_init__(self, keyed_hash: KeyedHash, catalog: ServedModels) -> None:
        settings, identity = self.settings, self.settings.identity
        self.identity_headers = IdentityHeaders.of(identity.user_headers, identity.session_headers)
        self.rules = RequestRules(
            settings.limits,
            ModelAliases(settings.models, catalog),
            settings.default_model,
            VolatileLines(settings.prompts.volatile, settings.prompts.strip),
            keyed_hash,
        )
        self.origin_policy = OriginPolicy.of(settings, loopback=self.loopback)

    def identify(
        self, headers: Headers, peer_address: str | None, *, local: bool | None = None
    ) -> Caller:
        """Who sends a request with this head; `local`: whether it is. Raises: GatewayError 401."""
        return identify_caller(
            headers,
            peer_address,
            self.key_ring,
            allow_anonymous=self.settings.allow_anonymous,
            loopback_listener=self.loopback,
            trusted_proxies=self.settings.listen.trusted_proxies,
            local=local,
        )

    def is_local(self, headers: Headers) -> bool:
        """Whether the request with this head is trusted as one of this machine."""
        proxies = self.settings.listen.trusted_proxies
        return is_local(headers, loopback_listener=self.loopback, trusted_proxies=proxies)

    def may_name_nodes(self, headers: Headers, *, local: bool | None = None) -> bool:
        """Whether the response may name nodes: by the settings, else to local callers."""
        expose = self.settings.listen.expose_node
        if expose is not None:
            return expose
        return self.is_local(headers) if local is None else local


@dataclass(slots=True, kw_only=True)
class RequestContext(Sender):
    """A parsed head: the sender of its request, and what it asks for."""

    priority_header: str | None  # `X-Priority`
    usual_priority: Priority | None
    """The class of a request whose body names none; None: `X-Priority` names one."""
    wants_progress: bool
    """`X-Gateway-Progress: 1`: the client wants progress comments in its stream."""
    may_name_nodes: bool  # whether the response may name nodes
    counts_no_comments: bool = False
    """Whether the client gives up a stream of comments alone, as Codex does after 300 s."""
    prefers_async: bool = False
    """`Prefer: respond-async`: the client wants to have the response later."""

    def class_of(self, parsed: ParsedBody) -> Priority:
        """The class of a request with this body. Raises: GatewayError 400."""
        usual = self.usual_priority
        if usual is not None and parsed.priority is parsed.service_tier is None:
            return usual
        return class_of(parsed, self.accounts.caller, self.priority_header)


@dataclass(slots=True, eq=False, repr=False)
class ContextCache:
    """The last head of a connection: most clients send the same one again and again."""

    _headers: Headers = field(default_factory=list)
    _config: HandlerConfig | None = None  # the configuration by which the head was parsed
    _keys_version: int = -1  # the version of the key ring by which its caller was found
    _context: RequestContext | None = None
    _x_request_id: str | None = None

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
    headers: Headers, peer_address: str | None, config: HandlerConfig, limit_book: LimitBook
) -> RequestContext:
    """The context that these headers describe. Raises: GatewayError 400, 401, 415, 503."""
    settings, identity_headers = config.settings, config.identity_headers
    local = config.is_local(headers)
    caller = config.identify(headers, peer_address, local=local)
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
    # The shortest that an official client sends; invalid values are ignored.
    timers = [_positive(value) for name, value in headers if name in _SDK_TIMEOUTS]
    sdk_timeout = min((seconds for seconds in timers if seconds is not None), default=None)
    # White space keeps an official client's timer from running out.
    has_timer = (
        not settings.heartbeat_plain
        and sdk_timeout is not None
        and (timeout is None or sdk_timeout < timeout)
    )
    header_priority = priority_header(headers)
    return RequestContext(
        accounts,
        headers_for_node(headers, settings.headers.to_nodes),
        fairness_key,
        identity_headers.session_key(headers, fairness_key),
        client_timeout=timeout,
        plain_client_timeout=sdk_timeout if has_timer else timeout,
        client_has_timer=has_timer,
        cache=cache_policy_of(caller, settings),
        headers=headers,
        priority_header=header_priority,
        usual_priority=(
            effective_priority(None, None, None, caller) if header_priority is None else None
        ),
        wants_progress=wants_progress,
        may_name_nodes=config.may_name_nodes(headers, local=local),
        counts_no_comments=counts_no_comments,
        prefers_async=prefers_async(headers),
    )


def class_of(parsed: ParsedBody, caller: Caller, header: str | None = None) -> Priority:
    """The class that head and body ask for, as far as the caller may have it.

    Raises: GatewayError 400, if the header's word is unknown.
    """
    word, service_tier = parsed.priority, parsed.service_tier
    return effective_priority(
        header,
        word if isinstance(word, str) else None,
        service_tier if isinstance(service_tier, str) else None,
        caller,
    )


_PLAIN_ENCODINGS = frozenset({b"", b"identity"})
_CLIENT_NAMES = frozenset({b"originator", b"user-agent"})
# How Codex's command, its desktop program, its extension and its SDK begin their names.
_CODEX = re.compile(rb"\s*codex[-_ /]", re.IGNORECASE)
_TRUE_WORDS = frozenset({b"1", b"true", b"yes", b"on"})


def _request_timeout(headers: Headers) -> float | None:
    """`X-Request-Timeout` in seconds."""
    for name, value in headers:
        if name == b"x-request-timeout":
            seconds = _positive(value)
            if seconds is None:
                problem = "must be a positive number of seconds."
                raise errors.invalid_field("X-Request-Timeout", problem)
            return seconds
    return None


# Headers in which the official clients of OpenAI and Anthropic send their timeouts, in seconds.
_SDK_TIMEOUTS = frozenset({b"x-stainless-read-timeout", b"x-stainless-timeout"})


def _positive(value: bytes) -> float | None:
    """A positive number; None: it is none."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None


_RESPOND_ASYNC = (b"respond-async", b'respond-async=""')


def prefers_async(headers: Headers) -> bool:
    """Whether the client wants to have the response later: it says `respond-async`."""
    return any(
        member.partition(b";")[0].strip() in _RESPOND_ASYNC
        for name, value in headers
        if name == b"prefer"
        for member in value.lower().split(b",")
    )


# Owns what callers without a key keep; no key has a colon in its id.
ANONYMOUS_OWNER = "anonymous:local"


def owner_by_head(headers: Headers, caller: Caller, config: HandlerConfig, what: str) -> str:
    """The id of whose files, batches or stored responses the request is about: that of the key.

    Callers without a key own things only on a loopback listener without a proxy in front, and own
    them together. `what` is named in the error. Raises: GatewayError 401.
    """
    if not caller.anonymous:
        return caller.id
    if config.is_local(headers):
        return ANONYMOUS_OWNER
    raise GatewayError(
        401,
        "invalid_api_key",
        f"{what} belong to an API key: send one as 'Authorization: Bearer lg_...'. Without one "
        "they are kept only for callers on the gateway's own machine.",
        retryable=False,
    )


@dataclass(frozen=True, slots=True)
class Callers:
    """Who sends the requests that Starlette serves."""

    config: Callable[[], HandlerConfig]  # what is in force

    def identify(self, request: HttpRequest) -> Caller:
        """The request's caller. Raises: GatewayError 401, 403."""
        config, headers = self.config(), request.scope["headers"]
        caller = config.identify(headers, request.client.host if request.client else None)
        if config.origin_policy is not None and caller.anonymous:
            server = request.scope.get("server")
            changes = request.method not in {"GET", "HEAD"}
            config.origin_policy.check(headers, server[0] if server else None, is_post=changes)
        return caller

    def owner(self, request: HttpRequest, what: str = "Files") -> str:
        """Whose things the request is about, as `owner_by_head`. Raises: GatewayError 401, 403."""
        caller = self.identify(request)
        return owner_by_head(request.scope["headers"], caller, self.config(), what)


def no_store(what: str) -> GatewayError:
    """501: the gateway has no store, so it keeps nothing."""
    return GatewayError(
        501,
        "not_supported",
        f"The gateway has no store (store.url: off), so it keeps no {what}.",
        retryable=False,
    )


EXPOSED_HEADERS = (
    "X-Request-ID", "request-id", "X-Gateway-Class", "X-Gateway-Attempts", "X-Gateway-Queue-Ms",
    "X-Gateway-Node", "X-Gateway-Tier", "X-Gateway-Fallback", "X-Gateway-Reason", "Retry-After",
    "x-ratelimit-limit-requests", "x-ratelimit-limit-tokens", "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-tokens", "x-ratelimit-reset-requests", "x-ratelimit-reset-tokens",
    "anthropic-ratelimit-requests-limit", "anthropic-ratelimit-requests-remaining",
    "anthropic-ratelimit-requests-reset", "anthropic-ratelimit-tokens-limit",
    "anthropic-ratelimit-tokens-remaining", "anthropic-ratelimit-tokens-reset",
)  # fmt: skip
"""Headers that a web page of another origin may read."""
_EXPOSED_HEADERS = ", ".join(EXPOSED_HEADERS).encode()

_CONTAINER_HOST_NAMES = (
    "host.docker.internal", "gateway.docker.internal", "kubernetes.docker.internal",
    "host.containers.internal", "host.lima.internal", "host.orb.internal",
    "host.rancher-desktop.internal", "host.minikube.internal",
)  # fmt: skip
"""Names of this machine in containers that Docker, Podman, Lima, OrbStack, Rancher and Minikube run
on it. Nobody can own such a name: `.internal` is not delegated."""

# Origins of pages of programs made with Tauri and Wails, on Windows and Android.
_DESKTOP_APP_ORIGINS = frozenset(
    f"{scheme}://{name}.localhost" for scheme in ("http", "https") for name in ("tauri", "wails")
)

# `Sec-Fetch-Site` of requests by a page of the same origin, or by the user; pages can't set it.
_OWN_SITES = frozenset({"same-origin", "none"})


def cors_headers(cors: CorsSpec, headers: Headers) -> Headers:
    """The headers that let the page of this request read the response; none if it may not."""
    origin = next((value for name, value in headers if name == b"origin"), None)
    if origin is None:
        return []
    anywhere = "*" in cors.origins
    if not anywhere and origin.decode("latin-1") not in cors.origins:
        return [(b"vary", b"Origin")]
    found = [(b"access-control-expose-headers", _EXPOSED_HEADERS)]
    if anywhere and not cors.credentials:
        found.append((b"access-control-allow-origin", b"*"))
    else:
        found += [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
    if cors.credentials:
        found.append((b"access-control-allow-credentials", b"true"))
    return found


_AUTHORITY = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{0,5}))?")
_ORIGIN = re.compile(rf"(https?)://{_AUTHORITY.pattern}")
_PORTS = {"http": 80, "https": 443}


class AllowedHosts:
    """The hosts that a listener answers to: `names`, loopback names, and its own address."""

    def __init__(self, names: Iterable[str]) -> None:
        # 0.0.0.0 is no host's address, but a page that uses it reaches this machine.
        self._names = {_normalized(name) for name in names} - {"0.0.0.0", "::"}

    def allows(self, host: str, local_address: object) -> bool:
        """Whether this `Host`, with or without a port, is one of them.

        `local_address` is the one that the client connected to, which no name server controls.
        It is ignored if it is no IP address.
        """
        authority = _AUTHORITY.fullmatch(host)
        if authority is None:
            return False
        name, own = _normalized(authority[1]), parse_address(str(local_address))
        return (
            is_loopback(name)
            or name.endswith(".localhost")
            or name in self._names
            or (own is not None and name == str(own))
        )


@dataclass(frozen=True, slots=True)
class OriginPolicy:
    """Restricts requests whose callers have no key."""

    hosts: AllowedHosts
    origins: frozenset[str]  # origins whose pages may post, besides the listener's own

    @classmethod
    def of(cls, settings: Settings, *, loopback: bool) -> Self | None:
        """The policy of a listener that is `loopback` or not; None: no restriction.

        Trusted proxies set `Host` as they like, and a listener that is not loopback admits
        everybody on purpose. Both are restricted only if `listen.hosts` is set.
        """
        listen = settings.listen
        if not listen.hosts and (not loopback or listen.trusted_proxies):
            return None
        cors = settings.cors
        names = (listen.host, *listen.hosts, socket.gethostname(), *_CONTAINER_HOST_NAMES)
        return cls(AllowedHosts(names), frozenset(cors.origins if cors else ()))

    def check(self, headers: Headers, local_address: object, *, is_post: bool) -> None:
        """Raise GatewayError 403 if a page of another origin may have sent the request.

        `local_address` is the one that the client connected to.
        """
        host = _header(headers, b"host") or ""
        if not self.hosts.allows(host, local_address):
            raise errors.host_not_allowed(host)
        if is_post and self._is_foreign(headers, host):
            raise errors.origin_not_allowed(_header(headers, b"origin") or "another site")

    def _is_foreign(self, headers: Headers, host: str) -> bool:
        site, origin = _header(headers, b"sec-fetch-site"), _header(headers, b"origin")
        if origin is None:
            return site == "cross-site"
        if site in _OWN_SITES or is_same_origin(origin, host):
            return False
        if not self.origins.isdisjoint((origin, "*")):
            return False
        # Other schemes belong to extensions and programs that the user has installed.
        origin = origin.lower()
        return origin.startswith(("http:", "https:", "null")) and origin not in _DESKTOP_APP_ORIGINS


def is_same_origin(origin: str, host: str) -> bool:
    """Whether a page of this origin comes from this host, whether a proxy adds TLS or not."""
    page, own = _ORIGIN.fullmatch(origin), _AUTHORITY.fullmatch(host)
    if page is None or own is None:
        return False
    port = _PORTS[page[1]]
    return (_normalized(page[2]), int(page[3] or port)) == (
        _normalized(own[1]),
        int(own[2] or port),
    )


def _header(headers: Headers, wanted: bytes) -> str | None:
    return next((value.decode("latin-1") for name, value in headers if name == wanted), None)


def _normalized(name: str) -> str:
    """A host in one form: addresses as Python writes them, names in lower case."""
    name = name.strip("[]").lower().removesuffix(".")
    return str(parse_address(name) or name)


_TIERS = {"cpu": b"x-gateway-tier: cpu\r\n", "gpu": b"x-gateway-tier: gpu\r\n"}
_LABELS = [priority.label.encode() for priority in Priority]


def gateway_header_lines(record: RequestRecord, *, anthropic: bool, name_node: bool) -> bytes:
    """The gateway's header lines of a routed response."""
    usual = record.attempts == 1 and not record.queue_seconds
    lines = (_usual_outcome_lines if usual else _outcome_lines)(
        record.priority,
        record.attempts,
        record.queue_seconds,
        record.tier,
        record.fallback,
        record.node if name_node else None,
    )
    request_id = record.x_request_id.encode()
    if anthropic:
        return b"x-request-id: %b\r\nrequest-id: %b\r\n%b" % (request_id, request_id, lines)
    return b"x-request-id: %b\r\n%b" % (request_id, lines)


def _outcome_lines(
    priority: Priority,
    attempts: int,
    queue: float,
    tier: str | None,
    fallback: str | None,
    node: str | None,
) -> bytes:
    """The header lines that say how the request was served."""
    lines = b"x-gateway-class: %b\r\nx-gateway-attempts: %d\r\nx-gateway-queue-ms: %d\r\n" % (
        _LABELS[priority],
        attempts,
        queue * 1000,
    )
    if tier is not None:
        lines += _TIERS[tier]
    if fallback is not None:
        lines += b"x-gateway-fallback: %b\r\n" % fallback.encode()
    if node is not None:
        lines += b"x-gateway-node: %b\r\n" % node.encode()
    return lines


# Nearly all requests are answered by their first node, without queueing.
_usual_outcome_lines = lru_cache(maxsize=4096)(_outcome_lines)


def early_gateway_header_lines(record: RequestRecord, *, anthropic: bool) -> bytes:
    """The gateway's header lines of a response that starts before its outcome is known."""
    request_id, label = record.x_request_id.encode(), _LABELS[record.priority]
    lines = b"x-request-id: %b\r\nx-gateway-class: %b\r\n" % (request_id, label)
    return lines + b"request-id: %b\r\n" % request_id if anthropic else lines


def rate_limit_lines(
    requests: RateLimit | None, tokens: RateLimit | None, *, anthropic: bool
) -> bytes:
    """The header lines that tell a caller its tightest limits, in OpenAI's form.

    `anthropic`: in Anthropic's too.
    """
    lines = anthropic_lines = ""
    for kind, found in (("requests", requests), ("tokens", tokens)):
        if found is None:
            continue
        lines += (
            f"x-ratelimit-limit-{kind}: {found.limit}\r\n"
            f"x-ratelimit-remaining-{kind}: {found.remaining}\r\n"
            f"x-ratelimit-reset-{kind}: {_duration(math.ceil(found.reset))}\r\n"
        )
        if anthropic:
            name = f"anthropic-ratelimit-{kind}"
            resets_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.resets_at))
            anthropic_lines += (
                f"{name}-limit: {found.limit}\r\n{name}-remaining: {found.remaining}\r\n"
                f"{name}-reset: {resets_at}\r\n"
            )
    return (lines + anthropic_lines).encode()


@lru_cache(maxsize=256)
def _duration(seconds: int) -> str:
    """A duration as OpenAI writes it: `15s`, `6m0s`, `7h30m0s`; `0s` for none."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def encode_headers(headers: Headers) -> bytes:
    """Header fields as header lines."""
    return b"".join(b"%b: %b\r\n" % field for field in headers)


def error_headers(error: GatewayError) -> Headers:
    """The headers of an error response."""
    headers = [
        (b"content-type", b"application/json"),
        (b"x-gateway-reason", error.code.encode()),
    ]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
    if not error.retryable and error.status >= 408:
        headers.append((b"x-should-retry", b"false"))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status == 415:
        headers.append((b"accept-encoding", b"identity"))
    if error.allow is not None:
        headers.append((b"allow", error.allow.encode()))
    return headers


def rejection(
    error: GatewayError, api: Api, request_id: str | None = None
) -> tuple[Headers, bytes]:
    """Headers and body of the response to what never became a request."""
    request_id = request_id or f"req_{secrets.token_hex(8)}"
    body = api.error_body(error, request_id)
    headers = [
        *error_headers(error),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", request_id.encode()),
    ]
    if api.sends_request_id:
        headers.append((b"request-id", request_id.encode()))
    return headers, body


def progress_comment(
    queue_position: QueuePosition | None, prefill_status: PrefillStatus | None
) -> bytes:
    """An SSE comment with the place in the queue or the progress of the prefill.

    Empty if neither is known.
    """
    if queue_position is not None:
        comment = b": queued position=%d" % queue_position.position
        if queue_position.expected_seconds is not None:
            comment += b" expected_start=%.1f" % queue_position.expected_seconds
        return comment + b"\n"
    if prefill_status is None:
        return b""
    if prefill_status.tokens is None:
        return b": prefill percent=%d estimated=1\n" % prefill_status.percent
    return b": prefill percent=%d processed=%d total=%d\n" % (
        prefill_status.percent,
        *prefill_status.tokens,
    )


def stream_header_lines(api: Api) -> bytes:
    """The header lines of a stream that begins with a heartbeat."""
    return b"content-type: %b\r\nx-accel-buffering: no\r\n" % api.stream_content_type


def node_error_header_lines(response: ClientResponse, content: bytes) -> bytes:
    """The header lines of a node's error with this body."""
    lines = response.header_lines
    if content is not response.content:
        lines = with_content_type(lines, b"content-type: application/json\r\n")
    return lines + b"x-gateway-reason: %b\r\n" % node_error_code(response.status).encode()
