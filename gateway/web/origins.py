"""Which web pages may send requests, and which may read a routed response.

Where callers need no key, so could any page that a browser of this machine shows: through a name of
its own that resolves to 127.0.0.1 (DNS rebinding), or a form that it posts (request forgery), which
needs no permission. For the other paths, Starlette's middleware tells browsers which pages may read
(`site.with_cors`).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from gateway import errors
from gateway.access.callers import is_loopback
from gateway.config.listeners import CorsSpec
from gateway.config.settings import Settings
from gateway.request import Headers
from gateway.web.response_heads import EXPOSED_HEADERS

_EXPOSED_HEADERS = ", ".join(EXPOSED_HEADERS).encode()

_CONTAINER_HOST_NAMES = (
    "host.docker.internal",
    "gateway.docker.internal",
    "kubernetes.docker.internal",
    "host.containers.internal",
    "host.lima.internal",
    "host.orb.internal",
    "host.rancher-desktop.internal",
    "host.minikube.internal",
)
"""Names of this machine in containers that Docker, Podman, Lima, OrbStack, Rancher and Minikube run
on it. Nobody can own such a name: `.internal` is not delegated."""

_DESKTOP_APP_ORIGINS = frozenset(
    f"{scheme}://{name}.localhost" for scheme in ("http", "https") for name in ("tauri", "wails")
)
"""Origins of pages of programs made with Tauri and Wails, on Windows and Android."""

_OWN_SITES = frozenset({"same-origin", "none"})
"""`Sec-Fetch-Site` of requests by a page of the same origin, or by the user; pages can't set it."""


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
        name = _normalized(authority[1])
        return (
            is_loopback(name)
            or name.endswith(".localhost")
            or name in self._names
            or name == _normalized_address(local_address)
        )


@dataclass(frozen=True, slots=True)
class OriginPolicy:
    """Restricts requests whose callers have no key."""

    hosts: AllowedHosts
    origins: frozenset[str]
    """Origins whose pages may post, besides the listener's own."""

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
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _normalized_address(text: object) -> str | None:
    try:
        return _normalized(str(ipaddress.ip_address(str(text))))
    except ValueError:
        return None
