"""Streams of other dialects, carried on by llama.cpp's own completion of the rendered prompt."""

from __future__ import annotations

from gateway.relay.continuation.joining import (
    OF_THE_ANSWER,
    Chunks,
    Joiner,
    block_delta,
    blocks_ended,
    data,
    event,
    message_ended,
    number,
)
from gateway.relay.continuation.said import Said
from gateway.relay.continuation.seam import Seam
from gateway.relay.continuation.thought import Closing
from gateway.relay.values import Value


class Parting:
    """Parts a thought that is under way from the answer behind it, as llama.cpp does.

    `closing`: what ends the thought; None: it is over already.
    """

    def __init__(self, closing: Closing | None) -> None:
        self._mark = closing.mark if closing else ""
        self._gap = closing.gap if closing else ""
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """What of a text belongs to the thought, and what to the answer."""
        if not self._mark:
            return "", self._answer(text)
        thought, closed, answer = (self._held + text).partition(self._mark)
        if closed:
            self._mark = self._held = ""
            return thought, self._answer(answer)
        # What may be the beginning of the mark waits.
        end = len(thought) - _overlap(thought, self._mark)
        self._held = thought[end:]
        return thought[:end], ""

    def rest(self) -> str:
        """What of the thought still waited, when all has come."""
        held, self._held = self._held, ""
        return held

    def _answer(self, text: str) -> str:
        """Without the white space that the template writes behind the mark, as far as it came."""
        while self._gap and text:
            if text[0] != self._gap[0]:
                self._gap = ""
                break
            self._gap, text = self._gap[1:], text[1:]
        return text


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that may be the beginning of `mark`."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


class _ChunksFromNative(Chunks):
    """Chunks made of the events of llama.cpp's own completion. `usage`: the client wants it."""

    def __init__(self, said: Said, seam: Seam, *, usage: bool = False) -> None:
        super().__init__(said, seam)
        head = said.head
        self._head = {name: head[name] for name in (*OF_THE_ANSWER, "object") if name in head}
        self._shape = {**self._head, "choices": []}
        self._counts = usage

    def feed(self, value: Value) -> bytes:
        new = self._new(value.get("content"))
        events = self._text(new) if new else b""
        if value.get("stop"):
            self._check_end()
            reason = "length" if value.get("stop_type") == "limit" else "stop"
            events += self._end(reason, value)
        return events

    def _text(self, text: str) -> bytes:
        return data(self._shape | {"choices": [self._text_choice(text)]})

    def _text_choice(self, text: str) -> Value:
        raise NotImplementedError

    def _end(self, reason: str, told: Value) -> bytes:
        last = self._shape | {"choices": [self._last_choice(reason)]}
        if not self._counts:
            return data(last | {"timings": told.get("timings")})
        counted = self._usage({"completion_tokens": told.get("tokens_predicted")})
        return data(last) + data(self._shape | {"usage": counted, "timings": told.get("timings")})


class ChatFromNative(_ChunksFromNative):
    """A chat's stream. `closing`: what ends the reasoning that is under way."""

    def __init__(
        self, said: Said, seam: Seam, closing: Closing | None = None, *, usage: bool = False
    ) -> None:
        super().__init__(said, seam, usage=usage)
        self._parting = Parting(closing)

    def _text(self, text: str) -> bytes:
        thought, answer = self._parting.feed(text)
        return self._thought(thought) + (super()._text(answer) if answer else b"")

    def _thought(self, text: str) -> bytes:
        if not text:
            return b""
        choice = {"finish_reason": None, "index": 0, "delta": {"reasoning_content": text}}
        return data(self._shape | {"choices": [choice]})

    def _end(self, reason: str, told: Value) -> bytes:
        return self._thought(self._parting.rest()) + super()._end(reason, told)

    def _text_choice(self, text: str) -> Value:
        return {"finish_reason": None, "index": 0, "delta": {"content": text}}

    def _last_choice(self, reason: str) -> Value:
        return {"finish_reason": reason, "index": 0, "delta": {}}


class CompletionsFromNative(_ChunksFromNative):
    """A completion's stream: llama.cpp's own takes and tells ids."""

    def _text_choice(self, text: str) -> Value:
        return {"text": text, "index": 0, "logprobs": None, "finish_reason": None}

    def _last_choice(self, reason: str) -> Value:
        return {"text": "", "index": 0, "logprobs": None, "finish_reason": reason}


class MessagesFromNative(Joiner):
    """Anthropic's stream. `closing`: what ends the thought that is under way."""

    def __init__(self, said: Said, seam: Seam, closing: Closing | None = None) -> None:
        super().__init__(said, seam)
        self._parting = Parting(closing)
        self._open = dict(said.open)
        self._next = said.block + 1 if said.open or said.tokens else 0

    def feed(self, value: Value) -> bytes:  # noqa: D102 - the base's
        thought, answer = self._parting.feed(self._new(value.get("content")))
        if not value.get("stop"):
            return self._more("thinking", thought) + self._more("text", answer)
        self._check_end()
        thought += self._parting.rest()
        events = self._more("thinking", thought) + self._more("text", answer)
        stop = "max_tokens" if value.get("stop_type") == "limit" else "end_turn"
        tokens = self._seam.kept_tokens + number(value.get("tokens_predicted"))
        events += blocks_ended(self._open)
        events += message_ended(stop, value.get("stopping_word") or None, tokens)
        return events + event({"type": "message_stop"})

    def _more(self, kind: str, text: str) -> bytes:
        """More of the newest block, where that is of this kind, or of a new one."""
        if not text:
            return b""
        index, begun = self._next - 1, b""
        if self._open.get(index) != kind:
            index, self._next = self._next, self._next + 1
            self._open[index] = kind
            block = {"type": kind, kind: ""}
            begun = event({"type": "content_block_start", "index": index, "content_block": block})
        return begun + block_delta(index, kind, text)
