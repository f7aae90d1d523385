"""JSON from nodes and clients, decoded in one way."""

from __future__ import annotations

import io
import re
import secrets
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from gateway import errors

T = TypeVar("T")
JsonObject = dict[str, Any]  # a JSON object
VALUE_DECODER = msgspec.json.Decoder()
_OBJECT = msgspec.json.Decoder(dict[str, Any])
# Decodes an object's fields; each value stays bytes.
FIELDS_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
# Decodes a list's items; each item stays bytes.
ITEMS_DECODER = msgspec.json.Decoder(list[msgspec.Raw])
TEXT_DECODER = msgspec.json.Decoder(str)
# What decoding raises for bytes that are no JSON, not UTF-8, or nested too deeply.
JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class AnyObject(msgspec.Struct):
    """Any JSON object; no field is decoded."""


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


def decode_body(
    decoder: msgspec.json.Decoder[T], raw: bytes | msgspec.Raw, name: str = "", *, whole: str = ""
) -> T:
    """The value that stands at `name` in a client's body; without one all of it.

    `whole`: how an error about all of it begins. Raises: GatewayError 400.
    """
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        place = f"{name}{path.rstrip('`')}".lstrip(".")
        message = f"'{place}': {problem}." if place else f"{whole}{problem}."
        raise errors.invalid_request(message, place or None) from None
    except RecursionError:
        # The depth that raises this differs between Pythons. All of them read more than
        # `limits.json_depth`, so `prepare` gives the same answer for what they can read.
        raise errors.invalid_request("The body is nested too deeply.") from None
    except UnicodeDecodeError:
        raise errors.invalid_json("it is not UTF-8") from None
    except msgspec.DecodeError as error:
        raise errors.invalid_json(str(error) if bytes(raw).strip() else "it is empty") from None


def as_raw(value: object) -> msgspec.Raw:
    """The value as JSON, to stand among others that are not decoded."""
    return msgspec.Raw(msgspec.json.encode(value))


# Large bodies: their long strings are cut out before they are parsed, and put back at the end.

SHORT_BODY_BYTES = 64 * 1024  # bytes of a body up to which it is parsed with all its strings
LONG_STRING_BYTES = 256  # bytes of a string from which it is cut out of a larger body
# Bytes of a body that may be left without its long strings: some milliseconds to parse.
MOST_PARSED_BYTES = 1 << 20
WINDOW_BYTES = 64 * 1024  # bytes that one step reads
STEP_BYTES = 256 * 1024  # bytes that one step writes
STEP_PIECES = 500  # pieces of a new body that one step writes
# Messages, images, tool calls and other parts of a conversation that is translated: some megabytes
# of objects while it is.
MOST_PARTS = 20_000
MOST_MESSAGE_PARTS = 1000  # parts of one message: some milliseconds to translate
STEP_PARTS = 100  # parts that are translated in one step, besides the last message's
Piece = bytes | memoryview


def raw_head(raw: msgspec.Raw, size: int) -> bytes:
    """The first bytes of a value."""
    return bytes(memoryview(raw)[:size])


@dataclass(slots=True)
class CutBody:
    """A body whose long strings have been replaced by marks."""

    body: bytes
    rest: bytes  # the body with the marks
    mark: re.Pattern[bytes] | None = None
    """Matches a mark with the string's number; None: there is none."""
    spans: list[tuple[int, int]] = field(default_factory=list)  # the strings' places in `body`

    def beginning(self, raw: msgspec.Raw) -> bytes:
        """The first bytes of a string, its quote included."""
        found = None if self.mark is None else self.mark.match(raw_head(raw, 64), 1)
        if found is None:
            return raw_head(raw, 16)
        start, _ = self.spans[int(found[1])]
        return self.body[start - 1 : start + 15]

    def restored(self, raw: msgspec.Raw, name: str) -> bytes:
        """A value with its long strings. Raises: GatewayError 400, if it is too large to parse."""
        pieces = list(self._splice(raw))
        if sum(map(len, pieces)) > MOST_PARSED_BYTES:
            raise errors.invalid_request(f"'{name}' has more than {MOST_PARSED_BYTES} bytes.", name)
        return b"".join(pieces)

    def join(self, fields: JsonObject) -> Generator[None, None, bytes]:
        """A body of these fields, with its long strings, in short steps.

        Of a list each item is encoded by itself.
        """
        whole = io.BytesIO()  # It grows in place and returns its bytes without a copy.
        written = 0
        for number, piece in enumerate(_pieces(fields)):
            if number % STEP_PIECES == STEP_PIECES - 1:
                yield
            for part in self._splice(piece):
                for start in range(0, len(part), STEP_BYTES):
                    written += whole.write(part[start : start + STEP_BYTES])
                    if written >= STEP_BYTES:
                        written = 0
                        yield
        return whole.getvalue()

    def _splice(self, piece: Piece | msgspec.Raw) -> Iterator[Piece]:
        if self.mark is None:
            yield bytes(piece)
            return
        view, data, at = memoryview(self.body), bytes(piece), 0
        for found in self.mark.finditer(data):
            start, end = self.spans[int(found[1])]
            yield data[at : found.start()]
            yield view[start:end]
            at = found.end()
        yield data[at:]


def _pieces(fields: JsonObject) -> Iterator[bytes]:
    before = b"{"
    for name, value in fields.items():
        yield before + msgspec.json.encode(name) + b":"
        if isinstance(value, list) and value:
            for number, item in enumerate(value):
                yield (b"," if number else b"[") + msgspec.json.encode(item)
            yield b"]"
        else:
            yield msgspec.json.encode(value)
        before = b","
    yield b"}" if fields else b"{}"


@dataclass(slots=True)
class PartCounter:
    """Bounds the parts of a conversation: each takes many times its bytes while it is translated.

    Its methods raise: GatewayError 400, if there are too many.
    """

    _total: int = 0
    _in_step: int = 0

    def add_messages(self, count: int) -> None:
        """Count all messages, before the first one is translated."""
        self._add(count, MOST_PARTS, "messages")

    def add_parts(self, count: int, name: str) -> None:
        """Count the parts at `name`, in one message."""
        self._add(count, MOST_MESSAGE_PARTS, name)
        self._in_step += count

    def ends_step(self, size: int = 0) -> bool:
        """Whether enough was translated for one step; to be asked after each message.

        `size`: bytes that were made of it anew.
        """
        self._in_step += 1 + size * STEP_PARTS // STEP_BYTES
        if self._in_step < STEP_PARTS:
            return False
        self._in_step = 0
        return True

    def _add(self, count: int, most: int, name: str) -> None:
        self._total += count
        if count > most or self._total > MOST_PARTS:
            message = f"'{name}' has more than {most} parts, which is too much to translate."
            if count <= most:
                message = f"The messages have more than {MOST_PARTS} parts in all."
            raise errors.invalid_request(message, name)


def cut_long_strings(body: bytes) -> Generator[None, None, CutBody]:
    """Cut the long strings out of a large body, in short steps. Raises: GatewayError 400."""
    body = body.removeprefix(b"\xef\xbb\xbf")
    if len(body) < SHORT_BODY_BYTES:
        return CutBody(body, body)
    key = secrets.token_hex(8).encode()
    parts: list[bytes] = []
    spans: list[tuple[int, int]] = []
    at = start = copied = size = 0
    in_string = False
    while at < len(body):
        window = _without_escapes(body, at, at + WINDOW_BYTES)
        quote = at - 1
        at += len(window)
        # Each quote ends a part but the last one.
        for length in map(len, window.split(b'"')[:-1]):
            quote += length + 1
            in_string = not in_string
            if in_string:
                start = quote + 1
            elif quote - start > LONG_STRING_BYTES:
                parts += (body[copied:start], b"%b:%d;" % (key, len(spans)))
                size += start - copied
                spans.append((start, quote))
                copied = quote
        if size + (start if in_string else at) - copied > MOST_PARSED_BYTES:
            raise errors.invalid_request(
                f"The body has more than {MOST_PARSED_BYTES} bytes besides its long strings, which "
                "is too much to translate: send it to the paths under /v1/."
            )
        yield
    if in_string:
        raise errors.invalid_json("a string has no end")
    parts.append(body[copied:])
    return CutBody(body, b"".join(parts), re.compile(key + rb":(\d+);"), spans)


def _without_escapes(body: bytes, start: int, end: int) -> bytes:
    """A part of a body, in which only quotes around strings are left; no escape is divided."""
    part = body[start:end]
    if (len(part) - len(part.rstrip(b"\\"))) % 2:
        part += body[end : end + 1]
    return part.replace(b"\\\\", b"__").replace(b'\\"', b"__")


def run_at_once(work: Generator[None, None, T]) -> T:
    """Run all steps of short work; return its value."""
    try:
        while True:
            next(work)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
