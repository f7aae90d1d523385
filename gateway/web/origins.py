"""Which web pages may ask, and which may read a routed reply.

Where callers are served without a key, every page that a browser of this machine shows could ask
as well: by a name of its own that resolves to 127.0.0.1 (DNS rebinding), or by a form that it posts
(request forgery), which needs no permission. Starlette's middleware tells browsers what pages may
read (`site.cors`).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from gateway import errors
from gateway.access.exposure import is_loopback
from gateway.config.listeners import CorsSpec
from gateway.config.settings import Settings
from gateway.request import Headers
from gateway.web.response_heads import EXPOSED_HEADERS

_EXPOSED = ", ".join(EXPOSED_HEADERS).encode()


_FROM_CONTAINERS = (
    "host.docker.internal",
    "gateway.docker.internal",
    "kubernetes.docker.internal",
    "host.containers.internal",
    "host.lima.internal",
    "host.orb.internal",
    "host.rancher-desktop.internal",
    "host.minikube.internal",
)
"""What a machine is called within the containers that Docker, Podman, Lima, OrbStack, Rancher and
Minikube run on it. Nobody can own such a name: `.internal` is not delegated."""

_PROGRAMS = frozenset(
    f"{scheme}://{name}.localhost" for scheme in ("http", "https") for name in ("tauri", "wails")
)
"""What programs made with Tauri and Wails call their own pages on Windows and Android."""

_OWN_SITES = frozenset({"same-origin", "none"})
"""What a browser says of requests by the page's own origin, and by its user; no page can."""


def _value(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> str | None:
    return next((value.decode("latin-1") for name, value in headers if name == wanted), None)


def cors_headers(cors: CorsSpec, headers: Headers) -> Headers:
    """The fields that let the page of this request read its reply; none if it may not."""
    origin = next((value for name, value in headers if name == b"origin"), None)
    if origin is None:
        return []
    anywhere = "*" in cors.origins
    if not anywhere and origin.decode("latin-1") not in cors.origins:
        return [(b"vary", b"Origin")]
    fields = [(b"access-control-expose-headers", _EXPOSED)]
    if anywhere and not cors.credentials:
        fields.append((b"access-control-allow-origin", b"*"))
    else:
        fields += [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
    if cors.credentials:
        fields.append((b"access-control-allow-credentials", b"true"))
    return fields


_AUTHORITY = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{0,5}))?")

_ORIGIN = re.compile(rf"(https?)://{_AUTHORITY.pattern}")

_PORTS = {"http": 80, "https": 443}


class AllowedHosts:
    """The names that a listener answers to: `names`, those of loopback, and its own address."""

    def __init__(self, names: Iterable[str]) -> None:
        # Nobody is "at" 0.0.0.0; a page that asks for it reaches this machine all the same.
        self._names = {_plain(name) for name in names} - {"0.0.0.0", "::"}

    def allows(self, host: str, local_address: object) -> bool:
        """Whether this `Host`, with or without a port, is one of them.

        `own_address` is the one that the connection came to, which no name server has a say in;
        what is no IP address is none.
        """
        found = _AUTHORITY.fullmatch(host)
        if found is None:
            return False
        name = _plain(found[1])
        return (
            is_loopback(name)
            or name.endswith(".localhost")
            or name in self._names
            or name == _address(local_address)
        )


@dataclass(frozen=True, slots=True)
class OriginPolicy:
    """What is asked of requests whose callers show no key."""

    hosts: AllowedHosts
    origins: frozenset[str]
    """Of pages that may post, besides the listener's own."""

    @classmethod
    def of(cls, settings: Settings, *, loopback: bool) -> Self | None:
        """The rules of a listener that is `loopback` or not; None: anybody may ask in any way.

        Behind trusted proxies `Host` is what they make it, and on other addresses than loopback
        everybody was let in on purpose. Both are held to `listen.hosts`, where it is set.
        """
        listen = settings.listen
        if not listen.hosts and (not loopback or listen.trusted_proxies):
            return None
        cors = settings.cors
        names = (listen.host, *listen.hosts, socket.gethostname(), *_FROM_CONTAINERS)
        return cls(AllowedHosts(names), frozenset(cors.origins if cors else ()))

    def check(self, headers: Headers, local_address: object, *, is_post: bool) -> None:
        """Raise GatewayError 403 unless the request can't be a foreign page's.

        `own_address` is the one that the connection came to.
        """
        host = _value(headers, b"host") or ""
        if not self.hosts.allows(host, local_address):
            raise errors.host_not_allowed(host)
        if is_post and self._is_foreign(headers, host):
            raise errors.origin_not_allowed(_value(headers, b"origin") or "another site")

    def _is_foreign(self, headers: Headers, host: str) -> bool:
        site, origin = _value(headers, b"sec-fetch-site"), _value(headers, b"origin")
        if origin is None:
            return site == "cross-site"
        if site in _OWN_SITES or is_same_origin(origin, host):
            return False
        if not self.origins.isdisjoint((origin, "*")):
            return False
        # Others than the web's are extensions and programs that their user has installed.
        origin = origin.lower()
        return origin.startswith(("http:", "https:", "null")) and origin not in _PROGRAMS


def is_same_origin(origin: str, host: str) -> bool:
    """Whether a page of this origin comes from this host, TLS before us or not."""
    page, own = _ORIGIN.fullmatch(origin), _AUTHORITY.fullmatch(host)
    if page is None or own is None:
        return False
    port = _PORTS[page[1]]
    return (_plain(page[2]), int(page[3] or port)) == (_plain(own[1]), int(own[2] or port))


def _plain(name: str) -> str:
    """A host in one form: addresses as Python writes them, names in lower case."""
    name = name.strip("[]").lower().removesuffix(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _address(text: object) -> str | None:
    try:
        return _plain(str(ipaddress.ip_address(str(text))))
    except ValueError:
        return None
