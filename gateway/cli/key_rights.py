"""What a key may do: the flags that say it, the changes that they make, and files of keys."""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from gateway.cli.options import FlagGroup
from gateway.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from gateway.callers.stored_keys import KeyProblem


LIMITS_PANEL = "Limits"
USERS_PANEL = "End users that it names (with --trust-user-headers)"
CACHE_PANEL = "Prompt caches and privacy (unset: as its group)"
TRUST_HELP = "Its holder may name its end users by header (see identity.user_headers)."
ALL_NODES = "all"  # of `--cache-nodes`: the key is kept to no pool, whatever its group says


class PriorityChoice(enum.StrEnum):
    """The classes, highest first."""

    URGENT = "urgent"
    PREMIUM = "premium"
    NORMAL = "normal"
    BATCH = "batch"


class IsolateChoice(enum.StrEnum):
    """Whose prompts may draw a request to a node."""

    GROUP = "group"
    KEY = "key"
    OFF = "off"


_CLASSES = "|".join(PriorityChoice)


def checked_name(value: str | None) -> str | None:
    """Return the name. Raises BadParameter."""
    if value is not None and (not value.strip() or value != value.strip() or len(value) > 256):
        raise typer.BadParameter("1 to 256 characters, without white space around them")
    return value


def _checked_budget(value: str | None) -> str | None:
    if value is not None:
        from gateway.config.keys import parse_budget

        try:
            parse_budget(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return value


def _checked_expiry(value: str | None) -> str | None:
    """Return the time in the form of the settings."""
    if value is None:
        return None
    from gateway.callers.key_desk import expiry, iso_time

    try:
        at = expiry(value, time.time()).timestamp()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if at <= time.time():
        raise typer.BadParameter("is over; give a later time")
    return iso_time(at)


def _limit(flag: str, text: str, panel: str = LIMITS_PANEL) -> Any:
    return typer.Option(None, flag, min=1, metavar="N", help=text, rich_help_panel=panel)


def _budget(flag: str, text: str, panel: str = LIMITS_PANEL) -> Any:
    return typer.Option(
        None,
        flag,
        metavar="AMOUNT/month|day",
        callback=_checked_budget,
        help=text,
        rich_help_panel=panel,
    )


NewName = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        callback=checked_name,
        show_default="its id",
        help="Who uses it; unique. Logs, metrics and the ledger show it.",
    ),
]


class RightFlags(FlagGroup):
    """The flags that say what a key may do; those that are not given leave it as it is."""

    default_class: PriorityChoice | None = typer.Option(
        None,
        "--class",
        metavar=_CLASSES,
        help="The class of its requests that name none; unset: normal.",
    )
    max_class: PriorityChoice | None = typer.Option(
        None, metavar=_CLASSES, help="The highest class it gets; unset: its --class."
    )
    model: list[str] | None = typer.Option(
        None, metavar="NAME", help="A model that it may use; repeat it for more. Unset: all."
    )
    models: str | None = typer.Option(
        None, metavar="A,B", help="Models that it may use, in one list."
    )
    group: str | None = typer.Option(
        None, metavar="GROUP", help="The group whose limits it shares."
    )
    expires: str | None = typer.Option(
        None,
        metavar="TIME",
        callback=_checked_expiry,
        help="When it ends: in 90d or 12h, or on 2027-01-31. Unset: never.",
    )
    rpm: int | None = _limit("--rpm", "Requests within any 60 seconds.")
    tpm: int | None = _limit("--tpm", "Tokens within any 60 seconds.")
    tokens_per_day: int | None = _limit("--tokens-per-day", "Tokens in a day (UTC).")
    budget: str | None = _budget(
        "--budget", "Money a month or day, in the currency of the nodes' costs."
    )
    concurrency: int | None = _limit("--concurrency", "Requests at one time.")
    prompt_tokens: int | None = _limit("--prompt-tokens", "Largest prompt, in tokens.")
    completion_tokens: int | None = _limit("--completion-tokens", "Most tokens of one answer.")
    trust_user_headers: bool | None = typer.Option(
        None,
        "--trust-user-headers/--no-trust-user-headers",
        help=TRUST_HELP,
        rich_help_panel=USERS_PANEL,
    )
    user_rpm: int | None = _limit(
        "--user-rpm", "Requests of each within any 60 seconds.", USERS_PANEL
    )
    user_tpm: int | None = _limit(
        "--user-tpm", "Tokens of each within any 60 seconds.", USERS_PANEL
    )
    user_tokens_per_day: int | None = _limit(
        "--user-tokens-per-day", "Tokens of each in a day.", USERS_PANEL
    )
    user_budget: str | None = _budget("--user-budget", "Money of each a month or day.", USERS_PANEL)
    user_concurrency: int | None = _limit(
        "--user-concurrency", "Requests of each at one time.", USERS_PANEL
    )
    cache_hide: bool | None = typer.Option(
        None,
        "--cache-hide/--no-cache-hide",
        help="Take the figures that tell what was cached out of its responses.",
        rich_help_panel=CACHE_PANEL,
    )
    cache_isolate: IsolateChoice | None = typer.Option(
        None,
        metavar="|".join(IsolateChoice),
        help="Whose prompts may draw its requests to the node that has them cached.",
        rich_help_panel=CACHE_PANEL,
    )
    cache_nodes: str | None = typer.Option(
        None,
        metavar="LABEL=VALUE,...",
        help=f"Labels of the nodes that it may use, and no other; {ALL_NODES}: every node.",
        rich_help_panel=CACHE_PANEL,
    )
    prompt_cache: bool | None = typer.Option(
        None,
        "--prompt-cache/--no-prompt-cache",
        help="Whether nodes may serve its prompts from their caches; without, each is read anew.",
        rich_help_panel=CACHE_PANEL,
    )

    def fields(self) -> dict[str, Any]:
        """Return the fields of a key that these flags set. Raises BadParameter."""
        flags = {
            **vars(self),
            "class": self.default_class,
            "models": listed_models(self.model, self.models),
            "cache_nodes": node_labels(self.cache_nodes),
        }
        own = ("class", "max_class", "models", "trust_user_headers", "group", "expires")
        fields = {name: flags[name] for name in own}
        for group in ("limits", "user_limits", "cache"):
            paths = {name: path for name, path in FIELDS.items() if path[0] == group and path[1:]}
            fields[group] = {path[1]: flags[name] for name, path in paths.items()}
        return given(fields)


class NewRightFlags(RightFlags):
    """Those of a new key, whose holder names nobody unless a flag says so."""

    trust_user_headers: bool | None = typer.Option(
        None, "--trust-user-headers", help=TRUST_HELP, rich_help_panel=USERS_PANEL
    )


def listed_models(repeated: list[str] | None, listed: str | None) -> list[str] | None:
    """Return the models of both flags. Raises BadParameter."""
    names = [*(repeated or ()), *(listed.split(",") if listed is not None else ())]
    found = list(dict.fromkeys(name.strip() for name in names))
    if listed is not None and not all(found):
        raise typer.BadParameter("write names with commas between them", param_hint="--models")
    return found or None


def node_labels(text: str | None) -> dict[str, str] | None:
    """Return the labels of `--cache-nodes`; empty: every node. Raises BadParameter."""
    if text is None:
        return None
    labels: dict[str, str] = {}
    if text.strip() == ALL_NODES:
        return labels
    for part in text.split(","):
        name, is_pair, value = (word.strip() for word in part.partition("="))
        if not (name and is_pair and value) or name in labels:
            raise typer.BadParameter(
                f"write labels as tenant=a,zone=b, each once; or {ALL_NODES}",
                param_hint="--cache-nodes",
            )
        labels[name] = value
    return labels


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that flags have set, with plain values; a group of none is left out."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _GROUPS:
            if inner := given(value):
                found[name] = inner
        elif value is not None:
            found[name] = value.value if isinstance(value, enum.Enum) else value
    return found


_GROUPS = frozenset({"limits", "user_limits", "cache"})
_LIMITS = ("rpm", "tpm", "tokens_per_day", "budget", "concurrency")
_KEY_LIMITS = (*_LIMITS, "prompt_tokens", "completion_tokens")

# Where each of the things that `--unset` takes away is in a key.
FIELDS: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("class", "max_class", "models", "group", "expires")},
    **{name: ("limits", name) for name in _KEY_LIMITS},
    **{f"user_{name}": ("user_limits", name) for name in _LIMITS},
    **{f"cache_{name}": ("cache", name) for name in ("hide", "isolate", "nodes")},
    "prompt_cache": ("cache", "prompt_cache"),
    **{name: (name,) for name in sorted(_GROUPS)},
}


def unset_fields(words: Iterable[str], wanted: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the fields that `--unset` names. Raises BadParameter, also if `wanted` sets one."""
    found: list[tuple[str, ...]] = []
    for word in (part.strip() for one in words for part in one.split(",")):
        path = FIELDS.get(word.removeprefix("--").replace("-", "_"))
        if path is None:
            known = ", ".join(name.replace("_", "-") for name in FIELDS)
            raise typer.BadParameter(
                f"there is no '{word}': it takes {known}", param_hint="--unset"
            )
        inner = wanted.get(path[0])
        if inner is not None and (len(path) == 1 or path[1] in inner):
            raise typer.BadParameter(
                f"'{word}' is set by another flag: give one of them", param_hint="--unset"
            )
        found.append(path)
    return found


def patch_of(
    before: Mapping[str, Any], wanted: Mapping[str, Any], removed: Iterable[tuple[str, ...]]
) -> dict[str, Any]:
    """Return the JSON merge patch that makes these changes to the key `before`."""
    patch: dict[str, Any] = {
        name: dict(value) if name in _GROUPS else value for name, value in wanted.items()
    }
    for path in removed:
        if len(path) == 1:
            patch[path[0]] = None
        elif patch.setdefault(path[0], {}) is not None:
            patch[path[0]][path[1]] = None
    for name in _GROUPS & patch.keys():
        if patch[name] is None:
            continue
        old = dict(before.get(name) or {})
        if all(value is None for value in {**old, **patch[name]}.values()):
            # Nothing is left. Limits of end users that are none would hide the group's.
            patch[name] = None
    labels = (patch.get("cache") or {}).get("nodes")
    if labels is not None:
        # A patch is merged with the old labels: those that are not named must go.
        old = (before.get("cache") or {}).get("nodes") or {}
        patch["cache"]["nodes"] = {**dict.fromkeys(old), **labels}
    return patch


LARGEST_TABLE = 16 << 20  # bytes
MOST_KEYS = 10_000  # keys of one file; the admin API takes no more at once

_COUNTS = frozenset(_KEY_LIMITS) - {"budget"}

_COLUMNS = (
    *("id", "sha256", "name", "class", "max_class", "models", "group", "expires"),
    *("trust_user_headers", *_KEY_LIMITS),
)

_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})


class ListedKey(NamedTuple):
    """A key of a file, as it stands there."""

    fields: object  # a mapping with the names of the settings, if it is right
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
    import csv
    import io

    from gateway.config.yaml_file import read_text

    text = read_text(file, LARGEST_TABLE)
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


def _fields(cells: dict[str, str]) -> dict[str, Any]:
    """The cells of a row as fields of a key; what is no number or list stays a text."""
    fields: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    for name, cell in cells.items():
        if not cell:
            continue
        if name in _KEY_LIMITS:
            is_count = name in _COUNTS and cell.removeprefix("-").isdecimal() and len(cell) < 20
            limits[name] = int(cell) if is_count else cell
        elif name == "models":
            fields[name] = [part.strip() for part in cell.replace(";", ",").split(",")]
        elif name == "trust_user_headers" and cell.lower() in _YES | _NO:
            fields[name] = cell.lower() in _YES
        else:
            fields[name] = cell
    return {**fields, "limits": limits} if limits else fields
