"""The answers to several prompts as one, as llama.cpp's server would give it.

Answer `j` to prompt `i` has the index `i * n + j`. What all share (id, time, model) is that of the
first to come; tokens are summed, where the server tells those of one prompt alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.relay import sse
from gateway.relay.values import NoJson, object_of
from gateway.transport.errors import Garbage

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHOICES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_INDEX = msgspec.json.Decoder(int)

_DONE = b"data: [DONE]\n\n"
_SHARED = ("id", "created", "model", "system_fingerprint")


class Merging(ABC):
    """What both APIs have in common."""

    def __init__(self, asked: Mapping[str, msgspec.Raw], answers: int) -> None:
        """`asked`: the request's other fields; `answers`: how many each prompt has."""
        self._asked = asked
        self._answers = answers
        self._whole: dict[int, bytes] = {}
        self.size = 0
        """Bytes of the answers that were added."""

    def add(self, index: int, answer: bytes) -> None:
        """The whole answer to one prompt. Raises: Garbage."""
        self._whole[index] = self._items(index, answer)
        self.size += len(self._whole[index])

    def events(self, index: int, events: bytes) -> bytes:
        """Whole events of the answer to one prompt, as those of all. Raises: Garbage."""
        found = []
        for event in sse.split(events):
            data = sse.payload(event)
            # The end comes once, and llama.cpp begins with `null` sometimes.
            if data and data not in {b"[DONE]", b"null"}:
                found.append(self._event(index, data))
        return b"".join(found)

    @abstractmethod
    def whole(self) -> bytes:
        """The one answer."""

    @abstractmethod
    def end(self) -> bytes:
        """What ends the stream of all."""

    @abstractmethod
    def _items(self, index: int, answer: bytes) -> bytes:
        """The answers to one prompt, without brackets around them."""

    @abstractmethod
    def _event(self, index: int, data: bytes) -> bytes:
        """One event of the answer to one prompt."""

    def _joined(self) -> bytes:
        return b"[" + b",".join(items for _, items in sorted(self._whole.items())) + b"]"

    def _numbered(
        self, index: int, items: list[dict[str, msgspec.Raw]]
    ) -> list[dict[str, msgspec.Raw]]:
        """These answers to one prompt, each with its number among all."""
        for place, item in enumerate(items):
            own = item.get("index")
            number = place if own is None else _read(_INDEX, own)
            item["index"] = msgspec.Raw(b"%d" % (index * self._answers + number))
        return items


class Completions(Merging):
    """`/v1/completions`: choices in one object."""

    def __init__(self, asked: Mapping[str, msgspec.Raw], answers: int) -> None:
        super().__init__(asked, answers)
        self._first: dict[str, msgspec.Raw] = {}
        self._first_index: int | None = None
        self._usage: dict[str, Any] = {}

    def whole(self) -> bytes:
        """The one answer."""
        fields = self._first | {"choices": msgspec.Raw(self._joined())}
        if self._usage:
            fields["usage"] = msgspec.Raw(msgspec.json.encode(self._usage))
        return msgspec.json.encode(fields)

    def end(self) -> bytes:
        """What ends the stream of all."""
        if not (self._usage and self._counts):
            return _DONE
        fields = {name: self._first[name] for name in _SHARED if name in self._first}
        fields |= {
            "object": msgspec.Raw(b'"text_completion"'),
            "choices": msgspec.Raw(b"[]"),
            "usage": msgspec.Raw(msgspec.json.encode(self._usage)),
        }
        return b"data: " + msgspec.json.encode(fields) + b"\n\n" + _DONE

    @property
    def _counts(self) -> bool:
        """Whether the client wants to be told the tokens."""
        try:
            options = object_of(bytes(self._asked.get("stream_options", b"{}")))
        except NoJson:
            return False
        return options.get("include_usage") is True

    def _items(self, index: int, answer: bytes) -> bytes:
        fields: dict[str, msgspec.Raw] = _read(_FIELDS, answer)
        choices = _read(_CHOICES, fields.pop("choices", b"[]"))
        self._count(fields)
        if self._first_index is None or index < self._first_index:
            self._first, self._first_index = fields, index
        return msgspec.json.encode(self._numbered(index, choices))[1:-1]

    def _event(self, index: int, data: bytes) -> bytes:
        fields: dict[str, msgspec.Raw] = _read(_FIELDS, data)
        choices = _read(_CHOICES, fields.get("choices", b"[]"))
        self._count(fields)
        if not choices:
            return b""
        self._first = self._first or fields
        fields |= {name: self._first[name] for name in _SHARED if name in self._first}
        encoded = msgspec.json.encode(self._numbered(index, choices))
        fields["choices"] = msgspec.Raw(encoded)
        return b"data: " + msgspec.json.encode(fields) + b"\n\n"

    def _count(self, fields: dict[str, msgspec.Raw]) -> None:
        usage = fields.pop("usage", None)
        if usage is not None:
            try:
                _add(self._usage, object_of(bytes(usage)))
            except NoJson:
                return  # `null`, as OpenAI's has it in all chunks but the last


class Native(Merging):
    """llama.cpp's `/completion`: a list of objects, or their events as they come."""

    def whole(self) -> bytes:
        """The one answer."""
        return self._joined()

    def end(self) -> bytes:
        """What ends the stream of all."""
        return b""

    def _items(self, index: int, answer: bytes) -> bytes:
        listed = answer if answer.lstrip()[:1] == b"[" else b"[" + answer + b"]"
        return msgspec.json.encode(self._numbered(index, _read(_CHOICES, listed)))[1:-1]

    def _event(self, index: int, data: bytes) -> bytes:
        (fields,) = self._numbered(index, [_read(_FIELDS, data)])
        return b"data: " + msgspec.json.encode(fields) + b"\n\n"


MERGING: dict[str, type[Merging]] = {"/v1/completions": Completions, "/completion": Native}
"""By the path, as nodes know it."""


def _read(decoder: msgspec.json.Decoder[Any], data: bytes | msgspec.Raw) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Garbage("The node's answer is not what was expected") from None


def _add(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Sum the numbers of `usage`, those of its details too."""
    for name, value in more.items():
        if isinstance(value, Mapping):
            inner = total.setdefault(name, {})
            if isinstance(inner, dict):
                _add(inner, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            before = total.get(name, 0)
            total[name] = before + value if isinstance(before, int) else value
        else:
            total.setdefault(name, value)
