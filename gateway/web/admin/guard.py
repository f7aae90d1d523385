"""Who may ask the admin listener: a key's holder, by the listener's name, from no other page."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import GatewayError
from gateway.web.asgi import error_response, truncate_echo
from gateway.web.origins import AllowedHosts, is_same_origin

KEYLESS_PATHS = frozenset({"/health", "/ready"})
"""Paths that need no key: balancers and supervisors ask them, and they tell nothing."""


class AdminGuard:
    """Lets the right requests through to `app` and refuses the others.

    `names` are hosts that the listener may be asked by, besides loopback ones and the address
    that a connection came to. With `key`, every path but `OPEN` needs it.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, names: Iterable[str]) -> None:
        self._app = app
        self._key = None if key is None else _digest(key.encode())
        self._hosts = AllowedHosts(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._objection(scope)
            if error is not None:
                response = error_response(error, scope)
                if error.status == 401:
                    response.headers["WWW-Authenticate"] = 'Bearer realm="llama-gateway admin"'
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _objection(self, scope: Scope) -> GatewayError | None:
        hosts = _values(scope, b"host")
        host = hosts[0] if len(hosts) == 1 else ""
        server = scope.get("server")
        if not self._hosts.allows(host, server[0] if server else None):
            return GatewayError(
                403,
                "host_not_allowed",
                f"The admin listener is not asked by the host '{truncate_echo(host)}': ask by its "
                "address, or add the name to admin.hosts in the settings.",
            )
        for origin in _values(scope, b"origin"):
            if not is_same_origin(origin, host):
                return GatewayError(
                    403,
                    "origin_not_allowed",
                    f"Pages of '{truncate_echo(origin)}' may not use the admin listener.",
                )
        if self._key is None or scope["path"] in KEYLESS_PATHS or self._unlocks(scope):
            return None
        return GatewayError(
            401,
            "invalid_api_key",
            "No valid admin key was sent. Send the one of admin.key_file as "
            "'Authorization: Bearer ...'.",
        )

    def _unlocks(self, scope: Scope) -> bool:
        fields = _values(scope, b"authorization")
        scheme, _, key = (fields[0] if len(fields) == 1 else "").strip().partition(" ")
        same = hmac.compare_digest(_digest(key.strip().encode("latin-1")), self._key or b"")
        return same and scheme.lower() == "bearer"


def _values(scope: Scope, wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
