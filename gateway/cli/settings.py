"""`llama-gateway settings`: the versions of both files that were in force, and a way back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli import options
from gateway.cli.client import UNIT_STATE_FOLDER
from gateway.cli.options import CommandGroup, Json
from gateway.cli.terminal import (
    CommandFailed,
    failing_by,
    print_config_error,
    print_error,
    print_json,
    print_note,
    print_table,
)
from gateway.config.errors import ConfigError, single_line

if TYPE_CHECKING:
    from gateway.app.startup import Options
    from gateway.config.versions import FileHistory, Version

app = CommandGroup(
    "Earlier versions of the settings and of the inventory: list, compare, put back.\n\n"
    "A gateway keeps the text of each file that it takes into force, at its start and at each "
    "reload: the last 50 of a file, whole and with their secrets, in files that only its user can "
    "read. They lie in a hidden folder beside the file, or in the gateway's state folder if it may "
    "not write there. These commands read them on the gateway's machine, whether it runs or not.\n"
    "\n"
    "A version is named by its file and its time in UTC, such as gateway-20261130T081500Z (the "
    "settings) or nodes-20261130T081500Z (the inventory); a beginning will do, and gateway or "
    "nodes alone is the newest.",
    ("llama-gateway settings history", "which versions there are of both files"),
    ("llama-gateway settings diff", "what was edited since the gateway last read the files"),
    ("llama-gateway settings diff gateway-20261130", "what has changed since that version"),
    ("llama-gateway settings rollback gateway-20261130T081500Z", "write that version to the file"),
    ("llama-gateway settings rollback nodes", "undo edits that are not in force"),
)

VersionName = Annotated[
    str, typer.Argument(metavar="VERSION", help="A version's name, as history lists it.")
]
Secrets = Annotated[
    bool,
    typer.Option("--secrets", help="Show keys' hashes, passwords and the like, and mask nothing."),
]
COLUMNS = ("VERSION", "IN FORCE SINCE (UTC)", "LINES", "ADDED", "REMOVED", "")


@app.add(
    "history",
    ("llama-gateway settings history", "both files, the newest version first"),
    ("llama-gateway settings history --json", "for scripts; without any text"),
)
def history(
    *,
    nodes: options.NodesFile = options.DEFAULT_NODES,
    config: options.ConfigFile = None,
    as_json: Json = False,
) -> None:
    """List the versions of both files, the newest first.

    ADDED and REMOVED count lines against the version before. What is on the disk now is marked.
    """
    told = [one.describe(None) for one in _histories(nodes, config)]
    if as_json:
        print_json({"files": told})
        return
    for number, one in enumerate(told):
        if number:
            print()
        versions = one["versions"]
        kept = f"kept in {one['folder']}" if versions else "no version was kept yet"
        print(single_line(f"{one['file']}: {kept}"))
        if versions:
            print_table(COLUMNS, (_cells(version) for version in versions))
        if one["managed"]:
            print_note(f"{one['file']}: {one['managed']}")
        if versions and not any(version["on_disk"] for version in versions):
            what = "was edited since" if one["on_disk"] else "is gone"
            print_note(f"{one['file']} {what}: llama-gateway settings diff {one['kind']}")


def _cells(version: dict[str, Any]) -> list[object]:
    at = version["at"].replace("T", " ").removesuffix("Z")
    mark = "on the disk now" if version["on_disk"] else None
    counts = (version[name] for name in ("lines", "added", "removed"))
    return [version["name"], at, *counts, mark]


@app.add(
    "diff",
    ("llama-gateway settings diff", "both files against the versions that were last in force"),
    ("llama-gateway settings diff nodes-20261130T081500Z", "the inventory, since that version"),
    (
        "llama-gateway settings diff gateway-20261101 gateway-20261130",
        "from one version to another",
    ),
)
def diff(
    *,
    version: Annotated[
        str | None,
        typer.Argument(
            metavar="VERSION",
            show_default="the newest one of each file",
            help="The version to compare with.",
        ),
    ] = None,
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="OTHER",
            show_default="the file on the disk",
            help="A version of the same file; what has changed from VERSION to it is shown.",
        ),
    ] = None,
    nodes: options.NodesFile = options.DEFAULT_NODES,
    config: options.ConfigFile = None,
    secrets: Secrets = False,
    as_json: Json = False,
) -> None:
    """Show what has changed from a version to the file on the disk, or to another version.

    Lines with a minus were there before, lines with a plus are there since. Secrets are masked: a
    key's hash that has changed shows as two masked lines.
    """
    known = [*_histories(nodes, config)]
    if version is not None:
        pairs = [_find(known, version)]
    else:
        pairs = [(one, one.versions()[-1]) for one in known if one.versions()]
    after = None if other is None else _find(known, other)
    if after is not None and after[0] is not pairs[0][0]:
        raise CommandFailed(f"{version} and {other} are versions of two files", 2)
    told = [_difference(*pair, after[1] if after else None, secrets=secrets) for pair in pairs]
    if as_json:
        print_json({"files": told})
        return
    for one in told:
        _print_difference(one)
    if not told:
        print_note("no version of either file was kept yet: a gateway keeps them when it serves")


@app.add(
    "rollback",
    ("llama-gateway settings rollback gateway-20261130T081500Z", "the settings of that time"),
    ("llama-gateway settings rollback nodes", "the inventory as it was last in force"),
    ("llama-gateway settings rollback nodes-20261130 --dry-run", "check it and show the change"),
)
@options.takes(process=options.ProcessFlags)
def rollback(
    *,
    version: VersionName,
    nodes: options.NodesFile = options.DEFAULT_NODES,
    process: options.ProcessFlags,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check it, show what would change, write nothing.")
    ] = False,
    secrets: Secrets = False,
    as_json: Json = False,
) -> None:
    """Write an earlier version to its file, if serve would start with it.

    It is checked as llama-gateway check does it, with the flags and the variables of serve, and
    together with the other file. The file is replaced at once for every reader, and keeps its owner
    and its mode; a link stays a link. What was there is kept as a version first. A file that
    Ansible or a ConfigMap writes is not touched: the difference is printed instead, to be put into
    its source. A running gateway reads the file by itself within seconds.
    """
    from gateway.app.startup import check_text
    from gateway.config.versions import FileManaged

    given = process.startup(nodes)
    found, wanted = _find([*_histories_of(given)], version)
    text = wanted.read()
    told = _difference(found, None, wanted, secrets=secrets)
    if problems := check_text(given, found.kind, text):
        if as_json:
            print_json({"written": False, "problems": [str(one) for one in problems], **told})
        else:
            print_config_error(ConfigError(problems))
        raise CommandFailed(f"{found.file} was not changed: {wanted.name} can't be in force", 2)
    result = {"written": False, "version": wanted.name, "kept": None, **told}
    managed = found.managed_by()
    if managed or dry_run:
        if as_json:
            print_json({**result, "managed": managed})
        else:
            _print_difference(told)
        if managed:
            raise CommandFailed(f"{found.file} was not changed: {managed}")
        print_note(f"{wanted.name} is valid; nothing was written")
        return
    with failing_by(FileManaged):
        try:
            kept = found.put_back(text, time.time())
        except OSError as error:
            why = error.strerror or str(error)
            raise CommandFailed(
                f"{found.file} was not changed: it can't be replaced ({why}); sudo may be missing, "
                "or the file alone is mounted: replace it where it comes from"
            ) from None
    if as_json:
        print_json({**result, "written": True, "kept": None if kept is None else kept.name})
        return
    _print_difference(told)
    print_note(f"{found.file} is that of {wanted.name} again")
    if kept is not None:
        print_note(f"what was there is kept as {kept.name}")
    print_note(
        "a running gateway reads it within seconds; reload it to be told at once what it says: "
        "POST /admin/reload, the page Settings, or SIGHUP and the log"
    )


def _histories(nodes: Path, config: Path | None) -> Iterator[FileHistory]:
    from gateway.app.startup import Options

    yield from _histories_of(Options(nodes, options.settings_file(config)))


def _histories_of(given: Options) -> Iterator[FileHistory]:
    """The histories of both files, and where the installed gateway keeps them."""
    from gateway.app.startup import histories

    for one in histories(given).values():
        places = [*one.folders]
        if "STATE_DIRECTORY" not in os.environ:
            places += histories(replace(given, state_dir=UNIT_STATE_FOLDER))[one.kind].folders
        found = replace(one, folders=tuple(dict.fromkeys(places)))
        for folder in found.closed():
            print_note(f"{folder} can't be read by this user: with sudo its versions are seen too")
        yield found


def _find(known: list[FileHistory], name: str) -> tuple[FileHistory, Version]:
    from gateway.config.versions import VersionError, find_version

    with failing_by(VersionError, status=2):
        return find_version(known, name)


def _difference(
    of: FileHistory, before: Version | None, after: Version | None, *, secrets: bool
) -> dict[str, Any]:
    """What has changed from one version to another; None: the file on the disk."""
    from gateway.config.versions import difference

    texts = [of.on_disk() or "" if one is None else one.read() for one in (before, after)]
    names = {"from": before and before.name, "to": after and after.name}
    shown = difference(texts[0], texts[1], with_secrets=secrets)
    return {"file": str(of.file), **names, **shown._asdict()}


def _print_difference(told: dict[str, Any]) -> None:
    """Print it as `diff -u` does, in colours on a terminal."""
    from rich.text import Text

    from gateway.cli.terminal import console

    before, after = (told[name] or told["file"] for name in ("from", "to"))
    if not told["lines"]:
        print_note(f"{after} is as {before}")
        return
    out = console()
    out.print(Text(single_line(f"--- {before}")), soft_wrap=True)
    out.print(Text(single_line(f"+++ {after}")), soft_wrap=True)
    styles = {"-": "red", "+": "green", "@": "cyan"}
    for line in told["lines"]:
        shown = "".join(one if one.isprintable() or one == "\t" else "\ufffd" for one in line)
        out.print(Text(shown, style=styles.get(line[0], "")), soft_wrap=True)
    if told["cut"]:
        print_error("the difference is longer: only its beginning is shown")
