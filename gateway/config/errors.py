"""Problems of configuration files: each names the file, the line, the key and the remedy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Problems that an error lists; it counts the others.
MOST_LISTED = 50

# Characters of one part of a problem.
LONGEST_PART = 400


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: its place, what is wrong, and the remedy.

    `line` and `column` count from 1; `line` 0 means the file as a whole. `key` is the path of
    the key, such as `nodes[2].timeouts.connect`, and empty where no key is to blame.
    """

    file: Path
    line: int
    key: str
    message: str
    remedy: str = ""
    column: int = 0
    lines: tuple[str, ...] = ()
    """Lines that could stand in place of what is wrong."""

    def __str__(self) -> str:
        """One line: `file:line: key: message (remedy)`."""
        place = str(self.file)
        if self.line:
            place += f":{self.line}"
            if self.column:
                place += f":{self.column}"
        parts = [single_line(part) for part in (place, self.key, self.message) if part]
        remedy = f" ({single_line(self.remedy)})" if self.remedy else ""
        return ": ".join(parts) + remedy


class ConfigError(Exception):
    """A configuration file that can't be used, with every problem found in it."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: Sequence[Problem] = tuple(problems)
        super().__init__(*self.problems)

    def __str__(self) -> str:
        """One line for each problem."""
        lines = [str(problem) for problem in self.problems[:MOST_LISTED]]
        if len(self.problems) > MOST_LISTED:
            lines.append(f"... and {len(self.problems) - MOST_LISTED} more")
        return "\n".join(lines)


def single_line(text: str) -> str:
    """Make any text one printable line of bounded length."""
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text[:LONGEST_PART]
    )
    return shown if len(text) <= LONGEST_PART else shown + "..."


def escape_json(text: str) -> str:
    """The JSON in `text`, with escapes for characters that a terminal would obey or hide."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text
    )


_FORMULA_STARTS = tuple("=+-@\t\r\n＝＋－＠")  # noqa: RUF001 - some read the wide ones, too


def safe_cell(text: str) -> str:
    """A cell that no spreadsheet takes for a formula: clients and models choose what is in it."""
    return f"'{text}" if text.lstrip(" ").startswith(_FORMULA_STARTS) else text
