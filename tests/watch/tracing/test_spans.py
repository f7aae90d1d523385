"""Spans of plain records and decisions."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.events import RequestRecord
from gateway.schedule.decision_log import (
    Decision,
    Grant,
    Queueing,
    Refusal,
)
from gateway.terms import Priority, RequestTrace, Traceparent
from gateway.watch.otlp import OtlpSender, encode
from gateway.watch.request_tracing import (
    MOST_WAITING,
    Allowance,
    Sampler,
    TraceCounts,
    TraceExporter,
)
from gateway.watch.spans import MOST_DECISIONS, EndedRequest, Span, spans_of
from tests.nodes.build import Clock
from tests.polling import wait_until
from tests.watch.tracing.collector import decoded

PATH = "/v1/chat/completions"


def grant(
    at: float, lease_id: int, request_id: str = "req_1", *, ttft: float = 0.5, **more: Any
) -> Grant:
    expected: dict[str, Any] = {
        "prompt_tokens": 5, "completion_tokens": 8, "expected_ttft": ttft, "expected_seconds": 2,
    }  # fmt: skip
    return Grant(request_id, at, 10.0, lease_id, "demo", "cpu", **expected, **more)


def queueing(at: float) -> Queueing:
    return Queueing("req_1", at, 10.0, Priority.NORMAL, 2, 1.5, 3, 99.0)


def spans(*decisions: Decision, **record: Any) -> list[Span]:
    values = {"x_request_id": "mine", "path": PATH, "request_id": "req_1", **record}
    trace = RequestTrace("1" * 32, "2" * 16, "req_1", 10.0)
    return list(spans_of(EndedRequest(trace, RequestRecord(**values), 20.0, decisions, 0)))


def shown(found: list[Span]) -> list[tuple[str, float, float]]:
    return [(span.name, span.start, span.end) for span in found]


def test_a_wait_may_end_with_a_refusal_or_with_its_client() -> None:
    refusal = Refusal("req_1", 15.0, 10.0, 503, "queue_timeout", "It took too long.")
    _, refused = spans(queueing(11.0), refusal, status=503, reason="queue_timeout")
    assert (refused.end, refused.error) == (15.0, "queue_timeout")
    assert refused.attributes["error.type"] == "queue_timeout"
    assert not any("took too long" in str(value) for value in refused.attributes.values())
    _, left = spans(queueing(11.0), status=499, reason="client_closed")
    assert (left.end, left.error) == (20.0, None)


def test_each_of_several_prompts_has_a_span_of_its_own() -> None:
    found = spans(
        grant(11.0, 1, "req_1.0", ended_at=13.0, outcome="ok"),
        grant(12.0, 2, "req_1.1", ended_at=18.0, outcome="ok"),
    )
    assert shown(found)[1:] == [
        ("prompt", 11.0, 13.0),
        ("attempt", 11.0, 13.0),
        ("prompt", 12.0, 18.0),
        ("attempt", 12.0, 18.0),
    ]
    assert [span.parent_id for span in found[1:]] == [
        found[0].span_id, found[1].span_id, found[0].span_id, found[3].span_id,
    ]  # fmt: skip


def test_however_much_was_decided_the_spans_are_bounded() -> None:
    many = [grant(11.0 + number, number, f"req_1.{number}") for number in range(5000)]
    assert len(spans(*many)) == 1 + 2 * MOST_DECISIONS


def test_a_message_has_ids_times_and_the_service_and_any_text() -> None:
    trace = RequestTrace("1" * 32, "2" * 16, "req_1", 10.0)
    record = RequestRecord("mine", PATH, status=502, reason="node_failed", caller="a\ud83d")
    granted = [grant(11.0, 1, ttft=math.inf, outcome="reset")]
    ended = EndedRequest(trace, record, 20.0, granted, 1_000)
    root, attempt = decoded(encode([ended], "site-a"))
    assert (root.trace_id, root.parent_id, root.service) == ("1" * 32, "2" * 16, "site-a")
    assert (root.start, root.end) == (10_000_001_000, 20_000_001_000)
    assert (root.kind, root.failed, attempt.failed) == ("server", True, True)
    assert root.attributes["llama_gateway.caller"] == "a?"
    assert attempt.attributes["error.type"] == "reset"
    assert "llama_gateway.expected_time_to_first_token" not in attempt.attributes
    assert attempt.attributes["llama_gateway.expected_seconds"] == 2.0


LIMIT = 30.0


def ended(number: int = 1) -> EndedRequest:
    record = RequestRecord(f"req_{number}", "/v1/chat/completions")
    return EndedRequest(RequestTrace("1" * 32, None, f"req_{number}", 0.0), record, 1.0, [], 0)


class Mute(OtlpSender):
    """Takes a trace, and says nothing until it is interrupted."""

    def __init__(self) -> None:
        self.entered, self.interrupted = threading.Event(), threading.Event()

    def send(self, requests: Sequence[EndedRequest]) -> bool:
        self.entered.set()
        return self.interrupted.wait(LIMIT)

    def interrupt(self) -> None:
        self.interrupted.set()

    def close(self) -> None: ...


def test_a_collector_that_hangs_costs_bounded_memory_and_the_end_does_not_wait() -> None:
    sender, counts = Mute(), TraceCounts()
    exporter = TraceExporter(lambda: sender, counts, batch_seconds=0.0, batch_traces=1)
    exporter.export(ended())
    assert sender.entered.wait(LIMIT)
    began = time.monotonic()
    for number in range(MOST_WAITING + 10):
        exporter.export(ended(number))
    assert counts.not_queued == 10
    exporter.close(0.1)
    assert time.monotonic() - began < LIMIT / 2
    assert sender.interrupted.is_set()
    # Once it is free, the thread counts what is left and ends.
    wait_until(lambda: not exporter.running, LIMIT)
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
