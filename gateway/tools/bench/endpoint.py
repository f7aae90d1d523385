"""The endpoints that can be measured: their bodies, and how their responses read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_COUNT = 100_000_000
"""Tokens; a larger figure of a server is nonsense."""

MOST_MILLISECONDS = 1e9


@dataclass(slots=True)
class ServerFigures:
    """What the server itself says of a request. None: it does not."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    prefill_seconds: float | None = None
    """llama.cpp's `timings`: of the slot's prefill, without the wait for the slot."""

    def learn(self, event: Mapping[str, Any]) -> None:
        """Take what an event or a plain response says; the last word counts."""
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
            self.completion_tokens = _count(usage.get("completion_tokens"), self.completion_tokens)
            details = usage.get("prompt_tokens_details")
            if isinstance(details, dict):
                self.cached_tokens = _count(details.get("cached_tokens"), self.cached_tokens)
        timings = event.get("timings")
        if isinstance(timings, dict):
            milliseconds = timings.get("prompt_ms")
            if isinstance(milliseconds, int | float) and 0 <= milliseconds <= MOST_MILLISECONDS:
                self.prefill_seconds = milliseconds / 1000


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint."""

    name: str
    path: bytes
    """Below `/v1`."""
    is_stream: bool
    prompt_fields: Callable[[str], dict[str, Any]] = field(repr=False)
    """A body's fields that hold the prompt."""
    has_content: Callable[[Mapping[str, Any]], bool] = field(repr=False)
    """Whether an event, or a plain response, holds some of what was asked for."""

    def body(
        self, model: str | None, prompt: str, max_tokens: int, extra: dict[str, Any]
    ) -> dict[str, Any]:
        """The body of a request. A field that `extra` sets to None is left out."""
        fields: dict[str, Any] = {"model": model, **self.prompt_fields(prompt)}
        if self.is_stream:
            fields |= {"stream": True, "max_tokens": max_tokens, "temperature": 0}
        return {name: value for name, value in (fields | extra).items() if value is not None}


def endpoint(name: str) -> Endpoint | None:
    """The endpoint of this name."""
    return next((one for one in ENDPOINTS if one.name == name), None)


def _chat_content(event: Mapping[str, Any]) -> bool:
    delta = _first(event, "choices").get("delta")
    if not isinstance(delta, dict):
        return False
    return any(delta.get(name) for name in _DELTA_FIELDS)


_DELTA_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


def _first(event: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    listed = event.get(name)
    first = listed[0] if isinstance(listed, list) and listed else None
    return first if isinstance(first, dict) else {}


def is_finished(event: Mapping[str, Any]) -> bool:
    """Whether an event of a stream says why the answer has ended."""
    return _first(event, "choices").get("finish_reason") is not None


def _count(value: object, otherwise: int | None) -> int | None:
    sound = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_COUNT
    return value if sound else otherwise  # type: ignore[return-value]


CHAT = Endpoint(
    "chat",
    b"/chat/completions",
    True,
    lambda prompt: {"messages": [{"role": "user", "content": prompt}]},
    _chat_content,
)

ENDPOINTS = (
    CHAT,
    Endpoint(
        "completions",
        b"/completions",
        True,
        lambda prompt: {"prompt": prompt},
        lambda event: bool(_first(event, "choices").get("text")),
    ),
    Endpoint(
        "embeddings",
        b"/embeddings",
        False,
        lambda prompt: {"input": prompt},
        lambda reply: bool(_first(reply, "data").get("embedding")),
    ),
)
