"""The guard of the admin listener: which hosts, origins and keys it lets in, and who they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.callers.keys import LOCAL_ADMIN, AdminIdentity, AdminKeys, AdminRole
from gateway.errors import GatewayError, truncate_echo
from gateway.http.heads import AllowedHosts, is_same_origin
from gateway.web.asgi import error_response

_IDENTITY_KEY = "gateway.admin_identity"  # key of the caller's `AdminIdentity` in the ASGI scope
_GUARD_KEY = "gateway.admin_guard"  # key of the guard that let the request in


def identity_of(request: Request) -> AdminIdentity:
    """Who has sent a request that the guard let in."""
    identity: AdminIdentity = request.scope[_IDENTITY_KEY]
    return identity


def is_still_admitted(request: Request) -> bool:
    """Whether the guard would let this request in now, as the same caller in the same role."""
    guard: AdminGuard = request.scope[_GUARD_KEY]
    try:
        return guard.check(request.scope) == identity_of(request)
    except GatewayError:
        return False


def role_required(needed: AdminRole, own: AdminRole) -> GatewayError:
    """403: the caller's key has a lower role."""
    return GatewayError(
        403,
        "role_required",
        f"This needs an admin key of the role '{needed.label}'; this one has the role "
        f"'{own.label}'.",
    )


class AdminGuard:
    """Passes permitted requests to `app` and refuses all others.

    `names` are permitted hosts, besides loopback names and the address that the client connected
    to. With `keys`, every path needs one that is not `is_keyless`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: AdminKeys,
        names: Iterable[str],
        is_keyless: Callable[[str], bool],
    ) -> None:
        self._app = app
        self._keys = keys
        self._is_keyless = is_keyless
        self._hosts = AllowedHosts(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            identity = self.check(scope)
        except GatewayError as error:
            response = error_response(error, scope)
            if error.status == 401:
                response.headers["WWW-Authenticate"] = 'Bearer realm="llama-gateway admin"'
            await response(scope, receive, send)
            return
        await self._app({**scope, _IDENTITY_KEY: identity, _GUARD_KEY: self}, receive, send)

    def check(self, scope: Scope) -> AdminIdentity:
        """Who sends this request. Raises: GatewayError 401, 403."""
        hosts = _values(scope, b"host")
        host = hosts[0].decode("latin-1") if len(hosts) == 1 else ""
        server = scope.get("server")
        if not self._hosts.allows(host, server[0] if server else None):
            raise GatewayError(
                403,
                "host_not_allowed",
                f"The admin listener does not answer to the host '{truncate_echo(host)}': use its "
                "address, or add the name to admin.hosts in the settings.",
            )
        for value in _values(scope, b"origin"):
            origin = value.decode("latin-1")
            if not is_same_origin(origin, host):
                raise GatewayError(
                    403,
                    "origin_not_allowed",
                    f"Pages of '{truncate_echo(origin)}' may not use the admin listener.",
                )
        if not self._keys.needed:
            return LOCAL_ADMIN
        values = _values(scope, b"authorization")
        scheme, _, key = (values[0] if len(values) == 1 else b"").strip().partition(b" ")
        identity = self._keys.find(key.strip().decode(errors="surrogateescape"))
        if identity is not None and scheme.lower() == b"bearer":
            return identity
        if self._is_keyless(scope["path"]):
            return NOBODY
        raise GatewayError(
            401,
            "invalid_api_key",
            "No valid admin key was sent. Send one of admin.keys or that of admin.key_file as "
            "'Authorization: Bearer ...'.",
        )


NOBODY = AdminIdentity("", AdminRole.VIEWER)  # the caller of a path that needs no key


def _values(scope: Scope, wanted: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == wanted]
