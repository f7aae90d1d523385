"""Ollama's API, which nodes are asked by OpenAI's and llama.cpp's: NDJSON streams, its errors.

The settings turn it on (`ollama`). Requests are translated in `ollama_requests.py`, responses here;
the models are described from what their nodes have reported.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

import msgspec

from gateway.errors import GatewayError
from gateway.proxy import sse
from gateway.proxy.api.base import (
    Api,
    ModelSummary,
    Page,
    ResponseRewriter,
    Translation,
    VisibleCatalog,
)
from gateway.proxy.api.ollama_requests import (
    EMBEDDINGS_PATH,
    IsModel,
    TranslatedRequest,
    shown_name,
    translate_chat,
    translate_embed,
    translate_generate,
)
from gateway.proxy.inbound.large_body import run_at_once
from gateway.proxy.json_values import JSON_ERRORS, STEP_BYTES, JsonObject
from gateway.transport.errors import InvalidResponse

VERSION = "0.33.0"
"""The version of Ollama whose API this is; tools ask whether it is new enough for them."""

_NANOSECONDS = 1_000_000_000

_NAMES = {
    "response_format": "format",
    "json_schema": "format",
    "max_tokens": "options.num_predict",
    "n_predict": "options.num_predict",
    "stop": "options.stop",
    "input_prefix": "prompt",
    "input_suffix": "suffix",
}
"""Ollama's names of the fields that errors of translated requests name."""


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


class OllamaApi(Api):
    """`/api/...`: the errors of all its paths."""

    name = "ollama"
    heartbeat_is_event = True
    has_comments = False
    stream_content_type = b"application/x-ndjson"

    def owns_path(self, path: str) -> bool:
        return path.startswith("/api/") and not path.startswith("/api/v1/")

    def error_body(self, error: GatewayError, x_request_id: str) -> bytes:
        # Its clients read a text, and nothing else.
        message = error.message
        for name, own_name in self._field_names().items():
            message = message.replace(f"'{name}'", f"'{own_name}'")
        return msgspec.json.encode({"error": message})

    def error_event(self, error: GatewayError, x_request_id: str) -> bytes:
        return self.error_body(error, x_request_id) + b"\n"

    def is_own_error(self, content: bytes) -> bool:
        return False

    def heartbeat(self) -> bytes:
        # White space at the beginning of a line: its clients fail on an empty line.
        return b" "

    def _field_names(self) -> Mapping[str, str]:
        return _NAMES


class _TranslatedApi(OllamaApi):
    """A path whose requests reach nodes. The clocks are for durations and for dates."""

    translates = True

    def __init__(
        self,
        clock: Callable[[], float] = _loop_time,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock

    def _translation(
        self,
        work: Generator[None, None, TranslatedRequest],
        rewriter_type: type[_Rewriter],
    ) -> Generator[None, None, Translation]:
        started_at = self._clock()
        request = yield from work
        rewriter = rewriter_type(request, started_at, self._clock, self._wall_clock)
        reply = None if request.load is None else rewriter.loaded(request.load)
        return Translation(request.path, request.body, rewriter, reply)


class OllamaChatApi(_TranslatedApi):
    """`/api/chat`."""

    def translate(self, body: bytes, is_model: IsModel) -> Generator[None, None, Translation]:
        return self._translation(translate_chat(body, is_model), _ChatRewriter)


class OllamaGenerateApi(_TranslatedApi):
    """`/api/generate`."""

    def translate(self, body: bytes, is_model: IsModel) -> Generator[None, None, Translation]:
        return self._translation(translate_generate(body, is_model), _GenerateRewriter)

    def _field_names(self) -> Mapping[str, str]:
        return {**_NAMES, "messages": "prompt"}


class OllamaEmbedApi(_TranslatedApi):
    """`/api/embed`, and with the field `prompt` the older `/api/embeddings`."""

    def __init__(
        self,
        field: str,
        clock: Callable[[], float] = _loop_time,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(clock, wall_clock)
        self._field = field

    def translate(self, body: bytes, is_model: IsModel) -> Generator[None, None, Translation]:
        started_at = self._clock()
        request = yield from translate_embed(body, is_model, self._field)
        single = self._field == "prompt"
        rewriter = _EmbedRewriter(request, started_at, self._clock, single=single)
        reply = None if request.load is None else rewriter.loaded()
        return Translation(EMBEDDINGS_PATH, request.body, rewriter, reply)

    def _field_names(self) -> Mapping[str, str]:
        return {"input": self._field}


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


class _Logprobs(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"null")


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
    logprobs: _Logprobs | None = None


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

STEP_TOKENS = 500
"""Tokens whose probabilities are rewritten in one step."""


def _decode(data: bytes) -> _Output:
    try:
        return _OUTPUT.decode(data)
    except JSON_ERRORS:
        raise InvalidResponse("The node's answer is not what was expected") from None


class _Rewriter(ResponseRewriter):
    """Rewrites a response that generates text. A stream's last line has what the others lack."""

    def __init__(
        self,
        request: TranslatedRequest,
        started_at: float,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._model = request.model
        self._top_logprobs = request.top_logprobs
        self._started_at = started_at
        self._clock = clock
        self._wall_clock = wall_clock
        self._first_text_at: float | None = None
        self._reason: str | None = None
        self._usage = _Usage()
        self._timings: _Timings | None = None
        self._calls: list[JsonObject] = []
        """Tool calls of which more may come."""
        self._call_count = 0

    def loaded(self, reason: str) -> bytes:
        """The response to a request that only loads or unloads the model."""
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

    def rewrite_body(self, content: bytes) -> bytes:
        return run_at_once(self.rewrite_in_steps(content))

    def rewrite_in_steps(self, content: bytes) -> Generator[None, None, bytes]:
        output = _decode(content)
        text, thinking, logprobs = self._read(output)
        tokens = []
        for number, token in enumerate(logprobs):
            if number % STEP_TOKENS == 0:
                yield
            tokens.append(msgspec.Raw(msgspec.json.encode(token)))
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
        logprobs = _ollama_logprobs(choice.logprobs, self._top_logprobs)
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
        return {"model": self._model or "", "created_at": _date(self._wall_clock())}

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


class _ChatRewriter(_Rewriter):
    def _answer(self, text: str, thinking: str, calls: list[JsonObject]) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class _GenerateRewriter(_Rewriter):
    def _answer(self, text: str, thinking: str, calls: list[JsonObject]) -> JsonObject:
        return {"response": text, "thinking": thinking} if thinking else {"response": text}


def _ollama_logprobs(logprobs: _Logprobs | None, most: int) -> Iterator[_Token]:
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


class _EmbedRewriter(ResponseRewriter):
    """Rewrites embeddings. `single`: in the form of `/api/embeddings`."""

    def __init__(
        self,
        request: TranslatedRequest,
        started_at: float,
        clock: Callable[[], float],
        *,
        single: bool,
    ) -> None:
        self._request = request
        self._started_at = started_at
        self._clock = clock
        self._single = single

    def loaded(self) -> bytes:
        """The response to a request without a text."""
        return run_at_once(self._encode(_Embeddings([], self._request.model), []))

    def rewrite_body(self, content: bytes) -> bytes:
        return run_at_once(self.rewrite_in_steps(content))

    def rewrite_in_steps(self, content: bytes) -> Generator[None, None, bytes]:
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
        return msgspec.Raw(msgspec.json.encode([value / length for value in values]))

    def _encode(
        self, found: _Embeddings, vectors: list[msgspec.Raw]
    ) -> Generator[None, None, bytes]:
        if self._single:
            return msgspec.json.encode({"embedding": vectors[0] if vectors else []})
        usage = found.usage or _Usage()
        end = {
            "total_duration": int((self._clock() - self._started_at) * _NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
        }
        whole = io.BytesIO()  # It grows in place and returns its bytes without a copy.
        whole.write(
            b'{"model":%b,"embeddings":['
            % msgspec.json.encode(self._request.model or found.model or "")
        )
        work = 0
        for number, vector in enumerate(vectors):
            work += whole.write(b"," if number else b"") + whole.write(memoryview(vector))
            if work > STEP_BYTES:
                work = 0
                yield
        whole.write(b"]," + msgspec.json.encode(end)[1:])
        return whole.getvalue()


# Descriptions of models, from what their nodes have reported.

_NEVER = "9999-12-31T00:00:00Z"
"""When a model is unloaded: nodes keep theirs."""

_ARCHITECTURE = "llama"
"""Nodes don't report it, and clients look for the context under its name."""


def _list_models(catalog: VisibleCatalog, _: JsonObject) -> JsonObject:
    """`/api/tags`."""
    return {"models": [_listed(model) for model in catalog.models()]}


def _list_loaded(catalog: VisibleCatalog, _: JsonObject) -> JsonObject:
    """`/api/ps`: the models with a node that is up."""
    return {"models": [_loaded(model) for model in catalog.models() if model.is_up]}


def _show_model(catalog: VisibleCatalog, body: JsonObject) -> JsonObject:
    """`/api/show`. Raises: GatewayError."""
    model = catalog.model(shown_name(body, {one.name for one in catalog.models()}.__contains__))
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
        "capabilities": list(_capabilities(model)),
        "modified_at": _date(model.created),
    }


def _listed(model: ModelSummary) -> JsonObject:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _date(model.created),
        **_size(model),
        "details": _details(model),
        "capabilities": list(_capabilities(model)),
    }


def _loaded(model: ModelSummary) -> JsonObject:
    return {
        "name": model.name,
        "model": model.name,
        **_size(model),
        "details": _details(model),
        "expires_at": _NEVER,
        "size_vram": (model.size or 0) if model.on_gpu else 0,
        "context_length": model.context or 0,
    }


def _size(model: ModelSummary) -> JsonObject:
    """Bytes, and in place of a digest of the file one of what is known of it."""
    known = f"{model.name}\n{model.file}\n{model.size}\n{model.quantization}"
    return {"size": model.size or 0, "digest": hashlib.sha256(known.encode()).hexdigest()}


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
OLLAMA_CHAT = OllamaChatApi()
OLLAMA_GENERATE = OllamaGenerateApi()
OLLAMA_EMBED = OllamaEmbedApi("input")
OLLAMA_EMBEDDINGS = OllamaEmbedApi("prompt")
