"""The exporter's thread with senders that fail in every way."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from gateway.events import RequestRecord
from gateway.terms import RequestTrace, Traceparent
from gateway.watch.otlp import OtlpSender
from gateway.watch.request_tracing import (
    MOST_WAITING,
    Allowance,
    Sampler,
    TraceCounts,
    TraceExporter,
)
from gateway.watch.spans import EndedRequest
from tests.nodes.build import Clock

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
        self.batches.append(len(requests))
        return True

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


CLIENT = Traceparent("1" * 32, "1" * 16, sampled=True)
SILENT = Traceparent("1" * 32, "1" * 16, sampled=False)


def sampler(share: float, beyond: float = 0.0, clock: Clock | None = None) -> Sampler:
    return Sampler(share, beyond, draw=random.Random(7).random, clock=clock or Clock())


@pytest.mark.parametrize(
    ("share", "least", "most"), [(0, 0, 0), (0.05, 400, 600), (1, 10**4, 10**4)]
)
def test_the_share_is_traced(share: float, least: int, most: int) -> None:
    one = sampler(share)
    assert least <= sum(one.takes(None) for _ in range(10_000)) <= most


def test_a_trace_that_the_client_has_not_recorded_is_left_alone() -> None:
    assert not any(sampler(1.0, 1.0).takes(SILENT) for _ in range(100))


def test_a_trace_that_the_client_has_recorded_has_the_chance_of_any_and_an_allowance() -> None:
    clock = Clock()
    one = sampler(0.0, 2.0, clock)
    assert sum(one.takes(CLIENT) for _ in range(1000)) == 2
    clock.now += 1.0
    assert sum(one.takes(CLIENT) for _ in range(1000)) == 2
    one = sampler(0.05)
    assert 400 <= sum(one.takes(CLIENT) for _ in range(10_000)) <= 600


def test_an_allowance_below_one_a_second_is_saved_up() -> None:
    clock = Clock()
    allowance = Allowance(0.1, clock)
    taken = 0
    for _ in range(1000):
        taken += allowance.take()
        clock.now += 0.1
    assert 10 <= taken <= 12
    assert not Allowance(0.0, clock).take()
