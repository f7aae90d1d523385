"""The addresses that the gateway listens on."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from gateway.config.settings import Settings
from gateway.options import StartError
from gateway.web.listener import bind


def bind_listeners(settings: Settings) -> tuple[socket.socket, socket.socket]:
    """Sockets for the public and the admin listener. Raises: StartError."""
    public = _bound(settings.listen.host, settings.listen.port, "--port (listen.port)")
    try:
        return public, _bound(settings.admin.host, settings.admin.port, "--admin-port (admin.port)")
    except StartError:
        public.close()
        raise


@contextlib.contextmanager
def addresses_held(settings: Settings) -> Iterator[None]:
    """Keep the listeners' addresses for a gateway that is yet to start. Raises: StartError."""
    public, admin = bind_listeners(settings)
    with public, admin:
        yield


def _bound(host: str, port: int, flag: str) -> socket.socket:
    try:
        return bind(host, port)
    except OSError as error:
        raise StartError(
            f"{host}:{port} can't be listened on: {error.strerror or error}; "
            f"end what is there, or choose another with {flag}"
        ) from None
