"""The bound on the tokens of one answer: all its names, and the one that a node is sent.

llama.cpp obeys one of several names, another one on each API: `n_predict` before
`max_completion_tokens` before `max_tokens`; on `/v1/responses` `max_output_tokens`, null too, in
place of `max_tokens`; on `/v1/messages` `max_tokens` alone. Other servers know an API's own name
only. So the largest bound counts, and nodes are sent that one, under the API's own name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import msgspec

Number = int | float | None

BOUND_NAMES = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")

MOST_TOKENS = (1 << 31) - 1
"""llama.cpp's numbers have 32 bits: of a larger one it would take the lower bits."""

UNBOUNDED = -1

SMALL_BOUND = 4096
"""Tokens; hardly a server refuses such a bound as larger than its answers may be."""


def largest_bound(values: Iterable[int | float]) -> int | None:
    """The largest of these bounds, in tokens; None: there is none, or an answer has no bound."""
    counts = [_tokens(value) for value in values]
    return max(counts) if counts and min(counts) >= 0 else None


def settle_bound(
    body: Any, fields: tuple[str, ...], most: int | None, left: float = math.inf
) -> tuple[int | None, dict[str, Any]]:
    """The most tokens that a node may write for one answer, and the edit that tells it so.

    None: any number. `body` has the values as attributes; `fields` are the API's own names, the
    usual one first; `most` is the operator's and the caller's limit on one answer, `left` what
    the caller's other limits leave at best, which bounds an answer that has no bound: the largest
    ones only where a negative number asks for it. The edit is mostly empty.
    """
    values, own = _bounds_of(body), getattr(body, fields[0])
    cap = MOST_TOKENS if most is None else min(most, MOST_TOKENS)
    # Nearly all bodies have the usual name alone.
    if values.count(None) == len(values) - 1 and type(own) is int and 0 < own <= cap:
        return own, {}
    given = {
        name: value for name, value in zip(BOUND_NAMES, values, strict=True) if value is not None
    }
    bound = largest_bound(given.values())
    if most is not None and (bound is None or bound > most):
        bound = most
    elif not given and left > SMALL_BOUND:
        return None, {}
    # A bound of 0 still lets llama.cpp write a token.
    tokens = None if bound is None else bound or 1
    sent = bound
    if sent is None:
        sent = UNBOUNDED if left == math.inf else _tokens(max(1, left))
    if len(given) == 1:
        [(name, value)] = given.items()
        if name in fields and _tokens(value) == sent and value <= MOST_TOKENS:
            return tokens, {}
    names = [name for name in fields if name in given] or fields[:1]
    return tokens, dict.fromkeys(given, msgspec.UNSET) | {names[-1]: sent}


_bounds_of = attrgetter(*BOUND_NAMES)


def _tokens(value: float) -> int:
    """A bound as llama.cpp reads it; `UNBOUNDED`, if it is negative."""
    return int(max(UNBOUNDED, min(value, MOST_TOKENS)))
