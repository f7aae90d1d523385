"""Anthropic's messages."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import ClassVar, Literal

import msgspec

from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.lease import Usage
from gateway.proxy import sse, tokens
from gateway.proxy.api import resuming
from gateway.proxy.api.base import (
    Answer,
    AnsweringNode,
    AnyObject,
    Api,
    Assembly,
    AssemblyError,
    ForwardedRequest,
    ResponseRewriter,
    Translation,
    body_fields,
    decoded_field,
    edit_body,
    read_events,
)
from gateway.proxy.api.chat import as_response_format, may_call_tools
from gateway.proxy.api.messages_by_chat import ChatToMessage, chat_request
from gateway.proxy.api.relayed import InputTokens
from gateway.proxy.api.resuming import (
    EventRewriter,
    ReasoningEndMark,
    ReasoningSplitter,
    as_count,
    named_event,
)
from gateway.proxy.json_values import (
    SHORT_BODY_BYTES,
    InvalidJson,
    JsonObject,
    cut_long_strings,
    parse_json,
    parse_object,
)
from gateway.proxy.tokens import token_count
from gateway.proxy.transcript import SplicePoint, Transcript

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}

_NO_CONTENT_TYPES = frozenset({None, "message_start", "content_block_start", "ping"})


def read_message(transcript: Transcript, value: JsonObject) -> None:
    """Add an event to the transcript."""
    match value.get("type"):
        case "message_start":
            transcript.begin(value.get("message") or {})
        case "content_block_start":
            kind = (value.get("content_block") or {}).get("type")
            transcript.open_block(value.get("index") or 0, str(kind))
            if kind not in {"text", "thinking"}:
                transcript.mark_unresumable("a tool call has begun")
        case "content_block_delta":
            delta = value.get("delta") or {}
            if delta.get("type") == "input_json_delta":
                transcript.mark_unresumable("a tool call has begun")
            if delta.get("type") == "signature_delta":
                transcript.open_blocks[value.get("index") or 0] = "signed"
            transcript.add_reasoning(delta.get("thinking"))
            transcript.add_content(delta.get("text"))
        case "content_block_stop":
            transcript.open_blocks.pop(value.get("index") or 0, None)
        case "message_delta":
            if reason := (value.get("delta") or {}).get("stop_reason"):
                transcript.finish(reason)
        case _:
            pass


class MessagesRewriter(EventRewriter):
    """A message's stream, continued by a message begun."""

    def __init__(self, transcript: Transcript, splice_point: SplicePoint) -> None:
        super().__init__(transcript, splice_point)
        self._index_shift = (
            transcript.block_index
            if transcript.block_is_open or not transcript.token_count
            else transcript.block_index + 1
        )
        self._skip_start = transcript.block_is_open
        """Whether the next block continues the open one."""

    def rewrite(self, value: JsonObject) -> bytes:
        kind = value.get("type")
        if kind in {"message_start", "ping"}:
            return b""
        if kind == "content_block_start" and self._skip_start:
            self._skip_start = False
            return b""
        event = dict(value)
        if isinstance(value.get("index"), int):
            event["index"] = value["index"] + self._index_shift
        if kind == "content_block_delta":
            delta = value.get("delta") or {}
            if delta.get("type") == "text_delta":
                text = self._new_text(delta.get("text"))
                if not text:
                    return b""
                event["delta"] = delta | {"text": text}
        elif kind == "message_delta":
            self._check_end()
            reported = value.get("usage") or {}
            output = self._splice_point.prefix_tokens + as_count(reported.get("output_tokens"))
            event["usage"] = reported | {"output_tokens": output}
        return named_event(event)

    def final_events(self, reason: str, *, usage: bool) -> bytes:
        events = _stop_blocks(self._transcript.open_blocks)
        if self._transcript.finish_reason is None:
            stop = "max_tokens" if reason == "length" else "end_turn"
            events += _message_delta(stop, None, self._splice_point.sent_tokens)
        return events + named_event({"type": "message_stop"})


class NativeToMessagesRewriter(EventRewriter):
    """A message's stream, continued by `/completion`.

    `end_mark`: the mark that ends the reasoning under way.
    """

    def __init__(
        self,
        transcript: Transcript,
        splice_point: SplicePoint,
        end_mark: ReasoningEndMark | None = None,
    ) -> None:
        super().__init__(transcript, splice_point)
        self._splitter = ReasoningSplitter(end_mark)
        self._open_blocks = dict(transcript.open_blocks)
        begun = transcript.open_blocks or transcript.token_count
        self._next_index = transcript.block_index + 1 if begun else 0

    def rewrite(self, value: JsonObject) -> bytes:
        reasoning, content = self._splitter.feed(self._new_text(value.get("content")))
        if not value.get("stop"):
            return self._text_events("thinking", reasoning) + self._text_events("text", content)
        self._check_end()
        reasoning += self._splitter.flush()
        events = self._text_events("thinking", reasoning) + self._text_events("text", content)
        stop = "max_tokens" if value.get("stop_type") == "limit" else "end_turn"
        tokens = self._splice_point.prefix_tokens + as_count(value.get("tokens_predicted"))
        events += _stop_blocks(self._open_blocks)
        events += _message_delta(stop, value.get("stopping_word") or None, tokens)
        return events + named_event({"type": "message_stop"})

    def _text_events(self, kind: str, text: str) -> bytes:
        """Text for the newest block if it is of this kind, else for a new one."""
        if not text:
            return b""
        index, start = self._next_index - 1, b""
        if self._open_blocks.get(index) != kind:
            index, self._next_index = self._next_index, self._next_index + 1
            self._open_blocks[index] = kind
            block = {"type": kind, kind: ""}
            start = named_event(
                {"type": "content_block_start", "index": index, "content_block": block}
            )
        return start + _block_delta(index, kind, text)


def _stop_blocks(blocks: dict[int, str]) -> bytes:
    """The ends of these open blocks, as llama.cpp writes them: all of them at the end."""
    events = b""
    for index, kind in sorted(blocks.items()):
        if kind == "thinking":
            events += _block_delta(index, "signature", "")
        events += named_event({"type": "content_block_stop", "index": index})
    return events


def _block_delta(index: int, kind: str, text: str) -> bytes:
    delta = {"type": f"{kind}_delta", kind: text}
    return named_event({"type": "content_block_delta", "index": index, "delta": delta})


def _message_delta(stop_reason: str, stop_sequence: str | None, tokens: int) -> bytes:
    """The event with the reason why a message ended, and its length."""
    delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
    return named_event(
        {"type": "message_delta", "delta": delta, "usage": {"output_tokens": tokens}}
    )


def _read_anthropic_usage(reported: JsonObject, timed: Usage) -> Usage:
    """Anthropic's `usage`, whose `input_tokens` exclude the cached ones."""
    prompt, cached, completion = timed.prompt_tokens, timed.cached_tokens, timed.completion_tokens
    if "input_tokens" in reported:
        cached = token_count(reported.get("cache_read_input_tokens"))
        prompt = token_count(reported["input_tokens"]) + cached
    if "output_tokens" in reported:
        completion = token_count(reported["output_tokens"])
    return Usage(prompt, cached, completion, timed.timings)


class _Message(Answer, kw_only=True):
    type: Literal["message"]
    content: list[AnyObject]


class MessagesApi(Api):
    """`/v1/messages`: named events, from `message_start` to `message_stop`."""

    name = "messages"
    prompt_field = "messages"
    max_tokens_fields = ("max_tokens",)
    clients_add_v1 = True
    sends_request_id = True
    heartbeat_is_event = True
    terminal_mark = b"event: message_stop"
    terminal_event = named_event({"type": "message_stop"})
    error_mark = b"event: error\n"
    ordinary_events = staticmethod(
        # A name may have spaces around it.
        sse.ordinary_events(line=rb"event: (?! |error[ \r]*\n|message_stop).*\n")
    )
    streaming_fields: ClassVar[JsonObject] = {"stream": True}
    transcript_reader = staticmethod(read_message)
    event_rewriter = MessagesRewriter
    is_chat = True
    translates = True
    rewrites_responses = True
    answer = msgspec.json.Decoder(_Message)
    answer_mark = b'"content"'

    def needs_translation(
        self, path: str, body: bytes, settings: Settings, *, prompt_cache: bool = True
    ) -> bool:
        """Whether the body asks for a format, which llama.cpp obeys in chats alone.

        So it does with `cache_prompt`.
        """
        if path != "/v1/messages":
            return False
        if not prompt_cache:
            return True
        if not settings.repairs.output_config:
            return False
        if not any(mark in body for mark in _FORMAT_MARKS):
            return False
        # `translate` reads a large body in steps, and then decides itself.
        large = len(body) >= SHORT_BODY_BYTES
        return large or _response_format(body_fields(body)) is not None

    def translate(
        self, body: bytes, is_model: Callable[[str], bool]
    ) -> Generator[None, None, Translation]:
        """The body as a chat with a `response_format`.

        It passes as it is if it asks for no format, or is too large to be read.
        """
        try:
            texts = yield from cut_long_strings(body)
        except GatewayError:
            return Translation("/v1/messages", body, ResponseRewriter())
        fields = body_fields(texts.rest)
        response_format = _response_format(fields)
        if response_format is None:
            return Translation("/v1/messages", body, ResponseRewriter())
        chat = yield from chat_request(fields, response_format, texts)
        return Translation("/v1/chat/completions", chat, ChatToMessage())

    def translate_uncached(
        self, body: bytes, is_model: Callable[[str], bool]
    ) -> Generator[None, None, Translation]:
        """The body as a chat, since llama.cpp ignores `cache_prompt` in messages."""
        texts = yield from cut_long_strings(body)
        fields = body_fields(texts.rest)
        chat = yield from chat_request(fields, _response_format(fields) or {}, texts)
        return Translation("/v1/chat/completions", chat, ChatToMessage())

    def response_rewriter(
        self, request: ForwardedRequest, node: AnsweringNode, settings: Settings
    ) -> ResponseRewriter | None:
        if node.kind != "llama.cpp" or not settings.repairs.stop_reason:
            return None
        bodies = request.bodies.values()
        if not any(not isinstance(body, bytes) or _STOP_MARK in body for body in bodies):
            return None
        return StopReasonRepair(partial(_stop_sequences, request))

    def owns_path(self, path: str) -> bool:
        return "/v1/messages" in path or path == "/messages"

    def error_body(self, error: GatewayError, x_request_id: str) -> bytes:
        kind = _ERROR_TYPES.get(error.status)
        if kind is None:
            kind = "invalid_request_error" if error.status < 500 else "api_error"
        message = error.message
        if error.param == "response_format":
            # It was checked as what `translate` made of it.
            asked = "'output_config.format' (as 'response_format')"
            message = message.replace("'response_format'", asked)
        fields = {"type": kind, "message": message}
        return msgspec.json.encode({"type": "error", "error": fields, "request_id": x_request_id})

    def error_event(self, error: GatewayError, x_request_id: str) -> bytes:
        return b"event: error\ndata: " + self.error_body(error, x_request_id) + b"\n\n"

    def is_own_error(self, content: bytes) -> bool:
        # llama.cpp answers with OpenAI's form.
        try:
            value = parse_json(content)
        except InvalidJson:
            return False
        return isinstance(value, dict) and value.get("type") == "error" and "error" in value

    def heartbeat(self) -> bytes:
        return b'event: ping\ndata: {"type": "ping"}\n\n'

    def has_content(self, value: JsonObject) -> bool:
        return value.get("type") not in _NO_CONTENT_TYPES

    def is_terminal_event(self, event: bytes) -> bool:
        return sse.event_name(event) == b"message_stop"

    def finished_answers(self, tail: bytes) -> int:
        try:
            deltas = [decoded_field(fields, "delta") for fields in read_events(tail)]
        except AssemblyError:
            return 0
        return any(isinstance(delta, dict) and bool(delta.get("stop_reason")) for delta in deltas)

    def is_stream_complete(self, tail: bytes) -> bool:
        return b"\nevent: message_stop" in (b"\n" + tail)[-128:]

    def read_usage(self, tail: bytes, opening: bytes = b"") -> Usage | None:
        """The tokens; a stream reports those of the prompt at its beginning."""
        found = tokens.read_usage(tail, _read_anthropic_usage)
        if found is None or found.timings is not None or found.prompt_tokens or not opening:
            return found
        for event in sse.split(opening):
            first = tokens.read_usage(event, _read_anthropic_usage)
            if first is not None and first.prompt_tokens:
                return Usage(first.prompt_tokens, first.cached_tokens, found.completion_tokens)
        return found

    def assemble(self, request_fields: JsonObject) -> Assembly:
        message: JsonObject | None = None
        blocks: dict[int, JsonObject] = {}
        texts: dict[tuple[int, str], list[str]] = {}
        stopped = False
        while (fields := (yield)) is not None:
            event = {name: parse_json(bytes(raw)) for name, raw in fields.items()}
            match event.get("type"):
                case "message_start":
                    message = dict(event.get("message") or {})
                case "content_block_start":
                    blocks[event.get("index", 0)] = dict(event.get("content_block") or {})
                case "content_block_delta":
                    _add_delta(texts, event.get("index", 0), event.get("delta") or {})
                case "message_delta" if message is not None:
                    message |= event.get("delta") or {}
                    message["usage"] = (message.get("usage") or {}) | (event.get("usage") or {})
                case "message_stop":
                    stopped = True
        if message is None or not stopped:
            raise AssemblyError("the node's stream has no message or no end")
        for (index, name), pieces in texts.items():
            text, block = "".join(pieces), blocks.setdefault(index, {})
            block[name] = _tool_input(text) if name == "input" else (block.get(name) or "") + text
        message["content"] = [blocks[index] for index in sorted(blocks)]
        return message

    def answer_events(self, content: bytes, request_fields: JsonObject) -> bytes:
        message = parse_object(content)
        usage = message.get("usage") or {}
        nothing: JsonObject = {"content": [], "stop_reason": None, "stop_sequence": None}
        begin = message | nothing | {"usage": {**usage, "output_tokens": 0}}
        end = {name: message.get(name) for name in ("stop_reason", "stop_sequence")}
        return b"".join(
            [
                named_event({"type": "message_start", "message": begin}),
                *(_block_events(*numbered) for numbered in enumerate(message["content"])),
                named_event({"type": "message_delta", "delta": end, "usage": usage}),
                self.terminal_event,
            ]
        )

    def unresumable_reason(self, body: JsonObject, transcript: Transcript) -> str | None:
        reason = resuming.unresumable_reason(body, transcript)
        if reason is not None:
            return reason
        config, thinking = body.get("output_config"), body.get("thinking")
        if body.get("output_format") or (isinstance(config, dict) and config.get("format")):
            return resuming.BOUND_TO_GRAMMAR
        if isinstance(thinking, dict) and thinking.get("type") == "enabled":
            budget = thinking.get("budget_tokens")
            if resuming.is_reasoning(transcript) and resuming.is_number(budget) and budget >= 0:
                return resuming.REASONING_LIMITED
        return resuming.message_unresumable_reason(body)

    def chat_body(self, body: JsonObject) -> JsonObject | None:
        return messages_as_chat(body)

    def continued_body(self, body: JsonObject, prefix: str, max_tokens: int | None) -> JsonObject:
        return resuming.continued_messages(body, prefix, max_tokens)

    def reported_prompt_tokens(self, transcript: Transcript) -> int | None:
        reported = transcript.first_event.get("usage") or {}
        names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        return sum(as_count(reported.get(name)) for name in names)

    def native_rewriter(
        self,
        body: JsonObject,
        transcript: Transcript,
        splice_point: SplicePoint,
        end_mark: ReasoningEndMark | None = None,
    ) -> EventRewriter | None:
        if body.get("tools"):
            return None
        return NativeToMessagesRewriter(transcript, splice_point, end_mark)


_DELTA_FIELDS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
    "input_json_delta": ("input", "partial_json"),
}
"""Of each type of deltas the field of their block to which they add, and their own."""


def _add_delta(texts: dict[tuple[int, str], list[str]], index: int, delta: JsonObject) -> None:
    names = _DELTA_FIELDS.get(str(delta.get("type")))
    if names is not None:
        texts.setdefault((index, names[0]), []).append(delta.get(names[1]) or "")


def _block_events(index: int, block: JsonObject) -> bytes:
    """The events of one block of a message, in one piece."""
    begin, deltas = dict(block), []
    for kind, (name, field) in _DELTA_FIELDS.items():
        if name == field and begin.get(name):
            deltas.append({"type": kind, name: begin[name]})
            begin[name] = ""
    if block.get("type") == "tool_use":
        text = msgspec.json.encode(block.get("input") or {}).decode()
        deltas.append({"type": "input_json_delta", "partial_json": text})
        begin["input"] = {}
    events = named_event({"type": "content_block_start", "index": index, "content_block": begin})
    for delta in deltas:
        events += named_event({"type": "content_block_delta", "index": index, "delta": delta})
    return events + named_event({"type": "content_block_stop", "index": index})


def _tool_input(text: str) -> object:
    """A tool's arguments; like llama.cpp, empty where they are no JSON."""
    try:
        return parse_json(text.encode()) if text else {}
    except InvalidJson:
        return {}


_FORMAT_MARKS = (b'"output_config"', b'"output_format"')

_STOP_MARK = b'"stop_sequences"'


def _response_format(fields: Mapping[str, msgspec.Raw]) -> JsonObject | None:
    """A chat's `response_format` for the format that the body asks for; None: it asks for none."""
    config, bound = decoded_field(fields, "output_config"), decoded_field(fields, "output_format")
    if isinstance(config, dict) and config.get("format") is not None:
        bound = config["format"]
    if not isinstance(bound, dict) or may_call_tools(fields):
        return None
    return as_response_format(bound)


def _stop_sequences(request: ForwardedRequest) -> frozenset[str]:
    """The stop sequences that the request names."""
    given = [decoded_field(body_fields(body), "stop_sequences") for body in request.bodies.values()]
    return frozenset(
        word
        for words in given
        if isinstance(words, list)
        for word in words
        if isinstance(word, str)
    )


class StopReasonRepair(ResponseRewriter):
    """Says that a stop sequence ended a message: llama.cpp b11549 calls that the end of the turn.

    `stop_sequences`: tells those of the request. The template has others, which are none of the
    client's.
    """

    __slots__ = ("_stop_sequences",)

    _MARK = b'"stop_sequence":"'
    """Bytes in an event or body that names a stop sequence, and in no text."""

    def __init__(self, stop_sequences: Callable[[], frozenset[str]]) -> None:
        self._stop_sequences = stop_sequences

    def rewrite_events(self, events: bytes) -> bytes:
        """The same events, of which the one with the stop reason is repaired."""
        return sse.edit_matching(events, self._MARK, self._rewrite_event)

    def rewrite_body(self, content: bytes) -> bytes:
        """The same plain response with its true stop reason."""
        return edit_body(content, self._repaired)

    def _rewrite_event(self, event: bytes) -> bytes:
        try:
            value = parse_object(sse.payload(event))
        except InvalidJson:
            return event
        delta = value.get("delta")
        if value.get("type") != "message_delta" or not isinstance(delta, dict):
            return event
        return named_event(value | {"delta": self._repaired(delta)})

    def _repaired(self, end: JsonObject) -> JsonObject:
        """The fields of a message or its end, with the true reason."""
        sequence = end.get("stop_sequence")
        if not isinstance(sequence, str):
            return end
        if sequence not in self._stop_sequences():
            return end | {"stop_sequence": None}
        reason = end.get("stop_reason")
        return end | {"stop_reason": "stop_sequence" if reason == "end_turn" else reason}


def messages_as_chat(body: JsonObject) -> JsonObject | None:
    """Messages as a chat; None: they hold more than text and reasoning."""
    if body.get("tools"):
        return None
    messages: list[object] = []
    system = body.get("system")
    if system:
        messages.append({"role": "system", "content": system})
    messages += body.get("messages") or ()
    chat = []
    for message in messages:
        converted = _chat_message(message) if isinstance(message, dict) else None
        if converted is None:
            return None
        chat.append(converted)
    kwargs = body.get("chat_template_kwargs")
    return {"messages": chat} | ({"chat_template_kwargs": kwargs} if kwargs else {})


def _chat_message(message: JsonObject) -> JsonObject | None:
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list):
        return None
    parts: dict[str, list[str]] = {"text": [], "thinking": []}
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in parts:
            return None
        parts[kind].append(str(part.get(kind) or ""))
    if len(parts["text"]) != 1 or len(parts["thinking"]) > 1:
        # llama.cpp gives several parts to the template as parts, and templates differ in them.
        return None
    converted = {"role": role, "content": parts["text"][0]}
    reasoning = "".join(parts["thinking"])
    return converted | {"reasoning_content": reasoning} if reasoning else converted


class CountTokensApi(MessagesApi):
    """`/v1/messages/count_tokens`."""

    translates = False
    answer = msgspec.json.Decoder(InputTokens)
    answer_mark = b'"input_tokens"'


MESSAGES = MessagesApi()

COUNT_TOKENS = CountTokensApi()
