"""Ollama's API, which nodes are asked by OpenAI's and llama.cpp's: NDJSON streams, its errors.

The settings turn it on (`ollama`). Of a request only what must change is parsed: texts, images,
schemas and tools pass as the client's own bytes. From a large body its long strings are cut out
before it is parsed, and put back at the end. The models are described from what their nodes have
reported.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar

import msgspec

from gateway import errors
from gateway.api import sse
from gateway.api.base import (
    Api,
    IsModel,
    ModelSummary,
    Page,
    ResponseRewriter,
    Translation,
    VisibleCatalog,
)
from gateway.api.chat import Logprobs
from gateway.api.json_values import (
    JSON_ERRORS,
    STEP_BYTES,
    CutBody,
    JsonObject,
    PartCounter,
    as_raw,
    cut_long_strings,
    decode_body,
    raw_head,
    run_at_once,
)
from gateway.errors import GatewayError
from gateway.transport.errors import InvalidResponse

CHAT_PATH, COMPLETION_PATH, INFILL_PATH, EMBEDDINGS_PATH = (
    "/v1/chat/completions", "/v1/completions", "/infill", "/v1/embeddings",
)  # fmt: skip

# Tool calls without an answer of which a later message may still answer one; the newest.
MOST_UNANSWERED = 1000
MOST_OPTIONS_BYTES = 64 * 1024  # bytes of `options`, besides strings that were cut out of them
DEFAULT_TAG = ":latest"  # ollama's tag of a name without one
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
_TEXTS = msgspec.json.Decoder(str | list[str] | None)


@dataclass(frozen=True, slots=True)
class TranslatedRequest:
    """A request to nodes, and what the response's translation needs of the client's."""

    path: str
    body: bytes
    model: str | None
    load: str | None = None  # `load` or `unload`: it has no prompt, and asks for nothing else
    top_logprobs: int = 0  # how many probabilities the client asked for besides the chosen token's
    dimensions: int = 0  # of an embedding that is to be shortened; 0: it is not
    single: bool = False  # whether it is for one embedding, as `/api/embeddings` gives it


Translating = Generator[None, None, TranslatedRequest]


def translate_chat(body: bytes, is_model: IsModel) -> Translating:
    """`/api/chat` as a chat. Raises: GatewayError 400, as the next two."""
    texts = yield from cut_long_strings(body)
    chat = decode_body(_CHAT, texts.rest)
    fields = _generating_fields(chat, CHAT_PATH, is_model)
    fields["messages"] = yield from _messages(chat.messages or [], texts)
    if _is_given(chat.tools):
        if raw_head(chat.tools, 1) != b"[":
            raise errors.invalid_request("'tools' must be a list.", "tools")
        fields["tools"] = chat.tools
    load = _load_reason(chat) if not chat.messages else None
    joined = yield from texts.join(fields)
    return TranslatedRequest(CHAT_PATH, joined, chat.model, load, chat.top_logprobs or 0)


def translate_generate(body: bytes, is_model: IsModel) -> Translating:
    """`/api/generate`: a chat; a completion if it is raw, an infill if it has a suffix."""
    texts = yield from cut_long_strings(body)
    asked = decode_body(_GENERATE, texts.rest)
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
    fields = _generating_fields(asked, path, is_model)
    prompt = asked.prompt if _is_given(asked.prompt) else ""
    if path == CHAT_PATH:
        PartCounter().add_parts(len(asked.images or ()), "images")
        content = _content(prompt, asked.images, texts, "images")
        system = {"role": "system", "content": asked.system}
        begin = [system] if _has_text(asked.system) else []
        fields["messages"] = [*begin, {"role": "user", "content": content}]
    elif path == INFILL_PATH:
        fields["input_prefix"], fields["input_suffix"] = prompt, asked.suffix
    else:
        fields["prompt"] = prompt
    load = _load_reason(asked) if not _has_text(asked.prompt) else None
    joined = yield from texts.join(fields)
    return TranslatedRequest(path, joined, asked.model, load, asked.top_logprobs or 0)


def translate_embed(body: bytes, is_model: IsModel, field_name: str) -> Translating:
    """`/api/embed` and, with another field, `/api/embeddings`."""
    texts = yield from cut_long_strings(body)
    asked = decode_body(_EMBED, texts.rest)
    given: msgspec.Raw = getattr(asked, field_name)
    fields = _model_field(asked.model, is_model) | {"input": given}
    try:
        has_text = bool(_TEXTS.decode(given)) if _is_given(given) else False
    except JSON_ERRORS:
        problem = "must be a string or a list of strings."
        raise errors.invalid_field(field_name, problem) from None
    load = None
    if not has_text:
        load, fields["input"] = "load", ""
    if asked.dimensions is not None and asked.dimensions < 0:
        raise errors.invalid_request("'dimensions' is negative.", "dimensions")
    joined = yield from texts.join(fields)
    return TranslatedRequest(
        EMBEDDINGS_PATH,
        joined,
        asked.model,
        load,
        dimensions=asked.dimensions or 0,
        single=field_name == "prompt",
    )


def _load_reason(asked: _Common) -> str:
    """What an empty request asks for: with a `keep_alive` of nothing, to unload the model."""
    value = asked.keep_alive
    if isinstance(value, str):
        return "unload" if re.fullmatch(r"0+(\.0+)?(ns|us|ms|s|m|h)?", value) else "load"
    return "unload" if value == 0 and value is not None else "load"


# Fields of requests that generate.


def _generating_fields(asked: _Generating, path: str, is_model: IsModel) -> JsonObject:
    if asked.debug_render_only:
        raise _unsupported("_debug_render_only", "llama.cpp's /apply-template renders a chat")
    streams = asked.stream is not False
    fields = _model_field(asked.model, is_model) | {"stream": streams}
    if streams and path != INFILL_PATH:
        fields["stream_options"] = {"include_usage": True}
    fields |= _option_fields(asked.options, path)
    fields |= _format_fields(asked.format, path)
    if path == CHAT_PATH and (kwargs := _thinking(asked.think)) is not None:
        fields["chat_template_kwargs"] = kwargs
    if asked.logprobs:
        count = asked.top_logprobs or 0
        if not 0 <= count <= 20:
            raise errors.invalid_request("'top_logprobs' must be from 0 to 20.", "top_logprobs")
        if path == CHAT_PATH:
            # Without any, llama.cpp does not even report the chosen token's.
            fields |= {"logprobs": True, "top_logprobs": max(1, count)}
        elif path == COMPLETION_PATH:
            fields["logprobs"] = max(1, count)
    return fields


def _model_field(name: str | None, is_model: IsModel) -> JsonObject:
    return {"model": _known_name(name, is_model)} if name else {}


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


_Whole = int | float | None  # some clients write them with a point


class _Options(msgspec.Struct):
    """Options that llama.cpp knows. Others concern how Ollama loads a model, and are ignored."""

    num_predict: _Whole = None
    stop: str | list[str] | None = None
    top_k: _Whole = None
    seed: _Whole = None
    repeat_last_n: _Whole = None
    mirostat: _Whole = None
    num_keep: _Whole = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None


_OPTIONS = msgspec.json.Decoder(_Options)
_WHOLE_OPTIONS = ("num_predict", "top_k", "seed", "repeat_last_n", "mirostat", "num_keep")


def _option_fields(raw: msgspec.Raw, path: str) -> JsonObject:
    """The options as llama.cpp's sampling parameters. Raises: GatewayError 400."""
    if not _is_given(raw):
        return {}
    if len(raw) > MOST_OPTIONS_BYTES:
        raise errors.invalid_field("options", f"has more than {MOST_OPTIONS_BYTES} bytes.")
    given = msgspec.structs.asdict(decode_body(_OPTIONS, raw, "options"))
    fields = {name: value for name, value in given.items() if value is not None}
    fields |= {name: int(fields[name]) for name in _WHOLE_OPTIONS if name in fields}
    if isinstance(stop := fields.get("stop"), str):
        fields["stop"] = [stop]
    if "num_keep" in fields:
        fields["n_keep"] = fields.pop("num_keep")
    # Negative: no limit, which is the default.
    if (most := fields.pop("num_predict", 0)) > 0:
        fields["n_predict" if path == INFILL_PATH else "max_tokens"] = most
    return fields


def _format_fields(raw: msgspec.Raw, path: str) -> JsonObject:
    text = raw_head(raw, 7)
    if not _has_text(raw):
        return {}
    if text != b'"json"' and text[:1] != b"{":
        raise errors.invalid_field("format", 'must be "json" or an object, a JSON schema.')
    if path != CHAT_PATH:
        return {"json_schema": raw if text[:1] == b"{" else {"type": "object"}}
    if text[:1] == b'"':
        return {"response_format": {"type": "json_object"}}
    schema = {"name": "format", "schema": raw}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "max": "high"}


def _thinking(think: object) -> JsonObject | None:
    """What chat templates are told of `think`; None: it is not given."""
    if think is None:
        return None
    if isinstance(think, bool):
        return {"enable_thinking": think}
    if isinstance(think, str) and think in _EFFORTS:
        return {"enable_thinking": True, "reasoning_effort": _EFFORTS[think]}
    raise errors.invalid_field("think", 'must be true, false, "low", "medium", "high" or "max".')


# Messages.


def _messages(
    messages: list[msgspec.Raw], texts: CutBody
) -> Generator[None, None, list[msgspec.Raw]]:
    """A chat's messages."""
    made: list[msgspec.Raw] = []
    calls = _CallIds()
    parts = PartCounter()
    parts.add_messages(len(messages))
    for number, raw in enumerate(messages):
        name = f"messages[{number}]"
        message = decode_body(_MESSAGE, raw, name)
        role = message.role.lower()
        _check_text(message.content, f"{name}.content")
        _check_text(message.thinking, f"{name}.thinking")
        parts.add_parts(len(message.images or ()), f"{name}.images")
        text = message.content if _is_given(message.content) else ""
        content = _content(text, message.images, texts, f"{name}.images")
        fields: JsonObject = {"role": role, "content": content}
        if _has_text(message.thinking):
            fields["reasoning_content"] = message.thinking
        if role == "tool":
            fields["tool_call_id"] = calls.answered(message.tool_name, message.tool_call_id)
            if message.tool_name:
                fields["name"] = message.tool_name
        elif _is_given(message.tool_calls):
            whole = msgspec.Raw(texts.restored(message.tool_calls, f"{name}.tool_calls"))
            asked = decode_body(_TOOL_CALLS, whole, f"{name}.tool_calls")
            parts.add_parts(len(asked or ()), f"{name}.tool_calls")
            if asked:
                fields["tool_calls"] = [calls.openai_call(call) for call in asked]
        made.append(as_raw(fields))
        if parts.ends_step(len(message.tool_calls)):
            yield
    return made


@dataclass(slots=True)
class _CallIds:
    """Ids of a chat's tool calls: Ollama's clients may leave them out, templates may want them."""

    _count: int = 0
    _unanswered: list[tuple[str, str]] = field(default_factory=list)  # (tool's name, id)

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


# Image types by the first characters of the base64.
_IMAGE_TYPES = {b"/9j/": b"jpeg", b"iVBO": b"png", b"R0lG": b"gif", b"UklG": b"webp"}
_BASE64_START = re.compile(rb'"[A-Za-z0-9+/_=-]{4,}"?')


def _content(
    text: msgspec.Raw | str, images: list[msgspec.Raw] | None, texts: CutBody, name: str
) -> Any:
    """A message's content: the text, with images before it."""
    if not images:
        return text
    content: list[JsonObject] = []
    for number, image in enumerate(images):
        # Some encoders escape slashes.
        start = texts.beginning(image).replace(rb"\/", b"/").rstrip(b"\\")
        if not _BASE64_START.fullmatch(start):
            raise errors.invalid_field(f"{name}[{number}]", "must be base64.")
        kind = _IMAGE_TYPES.get(start[1:5], b"jpeg")
        url = msgspec.Raw(b'"data:image/%b;base64,%b' % (kind, bytes(memoryview(image)[1:])))
        content.append({"type": "image_url", "image_url": {"url": url}})
    return [*content, {"type": "text", "text": text}]


# Values.


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


# The version of Ollama whose API this is; tools ask whether it is new enough for them.
VERSION = "0.33.0"
_NANOSECONDS = 1_000_000_000


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


_FIELD_NAMES = {
    "response_format": "format",
    "json_schema": "format",
    "max_tokens": "options.num_predict",
    "n_predict": "options.num_predict",
    "stop": "options.stop",
    "input_prefix": "prompt",
    "input_suffix": "suffix",
}


class OllamaApi(Api):
    """`/api/...`: the errors of all its paths."""

    name = "ollama"
    heartbeat = b" "  # at the beginning of a line: its clients fail on an empty one
    heartbeat_is_event = True
    has_comments = False
    stream_content_type = b"application/x-ndjson"
    field_names: Mapping[str, str] = _FIELD_NAMES
    """Ollama's names of the fields that errors of translated requests name."""

    def owns_path(self, path: str) -> bool:
        return path.startswith("/api/") and not path.startswith("/api/v1/")

    def error_body(self, error: GatewayError, x_request_id: str) -> bytes:
        # Its clients read a text, and nothing else.
        message = error.message
        for name, own_name in self.field_names.items():
            message = message.replace(f"'{name}'", f"'{own_name}'")
        return msgspec.json.encode({"error": message})

    def error_event(self, error: GatewayError, x_request_id: str) -> bytes:
        return self.error_body(error, x_request_id) + b"\n"

    def is_own_error(self, content: bytes) -> bool:
        return False


@dataclass(eq=False)
class TranslatedApi(OllamaApi):
    """A path whose requests reach nodes. The clocks are for durations and for dates."""

    asked: Callable[[bytes, IsModel], Translating]  # makes the request to nodes of the body
    rewriter: type[_Rewriter]
    field_names: Mapping[str, str] = field(default_factory=lambda: _FIELD_NAMES)
    clock: Callable[[], float] = _loop_time
    wall_clock: Callable[[], float] = time.time
    translates: ClassVar[bool] = True

    def translate(
        self, body: bytes, is_model: IsModel, *, prompt_cache: bool = True
    ) -> Generator[None, None, Translation]:
        started_at = self.clock()
        request = yield from self.asked(body, is_model)
        rewriter = self.rewriter(request, started_at, self.clock, self.wall_clock)
        reply = None if request.load is None else rewriter.loaded(request.load)
        return Translation(request.path, request.body, rewriter, reply)


# Responses of nodes.


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallPart(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_CallPart] | None = None


class _Alternative(msgspec.Struct):
    token: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    logprob: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    bytes: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Token(_Alternative):
    """A chosen token, in the form of both APIs."""

    top_logprobs: list[_Alternative] | msgspec.UnsetType | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Timings(msgspec.Struct):
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0
    predicted_n: int = 0


class _Output(msgspec.Struct):
    """An event or a plain response of a chat, a completion, or llama.cpp's own completion."""

    model: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None
    content: str | None = None
    stop: bool = False
    stop_type: str | None = None
    tokens_evaluated: int = 0
    tokens_predicted: int = 0


_OUTPUT = msgspec.json.Decoder(_Output)
_TOKEN = msgspec.json.Decoder(_Token)
_RAW_ITEMS = msgspec.json.Decoder(list[msgspec.Raw] | None)
STEP_TOKENS = 500  # tokens whose probabilities are rewritten in one step


def _decode(data: bytes) -> _Output:
    try:
        return _OUTPUT.decode(data)
    except JSON_ERRORS:
        raise InvalidResponse("The node's answer is not what was expected") from None


@dataclass(eq=False)
class _Rewriter(ResponseRewriter):
    """Rewrites the response to a request, which was begun at `_started_at`."""

    _request: TranslatedRequest
    _started_at: float
    _clock: Callable[[], float]
    _wall_clock: Callable[[], float]

    def loaded(self, reason: str) -> bytes:
        """The response to a request without a prompt, which only loads or unloads the model."""
        raise NotImplementedError


@dataclass(eq=False)
class _TextRewriter(_Rewriter):
    """Rewrites a response that generates text. A stream's last line has what the others lack."""

    _model: str | None = None  # as the node names it
    _first_text_at: float | None = None
    _reason: str | None = None
    _usage: _Usage = field(default_factory=_Usage)
    _timings: _Timings | None = None
    _calls: list[JsonObject] = field(default_factory=list)  # those of which more may come
    _call_count: int = 0

    def loaded(self, reason: str) -> bytes:
        return msgspec.json.encode(
            {**self._head(), **self._answer("", "", []), "done": True, "done_reason": reason}
        )

    def rewrite_events(self, events: bytes) -> bytes:
        lines = []
        for event in sse.split(events):
            data = sse.payload(event)
            if data == b"[DONE]":
                lines.append(self._last_line())
            elif data:
                lines += self._lines(_decode(data))
        return b"".join(lines)

    def rewrite_body(self, content: bytes) -> Generator[None, None, bytes]:
        output = _decode(content)
        text, thinking, logprobs = self._read(output)
        tokens = []
        for number, token in enumerate(logprobs):
            if number % STEP_TOKENS == 0:
                yield
            tokens.append(as_raw(token))
        answer = self._answer(text, thinking, self._take_calls())
        found = {"logprobs": tokens} if tokens else {}
        return msgspec.json.encode({**self._head(), **answer, **self._end(), **found})

    def _answer(self, text: str, thinking: str, calls: list[JsonObject]) -> JsonObject:
        """The fields of a line that hold the answer, or a part of it."""
        raise NotImplementedError

    def _lines(self, output: _Output) -> list[bytes]:
        """The lines for an event."""
        if output.error:
            message = output.error.get("message") if isinstance(output.error, dict) else None
            return [_line({"error": str(message or "The node failed.")})]
        text, thinking, tokens = self._read(output)
        logprobs = list(tokens)
        calls = self._take_calls(keep=0 if self._reason else 1)
        lines = []
        if text or thinking or calls or logprobs:
            if self._first_text_at is None:
                self._first_text_at = self._clock()
            line = {**self._head(), **self._answer(text, thinking, calls), "done": False}
            lines.append(_line({**line, "logprobs": logprobs} if logprobs else line))
        if output.stop:  # llama.cpp's own streams have no other end
            lines.append(self._last_line())
        return lines

    def _read(self, output: _Output) -> tuple[str, str, Iterator[_Token]]:
        """(text, thinking, logprobs) of an event; counts and calls are remembered."""
        self._model = self._model or output.model
        if output.usage is not None:
            self._usage = output.usage
        if output.timings is not None:
            self._timings = output.timings
        if output.stop:
            self._reason = "length" if output.stop_type == "limit" else "stop"
            self._usage = _Usage(output.tokens_evaluated, output.tokens_predicted)
        if not output.choices:
            return output.content or "", "", iter(())
        choice = output.choices[0]
        if choice.finish_reason:
            self._reason = "length" if choice.finish_reason == "length" else "stop"
        logprobs = _ollama_logprobs(choice.logprobs, self._request.top_logprobs)
        part = choice.delta or choice.message
        if part is None:
            return choice.text or "", "", logprobs
        for number, call in enumerate(part.tool_calls or ()):
            self._add_call(call, number if choice.delta is None else call.index)
        return part.content or "", part.reasoning_content or "", logprobs

    def _add_call(self, part: _CallPart, index: int) -> None:
        if index >= self._call_count:
            self._calls.append({"id": part.id, "name": "", "arguments": "", "index": index})
            self._call_count = index + 1
        if not self._calls or part.function is None:
            return
        call = self._calls[-1]
        call["name"] += part.function.name or ""
        call["arguments"] += part.function.arguments or ""

    def _take_calls(self, keep: int = 0) -> list[JsonObject]:
        """The tool calls that are complete: all but the last `keep`."""
        if len(self._calls) <= keep:
            return []
        taken = self._calls[: len(self._calls) - keep]
        self._calls = self._calls[len(taken) :]
        return [call for one in taken if (call := self._ollama_call(one)) is not None]

    def _ollama_call(self, call: JsonObject) -> JsonObject | None:
        """A tool call in Ollama's form; None: it was cut off. Raises: InvalidResponse."""
        try:
            arguments = msgspec.json.decode(call["arguments"] or "{}", type=dict[str, Any])
        except JSON_ERRORS:
            if self._reason == "length":
                return None
            raise InvalidResponse("A tool call's arguments are no JSON object") from None
        function = {"index": call["index"], "name": call["name"], "arguments": arguments}
        return {**({"id": call["id"]} if call["id"] else {}), "function": function}

    def _head(self) -> JsonObject:
        model = self._request.model or self._model or ""
        return {"model": model, "created_at": _date(self._wall_clock())}

    def _last_line(self) -> bytes:
        return _line({**self._head(), **self._answer("", "", []), **self._end()})

    def _end(self) -> JsonObject:
        """The fields of the end: reason, tokens, and durations in nanoseconds.

        Waiting for a slot counts as loading, as it does in Ollama.
        """
        now, timings, usage = self._clock(), self._timings, self._usage
        total = now - self._started_at
        reading = writing = 0.0
        if timings is not None:
            reading, writing = timings.prompt_ms / 1e3, timings.predicted_ms / 1e3
        if timings is None or timings.predicted_n != usage.completion_tokens:
            # None are known of the whole answer: it was resumed, or the node is not llama.cpp.
            writing = 0.0 if self._first_text_at is None else now - self._first_text_at
        durations = {
            "total_duration": total,
            "load_duration": max(0.0, total - reading - writing),
            "prompt_eval_duration": reading,
            "eval_duration": writing,
        }
        end = {name: round(seconds * _NANOSECONDS) for name, seconds in durations.items()}
        return {
            "done": True,
            "done_reason": self._reason or "stop",
            **end,
            "prompt_eval_count": usage.prompt_tokens,
            "eval_count": usage.completion_tokens,
        }


class _ChatRewriter(_TextRewriter):
    def _answer(self, text: str, thinking: str, calls: list[JsonObject]) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class _GenerateRewriter(_TextRewriter):
    def _answer(self, text: str, thinking: str, calls: list[JsonObject]) -> JsonObject:
        return {"response": text, "thinking": thinking} if thinking else {"response": text}


def _ollama_logprobs(logprobs: Logprobs | None, most: int) -> Iterator[_Token]:
    """The chosen tokens, each with its `most` likeliest alternatives."""
    try:
        for one in () if logprobs is None else _RAW_ITEMS.decode(logprobs.content) or ():
            token = _TOKEN.decode(one)
            token.top_logprobs = (token.top_logprobs or [])[:most] or msgspec.UNSET
            yield token
    except JSON_ERRORS:
        raise InvalidResponse("The node's probabilities can't be read") from None


def _line(value: JsonObject) -> bytes:
    return msgspec.json.encode(value) + b"\n"


class _Embedding(msgspec.Struct):
    embedding: msgspec.Raw
    index: int = 0


class _Embeddings(msgspec.Struct):
    data: list[msgspec.Raw]
    model: str | None = None
    usage: _Usage | None = None


_EMBEDDINGS = msgspec.json.Decoder(_Embeddings)
_EMBEDDING = msgspec.json.Decoder(_Embedding)
_VECTOR = msgspec.json.Decoder(list[float])


class _EmbedRewriter(_Rewriter):
    """Rewrites embeddings."""

    def loaded(self, reason: str) -> bytes:
        return run_at_once(self._encode(_Embeddings([]), []))

    def rewrite_body(self, content: bytes) -> Generator[None, None, bytes]:
        vectors: list[tuple[int, msgspec.Raw]] = []
        work = 0
        try:
            found = _EMBEDDINGS.decode(content)
            for one in found.data:
                if work > STEP_BYTES:
                    work = 0
                    yield
                vector = _EMBEDDING.decode(one)
                vectors.append((vector.index, self._shortened(vector.embedding)))
                work += len(memoryview(one)) * (8 if self._request.dimensions else 1)
        except JSON_ERRORS:
            raise InvalidResponse("The node's answer holds no embeddings") from None
        vectors.sort(key=itemgetter(0))
        return (yield from self._encode(found, [vector for _, vector in vectors]))

    def _shortened(self, vector: msgspec.Raw) -> msgspec.Raw:
        """The vector's first dimensions, of length 1 again, if the client asked for fewer."""
        most = self._request.dimensions
        if not most:
            return vector
        values = _VECTOR.decode(vector)[:most]
        length = math.sqrt(sum(value * value for value in values)) or 1.0
        return as_raw([value / length for value in values])

    def _encode(
        self, found: _Embeddings, vectors: list[msgspec.Raw]
    ) -> Generator[None, None, bytes]:
        if self._request.single:
            return msgspec.json.encode({"embedding": vectors[0] if vectors else []})
        usage = found.usage or _Usage()
        answer = {
            "model": self._request.model or found.model or "",
            "embeddings": vectors,
            "total_duration": int((self._clock() - self._started_at) * _NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
        }
        return (yield from CutBody(b"", b"").join(answer))


# Descriptions of models, from what their nodes have reported.

_NEVER = "9999-12-31T00:00:00Z"  # when a model is unloaded: nodes keep theirs
_ARCHITECTURE = "llama"  # nodes don't report it, and clients look for the context under its name


def _show_model(catalog: VisibleCatalog, body: JsonObject) -> JsonObject:
    """`/api/show`. Raises: GatewayError."""
    model = catalog.model(shown_name(body, {one.name for one in catalog.models}.__contains__))
    info: JsonObject = {"general.architecture": _ARCHITECTURE}
    if model.parameters is not None:
        info["general.parameter_count"] = model.parameters
    if model.context is not None:
        info[f"{_ARCHITECTURE}.context_length"] = model.context
    return {
        "modelfile": "",
        "parameters": "" if model.context is None else f"num_ctx {model.context}",
        "template": "",
        "details": _details(model),
        "model_info": info,
        "capabilities": _capabilities(model),
        "modified_at": _date(model.created),
    }


def _listed(model: ModelSummary, fields: JsonObject) -> JsonObject:
    """A model in a list; in place of a digest of its file one of what is known of it."""
    known = f"{model.name}\n{model.file}\n{model.size}\n{model.quantization}"
    return {
        "name": model.name,
        "model": model.name,
        "size": model.size or 0,
        "digest": hashlib.sha256(known.encode()).hexdigest(),
        "details": _details(model),
        **fields,
    }


def _list_models(catalog: VisibleCatalog, _: JsonObject) -> JsonObject:
    """`/api/tags`."""
    models = [
        _listed(one, {"modified_at": _date(one.created), "capabilities": _capabilities(one)})
        for one in catalog.models
    ]
    return {"models": models}


def _list_loaded(catalog: VisibleCatalog, _: JsonObject) -> JsonObject:
    """`/api/ps`: the models with a node that is up."""
    models = []
    for one in catalog.models:
        if one.is_up:
            memory = (one.size or 0) if one.on_gpu else 0
            more = {"size_vram": memory, "context_length": one.context or 0}
            models.append(_listed(one, {"expires_at": _NEVER, **more}))
    return {"models": models}


def _details(model: ModelSummary) -> JsonObject:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": _ARCHITECTURE,
        "families": [_ARCHITECTURE],
        "parameter_size": _parameter_size(model.parameters),
        "quantization_level": model.quantization or "unknown",
        **({} if model.context is None else {"context_length": model.context}),
    }


def _parameter_size(count: int | None) -> str:
    """A number of parameters as `7.2B`; empty: it is not known."""
    if count is None:
        return ""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def _capabilities(model: ModelSummary) -> list[str]:
    found = {
        "completion": "chat" in model.endpoints,
        "tools": "chat" in model.endpoints,
        "vision": "vision" in model.endpoints,
        "insert": "infill" in model.endpoints,
        "embedding": "embeddings" in model.endpoints,
    }
    return [name for name, has in found.items() if has]


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


PAGES = (
    Page("/", lambda *_: "Ollama is running", needs_models=False),
    Page("/api/version", lambda *_: {"version": VERSION}, needs_models=False),
    Page("/api/tags", _list_models),
    Page("/api/ps", _list_loaded),
    Page("/api/show", _show_model, method="POST"),
)


OLLAMA = OllamaApi()
OLLAMA_CHAT = TranslatedApi(translate_chat, _ChatRewriter)
OLLAMA_GENERATE = TranslatedApi(
    translate_generate, _GenerateRewriter, {**_FIELD_NAMES, "messages": "prompt"}
)
OLLAMA_EMBED = TranslatedApi(partial(translate_embed, field_name="input"), _EmbedRewriter, {})
# The older `/api/embeddings`, with the field `prompt`.
OLLAMA_EMBEDDINGS = TranslatedApi(
    partial(translate_embed, field_name="prompt"), _EmbedRewriter, {"input": "prompt"}
)
