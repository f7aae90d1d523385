"""Hides from a client what nodes had cached of its prompt, where the settings want that.

Who shares nodes with others could guess their prompts: a right guess is cached, a wrong one is not.
Of `usage`, numbers of cached tokens become 0, since clients expect the fields; all else that tells
is removed. The gateway itself has read the figures before.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping

import msgspec

from gateway.proxy import sse
from gateway.proxy.api.base import ResponseRewriter
from gateway.proxy.json_values import (
    FIELDS_DECODER,
    ITEMS_DECODER,
    JSON_ERRORS,
    InvalidJson,
    JsonObject,
    parse_object,
)
from gateway.transport.errors import InvalidResponse

Fields = dict[str, msgspec.Raw]

_KEY = re.compile(rb'(?:cache|prompt_)[A-Za-z0-9_/]*"\s*:')
"""Each object with telling figures has such a key. Within a text its quote would be escaped."""

_ID_SLOT = re.compile(rb',"id_slot":-?\d+|"id_slot":-?\d+,?')
"""A slot is chosen for what it has cached. Each event of llama.cpp's own streams names it."""

_TOLD_OF_TIMINGS = frozenset(
    {
        *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
        *("draft_n", "draft_n_accepted"),
    }
)
"""Fields of llama.cpp's `timings` that depend on the answer alone."""

_TELLING = frozenset(
    {
        *("cache_n", "tokens_cached", "prompt_progress", "id_slot", "__verbose"),
        *("prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "prompt_time"),
        # Ollama's: the whole less the answer's share is the prompt's.
        *("prompt_eval_duration", "load_duration", "total_duration"),
    }
)
"""Names of fields that tell how much of a prompt was cached."""

_NESTING = frozenset({"response", "message", "x_groq"})
"""Fields that hold an object with `usage`, in events of `/v1/responses` and `/v1/messages`."""

_CACHED_INPUT = ("cache_read_input_tokens", "cache_creation_input_tokens")
"""Anthropic's, which are no part of its `input_tokens`."""

_TIMES = frozenset({"prompt_time", "queue_time", "total_time"})
"""Some endpoints' times in `usage`, seconds."""


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

    def rewrite_body(self, content: bytes) -> bytes:
        """A plain response without the figures. Raises: InvalidResponse."""
        if self._translator is not None:
            content = self._translator.rewrite_body(content)
        return self._without_figures(content)

    def rewrite_in_steps(self, content: bytes) -> Generator[None, None, bytes]:
        """As `rewrite_body`, for a large body, in short steps."""
        if self._translator is not None:
            content = yield from self._translator.rewrite_in_steps(content)
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
            edited = raw if inner is None else _encoded(inner)
        changed = changed or edited is not raw
        kept[name] = edited
    return kept if changed else None


def _edited_timings(raw: msgspec.Raw) -> msgspec.Raw:
    timings = _object(raw)
    if timings is None:
        return raw
    return _encoded({name: timings[name] for name in timings if name in _TOLD_OF_TIMINGS})


def _edited_usage(raw: msgspec.Raw) -> msgspec.Raw:
    """`usage` as if nothing had been cached."""
    usage = _object(raw)
    if usage is None:
        return raw
    fresh = usage.get("input_tokens")
    if isinstance(fresh, int):
        cached = [usage.get(name) for name in _CACHED_INPUT]
        usage["input_tokens"] = fresh + sum(count for count in cached if isinstance(count, int))
    return _encoded(_without_cached(usage))


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


def _encoded(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
