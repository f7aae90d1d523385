"""Which nodes are drained: a small file, so that a drain lasts over a restart."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

LARGEST_FILE = 1 << 20
"""Bytes; ten thousand long names."""


class _File(msgspec.Struct):
    drained: list[str]


class Drains:
    """The names of drained nodes. `path` None: kept in memory only.

    A name stays though its node leaves the inventory: it is drained when it comes back.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._names = set() if path is None else _read(path)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        """Note that this node is drained."""
        if name not in self._names:
            self._names.add(name)
            self._write()

    def remove(self, name: str) -> None:
        """Note that this node is no longer drained."""
        if name in self._names:
            self._names.discard(name)
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        fresh = self._path.with_name(self._path.name + ".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with fresh.open("wb") as file:
                file.write(msgspec.json.encode(_File(sorted(self._names))))
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._path)
        except OSError as error:
            log.warning(
                "Drained nodes could not be saved and will be forgotten at a restart: %s", error
            )


def _read(path: Path) -> set[str]:
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE)
    except FileNotFoundError:
        return set()
    except OSError as error:
        log.warning("Drained nodes could not be read, none is drained: %s", error)
        return set()
    try:
        return set(msgspec.json.decode(raw, type=_File).drained)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        bad = path.with_name(path.name + ".bad")
        log.warning("%s is damaged (%s): kept as %s, no node is drained", path, error, bad.name)
        try:
            path.replace(bad)
        except OSError:
            log.warning("%s could not be kept aside", path)
        return set()
