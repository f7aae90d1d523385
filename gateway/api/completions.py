"""OpenAI's completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec

from gateway.api.base import (
    Answer,
    RawFields,
    ResponseMerger,
    decoded_field,
    read_fields,
    read_items,
)
from gateway.api.chat import (
    IDENTITY_FIELDS,
    AnswerParts,
    ChoicesApi,
    ChunkRewriter,
    NativeToChunkRewriter,
    read_chunk,
    take_logprobs,
)
from gateway.api.json_values import InvalidJson, JsonObject, as_raw, parse_object
from gateway.api.resuming import wants_usage
from gateway.api.transcript import Transcript


def read_completion(transcript: Transcript, value: JsonObject) -> None:
    """Add a chunk to the transcript."""
    for choice in read_chunk(transcript, value):
        transcript.add_content(choice.get("text"))


class CompletionsRewriter(ChunkRewriter):
    """A completion's stream, continued by a completion."""

    def _new_choice(self, choice: JsonObject) -> JsonObject | None:
        text = self._new_text(choice.get("text"))
        if not text and not choice.get("finish_reason"):
            return None
        return choice | {"text": text}

    @staticmethod
    def _choice(
        kind: str,  # noqa: ARG004 - all its text is of one kind
        text: str,
        reason: str | None = None,
    ) -> JsonObject:
        return {"text": text, "index": 0, "logprobs": None, "finish_reason": reason}


class NativeToCompletionsRewriter(NativeToChunkRewriter, CompletionsRewriter):
    """A completion's stream, continued by `/completion`, which takes and reports token ids."""

    content_kind = "text"


class CompletionsMerger(ResponseMerger):
    """Merges choices into one object."""

    def __init__(self, request_fields: Mapping[str, msgspec.Raw], answers_per_prompt: int) -> None:
        super().__init__(request_fields, answers_per_prompt)
        self._shared: RawFields = {}
        """Fields of the first prompt's response, or of the stream's first event."""
        self._shared_index: int | None = None
        self._usage: JsonObject = {}

    def merged_response(self) -> bytes:
        fields = dict(self._shared)
        if self._usage:
            fields["usage"] = as_raw(self._usage)
        start = msgspec.json.encode(fields)[:-1] + (b"," if fields else b"")
        return b"".join([start, b'"choices":', *self._all_items(), b"}"])

    def stream_end(self) -> bytes:
        end = ChoicesApi.stream_end
        options = decoded_field(self._request_fields, "stream_options")
        if not (self._usage and wants_usage({"stream_options": options})):
            return end
        fields = self._identity() | {
            "object": msgspec.Raw(b'"text_completion"'),
            "choices": msgspec.Raw(b"[]"),
            "usage": as_raw(self._usage),
        }
        return b"data: " + msgspec.json.encode(fields) + b"\n\n" + end

    def _identity(self) -> RawFields:
        return {name: self._shared[name] for name in IDENTITY_FIELDS if name in self._shared}

    def _items(self, index: int, response: bytes) -> bytes:
        fields = read_fields(response)
        choices = read_items(fields.pop("choices", b"[]"))
        self._add_usage(fields)
        if self._shared_index is None or index < self._shared_index:
            self._shared, self._shared_index = fields, index
        return b",".join(map(msgspec.json.encode, self._renumber(index, choices)))

    def _event(self, index: int, data: bytes) -> bytes:
        fields = read_fields(data)
        choices = read_items(fields.get("choices", b"[]"))
        self._add_usage(fields)
        if not choices:
            return b""
        self._shared = self._shared or fields
        fields |= self._identity()
        fields["choices"] = as_raw(self._renumber(index, choices))
        return b"data: " + msgspec.json.encode(fields) + b"\n\n"

    def _add_usage(self, fields: RawFields) -> None:
        usage = fields.pop("usage", None)
        if usage is not None:
            try:
                _add_numbers(self._usage, parse_object(bytes(usage)))
            except InvalidJson:
                return  # `null`, as in all of OpenAI's chunks but the last


def _add_numbers(total: JsonObject, more: Mapping[str, Any]) -> None:
    """Sum the numbers of `usage`, those of its details too."""
    for name, value in more.items():
        if isinstance(value, Mapping):
            inner = total.setdefault(name, {})
            if isinstance(inner, dict):
                _add_numbers(inner, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            before = total.get(name, 0)
            total[name] = before + value if isinstance(before, int) else value
        else:
            total.setdefault(name, value)


class _Text(msgspec.Struct):
    text: str


class _CompletionsAnswer(Answer, kw_only=True):
    choices: Annotated[list[_Text], msgspec.Meta(min_length=1)]


class CompletionsApi(ChoicesApi):
    """`/v1/completions`: text in each event, `[DONE]`."""

    name = "completions"
    prompt_field = "prompt"
    answer = msgspec.json.Decoder(_CompletionsAnswer)
    response_object = chunk_object = "text_completion"
    _END: ClassVar[JsonObject] = {"text": "", "logprobs": None}
    merger = CompletionsMerger
    transcript_reader = staticmethod(read_completion)
    event_rewriter = CompletionsRewriter
    native_event_rewriter = NativeToCompletionsRewriter
    logprobs_fields: ClassVar[JsonObject] = {"logprobs": 1}

    def _as_part(self, choice: RawFields) -> JsonObject:
        return {**choice}

    def _choice_has_content(self, choice: JsonObject) -> bool:
        return bool(choice.get("text"))

    def _whole_choice(self, index: int, answer: AnswerParts) -> JsonObject:
        return {
            "text": answer.text,
            "index": index,
            "logprobs": answer.logprobs,
            "finish_reason": answer.finish_reason,
        }

    def take_token_ids(self, value: JsonObject) -> list[int]:
        ids = take_logprobs(value)
        for choice in value["choices"]:
            choice["logprobs"] = None  # the field stays
        return ids


COMPLETIONS = CompletionsApi()
