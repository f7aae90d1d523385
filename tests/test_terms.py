"""What a request is, as plain values: classes, callers and the trace that it belongs to."""

from __future__ import annotations

import pytest

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


def test_a_caller_may_use_all_models_or_the_listed_ones() -> None:
    assert Caller("a", "a", Priority.NORMAL).may_use("anything")
    some = Caller("a", "a", Priority.NORMAL, frozenset({"x"}))
    assert (some.may_use("x"), some.may_use("y")) == (True, False)
    assert not Caller("a", "a", Priority.NORMAL, frozenset()).may_use("x")


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
