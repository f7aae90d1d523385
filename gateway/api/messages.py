"""Anthropic's messages."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import msgspec

from gateway import errors
from gateway.api import resuming, sse, tokens
from gateway.api.base import (
    INPUT_TOKENS,
    Answer,
    Api,
    Assembly,
    AssemblyError,
    Bodies,
    IsModel,
    ResponseAssembler,
    ResponseRewriter,
    Translation,
    body_fields,
    decoded_field,
    edit_body,
    read_events,
)
from gateway.api.chat import CHAT, as_chat, as_response_format
from gateway.api.json_values import (
    ITEMS_DECODER,
    JSON_ERRORS,
    MOST_PARSED_BYTES,
    SHORT_BODY_BYTES,
    AnyObject,
    CutBody,
    InvalidJson,
    JsonObject,
    PartCounter,
    as_raw,
    cut_long_strings,
    parse_json,
    parse_object,
)
from gateway.api.resuming import (
    EventRewriter,
    NativeEventRewriter,
    as_count,
    is_number,
    named_event,
)
from gateway.api.tokens import token_count
from gateway.api.transcript import Transcript
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.lease import NodeInfo, Usage
from gateway.transport.errors import InvalidResponse

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_type(status: int) -> str:
    """The type of an error that this status stands for."""
    return _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


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

    def _begin(self, transcript: Transcript) -> None:
        self._index_shift = (
            transcript.block_index
            if transcript.block_is_open or not transcript.token_count
            else transcript.block_index + 1
        )
        self._skip_start = transcript.block_is_open  # whether the next block continues the open one

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

    def final_events(self, reason: str) -> bytes:
        events = _stop_blocks(self._transcript.open_blocks)
        if self._transcript.finish_reason is None:
            stop = "max_tokens" if reason == "length" else "end_turn"
            tokens = {"output_tokens": self._splice_point.sent_tokens}
            events += _message_delta(stop, None, tokens)
        return events + _MESSAGE_STOP


class NativeToMessagesRewriter(NativeEventRewriter):
    """A message's stream, continued by `/completion`."""

    reasoning_kind, content_kind = "thinking", "text"

    def _begin(self, transcript: Transcript) -> None:
        self._open_blocks = dict(transcript.open_blocks)
        begun = transcript.open_blocks or transcript.token_count
        self._next_index = transcript.block_index + 1 if begun else 0

    def _text_events(self, kind: str, text: str) -> bytes:
        """Text for the newest block if it is of this kind, else for a new one."""
        index, start = self._next_index - 1, b""
        if self._open_blocks.get(index) != kind:
            index, self._next_index = self._next_index, self._next_index + 1
            self._open_blocks[index] = kind
            start = _block_start(index, kind)
        return start + _block_delta(index, kind, text)

    def _end_events(self, value: JsonObject) -> bytes:
        stop = "max_tokens" if value.get("stop_type") == "limit" else "end_turn"
        usage = {"output_tokens": self._written_tokens(value)}
        end = _message_delta(stop, value.get("stopping_word") or None, usage)
        return _stop_blocks(self._open_blocks) + end + _MESSAGE_STOP


_MESSAGE_STOP = named_event({"type": "message_stop"})


def _stop_blocks(blocks: dict[int, str]) -> bytes:
    """The ends of these open blocks, as llama.cpp writes them: all of them at the end."""
    return b"".join(_block_stop(index, kind) for index, kind in sorted(blocks.items()))


def _block_start(index: int, kind: str) -> bytes:
    block = {"type": kind, kind: ""}
    return named_event({"type": "content_block_start", "index": index, "content_block": block})


def _block_delta(index: int, kind: str, text: str) -> bytes:
    delta = {"type": f"{kind}_delta", kind: text}
    return named_event({"type": "content_block_delta", "index": index, "delta": delta})


def _block_stop(index: int, kind: str) -> bytes:
    signature = _block_delta(index, "signature", "") if kind == "thinking" else b""
    return signature + named_event({"type": "content_block_stop", "index": index})


def _message_delta(reason: str, stop_sequence: str | None, usage: JsonObject) -> bytes:
    """The event with the reason why a message ended, and its length."""
    delta = {"stop_reason": reason, "stop_sequence": stop_sequence}
    return named_event({"type": "message_delta", "delta": delta, "usage": usage})


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
    heartbeat = b'event: ping\ndata: {"type": "ping"}\n\n'
    heartbeat_is_event = True
    terminal_mark = b"event: message_stop"
    terminal_event = _MESSAGE_STOP
    ordinary_events = staticmethod(
        # A name may have spaces around it.
        sse.ordinary_events(line=rb"event: (?! |error[ \r]*\n|message_stop).*\n")
    )
    streaming_fields: ClassVar[JsonObject] = {"stream": True}
    transcript_reader = staticmethod(read_message)
    event_rewriter = MessagesRewriter
    native_event_rewriter = NativeToMessagesRewriter
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
        self, body: bytes, is_model: IsModel, *, prompt_cache: bool = True
    ) -> Generator[None, None, Translation]:
        """The body as a chat, with a `response_format` if it asks for a format.

        It passes as it is if it asks for none, or is too large to be read; but always as a chat
        without the prompt cache, since llama.cpp ignores `cache_prompt` in messages.
        """
        unchanged = Translation("/v1/messages", body, ResponseRewriter())
        try:
            texts = yield from cut_long_strings(body)
        except GatewayError:
            if prompt_cache:
                return unchanged
            raise
        fields = body_fields(texts.rest)
        response_format = _response_format(fields)
        if response_format is None and prompt_cache:
            return unchanged
        chat = yield from chat_request(fields, response_format or {}, texts)
        return Translation("/v1/chat/completions", chat, ChatToMessage())

    def response_rewriter(
        self, bodies: Bodies, model: str, node: NodeInfo, settings: Settings, *, stream: bool
    ) -> ResponseRewriter | None:
        if node.kind != "llama.cpp" or not settings.repairs.stop_reason:
            return None
        if not any(not isinstance(body, bytes) or _STOP_MARK in body for body in bodies):
            return None
        return StopReasonRepair(partial(_stop_sequences, bodies))

    def owns_path(self, path: str) -> bool:
        return "/v1/messages" in path or path == "/messages"

    def error_body(self, error: GatewayError, x_request_id: str) -> bytes:
        kind, message = error_type(error.status), error.message
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
        while (events := (yield)) is not None:
            for fields in read_events(events):
                event = {name: parse_json(bytes(raw)) for name, raw in fields.items()}
                match event.get("type"):
                    case "message_start":
                        message = dict(event.get("message") or {})
                    case "content_block_start":
                        blocks[event.get("index", 0)] = dict(event.get("content_block") or {})
                    case "content_block_delta":
                        delta = event.get("delta") or {}
                        if (names := _DELTA_FIELDS.get(str(delta.get("type")))) is not None:
                            part = texts.setdefault((event.get("index", 0), names[0]), [])
                            part.append(delta.get(names[1]) or "")
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

    def _own_unresumable_reason(self, body: JsonObject, transcript: Transcript) -> str | None:
        config, thinking = body.get("output_config"), body.get("thinking")
        if body.get("output_format") or (isinstance(config, dict) and config.get("format")):
            return resuming.BOUND_TO_GRAMMAR
        if isinstance(thinking, dict) and thinking.get("type") == "enabled":
            budget = thinking.get("budget_tokens")
            if resuming.is_reasoning(transcript) and resuming.is_number(budget) and budget >= 0:
                return resuming.REASONING_LIMITED
        return resuming.message_unresumable_reason(body)

    def chat_body(self, body: JsonObject) -> JsonObject | None:
        """Messages as a chat; None: they hold more than text and reasoning."""
        system = body.get("system")
        begin = [{"role": "system", "content": system}] if system else []
        return as_chat(body, [*map(_chat_message, [*begin, *(body.get("messages") or ())])])

    def reported_prompt_tokens(self, transcript: Transcript) -> int | None:
        reported = transcript.first_event.get("usage") or {}
        names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        return sum(as_count(reported.get(name)) for name in names)


# Of each type of deltas the field of their block to which they add, and their own.
_DELTA_FIELDS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
    "input_json_delta": ("input", "partial_json"),
}


def _block_events(index: int, block: JsonObject) -> bytes:
    """The events of one block of a message, in one piece."""
    begin, deltas = dict(block), []
    for kind, (name, own_name) in _DELTA_FIELDS.items():
        if name == own_name and begin.get(name):
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
    return as_response_format(bound, fields)


def _stop_sequences(bodies: Bodies) -> frozenset[str]:
    """The stop sequences that these bodies name."""
    given = [decoded_field(body_fields(body), "stop_sequences") for body in bodies]
    return frozenset(
        word
        for words in given
        if isinstance(words, list)
        for word in words
        if isinstance(word, str)
    )


@dataclass(slots=True, eq=False)
class StopReasonRepair(ResponseRewriter):
    """Says that a stop sequence ended a message: llama.cpp b11549 calls that the end of the turn.

    `stop_sequences`: tells those of the request. The template has others, which are none of the
    client's.
    """

    stop_sequences: Callable[[], frozenset[str]]

    def rewrite_events(self, events: bytes) -> bytes:
        """The same events, of which the one with the stop reason is repaired."""
        # Bytes in an event or body that names a stop sequence, and in no text.
        return sse.edit_matching(events, b'"stop_sequence":"', self._rewrite_event)

    def rewrite_body(self, content: bytes) -> Generator[None, None, bytes]:
        """The same plain response with its true stop reason."""
        yield
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
        if sequence not in self.stop_sequences():
            return end | {"stop_sequence": None}
        reason = end.get("stop_reason")
        return end | {"stop_reason": "stop_sequence" if reason == "end_turn" else reason}


def _chat_message(message: object) -> JsonObject | None:
    if not isinstance(message, dict):
        return None
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
    answer = msgspec.json.Decoder(INPUT_TOKENS)
    answer_mark = b'"input_tokens"'


MESSAGES = MessagesApi()
COUNT_TOKENS = CountTokensApi()


SAME_FIELDS = (
    "model", "stream", "temperature", "top_p", "top_k", "chat_template_kwargs", "priority",
)  # fmt: skip
"""Fields that mean the same in a chat; the others of messages are converted, or unknown to it."""

DEFAULT_MAX_TOKENS = 4096  # llama.cpp's, for a body without `max_tokens`
DEFAULT_THINKING_TOKENS = 10_000  # llama.cpp's, for `thinking` without `budget_tokens`
_BILLING_LINE, _STAMP = "x-anthropic-billing-header:", "cch="


def chat_request(
    fields: Mapping[str, msgspec.Raw], response_format: JsonObject, texts: CutBody
) -> Generator[None, None, bytes]:
    """The body of a chat for a message's body of these fields, in short steps.

    `texts`: the body, whose long strings are cut out of `fields`. Raises: GatewayError 400.
    """
    chat: JsonObject = {name: fields[name] for name in SAME_FIELDS if name in fields}
    messages: list[msgspec.Raw] = []
    parts = PartCounter()
    try:
        if (system := _value(fields, "system")) is not None:
            messages.append(as_raw({"role": "system", "content": _system_text(system)}))
        items = ITEMS_DECODER.decode(fields.get("messages", b""))
        parts.add_messages(len(items))
        for number, item in enumerate(items):
            message = parse_json(bytes(item))
            content = message.get("content") if isinstance(message, dict) else None
            count = len(content) if isinstance(content, list) else 0
            parts.add_parts(count, f"messages[{number}].content")
            made = [as_raw(one) for one in _chat_messages(message, texts)]
            messages += made
            if parts.ends_step(sum(map(len, made))):
                yield
        thinking, stream = _value(fields, "thinking"), _value(fields, "stream")
    except (InvalidJson, *JSON_ERRORS):
        raise errors.invalid_request("'messages' must be a list of messages.", "messages") from None
    chat["max_tokens"] = fields.get("max_tokens", DEFAULT_MAX_TOKENS)
    if "stop_sequences" in fields:
        chat["stop"] = fields["stop_sequences"]
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        budget = thinking.get("budget_tokens")
        chat["thinking_budget_tokens"] = budget if is_number(budget) else DEFAULT_THINKING_TOKENS
    if stream is True:
        chat["stream_options"] = {"include_usage": True}
    whole = yield from texts.join(chat | response_format | {"messages": messages})
    return whole


def _value(fields: Mapping[str, msgspec.Raw], name: str) -> Any:
    return parse_json(bytes(fields[name])) if name in fields else None


def _system_text(system: object) -> str:
    """The system prompt as one text."""
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    if not isinstance(blocks, list):
        return ""
    return "".join(
        _without_stamp(_text(block, "text"))
        for block in blocks
        if isinstance(block, dict) and block.get("type") == "text"
    )


def _without_stamp(text: str) -> str:
    """The text without Claude Code's stamp, which changes with each request.

    The prompt would never be cached. llama.cpp does the same.
    """
    at = text.find(_STAMP, len(_BILLING_LINE)) + len(_STAMP)
    if (
        not text.startswith(_BILLING_LINE)
        or at < len(_BILLING_LINE)
        or text[at + 5 : at + 6] != ";"
    ):
        return text
    return f"{text[:at]}fffff{text[at + 5 :]}"


def _text(block: Any, name: str) -> str:
    value = block.get(name)
    return value if isinstance(value, str) else ""


def _chat_messages(message: Any, texts: CutBody) -> list[Any]:
    """The chat's messages for one of Anthropic's: its own, and one for each tool's result.

    Raises: GatewayError 400, for arguments of a tool that are too large.
    """
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return [message]  # a plain text is the same; the node refuses all else
    parts: list[JsonObject] = []
    calls: list[JsonObject] = []
    results: list[JsonObject] = []
    reasoning = ""
    arguments_size = 0
    for block in message["content"]:
        match block.get("type") if isinstance(block, dict) else None:
            case "text":
                parts.append(block)
            case "thinking":
                reasoning += _text(block, "thinking")
            case "image":
                parts += _image_parts(block)
            case "tool_use":
                # As a text in a text, its long strings have other escapes.
                arguments = as_raw(block.get("input") or {})
                text = texts.restored(arguments, "messages").decode()
                arguments_size += len(text)
                if arguments_size > MOST_PARSED_BYTES:
                    raise errors.invalid_request(
                        f"A message's 'tool_use' blocks have more than {MOST_PARSED_BYTES} "
                        "characters.",
                        "messages",
                    )
                function = {"name": _text(block, "name"), "arguments": text}
                calls.append({"id": _text(block, "id"), "type": "function", "function": function})
            case "tool_result":
                result = {"role": "tool", "tool_call_id": _text(block, "tool_use_id")}
                results.append(result | {"content": _result_content(block.get("content"))})
    if not (parts or calls or reasoning):
        return results
    chat = {"role": message.get("role"), "content": parts or ""}
    if calls:
        chat["tool_calls"] = calls
    if reasoning:
        chat["reasoning_content"] = reasoning
    return [chat, *results]


def _image_parts(block: JsonObject) -> list[JsonObject]:
    """The image as a chat's part; none, if there is no source."""
    source = block.get("source")
    match source.get("type") if isinstance(source, dict) else None:
        case "base64":
            kind = _text(source, "media_type") or "image/jpeg"
            url = f"data:{kind};base64,{_text(source, 'data')}"
        case "url":
            url = _text(source, "url")
        case _:
            return []
    return [{"type": "image_url", "image_url": {"url": url}}]


def _result_content(content: object) -> str | list[JsonObject]:
    """A tool's result: one text, unless it holds images."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts: list[JsonObject] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            parts.append({"type": "text", "text": _text(block, "text")})
        elif kind == "image":
            parts += _image_parts(block)
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


# Reasons by the chat's; all others are the end of the turn.
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_SAME_ERROR_TYPES = frozenset({"invalid_request_error", "authentication_error", "rate_limit_error"})

# Types by the codes of the gateway's errors that may end a stream.
_TYPES_OF_CODES = {
    "node_timeout": "timeout_error",
    "request_too_large": "request_too_large",
    **dict.fromkeys(("queue_timeout", "no_node", "starting", "shutting_down"), "overloaded_error"),
}


@dataclass(slots=True, eq=False)
class ChatToMessage(ResponseRewriter):
    """Makes a message of a chat's response. It keeps numbers and ids, and none of the text."""

    _block: str = ""  # the type of the open block; empty: none is open
    _index: int = -1  # the number of the newest block; -1: the message has not begun
    _stop_reason: str = "end_turn"
    _usage: JsonObject = field(default_factory=lambda: {"output_tokens": 0})

    def rewrite_events(self, events: bytes) -> bytes:
        """The message's events for these of the chat. Raises: InvalidResponse."""
        return b"".join(map(self._rewrite_event, sse.split(events)))

    def rewrite_body(self, content: bytes) -> Generator[None, None, bytes]:
        """The message for a plain chat's response, by its events. Raises: InvalidResponse."""
        yield
        try:
            events = self.rewrite_events(CHAT.answer_events(content, CHAT.streaming_fields))
            return ResponseAssembler(MESSAGES, {}, events, len(events)).response()
        except (AssemblyError, IndexError, KeyError):
            raise InvalidResponse("The node's answer is no chat's") from None

    def _rewrite_event(self, event: bytes) -> bytes:
        data = sse.payload(event)
        if not data:
            return event
        if data == b"[DONE]":
            return self._end()
        try:
            value = parse_object(data)
            if error := value.get("error"):
                return _error_event(error)
            begin = b"" if self._index >= 0 else self._begin(value)
            if usage := value.get("usage"):
                self._usage = _usage(usage)
            return begin + b"".join(map(self._choice_events, value.get("choices") or ()))
        except (InvalidJson, TypeError, AttributeError):
            raise InvalidResponse("An event of the node's stream can't be read") from None

    def _begin(self, chunk: JsonObject) -> bytes:
        self._index = 0
        usage = {"cache_read_input_tokens": 0, "input_tokens": 0, "output_tokens": 0}
        message: JsonObject = {
            "id": chunk.get("id"),
            "type": "message",
            "role": "assistant",
            "model": chunk.get("model"),
            "stop_reason": None,
            "stop_sequence": None,
            "content": [],
            "usage": usage,
        }
        return named_event({"type": "message_start", "message": message})

    def _choice_events(self, choice: JsonObject) -> bytes:
        delta = choice.get("delta") or {}
        if reason := choice.get("finish_reason"):
            self._stop_reason = _STOP_REASONS.get(str(reason), "end_turn")
        thinking = self._text_events("thinking", delta.get("reasoning_content"))
        return thinking + self._text_events("text", delta.get("content"))

    def _text_events(self, kind: str, text: object) -> bytes:
        """A delta of the block of this type, which is begun if another one is open."""
        if not isinstance(text, str) or not text:
            return b""
        begin = b""
        if self._block != kind:
            begin = self._stop_block()
            self._block = kind
            begin += _block_start(self._index, kind)
        return begin + _block_delta(self._index, kind, text)

    def _stop_block(self) -> bytes:
        """The end of the open block, if there is one."""
        if not self._block:
            return b""
        end = _block_stop(self._index, self._block)
        self._block, self._index = "", self._index + 1
        return end

    def _end(self) -> bytes:
        """The end of the message, told by the chat's `[DONE]`."""
        last = _message_delta(self._stop_reason, None, self._usage)
        return self._stop_block() + last + _MESSAGE_STOP


def _usage(reported: Any) -> JsonObject:
    """A message's `usage`, whose `input_tokens` exclude the cached ones."""
    reported = reported or {}
    details = reported.get("prompt_tokens_details") or {}
    cached = as_count(details.get("cached_tokens"))
    return {
        "cache_read_input_tokens": cached,
        "input_tokens": max(0, as_count(reported.get("prompt_tokens")) - cached),
        "output_tokens": as_count(reported.get("completion_tokens")),
    }


def _error_event(error: Any) -> bytes:
    """The error that ends a chat's stream, in Anthropic's form."""
    kind = _TYPES_OF_CODES.get(str(error.get("code")))
    if kind is None:
        kind = error.get("type") if error.get("type") in _SAME_ERROR_TYPES else "api_error"
    message = {"type": kind, "message": str(error.get("message"))}
    return named_event({"type": "error", "error": message})
