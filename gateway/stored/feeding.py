"""What is fed to the scheduler, how much and in which order: the policy, on plain numbers.

Lines of batches are offered only where slots are free that class `batch` may use, or are just about
to be: whatever waits longer than that waits in the store, where it delays nobody. Only of batches
in danger of missing their deadline some more are offered: in a higher class they wait for a slot as
any other request of that class does. `Lane` has the claimed rows of one target (model, endpoint,
pool) and decides which goes next; the functions say how many are offered and claimed, and which
batches are in danger.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.lease import BatchRoom
from gateway.stored.claims import Pick, RequestKind, StoredRow

MOST_READY = 256  # rows of one target that are claimed ahead, at most
# Rows that end within so many seconds are claimed ahead: several times what a claim takes.
READY_SECONDS = 1.0
MOST_WANTS = 24  # picks of one claim: each is a query
# A deadline is in danger when the work before it takes more than this share of the time left.
DANGER_SHARE = 0.8
# So near, a deadline is in danger as long as the speed is unknown; also what a row is believed to
# take as long as none has ended.
DANGER_SECONDS = 30.0
LEAST_PACE = 1e-9  # rows a second; so few are none
# A deadline is near when the time left is less than so many times what the work before it takes on
# all slots. Until then slots may yet come free, in the evening for one.
NEAR_FACTOR = 3
# Late rows of one owner that wait for a slot of a target: a slot in so many, within these bounds.
# So many that one is there when a slot comes free, so few that the owner's own clients hardly wait
# for them.
LATE_SLOTS_DIVISOR, LEAST_LATE, MOST_LATE = 8, 2, 16
# Late rows of all owners that wait: one place in so many of the queue (`queue.max`).
LATE_QUEUE_DIVISOR = 8
# Each fourth row goes by turns, whatever deadlines are in danger: nobody starves for those that
# can't be kept any more.
TURNS_SHARE = 4
MEAN_OF = 32  # rows over which the time that one takes is averaged, about
# Slots that have come free for which it is remembered which prompts they have cached.
MOST_FREED = 64


class PrefixGroup(NamedTuple):
    """Rows of a batch that wait in the store and whose prompts begin alike."""

    prefix: int
    rows: int
    longest: int  # the most tokens that one of them may write
    tokens: int  # all tokens that they may write


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What is left of one batch for one target."""

    batch: str
    owner: str
    rows: int  # that wait in the store
    deadline: float = math.inf  # Unix time
    class_: str = ""  # the label of the highest class that they may have
    models: tuple[str | None, ...] = ()  # that they name
    groups: tuple[PrefixGroup, ...] = ()
    """Its larger groups; the other rows are claimed once these are."""


def rows_to_offer(room: BatchRoom, arriving: int) -> int:
    """Rows to offer now; negative: so many more wait than there will be slots for.

    `arriving`: rows that were offered and that the scheduler has not seen yet. Rows that wait for
    higher classes' slots are none of its business: those go first.
    """
    return min(room.free + room.soon, room.slots) - room.waiting - arriving - room.ahead


def ready_wanted(slots: int, ended_a_second: float) -> int:
    """Rows of a target that should be claimed and read before their slot is free."""
    if slots <= 0:
        return 1
    return min(MOST_READY, max(2, 2 * slots, math.ceil(ended_a_second * READY_SECONDS)))


def in_danger(
    works: Iterable[BatchWork],
    held: Mapping[str, int],
    rows_a_second: float | None,
    now: float,
    *,
    slots: int = 0,
    row_seconds: float | None = None,
) -> list[str]:
    """Batches that may miss their deadline, the nearest first.

    Whether they can be kept is counted as if all were worked on in the order of their deadlines:
    at the present pace they are not, and the deadline is near. `held`: rows of each batch that are
    claimed; `rows_a_second`: None, if unknown; `slots`: those that the class may use, 0 if unknown;
    `row_seconds`: for which a row holds a slot, None if unknown.
    """
    found, before = [], 0.0
    for work in sorted(works, key=lambda one: (one.deadline, one.batch)):
        rows = work.rows + held.get(work.batch, 0)
        if not rows or math.isinf(work.deadline):
            continue
        left = work.deadline - now
        before += rows
        if rows_a_second is None:
            late = left < DANGER_SECONDS
        else:
            pace = max(rows_a_second, LEAST_PACE)
            late = before / pace + (row_seconds or 0.0) > left * DANGER_SHARE
        if late and slots > 0 and left >= DANGER_SECONDS:
            rounds = math.ceil(before / slots)
            late = rounds * (row_seconds or DANGER_SECONDS) * NEAR_FACTOR > left
        if late:
            found.append(work.batch)
    return found


def late_places(slots: int, queue_places: int) -> tuple[int, int]:
    """Late rows that may wait: of one owner for a target of so many slots, and of all owners.

    `queue_places`: `queue.max`.
    """
    most = min(queue_places, max(1, queue_places // LATE_QUEUE_DIVISOR))
    return min(most, MOST_LATE, max(LEAST_LATE, slots // LATE_SLOTS_DIVISOR)), most


@dataclass(slots=True)
class Pace:
    """How many rows of a target end a second, over the last minutes."""

    clock: Callable[[], float]
    halves_in: float = 60.0  # seconds after which an end counts half
    least_ends: int = 5  # ends without which nothing is known ..
    least_seconds: float = 10.0  # ... before so many seconds have passed.
    _weight: float = 0.0
    _seconds: float = 0.0
    _ends: int = 0
    _at: float | None = None
    row_seconds: float | None = None  # for which a row holds a slot, on average; None: unknown

    def tick(self, *, busy: bool) -> None:
        """Time passes; it counts only while there are rows, whether or not they get slots."""
        now = self.clock()
        if self._at is not None and busy:
            passed = max(0.0, now - self._at)
            kept = 0.5 ** (passed / self.halves_in)
            self._weight *= kept
            self._seconds = self._seconds * kept + passed
        self._at = now

    def ended(self, seconds: float | None = None) -> None:
        """A row has got its result; `seconds`: for which it held its slot, None if it had none."""
        self.tick(busy=True)
        self._weight += 1
        self._ends += 1
        if seconds is not None:
            mean = seconds if self.row_seconds is None else self.row_seconds
            self.row_seconds = mean + (seconds - mean) / min(self._ends, MEAN_OF)

    @property
    def rows_a_second(self) -> float | None:
        """None: unknown."""
        if self._seconds <= 0 or (
            self._ends < self.least_ends and self._seconds < self.least_seconds
        ):
            return None
        return self._weight / self._seconds


# Which.


@dataclass(slots=True)
class _BatchRows:
    owner: str
    class_: str
    deadline: float = math.inf  # Unix time
    ready: dict[int, list[StoredRow]] = field(default_factory=dict)
    """By prefix; each list ends with the row that goes next."""
    running: Counter[int] = field(default_factory=Counter)  # by prefix
    count: int = 0  # rows that are ready
    waiting: dict[int, PrefixGroup] = field(default_factory=dict)
    """Groups in the store, as last read, less what was claimed since."""
    followed_by: dict[int, int] = field(default_factory=dict)
    """Of groups that have no rows left and still run, the one that gets their slots."""
    turn: int = 0  # the last time that it had its turn


@dataclass(slots=True, eq=False)
class Lane:
    """The claimed rows of one target, and which goes next.

    Slots are shared evenly between owners, and between an owner's batches. Within a batch, a slot
    that comes free goes on with the group that it has just served; as many groups are under way as
    there are nodes, so that each node reads a common prefix once. Long rows go before short ones.
    """

    nodes: int = 1  # nodes that serve the target
    _batches: dict[str, _BatchRows] = field(default_factory=dict)
    _of_owner: Counter[str] = field(default_factory=Counter)  # rows that run
    _owner_turn: dict[str, int] = field(default_factory=dict)
    _turns: int = 0
    _freed: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=MOST_FREED))
    """Batch and prefix of the rows that have ended last: their slots have that prompt cached."""

    # What it has.

    @property
    def ready(self) -> int:
        """Rows that could be offered now."""
        return sum(one.count for one in self._batches.values())

    @property
    def running(self) -> int:
        """Rows that were offered and have not ended."""
        return sum(self._of_owner.values())

    def held(self) -> dict[str, int]:
        """Rows that are ready or run, by batch."""
        return {batch: rows.count + rows.running.total() for batch, rows in self._batches.items()}

    def ready_of(self, batch: str) -> int:
        """Rows of a batch that could be offered now."""
        rows = self._batches.get(batch)
        return 0 if rows is None else rows.count

    def works(self) -> list[BatchWork]:
        """The batches that it has rows of."""
        return [
            BatchWork(batch, rows.owner, 0, rows.deadline, rows.class_)
            for batch, rows in self._batches.items()
        ]

    def drop_late(self, now: float) -> list[StoredRow]:
        """Take out ready rows whose deadline has passed, and return them."""
        if all(rows.deadline > now for rows in self._batches.values()):
            return []
        return self.drop(lambda row: row.deadline is not None and row.deadline <= now)

    def add(self, row: StoredRow) -> None:
        """A row was claimed and can be offered."""
        deadline = math.inf if row.deadline is None else row.deadline
        rows = self._batches.setdefault(_batch_of(row), _BatchRows(row.owner, row.class_, deadline))
        ready = rows.ready.setdefault(row.prefix, [])
        ready.append(row)
        if len(ready) > 1 and _length(ready[-2]) < _length(row):
            ready.sort(key=_length)
        rows.count += 1

    def drop(self, unwanted: Callable[[StoredRow], bool]) -> list[StoredRow]:
        """Take out ready rows, and return them."""
        dropped: list[StoredRow] = []
        for rows in self._batches.values():
            for prefix, ready in list(rows.ready.items()):
                if gone := [row for row in ready if unwanted(row)]:
                    dropped += gone
                    rows.count -= len(gone)
                    rows.ready[prefix] = [row for row in ready if not unwanted(row)]
                    if not rows.ready[prefix]:
                        del rows.ready[prefix]
        self._forget_empty()
        return dropped

    def ended(self, row: StoredRow) -> None:
        """A row has left its slot."""
        rows = self._batches[_batch_of(row)]
        rows.running[row.prefix] -= 1
        if rows.running[row.prefix] <= 0:
            del rows.running[row.prefix]
        self._of_owner[row.owner] -= 1
        self._freed.append((_batch_of(row), row.prefix))
        self._forget_empty()

    def _forget_empty(self) -> None:
        held = self._batches.items()
        for batch in [name for name, rows in held if not rows.count and not rows.running]:
            del self._batches[batch]

    # The next one.

    def next(self, paused: Collection[str] = (), urgent: Sequence[str] = ()) -> StoredRow | None:
        """Take the row that is to be offered next; None: there is none.

        `paused`: owners that are left out; `urgent`: batches in danger, the nearest deadline first.
        """
        open_ = {
            batch: rows
            for batch, rows in self._batches.items()
            if rows.count and rows.owner not in paused
        }
        if not open_:
            return None
        if (self._turns + 1) % TURNS_SHARE:
            for batch in urgent:
                if batch in open_:
                    return self._take(batch)
        latest = self._freed[-1][0] if self._freed else None

        def turn(batch: str) -> tuple[int, int, bool, int, int]:
            rows = open_[batch]
            return (
                self._of_owner[rows.owner],
                rows.running.total(),
                batch != latest,
                self._owner_turn.get(rows.owner, 0),
                rows.turn,
            )

        return self._take(min(open_, key=turn))

    def next_late(
        self, late: Iterable[str], paused: Collection[str], waiting: Mapping[str, int]
    ) -> StoredRow | None:
        """Take the row of a late batch that is to wait next for a slot; None: there is none.

        `late`: the nearest deadline first; `waiting`: late rows that wait already, by owner. The
        owner with the fewest goes next.
        """
        open_ = [
            batch
            for batch in late
            if self.ready_of(batch) and self._batches[batch].owner not in paused
        ]
        if not open_:
            return None
        return self._take(min(open_, key=lambda batch: waiting.get(self._batches[batch].owner, 0)))

    def _take(self, batch: str) -> StoredRow:
        rows = self._batches[batch]
        prefix = self._next_prefix(batch, rows)
        ready = rows.ready[prefix]
        row = ready.pop()
        if not ready:
            del rows.ready[prefix]
        rows.count -= 1
        rows.running[prefix] += 1
        rows.followed_by.pop(prefix, None)
        self._of_owner[row.owner] += 1
        self._turns += 1
        rows.turn = self._owner_turn[row.owner] = self._turns
        return row

    def _next_prefix(self, batch: str, rows: _BatchRows) -> int:
        """The group for the slot of the batch that has come free last.

        One that has ended is followed by the same group on all its slots: they are on one node.
        """
        places = (at for at in reversed(range(len(self._freed))) if self._freed[at][0] == batch)
        if (place := next(places, None)) is None:
            return self._best_prefix(rows)
        _, freed = self._freed[place]
        del self._freed[place]
        last, seen = freed, {freed}
        while last not in rows.ready and last in rows.followed_by:
            last = rows.followed_by[last]
            if last in seen:
                break
            seen.add(last)
        if last in rows.ready:
            return last
        chosen = self._best_prefix(rows)
        if len(rows.followed_by) >= MOST_FREED:
            del rows.followed_by[next(iter(rows.followed_by))]
        rows.followed_by[freed] = chosen
        return chosen

    def _best_prefix(self, rows: _BatchRows) -> int:
        """The next group that has not begun, if a node has none; else that with fewest slots."""
        under_way = [prefix for prefix in rows.ready if rows.running[prefix]]
        fresh = [prefix for prefix in rows.ready if not rows.running[prefix]]

        def waiting(prefix: int) -> PrefixGroup:
            return rows.waiting.get(prefix) or PrefixGroup(prefix, 0, 0, 0)

        def work(prefix: int) -> tuple[int, int, int]:
            """The longest row of a group, then all its work."""
            ready, group = rows.ready[prefix], waiting(prefix)
            tokens = sum(map(_length, ready)) + group.tokens
            return max(_length(ready[-1]), group.longest), tokens, -prefix

        # Of a group that has no rows left only the last ones still run.
        if fresh and len(under_way) < max(1, self.nodes):
            return max(fresh, key=work)
        left = {one: len(rows.ready[one]) + waiting(one).rows for one in under_way or fresh}
        return min(left, key=lambda prefix: (rows.running[prefix], -left[prefix], prefix))

    # What to claim.

    def wants(
        self, works: Sequence[BatchWork], wanted: int, urgent: Sequence[str] = ()
    ) -> list[Pick]:
        """What to claim so that about `wanted` rows are ready, evenly of owners and batches.

        `works`: batches with rows in the store whose owners are not paused.
        """
        missing = wanted - self.ready
        if missing <= 0 or not works:
            return []
        found: list[Pick] = []
        for work, share in self._shares(works, missing, urgent):
            found += self._wants_of(work, share)
            if len(found) >= MOST_WANTS:
                break
        return found[:MOST_WANTS]

    def _shares(
        self, works: Sequence[BatchWork], missing: int, urgent: Sequence[str]
    ) -> Iterator[tuple[BatchWork, int]]:
        """Each batch with the rows that are to be claimed of it, those in danger first."""
        held, of_owner = self.held(), Counter[str]()
        for rows in self._batches.values():
            of_owner[rows.owner] += rows.count + rows.running.total()
        rank = {batch: number for number, batch in enumerate(urgent)}
        shares: Counter[str] = Counter()
        left = {work.batch: work.rows for work in works}
        open_ = {work.batch: work for work in works if work.rows}
        step = max(1, missing // 16)
        while missing > 0 and open_:
            work = min(
                open_.values(),
                key=lambda one: (
                    rank.get(one.batch, len(rank)),
                    of_owner[one.owner],
                    held.get(one.batch, 0) + shares[one.batch],
                    one.batch,
                ),
            )
            part = min(step, missing, left[work.batch])
            shares[work.batch] += part
            of_owner[work.owner] += part
            left[work.batch] -= part
            missing -= part
            if not left[work.batch]:
                del open_[work.batch]
        order = sorted(works, key=lambda one: (rank.get(one.batch, len(rank)), one.batch))
        return ((work, shares[work.batch]) for work in order if shares[work.batch])

    def _wants_of(self, work: BatchWork, share: int) -> Iterator[Pick]:
        """What to claim of one batch: of groups under way, then of those that come next."""
        rows = self._batches.get(work.batch) or _BatchRows(work.owner, work.class_)
        rows.waiting = {group.prefix: group for group in work.groups}
        groups = sorted(
            work.groups,
            key=lambda one: (not rows.running[one.prefix], -one.longest, -one.tokens, one.prefix),
        )
        # Each group may soon have its even share of the slots, those that come next as well.
        each = max(1, math.ceil(share / max(1, self.nodes)))
        for group in groups:
            count = min(share, group.rows, each - len(rows.ready.get(group.prefix, ())))
            if count > 0:
                yield Pick(count, RequestKind.LINE, work.batch, prefix=group.prefix)
                share -= count
        if share > 0:
            yield Pick(share, RequestKind.LINE, work.batch)


def _batch_of(row: StoredRow) -> str:
    return row.batch or row.id


def _length(row: StoredRow) -> int:
    """Tokens that a row may write; a row that names no limit may write most."""
    return row.max_tokens or 1 << 30
