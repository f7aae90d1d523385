"""One gateway after another on the same sockets, so that no client is refused in between.

A successor is the same command started anew, perhaps of a newer version. It inherits the
listening sockets themselves: closing one of two sockets that share a port would reset who waits
in its backlog. When it is ready it says so through a pipe; only then does the old process stop
accepting, and ends what it runs. Sockets may come from systemd as well (sd_listen_fds(3)).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gateway.access.exposure import INITIAL_ACCESS, AnonymousAccess
from gateway.config.settings import Settings
from gateway.startup import Options, StartError
from gateway.web.listener import Listener, bind_socket, resolve_addresses

SOCKETS_VARIABLE = "LLAMA_GATEWAY_SOCKETS"
"""Set for a successor: `name=descriptor` for each socket, and `ready=` for the pipe."""

PREDECESSOR_VARIABLE = "LLAMA_GATEWAY_PREDECESSOR"
"""Set for a successor, which is no restart: it must not open what the old process keeps shut.
`keyed`: there have been API keys; `anonymous`: callers without one are let in nevertheless;
`customised`: its settings are not the defaults."""

LISTEN_FDS_START = 3
"""The number of the first descriptor that systemd passes (SD_LISTEN_FDS_START)."""

LISTENER_NAMES = ("public", "admin")
"""The listeners, in the order in which unnamed sockets of systemd are taken."""

READY_TIMEOUT = 60.0
"""Seconds for a successor to be ready; then it is ended and the old process stays."""


class HandoverFailed(Exception):  # noqa: N818 - the old process goes on as if nothing had been
    """No successor took over; the message says why."""


@dataclass(slots=True)
class InheritedState:
    """What this process was started with."""

    sockets: dict[str, socket.socket] = field(default_factory=dict)
    from_systemd: bool = False
    """The sockets are systemd's: they, and not the settings, say where the gateway listens."""
    ready_fd: int | None = None
    """The pipe that a predecessor reads."""
    anonymous_access: AnonymousAccess = INITIAL_ACCESS
    """The predecessor's."""
    customised: bool = False
    """The predecessor's settings are not the defaults: an empty file is not meant."""

    def apply_to(self, options: Options) -> Options:
        """The options with the addresses of systemd's sockets on top."""
        if not self.from_systemd:
            return options
        found = {name: sock.getsockname()[:2] for name, sock in self.sockets.items()}
        if (public := found.get("public")) is not None:
            options = replace(options, host=public[0], port=public[1])
        if (admin := found.get("admin")) is not None:
            options = replace(options, admin_host=admin[0], admin_port=admin[1])
        return options

    def take_socket(self, name: str, addresses: Iterable[tuple[str, int]]) -> socket.socket | None:
        """The socket of this listener, if it stands on one of the addresses wished for.

        Port 0 is any port.
        """
        sock = self.sockets.get(name)
        if sock is None:
            return None
        host, port = sock.getsockname()[:2]
        if not any(host == wished and on in {0, port} for wished, on in addresses):
            return None
        del self.sockets[name]
        return sock

    def notify_ready(self) -> None:
        """Let the predecessor go, and what nobody took of it."""
        for sock in self.sockets.values():
            sock.close()
        self.sockets.clear()
        if self.ready_fd is not None:
            with contextlib.suppress(OSError):
                os.write(self.ready_fd, b"1")
            os.close(self.ready_fd)
            self.ready_fd = None


def inherit_from_environment(environment: Mapping[str, str] = os.environ) -> InheritedState:
    """What a predecessor or systemd has left to this process. Raises: StartError."""
    if passed := environment.get(SOCKETS_VARIABLE):
        numbers = dict(part.split("=", 1) for part in passed.split())
        ready, fixed = numbers.pop("ready"), numbers.pop("fixed", "")
        sockets = {name: _adopted(int(number)) for name, number in numbers.items()}
        os.set_inheritable(int(ready), False)
        words = environment.get(PREDECESSOR_VARIABLE, "").split()
        return InheritedState(
            sockets,
            from_systemd=bool(fixed),
            ready_fd=int(ready),
            anonymous_access=AnonymousAccess(
                had_keys="keyed" in words, allowed="anonymous" in words
            ),
            customised="customised" in words,
        )
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return InheritedState()
    count = int(environment.get("LISTEN_FDS", "0"))
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    if not set(names) & set(LISTENER_NAMES):
        names = list(LISTENER_NAMES)
    for name in names[:count]:
        if name not in LISTENER_NAMES:
            raise StartError(
                f"systemd passes a socket named {name!r}, which no listener is; write "
                f"FileDescriptorName={' or '.join(LISTENER_NAMES)} into the socket unit",
                2,
            )
    numbered = zip(names, range(LISTEN_FDS_START, LISTEN_FDS_START + count), strict=False)
    return InheritedState({name: _adopted(number) for name, number in numbered}, from_systemd=True)


def _adopted(number: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=number)
    except OSError as error:
        raise StartError(f"the inherited descriptor {number} is no socket: {error.strerror}") from (
            None
        )
    if sock.family not in {socket.AF_INET, socket.AF_INET6} or sock.type != socket.SOCK_STREAM:
        sock.close()
        raise StartError(
            f"the inherited descriptor {number} is no TCP socket; write ListenStream=ADDRESS:PORT "
            "into the socket unit",
            2,
        )
    sock.setblocking(False)
    sock.set_inheritable(False)
    return sock


def restart_command() -> tuple[str, ...]:
    """The command that this process was started by, to be started again.

    By the name it was called by, so that a link to the newest release leads to it.
    """
    script = Path(sys.argv[0])
    if script.name != "__main__.py" and os.access(script, os.X_OK):
        return (str(script.absolute()), *sys.argv[1:])
    return (sys.executable, "-m", "gateway", *sys.argv[1:])


def successor_environment(
    anonymous_access: AnonymousAccess, settings_file: Path | None, *, customised: bool
) -> dict[str, str]:
    """The environment that lets a successor be no more open than this process.

    `config`: the settings file in force. A successor that does not find it must not take it for
    one that never was.
    """
    words = {
        "keyed": anonymous_access.had_keys,
        "anonymous": anonymous_access.allowed,
        "customised": customised,
    }
    told = {PREDECESSOR_VARIABLE: " ".join(word for word, holds in words.items() if holds)}
    return told if settings_file is None else {**told, "LLAMA_GATEWAY_CONFIG": str(settings_file)}


async def start_successor(
    command: Sequence[str],
    sockets: Mapping[str, socket.socket],
    *,
    from_systemd: bool,
    extra_environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start the command with these listening sockets; its process, once that is ready.

    `told`: more variables for its environment. Until it is ready nothing has changed.

    Raises: SuccessionFailed.
    """
    reader, writer = os.pipe()
    numbers = {name: sock.fileno() for name, sock in sockets.items()}
    listed = " ".join(f"{name}={number}" for name, number in numbers.items())
    environment = {
        name: value
        for name, value in os.environ.items()
        # Of systemd's: what names this very process.
        if name not in {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID"}
    }
    environment |= extra_environment or {}
    environment[SOCKETS_VARIABLE] = f"{listed} ready={writer}{' fixed=1' if from_systemd else ''}"
    try:
        try:
            # Not asyncio's: it outlives this event loop.
            process = subprocess.Popen(  # noqa: S603, ASYNC220 - our own command
                command, env=environment, pass_fds=(*numbers.values(), writer)
            )
        except OSError as error:
            raise HandoverFailed(f"{command[0]}: {error.strerror}") from None
        finally:
            os.close(writer)
        try:
            await asyncio.wait_for(_said_ready(reader), READY_TIMEOUT)
        except BaseException as error:
            process.kill()
            status = await asyncio.to_thread(process.wait)
            if isinstance(error, TimeoutError):
                why = f"it was not ready within {READY_TIMEOUT:.0f} s"
                raise HandoverFailed(why) from None
            if isinstance(error, EOFError):
                why = f"its status was {status}" if status > 0 else "its own errors say why"
                raise HandoverFailed(f"it ended before it was ready; {why}") from None
            raise
        return process
    finally:
        os.close(reader)


async def _said_ready(reader: int) -> None:
    """Wait for the successor's word. Raises: EOFError, when it is gone without one."""
    loop = asyncio.get_running_loop()
    os.set_blocking(reader, False)
    readable = asyncio.Event()
    loop.add_reader(reader, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(reader)
    if not os.read(reader, 1):
        raise EOFError


_PUBLIC = "--port (listen.port)"

_ADMIN = "--admin-port (admin.port)"


def bind_listeners(
    settings: Settings, inherited: InheritedState | None = None
) -> tuple[socket.socket, socket.socket]:
    """Sockets for the public and the admin listener: inherited ones where they fit.

    Raises: StartError.
    """
    left = inherited or InheritedState()
    listen, admin = settings.listen, settings.admin
    public = _bound(left, "public", listen.host, listen.port, _PUBLIC)
    try:
        return public, _bound(left, "admin", admin.host, admin.port, _ADMIN)
    except StartError:
        public.close()
        raise


@contextlib.contextmanager
def reserve_addresses(settings: Settings) -> Iterator[None]:
    """Keep the listeners' addresses for a gateway that is yet to start. Raises: StartError."""
    public, admin = bind_listeners(settings)
    with public, admin:
        yield


def open_listeners(public: Listener, admin: Listener) -> None:
    """Accept connections on both. Raises: StartError."""
    for listener, flag in ((public, _PUBLIC), (admin, _ADMIN)):
        with _told(listener.host, listener.port, flag):
            listener.open()


def _bound(left: InheritedState, name: str, host: str, port: int, flag: str) -> socket.socket:
    with _told(host, port, flag):
        return left.take_socket(name, resolve_addresses(host, port)) or bind_socket(host, port)


@contextlib.contextmanager
def _told(host: str, port: int, flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StartError(
            f"{host}:{port} can't be listened on: {error.strerror or error}; "
            f"end what is there, or choose another with {flag}"
        ) from None
