"""What OpenAI's chats and completions share: responses and chunks of `choices`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from gateway.proxy.api.base import Api, AssemblyError, read_events
from gateway.proxy.api.resuming import EventRewriter, as_count, data_event
from gateway.proxy.json_values import JsonObject
from gateway.proxy.splice import SplicePoint
from gateway.proxy.transcript import Transcript

# llama.cpp's order: JSON has none, but people who read a response do.
_FIELD_ORDER = (
    "choices",
    "created",
    "model",
    "system_fingerprint",
    "object",
    "usage",
    "id",
    "timings",
)

IDENTITY_FIELDS = ("id", "created", "model", "system_fingerprint")
"""Fields that all chunks of one response repeat."""


class ChoicesApi(Api):
    """An API whose events are chunks of choices, up to `[DONE]`."""

    max_tokens_fields: ClassVar[tuple[str, ...]] = ("max_tokens",)
    refusal_is_general = True
    stream_end = b"data: [DONE]\n\n"
    progress_fields: ClassVar[JsonObject] = {"return_progress": True}
    streaming_fields: ClassVar[JsonObject] = {
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    response_object: ClassVar[str]
    """The `object` of a plain response."""

    def has_content(self, value: JsonObject) -> bool:
        choices = value.get("choices")
        if not isinstance(choices, list) or not choices:
            return bool(value.get("usage"))
        return any(
            not isinstance(choice, dict)
            or bool(choice.get("finish_reason"))
            or self._choice_has_content(choice)
            for choice in choices
        )

    def has_finish_reason(self, tail: bytes) -> bool:
        try:
            return any(
                isinstance(choice, dict) and bool(choice.get("finish_reason"))
                for event in read_events(tail)
                for choice in event.get("choices") or ()
            )
        except (AssemblyError, TypeError):
            return False

    def _choice_has_content(self, choice: JsonObject) -> bool:
        """Whether a chunk's choice without a finish reason has content."""
        raise NotImplementedError

    def assemble(self, events: Iterable[JsonObject], request_fields: JsonObject) -> JsonObject:
        found: JsonObject = {}
        parts: dict[int, list[JsonObject]] = {}
        for event in events:
            for choice in event.get("choices") or ():
                parts.setdefault(as_index(choice.get("index")), []).append(choice)
            found |= event
        if not parts:
            raise AssemblyError("the node's stream has no answer")
        if not found.get("usage") and (usage := _usage_from_timings(found.get("timings"))):
            found["usage"] = usage
        found["object"] = self.response_object
        found["choices"] = [self._assemble_choice(index, parts[index]) for index in sorted(parts)]
        ordered = {name: found.pop(name) for name in _FIELD_ORDER if name in found}
        return ordered | found

    def _assemble_choice(self, index: int, parts: list[JsonObject]) -> JsonObject:
        """The plain response's choice made of the chunks' choices. Raises: AssemblyError."""
        raise NotImplementedError


def as_index(value: object) -> int:
    """An index; 0: it is none."""
    return value if isinstance(value, int) else 0


def _usage_from_timings(timings: object) -> JsonObject | None:
    """`usage` made of the timings of a server whose streams lack it, as older builds."""
    reported = timings if isinstance(timings, dict) else {}
    figures = [reported.get(name) for name in ("prompt_n", "cache_n", "predicted_n")]
    fresh, cached, written = (n if isinstance(n, int) and n > 0 else 0 for n in figures)
    if not written:
        return None
    prompt = fresh + cached
    return {"completion_tokens": written, "prompt_tokens": prompt, "total_tokens": prompt + written}


def assembled_finish_reason(parts: list[JsonObject]) -> str:
    """The finish reason of a choice's parts. Raises: AssemblyError, if they have none."""
    for part in reversed(parts):
        if part.get("finish_reason"):
            return str(part["finish_reason"])
    raise AssemblyError("an answer in the node's stream has no end")


def assembled_logprobs(parts: list[JsonObject]) -> JsonObject | None:
    """The logprobs of a choice's parts; None: they have none."""
    tokens: list[Any] = []
    found = False
    for part in parts:
        logprobs = part.get("logprobs")
        if logprobs is not None:
            found = True
            tokens += logprobs.get("content") or ()
    return {"content": tokens} if found else None


def read_chunk(transcript: Transcript, value: JsonObject) -> list[JsonObject]:
    """Add to the transcript all but the text, and return the choices."""
    if not transcript.first_event:
        transcript.begin(value)
    if value.get("usage"):
        transcript.mark_usage_sent()
    choices: list[JsonObject] = value.get("choices") or []
    for choice in choices:
        if choice.get("index"):
            transcript.mark_unresumable("the request asks for several answers")
        if choice.get("logprobs") is not None:
            transcript.mark_unresumable("the client asked for probabilities")
        if reason := choice.get("finish_reason"):
            transcript.finish(reason)
    return choices


def take_logprobs(value: JsonObject) -> list[int]:
    """Remove the logprobs of a chunk's choices, and return their token ids."""
    ids: list[int] = []
    for choice in value["choices"]:
        logprobs = choice.pop("logprobs", None)
        if logprobs is not None:
            ids += [token["id"] for token in logprobs["content"]]
    return ids


def wants_usage(body: JsonObject) -> bool:
    """Whether the client asks for `usage` in the stream."""
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


class ChunkRewriter(EventRewriter):
    """Rewrites chunks as chunks."""

    def rewrite(self, value: JsonObject) -> bytes:
        choices = []
        for choice in value.get("choices") or ():
            new = self._new_choice(choice)
            if choice.get("finish_reason"):
                self._check_end()
            if new is not None:
                choices.append(new)
        if not choices and not value.get("usage"):
            return b""
        first = self._transcript.first_event
        identity = {name: first[name] for name in IDENTITY_FIELDS if name in first}
        chunk = value | identity | {"choices": choices}
        if value.get("usage"):
            chunk["usage"] = self._whole_usage(value["usage"])
        return data_event(chunk)

    def final_events(self, reason: str, *, usage: bool) -> bytes:
        transcript, splice_point = self._transcript, self._splice_point
        chunk = transcript.first_event | {"choices": []}
        chunk = {name: value for name, value in chunk.items() if name not in {"usage", "timings"}}
        end = b""
        if transcript.finish_reason is None:
            end = data_event(chunk | {"choices": [self._last_choice(reason)]})
        if usage and not transcript.usage_sent:
            whole = {
                "completion_tokens": splice_point.sent_tokens,
                "prompt_tokens": splice_point.prompt_tokens,
                "total_tokens": splice_point.prompt_tokens + splice_point.sent_tokens,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
            end += data_event(chunk | {"usage": whole})
        return end

    def _new_choice(self, choice: JsonObject) -> JsonObject | None:
        """A choice without the overlap; None: nothing is left of it."""
        raise NotImplementedError

    def _last_choice(self, reason: str) -> JsonObject:
        """The choice that ends the response."""
        raise NotImplementedError

    def _whole_usage(self, reported: JsonObject) -> JsonObject:
        """The continuation's usage as that of the whole response to the client's own prompt."""
        splice_point = self._splice_point
        prompt = splice_point.prompt_tokens
        completion = splice_point.prefix_tokens + as_count(reported.get("completion_tokens"))
        usage = reported | {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        details = reported.get("prompt_tokens_details")
        if isinstance(details, dict):
            cached = min(as_count(details.get("cached_tokens")), prompt)
            usage["prompt_tokens_details"] = details | {"cached_tokens": cached}
        return usage


class NativeToChunkRewriter(ChunkRewriter):
    """Rewrites the events of llama.cpp's `/completion` as chunks.

    `usage`: the client asks for it.
    """

    def __init__(
        self, transcript: Transcript, splice_point: SplicePoint, *, usage: bool = False
    ) -> None:
        super().__init__(transcript, splice_point)
        first = transcript.first_event
        names = (*IDENTITY_FIELDS, "object")
        self._chunk = {name: first[name] for name in names if name in first} | {"choices": []}
        self._usage = usage

    def rewrite(self, value: JsonObject) -> bytes:
        text = self._new_text(value.get("content"))
        events = self._text_events(text) if text else b""
        if value.get("stop"):
            self._check_end()
            reason = "length" if value.get("stop_type") == "limit" else "stop"
            events += self._end_events(reason, value)
        return events

    def _text_events(self, text: str) -> bytes:
        return self._choice_event(self._text_choice(text))

    def _choice_event(self, choice: JsonObject) -> bytes:
        return data_event(self._chunk | {"choices": [choice]})

    def _text_choice(self, text: str) -> JsonObject:
        """A choice that adds this text."""
        raise NotImplementedError

    def _end_events(self, reason: str, value: JsonObject) -> bytes:
        last = self._chunk | {"choices": [self._last_choice(reason)]}
        timings = value.get("timings")
        if not self._usage:
            return data_event(last | {"timings": timings})
        usage = self._whole_usage({"completion_tokens": value.get("tokens_predicted")})
        return data_event(last) + data_event(self._chunk | {"usage": usage, "timings": timings})
