"""The next node's events made those of the first stream: one id, one role, usage that adds up."""

from __future__ import annotations

import msgspec

from gateway.relay.continuation.said import Said, Value
from gateway.relay.continuation.seam import Again, Mismatch, Seam

_OF_THE_ANSWER = ("id", "created", "model", "system_fingerprint")
"""What every chunk of one answer repeats."""


class Joiner:
    """Takes the continuation's events one by one. A new one for each continuation."""

    def __init__(self, said: Said, seam: Seam) -> None:
        self._said = said
        self._seam = seam
        self._again = Again(seam.again)

    @property
    def caught_up(self) -> bool:
        """Whether all that was to be written again has come."""
        return self._again.over

    def feed(self, value: Value) -> bytes:
        """What of an event goes to the client, possibly nothing. Raises: Mismatch."""
        raise NotImplementedError

    def ending(self, reason: str, *, usage: bool) -> bytes:
        """The end of an answer that lacks nothing else, without its `[DONE]`."""
        raise NotImplementedError

    def _new(self, text: object) -> str:
        """What of a token's text the client has not had yet."""
        if not isinstance(text, str) or not text:
            return ""
        return self._again.feed(text)

    def _check_end(self) -> None:
        if not self._again.over:
            raise Mismatch

    def _usage(self, told: Value) -> Value:
        """OpenAI's usage of the whole answer: the prompt is the client's own."""
        seam = self._seam
        completion = seam.kept_tokens + _number(told.get("completion_tokens"))
        usage = told | {
            "prompt_tokens": seam.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": seam.prompt_tokens + completion,
        }
        details = told.get("prompt_tokens_details")
        if isinstance(details, dict):
            cached = min(_number(details.get("cached_tokens")), seam.prompt_tokens)
            usage["prompt_tokens_details"] = details | {"cached_tokens": cached}
        return usage

    def _whole_usage(self) -> Value:
        """The same where the next node wrote nothing."""
        seam = self._seam
        return {
            "completion_tokens": seam.said_tokens,
            "prompt_tokens": seam.prompt_tokens,
            "total_tokens": seam.prompt_tokens + seam.said_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


class _Chunks(Joiner):
    """OpenAI's chunks."""

    def feed(self, value: Value) -> bytes:
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
        return _data(joined)

    def ending(self, reason: str, *, usage: bool) -> bytes:
        head = self._said.head | {"choices": []}
        head = {name: value for name, value in head.items() if name not in {"usage", "timings"}}
        end = b""
        if self._said.reason is None:
            end = _data(head | {"choices": [self._last_choice(reason)]})
        if usage and not self._said.counted:
            end += _data(head | {"usage": self._whole_usage()})
        return end

    def _identity(self) -> Value:
        head = self._said.head
        return {name: head[name] for name in _OF_THE_ANSWER if name in head}

    def _choice(self, choice: Value) -> Value | None:
        """What of a choice is sent on; None: nothing of it is new."""
        raise NotImplementedError

    def _last_choice(self, reason: str) -> Value:
        raise NotImplementedError


class Chat(_Chunks):
    """A chat's stream, carried on by a chat with a message begun."""

    def _choice(self, choice: Value) -> Value | None:
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

    def _last_choice(self, reason: str) -> Value:
        return {"finish_reason": reason, "index": 0, "delta": {}}


class Completions(_Chunks):
    """A completion's stream, carried on by a completion."""

    def _choice(self, choice: Value) -> Value | None:
        text = self._new(choice.get("text"))
        if not text and not choice.get("finish_reason"):
            return None
        return choice | {"text": text}

    def _last_choice(self, reason: str) -> Value:
        return {"text": "", "index": 0, "logprobs": None, "finish_reason": reason}


class Native(Joiner):
    """llama.cpp's own stream, carried on by its own completion."""

    def feed(self, value: Value) -> bytes:  # noqa: D102 - the base's
        text = self._new(value.get("content"))
        if value.get("stop"):
            self._check_end()
        elif not text:
            return b""
        seam = self._seam
        joined = value | {
            "content": text,
            "tokens_predicted": seam.kept_tokens + _number(value.get("tokens_predicted")),
            "tokens_evaluated": seam.prompt_tokens,
        }
        prompt = value.get("prompt")
        if isinstance(prompt, str):
            joined["prompt"] = prompt.removesuffix(seam.kept)
        return _data(joined)

    def ending(self, reason: str, *, usage: bool) -> bytes:  # noqa: D102 - the base's
        seam = self._seam
        stop = "limit" if reason == "length" else "eos"
        return _data(
            {
                "index": 0,
                "content": "",
                "tokens": [],
                "stop": True,
                "stop_type": stop,
                "tokens_predicted": seam.said_tokens,
                "tokens_evaluated": seam.prompt_tokens,
            }
        )


class Messages(Joiner):
    """Anthropic's stream, carried on by a message begun."""

    def __init__(self, said: Said, seam: Seam) -> None:
        super().__init__(said, seam)
        self._shift = said.block if said.opened or not said.tokens else said.block + 1
        self._skip = said.opened
        """Whether the next block goes on with the one that is open."""

    def feed(self, value: Value) -> bytes:  # noqa: D102 - the base's
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
            output = self._seam.kept_tokens + _number(usage.get("output_tokens"))
            joined["usage"] = usage | {"output_tokens": output}
        return _event(joined)

    def ending(self, reason: str, *, usage: bool) -> bytes:  # noqa: D102 - the base's
        end = b""
        if self._said.opened:
            end += _event({"type": "content_block_stop", "index": self._said.block})
        if self._said.reason is None:
            stop = "max_tokens" if reason == "length" else "end_turn"
            end += _event(
                {
                    "type": "message_delta",
                    "delta": {"stop_reason": stop, "stop_sequence": None},
                    "usage": {"output_tokens": self._seam.said_tokens},
                }
            )
        return end + _event({"type": "message_stop"})


class _FromNative(_Chunks):
    """Chunks made of the events of llama.cpp's own completion."""

    def __init__(self, said: Said, seam: Seam) -> None:
        super().__init__(said, seam)
        head = said.head
        self._head = {name: head[name] for name in (*_OF_THE_ANSWER, "object") if name in head}
        self._shape = {**self._head, "choices": []}
        self.usage = False
        """Whether the client asked for `usage`."""

    def feed(self, value: Value) -> bytes:
        new = self._new(value.get("content"))
        events = self._text(new) if new else b""
        if value.get("stop"):
            self._check_end()
            reason = "length" if value.get("stop_type") == "limit" else "stop"
            events += self._end(reason, value)
        return events

    def _text(self, text: str) -> bytes:
        return _data(self._shape | {"choices": [self._text_choice(text)]})

    def _text_choice(self, text: str) -> Value:
        raise NotImplementedError

    def _end(self, reason: str, told: Value) -> bytes:
        last = self._shape | {"choices": [self._last_choice(reason)]}
        if not self.usage:
            return _data(last | {"timings": told.get("timings")})
        counted = self._usage({"completion_tokens": told.get("tokens_predicted")})
        return _data(last) + _data(self._shape | {"usage": counted, "timings": told.get("timings")})


class ChatFromNative(_FromNative):
    """A chat's stream, carried on by a completion of the rendered prompt.

    `closing`: what ends the reasoning that is under way; None: it is the answer's text.
    """

    def __init__(self, said: Said, seam: Seam, closing: str | None = None) -> None:
        super().__init__(said, seam)
        self._closing = closing
        self._held = ""

    def _text(self, text: str) -> bytes:
        if self._closing is None:
            return super()._text(text)
        self._held += text
        thought, closed, answer = self._held.partition(self._closing)
        if not closed:
            # What may be the beginning of the closing mark waits.
            keep = _overlap(thought, self._closing)
            thought, self._held = thought[: len(thought) - keep], thought[len(thought) - keep :]
            return self._thought(thought)
        self._closing, self._held = None, ""
        answer = answer.lstrip()
        return self._thought(thought.rstrip()) + (super()._text(answer) if answer else b"")

    def _thought(self, text: str) -> bytes:
        if not text:
            return b""
        choice = {"finish_reason": None, "index": 0, "delta": {"reasoning_content": text}}
        return _data(self._shape | {"choices": [choice]})

    def _end(self, reason: str, told: Value) -> bytes:
        return self._thought(self._held) + super()._end(reason, told)

    def _text_choice(self, text: str) -> Value:
        return {"finish_reason": None, "index": 0, "delta": {"content": text}}

    def _last_choice(self, reason: str) -> Value:
        return {"finish_reason": reason, "index": 0, "delta": {}}


class CompletionsFromNative(_FromNative):
    """A completion's stream, carried on by llama.cpp's own, which takes and tells ids."""

    def _text_choice(self, text: str) -> Value:
        return {"text": text, "index": 0, "logprobs": None, "finish_reason": None}

    def _last_choice(self, reason: str) -> Value:
        return {"text": "", "index": 0, "logprobs": None, "finish_reason": reason}


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that may be the beginning of `mark`."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


JOINERS: dict[str, type[Joiner]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completions,
    "/v1/messages": Messages,
    "/completion": Native,
}
"""Of each path that can be carried on by itself, who joins its events."""


def _data(value: Value) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _event(value: Value) -> bytes:
    return b"event: " + str(value.get("type")).encode() + b"\n" + _data(value)


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
