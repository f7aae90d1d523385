"""Where log lines leave the process, without the event loop ever waiting for them.

Whoever reads our stderr may stop reading (a full pipe, a terminal on hold) or go away. Non-blocking
mode is no way out: it belongs to the open file, which our parent shares. So a thread writes, a
batch at a time, and what it can't keep up with is dropped and counted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

WAITING_BYTES = 4 * 1024 * 1024
"""Lines kept for a reader that lags; what comes beyond is dropped."""

GATHER_SECONDS = 0.05
"""How long lines are gathered into one write."""

CLOSE_SECONDS = 2.0
"""How long the last lines are waited for at the end."""

_CLOSED = frozenset({errno.EPIPE, errno.EBADF, errno.ECONNRESET})


class Sink:
    """Writes lines to a file descriptor from a thread of its own.

    The descriptor is duplicated: should somebody close it, its number may come to mean a client's
    socket. Without a usable one every line is dropped.
    """

    def __init__(self, fd: int, lost: Callable[[int], bytes] | None = None) -> None:
        """`lost` words the line that tells how many lines were dropped."""
        self._lost = lost
        self._lines: deque[bytes] = deque()
        self._waiting = 0
        self.dropped = 0
        self._untold = 0
        self._closing = False
        self._work = threading.Event()
        try:
            self._fd = os.dup(fd)
        except OSError:
            self._fd = -1
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        if self._fd >= 0:
            self._thread.start()

    def write(self, line: bytes) -> None:
        """Hand over one line, its newline included. Never waits, never raises."""
        if self._fd < 0 or self._closing or self._waiting > WAITING_BYTES:
            self.dropped += 1
            self._untold += 1
            return
        self._lines.append(line)
        # The two threads' sums may race by a line or so; the bound needs no more than that.
        self._waiting += len(line)
        if not self._work.is_set():
            self._work.set()

    def close(self) -> None:
        """Write what waits, for as long as `CLOSE_SECONDS` at most; later lines are dropped."""
        if self._closing:
            return
        self._closing = True
        self._work.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            self._work.wait()
            if not self._closing:
                time.sleep(GATHER_SECONDS)
            self._work.clear()
            if self._untold and self._lost is not None:
                untold, self._untold = self._untold, 0
                self._lines.append(self._lost(untold))
            batch = self._taken()
            if batch and not self._written(batch):
                break
            if self._closing and not self._lines:
                break
        fd, self._fd = self._fd, -1
        self._lines.clear()
        os.close(fd)

    def _taken(self) -> bytes:
        lines = []
        with contextlib.suppress(IndexError):
            while True:
                lines.append(self._lines.popleft())
        batch = b"".join(lines)
        self._waiting = 0
        return batch

    def _written(self, batch: bytes) -> bool:
        """Write all of it; False when there is nobody left to write for."""
        rest = memoryview(batch)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                # Somebody who shares the open file has made it non-blocking.
                if self._closing and not select.select((), (self._fd,), (), CLOSE_SECONDS)[1]:
                    return False
                select.select((), (self._fd,), (), 1.0)
            except OSError as error:
                if error.errno in _CLOSED:
                    return False
                # A full disk, a lost terminal: this batch is lost, the next may be written.
                self.dropped += batch.count(b"\n")
                return True
        return True
