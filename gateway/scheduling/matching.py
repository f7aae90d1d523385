"""Who of those that wait goes next, and where: classes, ageing, fair shares, the best fit.

The order is strict between classes, but for the share of the overdue (`ageing.py`). In a class the
caller goes that was served least (`fairness.py`). Of its requests, and of those of callers within a
small slack of it, the one with the highest response ratio goes: the time that it will have been
here when it ends, against the time it takes on the node that has room. So what fits the node, and
what is short, goes before the rest, and what has waited long before both (Brinch Hansen 1971).

Only a bounded number of requests is looked at for one placement, however many wait.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from gateway.config.queue import DEFAULT_PATIENCE, DEFAULT_SLOTLESS
from gateway.request import Priority
from gateway.scheduling import forecast
from gateway.scheduling.cost import LOOP_ROWS, CostColumns, row_cost, row_cost_after
from gateway.scheduling.fairness import COUNTER_SLACK
from gateway.scheduling.placement_state import (
    CandidateSet,
    FairnessAccount,
    NodeSlots,
    PlacementState,
    QueuedRequest,
)
from gateway.scheduling.selection import (
    POLICIES,
    AvailabilityCache,
    AvailableRows,
    SelectionPolicy,
    least_finish,
)
from gateway.scheduling.wait_queue import PriorityLevel, WaitQueue

OLDEST_PER_FIFO = 24
"""Requests of one lane that are compared, from its oldest on."""

MOST_COMPARED = 48
"""Requests that are compared for one placement, at most."""

WARM_ROWS_SEARCHED = 4
"""Rows with room whose warm requests are looked for further back in line."""

MOST_EVALUATIONS = 96
"""Expected finishes that are computed to compare them, about."""

MOST_DECLINES = 8
"""Requests that may decline a slot to wait for a warm one; then the first of them takes it."""

MOST_CACHE_REFRESHES = 4
"""Requests for one placement of which it is looked up again what is cached: it changes while they
wait."""


def _overdue_after() -> Mapping[Priority, float]:
    return {priority: DEFAULT_PATIENCE[priority.label] for priority in Priority}


@dataclass(frozen=True, slots=True)
class DispatchRules:
    """The settings that the dispatcher goes by."""

    policy: str = "least_finish"
    overdue_after: Mapping[Priority, float] = field(default_factory=_overdue_after)
    """Seconds after which a waiting request of a class is overdue."""
    overdue_share: float = 0.1
    """Of the placements, the share that goes to overdue requests while there are any."""
    batch_reserve: float = 0.0
    """Share of each node's slots that `batch` leaves free."""
    slotless_limit: int = DEFAULT_SLOTLESS
    """Requests that need no slot that a node gets at once."""


@dataclass(slots=True)
class Match:
    """A waiting request with the best row it could have now."""

    queued: QueuedRequest
    available: AvailableRows
    row: NodeSlots
    cost: float = 0.0
    """Its expected finish there, in seconds."""
    response_ratio: float = 0.0
    """Its response ratio: the time it would have been here by then, against that."""


class Matcher:
    """Finds the next placement."""

    def __init__(
        self,
        placement_state: PlacementState,
        wait_queue: WaitQueue,
        holds: SlotHolds,
        rules: DispatchRules,
        rng: random.Random,
    ) -> None:
        self.evaluations = 0
        self.refresh_cached: Callable[[QueuedRequest], None] | None = None
        self._board = placement_state
        self._line = wait_queue
        self._holds = holds
        self._columns = CostColumns(placement_state)
        self._rng = rng
        self._recalls = 0
        self.set_rules(rules)

    def set_rules(self, rules: DispatchRules) -> None:
        """Go by these from now on. Raises KeyError for a policy that does not exist."""
        self._policy: SelectionPolicy = POLICIES[rules.policy]
        self.by_cost = self._policy is least_finish
        self._patience = [rules.overdue_after[priority] for priority in Priority]
        self._turns = StarvationGuard(rules.overdue_share)

    def choose_row(self, available: AvailableRows, queued: QueuedRequest, now: float) -> NodeSlots:
        """The row of a room that the policy chooses."""
        rows = available.rows
        if len(rows) == 1:
            return rows[0]
        if (
            len(rows) >= LOOP_ROWS
            and available.unfiltered
            and self.by_cost
            and self._columns.available
        ):
            row = self._columns.least_finish(available.candidate_set, queued, now, self._rng)
        else:
            row = self._policy(rows, queued, now, self._rng)
        assert row is not None
        return row

    def next_match(self, now: float) -> Match | None:
        """The one that is next among those who wait and can be placed now."""
        self._holds.clear()
        self._recalls = MOST_CACHE_REFRESHES
        rooms = AvailabilityCache(self._board)
        overdue = self._oldest_overdue(now, rooms)
        ranks: Sequence[PriorityLevel] = self._line.levels
        if overdue is not None and self._turns.overdue_next:
            # Its class's turn: between callers it stays as fair as ever.
            ranks = (ranks[overdue.priority], *ranks)
            if rooms.rows_for(overdue) is None and self._holds.reserve_for(
                overdue, from_all_classes=True
            ):
                rooms.clear()
        for rank in ranks:
            if rank.count:
                found = self._from(rank, now, rooms)
                if found is not None:
                    if overdue is not None:
                        self._turns.placed(to_overdue=found.queued.priority is overdue.priority)
                    return found
        return None

    def _oldest_overdue(self, now: float, rooms: AvailabilityCache) -> QueuedRequest | None:
        """The oldest overdue request that some node has room for, or that is wide."""
        oldest: QueuedRequest | None = None
        for rank, patience in zip(self._line.levels, self._patience, strict=True):
            for lane in rank.fifos.values():
                for ask in lane[:OLDEST_PER_FIFO]:
                    if ask.received_at + patience > now or (
                        oldest is not None and oldest.arrival_key < ask.arrival_key
                    ):
                        break
                    if ask.slots > 1 or rooms.rows_for(ask) is not None:
                        oldest = ask
                        break
        return oldest

    def _from(self, rank: PriorityLevel, now: float, rooms: AvailabilityCache) -> Match | None:
        """The one of a class that is next."""
        shares = rank.counters
        reach = None
        found: list[Match] = []
        for counter, _, account in shares.by_counter:
            if (reach is not None and counter > reach) or len(found) >= MOST_COMPARED:
                break
            self._gather(account, found, rooms, now)
            if found:
                if not self.by_cost:
                    break
                if reach is None:
                    reach = counter + COUNTER_SLACK * shares.mean_charge
        if not found:
            return None
        if self.by_cost and rank.count > len(found) and reach is not None:
            self._gather_warm(found, reach, rooms, now)
        found.sort(key=lambda one: -one.response_ratio)
        for declined, one in enumerate(found):
            if declined >= MOST_DECLINES:
                break
            if not self._holds.defer(one.queued, one.available.candidate_set, one.cost, now):
                return one
        else:
            other = self._from_others(rank, MOST_DECLINES - len(found), rooms, now)
            if other is not None or rank.count <= MOST_DECLINES:
                return other
        # A slot that so many declined is not left idle any longer.
        return found[0]

    def _gather(
        self, account: FairnessAccount, found: list[Match], rooms: AvailabilityCache, now: float
    ) -> None:
        """Add what one caller has in line and could be placed now, its oldest first."""
        if self._line.wide_count and not found:
            self._keep_for_oldest(account, rooms)
        for lane in account.fifos.values():
            left = OLDEST_PER_FIFO if self.by_cost else 1
            for ask in lane:
                room = rooms.rows_for(ask)
                if room is None:
                    if not ask.excluded and not ask.failed:
                        break  # Nobody of this shape has room.
                    continue
                self._consider(ask, room, found, now)
                left = min(left - 1, MOST_EVALUATIONS // len(room.rows))
                if left <= 0:
                    break

    def _gather_warm(
        self, found: list[Match], reach: float, rooms: AvailabilityCache, now: float
    ) -> None:
        """Add those further back that have their prompt cached where there is room."""
        seen = {one.queued for one in found}
        priority = found[0].queued.priority
        for row in found[0].available.rows[:WARM_ROWS_SEARCHED]:
            for ask in list(islice(self._line.warm_for_row(row.index), OLDEST_PER_FIFO)):
                account = ask.account
                if ask.priority is priority and account is not None and account.counter <= reach:
                    room = None if ask in seen else rooms.rows_for(ask)
                    if room is not None:
                        seen.add(ask)
                        self._consider(ask, room, found, now)

    def _keep_for_oldest(self, account: FairnessAccount, rooms: AvailabilityCache) -> None:
        """Keep a node for the caller's oldest request if that is too wide for all as they are."""
        oldest = min((lane[0] for lane in account.fifos.values()), key=lambda ask: ask.arrival_key)
        if oldest.slots > 1 and rooms.rows_for(oldest) is None and self._holds.reserve_for(oldest):
            rooms.clear()

    def _consider(
        self, ask: QueuedRequest, room: AvailableRows, found: list[Match], now: float
    ) -> None:
        self.evaluations += 1
        if (
            self.refresh_cached is not None
            and self._recalls
            and ask.cache_checked_at < self._board.last_release
        ):
            self._recalls -= 1
            ask.cache_checked_at = now
            self.refresh_cached(ask)
            self._line.cached_changed(ask)
        row = self.choose_row(room, ask, now)
        cost = row_cost(row, ask, now)
        found.append(Match(ask, room, row, cost, (now - ask.received_at + cost) / cost))

    def _from_others(
        self, rank: PriorityLevel, most: int, rooms: AvailabilityCache, now: float
    ) -> Match | None:
        """The first that does not do better to wait, where the likely ones all do."""
        for _, _, account in rank.counters.by_counter:
            for lane in account.fifos.values():
                for ask in lane:
                    if most <= 0:
                        return None
                    room = None if ask.deferred_to else rooms.rows_for(ask)
                    if room is not None:
                        row = self.choose_row(room, ask, now)
                        cost = row_cost(row, ask, now)
                        if not self._holds.defer(ask, room.candidate_set, cost, now):
                            return Match(ask, room, row, cost)
                        most -= 1
        return None


DEFERRALS_PER_SLOT = 1
"""Turns of each of its slots that a node may be waited for at most: no node is overrun for the sake
of its cache."""

LEAST_CACHED_TOKENS = 32.0
"""Cached tokens that are worth a wait."""

LONGEST_DEFERRAL = 60.0
"""Seconds that a request is held back at most."""

DEFERRAL_MARGIN, LEAST_DEFERRAL_MARGIN = 2.0, 5.0
"""A hold ends this share of the predicted wait, and so many seconds, after it: by then the
prediction has failed."""


@dataclass(slots=True, eq=False)
class SlotHolds:
    """What is held back, and what is kept, until the next look."""

    placement_state: PlacementState
    deferred: list[QueuedRequest] = field(default_factory=list)

    def clear(self) -> None:
        """Nothing is held or kept: before a new look."""
        for ask in self.deferred:
            if ask.deferred_to is not None:
                ask.deferred_to.deferred.clear()
                ask.deferred_to = None
        self.deferred.clear()
        for row in self.placement_state.reserved_rows:
            row.reserved_for = None
        self.placement_state.reserved_rows.clear()

    def drop(self, queued: QueuedRequest) -> None:
        """It does not wait any more."""
        if queued.deferred_to is not None:
            queued.deferred_to.deferred.remove(queued)
            queued.deferred_to = None
            self.deferred.remove(queued)
        for row in self.placement_state.reserved_rows:
            if row.reserved_for is queued:
                row.reserved_for = None
                self.placement_state.reserved_rows.remove(row)
                break

    def defer(
        self, queued: QueuedRequest, candidate_set: CandidateSet, cost_now: float, now: float
    ) -> bool:
        """Hold `ask` back if a busy node that knows its prompt would finish it sooner.

        `here`: seconds that it is expected to take if it is placed at once.
        """
        if queued.deferred_until and now >= queued.deferred_until:
            return False
        best: NodeSlots | None = None
        least = cost_now
        longest = 0.0
        for index in queued.warmest_rows:
            if index not in candidate_set.row_indexes:
                continue
            row = self.placement_state.rows[index]
            if not self._worth_waiting(row, queued):
                continue
            ahead = sum([other.slots for other in row.deferred])
            if ahead + queued.slots > DEFERRALS_PER_SLOT * (row.capacity - row.foreign):
                continue  # The guard: no node is overrun for the sake of its cache.
            wait = forecast.seconds_until_free(row, max(1, ahead + queued.slots - row.free), now)
            if wait is None or wait > LONGEST_DEFERRAL:
                continue
            there = row_cost_after(row, queued, wait)
            if there < least:
                best, least, longest = row, there, wait
        if best is None:
            return False
        best.deferred.append(queued)
        self.deferred.append(queued)
        queued.deferred_to = best
        if not queued.deferred_until:
            queued.deferred_until = now + longest * (1.0 + DEFERRAL_MARGIN) + LEAST_DEFERRAL_MARGIN
        return True

    @staticmethod
    def _worth_waiting(row: NodeSlots, ask: QueuedRequest) -> bool:
        index = row.index
        return (
            row.free < ask.slots <= row.capacity
            and index not in ask.excluded
            and index not in ask.failed
            and max(ask.cached.get(index, 0.0), ask.pending.get(index, 0.0)) >= LEAST_CACHED_TOKENS
        )

    def reserve_for(self, queued: QueuedRequest, *, from_all_classes: bool = False) -> bool:
        """Keep a node's free slots for a wide request; whether there is one that can hold it.

        `strictly`: from the classes above it too.
        """
        rows = [
            row
            for pool in queued.groups[0]
            for row in pool.rows
            if row.capacity >= queued.slots
            and row.reserved_for is None
            and row.index not in queued.excluded
        ]
        if not rows:
            return False
        row = max(rows, key=lambda row: (row.index not in queued.failed, row.free - row.foreign))
        row.reserved_for, row.reserved_from_all = queued, from_all_classes
        self.placement_state.reserved_rows.append(row)
        return True


@dataclass(slots=True)
class StarvationGuard:
    """Whose turn the next placement is: the strict order's, or an overdue class's."""

    share: float
    _credit: float = 0.0

    @property
    def overdue_next(self) -> bool:
        """Whether the next placement belongs to an overdue class, if there is one."""
        return self._credit + self.share >= 1.0 - 1e-9

    def placed(self, *, to_overdue: bool) -> None:
        """A placement went to the class of the oldest overdue request, or to another."""
        credit = self._credit + self.share
        self._credit = max(0.0, credit - 1.0) if to_overdue else min(1.0, credit)
