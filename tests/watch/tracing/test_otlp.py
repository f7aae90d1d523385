"""Messages of OTLP, and what is sent again."""

from __future__ import annotations

from typing import Any

from gateway.events import RequestRecord
from gateway.terms import RequestTrace
from gateway.watch.otlp import encode
from gateway.watch.spans import EndedRequest
from tests.watch.tracing.collector import ReceivedSpan, decoded
from tests.watch.tracing.test_spans import grant

TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def encoded(*decisions: Any, **record: Any) -> list[ReceivedSpan]:
    values = {"x_request_id": "mine", "path": "/v1/embeddings", **record}
    trace = RequestTrace(TRACE, CLIENT, "req_1", 10.0)
    ended = EndedRequest(trace, RequestRecord(**values), 20.0, decisions, 1_000)
    return decoded(encode([ended], "site-a"))


def test_a_message_has_ids_times_and_the_service() -> None:
    (root,) = encoded()
    assert (root.trace_id, root.parent_id, root.service) == (TRACE, CLIENT, "site-a")
    assert (root.start, root.end) == (10_000_001_000, 20_000_001_000)
    assert root.kind == "server"


def test_a_failure_has_its_word() -> None:
    root, attempt = encoded(grant(11.0, 1, outcome="reset"), status=502, reason="node_failed")
    assert root.failed
    assert attempt.failed
    assert attempt.attributes["error.type"] == "reset"


def test_an_expectation_without_a_bound_is_left_out() -> None:
    _, attempt = encoded(grant(11.0, 1, ttft=float("inf")))
    assert "llama_gateway.expected_time_to_first_token" not in attempt.attributes
    assert attempt.attributes["llama_gateway.expected_seconds"] == 2.0


def test_a_text_that_is_no_unicode_is_sent_all_the_same() -> None:
    (root,) = encoded(caller="a\ud83d")
    assert root.attributes["llama_gateway.caller"] == "a?"
