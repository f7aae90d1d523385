"""Reads the lines of a batch's input: JSON objects with `custom_id`, `method`, `url` and `body`.

A line is either a request or an error of its own; the lines around it are read all the same. Each
line is numbered by its place in the file, from 1, empty ones included. Whatever the file holds,
memory is bounded: by one line, by what one call returns, and by 16 bytes for each `custom_id`.

Everything here blocks: call it on a thread (`folder.DiskThreads`).
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import BinaryIO, NamedTuple

import msgspec

from gateway.api.json_values import JSON_ERRORS, TEXT_DECODER
from gateway.api.tokens import BOUND_NAMES, largest_bound
from gateway.errors import truncate_echo
from gateway.request.body import BYTE_ORDER_MARK, BYTES_PER_TOKEN, MISSING, measure_prompt

PIECE_BYTES = 128 << 10  # bytes that are read from the file at a time
MOST_EMPTY_LINES = 1000  # empty lines that a file may have beside as many as lines: each takes time
CHUNK_BYTES = 1 << 20  # bytes after which `LineReader.read_some` returns
CHUNK_LINES = 500  # lines after which it does
# After so much of the input the thread lets the others run: it would hold the interpreter for
# milliseconds.
TURN_LINES, TURN_BYTES = 16, 32 << 10
TURN_SECONDS = 0.0002
LONGEST_CUSTOM_ID = 512  # characters: PostgreSQL can't index much longer ones
LONGEST_MODEL = 256  # characters
PREFIX_BYTES = 1024  # bytes of a prompt's beginning that tell a group of prompts from others
MOST_TOKENS = 1_000_000_000  # A larger `max_tokens` counts as this
_LONGEST_NUMBER = 20  # digits of a number that is looked at
_WHITE_SPACE = b" \t\r"


class TooManyLines(Exception):  # noqa: N818 - named for what it says of the file
    """The file has more lines than a batch may have."""


@dataclass(frozen=True, slots=True)
class LineSpec:
    """A line with a request. Its body is `length` bytes of the file."""

    number: int
    offset: int
    length: int
    custom_id: str
    model: str | None  # as the body names it
    prompt_tokens: int  # estimated
    max_tokens: int  # 0: the body names none
    prefix: int  # equal for prompts that begin alike; 0: too short to matter


@dataclass(frozen=True, slots=True)
class LineError:
    """A line that can't be run; it is `length` bytes of the file."""

    number: int
    offset: int
    length: int
    custom_id: str | None  # None: it has none, or none that can be read
    is_first: bool  # whether no earlier line has this `custom_id`
    code: str
    message: str
    param: str | None = None


Line = LineSpec | LineError


class RawLine(NamedTuple):
    """A line's bytes, without its end."""

    number: int
    offset: int
    length: int
    data: bytes | None  # None: it is too long


def raw_lines(file: BinaryIO, line_bytes: int) -> Iterator[RawLine]:
    """The lines of a buffered file. Raises: the file's own error."""
    number = offset = 0
    while begun := file.readline(line_bytes + 1):
        number, size, last = number + 1, len(begun), begun
        # What is beyond the limit is not kept.
        while not last.endswith(b"\n") and (last := file.readline(PIECE_BYTES)):
            size += len(last)
        length = size - last.endswith(b"\n")
        yield RawLine(number, offset, length, begun[:length] if length <= line_bytes else None)
        offset += size


class _Fields(msgspec.Struct):
    custom_id: msgspec.Raw = MISSING
    method: msgspec.Raw = MISSING
    url: msgspec.Raw = MISSING
    body: msgspec.Raw = MISSING


class _Body(msgspec.Struct):
    model: msgspec.Raw = MISSING
    stream: msgspec.Raw = MISSING
    max_completion_tokens: msgspec.Raw = MISSING
    max_tokens: msgspec.Raw = MISSING
    max_output_tokens: msgspec.Raw = MISSING
    n_predict: msgspec.Raw = MISSING
    tools: msgspec.Raw = MISSING
    system: msgspec.Raw = MISSING
    instructions: msgspec.Raw = MISSING
    query: msgspec.Raw = MISSING
    messages: msgspec.Raw = MISSING
    prompt: msgspec.Raw = MISSING
    input: msgspec.Raw = MISSING
    documents: msgspec.Raw = MISSING

    def prompt_parts(self) -> tuple[msgspec.Raw, ...]:
        """What forms the prompt, about in the order that templates have."""
        return (
            self.tools, self.system, self.instructions, self.query, self.messages, self.prompt,
            self.input, self.documents,
        )  # fmt: skip


_FIELDS = msgspec.json.Decoder(_Fields)
_BODY = msgspec.json.Decoder(_Body)


class _Broken(Exception):  # noqa: N818 - what a line is
    """A line can't be run."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(code)
        self.code, self.message, self.param = code, message, param


@dataclass(slots=True, eq=False)
class LineChecker:
    """Makes requests and errors of a batch's lines, in their order."""

    endpoint: str
    line_bytes: int
    _seen: set[bytes] = field(default_factory=set)  # digests of the `custom_id`s of all lines

    def check(self, raw: RawLine) -> Line | None:
        """The line; None: it is empty."""
        data, custom_id, is_first = raw.data or b"", None, False
        start = len(BYTE_ORDER_MARK) * (raw.number == 1 and data.startswith(BYTE_ORDER_MARK))
        data = data[start:]
        if raw.data is not None and not data.strip(_WHITE_SPACE):
            return None
        try:
            fields = self._fields_of(raw, data)
            custom_id = _text(fields.custom_id)
            is_first = self._is_first(custom_id)
            checked_id = _checked_custom_id(fields.custom_id, custom_id)
            body = self._checked_body(fields, is_first=is_first)
        except _Broken as broken:
            return LineError(
                raw.number, raw.offset, raw.length, custom_id, is_first,
                broken.code, broken.message, broken.param,
            )  # fmt: skip
        content = bytes(fields.body)
        size = measure_prompt(*body.prompt_parts())
        return LineSpec(
            raw.number,
            raw.offset + start + data.find(content),
            len(content),
            checked_id,
            None if (name := _text(body.model)) is None else name[:LONGEST_MODEL].replace("\0", ""),
            size.text_bytes // BYTES_PER_TOKEN + size.exact_tokens + size.media_tokens,
            _most_tokens(body),
            prefix_of(body.prompt_parts()),
        )

    def _fields_of(self, raw: RawLine, data: bytes) -> _Fields:
        """Raises: _Broken."""
        if raw.data is None:
            raise _Broken(
                "line_too_long",
                f"The line has {raw.length} bytes, and may have {self.line_bytes} "
                "('batches.line_bytes').",
            )
        message = "This line is not UTF-8."
        try:
            data.decode()
            message = "This line is no JSON object with custom_id, method, url and body."
            return _FIELDS.decode(data)
        except (UnicodeDecodeError, msgspec.ValidationError):
            raise _Broken("invalid_json_line", message) from None
        except JSON_ERRORS:
            raise _not_json() from None

    def _is_first(self, custom_id: str | None) -> bool:
        """Whether no earlier line has this `custom_id`, which is noted; False: there is none."""
        if custom_id is None or not _can_be_kept(custom_id):
            return False
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            return False
        self._seen.add(digest)
        return True

    def _checked_body(self, fields: _Fields, *, is_first: bool) -> _Body:
        """What its body asks for. Raises: _Broken."""
        for name in ("method", "url", "body"):
            if getattr(fields, name) is MISSING:
                raise _missing(name)
        if _text(fields.method) != "POST":
            raise _Broken("invalid_method", "The method of each line must be 'POST'.", "method")
        if _text(fields.url) != self.endpoint:
            raise _Broken(
                "invalid_url",
                "The URL provided for this request does not match the batch endpoint "
                f"'{self.endpoint}'.",
                "url",
            )
        try:
            body = _BODY.decode(fields.body)
        except msgspec.ValidationError:
            raise _wrong_type("body", "an object", fields.body) from None
        except JSON_ERRORS:
            raise _not_json() from None
        if bytes(memoryview(body.stream)[:5]) == b"true":
            raise _Broken(
                "streaming_unsupported", "Streaming is not supported in a batch.", "body.stream"
            )
        if not is_first:
            raise _Broken(
                "duplicate_custom_id",
                "An earlier line has the same custom_id: give each line one of its own.",
                "custom_id",
            )
        return body


@dataclass(eq=False)
class LineReader:
    """Reads a batch's input, which is a buffered file, some lines a call.

    `rest` is called after each few lines, so that other threads may run.
    """

    file: BinaryIO
    endpoint: str
    _: KW_ONLY
    most_lines: int
    line_bytes: int
    rest: Callable[[], None] = lambda: time.sleep(TURN_SECONDS)
    total: int = 0  # lines so far, without empty ones
    failed: int = 0  # of these, errors
    _bytes: int = 0  # that were read
    _models: set[str | None] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._lines = self._read()

    @property
    def model(self) -> str | None:
        """The model that all requests so far name; None: none or several."""
        return next(iter(self._models)) if len(self._models) == 1 else None

    def read_some(self) -> list[Line]:
        """The next lines; none: the end. Raises: TooManyLines; the file's own error."""
        found: list[Line] = []
        enough = self._bytes + CHUNK_BYTES
        for line in self._lines:
            found.append(line)
            if len(found) >= CHUNK_LINES or self._bytes >= enough:
                break
        return found

    def _read(self) -> Iterator[Line]:
        checker = LineChecker(self.endpoint, self.line_bytes)
        lines = size = 0
        for raw in raw_lines(self.file, self.line_bytes):
            line = checker.check(raw)
            lines += 1
            size += raw.length
            self._bytes += raw.length
            if lines >= TURN_LINES or size >= TURN_BYTES:
                lines = size = 0
                self.rest()
            is_one_too_many = line is not None and self.total >= self.most_lines
            if is_one_too_many or raw.number > 2 * self.most_lines + MOST_EMPTY_LINES:
                raise TooManyLines
            if line is None:
                continue
            self.total += 1
            if isinstance(line, LineError):
                self.failed += 1
            elif len(self._models) < 2:
                self._models.add(line.model)
            yield line


# Of this process alone: nobody who reads the store can test what a prompt begins with. Lines that
# two processes have read of one batch are told apart, which costs no more than some cached tokens.
_PREFIX_KEY = secrets.token_bytes(32)


def prefix_of(parts: tuple[msgspec.Raw, ...]) -> int:
    """A number that prompts with the same beginning share; 0: too short to matter."""
    begin = b""
    for part in parts:
        if part is not MISSING:
            begin += bytes(memoryview(part)[: PREFIX_BYTES - len(begin)])
        if len(begin) >= PREFIX_BYTES:
            digest = hashlib.blake2b(begin, digest_size=8, key=_PREFIX_KEY).digest()
            # A positive number of the database's 64 bits.
            return int.from_bytes(digest, "big") >> 1 or 1
    return 0


def _checked_custom_id(raw: msgspec.Raw, custom_id: str | None) -> str:
    """Raises: _Broken."""
    if raw is MISSING or custom_id == "":
        raise _missing("custom_id")
    if custom_id is None and bytes(memoryview(raw)[:1]) == b'"':
        raise _not_json()  # half of a character
    if custom_id is None:
        raise _wrong_type("custom_id", "a string", raw)
    if not _can_be_kept(custom_id):
        raise _Broken(
            "invalid_custom_id",
            f"The custom_id must have at most {LONGEST_CUSTOM_ID} characters, none of them NUL.",
            "custom_id",
        )
    return custom_id


def _can_be_kept(custom_id: str) -> bool:
    return len(custom_id) <= LONGEST_CUSTOM_ID and "\0" not in custom_id


def _text(raw: msgspec.Raw) -> str | None:
    """The string; None: it is none."""
    with suppress(*JSON_ERRORS):
        return TEXT_DECODER.decode(raw)
    return None


def _most_tokens(body: _Body) -> int:
    """The tokens that the body allows for the answer; 0: it names none."""
    bounds = []
    for raw in map(partial(getattr, body), BOUND_NAMES):
        if raw is not MISSING and len(memoryview(raw)) <= _LONGEST_NUMBER:
            with suppress(*JSON_ERRORS):
                bounds.append(_NUMBER.decode(raw))
    return min(largest_bound(bounds) or 0, MOST_TOKENS)


_NUMBER = msgspec.json.Decoder(int | float)


def _not_json() -> _Broken:
    return _Broken("invalid_json_line", "This line is not parseable as valid JSON.")


def _missing(name: str) -> _Broken:
    return _Broken("missing_required_parameter", f"Missing required parameter: '{name}'.", name)


def _wrong_type(name: str, expected: str, raw: msgspec.Raw) -> _Broken:
    begin = bytes(memoryview(raw)[:1])
    got = _TYPES.get(begin, "a number")
    text = f"Invalid type for '{name}': expected {expected}, but got {got} instead."
    return _Broken("invalid_type", truncate_echo(text), name)


_TYPES = {
    b'"': "a string",
    b"{": "an object",
    b"[": "an array",
    b"t": "a boolean",
    b"f": "a boolean",
    b"n": "null",
}
