"""Forms with a file (multipart/form-data, RFC 7578): the model's name is read, the rest is bytes.

Only forms as every client writes them are taken. Whatever two parsers could read in two ways is
refused, since a key's permission hangs on the name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from gateway import errors
from gateway.proxy.inbound.parsed_body import ParsedBody
from gateway.request import Headers

MOST_FORM_FIELDS = 64

LONGEST_FIELD_HEADERS = 4 * 1024
"""Bytes of one field's headers."""

LONGEST_MODEL_NAME = 512
"""Bytes of a model's name."""

_BOUNDARY = re.compile(
    rb"multipart/form-data\s*;\s*boundary=(?:\"([!#-\[\]-~ ]{1,70})\"|([!#-:<-\[\]-~]{1,70}))\s*",
    re.IGNORECASE,
)

_DISPOSITION = re.compile(
    rb"content-disposition:[ \t]*form-data[ \t]*;[ \t]*name=\"([^\"\\\r\n]{1,200})\""
    rb"(?:[ \t]*;[ \t]*filename\*?=(?:\"(?:[^\"\\]|\\.)*\"|[^\";\s]+))*[ \t]*",
    re.IGNORECASE,
)

_ONE = re.compile(rb"(?:\A|\r\n)content-disposition:", re.IGNORECASE)


class _FormField(NamedTuple):
    name: bytes
    start: int
    end: int
    """Its value is `body[start:end]`."""


def parse_multipart(body: bytes, headers: Headers) -> ParsedBody:
    """What a form says of where it goes. Raises: GatewayError 400."""
    kinds = [value for name, value in headers if name == b"content-type"]
    found = _BOUNDARY.fullmatch(kinds[0]) if len(kinds) == 1 else None
    if found is None:
        raise _wrong("its Content-Type must be multipart/form-data with a boundary")
    boundary = found[1] or found[2]
    if not body.startswith(b"--" + boundary + b"\r\n"):
        raise _wrong("it does not begin with its boundary")
    field = _model(body)
    if field is None:
        return ParsedBody()
    value = body[field.start : field.end]
    try:
        model = value.decode()
    except UnicodeDecodeError:
        raise _wrong("'model' is not UTF-8", "model") from None
    if len(value) > LONGEST_MODEL_NAME or not model.isprintable():
        raise _wrong("'model' is no name", "model")
    return ParsedBody(model=model.strip() or None)


def with_model(body: bytes, model: str) -> bytes:
    """`body` with another model's name; it must be a form that `peek` has read."""
    field = _model(body)
    if field is not None:
        return body[: field.start] + model.encode() + body[field.end :]
    line = body[: body.index(b"\r\n") + 2]
    return b'%bContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n%b' % (
        line,
        model.encode(),
        body,
    )


def _model(body: bytes) -> _FormField | None:
    found = [field for field in _fields(body) if field.name.lower() == b"model"]
    if len(found) > 1 or any(field.name != b"model" for field in found):
        raise _wrong("it names 'model' twice, or in capitals", "model")
    return found[0] if found else None


def _fields(body: bytes) -> Iterator[_FormField]:
    """The fields one by one. Raises: GatewayError 400."""
    at = body.index(b"\r\n")
    mark = b"\r\n" + body[:at]
    marks = body.count(body[:at])
    for count in range(1, MOST_FORM_FIELDS + 1):
        if body[at : at + 2] == b"--":
            if count < marks:
                raise _wrong("its boundary stands within a field")
            return
        head = body.find(b"\r\n\r\n", at, at + LONGEST_FIELD_HEADERS)
        if body[at : at + 2] != b"\r\n" or head < 0:
            raise _wrong("a field has no headers, or too many")
        end = body.find(mark, head + 2)
        if end < 0:
            raise _wrong("its last boundary is missing")
        yield _FormField(_name(body[at + 2 : head]), min(head + 4, end), end)
        at = end + len(mark)
    raise _wrong(f"it has more than {MOST_FORM_FIELDS} fields")


def _name(head: bytes) -> bytes:
    if b"\n" in head.replace(b"\r\n", b""):
        raise _wrong("a line of a field's headers ends wrongly")
    names = [found[1] for line in head.split(b"\r\n") if (found := _DISPOSITION.fullmatch(line))]
    if len(names) != 1 or len(_ONE.findall(head)) != 1:
        raise _wrong("a field's Content-Disposition can't be read")
    return names[0]


def _wrong(what: str, param: str | None = None) -> errors.GatewayError:
    return errors.invalid_request(f"The form can't be read: {what}.", param)
