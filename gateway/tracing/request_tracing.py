"""Traces requests: decides which, and hands those that have ended to the exporter.

While a request runs, its trace is an id and a list of the scheduler's decisions. All else is done
when it has ended, off the event loop.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.config.telemetry import TracesSettings
from gateway.events import RequestFinished
from gateway.request import Headers
from gateway.scheduling.decision_log import Decision, DecisionLog
from gateway.trace_context import RequestTrace, Traceparent, parse_traceparent
from gateway.tracing.export import FLUSH_SECONDS, Sender, TraceCounts, TraceExporter
from gateway.tracing.sampling import Sampler
from gateway.tracing.spans import EndedRequest

SETTLE_SECONDS = 0.5
"""Seconds after its end in which a request's attempts are accounted for."""

MOST_SETTLING = 1024
"""Requests that wait for that; one more is dropped."""


def open_otlp_sender(settings: TracesSettings) -> Sender:
    """A sender to the collector of these settings; imports OpenTelemetry's packages."""
    from gateway.tracing.otlp import OtlpSender

    return OtlpSender(settings)


@dataclass(frozen=True, slots=True)
class _Settling:
    """A traced request that has ended just now."""

    trace: RequestTrace
    record: RequestFinished
    ended_at: float
    followed: bool
    """Whether its decisions were collected while it ran."""


class RequestTracing:
    """The traces of one gateway. Call `begin` and `finished` only while it is `active`."""

    def __init__(
        self,
        settings: TracesSettings,
        decision_log: DecisionLog,
        *,
        clock: Callable[[], float],
        wall_clock_ns: Callable[[], int] = time.time_ns,
        rng: random.Random,
        open_sender: Callable[[TracesSettings], Sender] = open_otlp_sender,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        self._decision_log = decision_log
        self._clock = clock
        self._wall_clock_ns = wall_clock_ns
        self._rng = rng
        self._open_sender = open_sender
        self._settle_seconds = settle_seconds
        self._settling: list[_Settling] = []
        self._exporter: TraceExporter | None = None
        self._stopped: list[TraceExporter] = []
        """Earlier ones, which may still send what waited."""
        self._settings: TracesSettings | None = None
        self._sampler: Sampler
        self.active = False
        """Whether any requests are traced."""
        self.counts = TraceCounts()
        self.configure(settings)

    def configure(self, settings: TracesSettings) -> None:
        """Put these settings in force. The packages of the extra must be there."""
        if settings == self._settings:
            return
        self._settings = settings
        self._sampler = Sampler(
            settings.share, settings.beyond_share, draw=self._rng.random, clock=self._clock
        )
        self._stop_exporter()
        self.active = settings.endpoint is not None
        if self.active:
            self._exporter = TraceExporter(lambda: self._open_sender(settings), self.counts)
        else:
            self._settling.clear()
            self._decision_log.follow_none()

    def begin(
        self, request_id: str, record: RequestFinished, headers: Headers, received_at: float
    ) -> None:
        """A request has come with these headers: trace it, or not."""
        parent = parse_traceparent(headers)
        if self._sampler.takes(parent):
            record.traced(self._new_trace(request_id, parent, received_at))
            self._decision_log.follow(request_id)

    def finished(
        self, request_id: str, record: RequestFinished, headers: Headers, received_at: float
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
            self._decision_log.take(request_id)
            self.counts.count(not_queued=1)
            return
        self._settling.append(_Settling(trace, record, self._clock(), followed))
        if len(self._settling) == 1:
            asyncio.get_running_loop().call_later(self._settle_seconds, self._hand_over)

    def forget(self, request_id: str) -> None:
        """A request has ended of which nothing is told."""
        self._decision_log.take(request_id)

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
        number = self._rng.getrandbits(128) or 1
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
        missing = [one.trace.request_id for one in settling if not one.followed]
        found = self._find(missing) if missing else {}
        offset = self._wall_clock_ns() - round(self._clock() * 1e9)
        for one in settling:
            request_id = one.trace.request_id
            decisions = self._decision_log.take(request_id) if one.followed else None
            if decisions is None:
                decisions = found.get(request_id, [])
            exporter.export(EndedRequest(one.trace, one.record, one.ended_at, decisions, offset))

    def _find(self, request_ids: list[str]) -> dict[str, list[Decision]]:
        """What the log still has of these requests, by one look at it, or two for their parts."""
        log = self._decision_log
        remembered = log.find(request_ids)
        parts = log.find(part for one in remembered.values() for part in one.parts)
        found = {}
        for request_id, one in remembered.items():
            of_parts = (decision for part in one.parts for decision in parts[part].decisions)
            found[request_id] = [*one.decisions, *of_parts]
        return found
