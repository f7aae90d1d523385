"""`llama-gateway settings`: the versions of both files that were in force, and a way back."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.cli import options
from gateway.cli.client import UNIT_STATE_FOLDER
from gateway.cli.options import CommandGroup, argument, flag
from gateway.cli.terminal import (
    CommandFailed,
    WrongUsage,
    failing_by,
    print_config_error,
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
    "settings) or nodes-20261130T081500Z (the inventory); gateway or nodes alone is the newest.",
    ("llama-gateway settings history", "which versions there are of both files"),
    ("llama-gateway settings diff", "what was edited since the gateway last read the files"),
    ("llama-gateway settings diff gateway-20261130T081500Z", "what has changed since then"),
    ("llama-gateway settings rollback gateway-20261130T081500Z", "write that version to the file"),
    ("llama-gateway settings rollback nodes", "undo edits that are not in force"),
)

COLUMNS = ("VERSION", "IN FORCE SINCE (UTC)", "LINES", "ADDED", "REMOVED", "")


@app.add("history")
def history(
    *,
    nodes: Path = options.NODES,
    config: Path | None = options.CONFIG,
    as_json: bool = options.JSON,
) -> None:
    """List the versions of both files, the newest first.

    ADDED and REMOVED count lines against the version before. What is on the disk now is marked.
    """
    given = options.ProcessFlags(config=config).startup(nodes)
    told = [one.describe() for one in _histories(given)]
    if as_json:
        print_json({"files": told})
        return
    for one in told:
        versions = one["versions"]
        kept = f"kept in {one['folder']}" if versions else "no version that this user may read"
        print(single_line(f"{one['file']}: {kept}"))
        if versions:
            print_table(COLUMNS, map(_cells, versions))
            if not any(version["on_disk"] for version in versions):
                what = "was edited since" if one["on_disk"] else "is gone"
                print_note(f"{one['file']} {what}: llama-gateway settings diff {one['kind']}")
        if one["managed"]:
            print_note(f"{one['file']}: {one['managed']}")


def _cells(version: dict[str, Any]) -> list[object]:
    at = version["at"].replace("T", " ").removesuffix("Z")
    mark = "on the disk now" if version["on_disk"] else None
    return [version["name"], at, *(version[one] for one in ("lines", "added", "removed")), mark]


@app.add("diff")
def diff(
    *,
    version: str | None = argument(
        "VERSION", "As history has it.", None, show_default="the newest one of each file"
    ),
    nodes: Path = options.NODES,
    config: Path | None = options.CONFIG,
    secrets: bool = flag.switch(
        "--secrets", "Show keys' hashes, passwords and the like, and mask nothing."
    ),
    as_json: bool = options.JSON,
) -> None:
    """Show what has changed from a version to the file on the disk.

    Lines with a minus were there before, lines with a plus are there since. Secrets are masked: a
    key's hash that has changed shows as two masked lines.
    """
    from gateway.config.versions import difference

    known = _histories(options.ProcessFlags(config=config).startup(nodes))
    pairs = [(one, one.versions()[-1]) for one in known if version is None and one.versions()]
    if version is not None:
        pairs = [_find(known, version)]
    told = []
    for of, before in pairs:
        names = {"file": str(of.file), "from": before.name}
        texts = before.read(), of.on_disk() or ""
        told.append(names | difference(*texts, with_secrets=secrets))
    if as_json:
        print_json({"files": told})
        return
    for one in told:
        _print_difference(one["from"], one["file"], one)
    if not told:
        print_note("no version of either file was kept yet: a gateway keeps them when it serves")


@app.add("rollback")
def rollback(
    *,
    version: str = argument("VERSION", "As history has it."),
    nodes: Path = options.NODES,
    process: options.ProcessFlags,
    as_json: bool = options.JSON,
) -> None:
    """Write an earlier version to its file, if serve would start with it.

    It is checked as llama-gateway check does it, with the flags and the variables of serve, and
    together with the other file. The file is replaced at once for every reader, and keeps its owner
    and its mode; a link stays a link. What was there is kept as a version first. A file that
    Ansible writes is not touched: the difference is printed instead, to be put into the playbook's
    variables. A running gateway reads the file by itself within seconds.
    """
    from gateway.app.startup import check_text
    from gateway.config.versions import difference

    given = process.startup(nodes)
    found, wanted = _find(_histories(given), version)
    text = wanted.read()
    if problems := check_text(given, found.kind, text):
        print_config_error(ConfigError(problems))
        raise WrongUsage(f"{found.file} was not changed: {wanted.name} can't be in force")
    told = difference(found.on_disk() or "", text)
    if not as_json:
        _print_difference(str(found.file), wanted.name, told)
    if managed := found.managed():
        raise CommandFailed(f"{found.file} was not changed: {managed}")
    try:
        kept = found.put_back(text, time.time())
    except OSError as error:
        raise CommandFailed(
            f"{found.file} was not changed: it can't be replaced ({error.strerror or error}); sudo "
            "may be missing; a file of a ConfigMap, or one that is mounted alone, is replaced "
            "where it comes from"
        ) from None
    if as_json:
        names = {"version": wanted.name, "kept": None if kept is None else kept.name}
        print_json({"file": str(found.file), **names, **told})
        return
    print_note(f"{found.file} is that of {wanted.name} again")
    if kept is not None:
        print_note(f"what was there is kept as {kept.name}")
    print_note(
        "a running gateway reads it within seconds; reload it to be told at once what it says: "
        "POST /admin/reload, the page Settings, or SIGHUP and the log"
    )


def _histories(given: Options) -> list[FileHistory]:
    """The histories of both files, and where the installed gateway keeps them."""
    from gateway.app.startup import histories

    installed = histories(replace(given, state_dir=UNIT_STATE_FOLDER))
    unit = {} if "STATE_DIRECTORY" in os.environ else installed
    return [
        replace(one, folders=(*one.folders, *(unit[kind].folders[1:] if unit else ())))
        for kind, one in histories(given).items()
    ]


def _find(known: list[FileHistory], name: str) -> tuple[FileHistory, Version]:
    from gateway.config.versions import VersionError, find_version

    with failing_by(VersionError, status=2):
        return find_version(known, name)


def _print_difference(before: str, after: str, told: dict[str, Any]) -> None:
    """Print it as `diff -u` does."""
    if not told["lines"]:
        print_note(f"{after} is as {before}")
        return
    for line in (f"--- {before}", f"+++ {after}", *told["lines"]):
        print("".join(one if one.isprintable() or one == "\t" else "\ufffd" for one in line))
    if told["cut"]:
        print_note("the difference is longer: only its beginning is shown")
