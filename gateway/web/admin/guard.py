"""Protects the admin listener: by its key, by `Host`, and against pages of other origins."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import GatewayError, truncate_echo
from gateway.web.asgi import error_response
from gateway.web.origins import AllowedHosts, is_same_origin

KEYLESS_PATHS = frozenset({"/health", "/ready"})
"""Paths that need no key: load balancers and supervisors use them, and they reveal nothing."""


class AdminGuard:
    """Passes permitted requests to `app` and refuses all others.

    `names` are permitted hosts, besides loopback names and the address that the client connected
    to. With `key`, every path but `KEYLESS_PATHS` needs it.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, names: Iterable[str]) -> None:
        self._app = app
        self._key = None if key is None else _digest(key.encode())
        self._hosts = AllowedHosts(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._check(scope)
            if error is not None:
                response = error_response(error, scope)
                if error.status == 401:
                    response.headers["WWW-Authenticate"] = 'Bearer realm="llama-gateway admin"'
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> GatewayError | None:
        hosts = _values(scope, b"host")
        host = hosts[0] if len(hosts) == 1 else ""
        server = scope.get("server")
        if not self._hosts.allows(host, server[0] if server else None):
            return GatewayError(
                403,
                "host_not_allowed",
                f"The admin listener does not answer to the host '{truncate_echo(host)}': use its "
                "address, or add the name to admin.hosts in the settings.",
            )
        for origin in _values(scope, b"origin"):
            if not is_same_origin(origin, host):
                return GatewayError(
                    403,
                    "origin_not_allowed",
                    f"Pages of '{truncate_echo(origin)}' may not use the admin listener.",
                )
        if self._key is None or scope["path"] in KEYLESS_PATHS or self._has_key(scope):
            return None
        return GatewayError(
            401,
            "invalid_api_key",
            "No valid admin key was sent. Send the key of admin.key_file as "
            "'Authorization: Bearer ...'.",
        )

    def _has_key(self, scope: Scope) -> bool:
        values = _values(scope, b"authorization")
        scheme, _, key = (values[0] if len(values) == 1 else "").strip().partition(" ")
        same = hmac.compare_digest(_digest(key.strip().encode("latin-1")), self._key or b"")
        return same and scheme.lower() == "bearer"


def _values(scope: Scope, wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
