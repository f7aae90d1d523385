"""What a request is to the scheduler: read this first.

A `QueuedRequest` is a request in numbers: its class, how many slots and tokens it needs, and where
it may go. A `CandidateSet` holds the rows that serve one thing, such as one model's chats, and
`NodeSlots` is one row: a node's slots, speeds and work. Its `Requirements` decide which rows have
room for a request. A request that has slots on a row, a placement, is the same `QueuedRequest`; its
`Comparison` has the rows that it was compared with. Times are monotonic seconds, speeds tokens per
second.

Every module may read rows. A row is changed by its own methods, which tell the table of all rows,
`PlacementState`, so that the sets and counters that it keeps never fall behind. A row moves the
expected ends of the placements on it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from weakref import WeakSet

import msgspec

from gateway.config.scheduling import DEFAULT_SLOTLESS
from gateway.lease import PromptKey
from gateway.terms import Priority

# Rows that are kept of one placement: those of the least cost, the chosen one among them.
MOST_COMPARED_ROWS = 8


# Structs of msgspec, since some are made for each request. Letters as in `selection.py`.
class RowSpeed(msgspec.Struct, frozen=True, eq=False, gc=False):
    """How fast a row is believed to be."""

    measured: bool  # whether its speeds were measured; else they are guesses
    prefill_tps: float  # p
    token_base: float  # b
    token_step: float  # s
    penalty: float  # the row's part of D
    wake: float  # the seconds of `penalty` in which the node, which sleeps, wakes up


class RowWork(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What ran on a row."""

    busy: int  # k: neighbours
    running: int  # requests, those without a slot included
    ends_sum: float  # the sum of their expected ends
    prefill_until: float
    decode_slowdown: float  # d
    pool_used: int  # tokens of the pool that were reserved, or that others used


class RowFigures(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A row as it stood from one change to the next; made once, for all that look meanwhile."""

    name: str
    total: int  # its slots
    pool: int  # tokens that its slots share; 0: none
    speed: RowSpeed
    work: RowWork


class OwnFigures(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What held on a row for one request alone."""

    cached: float = 0.0
    penalty: float = 0.0  # its part of D


class NodeCounts(msgspec.Struct, frozen=True, eq=False, gc=False):
    """How many nodes there were for a request."""

    with_room: int  # rows of its candidate set that had room for it
    candidates: int  # rows of its candidate set
    fleet: int


NOTHING_OWN = OwnFigures()
NO_OWN_FIGURES: Mapping[str, OwnFigures] = {}  # for no row; never written to


class Comparison(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The rows that a placement was compared with, just before it was placed."""

    chosen: RowFigures
    others: tuple[RowFigures, ...]
    """The best of those that had room and were not chosen, in no order."""
    own: Mapping[str, OwnFigures]  # by the names of rows; none for those that are not there
    at: float  # when it was; by it the times in `RowWork` are seconds
    nodes: NodeCounts
    by_cost: bool  # whether the policy goes by the cost

    def own_figures(self, row: RowFigures) -> OwnFigures:
        """What held on this row for the request alone."""
        return self.own.get(row.name, NOTHING_OWN)

    @property
    def cached_on_chosen(self) -> float:
        """Tokens of its prompt that the chosen row was believed to have cached."""
        return self.own_figures(self.chosen).cached

    def remaining(self, row: RowFigures) -> float:
        """Sigma r: seconds that the neighbours still had to run, as far as they decoded."""
        work = row.work
        return max(0.0, work.ends_sum - self.at * work.running) if work.decode_slowdown else 0.0

    def prefill_wait(self, row: RowFigures) -> float:
        """R: seconds until the prompts that were queued there had been read."""
        return max(0.0, row.work.prefill_until - self.at)


class Deferral(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Why a request waits for a busy node though another has room. Costs are in seconds."""

    node: str
    wait_seconds: float  # until the busy node was expected to have room
    cost_there: float  # its expected cost there, that wait included
    cost_at_once: float  # its expected cost on the node that had room
    cached: float  # prompt tokens that the busy node was believed to have cached, or to have soon


MOST_TOKENS_PER_REQUEST = 1e7  # tokens of a prompt or an answer; more is a mistake and is clamped
DEFAULT_COMPLETION_TOKENS = 256.0  # expected tokens of an answer about which nothing is known
# Completion tokens of a request that decodes nothing, such as embeddings, or next to nothing.
NEGLIGIBLE_COMPLETION = 1.0
# Prompt tokens that a server reads however much is cached: the last one always.
LEAST_UNCACHED_TOKENS = 1.0
NO_ROWS: Mapping[int, float] = {}  # figures by row index, for no row; never written to
WARM_ROWS_PER_REQUEST = 6  # rows with most of a request's prompt cached that the request remembers
# A placement past its expected end is expected to take this share of its time so far once more.
OVERRUN_SHARE = 0.5
# Tokens/s outside of which a speed is a mistake; it is clamped.
SLOWEST_TPS, FASTEST_TPS = 1e-3, 1e7
MOST_PENALTY_SECONDS = 1e6
MOST_SLOTS = 1 << 16
# Requests on one row from which on the expected ends of all are not moved with each that starts or
# ends, but once for that share of them: a bounded number for each.
CROWD, CROWD_SHARE = 64, 1 / 32
# Requests that a row gets in order to learn its speed, though another seems to be better. The
# second one corrects the first, for which a server may have had to read its model from disk.
EXPLORING_REQUESTS = 2
UNMEASURED_PREFILL_TPS = 100.0  # prompt tokens/s of a node whose speed was never set
UNMEASURED_TOKEN_SECONDS = 0.1  # seconds per output token of such a node


def clamp(value: float, least: float, most: float, default: float) -> float:
    """`value` within its bounds; `default` for NaN."""
    if least <= value <= most:
        return value
    if math.isnan(value):
        return default
    return least if value < least else most


class QueuedRequest(msgspec.Struct, eq=False):
    """A request for slots on one node, in numbers, from its arrival until it is released.

    Out-of-range numbers are clamped. Once it has slots on a row, it is called a placement.

    `groups` has the candidate sets of each model name that the request stands for; a later name
    counts only when no node of an earlier one is alive, or all that are want a pause.
    """

    id: str
    groups: tuple[TierSets, ...]
    priority: Priority
    fairness_key: str  # the caller or user whose share it counts against
    received_at: float
    slots: int = 1
    prompt_tokens: float = 0.0
    completion_tokens: float = DEFAULT_COMPLETION_TOKENS
    cached: Mapping[int, float] = NO_ROWS
    """Prompt tokens that a row is believed to have cached, by row index."""
    pending: Mapping[int, float] = NO_ROWS
    """Prompt tokens that a row will have cached once what runs there has ended, by row index."""
    excluded: Collection[int] = ()  # indexes of rows that can't serve it: never used
    failed: Collection[int] = ()
    """Indexes of rows that have failed it: used only while no other is alive."""
    penalties: Mapping[int, float] = NO_ROWS
    """Seconds by which a row looks slower to this request, by row index; negative: faster."""
    prompt_key: PromptKey | None = None
    """Its prompt's key in the prompt cache's index, with the tokens expected of the prompt."""
    affinity_hash: int = 0  # hash of the prompt's shared beginning, for the policy `prefix_hash`
    deadline: float | None = None  # when its client stops waiting for the answer
    slotless_caller: str = ""  # the caller, all its users together, of a request that takes no slot
    pool_tokens: float = 0.0
    """Tokens for which a shared pool must have room; infinity: it runs alone there; 0: as many as
    are expected."""
    beside_others: bool = False
    """Whether it runs alone but for others' work, beside which `pool_tokens` are left."""
    # Set while it waits, by the wait queue and the dispatcher.
    work_tokens: tuple[float, float] = (0.0, 0.0)
    """Prompt tokens to be read and output tokens to be decoded for it, as expected."""
    arrival_key: tuple[float, int] = (0.0, 0)  # sorts requests by age
    account: FairnessAccount | None = None
    """Its caller's account while it waits; None: it does not wait."""
    requirements: Requirements = ((), 0, False)
    fills_pool: bool = False  # whether it needs most of the tokens of a shared pool
    was_reserved_for: bool = False
    """Whether a node's room has been reserved for it: once it suffices, it goes first."""
    warmest_rows: tuple[int, ...] = ()  # indexes of the rows that have most of its prompt cached
    cache_checked_at: float = 0.0  # when `cached` was last looked up
    deferred_to: NodeSlots | None = None  # the busy node that it waits for while others may pass it
    deferred_until: float = 0.0
    """When that node was predicted to have a slot, with a margin; 0: never deferred."""
    deferral: Deferral | None = None
    # Set when it is placed; the row moves its expected ends.
    row: NodeSlots = None  # type: ignore[assignment] # set as soon as anybody asks for it
    group: int = 0  # the model name it is served under: an index of `groups`
    placed_at: float = 0.0
    prefill_ends: float = 0.0  # when its prompt is expected to have been read
    ends: float = 0.0
    uncached: float = 0.0  # prompt tokens that the node has to read
    payer: FairnessAccount | None = None
    """The account that pays for it; None: it was settled, or it has not been placed."""
    charge: float = 0.0
    token_weight: float = 1.0
    """Price of an output token when it was placed: it is settled at the same price."""
    released: bool = False
    comparison: Comparison | None = None  # what its row was compared with, if that is kept

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
        """Whether it must leave each node's batch reserve free."""
        return self.priority is Priority.BATCH

    def set_penalties(self, penalties: Mapping[int, float]) -> None:
        """These rows look slower to it, or faster."""
        self.penalties = penalties

    @property
    def is_wide(self) -> bool:
        """Whether room must be kept for it, since others would take it piece by piece."""
        return self.slots > 1 or self.fills_pool

    @property
    def tokens_needed(self) -> float:
        """Tokens for which a shared pool must have room."""
        return self.pool_tokens or self.prompt_tokens + self.completion_tokens * self.slots

    def set_pool_tokens(self, tokens: float, *, beside_others: bool = False) -> None:
        """Set `pool_tokens` and `beside_others`; before it runs."""
        self.pool_tokens, self.beside_others = tokens, beside_others

    def set_fills_pool(self, *, fills: bool) -> None:
        """Set `fills_pool`; before it waits."""
        self.fills_pool = fills

    def note_reserved_for(self) -> None:
        """A node's room is reserved for it."""
        self.was_reserved_for = True

    def set_groups(self, groups: tuple[TierSets, ...]) -> None:
        """It may go to these candidates only; before it waits."""
        self.groups = groups

    def set_cached(
        self, prompt_tokens: float, cached: Mapping[int, float], pending: Mapping[int, float]
    ) -> None:
        """Take in what a lookup in the prompt cache's index has found."""
        self.prompt_tokens, self.cached, self.pending = prompt_tokens, cached, pending

    def find_warmest_rows(self) -> None:
        """Set `warmest_rows`: those that have most of its prompt cached, or will have."""
        cached, pending = self.cached, self.pending
        if pending:
            either = {**pending, **cached}
            cached = {one: max(cached.get(one, 0.0), pending.get(one, 0.0)) for one in either}
        rows = list(cached)
        if len(rows) > WARM_ROWS_PER_REQUEST:
            rows.sort(key=cached.__getitem__, reverse=True)
        self.warmest_rows = tuple(rows[:WARM_ROWS_PER_REQUEST])

    def enter(self, account: FairnessAccount, number: int, now: float) -> None:
        """It waits now, as the arrival of that number; `cached` is as of now."""
        self.account, self.cache_checked_at = account, now
        self.arrival_key = (self.received_at, number)
        self.requirements = self.groups, self.slots, self.keeps_batch_reserve
        cached = max(self.cached.values(), default=0.0)
        uncached = max(LEAST_UNCACHED_TOKENS, self.prompt_tokens - cached)
        self.work_tokens = uncached, self.completion_tokens

    def leave(self) -> None:
        """It does not wait any more."""
        self.account = None

    def looked_up(self, now: float) -> None:
        """`cached` is as of now."""
        self.cache_checked_at = now

    def defer_to(self, row: NodeSlots, until: float, deferral: Deferral) -> None:
        """Let it wait for this row. `until` holds from the first time on."""
        row.deferred.append(self)
        self.deferred_to, self.deferral = row, deferral
        if not self.deferred_until:
            self.deferred_until = until

    def begin(self, row: NodeSlots, now: float, uncached: float, start: float) -> float:
        """It gets slots on this row now, which will read `uncached` tokens from `start` on.

        Returns when it is expected to end.
        """
        self.row, self.placed_at, self.uncached, self.released = row, now, uncached, False
        self.prefill_ends = prefill_ends = start + uncached / row.prefill_tps
        self.ends = ends = prefill_ends + self.completion_tokens * row.per_output_token
        return ends

    def placed_earlier(self, at: float) -> None:
        """It was placed at that time, before its row knew of it."""
        self.placed_at = at

    def placed(
        self, group: int, comparison: Comparison | None, payer: FairnessAccount, token_weight: float
    ) -> float:
        """It is served under the model name of this group; returns what `payer` pays for it.

        `token_weight`: for an output token so many prompt tokens.
        """
        self.group, self.comparison, self.payer, self.token_weight = (
            group, comparison, payer, token_weight,
        )  # fmt: skip
        self.charge = charge = self.uncached + self.completion_tokens * token_weight
        return charge

    def release(self) -> None:
        """Its slots are free."""
        self.released = True

    def take_payer(self) -> FairnessAccount | None:
        """The account that pays for it, the first time; then None."""
        payer, self.payer = self.payer, None
        return payer

    def seconds_left(self, now: float) -> float:
        """Seconds until it ends, as expected now: the longer it is late, the longer it takes."""
        left = self.ends - now
        overrun = (now - self.placed_at) * OVERRUN_SHARE
        return left if left > 0.0 else overrun

    def undefer(self) -> None:
        """Let it wait for no row in particular."""
        if self.deferred_to is not None:
            self.deferred_to.deferred.remove(self)
            self.deferred_to = None


@dataclass(slots=True, eq=False)
class FairnessAccount:
    """The work that one caller of a class was served, and its waiting requests."""

    fairness_key: str
    serial: int
    counter: float = 0.0  # work, in prompt tokens
    running: int = 0
    fifos: dict[Requirements, list[QueuedRequest]] = field(default_factory=dict)
    """Its waiting requests by their requirements, oldest first."""

    def raise_to(self, least: float) -> None:
        """Lift the counter to `least`, which is above it."""
        self.counter = least

    def started(self, charge: float) -> None:
        """One of its requests runs now, at the price of `charge`."""
        self.running += 1
        self.counter += charge

    def settled(self, correction: float) -> None:
        """One has ended; its price differs from the charge by `correction`."""
        self.running -= 1
        self.counter += correction


@dataclass(slots=True, eq=False)
class NodeSlots:
    """One row of a table: a node's slots, speeds and work.

    Slots: `total`; `capacity`, that requests may use now; `foreign`, busy with others' work;
    `ours`, busy with placements; `busy`, both; `free`. An output token takes `token_base` seconds
    alone and `token_step` more for each neighbour.
    """

    table: PlacementState = field(repr=False)
    index: int
    name: str
    name_hash: int = 0  # a hash of its name, the same in every process
    gpu: bool = False
    total: int = 0
    capacity: int = 0
    foreign: int = 0
    ours: int = 0
    busy: int = 0
    free: int = 0
    alive: bool = False
    paused: bool = False
    """Alive, but it wants nothing for a while: a later model name counts meanwhile."""
    prefill_tps: float = UNMEASURED_PREFILL_TPS
    token_base: float = UNMEASURED_TOKEN_SECONDS
    token_step: float = 0.0
    measured: bool = True
    """Whether these speeds were measured; else they are guesses. No decision depends on it."""
    samples: int = EXPLORING_REQUESTS
    """Responses that have shown its speed, up to `EXPLORING_REQUESTS`."""
    exploring: int = 0
    """Requests that it may still get in order to learn its speed (`selection.explore`)."""
    hope: float = 1.0
    """Factor of its expected cost when it is decided whether it gets such a request."""
    penalty: float = 0.0  # seconds by which it is made to look slower; negative: faster
    wake: float = 0.0  # those of them in which its node, which sleeps, wakes up
    prefill_until: float = 0.0
    """When the prompts that are queued there are expected to have been read."""
    ends_sum: float = 0.0
    running: list[QueuedRequest] = field(default_factory=list)
    _stretch: tuple[float, float] = (1.0, 0.0)
    """What the expected ends of a crowd have not been moved by yet: a factor of the time left, and
    seconds."""
    _unmoved: int = 0  # starts and ends in `_stretch`
    deferred: list[QueuedRequest] = field(default_factory=list)
    """Waiting requests that are deferred to it, in the order in which they were."""
    reserved_for: QueuedRequest | None = None
    reserved_from_all: bool = False  # whether they are reserved from higher classes too
    batch_reserve: int = 0  # slots that `batch` must leave free
    kept_from_batch: bool = False
    """Whether that is all of them, so that `batch` has no place here even while it is idle."""
    reserve_group: object = None  # rows of equal groups, in the same tier, share their reserve
    last_placement: int = 0
    per_prompt_token: float = 0.0
    """Cost of one more prompt token, seconds: its prefill and the decoding that it holds up."""
    per_output_token: float = 0.0  # seconds of an output token of one more sequence
    decoding: int = 0
    decode_slowdown: float = 0.0
    """Share of their remaining time by which one more sequence slows them down."""
    slotless_running: int = 0  # requests without a slot that run here
    slotless_by_caller: dict[str, int] = field(default_factory=dict)
    pool: int = 0  # tokens that its slots share; 0: each has its own
    pool_reserved: float = 0.0
    pool_foreign: int = 0
    """Tokens of the pool that others use, or ours beyond what is reserved for them."""
    pool_room: float = math.inf
    """Tokens that a request here may need; infinity: any number, as while the node is idle."""
    figures: RowFigures | None = None  # as it stands now; None: ask `take_figures`
    _speed_figures: RowSpeed | None = None

    def take_figures(self) -> RowFigures:
        """The row as it stands now; the same until something changes."""
        speed = self._speed_figures
        if speed is None:
            speed = self._speed_figures = RowSpeed(
                self.measured, self.prefill_tps, self.token_base, self.token_step, self.penalty,
                self.wake,
            )  # fmt: skip
        work = RowWork(
            self.busy, len(self.running), self.ends_sum, self.prefill_until, self.decode_slowdown,
            round(self.pool_reserved) + self.pool_foreign if self.pool else 0,
        )  # fmt: skip
        figures = self.figures = RowFigures(self.name, self.total, self.pool, speed, work)
        return figures

    @property
    def is_current(self) -> bool:
        """Whether it is still that of a node: another row may have its index by now."""
        return self.table.by_name.get(self.name) is self

    # The node's own figures.

    def set_tier(self, *, gpu: bool) -> None:
        """Whether the node is of tier `gpu`."""
        self.gpu = gpu
        self.table.reserve_changed()

    def set_slots(
        self,
        total: float,
        capacity: float,
        foreign: float,
        *,
        alive: bool | None = None,
        paused: bool = False,
    ) -> None:
        """`total` slots, of which requests may use `capacity` now; others' work fills `foreign`.

        `alive`: worth waiting for, though it may take nothing now; None: if it takes work.
        `paused`: it wants nothing for a while.
        """
        old_total, was_alive = self.total, self.alive
        self.total = int(clamp(total, 0, MOST_SLOTS, 0))
        self.capacity = int(clamp(capacity, 0, MOST_SLOTS, 0))
        self.foreign = int(clamp(foreign, 0, MOST_SLOTS, 0))
        self.alive = self.capacity > 0 if alive is None else alive
        self.paused = paused
        self.table.slots_changed(reserve=self.total != old_total or self.alive is not was_alive)
        self.recompute()

    def set_speed(self, prefill_tps: float, token_base: float, token_step: float) -> None:
        """Prompt tokens/s, seconds per output token alone, seconds more for each neighbour."""
        fastest, slowest = 1 / FASTEST_TPS, 1 / SLOWEST_TPS
        prefill_tps = clamp(prefill_tps, SLOWEST_TPS, FASTEST_TPS, UNMEASURED_PREFILL_TPS)
        token_base = clamp(token_base, fastest, slowest, UNMEASURED_TOKEN_SECONDS)
        token_step = clamp(token_step, 0.0, slowest, 0.0)
        tps, base = self.prefill_tps, self.token_base
        self.prefill_tps, self.token_base, self.token_step = prefill_tps, token_base, token_step
        self._speed_figures = None
        if not (0.5 <= prefill_tps / tps <= 2.0 and 0.5 <= token_base / base <= 2.0):
            self.table.speed_changed()
        self.recompute()

    def set_learnt(self, samples: int, hope: float, *, measured: bool) -> None:
        """How many responses have shown its speeds, up to `EXPLORING_REQUESTS`.

        With fewer it may be explored, by its `hope`; with fewer than before, from the beginning.
        `measured`: whether its speeds were measured, or are guesses.
        """
        left = EXPLORING_REQUESTS if samples < self.samples else self.exploring
        self.exploring = min(left, EXPLORING_REQUESTS - samples)
        self.samples, self.hope, self.measured = samples, hope, measured
        self.figures = self._speed_figures = None
        self.table.exploring_changed(self)

    def set_penalty(self, seconds: float, *, wake: float = 0.0) -> None:
        """Seconds by which the node is made to look slower; negative: faster.

        `wake`: those of them in which it wakes up.
        """
        self.penalty = clamp(seconds, -MOST_PENALTY_SECONDS, MOST_PENALTY_SECONDS, 0.0)
        self.wake = wake
        self.figures = self._speed_figures = None
        self.table.row_changed(self, self.free)

    def set_pool(self, tokens: int, foreign: int) -> None:
        """Its slots share so many tokens, of which others use `foreign`; 0: they share none."""
        self.table.pool_changed(self.pool, tokens)
        self.pool, self.pool_foreign = tokens, foreign
        self.pool_reserved = sum([self._pool_share(one) for one in self.running])
        self.pool_room = math.inf
        self.recompute()

    def set_batch_reserve(self, slots: int) -> None:
        """As `PlacementState.spread_batch_reserve` has found."""
        self.batch_reserve = slots
        self.kept_from_batch = 0 < self.total <= slots
        self.table.row_changed(self, self.free)

    def set_reserve_group(self, group: object) -> None:
        """Rows of equal groups, in the same tier, share their reserve."""
        if self.reserve_group != group:
            self.reserve_group = group
            self.table.reserve_changed()

    def reserve(self, queued: QueuedRequest, *, from_all_classes: bool) -> None:
        """Reserve its free slots for a wide request."""
        self.reserved_for, self.reserved_from_all = queued, from_all_classes
        self.table.reserved_rows.append(self)

    def unreserve(self) -> None:
        """End its reservation."""
        self.reserved_for, self.reserved_from_all = None, False
        self.table.reserved_rows.remove(self)

    def recompute(self) -> None:
        """Derive `busy`, `free` and the cost coefficients from slots, speeds and work."""
        self.figures, before = None, self.free
        self.busy = busy = self.ours + self.foreign
        free = self.capacity - busy
        self.free = free if free > 0 else 0  # noqa: FURB136 - a call costs four times as much
        if self.pool:
            left = self.pool - self.pool_reserved - self.pool_foreign
            self.pool_room = left if busy else math.inf
        step = self.token_step
        self.per_output_token = per_token = self.token_base + step * busy
        self.per_prompt_token = (1 + busy) / self.prefill_tps
        # Requests without a slot may decode where no slot is busy.
        self.decode_slowdown = step / (per_token - step) if self.decoding and step and busy else 0.0
        self.table.row_changed(self, before)

    # Its work.

    def start(self, queued: QueuedRequest, now: float) -> None:
        """Start a request: its prefill holds up what decodes, its decoding slows that down.

        Where nothing decodes, prompts are read one after the other and no other end moves.
        """
        exploring = self.exploring
        uncached, completion = queued.prompt_tokens, queued.completion_tokens
        if queued.cached:
            uncached = max(LEAST_UNCACHED_TOKENS, uncached - queued.cached.get(self.index, 0.0))
        running = self.running
        decodes = completion > NEGLIGIBLE_COMPLETION
        if not (decodes or self.decoding):
            start = self.prefill_until
        elif len(running) >= CROWD:
            start = self.prefill_until
            self._stretch_ends(1.0 + self.decode_slowdown, uncached / self.prefill_tps, now)
        elif running:
            self._move_ends(now)
            start = self.prefill_until
            prefill, slowdown = uncached / self.prefill_tps, self.decode_slowdown
            total = 0.0
            for other in running:
                left = other.ends - now
                other.ends += prefill + (left * slowdown if left > 0.0 else 0.0)
                total += other.ends
            self.ends_sum = total
        else:
            start, self.ends_sum = now, 0.0
        if start < now:  # noqa: PLR1730 - a call costs four times as much
            start = now
        self.ends_sum += queued.begin(self, now, uncached, start)
        self.prefill_until = queued.prefill_ends
        running.append(queued)
        self.decoding += decodes
        if queued.slots:
            self.ours += queued.slots
            if self.exploring:
                self.exploring -= 1
            if self.pool:
                self.pool_reserved += self._pool_share(queued)
        else:
            caller = queued.slotless_caller
            self.slotless_running += 1
            self.slotless_by_caller[caller] = self.slotless_by_caller.get(caller, 0) + 1
        self.recompute()
        if exploring and not self.exploring:
            self.table.exploring_changed(self)
        self.last_placement = self.table.started()

    def prefill_done(self, placement: QueuedRequest, now: float) -> None:
        """The prompt of `placement` has been read at `now`; after its end that is no news."""
        if placement.released:
            return
        self.figures = None
        self.table.row_changed(self, self.free)
        before = placement.prefill_ends
        shift = now - before
        placement.prefill_ends = now
        placement.ends += shift
        self.ends_sum += shift
        if len(self.running) >= CROWD and before < self.prefill_until:
            self.prefill_until = max(now, self.prefill_until)  # Another was to be the last.
            return
        latest = now
        for one in self.running:
            if one.prefill_ends > latest:  # noqa: PLR1730 - a call costs four times as much
                latest = one.prefill_ends
        self.prefill_until = latest

    def end(self, placement: QueuedRequest, now: float) -> None:
        """`placement` has ended: what it held up or slowed down goes faster.

        Calling it again does nothing.
        """
        if placement.released:
            return
        running = self.running
        running.remove(placement)
        placement.release()
        if placement.slots:
            self.ours -= placement.slots
            if self.pool:
                left = self.pool_reserved - self._pool_share(placement)
                self.pool_reserved = left if self.ours else 0.0
        else:
            caller = placement.slotless_caller
            self.slotless_running -= 1
            self.slotless_by_caller[caller] -= 1
            if not self.slotless_by_caller[caller]:
                del self.slotless_by_caller[caller]
        decodes = placement.completion_tokens > NEGLIGIBLE_COMPLETION
        self.decoding -= decodes
        if not running:
            self.ends_sum = self.prefill_until = 0.0
            self._stretch, self._unmoved = (1.0, 0.0), 0
        elif len(running) >= CROWD and placement.prefill_ends <= now:
            self.ends_sum -= placement.ends
            if decodes or self.decoding:
                self._stretch_ends(1.0 - self.token_step / self.per_output_token, 0.0, now)
        elif decodes or self.decoding:
            self._hasten(running, placement, now)
        else:
            self.ends_sum -= placement.ends
            self.prefill_until = running[-1].prefill_ends
        self.recompute()
        self.table.ended(now, slotless=not placement.slots)

    def _hasten(self, running: list[QueuedRequest], placement: QueuedRequest, now: float) -> None:
        """What still runs goes faster now that `placement` has ended."""
        self._move_ends(now)
        gain = self.token_step / self.per_output_token
        prefill_ends = placement.prefill_ends
        unread = prefill_ends - now
        total, latest = 0.0, -math.inf
        for other in running:
            ends = other.ends
            if unread > 0.0 and other.prefill_ends < prefill_ends:
                ends -= unread
            if gain and ends > now:
                ends -= (ends - now) * gain
            other.ends = ends
            total += ends
            if other.prefill_ends > latest:  # noqa: PLR1730 - a call costs four times as much
                latest = other.prefill_ends
        self.ends_sum, self.prefill_until = total, latest

    def _stretch_ends(self, factor: float, seconds: float, now: float) -> None:
        """Move the ends of a crowd: `factor` of the time left, and `seconds` more.

        Not each time, since a burst of thousands would look at thousands each time: what counts
        meanwhile is as it was at most a `CROWD_SHARE` of them earlier.
        """
        earlier_factor, earlier_seconds = self._stretch
        self._stretch = earlier_factor * factor, earlier_seconds * factor + seconds
        self._unmoved += 1
        if self._unmoved > len(self.running) * CROWD_SHARE:
            self._move_ends(now)

    def _move_ends(self, now: float) -> None:
        """Move all ends by what they have not been moved by yet."""
        if not self._unmoved:
            return
        factor, seconds = self._stretch
        self._stretch, self._unmoved = (1.0, 0.0), 0
        total, latest = 0.0, 0.0
        for one in self.running:
            left = one.ends - now
            one.ends += seconds + (left * (factor - 1.0) if left > 0.0 else 0.0)
            total += one.ends
            if one.prefill_ends > latest:  # noqa: PLR1730 - a call costs four times as much
                latest = one.prefill_ends
        self.ends_sum, self.prefill_until = total, latest

    def _pool_share(self, queued: QueuedRequest) -> float:
        if not queued.slots:
            return 0.0
        return self.pool if queued.beside_others else min(queued.tokens_needed, self.pool)

    def has_slotless_room(self, caller: str) -> bool:
        """Whether it may run one more of this caller's requests without a slot.

        One caller gets half of the places at most, so that the next one finds room.
        """
        most, own = self.table.slotless_limit, self.slotless_by_caller.get(caller, 0)
        return self.slotless_running < most and own < (most + 1) // 2

    def tokens_short(self, needed: float) -> float:
        """Tokens that its pool lacks for a request that needs so many; 0: it has room.

        While it is idle it takes any request, which runs alone if it needs the whole pool.
        """
        if needed <= self.pool_room:
            return 0.0
        return max(1.0, min(needed, self.pool) - self.pool_room)

    def is_held_up_by_others(self, needed: float) -> bool:
        """Whether its pool lacks the room while others' work goes on, whatever of ours ends."""
        return self.foreign > 0 and self.pool_foreign + min(needed, self.pool) > self.pool > 0

    def seconds_until_room(self, queued: QueuedRequest, now: float) -> float | None:
        """Seconds until it has the slots and tokens for a request; None: it never will."""
        short = self.tokens_short(queued.tokens_needed)
        return self.seconds_until_free(queued.slots - self.free, now, short)

    def seconds_until_free(self, slots: int, now: float, tokens: float = 0.0) -> float | None:
        """Seconds until so many more slots, and tokens of its pool, are free; None: never."""
        if slots <= 0 and not tokens:
            return 0.0
        running = self.running
        if slots == 1 and not tokens:
            return min([one.seconds_left(now) for one in running if one.slots], default=None)
        for wait, one in sorted(
            [(one.seconds_left(now), one) for one in running], key=itemgetter(0)
        ):
            slots -= one.slots
            if tokens > 0.0:
                tokens -= self._pool_share(one)
            if slots <= 0 and tokens <= 0.0:
                return wait
        return None


@dataclass(slots=True)
class AvailableRows:
    """Rows with room for a request."""

    rows: list[NodeSlots]  # at least one
    candidate_set: CandidateSet
    group: int  # the group of the request that the candidate set belongs to
    unfiltered: bool = True  # whether these are all rows of the candidate set that have the slots


@dataclass(slots=True, eq=False, weakref_slot=True)
class CandidateSet:
    """The rows that serve one thing, for example one model's chat requests.

    Changed in place (`replace_rows`), so that waiting requests see nodes come and go.
    """

    table: PlacementState = field(repr=False)
    rows: tuple[NodeSlots, ...]
    row_indexes: frozenset[int] = frozenset()
    queued_tokens: tuple[list[float], list[float]] = field(
        default_factory=lambda: ([0.0] * 4, [0.0] * 4)
    )
    """Prompt tokens to be read and output tokens to be decoded for what waits for it, by class."""
    available: AvailableRows | None = None
    """Its rows with room for one slot when `free_rows_version` was `available_version`."""
    available_version: int = -1
    _sums: tuple[int, int, int, tuple[float, float]] = (-1, 0, 0, (math.inf, 0.0))
    """`_summed`, and before it the `slots_version` for which that was found."""

    def __post_init__(self) -> None:
        self.replace_rows(self.rows)

    def slots(self, *, for_batch: bool = False) -> int:
        """Slots of its rows that are alive; `for_batch`: those of them that `batch` may use."""
        sums = self._summed()
        return sums[2] if for_batch else sums[1]

    def pools(self) -> tuple[float, float]:
        """Tokens of its smallest and largest shared pool; infinity and 0 if no row has one."""
        return self._summed()[3]

    def _summed(self) -> tuple[int, int, int, tuple[float, float]]:
        version = self.table.slots_version
        if self._sums[0] != version:
            alive = [row for row in self.rows if row.alive]
            pools = [row.pool for row in self.rows if row.pool]
            self._sums = (
                version,
                sum([row.total for row in alive]),
                # Where all rows are kept from it, it may use idle ones.
                sum([row.total - row.batch_reserve for row in alive]) or len(alive),
                (min(pools, default=math.inf), max(pools, default=0.0)),
            )
        return self._sums

    def set_available(self, rows: list[NodeSlots], version: int) -> None:
        """Remember its rows with room for one slot, as of that `free_rows_version`."""
        self.available = AvailableRows(rows, self, 0) if rows else None
        self.available_version = version

    def replace_rows(self, rows: Iterable[NodeSlots]) -> None:
        """These rows and no others, in this order."""
        self.rows = tuple(rows)
        self.row_indexes = frozenset(row.index for row in self.rows)
        self.available_version, self._sums = -1, (-1, 0, 0, (math.inf, 0.0))


# Candidate sets that serve the same model, best first: each is for when those before are full.
TierSets = tuple[CandidateSet, ...]
# What decides which rows have room for a request, for equal ones the same: `groups`, `slots` and
# `keeps_batch_reserve`.
Requirements = tuple[tuple[TierSets, ...], int, bool]


def alive_rows(groups: Iterable[TierSets], excluded: Collection[int]) -> Iterator[NodeSlots]:
    """The rows of all these candidate sets that are alive, without the excluded ones."""
    return (
        row
        for tiers in groups
        for candidates in tiers
        for row in candidates.rows
        if row.alive and row.index not in excluded
    )


ROUNDING = 1e-9  # by so much a product may fall short of a whole number, as 0.29 of 100 does


def spread_reserve(share: float, totals: Sequence[int]) -> list[int]:
    """Slots that `batch` leaves free on each of several alike nodes with so many slots.

    Together they are that share of all slots, rounded down: the first nodes that fit into it whole,
    and what is left by turns on the others, the largest first. At least one node stays open to
    `batch` with one slot, whatever the share.
    """
    reserve = [0] * len(totals)
    left = int(share * sum(totals) + ROUNDING)
    open_nodes = sum(total > 0 for total in totals)
    for number, total in enumerate(totals):
        if 0 < total <= left and open_nodes > 1:
            reserve[number] = total
            left -= total
            open_nodes -= 1
    others = [number for number, total in enumerate(totals) if total - reserve[number] > 1]
    while left > 0 and others:
        others.sort(key=lambda number: reserve[number] - totals[number])
        for number in others[:left]:
            reserve[number] += 1
            left -= 1
        others = [number for number in others if totals[number] - reserve[number] > 1]
    return reserve


@dataclass(slots=True, eq=False)
class PlacementState:
    """All rows, and what is kept about all of them together."""

    batch_reserve: float = 0.0  # share of the slots of alike nodes that `batch` leaves free
    slotless_limit: int = DEFAULT_SLOTLESS  # requests without a slot that one node runs at once
    rows: list[NodeSlots] = field(default_factory=list)
    """By index; a removed row stays until its index is used again."""
    by_name: dict[str, NodeSlots] = field(default_factory=dict)
    free_rows: dict[int, NodeSlots] = field(default_factory=dict)
    free_rows_version: int = 0  # changes whenever a row enters or leaves `free_rows`
    placement_count: int = 0
    speed_changes: int = 0  # rows that became twice as fast, or half, since `clear_speed_changes`
    slots_freed: bool = False
    exploring: set[int] = field(default_factory=set)
    """Indexes of rows that may get requests in order to learn their speed."""
    reserved_rows: list[NodeSlots] = field(default_factory=list)
    """Rows whose free slots are reserved for a wide request."""
    last_release: float = 0.0  # when a placement last ended, anywhere
    pools: int = 0  # rows whose slots share one pool of tokens
    slots_version: int = 0  # changes with any row's slots or pool, but for what runs there
    _reserve_is_stale: bool = False
    """Whether rows or slots have changed since `spread_batch_reserve`."""
    _changed: set[int] = field(default_factory=set)
    """Indexes of rows that have changed since `take_changed_rows`."""
    _unused: list[int] = field(default_factory=list)
    _candidate_sets: WeakSet[CandidateSet] = field(default_factory=WeakSet)

    # Rows and candidate sets.

    def add(self, name: str, *, total: float = 1, gpu: bool = False) -> NodeSlots:
        """A row for a new node, which takes work on all its slots."""
        index = self._unused.pop() if self._unused else len(self.rows)
        row = self.by_name[name] = NodeSlots(self, index, name, zlib.crc32(name.encode()))
        self.rows[index : index + 1] = [row]
        row.set_tier(gpu=gpu)
        row.set_slots(total, total, 0)
        return row

    def remove(self, row: NodeSlots) -> None:
        """Take a row out of every candidate set. What runs there may still end."""
        del self.by_name[row.name]
        row.set_slots(0, 0, 0)
        self.exploring.discard(row.index)
        row.set_pool(0, 0)
        for candidates in list(self._candidate_sets):
            if row.index in candidates.row_indexes:
                candidates.replace_rows(other for other in candidates.rows if other is not row)
        self._unused.append(row.index)

    def candidate_set(self, rows: Iterable[NodeSlots] = ()) -> CandidateSet:
        """A new candidate set, which loses its rows as they are removed."""
        candidates = CandidateSet(self, tuple(rows))
        self._candidate_sets.add(candidates)
        return candidates

    def take_changed_rows(self) -> list[NodeSlots]:
        """The rows that have changed since the last call."""
        rows = self.rows
        changed = [rows[index] for index in self._changed]
        self._changed.clear()
        return changed

    def clear_speed_changes(self) -> None:
        """Count `speed_changes` from 0 again."""
        self.speed_changes = 0

    def set_limits(self, batch_reserve: float, slotless_limit: int) -> None:
        """Set `batch_reserve` (0..1) and `slotless_limit`."""
        self.slotless_limit = slotless_limit
        self.batch_reserve = clamp(batch_reserve, 0.0, 1.0, 0.0)
        self._reserve_is_stale = True
        self.spread_batch_reserve()

    def spread_batch_reserve(self) -> None:
        """Bring the reserve of each row up to date; before `batch` is given a slot.

        Not with each change, since that would look at all rows for each of them. Rows that are not
        alive have none: then others keep the reserve.
        """
        if not self._reserve_is_stale:
            return
        self._reserve_is_stale = False
        self.slots_version += 1
        groups: dict[tuple[bool, object], list[NodeSlots]] = {}
        for row in self.rows:
            if row.alive and self.batch_reserve:
                groups.setdefault((row.gpu, row.reserve_group), []).append(row)
            else:
                row.set_batch_reserve(0)
        for rows in groups.values():
            reserve = spread_reserve(self.batch_reserve, [row.total for row in rows])
            for row, slots in zip(rows, reserve, strict=True):
                row.set_batch_reserve(slots)

    def set_slots_freed(self, *, freed: bool) -> None:
        """Whether free slots are left that the waiting requests have not been offered."""
        self.slots_freed = freed

    # Told by the rows.

    def row_changed(self, row: NodeSlots, free_before: int) -> None:
        """Its figures are others now; it had so many free slots before."""
        free = row.free
        if free > free_before:
            self.slots_freed = True
            if not free_before:
                self.free_rows[row.index] = row
                self.free_rows_version += 1
        elif free_before and not free:
            self.free_rows_version += 1
            self.free_rows.pop(row.index, None)
        self._changed.add(row.index)

    def speed_changed(self) -> None:
        """A row became twice as fast, or half."""
        self.speed_changes += 1

    def exploring_changed(self, row: NodeSlots) -> None:
        """It may get requests in order to learn its speed, or no more."""
        (self.exploring.add if row.exploring else self.exploring.discard)(row.index)

    def reserve_changed(self) -> None:
        """The reserve of `batch` is to be spread anew."""
        self._reserve_is_stale = True

    def pool_changed(self, before: int, tokens: int) -> None:
        """The slots of a row share so many tokens instead of those before, or others use others."""
        self.pools += bool(tokens) - bool(before)
        self.slots_version += tokens != before
        self.slots_freed = True

    def slots_changed(self, *, reserve: bool) -> None:
        """A node has other slots; `reserve`: so that the reserve of `batch` is to be spread."""
        self.slots_version += 1
        self._reserve_is_stale |= reserve

    def started(self) -> int:
        """A request runs on a row; returns the number of this placement."""
        self.placement_count = number = self.placement_count + 1
        return number

    def ended(self, now: float, *, slotless: bool) -> None:
        """A request has ended on a row."""
        self.slots_freed = self.slots_freed or slotless
        self.last_release = now
