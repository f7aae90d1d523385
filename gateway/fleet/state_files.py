"""Small JSON files that last over a restart: replaced as a whole, and read without trust."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import os
import threading
from pathlib import Path
from typing import TypeVar

import msgspec

from gateway.config.inventory import NodeSpec
from gateway.fleet.node import Node, server_identity
from gateway.fleet.server_properties import ServerProperties, is_plausible

log = logging.getLogger(__name__)

T = TypeVar("T")


def read_state(path: Path, kind: type[T], most_bytes: int, consequence: str) -> T | None:
    """What the file holds; None where there is none, or none that can be used.

    A file that can't be used is logged, and a damaged one is kept aside. `largest`: bytes that are
    read at most. `lost`: what it means, for the log.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(most_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s can't be read (%s): %s", path, error.strerror or error, consequence)
        return None
    if len(raw) > most_bytes:
        damage = f"more than {most_bytes} bytes"
    else:
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            damage = str(error)
    bad = path.with_name(path.name + ".bad")
    log.warning("%s is damaged (%s): kept as %s, %s", path, damage, bad.name, consequence)
    try:
        path.replace(bad)
    except OSError:
        log.warning("%s could not be kept aside", path)
    return None


def write_state(path: Path, value: object) -> None:
    """Replace the file; a reader finds the old one or the new one. Raises: OSError."""
    # Two processes may do so at once, while one hands over to the other.
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(value))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


LARGEST_DRAIN_FILE = 1 << 20
"""Bytes; ten thousand long names."""


class _DrainFile(msgspec.Struct):
    drained: list[str]


class DrainedNodes:
    """The names of drained nodes. `path` None: kept in memory only.

    A name stays though its node leaves the inventory: it is drained when it comes back.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._names = set() if path is None else _read_drained(path)

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
            write_state(self._path, _DrainFile(sorted(self._names)))
        except OSError as error:
            log.warning(
                "Drained nodes could not be saved and will be forgotten at a restart: %s", error
            )


def _read_drained(path: Path) -> set[str]:
    found = read_state(path, _DrainFile, LARGEST_DRAIN_FILE, "no node is drained")
    return set() if found is None else set(found.drained)


PROPERTIES_VERSION = 1
"""Of the file; one of another version is not read."""

MOST_SERVERS = 10_000
"""Servers that are remembered; those that said something new least recently are forgotten."""

LARGEST_PROPERTIES_FILE = 16 << 20
"""Bytes. What does not fit is left out: a thousand nodes of 16 KiB each, hundreds of names, do."""

SAVE_AFTER = 1.0
"""Seconds from a change to the file, so that a fleet that starts is written once."""

PROPERTIES_LOST = "what nodes said before is forgotten"


class _StoredServer(msgspec.Struct):
    key: str
    facts: ServerProperties


class _PropertiesFile(msgspec.Struct):
    version: int
    servers: list[msgspec.Raw]


class PropertiesStore:
    """The last words of each server. `path` None: kept in memory only.

    A server is known by its node's name and by its address: at another address it is another one.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._facts = {} if path is None else _read_properties(path)
        self._changed = asyncio.Event()
        self._writing = threading.Lock()

    def recall(self, spec: NodeSpec) -> ServerProperties:
        """What this server said last; nothing if it never spoke."""
        known = self._facts.get(_server_key(spec))
        return ServerProperties() if known is None else _copy_properties(known, remembered=True)

    def record(self, node: Node) -> None:
        """Keep what the node says now, if that is new."""
        facts = node.properties
        if facts.remembered or facts == _NO_PROPERTIES:
            return
        key = _server_key(node.spec)
        if self._facts.get(key) != facts:
            self._facts.pop(key, None)
            self._facts[key] = _copy_properties(facts)
            if len(self._facts) > MOST_SERVERS:
                del self._facts[next(iter(self._facts))]
            self._changed.set()

    async def save_loop(self) -> None:
        """Write what is new, until cancelled; then `save` writes the rest."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(SAVE_AFTER)
            self._changed.clear()
            await asyncio.to_thread(self._write, tuple(self._facts.items()))

    def save(self) -> None:
        """Write now what is new."""
        if self._changed.is_set():
            self._changed.clear()
            self._write(tuple(self._facts.items()))

    def stop_saving(self) -> None:
        """Write no more: a successor does."""
        self._path = None

    def _write(self, known: tuple[tuple[str, ServerProperties], ...]) -> None:
        servers, left = [], LARGEST_PROPERTIES_FILE - 1024
        for key, facts in reversed(known):
            entry = msgspec.json.encode(_StoredServer(key, facts))
            left -= len(entry) + 1
            if left < 0:
                log.warning("Nodes say too much: what some serve will be forgotten at a restart")
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


def _server_key(spec: NodeSpec) -> str:
    """Short, whatever the address, and without it."""
    whole = msgspec.json.encode((spec.name, *server_identity(spec)))
    return hashlib.sha256(whole).hexdigest()[:32]


def _copy_properties(facts: ServerProperties, *, remembered: bool = False) -> ServerProperties:
    return dataclasses.replace(facts, refused=set(facts.refused), remembered=remembered)


def _read_properties(path: Path) -> dict[str, ServerProperties]:
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
    for raw in found.servers[:MOST_SERVERS]:
        try:
            one = msgspec.json.decode(raw, type=_StoredServer)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # What an earlier or later release wrote of one server.
            continue
        if is_plausible(one.facts):
            known[one.key] = one.facts
    return known
