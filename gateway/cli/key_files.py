"""Files of keys for `llama-gateway keys import`: YAML and JSON as in the settings, or a table."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from gateway.callers.stored_keys import KeyProblem

LARGEST_TABLE = 16 << 20
"""Bytes."""

MOST_KEYS = 10_000
"""Keys of one file; the admin API takes no more at once."""

_LIMITS = (
    "rpm",
    "tpm",
    "tokens_per_day",
    "budget",
    "concurrency",
    "prompt_tokens",
    "completion_tokens",
)

_COUNTS = frozenset(_LIMITS) - {"budget"}

_COLUMNS = (
    "id",
    "sha256",
    "name",
    "class",
    "max_class",
    "models",
    "group",
    "expires",
    "trust_user_headers",
    *_LIMITS,
)

_YES = frozenset({"1", "true", "yes", "on"})

_NO = frozenset({"0", "false", "no", "off"})


class ListedKey(NamedTuple):
    """A key of a file, as it stands there."""

    fields: object
    """A mapping with the names of the settings, if it is right."""
    line: int


def read_key_file(file: Path) -> list[ListedKey]:
    """Read the keys of a file. Raises ConfigError."""
    listed = _table(file) if file.suffix.lower() == ".csv" else _list(file)
    if not 0 < len(listed) <= MOST_KEYS:
        problem = "holds no key" if not listed else f"holds {len(listed)} keys"
        raise ConfigError(
            [Problem(file, 0, "", problem, f"an import takes 1 to {MOST_KEYS} of them")]
        )
    return listed


def listed_problems(
    file: Path, listed: Sequence[ListedKey], problems: Sequence[KeyProblem]
) -> ConfigError:
    """Return the problems with the lines of the file."""
    return ConfigError(
        Problem(file, listed[one.index].line, one.key, one.message, one.remedy) for one in problems
    )


def _list(file: Path) -> list[ListedKey]:
    """Read the keys of a YAML or JSON file: a list, or a mapping with `keys`."""
    from gateway.config.yaml_file import YamlList, YamlMapping, read_yaml, to_plain

    source = read_yaml(file, os.environ)
    if source.problems:
        raise ConfigError(source.problems)
    tree = source.root.tree
    if isinstance(tree, YamlMapping) and "keys" in tree.entries:
        tree = tree.entries["keys"].tree
    if not isinstance(tree, YamlList):
        remedy = "write a list of keys as in the settings: [{id: ..., sha256: ..., name: ...}]"
        raise ConfigError([Problem(file, source.root.line, "", "must be a list", remedy)])
    return [ListedKey(to_plain(entry.tree), entry.line) for entry in tree.entries]


def _table(file: Path) -> list[ListedKey]:
    """Read the keys of a CSV file, whose first line names the columns."""
    text = _read(file)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    listed: list[ListedKey] = []
    problems: list[Problem] = []
    try:
        columns = [name.strip().lower() for name in next(reader, [])]
        unknown = [name for name in columns if name not in _COLUMNS]
        missing = [name for name in ("id", "sha256") if name not in columns]
        if unknown or missing or len(set(columns)) < len(columns):
            what = f"no column '{missing[0]}'" if missing else f"the columns {', '.join(columns)}"
            remedy = f"the first line names each column once, of {', '.join(_COLUMNS)}"
            raise ConfigError([Problem(file, 1, "", what, remedy)])
        for row in reader:
            line = reader.line_num
            if not any(cell.strip() for cell in row):
                continue
            if len(row) != len(columns):
                message = f"has {len(row)} cells, not {len(columns)}"
                problems.append(Problem(file, line, "", message, "quote cells that hold commas"))
                continue
            cells = dict(zip(columns, map(str.strip, row), strict=True))
            listed.append(ListedKey(_fields(cells), line))
    except csv.Error as error:
        problems.append(Problem(file, reader.line_num, "", f"is no CSV: {error}"))
    if problems:
        raise ConfigError(problems)
    return listed


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            raw = opened.read(LARGEST_TABLE + 1)
    except OSError as error:
        remedy = "check the path and its rights"
        raise ConfigError([Problem(file, 0, "", f"can't be read: {error.strerror}", remedy)]) from (
            None
        )
    if len(raw) > LARGEST_TABLE:
        raise ConfigError([Problem(file, 0, "", f"larger than {LARGEST_TABLE >> 20} MiB")])
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError([Problem(file, 0, "", "not UTF-8", "save the file as UTF-8")]) from None


def _fields(cells: dict[str, str]) -> dict[str, Any]:
    """The cells of a row as fields of a key; what is no number or list stays a text."""
    fields: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    for name, cell in cells.items():
        if not cell:
            continue
        if name in _LIMITS:
            is_count = name in _COUNTS and cell.removeprefix("-").isdecimal() and len(cell) < 20
            limits[name] = int(cell) if is_count else cell
        elif name == "models":
            fields[name] = [part.strip() for part in cell.replace(";", ",").split(",")]
        elif name == "trust_user_headers" and cell.lower() in _YES | _NO:
            fields[name] = cell.lower() in _YES
        else:
            fields[name] = cell
    return {**fields, "limits": limits} if limits else fields
