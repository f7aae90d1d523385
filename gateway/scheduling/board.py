"""The board: what placing goes by, one row for each node.

The gateway mirrors its nodes into rows, the simulator its simulated ones. Slots that are ours are
counted here alone, by what was placed; whoever keeps the board says how many slots there are, how
many of them work may use at this moment, and how many others keep busy.

A row keeps the coefficients of the expected finish (`finish.py`) next to what it was told, so that
a choice costs few operations a node. A small fleet is chosen from by a loop over rows; a large one
through numpy columns, into which only those rows are copied that have changed (`Columns`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from gateway.config.waiting import SLOTLESS

if TYPE_CHECKING:
    from gateway.scheduling.ask import Ask
    from gateway.scheduling.forecast import Placement

SLOWEST, FASTEST = 1e-3, 1e7
"""Tokens/s outside of which a speed is a mistake; it is bounded."""
LONGEST = 1e6
"""Seconds; longer ones are bounded."""
MOST_SLOTS = 1 << 16
UNMEASURED_PREFILL = 100.0
"""Prompt tokens/s of a node that nobody has told about."""
UNMEASURED_TOKEN = 0.1
"""Seconds a token of such a node."""


def bounded(value: float, least: float, most: float, otherwise: float) -> float:
    """`value` within its bounds; `otherwise` for what is no number."""
    if least <= value <= most:
        return value
    if math.isnan(value):
        return otherwise
    return least if value < least else most


@dataclass(slots=True, eq=False)
class Row:
    """One node as placing sees it. Written through the board's setters only.

    `total`, `capacity` (what work may use now), `foreign` (others' load), `ours`, `busy` (both)
    and `free` are slots. `prefill` is prompt tokens/s; a token takes `token_base` seconds alone
    and `token_step` more for each neighbour. `reading_until`: prompts that are queued there are
    read by then. `doubt`: seconds that the node is made to look slower; negative: faster.
    """

    index: int
    name: str
    mark: int = 0
    """A hash of its name, the same in every process."""
    gpu: bool = False
    total: int = 0
    capacity: int = 0
    foreign: int = 0
    ours: int = 0
    busy: int = 0
    free: int = 0
    alive: bool = False
    """Worth waiting for."""
    prefill: float = UNMEASURED_PREFILL
    token_base: float = UNMEASURED_TOKEN
    token_step: float = 0.0
    doubt: float = 0.0
    reading_until: float = 0.0
    ends: float = 0.0
    """Sum of the predicted ends of what runs."""
    running: list[Placement] = field(default_factory=list)
    held: list[Ask] = field(default_factory=list)
    """Waiting requests that are held back for this node, in the order of their turns."""
    kept: Ask | None = None
    """The wide request that the free slots are kept for."""
    strictly: bool = False
    """Whether they are kept from classes above it too."""
    spare: int = 0
    """Slots that must stay free where a request leaves the reserve alone."""
    used: int = 0
    """The number of the last placement here."""
    per_prompt: float = 0.0
    """Seconds that one prompt token costs: its own reading and the writers it holds up."""
    per_token: float = 0.0
    """Seconds of one more sequence's token."""
    writers: int = 0
    """How many of those that run have an answer to write."""
    drag: float = 0.0
    """Share of their remaining time by which a newcomer slows down those who write."""
    slotless: int = 0
    """Requests that run here without a slot, and ..."""
    owners: dict[str, int] = field(default_factory=dict)
    """... how many of them are of each caller."""
    dirty: bool = False
    """Changed since numpy's columns were last brought up to date."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Pool:
    """The rows that can serve one thing, for example one model's chat requests.

    Changed in place (`set`), so that what waits sees a node that was added or lost.
    """

    rows: tuple[Row, ...] = ()
    members: frozenset[int] = frozenset()
    """Their indexes."""
    queued: tuple[list[float], list[float]] = field(default_factory=lambda: ([0.0] * 4, [0.0] * 4))
    """Tokens that are to be read and to be written for what waits for it, by class."""
    mask: Any = None
    """numpy's view of the rows that are not in it, made when needed."""
    room: Any = None
    """The room for one slot here (`room.py`), as it was found with `opened`."""
    opened: int = -1
    _slots: tuple[int, int, int] = (-1, 0, 0)

    def __post_init__(self) -> None:
        self.set(self.rows)

    def slots(self, board: Board) -> int:
        """Slots of the rows that are alive."""
        return self._counted(board)[1]

    def unreserved(self, board: Board) -> int:
        """Those of them that are for what leaves the reserve alone: at least one of each row."""
        return self._counted(board)[2]

    def _counted(self, board: Board) -> tuple[int, int, int]:
        if self._slots[0] != board.version:
            alive = [row for row in self.rows if row.alive]
            self._slots = (
                board.version,
                sum([row.total for row in alive]),
                sum([max(min(1, row.total), row.total - row.spare) for row in alive]),
            )
        return self._slots

    def set(self, rows: Iterable[Row]) -> None:
        """These rows and no others, in this order."""
        self.rows = tuple(rows)
        self.members = frozenset(row.index for row in self.rows)
        self.mask = None
        self.opened = -1
        self._slots = (-1, 0, 0)


@dataclass(slots=True, eq=False)
class Board:
    """All rows. Times are monotonic seconds, speeds tokens per second."""

    reserve: float = 0.0
    """Share of each node's slots that `batch` leaves free (`set_reserve`)."""
    slotless: int = SLOTLESS
    """Requests that need no slot that one node gets at once."""
    rows: list[Row] = field(default_factory=list)
    """By index; a removed row stays until its index is used again."""
    by_name: dict[str, Row] = field(default_factory=dict)
    open: dict[int, Row] = field(default_factory=dict)
    """Rows with a free slot, by index."""
    opened: int = 0
    """Changes whenever another row comes to be among them, or one leaves."""
    placed: int = 0
    """Placements so far."""
    moved: int = 0
    """Rows that read or write twice as fast as they did, or half, since somebody took note."""
    freed: bool = False
    """Whether slots have come free since those who wait were last looked at."""
    kept: list[Row] = field(default_factory=list)
    """Rows whose free slots are kept for a wide request."""
    released: float = 0.0
    """When the last of our slots came free, anywhere."""
    version: int = 0
    """Changes with the number of slots of any row."""
    dirty: list[Row] = field(default_factory=list)
    """Rows that have changed since numpy's columns were last brought up to date."""
    _unused: list[int] = field(default_factory=list)
    _pools: WeakSet[Pool] = field(default_factory=WeakSet)

    # Rows and pools.

    def add(
        self,
        name: str,
        *,
        total: float = 1,
        prefill: float = UNMEASURED_PREFILL,
        token_base: float = UNMEASURED_TOKEN,
        token_step: float = 0.0,
        gpu: bool = False,
    ) -> Row:
        """A row for a node that takes work on all its slots; the row of that name if there is."""
        row = self.by_name.get(name)
        if row is None:
            index = self._unused.pop() if self._unused else len(self.rows)
            row = self.by_name[name] = Row(index, name, zlib.crc32(name.encode()))
            self.rows[index : index + 1] = [row]
        row.gpu = gpu
        self.set_speed(row, prefill, token_base, token_step)
        self.set_slots(row, total, total, 0)
        return row

    def remove(self, row: Row) -> None:
        """Nothing goes there any more: it leaves every pool. What runs there may still end."""
        if self.by_name.get(row.name) is not row:
            return
        del self.by_name[row.name]
        self.set_slots(row, 0, 0, 0)
        for pool in list(self._pools):
            if row.index in pool.members:
                pool.set(other for other in pool.rows if other is not row)
        self._unused.append(row.index)

    def pool(self, rows: Iterable[Row] = ()) -> Pool:
        """A pool that loses its rows as they are removed."""
        pool = Pool(tuple(rows))
        self._pools.add(pool)
        return pool

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return len(self.by_name)

    # Requests without a slot.

    def has_slotless_room(self, row: Row, owner: str) -> bool:
        """Whether `row` may take one more request of this caller that needs no slot.

        One caller has half of the places at most, so that there is one for the next.
        """
        most = self.slotless
        return row.slotless < most and row.owners.get(owner, 0) < (most + 1) // 2

    def took_slotless(self, row: Row, owner: str) -> None:
        """Such a request runs there now."""
        row.slotless += 1
        row.owners[owner] = row.owners.get(owner, 0) + 1

    def gave_slotless(self, row: Row, owner: str) -> None:
        """It has ended."""
        row.slotless -= 1
        row.owners[owner] -= 1
        if not row.owners[owner]:
            del row.owners[owner]
        self.freed = True

    # What the board is told.

    def set_slots(
        self, row: Row, total: float, capacity: float, foreign: float, *, alive: bool | None = None
    ) -> None:
        """`total` slots, of which work may use `capacity` now, and others keep `foreign` busy.

        `alive`: worth waiting for, though it may take nothing now; left away: if it takes work.
        """
        row.total = int(bounded(total, 0, MOST_SLOTS, 0))
        row.capacity = int(bounded(capacity, 0, MOST_SLOTS, 0))
        row.foreign = int(bounded(foreign, 0, MOST_SLOTS, 0))
        row.alive = row.capacity > 0 if alive is None else alive
        self.version += 1
        row.spare = int(self.reserve * row.total)
        self.settle(row)

    def set_speed(self, row: Row, prefill: float, token_base: float, token_step: float) -> None:
        """Tokens read per second, seconds a token alone, seconds more for each neighbour."""
        before = row.prefill, row.token_base
        row.prefill = bounded(prefill, SLOWEST, FASTEST, UNMEASURED_PREFILL)
        row.token_base = bounded(token_base, 1 / FASTEST, 1 / SLOWEST, UNMEASURED_TOKEN)
        row.token_step = bounded(token_step, 0.0, 1 / SLOWEST, 0.0)
        after = row.prefill, row.token_base
        if any(not 0.5 <= new / old <= 2.0 for new, old in zip(after, before, strict=True)):
            self.moved += 1
        self.settle(row)

    def set_doubt(self, row: Row, seconds: float) -> None:
        """Seconds that a doubtful node is made to look slower; negative: faster."""
        row.doubt = bounded(seconds, -LONGEST, LONGEST, 0.0)
        self.settle(row)

    def set_reserve(self, share: float) -> None:
        """Share (0..1) of each node's slots that `batch` leaves free."""
        self.reserve = bounded(share, 0.0, 1.0, 0.0)
        self.version += 1
        for row in self.rows:
            row.spare = int(self.reserve * row.total)

    def settle(self, row: Row) -> None:
        """Bring what follows from the row's slots and speeds up to date."""
        row.busy = busy = row.ours + row.foreign
        free = row.capacity - busy
        if free > 0:
            if free > row.free:
                self.freed = True
                if not row.free:
                    self.open[row.index] = row
                    self.opened += 1
            row.free = free
        elif row.free:
            row.free = 0
            self.opened += 1
            self.open.pop(row.index, None)
        step = row.token_step
        row.per_token = per_token = row.token_base + step * busy
        row.per_prompt = (1 + busy) / row.prefill
        # What needs no slot may write where nobody is busy.
        row.drag = step / (per_token - step) if row.writers and step and busy else 0.0
        if not row.dirty:
            self.touch(row)

    def touch(self, row: Row) -> None:
        """What numpy's columns have of `row` is out of date."""
        if not row.dirty:
            row.dirty = True
            self.dirty.append(row)
