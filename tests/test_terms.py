"""What a request is, as plain values: its class, caller and trace; the errors of the contract."""

from __future__ import annotations

import pytest

from gateway import errors
from gateway.errors import GatewayError
from gateway.terms import Caller, Priority, RequestTrace, Traceparent, parse_traceparent
from tests.each_case import each_case


def test_a_class_is_parsed_by_its_label_and_higher_ones_come_first() -> None:
    assert sorted(Priority) == list(Priority)
    assert [one.label for one in Priority] == ["urgent", "premium", "normal", "batch"]
    for priority in Priority:
        assert Priority.parse(priority.label) is priority
        assert Priority.parse(f"  {priority.label.upper()} ") is priority
    for word in ("", "high", "0", "urgent,normal", "normal\0"):
        assert Priority.parse(word) is None


@each_case(
    ("highest", "usual", "late"),
    [
        (Priority.BATCH, Priority.BATCH, Priority.BATCH),
        (Priority.NORMAL, Priority.BATCH, Priority.NORMAL),
        (Priority.URGENT, Priority.BATCH, Priority.NORMAL),
        (Priority.URGENT, Priority.PREMIUM, Priority.PREMIUM),
        (Priority.NORMAL, Priority.URGENT, Priority.NORMAL),
    ],
)
def test_late_work_has_the_class_that_its_callers_requests_have(
    highest: Priority, usual: Priority, late: Priority
) -> None:
    assert Caller("a", "a", highest, default_priority=usual).late_priority is late


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"


def parsed(*values: str) -> Traceparent | None:
    return parse_traceparent([(b"accept", b"*/*"), *((b"traceparent", v.encode()) for v in values)])


def trace(parent: str | None = SPAN) -> RequestTrace:
    return RequestTrace(TRACE, parent, "req_1", 0.0)


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("fe", False)])
def test_a_traceparent_says_whether_the_client_has_recorded_its_part(
    flags: str, *, sampled: bool
) -> None:
    assert parsed(f" 00-{TRACE}-{SPAN}-{flags}\t") == Traceparent(TRACE, SPAN, sampled)
    # A later version may say more.
    assert parsed(f"cc-{TRACE}-{SPAN}-{flags}-what-the-future-is-like") == parsed(
        f"00-{TRACE}-{SPAN}-{flags}"
    )


@each_case(
    "values",
    [
        (), (VALID, VALID), ("",), ("3",), (VALID.upper(),), (f"{VALID}-more",), (f"{VALID}.",),
        (f"ff-{TRACE}-{SPAN}-01",), (f"00-{'0' * 32}-{SPAN}-01",), (f"00-{TRACE}-{'0' * 16}-01",),
        (f"00-{TRACE[:-1]}-{SPAN}-01",), (f"00-{TRACE}-{SPAN}-1",), (f"cc-{TRACE}-{SPAN}-01more",),
        (f"00_{TRACE}_{SPAN}_01",), ("00-" + "g" * 32 + f"-{SPAN}-01",),
    ],
)  # fmt: skip
def test_what_is_not_one_valid_traceparent_says_nothing(values: tuple[str, ...]) -> None:
    assert parsed(*values) is None


def test_a_node_gets_its_attempt_as_the_parent() -> None:
    lines = f"accept: */*\r\ntraceparent: {VALID}\r\ntracestate: a=1\r\nvia: 1.1\r\n".encode()
    told = trace().header_lines(lines, 7).decode().splitlines()
    attempt = trace().attempt_span_id(7)
    parent = f"traceparent: 00-{TRACE}-{attempt}-01"
    assert told == ["accept: */*", "via: 1.1", parent, "tracestate: a=1"]
    assert len(attempt) == 16
    other = RequestTrace(TRACE, SPAN, "req_2", 0.0)
    assert len({attempt, trace().attempt_span_id(8), other.attempt_span_id(7)}) == 3
    assert trace().span_id("request") != other.span_id("request")
    # A tracestate without a valid traceparent is left out.
    told = trace(None).header_lines(b"traceparent: 3\r\ntracestate: a=1\r\n", 7).decode().split()
    assert told == ["traceparent:", f"00-{TRACE}-{trace(None).attempt_span_id(7)}-01"]


def test_a_long_tracestate_is_cut_between_its_members() -> None:
    member = b"k=" + b"v" * 98
    lines = (b"tracestate: " + member + b"\r\n") * 100
    _, state = trace().header_lines(lines, 1).decode().splitlines()
    assert state == "tracestate: " + ",".join([member.decode()] * 5)
    many = b"tracestate: " + b",".join([b"a=1"] * 100) + b"\r\n"
    _, state = trace().header_lines(many, 1).decode().splitlines()
    assert state.count("a=1") == 32


@each_case(
    ("error", "status", "code", "kind", "retryable"),
    [
        (errors.invalid_json("x"), 400, "invalid_json", "invalid_request_error", True),
        (errors.invalid_request("x", "n"), 400, "invalid_request", "invalid_request_error", True),
        (errors.context_length_exceeded(9, 8), 400, "context_length_exceeded",
         "invalid_request_error", True),
        (errors.invalid_api_key(), 401, "invalid_api_key", "authentication_error", False),
        (errors.model_not_allowed("m"), 403, "model_not_allowed", "permission_error", True),
        (errors.model_not_found("m", []), 404, "model_not_found", "invalid_request_error", True),
        (errors.not_found("/x"), 404, "not_found", "invalid_request_error", True),
        (errors.queue_full("x", 3.0), 429, "queue_full", "rate_limit_error", True),
        (errors.queue_full("x", 60.0), 429, "queue_full", "rate_limit_error", True),
        (errors.queue_full("x", 61.0), 429, "queue_full", "rate_limit_error", False),
        (errors.node_failed("x"), 502, "node_failed", "server_error", False),
        (errors.no_node("x", 3.0), 503, "no_node", "server_error", True),
        (errors.no_node("x", 600.0), 503, "no_node", "server_error", False),
        (errors.queue_timeout("x", 3.0), 503, "queue_timeout", "server_error", False),
        (errors.starting("x"), 503, "starting", "server_error", True),
        (errors.shutting_down(), 503, "shutting_down", "server_error", True),
        (errors.node_timeout("x"), 504, "node_timeout", "server_error", False),
    ],
)  # fmt: skip
def test_an_error_has_its_status_code_and_type_and_says_whether_clients_may_retry(
    error: GatewayError, status: int, code: str, kind: str, retryable: bool
) -> None:
    assert (error.status, error.code, error.type) == (status, code, kind)
    assert error.message
    assert error.retryable is retryable
    assert (error.retry_after is not None) is (status in {429, 503})
    assert GatewayError(429, "insufficient_quota", "x").type == "insufficient_quota"


def test_a_context_overflow_contains_the_known_sizes() -> None:
    assert errors.context_length_exceeded(9, 8).details == {"n_prompt_tokens": 9, "n_ctx": 8}
    assert errors.context_length_exceeded(None, 8).details == {"n_ctx": 8}
    assert errors.context_length_exceeded(None, None).details == {}
    with_answer = errors.context_length_exceeded(31745, 32768, answer_tokens=1024)
    assert with_answer.details == {"n_prompt_tokens": 31745, "n_ctx": 32768}
    assert "prompt is too long: 31745 tokens > 31744 maximum" in with_answer.message
    assert "(31745 tokens and 1024 for the answer) exceeds the available" in with_answer.message
    too_much = errors.context_length_exceeded(30, 4096, answer_tokens=5000)
    assert (too_much.code, too_much.param) == ("context_length_exceeded", "max_tokens")
    assert too_much.details == {"n_prompt_tokens": 30, "n_ctx": 4096}
    assert too_much.message.startswith("'max_tokens' is too large: 5000 tokens. The request (30 ")
    assert "prompt is too long" not in too_much.message


@each_case(
    ("tokens", "context", "words"),
    [
        (4002, 1024, "prompt is too long: 4002 tokens > 1024 maximum"),
        (1024, 1024, "prompt is too long: 1024 tokens > 1023 maximum"),
        (None, 1024, "prompt is too long: 1025 tokens > 1024 maximum"),
        (4002, None, "prompt is too long: 4002 tokens > "),
        (None, None, "prompt is too long: "),
    ],
)
def test_a_context_overflow_has_the_wording_that_clients_look_for(
    tokens: int | None, context: int | None, words: str
) -> None:
    message = errors.context_length_exceeded(tokens, context).message
    assert words in message
    assert "exceeds the available context size" in message
    assert "exceeds the context window" in message
    assert "This model's maximum context length is" in message
