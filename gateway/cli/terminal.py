"""Output of the commands: tables, JSON, errors on stderr, and their help."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from gateway.config.errors import ConfigError, escape_json, single_line

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from rich.console import Console
    from rich.table import Table


PIPED_WIDTH = 10_000  # characters: a table in a pipe is not folded

STATE_COLOURS = {
    "ready": "green",
    **dict.fromkeys(("degraded", "starting", "loading", "mute"), "yellow"),
    **dict.fromkeys(("draining", "sleeping"), "cyan"),
    "standby": "bright_black",
    **dict.fromkeys(("ejected", "down"), "red"),
}


class CommandFailed(Exception):  # noqa: N818 - no error of the program
    """Ends the command with this message on stderr and `status`: 1 failed, 2 wrong usage."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class WrongUsage(CommandFailed):
    """Ends the command with status 2: what its user has written is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 2)


@contextmanager
def failing_by(*kinds: type[Exception], before: str = "", status: int = 1) -> Iterator[None]:
    """Report errors of these kinds as failures of the command, in their own words."""
    try:
        yield
    except kinds as error:
        raise CommandFailed(f"{before}{error}", status) from None


def run_interruptibly(
    work: Coroutine[Any, Any, None], loop_factory: Callable[[], AbstractEventLoop] | None = None
) -> int:
    """Run it; 0, or the exit status of a command that Ctrl-C (130) or SIGTERM (143) ends."""
    import asyncio
    import signal

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await work

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(run())
    except KeyboardInterrupt:
        return 130
    except asyncio.CancelledError:
        return 143
    return 0


def console(stream: TextIO | None = None) -> Console:
    """Return a console on stdout or `stream`: coloured on a terminal, plain elsewhere."""
    from rich.console import Console

    stream = stream or sys.stdout
    width = None if stream.isatty() else PIPED_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def print_error(message: str) -> None:
    """Print an error of one or several lines to stderr."""
    from rich.text import Text

    for line in message.splitlines() or [""]:
        console(sys.stderr).print(
            Text("error: ", style="bold red"), single_line(line), sep="", soft_wrap=True
        )


def print_config_error(error: ConfigError) -> None:
    """Print the problems of a file, and the lines that could stand in it, which can be copied."""
    print_error(str(error))
    for problem in error.problems:
        for line in problem.lines:
            print(line, file=sys.stderr)


def print_note(*messages: str) -> None:
    """Print notes to stderr, so that stdout holds the results alone."""
    for message in messages:
        # Not folded, so that a command in it can be copied.
        console(sys.stderr).print(single_line(message), soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value as JSON, without a character that a terminal would obey."""
    print(escape_json(json.dumps(value, indent=2, ensure_ascii=False, default=str)))


def print_answer(value: Any, text: str, *, as_json: bool) -> None:
    """Print what a command has done: this text, or the value as JSON."""
    if as_json:
        print_json(value)
    else:
        print(text)


def print_listing(
    value: Any,
    rows: Iterable[Sequence[tuple[str, object]]],
    nothing: str,
    *,
    as_json: bool,
    state_column: int | None = None,
) -> None:
    """Print a table, or a note if it has no row; or the value as JSON."""
    if as_json:
        print_json(value)
    elif listed := list(rows):
        print_rows(listed, state_column=state_column)
    else:
        print_note(nothing)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, state_column: int | None = None
) -> None:
    """Print a table; the states in column number `state_column` get their colours."""
    console().print(make_table(columns, rows, state_column=state_column))


def print_rows(
    rows: Iterable[Sequence[tuple[str, object]]], *, state_column: int | None = None
) -> None:
    """Print a table of rows whose cells come with the titles of their columns; no row: nothing."""
    if listed := list(rows):
        cells = ([cell for _, cell in row] for row in listed)
        print_table([title for title, _ in listed[0]], cells, state_column=state_column)


def make_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, state_column: int | None = None
) -> Table:
    """A table as `print_table` prints it."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        cells = [Text(format_cell(value)) for value in row]
        if state_column is not None:
            cells[state_column].stylize(STATE_COLOURS.get(cells[state_column].plain, ""))
        table.add_row(*cells)
    return table


def format_cell(value: object) -> str:
    """Format a value for a table; `-` for none."""
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, list | tuple):
        return ", ".join(format_cell(item) for item in value) or "-"
    return single_line(str(value))


def caller_text(row: Mapping[str, object]) -> str:
    """Who sent a request: the key's name and id, else what stands for a caller without a key."""
    caller, name = format_cell(row.get("caller")), row.get("caller_name")
    return caller if name in {None, row.get("caller")} else f"{format_cell(name)} ({caller})"


def state_in_words(node: Mapping[str, object]) -> str:
    """The state of a node, with the share of its load that is done."""
    progress, state = node.get("progress"), format_cell(node.get("state"))
    return f"{state} {progress:.0%}" if isinstance(progress, int | float) else state


MOST_WIDTH = 100  # columns; longer lines are hard to read
LEAST_WIDTH = 20
TWO_COLUMN_WIDTH = 70  # from this width on an option's help stands beside it, and not below
OPTION_COLUMN_WIDTH = 30  # columns for the options then; a longer option has a line of its own
# The error of a wrong command line, in the click that typer uses.
UsageError: Any = typer.BadParameter.__base__


def _format_help(command: Any, ctx: Any, formatter: Any) -> None:
    formatter.write("\n".join(_help(command, ctx)))


class HelpCommand(TyperCommand):
    """A command with the help of this module."""

    format_help = _format_help


class HelpGroup(TyperGroup):
    """A group of commands with the help of this module."""

    format_help = _format_help


def usage_message(error: Exception) -> str | None:
    """Return what is wrong with a command line; None where help was shown instead."""
    assert isinstance(error, UsageError)
    if type(error).__name__ == "NoArgsIsHelpError":
        return None
    message = str(error.format_message())
    if found := _INVALID.fullmatch(message):
        problem = found["problem"].removeprefix("Value error, ").replace("Input should", "must")
        message = f"{found['option']}: {problem}"
    else:
        message = message[:1].lower() + message[1:]
    path = error.ctx.command_path if error.ctx else "llama-gateway"
    return f"{message.rstrip('.')} (see {path} --help)"


_INVALID = re.compile(
    r"Invalid value for '?(?P<option>.+?)'?(?: \(env var: .+?\))?: (?P<problem>.+)", re.DOTALL
)


def _help(command: Any, ctx: Any) -> Iterator[str]:
    width = max(LEAST_WIDTH, min(MOST_WIDTH, shutil.get_terminal_size().columns))
    pieces = (ctx.command_path, *command.collect_usage_pieces(ctx))
    yield from _wrapped(f"Usage: {' '.join(pieces)}", width, indent="  ", first="")
    for paragraph in cleandoc(command.help or "").split("\n\n"):
        yield ""
        yield from _wrapped(paragraph, width)
    for title, records in _sections(command, ctx).items():
        yield ""
        yield f"{title}:"
        yield from _records(records, width)
    if command.epilog:
        yield ""
        yield from command.epilog.splitlines()
    yield ""


def _sections(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Return arguments, options by panel, and commands, each with its help."""
    found: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None:
            default = "Arguments" if param.param_type_name == "argument" else "Options"
            title = getattr(param, "rich_help_panel", None) or default
            # Leave out the type that follows an argument: its name says enough.
            name = record[0].partition(" <")[0]
            found.setdefault(title, []).append((name, _plain_default(record[1])))
    if isinstance(command, HelpGroup):
        for name in command.list_commands(ctx):
            below = command.get_command(ctx, name)
            if below is not None and not below.hidden:
                first = cleandoc(below.help or "").partition("\n\n")[0]
                found.setdefault("Commands", []).append((name, first))
    return found


def _plain_default(text: str) -> str:
    """Remove the brackets around a default, and write ranges in words."""
    text = re.sub(r"default: \((.+?)\)(?=[;\]])", r"default: \1", text)
    text = re.sub(r"(-?[\d.]+)<=x<=(-?[\d.]+)", r"\1 to \2", text)
    return re.sub(r"x>=(-?[\d.]+)", r"at least \1", text)


def _records(records: list[tuple[str, str]], width: int) -> Iterator[str]:
    beside = width >= TWO_COLUMN_WIDTH
    left = min(OPTION_COLUMN_WIDTH, max(len(name) for name, _ in records) + 4) if beside else 6
    for name, text in records:
        lines = list(_wrapped(text, width, indent=" " * left))
        if beside and len(name) + 4 <= left:
            yield f"  {name}".ljust(left) + (lines[0].lstrip() if lines else "")
            lines = lines[1:]
        else:
            yield f"  {name}"
        yield from lines


def _wrapped(text: str, width: int, *, indent: str = "", first: str | None = None) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
