"""Tokens of a response: those it took, read from its end, and the bound on those of one answer.

llama.cpp adds `timings` to the last chunk of a stream and to plain responses, and `usage` where the
API has it. Inside a JSON string the quotes of `"usage":{` would be escaped, so its raw bytes are
found only where it is a real key. Streams of OpenAI-compatible nodes report `usage` only if asked.
Where the client does not ask, the gateway does, and takes it out again (`UsageFilter`).

Of the bound llama.cpp obeys one of several names, another one on each API: `n_predict` before
`max_completion_tokens` before `max_tokens`; on `/v1/responses` `max_output_tokens`, null too, in
place of `max_tokens`; on `/v1/messages` `max_tokens` alone. Other servers know an API's own name
only. So the largest bound counts, and nodes are sent that one, under the API's own name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from gateway.api.json_values import InvalidJson, JsonObject, parse_object
from gateway.lease import GrantedLease, Usage

MOST_CLOSING_BRACKETS = 16
MOST_OBJECT_BYTES = 16 * 1024  # bytes; `usage` and `timings` have a few hundred
MOST_PLAUSIBLE_TOKENS = 1 << 31  # tokens of one response; a larger figure is wrong
# Reads an API's `usage` object, and takes from the timings' figures what it does not report.
UsageReader = Callable[[JsonObject, Usage], Usage]


def read_openai_usage(usage: JsonObject, timed: Usage) -> Usage:
    """OpenAI's two spellings, which both count cached tokens as part of the prompt."""
    if "prompt_tokens" in usage:
        prompt, completion = "prompt_tokens", "completion_tokens"
        details = usage.get("prompt_tokens_details")
    elif "input_tokens" in usage:
        prompt, completion = "input_tokens", "output_tokens"
        details = usage.get("input_tokens_details")
    else:
        return timed
    prompt_tokens, cached_tokens = token_count(usage[prompt]), timed.cached_tokens
    if isinstance(details, dict):
        cached_tokens = token_count(details.get("cached_tokens"))
    return Usage(
        prompt_tokens,
        min(cached_tokens, prompt_tokens),
        token_count(usage.get(completion)),
        timed.timings,
    )


def read_usage(data: bytes, read: UsageReader = read_openai_usage) -> Usage | None:
    """Read the last `timings` and `usage` objects in `data`; None without either."""
    usage = find_last_object(data, b'"usage":')
    timings = find_last_object(data, b'"timings":')
    if usage is None and timings is None:
        return None
    timed = Usage()
    if timings is not None:
        cached = token_count(timings.get("cache_n"))
        prompt = token_count(timings.get("prompt_n")) + cached
        timed = Usage(prompt, cached, token_count(timings.get("predicted_n")), timings)
    return timed if usage is None else read(usage, timed)


def find_last_object(data: bytes, key: bytes) -> dict[str, Any] | None:
    """The JSON object behind the last `key` (quotes and colon included), or None."""
    behind = data.rfind(key) + len(key)
    if behind < len(key):
        return None
    start = data.find(b"{", behind, behind + 8)
    if start < 0 or data[behind:start].strip():
        return None  # `null`, say
    # Figures nest one level at most: the end is among the first few closing brackets.
    end = start
    for _ in range(MOST_CLOSING_BRACKETS):
        end = data.find(b"}", end, start + MOST_OBJECT_BYTES) + 1
        if not end:
            break
        if data.count(b"{", start, end) == data.count(b"}", start, end):
            try:
                return parse_object(data[start:end])
            except InvalidJson:
                return None
    return None


def token_count(value: object) -> int:
    """A number of tokens; 0: it is none."""
    if not isinstance(value, (int, float)) or not value > 0:
        return 0
    return int(min(value, MOST_PLAUSIBLE_TOKENS))


class UsageOptions:
    """Which nodes may be asked for usage: they take the option, and report nothing without it.

    Each is known for one path and model.

    A node is forgotten with its connections, and all nodes are when the settings are read again.
    """

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken = WeakKeyDictionary[object, dict[tuple[str, str], bool]]()
        """By the node's connections."""

    def are_taken(self, lease: GrantedLease, path: str) -> bool | None:
        """Whether the node of this lease takes the option; None: unknown."""
        return self._taken.get(lease.node.connections, {}).get((path, lease.served_name))

    def note(self, lease: GrantedLease, path: str, *, taken: bool | None) -> None:
        """The node has shown whether it takes the option; None: it is unknown again."""
        known = self._taken.setdefault(lease.node.connections, {})
        if taken is None:
            known.pop((path, lease.served_name), None)
        else:
            known[path, lease.served_name] = taken

    def are_refused(self, lease: GrantedLease, path: str, status: int, content: bytes) -> bool:
        """Note what the answer to a request with the option shows about the node.

        Returns whether the node may refuse the request just because of the option.
        """
        taken = self.are_taken(lease, path)
        if status < 300:
            if taken is None:
                self.note(lease, path, taken=True)
            return False
        if status not in {400, 422} or (
            taken and b"stream_options" not in content and b"include_usage" not in content
        ):
            return False
        self.note(lease, path, taken=False)
        return True

    def forget(self) -> None:
        """Nothing is known of any node."""
        self._taken.clear()


Number = int | float | None
BOUND_NAMES = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
# llama.cpp's numbers have 32 bits: of a larger one it would take the lower bits.
MOST_TOKENS = (1 << 31) - 1
UNBOUNDED = -1
SMALL_BOUND = 4096  # tokens; hardly a server refuses such a bound as larger than its answers may be


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
