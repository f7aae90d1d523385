"""Reads `groups.toml`: which tests `make test` runs, which group has the others, and what code
each group is for.

`make test` runs all tests that are neither slow nor need real parts, and those marked `smoke`.
Every other test belongs to one group: the first one of the table that claims it.
"""

from __future__ import annotations

import shlex
import sys
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from tests.ci.change import Change

TABLE = Path(__file__).with_name("groups.toml")


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tests that run together: `make test-all ARGS=NAME`."""

    about: str
    seconds: int
    """How long it takes on two quiet cores."""
    files: tuple[str, ...] = ()
    """Beginnings of paths; all tests there are the group's, fast ones too."""
    tests: tuple[str, ...] = ()
    """Beginnings of paths; the tests there that are slow or need real parts are the group's."""
    marks: tuple[str, ...] = ()
    """Tests with one of these marks are the group's, wherever they are."""
    options: tuple[str, ...] = ("",)
    """Its tests run once with each of these options of pytest."""
    commands: tuple[str, ...] = ()
    """What runs instead of tests, or after them."""
    is_apart: bool = False
    """Whether it runs only if it is named: it takes hours."""
    is_second: bool = False
    """Whether it runs tests of other groups a second time, in another way."""
    name: str = ""
    """Its key in the table."""

    @property
    def has_tests(self) -> bool:
        """Whether pytest runs it."""
        return bool(self.options) and bool(self.files or self.tests or self.marks)

    def claims(self, path: str, marks: Collection[str], *, is_fast: bool) -> bool:
        """Whether a test is the group's, by its file, its marks, and whether it is fast."""
        if self.owns(path) or any(mark in marks for mark in self.marks):
            return True
        return not is_fast and path.startswith(self.tests)

    def owns(self, path: str) -> bool:
        """Whether all tests of a file are the group's."""
        return path.startswith(self.files)


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole table."""

    groups: Mapping[str, Group]
    code: Mapping[str, tuple[str, ...]]
    """Beginning of a path -> names of the groups that test the code there."""

    def group_of(self, path: str, marks: Collection[str], *, is_fast: bool) -> Group | None:
        """Return the group that a test belongs to; None: a fast test of `make test`."""
        found = (
            group
            for group in self.groups.values()
            if not group.is_second and group.claims(path, marks, is_fast=is_fast)
        )
        return next(found, None)

    def touched(self, changed: Change) -> list[Group]:
        """Return the groups that a change touches, the one with most changed lines first."""
        lines: Counter[str] = Counter()
        for path, numbers in changed.items():
            for name in self.groups_of_code(path):
                lines[name] += max(1, len(numbers))
        return [self.groups[name] for name, _ in lines.most_common()]

    def groups_of_code(self, path: str) -> set[str]:
        """Return the names of the groups to run when a file changes."""
        own = {
            name
            for name, group in self.groups.items()
            if path.startswith(group.files + group.tests) and not group.is_apart
        }
        longest = max(
            (begin for begin in self.code if path.startswith(begin)), key=len, default=None
        )
        return own | set(self.code[longest] if longest is not None else ())

    def named(self, names: Iterable[str]) -> list[Group]:
        """Return groups by their names. Raises: KeyError with the unknown name."""
        return [self.groups[name] for name in names]


def read_table(path: Path = TABLE) -> Table:
    """Read the table. Raises: ValueError with what is wrong in it."""
    data = tomllib.loads(path.read_text())
    for name, group in data["groups"].items():
        group["name"] = name
    table = msgspec.convert(data, Table)
    if unknown := {name for names in table.code.values() for name in names} - set(table.groups):
        raise ValueError(f"{path}: no group is called {', '.join(sorted(unknown))}")
    return table


def runs_of(group: Group) -> list[list[str]]:
    """Return the options of pytest for each run of a group's tests, the places behind them."""
    if not group.has_tests:
        return []
    # With marks the tests may be anywhere.
    places = ["tests"] if group.marks else [*group.files, *group.tests]
    return [["--group", group.name, *shlex.split(one), *places] for one in group.options]


def commands_of(group: Group) -> list[list[str]]:
    """Return the commands of a group."""
    commands = [shlex.split(command) for command in group.commands]
    return [
        [sys.executable if program == "python" else program, *words] for program, *words in commands
    ]
