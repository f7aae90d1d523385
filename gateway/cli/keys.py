"""`llama-gateway keys` and `groups`: API keys, of which only hashes are kept, and their groups."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import quote, unquote

import typer

from gateway.cli import client, options
from gateway.cli.client import AdminClient, GatewayRefused, NoStore, StoreFlags, objects
from gateway.cli.options import CommandGroup, FlagGroup, Panel, argument, flag
from gateway.cli.terminal import (
    CommandFailed,
    WrongUsage,
    failing_by,
    format_cell,
    print_answer,
    print_json,
    print_listing,
    print_note,
)
from gateway.config.errors import ConfigError, Problem, escape_json

if TYPE_CHECKING:
    from gateway.callers.key_desk import KeyDesk
    from gateway.callers.keys import ApiKey
    from gateway.config.keys import KeySpec
    from gateway.config.settings import Settings


_limits = Panel("Limits")
_users = Panel("End users that it names (with --trust-user-headers)")
_caches = Panel("Prompt caches and privacy (unset: as its group)")
TRUST_HELP = "Its holder may name its end users by header (see identity.user_headers)."
ALL_NODES = "all"  # of `--cache-nodes`: the key is kept to no pool, whatever its group says


Priority = Literal["urgent", "premium", "normal", "batch"]  # the classes, highest first
Isolation = Literal["group", "key", "off"]  # whose prompts may draw a request to a node
CLASSES = get_args(Priority)


def _checked_name(value: str | None) -> str | None:
    if value is not None and (value != value.strip() or not 1 <= len(value) <= 256):
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


def _budget(panel: Panel, meaning: str) -> Any:
    return panel("AMOUNT/month|day", meaning, callback=_checked_budget)


class RightFlags(FlagGroup):
    """The flags that say what a key may do; those that are not given leave it as it is."""

    default_class: Priority | None = flag(
        "|".join(CLASSES),
        "The class of its requests that name none; unset: normal.",
        name="--class",
    )
    max_class: Priority | None = flag(
        "|".join(CLASSES), "The highest class it gets; unset: its --class."
    )
    model: list[str] | None = flag(
        "NAME", "A model that it may use; repeat it for more. Unset: all."
    )
    models: str | None = flag("A,B", "Models that it may use, in one list.")
    group: str | None = flag("GROUP", "The group whose limits it shares.")
    expires: str | None = flag(
        "TIME",
        "When it ends: in 90d or 12h, or on 2027-01-31. Unset: never.",
        callback=_checked_expiry,
    )
    rpm: int | None = _limits("N", "Requests within any 60 seconds.", min=1)
    tpm: int | None = _limits("N", "Tokens within any 60 seconds.", min=1)
    tokens_per_day: int | None = _limits("N", "Tokens in a day (UTC).", min=1)
    budget: str | None = _budget(
        _limits, "Money a month or day, in the currency of the nodes' costs."
    )
    concurrency: int | None = _limits("N", "Requests at one time.", min=1)
    prompt_tokens: int | None = _limits("N", "Largest prompt, in tokens.", min=1)
    completion_tokens: int | None = _limits("N", "Most tokens of one answer.", min=1)
    trust_user_headers: bool | None = _users.switch(
        "--trust-user-headers/--no-trust-user-headers", TRUST_HELP, None
    )
    user_rpm: int | None = _users("N", "Requests of each within any 60 seconds.", min=1)
    user_tpm: int | None = _users("N", "Tokens of each within any 60 seconds.", min=1)
    user_tokens_per_day: int | None = _users("N", "Tokens of each in a day.", min=1)
    user_budget: str | None = _budget(_users, "Money of each a month or day.")
    user_concurrency: int | None = _users("N", "Requests of each at one time.", min=1)
    cache_hide: bool | None = _caches.switch(
        "--cache-hide/--no-cache-hide",
        "Take the figures that tell what was cached out of its responses.",
        None,
    )
    cache_isolate: Isolation | None = _caches(
        "|".join(get_args(Isolation)),
        "Whose prompts may draw its requests to the node that has them cached.",
    )
    cache_nodes: str | None = _caches(
        "LABEL=VALUE,...",
        f"Labels of the nodes that it may use, and no other; {ALL_NODES}: every node.",
    )
    prompt_cache: bool | None = _caches.switch(
        "--prompt-cache/--no-prompt-cache",
        "Whether nodes may serve its prompts from their caches; without, each is read anew.",
        None,
    )

    def fields(self) -> dict[str, Any]:
        """Return the fields of a key that these flags set. Raises BadParameter."""
        flags = {
            **vars(self),
            "class": self.default_class,
            "models": _listed_models(self.model, self.models),
            "cache_nodes": _node_labels(self.cache_nodes),
        }
        own = ("class", "max_class", "models", "trust_user_headers")
        return _placed(flags, {**{name: (name,) for name in own}, **FIELDS})


class NewRightFlags(RightFlags):
    """Those of a new key, whose holder names nobody unless a flag says so."""

    trust_user_headers: bool | None = _users.switch("--trust-user-headers", TRUST_HELP, None)


def _listed_models(repeated: list[str] | None, listed: str | None) -> list[str] | None:
    names = [*(repeated or ()), *(listed.split(",") if listed is not None else ())]
    found = list(dict.fromkeys(name.strip() for name in names))
    if listed is not None and not all(found):
        raise typer.BadParameter("write names with commas between them", param_hint="--models")
    return found or None


def _node_labels(text: str | None) -> dict[str, str] | None:
    """Return the labels of `--cache-nodes`; empty: every node. Raises BadParameter."""
    if text is None:
        return None
    labels: dict[str, str] = {}
    for part in text.split(",") if text.strip() != ALL_NODES else ():
        name, is_pair, value = (word.strip() for word in part.partition("="))
        if not (name and is_pair and value) or name in labels:
            raise typer.BadParameter(
                f"write labels as tenant=a,zone=b, each once; or {ALL_NODES}",
                param_hint="--cache-nodes",
            )
        labels[name] = value
    return labels


def _placed(flags: Mapping[str, Any], paths: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return the fields of a key, or of a group, that flags have set, each where `paths` says."""
    found: dict[str, Any] = {}
    for name, (*outer, last) in paths.items():
        if flags.get(name) is not None:
            fields = found.setdefault(outer[0], {}) if outer else found
            fields[last] = flags[name]
    return found


_GROUPS = ("cache", "limits", "user_limits")
_LIMITS = ("rpm", "tpm", "tokens_per_day", "budget", "concurrency")
_KEY_LIMITS = (*_LIMITS, "prompt_tokens", "completion_tokens")

# Where each of the things that `--unset` takes away is in a key.
FIELDS: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("class", "max_class", "models", "group", "expires")},
    **{name: ("limits", name) for name in _KEY_LIMITS},
    **{f"user_{name}": ("user_limits", name) for name in _LIMITS},
    **{f"cache_{name}": ("cache", name) for name in ("hide", "isolate", "nodes")},
    "prompt_cache": ("cache", "prompt_cache"),
    **{name: (name,) for name in _GROUPS},
}


def _unset_fields(
    words: Iterable[str],
    wanted: Mapping[str, Any],
    fields: Mapping[str, tuple[str, ...]] = FIELDS,
) -> set[tuple[str, ...]]:
    """Return the fields that `--unset` names. Raises BadParameter, also if `wanted` sets one."""
    found: set[tuple[str, ...]] = set()
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
        found.add(path)
    return found


def _after(
    before: Mapping[str, Any], wanted: Mapping[str, Any], removed: set[tuple[str, ...]]
) -> dict[str, Any]:
    """Return what a key or a group is to have in each place that changes; None: nothing."""
    found: dict[str, Any] = {**dict.fromkeys(path[0] for path in removed), **wanted}
    for place in found.keys() & set(_GROUPS):
        whole = {**(before.get(place) or {}), **(wanted.get(place) or {})}
        # Limits of end users that are none would hide the group's: then there is no mapping.
        found[place] = {
            name: value
            for name, value in whole.items()
            if value is not None and not removed & {(place,), (place, name)}
        } or None
    return found


def _patch_to(before: object, after: object) -> object:
    """Return the JSON merge patch that makes `after` of `before`."""
    if not isinstance(after, Mapping):
        return after
    old = before if isinstance(before, Mapping) else {}
    gone = {name: None for name, value in old.items() if value is not None and name not in after}
    return gone | {name: _patch_to(old.get(name), value) for name, value in after.items()}


LARGEST_TABLE = 16 << 20  # bytes
MOST_KEYS = 10_000  # keys of one file; the admin API takes no more at once

_COUNTS = frozenset(_KEY_LIMITS) - {"budget"}

# The columns of a table, and where each is in a key.
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("id", "sha256", "name", "class", "max_class", "models")},
    **{name: (name,) for name in ("group", "expires", "trust_user_headers")},
    **{name: ("limits", name) for name in _KEY_LIMITS},
}
_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


# A key of a file as it stands there, by the names of the settings if it is right; and its line.
ListedKey = tuple[object, int]


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
    return [(to_plain(entry.tree), entry.line) for entry in tree.entries]


def _table(file: Path) -> list[ListedKey]:
    """Read the keys of a CSV file, whose first line names the columns."""
    import csv
    import io

    from gateway.config.yaml_file import read_text

    text = read_text(file, LARGEST_TABLE)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    listed, problems = list[ListedKey](), list[Problem]()
    try:
        reader.fieldnames = columns = [name.strip().lower() for name in reader.fieldnames or ()]
        known = {"id", "sha256"} <= set(columns) <= _COLUMNS.keys()
        if not known or len(set(columns)) < len(columns):
            what = f"the columns are {', '.join(columns) or 'none'}"
            remedy = f"name id, sha256 and others, each once: of {', '.join(_COLUMNS)}"
            raise ConfigError([Problem(file, 1, "", what, remedy)])
        for row in reader:
            if None in row or None in row.values():
                message = f"has not {len(columns)} cells"
                remedy = "quote cells that hold commas"
                problems.append(Problem(file, reader.line_num, "", message, remedy))
            elif any(cell.strip() for cell in row.values()):
                cells = {name: _value(name, cell.strip()) for name, cell in row.items()}
                listed.append((_placed(cells, _COLUMNS), reader.line_num))
    except csv.Error as error:
        problems.append(Problem(file, reader.line_num, "", f"is no CSV: {error}"))
    if problems:
        raise ConfigError(problems)
    return listed


def _value(name: str, cell: str) -> object:
    """Return what a cell says; what is no number or list stays a text, and None is nothing."""
    if name in _COUNTS and cell.removeprefix("-").isdecimal() and len(cell) < 20:
        return int(cell)
    if name == "models" and cell:
        return [part.strip() for part in cell.replace(";", ",").split(",")]
    known = _WORDS if name == "trust_user_headers" else {}
    return known.get(cell.lower(), cell or None)


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


KEY_ID = flag(
    "ID",
    "The key's public part, which logs show.",
    name="--id",
    callback=_checked_id,
    show_default="random",
)
KEY_NAME = argument("NAME", "The key's name or id.")


# Asks for keys and groups: `AdminClient.request`, or what answers like it from a store alone.
Ask = Callable[..., dict[str, Any]]


class KeyFlags(options.FlagGroup):
    """The flags that name the keys: those of the gateway that runs, else of the store itself."""

    admin_url: str | None = options.ADMIN_URL
    admin_key_file: Path | None = options.ADMIN_KEY_FILE
    config: Path | None = options.CONFIG
    nodes: Path = options.NODES

    @contextlib.contextmanager
    def open(self) -> Iterator[Ask]:
        """Open the keys. Tells on stderr which store it is. Raises CommandFailed."""
        flags = StoreFlags(
            admin_url=self.admin_url, admin_key_file=self.admin_key_file, config=self.config
        )
        with flags.open(make=True) as source:
            if isinstance(source, AdminClient):
                yield source.request
                return
            from gateway.callers.key_desk import KeyDesk
            from gateway.callers.standings import Standings

            settings = client.read_settings(self.config)
            standings = Standings.alone(settings, source)
            unknown = partial(_unknown_models, settings, self.nodes)
            desk = KeyDesk(settings, standings, unknown, seconds=client.OPEN_SECONDS)
            yield partial(_ask_desk, desk)


@app.add(
    "hash",
    ("llama-gateway keys hash", "a new key, and the lines for config/gateway.yaml"),
    ("llama-gateway keys hash --read < key.txt", "the lines for an existing key"),
)
def hash_(
    key_id: str | None = KEY_ID,
    read: bool = flag.switch(
        "--read", "Read a key from the prompt or from stdin instead of making one."
    ),
    as_json: bool = options.JSON,
) -> None:
    """Make a key, or read one, and show its SHA-256 for the settings.

    A new key is shown only now and is stored nowhere.
    """
    if read and key_id is not None:
        raise typer.BadParameter("a key that is read has an id already", param_hint="--id")
    from gateway.callers.keys import hash_key, new_key

    text = None
    if read and sys.stdin.isatty():
        text = typer.prompt("Key", hide_input=True, err=True)
    elif read:
        text = sys.stdin.read(_LONGEST_INPUT)
    with failing_by(ValueError, before="this is no key of the gateway: ", status=2):
        key = new_key(key_id) if text is None else hash_key(text.strip())
    if not _ID.fullmatch(key.id):
        raise WrongUsage("the key's id may hold letters, digits and '-' only")
    entry = {"id": key.id, "sha256": key.sha256}
    _show_entry(key, entry, shown=not read, as_json=as_json)


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
def create(
    *,
    key_id: str | None = KEY_ID,
    name: str | None = flag(
        "NAME",
        "Who uses it; unique. Logs, metrics and the ledger show it.",
        callback=_checked_name,
        show_default="its id",
    ),
    rights: NewRightFlags,
    print_only: bool = typer.Option(False, "--print", hidden=True),
    as_json: bool = options.JSON,
    stored: KeyFlags,
) -> None:
    """Make a key with its name, rights and limits, and store its SHA-256.

    The key is shown only now, and kept nowhere. It works from the next request on. Where there is
    no store, the lines for the settings are shown.
    """
    from gateway.callers.key_desk import checked_specs
    from gateway.callers.keys import new_key
    from gateway.callers.stored_keys import KeysRefused

    fields = rights.fields()
    default_class, max_class = fields.get("class"), fields.get("max_class")
    highest = max_class or default_class or "normal"
    if default_class is not None and CLASSES.index(default_class) < CLASSES.index(highest):
        raise typer.BadParameter(f"is below --class {default_class}", param_hint="--max-class")
    if "user_limits" in fields and not fields.get("trust_user_headers"):
        raise typer.BadParameter("needs --trust-user-headers", param_hint="--user-…")
    key = new_key(key_id)
    first = {"name": name, "class": default_class, "max_class": highest, **fields}
    said = {field: value for field, value in first.items() if value is not None}
    entry = {"id": key.id, "sha256": key.sha256, **said}
    why = (
        "warning: --print goes with the next release: where the settings have no store "
        "(store.url: off), 'keys create' shows the lines for them anyway"
    )
    if not print_only:
        try:
            with stored.open() as ask:
                made = ask("POST", "/admin/keys", body=entry)
        except (NoStore, GatewayRefused) as error:
            if isinstance(error, GatewayRefused) and error.code != 501:
                raise
            why = "there is no store (store.url: off): put the lines into the settings"
        else:
            _show_new(key, made, as_json=as_json)
            return
    print_note(why)
    with failing_by(KeysRefused, status=2):
        checked_specs([entry], (), (), time.time())
    _show_entry(key, entry, shown=True, as_json=as_json)


@app.add("list")
def list_(
    *,
    revoked: bool = flag.switch("--revoked", "Show revoked keys as well."),
    as_json: bool = options.JSON,
    stored: KeyFlags,
) -> None:
    """Show all keys of the settings and the store, without their secrets, which nobody has."""
    with stored.open() as ask:
        found = ask("GET", "/admin/keys", {"revoked": "1"} if revoked else None)
    _tell_warnings(found.get("warnings", ()))
    if found.get("problem"):
        print_note(f"warning: the store does not answer: {found['problem']}")
    nothing = "there are no keys; 'llama-gateway keys create --name NAME' makes one"
    rows = map(_key_row, found["keys"])
    print_listing(found, rows, nothing, as_json=as_json, state_column=3)


@app.add("show")
def show(*, name: str = KEY_NAME, as_json: bool = options.JSON, stored: KeyFlags) -> None:
    """Show one key: its rights, its limits, and when it was made and ends."""
    with stored.open() as ask:
        key = _key(ask, name)
    if as_json:
        print_json(key)
        return
    for field, value in key.items():
        if field in {"standing", "users"}:
            continue
        text = _limits_text(value) if isinstance(value, dict) else format_cell(value)
        print(f"{field:20} {text}")
    whose = [(f"{one['of']}'s", [one]) for one in key.get("standing") or ()]
    whose += [(f"user {one['user']}", one["standing"]) for one in key.get("users") or ()]
    for owner, standing in whose:
        for one in standing:
            print(f"{'used':20} {format_cell(owner)} {_standing_text(one)}")


@app.add(
    "set",
    ("llama-gateway keys set alice --rpm 120 --budget 40/month", "other limits"),
    ("llama-gateway keys set alice --unset tpm,expires", "no limit of tokens, and no end"),
    ("llama-gateway keys set bob --class premium --max-class premium", "another class"),
    ("llama-gateway keys set bob --cache-hide --cache-isolate key", "kept apart from others"),
)
def set_(
    *,
    name: str = KEY_NAME,
    new_name: str | None = flag(
        "NAME", "Another name; its usage stays under its id.", name="--name", callback=_checked_name
    ),
    unset: list[str] | None = flag(
        "FLAG,...",
        "Take these away: names of the flags below, such as rpm,budget; or limits, "
        "user-limits, cache for all of them.",
    ),
    rights: RightFlags,
    as_json: bool = options.JSON,
    stored: KeyFlags,
) -> None:
    """Change a stored key's name, rights or limits; its id and its secret stay.

    What no flag names stays as it is. A change holds for the next request.
    """
    wanted = ({} if new_name is None else {"name": new_name}) | rights.fields()
    removed = _unset_fields(unset or (), wanted)
    if not wanted and not removed:
        raise typer.BadParameter("say what to change, such as --rpm 60 or --unset rpm")
    with stored.open() as ask:
        before = _key(ask, name)
        trusted = wanted.get("trust_user_headers", before.get("trust_user_headers"))
        if "user_limits" in wanted and not trusted:
            raise typer.BadParameter("needs --trust-user-headers", param_hint="--user-…")
        after = _after(before, wanted, removed)
        patch = {place: _patch_to(before.get(place), value) for place, value in after.items()}
        changed = ask("PATCH", _key_path(before), body=patch)
    _tell_warnings(changed.pop("warnings", ()))
    print_answer(changed, _rights_text(changed), as_json=as_json)


@app.add("revoke")
def revoke(*, name: str = KEY_NAME, as_json: bool = options.JSON, stored: KeyFlags) -> None:
    """End a key for good: within a second its requests get 401, on open connections too.

    Requests that run already are served to their end. Its name is free again, its id is not.
    """
    with stored.open() as ask:
        key = ask("DELETE", _key_path(_key(ask, name)))
    print_answer(key, f"{_called(key)}: revoked", as_json=as_json)


@app.add(
    "rotate",
    ("llama-gateway keys rotate alice", "the old secret works for a day"),
    ("llama-gateway keys rotate alice --grace 0", "the old secret ends now: it has leaked"),
)
def rotate(
    *,
    name: str = KEY_NAME,
    grace: str = flag("TIME", "How long the old secret works; 0: it ends.", "24h"),
    as_json: bool = options.JSON,
    stored: KeyFlags,
) -> None:
    """Give a key another secret, which is shown only now; its id, rights and limits stay."""
    from gateway.callers.key_desk import checked_grace
    from gateway.callers.keys import new_key
    from gateway.errors import GatewayError

    try:
        seconds = checked_grace(grace)
    except GatewayError as error:
        raise typer.BadParameter(error.message, param_hint="--grace") from None
    with stored.open() as ask:
        old = _key(ask, name)
        key = new_key(str(old["id"]))
        fields = {"sha256": key.sha256, "grace": seconds}
        rotated = ask("POST", f"{_key_path(old)}/rotate", body=fields)
    _show_new(key, rotated, as_json=as_json)


@app.add(
    "import",
    ("llama-gateway keys import keys.yaml", "a list of keys as in the settings, or under keys:"),
    ("llama-gateway keys import keys.csv", "a table: id,sha256,name,models,rpm,budget,…"),
)
def import_(
    *,
    file: Path = argument("FILE", "YAML, JSON or CSV; - reads YAML from stdin."),
    as_json: bool = options.JSON,
    stored: KeyFlags,
) -> None:
    """Store keys by their hashes, all or none; every bad line is named.

    The keys' holders keep the secrets that they have: lg_ID_SECRET, of whose SECRET the file has
    the SHA-256.
    """
    listed = _table(file) if file.suffix.lower() == ".csv" else _list(file)
    if not 0 < len(listed) <= MOST_KEYS:
        problem = f"holds {len(listed) or 'no'} key{'s' if listed else ''}"
        remedy = f"an import takes 1 to {MOST_KEYS} of them"
        raise ConfigError([Problem(file, 0, "", problem, remedy)])
    with stored.open() as ask:
        try:
            entries = {"keys": [fields for fields, _ in listed]}
            found = ask("POST", "/admin/keys/import", body=entries)
        except GatewayRefused as error:
            problems = objects(error.body, "problems")
            if not problems:
                raise
            raise ConfigError(
                Problem(file, listed[one["index"]][1], one["key"], one["message"], one["remedy"])
                for one in problems
            ) from None
    warnings = list(found.get("warnings", ()))
    _tell_warnings(warnings)
    done = {"imported": len(listed), "warnings": warnings}
    print_answer(done, f"{len(listed)} keys imported", as_json=as_json)


# `llama-gateway groups`: what the keys of each may use together.


groups = CommandGroup(
    "Groups of API keys: limits that the keys of a group share.\n\n"
    "Groups of the settings come before those of the store. While the gateway runs, they are "
    "changed through its admin API, and a change holds for the next request; else in the store.",
    ("llama-gateway groups set research --budget 200/month --tpm 100000", "make it, or change it"),
    ("llama-gateway keys create --name alice --group research", "a key of it"),
    ("llama-gateway groups list", "what each may use, and has used"),
    ("llama-gateway groups remove research", "its keys then share no limit"),
)

GROUP_NAME = argument("NAME", "The group's name.")

_GROUP_FIELDS = {
    **{name: path for name, path in FIELDS.items() if path[0] in {"limits", "user_limits"}},
    **{name: ("limits", name) for name in ("max_class", "models")},
}


class LimitFlags(FlagGroup):
    """The limits of a group; those that are not given stay as they are."""

    max_class: Priority | None = flag("|".join(CLASSES), "The highest class of its keys' requests.")
    models: str | None = flag("A,B", "Models that its keys may use, of those that each may use.")
    rpm: int | None = RightFlags.rpm
    tpm: int | None = RightFlags.tpm
    tokens_per_day: int | None = RightFlags.tokens_per_day
    budget: str | None = RightFlags.budget
    concurrency: int | None = RightFlags.concurrency
    prompt_tokens: int | None = RightFlags.prompt_tokens
    completion_tokens: int | None = RightFlags.completion_tokens
    user_rpm: int | None = RightFlags.user_rpm
    user_tpm: int | None = RightFlags.user_tpm
    user_tokens_per_day: int | None = RightFlags.user_tokens_per_day
    user_budget: str | None = RightFlags.user_budget
    user_concurrency: int | None = RightFlags.user_concurrency

    def fields(self) -> dict[str, Any]:
        """Return the fields of a group that these flags set. Raises BadParameter."""
        flags = {**vars(self), "models": _listed_models(None, self.models)}
        return _placed(flags, _GROUP_FIELDS)


@groups.add("list")
def list_groups(*, as_json: bool = options.JSON, stored: KeyFlags) -> None:
    """Show all groups of the settings and the store, those too that nobody has defined."""
    with stored.open() as ask:
        found = ask("GET", "/admin/groups")
    _tell_warnings(found.get("warnings", ()))
    nothing = "there are no groups; 'llama-gateway groups set NAME' makes one"
    print_listing(found, map(_group_row, found["groups"]), nothing, as_json=as_json)


def _group_row(group: Mapping[str, Any]) -> list[tuple[str, object]]:
    return [
        ("NAME", group["name"]),
        ("ORIGIN", group["origin"]),
        ("KEYS", group["keys"]),
        ("LIMITS", _limits_text(group["limits"])),
        ("USED", _used_text(group["standing"], "group")),
        ("EACH END USER", _limits_text(group["user_limits"])),
    ]


@groups.add(
    "set",
    ("llama-gateway groups set research --rpm 600 --budget 200/month", "what its keys may use"),
    ("llama-gateway groups set research --unset rpm", "no limit of requests"),
    ("llama-gateway groups set staff", "a group without a limit"),
)
def set_group(
    *,
    name: str = GROUP_NAME,
    unset: list[str] | None = flag(
        "FLAG,...",
        "Take these away: names of the flags below, such as rpm,budget; or limits, "
        "user-limits for all of them.",
    ),
    limits: LimitFlags,
    as_json: bool = options.JSON,
    stored: KeyFlags,
) -> None:
    """Make a group in the store, or change its limits: what no flag names stays as it is."""
    wanted = limits.fields()
    removed = _unset_fields(unset or (), wanted, _GROUP_FIELDS)
    with stored.open() as ask:
        found = ask("GET", "/admin/groups")["groups"]
        before: dict[str, Any] = next((one for one in found if one["name"] == name), {})
        kept = {place: before.get(place) for place in _GROUPS}
        after = kept | _after(kept, wanted, removed)
        given = {place: value for place, value in after.items() if value}
        group = ask("PUT", _group_path(name), body=given)
    own, users = _limits_text(group["limits"]), _limits_text(group["user_limits"])
    print_answer(group, f"{name}: {own}; each end user {users}", as_json=as_json)


@groups.add("remove")
def remove_group(*, name: str = GROUP_NAME, as_json: bool = options.JSON, stored: KeyFlags) -> None:
    """Remove a group of the store. Keys that are of it share no limit then."""
    with stored.open() as ask:
        group = ask("DELETE", _group_path(name))
    _tell_warnings(group["warnings"])
    print_answer(group, f"{name}: removed", as_json=as_json)


def _group_path(name: str) -> str:
    return f"/admin/groups/{quote(name, safe='')}"


# How keys and groups are shown.


def _key_row(key: Mapping[str, Any]) -> list[tuple[str, object]]:
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
        ("LIMITS", _limits_text(get("limits"))),
        ("USED", _used_text(get("standing"), "key")),
        ("LAST USED", get("last_used_at")),
        ("EXPIRES", get("expires")),
        ("OLD SECRET UNTIL", get("previous_until")),
    ]


def _used_text(standing: Iterable[Mapping[str, Any]] | None, of: str) -> str:
    """Write what is used of the limits of a key, or of a group, in one line; `-` for nothing."""
    told = (one for one in standing or () if one["of"] == of and one["used"])
    parts = (f"{one['limit']} {one['used']:.10g} of {one['most']:.10g}" for one in told)
    return ", ".join(parts) or "-"


def _standing_text(one: Mapping[str, Any]) -> str:
    reserved = f", {one['reserved']:.10g} reserved" if one["reserved"] else ""
    until = "" if one["resets_at"] is None else f", until {one['resets_at']}"
    used = f"{one['used']:.10g} of {one['most']:.10g}{reserved}"
    return f"{one['limit']}: {used}, {one['remaining']:.10g} left{until}"


def _limits_text(limits: object) -> str:
    """Write limits, or what a key says of prompt caches, in one line; `-` for nothing."""
    given = []
    for name, value in limits.items() if isinstance(limits, Mapping) else ():
        text = format_cell(value)
        if isinstance(value, bool):
            text = "yes" if value else "no"
        elif isinstance(value, Mapping):  # labels of nodes
            pairs = (f"{format_cell(label)}={format_cell(one)}" for label, one in value.items())
            text = ",".join(pairs) or ALL_NODES
        if value is not None:
            given.append(f"{format_cell(name)} {text}")
    return ", ".join(given) or "-"


def _called(key: Mapping[str, Any]) -> str:
    name, key_id = format_cell(key.get("name")), format_cell(key.get("id"))
    return name if name == key_id else f"{name} (id {key_id})"


def _show_new(key: ApiKey, shown: dict[str, Any], *, as_json: bool) -> None:
    """Show a new secret, this once, after what the gateway warns of."""
    _tell_warnings(shown.pop("warnings", ()))
    text = _SHOWN_ONCE.format(key.text) + _rights_text(shown)
    print_answer({"key": key.text, **shown}, text, as_json=as_json)


_SHOWN_ONCE = "The key, shown only now:\n\n  {}\n\n"


def _rights_text(shown: Mapping[str, Any]) -> str:
    told = {
        "at most class ": format_cell(shown.get("max_class")),
        **{f"{field} ": format_cell(shown.get(field)) for field in ("models", "group")},
        "": _limits_text(shown.get("limits")),
        "each end user ": _limits_text(shown.get("user_limits")),
        "cache: ": _limits_text(shown.get("cache")),
        "until ": format_cell(shown.get("expires")),
        "the old secret works until ": format_cell(shown.get("previous_until")),
    }
    parts = (name + text for name, text in told.items() if text != "-")
    return f"{_called(shown)}: {'; '.join(parts)}"


def _tell_warnings(warnings: Iterable[str]) -> None:
    print_note(*(f"warning: {one}" for one in warnings))


def _show_entry(key: ApiKey, entry: Mapping[str, Any], *, shown: bool, as_json: bool) -> None:
    """Show the entry of a key for the settings; `shown`: and the key itself, this once."""
    # Any JSON string is a YAML string.
    lines = "\n    ".join(
        f"{name}: {escape_json(json.dumps(value, ensure_ascii=False))}"
        for name, value in entry.items()
    )
    secret, told = (_SHOWN_ONCE.format(key.text), {"key": key.text}) if shown else ("", {})
    text = f"{secret}For config/gateway.yaml:\n\nkeys:\n  - {lines}"
    print_answer({**told, **entry}, text, as_json=as_json)


# Where keys are. While a gateway runs, its admin API makes every change, so that one program knows
# the models, the settings in force and the audit log. If none answers, the command opens the store.


def _key(ask: Ask, name: str) -> dict[str, Any]:
    """Return one key; its name may hold anything, which a path can't. Raises CommandFailed."""
    keys: list[dict[str, Any]] = ask("GET", "/admin/keys", {"name": name, "revoked": "1"})["keys"]
    if keys:
        return min(keys, key=lambda key: key.get("state") == "revoked")
    raise CommandFailed(
        f"there is no key of the name or id '{name}'; 'llama-gateway keys list' shows all"
    )


def _key_path(key: Mapping[str, Any]) -> str:
    return f"/admin/keys/{quote(str(key['id']), safe='')}"


def _ask_desk(
    desk: KeyDesk,
    method: str,
    path: str,
    parameters: Mapping[str, str] | None = None,
    *,
    body: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """As `AdminClient.request`, with the words of the desk in errors. Raises StoreError, too."""
    import asyncio  # heavy for `--help`

    from gateway.callers.stored_keys import KeysRefused
    from gateway.errors import GatewayError

    try:
        return asyncio.run(_answer(desk, method, path, parameters or {}, body or {}))
    except GatewayError as error:
        found = error.problems if isinstance(error, KeysRefused) else ()
        problems = {"problems": [asdict(one) for one in found]}
        raise GatewayRefused(error.message, error.status, problems) from None


async def _answer(
    desk: KeyDesk,
    method: str,
    path: str,
    parameters: Mapping[str, str],
    body: Mapping[str, Any],
) -> dict[str, Any]:
    """Answer as the admin API does, of the settings and of the store that this command has open."""
    match method, *map(unquote, path.removeprefix("/admin/").split("/")):
        case "GET", "keys" if "name" in parameters:
            return {"keys": [await desk.show(parameters["name"])]}
        case "GET", "keys":
            return await desk.list(revoked="revoked" in parameters)
        case "POST", "keys":
            return await desk.create(body)
        case "POST", "keys", "import":
            return await desk.import_keys(body["keys"])
        case "POST", "keys", name, "rotate":
            return await desk.rotate(name, body)
        case "PATCH", "keys", name:
            changed = await desk.change(name, body)
            # Only of what this change names: of others were warned before.
            return changed if {"models", "group"} & body.keys() else {**changed, "warnings": ()}
        case "DELETE", "keys", name:
            return await desk.revoke(name)
        case "GET", "groups":
            return await desk.list_groups()
        case "PUT", "groups", name:
            return await desk.put_group(name, body)
        case "DELETE", "groups", name:
            return await desk.remove_group(name)
    raise AssertionError(method, path)


def _unknown_models(settings: Settings, nodes: Path, specs: Sequence[KeySpec]) -> Sequence[str]:
    """Return a warning for each model that no node of the inventory declares."""
    from gateway.config.inventory import load_inventory
    from gateway.config.scheduling import CATCH_ALL

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
