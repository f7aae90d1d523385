"""What the APIs share to resume streams: event rewriters, reasoning marks, rules on the body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeGuard

import msgspec

from gateway.api import sse
from gateway.api.json_values import InvalidJson, JsonObject, parse_object
from gateway.api.outcome import error_message, error_status
from gateway.api.tokens import BOUND_NAMES, largest_bound
from gateway.api.transcript import OverlapFilter, OverlapMismatch, SplicePoint, Transcript
from gateway.transport.errors import InvalidResponse, NodeReportedError


class EventRewriter:
    """Makes a continuation's events part of the first stream: one id, one role, usage that adds up.

    A new one for each continuation. `end_mark`: the mark that ends the reasoning under way; None:
    none is. `usage`: whether the client asks for it.
    """

    def __init__(
        self,
        transcript: Transcript,
        splice_point: SplicePoint,
        end_mark: ReasoningEndMark | None = None,
        *,
        usage: bool = False,
    ) -> None:
        self._transcript = transcript
        self._splice_point = splice_point
        self._usage = usage
        self._overlap = OverlapFilter(splice_point.overlap)
        self._splitter = ReasoningSplitter(end_mark)
        self._begin(transcript)

    def _begin(self, transcript: Transcript) -> None:
        """Take from the transcript what only this API's events need."""

    @property
    def caught_up(self) -> bool:
        """Whether the whole overlap has been repeated."""
        return self._overlap.done

    def rewrite_events(self, events: bytes) -> bytes:
        """What the client gets of whole events.

        Raises: OverlapMismatch, InvalidResponse, NodeReportedError.
        """
        out = []
        for event in sse.split(events):
            data = sse.payload(event)
            if not data or data == b"[DONE]":
                continue
            try:
                value = parse_object(data)
                if value.get("error") or sse.event_name(event) == b"error":
                    message = error_message(data) or "The node failed in the middle of it"
                    raise NodeReportedError(message, error_status(data))
                out.append(self.rewrite(value))
            except (InvalidJson, TypeError, AttributeError):
                raise InvalidResponse("An event of the node's stream can't be read") from None
        return b"".join(out)

    def rewrite(self, value: JsonObject) -> bytes:
        """An event's part that the client gets, possibly empty. Raises: OverlapMismatch."""
        raise NotImplementedError

    def final_events(self, reason: str) -> bytes:
        """The events that end a response whose text is complete, without its `[DONE]`."""
        raise NotImplementedError

    def _new_text(self, text: object) -> str:
        """The part of a token's text behind the overlap."""
        return self._overlap.feed(text) if isinstance(text, str) else ""

    def _check_end(self) -> None:
        if not self._overlap.done:
            raise OverlapMismatch


class NativeEventRewriter(EventRewriter):
    """Rewrites the events of llama.cpp's `/completion` as those of another API."""

    reasoning_kind: ClassVar[str] = ""
    content_kind: ClassVar[str]  # the API's words for what a text is

    def rewrite(self, value: JsonObject) -> bytes:
        reasoning, content = self._splitter.feed(self._new_text(value.get("content")))
        is_last = bool(value.get("stop"))
        if is_last:
            self._check_end()
            reasoning += self._splitter.flush()
        events = self._text_events(self.reasoning_kind, reasoning) if reasoning else b""
        if content:
            events += self._text_events(self.content_kind, content)
        return events + self._end_events(value) if is_last else events

    def _text_events(self, kind: str, text: str) -> bytes:
        """The events that add a text of this kind."""
        raise NotImplementedError

    def _end_events(self, value: JsonObject) -> bytes:
        """The events that end the response, for the last one of `/completion`."""
        raise NotImplementedError

    def _written_tokens(self, value: JsonObject) -> int:
        """Tokens of the whole response, as the last event of `/completion` counts its own."""
        return self._splice_point.prefix_tokens + as_count(value.get("tokens_predicted"))


def data_event(value: JsonObject) -> bytes:
    """An event with this data."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(value: JsonObject) -> bytes:
    """An event with this data, named by its `type`."""
    return b"event: " + str(value.get("type")).encode() + b"\n" + data_event(value)


def as_count(value: object) -> int:
    """A count or an index; 0: it is none."""
    return value if type(value) is int else 0


@dataclass(frozen=True, slots=True)
class ReasoningEndMark:
    """The mark that ends reasoning in a node's template."""

    mark: str
    whitespace: str = "\n\n"  # white space behind the mark that is no part of the content


class ReasoningSplitter:
    """Splits text into reasoning and the content behind it, as llama.cpp does.

    `end_mark` None: the reasoning is over already.
    """

    def __init__(self, end_mark: ReasoningEndMark | None) -> None:
        self._mark = end_mark.mark if end_mark else ""
        self._whitespace = end_mark.whitespace if end_mark else ""
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the content in the next text."""
        if not self._mark:
            return "", self._strip_whitespace(text)
        reasoning, mark, content = (self._held + text).partition(self._mark)
        if mark:
            self._mark = self._held = ""
            return reasoning, self._strip_whitespace(content)
        # The beginning of the mark may be at the end: hold it back.
        end = len(reasoning) - _overlap_length(reasoning, self._mark)
        self._held = reasoning[end:]
        return reasoning[:end], ""

    def flush(self) -> str:
        """The reasoning that is still held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _strip_whitespace(self, text: str) -> str:
        """Drop the white space that the template writes behind the mark, as far as it came."""
        while self._whitespace and text:
            if text[0] != self._whitespace[0]:
                self._whitespace = ""
                break
            self._whitespace, text = self._whitespace[1:], text[1:]
        return text


def _overlap_length(text: str, mark: str) -> int:
    """Characters at the end of `text` that may be the beginning of `mark`."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


_SEVERAL_ANSWERS = ("n", "n_cmpl", "best_of")
# Fields that ask for more than text, which the replacement node lacks for the earlier tokens.
_MORE_THAN_TEXT = ("logprobs", "top_logprobs", "n_probs", "echo", "suffix", "audio")
# Fields that bind the output to a grammar, whose state no other node has.
_GRAMMAR = ("grammar", "json_schema")
BOUND_TO_GRAMMAR = "the output is bound to a grammar"
REASONING_LIMITED = "the length of its reasoning is limited"


def unresumable_reason(body: JsonObject, transcript: Transcript) -> str | None:
    """Why no API could resume the response to this body; None: it may be possible."""
    if transcript.unresumable is not None:
        return transcript.unresumable
    if any(is_number(body.get(name)) and body[name] > 1 for name in _SEVERAL_ANSWERS):
        return "the request asks for several answers"
    if any(body.get(name) for name in _MORE_THAN_TEXT):
        return "the request asks for more than text"
    if any(body.get(name) for name in _GRAMMAR):
        return BOUND_TO_GRAMMAR
    response_format = body.get("response_format")
    if isinstance(response_format, dict) and response_format.get("type") not in {None, "text"}:
        return BOUND_TO_GRAMMAR
    if body.get("tools") and _requires_call(body.get("tool_choice")):
        return "the output is bound to a tool call"
    limits = (body.get("thinking_budget_tokens"), body.get("reasoning_budget_tokens"))
    if is_reasoning(transcript) and any(is_number(limit) and limit >= 0 for limit in limits):
        return REASONING_LIMITED
    return None


def is_reasoning(transcript: Transcript) -> bool:
    """Whether reasoning is under way: only `/completion` continues it, and it knows no limit."""
    return bool(transcript.reasoning_text) and not transcript.text


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _requires_call(choice: object) -> bool:
    if isinstance(choice, dict):
        return choice.get("type") not in {"auto", "none"}
    return choice not in {None, "auto", "none"}


def wants_usage(body: JsonObject) -> bool:
    """Whether the client asks for `usage` in the stream."""
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def message_unresumable_reason(body: JsonObject) -> str | None:
    """Why a response to messages can't be resumed; None: they allow it."""
    messages = body.get("messages")
    if isinstance(messages, list) and messages:
        last = messages[-1]
        if isinstance(last, dict) and last.get("role") == "assistant":
            return "the request itself continues a message"
    return None


def remaining_tokens(body: JsonObject, written: int) -> int | None:
    """Tokens that may still be written; None: the body sets no limit."""
    bound = largest_bound(value for name in BOUND_NAMES if is_number(value := body.get(name)))
    return None if bound is None else max(0, bound - written)
