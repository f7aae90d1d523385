"""JSON as it comes from nodes and clients, read in one way."""

from __future__ import annotations

from typing import Any

import msgspec

JsonObject = dict[str, Any]
"""A JSON object."""

VALUE_DECODER = msgspec.json.Decoder()

_OBJECT = msgspec.json.Decoder(dict[str, Any])

_OBJECTS = msgspec.json.Decoder(list[dict[str, Any]])

FIELDS_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""An object's fields, each value as its own bytes."""

ITEMS_DECODER = msgspec.json.Decoder(list[msgspec.Raw])
"""A list's items, each as its own bytes."""

TEXT_DECODER = msgspec.json.Decoder(str)

JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading JSON raises: where it is none, not in UTF-8, or nested too deeply."""


class InvalidJson(Exception):  # noqa: N818 - says what it is
    """These bytes are not what was to be read."""


def parse_json(data: bytes) -> Any:
    """The value. Raises: NoJson."""
    try:
        return VALUE_DECODER.decode(data)
    except JSON_ERRORS:
        raise InvalidJson from None


def parse_object(data: bytes) -> JsonObject:
    """The object. Raises: NoJson."""
    try:
        return _OBJECT.decode(data)
    except JSON_ERRORS:
        raise InvalidJson from None


def check_object(data: bytes) -> None:
    """See that it is an object, without making what is in it. Raises: NoJson."""
    try:
        FIELDS_DECODER.decode(data)
    except JSON_ERRORS:
        raise InvalidJson from None


def parse_objects(data: bytes) -> list[JsonObject]:
    """The objects of a list. Raises: NoJson."""
    try:
        return _OBJECTS.decode(data)
    except JSON_ERRORS:
        raise InvalidJson from None
