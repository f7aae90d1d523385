"""How the commands explain themselves: plain text that nothing is cut from, at any width."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator
from inspect import cleandoc
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

WIDEST = 100
"""Columns; longer lines are hard to read."""
NARROWEST = 20
SIDE_BY_SIDE = 70
"""From so many columns on, what an option does stands beside it and not below it."""
BESIDE = 30
"""Columns for the options then; a longer one has a line of its own."""

UsageError: Any = typer.BadParameter.__base__
"""What a command line that is wrong raises, whichever click typer brings."""


class Command(TyperCommand):
    """A command with this help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write("\n".join(_help(self, ctx)))


class Group(TyperGroup):
    """A command that has commands below it, with this help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write("\n".join(_help(self, ctx)))


def usage(error: Exception) -> str | None:
    """What is wrong with a command line, and where to look; None: nothing, only help was wanted."""
    assert isinstance(error, UsageError)
    message = str(error.format_message())
    if type(error).__name__ == "NoArgsIsHelpError":
        return None
    if found := _INVALID.fullmatch(message):
        why = found["why"].removeprefix("Value error, ").replace("Input should", "must")
        message = f"{found['option']}: {why}"
    else:
        message = message[:1].lower() + message[1:]
    path = error.ctx.command_path if error.ctx else "llama-gateway"
    return f"{message.rstrip('.')} (see {path} --help)"


_INVALID = re.compile(
    r"Invalid value for '?(?P<option>.+?)'?(?: \(env var: .+?\))?: (?P<why>.+)", re.DOTALL
)


def _help(command: Any, ctx: Any) -> Iterator[str]:
    width = max(NARROWEST, min(WIDEST, shutil.get_terminal_size().columns))
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
    """Arguments, options by their panels, and commands: what to write, and what it does."""
    found: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None:
            usual = "Arguments" if param.param_type_name == "argument" else "Options"
            title = getattr(param, "rich_help_panel", None) or usual
            # An argument is followed by its type, which its own word says already.
            name = record[0].partition(" <")[0]
            found.setdefault(title, []).append((name, _in_words(record[1])))
    if isinstance(command, Group):
        for name in command.list_commands(ctx):
            below = command.get_command(ctx, name)
            if below is not None and not below.hidden:
                first = cleandoc(below.help or "").partition("\n\n")[0]
                found.setdefault("Commands", []).append((name, first))
    return found


def _in_words(text: str) -> str:
    """A default without the brackets around words, and a range as people write it."""
    text = re.sub(r"default: \((.+?)\)(?=[;\]])", r"default: \1", text)
    text = re.sub(r"(-?[\d.]+)<=x<=(-?[\d.]+)", r"\1 to \2", text)
    return re.sub(r"x>=(-?[\d.]+)", r"at least \1", text)


def _records(records: list[tuple[str, str]], width: int) -> Iterator[str]:
    beside = width >= SIDE_BY_SIDE
    left = min(BESIDE, max(len(name) for name, _ in records) + 4) if beside else 6
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
