"""Traces requests: decides which, and hands those that have ended to the exporter.

While a request runs, its trace is an id and a list of the scheduler's decisions. All else is done
when it has ended, off the event loop.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING

import structlog

from gateway.config.settings import TracesSettings
from gateway.events import RequestRecord
from gateway.schedule.decision_log import DecisionLog
from gateway.terms import Headers, RequestTrace, Traceparent, parse_traceparent
from gateway.watch.spans import EndedRequest

if TYPE_CHECKING:
    from gateway.watch.otlp import OtlpSender

log = structlog.get_logger()
MOST_WAITING = 1024  # traces that wait to be sent; one more is dropped
BATCH_TRACES = 256  # traces that are sent at once
# Seconds for which traces are collected into one message, unless there are so many sooner.
BATCH_SECONDS = 5.0
FLUSH_SECONDS = 2.0  # most seconds that the gateway's end waits for the last traces to be sent


@dataclass(slots=True)
class TraceCounts:
    """How many traces were exported and dropped since the start; for all exporters together."""

    exported: int = 0
    not_queued: int = 0  # dropped, as too many waited already
    not_sent: int = 0  # dropped, as the collector did not take them
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, *, exported: int = 0, not_queued: int = 0, not_sent: int = 0) -> None:
        """Add these. Any thread may call it."""
        with self._lock:
            self.exported += exported
            self.not_queued += not_queued
            self.not_sent += not_sent


@dataclass(eq=False)
class TraceExporter:
    """Owns the thread that sends traces. `open_sender` is called there, as it may import much."""

    open_sender: Callable[[], OtlpSender]
    counts: TraceCounts
    _: KW_ONLY
    batch_seconds: float = BATCH_SECONDS
    batch_traces: int = BATCH_TRACES

    def __post_init__(self) -> None:
        self._waiting: deque[EndedRequest] = deque()
        self._sender: OtlpSender | None = None
        self._work = threading.Event()
        self._due = threading.Event()  # a message is full, or this ends
        self._closing = threading.Event()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def export(self, request: EndedRequest) -> None:
        """Send this trace soon, or drop it where too many wait. Never waits and never raises."""
        if self._closing.is_set() or len(self._waiting) >= MOST_WAITING:
            self.counts.count(not_queued=1)
            return
        self._waiting.append(request)
        if not self._work.is_set():
            self._work.set()
        if len(self._waiting) == self.batch_traces:
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
            sender = self._sender = self.open_sender()
        except Exception as error:  # noqa: BLE001 - whatever it is, requests must be served
            log.error("traces can't be exported", why=type(error).__name__)  # noqa: TRY400
            sender = None
        while True:
            self._work.wait()
            self._due.wait(self.batch_seconds)
            if not self._closing.is_set():
                self._due.clear()
            self._work.clear()
            while self._waiting:
                number = min(len(self._waiting), self.batch_traces)
                self._send(sender, [self._waiting.popleft() for _ in range(number)])
            if self._closing.is_set() and not self._waiting:
                break
        if sender is not None:
            sender.close()

    def _send(self, sender: OtlpSender | None, batch: list[EndedRequest]) -> None:
        sent = False
        if sender is not None and not self._given_up.is_set():
            try:
                sent = sender.send(batch)
            except Exception as error:  # noqa: BLE001 - one message must not end the thread
                log.error("traces are lost", why=type(error).__name__)  # noqa: TRY400
        exported = len(batch) if sent else 0
        self.counts.count(exported=exported, not_sent=len(batch) - exported)


_MODULE = "opentelemetry.proto.collector.trace.v1.trace_service_pb2"


def has_otel() -> bool:
    """Whether traces can be exported."""
    try:
        return importlib.util.find_spec(_MODULE) is not None
    except ModuleNotFoundError:
        return False


@dataclass(slots=True)
class Allowance:
    """So many a second, saved up for one second at most."""

    rate: float
    clock: Callable[[], float]
    _left: float = math.inf
    _at: float = 0.0

    def take(self) -> bool:
        """Take one, if one is left."""
        now = self.clock()
        self._left = min(max(1.0, self.rate), self._left + (now - self._at) * self.rate)
        self._at = now
        if self._left < 1 or not self.rate:
            return False
        self._left -= 1
        return True


@dataclass
class Sampler:
    """Decides by its own draws: no client can have more traced than the allowance.

    A client that has recorded its part of a trace (`traceparent` with the flag) is followed as far
    as the allowance goes, and else has the chance of any other. One that says that it has not is
    believed: the gateway's part alone would tell nobody anything.
    """

    share: float
    beyond_share: float  # a second, of each kind
    draw: Callable[[], float]  # a number from 0 up to 1, below it
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._clients = Allowance(self.beyond_share, self.clock)
        self._failures = Allowance(self.beyond_share, self.clock)

    def takes(self, parent: Traceparent | None) -> bool:
        """Whether a request that has come is traced."""
        if parent is None:
            return self.draw() < self.share
        return parent.sampled and (self.draw() < self.share or self._clients.take())

    def takes_failed(self) -> bool:
        """Whether a request is traced that was not meant to be, and has failed."""
        return self._failures.take()


SETTLE_SECONDS = 0.5  # seconds after its end in which a request's attempts are accounted for
MOST_SETTLING = 1024  # requests that wait for that; one more is dropped


@dataclass(eq=False)
class RequestTracing:
    """The traces of one gateway. Call `begin` and `finished` only while it is `active`."""

    settings: InitVar[TracesSettings]
    decision_log: DecisionLog
    _: KW_ONLY
    clock: Callable[[], float]
    rng: random.Random
    settle_seconds: float = SETTLE_SECONDS

    def __post_init__(self, settings: TracesSettings) -> None:
        self._settling: list[tuple[RequestTrace, RequestRecord, float, bool]] = []
        """What has ended just now, when, and whether its decisions were collected meanwhile."""
        self._exporter: TraceExporter | None = None
        self._stopped: list[TraceExporter] = []  # earlier ones, which may still send what waited
        self._settings: TracesSettings | None = None
        self._sampler: Sampler
        self.active = False  # whether any requests are traced
        self.counts = TraceCounts()
        self.configure(settings)

    def configure(self, settings: TracesSettings) -> None:
        """Put these settings in force. The packages of the extra must be there."""
        if settings == self._settings:
            return
        self._settings = settings
        self._sampler = Sampler(
            settings.share, settings.beyond_share, draw=self.rng.random, clock=self.clock
        )
        self.active = settings.endpoint is not None
        self._stop_exporter()
        if not self.active:
            self._settling.clear()
            self.decision_log.follow_none()
            return

        def open_sender() -> OtlpSender:
            from gateway.watch.otlp import OtlpSender

            return OtlpSender(settings)

        self._exporter = TraceExporter(open_sender, self.counts)

    def begin(
        self, request_id: str, record: RequestRecord, headers: Headers, received_at: float
    ) -> None:
        """A request has come with these headers: trace it, or not."""
        parent = parse_traceparent(headers)
        if self._sampler.takes(parent):
            record.traced(self._new_trace(request_id, parent, received_at))
            self.decision_log.follow(request_id)

    def finished(
        self, request_id: str, record: RequestRecord, headers: Headers, received_at: float
    ) -> None:
        """A request has ended, and its record is complete but for what is still accounted for."""
        trace, followed = record.trace, True
        if trace is None:
            if record.status < 500 or not self._sampler.takes_failed():
                return
            followed = False
            trace = self._new_trace(request_id, parse_traceparent(headers), received_at)
            record.traced(trace)
        if len(self._settling) >= MOST_SETTLING:
            self.decision_log.take(request_id)
            self.counts.count(not_queued=1)
            return
        self._settling.append((trace, record, self.clock(), followed))
        if len(self._settling) == 1:
            asyncio.get_running_loop().call_later(self.settle_seconds, self._hand_over)

    def forget(self, request_id: str) -> None:
        """A request has ended of which nothing is told."""
        self.decision_log.take(request_id)

    async def aclose(self, seconds: float = FLUSH_SECONDS) -> None:
        """Send what there is, for at most so many seconds."""
        self._hand_over()
        self.active = False
        self._stop_exporter()
        exporters, self._stopped = self._stopped, []
        if exporters:
            # Together: each has its own thread.
            await asyncio.gather(
                *(asyncio.to_thread(exporter.close, seconds) for exporter in exporters)
            )

    def _new_trace(
        self, request_id: str, parent: Traceparent | None, received_at: float
    ) -> RequestTrace:
        if parent is not None:
            return RequestTrace(parent.trace_id, parent.span_id, request_id, received_at)
        # Never zero, which would not be valid.
        number = self.rng.getrandbits(128) or 1
        return RequestTrace(f"{number:032x}", None, request_id, received_at)

    def _stop_exporter(self) -> None:
        self._stopped = [exporter for exporter in self._stopped if exporter.running]
        if self._exporter is not None:
            self._exporter.stop()
            self._stopped.append(self._exporter)
            self._exporter = None

    def _hand_over(self) -> None:
        settling, self._settling = self._settling, []
        exporter = self._exporter
        if not settling or exporter is None:
            return
        missing = [trace.request_id for trace, _, _, followed in settling if not followed]
        # Without the parts of several prompts: those were not meant to be traced.
        found = self.decision_log.find(missing) if missing else {}
        offset = time.time_ns() - round(self.clock() * 1e9)
        for trace, record, ended_at, followed in settling:
            if followed:
                decisions = self.decision_log.take(trace.request_id) or []
            else:
                decisions = found[trace.request_id].decisions
            exporter.export(EndedRequest(trace, record, ended_at, decisions, offset))
