"""One request that arrives or waits, as the numbers that placing goes by."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from gateway.config.queue import DEFAULT_SLOTLESS
from gateway.request import Priority

MOST_TOKENS_PER_REQUEST = 1e7
"""Tokens of a prompt or an answer; more than that is a mistake, and is bounded."""

DEFAULT_COMPLETION_TOKENS = 256.0
"""Tokens expected of an answer that nobody knows anything about."""

Requirements = tuple[tuple["TierSets", ...], int, bool]
"""Groups, slots and whether it leaves the reserve alone: what the rows with room depend on."""

NO_ROWS: Mapping[int, float] = {}
"""Of no row; never written to."""

SLOWEST_TPS, FASTEST_TPS = 1e-3, 1e7
"""Tokens/s outside of which a speed is a mistake; it is bounded."""

MOST_PENALTY_SECONDS = 1e6
"""Seconds; longer ones are bounded."""

MOST_SLOTS = 1 << 16

UNMEASURED_PREFILL_TPS = 100.0
"""Prompt tokens/s of a node that nobody has told about."""

UNMEASURED_TOKEN_SECONDS = 0.1
"""Seconds a token of such a node."""


def clamp(value: float, least: float, most: float, default: float) -> float:
    """`value` within its bounds; `otherwise` for what is no number."""
    if least <= value <= most:
        return value
    if math.isnan(value):
        return default
    return least if value < least else most


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request for slots on one node. Nonsense in its numbers is bounded.

    `groups` holds the pools for each name that the request stands for: a later name is only for
    when no node of an earlier one is alive.
    """

    id: str
    groups: tuple[TierSets, ...]
    priority: Priority
    fairness_key: str
    """Who it is fair to."""
    received_at: float
    """When it came to the gateway; monotonic seconds."""
    slots: int = 1
    prompt_tokens: float = 0.0
    """Expected prompt tokens."""
    completion_tokens: float = DEFAULT_COMPLETION_TOKENS
    """Expected tokens of the answer."""
    cached: Mapping[int, float] = field(default_factory=lambda: NO_ROWS)
    """Tokens of its prompt that a row is believed to have cached, by the row's index."""
    pending: Mapping[int, float] = field(default_factory=lambda: NO_ROWS)
    """Tokens of it that a row will have cached when what runs there has ended, by index."""
    excluded: Collection[int] = ()
    """Indexes of rows that can't serve it: never used."""
    failed: Collection[int] = ()
    """Indexes of rows that have failed it: used only when no other is alive."""
    penalties: Mapping[int, float] = field(default_factory=lambda: NO_ROWS)
    """Seconds by which a row looks slower to this request, by index; negative: better."""
    prompt_key: object = None
    """What its prompt is looked up by again; for `Dispatcher.recall` alone."""
    affinity_hash: int = 0
    """Hash of what it shares with its like, for `prefix_hash`."""
    deadline: float | None = None
    """When the answer is of no use any more."""
    slotless_caller: str = ""
    """Of one that takes no slot: its caller with all users that it names."""
    # Kept by the line and the dispatcher.
    work_tokens: tuple[float, float] = (0.0, 0.0)
    """Tokens that are likely to be read and to be written for it."""
    arrival_key: tuple[float, int] = (0.0, 0)
    """The key of the order of age."""
    account: FairnessAccount | None = None
    """Its caller's, while it is in line."""
    requirements: Requirements = ((), 0, False)
    warmest_rows: tuple[int, ...] = ()
    """Indexes of the rows that have most of it cached."""
    cache_checked_at: float = 0.0
    """When what is cached of it was last looked up."""
    deferred_to: NodeSlots | None = None
    """The busy node that it is held back for."""
    deferred_until: float = 0.0
    """When that was predicted to have a slot, with a margin; 0: never held back."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.prompt_tokens <= MOST_TOKENS_PER_REQUEST:
            self.prompt_tokens = clamp(self.prompt_tokens, 0.0, MOST_TOKENS_PER_REQUEST, 0.0)
        if not 1.0 <= self.completion_tokens <= MOST_TOKENS_PER_REQUEST:
            self.completion_tokens = clamp(
                self.completion_tokens, 1.0, MOST_TOKENS_PER_REQUEST, DEFAULT_COMPLETION_TOKENS
            )
        if not 0 <= self.slots <= MOST_SLOTS:
            self.slots = int(clamp(self.slots, 0, MOST_SLOTS, 1))

    @property
    def keeps_batch_reserve(self) -> bool:
        """Whether it leaves the reserve of each node free."""
        return self.priority is Priority.BATCH


@dataclass(slots=True, eq=False)
class FairnessAccount:
    """What one caller of a class was served, and what it has in line."""

    fairness_key: str
    serial: int
    counter: float = 0.0
    """Prompt tokens' worth of work."""
    running: int = 0
    fifos: dict[Requirements, list[QueuedRequest]] = field(default_factory=dict)
    """Its waiting requests by shape, the oldest first."""


@dataclass(slots=True, eq=False)
class NodeSlots:
    """One node as placing sees it. Written through the board's setters only.

    `total`, `capacity` (what work may use now), `foreign` (others' load), `ours`, `busy` (both)
    and `free` are slots. `prefill` is prompt tokens/s; a token takes `token_base` seconds alone
    and `token_step` more for each neighbour. `reading_until`: prompts that are queued there are
    read by then. `doubt`: seconds that the node is made to look slower; negative: faster.
    """

    index: int
    name: str
    name_hash: int = 0
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
    prefill_tps: float = UNMEASURED_PREFILL_TPS
    token_base: float = UNMEASURED_TOKEN_SECONDS
    token_step: float = 0.0
    penalty: float = 0.0
    prefill_until: float = 0.0
    ends_sum: float = 0.0
    """Sum of the predicted ends of what runs."""
    running: list[Placement] = field(default_factory=list)
    deferred: list[QueuedRequest] = field(default_factory=list)
    """Waiting requests that are held back for this node, in the order of their turns."""
    reserved_for: QueuedRequest | None = None
    """The wide request that the free slots are kept for."""
    reserved_from_all: bool = False
    """Whether they are kept from classes above it too."""
    batch_reserve: int = 0
    """Slots that must stay free where a request leaves the reserve alone."""
    last_placement: int = 0
    """The number of the last placement here."""
    per_prompt_token: float = 0.0
    """Seconds that one prompt token costs: its own reading and the writers it holds up."""
    per_output_token: float = 0.0
    """Seconds of one more sequence's token."""
    decoding: int = 0
    """How many of those that run have an answer to write."""
    decode_slowdown: float = 0.0
    """Share of their remaining time by which a newcomer slows down those who write."""
    slotless_running: int = 0
    """Requests that run here without a slot, and ..."""
    slotless_by_caller: dict[str, int] = field(default_factory=dict)
    """... how many of them are of each caller."""
    dirty: bool = False
    """Changed since numpy's columns were last brought up to date."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class CandidateSet:
    """The rows that can serve one thing, for example one model's chat requests.

    Changed in place (`set`), so that what waits sees a node that was added or lost.
    """

    rows: tuple[NodeSlots, ...] = ()
    row_indexes: frozenset[int] = frozenset()
    """Their indexes."""
    queued_tokens: tuple[list[float], list[float]] = field(
        default_factory=lambda: ([0.0] * 4, [0.0] * 4)
    )
    """Tokens that are to be read and to be written for what waits for it, by class."""
    excluded_mask: Any = None
    """numpy's view of the rows that are not in it, made when needed."""
    available: Any = None
    """The room for one slot here (`room.py`), as it was found with `opened`."""
    available_version: int = -1
    _slots: tuple[int, int, int] = (-1, 0, 0)

    def __post_init__(self) -> None:
        self.replace_rows(self.rows)

    def slots(self, placement_state: PlacementState) -> int:
        """Slots of the rows that are alive."""
        return self._counted(placement_state)[1]

    def unreserved_slots(self, placement_state: PlacementState) -> int:
        """Those of them that are for what leaves the reserve alone: at least one of each row."""
        return self._counted(placement_state)[2]

    def _counted(self, board: PlacementState) -> tuple[int, int, int]:
        if self._slots[0] != board.slots_version:
            alive = [row for row in self.rows if row.alive]
            self._slots = (
                board.slots_version,
                sum([row.total for row in alive]),
                sum([max(min(1, row.total), row.total - row.batch_reserve) for row in alive]),
            )
        return self._slots

    def replace_rows(self, rows: Iterable[NodeSlots]) -> None:
        """These rows and no others, in this order."""
        self.rows = tuple(rows)
        self.row_indexes = frozenset(row.index for row in self.rows)
        self.excluded_mask = None
        self.available_version = -1
        self._slots = (-1, 0, 0)


TierSets = tuple[CandidateSet, ...]
"""Pools that serve the same model, the preferred first: the next is for when one has no room."""


@dataclass(slots=True, eq=False)
class PlacementState:
    """All rows. Times are monotonic seconds, speeds tokens per second."""

    batch_reserve: float = 0.0
    """Share of each node's slots that `batch` leaves free (`set_reserve`)."""
    slotless_limit: int = DEFAULT_SLOTLESS
    """Requests that need no slot that one node gets at once."""
    rows: list[NodeSlots] = field(default_factory=list)
    """By index; a removed row stays until its index is used again."""
    by_name: dict[str, NodeSlots] = field(default_factory=dict)
    free_rows: dict[int, NodeSlots] = field(default_factory=dict)
    """Rows with a free slot, by index."""
    free_rows_version: int = 0
    """Changes whenever another row comes to be among them, or one leaves."""
    placement_count: int = 0
    """Placements so far."""
    speed_changes: int = 0
    """Rows that read or write twice as fast as they did, or half, since somebody took note."""
    slots_freed: bool = False
    """Whether slots have come free since those who wait were last looked at."""
    reserved_rows: list[NodeSlots] = field(default_factory=list)
    """Rows whose free slots are kept for a wide request."""
    last_release: float = 0.0
    """When the last of our slots came free, anywhere."""
    slots_version: int = 0
    """Changes with the number of slots of any row."""
    dirty_rows: list[NodeSlots] = field(default_factory=list)
    """Rows that have changed since numpy's columns were last brought up to date."""
    _unused: list[int] = field(default_factory=list)
    _pools: WeakSet[CandidateSet] = field(default_factory=WeakSet)

    # Rows and pools.

    def add(
        self,
        name: str,
        *,
        total: float = 1,
        prefill_tps: float = UNMEASURED_PREFILL_TPS,
        token_base: float = UNMEASURED_TOKEN_SECONDS,
        token_step: float = 0.0,
        gpu: bool = False,
    ) -> NodeSlots:
        """A row for a node that takes work on all its slots; the row of that name if there is."""
        row = self.by_name.get(name)
        if row is None:
            index = self._unused.pop() if self._unused else len(self.rows)
            row = self.by_name[name] = NodeSlots(index, name, zlib.crc32(name.encode()))
            self.rows[index : index + 1] = [row]
        row.gpu = gpu
        self.set_speed(row, prefill_tps, token_base, token_step)
        self.set_slots(row, total, total, 0)
        return row

    def remove(self, row: NodeSlots) -> None:
        """Nothing goes there any more: it leaves every pool. What runs there may still end."""
        if self.by_name.get(row.name) is not row:
            return
        del self.by_name[row.name]
        self.set_slots(row, 0, 0, 0)
        for pool in list(self._pools):
            if row.index in pool.row_indexes:
                pool.replace_rows(other for other in pool.rows if other is not row)
        self._unused.append(row.index)

    def candidate_set(self, rows: Iterable[NodeSlots] = ()) -> CandidateSet:
        """A pool that loses its rows as they are removed."""
        pool = CandidateSet(tuple(rows))
        self._pools.add(pool)
        return pool

    @property
    def node_count(self) -> int:
        """How many nodes there are."""
        return len(self.by_name)

    # Requests without a slot.

    def has_slotless_room(self, row: NodeSlots, caller: str) -> bool:
        """Whether `row` may take one more request of this caller that needs no slot.

        One caller has half of the places at most, so that there is one for the next.
        """
        most = self.slotless_limit
        return (
            row.slotless_running < most and row.slotless_by_caller.get(caller, 0) < (most + 1) // 2
        )

    def slotless_started(self, row: NodeSlots, caller: str) -> None:
        """Such a request runs there now."""
        row.slotless_running += 1
        row.slotless_by_caller[caller] = row.slotless_by_caller.get(caller, 0) + 1

    def slotless_ended(self, row: NodeSlots, caller: str) -> None:
        """It has ended."""
        row.slotless_running -= 1
        row.slotless_by_caller[caller] -= 1
        if not row.slotless_by_caller[caller]:
            del row.slotless_by_caller[caller]
        self.slots_freed = True

    # What the board is told.

    def set_slots(
        self,
        row: NodeSlots,
        total: float,
        capacity: float,
        foreign: float,
        *,
        alive: bool | None = None,
    ) -> None:
        """`total` slots, of which work may use `capacity` now, and others keep `foreign` busy.

        `alive`: worth waiting for, though it may take nothing now; left away: if it takes work.
        """
        row.total = int(clamp(total, 0, MOST_SLOTS, 0))
        row.capacity = int(clamp(capacity, 0, MOST_SLOTS, 0))
        row.foreign = int(clamp(foreign, 0, MOST_SLOTS, 0))
        row.alive = row.capacity > 0 if alive is None else alive
        self.slots_version += 1
        row.batch_reserve = int(self.batch_reserve * row.total)
        self.recompute(row)

    def set_speed(
        self, row: NodeSlots, prefill_tps: float, token_base: float, token_step: float
    ) -> None:
        """Tokens read per second, seconds a token alone, seconds more for each neighbour."""
        before = row.prefill_tps, row.token_base
        row.prefill_tps = clamp(prefill_tps, SLOWEST_TPS, FASTEST_TPS, UNMEASURED_PREFILL_TPS)
        row.token_base = clamp(
            token_base, 1 / FASTEST_TPS, 1 / SLOWEST_TPS, UNMEASURED_TOKEN_SECONDS
        )
        row.token_step = clamp(token_step, 0.0, 1 / SLOWEST_TPS, 0.0)
        after = row.prefill_tps, row.token_base
        if any(not 0.5 <= new / old <= 2.0 for new, old in zip(after, before, strict=True)):
            self.speed_changes += 1
        self.recompute(row)

    def set_penalty(self, row: NodeSlots, seconds: float) -> None:
        """Seconds that a doubtful node is made to look slower; negative: faster."""
        row.penalty = clamp(seconds, -MOST_PENALTY_SECONDS, MOST_PENALTY_SECONDS, 0.0)
        self.recompute(row)

    def set_batch_reserve(self, share: float) -> None:
        """Share (0..1) of each node's slots that `batch` leaves free."""
        self.batch_reserve = clamp(share, 0.0, 1.0, 0.0)
        self.slots_version += 1
        for row in self.rows:
            row.batch_reserve = int(self.batch_reserve * row.total)

    def recompute(self, row: NodeSlots) -> None:
        """Bring what follows from the row's slots and speeds up to date."""
        row.busy = busy = row.ours + row.foreign
        free = row.capacity - busy
        if free > 0:
            if free > row.free:
                self.slots_freed = True
                if not row.free:
                    self.free_rows[row.index] = row
                    self.free_rows_version += 1
            row.free = free
        elif row.free:
            row.free = 0
            self.free_rows_version += 1
            self.free_rows.pop(row.index, None)
        step = row.token_step
        row.per_output_token = per_token = row.token_base + step * busy
        row.per_prompt_token = (1 + busy) / row.prefill_tps
        # What needs no slot may write where nobody is busy.
        row.decode_slowdown = step / (per_token - step) if row.decoding and step and busy else 0.0
        if not row.dirty:
            self.mark_dirty(row)

    def mark_dirty(self, row: NodeSlots) -> None:
        """What numpy's columns have of `row` is out of date."""
        if not row.dirty:
            row.dirty = True
            self.dirty_rows.append(row)


@dataclass(slots=True, eq=False)
class Placement:
    """A request that has slots on a node, until `Dispatcher.finished`. Monotonic seconds."""

    queued: QueuedRequest
    row: NodeSlots
    candidate_set: CandidateSet
    group: int
    """Which of the request's names it is served under: an index of `ask.groups`."""
    placed_at: float
    prefill_ends: float
    """When its prompt is expected to have been read."""
    ends: float
    """When it is expected to end."""
    account: FairnessAccount | None = None
    charge: float = 0.0
    """What its caller has been charged."""
    token_weight: float = 1.0
    """What a written token counted then: it must count the same when it is settled."""
    released: bool = False
