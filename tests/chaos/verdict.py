"""Judges one response: complete answer, allowed error, client gone, or a violation."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from tests.chaos.client import ReceivedResponse
from tests.chaos.response_reader import (
    CorruptResponse,
    ParsedResponse,
    error_of,
    read_plain,
    read_stream,
)
from tests.chaos.workload import WorkloadRequest

ALLOWED_REASONS = {
    429: {"queue_full"},
    500: {"node_error"},  # an error that two nodes agree on is passed on
    502: {"node_failed"},
    503: {"no_node", "queue_timeout", "starting"},
    504: {"node_timeout"},
}  # statuses that faults around the gateway may cause, with their `X-Gateway-Reason`


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a request in a word, and its violation, if any."""

    outcome: str
    """`whole`, `left`, `broke` (before the first byte), `cut`, `splice` (other text after a
    resume), `corrupt`, `error <status>` or `event <code>`."""
    problem: str | None = None
    status: int = 0  # the status that the gateway should have recorded; 0: not known


def judge(request: WorkloadRequest, response: ReceivedResponse) -> Verdict:
    """Judge a response. Never raises: a response that can't be parsed is a violation."""
    try:
        return _judge(request, response)
    except CorruptResponse as corrupt:
        return Verdict("corrupt", str(corrupt))
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        return Verdict("corrupt", f"{error!r} in {bytes(response.body[-200:])!r}")


def _judge(request: WorkloadRequest, response: ReceivedResponse) -> Verdict:
    data = bytes(response.body)
    if response.left:
        if response.status == 200 and request.stream and not request.real:
            return Verdict("left", _text_problem(request, read_stream(request.path, data)))
        return Verdict("left")
    if response.broke is not None or not response.complete:
        outcome = "cut" if response.status else "broke"
        return Verdict(outcome, f"the connection ended: {response.broke}")
    if response.status != 200:
        return _judge_error(response)
    if request.vector:
        vector = json.loads(data)["data"][0]["embedding"]
        same = len(vector) == len(request.vector) and all(map(math.isclose, vector, request.vector))
        return Verdict("whole", None if same else "another vector", 200)
    kind = response.headers.get("content-type", "")
    if kind.startswith("text/event-stream") is not request.stream:
        return Verdict("corrupt", f"content type {kind}")
    parsed = read_stream(request.path, data) if request.stream else read_plain(request.path, data)
    if parsed.error is not None:
        if parsed.ends:
            return Verdict("corrupt", "an end and an error")
        code = parsed.error.get("code") or parsed.error["type"]
        return Verdict(f"event {code}", _text_problem(request, parsed))
    if not parsed.ends or not parsed.last_event_complete:
        return Verdict("corrupt", f"ended without an end event or an error: {data[-120:]!r}")
    if parsed.text != request.text:
        outcome = "splice" if request.real else "corrupt"
        return Verdict(outcome, _difference(request.text, parsed.text), 200)
    if parsed.completion_tokens not in {None, request.tokens}:
        return Verdict("whole", f"{parsed.completion_tokens} of {request.tokens} tokens", 200)
    return Verdict("whole", None, 200)


def _judge_error(response: ReceivedResponse) -> Verdict:
    outcome = f"error {response.status}"
    error = error_of(json.loads(response.body))
    reason = response.headers.get("x-gateway-reason", "node_error")
    if reason not in ALLOWED_REASONS.get(response.status, set()):
        return Verdict(outcome, f"{reason}: {error}", response.status)
    if response.status in {429, 503} and "retry-after" not in response.headers:
        return Verdict(outcome, "no Retry-After", response.status)
    return Verdict(f"{outcome} {reason}", None, response.status)


def _text_problem(request: WorkloadRequest, parsed: ParsedResponse) -> str | None:
    # Another server may have resumed a real one's: there, complete answers are compared.
    if request.real or request.text.startswith(parsed.text):
        return None
    return _difference(request.text, parsed.text)


def _difference(expected: str, received: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(expected, received, strict=False)) if a != b), None)
    at = min(len(expected), len(received)) if at is None else at
    around = slice(max(0, at - 10), at + 20)
    lengths = f"{at} of {len(expected)} ({len(received)} received)"
    return f"another text at {lengths}: {expected[around]!r}, not {received[around]!r}"
