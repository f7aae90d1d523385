"""A large request body: kept once, never parsed as a whole, edited by its fields.

A small body is bytes, and what is to be known of it is parsed from them in one go. A large one has
its `Outline` (`structure.py`), from which the same is answered without reading it again; an edit
replaces fields and leaves the others where they lie, and what is sent to a node is their pieces.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping

import msgspec

from gateway import errors
from gateway.config.listeners import LimitSettings
from gateway.relay.media import PICTURE, Media, cost
from gateway.relay.peek import (
    FIRST_ID,
    Peek,
    PromptSize,
    is_address,
    is_misspelt,
    misspelt_model,
    peek,
)
from gateway.relay.structure import Field, Outline, cut_before, outline

LARGE = 64 * 1024
"""Bytes of a body from which on it is one. A smaller one of any shape takes some milliseconds."""
SMALL = 16 * 1024
"""Bytes of the value of a field that is known by name, and may be parsed in passing."""
SCALAR = 1024
"""The same of any field: there may be a thousand."""
PARSED = 4 << 20
"""Bytes of a body up to which it is parsed whole where an answer is to be gone on with."""
LONGEST_LINK = 16 * 1024
MEDIA_STEP = 64
"""Pictures that are looked at in one step."""

_KNOWN = Peek.__struct_fields__
_TYPED = frozenset(
    name
    for name, default in zip(Peek.__struct_fields__, Peek.__struct_defaults__, strict=True)
    if default is None
)
"""Fields that are read as what they are, and never long."""
_TEXT = msgspec.json.Decoder(str)
_PROMPTS = ("messages", "prompt", "input")
_PARTS = ("tools", "system", "instructions")

Value = bytes | memoryview


class Large:
    """A large body with the edits made to it."""

    __slots__ = ("_body", "_edited", "_found", "_media", "_small", "_values")

    def __init__(
        self,
        body: bytes,
        found: Outline,
        values: dict[str, Value],
        media: Media,
        *,
        edited: bool = False,
    ) -> None:
        self._body = body
        self._found = found
        self._values = values
        """Of each field; of equal ones the last."""
        self._media = media
        self._edited = edited
        self._small: bytes | None = None

    def __len__(self) -> int:
        return sum(map(len, self.pieces())) if self._edited else len(self._body)

    def __hash__(self) -> int:
        """Of what it is made of; of long values by their ends."""
        return hash(
            tuple(
                (name, len(value), bytes(value[:SCALAR]), bytes(value[-SCALAR:]))
                for name, value in self._values.items()
            )
        )

    @property
    def levels(self) -> int:
        """How deeply it is nested."""
        return self._found.levels

    @property
    def pictures(self) -> bool:
        """Whether it holds any."""
        return self._found.pictures

    def pieces(self) -> list[Value]:
        """What is sent: together they are the body."""
        if not self._edited:
            return [self._body]
        pieces: list[Value] = []
        before = b"{"
        for name, value in self._values.items():
            pieces += (before + msgspec.json.encode(name) + b":", value)
            before = b","
        pieces.append(b"}" if pieces else b"{}")
        return pieces

    def whole(self) -> bytes:
        """All of it as bytes: a copy."""
        return b"".join(self.pieces())

    def small(self) -> bytes:
        """The body without its large fields."""
        if self._small is None:
            self._small = _joined(
                (name, value) for name, value in self._values.items() if len(value) <= SCALAR
            )
        return self._small

    def parsed(self) -> bytes:
        """The body, without its large fields if it is too large to be parsed whole."""
        return self.whole() if len(self) <= PARSED else self.small()

    def has(self, names: tuple[str, ...]) -> bool:
        """Whether it has any of these fields."""
        return any(name in self._values for name in names)

    def peek(self) -> Peek:
        """As `peek.peek` of a small one. Raises: GatewayError 400."""
        known = {name: self._values[name] for name in _KNOWN if name in self._values}
        large = {name: value for name, value in known.items() if len(value) > SMALL}
        for name in large:
            if name in _TYPED and name != "model":
                raise errors.invalid_request(f"'{name}' is longer than {SMALL} bytes.", name)
        peeked = peek(_joined((name, known[name]) for name in known if name not in large))
        if large.pop("model", None) is not None:
            peeked.model = self._beginning("model")
        for name, value in large.items():
            setattr(peeked, name, msgspec.Raw(value))
        return peeked

    def _beginning(self, name: str) -> str:
        """What a text begins with. Raises: GatewayError 400, if it is none."""
        value = bytes(self._values[name][: SMALL + 1])
        if value[:1] != b'"':
            raise errors.invalid_request(f"'{name}' must be a string.", name)
        text: str = _TEXT.decode(value[: cut_before(value, 1, SMALL)] + b'"')
        return text

    def fields(self) -> dict[str, msgspec.Raw]:
        """The values of its fields, which are views of the body."""
        return {name: msgspec.Raw(value) for name, value in self._values.items()}

    def with_fields(self, fields: Mapping[str, msgspec.Raw]) -> Large:
        """The same body, with these fields for its own."""
        values: dict[str, Value] = {name: memoryview(raw) for name, raw in fields.items()}
        return Large(self._body, self._found, values, self._media, edited=True)

    def _field(self, name: str) -> Field | None:
        """What was found of a field that nobody has edited."""
        for found in reversed(self._found.fields):
            if found.name == name:
                return found
        return None

    # What is asked of its prompt.

    def count_prompts(self) -> int:
        """How many prompts a completion's `prompt` holds, as `prompts.split` tells them apart."""
        found = self._field("prompt")
        if found is None or found.plain or self._body[found.value : found.value + 1] != b"[":
            return 1
        return found.items or 1

    def continues(self) -> bool:
        """Whether the last of its messages is the assistant's own."""
        found = self._field("messages")
        return found is not None and found.role == "assistant"

    def opening(self, name: str) -> bytes:
        """The beginning of a field as JSON of its own; all of it where it is not long."""
        found = self._field(name)
        if found is None:
            return b""
        return self._body[found.value : found.cut or found.end] + found.closing

    def rest(self, name: str) -> int:
        """Bytes of a field behind its `opening`."""
        found = self._field(name)
        return found.end - found.cut if found is not None and found.cut else 0

    def length(self, name: str) -> int:
        """Bytes of a field; 0: there is none."""
        return len(self._values.get(name, b""))

    def ids(self, name: str) -> int:
        """How many token ids a field holds; 0: it holds something else."""
        found = self._field(name)
        if found is None or not FIRST_ID.match(self._body, found.value):
            return 0
        return self._body.count(b",", found.value, found.end) + 1

    def measure(self, prompt: str | None) -> PromptSize:
        """As `peek.measure`, where `prompt` is the field that holds it."""
        ids = self.ids(prompt) if prompt in _PROMPTS else 0
        names = (prompt, *_PARTS) if prompt in _PROMPTS and not ids else _PARTS
        text = sum(self.length(name) for name in names)
        text -= self._media.size + self._found.escapes + 2 * self._found.unicode
        return PromptSize(max(0, text), ids, self._media.tokens)

    def count_tokens(self, prompt: str | None, bytes_per_token: float) -> int:
        """As `peek.count_tokens`."""
        if prompt not in _PROMPTS:
            return 0
        if ids := self.ids(prompt):
            return ids
        size = self.length(prompt) - 5 * self._found.unicode - self._media.size
        return int(max(0, size) / bytes_per_token) + self._media.least

    def addresses(self) -> list[str]:
        """The texts that a server might fetch as addresses; of long ones the beginning."""
        found = []
        for start, end, kind in self._found.links:
            if self._body.startswith(b"data:", start):
                continue
            if kind == "data" and not self._may_be_address(start, end):
                continue
            most = min(end, start + LONGEST_LINK)
            if most < end:
                most = cut_before(self._body, start, most)
            text = _TEXT.decode(b'"%b"' % self._body[start:most])
            if kind == "server" or ":" in text or (kind == "url" and is_address(text)):
                found.append(text)
        return found

    def _may_be_address(self, start: int, end: int) -> bool:
        """Whether a text, base64 mostly, has a colon in it; an escape could spell one."""
        body = self._body
        return body.find(b":", start, end) >= 0 or (
            body.find(b"\\u", start, min(end, start + LONGEST_LINK)) >= 0
        )


def _joined(fields: Iterable[tuple[str, Value]]) -> bytes:
    """The object that these fields make."""
    parts = [msgspec.json.encode(name) + b":" + bytes(value) for name, value in fields]
    return b"{" + b",".join(parts) + b"}"


def read_large(body: bytes, limits: LimitSettings) -> Generator[None, None, Large]:
    """The large body that these bytes are, a step at a time. Raises: GatewayError 400."""
    found = yield from outline(body, limits)
    view = memoryview(body)
    values: dict[str, Value] = {one.name: view[one.value : one.end] for one in found.fields}
    if any(is_misspelt(name) for name in values):
        raise misspelt_model()
    size, (tokens, least) = found.more_size, (found.more_media * costs for costs in PICTURE)
    for number, (start, end) in enumerate(found.media):
        costs, surely = cost(body, start, end)
        size += end - start
        tokens += costs
        least += surely
        if number % MEDIA_STEP == MEDIA_STEP - 1:
            yield
    return Large(body, found, values, Media(size, tokens, least))


Body = bytes | Large
"""A request's body, as what prepares and sends it takes it."""


def parsed(body: Body) -> bytes:
    """A body as bytes that may be parsed whole; without its large fields if it is too large."""
    return body if isinstance(body, bytes) else body.parsed()


def small(body: Body) -> bytes:
    """A body as bytes, without fields that are large in themselves."""
    return body if isinstance(body, bytes) else body.small()
