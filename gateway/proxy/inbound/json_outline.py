"""What a large JSON body is made of, found in short steps before any of it is parsed.

A few megabytes of `{},{},…` make forty times their size in objects, and one decode of sixty
megabytes holds up everybody. So a large body is walked through in pieces: each is checked to be
UTF-8, its tokens are counted against the limits, and a C decoder that builds nothing says whether
it is JSON, between a head and an end that make a whole document of it. What is learnt on the way is
where the body's fields are, and where in them there are links and pictures, so that nobody needs to
read it whole again.

Time and memory go with the body's length, whatever its shape: a step looks at `CHUNK` bytes, or at
`LONG` bytes where they lie within one string, and a shape that is dear ends at its limit.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass, field

import msgspec

from gateway import errors
from gateway.config.listeners import LimitSettings
from gateway.proxy.inbound.media import MOST_MEDIA_FILES, is_base64
from gateway.proxy.inbound.parsed_body import IMAGE_TYPES, MEDIA_KEYS

CHUNK_BYTES = 16 * 1024
"""Bytes in which tokens are looked for at a time: 16,000 at most, some milliseconds."""

STRING_CHUNK_BYTES = 256 * 1024
"""Bytes of one string that are looked at at a time."""

UNSPLIT_STRING_BYTES = 4096
"""Bytes of a string up to which it is not cut in two."""

MOST_GAP_BYTES = CHUNK_BYTES - 8
"""Bytes of white space, or of one number, that may stand between two commas or brackets."""

LONGEST_KEY = 1024
"""Bytes of a name in the body itself."""

KEYED_FIELD_BYTES = 2 << 20
"""Bytes of a field's beginning that its fingerprint is made of."""

KEYED_FIELD_VALUES = 1 << 14
"""Objects, lists and strings of it."""

MOST_LINKS = 10_000
"""Texts that may be addresses; each is looked at."""

SHORTEST_MEDIA_STRING = 256

LONGEST_TYPE_VALUE = 128

_SPACE = b" \t\n\r"

_TOKEN = re.compile(
    rb'"([^"]*+)(?:"[ \t\n\r]*+(?:(:)|(?=[,\]}])|(\Z))|(\Z))|[\[\]{}]|(")',
)
"""A string, with the colon that makes a name of it; or a bracket. Groups 3 and 4: a string that
ends with the chunk, or goes on behind it; 5: no JSON."""

_CLOSE = re.compile(rb'"[ \t\n\r]*+(?:(:)|(?=[,\]}])|(\Z))')

_SPACES = re.compile(rb"[ \t\n\r]*+")

_BYTE = re.compile(r"\(byte (\d+)\)")

_HIGH = re.compile(rb"\\u[dD][89abAB]")

_NAMES: dict[bytes, str] = {
    name.encode(): name
    for name in (
        *MEDIA_KEYS,
        "source",
        "multimodal_data",
        "server_url",
        "url",
        "data",
        "type",
        "role",
    )
}

_MEDIA_CONTAINERS = frozenset({*MEDIA_KEYS, "source", "multimodal_data"})

_AFTER, _WITHIN, _VALUE, _NEXT, _STRING, _KEY, _START = range(7)
"""Where a chunk begins or ends: behind a value, behind an opening bracket, behind a colon, behind a
comma, within a string, within a name, before all."""

_HEADS = {
    _AFTER: (b"[0", b'{"":0'),
    _WITHIN: (b"[", b"{"),
    _VALUE: (b"[", b'{"":'),
    _NEXT: (b"[0,", b'{"":0,'),
    _STRING: (b'["', b'{"":"'),
    _KEY: (b'["', b'{"'),
}

_ENDS = {
    _AFTER: (b"", b""),
    _WITHIN: (b"", b""),
    _VALUE: (b'""', b'""'),
    _NEXT: (b'""', b'"":""'),
    _STRING: (b'"', b'"'),
    _KEY: (b'"', b'":""'),
}

_BEHIND = {44: _NEXT, 58: _VALUE, 91: _WITHIN, 123: _WITHIN}


class _Nothing(msgspec.Struct):
    """Any object, of which nothing is kept."""


_SKIP = msgspec.json.Decoder(_Nothing)

_TEXT = msgspec.json.Decoder(str)

Span = tuple[int, int]
"""Where a string begins and ends, without its quotes."""

Link = tuple[int, int, str]
"""The same, and what it is: `url`, `data`, or a `server`, which is an address whatever it says."""


@dataclass(slots=True)
class BodyField:
    """One field of the body: where its value stands, and what it is made of."""

    name: str
    start: int
    end: int = 0
    item_count: int = 0
    """Strings, lists and objects that stand in a list, where the value is one."""
    has_scalars: bool = False
    """Whether anything else stands there: numbers."""
    last_item: int = 0
    """Where the last of `items` begins."""
    last_role: str = ""
    """What the last of them says is its `role`."""
    truncated_at: int = 0
    """Where the value's beginning ends, if it is longer than is looked at; 0: nowhere."""
    truncated_suffix: bytes = b""
    """What makes JSON of that beginning."""
    values_before: int = 0


@dataclass(slots=True)
class JsonOutline:
    """What was found."""

    fields: list[BodyField] = field(default_factory=list)
    depth: int = 0
    links: list[Link] = field(default_factory=list)
    """Texts that a server might fetch as addresses."""
    has_images: bool = False
    media_spans: list[Span] = field(default_factory=list)
    """Base64 of pictures and sounds."""
    uncounted_media: int = 0
    """Further ones, which are not looked at."""
    uncounted_media_bytes: int = 0
    """Bytes of these."""
    escape_count: int = 0
    unicode_escape_count: int = 0
    """Escapes in all, and those of the form `\\u0041`."""


def read_outline(body: bytes, limits: LimitSettings) -> Generator[None, None, JsonOutline]:
    """Walk through `body`, a step at a time. Raises: GatewayError 400."""
    walk = _OutlineScanner(body, limits)
    at = 0
    while at < len(body):
        at = walk.step(at)
        yield
    walk.finish()
    return walk.outline


def safe_cut(body: bytes, start: int, end: int) -> int:
    """The last place up to `end` that is within no character and no escape of a string.

    `start` is such a place.
    """
    while end > start and end < len(body) and 0x80 <= body[end] < 0xC0:
        end -= 1
    text = _neutral(body[start:end])
    return start + _aligned(text, len(text))


def _neutral(data: bytes) -> bytes:
    """The same without escaped quotes and backslashes, each byte in its place."""
    if data.find(b"\\") < 0:
        return data
    return data.replace(b"\\\\", b"\0\1").replace(b'\\"', b"\0\1")


def _aligned(text: bytes, end: int) -> int:
    """The last place up to `end` within no character and no escape of a `_neutral` string."""
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
    if at >= 6 and _HIGH.match(text, at - 6):
        at -= 6
    if at and text[at - 1] == 0:
        at -= 1
    return at


class _OutlineScanner:
    """The way through one body."""

    __slots__ = (
        "_begun", "_body", "_containers", "_field", "_kinds", "_limits", "_names", "_pending",
        "_plain", "_sources", "_state", "_strings", "outline",
    )  # fmt: skip

    def __init__(self, body: bytes, limits: LimitSettings) -> None:
        self._body = body
        self._limits = limits
        self.outline = JsonOutline()
        self._kinds = bytearray()
        """The brackets that are open."""
        self._names: list[str | None] = []
        """For each of them, the name that it is the value of, where that is of interest."""
        self._pending: str | None = None
        """Such a name, whose value is next."""
        self._state = _START
        self._begun = 0
        """Where the string begins within which a chunk ended."""
        self._field: BodyField | None = None
        self._sources: list[tuple[int, list[str], list[Link]]] = []
        """Open objects `source`: their level, types, and addresses."""
        self._containers = self._strings = self._plain = 0

    def step(self, start: int) -> int:
        """Look at what stands at `start`; where the next step begins."""
        body = self._body
        state, kinds = self._state, bytes(self._kinds)
        within = state in {_STRING, _KEY}
        end = start + (STRING_CHUNK_BYTES if within else CHUNK_BYTES)
        text = _neutral(body[start:end])
        last = end >= len(body)
        at = 0
        if within:
            at = text.find(b'"')
            closed = None if at < 0 else _CLOSE.match(text, at)
            if closed is None or closed[2] is not None:
                if last or (closed is None and at >= 0):
                    raise self._invalid(start, state, kinds)
                at = _aligned(text, len(text) if at < 0 else at)
                if at <= 0:
                    raise _long_gap()
                return self._checked(start, start + at, state, kinds)
            self._end_string(self._begun, start + at, start + closed.end(), closed[1] is not None)
            at = closed.end()
            if len(text) - at > CHUNK_BYTES:
                text, last = text[: at + CHUNK_BYTES], False
        cut = self._tokens(text, at, start, last=last)
        if not last and cut <= 0:
            raise _long_gap()
        self._count()
        return self._checked(start, start + cut, state, kinds)

    def finish(self) -> None:
        """All is read."""
        if self._kinds or self._state == _START:
            raise errors.invalid_json(
                "Input data was truncated" if self._body.strip() else "it is empty"
            )

    def _checked(self, start: int, end: int, state: int, kinds: bytes) -> int:
        """See that what stands there is JSON, where it stands; `end`."""
        body = self._body[start:end]
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise errors.invalid_json(f"byte {start + error.start} is not UTF-8") from None
        closing = _closing(self._state, self._kinds)
        if kinds or state == _START:
            head = _head(state, kinds)
            try:
                _SKIP.decode(head + body + closing)
            except msgspec.ValidationError:
                raise errors.invalid_request("The body must be an object.") from None
            except msgspec.DecodeError as error:
                before = start - len(head)
                detail = _BYTE.sub(lambda found: f"(byte {int(found[1]) + before})", str(error))
                raise errors.invalid_json(detail) from None
        elif body.strip(_SPACE):
            raise errors.invalid_json(f"JSON is malformed: trailing characters (byte {start})")
        if body.find(b"\\") >= 0:
            self.outline.escape_count += body.count(b"\\")
            self.outline.unicode_escape_count += body.count(b"\\u")
        now = self._field
        if (
            now is not None
            and not now.truncated_at
            and (len(self._kinds) > 1 or self._state == _STRING)
        ):
            seen = self._containers + self._strings - now.values_before
            if end - now.start >= KEYED_FIELD_BYTES or seen >= KEYED_FIELD_VALUES:
                now.truncated_at, now.truncated_suffix = end, closing[:-1]
        return end

    def _invalid(self, start: int, state: int, kinds: bytes) -> errors.GatewayError:
        """Why what begins there is no JSON."""
        head = _head(state, kinds)
        try:
            _SKIP.decode(head + self._body[start : start + STRING_CHUNK_BYTES])
        except msgspec.DecodeError as error:
            return errors.invalid_json(_BYTE.sub("", str(error)).strip())
        return errors.invalid_json("Input data was truncated")

    def _count(self) -> None:
        limits = self._limits
        for count, most, key, what in (
            (self._containers, limits.json_containers, "json_containers", "lists and objects"),
            (self._strings, limits.json_strings, "json_strings", "strings"),
            (self._plain, limits.json_numbers, "json_numbers", "numbers"),
            (len(self.outline.fields), limits.json_fields, "json_fields", "fields"),
        ):
            if count > most:
                raise errors.invalid_request(
                    f"The body has more than {most} {what} ('limits.{key}')."
                )
        if len(self.outline.links) > MOST_LINKS:
            raise errors.invalid_request(f"The body has more than {MOST_LINKS} pictures and links.")

    # One loop, since a call for each token would double its price.
    def _tokens(  # noqa: PLR0912, PLR0915
        self, text: bytes, at: int, start: int, *, last: bool
    ) -> int:
        """Take in the tokens of a chunk from `at`; where the next one is to begin."""
        kinds, names, deepest = self._kinds, self._names, self._limits.json_depth
        behind = at
        containers = strings = plain = 0
        for token in _TOKEN.finditer(text, at):
            here, end = token.span()
            if here > behind:
                if here - behind > 1:
                    # More than a comma or a colon stands between them.
                    plain += text.count(b",", behind, here)
                if len(kinds) == 2 and text[behind:here].strip(b", \t\n\r"):
                    self._are_plain()
            kind = text[here]
            if kind == 34:
                group = token.lastindex
                strings += 1
                if group == 5 or not kinds:
                    raise errors.invalid_json(f"JSON is malformed (byte {start + here})")
                if group == 2:
                    self._name(token[1], start + here, start + end)
                elif group == 1:
                    if (
                        self._pending is not None
                        or len(kinds) == 2
                        or end - here > SHORTEST_MEDIA_STRING
                        or names[-1] == "multimodal_data"
                    ):
                        self._text(start + here, start + token.end(1))
                    self._pending = None
                elif last:
                    raise errors.invalid_json("Input data was truncated")
                else:
                    strings -= 1
                    self._add(containers, strings, plain)
                    return self._open_string(text, here, end if group == 4 else token.end(1), start)
            elif kind in b"[{":
                containers += 1
                if len(kinds) == 2:
                    self._item(start + here)
                elif not kinds and (self._state != _START or kind != 123 or containers > 1):
                    raise errors.invalid_request("The body must be one object.")
                kinds.append(kind)
                if len(kinds) > deepest:
                    raise errors.nested_too_deeply(deepest)
                self.outline.depth = max(self.outline.depth, len(kinds))
                pending, self._pending = self._pending, None
                names.append(pending)
                if pending in _MEDIA_CONTAINERS:
                    self._watch(pending)
            else:
                if not kinds:
                    raise errors.invalid_json(f"JSON is malformed (byte {start + here})")
                kinds.pop()
                if names.pop() == "source":
                    self._end_source()
                self._pending = None
                if not kinds:
                    self._end_field(start + here)
            behind = end
        self._add(containers, strings, plain)
        if last:
            self._state = _AFTER
            return len(text)
        comma = text.rfind(b",", behind)
        if comma >= 0 and kinds:
            self._add(0, 0, text.count(b",", behind, comma))
            if len(kinds) == 2 and text[behind:comma].strip(b", \t\n\r"):
                self._are_plain()
            self._state = _AFTER
            return comma
        self._follow(text, behind)
        return behind if kinds else len(text)

    def _add(self, containers: int, strings: int, plain: int) -> None:
        self._containers += containers
        self._strings += strings
        self._plain += plain

    def _follow(self, text: bytes, at: int) -> None:
        """The state at `at`, by what stands before it."""
        before = text[:at].rstrip(_SPACE)
        if before:
            self._state = _BEHIND.get(before[-1], _AFTER)
        elif self._state in {_STRING, _KEY}:
            self._state = _AFTER

    def _open_string(self, text: bytes, here: int, end: int, start: int) -> int:
        """A string goes on behind the chunk: where to cut, before it or within it."""
        before = self._state
        self._follow(text, here)
        if len(text) - here <= UNSPLIT_STRING_BYTES and here:
            return here
        name = self._kinds[-1] == 123 and self._state in {_NEXT, _WITHIN}
        cut = _aligned(text, end)
        if cut <= here:
            self._state = before
            return 0
        self._state = _KEY if name else _STRING
        self._begun = start + here
        if name and len(self._kinds) == 1:
            raise _long_name()
        return cut

    def _end_string(self, begun: int, quote: int, end: int, name: bool) -> None:  # noqa: FBT001
        """A string that earlier chunks began is at its end."""
        self._strings += 1
        if name:
            self._name(
                b"" if quote - begun > UNSPLIT_STRING_BYTES else self._body[begun + 1 : quote],
                begun,
                end,
            )
            return
        self._text(begun, quote)
        self._pending = None

    def _name(self, raw: bytes, here: int, end: int) -> None:
        """A name in an object, and its value is next."""
        name = _NAMES.get(raw)
        if name is None and raw.find(b"\\u") >= 0 and len(raw) <= UNSPLIT_STRING_BYTES:
            name = _NAMES.get(self._said(here + 1, here + 1 + len(raw)).encode())
        self._pending = name
        if len(self._kinds) == 1:
            if end - here > LONGEST_KEY:
                raise _long_name()
            self._end_field(self._body.rfind(b",", 0, here))
            space = _SPACES.match(self._body, end, end + CHUNK_BYTES)
            value = end if space is None else space.end()
            self._field = BodyField(
                self._said(here + 1, self._body.rfind(b'"', here, end)),
                value,
                values_before=self._containers + self._strings,
            )
            self.outline.fields.append(self._field)

    def _end_field(self, end: int) -> None:
        """The body's field that was read ends before `end`."""
        now, self._field = self._field, None
        if now is None:
            return
        tail = self._body[max(now.start, end - CHUNK_BYTES) : end]
        now.end = end - len(tail) + len(tail.rstrip(_SPACE))
        if not now.truncated_at or now.truncated_at > now.end:
            now.truncated_at, now.truncated_suffix = 0, b""

    def _are_plain(self) -> None:
        if self._field is not None and self._kinds[1] == 91:
            self._field.has_scalars = True

    def _item(self, here: int) -> None:
        now = self._field
        if now is not None and self._kinds[1] == 91:
            now.item_count += 1
            now.last_item, now.last_role = here, ""

    def _watch(self, name: str | None) -> None:
        if name == "multimodal_data":
            self.outline.has_images = True
        elif name == "source" and self._kinds[-1] == 123:
            self._sources.append((len(self._kinds), [], []))

    def _end_source(self) -> None:
        if self._sources and self._sources[-1][0] > len(self._kinds):
            _, types, spans = self._sources.pop()
            if not types or any(said != "base64" for said in types):
                self.outline.links += spans

    def _text(self, quote: int, end: int) -> None:
        """A string that is a value: what it may be a link, a picture or a role of."""
        found, kinds, pending = self.outline, self._kinds, self._pending
        if len(kinds) == 2:
            self._item(quote)
        within = self._names[-1] if self._names else None
        start = quote + 1
        if pending == "type":
            said = self._said(start, end) if end - start < LONGEST_TYPE_VALUE else ""
            found.has_images = found.has_images or said in IMAGE_TYPES
            if within == "source" and self._sources:
                self._sources[-1][1].append(said)
        elif pending == "role":
            if len(kinds) == 3 and kinds[1] == 91 and self._field is not None:
                self._field.last_role = (
                    self._said(start, end) if end - start < LONGEST_TYPE_VALUE else ""
                )
        elif pending is not None or within == "multimodal_data":
            self._link(pending, within, start, end)
        if end - quote > SHORTEST_MEDIA_STRING:
            self._media(quote + 1, end, bare=pending == "data" or within == "multimodal_data")

    def _link(self, name: str | None, within: str | None, start: int, end: int) -> None:
        """A string of that name in an object of the name `within`: it may be an address."""
        links = self.outline.links
        top = self._field.name if self._field is not None and len(self._kinds) == 3 else ""
        if name in MEDIA_KEYS:
            links.append((start, end, "url"))
        elif name in {"url", "data"}:
            if within in MEDIA_KEYS:
                links.append((start, end, name))
            elif within == "source" and self._sources:
                self._sources[-1][2].append((start, end, name))
            elif name == "url" and top == "mcp_servers":
                links.append((start, end, "server"))
        elif name == "server_url":
            if top == "tools":
                links.append((start, end, "server"))
        elif within == "multimodal_data":
            links.append((start, end, "data"))

    def _media(self, start: int, end: int, *, bare: bool) -> None:
        body = self._body
        if body.startswith(b"data:", start):
            at = body.find(b";base64,", start, min(end, start + LONGEST_TYPE_VALUE))
            start = at + len(b";base64,")
            if at < 0:
                return
        elif not bare or not is_base64(body, start):
            return
        if len(self.outline.media_spans) < MOST_MEDIA_FILES:
            self.outline.media_spans.append((start, end))
        else:
            self.outline.uncounted_media += 1
            self.outline.uncounted_media_bytes += end - start

    def _said(self, start: int, end: int) -> str:
        """A string's text; empty if it is none."""
        try:
            return _TEXT.decode(b'"%b"' % self._body[start:end])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return ""


def _head(state: int, kinds: bytes) -> bytes:
    """What makes JSON of a chunk that begins in this state, within these brackets."""
    if not kinds:
        return b""
    outer = b"".join([b"[" if kind == 91 else b'{"":' for kind in kinds[:-1]])
    return outer + _HEADS[state][kinds[-1] == 123]


def _closing(state: int, kinds: bytes | bytearray) -> bytes:
    """What makes JSON of a chunk that ends so."""
    if not kinds:
        return b""
    ends = bytes(kind + 2 for kind in reversed(kinds))  # `]` and `}` stand two behind the others
    return _ENDS[state][kinds[-1] == 123] + ends


def _long_name() -> errors.GatewayError:
    return errors.invalid_request(f"The body has a field whose name is over {LONGEST_KEY} bytes.")


def _long_gap() -> errors.GatewayError:
    return errors.invalid_request(
        f"The body has more than {MOST_GAP_BYTES} bytes of white space, or of one number, on end."
    )
