"""`llama-gateway keys`: makes, lists, rotates and revokes API keys; only hashes are kept."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import re
import sys
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias
from urllib.parse import quote

import typer

from gateway.cli import client, options
from gateway.cli.client import AdminClient, AdminFlags, GatewayRefused, NoStore
from gateway.cli.options import CommandGroup, FlagGroup, Json
from gateway.cli.terminal import (
    CommandFailed,
    failing_by,
    format_cell,
    print_json,
    print_note,
    print_rows,
)
from gateway.config.errors import ConfigError, Problem, escape_json

if TYPE_CHECKING:
    from gateway.callers.key_desk import KeyDesk
    from gateway.callers.keys import ApiKey
    from gateway.callers.stored_keys import KeyProblem
    from gateway.config.keys import KeySpec
    from gateway.config.settings import Settings


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


def unset_fields(
    words: Iterable[str],
    wanted: Mapping[str, Any],
    fields: Mapping[str, tuple[str, ...]] = FIELDS,
) -> list[tuple[str, ...]]:
    """Return the fields that `--unset` names. Raises BadParameter, also if `wanted` sets one."""
    found: list[tuple[str, ...]] = []
    for word in (part.strip() for one in words for part in one.split(",")):
        path = fields.get(word.removeprefix("--").replace("-", "_"))
        if path is None:
            known = ", ".join(name.replace("_", "-") for name in fields)
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


app = CommandGroup(
    "API keys of the public listener. Store and settings hold their SHA-256 alone.\n\n"
    "While the gateway runs, they are changed through its admin API, and a change holds for "
    "the next request; else in the store itself. Each command names the store on stderr.",
    ("llama-gateway keys create --name alice", "a key, which works from now on"),
    ("llama-gateway keys create --name bob --rpm 60 --budget 20/month", "with limits"),
    ("llama-gateway keys list", "whose keys there are, and what they may do"),
    ("llama-gateway keys set bob --rpm 120 --unset budget", "other limits, its secret stays"),
    ("llama-gateway keys rotate alice", "another secret; the old one works for a day"),
    ("llama-gateway keys revoke alice", "refused within a second"),
)

_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_LONGEST_INPUT = 4096


def _checked_id(value: str | None) -> str | None:
    if value is not None and not _ID.fullmatch(value):
        raise typer.BadParameter("1 to 64 letters, digits or '-', no underscore")
    return value


KeyId = Annotated[
    str | None,
    typer.Option(
        "--id",
        metavar="ID",
        callback=_checked_id,
        show_default="random",
        help="The key's public part, which logs show.",
    ),
]


KeyName = Annotated[str, typer.Argument(metavar="NAME", help="The key's name or id.")]


class KeyFlags(options.FlagGroup):
    """The flags that name the keys: those of the gateway that runs, else of the store itself."""

    admin_url: options.AdminUrl = None
    admin_key_file: options.AdminKeyFile = None
    config: options.ConfigFile = None
    nodes: options.NodesFile = options.DEFAULT_NODES

    @contextlib.contextmanager
    def open(self) -> Iterator[KeyAccess]:
        """Open the keys. Tells on stderr which store it is. Raises CommandFailed."""
        flags = AdminFlags(
            admin_url=self.admin_url, admin_key_file=self.admin_key_file, config=self.config
        )
        with flags.connect() as admin:
            if client.is_gateway_running(admin, self.admin_url, self.config):
                yield RunningGateway(admin)
                return
        settings = client.read_settings(self.config)
        location = client.named_store(settings)
        print_note(f"store: {location.shown} (no gateway answers at {admin.url})")
        from gateway.callers.key_desk import KeyDesk
        from gateway.callers.standings import Standings

        def unknown(specs: Sequence[KeySpec]) -> Sequence[str]:
            return unknown_models(settings, self.nodes, specs)

        with client.open_alone(location) as store:
            standings = Standings.alone(settings, store)
            desk = KeyDesk(settings, standings, unknown, seconds=client.OPEN_SECONDS)
            yield StoreAlone(desk, location.shown)


@app.add(
    "hash",
    ("llama-gateway keys hash", "a new key, and the lines for config/gateway.yaml"),
    ("llama-gateway keys hash --read < key.txt", "the lines for an existing key"),
)
def hash_(
    key_id: KeyId = None,
    read: bool = typer.Option(
        False, "--read", help="Read a key from the prompt or from stdin instead of making one."
    ),
    as_json: Json = False,
) -> None:
    """Make a key, or read one, and show its SHA-256 for the settings.

    A new key is shown only now and is stored nowhere.
    """
    if read and key_id is not None:
        raise typer.BadParameter("a key that is read has an id already", param_hint="--id")
    key = _read_key() if read else _new_key(key_id)
    entry = {"id": key.id, "sha256": key.sha256}
    show_entry(key, entry, shown=not read, as_json=as_json)


@app.add(
    "create",
    ("llama-gateway keys create --name alice --expires 90d", "a key that works for 90 days"),
    (
        "llama-gateway keys create --name bob --models mistral-7b,phi-4-mini --rpm 60",
        "two models, 60 requests a minute",
    ),
    (
        "llama-gateway keys create --name vip --class premium --budget 20/month",
        "premium by default, for 20 of the nodes' currency a month",
    ),
    (
        "llama-gateway keys create --name chat --trust-user-headers --user-rpm 10",
        "a chat's web interface: fair between its users, each with a limit",
    ),
)
@options.takes(rights=NewRightFlags, stored=KeyFlags)
def create(
    *,
    key_id: KeyId = None,
    name: NewName = None,
    rights: NewRightFlags,
    print_only: bool = typer.Option(False, "--print", hidden=True),
    as_json: Json = False,
    stored: KeyFlags,
) -> None:
    """Make a key with its name, rights and limits, and store its SHA-256.

    The key is shown only now, and kept nowhere. It works from the next request on. Where there is
    no store, the lines for the settings are shown.
    """
    fields = rights.fields()
    default_class, max_class = fields.get("class"), fields.get("max_class")
    highest = max_class or default_class or PriorityChoice.NORMAL.value
    classes = [one.value for one in PriorityChoice]
    if default_class is not None and classes.index(default_class) < classes.index(highest):
        raise typer.BadParameter(f"is below --class {default_class}", param_hint="--max-class")
    if "user_limits" in fields and not fields.get("trust_user_headers"):
        raise typer.BadParameter("needs --trust-user-headers", param_hint="--user-…")
    first = {"name": name, "class": default_class, "max_class": highest}
    key = _new_key(key_id)
    entry = {"id": key.id, "sha256": key.sha256, **given({**first, **fields})}
    if print_only:
        print_note(
            "warning: --print goes with the next release: where the settings have no store "
            "(store.url: off), 'keys create' shows the lines for them anyway"
        )
        _show_lines(key, entry, as_json=as_json)
        return
    try:
        with stored.open() as keys:
            made = keys.create(entry)
    except NoStore:
        print_note("there is no store (store.url: off): put the lines into the settings")
        _show_lines(key, entry, as_json=as_json)
        return
    tell_warnings(made.pop("warnings", ()))
    show_new(key, made, as_json=as_json)


@app.add("list")
@options.takes(stored=KeyFlags)
def list_(
    *,
    revoked: bool = typer.Option(False, "--revoked", help="Show revoked keys as well."),
    as_json: Json = False,
    stored: KeyFlags,
) -> None:
    """Show all keys of the settings and the store, without their secrets, which nobody has."""
    with stored.open() as keys:
        found = keys.list(revoked=revoked)
    tell_warnings(found.get("warnings", ()))
    if found.get("problem"):
        print_note(f"warning: the store does not answer: {found['problem']}")
    if as_json:
        print_json(found)
    elif found["keys"]:
        print_rows(map(key_row, found["keys"]), state_column=3)
    else:
        print_note("there are no keys; 'llama-gateway keys create --name NAME' makes one")


@app.add("show")
@options.takes(stored=KeyFlags)
def show(*, name: KeyName, as_json: Json = False, stored: KeyFlags) -> None:
    """Show one key: its rights, its limits, and when it was made and ends."""
    with stored.open() as keys:
        key = keys.show(name)
    if as_json:
        print_json(key)
        return
    for field, value in key.items():
        if field in {"standing", "users"}:
            continue
        text = format_cell(value)
        if isinstance(value, dict):
            text = cache_text(value) if field == "cache" else limits_text(value)
        print(f"{field:20} {text}")
    whose = [(f"{one['of']}'s", [one]) for one in key.get("standing") or ()]
    whose += [(f"user {one['user']}", one["standing"]) for one in key.get("users") or ()]
    for owner, standing in whose:
        for one in standing:
            print(f"{'used':20} {format_cell(owner)} {standing_text(one)}")


@app.add(
    "set",
    ("llama-gateway keys set alice --rpm 120 --budget 40/month", "other limits"),
    ("llama-gateway keys set alice --unset tpm,expires", "no limit of tokens, and no end"),
    ("llama-gateway keys set bob --class premium --max-class premium", "another class"),
    ("llama-gateway keys set bob --cache-hide --cache-isolate key", "kept apart from others"),
)
@options.takes(rights=RightFlags, stored=KeyFlags)
def set_(
    *,
    name: KeyName,
    new_name: str | None = typer.Option(
        None,
        "--name",
        metavar="NAME",
        callback=checked_name,
        help="Another name; its usage stays under its id.",
    ),
    unset: list[str] | None = typer.Option(
        None,
        metavar="FLAG,...",
        help=(
            "Take these away: names of the flags below, such as rpm,budget; or limits, "
            "user-limits, cache for all of them."
        ),
    ),
    rights: RightFlags,
    as_json: Json = False,
    stored: KeyFlags,
) -> None:
    """Change a stored key's name, rights or limits; its id and its secret stay.

    What no flag names stays as it is. A change holds for the next request.
    """
    wanted = given({"name": new_name, **rights.fields()})
    removed = unset_fields(unset or (), wanted)
    if not wanted and not removed:
        raise typer.BadParameter("say what to change, such as --rpm 60 or --unset rpm")
    with stored.open() as keys:
        before = keys.show(name)
        trusted = wanted.get("trust_user_headers", before.get("trust_user_headers"))
        if "user_limits" in wanted and not trusted:
            raise typer.BadParameter("needs --trust-user-headers", param_hint="--user-…")
        changed = keys.change(str(before["id"]), patch_of(before, wanted, removed))
    tell_warnings(changed.pop("warnings", ()))
    if as_json:
        print_json(changed)
    else:
        print(rights_text(changed))


@app.add("revoke")
@options.takes(stored=KeyFlags)
def revoke(*, name: KeyName, as_json: Json = False, stored: KeyFlags) -> None:
    """End a key for good: within a second its requests get 401, on open connections too.

    Requests that run already are served to their end. Its name is free again, its id is not.
    """
    with stored.open() as keys:
        key = keys.revoke(name)
    if as_json:
        print_json(key)
    else:
        print(f"{called(key)}: revoked")


@app.add(
    "rotate",
    ("llama-gateway keys rotate alice", "the old secret works for a day"),
    ("llama-gateway keys rotate alice --grace 0", "the old secret ends now: it has leaked"),
)
@options.takes(stored=KeyFlags)
def rotate(
    *,
    name: KeyName,
    grace: str = typer.Option(
        "24h", metavar="TIME", help="How long the old secret works; 0: it ends."
    ),
    as_json: Json = False,
    stored: KeyFlags,
) -> None:
    """Give a key another secret, which is shown only now; its id, rights and limits stay."""
    from gateway.callers.key_desk import checked_grace
    from gateway.errors import GatewayError

    try:
        seconds = checked_grace(grace)
    except GatewayError as error:
        raise typer.BadParameter(error.message, param_hint="--grace") from None
    with stored.open() as keys:
        key = _new_key(str(keys.show(name)["id"]))
        rotated = keys.rotate(name, key.sha256, seconds)
    tell_warnings(rotated.pop("warnings", ()))
    show_new(key, rotated, as_json=as_json)


@app.add(
    "import",
    ("llama-gateway keys import keys.yaml", "a list of keys as in the settings, or under keys:"),
    ("llama-gateway keys import keys.csv", "a table: id,sha256,name,models,rpm,budget,…"),
)
@options.takes(stored=KeyFlags)
def import_(
    *,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML, JSON or CSV; - reads YAML from stdin.")
    ],
    as_json: Json = False,
    stored: KeyFlags,
) -> None:
    """Store keys by their hashes, all or none; every bad line is named.

    The keys' holders keep the secrets that they have: lg_ID_SECRET, of whose SECRET the file has
    the SHA-256.
    """
    listed = read_key_file(file)
    with stored.open() as keys:
        try:
            warnings = keys.import_keys([entry.fields for entry in listed])
        except KeysNotStored as error:
            raise listed_problems(file, listed, error.problems) from None
    tell_warnings(warnings)
    if as_json:
        print_json({"imported": len(listed), "warnings": list(warnings)})
    else:
        print(f"{len(listed)} {'key' if len(listed) == 1 else 'keys'} imported")


def _show_lines(key: ApiKey, entry: Mapping[str, Any], *, as_json: bool) -> None:
    """Show a new key, and its entry for the settings. Raises CommandFailed."""
    from gateway.callers.key_desk import checked_specs
    from gateway.callers.stored_keys import KeysRefused

    try:
        checked_specs([entry], (), (), time.time())
    except KeysRefused as error:
        raise CommandFailed(error.message, status=2) from None
    show_entry(key, entry, shown=True, as_json=as_json)


def _new_key(key_id: str | None) -> ApiKey:
    from gateway.callers.keys import new_key

    return new_key(key_id)


def _read_key() -> ApiKey:
    from gateway.callers.keys import hash_key

    if sys.stdin.isatty():
        text = typer.prompt("Key", hide_input=True, err=True)
    else:
        text = sys.stdin.read(_LONGEST_INPUT)
    with failing_by(ValueError, before="this is no key of the gateway: ", status=2):
        key = hash_key(text.strip())
    if not _ID.fullmatch(key.id):
        raise CommandFailed("the key's id may hold letters, digits and '-' only", status=2)
    return key


# How keys are shown.


def key_row(key: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return a key's row of the table."""
    get = key.get
    classes = [word for word in (get("class"), get("max_class")) if word]
    return [
        ("NAME", get("name")),
        ("ID", get("id")),
        ("SOURCE", get("source")),
        ("STATE", get("state")),
        ("CLASS", " to ".join(dict.fromkeys(classes))),
        ("GROUP", get("group")),
        ("MODELS", get("models")),
        ("LIMITS", limits_text(get("limits"))),
        ("USED", used_text(get("standing"), "key")),
        ("LAST USED", get("last_used_at")),
        ("EXPIRES", get("expires")),
        ("OLD SECRET UNTIL", get("previous_until")),
    ]


def used_text(standing: object, of: str) -> str:
    """Write what is used of the limits of a key, or of a group, in one line; `-` for nothing."""
    told = [one for one in standing if one["of"] == of and one["used"]] if standing else []  # type: ignore[attr-defined]
    return (
        ", ".join(f"{one['limit']} {one['used']:.10g} of {one['most']:.10g}" for one in told) or "-"
    )


def standing_text(one: Mapping[str, Any]) -> str:
    """Write how much of a limit is used and left."""
    text = f"{one['limit']}: {one['used']:.10g} of {one['most']:.10g}"
    if one["reserved"]:
        text += f", {one['reserved']:.10g} reserved"
    text += f", {one['remaining']:.10g} left"
    return text if one["resets_at"] is None else f"{text}, until {one['resets_at']}"


def limits_text(limits: object) -> str:
    """Write limits in one line; `-` for none."""
    if not isinstance(limits, Mapping):
        return "-"
    given = [
        f"{format_cell(name)} {format_cell(value)}"
        for name, value in limits.items()
        if value is not None
    ]
    return ", ".join(given) or "-"


def called(key: Mapping[str, Any]) -> str:
    """Name a key for people."""
    name, key_id = format_cell(key.get("name")), format_cell(key.get("id"))
    return name if name == key_id else f"{name} (id {key_id})"


def show_new(key: ApiKey, shown: Mapping[str, Any], *, as_json: bool) -> None:
    """Show a new secret, this once."""
    if as_json:
        print_json({"key": key.text, **shown})
        return
    print(f"The key, shown only now:\n\n  {key.text}\n")
    print(rights_text(shown))


def rights_text(shown: Mapping[str, Any]) -> str:
    """Write a key's rights and limits in one line."""
    parts = [f"at most class {format_cell(shown.get('max_class'))}"]
    parts += [
        f"{field} {format_cell(shown[field])}" for field in ("models", "group") if shown.get(field)
    ]
    if (limits := limits_text(shown.get("limits"))) != "-":
        parts.append(limits)
    if (of_users := limits_text(shown.get("user_limits"))) != "-":
        parts.append(f"each end user {of_users}")
    if (cache := cache_text(shown.get("cache"))) != "-":
        parts.append(f"cache: {cache}")
    if shown.get("expires"):
        parts.append(f"until {format_cell(shown['expires'])}")
    if shown.get("previous_until"):
        parts.append(f"the old secret works until {format_cell(shown['previous_until'])}")
    return f"{called(shown)}: {'; '.join(parts)}"


def cache_text(cache: object) -> str:
    """Write what a key says of prompt caches in one line; `-` for nothing."""
    if not isinstance(cache, Mapping):
        return "-"
    words = {
        name: {True: "yes", False: "no"}.get(value, value)
        for name, value in cache.items()
        if not isinstance(value, Mapping)
    }
    nodes = cache.get("nodes")
    if isinstance(nodes, Mapping):
        pool = ",".join(
            f"{format_cell(name)}={format_cell(value)}" for name, value in nodes.items()
        )
        words["nodes"] = pool or "all"
    return limits_text(words)


def tell_warnings(warnings: Iterable[str]) -> None:
    """Print warnings to stderr."""
    for warning in warnings:
        print_note(f"warning: {warning}")


def show_entry(key: ApiKey, entry: Mapping[str, Any], *, shown: bool, as_json: bool) -> None:
    """Show the entry of a key for the settings; `shown`: and the key itself, this once."""
    if as_json:
        print_json({"key": key.text, **entry} if shown else entry)
        return
    if shown:
        print(f"The key, shown only now:\n\n  {key.text}\n")
    print("For config/gateway.yaml:\n\nkeys:")
    # Any JSON string is a YAML string.
    lines = [
        f"{name}: {escape_json(json.dumps(value, ensure_ascii=False))}"
        for name, value in entry.items()
    ]
    print("  - " + "\n    ".join(lines))


# Where keys are. While a gateway runs, its admin API makes every change, so that one program knows
# the models, the settings in force and the audit log. If none answers, the command opens the store.


class KeysNotStored(Exception):  # noqa: N818 - says what happened to the keys
    """None of several keys was stored; `problems` says what is wrong with which."""

    def __init__(self, problems: Sequence[KeyProblem]) -> None:
        super().__init__()
        self.problems = problems


class RunningGateway:
    """The keys of a running gateway, by its admin API. The methods raise CommandFailed."""

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin

    def list(self, *, revoked: bool) -> dict[str, Any]:
        """Return all `keys`, without secrets, and `warnings`."""
        return self._admin.request("GET", "/admin/keys", {"revoked": "1"} if revoked else None)

    def show(self, name: str) -> dict[str, Any]:
        """Return one key; its name may hold anything, which a path can't."""
        found = self._admin.request("GET", "/admin/keys", {"name": name, "revoked": "1"})
        keys = [key for key in found.get("keys", ()) if isinstance(key, dict)]
        if not keys:
            raise CommandFailed(
                f"there is no key of the name or id '{name}'; 'llama-gateway keys list' shows all"
            )
        return min(keys, key=lambda key: key.get("state") == "revoked")

    def create(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Store a key, which has an id and a hash, and return it. Raises NoStore, too."""
        try:
            return self._admin.request("POST", "/admin/keys", body=entry)
        except GatewayRefused as error:
            if error.code == 501:
                raise NoStore from None
            raise

    def import_keys(self, entries: Sequence[object]) -> Sequence[str]:
        """Store all of these or none; returns warnings. Raises KeysNotStored, too."""
        from gateway.callers.stored_keys import KeyProblem

        try:
            done = self._admin.request("POST", "/admin/keys/import", body={"keys": entries})
        except GatewayRefused as error:
            problems = error.body.get("problems")
            if not isinstance(problems, list) or not problems:
                raise
            raise KeysNotStored([KeyProblem(**problem) for problem in problems]) from None
        return list(done.get("warnings", ()))

    def change(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Change a key by a JSON merge patch (RFC 7396), and return it, with `warnings`."""
        return self._admin.request("PATCH", self._path(name), body=patch)

    def rotate(self, name: str, sha256: str, grace: float) -> dict[str, Any]:
        """Give a key another secret, and return it."""
        path = f"{self._path(name)}/rotate"
        return self._admin.request("POST", path, body={"sha256": sha256, "grace": grace})

    def revoke(self, name: str) -> dict[str, Any]:
        """Revoke a key, and return it."""
        return self._admin.request("DELETE", self._path(name))

    def groups(self) -> dict[str, Any]:
        """Return all `groups` of keys, and `warnings`."""
        return self._admin.request("GET", "/admin/groups")

    def put_group(self, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Define a group, and return it. Raises NoStore, too."""
        try:
            return self._admin.request("PUT", f"/admin/groups/{quote(name, safe='')}", body=fields)
        except GatewayRefused as error:
            if error.code == 501:
                raise NoStore from None
            raise

    def remove_group(self, name: str) -> dict[str, Any]:
        """Remove a group of the store, and return it, with `warnings`."""
        return self._admin.request("DELETE", f"/admin/groups/{quote(name, safe='')}")

    def _path(self, name: str) -> str:
        return f"/admin/keys/{quote(str(self.show(name)['id']), safe='')}"


class StoreAlone:
    """The keys of a store that this command has open, and of the settings: as `RunningGateway`."""

    def __init__(self, desk: KeyDesk, store: str) -> None:
        self._desk = desk
        self._store = store

    def list(self, *, revoked: bool) -> dict[str, Any]:
        """Return all keys."""
        return self._do(self._desk.list(revoked=revoked))

    def show(self, name: str) -> dict[str, Any]:
        """Return one key."""
        return self._do(self._desk.show(name))

    def create(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Store a key."""
        return self._do(self._desk.create(entry))

    def import_keys(self, entries: Sequence[object]) -> Sequence[str]:
        """Store keys."""
        return list(self._do(self._desk.import_keys(entries), of_many=True)["warnings"])

    def change(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Change a key."""
        changed = self._do(self._desk.change(name, patch))
        # Only of what this change names: of others were warned before.
        return changed if {"models", "group"} & patch.keys() else {**changed, "warnings": ()}

    def rotate(self, name: str, sha256: str, grace: float) -> dict[str, Any]:
        """Give a key another secret."""
        return self._do(self._desk.rotate(name, {"sha256": sha256, "grace": grace}))

    def revoke(self, name: str) -> dict[str, Any]:
        """Revoke a key."""
        return self._do(self._desk.revoke(name))

    def groups(self) -> dict[str, Any]:
        """Return all groups."""
        return self._do(self._desk.list_groups())

    def put_group(self, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Define a group."""
        return self._do(self._desk.put_group(name, fields))

    def remove_group(self, name: str) -> dict[str, Any]:
        """Remove a group."""
        return self._do(self._desk.remove_group(name))

    def _do(
        self, work: Coroutine[Any, Any, dict[str, Any]], *, of_many: bool = False
    ) -> dict[str, Any]:
        import asyncio  # heavy for `--help`

        from gateway.callers.stored_keys import KeysRefused
        from gateway.errors import GatewayError
        from gateway.store.failures import StoreError

        try:
            return asyncio.run(work)
        except KeysRefused as error:
            if of_many:
                raise KeysNotStored(error.problems) from None
            raise CommandFailed(error.message, 2 if error.status == 400 else 1) from None
        except StoreError as error:
            raise CommandFailed(f"the store {self._store} can't be used: {error}") from None
        except GatewayError as error:
            raise CommandFailed(error.message) from None


KeyAccess: TypeAlias = RunningGateway | StoreAlone


def unknown_models(settings: Settings, nodes: Path, specs: Sequence[KeySpec]) -> Sequence[str]:
    """Return a warning for each model that no node of the inventory declares."""
    from gateway.config.inventory import load_inventory
    from gateway.config.routing import CATCH_ALL

    names = list(dict.fromkeys(name for spec in specs for name in spec.models or ()))
    if not names or CATCH_ALL in settings.models:
        return []
    try:
        inventory = load_inventory(nodes)
    except (ConfigError, OSError):
        return [f"{nodes} can't be read, so nobody knows whether a node serves {', '.join(names)}"]
    enabled = [node for node in inventory.nodes if node.enabled]
    known = {name for node in enabled for name in node.models or ()} | set(settings.models)
    effect = "requests for it get 404 until one does"
    if any(node.models is None for node in enabled):
        effect = "a node that declares no models may serve it"
    return [
        f"no node of {nodes} declares the model '{name}'; {effect}"
        for name in names
        if name not in known
    ]
