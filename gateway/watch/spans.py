"""The spans of a request that has ended, from its record and the scheduler's decisions about it.

Plain values, without any text of prompts and completions: neither records nor decisions have any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.events import RequestRecord
from gateway.schedule.decision_log import Decision, Grant, Queueing, Refusal
from gateway.terms import RequestTrace
from gateway.watch.event_log import BLAMELESS_OUTCOMES
from gateway.watch.metrics import OPERATIONS, PROVIDER

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
