"""Tokens and speeds, read from the end of an answer without parsing the rest.

llama.cpp puts `timings` into the last chunk of a stream unasked and into plain answers, and
`usage` where the dialect has it. Inside a JSON string the quotes of `"usage":{` would be escaped,
so its raw bytes are found only where it is a real key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gateway.proxy.json_values import InvalidJson, parse_object
from gateway.scheduling.demand_model import ReportedTokens

_BARE = re.compile(rb'"usage":\s*\{"prompt_tokens":(\d{1,9}),"total_tokens":\d{1,9}\}')
"""What an answer of embeddings says, and no other."""

EMBEDDINGS_USAGE_WITHIN = 512
"""Bytes; llama.cpp says it before the vectors."""

MOST_CLOSING_BRACKETS = 16

MOST_OBJECT_BYTES = 16 * 1024
"""Bytes; `usage` and `timings` have a few hundred."""

MOST_PLAUSIBLE_TOKENS = 1 << 31
"""Of one answer; what claims more is wrong."""


@dataclass(slots=True)
class Usage(ReportedTokens):
    """Tokens of one answer; `cached` is a part of `prompt`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    timings: dict[str, Any] | None = None
    """llama.cpp's own figures of the generation, unchecked."""


def read_usage(data: bytes) -> Usage | None:
    """What the last `timings` and `usage` objects in `data` say, or None without either."""
    bare = _BARE.search(data, 0, EMBEDDINGS_USAGE_WITHIN)
    if bare is not None:
        return Usage(int(bare[1]))
    usage = find_last_object(data, b'"usage":')
    timings = find_last_object(data, b'"timings":')
    if usage is None and timings is None:
        return None
    found = Usage(timings=timings)
    if timings is not None:
        found.cached_tokens = _count(timings.get("cache_n"))
        found.prompt_tokens = _count(timings.get("prompt_n")) + found.cached_tokens
        found.completion_tokens = _count(timings.get("predicted_n"))
    if usage is not None:
        _read(found, usage)
    return found


def _read(found: Usage, usage: dict[str, Any]) -> None:
    """OpenAI's names and Anthropic's, whose `input_tokens` leave out what was cached."""
    if "prompt_tokens" in usage:
        found.prompt_tokens = _count(usage["prompt_tokens"])
        found.completion_tokens = _count(usage.get("completion_tokens"))
        found.cached_tokens = _detail(usage.get("prompt_tokens_details"), found.cached_tokens)
    elif "input_tokens" in usage and "total_tokens" in usage:
        found.prompt_tokens = _count(usage["input_tokens"])
        found.completion_tokens = _count(usage.get("output_tokens"))
        found.cached_tokens = _detail(usage.get("input_tokens_details"), found.cached_tokens)
    else:
        if "input_tokens" in usage:
            found.cached_tokens = _count(usage.get("cache_read_input_tokens"))
            found.prompt_tokens = _count(usage["input_tokens"]) + found.cached_tokens
        if "output_tokens" in usage:
            found.completion_tokens = _count(usage["output_tokens"])
    found.cached_tokens = min(found.cached_tokens, found.prompt_tokens)


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


def _detail(details: object, otherwise: int) -> int:
    if isinstance(details, dict):
        return _count(details.get("cached_tokens"))
    return otherwise


def _count(value: object) -> int:
    if not isinstance(value, (int, float)) or not value > 0:
        return 0
    return int(min(value, MOST_PLAUSIBLE_TOKENS))
