"""Multipart forms with a file (RFC 7578): only the model's name is read, the rest stays bytes.

Only forms as all clients write them are accepted. A form that two parsers could read in two ways is
refused, since a key's permissions depend on the model's name.
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

_ANY_DISPOSITION = re.compile(rb"(?:\A|\r\n)content-disposition:", re.IGNORECASE)


class _FormField(NamedTuple):
    name: bytes
    start: int
    end: int
    """The value is `body[start:end]`."""


def parse_multipart(body: bytes, headers: Headers) -> ParsedBody:
    """The fields that decide where a form goes. Raises: GatewayError 400."""
    types = [value for name, value in headers if name == b"content-type"]
    found = _BOUNDARY.fullmatch(types[0]) if len(types) == 1 else None
    if found is None:
        raise _invalid("its Content-Type must be multipart/form-data with a boundary")
    boundary = found[1] or found[2]
    if not body.startswith(b"--" + boundary + b"\r\n"):
        raise _invalid("it does not begin with its boundary")
    field = _model_field(body)
    if field is None:
        return ParsedBody()
    value = body[field.start : field.end]
    try:
        model = value.decode()
    except UnicodeDecodeError:
        raise _invalid("'model' is not UTF-8", "model") from None
    if len(value) > LONGEST_MODEL_NAME or not model.isprintable():
        raise _invalid("'model' is no name", "model")
    return ParsedBody(model=model.strip() or None)


def with_model(body: bytes, model: str) -> bytes:
    """`body` with another model's name; `parse_multipart` must have accepted it."""
    field = _model_field(body)
    if field is not None:
        return body[: field.start] + model.encode() + body[field.end :]
    boundary_line = body[: body.index(b"\r\n") + 2]
    return b'%bContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n%b' % (
        boundary_line,
        model.encode(),
        body,
    )


def _model_field(body: bytes) -> _FormField | None:
    found = [field for field in _form_fields(body) if field.name.lower() == b"model"]
    if len(found) > 1 or any(field.name != b"model" for field in found):
        raise _invalid("it names 'model' twice, or in capitals", "model")
    return found[0] if found else None


def _form_fields(body: bytes) -> Iterator[_FormField]:
    """The fields in their order. Raises: GatewayError 400."""
    at = body.index(b"\r\n")
    delimiter = b"\r\n" + body[:at]
    boundaries = body.count(body[:at])
    for count in range(1, MOST_FORM_FIELDS + 1):
        if body[at : at + 2] == b"--":
            if count < boundaries:
                raise _invalid("its boundary stands within a field")
            return
        head = body.find(b"\r\n\r\n", at, at + LONGEST_FIELD_HEADERS)
        if body[at : at + 2] != b"\r\n" or head < 0:
            raise _invalid("a field has no headers, or too many")
        end = body.find(delimiter, head + 2)
        if end < 0:
            raise _invalid("its last boundary is missing")
        yield _FormField(_field_name(body[at + 2 : head]), min(head + 4, end), end)
        at = end + len(delimiter)
    raise _invalid(f"it has more than {MOST_FORM_FIELDS} fields")


def _field_name(head: bytes) -> bytes:
    if b"\n" in head.replace(b"\r\n", b""):
        raise _invalid("a line of a field's headers ends wrongly")
    names = [found[1] for line in head.split(b"\r\n") if (found := _DISPOSITION.fullmatch(line))]
    if len(names) != 1 or len(_ANY_DISPOSITION.findall(head)) != 1:
        raise _invalid("a field's Content-Disposition can't be read")
    return names[0]


def _invalid(problem: str, param: str | None = None) -> errors.GatewayError:
    return errors.invalid_request(f"The form can't be read: {problem}.", param)
