"""What each server said last of itself: a file, so that a restart forgets no down node's models."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import threading
from typing import TYPE_CHECKING

import msgspec

from gateway.fleet import state_file
from gateway.fleet.facts import Facts, within_bounds
from gateway.fleet.sameness import server

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.config.inventory import NodeSpec
    from gateway.fleet.node import Node

log = logging.getLogger(__name__)

VERSION = 1
"""Of the file; one of another version is not read."""
MOST_SERVERS = 10_000
"""Servers that are remembered; those that said something new least recently are forgotten."""
LARGEST_FILE = 16 << 20
"""Bytes. What does not fit is left out: a thousand nodes of 16 KiB each, hundreds of names, do."""
SAVE_AFTER = 1.0
"""Seconds from a change to the file, so that a fleet that starts is written once."""
FORGOTTEN = "what nodes said before is forgotten"


class _Server(msgspec.Struct):
    key: str
    facts: Facts


class _File(msgspec.Struct):
    version: int
    servers: list[msgspec.Raw]


class LastSeen:
    """The last words of each server. `path` None: kept in memory only.

    A server is known by its node's name and by its address: at another address it is another one.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._facts = {} if path is None else _read(path)
        self._changed = asyncio.Event()
        self._writing = threading.Lock()

    def of(self, spec: NodeSpec) -> Facts:
        """What this server said last; nothing if it never spoke."""
        known = self._facts.get(_key(spec))
        return Facts() if known is None else _copy(known, remembered=True)

    def note(self, node: Node) -> None:
        """Keep what the node says now, if that is new."""
        facts = node.facts
        if facts.remembered or facts == _NOTHING:
            return
        key = _key(node.spec)
        if self._facts.get(key) != facts:
            self._facts.pop(key, None)
            self._facts[key] = _copy(facts)
            if len(self._facts) > MOST_SERVERS:
                del self._facts[next(iter(self._facts))]
            self._changed.set()

    async def keep_saved(self) -> None:
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

    def release(self) -> None:
        """Write no more: a successor does."""
        self._path = None

    def _write(self, known: tuple[tuple[str, Facts], ...]) -> None:
        servers, left = [], LARGEST_FILE - 1024
        for key, facts in reversed(known):
            entry = msgspec.json.encode(_Server(key, facts))
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
                state_file.write(self._path, _File(VERSION, servers))
            except OSError as error:
                log.warning(
                    "What nodes serve could not be saved and will be forgotten at a restart: %s",
                    error,
                )


_NOTHING = Facts()


def _key(spec: NodeSpec) -> str:
    """Short, whatever the address, and without it."""
    whole = msgspec.json.encode((spec.name, *server(spec)))
    return hashlib.sha256(whole).hexdigest()[:32]


def _copy(facts: Facts, *, remembered: bool = False) -> Facts:
    return dataclasses.replace(facts, refused=set(facts.refused), remembered=remembered)


def _read(path: Path) -> dict[str, Facts]:
    found = state_file.read(path, _File, LARGEST_FILE, FORGOTTEN)
    if found is None:
        return {}
    if found.version != VERSION:
        log.warning("%s is of version %d, not %d: %s", path, found.version, VERSION, FORGOTTEN)
        return {}
    known: dict[str, Facts] = {}
    for raw in found.servers[:MOST_SERVERS]:
        try:
            one = msgspec.json.decode(raw, type=_Server)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # What an earlier or later release wrote of one server.
            continue
        if within_bounds(one.facts):
            known[one.key] = one.facts
    return known
