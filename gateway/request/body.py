"""A request's body: parsed once if it is small; if it is large, edited field by field.

A small body is bytes, parsed in one go. A large one is never parsed as a whole: it has a
`JsonOutline` (`json_outline.py`), which answers the same questions without reading the body again.
An edit replaces fields and leaves the others in place; a node is sent the pieces. Work that takes
milliseconds is done in short steps, by the `TimeSlicer` that all requests share, so that it does
not block the event loop.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from gateway import errors
from gateway.api.json_values import FIELDS_DECODER, TEXT_DECODER, decode_body
from gateway.api.tokens import Number
from gateway.config.listeners import LimitSettings
from gateway.request.json_outline import BodyField, JsonOutline, read_outline, safe_cut
from gateway.request.media import (
    UNREADABLE_IMAGE_COST,
    Link,
    MediaCost,
    file_cost,
    may_be_url,
    measure_media,
)

# English text has about 4 bytes per token in the tokenizers of today's open models. JSON around it
# makes estimates low on purpose, since they only ever exclude nodes.
BYTES_PER_TOKEN = 4
PROMPT_FIELDS = ("messages", "prompt", "input")  # Fields of `ParsedBody` that hold a prompt
MISSING = msgspec.Raw()  # The value of a field that the body does not have


class ParsedBody(msgspec.Struct, gc=False):
    """The fields that decide where a request goes; everything else stays bytes.

    Fields that are only ever removed or bounded are here so that their presence is known. What
    each means is in the OpenAPI document too.
    """

    model: Annotated[str | None, "the model's public name; unset: `default_model`, the only one "
        'there is, or that of `"*"`'] = None  # fmt: skip
    stream: Annotated[bool | None, "answer by events, as the text is written"] = None
    n: Annotated[Number, "completions; above `limits.n` 400"] = None
    max_tokens: Annotated[Number, "most tokens of the answer; the largest of its names counts, and "
        "is lowered to `limits.max_tokens`. Negative: no bound"] = None  # fmt: skip
    max_completion_tokens: Annotated[Number, "as `max_tokens`"] = None
    max_output_tokens: Annotated[Number, "as `max_tokens`, on `/v1/responses`"] = None
    n_predict: Annotated[Number, "as `max_tokens`, of llama.cpp"] = None
    n_probs: Annotated[Number, "lowered to `limits.n_probs`"] = None
    top_logprobs: Annotated[Number, "lowered to `limits.n_probs`"] = None
    logprobs: Annotated[msgspec.Raw, "true, false, or a number, which is lowered to "
        "`limits.n_probs`"] = MISSING  # fmt: skip
    n_cmpl: Annotated[Number, "as `n`, of llama.cpp"] = None
    best_of: Annotated[Number, "as `n`; llama.cpp refuses it"] = None
    repeat_last_n: Annotated[Number, "lowered to the model's largest context"] = None
    dry_penalty_last_n: Annotated[Number, "lowered to the model's largest context"] = None
    priority: Annotated[Any, "one of the classes' names: the class, where no header names "
        "one"] = None  # fmt: skip
    service_tier: Annotated[Any, "`priority` is premium, `flex` is batch"] = None
    id_slot: Annotated[msgspec.Raw, "removed"] = MISSING
    lora: Annotated[msgspec.Raw, "removed"] = MISSING
    suffix: Annotated[msgspec.Raw, "the text behind the gap that is to be filled"] = MISSING
    prompt: Annotated[msgspec.Raw, "a text, token ids, or a list of them"] = MISSING
    messages: Annotated[msgspec.Raw, "the conversation"] = MISSING
    input: Annotated[msgspec.Raw, "text, texts, or items"] = MISSING
    tools: Annotated[msgspec.Raw, "at most `limits.tools_bytes`"] = MISSING
    system: Annotated[msgspec.Raw, "the system prompt, on `/v1/messages`"] = MISSING
    instructions: Annotated[msgspec.Raw, "the system prompt, on `/v1/responses`"] = MISSING
    grammar: Annotated[msgspec.Raw, "GBNF, at most `limits.grammar_bytes` and "
        "`limits.grammar_depth`"] = MISSING  # fmt: skip
    json_schema: Annotated[msgspec.Raw, "a schema of the answer, of llama.cpp"] = MISSING
    response_format: Annotated[msgspec.Raw, "a form of the answer"] = MISSING
    text: Annotated[msgspec.Raw, "a form of the answer, on `/v1/responses`"] = MISSING
    output_config: Annotated[msgspec.Raw, "a form of the answer, on `/v1/messages`"] = MISSING
    output_format: Annotated[msgspec.Raw, "a form of the answer, on `/v1/messages`"] = MISSING
    stop: Annotated[msgspec.Raw, "at most `limits.stop_bytes`"] = MISSING
    stop_sequences: Annotated[msgspec.Raw, "at most `limits.stop_bytes`"] = MISSING
    logit_bias: Annotated[msgspec.Raw, "at most `limits.logit_bias_bytes`"] = MISSING
    samplers: Annotated[msgspec.Raw, "at most 32, in 1 KiB"] = MISSING
    dry_sequence_breakers: Annotated[msgspec.Raw, "at most 1 KiB"] = MISSING
    response_fields: Annotated[msgspec.Raw, "at most `limits.logit_bias_bytes`"] = MISSING
    grammar_triggers: Annotated[msgspec.Raw, "refused"] = MISSING
    conversation: Annotated[msgspec.Raw, "refused on `/v1/responses`, as is its `prompt`"] = MISSING


_PARSED_BODY = msgspec.json.Decoder(ParsedBody)


def parse_body(body: bytes) -> ParsedBody:
    """Parse `body`. Raises: GatewayError 400."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise errors.invalid_json(f"byte {error.start} is not UTF-8") from None
    parsed = decode_body(_PARSED_BODY, body, whole="The body is not what was expected: ")
    # Usually "model" occurs once, and only an escape could hide another spelling of it: of one of
    # its letters, or of their neighbours.
    may_hide = body.lower().count(b'"model"') != (parsed.model is not None) or (
        body.find(b"\\") >= 0 and (body.find(b"\\u004") >= 0 or body.find(b"\\u006") >= 0)
    )
    if may_hide and any(map(is_misspelt_model, FIELDS_DECODER.decode(body))):
        raise misspelt_model_error()
    return parsed


def is_misspelt_model(name: str) -> bool:
    """Whether a field's name differs from `model` only in case.

    Go's JSON decoder would read it as the model's name, and servers in Go may stand behind the
    gateway. No character beyond ASCII folds to one of these letters.
    """
    return len(name) == len("model") and name != "model" and name.lower() == "model"


def misspelt_model_error() -> errors.GatewayError:
    """400: servers differ in how they read this name."""
    return errors.invalid_request(
        "The model's name is given under 'model', in lower case.", "model"
    )


# Compared as one tuple: field by field costs twice as much.
_limited_options = attrgetter(
    *("tools", "grammar", "json_schema", "response_format", "text", "output_config"),
    *("output_format", "stop", "stop_sequences", "logit_bias", "samplers"),
    *("dry_sequence_breakers", "response_fields", "grammar_triggers"),
)
_edited_options = attrgetter(
    *("priority", "n_probs", "top_logprobs", "logprobs", "id_slot", "lora", "response_fields"),
    *("repeat_last_n", "dry_penalty_last_n"),
)
_NO_LIMITED_OPTIONS, _NO_EDITED_OPTIONS = (
    get(ParsedBody()) for get in (_limited_options, _edited_options)
)


def has_limited_options(parsed: ParsedBody) -> bool:
    """Whether any field is set that `request_limits` checks."""
    return _limited_options(parsed) != _NO_LIMITED_OPTIONS


def has_edited_options(parsed: ParsedBody) -> bool:
    """Whether any field is set for which `edits.required_edit` may remove or lower something."""
    return _edited_options(parsed) != _NO_EDITED_OPTIONS


TOKEN_IDS_START = re.compile(rb"\s*\[\s*\d")
SHORTEST_IMAGE = 256  # Bytes; a shorter prompt holds no image


class PromptSize(NamedTuple):
    """A prompt's size, from which `schedule/core/demand_model.py` estimates its tokens."""

    text_bytes: int = 0  # Bytes of text, as UTF-8
    exact_tokens: int = 0  # Tokens that the client sent as ids
    media_tokens: int = 0  # Estimated tokens of images and audio
    min_tokens: int = 0
    """A low estimate of the tokens of the prompt's own field: exact for ids, by length for text,
    with the fewest tokens that images of their sizes cost."""


def measure_prompt(prompt: msgspec.Raw, *more: msgspec.Raw) -> PromptSize:
    """The size of the prompt that these fields form; missing fields count nothing."""
    text = ids = tokens = least = 0
    for raw in (prompt, *more):
        if raw is MISSING:
            continue
        data = bytes(raw)
        if _are_token_ids(data):
            ids += data.count(b",") + 1
            continue
        media = measure_media(data) if _may_hold_media(data) else _NO_MEDIA_COST
        size = len(data) - media.base64_bytes
        unicode_escapes = 0
        text += size
        tokens += media.tokens
        if data.find(b"\\") >= 0:
            # A character escaped with \u is three bytes in most alphabets, any other one byte.
            unicode_escapes = data.count(b"\\u")
            text -= data.count(b"\\") + 2 * unicode_escapes
        if raw is prompt:
            # Here an escaped character counts as one byte: it is rarely more than one token.
            least = int((size - 5 * unicode_escapes) / BYTES_PER_TOKEN) + media.min_tokens
    return PromptSize(max(0, text), ids, tokens, least or ids)


def _may_hold_media(data: bytes) -> bool:
    return len(data) > SHORTEST_IMAGE and (b";base64," in data or b'data"' in data)


def _are_token_ids(data: bytes) -> bool:
    return data[:2] not in _USUAL_STARTS and TOKEN_IDS_START.match(data) is not None


# The first two bytes of most prompts that are texts or messages.
_USUAL_STARTS = frozenset({b"", b'["', b"[{"})
_NO_MEDIA_COST = MediaCost()


def nesting_depth(body: bytes, limit: int) -> int:
    """How deeply the JSON is nested, up to `limit` + 1; 0: clearly within `limit`."""
    if len(body) <= limit or body.count(b"[") + body.count(b"{") <= limit:
        return 0
    text = body
    if text.find(b"\\") >= 0:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Every other part between quotes is outside of strings.
    brackets = b"".join(text.split(b'"')[::2]).translate(_TO_PARENTHESES, _NO_BRACKETS)
    return depth_of_parentheses(brackets, limit)


def depth_of_parentheses(parentheses: bytes, limit: int) -> int:
    """How deeply they nest, up to `limit` + 1."""
    depth, too_deep = 0, b"(" * (limit + 1)
    while parentheses and depth <= limit:
        if parentheses.find(too_deep) >= 0:
            return limit + 1
        outer = parentheses.replace(b"()", b"")  # removes the innermost pairs
        if len(outer) == len(parentheses):
            return depth + outer.count(b"(")  # some are never closed
        parentheses = outer
        depth += 1
    return depth


_TO_PARENTHESES = bytes.maketrans(b"{}[]", b"()()")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
T = TypeVar("T")
# Bytes from which a body is large. A smaller one of any shape takes some milliseconds.
LARGE_BODY_BYTES = 64 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # Some clients put it in front of UTF-8
SMALL_BODY_BYTES = 4 * 1024  # A body of fewer bytes takes no time to parse, whatever it holds
# Most objects and lists of a body that is parsed at once, in 0.3 ms. A body with more takes its
# turn: 60 kB hold 20,000 of them, which take 6-9 ms, and a client may send hundreds at once.
MOST_JSON_CONTAINERS = 1000
PARSED_FIELD_BYTES = 16 * 1024  # Bytes of a field of `ParsedBody` that may be parsed at once
# Bytes of a large body's beginning, and of its end, by which it is told from others.
IDENTIFYING_BYTES = LARGE_BODY_BYTES
SMALL_FIELD_BYTES = 1024  # Bytes of any field that may be parsed at once: there may be a thousand
FULL_PARSE_BYTES = 4 << 20  # Bytes of a body up to which it is parsed whole to resume its stream
LONGEST_LINK = 16 * 1024  # Bytes of a URL that are looked at
MEDIA_PER_STEP = 64  # Images and audio files that are measured in one step

# Fields of `ParsedBody` with decoded values; none is long but `model`.
_SHORT_FIELDS = frozenset(
    name
    for name, default in zip(
        ParsedBody.__struct_fields__, ParsedBody.__struct_defaults__, strict=True
    )
    if default is None
)

_OTHER_PROMPT_PARTS: tuple[str, ...] = ("tools", "system", "instructions")
FieldBytes = bytes | memoryview


def is_slow_to_parse(body: bytes) -> bool:
    """Whether preparing takes milliseconds: the body is large or has many objects and lists."""
    return (
        len(body) >= LARGE_BODY_BYTES or body.count(b"{") + body.count(b"[") > MOST_JSON_CONTAINERS
    )


def read_large_body(body: bytes, limits: LimitSettings) -> Generator[None, None, LargeBody]:
    """Check and outline a large body, in short steps. Raises: GatewayError 400."""
    outline = yield from read_outline(body, limits)
    view = memoryview(body)
    values: dict[str, FieldBytes] = {one.name: view[one.start : one.end] for one in outline.fields}
    if any(is_misspelt_model(name) for name in values):
        raise misspelt_model_error()
    base64_bytes = outline.uncounted_media_bytes
    tokens, min_tokens = (outline.uncounted_media * cost for cost in UNREADABLE_IMAGE_COST)
    for number, (start, end) in enumerate(outline.media_spans):
        cost, min_cost = file_cost(body, start, end)
        base64_bytes += end - start
        tokens += cost
        min_tokens += min_cost
        if number % MEDIA_PER_STEP == MEDIA_PER_STEP - 1:
            yield
    return LargeBody(body, outline, values, MediaCost(base64_bytes, tokens, min_tokens))


@dataclass(slots=True, eq=False, repr=False)
class LargeBody:
    """A large body, and the edits made to it."""

    _body: bytes
    outline: JsonOutline
    _values: dict[str, FieldBytes]  # By field; of repeated fields the last
    _media: MediaCost
    _edited: bool = False
    _small_fields: bytes | None = None

    def __len__(self) -> int:
        return sum(map(len, self.pieces())) if self._edited else len(self._body)

    def pieces(self) -> list[FieldBytes]:
        """The body in pieces, as it is sent."""
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
        """A copy of the whole body."""
        return b"".join(self.pieces())

    def without_large_fields(self) -> bytes:
        """The body without its large fields."""
        if self._small_fields is None:
            self._small_fields = _join_fields(
                (name, value)
                for name, value in self._values.items()
                if len(value) <= SMALL_FIELD_BYTES
            )
        return self._small_fields

    def bytes_to_parse(self) -> bytes:
        """The body, without its large fields if it is too large to be parsed whole."""
        return self.to_bytes() if len(self) <= FULL_PARSE_BYTES else self.without_large_fields()

    def has_any(self, names: tuple[str, ...]) -> bool:
        """Whether it has any of these fields."""
        return any(name in self._values for name in names)

    def parse(self) -> ParsedBody:
        """As `parse_body` for a small body. Raises: GatewayError 400."""
        names = ParsedBody.__struct_fields__
        known = {name: self._values[name] for name in names if name in self._values}
        large = {name: value for name, value in known.items() if len(value) > PARSED_FIELD_BYTES}
        for name in large:
            if name in _SHORT_FIELDS and name != "model":
                raise errors.invalid_field(name, f"is longer than {PARSED_FIELD_BYTES} bytes.")
        parsed = parse_body(
            _join_fields((name, known[name]) for name in known if name not in large)
        )
        values: dict[str, object] = {name: msgspec.Raw(value) for name, value in large.items()}
        if "model" in large:
            # The beginning of it.
            value = bytes(self._values["model"][: PARSED_FIELD_BYTES + 1])
            if value[:1] != b'"':
                raise errors.invalid_request("'model' must be a string.", "model")
            whole = safe_cut(value, 1, PARSED_FIELD_BYTES)
            values["model"] = TEXT_DECODER.decode(value[:whole] + b'"')
        return msgspec.structs.replace(parsed, **values)

    def raw_fields(self) -> dict[str, msgspec.Raw]:
        """The values of its fields, as views of the body."""
        return {name: msgspec.Raw(value) for name, value in self._values.items()}

    def with_fields(self, fields: Mapping[str, msgspec.Raw]) -> LargeBody:
        """This body with `fields` in place of its own."""
        values: dict[str, FieldBytes] = {name: memoryview(raw) for name, raw in fields.items()}
        return LargeBody(self._body, self.outline, values, self._media, _edited=True)

    def _field(self, name: str) -> BodyField | None:
        """The outline of a field that no edit has replaced; of repeated fields the last."""
        for found in reversed(self.outline.fields):
            if found.name == name:
                return found
        return None

    def count_prompts(self) -> int:
        """How many prompts a completion's `prompt` holds, as `split_prompts` counts them."""
        found = self._field("prompt")
        if found is None or found.has_scalars or self._body[found.start : found.start + 1] != b"[":
            return 1
        return found.item_count or 1

    def ends_with_assistant(self) -> bool:
        """Whether the last message is the assistant's."""
        found = self._field("messages")
        return found is not None and found.last_role == "assistant"

    def truncated_field(self, name: str) -> bytes:
        """The beginning of a field, closed to be valid JSON; all of a short field."""
        found = self._field(name)
        if found is None:
            return b""
        return self._body[found.start : found.truncated_at or found.end] + found.truncated_suffix

    def beginning(self, names: Iterable[str], most: int) -> tuple[bytes, int]:
        """A JSON object of the beginnings of these fields; and how many bytes it leaves out.

        A field after so many bytes is left out as a whole.
        """
        found: list[tuple[str, FieldBytes]] = []
        left_out = 0
        for name in names:
            value = self.truncated_field(name) if most > 0 else b""
            most -= len(value)
            left_out += self.field_size(name) - len(value)
            if value:
                found.append((name, value))
        return _join_fields(found), left_out

    def field_size(self, name: str) -> int:
        """Bytes of a field; 0 without it."""
        return len(self._values.get(name, b""))

    def count_token_ids(self, name: str) -> int:
        """How many token ids a field holds; 0 if it holds anything else."""
        found = self._field(name)
        if found is None or not TOKEN_IDS_START.match(self._body, found.start):
            return 0
        return self._body.count(b",", found.start, found.end) + 1

    def measure_prompt(self, prompt_field: str | None) -> PromptSize:
        """As the function `measure_prompt` for a small body."""
        outline, media, size, least, ids = self.outline, self._media, 0, 0, 0
        if prompt_field is not None and prompt_field in PROMPT_FIELDS:
            ids = self.count_token_ids(prompt_field)
            size = 0 if ids else self.field_size(prompt_field)
            text = size - 5 * outline.unicode_escape_count - media.base64_bytes
            least = ids or int(max(0, text) / BYTES_PER_TOKEN) + media.min_tokens
        text = size + sum(self.field_size(name) for name in _OTHER_PROMPT_PARTS)
        text -= media.base64_bytes + outline.escape_count + 2 * outline.unicode_escape_count
        return PromptSize(max(0, text), ids, media.tokens, least)

    def find_links(self) -> list[Link]:
        """The URLs that a node might fetch; of long ones the beginning."""
        found = []
        for start, end, kind, key in self.outline.links:
            if self._body.startswith(b"data:", start):
                continue
            if kind == "data" and not self._may_hold_colon(start, end):
                continue
            most = min(end, start + LONGEST_LINK)
            if most < end:
                most = safe_cut(self._body, start, most)
            text = TEXT_DECODER.decode(b'"%b"' % self._body[start:most])
            if kind == "server" or ":" in text or (kind == "url" and may_be_url(text)):
                found.append(Link(text, key))
        return found

    def _may_hold_colon(self, start: int, end: int) -> bool:
        """Whether a text, usually base64, has a colon; an escape could spell one."""
        body = self._body
        return body.find(b":", start, end) >= 0 or (
            body.find(b"\\u", start, min(end, start + LONGEST_LINK)) >= 0
        )


def _join_fields(fields: Iterable[tuple[str, FieldBytes]]) -> bytes:
    """A JSON object of these fields."""
    parts = [msgspec.json.encode(name) + b":" + bytes(value) for name, value in fields]
    return b"{" + b",".join(parts) + b"}"


Body = bytes | LargeBody  # A request's body: bytes, or a large body


def bytes_to_parse(body: Body) -> bytes:
    """A body as bytes to be parsed whole; without its large fields if it is too large for that."""
    return body if isinstance(body, bytes) else body.bytes_to_parse()


def without_large_fields(body: Body) -> bytes:
    """A body as bytes; a large one without its large fields."""
    return body if isinstance(body, bytes) else body.without_large_fields()


def identifying_pieces(body: Body) -> list[FieldBytes]:
    """What tells a body from others of its length: all of it, or if it is large both its ends."""
    pieces: list[FieldBytes] = [body] if isinstance(body, bytes) else body.pieces()
    if len(body) <= 2 * IDENTIFYING_BYTES:
        return pieces
    ends: tuple[list[FieldBytes], list[FieldBytes]] = [], []
    left = IDENTIFYING_BYTES
    for piece in pieces:
        ends[0].append(piece[:left])
        left -= len(ends[0][-1])
    left = IDENTIFYING_BYTES
    for piece in reversed(pieces):
        ends[1].append(piece[max(0, len(piece) - left) :])
        left -= len(ends[1][-1])
    return ends[0] + ends[1][::-1]


@dataclass(slots=True)
class TimeSlicer:
    """Runs work in steps: in each turn of the event loop one step of all such work together."""

    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, work: Generator[None, None, T]) -> T:
        """Run all steps of `work`; return its value."""
        try:
            while True:
                async with self._lock:
                    try:
                        next(work)
                    finally:
                        # The next waiter gets the lock in the next turn of the loop.
                        await asyncio.sleep(0)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            work.close()
