"""What the system gives the process: open files, state files, systemd's socket, packages."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import resource
import shlex
import socket
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

log = logging.getLogger(__name__)
T = TypeVar("T")


def raise_open_file_limit() -> int:
    """Raise the limit of open files as far as the system allows; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):
            return soft
    return hard


def connection_limits(open_files: int, public: int, admin: int) -> tuple[int, int]:
    """Most connections of the public and the admin listener, at most `public` and `admin`.

    Each connection takes a file, and clients that use up one share leave the others:

    - Public connections: five eighths of `open_files`. Strangers can hold them open while they send
      or read next to nothing, and most that are open have no request on a node.
    - Admin connections: an eighth. Dashboards, scrapers and commands take a few dozen; the share is
      the bound for a client that opens many.
    - What is left, a quarter: a connection for each request that is running on a node, as many as
      the nodes have slots, and idle ones; besides them the store, the log and the listeners, which
      take some twenty files.
    """
    return min(public, max(1, open_files * 5 // 8)), min(admin, max(1, open_files // 8))


class SystemdNotifier:
    """Notifies systemd by the socket that `NOTIFY_SOCKET` names; without one it does nothing."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]
        usec = environment.get("WATCHDOG_USEC", "")
        own = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_seconds = int(usec) / 1e6 if usec.isdigit() and own else None
        """The watchdog's interval in seconds; None: there is no watchdog."""

    def notify(self, *lines: str) -> None:
        """Send assignments, for example `READY=1`. Errors are ignored."""
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        ):
            sock.setblocking(False)
            sock.sendto("\n".join(lines).encode(), self._address)

    async def feed_watchdog(self) -> None:
        """Notify the watchdog twice per interval, while the event loop runs, until cancelled."""
        if self.watchdog_seconds is None:
            return
        while True:
            self.notify("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_seconds / 2)


def read_state(path: Path, kind: type[T], most_bytes: int, consequence: str) -> T | None:
    """The file's value; None if there is no file, or no usable one.

    An unusable file is logged with the `consequence`, and a damaged one is set aside. At most
    `most_bytes` are read.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(most_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s can't be read (%s): %s", path, error.strerror or error, consequence)
        return None
    if len(raw) > most_bytes:
        damage = f"more than {most_bytes} bytes"
    else:
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            damage = str(error)
    log.warning("%s is damaged (%s): kept as %s, %s", path, damage, set_aside(path), consequence)
    return None


def set_aside(path: Path) -> str:
    """Rename a file that can't be used; returns its new name, or its own if that failed."""
    bad = path.with_name(path.name + ".bad")
    try:
        return path.replace(bad).name
    except OSError:
        log.warning("%s could not be set aside", path)
        return path.name


def write_state(path: Path, value: object, *, mode: int = 0o666) -> None:
    """Replace the file by this value as JSON, as `replace_file` does. Raises: OSError."""
    replace_file(path, msgspec.json.encode(value), mode=mode)


def replace_file(
    path: Path, content: bytes, *, mode: int = 0o666, like: Path | None = None
) -> None:
    """Replace the file; a reader finds the old one or the new one. Raises: OSError.

    `mode`: who may read it, less what the process's umask takes away. `like`: the file whose owner,
    mode and attributes it gets instead.
    """
    # During a hand-over two processes may write at the same time.
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fresh.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(fresh, flags, mode), "wb") as file:
            file.write(content)
            file.flush()
            if like is not None:
                _make_like(file.fileno(), like)
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def _make_like(descriptor: int, like: Path) -> None:
    wanted = like.stat()
    os.fchown(descriptor, wanted.st_uid, wanted.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(wanted.st_mode))
    for name in os.listxattr(like):  # Access lists, and labels of SELinux.
        with contextlib.suppress(OSError):
            os.setxattr(descriptor, name, os.getxattr(like, name))


DISTRIBUTION = "llama-gateway"


def install_command(extra: str) -> str:
    """Return the command that adds an extra's packages to the environment that runs this.

    No package index is known to have this program, so it names the packages themselves, which the
    program's own metadata list.
    """
    python = sys.executable or "python3"
    try:
        listed = importlib.metadata.requires(DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:
        # It runs in a checkout that was never installed.
        checkout = Path(__file__).resolve().parent.parent
        return shlex.join([python, "-m", "pip", "install", f"{checkout}[{extra}]"])
    wanted = [
        requirement.partition(";")[0].replace(" ", "")
        for requirement in listed
        if re.search(rf"""extra *== *["']{extra}["']""", requirement)
    ]
    if Path(sys.prefix, "pipx_metadata.json").is_file():
        return shlex.join(["pipx", "inject", Path(sys.prefix).name, *wanted])
    if importlib.util.find_spec("pip") is None:
        return shlex.join(["uv", "pip", "install", "--python", python, *wanted])
    return shlex.join([python, "-m", "pip", "install", *wanted])
