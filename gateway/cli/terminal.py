"""What commands write: words for people, tables that stay whole when piped, errors to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 10_000
"""Characters: a table in a pipe is not folded to some terminal's width."""

COLOURS = {
    "ready": "green",
    "degraded": "yellow",
    "starting": "yellow",
    "loading": "yellow",
    "mute": "yellow",
    "draining": "cyan",
    "standby": "bright_black",
    "ejected": "red",
    "down": "red",
}


class CommandFailed(Exception):  # noqa: N818 - what it tells is not the program's error
    """The command ends with this message on stderr; `status` 1: could not, 2: wrong usage."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def console(stream: TextIO | None = None) -> Console:
    """A console on stdout, or on `stream`: coloured on a terminal and plain elsewhere."""
    from rich.console import Console

    stream = stream or sys.stdout
    width = None if stream.isatty() else PIPED_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def complain(message: str) -> None:
    """Tell on stderr what is wrong, a line or several."""
    from rich.text import Text

    from gateway.config.problems import printable

    for line in message.splitlines() or [""]:
        console(sys.stderr).print(
            Text("error: ", style="bold red"), printable(line), sep="", soft_wrap=True
        )


def note(message: str) -> None:
    """Tell on stderr what is worth knowing, so that stdout stays what was asked for."""
    from gateway.config.problems import printable

    # Not folded here: a command is copied from a terminal in one piece.
    console(sys.stderr).print(printable(message), soft_wrap=True)


def put_json(value: Any) -> None:
    """Write a value for a script."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def put_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, state: int) -> None:
    """Write a table; the column number `state` holds states, which get their colours."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        cells = [Text(cell(value)) for value in row]
        cells[state].stylize(COLOURS.get(cells[state].plain, ""))
        table.add_row(*cells)
    console().print(table)


def cell(value: object) -> str:
    """A value as a table shows it; `-` for none."""
    from gateway.config.problems import printable

    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, list | tuple):
        return ", ".join(cell(item) for item in value) or "-"
    return printable(str(value))
