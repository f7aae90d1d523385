"""`Api`: everything that the gateway asks of an API, with OpenAI's error form as the default.

What an API can't do it says itself: by None, False or an empty value here, which its module
overrides where it can. `RelayedApi` is for requests whose responses are plain and pass as they are.
"""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec

from gateway.api import json_values, resuming, sse
from gateway.api.json_values import (
    FIELDS_DECODER,
    JSON_ERRORS,
    InvalidJson,
    JsonObject,
    T,
    parse_json,
    parse_object,
)
from gateway.api.outcome import error_message
from gateway.api.resuming import EventRewriter
from gateway.api.tokens import BOUND_NAMES, read_usage
from gateway.api.transcript import Transcript, TranscriptReader
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.lease import NodeInfo, Usage
from gateway.terms import SegmentedBody
from gateway.transport.errors import InvalidResponse

RawFields = dict[str, msgspec.Raw]  # a JSON object whose values are not decoded
_ITEMS = msgspec.json.Decoder(list[RawFields])
_INDEX = msgspec.json.Decoder(int)
# Data of events that are left out: the end comes once, and llama.cpp may begin with `null`.
_NO_EVENTS = frozenset({b"", b"[DONE]", b"null"})


class ResponseMerger(ABC):
    """Merges plain responses or streams; a new one for each request."""

    def __init__(self, request_fields: Mapping[str, msgspec.Raw], answers_per_prompt: int) -> None:
        """`request_fields`: the request's fields except its prompts."""
        self._request_fields = request_fields
        self._answers_per_prompt = answers_per_prompt
        self._items_by_prompt: dict[int, bytes] = {}
        self.size = 0  # bytes of the plain responses added

    def add(self, index: int, response: bytes) -> None:
        """Add the plain response to one prompt. Raises: InvalidResponse."""
        self._items_by_prompt[index] = self._items(index, response)
        self.size += len(self._items_by_prompt[index])

    def merge_events(self, index: int, events: bytes) -> bytes:
        """Rewrite whole events of the response to one prompt. Raises: InvalidResponse."""
        payloads = map(sse.payload, sse.split(events))
        return b"".join(self._event(index, data) for data in payloads if data not in _NO_EVENTS)

    @abstractmethod
    def merged_response(self) -> bytes:
        """The one plain response."""

    @abstractmethod
    def stream_end(self) -> bytes:
        """The end of the merged stream."""

    @abstractmethod
    def _items(self, index: int, response: bytes) -> bytes:
        """The answers to one prompt: JSON objects with commas between them."""

    @abstractmethod
    def _event(self, index: int, data: bytes) -> bytes:
        """One event of the response to one prompt; empty: it is left out."""

    def _all_items(self) -> list[bytes]:
        """Pieces of the list of all answers, which are joined once: they may be large."""
        pieces = [b"["]
        for _, items in sorted(self._items_by_prompt.items()):
            pieces += (items, b",")
        return [*pieces[:-1], b"]"] if len(pieces) > 1 else [b"[]"]

    def _renumber(self, index: int, items: list[RawFields]) -> list[RawFields]:
        """Number the answers to one prompt by their place among all answers."""
        for place, item in enumerate(items):
            own = item.get("index")
            number = place if own is None else _decode(_INDEX, own)
            item["index"] = msgspec.Raw(b"%d" % (index * self._answers_per_prompt + number))
        return items


def read_fields(data: bytes | msgspec.Raw) -> RawFields:
    """The fields of a JSON object. Raises: InvalidResponse."""
    return _decode(FIELDS_DECODER, data)


def read_items(data: bytes | msgspec.Raw) -> list[RawFields]:
    """The JSON objects of a list. Raises: InvalidResponse."""
    return _decode(_ITEMS, data)


def inner_items(data: bytes | msgspec.Raw) -> bytes:
    """The items of a list, undecoded, with commas between them; empty: null. Raises: TypeError."""
    listed = bytes(data)
    if listed == b"null":
        return b""
    if not listed.startswith(b"["):
        raise TypeError
    return listed[1:-1].strip()


def _decode(decoder: msgspec.json.Decoder[T], data: bytes | msgspec.Raw) -> T:
    try:
        return decoder.decode(data)
    except JSON_ERRORS:
        raise InvalidResponse("The node's response has another form than expected") from None


_DONE = re.compile(rb"\ndata: ?\[DONE\]")
LARGEST_ANSWER_BYTES = 4 << 20  # bytes of a plain response that are decoded at once: up to 10 ms
EDGE_BYTES = 1024  # bytes at the beginning and the end of a longer one that are looked at
_JSON_BEGINS = (b"{", b"[")
_JSON_EDGES = (b"{}", b"[]")
_KEEPALIVE = b'event: keepalive\ndata: {"type":"keepalive","sequence_number":%d}\n\n'
_EVENT_NUMBER = re.compile(rb'("sequence_number": ?)(\d{1,15})')
_NO_ERROR = sse.ordinary_events(after_brace=rb'(?!"error":)')


class Answer(msgspec.Struct, kw_only=True):
    """An object that is no error."""

    error: None = None


Bodies = Iterable[bytes | SegmentedBody]
IsModel = Callable[[str], bool]  # whether there is a model of a name


class StreamEventKind(enum.Enum):
    """What an event before the first content is."""

    NO_CONTENT = enum.auto()
    """It only begins the response. It is held back, since a retry would repeat it."""
    CONTENT = enum.auto()
    ERROR = enum.auto()


class ResponseRewriter:
    """Rewrites one response on its way to the client; one object for each response.

    It sees what would be sent: the node's events, those of a resumption, and error events.
    """

    def rewrite_events(self, events: bytes) -> bytes:
        """What the client gets in place of these whole events; possibly nothing.

        Raises: InvalidResponse.
        """
        return events

    def rewrite_body(self, content: bytes) -> Generator[None, None, bytes]:
        """What the client gets in place of a plain response's whole body, in short steps.

        Raises: InvalidResponse.
        """
        yield
        return content


class NumberedHeartbeats(ResponseRewriter):
    """Heartbeats that are events, and the numbers of all events of their stream.

    As in OpenAI's streams each takes a number, so that those of the events behind it move up.
    """

    __slots__ = ("_inner", "_is_first", "_next_number")

    def __init__(self) -> None:
        self._inner: ResponseRewriter | None = None
        self._next_number = 0
        self._is_first = True  # whether the events still have the numbers that they came with

    def wrap(self, inner: ResponseRewriter | None) -> None:
        """Number what `inner` makes of the node's events; None: those themselves."""
        self._inner = inner

    def heartbeat(self) -> bytes:
        """The next heartbeat."""
        number, self._next_number, self._is_first = self._next_number, self._next_number + 1, False
        return _KEEPALIVE % number

    def of_log(self, piece: bytes) -> bytes:
        """A piece of a stored stream, by whose numbers clients go on: a heartbeat takes none."""
        if piece == sse.HEARTBEAT:
            return _KEEPALIVE % max(0, self._next_number - 1)
        return self.number(piece)

    def rewrite_events(self, events: bytes) -> bytes:
        """The same events with their numbers in the stream."""
        return self.number(events if self._inner is None else self._inner.rewrite_events(events))

    def number(self, events: bytes) -> bytes:
        """Events as the client would have them without heartbeats, with their numbers."""
        if not self._is_first:
            return b"".join(map(self._renumber, sse.split(events)))
        if found := _EVENT_NUMBER.findall(events):
            self._next_number = int(found[-1][1]) + 1
        return events

    def _renumber(self, event: bytes) -> bytes:
        """The event with the next number, if it has one."""
        number = self._next_number
        event, count = _EVENT_NUMBER.subn(rb"\g<1>%d" % number, event, count=1)
        self._next_number += count
        return event


@dataclass(frozen=True, slots=True)
class Translation:
    """A client's request in another API, by which nodes are asked."""

    path: str  # the routed path whose API it is; the client's own: it is not translated after all
    body: bytes
    rewriter: ResponseRewriter  # translates the response back
    reply: bytes | None = None
    """The response, if no node need be asked: only the model's name is checked."""


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A model as its nodes have reported it; None: they have not."""

    name: str
    created: int  # seconds since 1970
    endpoints: AbstractSet[str]
    """What its nodes are known to serve: `chat`, `embeddings`, `vision` and so on."""
    is_up: bool  # whether a node with it is up
    on_gpu: bool  # whether a node with it computes on a GPU
    context: int | None = None  # tokens of one slot
    parameters: int | None = None
    size: int | None = None  # bytes of its tensors
    quantization: str | None = None
    file: str | None = None


class VisibleCatalog(NamedTuple):
    """The models that a caller may see."""

    models: list[ModelSummary]  # all that have a name of their own
    model: Callable[[str | None], ModelSummary]
    """The one that a request for this name gets. Raises: GatewayError."""


@dataclass(frozen=True, slots=True)
class Page:
    """A path of an API that the gateway answers without a node.

    `respond` makes JSON or a text of the models and, for POST, the fields of the body. Raises:
    GatewayError.
    """

    path: str
    respond: Callable[[VisibleCatalog, JsonObject], JsonObject | str]
    method: Literal["GET", "POST"] = "GET"
    needs_models: bool = True  # False: it may be read without a key


class Api:
    """An API of JSON bodies and server-sent events. One instance serves all requests."""

    name: ClassVar[str]

    # The request

    prompt_field: str | None = None  # the body's field that holds the prompt
    max_tokens_fields: ClassVar[tuple[str, ...]] = ()
    """The body's fields that bound the response in tokens, the usual one first."""
    clients_add_v1: ClassVar[bool] = False
    """Whether official clients add `/v1` to their base URL themselves."""
    refusal_is_general: ClassVar[bool] = False
    """Whether a node that answers 501 to this API generates no text by any API."""

    # Between the client and the node. APIs that need none of it pay for one test of each flag.

    translates: ClassVar[bool] = False
    """Whether nodes are asked by another API; `translate` says how."""
    refused_fields: ClassVar[Mapping[str, str]] = {}
    """Fields that no node would obey, and why: a body may have them empty only."""
    added_fields_marks: ClassVar[tuple[bytes, ...]] = ()
    """Each body to which `added_fields` may add has some of these bytes; empty: it adds to none."""
    may_keep_responses: ClassVar[bool] = False
    """Whether a request can ask the gateway to keep its response, or to make it later."""
    rewrites_responses: ClassVar[bool] = False
    """Whether `response_rewriter` may rewrite a response on its way to the client."""

    def needs_translation(
        self, path: str, body: bytes, settings: Settings, *, prompt_cache: bool = True
    ) -> bool:
        """Whether this body for this path is to be translated, where the API `translates`.

        `prompt_cache`: whether nodes may serve its prompt from their caches.
        """
        return True

    def translate(
        self, body: bytes, is_model: IsModel, *, prompt_cache: bool = True
    ) -> Generator[None, None, Translation]:
        """The request of this body as nodes get it, in short steps.

        It is checked afterwards, like one that the client sent in that form. `prompt_cache`: as in
        `needs_translation`. Raises: GatewayError 400, with this API's names of fields.
        """
        raise NotImplementedError

    def added_fields(
        self, fields: Mapping[str, msgspec.Raw], node_kind: str, settings: Settings
    ) -> JsonObject | None:
        """Fields that the body of these `fields` needs for a node of this kind; None: none.

        `msgspec.UNSET` takes a field out. `node_kind`: `llama.cpp` or `openai`.
        """
        return None

    def response_rewriter(
        self, bodies: Bodies, model: str, node: NodeInfo, settings: Settings, *, stream: bool
    ) -> ResponseRewriter | None:
        """Rewrites the response of this node to a request; None: nothing is rewritten.

        `bodies`: those of the request, for each of its targets. A stream that is resumed keeps its
        rewriter.
        """
        return None

    # Errors

    sends_request_id: ClassVar[bool] = False
    """Whether replies also name the request in `request-id`."""

    def owns_path(self, path: str) -> bool:
        """Whether only clients of this API ask for this path, which may have no route."""
        return False

    def error_body(self, error: GatewayError, x_request_id: str) -> bytes:
        """The error's body as this API's official clients expect it."""
        return msgspec.json.encode({"error": openai_error(error)})

    def error_event(self, error: GatewayError, x_request_id: str) -> bytes:
        """The error as an event of a stream that has begun."""
        return b"data: " + self.error_body(error, x_request_id) + b"\n\n"

    def is_own_error(self, content: bytes) -> bool:
        """Whether a node's error body may reach the client as it is."""
        return True

    # The stream

    single_terminal_event: ClassVar[bool] = True
    """Whether one event ends the stream, however many answers it holds."""
    terminal_mark: ClassVar[bytes] = b"data: [DONE]"
    """Bytes in the terminal event, and in hardly any other."""
    terminal_mark_nested: ClassVar[bool] = False
    """Whether `terminal_mark` stands within an object, where `ordinary_events` can't see it."""
    stream_end: ClassVar[bytes] = b""  # bytes behind the last event that end the stream
    terminal_event: ClassVar[bytes] = b""
    """The event that ends a stream whose answers have all given a reason for their end."""
    ordinary_events = staticmethod(_NO_ERROR)
    """Matches events that neither end the stream nor are the node's error event."""
    heartbeat: ClassVar[bytes] = sse.HEARTBEAT  # bytes between events that mean nothing
    heartbeat_is_event: ClassVar[bool] = False
    """Whether the heartbeat is an event, so that a comment can't take its place."""
    has_comments: ClassVar[bool] = True
    """Whether a client skips comments, so that progress can be reported in them."""
    stream_content_type: ClassVar[bytes] = b"text/event-stream"
    """The media type of a stream on its way to the client."""

    def numbered_heartbeats(self) -> NumberedHeartbeats | None:
        """Heartbeats of one stream to a client that counts no comment; None: `heartbeat` counts."""
        return None

    def classify_event(self, event: bytes) -> StreamEventKind:
        """Classify an event. Raises: InvalidResponse, if it is none of this API's."""
        data = sse.payload(event)
        if not data:
            return StreamEventKind.NO_CONTENT
        if sse.event_name(event) == b"error":
            return StreamEventKind.ERROR
        if data == b"[DONE]":
            raise InvalidResponse("The node's stream ended before its first content")
        if data == b"null":
            # llama.cpp begins a stream of several prompts with it.
            return StreamEventKind.NO_CONTENT
        try:
            if sse.is_dense(data):
                fields = FIELDS_DECODER.decode(data)
                failed = bool(decoded_field(fields, "error"))
                return StreamEventKind.ERROR if failed else StreamEventKind.CONTENT
            value = json_values.parse_json(data)
        except (InvalidJson, *JSON_ERRORS):
            raise InvalidResponse("An event of the node's stream is not JSON") from None
        if not isinstance(value, dict):
            raise InvalidResponse("An event of the node's stream is not a JSON object")
        if value.get("error"):
            return StreamEventKind.ERROR
        if "prompt_progress" in value:
            return StreamEventKind.NO_CONTENT
        try:
            has_content = self.has_content(value)
        except (AttributeError, LookupError, TypeError):
            raise InvalidResponse("An event of the node's stream has another form") from None
        return StreamEventKind.CONTENT if has_content else StreamEventKind.NO_CONTENT

    def has_content(self, value: JsonObject) -> bool:
        """Whether an event's data holds anything that the reader would miss."""
        raise NotImplementedError

    def is_terminal_event(self, event: bytes) -> bool:
        """Whether this event, which holds `terminal_mark`, is the stream's last."""
        return sse.payload(event) == b"[DONE]"

    def finished_answers(self, tail: bytes) -> int:
        """How many answers of a stream have ended, as these last events say.

        0: none, or the API says so by its terminal event alone.
        """
        return 0

    def is_stream_complete(self, tail: bytes) -> bool:
        """Whether a stream that ends with these bytes is complete."""
        return _DONE.search((b"\n" + tail)[-64:]) is not None

    # Usage and prefill progress

    def read_usage(self, tail: bytes, opening: bytes = b"") -> Usage | None:
        """The tokens that a response reports at its end; None: it reports none.

        `opening`: a stream's first events.
        """
        return read_usage(tail)

    progress_fields: ClassVar[JsonObject | None] = None
    """Fields that make llama.cpp report prefill progress; None: it can't with this API."""
    progress_replaces_event: ClassVar[bool] = False
    """Whether the first progress event stands for an event of the stream without progress."""

    def usage_fields(self, fields: Mapping[str, msgspec.Raw]) -> JsonObject | None:
        """Fields that make an OpenAI-compatible node report usage in its stream.

        None: the body of these `fields` asks for it, or nodes report it unasked.
        """
        return None

    # A plain response

    answer: msgspec.json.Decoder[Any]
    """Decodes a plain response, and raises for all that is none of this API's."""
    answers_json: ClassVar[bool] = True  # whether all plain responses are JSON
    answer_mark: bytes  # bytes near the beginning of each plain response that is long
    decoded_bytes: ClassVar[int] = LARGEST_ANSWER_BYTES
    """Bytes of a plain response up to which it is decoded to be checked."""

    def check_answer(self, content: bytes, *, whole: bool = True) -> None:
        """Check that a plain response of status 2xx is one of this API's. Raises: InvalidResponse.

        `whole`: False: it is the beginning of one.
        """
        begin = content[:1] if content[:1] in _JSON_BEGINS else content.lstrip()[:1]
        if begin not in _JSON_BEGINS:
            raise InvalidResponse("The node's answer is not JSON")
        if not whole or (len(content) > self.decoded_bytes and self._is_like_answer(content)):
            return
        try:
            # One that is longer and does not begin like an answer is none.
            self.answer.decode(content[:LARGEST_ANSWER_BYTES])
        except JSON_ERRORS:
            error = error_message(content[:LARGEST_ANSWER_BYTES])
            said = f" It says: {error}" if error else ""
            raise InvalidResponse(f"The node answered, but not in this API's form.{said}") from None

    def _is_like_answer(self, content: bytes) -> bool:
        """Whether a long plain response begins and ends like one of this API's.

        It ends with its list of objects, or with some fields behind that.
        """
        begin, tail = content[:EDGE_BYTES].lstrip()[:1], content[-EDGE_BYTES:].rstrip()
        end = tail.rfind(b"]")
        fields = tail[end + 1 :]
        return (
            content.find(self.answer_mark, 0, EDGE_BYTES) >= 0
            and not content.startswith(b'{"error":')
            and begin + tail[-1:] in _JSON_EDGES
            and tail[:end].rstrip()[-1:] == b"}"
            and fields.count(b"}") - fields.count(b"{") == (begin == b"{")
        )

    def answer_events(self, content: bytes, request_fields: JsonObject) -> bytes:
        """The stream of one piece and its end that a plain response makes.

        `content` has passed `check_answer`. Raises: InvalidResponse.
        """
        raise NotImplementedError

    # A plain response, assembled from a stream

    streaming_fields: ClassVar[JsonObject | None] = None
    """Fields that make a plain request's body ask for a stream; None: the plain response can't be
    assembled from a stream's events."""
    assembles_several_answers: ClassVar[bool] = False
    """Whether events say which of a prompt's several answers they belong to."""

    def assemble(self, request_fields: JsonObject) -> Assembly:
        """Take some whole events after the others, then None; return the plain response.

        Raises: AssemblyError.
        """
        raise NotImplementedError

    # Several prompts in one request

    merger: ClassVar[type[ResponseMerger] | None] = None
    """Merges the responses to several prompts; None: a request has one prompt."""

    # Resuming

    transcript_reader: TranscriptReader | None = None
    """Adds an event's data to the transcript; None: a stream of this API can't be resumed."""
    event_rewriter: ClassVar[type[EventRewriter] | None] = None
    """Rewrites a continuation by this same API; None as for `transcript_reader`."""
    native_event_rewriter: ClassVar[type[EventRewriter] | None] = None
    """Rewrites a continuation by llama.cpp's `/completion` as this API's events; None: they can't
    be written. Nor can those of a chat with tools."""
    is_chat: ClassVar[bool] = False
    """Whether the prompt is messages, so that a node's template renders it and a continuation
    begins with a last message of the assistant's."""
    resumes_by_completion: ClassVar[bool] = False
    """Whether a begun chat is continued by `/completion` alone, whatever the node can."""
    logprobs_fields: ClassVar[JsonObject | None] = None
    """Fields that make llama.cpp report token ids; None: it can't, or does so unasked."""

    def take_token_ids(self, value: JsonObject) -> list[int]:
        """Remove from an event's data what `logprobs_fields` added, and return its token ids.

        Raises: KeyError, TypeError, if the data has another shape.
        """
        raise NotImplementedError

    def can_resume_exactly(self, body: JsonObject) -> bool:
        """Whether token ids of a response to this body can be had, and continued from."""
        return (
            self.logprobs_fields is not None
            and not body.get("tools")
            and self.unresumable_reason(body, Transcript()) is None
        )

    def unresumable_reason(self, body: JsonObject, transcript: Transcript) -> str | None:
        """Why another node can't safely resume the response to this body; None: it can.

        The words are for the log and the client; they hold nothing of the body or response.
        """
        reason = resuming.unresumable_reason(body, transcript)
        return reason or self._own_unresumable_reason(body, transcript)

    def _own_unresumable_reason(self, body: JsonObject, transcript: Transcript) -> str | None:
        """As `unresumable_reason`, by what is this API's alone."""
        if self.is_chat:
            return resuming.message_unresumable_reason(body)
        has_prompt = isinstance(body.get("prompt"), str) or transcript.token_ids
        return None if has_prompt else "the prompt is not one text"

    def chat_body(self, body: JsonObject) -> JsonObject | None:
        """The body as a chat for `/apply-template`; None: it can't be written as one."""
        return None

    def continued_body(self, body: JsonObject, prefix: str, max_tokens: int | None) -> JsonObject:
        """The body of a request that continues the response behind `prefix`."""
        if not self.is_chat:
            continued = body | {"prompt": f"{body['prompt']}{prefix}"}
        else:
            # Text that ends in white space must reach the template as it is.
            begun = [{"role": "assistant", "content": prefix}] if prefix else []
            continued = body | {"messages": [*body["messages"], *begun]}
        if max_tokens is None:
            return continued
        bounds = [name for name in BOUND_NAMES if body.get(name) is not None]
        return continued | dict.fromkeys(bounds, max_tokens)

    def reported_prompt_tokens(self, transcript: Transcript) -> int | None:
        """The prompt's tokens as the transcript reports them; None: it does not."""
        return None


def body_fields(body: Any) -> Mapping[str, msgspec.Raw]:
    """The fields of a request's body, each as bytes; none, if it is no object."""
    try:
        fields: Mapping[str, msgspec.Raw] = (
            FIELDS_DECODER.decode(body) if isinstance(body, bytes) else body.raw_fields()
        )
    except JSON_ERRORS:
        return {}
    return fields


def decoded_field(fields: Mapping[str, msgspec.Raw], name: str) -> object:
    """The value of a field; None, if there is none."""
    try:
        return json_values.parse_json(bytes(fields[name])) if name in fields else None
    except InvalidJson:
        return None


def edit_body(content: bytes, edit: Callable[[JsonObject], JsonObject]) -> bytes:
    """A plain response as `edit` makes it; untouched where it returns its argument.

    So is what is no JSON object.
    """
    try:
        response = parse_object(content)
    except InvalidJson:
        return content
    edited = edit(response)
    return content if edited is response else msgspec.json.encode(edited)


def openai_error(error: GatewayError) -> JsonObject:
    """OpenAI's error object."""
    return {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
        **error.details,
    }


class AssemblyError(Exception):
    """The events don't make a whole response. Its text never quotes them."""


# Makes a plain response, of which parts may be undecoded, of a stream's events.
Assembly = Generator[None, bytes | None, JsonObject]


class ResponseAssembler:
    """Assembles a plain response of a stream's events while they come.

    So no turn of the event loop has them all. `max_bytes`: bytes of events that a response may
    have.
    """

    __slots__ = ("_assembly", "_bytes_left", "_chunks", "_error", "_unread")

    def __init__(
        self, api: Api, request_fields: JsonObject, first_chunk: bytes, max_bytes: int
    ) -> None:
        """`request_fields`: those of the request's body."""
        self._assembly = api.assemble(request_fields)
        next(self._assembly)
        self._bytes_left = max_bytes
        self._error: AssemblyError | None = None
        self._chunks: list[bytes] = []
        self._unread = 0  # bytes of them
        self.add(first_chunk)

    @property
    def too_large(self) -> bool:
        """Whether the events have more than `max_bytes`."""
        return self._bytes_left < 0

    def add(self, events: bytes, _: bytes | None = None, /) -> bool:
        """Add whole events, and return `too_large`."""
        self._chunks.append(events)
        self._unread += len(events)
        self._bytes_left -= len(events)
        if self._unread > MOST_UNREAD_BYTES:
            self._read()
        return self._bytes_left < 0

    def _read(self) -> None:
        events, self._chunks, self._unread = b"".join(self._chunks), [], 0
        if self._error is not None or self._bytes_left < 0:
            return
        try:
            self._assembly.send(events)
        except AssemblyError as error:
            self._error = error
        except _OTHER_FORM:
            self._error = _other_form()

    def response(self) -> bytes:
        """The response as JSON. Raises: AssemblyError."""
        self._read()
        if self._error is not None:
            raise self._error
        try:
            self._assembly.send(None)
        except StopIteration as end:
            try:
                return msgspec.json.encode(end.value)
            except ValueError:
                raise _other_form() from None
        except _OTHER_FORM:
            pass
        raise _other_form()


MOST_UNREAD_BYTES = 16 * 1024  # bytes of events that are read together: some hundred tokens
_OTHER_FORM = (
    AttributeError, IndexError, InvalidJson, KeyError, TypeError, ValueError, *JSON_ERRORS,
)  # fmt: skip


def _other_form() -> AssemblyError:
    return AssemblyError("an event of the node's stream has another form")


def read_events(stream: bytes) -> Iterator[RawFields]:
    """The fields in the data of whole events, in order, without `[DONE]`.

    Raises: AssemblyError, for data that is no object, and for the node's error event.
    """
    for event in sse.split(stream):
        data = sse.payload(event)
        if not data or data == b"[DONE]":
            continue
        try:
            fields: RawFields = FIELDS_DECODER.decode(data)
            is_error = "error" in fields and parse_json(bytes(fields["error"]))
        except (InvalidJson, *JSON_ERRORS):
            raise AssemblyError("an event of the node's stream is no JSON object") from None
        if is_error:
            raise AssemblyError("the node's stream ended with an error")
        yield fields


_EMBEDDINGS_USAGE = re.compile(rb'"usage":\s*\{"prompt_tokens":(\d{1,9}),"total_tokens":\d{1,9}\}')
EMBEDDINGS_USAGE_WITHIN = 512  # bytes; llama.cpp writes the usage of embeddings before the vectors
_SOME = msgspec.Meta(min_length=1)


class _Embedding(msgspec.Struct):
    embedding: msgspec.Raw


class _Embeddings(Answer, kw_only=True):
    data: Annotated[list[_Embedding], _SOME]


class _Ranked(msgspec.Struct):
    index: int


class _Ranking(Answer, kw_only=True):
    results: list[_Ranked] | None = None
    data: Annotated[list[_Ranked], _SOME] | None = None  # voyage's name of the list

    def __post_init__(self) -> None:
        if self.results is self.data is None:
            raise ValueError


_NATIVE_EMBEDDINGS = Annotated[list[_Embedding], _SOME] | _Embedding
# The list is TEI's form, in which llama.cpp's server answers TEI's requests.
_RANKINGS = Annotated[list[_Ranked], _SOME] | _Ranking


def _answer_with(name: str, kind: Any) -> type[msgspec.Struct]:
    """The type of responses that always have this field."""
    return msgspec.defstruct("Answer", [(name, kind)], bases=(Answer,), kw_only=True)


INPUT_TOKENS = _answer_with("input_tokens", int)  # a count of a prompt's tokens


class RelayedApi(Api):
    """Embeddings, reranking, tokenizing and the like, with OpenAI's errors."""

    name = "relayed"

    def __init__(
        self, prompt_field: str | None = None, mark: str = "", answer: Any = Answer
    ) -> None:
        """`mark`: the field that long responses are known by. `answer`: the type of all."""
        self.prompt_field = prompt_field
        self.answer = msgspec.json.Decoder(answer)
        self.answer_mark = f'"{mark}"'.encode()

    def has_content(self, value: JsonObject) -> bool:
        return True

    def read_usage(self, tail: bytes, opening: bytes = b"") -> Usage | None:
        bare = _EMBEDDINGS_USAGE.search(tail, 0, EMBEDDINGS_USAGE_WITHIN)
        return super().read_usage(tail) if bare is None else Usage(int(bare[1]))


class EmbeddingsApi(RelayedApi):
    """Embeddings: many bytes, and no text in which an end could stand."""

    decoded_bytes = 4 * 1024


class TranscriptionsApi(RelayedApi):
    """Transcriptions: JSON, or text in a format that the client has asked for."""

    answers_json = False

    def __init__(self) -> None:
        super().__init__(None, "text", _answer_with("text", str))

    def check_answer(self, content: bytes, *, whole: bool = True) -> None:
        """As for all APIs, but a text may be anything but a page."""
        begin = content.lstrip()[:1]
        if begin == b"{":
            super().check_answer(content, whole=whole)
        elif not content or begin == b"<":
            raise InvalidResponse("The node's answer is no transcription")


RELAYED = RelayedApi()  # any other request
EMBEDDINGS = EmbeddingsApi("input", "embedding", _Embeddings)
NATIVE_EMBEDDINGS = EmbeddingsApi("content", "embedding", _NATIVE_EMBEDDINGS)
RANKING = RelayedApi("documents", "index", _RANKINGS)
TRANSCRIPTIONS = TranscriptionsApi()
CHAT_COUNT = RelayedApi("messages", "input_tokens", INPUT_TOKENS)
TOKENIZE = RelayedApi("content", "tokens", _answer_with("tokens", msgspec.Raw))
DETOKENIZE = RelayedApi("tokens", "content", _answer_with("content", str))
TEMPLATE = RelayedApi("messages", "prompt", _answer_with("prompt", str))
