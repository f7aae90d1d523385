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
from gateway.proxy.inbound.json_outline import BodyField, JsonOutline, read_outline, safe_cut
from gateway.proxy.inbound.media import UNREADABLE_IMAGE_COST, MediaCost, file_cost
from gateway.proxy.inbound.parsed_body import (
    TOKEN_IDS_START,
    ParsedBody,
    PromptSize,
    is_misspelt_model,
    may_be_url,
    misspelt_model_error,
    parse_body,
)

LARGE_BODY_BYTES = 64 * 1024
"""Bytes of a body from which on it is one. A smaller one of any shape takes some milliseconds."""

PARSED_FIELD_BYTES = 16 * 1024
"""Bytes of the value of a field that is known by name, and may be parsed in passing."""

SMALL_FIELD_BYTES = 1024
"""The same of any field: there may be a thousand."""

FULL_PARSE_BYTES = 4 << 20
"""Bytes of a body up to which it is parsed whole where an answer is to be gone on with."""

LONGEST_LINK = 16 * 1024

MEDIA_PER_STEP = 64
"""Pictures that are looked at in one step."""

_KNOWN = ParsedBody.__struct_fields__

_TYPED = frozenset(
    name
    for name, default in zip(
        ParsedBody.__struct_fields__, ParsedBody.__struct_defaults__, strict=True
    )
    if default is None
)
"""Fields that are read as what they are, and never long."""

_TEXT = msgspec.json.Decoder(str)

_PROMPTS = ("messages", "prompt", "input")

_PARTS = ("tools", "system", "instructions")

FieldBytes = bytes | memoryview


class LargeBody:
    """A large body with the edits made to it."""

    __slots__ = ("_body", "_edited", "_media", "_outline", "_small", "_values")

    def __init__(
        self,
        body: bytes,
        outline: JsonOutline,
        values: dict[str, FieldBytes],
        media: MediaCost,
        *,
        edited: bool = False,
    ) -> None:
        self._body = body
        self._outline = outline
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
                (
                    name,
                    len(value),
                    bytes(value[:SMALL_FIELD_BYTES]),
                    bytes(value[-SMALL_FIELD_BYTES:]),
                )
                for name, value in self._values.items()
            )
        )

    @property
    def depth(self) -> int:
        """How deeply it is nested."""
        return self._outline.depth

    @property
    def has_images(self) -> bool:
        """Whether it holds any."""
        return self._outline.has_images

    def pieces(self) -> list[FieldBytes]:
        """What is sent: together they are the body."""
        if not self._edited:
            return [self._body]
        pieces: list[FieldBytes] = []
        before = b"{"
        for name, value in self._values.items():
            pieces += (before + msgspec.json.encode(name) + b":", value)
            before = b","
        pieces.append(b"}" if pieces else b"{}")
        return pieces

    def to_bytes(self) -> bytes:
        """All of it as bytes: a copy."""
        return b"".join(self.pieces())

    def without_large_fields(self) -> bytes:
        """The body without its large fields."""
        if self._small is None:
            self._small = _joined(
                (name, value)
                for name, value in self._values.items()
                if len(value) <= SMALL_FIELD_BYTES
            )
        return self._small

    def bytes_to_parse(self) -> bytes:
        """The body, without its large fields if it is too large to be parsed whole."""
        return self.to_bytes() if len(self) <= FULL_PARSE_BYTES else self.without_large_fields()

    def has_any(self, names: tuple[str, ...]) -> bool:
        """Whether it has any of these fields."""
        return any(name in self._values for name in names)

    def parse(self) -> ParsedBody:
        """As `peek.peek` of a small one. Raises: GatewayError 400."""
        known = {name: self._values[name] for name in _KNOWN if name in self._values}
        large = {name: value for name, value in known.items() if len(value) > PARSED_FIELD_BYTES}
        for name in large:
            if name in _TYPED and name != "model":
                raise errors.invalid_request(
                    f"'{name}' is longer than {PARSED_FIELD_BYTES} bytes.", name
                )
        peeked = parse_body(_joined((name, known[name]) for name in known if name not in large))
        if large.pop("model", None) is not None:
            peeked.model = self._beginning("model")
        for name, value in large.items():
            setattr(peeked, name, msgspec.Raw(value))
        return peeked

    def _beginning(self, name: str) -> str:
        """What a text begins with. Raises: GatewayError 400, if it is none."""
        value = bytes(self._values[name][: PARSED_FIELD_BYTES + 1])
        if value[:1] != b'"':
            raise errors.invalid_request(f"'{name}' must be a string.", name)
        text: str = _TEXT.decode(value[: safe_cut(value, 1, PARSED_FIELD_BYTES)] + b'"')
        return text

    def raw_fields(self) -> dict[str, msgspec.Raw]:
        """The values of its fields, which are views of the body."""
        return {name: msgspec.Raw(value) for name, value in self._values.items()}

    def with_fields(self, fields: Mapping[str, msgspec.Raw]) -> LargeBody:
        """The same body, with these fields for its own."""
        values: dict[str, FieldBytes] = {name: memoryview(raw) for name, raw in fields.items()}
        return LargeBody(self._body, self._outline, values, self._media, edited=True)

    def _field(self, name: str) -> BodyField | None:
        """What was found of a field that nobody has edited."""
        for found in reversed(self._outline.fields):
            if found.name == name:
                return found
        return None

    # What is asked of its prompt.

    def count_prompts(self) -> int:
        """How many prompts a completion's `prompt` holds, as `prompts.split` tells them apart."""
        found = self._field("prompt")
        if found is None or found.has_scalars or self._body[found.start : found.start + 1] != b"[":
            return 1
        return found.item_count or 1

    def ends_with_assistant(self) -> bool:
        """Whether the last of its messages is the assistant's own."""
        found = self._field("messages")
        return found is not None and found.last_role == "assistant"

    def truncated_field(self, name: str) -> bytes:
        """The beginning of a field as JSON of its own; all of it where it is not long."""
        found = self._field(name)
        if found is None:
            return b""
        return self._body[found.start : found.truncated_at or found.end] + found.truncated_suffix

    def truncated_bytes(self, name: str) -> int:
        """Bytes of a field behind its `opening`."""
        found = self._field(name)
        return found.end - found.truncated_at if found is not None and found.truncated_at else 0

    def field_size(self, name: str) -> int:
        """Bytes of a field; 0: there is none."""
        return len(self._values.get(name, b""))

    def count_token_ids(self, name: str) -> int:
        """How many token ids a field holds; 0: it holds something else."""
        found = self._field(name)
        if found is None or not TOKEN_IDS_START.match(self._body, found.start):
            return 0
        return self._body.count(b",", found.start, found.end) + 1

    def measure_prompt(self, prompt_field: str | None) -> PromptSize:
        """As `peek.measure`, where `prompt` is the field that holds it."""
        ids = self.count_token_ids(prompt_field) if prompt_field in _PROMPTS else 0
        names = (prompt_field, *_PARTS) if prompt_field in _PROMPTS and not ids else _PARTS
        text = sum(self.field_size(name) for name in names)
        text -= (
            self._media.base64_bytes
            + self._outline.escape_count
            + 2 * self._outline.unicode_escape_count
        )
        return PromptSize(max(0, text), ids, self._media.tokens)

    def estimate_min_tokens(self, prompt_field: str | None, bytes_per_token: float) -> int:
        """As `peek.count_tokens`."""
        if prompt_field not in _PROMPTS:
            return 0
        if ids := self.count_token_ids(prompt_field):
            return ids
        size = (
            self.field_size(prompt_field)
            - 5 * self._outline.unicode_escape_count
            - self._media.base64_bytes
        )
        return int(max(0, size) / bytes_per_token) + self._media.min_tokens

    def find_links(self) -> list[str]:
        """The texts that a server might fetch as addresses; of long ones the beginning."""
        found = []
        for start, end, kind in self._outline.links:
            if self._body.startswith(b"data:", start):
                continue
            if kind == "data" and not self._may_be_address(start, end):
                continue
            most = min(end, start + LONGEST_LINK)
            if most < end:
                most = safe_cut(self._body, start, most)
            text = _TEXT.decode(b'"%b"' % self._body[start:most])
            if kind == "server" or ":" in text or (kind == "url" and may_be_url(text)):
                found.append(text)
        return found

    def _may_be_address(self, start: int, end: int) -> bool:
        """Whether a text, base64 mostly, has a colon in it; an escape could spell one."""
        body = self._body
        return body.find(b":", start, end) >= 0 or (
            body.find(b"\\u", start, min(end, start + LONGEST_LINK)) >= 0
        )


def _joined(fields: Iterable[tuple[str, FieldBytes]]) -> bytes:
    """The object that these fields make."""
    parts = [msgspec.json.encode(name) + b":" + bytes(value) for name, value in fields]
    return b"{" + b",".join(parts) + b"}"


def read_large_body(body: bytes, limits: LimitSettings) -> Generator[None, None, LargeBody]:
    """The large body that these bytes are, a step at a time. Raises: GatewayError 400."""
    found = yield from read_outline(body, limits)
    view = memoryview(body)
    values: dict[str, FieldBytes] = {one.name: view[one.start : one.end] for one in found.fields}
    if any(is_misspelt_model(name) for name in values):
        raise misspelt_model_error()
    size, (tokens, least) = (
        found.uncounted_media_bytes,
        (found.uncounted_media * costs for costs in UNREADABLE_IMAGE_COST),
    )
    for number, (start, end) in enumerate(found.media_spans):
        costs, surely = file_cost(body, start, end)
        size += end - start
        tokens += costs
        least += surely
        if number % MEDIA_PER_STEP == MEDIA_PER_STEP - 1:
            yield
    return LargeBody(body, found, values, MediaCost(size, tokens, least))


Body = bytes | LargeBody
"""A request's body, as what prepares and sends it takes it."""


def bytes_to_parse(body: Body) -> bytes:
    """A body as bytes that may be parsed whole; without its large fields if it is too large."""
    return body if isinstance(body, bytes) else body.bytes_to_parse()


def without_large_fields(body: Body) -> bytes:
    """A body as bytes, without fields that are large in themselves."""
    return body if isinstance(body, bytes) else body.without_large_fields()
