"""Translates Ollama's requests into those that nodes understand.

Only what must change is parsed: texts, images, schemas and tools pass as the client's own bytes.
From a large body its long strings are cut out before it is parsed, and put back at the end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway import errors
from gateway.errors import GatewayError
from gateway.proxy.json_values import (
    JSON_ERRORS,
    CutBody,
    FieldPieces,
    JsonObject,
    PartCounter,
    cut_long_strings,
    raw_head,
)

CHAT_PATH, COMPLETION_PATH, INFILL_PATH, EMBEDDINGS_PATH = (
    "/v1/chat/completions", "/v1/completions", "/infill", "/v1/embeddings",
)  # fmt: skip

MOST_UNANSWERED = 1000
"""Tool calls without an answer of which a later message may still answer one; the newest."""

MOST_OPTIONS_BYTES = 64 * 1024
"""Bytes of `options`, besides strings that were cut out of them."""

DEFAULT_TAG = ":latest"
"""Ollama's tag of a name without one."""

IsModel = Callable[[str], bool]

MISSING = msgspec.Raw()


class _Common(msgspec.Struct, kw_only=True):
    """What all requests have."""

    model: str | None = None
    options: msgspec.Raw = MISSING
    keep_alive: Any = None


class _Generating(_Common, kw_only=True):
    stream: bool | None = None
    format: msgspec.Raw = MISSING
    think: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    debug_render_only: bool | None = msgspec.field(default=None, name="_debug_render_only")


class ChatBody(_Generating, kw_only=True):
    """`/api/chat`."""

    messages: list[msgspec.Raw] | None = None
    tools: msgspec.Raw = MISSING


class GenerateBody(_Generating, kw_only=True):
    """`/api/generate`."""

    prompt: msgspec.Raw = MISSING
    suffix: msgspec.Raw = MISSING
    system: msgspec.Raw = MISSING
    template: str | None = None
    context: list[Any] | None = None
    raw: bool | None = None
    images: list[msgspec.Raw] | None = None


class EmbedBody(_Common, kw_only=True):
    """`/api/embed`, and `prompt` of `/api/embeddings`."""

    input: msgspec.Raw = MISSING
    prompt: msgspec.Raw = MISSING
    dimensions: int | None = None


class _ChatMessage(msgspec.Struct):
    role: str = ""
    content: msgspec.Raw = MISSING
    thinking: msgspec.Raw = MISSING
    images: list[msgspec.Raw] | None = None
    tool_calls: msgspec.Raw = MISSING
    tool_name: str | None = None
    tool_call_id: str | None = None


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class _MessageCall(msgspec.Struct):
    function: _CalledFunction
    id: str | None = None


_CHAT = msgspec.json.Decoder(ChatBody)
_GENERATE = msgspec.json.Decoder(GenerateBody)
_EMBED = msgspec.json.Decoder(EmbedBody)
_MESSAGE = msgspec.json.Decoder(_ChatMessage)
_TOOL_CALLS = msgspec.json.Decoder(list[_MessageCall] | None)
_OPTIONS = msgspec.json.Decoder(dict[str, Any])
_TEXTS = msgspec.json.Decoder(str | list[str] | None)


@dataclass(frozen=True, slots=True)
class TranslatedRequest:
    """A request to nodes, and what the response's translation needs of the client's."""

    path: str
    body: bytes
    model: str | None
    stream: bool = False
    load: str | None = None
    """`load` or `unload`: it has no prompt, and asks for nothing else."""
    top_logprobs: int = 0
    """How many probabilities the client asked for besides the chosen token's."""
    dimensions: int = 0
    """Of an embedding that is to be shortened; 0: it is not."""


Translating = Generator[None, None, TranslatedRequest]


def translate_chat(body: bytes, is_model: IsModel) -> Translating:
    """`/api/chat` as a chat. Raises: GatewayError 400, as the next two."""
    texts = yield from cut_long_strings(body)
    chat = texts.decode(_CHAT)
    fields = _generating_fields(chat, CHAT_PATH, texts, is_model)
    fields["messages"] = yield from _messages(chat.messages or [], texts)
    if _is_given(chat.tools):
        if raw_head(chat.tools, 1) != b"[":
            raise errors.invalid_request("'tools' must be a list.", "tools")
        fields["tools"] = chat.tools
    load = _load_reason(chat) if not chat.messages else None
    return (yield from _translated(CHAT_PATH, fields, texts, chat, load))


def translate_generate(body: bytes, is_model: IsModel) -> Translating:
    """`/api/generate`: a chat; a completion if it is raw, an infill if it has a suffix."""
    texts = yield from cut_long_strings(body)
    asked = texts.decode(_GENERATE)
    for name in ("prompt", "suffix", "system"):
        _check_text(getattr(asked, name), name)
    if asked.template:
        raise _unsupported("template", "The model's own is used; with 'raw' there is none")
    if asked.context:
        raise _unsupported("context", "Send the conversation to /api/chat")
    if asked.raw and _has_text(asked.system):
        raise errors.invalid_request("'raw' and 'system' exclude each other.", "system")
    path = CHAT_PATH
    if _has_text(asked.suffix):
        path = INFILL_PATH
    elif asked.raw:
        path = COMPLETION_PATH
    if asked.images and path != CHAT_PATH:
        raise _unsupported("images", "They need a chat's template: leave out 'raw' and 'suffix'")
    fields = _generating_fields(asked, path, texts, is_model)
    prompt = asked.prompt if _is_given(asked.prompt) else msgspec.Raw(b'""')
    if path == CHAT_PATH:
        messages: list[bytes] = [b"["]
        if _has_text(asked.system):
            messages += [b'{"role":"system","content":', asked.system, b"},"]
        PartCounter().add_parts(len(asked.images or ()), "images")
        messages += [b'{"role":"user","content":', *_content(prompt, asked.images, texts, "images")]
        fields["messages"] = [*messages, b"}]"]
    elif path == INFILL_PATH:
        fields["input_prefix"], fields["input_suffix"] = prompt, asked.suffix
    else:
        fields["prompt"] = prompt
    load = _load_reason(asked) if not _has_text(asked.prompt) else None
    return (yield from _translated(path, fields, texts, asked, load))


def translate_embed(body: bytes, is_model: IsModel, field_name: str) -> Translating:
    """`/api/embed` and, with another field, `/api/embeddings`."""
    texts = yield from cut_long_strings(body)
    asked = texts.decode(_EMBED)
    given: msgspec.Raw = getattr(asked, field_name)
    fields: FieldPieces = _model_field(asked.model, is_model) | {"input": given}
    try:
        has_text = bool(_TEXTS.decode(given)) if _is_given(given) else False
    except JSON_ERRORS:
        message = f"'{field_name}' must be a string or a list of strings."
        raise errors.invalid_request(message, field_name) from None
    load = None
    if not has_text:
        load, fields["input"] = "load", b'""'
    if asked.dimensions is not None and asked.dimensions < 0:
        raise errors.invalid_request("'dimensions' is negative.", "dimensions")
    joined = yield from texts.join(fields)
    return TranslatedRequest(
        EMBEDDINGS_PATH, joined, asked.model, load=load, dimensions=asked.dimensions or 0
    )


def _translated(
    path: str, fields: FieldPieces, texts: CutBody, asked: _Generating, load: str | None
) -> Translating:
    stream = asked.stream is not False
    joined = yield from texts.join(fields)
    return TranslatedRequest(path, joined, asked.model, stream, load, asked.top_logprobs or 0)


def _load_reason(asked: _Common) -> str:
    """What an empty request asks for: with a `keep_alive` of nothing, to unload the model."""
    value = asked.keep_alive
    if isinstance(value, str):
        return "unload" if re.fullmatch(r"0+(\.0+)?(ns|us|ms|s|m|h)?", value) else "load"
    return "unload" if value == 0 and value is not None else "load"


# FieldPieces of requests that generate.


def _generating_fields(
    asked: _Generating, path: str, texts: CutBody, is_model: IsModel
) -> FieldPieces:
    if asked.debug_render_only:
        raise _unsupported("_debug_render_only", "llama.cpp's /apply-template renders a chat")
    streams = asked.stream is not False
    fields = _model_field(asked.model, is_model)
    fields["stream"] = _json(streams)
    if streams and path != INFILL_PATH:
        fields["stream_options"] = b'{"include_usage":true}'
    for name, value in _option_fields(_options(asked.options, texts), path).items():
        fields[name] = _json(value)
    fields |= _format_fields(asked.format, path)
    if path == CHAT_PATH and (kwargs := _thinking(asked.think)) is not None:
        fields["chat_template_kwargs"] = _json(kwargs)
    if asked.logprobs:
        count = asked.top_logprobs or 0
        if not 0 <= count <= 20:
            raise errors.invalid_request("'top_logprobs' must be from 0 to 20.", "top_logprobs")
        if path == CHAT_PATH:
            # Without any, llama.cpp does not even report the chosen token's.
            fields |= {"logprobs": b"true", "top_logprobs": _json(max(1, count))}
        elif path == COMPLETION_PATH:
            fields["logprobs"] = _json(max(1, count))
    return fields


def _model_field(name: str | None, is_model: IsModel) -> FieldPieces:
    if not name:
        return {}
    return {"model": _json(_known_name(name, is_model))}


def _known_name(name: str, is_model: IsModel) -> str:
    """The name; Ollama's tag of a name without one is left out if no model has it."""
    bare = name.removesuffix(DEFAULT_TAG)
    return bare if bare != name and not is_model(name) else name


def shown_name(body: JsonObject, is_model: IsModel) -> str | None:
    """The model that `/api/show` names; None: none. Raises: GatewayError 400."""
    field_name = "model" if body.get("model") else "name"
    name = body.get(field_name)
    if name and not isinstance(name, str):
        raise errors.invalid_request(f"'{field_name}' must be a string.", field_name)
    return _known_name(name, is_model) if name else None


_NUMBERS = frozenset(
    {
        "temperature", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty",
        "frequency_penalty", "mirostat_tau", "mirostat_eta",
    }
)  # fmt: skip

_INTEGERS = {name: name for name in ("top_k", "seed", "repeat_last_n", "mirostat")} | {
    "num_keep": "n_keep"
}
"""With llama.cpp's names. Other options concern how Ollama loads a model, and are ignored."""


def _options(raw: msgspec.Raw, texts: CutBody) -> JsonObject:
    if not _is_given(raw):
        return {}
    if len(raw) > MOST_OPTIONS_BYTES:
        message = f"'options' has more than {MOST_OPTIONS_BYTES} bytes."
        raise errors.invalid_request(message, "options")
    options: JsonObject = texts.decode_part(_OPTIONS, raw, "options")
    return options


def _option_fields(options: JsonObject, path: str) -> JsonObject:
    """The options as llama.cpp's sampling parameters. Raises: GatewayError 400."""
    fields: JsonObject = {}
    for name, value in options.items():
        if value is None:
            continue
        if name in _NUMBERS:
            fields[name] = _number(name, value)
        elif name in _INTEGERS:
            fields[_INTEGERS[name]] = _integer(name, value)
        elif name == "num_predict":
            # Negative: no limit, which is the default.
            if (most := _integer(name, value)) > 0:
                fields["n_predict" if path == INFILL_PATH else "max_tokens"] = most
        elif name == "stop":
            words = [value] if isinstance(value, str) else value
            if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                raise _wrong_option(name, "a list of strings")
            fields[name] = words
    return fields


def _number(name: str, value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_option(name, "a number")
    return value


def _integer(name: str, value: object) -> int:
    number = _number(name, value)
    if isinstance(number, float) and not math.isfinite(number):
        raise _wrong_option(name, "a number that an integer can hold")
    return int(number)


def _wrong_option(name: str, expected: str) -> GatewayError:
    return errors.invalid_request(f"'options.{name}' must be {expected}.", f"options.{name}")


def _format_fields(raw: msgspec.Raw, path: str) -> FieldPieces:
    text = raw_head(raw, 7)
    if not _has_text(raw):
        return {}
    if text == b'"json"':
        schema = msgspec.Raw(b'{"type":"object"}')
    elif text[:1] == b"{":
        schema = raw
    else:
        message = "'format' must be \"json\" or an object, a JSON schema."
        raise errors.invalid_request(message, "format")
    if path != CHAT_PATH:
        return {"json_schema": schema}
    if text[:1] == b'"':
        return {"response_format": b'{"type":"json_object"}'}
    head = b'{"type":"json_schema","json_schema":{"name":"format","schema":'
    return {"response_format": [head, schema, b"}}"]}


_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "max": "high"}


def _thinking(think: object) -> JsonObject | None:
    """What chat templates are told of `think`; None: it is not given."""
    if think is None:
        return None
    if isinstance(think, bool):
        return {"enable_thinking": think}
    if isinstance(think, str) and think in _EFFORTS:
        return {"enable_thinking": True, "reasoning_effort": _EFFORTS[think]}
    message = '\'think\' must be true, false, "low", "medium", "high" or "max".'
    raise errors.invalid_request(message, "think")


# Messages.


def _messages(messages: list[msgspec.Raw], texts: CutBody) -> Generator[None, None, list[bytes]]:
    """A chat's messages, in pieces."""
    pieces = [b"["]
    calls = _CallIds()
    parts = PartCounter()
    parts.add_messages(len(messages))
    for number, raw in enumerate(messages):
        name = f"messages[{number}]"
        message = texts.decode_part(_MESSAGE, raw, name)
        role = message.role.lower()
        _check_text(message.content, f"{name}.content")
        _check_text(message.thinking, f"{name}.thinking")
        if number:
            pieces.append(b",")
        content = message.content if _is_given(message.content) else msgspec.Raw(b'""')
        pieces += [b'{"role":', _json(role), b',"content":']
        parts.add_parts(len(message.images or ()), f"{name}.images")
        pieces += _content(content, message.images, texts, f"{name}.images")
        if _has_text(message.thinking):
            pieces += [b',"reasoning_content":', message.thinking]
        if role == "tool":
            answered = calls.answered(message.tool_name, message.tool_call_id)
            pieces += [b',"tool_call_id":', _json(answered)]
            if message.tool_name:
                pieces += [b',"name":', _json(message.tool_name)]
        elif _is_given(message.tool_calls):
            whole = msgspec.Raw(texts.restored(message.tool_calls, f"{name}.tool_calls"))
            asked = texts.decode_part(_TOOL_CALLS, whole, f"{name}.tool_calls")
            parts.add_parts(len(asked or ()), f"{name}.tool_calls")
            if asked:
                pieces += [b',"tool_calls":', _json([calls.openai_call(call) for call in asked])]
        pieces.append(b"}")
        if parts.ends_step(len(message.tool_calls)):
            yield
    pieces.append(b"]")
    return pieces


@dataclass(slots=True)
class _CallIds:
    """Ids of a chat's tool calls: Ollama's clients may leave them out, templates may want them."""

    _count: int = 0
    _unanswered: list[tuple[str, str]] = field(default_factory=list)
    """(tool's name, id)."""

    def openai_call(self, call: _MessageCall) -> JsonObject:
        """The call as in a chat completion: with an id, and its arguments as a text."""
        self._count += 1
        call_id = call.id or f"call_{self._count}"
        self._unanswered.append((call.function.name, call_id))
        del self._unanswered[:-MOST_UNANSWERED]
        raw = bytes(call.function.arguments)
        try:
            arguments: object = msgspec.Raw(raw) if raw[:1] == b'"' else raw.decode()
        except UnicodeDecodeError:
            raise errors.invalid_json("a tool call's arguments are not UTF-8") from None
        function = {"name": call.function.name, "arguments": arguments}
        return {"type": "function", "id": call_id, "function": function}

    def answered(self, name: str | None, call_id: str | None) -> str:
        """The id of the call that a tool's message answers: the first of this name, or at all."""
        for index, (tool, known) in enumerate(self._unanswered):
            if call_id == known if call_id else name in {None, "", tool}:
                del self._unanswered[index]
                return known
        if call_id:
            return call_id
        return self._unanswered.pop(0)[1] if self._unanswered else f"call_{self._count or 1}"


_IMAGE_TYPES = {b"/9j/": b"jpeg", b"iVBO": b"png", b"R0lG": b"gif", b"UklG": b"webp"}
"""Image types by the first characters of the base64."""

_BASE64_START = re.compile(rb'"[A-Za-z0-9+/_=-]{4,}"?')


def _content(
    text: msgspec.Raw, images: list[msgspec.Raw] | None, texts: CutBody, name: str
) -> list[bytes]:
    """A message's content, in pieces: the text, with images before it."""
    if not images:
        return [text]
    pieces = [b"["]
    for number, image in enumerate(images):
        # Some encoders escape slashes.
        start = texts.beginning(image).replace(rb"\/", b"/").rstrip(b"\\")
        if not _BASE64_START.fullmatch(start):
            field_name = f"{name}[{number}]"
            raise errors.invalid_request(f"'{field_name}' must be base64.", field_name)
        kind = _IMAGE_TYPES.get(start[1:5], b"jpeg")
        pieces += [
            b'{"type":"image_url","image_url":{"url":"data:image/%b;base64,' % kind,
            bytes(memoryview(image)[1:]),
            b"}},",
        ]
    return [*pieces, b'{"type":"text","text":', text, b"}]"]


# Values.


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)


def _is_given(raw: msgspec.Raw) -> bool:
    return len(raw) > 0 and raw_head(raw, 4) != b"null"


def _has_text(raw: msgspec.Raw) -> bool:
    """Whether a value is given that is not the empty text."""
    return _is_given(raw) and raw_head(raw, 2) != b'""'


def _check_text(raw: msgspec.Raw, name: str) -> None:
    if _is_given(raw) and raw_head(raw, 1) != b'"':
        raise errors.invalid_request(f"'{name}' must be a string.", name)


def _unsupported(name: str, remedy: str) -> GatewayError:
    return errors.invalid_request(f"'{name}' is not supported. {remedy}.", name)
