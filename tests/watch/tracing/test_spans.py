"""Spans of plain records and decisions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from gateway.events import RequestRecord
from gateway.lease import NOTHING_TRIED
from gateway.schedule.decision_log import (
    Decision,
    Grant,
    Queueing,
    Refusal,
)
from gateway.terms import Priority, RequestTrace
from gateway.watch.spans import MOST_DECISIONS, EndedRequest, Span, spans_of

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


def test_a_request_that_no_node_has_seen_is_one_span() -> None:
    (root,) = spans(status=401, reason="invalid_api_key")
    assert (root.kind, root.parent_id, root.start, root.end) == ("server", "2" * 16, 10.0, 20.0)
    assert root.attributes["error.type"] == "invalid_api_key"
    assert root.error is None
    assert "gen_ai.usage.input_tokens" not in root.attributes


def test_a_wait_ends_with_the_grant() -> None:
    first = grant(13.0, 1, first_content_at=14.0, ended_at=19.0, outcome="ok", used=(5, 2, 8))
    found = spans(queueing(11.0), first, attempts=1)
    assert shown(found)[1:] == [
        ("queue", 11.0, 13.0),
        ("attempt", 13.0, 19.0),
        ("prefill", 13.0, 14.0),
        ("decode", 14.0, 19.0),
    ]
    assert found[3].parent_id == found[2].span_id
    assert found[2].attributes["gen_ai.usage.output_tokens"] == 8
    assert len({span.span_id for span in found}) == len(found)


def test_a_wait_may_end_with_a_refusal_or_with_its_client() -> None:
    refusal = Refusal("req_1", 15.0, 10.0, 503, "queue_timeout", "It took too long.")
    _, refused = spans(queueing(11.0), refusal, status=503, reason="queue_timeout")
    assert (refused.end, refused.error) == (15.0, "queue_timeout")
    assert refused.attributes["error.type"] == "queue_timeout"
    assert not any("took too long" in str(value) for value in refused.attributes.values())
    _, left = spans(queueing(11.0), status=499, reason="client_closed")
    assert (left.end, left.error) == (20.0, None)


def test_a_resumption_lasts_from_the_end_of_one_node_to_the_content_of_the_next() -> None:
    first = grant(11.0, 1, first_content_at=12.0, ended_at=14.0, outcome="reset")
    second = grant(14.5, 2, resumes=True, first_content_at=16.0, ended_at=19.0, outcome="ok")
    found = spans(first, second)
    (resume,) = [span for span in found if span.name == "resume"]
    assert (resume.start, resume.end, resume.error) == (14.0, 16.0, None)
    assert resume.attributes["llama_gateway.reason"] == "reset"
    assert [span.error for span in found if span.name == "attempt"] == ["reset", None]


def test_a_resumption_that_fails_says_so_and_one_that_yielded_says_why() -> None:
    first = grant(11.0, 1, first_content_at=12.0, ended_at=14.0, outcome="yielded")
    second = grant(14.5, 2, resumes=True, times_yielded=1, ended_at=15.0, outcome="reset")
    (resume,) = [span for span in spans(first, second) if span.name == "resume"]
    assert (resume.start, resume.end, resume.error) == (14.0, 15.0, "reset")
    assert resume.attributes["llama_gateway.reason"] == "yielded"


def test_an_attempt_that_has_not_ended_ends_with_the_request() -> None:
    _, attempt = spans(grant(11.0, 1, tried=NOTHING_TRIED))
    assert (attempt.end, attempt.error) == (20.0, None)
    assert "llama_gateway.outcome" not in attempt.attributes


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


def test_a_node_is_named_and_long_names_are_cut() -> None:
    root, attempt = spans(grant(11.0, 1), node="epyc-a", attempts=1, caller="x" * 1000)
    assert attempt.attributes["llama_gateway.node"] == "epyc-a"
    assert len(str(root.attributes["llama_gateway.caller"])) < 300


def test_a_span_is_a_plain_value() -> None:
    (root,) = spans(ttft=math.inf)
    assert dataclasses.asdict(root)["attributes"]["http.route"] == PATH
