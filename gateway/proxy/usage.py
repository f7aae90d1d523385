"""Tokens and speeds, read from the end of a response without parsing the rest.

Streams of OpenAI-compatible nodes report `usage` only if asked. Where the client does not ask, the
gateway does, and takes it out again.

llama.cpp adds `timings` to the last chunk of a stream and to plain responses, and `usage` where the
API has it. Inside a JSON string the quotes of `"usage":{` would be escaped, so its raw bytes are
found only where it is a real key.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from gateway.lease import GrantedLease, Usage
from gateway.proxy import sse
from gateway.proxy.json_values import InvalidJson, JsonObject, parse_object

MOST_CLOSING_BRACKETS = 16

MOST_OBJECT_BYTES = 16 * 1024
"""Bytes; `usage` and `timings` have a few hundred."""

MOST_PLAUSIBLE_TOKENS = 1 << 31
"""Tokens of one response; a larger figure is wrong."""


UsageReader = Callable[[JsonObject, Usage], Usage]
"""Reads an API's `usage` object, and takes from the timings' figures what it does not report."""


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


_KEY = b'"usage"'

_NULL_USAGE = re.compile(rb', *"usage" *: *null(?= *[,}])|"usage" *: *null *,')
"""What OpenAI adds to each chunk before the one with usage."""


class UsageFilter:
    """Takes out of a stream what reports usage, since only the gateway asked; an `EventFilter`.

    `on_timings` is called if `timings` come with it: llama.cpp's server would have sent them
    unasked, in a chunk that the client gets.
    """

    __slots__ = ("_on_timings", "event")

    def __init__(self, on_timings: Callable[[], None] = lambda: None) -> None:
        self._on_timings = on_timings
        self.event = b""
        """The chunk with usage that no choice followed; empty: none has come."""

    def __call__(self, events: bytes) -> bytes:
        """These whole events as they would be if nobody had asked."""
        passed = events
        if _KEY in events:
            events = _NULL_USAGE.sub(b"", events)
            passed = sse.edit_matching(events, _KEY, self._take)
        if self.event and b'"choices"' in events.rpartition(self.event)[2]:
            self.event = b""  # some nodes report it again and again
        return passed

    def _take(self, event: bytes) -> bytes:
        try:
            value = parse_object(sse.payload(event))
        except InvalidJson:
            return event
        said = value.get("choices") or value.get("error")
        if said or not isinstance(value.get("usage"), dict):
            return event  # some nodes report it unasked, beside a choice
        self.event = event
        if "timings" in value:
            self._on_timings()
        return b""


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

    def may_be_refused(self, lease: GrantedLease, path: str, status: int, content: bytes) -> bool:
        """Whether the option may be why the node refuses a request with this error."""
        return status in {400, 422} and (
            self.are_taken(lease, path) is not True
            or b"stream_options" in content
            or b"include_usage" in content
        )

    def forget(self) -> None:
        """Nothing is known of any node."""
        self._taken.clear()
