"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec

from gateway.proxy.api import resuming
from gateway.proxy.api.base import Answer, AnyObject, decoded_field
from gateway.proxy.api.choices import (
    AnswerParts,
    ChoicesApi,
    ChunkRewriter,
    NativeToChunkRewriter,
    as_index,
    read_chunk,
    take_logprobs,
    wants_usage,
)
from gateway.proxy.api.merging import RawFields, read_fields, read_items
from gateway.proxy.api.resuming import EventRewriter, ReasoningEndMark, ReasoningSplitter
from gateway.proxy.json_values import JsonObject
from gateway.proxy.transcript import SplicePoint, Transcript


def read_chat(transcript: Transcript, value: JsonObject) -> None:
    """Add a chunk to the transcript."""
    for choice in read_chunk(transcript, value):
        delta = choice.get("delta") or {}
        if delta.get("tool_calls") or delta.get("function_call"):
            transcript.mark_unresumable("a tool call has begun")
        transcript.add_reasoning(delta.get("reasoning_content"))
        transcript.add_content(delta.get("content"))


class ChatRewriter(ChunkRewriter):
    """A chat's stream, continued by a chat with the assistant's message begun."""

    def _new_choice(self, choice: JsonObject) -> JsonObject | None:
        delta = {
            name: value
            for name, value in (choice.get("delta") or {}).items()
            if name != "role" and value is not None
        }
        if "content" in delta:
            delta["content"] = self._new_text(delta["content"])
            if not delta["content"]:
                del delta["content"]
        if not delta and not choice.get("finish_reason"):
            return None
        return choice | {"delta": delta}

    def _last_choice(self, reason: str) -> JsonObject:
        return {"finish_reason": reason, "index": 0, "delta": {}}


class NativeToChatRewriter(NativeToChunkRewriter):
    """A chat's stream, continued by `/completion`.

    `end_mark`: the mark that ends the reasoning under way.
    """

    def __init__(
        self,
        transcript: Transcript,
        splice_point: SplicePoint,
        end_mark: ReasoningEndMark | None = None,
        *,
        usage: bool = False,
    ) -> None:
        super().__init__(transcript, splice_point, usage=usage)
        self._splitter = ReasoningSplitter(end_mark)

    def _text_events(self, text: str) -> bytes:
        reasoning, content = self._splitter.feed(text)
        events = self._reasoning_events(reasoning)
        return events + super()._text_events(content) if content else events

    def _reasoning_events(self, text: str) -> bytes:
        if not text:
            return b""
        delta = {"reasoning_content": text}
        return self._choice_event({"finish_reason": None, "index": 0, "delta": delta})

    def _end_events(self, reason: str, value: JsonObject) -> bytes:
        return self._reasoning_events(self._splitter.flush()) + super()._end_events(reason, value)

    def _text_choice(self, text: str) -> JsonObject:
        return {"finish_reason": None, "index": 0, "delta": {"content": text}}

    def _last_choice(self, reason: str) -> JsonObject:
        return {"finish_reason": reason, "index": 0, "delta": {}}


class _Choice(msgspec.Struct):
    message: AnyObject


class _ChatAnswer(Answer, kw_only=True):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


class ChatApi(ChoicesApi):
    """`/v1/chat/completions`: a role delta, content deltas, a finish reason, `[DONE]`."""

    name = "chat"
    prompt_field = "messages"
    answer = msgspec.json.Decoder(_ChatAnswer)
    max_tokens_fields = ("max_tokens", "max_completion_tokens")
    response_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    _END: ClassVar[JsonObject] = {"delta": {}}
    assembles_several_answers = True
    transcript_reader = staticmethod(read_chat)
    event_rewriter = ChatRewriter
    is_chat = True
    logprobs_fields: ClassVar[JsonObject] = {"logprobs": True, "top_logprobs": 1}

    def _as_part(self, choice: RawFields) -> JsonObject:
        part: JsonObject = {**choice}
        delta: JsonObject = {**read_fields(part.pop("message"))}
        calls = delta.get("tool_calls", b"null")
        if bytes(calls) != b"null":
            numbered = enumerate(read_items(calls))
            delta["tool_calls"] = [{"index": number, **call} for number, call in numbered]
        return part | {"delta": delta}

    def _choice_has_content(self, choice: JsonObject) -> bool:
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return True
        return any(value for name, value in delta.items() if name != "role")

    def _whole_choice(self, index: int, answer: AnswerParts) -> JsonObject:
        message: JsonObject = {"role": answer.role, "content": answer.text}
        if reasoning := "".join(answer.reasoning):
            message["reasoning_content"] = reasoning
        if answer.calls:
            message["tool_calls"] = _whole_calls(answer.calls)
        choice: JsonObject = {
            "finish_reason": answer.finish_reason,
            "index": index,
            "message": message,
        }
        logprobs = answer.logprobs
        return choice if logprobs is None else choice | {"logprobs": logprobs}

    def take_token_ids(self, value: JsonObject) -> list[int]:
        return take_logprobs(value)

    def unresumable_reason(self, body: JsonObject, transcript: Transcript) -> str | None:
        reason = resuming.unresumable_reason(body, transcript)
        return reason or resuming.message_unresumable_reason(body)

    def chat_body(self, body: JsonObject) -> JsonObject | None:
        return body

    def continued_body(self, body: JsonObject, prefix: str, max_tokens: int | None) -> JsonObject:
        return resuming.continued_messages(body, prefix, max_tokens)

    def native_rewriter(
        self,
        body: JsonObject,
        transcript: Transcript,
        splice_point: SplicePoint,
        end_mark: ReasoningEndMark | None = None,
    ) -> EventRewriter | None:
        if body.get("tools"):
            return None
        return NativeToChatRewriter(transcript, splice_point, end_mark, usage=wants_usage(body))


def _whole_calls(parts: list[JsonObject]) -> list[JsonObject]:
    """The tool calls of these parts: of each, first its name comes, then its arguments."""
    calls: dict[int, JsonObject] = {}
    functions: dict[int, tuple[list[str], list[str]]] = {}
    for part in parts:
        index = as_index(part.get("index"))
        call = calls.setdefault(index, {"type": "function", "function": {}, "id": ""})
        for field in ("type", "id"):
            call[field] = part.get(field) or call[field]
        function = part.get("function") or {}
        names, arguments = functions.setdefault(index, ([], []))
        names.append(function.get("name") or "")
        arguments.append(function.get("arguments") or "")
    for index, (names, arguments) in functions.items():
        calls[index]["function"] = {"name": "".join(names), "arguments": "".join(arguments)}
    return [calls[index] for index in sorted(calls)]


def as_response_format(bound: JsonObject) -> JsonObject | None:
    """A chat's `response_format` for the format that another API's request asks for.

    None: it asks for plain text, or for a format that chats don't know.
    """
    kind, schema = bound.get("type"), bound.get("schema")
    if kind == "json_object":
        return {"response_format": {"type": kind}}
    if kind != "json_schema" or not isinstance(schema, dict):
        return None
    named = {name: bound[name] for name in ("name", "strict") if name in bound}
    return {"response_format": {"type": kind, "json_schema": {**named, "schema": schema}}}


def may_call_tools(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether the model may call tools: llama.cpp would never let it beside a format."""
    return bool(decoded_field(fields, "tools")) and decoded_field(fields, "tool_choice") not in (
        "none",
        {"type": "none"},
    )


CHAT = ChatApi()
