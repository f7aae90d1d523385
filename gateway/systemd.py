"""What systemd is told, where it listens: readiness, its watchdog, the end (sd_notify(3))."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping


class Notifier:
    """Speaks to the socket that systemd names in `NOTIFY_SOCKET`; without one it does nothing."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]
        usec = environment.get("WATCHDOG_USEC", "")
        own = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog = int(usec) / 1e6 if usec.isdigit() and own else None
        """Seconds within which systemd wants a sign of life; None: it wants none."""

    def tell(self, *lines: str) -> None:
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
        if self.watchdog is None:
            return
        while True:
            self.tell("WATCHDOG=1")
            await asyncio.sleep(self.watchdog / 2)
