"""One answer, the response that it is part of, and the protocol that each API implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal
from zlib import crc32

import msgspec

from tests.emulator.language_model import tokenize
from tests.emulator.request_body import GenerationRequest


@dataclass(slots=True)
class Answer:
    """The answer to one prompt so far. Times in seconds."""

    index: int
    prompt: str
    prompt_tokens: int
    slot: int
    cached: int = 0  # tokens of the prompt that the slot had cached
    text: str = ""
    tokens: int = 0
    finish: Literal["stop", "length", "word"] = "stop"
    stopping_word: str = ""
    prefill: float = 0.0
    decode: float = 0.0

    def timings(self) -> dict[str, Any]:
        read, wrote = self.prefill * 1000, self.decode * 1000
        count = max(self.prompt_tokens - self.cached, 1)
        steps = max(self.tokens - 1, 1)  # the first token comes out of the prefill
        return {
            "cache_n": self.cached,
            "prompt_n": count,
            "prompt_ms": round(read, 3),
            "prompt_per_token_ms": read / count,
            "prompt_per_second": count * 1000 / max(read, 0.001),
            "predicted_n": self.tokens,
            "predicted_ms": round(max(wrote, 0.001), 3),
            "predicted_per_token_ms": wrote / steps,
            "predicted_per_second": steps * 1000 / max(wrote, 0.001),
        }

    def progress(self, processed: int, seconds: float) -> dict[str, int]:
        return {
            "total": self.prompt_tokens,
            "cache": self.cached,
            "processed": processed,
            "time_ms": int(seconds * 1000),
        }

    def finish_reason(self) -> str:
        return "length" if self.finish == "length" else "stop"


@dataclass(slots=True)
class ResponseState:
    """The values that all events of one response share."""

    request: GenerationRequest
    model: str
    created: int
    number: int  # of the request; part of the ids
    answers: list[Answer] = field(default_factory=list)

    def new_id(self, prefix: str) -> str:
        return f"{prefix}{crc32(prefix.encode()):08x}{self.number:024d}"

    def usage(self) -> dict[str, Any]:
        first = self.answers[0]
        return {
            "completion_tokens": first.tokens,
            "prompt_tokens": first.prompt_tokens,
            "total_tokens": first.prompt_tokens + first.tokens,
            "prompt_tokens_details": {"cached_tokens": first.cached},
        }


class Api(ABC):
    """The form of one API's answers. A list of events goes out as one chunk."""

    def __init__(self, state: ResponseState) -> None:
        self.state = state

    def head(self) -> list[bytes]:
        """Events that come with the head, before the prefill."""
        return []

    def progress(self, answer: Answer, processed: int, seconds: float) -> list[bytes]:
        """Events with the progress of the prefill."""
        return []

    def start(self, answer: Answer) -> list[bytes]:
        """Events that go out in one chunk with the first delta."""
        return []

    @abstractmethod
    def delta(self, answer: Answer, word: str) -> bytes: ...

    @abstractmethod
    def finish(self, answer: Answer) -> list[bytes]: ...

    def end(self) -> list[bytes]:
        """Events after all answers."""
        return []

    @abstractmethod
    def plain(self) -> Any:
        """The body of a plain response."""


def to_json(value: object) -> bytes:
    return msgspec.json.encode(value)


def data_event(value: object) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(value)


def named_event(value: dict[str, Any]) -> bytes:
    """An event whose name is its type."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), msgspec.json.encode(value))


def null_for_many_prompts(state: ResponseState) -> list[bytes]:
    """The `null` event that the server sends first when it has several prompts."""
    return [b"data: null\n\n"] if len({answer.prompt for answer in state.answers}) > 1 else []


def logprobs(word: str) -> dict[str, Any]:
    ids = tokenize(word)
    token = {
        "id": ids[0] if ids else 0,
        "token": word,
        "bytes": list(word.encode()),
        "logprob": -0.5,
    }
    return {"content": [token | {"top_logprobs": [token]}]}
