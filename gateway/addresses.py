"""The addresses that the gateway listens on."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from gateway.config.settings import Settings
from gateway.options import StartError
from gateway.succession import Inheritance
from gateway.web.listener import Listener, bind, resolved

_PUBLIC = "--port (listen.port)"
_ADMIN = "--admin-port (admin.port)"


def bind_listeners(
    settings: Settings, inheritance: Inheritance | None = None
) -> tuple[socket.socket, socket.socket]:
    """Sockets for the public and the admin listener: inherited ones where they fit.

    Raises: StartError.
    """
    left = inheritance or Inheritance()
    listen, admin = settings.listen, settings.admin
    public = _bound(left, "public", listen.host, listen.port, _PUBLIC)
    try:
        return public, _bound(left, "admin", admin.host, admin.port, _ADMIN)
    except StartError:
        public.close()
        raise


@contextlib.contextmanager
def addresses_held(settings: Settings) -> Iterator[None]:
    """Keep the listeners' addresses for a gateway that is yet to start. Raises: StartError."""
    public, admin = bind_listeners(settings)
    with public, admin:
        yield


def open_listeners(public: Listener, admin: Listener) -> None:
    """Accept connections on both. Raises: StartError."""
    for listener, flag in ((public, _PUBLIC), (admin, _ADMIN)):
        with _told(listener.host, listener.port, flag):
            listener.open()


def _bound(left: Inheritance, name: str, host: str, port: int, flag: str) -> socket.socket:
    with _told(host, port, flag):
        return left.take(name, resolved(host, port)) or bind(host, port)


@contextlib.contextmanager
def _told(host: str, port: int, flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StartError(
            f"{host}:{port} can't be listened on: {error.strerror or error}; "
            f"end what is there, or choose another with {flag}"
        ) from None
