"""The next node's events made those of the first stream: one id, one role, usage that adds up."""

from __future__ import annotations

import msgspec

from gateway.proxy import sse
from gateway.proxy.json_values import InvalidJson, JsonObject, parse_object
from gateway.proxy.outcome import error_message, error_status
from gateway.proxy.resume.reasoning_template import ReasoningEndMark
from gateway.proxy.resume.splice import OverlapFilter, OverlapMismatch, SplicePoint
from gateway.proxy.resume.transcript import Transcript
from gateway.transport.errors import InvalidResponse, NodeReportedError

IDENTITY_FIELDS = ("id", "created", "model", "system_fingerprint")
"""What every chunk of one answer repeats."""


class EventRewriter:
    """Takes the continuation's events one by one. A new one for each continuation."""

    def __init__(self, transcript: Transcript, splice_point: SplicePoint) -> None:
        self._said = transcript
        self._seam = splice_point
        self._again = OverlapFilter(splice_point.overlap)

    @property
    def caught_up(self) -> bool:
        """Whether all that was to be written again has come."""
        return self._again.done

    def rewrite(self, value: JsonObject) -> bytes:
        """What of an event goes to the client, possibly nothing. Raises: Mismatch."""
        raise NotImplementedError

    def final_events(self, reason: str, *, usage: bool) -> bytes:
        """The end of an answer that lacks nothing else, without its `[DONE]`."""
        raise NotImplementedError

    def _new(self, text: object) -> str:
        """What of a token's text the client has not had yet."""
        if not isinstance(text, str) or not text:
            return ""
        return self._again.feed(text)

    def _check_end(self) -> None:
        if not self._again.done:
            raise OverlapMismatch

    def _usage(self, told: JsonObject) -> JsonObject:
        """OpenAI's usage of the whole answer: the prompt is the client's own."""
        seam = self._seam
        completion = seam.prefix_tokens + as_count(told.get("completion_tokens"))
        usage = told | {
            "prompt_tokens": seam.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": seam.prompt_tokens + completion,
        }
        details = told.get("prompt_tokens_details")
        if isinstance(details, dict):
            cached = min(as_count(details.get("cached_tokens")), seam.prompt_tokens)
            usage["prompt_tokens_details"] = details | {"cached_tokens": cached}
        return usage

    def _whole_usage(self) -> JsonObject:
        """The same where the next node wrote nothing."""
        seam = self._seam
        return {
            "completion_tokens": seam.sent_tokens,
            "prompt_tokens": seam.prompt_tokens,
            "total_tokens": seam.prompt_tokens + seam.sent_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


class ChunkRewriter(EventRewriter):
    """OpenAI's chunks."""

    def rewrite(self, value: JsonObject) -> bytes:  # noqa: D102 - the base's
        choices = []
        for choice in value.get("choices") or ():
            new = self._choice(choice)
            if choice.get("finish_reason"):
                self._check_end()
            if new is not None:
                choices.append(new)
        if not choices and not value.get("usage"):
            return b""
        joined = value | self._identity() | {"choices": choices}
        if value.get("usage"):
            joined["usage"] = self._usage(value["usage"])
        return data_event(joined)

    def final_events(self, reason: str, *, usage: bool) -> bytes:  # noqa: D102 - the base's
        head = self._said.first_event | {"choices": []}
        head = {name: value for name, value in head.items() if name not in {"usage", "timings"}}
        end = b""
        if self._said.finish_reason is None:
            end = data_event(head | {"choices": [self._last_choice(reason)]})
        if usage and not self._said.usage_sent:
            end += data_event(head | {"usage": self._whole_usage()})
        return end

    def _identity(self) -> JsonObject:
        head = self._said.first_event
        return {name: head[name] for name in IDENTITY_FIELDS if name in head}

    def _choice(self, choice: JsonObject) -> JsonObject | None:
        """What of a choice is sent on; None: nothing of it is new."""
        raise NotImplementedError

    def _last_choice(self, reason: str) -> JsonObject:
        raise NotImplementedError


class ChatRewriter(ChunkRewriter):
    """A chat's stream, carried on by a chat with a message begun."""

    def _choice(self, choice: JsonObject) -> JsonObject | None:
        delta = {
            name: value
            for name, value in (choice.get("delta") or {}).items()
            if name != "role" and value is not None
        }
        if "content" in delta:
            delta["content"] = self._new(delta["content"])
            if not delta["content"]:
                del delta["content"]
        if not delta and not choice.get("finish_reason"):
            return None
        return choice | {"delta": delta}

    def _last_choice(self, reason: str) -> JsonObject:
        return {"finish_reason": reason, "index": 0, "delta": {}}


class CompletionsRewriter(ChunkRewriter):
    """A completion's stream, carried on by a completion."""

    def _choice(self, choice: JsonObject) -> JsonObject | None:
        text = self._new(choice.get("text"))
        if not text and not choice.get("finish_reason"):
            return None
        return choice | {"text": text}

    def _last_choice(self, reason: str) -> JsonObject:
        return {"text": "", "index": 0, "logprobs": None, "finish_reason": reason}


class NativeRewriter(EventRewriter):
    """llama.cpp's own stream, carried on by its own completion."""

    def rewrite(self, value: JsonObject) -> bytes:  # noqa: D102 - the base's
        text = self._new(value.get("content"))
        if value.get("stop"):
            self._check_end()
        elif not text:
            return b""
        seam = self._seam
        joined = value | {
            "content": text,
            "tokens_predicted": seam.prefix_tokens + as_count(value.get("tokens_predicted")),
            "tokens_evaluated": seam.prompt_tokens,
        }
        prompt = value.get("prompt")
        if isinstance(prompt, str):
            joined["prompt"] = prompt.removesuffix(seam.prefix)
        return data_event(joined)

    def final_events(self, reason: str, *, usage: bool) -> bytes:  # noqa: D102 - the base's
        seam = self._seam
        stop = "limit" if reason == "length" else "eos"
        return data_event(
            {
                "index": 0,
                "content": "",
                "tokens": [],
                "stop": True,
                "stop_type": stop,
                "tokens_predicted": seam.sent_tokens,
                "tokens_evaluated": seam.prompt_tokens,
            }
        )


class MessagesRewriter(EventRewriter):
    """Anthropic's stream, carried on by a message begun."""

    def __init__(self, transcript: Transcript, splice_point: SplicePoint) -> None:
        super().__init__(transcript, splice_point)
        self._shift = (
            transcript.block_index
            if transcript.block_is_open or not transcript.token_count
            else transcript.block_index + 1
        )
        self._skip = transcript.block_is_open
        """Whether the next block goes on with the one that is open."""

    def rewrite(self, value: JsonObject) -> bytes:  # noqa: D102 - the base's
        kind = value.get("type")
        if kind in {"message_start", "ping"}:
            return b""
        if kind == "content_block_start" and self._skip:
            self._skip = False
            return b""
        joined = dict(value)
        if isinstance(value.get("index"), int):
            joined["index"] = value["index"] + self._shift
        if kind == "content_block_delta":
            delta = value.get("delta") or {}
            if delta.get("type") == "text_delta":
                text = self._new(delta.get("text"))
                if not text:
                    return b""
                joined["delta"] = delta | {"text": text}
        elif kind == "message_delta":
            self._check_end()
            usage = value.get("usage") or {}
            output = self._seam.prefix_tokens + as_count(usage.get("output_tokens"))
            joined["usage"] = usage | {"output_tokens": output}
        return named_event(joined)

    def final_events(self, reason: str, *, usage: bool) -> bytes:  # noqa: D102 - the base's
        end = close_blocks(self._said.open_blocks)
        if self._said.finish_reason is None:
            stop = "max_tokens" if reason == "length" else "end_turn"
            end += message_delta(stop, None, self._seam.sent_tokens)
        return end + named_event({"type": "message_stop"})


REWRITERS: dict[str, type[EventRewriter]] = {
    "/v1/chat/completions": ChatRewriter,
    "/v1/completions": CompletionsRewriter,
    "/v1/messages": MessagesRewriter,
    "/completion": NativeRewriter,
}
"""Of each path that can be carried on by itself, who joins its events."""


def close_blocks(blocks: dict[int, str]) -> bytes:
    """The ends of these content blocks, as llama.cpp writes them: all of them at the end."""
    end = b""
    for index, kind in sorted(blocks.items()):
        if kind == "thinking":
            end += block_delta(index, "signature", "")
        end += named_event({"type": "content_block_stop", "index": index})
    return end


def block_delta(index: int, kind: str, text: str) -> bytes:
    """More of a content block."""
    delta = {"type": f"{kind}_delta", kind: text}
    return named_event({"type": "content_block_delta", "index": index, "delta": delta})


def message_delta(stop_reason: str, stop_sequence: str | None, tokens: int) -> bytes:
    """Why a message ended, and its length."""
    delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
    return named_event(
        {"type": "message_delta", "delta": delta, "usage": {"output_tokens": tokens}}
    )


def data_event(value: JsonObject) -> bytes:
    """An event of OpenAI's."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(value: JsonObject) -> bytes:
    """An event of Anthropic's."""
    return b"event: " + str(value.get("type")).encode() + b"\n" + data_event(value)


def as_count(value: object) -> int:
    """A count; 0: it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


class StreamRewriter:
    """Rewrites whole events, piece by piece."""

    __slots__ = ("rewriter",)

    def __init__(self, rewriter: EventRewriter) -> None:
        self.rewriter = rewriter

    def rewrite(self, events: bytes) -> bytes:
        """What of them goes to the client. Raises: Mismatch, Garbage, Errored."""
        out = []
        for event in sse.split(events):
            data = sse.payload(event)
            if not data or data == b"[DONE]":
                continue
            try:
                value = parse_object(data)
                if value.get("error") or sse.event_name(event) == b"error":
                    said = error_message(data) or "The node failed in the middle of it"
                    raise NodeReportedError(said, error_status(data))
                out.append(self.rewriter.rewrite(value))
            except (InvalidJson, TypeError, AttributeError):
                raise InvalidResponse("An event of the node's stream can't be read") from None
        return b"".join(out)


class ReasoningSplitter:
    """Parts a thought that is under way from the answer behind it, as llama.cpp does.

    `closing`: what ends the thought; None: it is over already.
    """

    def __init__(self, end_mark: ReasoningEndMark | None) -> None:
        self._mark = end_mark.mark if end_mark else ""
        self._gap = end_mark.whitespace if end_mark else ""
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

    def flush(self) -> str:
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


class _NativeToChunkRewriter(ChunkRewriter):
    """Chunks made of the events of llama.cpp's own completion. `usage`: the client wants it."""

    def __init__(
        self, transcript: Transcript, splice_point: SplicePoint, *, usage: bool = False
    ) -> None:
        super().__init__(transcript, splice_point)
        head = transcript.first_event
        self._head = {name: head[name] for name in (*IDENTITY_FIELDS, "object") if name in head}
        self._shape = {**self._head, "choices": []}
        self._counts = usage

    def rewrite(self, value: JsonObject) -> bytes:
        new = self._new(value.get("content"))
        events = self._text(new) if new else b""
        if value.get("stop"):
            self._check_end()
            reason = "length" if value.get("stop_type") == "limit" else "stop"
            events += self._end(reason, value)
        return events

    def _text(self, text: str) -> bytes:
        return data_event(self._shape | {"choices": [self._text_choice(text)]})

    def _text_choice(self, text: str) -> JsonObject:
        raise NotImplementedError

    def _end(self, reason: str, told: JsonObject) -> bytes:
        last = self._shape | {"choices": [self._last_choice(reason)]}
        if not self._counts:
            return data_event(last | {"timings": told.get("timings")})
        counted = self._usage({"completion_tokens": told.get("tokens_predicted")})
        return data_event(last) + data_event(
            self._shape | {"usage": counted, "timings": told.get("timings")}
        )


class NativeToChatRewriter(_NativeToChunkRewriter):
    """A chat's stream. `closing`: what ends the reasoning that is under way."""

    def __init__(
        self,
        transcript: Transcript,
        splice_point: SplicePoint,
        end_mark: ReasoningEndMark | None = None,
        *,
        usage: bool = False,
    ) -> None:
        super().__init__(transcript, splice_point, usage=usage)
        self._parting = ReasoningSplitter(end_mark)

    def _text(self, text: str) -> bytes:
        thought, answer = self._parting.feed(text)
        return self._thought(thought) + (super()._text(answer) if answer else b"")

    def _thought(self, text: str) -> bytes:
        if not text:
            return b""
        choice = {"finish_reason": None, "index": 0, "delta": {"reasoning_content": text}}
        return data_event(self._shape | {"choices": [choice]})

    def _end(self, reason: str, told: JsonObject) -> bytes:
        return self._thought(self._parting.flush()) + super()._end(reason, told)

    def _text_choice(self, text: str) -> JsonObject:
        return {"finish_reason": None, "index": 0, "delta": {"content": text}}

    def _last_choice(self, reason: str) -> JsonObject:
        return {"finish_reason": reason, "index": 0, "delta": {}}


class NativeToCompletionsRewriter(_NativeToChunkRewriter):
    """A completion's stream: llama.cpp's own takes and tells ids."""

    def _text_choice(self, text: str) -> JsonObject:
        return {"text": text, "index": 0, "logprobs": None, "finish_reason": None}

    def _last_choice(self, reason: str) -> JsonObject:
        return {"text": "", "index": 0, "logprobs": None, "finish_reason": reason}


class NativeToMessagesRewriter(EventRewriter):
    """Anthropic's stream. `closing`: what ends the thought that is under way."""

    def __init__(
        self,
        transcript: Transcript,
        splice_point: SplicePoint,
        end_mark: ReasoningEndMark | None = None,
    ) -> None:
        super().__init__(transcript, splice_point)
        self._parting = ReasoningSplitter(end_mark)
        self._open = dict(transcript.open_blocks)
        self._next = (
            transcript.block_index + 1 if transcript.open_blocks or transcript.token_count else 0
        )

    def rewrite(self, value: JsonObject) -> bytes:  # noqa: D102 - the base's
        thought, answer = self._parting.feed(self._new(value.get("content")))
        if not value.get("stop"):
            return self._more("thinking", thought) + self._more("text", answer)
        self._check_end()
        thought += self._parting.flush()
        events = self._more("thinking", thought) + self._more("text", answer)
        stop = "max_tokens" if value.get("stop_type") == "limit" else "end_turn"
        tokens = self._seam.prefix_tokens + as_count(value.get("tokens_predicted"))
        events += close_blocks(self._open)
        events += message_delta(stop, value.get("stopping_word") or None, tokens)
        return events + named_event({"type": "message_stop"})

    def _more(self, kind: str, text: str) -> bytes:
        """More of the newest block, where that is of this kind, or of a new one."""
        if not text:
            return b""
        index, begun = self._next - 1, b""
        if self._open.get(index) != kind:
            index, self._next = self._next, self._next + 1
            self._open[index] = kind
            block = {"type": kind, kind: ""}
            begun = named_event(
                {"type": "content_block_start", "index": index, "content_block": block}
            )
        return begun + block_delta(index, kind, text)
