"""The limit of open files: each client and each node connection takes one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Mapping


def raise_open_file_limit() -> int:
    """Raise this process's limit to what the system allows; returns what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):
            return soft
    return hard


def connection_limits(open_files: int, public: int, admin: int) -> tuple[int, int]:
    """Connections that the two listeners may have, so that `files` suffice for the nodes' as well.

    A half is for the public one, a quarter for the admin one: who fills one has not filled all.
    """
    return min(public, max(1, open_files // 2)), min(admin, max(1, open_files // 4))


class SystemdNotifier:
    """Speaks to the socket that systemd names in `NOTIFY_SOCKET`; without one it does nothing."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]
        usec = environment.get("WATCHDOG_USEC", "")
        own = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_seconds = int(usec) / 1e6 if usec.isdigit() and own else None
        """Seconds within which systemd wants a sign of life; None: it wants none."""

    def notify(self, *lines: str) -> None:
        """Send some assignments, for example `READY=1`. A lost message is nobody's error."""
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        ):
            sock.setblocking(False)
            sock.sendto("\n".join(lines).encode(), self._address)

    async def feed_watchdog(self) -> None:
        """Tell systemd that the event loop turns, twice in each interval, until cancelled."""
        if self.watchdog_seconds is None:
            return
        while True:
            self.notify("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_seconds / 2)
