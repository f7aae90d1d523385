"""What the client gets of a node's response: head, body, and errors in the form of its API.

For every kind of client alike, whether it waits on a connection or reads a stored result. Which
fields of the head it gets is told by `header_fields.py`.

Where the settings want it, the client learns nothing of what nodes had cached of its prompt: who
shares nodes with others could guess their prompts, since a right guess is cached and a wrong one
not. Of `usage`, numbers of cached tokens become 0, as clients expect the fields; all else that
tells is removed. The gateway itself has read the figures before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace

import msgspec

from gateway import errors
from gateway.api import sse
from gateway.api.base import Api, ResponseRewriter
from gateway.api.json_values import (
    FIELDS_DECODER,
    ITEMS_DECODER,
    JSON_ERRORS,
    InvalidJson,
    JsonObject,
    as_raw,
    parse_json,
    parse_object,
)
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.events import RequestRecord
from gateway.forward.event_pipeline import WriteToClient
from gateway.forward.header_fields import without_times
from gateway.lease import NodeInfo
from gateway.request.preparation import Request
from gateway.transport.errors import InvalidResponse, UpstreamError

JSON_HEADER_LINE = b"content-type: application/json; charset=utf-8\r\n"
SSE_HEADER_LINE = b"content-type: text/event-stream\r\n"


class BodyStream:
    """The rest of a stream behind its first bytes; this one has no rest."""

    __slots__ = ()

    @property
    def is_sse(self) -> bool:
        """Whether the response is a stream of events."""
        return True

    @property
    def failure(self) -> UpstreamError | None:
        """Why no more comes from its node, if it was failed: nobody waits for the client then."""
        return None

    @property
    def is_open(self) -> bool:
        """Whether a heartbeat may precede the next bytes."""
        return False

    @property
    def last_content_at(self) -> float:
        """When content last came; monotonic."""
        return 0.0

    def notify_failure(self, callback: Callable[[], None]) -> None:
        """Call `callback` on failure: the reader may wait for something else."""

    async def next_chunk(self, write: WriteToClient | None = None) -> bytes | None:
        """The next bytes; empty: there are no more. Raises: UpstreamError."""
        return b""

    def close(self) -> None:
        """The client has received everything, or has left."""


@dataclass(slots=True)
class ClientResponse:
    """A response for the client: whole in `content`, or begun there with the rest to follow."""

    status: int
    header_lines: bytes  # The node's header lines that are forwarded
    content: bytes
    body_stream: BodyStream | None = None
    node: NodeInfo | None = None  # The node that answered; None: several, to one prompt each

    async def whole_content(self, most: int) -> bytes:
        """The body of a plain response, to its end.

        Raises: GatewayError 502, if it has more than `most` bytes; UpstreamError.
        """
        parts, size, stream = [self.content], len(self.content), self.body_stream
        while stream is not None and (chunk := await stream.next_chunk()):
            parts.append(chunk)
            size += len(chunk)
            if size > most:
                raise errors.node_failed(f"The answer is too long ({most} bytes).")
        return b"".join(parts)


def for_client(
    request: Request,
    response: ClientResponse,
    api: Api,
    settings: Settings,
    translator: ResponseRewriter | None = None,
    *,
    hides_cache: bool,
) -> tuple[ClientResponse, ResponseRewriter | None]:
    """The response for a client of `api`, and what rewrites its body; None: nothing does.

    `translator`: of a request that was translated for nodes. `hides_cache`: what tells of nodes'
    prompt caches is hidden, in header fields too.
    """
    rewriter, node = translator, response.node
    if api.rewrites_responses and rewriter is None and node is not None:
        bodies, model = request.bodies.values(), request.lease_request.wanted.model
        rewriter = api.response_rewriter(bodies, model, node, settings, stream=request.stream)
    if hides_cache:
        rewriter = CacheFigureHider(rewriter)
        response = replace(response, header_lines=without_times(response.header_lines))
    return response, rewriter


def rewrite_in_steps(rewriter: ResponseRewriter, content: bytes) -> Generator[None, None, bytes]:
    """A plain response as the client gets it, in short steps. Raises: GatewayError 502."""
    try:
        return (yield from rewriter.rewrite_body(content))
    except InvalidResponse as failure:
        raise errors.node_failed(f"{failure}.") from None


class EventsForClient:
    """The events of one stream as its client gets them."""

    __slots__ = ("_record", "_rewriter", "api")

    def __init__(self, rewriter: ResponseRewriter, api: Api, record: RequestRecord) -> None:
        self._rewriter: ResponseRewriter | None = rewriter
        """None once the stream has ended with an error."""
        self.api = api  # The API that the client uses
        self._record = record

    @property
    def failed(self) -> bool:
        """Whether the stream has ended with an error, since its events were invalid."""
        return self._rewriter is None

    def rewrite(self, events: bytes) -> bytes:
        """The events as the client gets them; an error in place of invalid ones."""
        if self._rewriter is None:
            return b""
        try:
            return self._rewriter.rewrite_events(events)
        except InvalidResponse as failure:
            self._rewriter = None
            error = errors.node_failed(f"{failure}.")
            self._record.fail(error.status, error.code)
            return self.api.error_event(error, self._record.x_request_id)


_NODE_ERROR_CODES = {400: "invalid_request", 413: "request_too_large", 422: "invalid_request"}
_OTHER_NODE_ERROR = "node_error"


def node_error(response: ClientResponse) -> GatewayError:
    """The error that a node's response of status 400 or more contains."""
    try:
        message = str(parse_json(response.content)["error"]["message"])
    except (InvalidJson, KeyError, TypeError):
        message = f"The node answered with status {response.status}."
    return GatewayError(response.status, node_error_code(response.status), message)


def node_error_body(response: ClientResponse, api: Api, x_request_id: str) -> bytes:
    """The node's body as it is, unless it is empty or not in the API's error form."""
    if response.content and api.is_own_error(response.content):
        return response.content
    return api.error_body(node_error(response), x_request_id)


def node_error_code(status: int) -> str:
    """The error code of a node's response of this status."""
    return _NODE_ERROR_CODES.get(status, _OTHER_NODE_ERROR)


Fields = dict[str, msgspec.Raw]
# Each object with telling figures has such a key. Within a text its quote would be escaped.
_KEY = re.compile(rb'(?:cache|prompt_)[A-Za-z0-9_/]*"\s*:')
# A slot is chosen for what it has cached. Each event of llama.cpp's own streams names it.
_ID_SLOT = re.compile(rb',"id_slot":-?\d+|"id_slot":-?\d+,?')

# Fields of llama.cpp's `timings` that depend on the answer alone.
_TOLD_OF_TIMINGS = frozenset(
    {
        *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
        *("draft_n", "draft_n_accepted"),
    }
)

# Names of fields that tell how much of a prompt was cached.
_TELLING = frozenset(
    {
        *("cache_n", "tokens_cached", "prompt_progress", "id_slot", "__verbose"),
        *("prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "prompt_time"),
        # Ollama's: the whole less the answer's share is the prompt's.
        *("prompt_eval_duration", "load_duration", "total_duration"),
    }
)

# Fields that hold an object with `usage`, in events of `/v1/responses` and `/v1/messages`.
_NESTING = frozenset({"response", "message", "x_groq"})
# Anthropic's, which are no part of its `input_tokens`.
_CACHED_INPUT = ("cache_read_input_tokens", "cache_creation_input_tokens")
# Some endpoints' times in `usage`, seconds.
_TIMES = frozenset({"prompt_time", "queue_time", "total_time"})


class CacheFigureHider(ResponseRewriter):
    """Hides the figures of one response, behind its `translator` to the client's API, if any."""

    __slots__ = ("_translator",)

    def __init__(self, translator: ResponseRewriter | None = None) -> None:
        self._translator = translator

    def rewrite_events(self, events: bytes) -> bytes:
        """These whole events without the figures. Raises: InvalidResponse."""
        if self._translator is not None:
            events = self._translator.rewrite_events(events)
        if b"id_slot" in events:
            events = _ID_SLOT.sub(b"", events)
        # As `_may_tell`, without a call: this runs for each chunk.
        if (b"cache" in events or b"prompt_" in events) and _KEY.search(events) is not None:
            events = b"".join(map(_edited_event, sse.split(events)))
        return events

    def rewrite_body(self, content: bytes) -> Generator[None, None, bytes]:
        """A plain response without the figures. Raises: InvalidResponse."""
        if self._translator is not None:
            content = yield from self._translator.rewrite_body(content)
        yield
        return self._without_figures(content)

    @staticmethod
    def _without_figures(content: bytes) -> bytes:
        first = content.lstrip()[:1]
        if first not in {b"{", b"["} or not (_may_tell(content) or b"id_slot" in content):
            return content
        try:
            if first == b"{":
                return _edited_object(content)
            items = [_edited_object(bytes(item)) for item in ITEMS_DECODER.decode(content)]
        except JSON_ERRORS:
            raise InvalidResponse("The node's answer is not JSON") from None
        return b"[" + b",".join(items) + b"]"


def _may_tell(data: bytes) -> bool:
    return (b"cache" in data or b"prompt_" in data) and _KEY.search(data) is not None


def _edited_event(event: bytes) -> bytes:
    """One event, or some lines of JSON, without the figures. Raises: InvalidResponse."""
    if not _may_tell(event):
        return event
    try:
        if event.startswith(b"{"):
            return b"".join(_edited_line(line) for line in event.splitlines(keepends=True))
        data = sse.payload(event)
        if not data.startswith(b"{"):
            return event
        edited = _edited_object(data)
    except JSON_ERRORS:
        raise InvalidResponse("An event of the node's stream is no JSON object") from None
    if data in event:
        return event.replace(data, edited, 1)
    name = sse.event_name(event)
    return (b"event: %b\n" % name if name else b"") + b"data: %b\n\n" % edited


def _edited_line(line: bytes) -> bytes:
    return _edited_object(line.rstrip()) + b"\n" if line.startswith(b"{") else line


def _edited_object(data: bytes) -> bytes:
    """The same object without the figures; the same bytes if it has none."""
    fields = FIELDS_DECODER.decode(data)
    edited = _edited_fields(fields)
    return data if edited is None else msgspec.json.encode(edited)


def _edited_fields(fields: Mapping[str, msgspec.Raw]) -> Fields | None:
    """The fields without the figures; None: they have none."""
    kept: Fields = {}
    changed = False
    for name, raw in fields.items():
        # llama.cpp names a nested field that a client selects (`response_fields`) by its path.
        first, _, last = name.partition("/")
        if first in _TELLING or last.rpartition("/")[2] in _TELLING:
            changed = True
            continue
        edited = raw
        if name == "usage":
            edited = _edited_usage(raw)
        elif name == "timings":
            edited = _edited_timings(raw)
        elif name in _NESTING and bytes(memoryview(raw)[:1]) == b"{":
            inner = _edited_fields(FIELDS_DECODER.decode(raw))
            edited = raw if inner is None else as_raw(inner)
        changed = changed or edited is not raw
        kept[name] = edited
    return kept if changed else None


def _edited_timings(raw: msgspec.Raw) -> msgspec.Raw:
    timings = _object(raw)
    if timings is None:
        return raw
    return as_raw({name: timings[name] for name in timings if name in _TOLD_OF_TIMINGS})


def _edited_usage(raw: msgspec.Raw) -> msgspec.Raw:
    """`usage` as if nothing had been cached."""
    usage = _object(raw)
    if usage is None:
        return raw
    fresh = usage.get("input_tokens")
    if isinstance(fresh, int):
        cached = [usage.get(name) for name in _CACHED_INPUT]
        usage["input_tokens"] = fresh + sum(count for count in cached if isinstance(count, int))
    return as_raw(_without_cached(usage))


def _without_cached(usage: JsonObject) -> JsonObject:
    """Numbers of cached tokens become 0, at any depth."""
    edited: JsonObject = {}
    for name, value in usage.items():
        if name in _TIMES:
            continue
        is_cached = "cache" in name
        if isinstance(value, dict):
            edited[name] = dict.fromkeys(value, 0) if is_cached else _without_cached(value)
        else:
            edited[name] = 0 if is_cached and isinstance(value, (int, float)) else value
    return edited


def _object(raw: msgspec.Raw) -> JsonObject | None:
    try:
        return parse_object(bytes(raw))
    except InvalidJson:
        return None
