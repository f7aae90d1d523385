"""Runs the lines of batches: claims them, offers them to the scheduler, and records their results.

Rows are claimed a little ahead, so that a line that has ended is followed by the next one at its
slot at once. `feeding.py` decides how many are offered and which; `Supply` knows what waits in the
store. A row that was claimed ends in one of three ways: its result is recorded, or it is put back
and waits again, or this process dies and another one takes it when its lease is over.

Rows are offered only where a slot is free, so requests of clients that want all slots would keep
them waiting for ever. Rows whose deadline is in danger (`TargetRows.late`) therefore stand in the
scheduler's queue like any other request of a higher class, a few at a time (`late_places`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple

import structlog
from sqlalchemy import Connection, func, or_, select

from gateway.lease import BatchRoom
from gateway.store.schema import batches, stored_requests
from gateway.store.store import woken
from gateway.stored.claims import (
    IS_WAITING,
    Pick,
    RequestKind,
    StoredRow,
    UnfinishedWork,
    WaitingLines,
    those_with,
    waiting_by_kind,
    waiting_lines,
)
from gateway.stored.feeding import (
    MOST_LATE,
    BatchWork,
    Lane,
    Pace,
    PrefixGroup,
    in_danger,
    late_places,
    ready_wanted,
    rows_to_offer,
)
from gateway.stored.folder import Storage, StorageTrouble
from gateway.stored.results import LineResults
from gateway.stored.runner import (
    MOST_RUNS,
    HeldRow,
    RequestTarget,
    RowDeferred,
    RowExpired,
    RowRuns,
    RunFailed,
)
from gateway.terms import Priority

MOST_GROUPS = 64  # groups of one batch that are told apart at a time: those with the longest rows
READ_SECONDS = 2.0  # seconds after which it is read again what waits
IDLE_SECONDS = 5.0  # the same, while nothing waits that is known of
READ_SHARE = 20  # reading what waits takes at most one part in so many of the time
PREFIX_SECONDS = 10.0  # seconds after which the groups of a batch are read again
MOST_GROUPED = 8  # batches of one target whose groups are read: those that are next
# Most seconds until late rows are offered again of which one found no place in the queue.
REFUSED_SECONDS = 1.0
LOOK_SECONDS = 0.1  # seconds between two looks at the room for batch work
# A slot that comes free within so many seconds is offered a row: until then it is prepared.
SOON_SECONDS = 0.02
RENEW_SECONDS = 5.0  # seconds between two renewals, which also tell which rows were cancelled
WOKEN_SECONDS = 0.2  # seconds until the next renewal when rows were cancelled
MOST_UNRECORDED = 5000  # results that wait to be recorded; beyond them no row is offered
RETRY_SECONDS = 10.0  # seconds until a row that nodes have failed is run again, times its runs
# Seconds after which it is tried again whether an owner's limit is still reached.
MOST_PAUSE = 300.0
HOLD_SECONDS = 10.0  # if an owner is paused for longer, its claimed rows are put back
# For so long after an owner's limit was reached its rows are offered one after the other.
CAREFUL_SECONDS = 30.0
# Rows without any node that are tried at a time: their model may be unknown, which is a result.
MOST_PROBES = 64
AWAY_SECONDS = 2.0  # seconds after which a store or folder that has failed is tried again
# Seconds after which batches are counted again while none is unfinished: some are removed.
COUNT_SECONDS = 60.0
END_SECONDS = 3.0  # most seconds to put back what is left, at the end
log = structlog.get_logger()
_ROW: Final = stored_requests.c


# What waits in the store.


class Waiting(NamedTuple):
    """What waits in a folder, and may run now."""

    lines: list[WaitingLines]
    kinds: Counter[str]  # how many requests, by kind
    batches: dict[str, int]  # by state
    oldest: float | None
    """When the oldest batch with waiting lines was created, as Unix time; None: there is none."""


def read_waiting(connection: Connection, folder: str, now: float) -> Waiting:
    """What waits in a folder, and may run now; `now`: Unix time."""
    lines = list(waiting_lines(connection, folder, now))
    kinds = waiting_by_kind(connection, folder, now)
    if lines:
        kinds[RequestKind.LINE.value] = sum(one.rows for one in lines)
    by_state = select(batches.c.state, func.count()).where(batches.c.folder == folder)
    states = connection.execute(by_state.group_by(batches.c.state)).all()
    waits = select(_ROW.id).where(_ROW.batch == batches.c.id, IS_WAITING).limit(1).exists()
    oldest = select(func.min(batches.c.created_at)).where(
        batches.c.folder == folder, batches.c.ended_at.is_(None), waits
    )
    counts = {state: number for state, number in states}  # noqa: C416 - rows are no tuples
    return Waiting(lines, kinds, counts, connection.scalar(oldest))


def read_prefixes(connection: Connection, batch: str, now: float) -> tuple[PrefixGroup, ...]:
    """Groups of waiting lines of a batch whose prompts begin alike.

    Lines whose beginning no other has are left out; those of short prompts are one group.
    """
    longest = func.max(_ROW.max_tokens)
    asked = (
        select(_ROW.prefix, func.count(), longest, func.sum(_ROW.max_tokens))
        .where(_ROW.batch == batch, IS_WAITING, _ROW.not_before <= now)
        .group_by(_ROW.prefix)
        .having(or_(func.count() > 1, _ROW.prefix == 0))
        .order_by(longest.desc(), _ROW.prefix)
        .limit(MOST_GROUPS)
    )
    return tuple(
        PrefixGroup(prefix, rows, int(most_tokens or 0), int(tokens or 0))
        for prefix, rows, most_tokens, tokens in connection.execute(asked)
    )


@dataclass(slots=True, eq=False)
class Supply:
    """Lines that wait, by target."""

    storage: Storage
    target_of: Callable[[str, str, str | None], RequestTarget | None]  # that of a runner
    read_at: float = 0.0  # when it is to be read again
    works: dict[RequestTarget | None, dict[str, BatchWork]] = field(default_factory=dict)
    _prefixes: dict[str, tuple[float, tuple[PrefixGroup, ...]]] = field(default_factory=dict)
    """Groups of batches, and when they were read."""

    async def read(self, folder: str) -> Waiting:
        """Read what waits. Raises: StoreError."""
        storage, clock = self.storage, self.storage.clock
        began = clock()
        waiting = await storage.read(read_waiting, folder, storage.now())
        took = clock() - began
        pause = READ_SECONDS if waiting.kinds else IDLE_SECONDS
        self.read_at = clock() + max(pause, took * READ_SHARE)
        works = defaultdict[RequestTarget | None, dict[str, BatchWork]](dict)
        for some in waiting.lines:
            target = self.target_of(some.owner, some.path, some.model)
            work = works[target].get(some.batch)
            if work is None:
                work = BatchWork(some.batch, some.owner, 0, some.deadline, some.class_)
            models = *work.models, some.model
            works[target][some.batch] = replace(work, rows=work.rows + some.rows, models=models)
        self.works = dict(works)
        for batch in self._prefixes.keys() - {some.batch for some in waiting.lines}:
            del self._prefixes[batch]
        return waiting

    def read_soon(self, seconds: float = 0.0) -> None:
        """Read again within so many seconds: something has changed."""
        self.read_at = min(self.read_at, self.storage.clock() + seconds)

    def works_of(self, target: RequestTarget | None) -> list[BatchWork]:
        """Batches with lines that wait for a target, as far as is known."""
        return [work for work in self.works.get(target, {}).values() if work.rows > 0]

    def targets_of(self, batch: str) -> set[RequestTarget | None]:
        """Where the lines of a batch go that wait."""
        return {target for target, works in self.works.items() if batch in works}

    async def with_groups(self, works: list[BatchWork], held: Mapping[str, int]) -> list[BatchWork]:
        """The same with the groups of those that are next. Raises: StoreError.

        `held`: batches that have claimed rows already.
        """
        storage = self.storage
        works = sorted(works, key=lambda one: (one.batch not in held, one.deadline, one.batch))
        for work in works[:MOST_GROUPED]:
            known = self._prefixes.get(work.batch)
            if known is None or storage.clock() - known[0] > PREFIX_SECONDS:
                groups = await storage.read(read_prefixes, work.batch, storage.now())
                self._prefixes[work.batch] = storage.clock(), groups
        return [
            replace(work, groups=self._prefixes.get(work.batch, (0.0, ()))[1]) for work in works
        ]

    def picks(self, target: RequestTarget | None, wants: Sequence[Pick]) -> list[Pick]:
        """What to claim: of batches with several models, those that go to this target."""
        found: list[Pick] = []
        for want in wants:
            batch = want.batch or ""
            if len(self.targets_of(batch)) <= 1:
                found.append(want)
                continue
            models = self.works[target][batch].models
            limit = max(1, want.limit // len(models))
            found += [replace(want, limit=limit, model=model) for model in models]
        return found

    def count_claimed(
        self, target: RequestTarget | None, picks: Sequence[Pick], rows: Sequence[StoredRow]
    ) -> None:
        """What was claimed does not wait any more, nor what was asked for in vain."""
        claimed = Counter(row.batch for row in rows)
        of_group = Counter((row.batch, row.prefix) for row in rows)
        works = self.works.get(target, {})
        for batch in {pick.batch for pick in picks if pick.batch is not None}:
            if batch in works:
                left = works[batch].rows - claimed[batch] if claimed[batch] else 0
                works[batch] = replace(works[batch], rows=left)
            if batch in self._prefixes:
                read_at, groups = self._prefixes[batch]
                counted = (
                    group._replace(rows=group.rows - of_group[batch, group.prefix])
                    for group in groups
                )
                self._prefixes[batch] = read_at, tuple(one for one in counted if one.rows > 0)
        if len(rows) < sum(pick.limit for pick in picks) // 2:
            self.read_soon(0.2)


# Rows that are held.


@dataclass(slots=True, eq=False)
class TargetRows:
    """The lane of one target, and what is known of its room."""

    target: RequestTarget | None
    pace: Pace
    lane: Lane = field(default_factory=Lane)
    credit: int = 0  # rows that may be offered now
    slots: int = 0
    urgent: list[str] = field(default_factory=list)
    """Batches whose deadline is in danger, the nearest first."""
    late: dict[str, Priority] = field(default_factory=dict)
    """Those of them whose class is raised, so that their rows may wait in it, and to which."""
    late_waiting: Counter[str] = field(default_factory=Counter)  # their rows that do, by owner
    late_paused_until: float = 0.0  # monotonic seconds
    arriving: set[str] = field(default_factory=set)
    """Rows that were offered and that the scheduler has not seen yet."""
    probes: int = 1  # rows that are tried at a time while no node is there
    paused_until: float = 0.0


@dataclass(slots=True, eq=False)
class HeldLine(HeldRow):
    """A claimed line of a batch."""

    state: TargetRows
    has_slot: bool = False  # whether it counts as running in its lane
    in_late_place: bool = False  # whether it was offered as late, without room for class `batch`


@dataclass(eq=False)
class Feeder(RowRuns[HeldLine]):
    """Feeds the lines of batches to the scheduler."""

    retry_seconds = RETRY_SECONDS
    failed_event = "a stored request can't be run"
    supply: Supply
    results: LineResults
    work: UnfinishedWork
    outcomes: Counter[str] = field(default_factory=Counter)
    """Lines whose result this process has recorded: `done`, `failed`, or `lost` (taken)."""
    deferred: int = 0  # runs after which a row waits again: a limit of its owner, no room, no node
    retried: int = 0  # runs that nodes have failed and that are repeated
    waiting: Waiting = field(default_factory=lambda: Waiting([], Counter(), {}, None))
    put_off: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Of batches whose lines were put off of late: why, and until when (Unix time)."""
    _targets: dict[RequestTarget | None, TargetRows] = field(default_factory=dict)
    _paused: dict[str, float] = field(default_factory=dict)
    """Owners whose limits are reached, and until when they are left alone."""
    _careful: dict[str, float] = field(default_factory=dict)
    """Owners whose limits were reached of late, and until when they are tried step by step."""
    _claims: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there may be something to claim or to put back."""
    _looks: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something to offer."""
    _renew_at: float = 0.0
    _stopped: bool = False
    _is_work: bool = True  # whether anything was unfinished when it was last asked
    _count_at: float = 0.0  # when what is in the store is counted, though nothing is unfinished
    _trouble: StorageTrouble = field(
        init=False,
        default_factory=lambda: StorageTrouble(
            lambda why: log.warning("lines of batches wait", why=why),
            lambda: log.info("lines of batches go on"),
        ),
    )

    def clock(self) -> float:
        """Monotonic seconds."""
        return self.leases.storage.clock()

    @property
    def running(self) -> int:
        """Rows that were offered and have not ended."""
        return sum(state.lane.running for state in self._targets.values())

    @property
    def claimed(self) -> int:
        """Rows that are ready to be offered."""
        return sum(state.lane.ready for state in self._targets.values())

    # What others ask.

    def at_nodes(self) -> list[tuple[str, RequestTarget | None]]:
        """Batch and target of each line that is at a node now."""
        return [
            (held.row.batch or "", held.state.target)
            for held in self._held.values()
            if held.has_slot and self.runner.has_begun(held.row.id)
        ]

    def held_of(self, batch: str) -> int:
        """How many lines of the batch this process has claimed."""
        return sum(held.row.batch == batch for held in self._held.values())

    def targets_of(self, batch: str) -> set[RequestTarget]:
        """The targets of the batch's lines, of those that may run now."""
        held = {one.state.target for one in self._held.values() if one.row.batch == batch}
        return {one for one in held | self.supply.targets_of(batch) if one is not None}

    def room(self, target: RequestTarget, seconds: float) -> BatchRoom:
        """The room for lines that go to a target, within so many seconds."""
        return self.rooms.batch_room(
            target.model_names, seconds, endpoint=target.endpoint, node_labels=target.node_labels
        )

    def seconds_paused(self, owner: str) -> float:
        """For how long the owner's rows are left alone: a limit of its key is reached."""
        return max(0.0, self._paused.get(owner, 0.0) - self.clock())

    def keep_put_off(self, batches: Iterable[str]) -> None:
        """Forget why lines of all other batches were put off."""
        self.put_off = {id_: self.put_off[id_] for id_ in batches if id_ in self.put_off}

    def wake(self) -> None:
        """Rows have come, or were cancelled."""
        self.supply.read_soon()
        self._claims.set()
        # Many may wake it at once.
        self._renew_at = min(self._renew_at, self.clock() + WOKEN_SECONDS)

    def stop(self) -> None:
        """Claim and offer no more; rows that run go on, the others are put back."""
        if not self._stopped:
            self._stopped = True
            self._drop(self._not_begun(self._held.values()))
            self._claims.set()

    async def run(self) -> None:
        """Feed until cancelled; then what runs is put back, unless it has a result already.

        It may run again, unless it was stopped before.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._claim_rows(), name="claim stored requests")
                group.create_task(self._offer_rows(), name="offer stored requests")
        finally:
            stopped = self._stopped
            self.stop()
            await self._close(END_SECONDS, until_recorded=False)  # `LineResults` does that.
            self._stopped = stopped

    # Claiming.

    async def _claim_rows(self) -> None:
        while True:
            try:
                with self._trouble.told():
                    await self._claim_step()
            except Exception as error:  # Whatever it is, the other batches must go on.
                log.exception("work on batches has failed")
                self._trouble.errors[""] = error.with_traceback(None)
            if self._trouble.errors:
                await asyncio.sleep(AWAY_SECONDS)
                continue
            next_at = self._renew_at
            if not self._stopped:
                next_at = min(next_at, self.supply.read_at)
            await woken(self._claims, max(0.05, min(IDLE_SECONDS, next_at - self.clock())))

    async def _claim_step(self) -> None:
        """Put back and renew what must be, and claim rows. Raises: StoreError, FolderError."""
        if await self.leases.write():
            self.supply.read_soon(READ_SECONDS)
        if self.clock() >= self._renew_at:
            await self._renew_step()
        if self._stopped:
            return
        if self.clock() >= self.supply.read_at:
            # Once more behind the last work: its counts have changed.
            was_work, self._is_work = self._is_work, await self.work.exists()
            if self._is_work or was_work or self._held or self.clock() >= self._count_at:
                self.waiting = await self.supply.read(await self.leases.storage.opened())
                self._count_at = self.clock() + COUNT_SECONDS
                for known in self.supply.works:
                    self._state_of(known)
            else:
                self.supply.read_at = self.clock() + IDLE_SECONDS
        for target, state in list(self._targets.items()):
            self._look(state)
            if picks := await self._picks(state):
                await self._claim(state, picks)
            elif not (state.lane.ready or state.lane.running or self.supply.works_of(target)):
                del self._targets[target]

    def _state_of(self, target: RequestTarget | None) -> TargetRows:
        if target not in self._targets:
            self._targets[target] = TargetRows(target, Pace(self.clock))
        return self._targets[target]

    async def _picks(self, state: TargetRows) -> list[Pick]:
        """What to claim for a target. Raises: StoreError."""
        target, lane = state.target, state.lane
        if self.clock() < state.paused_until:
            return []
        wanted = ready_wanted(state.slots, state.pace.rows_a_second or 0.0)
        if not state.slots:
            wanted = state.probes
        wanted += max(0, state.credit)
        works = [one for one in self.supply.works_of(target) if not self.seconds_paused(one.owner)]
        # Half of it is enough to go on with: a claim for each row would be a load on the store.
        if lane.ready > wanted // 2:
            late = state.late
            works = [one for one in works if one.batch in late and not lane.ready_of(one.batch)]
            if not works:
                return []
            wanted = lane.ready + MOST_LATE
        works = await self.supply.with_groups(works, lane.held())
        return self.supply.picks(target, lane.wants(works, wanted, state.urgent))

    async def _claim(self, state: TargetRows, picks: list[Pick]) -> None:
        """Claim rows, and offer them. Raises: StoreError, FolderError."""
        claimed = await self.leases.claim(picks)
        self.supply.count_claimed(state.target, picks, claimed)
        for row in claimed:
            if self._stopped:
                self.leases.put_back([row.id], self.now())
            elif row.id not in self._held:
                found = self._state_of(self.runner.target_of(row.owner, row.path, row.model))
                self._held[row.id] = HeldLine(row, found)
                found.lane.add(row)
        for one in list(self._targets.values()):
            self._offer(one)
        self._looks.set()

    # Offering.

    async def _offer_rows(self) -> None:
        while True:
            if not self._held:
                self._looks.clear()
                await self._looks.wait()
            try:
                await self._offer_step()
            except Exception:
                # Whatever it is, the other batches must go on.
                log.exception("rows can't be offered")
                await asyncio.sleep(AWAY_SECONDS)
            await asyncio.sleep(LOOK_SECONDS)

    async def _offer_step(self) -> None:
        for state in list(self._targets.values()):
            if late := state.lane.drop_late(self.now()):
                self._give_back(late, self.now())
            if state.lane.ready or state.lane.running:
                state.pace.tick(busy=True)
                self._look(state)
                self._offer(state)
                # What is offered here takes room that the next target may have too.
                await asyncio.sleep(0)

    def _look(self, state: TargetRows) -> None:
        lane, registry, target = state.lane, self.runner.registry, state.target
        state.arriving = {
            id_
            for id_ in state.arriving
            if id_ not in registry and (held := self._held.get(id_)) is not None and held.has_slot
        }
        room = BatchRoom(0, 0, 0, 0, 0, 0)
        if target is not None:
            room = self.room(target, SOON_SECONDS)
        lane.nodes, state.slots = max(1, room.nodes), room.slots
        if room.slots:
            state.probes = 1
            state.credit = rows_to_offer(room, len(state.arriving))
        else:
            state.credit = state.probes - lane.running
        works = {work.batch: work for work in (*lane.works(), *self.supply.works_of(target))}
        pace = state.pace
        state.urgent = in_danger(
            works.values(), lane.held(), pace.rows_a_second, self.now(),
            slots=state.slots, row_seconds=pace.row_seconds,
        )  # fmt: skip
        self._raise_late(state, works)

    def _raise_late(self, state: TargetRows, works: Mapping[str, BatchWork]) -> None:
        """Raise rows that were offered of batches in danger to the class that those may have now.

        It is theirs, within what their owner may have.
        """
        runner, late = self.runner, dict[str, Priority]()
        for work in (works[id_] for id_ in state.urgent):
            own = Priority.parse(work.class_) or Priority.BATCH
            if (raised := max(runner.late_priority(work.owner), own)) < Priority.BATCH:
                late[work.batch] = raised
        state.late = late
        state.late_waiting.clear()
        by_priority: defaultdict[Priority, list[StoredRow]] = defaultdict(list)
        for held in self._held.values() if late else ():
            batch = held.row.batch or ""
            if batch in late and held.has_slot and held.state.target == state.target:
                by_priority[late[batch]].append(held.row)
        for priority, rows in by_priority.items():
            waiting = runner.raise_class(self.rooms, [row.id for row in rows], priority)
            for row in rows:
                # The scheduler has not seen all of them, or knows their prompts by other ids.
                state.late_waiting[row.owner] += row.id in waiting or not runner.has_begun(row.id)

    def _offer(self, state: TargetRows) -> None:
        """Start rows, as many as there is room for."""
        if self._stopped or self.clock() < state.paused_until:
            return
        left_out = {owner for owner in self._paused if self.seconds_paused(owner)}
        if sum(held.recording for held in self._held.values()) >= MOST_UNRECORDED:
            return
        while True:
            has_room = state.credit > 0
            row = (
                state.lane.next(left_out, state.urgent)
                if has_room
                else self._next_late(state, left_out)
            )
            if row is None:
                break
            if self._careful.get(row.owner, -1.0) >= self.clock():
                left_out.add(row.owner)  # The next one when this one was admitted.
            held = self._held[row.id]
            held.has_slot, held.in_late_place = True, not has_room
            if has_room:
                state.credit -= 1
            else:
                state.late_waiting[row.owner] += 1
            state.arriving.add(row.id)
            self._begin(held)
        if self.supply.works_of(state.target) and state.lane.ready <= max(1, state.slots):
            self._claims.set()

    def _next_late(self, state: TargetRows, left_out: set[str]) -> StoredRow | None:
        """The late row that may wait for a slot; None: there is none, or enough wait."""
        if not state.late or not state.slots or self.clock() < state.late_paused_until:
            return None
        of_owner, of_all = late_places(state.slots, self.runner.settings.queue.max)
        if sum(one.late_waiting.total() for one in self._targets.values()) >= of_all:
            return None
        waiting = state.late_waiting
        full = {owner for owner, number in waiting.items() if number >= of_owner}
        return state.lane.next_late(state.late, left_out | full, waiting)

    def _slot_free(self, held: HeldLine) -> None:
        """A row has left its slot: the next one goes there."""
        if not held.has_slot:
            return
        held.has_slot = False
        held.state.lane.ended(held.row)
        held.state.credit += not held.in_late_place
        self._offer(held.state)

    # Running.

    async def _run(self, held: HeldLine, body: bytes | None) -> None:
        """Run a row and record its result, or let it wait again. Raises: RunFailed."""
        row, state = held.row, held.state
        if body is None:  # It fails.
            log.warning("the input of a batch is missing", batch=row.batch)
        priority = state.late.get(row.batch or "", Priority.BATCH)
        free = partial(self._slot_free, held)
        try:
            outcome = await self.runner.run(row, body or b"", priority=priority, on_slot_free=free)
        except RowDeferred as deferred:
            self._deferred(held, deferred)
            return
        except RowExpired:
            self.leases.put_back([row.id], self.now())
            return
        ran = outcome.record
        state.pace.ended(ran.duration_seconds - ran.queue_seconds if ran.attempts else None)
        if self._paused.pop(row.owner, None) is not None:
            self._offer(state)  # It may have one more again.
        if outcome.failed_on_nodes and row.attempts + 1 < MOST_RUNS:
            self.retried += 1
            seconds = RETRY_SECONDS * (row.attempts + 1)
            self.put_off[row.batch or ""] = "nodes_failed", self.now() + seconds
            raise RunFailed(seconds)
        held.recording = True
        if not state.slots:
            # Without a node it has a result all the same: so have others, likely.
            state.probes = min(2 * state.probes, MOST_PROBES)
        if not await self.results.add(row, outcome):
            self.outcomes["lost"] += 1
            self.leases.put_back([row.id], self.now())
        else:
            self.outcomes["done" if outcome.status < 400 else "failed"] += 1

    def _let_go(self, held: HeldLine) -> None:
        self._slot_free(held)
        if held.task is not None:  # Else it is kept, to be offered again.
            self._forget(held)
            if self.leases.has_put_back:
                self._claims.set()

    def _deferred(self, held: HeldLine, deferred: RowDeferred) -> None:
        self.deferred += 1
        row, state, now, seconds = held.row, held.state, self.clock(), deferred.seconds
        if deferred.concerns_owner:
            seconds = min(seconds, MOST_PAUSE)
            self._paused[row.owner] = now + seconds
            self._careful[row.owner] = now + seconds + CAREFUL_SECONDS
            if seconds <= HOLD_SECONDS and not self._stopped:
                self._keep(held)
                return
            ready = [
                other
                for one in self._targets.values()
                for other in one.lane.drop(lambda other: other.owner == row.owner)
            ]
            self._give_back(ready, self.now() + seconds)
            self.leases.put_back([row.id], self.now() + seconds)
            return
        if held.in_late_place and deferred.reason == "queue_full" and not self._stopped:
            # The others of its class were more.
            state.late_paused_until = now + min(seconds, REFUSED_SECONDS)
            self._keep(held)
            return
        if not state.slots or deferred.reason in {"queue_full", "starting"}:
            state.probes = 1
            state.paused_until = now + min(seconds, MOST_PAUSE)
        if deferred.reason == "queue_timeout" and row.deadline is not None:
            # Its prompt is too long for the time left, it seems: that hardly changes.
            seconds = max(seconds, (row.deadline - self.now()) / 4)
            self.put_off[row.batch or ""] = "deadline", self.now() + seconds
        self.leases.put_back([row.id], self.now() + seconds)

    def _keep(self, held: HeldLine) -> None:
        """A row that could not run keeps its claim, and is offered again."""
        self._slot_free(held)
        held.task = None
        held.state.lane.add(held.row)

    # Leases.

    async def _renew_step(self) -> None:
        """Say that this process still runs its rows; take back what lost processes had."""
        self._renew_at = self.clock() + RENEW_SECONDS
        if not self._held and not await self.work.exists():
            return
        released = await self._renew()
        batches_held = {held.row.batch for held in self._held.values() if held.row.batch}
        paused: set[str] = set()
        if batches_held:
            is_paused = batches.c.paused_at.is_not(None)
            paused = await self.leases.storage.read(
                those_with, batches.c.id, batches_held, is_paused
            )
        of_paused = (held for held in self._held.values() if held.row.batch in paused)
        self._drop(self._not_begun(of_paused))
        if released:
            log.info("stored requests of lost processes wait again", requests=released)
            self.supply.read_soon()
            self._claims.set()

    def _not_begun(self, some: Iterable[HeldLine]) -> set[str]:
        """Those of the rows that are ready or wait for a slot."""
        ready = (held for held in some if held.task is None or held.has_slot)
        return {held.row.id for held in ready if not self.runner.has_begun(held.row.id)}

    async def _drop_unwanted(self, ids: set[str]) -> None:
        self._drop(ids)

    def _drop(self, ids: set[str]) -> None:
        """End rows that were cancelled, or taken by another process, or are not to run here."""
        if not ids:
            return
        for state in self._targets.values():
            self._give_back(state.lane.drop(lambda row: row.id in ids), self.now())
        for id_ in ids:
            held = self._held.get(id_)
            if held is not None and held.task is not None and not held.recording:
                held.task.cancel()
        self._claims.set()

    def _give_back(self, rows: Iterable[StoredRow], not_before: float) -> None:
        """Put back rows that have not run."""
        rows = list(rows)
        self.leases.put_back((row.id for row in rows), not_before)
        for row in rows:
            if (held := self._held.get(row.id)) is not None:
                self._forget(held)
        self._claims.set()
