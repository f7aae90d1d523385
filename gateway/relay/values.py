"""JSON as it comes from nodes and clients, read in one way."""

from __future__ import annotations

from typing import Any

import msgspec

Value = dict[str, Any]
"""A JSON object."""

_ANY = msgspec.json.Decoder()
_OBJECT = msgspec.json.Decoder(dict[str, Any])
_OBJECTS = msgspec.json.Decoder(list[dict[str, Any]])

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading JSON raises: where it is none, not in UTF-8, or nested too deeply."""


class NoJson(Exception):  # noqa: N818 - says what it is
    """These bytes are not what was to be read."""


def any_of(data: bytes) -> Any:
    """The value. Raises: NoJson."""
    try:
        return _ANY.decode(data)
    except UNREADABLE:
        raise NoJson from None


def object_of(data: bytes) -> Value:
    """The object. Raises: NoJson."""
    try:
        return _OBJECT.decode(data)
    except UNREADABLE:
        raise NoJson from None


def check_object(data: bytes) -> None:
    """See that it is an object, without making what is in it. Raises: NoJson."""
    try:
        _FIELDS.decode(data)
    except UNREADABLE:
        raise NoJson from None


def objects_of(data: bytes) -> list[Value]:
    """The objects of a list. Raises: NoJson."""
    try:
        return _OBJECTS.decode(data)
    except UNREADABLE:
        raise NoJson from None
