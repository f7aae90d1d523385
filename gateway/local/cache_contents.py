"""What the cache folder holds, who uses it now, and its removal.

Only what this program is known to make is listed and removed: the folder may be one that holds
other things too.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gateway.local.cache import DEMO_MODELS, DOWNLOADS, LOGS, file_lock, unused_file
from gateway.local.download import read_record
from gateway.local.gguf import model_parts

ROOT = Path("/")
Kind = Literal["model", "partial", "demo", "logs", "measurements"]
DOWNLOAD_FOLDER = re.compile(r"[0-9a-f]{16}")
DEMO_MODEL = re.compile(r"demo-[a-z]+-v\d+\.gguf")
MEASUREMENT_FILES = ("tuning.jsonl", "tuning.jsonl.1")


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Something that the cache holds, and that is removed as a whole."""

    name: str  # unique in the cache
    kind: Kind
    files: tuple[Path, ...]  # those whose use counts; a model's first
    size: int  # bytes on the disk
    last_used: float  # Unix time
    source: str | None = None  # the address it was downloaded from, without secrets
    expected: int | None = None  # bytes of a partial download, once it is whole
    sha256: str | None = None
    users: tuple[int, ...] = ()  # PIDs that have it open now
    locked: bool = False  # some process downloads it, or serves from it

    @property
    def in_use(self) -> bool:
        """Whether it must stay."""
        return self.locked or bool(self.users)


def cache_contents(cache: Path, sysroot: Path = ROOT) -> list[CacheEntry]:
    """Return what the cache holds, the largest first. Raises OSError."""
    found = [*_downloads(cache), *_generated(cache)]
    names = [entry.name for entry in found]
    users = open_files(cache, sysroot)
    rows = []
    for entry in found:
        pids = sorted({pid for path in entry.files for pid in users.get(path.resolve(), ())})
        name = entry.name
        if names.count(name) > 1 and entry.kind in {"model", "partial"}:
            name += f"@{entry.files[0].parent.name[:8]}"  # a part of the address's key
        with _held(entry) as is_free:
            rows.append(replace(entry, name=name, users=tuple(pids), locked=not is_free))
    return sorted(rows, key=lambda entry: (-entry.size, entry.name))


def remove_entry(entry: CacheEntry) -> bool:
    """Remove an entry; return False where a process uses it. Raises OSError."""
    with _held(entry) as is_free:
        if entry.users or not is_free:
            return False
        if entry.kind in {"model", "partial"}:
            # Nothing but this address's files is in here. The empty lock file beside it stays: a
            # process may wait for it that would not see another one.
            shutil.rmtree(entry.files[0].parent)
        else:
            for path in entry.files:
                path.unlink(missing_ok=True)
    return True


@contextmanager
def _held(entry: CacheEntry) -> Iterator[bool]:
    """Hold an entry against downloads and `models_in_use`; yield False where one has it already."""
    is_free = True
    with ExitStack() as stack:
        with suppress(OSError):  # another user's, or gone
            for path in entry.files if entry.kind in {"model", "demo"} else ():
                is_free = stack.enter_context(unused_file(path)) and is_free
            if entry.kind in {"model", "partial"}:
                try:
                    stack.enter_context(file_lock(entry.files[0].parent, timeout=0))
                except TimeoutError:
                    is_free = False
        yield is_free


def open_files(folder: Path, sysroot: Path = ROOT) -> dict[Path, set[int]]:
    """Return which processes have which files below `folder` open or mapped, as `/proc` shows it.

    Processes of other users are seen by root alone.
    """
    below = f"{folder.resolve()}{os.sep}"
    found: dict[Path, set[int]] = {}
    own = str(os.getpid())
    for process in _children(sysroot / "proc"):
        if not process.name.isdecimal() or process.name == own:
            continue
        names = set[str]()
        for link in _children(process / "fd"):
            with suppress(OSError):
                names.add(str(link.readlink()))
        with suppress(OSError), (process / "maps").open(errors="replace") as lines:
            for line in lines:  # address, flags, offset, device, inode, path
                names.update(line.rstrip("\n").split(maxsplit=5)[5:])
        for name in names:
            if name.startswith(below):
                found.setdefault(Path(name), set()).add(int(process.name))
    return found


def _downloads(cache: Path) -> Iterator[CacheEntry]:
    for folder in _children(cache / DOWNLOADS):
        if folder.is_symlink() or not folder.is_dir() or not DOWNLOAD_FOLDER.fullmatch(folder.name):
            continue
        whole = sorted(path for path in _children(folder) if path.suffix == ".gguf")
        parts = sorted(path for path in _children(folder) if path.name.endswith(".gguf.part"))
        files = whole or parts
        if not files:
            continue
        target = whole[0] if whole else parts[0].with_suffix("")
        record = read_record(target)
        is_whole = bool(whole) and all(path.is_file() for path in model_parts(whole[0]))
        size = sum(path.stat().st_size for path in _children(folder))
        yield CacheEntry(
            name=target.name,
            # A split model of which a file is missing is none yet.
            kind="partial" if parts or not is_whole else "model",
            files=(*whole, *parts),
            size=size,
            last_used=max(_last_used(path) for path in files),
            source=None if record is None else record.url,
            expected=record.total if record is not None and len(files) == 1 and parts else None,
            sha256=None if record is None or len(whole) != 1 else record.sha256,
        )


def _generated(cache: Path) -> Iterator[CacheEntry]:
    for path in _children(cache / DEMO_MODELS):
        if DEMO_MODEL.fullmatch(path.name) and path.is_file():
            yield CacheEntry(path.name, "demo", (path,), path.stat().st_size, _last_used(path))
    logs = [path for path in _children(cache / LOGS) if ".log" in path.suffixes]
    measured = [path for name in MEASUREMENT_FILES if (path := cache / name).is_file()]
    kinds: tuple[tuple[Kind, list[Path]], ...] = (("logs", logs), ("measurements", measured))
    for kind, paths in kinds:
        if paths:
            size = sum(path.stat().st_size for path in paths)
            changed = max(path.stat().st_mtime for path in paths)
            yield CacheEntry(kind, kind, tuple(sorted(paths)), size, changed)


def _last_used(path: Path) -> float:
    """The later of use and change: a use is written as the time of the last access."""
    stat = path.stat()
    return max(stat.st_atime, stat.st_mtime)


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
