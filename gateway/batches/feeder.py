"""Runs the lines of batches: claims them, offers them to the scheduler, and records their results.

Rows are claimed a little ahead and their bodies are read, so that a line that has ended is followed
by the next one at its slot at once. `feeding.py` decides how many are offered and which; `Supply`
knows what waits in the store. A row that was claimed ends in one of three ways: its result is
recorded, or it is put back and waits again, or this process dies and another one takes it when its
lease is over.

Rows are offered only where a slot is free, so requests of clients that want all slots would keep
them waiting for ever. Rows whose deadline is in danger (`LateRows`) therefore stand in the
scheduler's queue like any other request of a higher class, a few at a time (`late_places`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol, TypeVar

import structlog
from sqlalchemy import Connection, func, or_, select

from gateway.batches.claims import Pick, RowLeases
from gateway.batches.feeding import (
    MOST_LATE,
    BatchWork,
    Lane,
    Pace,
    PrefixGroup,
    Want,
    in_danger,
    late_places,
    ready_wanted,
    rows_to_offer,
)
from gateway.batches.folder import FolderError
from gateway.batches.progress import FeederCounts
from gateway.batches.request_rows import (
    IS_WAITING,
    RequestKind,
    StoredRow,
    UnfinishedWork,
    WaitingGroup,
    waiting_groups,
)
from gateway.batches.runner import (
    MOST_RUNS,
    Outcome,
    RequestRunner,
    RequestTarget,
    RowDeferred,
    RowExpired,
    StoredRequest,
)
from gateway.lease import BatchRoom, BatchRoomService
from gateway.request import Priority
from gateway.store.failures import StoreError
from gateway.store.schema import batches, stored_requests
from gateway.store.store import Store

MOST_GROUPS = 64  # groups of one batch that are told apart at a time: those with the longest rows

_ROW: Final = stored_requests.c


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits in a folder."""

    groups: list[WaitingGroup]
    batches: dict[str, int] = field(default_factory=dict)  # batches by state
    oldest: float | None = None
    """When the oldest batch with waiting lines was created, as Unix time; None: there is none."""


@dataclass(frozen=True, slots=True)
class ReadWaiting:
    """A job of the store: what waits in a folder, and may run now."""

    folder: str
    now: float  # Unix time

    def __call__(self, connection: Connection) -> Waiting:
        """Run within the transaction of `connection`."""
        groups = waiting_groups(connection, self.folder, self.now)
        by_state = select(batches.c.state, func.count()).where(batches.c.folder == self.folder)
        states = connection.execute(by_state.group_by(batches.c.state)).all()
        waits = select(_ROW.id).where(_ROW.batch == batches.c.id, IS_WAITING).limit(1).exists()
        oldest = select(func.min(batches.c.created_at)).where(
            batches.c.folder == self.folder, batches.c.ended_at.is_(None), waits
        )
        counts = {state: number for state, number in states}  # noqa: C416 - rows are no tuples
        return Waiting(groups, counts, connection.scalar(oldest))


@dataclass(frozen=True, slots=True)
class ReadPrefixes:
    """A job of the store: groups of waiting lines of a batch whose prompts begin alike.

    Lines whose beginning no other has are left out; those of short prompts are one group.
    """

    batch: str
    now: float
    most: int = MOST_GROUPS

    def __call__(self, connection: Connection) -> tuple[PrefixGroup, ...]:
        """Run within the transaction of `connection`."""
        longest = func.max(_ROW.max_tokens)
        asked = (
            select(_ROW.prefix, func.count(), longest, func.sum(_ROW.max_tokens))
            .where(_ROW.batch == self.batch, IS_WAITING, _ROW.not_before <= self.now)
            .group_by(_ROW.prefix)
            .having(or_(func.count() > 1, _ROW.prefix == 0))
            .order_by(longest.desc(), _ROW.prefix)
            .limit(self.most)
        )
        return tuple(
            PrefixGroup(prefix, rows, int(most or 0), int(tokens or 0))
            for prefix, rows, most, tokens in connection.execute(asked)
        )


READ_SECONDS = 2.0  # seconds after which it is read again what waits
IDLE_SECONDS = 5.0  # the same, while nothing waits that is known of
READ_SHARE = 20  # reading what waits takes at most one part in so many of the time
PREFIX_SECONDS = 10.0  # seconds after which the groups of a batch are read again
MOST_GROUPED = 8  # batches of one target whose groups are read: those that are next


class Targets(Protocol):
    """Knows what may serve a request; the runner."""

    def target_of(self, owner: str, path: str, model: str | None) -> RequestTarget | None:
        """None: it is refused without a node."""


@dataclass(slots=True, eq=False)
class Supply:
    """Lines that wait, by target. `clock` is monotonic, `now` gives Unix time."""

    store: Store
    targets: Targets
    clock: Callable[[], float]
    now: Callable[[], float]
    read_at: float = 0.0  # when it is to be read again
    _works: dict[RequestTarget | None, dict[str, BatchWork]] = field(default_factory=dict)
    _classes: dict[str, str] = field(default_factory=dict)
    """The highest class of each batch's lines."""
    _models: dict[str, dict[str | None, RequestTarget | None]] = field(default_factory=dict)
    """The models of each batch with waiting lines, and where they go."""
    _prefixes: dict[str, tuple[float, tuple[PrefixGroup, ...]]] = field(default_factory=dict)
    """Groups of batches, and when they were read."""

    async def read(self, folder: str, kept: Iterable[str | None]) -> Waiting:
        """Read what waits; of the batches `kept` the rest is remembered. Raises: StoreError."""
        began = self.clock()
        waiting = await self.store.run(ReadWaiting(folder, self.now()), write=False)
        took = self.clock() - began
        pause = READ_SECONDS if waiting.groups else IDLE_SECONDS
        self.read_at = self.clock() + max(pause, took * READ_SHARE)
        works = defaultdict[RequestTarget | None, dict[str, BatchWork]](dict)
        self._models.clear()
        for group in waiting.groups:
            if group.kind is not RequestKind.LINE or group.batch is None:
                continue
            target = self.targets.target_of(group.owner, group.path, group.model)
            self._classes[group.batch] = group.class_
            self._models.setdefault(group.batch, {})[group.model] = target
            deadline = math.inf if group.nearest_deadline is None else group.nearest_deadline
            before = works[target].get(group.batch)
            rows = group.rows if before is None else group.rows + before.rows
            works[target][group.batch] = BatchWork(group.batch, group.owner, rows, deadline)
        self._works = dict(works)
        for batch in set(self._classes) - set(kept) - set(self._models):
            del self._classes[batch]
            self._prefixes.pop(batch, None)
        return waiting

    def read_soon(self, seconds: float = 0.0) -> None:
        """Read again within so many seconds: something has changed."""
        self.read_at = min(self.read_at, self.clock() + seconds)

    def known_targets(self) -> list[RequestTarget | None]:
        """Where something waits for."""
        return list(self._works)

    def works_of(self, target: RequestTarget | None) -> list[BatchWork]:
        """Batches with lines that wait for a target, as far as is known."""
        return [work for work in self._works.get(target, {}).values() if work.rows > 0]

    def class_of(self, batch: str | None) -> str:
        """The label of the highest class that the lines of a batch may have."""
        return self._classes.get(batch or "", "")

    async def with_groups(self, works: list[BatchWork], held: Mapping[str, int]) -> list[BatchWork]:
        """The same with the groups of those that are next. Raises: StoreError.

        `held`: batches that have claimed rows already.
        """
        works = sorted(works, key=lambda one: (one.batch not in held, one.deadline, one.batch))
        for work in works[:MOST_GROUPED]:
            known = self._prefixes.get(work.batch)
            if known is None or self.clock() - known[0] > PREFIX_SECONDS:
                groups = await self.store.run(ReadPrefixes(work.batch, self.now()), write=False)
                self._prefixes[work.batch] = self.clock(), groups
        return [
            replace(work, groups=self._prefixes.get(work.batch, (0.0, ()))[1]) for work in works
        ]

    def picks(self, target: RequestTarget | None, wants: Sequence[Want]) -> list[Pick]:
        """What to claim: of batches with several models, those that go to this target."""
        found: list[Pick] = []
        for want in wants:
            models = self._models.get(want.batch, {})
            if len(models) <= 1:
                found.append(Pick(want.rows, RequestKind.LINE, want.batch, prefix=want.prefix))
                continue
            chosen = [model for model, of_model in models.items() if of_model == target]
            found += [
                Pick(
                    max(1, want.rows // len(chosen)), RequestKind.LINE, want.batch,
                    model=model, prefix=want.prefix,
                )
                for model in chosen
            ]  # fmt: skip
        return found

    def count_claimed(
        self, target: RequestTarget | None, picks: Sequence[Pick], rows: Sequence[StoredRow]
    ) -> None:
        """What was claimed does not wait any more, nor what was asked for in vain."""
        claimed = Counter(row.batch for row in rows)
        of_group = Counter((row.batch, row.prefix) for row in rows)
        works = self._works.get(target, {})
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


REFUSED_SECONDS = 1.0
"""Most seconds until late rows are offered again of which one found no place in the queue."""


@dataclass(slots=True, eq=False)
class LateRows:
    """Those of one target."""

    batches: dict[str, Priority] = field(default_factory=dict)
    """The batches whose class is raised, and to which; the nearest deadline first."""
    waiting: Counter[str] = field(default_factory=Counter)  # rows that wait for a slot, by owner
    paused_until: float = 0.0  # monotonic seconds

    def update(self, in_danger: Mapping[str, tuple[str, str]], runner: RequestRunner) -> None:
        """Of these batches the deadline is in danger: their owners, and the class of their rows.

        A row's class is raised to that one, within what its owner may have now.
        """
        raised = {
            batch: max(runner.late_priority(owner), Priority.parse(label) or Priority.BATCH)
            for batch, (owner, label) in in_danger.items()
        }
        self.batches = {batch: one for batch, one in raised.items() if one < Priority.BATCH}
        self.waiting.clear()

    def raise_class(
        self, offered: Iterable[StoredRow], rooms: BatchRoomService, runner: RequestRunner
    ) -> None:
        """Raise those of the rows that were offered before, and count those that wait."""
        by_priority: defaultdict[Priority, list[StoredRow]] = defaultdict(list)
        for row in offered:
            if (priority := self.batches.get(row.batch or "")) is not None:
                by_priority[priority].append(row)
        for priority, rows in by_priority.items():
            waiting = rooms.raise_class({row.id for row in rows}, priority)
            for row in rows:
                runner.note_raised(row.id, priority)
                # The scheduler has not seen all of them, or knows their prompts by other ids.
                self.waiting[row.owner] += row.id in waiting or not runner.has_begun(row.id)

    def note_offered(self, owner: str) -> None:
        """One more is about to wait."""
        self.waiting[owner] += 1

    def owners_with(self, rows: int) -> set[str]:
        """Owners of whom so many rows wait."""
        return {owner for owner, waiting in self.waiting.items() if waiting >= rows}

    def refused(self, now: float, seconds: float) -> None:
        """One found no place in the queue, and may in so many seconds."""
        self.paused_until = now + min(seconds, REFUSED_SECONDS)


@dataclass(slots=True, eq=False)
class HeldRow:
    """A claimed row."""

    row: StoredRow
    target: RequestTarget | None
    body: bytes | None  # None: it runs or has run
    task: asyncio.Task[None] | None = None
    has_slot: bool = False  # whether it counts as running in its lane
    recording: bool = False  # whether it has a result, which is being recorded
    in_late_place: bool = False  # whether it was offered as late, without room for class `batch`


@dataclass(slots=True, eq=False)
class TargetRows:
    """The lane of one target, and what is known of its room."""

    pace: Pace
    lane: Lane = field(default_factory=Lane)
    credit: int = 0  # rows that may be offered now
    slots: int = 0
    urgent: list[str] = field(default_factory=list)
    """Batches whose deadline is in danger, the nearest first."""
    late: LateRows = field(default_factory=LateRows)  # those of them whose class is raised
    arriving: set[str] = field(default_factory=set)
    """Rows that were offered and that the scheduler has not seen yet."""
    probes: int = 1  # rows that are tried at a time while no node is there
    paused_until: float = 0.0


LOOK_SECONDS = 0.1  # seconds between two looks at the room for batch work

SOON_SECONDS = 0.02
"""A slot that comes free within so many seconds is offered a row: until then it is prepared."""

RENEW_SECONDS = 5.0  # seconds between two renewals, which also tell which rows were cancelled
MOST_BODIES = 64 << 20  # bytes of bodies that are read ahead
MOST_UNRECORDED = 5000  # results that wait to be recorded; beyond them no row is offered
RETRY_SECONDS = 10.0  # seconds until a row that nodes have failed is run again, times its runs

MOST_PAUSE = 300.0
"""Seconds after which it is tried again whether an owner's limit is still reached."""

HOLD_SECONDS = 10.0  # if an owner is paused for longer, its claimed rows are put back

CAREFUL_SECONDS = 30.0
"""For so long after an owner's limit was reached its rows are offered one after the other."""

MOST_PROBES = 64
"""Rows without any node that are tried at a time: their model may be unknown, which is a result."""

AWAY_SECONDS = 2.0  # seconds after which a store or folder that has failed is tried again

COUNT_SECONDS = 60.0
"""Seconds after which batches are counted again while none is unfinished: some are removed."""

END_SECONDS = 3.0  # most seconds to put back what is left, at the end

T = TypeVar("T")

log = structlog.get_logger()


class Results(Protocol):
    """Keeps results; `results.LineResults`."""

    async def add(self, row: StoredRow, batch_api: str, outcome: Outcome) -> bool:
        """Returns when the result is recorded; False: the row was taken meanwhile."""


@dataclass(slots=True, eq=False)
class Feeder:
    """Feeds the lines of batches to the scheduler. `clock` is monotonic, `now` gives Unix time."""

    supply: Supply
    leases: RowLeases
    runner: RequestRunner
    results: Results
    rooms: BatchRoomService
    work: UnfinishedWork
    clock: Callable[[], float]
    now: Callable[[], float]
    counts: FeederCounts = field(default_factory=FeederCounts)
    renew_seconds: float = RENEW_SECONDS
    _held: dict[str, HeldRow] = field(default_factory=dict)
    _targets: dict[RequestTarget | None, TargetRows] = field(default_factory=dict)
    _paused: dict[str, float] = field(default_factory=dict)
    """Owners whose limits are reached, and until when they are left alone."""
    _careful: dict[str, float] = field(default_factory=dict)
    """Owners whose limits were reached of late, and until when they are tried step by step."""
    _claims: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there may be something to claim or to put back."""
    _looks: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something to offer."""
    _renewals: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)  # set when no row is held
    _stopped: bool = False
    _is_work: bool = True  # whether anything was unfinished when it was last asked
    _count_at: float = 0.0  # when it is counted what is in the store, though nothing is unfinished
    _problem: str | None = None

    @property
    def running(self) -> int:
        """Rows that were offered and have not ended."""
        return sum(state.lane.running for state in self._targets.values())

    @property
    def claimed(self) -> int:
        """Rows that are ready to be offered."""
        return sum(state.lane.ready for state in self._targets.values())

    def wake(self) -> None:
        """Rows have come, or were cancelled."""
        self.supply.read_soon()
        self._claims.set()
        self._renewals.set()

    def stop(self) -> None:
        """Claim and offer no more; rows that run go on, the others are put back."""
        if not self._stopped:
            self._stopped = True
            self._drop_unwanted(self._not_begun(self._held.values()))
            self._claims.set()

    async def ended(self) -> None:
        """After `stop`: wait until no row runs any more."""
        while self._held:
            self._ended.clear()
            await self._ended.wait()

    async def run(self) -> None:
        """Feed until cancelled; then what runs is put back, unless it has a result already."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._claim_rows(), name="claim stored requests")
                group.create_task(self._offer_rows(), name="offer stored requests")
                group.create_task(self._renew_claims(), name="renew claims")
        finally:
            await self._end()

    async def _end(self) -> None:
        self.stop()
        running = [held for held in self._held.values() if held.task is not None]
        tasks = [held.task for held in running if held.task is not None and not held.recording]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_SECONDS)
        for held in running:
            if held.recording and held.task is not None:
                held.task.cancel()  # Whoever keeps the results records this one.
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self.leases.write()

    # Claiming.

    async def _claim_rows(self) -> None:
        while True:
            self._claims.clear()
            pause = IDLE_SECONDS
            if await self._try(self._claim_step) and not self._claims.is_set():
                pause = max(0.05, min(IDLE_SECONDS, self.supply.read_at - self.clock()))
            elif self._problem is not None:
                await asyncio.sleep(AWAY_SECONDS)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._claims.wait()

    async def _try(self, step: Callable[[], Awaitable[None]]) -> bool:
        """Do a step; whether store and folder could be used."""
        try:
            await step()
        except (StoreError, FolderError) as error:
            if self._problem is None:
                log.warning("lines of batches wait", why=str(error))
            self._problem = str(error)
            return False
        except Exception as error:
            # Whatever it is, the other batches must go on.
            log.exception("work on batches has failed")
            self._problem = str(error)
            return False
        if self._problem is not None:
            log.info("lines of batches go on")
            self._problem = None
        return True

    async def _claim_step(self) -> None:
        if await self.leases.write():
            self.supply.read_soon(READ_SECONDS)
        if self._stopped:
            return
        if self.clock() >= self.supply.read_at:
            # Once more behind the last work: its counts have changed.
            was_work, self._is_work = self._is_work, await self.work.exists()
            if self._is_work or was_work or self._held or self.clock() >= self._count_at:
                await self._read_waiting()
            else:
                self.supply.read_at = self.clock() + IDLE_SECONDS
        for target, state in list(self._targets.items()):
            self._look(target, state)
            if picks := await self._picks(target, state):
                await self._claim(target, picks)
            elif not (state.lane.ready or state.lane.running or self.supply.works_of(target)):
                del self._targets[target]

    async def _read_waiting(self) -> None:
        folder = await self.leases.open_folder()
        waiting = await self.supply.read(folder, {held.row.batch for held in self._held.values()})
        counts = self.counts
        counts.waiting = Counter[str]()
        for group in waiting.groups:
            counts.waiting[group.kind.value] += group.rows
        counts.batches, counts.oldest = waiting.batches, waiting.oldest
        self._count_at = self.clock() + COUNT_SECONDS
        for target in self.supply.known_targets():
            if target not in self._targets:
                self._targets[target] = TargetRows(Pace(self.clock))

    async def _picks(self, target: RequestTarget | None, state: TargetRows) -> list[Pick]:
        """What to claim for a target."""
        bodies = sum(len(held.body) for held in self._held.values() if held.body is not None)
        if self.clock() < state.paused_until or bodies >= MOST_BODIES:
            return []
        wanted = ready_wanted(state.slots, state.pace.rows_a_second or 0.0)
        if not state.slots:
            wanted = state.probes
        wanted += max(0, state.credit)
        works = [work for work in self.supply.works_of(target) if not self._is_paused(work.owner)]
        # Half of it is enough to go on with: a claim for each row would be a load on the store.
        if state.lane.ready > wanted // 2:
            lane, late = state.lane, state.late.batches
            works = [one for one in works if one.batch in late and not lane.ready_of(one.batch)]
            if not works:
                return []
            wanted = lane.ready + MOST_LATE
        works = await self.supply.with_groups(works, state.lane.held())
        return self.supply.picks(target, state.lane.wants(works, wanted, state.urgent))

    async def _claim(self, target: RequestTarget | None, picks: list[Pick]) -> None:
        """Claim rows with their bodies, and offer them."""
        claimed = await self.leases.claim(picks, MOST_BODIES)
        self.supply.count_claimed(target, picks, [row for row, _ in claimed])
        for row, body in claimed:
            self._hold(row, body)
        for one, state in list(self._targets.items()):
            self._offer(one, state)
        self._looks.set()

    def _hold(self, row: StoredRow, body: bytes | None) -> None:
        """A row that was claimed; without a body, as its file is gone, it fails."""
        target = self.runner.target_of(row.owner, row.path, row.model)
        if row.id in self._held or self._stopped:
            if self._stopped:
                self.leases.put_back([row.id], self.now())
            return
        if body is None:
            log.warning("the input of a batch is missing", batch=row.batch)
        held = self._held[row.id] = HeldRow(row, target, body or b"")
        state = self._targets.get(target)
        if state is None:
            state = self._targets[target] = TargetRows(Pace(self.clock))
        state.lane.add(held.row)

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
        for target, state in list(self._targets.items()):
            if late := state.lane.drop_late(self.now()):
                self._give_back(late, self.now())
            if state.lane.ready or state.lane.running:
                state.pace.tick(busy=True)
                self._look(target, state)
                self._offer(target, state)
                # What is offered here takes room that the next target may have too.
                await asyncio.sleep(0)

    def _look(self, target: RequestTarget | None, state: TargetRows) -> None:
        """See how much room there is."""
        lane, registry = state.lane, self.runner.registry
        state.arriving = {
            id_
            for id_ in state.arriving
            if id_ not in registry and (held := self._held.get(id_)) is not None and held.has_slot
        }
        room = BatchRoom(0, 0, 0, 0, 0, 0)
        if target is not None:
            room = self.rooms.batch_room(
                target.model_names,
                SOON_SECONDS,
                endpoint=target.endpoint,
                node_labels=target.node_labels,
            )
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
        found = {id_: (works[id_].owner, self.supply.class_of(id_)) for id_ in state.urgent}
        state.late.update(found, self.runner)
        if state.late.batches:
            rows = (one for one in self._held.values() if one.target == target)
            offered = [one.row for one in rows if one.has_slot]
            state.late.raise_class(offered, self.rooms, self.runner)

    def _offer(self, target: RequestTarget | None, state: TargetRows) -> None:
        """Start rows, as many as there is room for."""
        if self._stopped or self.clock() < state.paused_until:
            return
        left_out = {owner for owner in list(self._paused) if self._is_paused(owner)}
        if sum(held.recording for held in self._held.values()) >= MOST_UNRECORDED:
            return
        while True:
            has_room = state.credit > 0
            if has_room:
                row = state.lane.next(left_out, state.urgent)
            else:
                row = self._next_late(state, left_out)
            if row is None:
                break
            if row.owner in self._careful:
                if self._careful[row.owner] < self.clock():
                    del self._careful[row.owner]
                else:
                    left_out.add(row.owner)  # The next one when this one was admitted.
            held = self._held[row.id]
            held.has_slot, held.in_late_place = True, not has_room
            if has_room:
                state.credit -= 1
            else:
                state.late.note_offered(row.owner)
            state.arriving.add(row.id)
            held.task = asyncio.create_task(self._run(held, state), name="run a stored request")
        if self.supply.works_of(target) and state.lane.ready <= max(1, state.slots):
            self._claims.set()

    def _next_late(self, state: TargetRows, left_out: set[str]) -> StoredRow | None:
        """The late row that may wait for a slot; None: there is none, or enough wait."""
        late = state.late
        if not late.batches or not state.slots or self.clock() < late.paused_until:
            return None
        of_owner, of_all = late_places(state.slots, self.runner.settings.queue.max)
        if sum(one.late.waiting.total() for one in self._targets.values()) >= of_all:
            return None
        full = late.owners_with(of_owner)
        return state.lane.next_late(late.batches, left_out | full, late.waiting)

    def _is_paused(self, owner: str) -> bool:
        until = self._paused.get(owner)
        if until is None:
            return False
        if until <= self.clock():
            del self._paused[owner]
            return False
        return True

    def _slot_free(self, held: HeldRow, state: TargetRows) -> None:
        """A row has left its slot: the next one goes there."""
        if not held.has_slot:
            return
        held.has_slot = False
        state.lane.ended(held.row)
        state.credit += not held.in_late_place
        self._offer(held.target, state)

    # Running.

    async def _run(self, held: HeldRow, state: TargetRows) -> None:
        """Run one row to its result, or let it wait again."""
        row, runner = held.row, self.runner
        body, held.body = held.body or b"", None
        priority = state.late.batches.get(row.batch or "", Priority.BATCH)
        request = StoredRequest(
            row.id, row.owner, row.path, priority, row.user, deadline=row.deadline
        )
        try:
            outcome = await runner.run(
                request, body, on_slot_free=partial(self._slot_free, held, state)
            )
        except RowDeferred as deferred:
            self._deferred(held, state, body, deferred)
            return
        except RowExpired:
            self.leases.put_back([row.id], self.now())
        except asyncio.CancelledError:
            self.leases.put_back([row.id], self.now())
            raise
        except Exception:
            log.exception("a stored request can't be run", request=row.id)
            self.leases.put_back([row.id], self.now() + RETRY_SECONDS, failed=True)
        else:
            ran = outcome.record
            state.pace.ended(ran.duration_seconds - ran.queue_seconds if ran.attempts else None)
            if self._paused.pop(row.owner, None) is not None:
                self._offer(held.target, state)  # It may have one more again.
            if outcome.failed_on_nodes and row.attempts + 1 < MOST_RUNS:
                self.counts.retried += 1
                pause = RETRY_SECONDS * (row.attempts + 1)
                self.leases.put_back([row.id], self.now() + pause, failed=True)
            else:
                await self._record(held, state, outcome)
        finally:
            self._slot_free(held, state)
            if held.body is None:
                self._let_go(held)

    async def _record(self, held: HeldRow, state: TargetRows, outcome: Outcome) -> None:
        held.recording = True
        if not state.slots:
            # Without a node it has a result all the same: so have others, likely.
            state.probes = min(2 * state.probes, MOST_PROBES)
        api = "anthropic" if (held.row.batch or "").startswith("msgbatch_") else "openai"
        if not await self.results.add(held.row, api, outcome):
            self.counts.outcomes["lost"] += 1
            self.leases.put_back([held.row.id], self.now())
        else:
            self.counts.outcomes["done" if outcome.status < 400 else "failed"] += 1

    def _let_go(self, held: HeldRow) -> None:
        self._held.pop(held.row.id, None)
        if self.leases.has_put_back:
            self._claims.set()
        if not self._held:
            self._ended.set()

    def _deferred(
        self, held: HeldRow, state: TargetRows, body: bytes, deferred: RowDeferred
    ) -> None:
        """A row that could not be run now waits again."""
        self.counts.deferred += 1
        row, now = held.row, self.clock()
        if deferred.concerns_owner:
            seconds = min(deferred.seconds, MOST_PAUSE)
            self._paused[row.owner] = now + seconds
            self._careful[row.owner] = now + seconds + CAREFUL_SECONDS
            if seconds <= HOLD_SECONDS and not self._stopped:
                self._keep(held, state, body)
                return
            ready = [
                other
                for one in self._targets.values()
                for other in one.lane.drop(lambda other: other.owner == row.owner)
            ]
            self._give_back(ready, self.now() + seconds)
            self.leases.put_back([row.id], self.now() + seconds)
            return
        seconds = deferred.seconds
        if held.in_late_place and deferred.reason == "queue_full" and not self._stopped:
            # The others of its class were more.
            state.late.refused(now, seconds)
            self._keep(held, state, body)
            return
        if not state.slots or deferred.reason in {"queue_full", "starting"}:
            state.probes = 1
            state.paused_until = now + min(seconds, MOST_PAUSE)
        if deferred.reason == "queue_timeout" and row.deadline is not None:
            # Its prompt is too long for the time left, it seems: that hardly changes.
            seconds = max(seconds, (row.deadline - self.now()) / 4)
        self.leases.put_back([row.id], self.now() + seconds)

    def _keep(self, held: HeldRow, state: TargetRows, body: bytes) -> None:
        """A row that could not run keeps its claim, and is offered again."""
        self._slot_free(held, state)
        held.task, held.body = None, body
        state.lane.add(held.row)

    # Leases.

    async def _renew_claims(self) -> None:
        while True:
            if await self._try(self._renew_step):
                self._renewals.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.renew_seconds):
                    await self._renewals.wait()
            await asyncio.sleep(0.2)  # Many may wake it at once.

    async def _renew_step(self) -> None:
        """Say that this process still runs its rows; take back what lost processes had."""
        ids = set(self._held)
        if not ids and not await self.work.exists():
            return
        wanted = await self.leases.renew(ids)
        self._drop_unwanted(ids - wanted)
        await self._stop_paused()
        released = await self.leases.release_lost()
        if released:
            log.info("stored requests of lost processes wait again", requests=released)
            self.supply.read_soon()
            self._claims.set()

    async def _stop_paused(self) -> None:
        """Put back rows of paused batches that have not begun."""
        batches = {held.row.batch for held in self._held.values()}
        paused = await self.leases.paused(one for one in batches if one is not None)
        of_paused = (held for held in self._held.values() if held.row.batch in paused)
        self._drop_unwanted(self._not_begun(of_paused))

    def _not_begun(self, some: Iterable[HeldRow]) -> set[str]:
        """Those of the rows that are ready or wait for a slot."""
        ready = (held for held in some if held.task is None or held.has_slot)
        return {held.row.id for held in ready if not self.runner.has_begun(held.row.id)}

    def _drop_unwanted(self, ids: set[str]) -> None:
        """End rows that were cancelled, or taken by another process."""
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
        ids = [row.id for row in rows]
        self.leases.put_back(ids, not_before)
        for id_ in ids:
            self._held.pop(id_, None)
        if ids and not self._held:
            self._ended.set()
        self._claims.set()
