"""What the operating system gives the process: open files, and systemd's notification socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Mapping


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

    Each connection takes a file. Half of `open_files` is for public connections, a quarter for
    admin ones; the rest is for nodes. So clients that use up one share leave the others.
    """
    return min(public, max(1, open_files // 2)), min(admin, max(1, open_files // 4))


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
