"""Hands ended requests to a collector, in a thread of its own, within bounds of memory and time."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from gateway.tracing.spans import EndedRequest

MOST_WAITING = 1024
"""Traces that wait to be sent; one more is dropped."""

BATCH_TRACES = 256
"""Traces that are sent at once."""

BATCH_SECONDS = 5.0
"""Seconds for which traces are collected into one message, unless there are so many sooner."""

FLUSH_SECONDS = 2.0
"""Most seconds that the gateway's end waits for the last traces to be sent."""

log = structlog.get_logger()


class Sender(Protocol):
    """Sends traces to a collector. Called by one thread, but for `interrupt`."""

    def send(self, requests: Sequence[EndedRequest]) -> bool:
        """Send them; False if they were not taken. Takes a bounded time."""

    def interrupt(self) -> None:
        """Give up what is being tried again, and try nothing any more."""

    def close(self) -> None:
        """Close its connection."""


class TraceCounts:
    """How many traces were exported and dropped since the start; for all exporters together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.exported = 0
        self.not_queued = 0
        """Dropped, as too many waited already."""
        self.not_sent = 0
        """Dropped, as the collector did not take them."""

    def count(self, *, exported: int = 0, not_queued: int = 0, not_sent: int = 0) -> None:
        """Add these. Any thread may call it."""
        with self._lock:
            self.exported += exported
            self.not_queued += not_queued
            self.not_sent += not_sent


class TraceExporter:
    """Owns the thread that sends traces. `open_sender` is called there, as it may import much."""

    def __init__(
        self,
        open_sender: Callable[[], Sender],
        counts: TraceCounts,
        *,
        batch_seconds: float = BATCH_SECONDS,
        batch_traces: int = BATCH_TRACES,
    ) -> None:
        self._open_sender = open_sender
        self._counts = counts
        self._batch_seconds = batch_seconds
        self._batch_traces = batch_traces
        self._waiting: deque[EndedRequest] = deque()
        self._sender: Sender | None = None
        self._work = threading.Event()
        self._due = threading.Event()
        """A message is full, or this ends."""
        self._closing = threading.Event()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def export(self, request: EndedRequest) -> None:
        """Send this trace soon, or drop it where too many wait. Never waits and never raises."""
        if self._closing.is_set() or len(self._waiting) >= MOST_WAITING:
            self._counts.count(not_queued=1)
            return
        self._waiting.append(request)
        if not self._work.is_set():
            self._work.set()
        if len(self._waiting) == self._batch_traces:
            self._due.set()

    def stop(self) -> None:
        """Take no more traces; the thread ends when it has sent those that wait."""
        self._closing.set()
        self._due.set()
        self._work.set()

    def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """`stop`, and wait so long at most for the thread to end; what is left then is dropped."""
        self.stop()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._given_up.set()
            if self._sender is not None:
                self._sender.interrupt()

    @property
    def running(self) -> bool:
        """Whether its thread still runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            sender = self._sender = self._open_sender()
        except Exception as error:  # noqa: BLE001 - whatever it is, requests must be served
            log.error("traces can't be exported", why=type(error).__name__)  # noqa: TRY400
            sender = None
        while True:
            self._work.wait()
            self._due.wait(self._batch_seconds)
            if not self._closing.is_set():
                self._due.clear()
            self._work.clear()
            while batch := self._take():
                self._send(sender, batch)
            if self._closing.is_set() and not self._waiting:
                break
        if sender is not None:
            sender.close()

    def _send(self, sender: Sender | None, batch: list[EndedRequest]) -> None:
        sent = False
        if sender is not None and not self._given_up.is_set():
            try:
                sent = sender.send(batch)
            except Exception as error:  # noqa: BLE001 - one message must not end the thread
                log.error("traces are lost", why=type(error).__name__)  # noqa: TRY400
        if sent:
            self._counts.count(exported=len(batch))
        else:
            self._counts.count(not_sent=len(batch))

    def _take(self) -> list[EndedRequest]:
        batch: list[EndedRequest] = []
        with contextlib.suppress(IndexError):
            while len(batch) < self._batch_traces:
                batch.append(self._waiting.popleft())
        return batch
