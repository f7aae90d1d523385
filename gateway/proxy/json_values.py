"""JSON from nodes and clients, decoded in one way."""

from __future__ import annotations

from typing import Any

import msgspec

JsonObject = dict[str, Any]
"""A JSON object."""

VALUE_DECODER = msgspec.json.Decoder()

_OBJECT = msgspec.json.Decoder(dict[str, Any])

_OBJECTS = msgspec.json.Decoder(list[dict[str, Any]])

_TEXTS = msgspec.json.Decoder(list[str])

FIELDS_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""Decodes an object's fields; each value stays bytes."""

ITEMS_DECODER = msgspec.json.Decoder(list[msgspec.Raw])
"""Decodes a list's items; each item stays bytes."""

TEXT_DECODER = msgspec.json.Decoder(str)

JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are no JSON, not UTF-8, or nested too deeply."""


class InvalidJson(Exception):  # noqa: N818 - the name says it
    """These bytes are not JSON of the expected type."""


def parse_json(data: bytes) -> Any:
    """The value. Raises: InvalidJson."""
    try:
        return VALUE_DECODER.decode(data)
    except JSON_ERRORS:
        raise InvalidJson from None


def parse_object(data: bytes) -> JsonObject:
    """The object. Raises: InvalidJson."""
    try:
        return _OBJECT.decode(data)
    except JSON_ERRORS:
        raise InvalidJson from None


def check_object(data: bytes) -> None:
    """Check that it is an object, without decoding its values. Raises: InvalidJson."""
    try:
        FIELDS_DECODER.decode(data)
    except JSON_ERRORS:
        raise InvalidJson from None


def parse_objects(data: bytes) -> list[JsonObject]:
    """The objects of a list. Raises: InvalidJson."""
    try:
        return _OBJECTS.decode(data)
    except JSON_ERRORS:
        raise InvalidJson from None


def parse_texts(data: bytes) -> list[str]:
    """The strings of a list. Raises: InvalidJson."""
    try:
        return _TEXTS.decode(data)
    except JSON_ERRORS:
        raise InvalidJson from None
