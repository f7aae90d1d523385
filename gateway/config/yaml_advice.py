"""What to do about a line that YAML can't read: most often it is indented wrongly."""

from __future__ import annotations

import re
from collections.abc import Sequence

_KEY = re.compile(r"^(?P<indent> *(?:- +)*)(?P<key>[A-Za-z_][\w.-]*) *:(?: |$)")
_NO_SPACE = re.compile(r"^ *(?:- +)*(?P<key>[A-Za-z_][\w.-]*):\S")
# The words of libyaml and of the parser in Python.
_STRUCTURE = ("expected '-' indicator", "expected key", "expected <block end>", "mapping values")

QUOTE = "quote a value that holds ': ', ' #', '{' or '['"


def advice(problem: str, lines: Sequence[str], line: int, began: int) -> tuple[int, str]:
    """The line to blame, counted from 1, and what to do there.

    `problem`: the parser's words; `line`: where it stopped; `began`: where what it was reading
    began; 0: it does not say.
    """
    here = _at(lines, line)
    if "\t" in here[: len(here) - len(here.lstrip())]:
        return line, "indent with spaces, not with tabs"
    if "expected ':'" in problem and (found := _NO_SPACE.match(_at(lines, began))):
        return began, f"put a space after {found['key']}:"
    key = _KEY.match(here)
    plain = key is not None and "-" not in key["indent"] and ": " not in here[key.end() :]
    if key and plain and any(words in problem for words in _STRUCTURE):
        above = _key_above(lines, line)
        if above is not None and above[1] != len(key["indent"]):
            name, column = above
            return line, f"indent {key['key']} by {column} spaces, as {name} above it; or {QUOTE}"
    return line, QUOTE


def _at(lines: Sequence[str], line: int) -> str:
    return lines[line - 1] if 0 < line <= len(lines) else ""


def _key_above(lines: Sequence[str], line: int) -> tuple[str, int] | None:
    """The nearest key above a line, with the columns before it; None: it may hold this line."""
    for text in reversed(lines[: line - 1]):
        if (found := _KEY.match(text)) and text[found.end() :].strip():
            return found["key"], len(found["indent"])
        if text.strip() and not text.lstrip().startswith("#"):
            return None
    return None
