"""Traces requests: decides which, and hands those that have ended to the exporter.

While a request runs, its trace is an id and a list of the scheduler's decisions. All else is done
when it has ended, off the event loop: its spans are made of its record and the decisions about it
(`spans_of`), of which neither has any text of prompts and completions.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Literal

import structlog

from gateway.config.telemetry import TracesSettings
from gateway.events import RequestRecord
from gateway.schedule.decision_log import Decision, DecisionLog, Grant, Queueing, Refusal
from gateway.terms import Headers, RequestTrace, Traceparent, parse_traceparent
from gateway.watch.event_log import BLAMELESS_OUTCOMES
from gateway.watch.metrics import OPERATIONS, PROVIDER

if TYPE_CHECKING:
    from gateway.watch.otlp import OtlpSender

log = structlog.get_logger()
MOST_WAITING = 1024  # traces that wait to be sent; one more is dropped
BATCH_TRACES = 256  # traces that are sent at once
# Seconds for which traces are collected into one message, unless there are so many sooner.
BATCH_SECONDS = 5.0
FLUSH_SECONDS = 2.0  # most seconds that the gateway's end waits for the last traces to be sent


class TraceCounts:
    """How many traces were exported and dropped since the start; for all exporters together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.exported = 0
        self.not_queued = 0  # dropped, as too many waited already
        self.not_sent = 0  # dropped, as the collector did not take them

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
            while batch := self._take():
                self._send(sender, batch)
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

    def _take(self) -> list[EndedRequest]:
        batch: list[EndedRequest] = []
        with contextlib.suppress(IndexError):
            while len(batch) < self.batch_traces:
                batch.append(self._waiting.popleft())
        return batch


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
    _left: float = field(init=False)
    _at: float = field(init=False)

    def __post_init__(self) -> None:
        self._left, self._at = max(1.0, self.rate), self.clock()

    def take(self) -> bool:
        """Take one, if one is left."""
        now = self.clock()
        most = max(1.0, self.rate)
        self._left = min(most, self._left + (now - self._at) * self.rate)
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


def open_otlp_sender(settings: TracesSettings) -> OtlpSender:
    """A sender to the collector of these settings; imports OpenTelemetry's packages."""
    from gateway.watch.otlp import OtlpSender

    return OtlpSender(settings)


@dataclass(frozen=True, slots=True)
class _Settling:
    """A traced request that has ended just now."""

    trace: RequestTrace
    record: RequestRecord
    ended_at: float
    followed: bool  # whether its decisions were collected while it ran


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
        self._settling: list[_Settling] = []
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
        self._export(settings)

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
        self._settling.append(_Settling(trace, record, self.clock(), followed))
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

    def _export(self, settings: TracesSettings) -> None:
        """Send traces by these settings from now on, or none."""
        self._stop_exporter()
        if self.active:
            self._exporter = TraceExporter(lambda: open_otlp_sender(settings), self.counts)
        else:
            self._settling.clear()
            self.decision_log.follow_none()

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
        offset = time.time_ns() - round(self.clock() * 1e9)
        for one in settling:
            request_id = one.trace.request_id
            decisions = self.decision_log.take(request_id) if one.followed else None
            if decisions is None:
                decisions = found.get(request_id, [])
            exporter.export(EndedRequest(one.trace, one.record, one.ended_at, decisions, offset))

    def _find(self, request_ids: list[str]) -> dict[str, list[Decision]]:
        """What the log still has of these requests, by one look at it, or two for their parts."""
        log = self.decision_log
        remembered = log.find(request_ids)
        parts = log.find(part for one in remembered.values() for part in one.parts)
        found = {}
        for request_id, one in remembered.items():
            of_parts = (decision for part in one.parts for decision in parts[part].decisions)
            found[request_id] = [*one.decisions, *of_parts]
        return found


Attribute = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, Attribute]
MOST_DECISIONS = 256  # decisions about one request of which spans are made, the first
LONGEST_ATTRIBUTE = 256  # characters of a text; longer ones are cut
_OWN = "llama_gateway."


@dataclass(frozen=True, slots=True)
class Span:
    """One span; times in monotonic seconds."""

    name: str
    span_id: str
    parent_id: str | None
    kind: Literal["server", "client", "internal"]
    start: float
    end: float
    attributes: Attributes
    error: str | None = None  # why it failed, in a word; None: it did not


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A traced request that has ended, and all that was decided about it."""

    trace: RequestTrace
    record: RequestRecord
    ended_at: float  # monotonic seconds
    decisions: Sequence[Decision]
    clock_offset: int  # nanoseconds from the monotonic clock's times to those since 1970


def spans_of(request: EndedRequest) -> Iterator[Span]:
    """The spans of a request, a parent before its children."""
    trace, record = request.trace, request.record
    root_id = trace.span_id("request")
    yield _root(request, root_id)
    parts: dict[str, list[Decision]] = {}
    for one in request.decisions[:MOST_DECISIONS]:
        parts.setdefault(one.request_id, []).append(one)
    for part_id, decisions in parts.items():
        decisions.sort(key=lambda one: one.at)
        # Of several prompts each is a request of its own, with a number behind its id.
        number = part_id.removeprefix(trace.request_id).lstrip(".")
        if not number:
            yield from _steps(request, decisions, root_id, record.node)
            continue
        prompt_id = trace.span_id("prompt", number)
        steps = list(_steps(request, decisions, prompt_id, None))
        end = max((span.end for span in steps), default=decisions[-1].at)
        attributes = {_OWN + "prompt": int(number) if number.isdecimal() else number}
        start = decisions[0].at
        yield Span("prompt", prompt_id, root_id, "internal", start, max(start, end), attributes)
        yield from steps


def _root(request: EndedRequest, span_id: str) -> Span:
    record, trace = request.record, request.trace
    attributes: dict[str, Attribute] = {
        "http.request.method": "POST",
        "http.route": record.path,
        "http.response.status_code": record.status,
        _OWN + "request_id": record.x_request_id,
        _OWN + "class": record.priority.label,
        _OWN + "caller": _cut(record.caller),
        _OWN + "stream": record.stream,
        _OWN + "attempts": record.attempts,
        _OWN + "queue_seconds": _rounded(record.queue_seconds),
    }
    operation = OPERATIONS.get(record.path)
    if operation is not None:
        attributes |= {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": _cut(record.model),
        }
    if record.attempts:
        attributes |= _usage(record.prompt_tokens, record.cached_tokens, record.completion_tokens)
    attributes |= _known(
        node=record.node,
        tier=record.tier,
        fallback=record.fallback,
        time_to_first_token=None if record.ttft is None else _rounded(record.ttft),
    )
    error = None
    if record.status >= 400:
        reason = record.reason or str(record.status)
        attributes["error.type"] = reason
        # To a server, what its client did wrong is no failure, nor that it left.
        error = reason if record.status >= 500 else None
    return Span(
        f"POST {record.path}",
        span_id,
        trace.parent_id,
        "server",
        trace.received_at,
        request.ended_at,
        attributes,
        error,
    )


def _steps(
    request: EndedRequest, decisions: Sequence[Decision], parent_id: str, last_node: str | None
) -> Iterator[Span]:
    """The spans of waits and attempts, in the order in which they began."""
    trace, attempt = request.trace, 0
    before: Grant | None = None
    last = next((one for one in reversed(decisions) if isinstance(one, Grant)), None)
    for index, one in enumerate(decisions):
        if isinstance(one, Queueing):
            later = decisions[index + 1] if index + 1 < len(decisions) else None
            yield _queue(request, one, later, parent_id)
        elif isinstance(one, Grant):
            attempt += 1
            if before is not None and one.resumes:
                yield _resume(request, before, one, parent_id)
            node = last_node if one is last else None
            span = _attempt(request, one, attempt, node, parent_id)
            yield span
            first, end = one.first_content_at, span.end
            if first is not None:
                lease_id = one.lease_id
                middle = min(max(first, one.at), end)
                yield Span(
                    "prefill", trace.span_id("prefill", lease_id), span.span_id, "internal",
                    one.at, middle, {_OWN + "expected_seconds": _rounded(one.expected_ttft)},
                )  # fmt: skip
                expected = one.expected_seconds - one.expected_ttft
                yield Span(
                    "decode", trace.span_id("decode", lease_id), span.span_id, "internal",
                    middle, end, {_OWN + "expected_seconds": _rounded(expected)},
                )  # fmt: skip
            before = one


def _queue(
    request: EndedRequest, queueing: Queueing, later: Decision | None, parent_id: str
) -> Span:
    attributes: dict[str, Attribute] = {
        _OWN + "class": queueing.priority.label,
        _OWN + "waiting": queueing.waiting,
    }
    expected = queueing.predicted_wait
    expected = None if expected is None else _rounded(expected)
    attributes |= _known(ahead=queueing.ahead, expected_seconds=expected)
    error = later.code if isinstance(later, Refusal) else None
    if error is not None:
        attributes["error.type"] = error
    end = request.ended_at if later is None else later.at
    span_id = request.trace.span_id("queue", queueing.request_id, queueing.at)
    return Span("queue", span_id, parent_id, "internal", queueing.at, end, attributes, error)


def _attempt(
    request: EndedRequest, grant: Grant, number: int, node: str | None, parent_id: str
) -> Span:
    comparison, tried = grant.comparison, grant.tried
    attributes: dict[str, Attribute] = {
        _OWN + "attempt": number,
        _OWN + "tier": grant.tier,
        _OWN + "slots": grant.slots,
        _OWN + "expected_prompt_tokens": round(grant.prompt_tokens),
        _OWN + "expected_completion_tokens": round(grant.completion_tokens),
        _OWN + "expected_time_to_first_token": _rounded(grant.expected_ttft),
        _OWN + "expected_seconds": _rounded(grant.expected_seconds),
        _OWN + "resumes": grant.resumes,
    }
    if comparison is not None:
        node = comparison.chosen.name
        attributes[_OWN + "expected_cached_tokens"] = round(comparison.cached_on_chosen)
    first = grant.first_content_at
    attributes |= _known(
        node=node,
        fallback=grant.fallback,
        times_yielded=grant.times_yielded or None,
        failed_nodes=tuple(sorted(tried.failed_nodes)) or None if tried else None,
        time_to_first_token=None if first is None else _rounded(first - grant.at),
        outcome=grant.outcome,
    )
    if grant.status:
        attributes["http.response.status_code"] = grant.status
    if grant.used is not None:
        attributes |= _usage(*grant.used)
    error = None
    if grant.outcome is not None and grant.outcome not in BLAMELESS_OUTCOMES:
        error = attributes["error.type"] = grant.outcome
    return Span(
        "attempt",
        request.trace.attempt_span_id(grant.lease_id),
        parent_id,
        "client",
        grant.at,
        max(grant.at, _end(request, grant)),
        attributes,
        error,
    )


def _resume(request: EndedRequest, before: Grant, grant: Grant, parent_id: str) -> Span:
    """The time for which a client's stream stood still: from its node's end to new content."""
    moved = grant.first_content_at
    went_on = _end(request, grant) if moved is None else moved
    start = min(_end(request, before), grant.at)
    yielded = grant.times_yielded > before.times_yielded
    attributes: dict[str, Attribute] = {
        _OWN + "reason": "yielded" if yielded else (before.outcome or "failed")
    }
    error = None if moved is not None else (grant.outcome or "failed")
    span_id = request.trace.span_id("resume", grant.lease_id)
    end = max(start, went_on)
    return Span("resume", span_id, parent_id, "internal", start, end, attributes, error)


def _end(request: EndedRequest, grant: Grant) -> float:
    return request.ended_at if grant.ended_at is None else grant.ended_at


def _known(**attributes: Attribute | None) -> dict[str, Attribute]:
    """The gateway's own attributes of these names, without those that are None."""
    return {_OWN + name: value for name, value in attributes.items() if value is not None}


def _usage(prompt: int, cached: int, completion: int) -> dict[str, Attribute]:
    return {
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.cache_read.input_tokens": cached,
        "gen_ai.usage.output_tokens": completion,
    }


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_ATTRIBUTE else text[:LONGEST_ATTRIBUTE] + "..."
