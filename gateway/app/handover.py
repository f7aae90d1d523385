"""Handover of the listening sockets to a new process, so that no client is refused in between.

The successor is the same command started again, perhaps of a newer version. It inherits the sockets
themselves: of two sockets that share a port, closing one would reset the clients in its backlog.
When the successor is ready it writes to a pipe; only then does the old process stop accepting
connections, and ends when its requests have. Sockets may also come from systemd (sd_listen_fds(3)).
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
from typing import BinaryIO

from gateway.app.startup import Options, StartError
from gateway.callers.keys import INITIAL_ACCESS, AnonymousAccess
from gateway.config.settings import Settings, parse_address
from gateway.http.listener import Listener, bind_socket, resolve_addresses
from gateway.lease import HASH_KEY_BYTES

# Set for a successor: `name=descriptor` for each socket, `ready=descriptor` for the pipe, and
# `fixed=1` if systemd owns the sockets.
SOCKETS_VARIABLE = "LLAMA_GATEWAY_SOCKETS"
# Set for a successor: the descriptor of a pipe that holds the key of `KeyedHash`, which nobody else
# can read.
HASH_KEY_VARIABLE = "LLAMA_GATEWAY_HASH_KEY_PIPE"
# Set for a successor: the descriptor of a pipe that ends when the old process has written the last
# of what it has learnt, or is dead.
LEARNT_VARIABLE = "LLAMA_GATEWAY_LEARNT_PIPE"
# Set for a successor, which must not admit callers that the old process refuses. Words: `keyed`:
# there have been API keys; `anonymous`: callers without one are admitted nevertheless;
# `customised`: the settings are not the defaults; `admin-keyed`: there have been admin keys.
PREDECESSOR_VARIABLE = "LLAMA_GATEWAY_PREDECESSOR"
LISTEN_FDS_START = 3  # the first descriptor that systemd passes (SD_LISTEN_FDS_START)
LISTENER_NAMES = ("public", "admin")  # the listeners, in the order of systemd's unnamed sockets
# Seconds for a successor to become ready; then it is killed and the old process stays.
READY_TIMEOUT = 60.0


class HandoverFailed(Exception):  # noqa: N818 - no error of the process, which serves on
    """No successor took over; the message says why."""


@dataclass(slots=True)
class InheritedState:
    """What a predecessor or systemd has passed to this process."""

    sockets: dict[str, socket.socket] = field(default_factory=dict)
    from_systemd: bool = False
    """The sockets are systemd's: they decide where the gateway listens, not the settings."""
    ready_fd: int | None = None  # the pipe to the predecessor
    anonymous_access: AnonymousAccess = INITIAL_ACCESS  # the predecessor's
    hash_key: bytes | None = field(default=None, repr=False)
    """The predecessor's key for digests of prompts; None: there is no predecessor."""
    learnt_fd: int | None = None
    """The pipe that ends when the predecessor has written what it has learnt."""
    customised: bool = False
    """The predecessor's settings were not the defaults, so an empty file must be a mistake."""
    had_admin_keys: bool = False  # the predecessor has had admin keys

    def apply_to(self, options: Options) -> Options:
        """The options, overridden by the addresses of systemd's sockets."""
        if not self.from_systemd:
            return options
        addresses = {name: sock.getsockname()[:2] for name, sock in self.sockets.items()}
        if (public := addresses.get("public")) is not None:
            options = replace(options, host=public[0], port=public[1])
        if (admin := addresses.get("admin")) is not None:
            options = replace(options, admin_host=admin[0], admin_port=admin[1])
        return options

    def take_socket(self, name: str, addresses: Iterable[tuple[str, int]]) -> socket.socket | None:
        """The inherited socket of this listener, if its address is one of these; port 0 is any.

        It is removed from `sockets`.
        """
        sock = self.sockets.get(name)
        host, port = (None, 0) if sock is None else sock.getsockname()[:2]
        if any(host == wanted and number in {0, port} for wanted, number in addresses):
            return self.sockets.pop(name)
        return None

    async def wait_for_learnt(self) -> None:
        """Wait until the predecessor has written what it has learnt. The caller sets a limit."""
        if self.learnt_fd is not None:
            with os.fdopen(self.learnt_fd, "rb", buffering=0) as pipe:
                self.learnt_fd = None
                await _wait_until_readable(pipe.fileno())

    def notify_ready(self) -> None:
        """Report readiness to the predecessor, and close the sockets that nobody took."""
        for sock in self.sockets.values():
            sock.close()
        self.sockets.clear()
        if self.ready_fd is not None:
            with contextlib.suppress(OSError):
                os.write(self.ready_fd, b"1")
            os.close(self.ready_fd)
            self.ready_fd = None


def inherit_from_environment(
    environment: Mapping[str, str] = os.environ, *, first_descriptor: int = LISTEN_FDS_START
) -> InheritedState:
    """What a predecessor or systemd has passed to this process. Raises: StartError."""
    if passed := environment.get(SOCKETS_VARIABLE):
        numbers = dict(part.split("=", 1) for part in passed.split())
        ready, from_systemd = numbers.pop("ready"), numbers.pop("fixed", "")
        sockets = {name: _adopt_socket(int(number)) for name, number in numbers.items()}
        words, hash_key = environment.get(PREDECESSOR_VARIABLE, "").split(), None
        key_pipe = _inherited_pipe(environment.get(HASH_KEY_VARIABLE))
        if key_pipe is not None:
            with os.fdopen(key_pipe, "rb", buffering=0) as pipe:
                hash_key = pipe.read(HASH_KEY_BYTES)
        return InheritedState(
            sockets,
            from_systemd=bool(from_systemd),
            ready_fd=_inherited_pipe(ready),
            anonymous_access=AnonymousAccess(
                had_keys="keyed" in words, allowed="anonymous" in words
            ),
            hash_key=hash_key,
            learnt_fd=_inherited_pipe(environment.get(LEARNT_VARIABLE)),
            customised="customised" in words,
            had_admin_keys="admin-keyed" in words,
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
                f"systemd passes a socket named {name!r}, but no listener has that name; write "
                f"FileDescriptorName={' or '.join(LISTENER_NAMES)} into the socket unit",
                2,
            )
    numbered = zip(names, range(first_descriptor, first_descriptor + count), strict=False)
    sockets = {name: _adopt_socket(number) for name, number in numbered}
    return InheritedState(sockets, from_systemd=True)


def _adopt_socket(number: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=number)
    except OSError as error:
        raise StartError(
            f"the inherited descriptor {number} is not a socket: {error.strerror}"
        ) from (None)
    if sock.family not in {socket.AF_INET, socket.AF_INET6} or sock.type != socket.SOCK_STREAM:
        sock.close()
        raise StartError(
            f"the inherited descriptor {number} is not a TCP socket; write "
            "ListenStream=ADDRESS:PORT into the socket unit",
            2,
        )
    sock.setblocking(False)
    sock.set_inheritable(False)
    return sock


def _inherited_pipe(number: str | None) -> int | None:
    if number is None:
        return None
    os.set_inheritable(int(number), False)
    return int(number)


def restart_command() -> tuple[str, ...]:
    """The command that started this process.

    By the name that was used, so that a link to the newest release is followed again.
    """
    script = Path(sys.argv[0])
    if script.name != "__main__.py" and os.access(script, os.X_OK):
        return (str(script.absolute()), *sys.argv[1:])
    return (sys.executable, "-m", "gateway", *sys.argv[1:])


def successor_environment(
    anonymous_access: AnonymousAccess,
    settings_file: Path | None,
    *,
    customised: bool,
    had_admin_keys: bool = False,
) -> dict[str, str]:
    """Variables that keep a successor from admitting more callers than this process.

    They name the settings file in force: a successor that can't find it must not start with the
    defaults.
    """
    words = {
        "keyed": anonymous_access.had_keys,
        "anonymous": anonymous_access.allowed,
        "customised": customised,
        "admin-keyed": had_admin_keys,
    }
    variables = {PREDECESSOR_VARIABLE: " ".join(word for word, holds in words.items() if holds)}
    if settings_file is not None:
        variables["LLAMA_GATEWAY_CONFIG"] = str(settings_file)
    return variables


async def start_successor(
    command: Sequence[str],
    sockets: Mapping[str, socket.socket],
    *,
    from_systemd: bool,
    hash_key: bytes,
    learnt_pipe: BinaryIO | None = None,
    extra_environment: Mapping[str, str] | None = None,
    timeout: float = READY_TIMEOUT,
) -> subprocess.Popen[bytes]:
    """Start the command with these listening sockets; returns its process once it is ready.

    Until then nothing has changed. `learnt_pipe`: it ends when the caller has written what it has
    learnt. `timeout` is in seconds. Raises: HandoverFailed.
    """
    reader, writer = os.pipe()
    numbers = {name: sock.fileno() for name, sock in sockets.items()}
    listed = " ".join(f"{name}={number}" for name, number in numbers.items())
    environment = {
        name: value
        for name, value in os.environ.items()
        # systemd's variables that name this process.
        if name not in {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID"}
    }
    key_reader, key_writer = os.pipe()
    os.write(key_writer, hash_key)  # which fits into its buffer
    os.close(key_writer)
    passed = [*numbers.values(), writer, key_reader]
    environment |= extra_environment or {}
    environment[HASH_KEY_VARIABLE] = str(key_reader)
    environment.pop(LEARNT_VARIABLE, None)
    if learnt_pipe is not None:
        environment[LEARNT_VARIABLE] = str(learnt_pipe.fileno())
        passed.append(learnt_pipe.fileno())
    environment[SOCKETS_VARIABLE] = f"{listed} ready={writer}{' fixed=1' if from_systemd else ''}"
    try:
        try:
            # Not by asyncio: the process outlives this event loop.
            process = subprocess.Popen(  # noqa: S603, ASYNC220 - our own command
                command, env=environment, pass_fds=passed
            )
        except OSError as error:
            raise HandoverFailed(f"{command[0]}: {error.strerror}") from None
        finally:
            os.close(writer)
            os.close(key_reader)
        try:
            await asyncio.wait_for(_wait_until_ready(reader), timeout)
        except BaseException as error:
            process.kill()
            status = await asyncio.to_thread(process.wait)
            if isinstance(error, TimeoutError):
                why = f"it was not ready within {timeout:.0f} s"
                raise HandoverFailed(why) from None
            if isinstance(error, EOFError):
                why = f"its status was {status}" if status > 0 else "its own errors say why"
                raise HandoverFailed(f"it ended before it was ready; {why}") from None
            raise
        return process
    finally:
        os.close(reader)


async def _wait_until_ready(reader: int) -> None:
    """Wait for the successor to write. Raises: EOFError, if it ends without that."""
    await _wait_until_readable(reader)
    if not os.read(reader, 1):
        raise EOFError


async def _wait_until_readable(reader: int) -> None:
    """Wait until something was written into the pipe, or its writer has closed it."""
    loop = asyncio.get_running_loop()
    os.set_blocking(reader, False)
    readable = asyncio.Event()
    loop.add_reader(reader, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(reader)


_PUBLIC_OPTION = "--port (listen.port)"
_ADMIN_OPTION = "--admin-port (admin.port)"


def bind_listeners(
    settings: Settings, inherited: InheritedState | None = None
) -> tuple[socket.socket, socket.socket]:
    """Sockets of the public and the admin listener; inherited ones if their addresses match.

    Raises: StartError.
    """
    state = inherited or InheritedState()
    listen, admin = settings.listen, settings.admin
    public = _bind(state, "public", listen.host, listen.port, _PUBLIC_OPTION)
    try:
        return public, _bind(state, "admin", admin.host, admin.port, _ADMIN_OPTION)
    except StartError:
        public.close()
        raise


def bind_cluster(settings: Settings, inherited: InheritedState) -> socket.socket | None:
    """A socket that listens for the other members of the cluster; None: there is no cluster.

    Raises: StartError.
    """
    if settings.cluster is None:
        return None
    host, port = parse_address(settings.cluster.listen)
    sock = _bind(inherited, "cluster", host, port, "cluster.listen")
    sock.listen()
    return sock


@contextlib.contextmanager
def reserve_addresses(settings: Settings) -> Iterator[None]:
    """Hold the listeners' addresses for a gateway that starts later. Raises: StartError."""
    public, admin = bind_listeners(settings)
    with public, admin:
        yield


def open_listeners(public: Listener, admin: Listener) -> None:
    """Accept connections on both. Raises: StartError."""
    for listener, option in ((public, _PUBLIC_OPTION), (admin, _ADMIN_OPTION)):
        with _explain_os_error(listener.host, listener.port, option):
            listener.open()


async def close_listeners(*listeners: Listener | None) -> None:
    """Close those that there are, within a second; together, as each takes a tenth of it."""

    async def close(listener: Listener) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(listener.close(), 1.0)

    await asyncio.gather(*(close(one) for one in listeners if one is not None))


def _bind(state: InheritedState, name: str, host: str, port: int, option: str) -> socket.socket:
    with _explain_os_error(host, port, option):
        return state.take_socket(name, resolve_addresses(host, port)) or bind_socket(host, port)


@contextlib.contextmanager
def _explain_os_error(host: str, port: int, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StartError(
            f"{host}:{port} can't be listened on: {error.strerror or error}; "
            f"end what listens there, or choose another with {option}"
        ) from None
