"""`llama-gateway store`: copies whole stores, as backups, back, and to other databases."""

from __future__ import annotations

import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.cli import options
from gateway.cli.client import named_store, read_settings
from gateway.cli.options import CommandGroup, argument, flag
from gateway.cli.terminal import CommandFailed, WrongUsage, print_answer, print_note

if TYPE_CHECKING:
    from gateway.store.database import StoreLocation

app = CommandGroup(
    "Copies of the store: keys, ledger, audit log, batches, and what was learnt.\n\n"
    "A copy is of one moment, also while a gateway runs. It is checked row by row, and appears "
    "when it is whole. Where it goes there must be no store yet. A place is a file of SQLite, "
    "or a URL; in quotes, ${NAME} in a URL is a variable, so that no password is in the list "
    "of processes.",
    ("llama-gateway store backup /backup/gateway.db", "the store that the settings name"),
    ("llama-gateway store restore /backup/gateway.db", "back to where the settings say"),
    (
        "llama-gateway store copy gateway.db 'postgresql://gateway:${PASSWORD}@db/gateway'",
        "from SQLite to PostgreSQL; the other way round likewise",
    ),
)

_PLACE = "A file of SQLite, sqlite:///FILE or postgresql://…"
FROM = argument("FROM", _PLACE)
TO = argument("TO", _PLACE)
RUN_BATCHES = flag.switch(
    "--run-batches",
    "Let unfinished batches run at once. Only if nobody runs those of the source.",
)


@app.add("backup")
def backup(
    *, to: str = TO, config: Path | None = options.CONFIG, as_json: bool = options.JSON
) -> None:
    """Copy the store that the settings name to a new file, or to an empty database.

    Callers' files are not in it: copy their folder afterwards.
    """
    _copy(named_store(read_settings(config)), _place(to), pause_batches=False, as_json=as_json)


@app.add("restore")
def restore(
    *,
    from_: str = FROM,
    config: Path | None = options.CONFIG,
    run_batches: bool = RUN_BATCHES,
    as_json: bool = options.JSON,
) -> None:
    """Copy a backup to where the settings have the store; no gateway runs there.

    Every unfinished batch is paused: 'llama-gateway batch resume ID' runs it.
    """
    target = named_store(read_settings(config))
    _copy(_place(from_), target, pause_batches=not run_batches, as_json=as_json)


@app.add("copy")
def copy(
    *,
    from_: str = FROM,
    to: str = TO,
    run_batches: bool = RUN_BATCHES,
    as_json: bool = options.JSON,
) -> None:
    """Copy a store to another place, such as from SQLite to PostgreSQL.

    To move a gateway, stop it, copy its store, and name the new place in its settings (store.url).
    Every unfinished batch is paused: 'llama-gateway batch resume ID' runs it.
    """
    _copy(_place(from_), _place(to), pause_batches=not run_batches, as_json=as_json)


def _place(text: str) -> StoreLocation:
    """Where a store is, by a URL or the path of a file. Raises CommandFailed."""
    from gateway.config.yaml_file import InterpolationError, interpolate
    from gateway.store.database import locate_store

    try:
        url = interpolate(text, os.environ) if "://" in text else f"sqlite:///{Path(text)}"
        return locate_store(url, Path())
    except (InterpolationError, ValueError) as error:
        raise WrongUsage(
            f"this is no place of a store: {error}: name a file, sqlite:///FILE, or "
            "postgresql://USER@HOST/DATABASE"
        ) from None


def _copy(
    source: StoreLocation, target: StoreLocation, *, pause_batches: bool, as_json: bool
) -> None:
    """Copy, and tell how far it is and what was done. Raises CommandFailed."""
    from gateway.cli.progress import StatusProgress
    from gateway.store.copying import copy_store
    from gateway.store.failures import StoreError

    # So that SIGTERM, like Ctrl-C, ends what is under way and removes what is half done.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    print_note(f"from {source.shown} to {target.shown}")
    try:
        with StatusProgress("store") as progress:
            copied = copy_store(
                source,
                target,
                pause_batches=pause_batches,
                on_rows=lambda table, done, total: progress.show(
                    f"{done:,} of {total:,} rows, {table}", table, done, total
                ),
            )
    except StoreError as error:
        raise CommandFailed(f"{error}. Nothing was copied") from None
    finally:
        signal.signal(signal.SIGTERM, before)
    rows, tables = sum(copied.tables.values()), len(copied.tables)
    told = {"from": source.shown, "to": target.shown, "rows": rows, **asdict(copied)}
    text = f"{rows:,} rows of {tables} tables, digest {copied.digest[:16]}, checked"
    print_answer(told, text, as_json=as_json)
    if copied.used_by is not None:
        print_note(f"{copied.used_by} uses the source: what it writes from now on is not copied")
    if copied.paused_batches:
        print_note(
            f"{copied.paused_batches:,} unfinished batches are paused: "
            "'llama-gateway batch resume ID' runs one"
        )
    if copied.folders:
        print_note(
            f"{sum(copied.folders.values()):,} files and unfinished batches need the folder "
            "'batches' of their gateway, or its batches.folder: copy that too, after the store "
            f"(its folder-id is {', '.join(sorted(copied.folders))})"
        )
