"""Prompt keys: digests of a prompt's blocks, chained so that equal keys mean equal beginnings.

A key covers what a chat template puts into the prompt, in the template's order: model, tools,
system prompt, messages. It is built from decoded values: escapes, white space, the order of keys
and marks such as `cache_control` make no difference, and a message's text counts the same as a
string and as a part. Tools and the arguments of tool calls count as the client's own bytes.

Each message begins a new block. So the key of a conversation's next turn begins with all blocks of
the turn before, whatever the template puts between messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import msgspec

from gateway.api.json_values import (
    FIELDS_DECODER,
    ITEMS_DECODER,
    TEXT_DECODER,
    as_raw,
    run_at_once,
)
from gateway.config.settings import LONGEST_LINE, literal_prefix, pattern_problem
from gateway.lease import KeyedHash, PromptKey, block_numbers
from gateway.request.body import BYTES_PER_TOKEN, MISSING, Body
from gateway.request.edits import Edit, raw_fields
from gateway.request.media import UNREADABLE_IMAGE_TOKENS
from gateway.request.routes import Route

BLOCK_BYTES = 512  # About 128 tokens, whose prefill takes a slow CPU node a few seconds
SHORTEST_BODY = 256  # Bytes of a body below which a cached prompt saves too little
MOST_BLOCKS = 4096  # Blocks of one prompt; the rest only counts towards its size
MESSAGES_PER_STEP = 512  # Messages that are cut into blocks in one step
BLOCKS_PER_STEP = 512  # Blocks that are hashed in one step: 0.4 ms
# Bytes that an image or audio file counts as: LLaVA's 576 tokens lie within the range of models
# (256 to some thousands).
IMAGE_BYTES = UNREADABLE_IMAGE_TOKENS * BYTES_PER_TOKEN


class _Part(msgspec.Struct, gc=False):
    type: str = ""
    text: str | None = None
    # Of parts that are not text, what templates use: tool calls, their results, thinking, media.
    name: msgspec.Raw = MISSING
    input: msgspec.Raw = MISSING
    content: msgspec.Raw = MISSING
    thinking: msgspec.Raw = MISSING
    image_url: msgspec.Raw = MISSING
    source: msgspec.Raw = MISSING
    input_audio: msgspec.Raw = MISSING
    file: msgspec.Raw = MISSING


class _Message(msgspec.Struct, gc=False):
    role: str = ""
    type: str = ""
    content: str | list[_Part] | None = None
    tool_calls: msgspec.Raw = MISSING
    name: msgspec.Raw = MISSING
    arguments: msgspec.Raw = MISSING
    output: msgspec.Raw = MISSING


class _ChatBody(msgspec.Struct, gc=False):
    tools: msgspec.Raw = MISSING
    system: str | list[_Part] | None = None
    instructions: str | None = None
    messages: list[_Message] = []
    input: str | list[_Message] | None = None


class _CompletionBody(msgspec.Struct, gc=False):
    prompt: msgspec.Raw = MISSING


class _InfillBody(msgspec.Struct, gc=False):
    input_extra: msgspec.Raw = MISSING
    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""


_TEXTS = msgspec.json.Decoder(list[str])
_SEPARATOR = "\0"
_SYSTEM_ROLES = frozenset({"system", "developer"})


def build_prompt_key(
    body: Body,
    route: Route,
    model: str,
    volatile_lines: VolatileLines,
    keyed_hash: KeyedHash,
    scope: str = "",
) -> PromptKey | None:
    """As `prompt_key_steps`, at once."""
    if len(body) < SHORTEST_BODY:
        return None
    return run_at_once(prompt_key_steps(body, route, model, volatile_lines, keyed_hash, scope))


def prompt_key_steps(
    body: Body,
    route: Route,
    model: str,
    volatile_lines: VolatileLines,
    keyed_hash: KeyedHash,
    scope: str = "",
) -> Generator[None, None, PromptKey | None]:
    """The key of a body's prompt, in short steps.

    Of a large body it covers the prompt's beginning; the rest only counts towards its size.
    `scope`: equal prompts have equal keys within it alone.

    None: the prompt is too short, the path has no prompt cache, or the body holds several prompts
    or a prompt in an unknown form.
    """
    known = _PROMPTS.get(route.prompt_field) if route.generates else None
    if known is None:
        return None
    decoder, add_prompt = known
    key = _KeyBuilder(volatile_lines)
    try:
        if isinstance(body, bytes):
            yield from add_prompt(key, decoder.decode(body))
        else:
            names = decoder.type.__struct_fields__
            beginning, left_out = body.beginning(names, MOST_BLOCKS * BLOCK_BYTES)
            yield from add_prompt(key, decoder.decode(beginning))
            key.count(left_out)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    blocks = key.blocks
    if not (blocks and key.size):
        return None  # or it would hold no text at all
    digests = keyed_hash.chain(_first_mark(keyed_hash, model, scope), blocks[:BLOCKS_PER_STEP])
    for start in range(BLOCKS_PER_STEP, len(blocks), BLOCKS_PER_STEP):
        yield
        digests += keyed_hash.chain(digests[-1], blocks[start : start + BLOCKS_PER_STEP])
    tokens = key.size / BYTES_PER_TOKEN
    return PromptKey(block_numbers(digests), tokens, tuple(key.ends), key.size, key.omits_volatile)


class _KeyBuilder:
    """Cuts a prompt into blocks."""

    __slots__ = ("_volatile_lines", "blocks", "ends", "omits_volatile", "size")

    def __init__(self, volatile_lines: VolatileLines) -> None:
        self._volatile_lines = volatile_lines
        self.blocks: list[bytes] = []
        self.ends: list[int] = []
        self.size = 0
        self.omits_volatile = False

    def add(self, data: bytes, weight: int | None = None) -> None:
        """Add data that ends with its own block; `weight`: the bytes that it counts as."""
        if weight is None and len(data) > BLOCK_BYTES:
            self._cut(data, len(data))
            return
        self.size += len(data) if weight is None else weight
        if len(self.blocks) < MOST_BLOCKS:
            self.blocks.append(data)
            self.ends.append(self.size)

    def add_open(self, data: bytes) -> None:
        """Add data that may go on in the next prompt: only full blocks are hashed."""
        self._cut(data, len(data) // BLOCK_BYTES * BLOCK_BYTES)

    def _cut(self, data: bytes, most: int) -> None:
        """Cut so many bytes of `data` into blocks; all of it counts."""
        size, room = self.size, (MOST_BLOCKS - len(self.blocks)) * BLOCK_BYTES
        for at in range(0, min(most, room), BLOCK_BYTES):
            part = data[at : at + BLOCK_BYTES]
            self.blocks.append(part)
            self.ends.append(size + at + len(part))
        self.size = size + len(data)

    def count(self, size: int) -> None:
        """Count bytes of the prompt that are not hashed."""
        self.size += size

    def stable_lines(self, text: str) -> str:
        """`text` of the system prompt without its volatile lines."""
        sent = self._volatile_lines.stripped.remove_from(text)
        stable = self._volatile_lines.ignored.remove_from(sent)
        self.omits_volatile = self.omits_volatile or stable is not sent
        return stable

    def scale(self, size: int) -> None:
        """Count everything added so far as `size` bytes in all."""
        self.ends = [end * size // self.size for end in self.ends]
        self.size = size


def _first_mark(keyed_hash: KeyedHash, model: str, scope: str) -> bytes:
    """What stands before the first block.

    That of a scope is a digest that nobody can guess, of bytes that no block begins with: else a
    prompt of another scope could be written so that its key is equal.
    """
    name = model.encode()
    mark = b"%d %b" % (len(name), name)
    return keyed_hash.digest((b"\0scope ", mark, scope.encode())) if scope else mark


def _add_chat(key: _KeyBuilder, chat: _ChatBody) -> Generator[None, None, None]:
    if chat.tools is not MISSING:
        key.add(bytes(chat.tools))
    for system in (chat.system, chat.instructions):
        if system:
            _add_message(key, _Message("system", content=system), is_system=True)
    messages = chat.input if chat.input is not None else chat.messages
    if isinstance(messages, str):
        messages = [_Message("user", content=messages)]
    in_system_prompt = True
    for start in range(0, len(messages), MESSAGES_PER_STEP):
        for message in messages[start : start + MESSAGES_PER_STEP]:
            in_system_prompt = in_system_prompt and message.role in _SYSTEM_ROLES
            _add_message(key, message, is_system=in_system_prompt)
        yield


def _add_message(key: _KeyBuilder, message: _Message, *, is_system: bool) -> None:
    """Add a message as blocks of its own. Images count as what they cost, not as their base64."""
    content = message.content
    if isinstance(content, str):
        if is_system and not (content := key.stable_lines(content)):
            return
        key.add(f"{message.role}{_SEPARATOR}{content}".encode())
    else:
        texts = [message.role]
        for part in content or ():
            if part.text is None:
                key.add(_SEPARATOR.join(texts).encode())
                _add_media_or_tool(key, part)
                texts = []
            elif text := key.stable_lines(part.text) if is_system else part.text:
                texts.append(text)
        if is_system and content and len(texts) == 1:
            return
        key.add(_SEPARATOR.join(texts).encode())
    for raw in (message.name, message.tool_calls, message.arguments, message.output):
        if raw is not MISSING:
            key.add(bytes(raw))


def _add_media_or_tool(key: _KeyBuilder, part: _Part) -> None:
    """Add a message part that is not text."""
    key.add(part.type.encode())
    for raw in (part.name, part.thinking, part.input):
        if raw is not MISSING:
            key.add(bytes(raw))
    for raw in (part.image_url, part.source, part.input_audio, part.file):
        if raw is not MISSING:
            key.add(bytes(raw), IMAGE_BYTES)
    if part.content is not MISSING:
        data = bytes(part.content)
        key.add(data, IMAGE_BYTES if b'"base64"' in data else None)


def _add_completion(key: _KeyBuilder, body: _CompletionBody) -> Generator[None, None, None]:
    """Add a completion's prompt, text or token ids; nothing if it is several, or none."""
    yield from ()
    data = bytes(body.prompt).strip()
    if data[:1] == b'"':
        texts = [TEXT_DECODER.decode(data)]
    elif data[:1] != b"[":
        return
    elif b'"' in data or b"[" in data[1:]:
        texts = _TEXTS.decode(data)
    else:
        key.add_open(data[1:-1].strip())
        key.scale(BYTES_PER_TOKEN * (data.count(b",") + 1))
        return
    if len(texts) == 1:
        key.add_open(key.stable_lines(texts[0]).encode())


def _add_infill(key: _KeyBuilder, body: _InfillBody) -> Generator[None, None, None]:
    """Behind the other files and the text before the cursor all only counts."""
    yield from ()
    if body.input_extra is not MISSING:
        key.add(bytes(body.input_extra))
    key.add_open(body.input_prefix.encode())
    key.count(len(body.input_suffix) + len(body.prompt))


_AddPrompt = Callable[[_KeyBuilder, Any], Generator[None, None, None]]
_CHAT = msgspec.json.Decoder(_ChatBody), _add_chat
# By the field that holds the prompt: what decodes the body, and adds its prompt to a key.
_PROMPTS: Mapping[str | None, tuple[msgspec.json.Decoder[Any], _AddPrompt]] = {
    "messages": _CHAT,
    "input": _CHAT,
    "prompt": (msgspec.json.Decoder(_CompletionBody), _add_completion),
    "input_prefix": (msgspec.json.Decoder(_InfillBody), _add_infill),
}

# Lines never in a prompt key; removed from requests only if the settings say so.
BUILT_IN_PATTERNS = ("x-anthropic-billing-header:",)
SEARCHED_CHARACTERS = 16 * 1024  # Characters of a system prompt that are searched for lines
MOST_LINES_PER_PATTERN = 16  # Lines of one text that are matched with one pattern
MOST_FIELD_BYTES = 4 << 20  # Bytes of a field up to which it is searched for lines
_RAW_SYSTEM_ROLES = frozenset(f'"{role}"'.encode() for role in _SYSTEM_ROLES)


class LinePatterns:
    """Compiled patterns for lines. Raises ValueError, in words for people, for an unfit one."""

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
    """Lines of system prompts that change from request to request, such as the time.

    `ignored` ones are left out of prompt keys, `stripped` ones are removed from requests too.
    Raises ValueError, in words for people, for an unfit pattern.
    """

    __slots__ = ("ignored", "stripped", "strips_requests")

    def __init__(self, volatile: Sequence[str] = (), strip: Sequence[str] = ()) -> None:
        self.ignored = LinePatterns([*BUILT_IN_PATTERNS, *volatile, *strip])
        self.stripped = LinePatterns(strip)
        self.strips_requests = bool(strip)  # Whether `strip_edit` may change anything

    def strip_edit(self, body: Body) -> Edit:
        """The edit that removes `stripped` lines from a body's system prompt; usually empty.

        They are searched in `system` and `instructions`, in the system messages at the beginning,
        and at the beginning of a plain `prompt`. Everything else keeps its bytes.
        """
        lines = self.stripped
        if not lines:
            return {}
        try:
            fields = raw_fields(body)
            edit: Edit = {}
            for name, strip in _STRIPPERS.items():
                if name in fields and len(fields[name]) <= MOST_FIELD_BYTES:
                    value = strip(fields[name], lines)
                    if value is not None:
                        edit[name] = value
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return {}
        return edit


def _strip_text(raw: msgspec.Raw, lines: LinePatterns) -> msgspec.Raw | None:
    """A string without the matching lines; None if it has none."""
    if bytes(memoryview(raw)[:1]) != b'"':
        return None
    text = msgspec.json.decode(raw)
    stripped = lines.remove_from(text)
    return None if stripped is text else as_raw(stripped)


def _strip_content(raw: msgspec.Raw, lines: LinePatterns) -> msgspec.Raw | None:
    """The same for a string or a list of parts; a part that becomes empty is dropped."""
    if bytes(memoryview(raw)[:1]) != b"[":
        return _strip_text(raw, lines)
    parts = ITEMS_DECODER.decode(raw)
    kept = []
    for part in parts:
        fields = FIELDS_DECODER.decode(part) if bytes(memoryview(part)[:1]) == b"{" else {}
        text = _strip_text(fields["text"], lines) if "text" in fields else None
        if text is None:
            kept.append(part)
        elif bytes(text) != b'""':
            kept.append(as_raw(fields | {"text": text}))
    if len(kept) == len(parts) and all(a is b for a, b in zip(kept, parts, strict=True)):
        return None
    return as_raw(kept)


def _strip_messages(raw: msgspec.Raw, lines: LinePatterns) -> msgspec.Raw | None:
    """The same for the system messages at the beginning; other messages stay."""
    if bytes(memoryview(raw)[:1]) != b"[":
        return None
    messages = ITEMS_DECODER.decode(raw)
    changed = False
    for i, message in enumerate(messages):
        fields = FIELDS_DECODER.decode(message)
        if bytes(fields.get("role", b"")) not in _RAW_SYSTEM_ROLES:
            break
        content = _strip_content(fields["content"], lines) if "content" in fields else None
        if content is not None:
            messages[i] = as_raw(fields | {"content": content})
            changed = True
    return as_raw(messages) if changed else None


_STRIPPERS = {
    "system": _strip_content,
    "instructions": _strip_text,
    "messages": _strip_messages,
    "input": _strip_messages,
    "prompt": _strip_text,
}
