"""What came of one request: a whole answer, an honest error, a client gone, or a broken promise."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from tests.chaos.asks import Ask
from tests.chaos.client import Got
from tests.chaos.reading import Corrupt, Read, error_of, read_plain, read_stream, read_vector

HONEST = {
    429: {"queue_full"},
    500: {"node_error"},  # what two nodes say alike is passed on
    502: {"node_failed"},
    503: {"no_node", "queue_timeout", "starting"},
    504: {"node_timeout"},
}
"""Statuses that may come of faults around the gateway, with their reasons."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of a request, in a word, and what is wrong with it."""

    outcome: str
    """`whole`, `left`, `broke` (before anything came), `cut`, `seam`, `corrupt` or
    `error <status>`, `event <code>`."""
    problem: str | None = None
    code: int = 0
    """What the gateway should have noted; 0: not known."""


def judge(ask: Ask, got: Got) -> Judged:
    """Never raises: what can't be read is a problem."""
    try:
        return _judge(ask, got)
    except Corrupt as corrupt:
        return Judged("corrupt", str(corrupt))
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        return Judged("corrupt", f"{error!r} in {bytes(got.body[-200:])!r}")


def _judge(ask: Ask, got: Got) -> Judged:
    if got.left:
        if got.status == 200 and ask.stream and not ask.real:
            problem = _text_problem(ask, read_stream(ask.path, bytes(got.body)))
            return Judged("left", problem)
        return Judged("left")
    if got.broke is not None or not got.complete:
        outcome = "cut" if got.status else "broke"
        return Judged(outcome, f"the connection ended: {got.broke}")
    if got.status != 200:
        return _error(ask, got)
    if ask.vector:
        vector = read_vector(bytes(got.body))
        same = len(vector) == len(ask.vector) and all(map(math.isclose, vector, ask.vector))
        return Judged("whole", None if same else "another vector", 200)
    kind = got.headers.get("content-type", "")
    if kind.startswith("text/event-stream") is not ask.stream:
        return Judged("corrupt", f"content type {kind}")
    data = bytes(got.body)
    read = read_stream(ask.path, data) if ask.stream else read_plain(ask.path, data)
    if read.error is not None:
        if read.ends:
            return Judged("corrupt", "an end and an error")
        said = read.error.get("code") or read.error["type"]
        return Judged(f"event {said}", _text_problem(ask, read))
    if not read.ends or not read.whole_events:
        return Judged("corrupt", f"cut without a word: {data[-120:]!r}")
    if read.text != ask.text:
        differs = "seam" if ask.real else "corrupt"
        return Judged(differs, f"another text: {_difference(ask.text, read.text)}", 200)
    if read.completion_tokens not in {None, ask.tokens}:
        return Judged("whole", f"{read.completion_tokens} of {ask.tokens} tokens", 200)
    return Judged("whole", None, 200)


def _error(ask: Ask, got: Got) -> Judged:
    outcome = f"error {got.status}"
    error = error_of(json.loads(got.body))
    reason = got.headers.get("x-gateway-reason", "node_error")
    if reason not in HONEST.get(got.status, set()):
        return Judged(outcome, f"{reason}: {error}", got.status)
    if got.status in {429, 503} and "retry-after" not in got.headers:
        return Judged(outcome, "no Retry-After", got.status)
    return Judged(f"{outcome} {reason}", None, got.status)


def _text_problem(ask: Ask, read: Read) -> str | None:
    if ask.text.startswith(read.text):
        return None
    if ask.real:
        return None  # it may have been carried on; whole answers are looked at
    return f"another text: {_difference(ask.text, read.text)}"


def _difference(wanted: str, came: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(wanted, came, strict=False)) if a != b), None)
    at = min(len(wanted), len(came)) if at is None else at
    return (
        f"at {at} of {len(wanted)} ({len(came)} came): "
        f"{wanted[max(0, at - 10) : at + 20]!r}, not {came[max(0, at - 10) : at + 20]!r}"
    )
