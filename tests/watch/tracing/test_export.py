"""The exporter's thread with senders that fail in every way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from gateway.events import RequestRecord
from gateway.terms import RequestTrace
from gateway.watch.otlp import OtlpSender
from gateway.watch.request_tracing import MOST_WAITING, TraceCounts, TraceExporter
from gateway.watch.spans import EndedRequest

LIMIT = 30.0


def wait_for(condition: Callable[[], bool], limit: float) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"not within {limit} s"
        time.sleep(0.005)


def ended(number: int = 1) -> EndedRequest:
    record = RequestRecord(f"req_{number}", "/v1/chat/completions")
    return EndedRequest(RequestTrace("1" * 32, None, f"req_{number}", 0.0), record, 1.0, [], 0)


@dataclass
class FakeSender(OtlpSender):
    """Takes traces, until it hangs or fails."""

    takes: bool = True
    error: Exception | None = None
    free: threading.Event = field(default_factory=threading.Event)
    """While it is not set, `send` does not return."""
    entered: threading.Event = field(default_factory=threading.Event)
    batches: list[int] = field(default_factory=list)
    interrupted: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        self.free.set()

    def send(self, requests: Sequence[EndedRequest]) -> bool:
        self.entered.set()
        assert self.free.wait(LIMIT)
        if self.error is not None:
            raise self.error
        self.batches.append(len(requests))
        return self.takes

    def interrupt(self) -> None:
        self.interrupted = True
        self.free.set()

    def close(self) -> None:
        self.closed = True


def test_what_waits_at_the_end_is_sent() -> None:
    sender, counts = FakeSender(), TraceCounts()
    exporter = TraceExporter(lambda: sender, counts, batch_seconds=LIMIT, batch_traces=4)
    for number in range(3):
        exporter.export(ended(number))
    exporter.close(LIMIT)
    assert sender.batches == [3]
    assert (counts.exported, counts.not_queued, counts.not_sent) == (3, 0, 0)
    assert not exporter.running
    assert sender.closed


def test_a_full_message_is_sent_at_once() -> None:
    sender, counts = FakeSender(), TraceCounts()
    exporter = TraceExporter(lambda: sender, counts, batch_seconds=LIMIT, batch_traces=4)
    for number in range(4):
        exporter.export(ended(number))
    wait_for(lambda: counts.exported == 4, LIMIT / 2)
    exporter.close(LIMIT)


def test_a_collector_that_hangs_costs_bounded_memory_and_the_end_does_not_wait() -> None:
    sender, counts = FakeSender(), TraceCounts()
    sender.free.clear()
    exporter = TraceExporter(lambda: sender, counts, batch_seconds=0.0, batch_traces=1)
    exporter.export(ended())
    assert sender.entered.wait(LIMIT)
    began = time.monotonic()
    for number in range(MOST_WAITING + 10):
        exporter.export(ended(number))
    assert counts.not_queued == 10
    exporter.close(0.1)
    assert time.monotonic() - began < LIMIT / 2
    assert sender.interrupted
    # Once it is free, the thread counts what is left and ends.
    wait_for(lambda: not exporter.running, LIMIT)
    assert counts.not_sent == MOST_WAITING


@pytest.mark.parametrize("sender", [FakeSender(takes=False), FakeSender(error=ValueError("x"))])
def test_what_was_not_taken_is_counted_and_the_thread_goes_on(sender: FakeSender) -> None:
    counts = TraceCounts()
    exporter = TraceExporter(lambda: sender, counts, batch_seconds=0.0)
    exporter.export(ended(1))
    wait_for(lambda: counts.not_sent == 1, LIMIT)
    sender.takes, sender.error = True, None
    exporter.export(ended(2))
    wait_for(lambda: counts.exported == 1, LIMIT)
    exporter.close(LIMIT)


def test_a_sender_that_can_not_be_opened_loses_traces_and_nothing_else() -> None:
    def fails() -> FakeSender:
        raise ImportError("no such module")

    counts = TraceCounts()
    exporter = TraceExporter(fails, counts, batch_seconds=0.0)
    exporter.export(ended())
    wait_for(lambda: counts.not_sent == 1, LIMIT)
    exporter.close(LIMIT)
    assert not exporter.running


def test_nothing_is_taken_after_the_end() -> None:
    sender, counts = FakeSender(), TraceCounts()
    exporter = TraceExporter(lambda: sender, counts)
    exporter.close(LIMIT)
    exporter.export(ended())
    assert (sender.batches, counts.not_queued) == ([], 1)
