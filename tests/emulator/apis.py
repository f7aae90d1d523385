"""The answers in the form of each API, with the fields of a real server (b11549)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal
from zlib import crc32

import msgspec

from tests.emulator.language_model import count_tokens, tokenize
from tests.emulator.request_body import ApiName, GenerationRequest

DONE = b"data: [DONE]\n\n"
SAMPLING: dict[str, Any] = {
    "seed": 4294967295,
    "temperature": 0.800000011920929,
    "top_k": 40,
    "top_p": 0.949999988079071,
    "stop": [],
    "max_tokens": -1,
    "n_predict": -1,
    "ignore_eos": False,
    "stream": False,
    "grammar": "",
    "samplers": ["penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
}  # some of the four dozen sampling settings of `/props` and of the end of a native answer

to_json = msgspec.json.encode


def data_event(value: object) -> bytes:
    return b"data: %b\n\n" % to_json(value)


def named_event(kind: str, **values: Any) -> bytes:
    """An event whose name is its type."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json({"type": kind, **values}))


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

    def progress(self, processed: int, seconds: float) -> dict[str, Any]:
        counts = {"total": self.prompt_tokens, "cache": self.cached, "processed": processed}
        return {"prompt_progress": {**counts, "time_ms": int(seconds * 1000)}}

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
        self.id = state.new_id("chatcmpl-")  # whatever the API
        # In the order of the real server, as is all that comes in streams.
        fixed = {"created": state.created, "model": state.model}
        self.about = {**fixed, "system_fingerprint": "b0-unknown"}

    def head(self) -> list[bytes]:
        """Events that come with the head, before the prefill."""
        return []

    def progress(self, answer: Answer, processed: int, seconds: float) -> list[bytes]:
        return []

    def start(self, answer: Answer) -> list[bytes]:
        """Events that go out in one chunk with the first delta."""
        return []

    @abstractmethod
    def delta(self, answer: Answer, word: str) -> bytes: ...

    @abstractmethod
    def finish(self, answer: Answer) -> list[bytes]: ...

    def end(self) -> list[bytes]:
        return []

    @abstractmethod
    def plain(self) -> Any:
        """The body of a plain response."""

    def timed(self, answer: Answer) -> dict[str, Any]:
        """The timings of a delta, if the request asks for them."""
        asked = self.state.request.asks("timings_per_token")
        return {"timings": answer.timings()} if asked else {}

    def null_for_many_prompts(self) -> list[bytes]:
        """The `null` event that the server sends first when it has several prompts."""
        prompts = {answer.prompt for answer in self.state.answers}
        return [b"data: null\n\n"] if len(prompts) > 1 else []


class Chat(Api):
    """`/v1/chat/completions`."""

    def __init__(self, state: ResponseState) -> None:
        super().__init__(state)
        first = {"created": state.created, "id": self.id}
        self.common = {**first, **self.about, "object": "chat.completion.chunk"}
        # There are many deltas: all but the word is encoded once.
        self._tail = b"}}]," + to_json(self.common)[1:] + b"\n\n"

    def _chunk(
        self, answer: Answer, delta: dict[str, Any], finish: str | None = None, **more: Any
    ) -> dict[str, Any]:
        choice = {"finish_reason": finish, "index": answer.index, "delta": delta}
        return {"choices": [choice], **self.common, **more}

    def progress(self, answer: Answer, processed: int, seconds: float) -> list[bytes]:
        role = {"role": "assistant", "content": None}
        return [data_event(self._chunk(answer, role, **answer.progress(processed, seconds)))]

    def start(self, answer: Answer) -> list[bytes]:
        return [data_event(self._chunk(answer, {"role": "assistant", "content": None}))]

    def delta(self, answer: Answer, word: str) -> bytes:
        request = self.state.request
        logprobs = request.body.get("logprobs")
        if logprobs or request.asks("timings_per_token"):
            chunk = self._chunk(answer, {"content": word}, **self.timed(answer))
            if logprobs:
                token = {"id": (tokenize(word) or [0])[0], "token": word, "logprob": -0.5}
                token["bytes"] = list(word.encode())
                told = {"content": [token | {"top_logprobs": [token]}]}
                chunk["choices"][0]["logprobs"] = told
            return data_event(chunk)
        begin = b'data: {"choices":[{"finish_reason":null,"index":%d,"delta":{"content":'
        return begin % answer.index + to_json(word) + self._tail

    def finish(self, answer: Answer) -> list[bytes]:
        more = {} if self.state.request.include_usage else {"timings": answer.timings()}
        return [data_event(self._chunk(answer, {}, answer.finish_reason(), **more))]

    def end(self) -> list[bytes]:
        if not self.state.request.include_usage:
            return [DONE]
        timings = self.state.answers[0].timings()
        usage = {"choices": [], **self.common, "usage": self.state.usage(), "timings": timings}
        return [data_event(usage), DONE]

    def plain(self) -> dict[str, Any]:
        choices = [
            {
                "finish_reason": answer.finish_reason(),
                "index": answer.index,
                "message": {"role": "assistant", "content": answer.text},
            }
            for answer in self.state.answers
        ]
        timings = self.state.answers[0].timings()
        last = {"usage": self.state.usage(), "id": self.id, "timings": timings}
        return {"choices": choices, **self.about, "object": "chat.completion", **last}


class Completions(Api):
    """`/v1/completions`."""

    def __init__(self, state: ResponseState) -> None:
        super().__init__(state)
        self.common = {**self.about, "object": "text_completion"}

    def _choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        return {"text": text, "index": index, "logprobs": None, "finish_reason": finish}

    def _done(self, choices: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        last = {"usage": self.state.usage(), "id": self.id, "timings": answer.timings()}
        return {"choices": choices, **self.common, **last}

    def head(self) -> list[bytes]:
        return self.null_for_many_prompts()

    def _delta(self, answer: Answer, text: str, **more: Any) -> bytes:
        choices = [self._choice(answer.index, text, None)]
        last = {"id": self.id, **more, **self.timed(answer)}
        return data_event({"choices": choices, **self.common, **last})

    def progress(self, answer: Answer, processed: int, seconds: float) -> list[bytes]:
        return [self._delta(answer, "", **answer.progress(processed, seconds))]

    def delta(self, answer: Answer, word: str) -> bytes:
        return self._delta(answer, word)

    def finish(self, answer: Answer) -> list[bytes]:
        choice = self._choice(answer.index, "", answer.finish_reason())
        return [data_event(self._done([choice], answer))]

    def end(self) -> list[bytes]:
        return [DONE]

    def plain(self) -> dict[str, Any]:
        choices = [self._choice(a.index, a.text, a.finish_reason()) for a in self.state.answers]
        return self._done(choices, self.state.answers[0])


class Messages(Api):
    """`/v1/messages`, Anthropic's."""

    def _message(
        self, answer: Answer, content: list[Any], reason: str | None, tokens: int
    ) -> dict[str, Any]:
        read = answer.prompt_tokens - answer.cached
        usage = {"cache_read_input_tokens": answer.cached, "input_tokens": read}
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.state.model,
            "stop_reason": reason,
            "stop_sequence": answer.stopping_word or None,
            "usage": {**usage, "output_tokens": tokens},
        }

    def _stop_reason(self, answer: Answer) -> str:
        return "max_tokens" if answer.finish == "length" else "end_turn"

    def start(self, answer: Answer) -> list[bytes]:
        block = {"type": "text", "text": ""}
        return [
            named_event("message_start", message=self._message(answer, [], None, 0)),
            named_event("content_block_start", index=0, content_block=block),
        ]

    def delta(self, answer: Answer, word: str) -> bytes:
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
            b'"delta":{"type":"text_delta","text":%b}}\n\n' % to_json(word)
        )

    def finish(self, answer: Answer) -> list[bytes]:
        reason, sequence = self._stop_reason(answer), answer.stopping_word or None
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [
            named_event("content_block_stop", index=0),
            named_event("message_delta", delta=delta, usage={"output_tokens": answer.tokens}),
            named_event("message_stop"),
        ]

    def plain(self) -> dict[str, Any]:
        answer = self.state.answers[0]
        content = [{"type": "text", "text": answer.text}]
        return self._message(answer, content, self._stop_reason(answer), answer.tokens)


class Native(Api):
    """`/completion`. It has no `[DONE]`: the event with `"stop": true` is the last."""

    def head(self) -> list[bytes]:
        return self.null_for_many_prompts()

    def progress(self, answer: Answer, processed: int, seconds: float) -> list[bytes]:
        return [self._delta(answer, "", [0], **answer.progress(processed, seconds))]

    def delta(self, answer: Answer, word: str) -> bytes:
        return self._delta(answer, word, tokenize(word))

    def _delta(self, answer: Answer, text: str, tokens: list[int], **more: Any) -> bytes:
        value = {
            "index": answer.index,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": answer.tokens,
            "tokens_evaluated": answer.prompt_tokens,
        }
        return data_event({**value, **self.timed(answer), **more})

    def finish(self, answer: Answer) -> list[bytes]:
        return [data_event(self._done(answer, ""))]

    def plain(self) -> Any:
        answers = [self._done(answer, answer.text) for answer in self.state.answers]
        return answers[0] if len(answers) == 1 else answers

    def _done(self, answer: Answer, content: str) -> dict[str, Any]:
        request = self.state.request
        limit = -1 if request.max_tokens is None else request.max_tokens
        settings = {"max_tokens": limit, "n_predict": limit, "stream": request.stream}
        whole: dict[str, Any] = {
            "index": answer.index,
            "content": content,
            "tokens": [],
            "id_slot": answer.slot,
            "stop": True,
            "model": self.state.model,
            "tokens_predicted": answer.tokens,
            "tokens_evaluated": answer.prompt_tokens,
            "generation_settings": SAMPLING | settings,
            "prompt": "<s> " + answer.prompt,
            "has_new_line": "\n" in answer.text,
            "truncated": False,
            "stop_type": {"stop": "eos", "length": "limit", "word": "word"}[answer.finish],
            "stopping_word": answer.stopping_word,
            "tokens_cached": count_tokens(answer.prompt) + answer.tokens - 1,
            "timings": answer.timings(),
        }
        if request.body.get("n_probs"):
            ids = tokenize(answer.text)[: answer.tokens]
            whole["completion_probabilities"] = [{"id": one, "logprob": -0.5} for one in ids]
        paths = request.body.get("response_fields")
        return _selected(whole, paths) if paths else whole


def _selected(whole: dict[str, Any], paths: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = whole
        *parents, last = path.split("/")
        for name in parents:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, dict) and last in value:
            found[path] = value[last]
    return found


class Responses(Api):
    """`/v1/responses`."""

    def __init__(self, state: ResponseState) -> None:
        super().__init__(state)
        self._about = {"id": state.new_id("resp_"), "object": "response"}
        self._item = state.new_id("msg_")
        self._created = False

    def _part(self, answer: Answer) -> dict[str, Any]:
        return {"type": "output_text", "annotations": [], "logprobs": [], "text": answer.text}

    def _message(self, status: str, *content: Any) -> dict[str, Any]:
        about = {"type": "message", "status": status, "id": self._item, "role": "assistant"}
        return about | {"content": list(content)}

    def _response(self, answer: Answer) -> dict[str, Any]:
        counts = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.tokens}
        usage = {
            **counts,
            "total_tokens": sum(counts.values()),
            "input_tokens_details": {"cached_tokens": answer.cached},
        }
        return {
            **self._about,
            "created_at": self.state.created,
            "status": "completed",
            "model": self.state.model,
            "output": [self._message("completed", self._part(answer))],
            "usage": usage,
        }

    def _begin(self, **progress: Any) -> list[bytes]:
        """That it was created, once, and is in progress."""
        response = {**self._about, "status": "in_progress"}
        begun, self._created = self._created, True
        created = [] if begun else [named_event("response.created", response=response)]
        if begun and not progress:
            return []
        return [*created, named_event("response.in_progress", response=response, **progress)]

    def progress(self, answer: Answer, processed: int, seconds: float) -> list[bytes]:
        return self._begin(**answer.progress(processed, seconds))

    def start(self, answer: Answer) -> list[bytes]:
        part = {"type": "output_text", "text": ""}
        return [
            *self._begin(),
            named_event("response.output_item.added", item=self._message("in_progress")),
            named_event("response.content_part.added", item_id=self._item, part=part),
        ]

    def delta(self, answer: Answer, word: str) -> bytes:
        return named_event("response.output_text.delta", item_id=self._item, delta=word)

    def finish(self, answer: Answer) -> list[bytes]:
        item, part = self._item, self._part(answer)
        response, timings = self._response(answer), answer.timings()
        return [
            named_event("response.output_text.done", item_id=item, text=answer.text),
            named_event("response.content_part.done", item_id=item, part=part),
            named_event("response.output_item.done", item=self._message("completed", part)),
            named_event("response.completed", response=response, timings=timings),
        ]

    def plain(self) -> dict[str, Any]:
        return self._response(self.state.answers[0]) | {"completed_at": self.state.created}


APIS: dict[ApiName, type[Api]] = {
    "chat": Chat,
    "completions": Completions,
    "messages": Messages,
    "native": Native,
    "responses": Responses,
}
