"""Multipart forms with a file (RFC 7578): only the model's name is read, the rest stays bytes.

RFC 2046 also allows text before the first boundary, white space behind one, and folded headers,
which few servers read. Such a form is brought to the shape that all clients write. A form that two
parsers could read in two ways is refused, since a key's permissions depend on the model's name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gateway import errors
from gateway.request.body import ParsedBody
from gateway.terms import Headers

MOST_FORM_FIELDS = 64
LONGEST_FIELD_HEADERS = 4 * 1024  # Bytes of one field's headers
LONGEST_MODEL_NAME = 512  # Bytes of a model's name
LONGEST_PADDING = 1024  # Bytes of white space behind a boundary

_PARAMETER = re.compile(
    rb';[ \t]*([^\s;="]+)=(?:"((?:[^"\\\r\n]|\\[^\r\n])*)"|([^\s;"]+))[ \t]*',
)

_PARAMETERS = rb"[ \t]*((?:;[^\r\n]*)?)"
_CONTENT_TYPE = re.compile(rb"multipart/form-data" + _PARAMETERS, re.IGNORECASE)
_DISPOSITION = re.compile(rb"content-disposition:[ \t]*form-data" + _PARAMETERS, re.IGNORECASE)
_ANY_DISPOSITION = re.compile(rb"content-disposition[ \t]*:", re.IGNORECASE)

_PLAIN_DISPOSITION = re.compile(
    rb'content-disposition:[ \t]*form-data[ \t]*;[ \t]*name="', re.IGNORECASE
)

_BOUNDARY = re.compile(rb"[!#-\[\]-~ ]{0,69}[!#-\[\]-~]")
_NAME = re.compile(rb'[^"\\]{1,200}')
_FOLD = re.compile(rb"\r\n[ \t]+")
_DELIMITER_END = re.compile(rb"(--)?([ \t]{0,%d})(?=\r\n|\Z)" % LONGEST_PADDING)


class FieldHead(NamedTuple):
    """The headers of a field."""

    lines: list[bytes]  # Without folds
    name: bytes
    parameters: dict[bytes, bytes]
    """Of its Content-Disposition: between their quotes as they were written."""
    is_plain: bool  # Whether every parser reads them alike


class _FormField(NamedTuple):
    head: FieldHead
    start: int
    end: int  # The value is `body[start:end]`


def boundary_of(content_type: bytes) -> bytes | None:
    """The boundary that a Content-Type names; None: it is no form's, or has none."""
    found = _CONTENT_TYPE.fullmatch(content_type)
    # Some servers search for the word, in quotes too.
    if found is None or content_type.lower().count(b"boundary=") != 1:
        return None
    boundary = _parameters(found[1]).get(b"boundary", b"")
    return boundary if _BOUNDARY.fullmatch(boundary) else None


def parse_field_head(head: bytes) -> FieldHead:
    """Read the headers of a field. Raises: GatewayError 400."""
    unfolded = _FOLD.sub(b" ", head)
    lines = unfolded.split(b"\r\n")
    if any(b"\n" in line or b"\r" in line for line in lines):
        raise form_error("a line of a field's headers ends wrongly")
    named = [line for line in lines if _ANY_DISPOSITION.match(line)]
    found = _DISPOSITION.fullmatch(named[0]) if len(named) == 1 else None
    if found is None:
        raise form_error("a field's Content-Disposition can't be read")
    parameters = _parameters(found[1])
    name = parameters.get(b"name", b"")
    if b"name*" in parameters or not _NAME.fullmatch(name):
        raise form_error("a field has no name")
    is_plain = unfolded == head and _PLAIN_DISPOSITION.match(named[0]) is not None
    return FieldHead(lines, name, parameters, is_plain)


def parse_multipart(body: bytes, headers: Headers) -> tuple[bytes, ParsedBody]:
    """The form as nodes get it, and the fields that decide where it goes.

    Raises: GatewayError 400.
    """
    types = [value for name, value in headers if name == b"content-type"]
    boundary = boundary_of(types[0]) if len(types) == 1 else None
    if boundary is None:
        raise form_error("its Content-Type must be multipart/form-data with a boundary")
    mark = b"--" + boundary
    fields, is_plain = _read_form(body, mark)
    if not is_plain:
        body = _plain_form(body, mark, fields)
        fields, _ = _read_form(body, mark)
    field = _model_field(fields)
    if field is None:
        return body, ParsedBody()
    value = body[field.start : field.end]
    try:
        model = value.decode()
    except UnicodeDecodeError:
        raise form_error("'model' is not UTF-8", "model") from None
    if len(value) > LONGEST_MODEL_NAME or not model.isprintable():
        raise form_error("'model' is no name", "model")
    return body, ParsedBody(model=model.strip() or None)


def with_model(body: bytes, model: str) -> bytes:
    """`body`, which comes from `parse_multipart`, with another model's name."""
    mark = body[: body.index(b"\r\n")]
    field = _model_field(_read_form(body, mark)[0])
    if field is not None:
        return body[: field.start] + model.encode() + body[field.end :]
    return b'%b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n%b' % (
        mark,
        model.encode(),
        body,
    )


def form_error(problem: str, param: str | None = None) -> errors.GatewayError:
    """400: the form can't be read."""
    return errors.invalid_request(f"The form can't be read: {problem}.", param)


def _parameters(text: bytes) -> dict[bytes, bytes]:
    """Parameters of a header, by their names in small letters. Raises: GatewayError 400."""
    found: dict[bytes, bytes] = {}
    at = 0
    while parameter := _PARAMETER.match(text, at):
        name = parameter[1].lower()
        if name in found:
            raise form_error("a header has a parameter twice")
        found[name] = parameter[2] or parameter[3] or b""
        at = parameter.end()
    if text[at:].strip(b"; \t"):
        raise form_error("a header's parameters can't be read")
    return found


def _model_field(fields: list[_FormField]) -> _FormField | None:
    found = [field for field in fields if field.head.name.lower() == b"model"]
    if len(found) > 1 or any(field.head.name != b"model" for field in found):
        raise form_error("it names 'model' twice, or in capitals", "model")
    return found[0] if found else None


def _read_form(body: bytes, mark: bytes) -> tuple[list[_FormField], bool]:
    """The fields between boundaries, which begin with `mark`; whether all parsers see the same.

    Raises: GatewayError 400.
    """
    fields: list[_FormField] = []
    at, is_last = body.find(mark), False
    is_plain, head_start = at == 0, -1
    while at >= 0:
        found = _DELIMITER_END.match(body, at + len(mark))
        if is_last or found is None or (at and body[at - 2 : at] != b"\r\n"):
            raise form_error("its boundary stands within a field")
        if head_start >= 0:
            fields.append(_read_field(body, head_start, at - 2))
        if len(fields) > MOST_FORM_FIELDS:
            raise form_error(f"it has more than {MOST_FORM_FIELDS} fields")
        is_plain, is_last = is_plain and not found[2], found[1] is not None
        head_start = found.end()
        at = body.find(mark, head_start)
    if not (is_last and fields):
        raise form_error("it has no field, or its last boundary is missing")
    return fields, is_plain and all(field.head.is_plain for field in fields)


def _read_field(body: bytes, line_end: int, end: int) -> _FormField:
    """The field between the end of a boundary's line and the next boundary."""
    head_end = body.find(b"\r\n\r\n", line_end, line_end + LONGEST_FIELD_HEADERS)
    if not 0 <= head_end <= end - 2:
        raise form_error("a field has no headers, or too many")
    head = parse_field_head(body[line_end + 2 : head_end])
    return _FormField(head, min(head_end + 4, end), end)


def _plain_form(body: bytes, mark: bytes, fields: list[_FormField]) -> bytes:
    """The form as all clients write it."""
    parts: list[bytes] = []
    for head, start, end in fields:
        others = (
            (b"; %b=%b" if name.endswith(b"*") else b'; %b="%b"') % (name, value)
            for name, value in head.parameters.items()
            if name != b"name"
        )
        disposition = b'Content-Disposition: form-data; name="%b"%b' % (head.name, b"".join(others))
        lines = (disposition if _ANY_DISPOSITION.match(line) else line for line in head.lines)
        parts += mark, b"\r\n", b"\r\n".join(lines), b"\r\n\r\n", body[start:end], b"\r\n"
    return b"".join((*parts, mark, b"--\r\n"))
