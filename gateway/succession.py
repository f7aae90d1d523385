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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gateway.access.anonymous import OPEN, Door
from gateway.options import Options, StartError

PASSED = "LLAMA_GATEWAY_SOCKETS"
"""Set for a successor: `name=descriptor` for each socket, and `ready=` for the pipe."""

PREDECESSOR = "LLAMA_GATEWAY_PREDECESSOR"
"""Set for a successor, which is no restart: it must not open what the old process keeps shut.
`keyed`: there have been API keys; `anonymous`: callers without one are let in nevertheless;
`customised`: its settings are not the defaults."""

FIRST = 3
"""The number of the first descriptor that systemd passes (SD_LISTEN_FDS_START)."""

NAMES = ("public", "admin")
"""The listeners, in the order in which unnamed sockets of systemd are taken."""

READY_WITHIN = 60.0
"""Seconds for a successor to be ready; then it is ended and the old process stays."""


class SuccessionFailed(Exception):  # noqa: N818 - the old process goes on as if nothing had been
    """No successor took over; the message says why."""


@dataclass(slots=True)
class Inheritance:
    """What this process was started with."""

    sockets: dict[str, socket.socket] = field(default_factory=dict)
    fixed: bool = False
    """The sockets are systemd's: they, and not the settings, say where the gateway listens."""
    ready: int | None = None
    """The pipe that a predecessor reads."""
    door: Door = OPEN
    """The predecessor's."""
    customised: bool = False
    """The predecessor's settings are not the defaults: an empty file is not meant."""

    def over(self, options: Options) -> Options:
        """The options with the addresses of systemd's sockets on top."""
        if not self.fixed:
            return options
        found = {name: sock.getsockname()[:2] for name, sock in self.sockets.items()}
        if (public := found.get("public")) is not None:
            options = replace(options, host=public[0], port=public[1])
        if (admin := found.get("admin")) is not None:
            options = replace(options, admin_host=admin[0], admin_port=admin[1])
        return options

    def take(self, name: str, addresses: Iterable[tuple[str, int]]) -> socket.socket | None:
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

    def tell_ready(self) -> None:
        """Let the predecessor go, and what nobody took of it."""
        for sock in self.sockets.values():
            sock.close()
        self.sockets.clear()
        if self.ready is not None:
            with contextlib.suppress(OSError):
                os.write(self.ready, b"1")
            os.close(self.ready)
            self.ready = None


def inherit(environment: Mapping[str, str] = os.environ) -> Inheritance:
    """What a predecessor or systemd has left to this process. Raises: StartError."""
    if passed := environment.get(PASSED):
        numbers = dict(part.split("=", 1) for part in passed.split())
        ready, fixed = numbers.pop("ready"), numbers.pop("fixed", "")
        sockets = {name: _adopted(int(number)) for name, number in numbers.items()}
        os.set_inheritable(int(ready), False)
        words = environment.get(PREDECESSOR, "").split()
        return Inheritance(
            sockets,
            fixed=bool(fixed),
            ready=int(ready),
            door=Door(keyed="keyed" in words, anonymous="anonymous" in words),
            customised="customised" in words,
        )
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return Inheritance()
    count = int(environment.get("LISTEN_FDS", "0"))
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    if not set(names) & set(NAMES):
        names = list(NAMES)
    for name in names[:count]:
        if name not in NAMES:
            raise StartError(
                f"systemd passes a socket named {name!r}, which no listener is; write "
                f"FileDescriptorName={' or '.join(NAMES)} into the socket unit",
                2,
            )
    numbered = zip(names, range(FIRST, FIRST + count), strict=False)
    return Inheritance({name: _adopted(number) for name, number in numbered}, fixed=True)


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


def own_command() -> tuple[str, ...]:
    """The command that this process was started by, to be started again.

    By the name it was called by, so that a link to the newest release leads to it.
    """
    script = Path(sys.argv[0])
    if script.name != "__main__.py" and os.access(script, os.X_OK):
        return (str(script.absolute()), *sys.argv[1:])
    return (sys.executable, "-m", "gateway", *sys.argv[1:])


def legacy(door: Door, config: Path | None, *, customised: bool) -> dict[str, str]:
    """The environment that lets a successor be no more open than this process.

    `config`: the settings file in force. A successor that does not find it must not take it for
    one that never was.
    """
    words = {"keyed": door.keyed, "anonymous": door.anonymous, "customised": customised}
    told = {PREDECESSOR: " ".join(word for word, holds in words.items() if holds)}
    return told if config is None else {**told, "LLAMA_GATEWAY_CONFIG": str(config)}


async def start_successor(
    command: Sequence[str],
    sockets: Mapping[str, socket.socket],
    *,
    fixed: bool,
    told: Mapping[str, str] | None = None,
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
    environment |= told or {}
    environment[PASSED] = f"{listed} ready={writer}{' fixed=1' if fixed else ''}"
    try:
        try:
            # Not asyncio's: it outlives this event loop.
            process = subprocess.Popen(  # noqa: S603, ASYNC220 - our own command
                command, env=environment, pass_fds=(*numbers.values(), writer)
            )
        except OSError as error:
            raise SuccessionFailed(f"{command[0]}: {error.strerror}") from None
        finally:
            os.close(writer)
        try:
            await asyncio.wait_for(_said_ready(reader), READY_WITHIN)
        except BaseException as error:
            process.kill()
            status = await asyncio.to_thread(process.wait)
            if isinstance(error, TimeoutError):
                why = f"it was not ready within {READY_WITHIN:.0f} s"
                raise SuccessionFailed(why) from None
            if isinstance(error, EOFError):
                why = f"its status was {status}" if status > 0 else "its own errors say why"
                raise SuccessionFailed(f"it ended before it was ready; {why}") from None
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
