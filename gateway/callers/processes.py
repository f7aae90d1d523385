"""The processes that share the store: each says that it is alive, and notices which others are not.

A process that is killed leaves its open requests behind. Any other one may turn them into rows of
the ledger (`recover`): the id of a row is that of its request, so however many processes try, there
is one row for each.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, select, update

from gateway.store.database import insert_for
from gateway.store.schema import open_requests, processes

HEARTBEAT_SECONDS = 5.0  # seconds between two signs of life in the store
# Seconds without a sign of life after which a process counts as dead, by the observer's clock: a
# store that was down, or a host whose clock is wrong, makes nobody look dead.
DEAD_SECONDS = 30.0
# Open requests of a dead process that one transaction recovers: some 20 ms of work.
MOST_TAKEN = 500
LOST = "lost"  # the outcome of a request whose process was killed
# And of one whose edge was: that may yet tell another process what became of it.
EDGE_DIED = "edge_died"


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """This process, as others see it in the store."""

    id: str  # random; behind the dot the time when it started, in ticks since the machine did
    host: str  # the machine since it was started, and the name space that `pid` belongs to
    pid: int
    started_at: float  # Unix time

    @classmethod
    def of_this_process(cls, now: float) -> ProcessIdentity:
        """A new identity."""
        pid = os.getpid()
        return cls(f"{secrets.token_hex(8)}.{start_ticks(pid) or 0:x}", _this_host(), pid, now)


class SeenProcess(NamedTuple):
    """A process as the store shows it."""

    id: str
    host: str | None  # None: it is not registered, yet has open requests
    pid: int
    seen_at: float


def start_ticks(pid: int) -> int | None:
    """When a process of this machine started, in ticks since the machine did; None: unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _this_host() -> str:
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def is_gone(seen: SeenProcess, host: str) -> bool:
    """Whether it certainly does not run any more: its pid on this host is free or another's."""
    if seen.host != host:
        return False
    try:
        os.kill(seen.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    started = start_ticks(seen.pid)
    _, _, ticks = seen.id.rpartition(".")
    return started is not None and ticks not in {"0", f"{started:x}"}


@dataclass(slots=True, eq=False)
class ProcessWatch:
    """Decides which other processes are dead, from what the store shows at several times."""

    own: ProcessIdentity
    clock: Callable[[], float]
    _unchanged_since: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of each other process, its last sign of life, and since when that has been the last."""

    def dead(self, seen: Iterable[SeenProcess]) -> list[SeenProcess]:
        """Those of the processes that are dead; `seen`: all that the store shows now."""
        now, before, found = self.clock(), self._unchanged_since, []
        self._unchanged_since = {}
        for one in seen:
            if one.id == self.own.id:
                continue
            last, since = before.get(one.id, (one.seen_at, now))
            if last != one.seen_at:
                since = now
            self._unchanged_since[one.id] = one.seen_at, since
            if is_gone(one, self.own.host) or now - since >= DEAD_SECONDS:
                found.append(one)
        return found


# Jobs of the store.


def register(connection: Connection, own: ProcessIdentity, now: float) -> None:
    """Say that this process is alive."""
    values = {"id": own.id, "started_at": own.started_at, "seen_at": now, "host": own.host,
              "pid": own.pid}  # fmt: skip
    connection.execute(
        insert_for(connection)(processes)
        .values(values)
        .on_conflict_do_update(index_elements=["id"], set_={"seen_at": now})
    )


def leave_open(connection: Connection, own: ProcessIdentity, ids: Sequence[str]) -> None:
    """This process runs these requests no more: who runs them makes them its own.

    If nobody does, they are recovered as those of a dead process.
    """
    ours = open_requests.c.process == own.id, open_requests.c.id.in_(ids)
    connection.execute(update(open_requests).where(*ours).values(process=f"{own.id}.left"))


def unregister(connection: Connection, own: ProcessIdentity) -> None:
    """This process ends, and leaves no open request behind."""
    connection.execute(delete(processes).where(processes.c.id == own.id))


def seen_processes(connection: Connection) -> list[SeenProcess]:
    """All processes that are registered or have open requests."""
    columns = processes.c.id, processes.c.host, processes.c.pid, processes.c.seen_at
    seen = [SeenProcess(*row) for row in connection.execute(select(*columns))]
    known = {one.id for one in seen}
    of_open = connection.execute(select(open_requests.c.process).distinct()).scalars()
    return seen + [SeenProcess(one, None, 0, 0.0) for one in of_open if one not in known]


def take_open_requests(
    connection: Connection, dead: SeenProcess, most: int = MOST_TAKEN
) -> list[dict[str, Any]]:
    """Remove open requests of a dead process, and return them; none if it lives after all.

    The process itself goes with the last of them, when fewer than `most` were left. The same
    transaction must write them into the ledger.
    """
    own_row = processes.c.id == dead.id, processes.c.seen_at == dead.seen_at
    if dead.host is not None:
        # Of two processes that recover it one waits for the other.
        locked = select(processes.c.id).where(*own_row).with_for_update()
        if connection.scalar(locked) is None:
            return []
    columns = open_requests.c
    oldest = select(open_requests).where(columns.process == dead.id).order_by(columns.id)
    found = connection.execute(oldest.limit(most))
    rows = [dict(row._mapping) for row in found]  # noqa: SLF001 - a public name of SQLAlchemy
    if rows:
        connection.execute(delete(open_requests).where(columns.id.in_([r["id"] for r in rows])))
    if len(rows) < most:
        connection.execute(delete(processes).where(*own_row))
    return rows
