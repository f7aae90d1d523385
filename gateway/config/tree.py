"""What a YAML file holds, with the line of every key and item."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# A longer run of digits is a checksum or an id, not a number.
_LONGEST_NUMBER = 40

_INT = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]{1,4})?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: Mapping[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value. `text` is what a variable held where its value was typed."""

    value: Value
    text: str | None = None
    size: int = 1
    depth: int = 1


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    entries: tuple[Entry, ...]
    size: int
    depth: int


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping; its keys are texts, whatever they look like."""

    entries: Mapping[str, Entry]
    size: int
    depth: int


Tree = Scalar | Items | Table


@dataclass(frozen=True, slots=True)
class Entry:
    """A value in its place: the line of its key or item, and its path, `nodes[2].timeouts`."""

    tree: Tree
    line: int
    key: str


def table(entries: Mapping[str, Entry]) -> Table:
    """Build a mapping from entries that may come from several places."""
    return Table(entries, *_measure(entry.tree for entry in entries.values()))


def items(entries: Iterable[Entry]) -> Items:
    """Build a list."""
    kept = tuple(entries)
    return Items(kept, *_measure(entry.tree for entry in kept))


def plain(tree: Tree) -> object:
    """Turn a tree into plain values."""
    match tree:
        case Scalar(value=value):
            return value
        case Items(entries=entries):
            return [plain(item.tree) for item in entries]
        case Table(entries=entries):
            return {key: plain(entry.tree) for key, entry in entries.items()}


def typed(text: str) -> Value:
    """Type a plain scalar as the core schema of YAML 1.2 does."""
    if len(text) > _LONGEST_NUMBER:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in {"0x", "0o"} else int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def _measure(trees: Iterable[Tree]) -> tuple[int, int]:
    size, depth = 1, 0
    for tree in trees:
        size += tree.size
        depth = max(depth, tree.depth)
    return size, depth + 1
