"""The next node's events made those of the first stream: one id, one role, usage that adds up."""

from __future__ import annotations

import msgspec

from gateway.relay.continuation.said import Said
from gateway.relay.continuation.seam import Again, Mismatch, Seam
from gateway.relay.values import Value

OF_THE_ANSWER = ("id", "created", "model", "system_fingerprint")
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
        completion = seam.kept_tokens + number(told.get("completion_tokens"))
        usage = told | {
            "prompt_tokens": seam.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": seam.prompt_tokens + completion,
        }
        details = told.get("prompt_tokens_details")
        if isinstance(details, dict):
            cached = min(number(details.get("cached_tokens")), seam.prompt_tokens)
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


class Chunks(Joiner):
    """OpenAI's chunks."""

    def feed(self, value: Value) -> bytes:  # noqa: D102 - the base's
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
        return data(joined)

    def ending(self, reason: str, *, usage: bool) -> bytes:  # noqa: D102 - the base's
        head = self._said.head | {"choices": []}
        head = {name: value for name, value in head.items() if name not in {"usage", "timings"}}
        end = b""
        if self._said.reason is None:
            end = data(head | {"choices": [self._last_choice(reason)]})
        if usage and not self._said.counted:
            end += data(head | {"usage": self._whole_usage()})
        return end

    def _identity(self) -> Value:
        head = self._said.head
        return {name: head[name] for name in OF_THE_ANSWER if name in head}

    def _choice(self, choice: Value) -> Value | None:
        """What of a choice is sent on; None: nothing of it is new."""
        raise NotImplementedError

    def _last_choice(self, reason: str) -> Value:
        raise NotImplementedError


class Chat(Chunks):
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


class Completions(Chunks):
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
            "tokens_predicted": seam.kept_tokens + number(value.get("tokens_predicted")),
            "tokens_evaluated": seam.prompt_tokens,
        }
        prompt = value.get("prompt")
        if isinstance(prompt, str):
            joined["prompt"] = prompt.removesuffix(seam.kept)
        return data(joined)

    def ending(self, reason: str, *, usage: bool) -> bytes:  # noqa: D102 - the base's
        seam = self._seam
        stop = "limit" if reason == "length" else "eos"
        return data(
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
            output = self._seam.kept_tokens + number(usage.get("output_tokens"))
            joined["usage"] = usage | {"output_tokens": output}
        return event(joined)

    def ending(self, reason: str, *, usage: bool) -> bytes:  # noqa: D102 - the base's
        end = blocks_ended(self._said.open)
        if self._said.reason is None:
            stop = "max_tokens" if reason == "length" else "end_turn"
            end += message_ended(stop, None, self._seam.said_tokens)
        return end + event({"type": "message_stop"})


JOINERS: dict[str, type[Joiner]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completions,
    "/v1/messages": Messages,
    "/completion": Native,
}
"""Of each path that can be carried on by itself, who joins its events."""


def blocks_ended(blocks: dict[int, str]) -> bytes:
    """The ends of these content blocks, as llama.cpp writes them: all of them at the end."""
    end = b""
    for index, kind in sorted(blocks.items()):
        if kind == "thinking":
            end += block_delta(index, "signature", "")
        end += event({"type": "content_block_stop", "index": index})
    return end


def block_delta(index: int, kind: str, text: str) -> bytes:
    """More of a content block."""
    delta = {"type": f"{kind}_delta", kind: text}
    return event({"type": "content_block_delta", "index": index, "delta": delta})


def message_ended(stop: str, word: str | None, tokens: int) -> bytes:
    """Why a message ended, and its length."""
    delta = {"stop_reason": stop, "stop_sequence": word}
    return event({"type": "message_delta", "delta": delta, "usage": {"output_tokens": tokens}})


def data(value: Value) -> bytes:
    """An event of OpenAI's."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def event(value: Value) -> bytes:
    """An event of Anthropic's."""
    return b"event: " + str(value.get("type")).encode() + b"\n" + data(value)


def number(value: object) -> int:
    """A count; 0: it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
