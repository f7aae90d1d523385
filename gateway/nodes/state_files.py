"""What the fleet keeps over a restart: drained nodes, paused and pinned models, and properties.

Each has a JSON file of its own, which is replaced as a whole, and read without trust.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from gateway.config.inventory import NodeSpec
from gateway.nodes.server_properties import ServerProperties, is_plausible, server_key
from gateway.system import read_state, write_state

log = logging.getLogger(__name__)
LARGEST_NAMES_FILE = 1 << 20  # bytes; ten thousand long names


class StoredNames:
    """Names in a file of their own. `path` None: kept in memory only."""

    def __init__(self, path: Path | None, key: str, what: str, lost: str) -> None:
        """`key` of the list in the file; `what` they name; `lost`: if it can't be read."""
        self._path, self._key, self._what = path, key, what
        self.names: frozenset[str] = frozenset()  # all of them; replaced at each change
        if path is not None:
            found = read_state(path, dict[str, list[str]], LARGEST_NAMES_FILE, lost)
            self.names = frozenset((found or {}).get(key, ()))
        self._saved = self.names
        self._writing = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def keep(self, name: str, *, kept: bool = True) -> None:
        """Keep this name, over a restart once it is saved; or no longer."""
        self.names = self.names | {name} if kept else self.names - {name}

    def save(self) -> None:
        """Write the names if they have changed. It waits for the disk: call it in a thread."""
        with self._writing:
            names = self.names
            if self._path is None or names == self._saved:
                return
            try:
                write_state(self._path, {self._key: sorted(names)})
            except OSError as error:
                words = "%s could not be saved and will be forgotten at a restart: %s"
                log.warning(words, self._what, error)
            else:
                self._saved = names


class OperatorOrders:
    """Which nodes are drained, and which models paused or pinned, by name.

    A name that is gone keeps its entry: a node that comes back to the inventory is still drained.
    """

    def __init__(self, file: Callable[[str], Path] | None = None) -> None:
        """`file` gives the path of each file; None: they are kept in memory only."""

        def names(name: str, key: str, what: str, lost: str) -> StoredNames:
            return StoredNames(None if file is None else file(name), key, what, lost)

        self.drained = names("drains", "drained", "Drained nodes", "no node is drained")
        self.paused = names("paused", "paused", "Paused models", "no model is paused")
        self.pinned = names("pinned", "pinned", "Pinned models", "operators have pinned no model")

    def save(self) -> None:
        """Write what has changed. It waits for the disk: call it in a thread."""
        for names in (self.drained, self.paused, self.pinned):
            names.save()


PROPERTIES_VERSION = 1  # version of the file's format; a file of another version is not read
# Servers that are remembered; those whose properties are unchanged for longest are dropped.
MOST_SERVERS = 10_000
# Bytes. Servers that do not fit are left out: a thousand of 16 KiB each (hundreds of names) fit.
LARGEST_PROPERTIES_FILE = 16 << 20
# Seconds from a change until the file is written, so that a fleet that starts is written once.
SAVE_AFTER = 1.0
PROPERTIES_LOST = "what nodes reported before is forgotten"


class _StoredServer(msgspec.Struct):
    key: str
    facts: ServerProperties


class _PropertiesFile(msgspec.Struct):
    version: int
    servers: list[msgspec.Raw]


class PropertiesStore:
    """The last known properties of each server. `path` None: kept in memory only.

    A server is known by its node's name and its address: at another address it is another server.
    """

    def __init__(self, path: Path | None = None, *, most_servers: int = MOST_SERVERS) -> None:
        self._path, self._most_servers = path, most_servers
        self._servers = {} if path is None else _read_properties(path, most_servers)
        self._changed = asyncio.Event()
        self._writing = threading.Lock()

    def recall(self, spec: NodeSpec) -> ServerProperties:
        """What this server reported last; empty if it never did."""
        known = self._servers.get(server_key(spec, spec.name))
        return ServerProperties() if known is None else _copy_properties(known, remembered=True)

    def record(self, spec: NodeSpec, properties: ServerProperties) -> None:
        """Keep what this server has reported, if it is new."""
        if properties.remembered or properties == _NO_PROPERTIES:
            return
        key = server_key(spec, spec.name)
        if self._servers.get(key) != properties:
            self._servers.pop(key, None)
            self._servers[key] = _copy_properties(properties)
            if len(self._servers) > self._most_servers:
                del self._servers[next(iter(self._servers))]
            self._changed.set()

    async def save_loop(self) -> None:
        """Write changes, until cancelled; then `save` writes the rest."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(SAVE_AFTER)
            self._changed.clear()
            await asyncio.to_thread(self._write, tuple(self._servers.items()))

    def save(self) -> None:
        """Write changes now."""
        if self._changed.is_set():
            self._changed.clear()
            self._write(tuple(self._servers.items()))

    def stop_saving(self) -> None:
        """Write no more: a successor process does."""
        self._path = None

    def _write(self, known: tuple[tuple[str, ServerProperties], ...]) -> None:
        servers, left = [], LARGEST_PROPERTIES_FILE - 1024
        for key, properties in reversed(known):
            entry = msgspec.json.encode(_StoredServer(key, properties))
            left -= len(entry) + 1
            if left < 0:
                log.warning(
                    "Nodes report too much to be saved: what some of them serve will be forgotten "
                    "at a restart"
                )
                break
            servers.append(msgspec.Raw(entry))
        servers.reverse()
        with self._writing:
            if self._path is None:
                return
            try:
                write_state(self._path, _PropertiesFile(PROPERTIES_VERSION, servers))
            except OSError as error:
                log.warning(
                    "What nodes serve could not be saved and will be forgotten at a restart: %s",
                    error,
                )


_NO_PROPERTIES = ServerProperties()


def _copy_properties(properties: ServerProperties, *, remembered: bool = False) -> ServerProperties:
    return dataclasses.replace(properties, refused=set(properties.refused), remembered=remembered)


def _read_properties(path: Path, most_servers: int) -> dict[str, ServerProperties]:
    found = read_state(path, _PropertiesFile, LARGEST_PROPERTIES_FILE, PROPERTIES_LOST)
    if found is None:
        return {}
    if found.version != PROPERTIES_VERSION:
        log.warning(
            "%s is of version %d, not %d: %s",
            path,
            found.version,
            PROPERTIES_VERSION,
            PROPERTIES_LOST,
        )
        return {}
    known: dict[str, ServerProperties] = {}
    for raw in found.servers[:most_servers]:
        try:
            one = msgspec.json.decode(raw, type=_StoredServer)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # Another release wrote other fields for this server.
            continue
        if is_plausible(one.facts):
            known[one.key] = one.facts
    return known
