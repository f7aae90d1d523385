"""What is wrong with a configuration file, told so that it can be put right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# More problems than this are counted, not listed: nobody reads them, and a log line has an end.
_LISTED = 50

_CLIPPED = 400


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: where it is, what is wrong, and what to do about it.

    `line` and `column` count from 1; `line` 0 means the file as a whole. `key` is the path of
    the key, such as `nodes[2].timeouts.connect`, and empty where no key is to blame.
    """

    file: Path
    line: int
    key: str
    message: str
    remedy: str = ""
    column: int = 0

    def __str__(self) -> str:
        """One line: `file:line: key: message (remedy)`."""
        place = str(self.file)
        if self.line:
            place += f":{self.line}"
            if self.column:
                place += f":{self.column}"
        told = [single_line(part) for part in (place, self.key, self.message) if part]
        remedy = f" ({single_line(self.remedy)})" if self.remedy else ""
        return ": ".join(told) + remedy


class ConfigError(Exception):
    """A configuration file that can't be used, with every problem found in it."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: Sequence[Problem] = tuple(problems)
        super().__init__(*self.problems)

    def __str__(self) -> str:
        """One line for each problem."""
        lines = [str(problem) for problem in self.problems[:_LISTED]]
        if len(self.problems) > _LISTED:
            lines.append(f"... and {len(self.problems) - _LISTED} more")
        return "\n".join(lines)


def single_line(text: str) -> str:
    """Keep a text to one line of bounded length, whatever a file put into it."""
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text[:_CLIPPED]
    )
    return shown if len(text) <= _CLIPPED else shown + "..."
