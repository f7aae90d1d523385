from __future__ import annotations

import pytest

from gateway.terms import RequestTrace, Traceparent, parse_traceparent

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
    assert parsed(f"00-{TRACE}-{SPAN}-{flags}") == Traceparent(TRACE, SPAN, sampled)


def test_a_later_version_may_say_more() -> None:
    assert parsed(f"cc-{TRACE}-{SPAN}-01-what-the-future-is-like") == parsed(VALID)
    assert parsed(f" {VALID}\t") == parsed(VALID)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "3",
        VALID.upper(),
        f"{VALID}-more",
        f"{VALID}.",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"cc-{TRACE}-{SPAN}-01more",
        f"00_{TRACE}_{SPAN}_01",
        "00-" + "g" * 32 + f"-{SPAN}-01",
    ],
)
def test_what_is_not_valid_says_nothing(value: str) -> None:
    assert parsed(value) is None


def test_neither_do_two_or_none() -> None:
    assert parsed(VALID, VALID) is None
    assert parsed() is None


def test_a_node_gets_its_attempt_as_the_parent() -> None:
    lines = (
        b"accept: */*\r\ntraceparent: " + VALID.encode() + b"\r\ntracestate: a=1\r\nvia: 1.1\r\n"
    )
    told = trace().header_lines(lines, 7).decode().splitlines()
    attempt = trace().attempt_span_id(7)
    assert told == [
        "accept: */*",
        "via: 1.1",
        f"traceparent: 00-{TRACE}-{attempt}-01",
        "tracestate: a=1",
    ]
    assert attempt != trace().attempt_span_id(8)
    assert len(attempt) == 16


def test_a_tracestate_without_a_valid_traceparent_is_left_out() -> None:
    lines = b"traceparent: 3\r\ntracestate: a=1\r\n"
    told = trace(None).header_lines(lines, 7).decode().splitlines()
    assert told == [f"traceparent: 00-{TRACE}-{trace(None).attempt_span_id(7)}-01"]


def test_a_long_tracestate_is_cut_between_its_members() -> None:
    member = b"k=" + b"v" * 98
    lines = b"".join(b"tracestate: " + member + b"\r\n" for _ in range(100))
    _, state = trace().header_lines(lines, 1).decode().splitlines()
    assert state == "tracestate: " + ",".join([member.decode()] * 5)
    many = b"tracestate: " + b",".join(b"a=1" for _ in range(100)) + b"\r\n"
    _, state = trace().header_lines(many, 1).decode().splitlines()
    assert state.count("a=1") == 32


def test_two_requests_of_one_trace_have_spans_of_their_own() -> None:
    one, other = trace(), RequestTrace(TRACE, SPAN, "req_2", 0.0)
    assert one.span_id("request") != other.span_id("request")
    assert one.attempt_span_id(1) != other.attempt_span_id(1)
