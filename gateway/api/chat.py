"""OpenAI's chat completions, and what completions share with them: chunks of `choices`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar

import msgspec

from gateway.api.base import (
    Answer,
    Api,
    Assembly,
    AssemblyError,
    RawFields,
    decoded_field,
    inner_items,
    read_events,
    read_fields,
    read_items,
)
from gateway.api.json_values import JSON_ERRORS, AnyObject, JsonObject, parse_json
from gateway.api.resuming import (
    EventRewriter,
    NativeEventRewriter,
    as_count,
    data_event,
    wants_usage,
)
from gateway.api.transcript import Transcript
from gateway.transport.errors import InvalidResponse

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

MOST_OPTIONS_BYTES = 1024  # bytes of `stream_options` that are looked at
# Fields that all chunks of one response repeat.
IDENTITY_FIELDS = ("id", "created", "model", "system_fingerprint")


class ChoicesApi(Api):
    """An API whose events are chunks of choices, up to `[DONE]`."""

    max_tokens_fields: ClassVar[tuple[str, ...]] = ("max_tokens",)
    refusal_is_general = True
    stream_end = terminal_event = b"data: [DONE]\n\n"
    progress_fields: ClassVar[JsonObject] = {"return_progress": True}
    streaming_fields: ClassVar[JsonObject] = {
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer_mark = b'"choices"'
    response_object: ClassVar[str]  # the `object` of a plain response
    chunk_object: ClassVar[str]  # that of a chunk
    _END: ClassVar[JsonObject]  # what the last chunk of a choice has in place of content

    def answer_events(self, content: bytes, request_fields: JsonObject) -> bytes:
        chunk: JsonObject = {**read_fields(content), "object": self.chunk_object}
        choices, usage = read_items(chunk.pop("choices")), chunk.pop("usage", None)
        timings = {"timings": chunk.pop("timings")} if "timings" in chunk else {}
        begin, ends = [], []
        for number, choice in enumerate(choices):
            reason, index = choice.pop("finish_reason", "stop"), choice.get("index", number)
            part = {"index": index, **self._as_part(choice), "finish_reason": None}
            begin.append(data_event(chunk | {"choices": [part]}))
            end = {"index": index, **self._END, "finish_reason": reason}
            ends.append(chunk | {"choices": [end]})
        if usage is not None and wants_usage(request_fields):
            ends.append(chunk | {"choices": [], "usage": usage})
        ends[-1] |= timings
        return b"".join([*begin, *map(data_event, ends), self.terminal_event])

    def _as_part(self, choice: RawFields) -> JsonObject:
        """The choice of a plain response as that of a chunk. Raises: InvalidResponse."""
        raise NotImplementedError

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

    def finished_answers(self, tail: bytes) -> int:
        try:
            return len(
                {
                    as_count(choice.index)
                    for fields in read_events(tail)
                    for choice in read_choices(fields)
                    if choice.finish_reason
                }
            )
        except (AssemblyError, *JSON_ERRORS):
            return 0

    def usage_fields(self, fields: Mapping[str, msgspec.Raw]) -> JsonObject | None:
        if len(fields.get("stream_options", b"")) > MOST_OPTIONS_BYTES:
            return None
        options = decoded_field(fields, "stream_options")
        if options is None:
            options = {}
        if not isinstance(options, dict):
            return None
        asked = options.get("include_usage")
        if asked is not None and asked is not False:
            return None
        # vLLM's, without effect until usage is asked for.
        options.pop("continuous_usage_stats", None)
        return {"stream_options": options | {"include_usage": True}}

    def _choice_has_content(self, choice: JsonObject) -> bool:
        """Whether a chunk's choice without a finish reason has content."""
        raise NotImplementedError

    def assemble(self, request_fields: JsonObject) -> Assembly:
        last: RawFields = {}
        answers: defaultdict[int, AnswerParts] = defaultdict(AnswerParts)
        while (events := (yield)) is not None:
            pieces, at, tries = events.split(b"\n\n"), 0, MOST_RUN_TRIES
            while at < len(pieces):
                for fields in read_events(pieces[at] + b"\n\n"):
                    for choice in read_choices(fields):
                        answers[as_count(choice.index)].add(choice)
                    last |= fields
                at += 1
                if tries and len(pieces) - at >= LEAST_RUN:
                    at = read_run(pieces, at, answers)
                    tries -= 1
        if not answers:
            raise AssemblyError("the node's stream has no answer")
        found = {name: parse_json(bytes(raw)) for name, raw in last.items() if name != "choices"}
        found["object"] = self.response_object
        found["choices"] = [self._whole_choice(at, answers[at]) for at in sorted(answers)]
        ordered = {name: found.pop(name) for name in _FIELD_ORDER if name in found}
        return ordered | found

    def _whole_choice(self, index: int, answer: AnswerParts) -> JsonObject:
        """The plain response's choice. Raises: AssemblyError."""
        raise NotImplementedError


class Logprobs(msgspec.Struct):
    """The probabilities of a choice's tokens."""

    content: msgspec.Raw = msgspec.Raw(b"null")


class _Delta(msgspec.Struct):
    role: Any = None
    content: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


class ChunkChoice(msgspec.Struct):
    """A chunk's choice. Its probabilities, by far the most of it, are not decoded."""

    index: Any = 0
    finish_reason: Any = None
    delta: _Delta | None = None
    text: Any = None
    logprobs: Logprobs | None = None


_CHOICES = msgspec.json.Decoder(list[ChunkChoice] | None)


def read_choices(fields: RawFields) -> list[ChunkChoice]:
    """The choices of a chunk. Raises: JSON_ERRORS."""
    return _CHOICES.decode(fields["choices"]) or [] if "choices" in fields else []


class AnswerParts:
    """One answer of a response, as far as its chunks have come."""

    __slots__ = ("_logprobs", "_reason", "_texts", "calls", "reasoning", "role")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.reasoning: list[str] = []
        self.role = "assistant"
        self.calls: list[JsonObject] = []  # parts of tool calls
        self._reason: object = None
        self._logprobs: list[bytes] | None = None
        """Of each chunk the probabilities of its tokens, with commas between them."""

    def add(self, choice: ChunkChoice) -> None:
        """Add a chunk's choice."""
        delta = choice.delta
        if delta is not None:
            self._texts.append(delta.content or "")
            if delta.reasoning_content:
                self.reasoning.append(delta.reasoning_content)
            if delta.role:
                self.role = delta.role
            if delta.tool_calls:
                self.calls += delta.tool_calls
        elif choice.text:
            self._texts.append(choice.text)
        if choice.finish_reason:
            self._reason = choice.finish_reason
        if choice.logprobs is not None:
            self._logprobs = self._logprobs or []
            if tokens := inner_items(choice.logprobs.content):
                self._logprobs.append(tokens)

    def add_texts(self, texts: list[str], *, are_reasoning: bool) -> None:
        """Add what chunks have that hold nothing else."""
        (self.reasoning if are_reasoning else self._texts).extend(texts)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    @property
    def finish_reason(self) -> str:
        """Why it ended. Raises: AssemblyError, if it has not."""
        if not self._reason:
            raise AssemblyError("an answer in the node's stream has no end")
        return str(self._reason)

    @property
    def logprobs(self) -> JsonObject | None:
        """The probabilities; None: it has none."""
        if self._logprobs is None:
            return None
        return {"content": msgspec.Raw(b"[%b]" % b",".join(self._logprobs))}


LEAST_RUN = 4  # events that come together, from which on it is tried to read them as a run
MOST_RUN_TRIES = 8  # in events that come together: where all differ, no more is lost
_TEXT = re.compile(rb'"(?:content|reasoning_content|text)": ?("(?:[^"\\]|\\.)*")')
_REASONING = [ChunkChoice(delta=_Delta(reasoning_content="\0"))]
# The choices of a chunk that has a text and nothing else. No other field has just this text.
_TEXT_ALONE = (_REASONING, [ChunkChoice(delta=_Delta(content="\0"))], [ChunkChoice(text="\0")])
_TEXTS = msgspec.json.Decoder(list[str])


def read_run(pieces: list[bytes], at: int, answers: Mapping[int, AnswerParts]) -> int:
    """Read the events from `at` on that differ from the one before in nothing but their text.

    Most do, and one call decodes all of them. Returns the place of the first other one.
    """
    first = pieces[at - 1]
    found = _TEXT.search(first)
    if found is None or not first.startswith(b"data:") or b"\n" in first:
        return at
    before, after = first[: found.start(1)], first[found.end(1) :]
    try:
        choices = read_choices(read_fields(before[5:] + b'"\\u0000"' + after))
    except (InvalidResponse, *JSON_ERRORS):
        return at
    if choices not in _TEXT_ALONE:
        return at
    end = at
    while end < len(pieces) and pieces[end].startswith(before) and pieces[end].endswith(after):
        end += 1
    begin, behind = len(before), -len(after)
    try:
        strings = b",".join([piece[begin:behind] for piece in pieces[at:end]])
        texts = _TEXTS.decode(b"[%b]" % strings)
    except JSON_ERRORS:
        return at
    if len(texts) != end - at:
        return at
    answers[0].add_texts(texts, are_reasoning=choices == _REASONING)
    return end


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


class ChunkRewriter(EventRewriter):
    """Rewrites chunks as chunks."""

    @staticmethod
    def _choice(kind: str, text: str, reason: str | None = None) -> JsonObject:
        """A choice that adds a text of this kind, or ends the response."""
        raise NotImplementedError

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

    def final_events(self, reason: str) -> bytes:
        transcript, splice_point = self._transcript, self._splice_point
        chunk = transcript.first_event | {"choices": []}
        chunk = {name: value for name, value in chunk.items() if name not in {"usage", "timings"}}
        end = b""
        if transcript.finish_reason is None:
            end = data_event(chunk | {"choices": [self._choice("", "", reason)]})
        if self._usage and not transcript.usage_sent:
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


class NativeToChunkRewriter(NativeEventRewriter, ChunkRewriter):
    """Rewrites the events of llama.cpp's `/completion` as chunks."""

    def _text_events(self, kind: str, text: str) -> bytes:
        return data_event(self._chunk | {"choices": [self._choice(kind, text)]})

    def _end_events(self, value: JsonObject) -> bytes:
        reason = "length" if value.get("stop_type") == "limit" else "stop"
        chunk, timings = self._chunk, {"timings": value.get("timings")}
        last = chunk | {"choices": [self._choice("", "", reason)]}
        if not self._usage:
            return data_event(last | timings)
        usage = self._whole_usage({"completion_tokens": value.get("tokens_predicted")})
        return data_event(last) + data_event(chunk | {"usage": usage} | timings)

    @cached_property
    def _chunk(self) -> JsonObject:
        first = self._transcript.first_event
        names = (*IDENTITY_FIELDS, "object")
        return {name: first[name] for name in names if name in first} | {"choices": []}


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

    @staticmethod
    def _choice(kind: str, text: str, reason: str | None = None) -> JsonObject:
        return {"finish_reason": reason, "index": 0, "delta": {kind: text} if kind else {}}


class NativeToChatRewriter(NativeToChunkRewriter, ChatRewriter):
    """A chat's stream, continued by `/completion`."""

    reasoning_kind, content_kind = "reasoning_content", "content"


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
    native_event_rewriter = NativeToChatRewriter
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

    def chat_body(self, body: JsonObject) -> JsonObject | None:
        return body


def _whole_calls(parts: list[JsonObject]) -> list[JsonObject]:
    """The tool calls of these parts: of each, first its name comes, then its arguments."""
    calls: dict[int, JsonObject] = {}
    functions: dict[int, tuple[list[str], list[str]]] = {}
    for part in parts:
        index = as_count(part.get("index"))
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


def as_chat(body: JsonObject, messages: list[JsonObject | None]) -> JsonObject | None:
    """A chat of these messages of another API's body; None: some hold more than text."""
    if body.get("tools") or None in messages:
        return None
    kwargs = body.get("chat_template_kwargs")
    return {"messages": messages} | ({"chat_template_kwargs": kwargs} if kwargs else {})


def as_response_format(bound: object, fields: Mapping[str, msgspec.Raw]) -> JsonObject | None:
    """A chat's `response_format` for the format that these fields of another API ask for.

    None: they ask for plain text, or for a format that chats don't know. So it is where the model
    may call tools: llama.cpp would never let it beside a format.
    """
    if not isinstance(bound, dict):
        return None
    choice = decoded_field(fields, "tool_choice")
    if decoded_field(fields, "tools") and choice not in ("none", {"type": "none"}):
        return None
    kind, schema = bound.get("type"), bound.get("schema")
    if kind == "json_object":
        return {"response_format": {"type": kind}}
    if kind != "json_schema" or not isinstance(schema, dict):
        return None
    named = {name: bound[name] for name in ("name", "strict") if name in bound}
    return {"response_format": {"type": kind, "json_schema": {**named, "schema": schema}}}


CHAT = ChatApi()
