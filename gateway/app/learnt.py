"""What the gateway has learnt, kept over its restarts: of nodes, callers, prompts and requests.

Each part is a section: rows with a key, and a plain value that its owner gives and takes back.
Every few seconds the rows that have changed are gathered, in short turns of the event loop, and
written away from it: to a table of the store, else to a file of the state folder. They are read
before the first request is served, and once more when a predecessor has written its last ones: only
the process that accepts connections writes.

Evidence counts half for every `HALF_LIFE` since it was learnt, and rows older than `OLDEST` are
dropped. So is what was learnt of another model, build or number of slots than a server has now, and
of a caller whose key is gone. Nothing here is needed: what can't be read is told of once, and
learnt anew.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec
import structlog
from sqlalchemy import Connection, bindparam, delete, func, select
from sqlalchemy.exc import SQLAlchemyError

from gateway.callers.keys import KeyRing
from gateway.events import EventBus
from gateway.lease import HASH_KEY_BYTES, KeyedHash
from gateway.nodes.fleet import Fleet
from gateway.nodes.node import LearntOfServer, Node
from gateway.nodes.prompt_cache import KeptPrompt
from gateway.nodes.saved_prompts import MOST_KEPT, SavedPrompt, SavedPrompts
from gateway.nodes.server_properties import server_key
from gateway.schedule.core.demand_model import TokenEstimates, TokenStats
from gateway.schedule.decision_log import (
    Decision,
    DecisionLog,
    Grant,
    PredictionAccuracy,
    Queueing,
    Refusal,
)
from gateway.schedule.scheduler import Scheduler
from gateway.store.database import insert_for
from gateway.store.failures import StoreError
from gateway.store.schema import learnt as table
from gateway.store.store import Store
from gateway.system import read_state, set_aside, write_state
from gateway.watch.history import FleetHistory, HistoryPoint, NodeHistory
from gateway.web.asgi import in_steps

# Seconds in which evidence comes to count half. A server of one model and build on one machine
# seldom changes its speed, but after a week the first requests should show it anew.
HALF_LIFE = 2 * 86400.0
OLDEST = 30 * 86400.0  # seconds after which a row that has not changed is dropped
# Seconds after which no node is believed to cache a prompt: others have taken its place.
OLDEST_PROMPT = 6 * 3600.0
WRITE_SECONDS = 3.0  # seconds between two looks for changed rows
# Bytes a second at which the file is written at most: it is replaced as a whole.
FILE_PACE = 2 << 20
PREDECESSOR_SECONDS = 10.0  # most seconds to wait for a predecessor's last rows, and for one write
UPKEEP_SECONDS = 3600.0  # seconds between two looks for old rows in the store
ROWS_PER_JOB = 500  # rows that one job of the store writes: some 10 ms of work
MOST_READ_ROWS = 50_000  # rows that are read at the start
MOST_STORED_ROWS = 200_000  # rows of all gateways in one store; the oldest go first
# Sections whose rows leave the store earlier, whichever gateway's they are: they are many, and a
# gateway that does not come back leaves them behind.
SHORT_LIVED = ("prompts", "saved", "charts", "node_days", "decisions")
SHORT_LIFE = 2 * 86400.0
LARGEST_ROW = 64 << 10  # bytes of a value; larger ones are not kept
# Bytes of the file, and of what is read from the store: more than all sections' together.
LARGEST_FILE = 44 << 20
FILE_VERSION = 1  # version of the file's format; a file of another version is set aside
# Seconds after the end of an attempt in which its tokens become known, if ever.
SETTLE_SECONDS = 60.0
# Decisions share a row up to this many rows of nodes that they compare, each some 400 bytes.
COMPARED_OF_ROW = 32
LAST_TIME = 1e11  # stands for infinity, which JSON lacks
SHARED_SECTIONS = ("servers", "demand")  # what holds for other gateways of the store as well
LOST = "what was learnt before is forgotten"
log = structlog.get_logger()


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One row of a section, with the names of the store's columns."""

    section: str
    version: int
    key: str
    caller: str | None
    """The id of the caller of whose requests it was learnt; None: of no single one's."""
    changed_at: float  # when it was learnt, Unix time
    value: msgspec.Raw  # JSON

    @property
    def place(self) -> Place:
        """Where it is kept; only one row is there."""
        return self.section, self.version, self.key

    def says(self, other: Row | None) -> bool:
        """Whether the other row of its place has the same value, whenever that was learnt."""
        return other is not None and (self.value, self.caller) == (other.value, other.caller)


Place = tuple[str, int, str]
# A row's key, caller and value (None: there is no such row any more).
Change = tuple[str, str | None, object]
IsGone = Callable[[str], bool]  # whether the key of a caller, by its id, is gone


class Section:
    """One kind of rows, and how their owner gives and takes them."""

    name: str
    version: int = 1  # of its values' form; rows of others are left alone
    most_rows: int
    most_bytes: int
    pause: float = 0.0  # least seconds between two looks for changes, but at the end
    _keys: PromptKeys | None = None  # of the digests in its rows; None: there are none

    def is_kept(self) -> bool:
        """Whether the settings allow that its rows are kept."""
        return self._keys is None or self._keys.is_kept()

    def changes(self) -> Iterator[Change | None]:
        """What may have changed since the last call; None: nothing yet. It may be paused at any."""
        raise NotImplementedError

    def restore(self, row: Row, age: float) -> bool:
        """Take a row, learnt `age` seconds ago; False: it is of no use any more.

        Raises whatever: the row is another program's.
        """
        raise NotImplementedError

    def restored(self) -> None:
        """All rows have been given."""

    def begin_anew(self) -> None:
        """Rows will be given that count more than what was learnt here."""

    def forget(self, is_gone: IsGone) -> None:
        """Forget what was learnt of the callers that are gone."""


class LearntMemory:
    """Keeps what `sections` have learnt in `backend`. `now` gives Unix time."""

    def __init__(
        self,
        sections: Sequence[Section],
        backend: LearntTable | LearntFile,
        key_ring: KeyRing,
        now: Callable[[], float] = time.time,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        self._sections = sections
        self._backend = backend
        self._key_ring = key_ring
        self._now = now
        self._flush = flush
        self._kept: dict[str, OrderedDict[str, Row]] = {one.name: OrderedDict() for one in sections}
        """The rows of each section by their keys, the one that changed least recently first."""
        self._unwritten: dict[Place, Row | None] = {}  # rows to be kept; None: to be dropped
        self._callers: frozenset[str] | None = None
        """The ids of the keys at the last look; None: they are not known yet."""
        self._keys_version = -1
        self._tried = self._read = self._writes = self._closed = False
        self._pipe: BinaryIO | None = None
        """To a successor: it ends when this process writes no more."""
        self._full: set[str] = set()  # sections of which it was told that they are full
        self._gathered: dict[str, float] = {}
        """When there was the last look at sections that have a `pause`."""
        self._failures: set[str] = set()  # errors that were told of
        self._lock = asyncio.Lock()

    @classmethod
    def of_gateway(
        cls,
        scheduler: Scheduler,
        history: FleetHistory,
        node_history: NodeHistory,
        bus: EventBus,
        key_ring: KeyRing,
        keyed_hash: KeyedHash,
        place: Store | Path,
        gateway: str,
        remember_prompts: Callable[[], bool],
        *,
        saved_prompts: SavedPrompts,
        has_hash_key: bool,
    ) -> Self:
        """What one gateway keeps, in the order in which it is read.

        `place`: the store, or a file where there is none. `has_hash_key`: from a predecessor.
        """
        keys = PromptKeys(keyed_hash, remember_prompts, is_fixed=has_hash_key)
        sections = (
            Servers(scheduler.fleet),
            Demand(scheduler.demand_model.token_estimates),
            keys,
            Prompts(scheduler, keys),
            SavedSlots(saved_prompts, keys),
            Predictions(scheduler.accuracy),
            Charts(history),
            NodeDays(node_history),
            Decisions(scheduler.decision_log),
        )
        if isinstance(place, Path):
            return cls(sections, LearntFile(place), key_ring, flush=bus.flush)
        return cls(sections, LearntTable(place, gateway), key_ring, flush=bus.flush)

    # Start and end.

    async def load(self, seconds: float, *, anew: bool = False) -> None:
        """Read the rows and give them to their owners, within about so many seconds.

        Rows of which more has been learnt meanwhile stay as they are; `anew`: they do not, since
        another process has learnt for this one. What can't be read now is read later (`run`).
        """
        async with self._lock:
            end = time.monotonic() + seconds
            try:
                if anew:
                    # What will be read replaces what this process has learnt and not written.
                    for section in self._sections:
                        section.begin_anew()
                    for name, _, key in self._unwritten:
                        self._kept[name].pop(key, None)
                    self._unwritten.clear()
                    self._read = False
                elif self._tried:
                    await self._gather(whole=True)
                self._tried = True
                rows = await self._backend.read(seconds)
                if rows is not None:
                    self._read = True
                    await self._restore(rows, end)
            except Exception as error:  # noqa: BLE001 - nothing here may stop a start
                self._read = True
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Tell of an error once, without its words: they may be a caller's."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}"
        if why not in self._failures:
            self._failures.add(why)
            log.warning("learnt: something can't be kept or taken", why=why, remedy="report this")

    async def run(self, predecessor: Callable[[], Awaitable[None]] | None = None) -> None:
        """Write what changes, until cancelled; then `close` writes the rest.

        `predecessor` waits until a predecessor has written its last rows.
        """
        if predecessor is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(PREDECESSOR_SECONDS):
                    await predecessor()
            await self.load(PREDECESSOR_SECONDS)
        self.begin_writing()
        while True:
            await asyncio.sleep(max(WRITE_SECONDS, self._backend.pause))
            if not self._read:
                await self.load(PREDECESSOR_SECONDS)
            await self.save(PREDECESSOR_SECONDS)

    def end_writing(self) -> None:
        """Another process writes from now on; `run` must have been cancelled, and may run again."""
        self._writes = False

    def begin_writing(self) -> None:
        """This process accepts connections, and no other one of this gateway."""
        self._writes = not self._closed

    async def save(self, seconds: float, *, whole: bool = False) -> None:
        """Write what has changed, within so many seconds. `whole`: of all sections."""
        async with self._lock:
            if not self._writes:
                return
            try:
                await self._gather(whole=whole)
                if self._unwritten:
                    for section, _, key in await self._backend.write(self._unwritten, seconds):
                        # To be written if it is given again, even unchanged.
                        if section in self._kept:
                            self._kept[section].pop(key, None)
            except Exception as error:  # noqa: BLE001 - nothing here may end the gateway's work
                self._failed(error)

    async def close(self, seconds: float) -> None:
        """Write the rest, and nothing from then on: this process ends, or has a successor."""
        self._closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.save(seconds, whole=True)
        self._writes = False
        self.close_pipe()

    def open_pipe(self) -> BinaryIO:
        """A pipe for a successor, which ends with `close`; the caller closes its own end."""
        reader, writer = os.pipe()
        self._pipe = os.fdopen(writer, "wb", buffering=0)
        return os.fdopen(reader, "rb", buffering=0)

    def close_pipe(self) -> None:
        """The successor may read what was learnt; or there is none after all."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    # From owners to rows. All that changes rows runs under the lock.

    async def _gather(self, *, whole: bool) -> None:
        """Find what has changed; `whole`: in all sections."""
        self._flush()
        self._forget_callers()
        for section in self._sections:
            now, last = time.monotonic(), self._gathered.get(section.name)
            if whole or last is None or now - last >= section.pause:
                self._gathered[section.name] = now
                await self._gather_section(section)
        # While the store is away they would be ever more: each decision comes and goes.
        gone = [place for place, row in self._unwritten.items() if row is None]
        for place in gone[: max(0, len(gone) - MOST_READ_ROWS)]:
            del self._unwritten[place]

    async def _gather_section(self, section: Section, *, as_read: bool = False) -> None:
        """Find what has changed in a section; `as_read`: the rows that are kept are still true."""
        async for change in in_steps(section.changes()):
            if change is not None:
                self._take(section, *change, as_read=as_read)
        if not section.is_kept():
            for key in [*self._kept[section.name]]:
                self._drop(section, key)
        self._bound(section)

    def _take(
        self, section: Section, key: str, caller: str | None, value: object, *, as_read: bool
    ) -> None:
        kept, raw = self._kept[section.name], b""
        # The request of a caller that is gone ran on.
        if value is not None and not (caller is not None and self._is_gone(caller)):
            with suppress(ValueError):  # Half a surrogate in a client's name for a model, say.
                raw = msgspec.json.encode(value)
        if not 0 < len(raw) <= LARGEST_ROW:
            self._drop(section, key)
            return
        row = Row(section.name, section.version, key, caller, self._now(), msgspec.Raw(raw))
        if not row.says(kept.get(key)):
            if not (as_read and key in kept):
                self._unwritten[row.place] = row
            kept[key] = row
            kept.move_to_end(key)

    def _drop(self, section: Section, key: str) -> None:
        if self._kept[section.name].pop(key, None) is not None:
            self._unwritten[section.name, section.version, key] = None

    def _bound(self, section: Section) -> None:
        """Drop the rows that changed least recently beyond the section's bounds."""
        kept = self._kept[section.name]
        size = sum(len(row.value) for row in kept.values())
        if len(kept) <= section.most_rows and size <= section.most_bytes:
            return
        if section.name not in self._full:
            self._full.add(section.name)
            full = {"section": section.name, "rows": len(kept), "bytes": size}
            log.info("learnt: the oldest rows are dropped from now on", **full)
        while len(kept) > section.most_rows or size > section.most_bytes:
            key = next(iter(kept))
            size -= len(kept[key].value)
            self._drop(section, key)

    def _forget_callers(self) -> None:
        """Forget what was learnt of callers without a key, if keys have changed.

        Not only of those that have just gone: their last requests end later.
        """
        ring = self._key_ring
        if ring.version == self._keys_version or not ring.is_complete:
            return
        self._keys_version = ring.version
        self._callers = frozenset(one.id for one in ring.callers())
        for section in self._sections:
            section.forget(self._is_gone)
            for key, row in [*self._kept[section.name].items()]:
                if row.caller is not None and self._is_gone(row.caller):
                    self._drop(section, key)

    # From rows to owners.

    async def _restore(self, rows: Sequence[Row], end: float) -> None:
        self._forget_callers()
        by_section = dict[str, list[Row]]()
        for row in rows:
            by_section.setdefault(row.section, []).append(row)
        unreadable = late = 0
        for section in self._sections:
            async for row in in_steps(by_section.pop(section.name, ())):
                if time.monotonic() > end:
                    late += 1
                else:
                    unreadable += not self._restore_row(section, row)
            try:
                section.restored()
            except Exception as error:  # noqa: BLE001 - another program wrote the rows
                self._failed(error)
            await asyncio.sleep(0)
            # What counts less by now is not another row: it keeps its age.
            await self._gather_section(section, as_read=True)
        unreadable += sum(map(len, by_section.values()))
        if unreadable or late:
            log.warning("learnt: rows are left alone", unreadable=unreadable, no_time_for=late)

    def _restore_row(self, section: Section, row: Row) -> bool:
        """Give a row to its owner; False: this version can't read it."""
        kept, age = self._kept[section.name], max(0.0, self._now() - row.changed_at)
        if row.version != section.version:
            return False
        if row.place in self._unwritten or row.says(kept.get(row.key)):
            return True
        kept[row.key] = row
        kept.move_to_end(row.key)
        try:
            if (
                age > OLDEST
                or not section.is_kept()
                or (row.caller is not None and self._is_gone(row.caller))
                or not section.restore(row, age)
            ):
                self._drop(section, row.key)
        except Exception:  # noqa: BLE001 - another program wrote it
            kept.pop(row.key, None)
            return False
        return True

    def _is_gone(self, caller: str) -> bool:
        """Whether a row's caller has no key any more; those with a colon never had one."""
        known = self._callers
        return not (known is None or caller in known or ":" in caller)


# Where rows are kept.


class LearntTable:
    """Rows in a table of the store, each gateway's own.

    A gateway that has no row of a server or a caller takes the newest of another gateway's.
    """

    pause = 0.0  # seconds to wait until the next `write`

    def __init__(self, store: Store, gateway: str, now: Callable[[], float] = time.time) -> None:
        self._store = store
        self._gateway = gateway
        self._now = now
        self._upkeep_at = 0.0

    async def read(self, seconds: float) -> Sequence[Row] | None:
        """The rows, the oldest first; None: they can't be read in this time."""
        if not self._store.status().up:
            return None
        try:
            return await self._store.run(self._rows, write=False, seconds=seconds)
        except StoreError:
            return None
        except SQLAlchemyError as error:  # Text that is none, say. Its words may be a row's.
            log.warning("learnt: rows can't be read", why=type(error).__name__, consequence=LOST)
            return []

    async def write(self, changes: dict[Place, Row | None], seconds: float) -> Sequence[Place]:
        """Keep these rows (None: drop it), and take out of `changes` what is done.

        Returns which other rows of this gateway it has dropped, as they were old. A few hundred at
        a time, since the ledger waits meanwhile.
        """
        end = time.monotonic() + seconds
        if not self._store.status().up:
            return ()
        try:
            while changes and (left := end - time.monotonic()) > 0:
                some = dict(islice(changes.items(), ROWS_PER_JOB))
                await self._store.run(partial(self._write, changes=some), seconds=left)
                for place in some:
                    del changes[place]
            if self._now() >= self._upkeep_at and (left := end - time.monotonic()) > 0:
                self._upkeep_at = self._now() + UPKEEP_SECONDS
                return await self._store.run(self._drop_old, seconds=left)
        except StoreError:
            pass
        return ()

    def _rows(self, connection: Connection) -> list[Row]:
        """A job of the store: own rows, and those of others that this gateway lacks."""
        c, found, left, now = table.c, dict[Place, Row](), LARGEST_FILE, self._now()
        foreign = 0
        own = c.gateway == self._gateway
        newest = (
            select(c.section, c.version, c.key, c.caller, c.changed_at, c.value)
            .where(c.changed_at >= now - OLDEST)
            .order_by(c.changed_at.desc())
            .limit(MOST_READ_ROWS)
            # All at once they would hold up the other threads.
            .execution_options(yield_per=ROWS_PER_JOB)
        )
        for whose in (own, (~own) & c.section.in_(SHARED_SECTIONS)):
            for section, version, key, caller, at, value in connection.execute(newest.where(whose)):
                # SQLite's columns take values of any type.
                texts = (section, key, value, caller or "")
                if not (isinstance(at, float) and all(isinstance(one, str) for one in texts)):
                    foreign += 1
                    continue
                row = Row(section, version, key, caller, min(at, now), msgspec.Raw(value.encode()))
                left -= len(value)
                if left > 0:
                    found.setdefault(row.place, row)
        if foreign:
            log.warning("learnt: rows of other types are left alone", rows=foreign)
        return sorted(found.values(), key=lambda row: row.changed_at)

    def _write(self, connection: Connection, changes: Mapping[Place, Row | None]) -> None:
        """A job of the store. It can be done twice."""
        c = table.c
        drop = [
            {"of_section": section, "of_version": version, "of_key": key}
            for (section, version, key), row in changes.items()
            if row is None
        ]
        if drop:
            gone = delete(table).where(
                c.gateway == self._gateway,
                c.section == bindparam("of_section"),
                c.version == bindparam("of_version"),
                c.key == bindparam("of_key"),
            )
            connection.execute(gone, drop)
        put = [
            msgspec.structs.asdict(one)
            | {"gateway": self._gateway, "value": bytes(one.value).decode()}
            for one in changes.values()
            if one is not None
        ]
        if put:
            new = insert_for(connection)(table)
            changed = {name: new.excluded[name] for name in ("caller", "changed_at", "value")}
            connection.execute(
                new.on_conflict_do_update(index_elements=[*table.primary_key], set_=changed), put
            )

    def _drop_old(self, connection: Connection) -> list[Place]:
        """A job of the store: drop what is old, or too much; returns which rows of its own.

        Those of others are as old as their newest say at most, lest a clock that is ahead drops
        them all.
        """
        c, now = table.c, self._now()
        own = c.gateway == self._gateway
        others_now = connection.scalar(select(func.max(c.changed_at)).where(~own))
        since = now if others_now is None else min(now, others_now)
        newest = select(c.changed_at).where(~own).order_by(c.changed_at.desc())
        least = connection.scalar(newest.offset(MOST_STORED_ROWS).limit(1))
        oldest = max(since - OLDEST, 0.0 if least is None else least)
        short = c.section.in_(SHORT_LIVED)
        old = (c.changed_at < oldest) | (short & (c.changed_at < since - SHORT_LIFE))
        connection.execute(delete(table).where(~own, old))
        old = (c.changed_at < now - OLDEST) | (short & (c.changed_at < now - SHORT_LIFE))
        mine = select(c.section, c.version, c.key).where(own, old)
        dropped = [(section, version, key) for section, version, key in connection.execute(mine)]
        connection.execute(delete(table).where(own, old))
        return dropped


class _FileContent(msgspec.Struct):
    version: int
    rows: list[Row]


class LearntFile:
    """Rows in a file that only the gateway's user can read, and that is replaced as a whole."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._now = now
        self._rows: dict[Place, Row] = {}  # those of other versions, too
        self._size = 0
        self._writing = threading.Lock()
        self._error: Exception | None = None

    @property
    def pause(self) -> float:
        """Seconds that the last file's bytes are worth."""
        return self._size / FILE_PACE

    async def read(self, seconds: float) -> Sequence[Row] | None:
        """The same; of an unusable file there are none, and it is set aside."""
        reading = asyncio.to_thread(read_state, self._path, _FileContent, LARGEST_FILE, LOST)
        try:
            async with asyncio.timeout(seconds):
                found = await reading
        except TimeoutError:
            return None
        if found is not None and found.version != FILE_VERSION:
            kept_as = await asyncio.to_thread(set_aside, self._path)
            told = {"path": str(self._path), "version": found.version, "kept_as": kept_as}
            log.warning("learnt: a file of another version", **told, consequence=LOST)
            found = None
        now = self._now()
        rows = [
            row if row.changed_at <= now else msgspec.structs.replace(row, changed_at=now)
            for row in (() if found is None else found.rows)
            if row.changed_at > now - OLDEST
        ]
        self._rows = {row.place: row for row in sorted(rows, key=lambda row: row.changed_at)}
        return [*self._rows.values()]

    async def write(self, changes: dict[Place, Row | None], seconds: float) -> Sequence[Place]:
        """The same, by another file in its place."""
        for place, row in changes.items():
            if row is None:
                self._rows.pop(place, None)
            else:
                self._rows[place] = row
        if self._writing.locked():  # The disk stands still.
            return ()
        writing = asyncio.to_thread(self._replace, [*self._rows.values()])
        before, self._error = self._error, None
        try:
            async with asyncio.timeout(seconds):
                await writing
            changes.clear()
        except (OSError, TimeoutError) as error:
            self._error = error
            if before is None:
                why = str(error) or f"not within {seconds:.0f} s"
                log.warning("learnt: it can't be written and will be lost", why=why)
        return ()

    def _replace(self, rows: list[Row]) -> None:
        with self._writing:
            self._size = sum(len(bytes(row.value)) for row in rows)
            write_state(self._path, _FileContent(FILE_VERSION, rows), mode=0o600)


# What is kept.

_ANONYMOUS = "anonymous:"


def share_kept(age: float) -> float:
    """The share that evidence of this age still counts."""
    return float(0.5 ** (age / HALF_LIFE))


def _owner(fairness_key: str) -> str:
    """The id of the caller whose end user this may be; an anonymous one's address has slashes."""
    return fairness_key if fairness_key.startswith(_ANONYMOUS) else fairness_key.partition("/")[0]


def _digest(value: object) -> str:
    return blake2b(msgspec.json.encode(value), digest_size=16).hexdigest()


@dataclass(eq=False)
class Servers(Section):
    """The speed, and the usual speed, of each server: a row by its address."""

    name, most_rows, most_bytes = "servers", 10_000, 8 << 20
    _fleet: Fleet
    _seen: dict[str, tuple[Node, int, bool]] = field(default_factory=dict)
    """For each name: the node, the version of its speed, and whether that is known."""
    _found: dict[str, tuple[LearntOfServer, float]] = field(default_factory=dict)

    def changes(self) -> Iterator[Change | None]:
        before, self._seen = self._seen, {}
        for name, node in [*self._fleet.nodes.items()]:
            was, version, is_known = before.get(name, (node, -1, False))
            if was is node and version == node.speed.version:
                self._seen[name] = before[name]
                yield None
                continue
            learnt = node.export()
            self._seen[name] = node, node.speed.version, learnt is not None
            # Another node may have learnt of this server.
            has_row = learnt is not None or is_known
            yield (server_key(node.spec), None, learnt) if has_row else None

    def restore(self, row: Row, age: float) -> bool:
        learnt = msgspec.json.decode(row.value, type=LearntOfServer)
        self._found[row.key] = learnt, share_kept(age)
        return True

    def restored(self) -> None:
        """Give all at once: the speeds of nodes are compared."""
        self._fleet.restore(self._found)
        self._found = {}


class _Demand(msgspec.Struct, frozen=True):
    caller: str | None
    model: str
    stats: TokenStats


@dataclass(eq=False)
class Demand(Section):
    """How long prompts and answers of each model, and of each caller, are."""

    name, most_rows, most_bytes = "demand", 17_408, 6 << 20
    _estimates: TokenEstimates
    _seen: int = 0  # lessons

    def changes(self) -> Iterator[Change]:
        lessons, self._seen = self._estimates.lessons - self._seen, self._estimates.lessons
        for caller, model, stats in self._estimates.latest(lessons):
            owner = None if caller is None else _owner(caller)
            with suppress(ValueError):  # Half a surrogate.
                yield _digest((caller, model)), owner, _Demand(caller, model, stats)

    def restore(self, row: Row, age: float) -> bool:
        found = msgspec.json.decode(row.value, type=_Demand)
        self._estimates.restore(found.caller, found.model, found.stats, share_kept(age))
        return True

    def forget(self, is_gone: IsGone) -> None:
        self._estimates.forget(lambda fairness_key: is_gone(_owner(fairness_key)))


class _PromptKey(msgspec.Struct, frozen=True):
    key: bytes
    day: int  # so that the row does not grow old while it is in use


class PromptKeys(Section):
    """The key of prompts' digests, without which those of an earlier process say nothing."""

    name, most_rows, most_bytes = "prompt_key", 1, 1 << 10

    def __init__(
        self,
        keyed_hash: KeyedHash,
        remember: Callable[[], bool],
        now: Callable[[], float] = time.time,
        *,
        is_fixed: bool,
    ) -> None:
        self._keyed_hash = keyed_hash
        self._remember = remember
        self._now = now
        self._is_fixed = is_fixed  # whether digests may have been made with the key
        self.agrees = False  # whether the digests that are read were made with the key

    def is_kept(self) -> bool:
        return self._remember()

    def begin_anew(self) -> None:
        """The digests that others have written count, not those made here."""
        self._is_fixed = False

    def changes(self) -> Iterator[Change]:
        self._is_fixed = True
        if self.is_kept():
            yield "key", None, _PromptKey(self._keyed_hash.key, int(self._now() // 86400))

    def restore(self, row: Row, age: float) -> bool:
        """Use the key, unless there is one that must be used; keys do not age."""
        key = msgspec.json.decode(row.value, type=_PromptKey).key
        if not self._is_fixed and len(key) == HASH_KEY_BYTES:
            self._keyed_hash.set_key(key)
        self.agrees = key == self._keyed_hash.key
        return self.agrees


class _Prompt(msgspec.Struct, frozen=True):
    served_as: str  # a digest of the server's model and build
    prompt: KeptPrompt


class Prompts(Section):
    """The prompts that each node caches, as digests: a row for each."""

    name, most_rows, most_bytes = "prompts", 10_000, 8 << 20
    _keys: PromptKeys

    def __init__(self, scheduler: Scheduler, keys: PromptKeys) -> None:
        self._cache = scheduler.prompt_cache
        self._nodes = scheduler.fleet_sync.nodes
        self._keys = keys
        self._seen: dict[int, tuple[Node, int, set[str]]] = {}
        """For each row of the fleet: its node, the number of changes, and the prompts' keys."""
        self._indexes: dict[str, list[int]] | None = None
        """While rows are read: the rows of the fleet by `server_key`."""

    def changes(self) -> Iterator[Change | None]:
        before, self._seen = self._seen, {}
        for index, (was, _, keys) in before.items():
            for key in keys if self._nodes.get(index) is not was else ():
                yield key, None, None
        for index, node in [*self._nodes.items()] if self.is_kept() else ():
            cache = self._cache.nodes.get(index)
            changes = 0 if cache is None else cache.changes
            was, version, keys = before.get(index, (node, -1, set[str]()))
            if was is not node:
                keys = set()
            elif version == changes:
                self._seen[index] = before[index]
                yield None
                continue
            server, found = server_key(node.spec), set[str]()
            for last, held in self._cache.export(index):
                key = f"{server}.{last:x}"
                found.add(key)
                if key not in keys:
                    prompt = KeptPrompt.of(held)
                    yield key, held.caller or None, _Prompt(_digest(node.measured), prompt)
            self._seen[index] = node, changes, found
            for key in keys - found:
                yield key, None, None

    def restore(self, row: Row, age: float) -> bool:
        """Put the prompt into the caches of its server's nodes, if they still serve the same."""
        if not self._keys.agrees or age > OLDEST_PROMPT:
            return False
        if self._indexes is None:
            self._indexes = {}
            for index, node in self._nodes.items():
                self._indexes.setdefault(server_key(node.spec), []).append(index)
        found = msgspec.json.decode(row.value, type=_Prompt)
        is_used = False
        for index in self._indexes.get(row.key.partition(".")[0], ()):
            node = self._nodes[index]
            if _digest(node.measured) == found.served_as:
                is_used = True
                _, _, keys = self._seen.setdefault(index, (node, -1, set()))
                if row.key not in keys:
                    keys.add(row.key)
                    self._cache.restore(index, found.prompt, row.caller or "")
        return is_used

    def restored(self) -> None:
        """The fleet may change."""
        self._indexes = None

    def forget(self, is_gone: IsGone) -> None:
        self._cache.forget(is_gone)


@dataclass(eq=False)
class SavedSlots(Section):
    """What is in the files of saved prompts, as digests: a row for each file."""

    name, most_rows, most_bytes = "saved", MOST_KEPT, 4 << 20
    _saved_prompts: SavedPrompts
    _keys: PromptKeys
    _seen: dict[str, SavedPrompt] = field(default_factory=dict)

    def changes(self) -> Iterator[Change]:
        before, self._seen = self._seen, {}
        if self.is_kept():
            self._seen.update(self._saved_prompts.export())
        for key in before.keys() - self._seen.keys():
            yield key, None, None
        for key, saved in [*self._seen.items()]:
            if before.get(key) is not saved:
                yield key, saved.caller or None, saved

    def restore(self, row: Row, age: float) -> bool:
        if not self._keys.agrees or age > OLDEST_PROMPT:
            return False
        saved = msgspec.json.decode(row.value, type=SavedPrompt)
        return self._saved_prompts.add(row.key, saved)

    def forget(self, is_gone: IsGone) -> None:
        self._saved_prompts.forget(is_gone)


@dataclass(eq=False)
class Predictions(Section):
    """How well predictions came true: counts, from which metrics go on, and so they do not age."""

    name, most_rows, most_bytes = "predictions", 1, 16 << 10
    _accuracy: PredictionAccuracy

    def changes(self) -> Iterator[Change]:
        if not self._accuracy.is_empty:
            yield "all", None, self._accuracy

    def restore(self, row: Row, age: float) -> bool:
        self._accuracy.restore(msgspec.json.decode(row.value, type=PredictionAccuracy))
        return True


@dataclass(eq=False)
class Charts(Section):
    """The points of the dashboard's charts, for an hour."""

    name, most_rows, most_bytes = "charts", 720, 1 << 20
    pause = 60.0  # They change all the time, whether anything else does or not.
    _history: FleetHistory
    _now: Callable[[], float] = time.time
    _found: list[HistoryPoint] = field(default_factory=list)

    def changes(self) -> Iterator[Change]:
        yield from ((f"{point.at:.1f}", None, point) for point in self._history.points)

    def restore(self, row: Row, age: float) -> bool:
        self._found.append(msgspec.json.decode(row.value, type=HistoryPoint))
        return True

    def restored(self) -> None:
        """Give all at once: they are sorted by time."""
        self._history.restore(self._found, self._now())
        self._found = []


@dataclass(eq=False)
class NodeDays(Section):
    """A day of busy slots and speed of each node: a row by its name, of 8 KiB."""

    name, most_rows, most_bytes = "node_days", 10_000, 8 << 20
    pause = 900.0  # They all change every five minutes.
    _history: NodeHistory
    _now: Callable[[], float] = time.time

    def changes(self) -> Iterator[Change]:
        yield from ((name, None, day) for name, day in self._history.export())

    def restore(self, row: Row, age: float) -> bool:
        day = msgspec.json.decode(row.value, type=bytes)
        return self._history.restore(row.key, day, self._now())


@dataclass(slots=True)
class _DecisionsOfRow:
    key: str
    decisions: list[Decision] = field(default_factory=list)
    compared: int = 0
    """The rows of nodes in them, of which their size is made, and one for each decision."""

    @property
    def is_full(self) -> bool:
        return self.compared >= COMPARED_OF_ROW

    def add(self, one: Decision) -> None:
        self.decisions.append(one)
        compared = one.comparison if isinstance(one, Grant) else None
        self.compared += 1 if compared is None else 2 + len(compared.others)


@dataclass(eq=False)
class Decisions(Section):
    """The decisions about requests that `why` explains: numbers and names of nodes, no text.

    A row of each would cost more than the scheduler takes to decide: some share a row, with the
    seconds from their clock to Unix time. Versions before had a row for each.
    """

    name, version, most_rows, most_bytes = "decisions", 2, 1_024, 8 << 20
    _log: DecisionLog
    _now: Callable[[], float] = time.time
    _newest: dict[type[Decision], Decision] = field(default_factory=dict)
    """The newest of each kind at the last call."""
    _rows: list[_DecisionsOfRow] = field(default_factory=list)
    """Those that may change: the last one, while it has room, and those with a grant that had not
    come to its end."""
    _shift: float = 0.0
    _found: list[Decision] = field(default_factory=list)

    def _to_unix(self) -> float:
        """Seconds from the log's clock to Unix time: the same, unless one of them was set.

        Else each row of what runs would be another one at each call.
        """
        shift = self._now() - self._log.clock()
        if abs(shift - self._shift) > 1:
            self._shift = shift
        return self._shift

    def changes(self) -> Iterator[Change]:
        """Rows of the decisions since the last call, and those that may have come to their end."""
        clock, shift = self._log.clock(), self._to_unix()
        for kind, found in self._log.by_kind():
            newest = self._newest.get(kind)
            later = [*takewhile(lambda one: one is not newest, reversed(found))]  # noqa: B023
            for one in reversed(later):
                self._put(one, shift)
            if found:
                self._newest[kind] = found[-1]
        rows = self._rows
        self._rows = [
            row
            for row in rows
            if not row.is_full or any(_runs(one, clock) for one in row.decisions)
        ]
        for row in rows:
            told = [(type(one).__name__[0].lower(), _told(one)) for one in row.decisions]
            yield row.key, None, (shift, told)

    def _put(self, one: Decision, shift: float) -> None:
        if not self._rows or self._rows[-1].is_full:
            number = one.lease_id if isinstance(one, Grant) else f"{one.at + shift:.2f}"
            self._rows.append(_DecisionsOfRow(f"{_SOME}{one.request_id}.{number}"))
        self._rows[-1].add(one)

    def restore(self, row: Row, age: float) -> bool:
        """Keep its decisions for `restored`. What runs may have gone on unseen."""
        shift, is_shared = -self._to_unix(), row.key[0] == _SOME
        to_unix, listed = 0.0, [(row.key[0], row.value)]
        if is_shared:
            to_unix, listed = msgspec.json.decode(row.value, type=_RowValue)
        for letter, raw in listed:
            one = _shifted(letter, raw, to_unix + shift)
            if isinstance(one, Grant) and one.ended_at is None:
                one.ended("unknown", one.status, row.changed_at + shift)
            self._found.append(one)
            if not is_shared:
                self._put(one, -shift)
        return is_shared

    def restored(self) -> None:
        """Give all at once: they are sorted by time."""
        self._log.restore(self._found)
        self._found = []
        for kind, found in self._log.by_kind():
            if found:
                self._newest[kind] = found[-1]


# Of the key of a row that holds some decisions, the first letter.
_SOME = "s"
# By the first letter of the key of a row that holds one.
_KINDS: Mapping[str, type[Decision]] = {"g": Grant, "q": Queueing, "r": Refusal}
_RowValue = tuple[float, list[tuple[str, msgspec.Raw]]]


def _runs(one: Decision, clock: float) -> bool:
    """Whether more may become known of it."""
    if not isinstance(one, Grant) or one.used is not None:
        return False
    return one.ended_at is None or clock - one.ended_at < SETTLE_SECONDS


def _told(one: Decision) -> Decision:
    """The decision without words, since they may be a client's, and without infinite times."""
    if isinstance(one, Refusal):
        return msgspec.structs.replace(one, message="")
    if isinstance(one, Queueing) and one.expires_at > LAST_TIME:
        return msgspec.structs.replace(one, expires_at=LAST_TIME)
    return one


def _shifted(letter: str, raw: msgspec.Raw, shift: float) -> Decision:
    """The decision, with its times on another clock.

    Of the times of a comparison only the differences count.
    """
    one = msgspec.json.decode(raw, type=_KINDS[letter])
    changed: dict[str, Any] = {
        name: min(value + shift, LAST_TIME)
        for name in ("at", "received_at", "expires_at", "first_content_at", "ended_at")
        if (value := getattr(one, name, None)) is not None
    }
    return msgspec.structs.replace(one, **changed)
