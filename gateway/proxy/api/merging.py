"""Merging the responses to several prompts of one request into one response."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.proxy import sse
from gateway.proxy.json_values import FIELDS_DECODER, JSON_ERRORS
from gateway.transport.errors import InvalidResponse

RawFields = dict[str, msgspec.Raw]
"""A JSON object whose values are not decoded."""


_ITEMS = msgspec.json.Decoder(list[RawFields])

_INDEX = msgspec.json.Decoder(int)

_NO_EVENTS = frozenset({b"", b"[DONE]", b"null"})
"""Data of events that are left out: the end comes once, and llama.cpp may begin with `null`."""


class ResponseMerger(ABC):
    """Merges plain responses or streams; a new one for each request."""

    def __init__(self, request_fields: Mapping[str, msgspec.Raw], answers_per_prompt: int) -> None:
        """`request_fields`: the request's fields except its prompts."""
        self._request_fields = request_fields
        self._answers_per_prompt = answers_per_prompt
        self._items_by_prompt: dict[int, bytes] = {}
        self.size = 0
        """Bytes of the plain responses added."""

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
    fields: RawFields = _decode(FIELDS_DECODER, data)
    return fields


def read_items(data: bytes | msgspec.Raw) -> list[RawFields]:
    """The JSON objects of a list. Raises: InvalidResponse."""
    items: list[RawFields] = _decode(_ITEMS, data)
    return items


def inner_items(data: bytes | msgspec.Raw) -> bytes:
    """The items of a list, undecoded, with commas between them; empty: null. Raises: TypeError."""
    listed = bytes(data)
    if listed == b"null":
        return b""
    if not listed.startswith(b"["):
        raise TypeError
    return listed[1:-1].strip()


def _decode(decoder: msgspec.json.Decoder[Any], data: bytes | msgspec.Raw) -> Any:
    try:
        return decoder.decode(data)
    except JSON_ERRORS:
        raise InvalidResponse("The node's response has another form than expected") from None
