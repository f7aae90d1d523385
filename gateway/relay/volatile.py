"""Lines of a system prompt that change with each request, and would void every prompt cache.

Some clients put such a line in front of all else. Claude Code's first system block is
`x-anthropic-billing-header: cc_version=2.1.88.a3f; cc_entrypoint=cli; cch=fa690;`. Its last number
changes with each request, the end of the version with each conversation; it is meant for
Anthropic's own service and says nothing to a model. (Newer llama.cpp servers blot out `cch` alone.)

Leaving a line out of the fingerprint keeps a conversation's place. Only taking it out of the
request as well lets the node's cache be of use, unless the server ignores it by itself.

Patterns are applied to one line each, from its start, and take the whole line. Which are fit, and
can't run long whatever the text, is for `config/line_patterns.py` to say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.config.line_patterns import LONGEST_LINE, plain_start, refusal
from gateway.relay.large import Body

BUILT_IN = ("x-anthropic-billing-header:",)
"""Never part of a fingerprint; taken out of requests only where the settings say so."""

HEAD = 16 * 1024
"""Characters of a system prompt in which lines are looked for."""
MOST_LINES = 16
"""Lines of one text that are looked at for one pattern."""

MOST_BYTES = 4 << 20
"""Of a field; in a longer one no lines are looked for."""

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_SYSTEM_ROLES = frozenset({b'"system"', b'"developer"'})


class Lines:
    """Patterns for lines, compiled. Raises ValueError, in words for people, for unfit ones."""

    __slots__ = ("_patterns",)

    def __init__(self, patterns: Sequence[str]) -> None:
        found: dict[str, tuple[str, re.Pattern[str]]] = {}
        for pattern in patterns:
            if (why := refusal(pattern)) is not None:
                raise ValueError(f"{pattern!r} {why}")
            found[pattern] = (plain_start(pattern), re.compile(pattern))
        self._patterns = tuple(found.values())

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def without(self, text: str) -> str:
        """`text` without the lines that match; itself if none does."""
        for plain, pattern in self._patterns:
            at = text.find(plain, 0, HEAD)
            for _ in range(MOST_LINES):
                if at < 0:
                    break
                end = text.find("\n", at) + 1 or len(text)
                starts = at == 0 or text[at - 1] == "\n"
                if starts and pattern.match(text[at : min(end, at + LONGEST_LINE)].rstrip("\r\n")):
                    text = text[:at] + text[end:]
                    at = text.find(plain, at, HEAD)
                else:
                    at = text.find(plain, end, HEAD)
        return text


class Volatile:
    """Which lines are left out of fingerprints, and which of those out of requests too.

    Raises ValueError, in words for people, for a pattern that is no fit.
    """

    __slots__ = ("left_out", "stripped", "strips")

    def __init__(self, volatile: Sequence[str] = (), strip: Sequence[str] = ()) -> None:
        self.left_out = Lines([*BUILT_IN, *volatile, *strip])
        self.stripped = Lines(strip)
        self.strips = bool(strip)
        """Whether `edit` may change anything."""

    def edit(self, body: Body) -> dict[str, Any]:
        """New values of the body's fields, as `edits.applied` takes them; mostly none.

        The system text loses its volatile lines: that of `system` and `instructions`, of the
        messages of the system that stand first, and the head of a plain `prompt`. Whatever of the
        body isn't touched keeps its bytes.
        """
        lines = self.stripped
        if not lines:
            return {}
        try:
            fields = _FIELDS.decode(body) if isinstance(body, bytes) else body.fields()
            found = {}
            for name, edited in _EDITORS.items():
                if name in fields and len(fields[name]) <= MOST_BYTES:
                    value = edited(fields[name], lines)
                    if value is not None:
                        found[name] = value
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return {}
        return found


def _text(raw: msgspec.Raw, lines: Lines) -> msgspec.Raw | None:
    """A string without its volatile lines; None: it has none."""
    if bytes(memoryview(raw)[:1]) != b'"':
        return None
    text = msgspec.json.decode(raw)
    left = lines.without(text)
    return None if left is text else msgspec.Raw(msgspec.json.encode(left))


def _content(raw: msgspec.Raw, lines: Lines) -> msgspec.Raw | None:
    """A string, or a list of parts: a part of which nothing is left goes as a whole."""
    if bytes(memoryview(raw)[:1]) != b"[":
        return _text(raw, lines)
    parts = _ITEMS.decode(raw)
    kept = []
    for part in parts:
        fields = _FIELDS.decode(part) if bytes(memoryview(part)[:1]) == b"{" else {}
        text = _text(fields["text"], lines) if "text" in fields else None
        if text is None:
            kept.append(part)
        elif bytes(text) != b'""':
            kept.append(_raw(fields | {"text": text}))
    if len(kept) == len(parts) and all(a is b for a, b in zip(kept, parts, strict=True)):
        return None
    return _raw(kept)


def _messages(raw: msgspec.Raw, lines: Lines) -> msgspec.Raw | None:
    """The messages of the system that stand first; the others stay as they are."""
    if bytes(memoryview(raw)[:1]) != b"[":
        return None
    messages = _ITEMS.decode(raw)
    changed = False
    for i, message in enumerate(messages):
        fields = _FIELDS.decode(message)
        if bytes(fields.get("role", b"")) not in _SYSTEM_ROLES:
            break
        content = _content(fields["content"], lines) if "content" in fields else None
        if content is not None:
            messages[i] = _raw(fields | {"content": content})
            changed = True
    return _raw(messages) if changed else None


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


_EDITORS = {
    "system": _content,
    "instructions": _text,
    "messages": _messages,
    "input": _messages,
    "prompt": _text,
}
