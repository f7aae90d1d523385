"""A prompt as chained blocks: equal numbers at equal places mean prompts that begin alike.

What counts is what a chat template makes of a body, in its order: the model, the tools, the
system's part, then the messages. It is taken from the values, so that escapes, white space, the
order of keys and marks such as `cache_control` make no difference, and a message's text counts the
same as a string and as a part. Tools and the arguments of their calls are the client's own bytes.

Each message begins a new block. So a turn's prompt ends where a block ends, the next turn's blocks
begin with all of its blocks, and nothing has to be known of what stands between them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec

from gateway.config.prompts import LONGEST_LINE, literal_prefix, pattern_problem
from gateway.fleet.prompt_tree import PromptKey
from gateway.proxy.inbound.large_body import Body, LargeBody
from gateway.proxy.inbound.parsed_body import MISSING
from gateway.proxy.inbound.routes import Route

BLOCK_BYTES = 512
"""Bytes; about 128 tokens, which a slow CPU node reads in a few seconds."""

SHORTEST_BODY = 256
"""Bytes of a body below which no cache is worth thinking of."""

MOST_BLOCKS = 4096
"""Of one prompt; what stands behind them is measured only."""

BYTES_PER_TOKEN = 4

MESSAGES_PER_STEP = 512
"""Messages that are looked at in one step."""

IMAGE_BYTES = 576 * BYTES_PER_TOKEN
"""Bytes that a picture or a sound counts as: LLaVA's 576 tokens lie amidst of what models make of
a picture (256 to some thousands)."""


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None
    # What of other parts goes into a template: tools that were used, what they gave, thoughts.
    name: msgspec.Raw = MISSING
    input: msgspec.Raw = MISSING
    content: msgspec.Raw = MISSING
    thinking: msgspec.Raw = MISSING
    image_url: msgspec.Raw = MISSING
    source: msgspec.Raw = MISSING
    input_audio: msgspec.Raw = MISSING
    file: msgspec.Raw = MISSING


class _Message(msgspec.Struct):
    role: str = ""
    type: str = ""
    content: str | list[_Part] | None = None
    tool_calls: msgspec.Raw = MISSING
    name: msgspec.Raw = MISSING
    arguments: msgspec.Raw = MISSING
    output: msgspec.Raw = MISSING


class _Chat(msgspec.Struct):
    tools: msgspec.Raw = MISSING
    system: str | list[_Part] | None = None
    instructions: str | None = None
    messages: list[_Message] = []
    input: str | list[_Message] | None = None


class _Plain(msgspec.Struct):
    prompt: msgspec.Raw = MISSING


class _Infill(msgspec.Struct):
    input_extra: msgspec.Raw = MISSING
    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""


_CHAT = msgspec.json.Decoder(_Chat)

_SYSTEM_TEXT = msgspec.json.Decoder(str | list[_Part] | None)

_TURNS = msgspec.json.Decoder(str | list[_Message] | None)

_PLAIN = msgspec.json.Decoder(_Plain)

_INFILL = msgspec.json.Decoder(_Infill)

_TEXT = msgspec.json.Decoder(str)

_TEXTS = msgspec.json.Decoder(list[str])

_SEPARATOR = "\0"

_SYSTEM = frozenset({"system", "developer"})

_CHAT_FIELDS = frozenset({"messages", "input"})

LineFilter = Callable[[str], str]


def build_prompt_key(
    body: bytes, route: Route, model: str, volatile_lines: VolatileLines
) -> PromptKey | None:
    """The prompt's blocks, and its size in bytes of text.

    None: it isn't worth it, the path has no use for a prompt cache, or the body holds several
    prompts or something that isn't understood.
    """
    if len(body) < SHORTEST_BODY or not route.generates:
        return None
    chain = _Chain(model)
    leave_out = _line_filter(chain, volatile_lines)
    try:
        if route.prompt_field in _CHAT_FIELDS:
            _add_chat(chain, _CHAT.decode(body), leave_out)
        elif route.prompt_field == "prompt":
            if not _add_prompt(chain, _PLAIN.decode(body).prompt, leave_out):
                return None
        elif route.prompt_field == "input_prefix":
            _add_infill(chain, _INFILL.decode(body))
        else:
            return None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return chain.prompt()


def build_large_prompt_key(
    body: LargeBody, route: Route, model: str, volatile_lines: VolatileLines
) -> Generator[None, None, PromptKey | None]:
    """The same of a large body, a step at a time: of its beginning; the rest is measured only."""
    if not route.generates:
        return None
    chain = _Chain(model)
    leave_out = _line_filter(chain, volatile_lines)
    try:
        if route.prompt_field in _CHAT_FIELDS:
            yield from _add_large_chat(chain, body, leave_out)
        elif route.prompt_field == "prompt":
            if body.count_token_ids("prompt"):
                chain.add_open(body.truncated_field("prompt")[1:-1].strip())
                chain.size = max(chain.size, 1)
                chain.scale(BYTES_PER_TOKEN * body.count_token_ids("prompt"))
            elif body.count_prompts() > 1 or not _add_prompt(
                chain, _truncated_field(body, "prompt"), leave_out
            ):
                return None
            else:
                chain.size += body.truncated_bytes("prompt")
        elif route.prompt_field == "input_prefix":
            if extra := body.truncated_field("input_extra"):
                chain.add(extra)
            chain.add_open(_TEXT.decode(body.truncated_field("input_prefix") or b'""').encode())
            chain.size += sum(map(body.truncated_bytes, ("input_extra", "input_prefix")))
            chain.size += body.field_size("input_suffix") + body.field_size("prompt")
        else:
            return None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return chain.prompt()


def _truncated_field(body: LargeBody, name: str) -> msgspec.Raw:
    return msgspec.Raw(body.truncated_field(name))


def _add_large_chat(
    chain: _Chain, body: LargeBody, leave_out: LineFilter
) -> Generator[None, None, None]:
    if tools := body.truncated_field("tools"):
        chain.add(tools)
    for name in ("system", "instructions"):
        if not chain.full and (text := body.truncated_field(name)):
            system = _SYSTEM_TEXT.decode(text)
            if system:
                _add_message(chain, _Message("system", content=system), leave_out)
            yield
    name = "input" if body.has_any(("input",)) else "messages"
    said = body.truncated_field(name)
    turns = _TURNS.decode(said) if said and not chain.full else None
    yield
    if isinstance(turns, str):
        turns = [_Message("user", content=turns)]
    first = True
    for number, message in enumerate(turns or ()):
        if chain.full:
            # What is left is measured by its share.
            chain.size += len(said) * (len(turns or ()) - number) // len(turns or ())
            break
        first = first and message.role in _SYSTEM
        _add_message(chain, message, leave_out if first else None)
        if number % MESSAGES_PER_STEP == MESSAGES_PER_STEP - 1:
            yield
    chain.size += sum(map(body.truncated_bytes, ("tools", "system", "instructions", name)))


def _line_filter(chain: _Chain, volatile: VolatileLines) -> LineFilter:
    def leave_out(text: str) -> str:
        seen = volatile.stripped.remove_from(text)
        left = volatile.ignored.remove_from(seen)
        chain.unsure = chain.unsure or left is not seen
        return left

    return leave_out


class _Chain:
    """Blocks as they are made."""

    __slots__ = ("blocks", "ends", "last", "size", "unsure")

    def __init__(self, model: str) -> None:
        self.blocks: list[int] = []
        self.ends: list[int] = []
        self.size = 0
        self.last = hash(model)
        self.unsure = False

    def add(self, data: bytes, weight: int | None = None) -> None:
        """A part that ends where a block ends; `weight`: the bytes it counts as."""
        room = MOST_BLOCKS - len(self.blocks)
        if weight is None and len(data) > BLOCK_BYTES:
            full = min(len(data), room * BLOCK_BYTES)
            for at in range(0, full, BLOCK_BYTES):
                part = data[at : at + BLOCK_BYTES]
                self._close(part, len(part))
            self.size += len(data) - full
        elif room:
            self._close(data, len(data) if weight is None else weight)
        else:
            self.size += len(data) if weight is None else weight

    def add_open(self, data: bytes) -> None:
        """A part that may go on in another prompt: only its full blocks count."""
        full = min(len(data) // BLOCK_BYTES, MOST_BLOCKS - len(self.blocks)) * BLOCK_BYTES
        for at in range(0, full, BLOCK_BYTES):
            self._close(data[at : at + BLOCK_BYTES], BLOCK_BYTES)
        self.size += len(data) - full

    @property
    def full(self) -> bool:
        """Whether there is no room for another block."""
        return len(self.blocks) >= MOST_BLOCKS

    def prompt(self) -> PromptKey | None:
        """All of it; None: there is nothing, or blocks without a single letter."""
        if not (self.blocks and self.size):
            return None
        return PromptKey(
            tuple(self.blocks),
            self.size / BYTES_PER_TOKEN,
            tuple(self.ends),
            self.size,
            self.unsure,
        )

    def scale(self, size: int) -> None:
        """Measure everything anew: all of it is `size` bytes."""
        self.ends = [end * size // self.size for end in self.ends]
        self.size = size

    def _close(self, data: bytes, weight: int) -> None:
        self.last = hash((self.last, data))
        self.size += weight
        self.blocks.append(self.last)
        self.ends.append(self.size)


def _add_chat(chain: _Chain, chat: _Chat, leave_out: LineFilter) -> None:
    if chat.tools is not MISSING:
        chain.add(bytes(chat.tools))
    for system in (chat.system, chat.instructions):
        if system:
            _add_message(chain, _Message("system", content=system), leave_out)
    turns = chat.input if chat.input is not None else chat.messages
    if isinstance(turns, str):
        turns = [_Message("user", content=turns)]
    first = True
    rest: list[_Message] = []
    if len(turns) > MOST_BLOCKS:
        # Each of them makes a block at least.
        turns, rest = turns[:MOST_BLOCKS], turns[MOST_BLOCKS:]
    for message in turns:
        first = first and message.role in _SYSTEM
        _add_message(chain, message, leave_out if first else None)
    for message in rest:
        chain.size += _length(message)


def _add_message(chain: _Chain, message: _Message, leave_out: LineFilter | None) -> None:
    """A message as blocks of its own. Pictures count as what they cost, not as their base64."""
    content = message.content
    texts = [message.role]
    if isinstance(content, str):
        if leave_out is not None and not (content := leave_out(content)):
            return
        texts.append(content)
    elif content:
        for part in content:
            if part.text is None:
                chain.add(_SEPARATOR.join(texts).encode())
                _add_part(chain, part)
                texts = []
            elif text := part.text if leave_out is None else leave_out(part.text):
                texts.append(text)
        if leave_out is not None and len(texts) == 1:
            return
    chain.add(_SEPARATOR.join(texts).encode())
    for raw in (message.name, message.tool_calls, message.arguments, message.output):
        if raw is not MISSING:
            chain.add(bytes(raw))


def _length(message: _Message) -> int:
    """Characters of a message's text."""
    content = message.content
    if isinstance(content, str):
        return len(content)
    return sum(len(part.text or "") for part in content or ())


def _add_part(chain: _Chain, part: _Part) -> None:
    """A part that is no text."""
    chain.add(part.type.encode())
    for raw in (part.name, part.thinking, part.input):
        if raw is not MISSING:
            chain.add(bytes(raw))
    for raw in (part.image_url, part.source, part.input_audio, part.file):
        if raw is not MISSING:
            chain.add(bytes(raw), IMAGE_BYTES)
    if part.content is not MISSING:
        data = bytes(part.content)
        chain.add(data, IMAGE_BYTES if b'"base64"' in data else None)


def _add_prompt(chain: _Chain, raw: msgspec.Raw, leave_out: LineFilter) -> bool:
    """A completion's prompt, text or token ids; False: it is several, or none."""
    data = bytes(raw).strip()
    if data[:1] == b"[":
        if b'"' in data or b"[" in data[1:]:
            texts = _TEXTS.decode(data)
            if len(texts) != 1:
                return False
            text = texts[0]
        else:
            chain.add_open(data[1:-1].strip())
            chain.scale(BYTES_PER_TOKEN * (data.count(b",") + 1))
            return True
    elif data[:1] == b'"':
        text = _TEXT.decode(data)
    else:
        return False
    chain.add_open(leave_out(text).encode())
    return True


def _add_infill(chain: _Chain, infill: _Infill) -> None:
    """The other files, then what stands in front of the cursor; all else follows a changing end."""
    if infill.input_extra is not MISSING:
        chain.add(bytes(infill.input_extra))
    chain.add_open(infill.input_prefix.encode())
    chain.size += len(infill.input_suffix) + len(infill.prompt)


BUILT_IN_PATTERNS = ("x-anthropic-billing-header:",)
"""Never part of a fingerprint; taken out of requests only where the settings say so."""

SEARCHED_CHARACTERS = 16 * 1024
"""Characters of a system prompt in which lines are looked for."""

MOST_LINES_PER_PATTERN = 16
"""Lines of one text that are looked at for one pattern."""

MOST_FIELD_BYTES = 4 << 20
"""Of a field; in a longer one no lines are looked for."""

_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

_RAW_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])

_SYSTEM_ROLES = frozenset({b'"system"', b'"developer"'})


class LinePatterns:
    """Patterns for lines, compiled. Raises ValueError, in words for people, for unfit ones."""

    __slots__ = ("_patterns",)

    def __init__(self, patterns: Sequence[str]) -> None:
        found: dict[str, tuple[str, re.Pattern[str]]] = {}
        for pattern in patterns:
            if (why := pattern_problem(pattern)) is not None:
                raise ValueError(f"{pattern!r} {why}")
            found[pattern] = (literal_prefix(pattern), re.compile(pattern))
        self._patterns = tuple(found.values())

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def remove_from(self, text: str) -> str:
        """`text` without the lines that match; itself if none does."""
        for plain, pattern in self._patterns:
            at = text.find(plain, 0, SEARCHED_CHARACTERS)
            for _ in range(MOST_LINES_PER_PATTERN):
                if at < 0:
                    break
                end = text.find("\n", at) + 1 or len(text)
                starts = at == 0 or text[at - 1] == "\n"
                if starts and pattern.match(text[at : min(end, at + LONGEST_LINE)].rstrip("\r\n")):
                    text = text[:at] + text[end:]
                    at = text.find(plain, at, SEARCHED_CHARACTERS)
                else:
                    at = text.find(plain, end, SEARCHED_CHARACTERS)
        return text


class VolatileLines:
    """Which lines are left out of fingerprints, and which of those out of requests too.

    Raises ValueError, in words for people, for a pattern that is no fit.
    """

    __slots__ = ("ignored", "stripped", "strips_requests")

    def __init__(self, volatile: Sequence[str] = (), strip: Sequence[str] = ()) -> None:
        self.ignored = LinePatterns([*BUILT_IN_PATTERNS, *volatile, *strip])
        self.stripped = LinePatterns(strip)
        self.strips_requests = bool(strip)
        """Whether `edit` may change anything."""

    def strip_edit(self, body: Body) -> dict[str, Any]:
        """New values of the body's fields, as `edits.applied` takes them; mostly none.

        The system text loses its volatile lines: that of `system` and `instructions`, of the
        messages of the system that stand first, and the head of a plain `prompt`. Whatever of the
        body isn't touched keeps its bytes.
        """
        lines = self.stripped
        if not lines:
            return {}
        try:
            fields = _RAW_FIELDS.decode(body) if isinstance(body, bytes) else body.raw_fields()
            found = {}
            for name, edited in _STRIPPERS.items():
                if name in fields and len(fields[name]) <= MOST_FIELD_BYTES:
                    value = edited(fields[name], lines)
                    if value is not None:
                        found[name] = value
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return {}
        return found


def _strip_text(raw: msgspec.Raw, lines: LinePatterns) -> msgspec.Raw | None:
    """A string without its volatile lines; None: it has none."""
    if bytes(memoryview(raw)[:1]) != b'"':
        return None
    text = msgspec.json.decode(raw)
    left = lines.remove_from(text)
    return None if left is text else msgspec.Raw(msgspec.json.encode(left))


def _strip_content(raw: msgspec.Raw, lines: LinePatterns) -> msgspec.Raw | None:
    """A string, or a list of parts: a part of which nothing is left goes as a whole."""
    if bytes(memoryview(raw)[:1]) != b"[":
        return _strip_text(raw, lines)
    parts = _RAW_ITEMS.decode(raw)
    kept = []
    for part in parts:
        fields = _RAW_FIELDS.decode(part) if bytes(memoryview(part)[:1]) == b"{" else {}
        text = _strip_text(fields["text"], lines) if "text" in fields else None
        if text is None:
            kept.append(part)
        elif bytes(text) != b'""':
            kept.append(_encoded(fields | {"text": text}))
    if len(kept) == len(parts) and all(a is b for a, b in zip(kept, parts, strict=True)):
        return None
    return _encoded(kept)


def _strip_messages(raw: msgspec.Raw, lines: LinePatterns) -> msgspec.Raw | None:
    """The messages of the system that stand first; the others stay as they are."""
    if bytes(memoryview(raw)[:1]) != b"[":
        return None
    messages = _RAW_ITEMS.decode(raw)
    changed = False
    for i, message in enumerate(messages):
        fields = _RAW_FIELDS.decode(message)
        if bytes(fields.get("role", b"")) not in _SYSTEM_ROLES:
            break
        content = _strip_content(fields["content"], lines) if "content" in fields else None
        if content is not None:
            messages[i] = _encoded(fields | {"content": content})
            changed = True
    return _encoded(messages) if changed else None


def _encoded(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


_STRIPPERS = {
    "system": _strip_content,
    "instructions": _strip_text,
    "messages": _strip_messages,
    "input": _strip_messages,
    "prompt": _strip_text,
}
