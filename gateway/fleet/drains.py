"""Which nodes are drained: a small file, so that a drain lasts over a restart."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from gateway.fleet import state_file

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
        try:
            state_file.write(self._path, _File(sorted(self._names)))
        except OSError as error:
            log.warning(
                "Drained nodes could not be saved and will be forgotten at a restart: %s", error
            )


def _read(path: Path) -> set[str]:
    found = state_file.read(path, _File, LARGEST_FILE, "no node is drained")
    return set() if found is None else set(found.drained)
