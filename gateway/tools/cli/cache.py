"""`llama-gateway cache`: what the cache folder holds, and its removal."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING

import typer

from gateway.tools.cli.options import Json, examples_epilog
from gateway.tools.cli.terminal import (
    CommandFailed,
    HelpCommand,
    HelpGroup,
    print_error,
    print_json,
    print_note,
    print_table,
)

if TYPE_CHECKING:
    from gateway.tools.local.cache_contents import CacheEntry

app = typer.Typer(
    cls=HelpGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    help=(
        "Downloaded models, demo models, logs and measurements that are kept on this machine.\n\n"
        "They are in the folder that LLAMA_GATEWAY_CACHE names, by default "
        "~/.cache/llama-gateway."
    ),
    epilog=examples_epilog(
        ("llama-gateway cache list", "what there is, how large, and since when unused"),
        ("llama-gateway cache remove mistral-7b.gguf", "one model, or what has arrived of it"),
        ("llama-gateway cache remove --older-than 30d", "all that was not used for a month"),
    ),
)

_LIST_EXAMPLES = examples_epilog(
    ("llama-gateway cache list", "the largest first"),
    ("llama-gateway cache list --json", "for scripts: bytes, Unix times, PIDs, digests"),
)

_REMOVE_EXAMPLES = examples_epilog(
    ("llama-gateway cache remove mistral-7b.gguf", "one model, or what has arrived of it"),
    ("llama-gateway cache remove --older-than 30d --dry-run", "what would go"),
    ("llama-gateway cache remove --all", "all but what is in use"),
)

COLUMNS = ("NAME", "KIND", "SIZE", "LAST USED", "IN USE", "SOURCE")


@app.command("list", cls=HelpCommand, epilog=_LIST_EXAMPLES)
def list_cache(as_json: Json = False) -> None:
    """List what the cache holds: sizes, last use, and the processes that use it now."""
    from gateway.tools.local.cache import cache_folder
    from gateway.tools.local.cache_contents import cache_contents

    folder = cache_folder()
    entries = cache_contents(folder)
    total = sum(entry.size for entry in entries)
    if as_json:
        print_json(
            {"folder": str(folder), "bytes": total, "entries": [_as_dict(one) for one in entries]}
        )
        return
    if not entries:
        print_note(f"{folder}: the cache is empty")
        return
    print_table(COLUMNS, [_row(entry) for entry in entries])
    print_note(f"{_size(total)} in {folder}")


@app.command("remove", cls=HelpCommand, epilog=_REMOVE_EXAMPLES)
def remove_cache(
    names: list[str] | None = typer.Argument(
        None, metavar="[NAME]...", help="Names of cache list.", show_default=False
    ),
    everything: bool = typer.Option(False, "--all", help="Remove all that is not in use."),
    older_than: str | None = typer.Option(
        None,
        metavar="TIME",
        show_default=False,
        help="Remove what was not used for so long, such as 30d or 12h.",
    ),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Say what would be removed, and remove nothing."
    ),
    as_json: Json = False,
) -> None:
    """Remove models, partial downloads, logs or measurements.

    What a process uses now is refused when it is named (status 1), and left out by --all and
    --older-than.
    """
    from gateway.tools.local.cache import cache_folder
    from gateway.tools.local.cache_contents import CacheEntry, cache_contents

    if sum((bool(names), everything, older_than is not None)) != 1:
        raise CommandFailed("give one of: names, --all, --older-than TIME", 2)
    entries = cache_contents(cache_folder())
    chosen = _chosen(entries, names or [], older_than)
    removed, refused = list[CacheEntry](), list[CacheEntry]()
    for entry in chosen:
        (removed if _remove(entry, dry_run=dry_run) else refused).append(entry)
    freed = sum(entry.size for entry in removed)
    if as_json:
        print_json(
            {
                "removed": [_as_dict(entry) for entry in removed],
                "in_use": [_as_dict(entry) for entry in refused],
                "bytes": freed,
                "dry_run": dry_run,
            }
        )
    else:
        for entry in removed:
            print(f"{'would remove' if dry_run else 'removed'} {entry.name} ({_size(entry.size)})")
        print_note(f"{_size(freed)} {'would be' if dry_run else 'are'} free again")
    for entry in refused:
        say = print_error if names else print_note
        say(f"{entry.name} is in use{_by(entry)} and stays. Remedy: end what uses it first")
    raise typer.Exit(1 if names and refused else 0)


def _remove(entry: CacheEntry, *, dry_run: bool) -> bool:
    """Remove an entry; return False where some process uses it."""
    from gateway.tools.local.cache_contents import InUseError, remove_entry

    if entry.in_use:
        return False
    try:
        if not dry_run:
            remove_entry(entry)
    except InUseError:  # since it was listed
        return False
    return True


def _chosen(
    entries: list[CacheEntry], names: list[str], older_than: str | None
) -> list[CacheEntry]:
    """Return the entries to remove. Raises CommandFailed."""
    from gateway.config.fields import parse_duration

    if names:
        by_name = {entry.name: entry for entry in entries}
        for name in names:
            if name not in by_name:
                alike = [known for known in by_name if known.startswith(f"{name}@")]
                raise CommandFailed(
                    f"{name}: the cache holds nothing of that name"
                    + (f"; there are {', '.join(alike)}" if alike else "")
                    + ". Remedy: a name of llama-gateway cache list",
                    2,
                )
        return [by_name[name] for name in dict.fromkeys(names)]
    if older_than is None:
        return entries
    try:
        seconds = parse_duration(older_than)
    except ValueError:
        raise CommandFailed(f"--older-than {older_than}: not a time, such as 30d", 2) from None
    if seconds < 0:
        raise CommandFailed(f"--older-than {older_than}: must not be negative", 2)
    return [entry for entry in entries if time.time() - entry.last_used >= seconds]


def _row(entry: CacheEntry) -> list[object]:
    size = _size(entry.size)
    if entry.expected:
        size += f" of {_size(entry.expected)}"
    used = datetime.fromtimestamp(entry.last_used).astimezone()
    return [entry.name, entry.kind, size, f"{used:%Y-%m-%d %H:%M}", _use(entry), entry.source]


def _use(entry: CacheEntry) -> str:
    if entry.users:
        return f"by {', '.join(map(str, entry.users))}"
    return "yes" if entry.locked else ""


def _by(entry: CacheEntry) -> str:
    if not entry.users:
        return ""
    return f" by process{'es' if len(entry.users) > 1 else ''} {', '.join(map(str, entry.users))}"


def _as_dict(entry: CacheEntry) -> dict[str, object]:
    return {
        "name": entry.name,
        "kind": entry.kind,
        "bytes": entry.size,
        "expected_bytes": entry.expected,
        "last_used": entry.last_used,
        "in_use": entry.in_use,
        "pids": list(entry.users),
        "source": entry.source,
        "sha256": entry.sha256,
        "files": [str(path) for path in entry.files],
    }


def _size(size: int) -> str:
    from gateway.tools.local.memory import format_gib

    return format_gib(size) if size >= 1 << 20 else f"{size / 1024:.0f} KiB"
