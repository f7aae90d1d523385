"""Scans a large JSON body in short steps: checks it, and finds its fields, links and media.

Decoding a few megabytes of `{},{},…` takes forty times their size in objects, and one decode of
sixty megabytes blocks the event loop. So a large body is scanned in chunks. Each is checked to be
UTF-8; its tokens are counted against the limits; and a C decoder that builds nothing checks that it
is JSON, after a prefix and before a suffix that make a whole document of it. The outline says where
the body's fields are, and where in them there are links and media, so nothing reads it again.

Time and memory are proportional to the body's length, whatever its shape: a step looks at
`ScanSizes.chunk`, or at `ScanSizes.string_chunk` within one string, and costly shapes meet a limit.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from gateway import errors
from gateway.api.json_values import TEXT_DECODER, AnyObject
from gateway.config.listeners import LimitSettings
from gateway.request.media import (
    IMAGE_TYPES,
    INLINE_TYPES,
    LINK_KEYS,
    MEDIA_FIELDS,
    MEDIA_KEYS,
    MOST_MEDIA_FILES,
    PART_KEYS,
    SERVER_KEYS,
    is_base64,
)


class ScanSizes(NamedTuple):
    """How much of a body one step scans, in bytes; tests use smaller ones."""

    chunk: int = 16 * 1024  # Outside of long strings: at most 16,000 tokens, some milliseconds
    string_chunk: int = 256 * 1024  # Within a string
    unsplit_string: int = 4096  # A string up to this length is not cut in two
    longest_name: int = 1024  # The longest name of a top-level field; longer ones are refused


DEFAULT_SIZES = ScanSizes()
KEYED_FIELD_BYTES = 2 << 20  # Bytes of a field's beginning that the prompt key covers
KEYED_FIELD_VALUES = 1 << 14  # Objects, lists and strings of that beginning
MOST_LINKS = 10_000  # Texts that may be URLs; each of them is checked
SHORTEST_MEDIA_STRING = 256
LONGEST_TYPE_VALUE = 128
_SPACE_BYTES = b" \t\n\r"

# A string, with a colon if it is a name, or a bracket. Groups 3 and 4: a string that ends with the
# chunk, or goes on after it; 5: not JSON.
_TOKEN = re.compile(
    rb'"([^"]*+)(?:"[ \t\n\r]*+(?:(:)|(?=[,\]}])|(\Z))|(\Z))|[\[\]{}]|(")',
)

_STRING_END = re.compile(rb'"[ \t\n\r]*+(?:(:)|(?=[,\]}])|(\Z))')
_WHITE_SPACE = re.compile(rb"[ \t\n\r]*+")
_BYTE_POSITION = re.compile(r"\(byte (\d+)\)")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
_OTHER_TRACKED = ("server_url", "url", "data", "type", "role")
_TRACKED_NAMES = {name.encode(): name for name in (*LINK_KEYS, *PART_KEYS, *_OTHER_TRACKED)}
_PARTS = "parts"  # The place of a container in which servers look for media
# Where a chunk begins or ends.
_AFTER_VALUE, _AFTER_OPENING, _AFTER_COLON, _AFTER_COMMA, _IN_STRING, _IN_NAME, _START = range(7)

_PREFIXES = {
    _AFTER_VALUE: (b"[0", b'{"":0'),
    _AFTER_OPENING: (b"[", b"{"),
    _AFTER_COLON: (b"[", b'{"":'),
    _AFTER_COMMA: (b"[0,", b'{"":0,'),
    _IN_STRING: (b'["', b'{"":"'),
    _IN_NAME: (b'["', b'{"'),
}

_SUFFIXES = {
    _AFTER_COLON: (b'""', b'""'),
    _AFTER_COMMA: (b'""', b'"":""'),
    _IN_STRING: (b'"', b'"'),
    _IN_NAME: (b'"', b'":""'),
}

_STATE_AFTER = {44: _AFTER_COMMA, 58: _AFTER_COLON, 91: _AFTER_OPENING, 123: _AFTER_OPENING}


_VALIDATOR = msgspec.json.Decoder(AnyObject)
Span = tuple[int, int]  # Where a string begins and ends, without its quotes
# The same, its kind (`url`, `data`, or `server`, which is a URL whatever it contains), and the name
# of its place, as in `media.Link`.
Link = tuple[int, int, str, str]


@dataclass(slots=True)
class BodyField:
    """One top-level field: where its value is, and what it holds."""

    name: str
    start: int
    end: int = 0
    item_count: int = 0  # If the value is a list: its strings, lists and objects
    has_scalars: bool = False  # Whether that list holds anything else: numbers, say
    last_role: str = ""  # The `role` of its last item
    truncated_at: int = 0
    """Where the part for the prompt key ends, if the value is longer; 0: it is not."""
    truncated_suffix: bytes = b""  # The brackets and quotes that close that part
    values_before: int = 0  # Objects, lists and strings of the body before this field

    def add_item(self) -> None:
        """Count a string, list or object of the list."""
        self.item_count += 1
        self.last_role = ""

    def truncate(self, end: int, suffix: bytes, values: int) -> None:
        """End the part for the prompt key if it is long; `values`: those of the body so far."""
        long = end - self.start >= KEYED_FIELD_BYTES
        if not self.truncated_at and (long or values - self.values_before >= KEYED_FIELD_VALUES):
            self.truncated_at, self.truncated_suffix = end, suffix

    def finish(self, end: int) -> None:
        """The value ends at `end`."""
        self.end = end
        if self.truncated_at > end:
            self.truncated_at, self.truncated_suffix = 0, b""


class JsonOutline(NamedTuple):
    """What a body consists of."""

    fields: list[BodyField]
    depth: int
    links: list[Link]  # Texts that a node might fetch as URLs
    has_images: bool
    media_spans: list[Span]  # Base64 of images and audio
    uncounted_media: int  # Further ones, beyond `MOST_MEDIA_FILES`
    uncounted_media_bytes: int  # Bytes of those
    escape_count: int  # Escapes in all
    unicode_escape_count: int  # Those of the form `\u0041`


def read_outline(
    body: bytes, limits: LimitSettings, sizes: ScanSizes = DEFAULT_SIZES
) -> Generator[None, None, JsonOutline]:
    """Scan `body` in short steps. Raises: GatewayError 400."""
    scanner = OutlineScanner(body, limits, sizes)
    at = 0
    while at < len(body):
        at = scanner.step(at)
        yield
    return scanner.finish()


def safe_cut(body: bytes, start: int, end: int) -> int:
    """The last position up to `end` that splits no character and no escape of a string.

    `start` must be such a position.
    """
    while end > start and end < len(body) and 0x80 <= body[end] < 0xC0:
        end -= 1
    text = _mask_escapes(body[start:end])
    return start + _align(text, len(text))


def _mask_escapes(data: bytes) -> bytes:
    """`data` with escaped quotes and backslashes masked, at the same length."""
    if data.find(b"\\") < 0:
        return data
    return data.replace(b"\\\\", b"\0\1").replace(b'\\"', b"\0\1")


def _align(text: bytes, end: int) -> int:
    """The last position up to `end` that splits no character and no escape of a masked string."""
    at = end
    if at == len(text):
        for back in range(1, 5):
            byte = text[at - back] if at >= back else 0
            if byte < 0x80:
                break
            if byte >= 0xC0:
                at -= back
                break
    escape = text.rfind(b"\\", max(0, at - 6), at)
    if escape >= 0:
        at = escape
    if at >= 6 and _HIGH_SURROGATE.match(text, at - 6):
        at -= 6
    if at and text[at - 1] == 0:
        at -= 1
    return at


class OutlineScanner:
    """Scans one body, chunk by chunk."""

    __slots__ = (
        "_body", "_brackets", "_containers", "_depth", "_escapes", "_field", "_fields",
        "_has_images", "_limits", "_links", "_media", "_next_name", "_places", "_scalars", "_sizes",
        "_sources", "_state", "_string_start", "_strings", "_uncounted", "_unicode_escapes",
    )  # fmt: skip

    def __init__(self, body: bytes, limits: LimitSettings, sizes: ScanSizes) -> None:
        self._body = body
        self._limits = limits
        self._sizes = sizes
        self._brackets = bytearray()  # The open brackets
        self._places: list[str | None] = []
        """For each open bracket, what servers look for in it: `_PARTS`, a link of one of
        `LINK_KEYS`, a server of one of `SERVER_KEYS`; None: nothing."""
        self._next_name: str | None = None  # The tracked name whose value is next
        self._state = _START
        self._string_start = 0  # Where the string begins that the chunk's end cuts
        self._field: BodyField | None = None
        self._sources: list[tuple[int, list[str], list[Link]]] = []
        """Open `source` objects: their depth, their types, and the links in them."""
        self._fields: list[BodyField] = []
        self._links: list[Link] = []
        self._media: list[Span] = []
        self._uncounted: list[int] = []  # Bytes of each file beyond `MOST_MEDIA_FILES`
        self._has_images = False
        self._containers = self._strings = self._scalars = self._depth = 0
        self._escapes = self._unicode_escapes = 0

    def step(self, start: int) -> int:
        """Scan the chunk at `start`; return where the next one begins."""
        body = self._body
        state, brackets = self._state, bytes(self._brackets)
        in_string = state in {_IN_STRING, _IN_NAME}
        end = start + (self._sizes.string_chunk if in_string else self._sizes.chunk)
        text = _mask_escapes(body[start:end])
        last = end >= len(body)
        at = 0
        if in_string:
            at = text.find(b'"')
            closed = None if at < 0 else _STRING_END.match(text, at)
            if closed is None or closed[2] is not None:
                if last or (closed is None and at >= 0):
                    raise self._invalid(start, state, brackets)
                at = _align(text, len(text) if at < 0 else at)
                if at <= 0:
                    raise self._long_gap()
                return self._check_chunk(start, start + at, state, brackets)
            self._end_string(
                self._string_start, start + at, start + closed.end(), closed[1] is not None
            )
            at = closed.end()
            if len(text) - at > self._sizes.chunk:
                text, last = text[: at + self._sizes.chunk], False
        cut = self._scan_tokens(text, at, start, last=last)
        if not last and (cut <= 0 or (state == _START and text.isspace())):
            raise self._long_gap()
        self._check_limits()
        return self._check_chunk(start, start + cut, state, brackets)

    def finish(self) -> JsonOutline:
        """The outline of a complete body. Raises: GatewayError 400."""
        if self._brackets or self._state == _START:
            raise errors.invalid_json(
                "Input data was truncated" if self._body.strip() else "it is empty"
            )
        uncounted = self._uncounted
        return JsonOutline(
            fields=self._fields,
            depth=self._depth,
            links=self._links,
            has_images=self._has_images,
            media_spans=self._media,
            uncounted_media=len(uncounted),
            uncounted_media_bytes=sum(uncounted),
            escape_count=self._escapes,
            unicode_escape_count=self._unicode_escapes,
        )

    def _check_chunk(self, start: int, end: int, state: int, brackets: bytes) -> int:
        """Check that the chunk is JSON in its place; return `end`. Raises: GatewayError 400."""
        body = self._body[start:end]
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise errors.invalid_json(f"byte {start + error.start} is not UTF-8") from None
        suffix = _suffix(self._state, self._brackets)
        if brackets or state == _START:
            prefix = _prefix(state, brackets)
            try:
                _VALIDATOR.decode(prefix + body + suffix)
            except msgspec.ValidationError:
                raise errors.invalid_request("The body must be an object.") from None
            except msgspec.DecodeError as error:
                before = start - len(prefix)
                detail = _BYTE_POSITION.sub(
                    lambda found: f"(byte {int(found[1]) + before})", str(error)
                )
                raise errors.invalid_json(detail) from None
        elif body.strip(_SPACE_BYTES):
            raise errors.invalid_json(f"JSON is malformed: trailing characters (byte {start})")
        if body.find(b"\\") >= 0:
            self._escapes += body.count(b"\\")
            self._unicode_escapes += body.count(b"\\u")
        if self._field is not None and (len(self._brackets) > 1 or self._state == _IN_STRING):
            self._field.truncate(end, suffix[:-1], self._containers + self._strings)
        return end

    def _invalid(self, start: int, state: int, brackets: bytes) -> errors.GatewayError:
        """The error for a chunk at `start` that is not JSON."""
        prefix = _prefix(state, brackets)
        try:
            _VALIDATOR.decode(prefix + self._body[start : start + self._sizes.string_chunk])
        except msgspec.DecodeError as error:
            return errors.invalid_json(_BYTE_POSITION.sub("", str(error)).strip())
        return errors.invalid_json("Input data was truncated")

    def _check_limits(self) -> None:
        limits = self._limits
        for count, most, key, what in (
            (self._containers, limits.json_containers, "json_containers", "lists and objects"),
            (self._strings, limits.json_strings, "json_strings", "strings"),
            (self._scalars, limits.json_numbers, "json_numbers", "numbers"),
            (len(self._fields), limits.json_fields, "json_fields", "fields"),
        ):
            if count > most:
                raise errors.invalid_request(
                    f"The body has more than {most} {what} ('limits.{key}')."
                )
        if len(self._links) > MOST_LINKS:
            raise errors.invalid_request(f"The body has more than {MOST_LINKS} images and links.")

    # One loop, since a call for each token would double the cost.
    def _scan_tokens(  # noqa: PLR0912, PLR0915
        self, text: bytes, at: int, start: int, *, last: bool
    ) -> int:
        """Scan a chunk's tokens from `at`; return where the next chunk begins."""
        brackets, places, deepest = self._brackets, self._places, self._limits.json_depth
        done = at
        containers = strings = scalars = 0
        for token in _TOKEN.finditer(text, at):
            here, end = token.span()
            if here > done:
                if here - done > 1:
                    # More than a comma or a colon is between the two tokens.
                    scalars += text.count(b",", done, here)
                if len(brackets) == 2 and text[done:here].strip(b", \t\n\r"):
                    self._mark_scalars()
            byte = text[here]
            if byte == 34:
                group = token.lastindex
                strings += 1
                if group == 5 or not brackets:
                    raise errors.invalid_json(f"JSON is malformed (byte {start + here})")
                if group == 2:
                    self._begin_field(token[1], start + here, start + end)
                elif group == 1:
                    if (
                        self._next_name is not None
                        or len(brackets) == 2
                        or end - here > SHORTEST_MEDIA_STRING
                        or places[-1] == "multimodal_data"
                    ):
                        self._end_value(start + here, start + token.end(1))
                    self._next_name = None
                elif last:
                    raise errors.invalid_json("Input data was truncated")
                else:
                    strings -= 1
                    self._add(containers, strings, scalars)
                    return self._open_string(text, here, end if group == 4 else token.end(1), start)
            elif byte in b"[{":
                containers += 1
                if len(brackets) == 2:
                    self._add_item()
                elif not brackets and (self._state != _START or byte != 123 or containers > 1):
                    raise errors.invalid_request("The body must be one object.")
                place = places[-1] if places else None
                if len(brackets) < 2 or (
                    place is not None and (place != _PARTS or brackets[-1] != 91)
                ):
                    place = self._place_of_value(place, byte)
                brackets.append(byte)
                if len(brackets) > deepest:
                    raise errors.nested_too_deeply(deepest)
                self._depth = max(self._depth, len(brackets))
                self._next_name = None
                places.append(place)
            else:
                if not brackets:
                    raise errors.invalid_json(f"JSON is malformed (byte {start + here})")
                brackets.pop()
                if places.pop() == "source":
                    self._end_source()
                self._next_name = None
                if not brackets:
                    self._end_field(start + here)
            done = end
        self._add(containers, strings, scalars)
        if last:
            self._state = _AFTER_VALUE
            return len(text)
        comma = text.rfind(b",", done)
        if comma >= 0 and brackets:
            self._add(0, 0, text.count(b",", done, comma))
            if len(brackets) == 2 and text[done:comma].strip(b", \t\n\r"):
                self._mark_scalars()
            self._set_state(text, comma)  # Behind a value, or wrongly behind a bracket.
            return comma
        self._set_state(text, done)
        return done if brackets else len(text)

    def _add(self, containers: int, strings: int, scalars: int) -> None:
        self._containers += containers
        self._strings += strings
        self._scalars += scalars

    def _set_state(self, text: bytes, at: int) -> None:
        """Set the state at `at` by the byte before it."""
        before = text[:at].rstrip(_SPACE_BYTES)
        if before:
            self._state = _STATE_AFTER.get(before[-1], _AFTER_VALUE)
        elif self._state in {_IN_STRING, _IN_NAME}:
            self._state = _AFTER_VALUE

    def _open_string(self, text: bytes, here: int, end: int, start: int) -> int:
        """For a string that goes on after the chunk, where to cut: before it or in it."""
        before = self._state
        self._set_state(text, here)
        if len(text) - here <= self._sizes.unsplit_string and here:
            return here
        is_name = self._brackets[-1] == 123 and self._state in {_AFTER_COMMA, _AFTER_OPENING}
        cut = _align(text, end)
        if cut <= here:
            self._state = before
            return 0
        self._state = _IN_NAME if is_name else _IN_STRING
        self._string_start = start + here
        if is_name and len(self._brackets) == 1:
            raise self._long_name()
        return cut

    def _end_string(self, start: int, quote: int, end: int, is_name: bool) -> None:  # noqa: FBT001
        """A string ends that an earlier chunk began."""
        self._strings += 1
        if is_name:
            raw = (
                b"" if quote - start > self._sizes.unsplit_string else self._body[start + 1 : quote]
            )
            self._begin_field(raw, start, end)
            return
        self._end_value(start, quote)
        self._next_name = None

    def _begin_field(self, raw: bytes, here: int, end: int) -> None:
        """A field's name was read; its value is next."""
        name = _TRACKED_NAMES.get(raw)
        if name is None and raw.find(b"\\u") >= 0 and len(raw) <= self._sizes.unsplit_string:
            name = _TRACKED_NAMES.get(self._decode_text(here + 1, here + 1 + len(raw)).encode())
        self._next_name = name
        if len(self._brackets) == 1:
            if end - here > self._sizes.longest_name:
                raise self._long_name()
            self._end_field(self._body.rfind(b",", 0, here))
            space = _WHITE_SPACE.match(self._body, end, end + self._sizes.chunk)
            self._field = BodyField(
                self._decode_text(here + 1, self._body.rfind(b'"', here, end)),
                end if space is None else space.end(),
                values_before=self._containers + self._strings,
            )
            self._fields.append(self._field)

    def _end_field(self, end: int) -> None:
        """The current top-level field ends before `end`."""
        ended, self._field = self._field, None
        if ended is not None:
            tail = self._body[max(ended.start, end - self._sizes.chunk) : end]
            ended.finish(end - len(tail) + len(tail.rstrip(_SPACE_BYTES)))

    def _mark_scalars(self) -> None:
        if self._field is not None and self._brackets[1] == 91:
            self._field.has_scalars = True

    def _add_item(self) -> None:
        if self._field is not None and self._brackets[1] == 91:
            self._field.add_item()

    def _place_of_value(self, place: str | None, byte: int) -> str | None:
        """What servers look for in the value that begins with this bracket, in such a place."""
        brackets, name = self._brackets, self._next_name
        if len(brackets) == 1 and self._field is not None:
            field = self._field.name
            return _PARTS if field in MEDIA_FIELDS else field if field in SERVER_KEYS else None
        if place in SERVER_KEYS:
            return place if len(brackets) == 2 else None
        if name in PART_KEYS and place in {_PARTS, "source"}:
            return _PARTS
        if place != _PARTS or name not in LINK_KEYS:
            return None
        if name == "multimodal_data":
            self._has_images = True
        elif name == "source":
            if byte != 123:
                return None
            self._sources.append((len(brackets) + 1, [], []))
        return name

    def _end_source(self) -> None:
        if self._sources and self._sources[-1][0] > len(self._brackets):
            _, types, links = self._sources.pop()
            if not types or any(one not in INLINE_TYPES for one in types):
                self._links += links

    def _end_value(self, quote: int, end: int) -> None:
        """Note a string value that may be a link, media, a type or a role."""
        brackets, name = self._brackets, self._next_name
        if len(brackets) == 2:
            self._add_item()
        container = self._places[-1] if self._places else None
        start = quote + 1
        if name == "type":
            text = self._decode_text(start, end) if end - start < LONGEST_TYPE_VALUE else ""
            if container == _PARTS:
                self._has_images = self._has_images or text in IMAGE_TYPES
            elif container == "source":
                self._sources[-1][1].append(text)
        elif name == "role":
            if len(brackets) == 3 and brackets[1] == 91 and self._field is not None:
                self._field.last_role = (
                    self._decode_text(start, end) if end - start < LONGEST_TYPE_VALUE else ""
                )
        elif name is not None or container == "multimodal_data":
            self._add_link(name, container, start, end)
        if end - quote > SHORTEST_MEDIA_STRING:
            self._add_media(start, end, bare=name == "data" or container == "multimodal_data")

    def _add_link(self, name: str | None, container: str | None, start: int, end: int) -> None:
        """Note the value of `name` in an object named `container` if it may be a URL."""
        links = self._links
        if container in SERVER_KEYS:
            if name == SERVER_KEYS[container] and len(self._brackets) == 3:
                links.append((start, end, "server", container))
        elif container == _PARTS:
            if name in MEDIA_KEYS:
                links.append((start, end, "url", name))
        elif container == "multimodal_data":
            links.append((start, end, "data", container))
        elif container is not None and name in {"url", "data"}:
            found = self._sources[-1][2] if container == "source" else links
            found.append((start, end, name, container))

    def _add_media(self, start: int, end: int, *, bare: bool) -> None:
        body = self._body
        if body.startswith(b"data:", start):
            at = body.find(b";base64,", start, min(end, start + LONGEST_TYPE_VALUE))
            start = at + len(b";base64,")
            if at < 0:
                return
        elif not bare or not is_base64(body, start):
            return
        if len(self._media) < MOST_MEDIA_FILES:
            self._media.append((start, end))
        else:
            self._uncounted.append(end - start)

    def _decode_text(self, start: int, end: int) -> str:
        """A string's text; empty if it is not valid."""
        try:
            return TEXT_DECODER.decode(b'"%b"' % self._body[start:end])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return ""

    def _long_name(self) -> errors.GatewayError:
        most = self._sizes.longest_name
        return errors.invalid_request(f"The body has a field whose name is over {most} bytes.")

    def _long_gap(self) -> errors.GatewayError:
        most = self._sizes.chunk - 8
        what = "white space, or of one number, in a row"
        return errors.invalid_request(f"The body has more than {most} bytes of {what}.")


def _prefix(state: int, brackets: bytes) -> bytes:
    """What makes a document of a chunk that begins in this state, inside these brackets."""
    if not brackets:
        return b""
    outer = b"".join([b"[" if byte == 91 else b'{"":' for byte in brackets[:-1]])
    return outer + _PREFIXES[state][brackets[-1] == 123]


def _suffix(state: int, brackets: bytes | bytearray) -> bytes:
    """What makes a document of a chunk that ends in this state, inside these brackets."""
    if not brackets:
        return b""
    closing = bytes(byte + 2 for byte in reversed(brackets))  # `]` is `[` + 2, `}` is `{` + 2
    return _SUFFIXES.get(state, (b"", b""))[brackets[-1] == 123] + closing
