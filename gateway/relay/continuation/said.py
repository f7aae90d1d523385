"""What of a stream has gone out to the client.

Events are kept as they went by, and read only when there are many of them or when the node has
failed: nothing is parsed for each token of a stream that goes well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.relay import sse

Value = dict[str, Any]

RAW_MOST = 48 * 1024
"""Bytes of events that are kept unread: some 240 tokens."""
RAW_KEPT = 8 * 1024
"""Bytes of the newest events that stay unread then: the seam wants them token by token."""

_OBJECTS = msgspec.json.Decoder(list[dict[str, Any]])


@dataclass(slots=True)
class Said:
    """The client's view of an answer so far."""

    head: Value = field(default_factory=dict)
    """The first event that tells the answer's `id`, `created` and `model`."""
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    """Of each token the text, in order, but for older ones, which may be one piece."""
    tokens: int = 0
    """Tokens that had text."""
    ids: list[int] = field(default_factory=list)
    """Their ids, where the stream tells them: of all tokens or of none."""
    block: int = 0
    """Number of the content block that is open (`/v1/messages`)."""
    opened: bool = False
    """Whether a content block is open."""
    reason: str | None = None
    """Why it ended, if it has; only the end of the stream itself is missing."""
    counted: bool = False
    """Whether `usage` has gone out."""
    unsound: str | None = None
    """Why nothing may follow from another node."""

    @property
    def text(self) -> str:
        """The answer's text so far."""
        return "".join(self.content)

    @property
    def thought(self) -> str:
        """The reasoning so far."""
        return "".join(self.reasoning)


Reader = Callable[[Said, Value], None]
"""Adds what one event says."""


class SoFar:
    """Keeps what goes out of one stream. `most`: bytes of text; past it there is no way back."""

    __slots__ = ("_most", "_raw", "_read", "_said", "_size")

    def __init__(self, read: Reader, most: int) -> None:
        self._read = read
        self._most = most
        self._said = Said()
        self._raw: list[bytes] = []
        self._size = 0

    def add(self, events: bytes) -> None:
        """These whole events go out."""
        self._raw.append(events)
        self._size += len(events)
        if self._size > RAW_MOST:
            self._compact()

    def know(self, ids: Iterable[int]) -> None:
        """The ids of the next tokens, where what goes out does not tell them."""
        self._said.ids += ids

    def said(self) -> Said:
        """All that has gone out: to be asked for when the stream has failed."""
        self._take(b"".join(self._raw))
        self._raw, self._size = [], 0
        return self._said

    def _compact(self) -> None:
        if self._said.unsound is not None:
            self._raw, self._size = [], 0
            return
        raw = b"".join(self._raw)
        end = raw.rfind(b"\n\n", 0, len(raw) - RAW_KEPT) + 2
        if end < 2:
            end = len(raw)  # one event larger than all that is kept
        self._take(raw[:end])
        said = self._said
        # The old tokens as one piece each: a list of small strings costs ten times their text.
        said.reasoning[:] = [said.thought]
        said.content[:] = [said.text]
        if len(said.reasoning[0].encode()) + len(said.content[0].encode()) > self._most:
            said.unsound = "the answer is longer than what is kept for a continuation"
            said.reasoning[:] = said.content[:] = []
        self._raw = [raw[end:]]
        self._size = len(raw) - end

    def _take(self, events: bytes) -> None:
        """Read these whole events, all in one go: one by one they cost three times as much."""
        lines = [line[5:] for line in events.split(b"\n") if line.startswith(b"data:")]
        if len(lines) != events.count(b"\n\n"):
            # Data of several lines, none, or other line ends.
            lines = [sse.payload(event) for event in sse.split(events)]
        found = [line for line in lines if line.strip() not in _NO_VALUES]
        try:
            for value in _OBJECTS.decode(b"[" + b",".join(found) + b"]"):
                self._read(self._said, value)
        except (msgspec.DecodeError, RecursionError, TypeError, AttributeError):
            self._said.unsound = "an event that went out can't be read"


_NO_VALUES = frozenset({b"", b"[DONE]", b"null"})


def read_chat(said: Said, value: Value) -> None:
    """A chunk of a chat."""
    said.head = said.head or value
    said.counted = said.counted or bool(value.get("usage"))
    for choice in value.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("index"):
            said.unsound = "the request asks for several answers"
        if delta.get("tool_calls") or delta.get("function_call"):
            said.unsound = "a tool call has begun"
        if choice.get("logprobs") is not None:
            said.unsound = "the client asked for probabilities"
        _add(said.reasoning, said, delta.get("reasoning_content"))
        _add(said.content, said, delta.get("content"))
        said.reason = choice.get("finish_reason") or said.reason


def read_completions(said: Said, value: Value) -> None:
    """A chunk of a completion."""
    said.head = said.head or value
    said.counted = said.counted or bool(value.get("usage"))
    for choice in value.get("choices") or ():
        if choice.get("index"):
            said.unsound = "the request asks for several answers"
        if choice.get("logprobs") is not None:
            said.unsound = "the client asked for probabilities"
        _add(said.content, said, choice.get("text"))
        said.reason = choice.get("finish_reason") or said.reason


def read_native(said: Said, value: Value) -> None:
    """An event of llama.cpp's own completion, which tells its tokens' ids."""
    said.head = said.head or value
    if value.get("index"):
        said.unsound = "the request asks for several answers"
    if value.get("completion_probabilities"):
        said.unsound = "the client asked for probabilities"
    said.ids += [token for token in value.get("tokens") or () if isinstance(token, int)]
    _add(said.content, said, value.get("content"))
    if value.get("stop"):
        said.reason = str(value.get("stop_type") or "eos")


def read_messages(said: Said, value: Value) -> None:
    """An event of Anthropic's messages."""
    match value.get("type"):
        case "message_start":
            said.head = value.get("message") or {}
        case "content_block_start":
            said.block, said.opened = value.get("index") or 0, True
            if (value.get("content_block") or {}).get("type") not in {"text", "thinking"}:
                said.unsound = "a tool call has begun"
        case "content_block_delta":
            delta = value.get("delta") or {}
            if delta.get("type") == "input_json_delta":
                said.unsound = "a tool call has begun"
            _add(said.reasoning, said, delta.get("thinking"))
            _add(said.content, said, delta.get("text"))
        case "content_block_stop":
            said.opened = False
        case "message_delta":
            said.reason = (value.get("delta") or {}).get("stop_reason") or said.reason
        case _:
            pass


def _add(pieces: list[str], said: Said, text: object) -> None:
    if isinstance(text, str) and text:
        pieces.append(text)
        said.tokens += 1


READERS: dict[str, Reader] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completions,
    "/v1/messages": read_messages,
    "/completion": read_native,
}
"""Of each path that can be carried on, who reads its events."""
