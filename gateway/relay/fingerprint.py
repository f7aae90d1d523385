"""A prompt as chained blocks: equal numbers at equal places mean prompts that begin alike.

What counts is what a chat template makes of a body, in its order: the model, the tools, the
system's part, then the messages. It is taken from the values, so that escapes, white space, the
order of keys and marks such as `cache_control` make no difference, and a message's text counts the
same as a string and as a part. Tools and the arguments of their calls are the client's own bytes.

Each message begins a new block. So a turn's prompt ends where a block ends, the next turn's blocks
begin with all of its blocks, and nothing has to be known of what stands between them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import msgspec

from gateway.fleet.prefixes import Prompt
from gateway.relay.large import Large
from gateway.relay.peek import NOTHING
from gateway.relay.routes import Route
from gateway.relay.volatile import Volatile

BLOCK = 512
"""Bytes; about 128 tokens, which a slow CPU node reads in a few seconds."""
SHORTEST = 256
"""Bytes of a body below which no cache is worth thinking of."""
MOST_BLOCKS = 4096
"""Of one prompt; what stands behind them is measured only."""
BYTES_PER_TOKEN = 4
STEP = 512
"""Messages that are looked at in one step."""
IMAGE = 576 * BYTES_PER_TOKEN
"""Bytes that a picture or a sound counts as: LLaVA's 576 tokens lie amidst of what models make of
a picture (256 to some thousands)."""


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None
    # What of other parts goes into a template: tools that were used, what they gave, thoughts.
    name: msgspec.Raw = NOTHING
    input: msgspec.Raw = NOTHING
    content: msgspec.Raw = NOTHING
    thinking: msgspec.Raw = NOTHING
    image_url: msgspec.Raw = NOTHING
    source: msgspec.Raw = NOTHING
    input_audio: msgspec.Raw = NOTHING
    file: msgspec.Raw = NOTHING


class _Message(msgspec.Struct):
    role: str = ""
    type: str = ""
    content: str | list[_Part] | None = None
    tool_calls: msgspec.Raw = NOTHING
    name: msgspec.Raw = NOTHING
    arguments: msgspec.Raw = NOTHING
    output: msgspec.Raw = NOTHING


class _Chat(msgspec.Struct):
    tools: msgspec.Raw = NOTHING
    system: str | list[_Part] | None = None
    instructions: str | None = None
    messages: list[_Message] = []
    input: str | list[_Message] | None = None


class _Plain(msgspec.Struct):
    prompt: msgspec.Raw = NOTHING


class _Infill(msgspec.Struct):
    input_extra: msgspec.Raw = NOTHING
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
_CHATS = frozenset({"messages", "input"})

LeaveOut = Callable[[str], str]


def fingerprint(body: bytes, route: Route, model: str, volatile: Volatile) -> Prompt | None:
    """The prompt's blocks, and its size in bytes of text.

    None: it isn't worth it, the path has no use for a prompt cache, or the body holds several
    prompts or something that isn't understood.
    """
    if len(body) < SHORTEST or not route.streams:
        return None
    chain = _Chain(model)
    leave_out = _leaving_out(chain, volatile)
    try:
        if route.prompt in _CHATS:
            _chat(chain, _CHAT.decode(body), leave_out)
        elif route.prompt == "prompt":
            if not _plain(chain, _PLAIN.decode(body).prompt, leave_out):
                return None
        elif route.prompt == "input_prefix":
            _infill(chain, _INFILL.decode(body))
        else:
            return None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return chain.prompt()


def fingerprint_large(
    body: Large, route: Route, model: str, volatile: Volatile
) -> Generator[None, None, Prompt | None]:
    """The same of a large body, a step at a time: of its beginning; the rest is measured only."""
    if not route.streams:
        return None
    chain = _Chain(model)
    leave_out = _leaving_out(chain, volatile)
    try:
        if route.prompt in _CHATS:
            yield from _large_chat(chain, body, leave_out)
        elif route.prompt == "prompt":
            if body.ids("prompt"):
                chain.add_open(body.opening("prompt")[1:-1].strip())
                chain.size = max(chain.size, 1)
                chain.scale(BYTES_PER_TOKEN * body.ids("prompt"))
            elif body.count_prompts() > 1 or not _plain(chain, _raw(body, "prompt"), leave_out):
                return None
            else:
                chain.size += body.rest("prompt")
        elif route.prompt == "input_prefix":
            if extra := body.opening("input_extra"):
                chain.add(extra)
            chain.add_open(_TEXT.decode(body.opening("input_prefix") or b'""').encode())
            chain.size += sum(map(body.rest, ("input_extra", "input_prefix")))
            chain.size += body.length("input_suffix") + body.length("prompt")
        else:
            return None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return chain.prompt()


def _raw(body: Large, name: str) -> msgspec.Raw:
    return msgspec.Raw(body.opening(name))


def _large_chat(chain: _Chain, body: Large, leave_out: LeaveOut) -> Generator[None, None, None]:
    if tools := body.opening("tools"):
        chain.add(tools)
    for name in ("system", "instructions"):
        if not chain.full and (text := body.opening(name)):
            system = _SYSTEM_TEXT.decode(text)
            if system:
                _add_message(chain, _Message("system", content=system), leave_out)
            yield
    name = "input" if body.has(("input",)) else "messages"
    said = body.opening(name)
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
        if number % STEP == STEP - 1:
            yield
    chain.size += sum(map(body.rest, ("tools", "system", "instructions", name)))


def _leaving_out(chain: _Chain, volatile: Volatile) -> LeaveOut:
    def leave_out(text: str) -> str:
        seen = volatile.stripped.without(text)
        left = volatile.left_out.without(seen)
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
        if weight is None and len(data) > BLOCK:
            full = min(len(data), room * BLOCK)
            for at in range(0, full, BLOCK):
                part = data[at : at + BLOCK]
                self._close(part, len(part))
            self.size += len(data) - full
        elif room:
            self._close(data, len(data) if weight is None else weight)
        else:
            self.size += len(data) if weight is None else weight

    def add_open(self, data: bytes) -> None:
        """A part that may go on in another prompt: only its full blocks count."""
        full = min(len(data) // BLOCK, MOST_BLOCKS - len(self.blocks)) * BLOCK
        for at in range(0, full, BLOCK):
            self._close(data[at : at + BLOCK], BLOCK)
        self.size += len(data) - full

    @property
    def full(self) -> bool:
        """Whether there is no room for another block."""
        return len(self.blocks) >= MOST_BLOCKS

    def prompt(self) -> Prompt | None:
        """All of it; None: there is nothing, or blocks without a single letter."""
        if not (self.blocks and self.size):
            return None
        return Prompt(
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


def _chat(chain: _Chain, chat: _Chat, leave_out: LeaveOut) -> None:
    if chat.tools is not NOTHING:
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


def _add_message(chain: _Chain, message: _Message, leave_out: LeaveOut | None) -> None:
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
        if raw is not NOTHING:
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
        if raw is not NOTHING:
            chain.add(bytes(raw))
    for raw in (part.image_url, part.source, part.input_audio, part.file):
        if raw is not NOTHING:
            chain.add(bytes(raw), IMAGE)
    if part.content is not NOTHING:
        data = bytes(part.content)
        chain.add(data, IMAGE if b'"base64"' in data else None)


def _plain(chain: _Chain, raw: msgspec.Raw, leave_out: LeaveOut) -> bool:
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


def _infill(chain: _Chain, infill: _Infill) -> None:
    """The other files, then what stands in front of the cursor; all else follows a changing end."""
    if infill.input_extra is not NOTHING:
        chain.add(bytes(infill.input_extra))
    chain.add_open(infill.input_prefix.encode())
    chain.size += len(infill.input_suffix) + len(infill.prompt)
