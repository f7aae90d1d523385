"""Who may ask the admin listener: a key's holder, by a name of the listener's, from no other page.

A web page can make a browser send requests to 127.0.0.1. It can't choose their `Host` without
owning that name (DNS rebinding), nor leave `Origin` away where it writes (request forgery).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.exposure import is_loopback
from gateway.errors import GatewayError
from gateway.web.public.answers import echoed, refusal

OPEN = frozenset({"/health", "/ready"})
"""Paths that need no key: balancers and supervisors ask them, and they tell nothing."""

_AUTHORITY = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_ORIGIN = re.compile(rf"(https?)://{_AUTHORITY.pattern}")
_PORTS = {"http": 80, "https": 443}


class Guard:
    """Lets the right requests through to `app` and refuses the others.

    `names` are hosts that the listener may be asked by, besides loopback ones and the address
    that a connection came to. With `key`, every path but `OPEN` needs it.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, names: Iterable[str]) -> None:
        self._app = app
        self._key = None if key is None else _digest(key.encode())
        # Nobody is "at" 0.0.0.0; a page that asks for it reaches this machine all the same.
        self._names = {_plain(name) for name in names} - {"0.0.0.0", "::"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._objection(scope)
            if error is not None:
                response = refusal(error, scope)
                if error.status == 401:
                    response.headers["WWW-Authenticate"] = 'Bearer realm="llama-gateway admin"'
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _objection(self, scope: Scope) -> GatewayError | None:
        hosts = _values(scope, b"host")
        host = hosts[0] if len(hosts) == 1 else ""
        if not self._answers_to(host, scope):
            return GatewayError(
                403,
                "host_not_allowed",
                f"The admin listener is not asked by the host '{echoed(host)}': ask by its "
                "address, or add the name to admin.hosts in the settings.",
            )
        for origin in _values(scope, b"origin"):
            if not _is_same(origin, host):
                return GatewayError(
                    403,
                    "origin_not_allowed",
                    f"Pages of '{echoed(origin)}' may not use the admin listener.",
                )
        if self._key is None or scope["path"] in OPEN or self._unlocks(scope):
            return None
        return GatewayError(
            401,
            "invalid_api_key",
            "No valid admin key was sent. Send the one of admin.key_file as "
            "'Authorization: Bearer ...'.",
        )

    def _answers_to(self, host: str, scope: Scope) -> bool:
        found = _AUTHORITY.fullmatch(host)
        if found is None:
            return False
        name = _plain(found[1])
        return is_loopback(name) or name in self._names or name == _own_address(scope)

    def _unlocks(self, scope: Scope) -> bool:
        fields = _values(scope, b"authorization")
        scheme, _, key = (fields[0] if len(fields) == 1 else "").strip().partition(" ")
        same = hmac.compare_digest(_digest(key.strip().encode("latin-1")), self._key or b"")
        return same and scheme.lower() == "bearer"


def _values(scope: Scope, wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]


def _plain(name: str) -> str:
    """A host in one form: addresses as Python writes them, names in lower case."""
    name = name.strip("[]").lower().removesuffix(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _own_address(scope: Scope) -> str | None:
    """The address that the connection came to, which no name server has a say in."""
    server = scope.get("server")
    try:
        return _plain(str(ipaddress.ip_address(server[0]))) if server else None
    except ValueError:
        return None


def _is_same(origin: str, host: str) -> bool:
    """Whether a page of this origin comes from this host, TLS before us or not."""
    page, own = _ORIGIN.fullmatch(origin), _AUTHORITY.fullmatch(host)
    if page is None or own is None:
        return False
    port = _PORTS[page[1]]
    return (_plain(page[2]), int(page[3] or port)) == (_plain(own[1]), int(own[2] or port))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
