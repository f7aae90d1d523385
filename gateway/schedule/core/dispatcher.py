"""The dispatcher: places requests on nodes, or queues them. The gateway and the simulator run it.

It is a pure core: nothing here waits, sleeps or reads a clock; time comes in with each call.

A slot stays idle while a request that may use it waits for three reasons only: the request is
deferred to a busy node that has its prompt cached and is predicted to finish it sooner; a wide
request reserves a node's slots until there are enough of them; `batch` leaves its reserve free.
Where the slots of a node share one pool of tokens, a request also waits for room in it.

Requests without a slot have a wait queue of their own, in the same order: neither queue waits for
the other.

Which waiting request goes next, and to which row (`Matcher`):
Classes go in strict order, except for the share of placements that overdue requests get
(`StarvationGuard`). Within a class the least served caller goes (`wait_queue.py`). Of its requests,
and of those of callers within a small slack of it, the one with the highest response ratio goes:
the time from its arrival to its expected end, divided by the time it takes on the node that has
room. So requests that fit the node, and short ones, go before the rest, and those that have waited
long before both (Brinch Hansen 1971). A request may decline a slot because a busy node that has its
prompt cached would finish it sooner (`SlotHolds`).

However many requests wait, a bounded number is compared for one placement.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from gateway.config.scheduling import DEFAULT_PATIENCE, DEFAULT_SLOTLESS
from gateway.config.settings import Settings
from gateway.schedule.core.requests import (
    MOST_TOKENS_PER_REQUEST,
    AvailableRows,
    CandidateSet,
    Deferral,
    FairnessAccount,
    NodeSlots,
    PlacementState,
    QueuedRequest,
    clamp,
)
from gateway.schedule.core.selection import (
    POLICIES,
    AvailabilityCache,
    LeastFinish,
    SelectionPolicy,
    available_rows,
    compare,
    explore,
    row_cost,
    row_cost_after,
)
from gateway.schedule.core.wait_queue import (
    COUNTER_SLACK,
    PriorityLevel,
    VirtualTokenCounters,
    WaitForecast,
    WaitQueue,
    by_age,
)
from gateway.terms import Priority

OLDEST_PER_FIFO = 24  # requests of one FIFO that are compared, from its oldest on
# Requests of one FIFO that are passed over, since no shared pool has room for their tokens.
MOST_PASSED_OVER = 256
# Nodes whose pools are reserved at a time for requests that need most of one: where many do, pools
# come free as fast as they are needed, and each reservation looks at all nodes.
MOST_POOLS_HELD = 2
MOST_COMPARED = 48
# Rows with room whose warm requests are looked for further back in the queue.
WARM_ROWS_SEARCHED = 4
MOST_EVALUATIONS = 96  # costs that are computed to compare the requests of one FIFO, about
# Shared pools that are searched for room to compare requests for one placement, about: of those
# with a free slot each request looks at all.
MOST_POOLS_SEARCHED = 8192
# Requests that may decline a slot to wait for a warm one; then the first of them takes it.
MOST_DECLINES = 8
# Requests whose `cached`, which changes while they wait, is looked up anew for one placement.
MOST_CACHE_REFRESHES = 4


@dataclass(frozen=True, slots=True)
class DispatchRules:
    """The settings that the dispatcher goes by."""

    policy: str = "least_finish"  # a name in `selection.POLICIES`
    overdue_after: Mapping[Priority, float] = field(
        default_factory=lambda: {one: DEFAULT_PATIENCE[one.label] for one in Priority}
    )
    """Seconds after which a waiting request of a class is overdue."""
    overdue_share: float = 0.1
    """Share of the placements that overdue requests get while there are any."""
    batch_reserve: float = 0.0  # share of the slots of alike nodes that `batch` leaves free
    slotless_limit: int = DEFAULT_SLOTLESS  # requests without a slot that a node runs at once


@dataclass(slots=True)
class Match:
    """A waiting request with the best row that it could have now."""

    queued: QueuedRequest
    available: AvailableRows
    row: NodeSlots
    cost: float = 0.0  # its expected cost there, in seconds
    response_ratio: float = 0.0
    """The time from its arrival to its expected end, divided by its cost."""


class Matcher:
    """Finds the next placement among the requests of one wait queue."""

    def __init__(
        self,
        placement_state: PlacementState,
        wait_queue: WaitQueue,
        holds: SlotHolds,
        rng: random.Random,
    ) -> None:
        self.evaluations = 0
        self._refresh_cached: Callable[[QueuedRequest], None] | None = None
        self._refreshes_left = 0
        self._state = placement_state
        self._wait_queue = wait_queue
        self._holds = holds
        self._rng = rng
        self._now, self._available = 0.0, AvailabilityCache(placement_state)
        """Of the look that goes on."""

    def set_rules(self, rules: DispatchRules, policy: SelectionPolicy) -> None:
        """Go by these from now on; `policy` is the one that `rules` names."""
        self._policy = policy
        self._overdue_after = [rules.overdue_after[priority] for priority in Priority]
        self._starvation_guard = StarvationGuard(rules.overdue_share)

    def set_cache_refresh(self, refresh: Callable[[QueuedRequest], None]) -> None:
        """Look up the `cached` of waiting requests with this."""
        self._refresh_cached = refresh

    def next_match(self, now: float) -> Match | None:
        """The request that goes next, of those that can be placed now; None: there is none."""
        self._holds.clear()
        self._refreshes_left = MOST_CACHE_REFRESHES
        self._now, self._available = now, AvailabilityCache(self._state)
        available, overdue = self._available, self._oldest_overdue()
        levels: Sequence[PriorityLevel] = self._wait_queue.levels
        if overdue is not None and self._starvation_guard.overdue_next:
            # Its class goes first; between that class's callers it stays as fair as ever.
            levels = (levels[overdue.priority], *levels)
            rows = available.rows_for(overdue)
            if rows is None:
                if self._holds.reserve_for(overdue, from_all_classes=True):
                    available.clear()
            elif overdue.was_reserved_for:
                self._starvation_guard.placed(to_overdue=True)
                return self._match(overdue, rows)
        for level in levels:
            if level.count:
                match = self._next_of_level(level)
                if match is not None:
                    if overdue is not None:
                        self._starvation_guard.placed(
                            to_overdue=match.queued.priority is overdue.priority
                        )
                    return match
        return None

    def _oldest_overdue(self) -> QueuedRequest | None:
        """The oldest overdue request that is wide, or for which some node has the slots."""
        now, available = self._now, self._available
        oldest: QueuedRequest | None = None
        for level, overdue_after in zip(self._wait_queue.levels, self._overdue_after, strict=True):
            for fifo in level.fifos.values():
                for queued in fifo[:OLDEST_PER_FIFO]:
                    if queued.received_at + overdue_after > now or (
                        oldest is not None and oldest.arrival_key < queued.arrival_key
                    ):
                        break
                    if (
                        queued.is_wide
                        or available.rows_for(queued) is not None
                        or available.lacks_tokens(queued)
                    ):
                        oldest = queued
                        break
        return oldest

    def _next_of_level(self, level: PriorityLevel) -> Match | None:
        counters = level.counters
        by_cost = self._policy.by_cost
        limit = None
        """The highest counter of a caller whose requests are compared."""
        matches: list[Match] = []
        most = self._most_compared()
        for counter, _, account in counters.by_counter:
            if (limit is not None and counter > limit) or len(matches) >= most:
                break
            self._add_matches(account, matches, most)
            if matches:
                if not by_cost:
                    break
                if limit is None:
                    limit = counter + COUNTER_SLACK * counters.mean_charge
        if not matches:
            return None
        if by_cost and level.count > len(matches) and limit is not None:
            self._add_warm_matches(matches, limit)
        matches.sort(key=lambda one: -one.response_ratio)
        for declined, one in enumerate(matches):
            if declined >= MOST_DECLINES:
                break
            if not self._holds.defer(one.queued, one.available.candidate_set, one.cost, self._now):
                return one
        else:
            other = self._first_that_accepts(level, MOST_DECLINES - len(matches))
            if other is not None or level.count <= MOST_DECLINES:
                return other
        # So many have declined the slot: it must not stay idle.
        return matches[0]

    def _most_compared(self) -> int:
        """Requests that are compared for one placement; fewer where each looks at many pools."""
        if not self._state.pools:
            return MOST_COMPARED
        return min(MOST_COMPARED, MOST_POOLS_SEARCHED // max(1, len(self._state.free_rows)) or 1)

    def _add_matches(self, account: FairnessAccount, matches: list[Match], most: int) -> None:
        """Add one caller's requests that can be placed now: `most` of each FIFO, the oldest."""
        available = self._available
        if self._wait_queue.wide_count and not matches:
            oldest = min((fifo[0] for fifo in account.fifos.values()), key=by_age)
            if oldest.is_wide:
                rows = available.rows_for(oldest)
                if rows is None:
                    held = len(self._state.reserved_rows)
                    if (oldest.slots > 1 or held < MOST_POOLS_HELD) and self._holds.reserve_for(
                        oldest
                    ):
                        available.clear()
                elif oldest.fills_pool or oldest.was_reserved_for:
                    matches.append(self._match(oldest, rows, goes_first=True))
                    return
        for fifo in account.fifos.values():
            left = min(most, OLDEST_PER_FIFO) if self._policy.by_cost else 1
            too_large = 0
            for queued in fifo:
                rows = available.rows_for(queued)
                if rows is None:
                    if not queued.excluded and not queued.failed:
                        too_large += 1
                        if too_large >= MOST_PASSED_OVER or not available.lacks_tokens(queued):
                            break  # No row has room for these requirements.
                    continue
                matches.append(self._match(queued, rows))
                left = min(left - 1, MOST_EVALUATIONS // len(rows.rows))
                if left <= 0:
                    break

    def _add_warm_matches(self, matches: list[Match], limit: float) -> None:
        """Add requests further back that have their prompt cached on a row with room."""
        seen = {one.queued for one in matches}
        priority = matches[0].queued.priority
        for row in matches[0].available.rows[:WARM_ROWS_SEARCHED]:
            for queued in list(islice(self._wait_queue.warm_for_row(row.index), OLDEST_PER_FIFO)):
                account = queued.account
                if queued.priority is priority and account is not None and account.counter <= limit:
                    rows = None if queued in seen else self._available.rows_for(queued)
                    if rows is not None:
                        seen.add(queued)
                        matches.append(self._match(queued, rows))

    def _match(
        self, queued: QueuedRequest, available: AvailableRows, *, goes_first: bool = False
    ) -> Match:
        """A request with the best of these rows; `goes_first`: before all that it competes with."""
        now = self._now
        self.evaluations += 1
        if (
            self._refresh_cached is not None
            and self._refreshes_left
            and queued.cache_checked_at < self._state.last_release
        ):
            self._refreshes_left -= 1
            queued.looked_up(now)
            self._refresh_cached(queued)
            self._wait_queue.cached_changed(queued)
        row = self._choose_row(available, queued)
        cost = row_cost(row, queued, now)
        ratio = math.inf if goes_first else (now - queued.received_at + cost) / cost
        return Match(queued, available, row, cost, ratio)

    def _first_that_accepts(self, level: PriorityLevel, most: int) -> Match | None:
        """Of up to `most` further requests, the first that would not rather wait."""
        available, now = self._available, self._now
        for _, _, account in level.counters.by_counter:
            for fifo in account.fifos.values():
                for queued in fifo:
                    if most <= 0:
                        return None
                    rows = None if queued.deferred_to else available.rows_for(queued)
                    if rows is not None:
                        row = self._choose_row(rows, queued)
                        cost = row_cost(row, queued, now)
                        if not self._holds.defer(queued, rows.candidate_set, cost, now):
                            return Match(queued, rows, row, cost)
                        most -= 1
        return None

    def _choose_row(self, available: AvailableRows, queued: QueuedRequest) -> NodeSlots:
        rows = available.rows
        if len(rows) == 1:
            return rows[0]
        return self._policy.choose(available, queued, self._now, self._rng)


# Requests that may be deferred to a node, for each of its slots: no node is overrun for the sake of
# its cache.
DEFERRALS_PER_SLOT = 1
LEAST_CACHED_TOKENS = 32.0
LONGEST_DEFERRAL = 60.0  # seconds that a request is deferred at most
# A deferral ends this share of the predicted wait, and so many seconds, after it: by then the
# prediction has failed.
DEFERRAL_MARGIN, LEAST_DEFERRAL_MARGIN = 2.0, 5.0


@dataclass(slots=True, eq=False)
class SlotHolds:
    """Deferrals to busy nodes, and reservations for wide requests, until the next look."""

    placement_state: PlacementState
    deferred: list[QueuedRequest] = field(default_factory=list)

    def clear(self) -> None:
        """End all deferrals and reservations, before a new look."""
        for queued in self.deferred:
            queued.undefer()
        self.deferred.clear()
        for row in list(self.placement_state.reserved_rows):
            row.unreserve()

    def drop(self, queued: QueuedRequest) -> None:
        """End those of a request that does not wait any more."""
        if queued.deferred_to is not None:
            queued.undefer()
            self.deferred.remove(queued)
        for row in self.placement_state.reserved_rows:
            if row.reserved_for is queued:
                row.unreserve()
                break

    def defer(
        self, queued: QueuedRequest, candidate_set: CandidateSet, cost_now: float, now: float
    ) -> bool:
        """Defer a request if a busy node that has its prompt cached would finish it sooner.

        `cost_now`: the seconds it takes if it is placed at once. False: it is not deferred.
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
            if not _is_worth_waiting(row, queued):
                continue
            ahead = sum([other.slots for other in row.deferred])
            if ahead + queued.slots > DEFERRALS_PER_SLOT * (row.capacity - row.foreign):
                continue
            wait = row.seconds_until_free(max(1, ahead + queued.slots - row.free), now)
            if wait is None or wait > LONGEST_DEFERRAL:
                continue
            cost = row_cost_after(row, queued, wait)
            if cost < least:
                best, least, longest = row, cost, wait
        if best is None:
            return False
        cached = max(queued.cached.get(best.index, 0.0), queued.pending.get(best.index, 0.0))
        queued.defer_to(
            best,
            now + longest * (1.0 + DEFERRAL_MARGIN) + LEAST_DEFERRAL_MARGIN,
            Deferral(best.name, longest, least, cost_now, cached),
        )
        self.deferred.append(queued)
        return True

    def reserve_for(self, queued: QueuedRequest, *, from_all_classes: bool = False) -> bool:
        """Reserve a node's free slots for a wide request; False: no node is large enough.

        `from_all_classes`: from higher classes too.
        """
        needed = queued.tokens_needed
        rows = [
            row
            for candidates in queued.groups[0]
            for row in candidates.rows
            if row.capacity >= queued.slots
            and row.reserved_for is None
            and row.index not in queued.excluded
            and not (row.pool and row.is_held_up_by_others(needed))
        ]
        if queued.keeps_batch_reserve:
            rows = [row for row in rows if not row.kept_from_batch] or rows
        if not rows:
            return False
        row = max(
            rows,
            key=lambda row: (
                row.index not in queued.failed,
                -row.tokens_short(needed),
                row.free - row.foreign,
            ),
        )
        row.reserve(queued, from_all_classes=from_all_classes)
        queued.note_reserved_for()
        return True


def _is_worth_waiting(row: NodeSlots, queued: QueuedRequest) -> bool:
    index = row.index
    return (
        queued.slots <= row.capacity
        and (row.free < queued.slots or row.tokens_short(queued.tokens_needed) > 0.0)
        and index not in queued.excluded
        and index not in queued.failed
        and not (row.kept_from_batch and queued.keeps_batch_reserve)
        and max(queued.cached.get(index, 0.0), queued.pending.get(index, 0.0))
        >= LEAST_CACHED_TOKENS
    )


@dataclass(slots=True)
class StarvationGuard:
    """Whether the next placement goes by the strict order or to an overdue class."""

    share: float  # share of the placements that overdue classes get
    _credit: float = 0.0

    @property
    def overdue_next(self) -> bool:
        """Whether the next placement belongs to an overdue class, if there is one."""
        return self._credit + self.share >= 1.0 - 1e-9

    def placed(self, *, to_overdue: bool) -> None:
        """A placement went to the class of the oldest overdue request, or to another."""
        credit = self._credit + self.share
        self._credit = max(0.0, credit - 1.0) if to_overdue else min(1.0, credit)


class Dispatcher:
    """Places requests on the rows of a placement state; those that find no room wait."""

    def __init__(
        self,
        placement_state: PlacementState,
        rules: DispatchRules,
        rng: random.Random,
        *,
        keeps_comparisons: bool = False,
    ) -> None:
        """`keeps_comparisons`: each placement has what it was compared with, to explain it."""
        self.placement_state = placement_state
        self._rng = rng
        self._keeps_comparisons = keeps_comparisons
        self._compared_by: LeastFinish | None = None
        self._wait_queue, self._slotless_queue = WaitQueue(), WaitQueue()
        self._holds = SlotHolds(placement_state)
        self._matcher = Matcher(placement_state, self._wait_queue, self._holds, rng)
        self._slotless_matcher = Matcher(placement_state, self._slotless_queue, self._holds, rng)
        self._forecast = WaitForecast(placement_state, self._wait_queue)
        self._slotless_forecast = WaitForecast(placement_state, self._slotless_queue)
        self.wake_at = math.inf
        """When `match` is to be called though nothing has changed; infinity: no need to."""
        self.waiting = 0
        self.may_place: Callable[[], bool] | None = None
        """Asked before anything is placed; while it says no, all wait. None: always."""
        self.set_rules(rules)

    def set_rules(self, rules: DispatchRules) -> None:
        """Go by these from now on. Raises KeyError for a policy that does not exist."""
        self._policy = POLICIES[rules.policy](self.placement_state)
        self._choose = self._policy.choose
        if self._keeps_comparisons and isinstance(self._policy, LeastFinish):
            self._compared_by = self._policy
        self.rules = rules
        self._matcher.set_rules(rules, self._policy)
        self._slotless_matcher.set_rules(rules, self._policy)
        self.placement_state.set_limits(rules.batch_reserve, rules.slotless_limit)

    def set_cache_refresh(self, refresh: Callable[[QueuedRequest], None]) -> None:
        """Call `refresh` to look up anew what is `cached` and `pending` of a waiting request."""
        self._matcher.set_cache_refresh(refresh)

    def place_while(self, may_place: Callable[[], bool]) -> None:
        """Place requests only while this says so."""
        self.may_place = may_place
        self.placement_state.set_slots_freed(freed=True)

    # Placing.

    def place_or_queue(self, queued: QueuedRequest, now: float) -> QueuedRequest | None:
        """Place a request at once, or queue it: None."""
        placement = self.place(queued, now, keep_deferral=True)
        if placement is None:
            self._enqueue(queued, now)
        return placement

    def place(
        self, queued: QueuedRequest, now: float, *, keep_deferral: bool = False
    ) -> QueuedRequest | None:
        """Place a request at once; None: it would have to wait, and is not queued.

        Where slots have come free that `match` has not given out yet, waiting requests go first.
        `keep_deferral`: let a request that would rather wait for a busy node remain deferred to it.
        """
        queue = self._wait_queue if queued.slots else self._slotless_queue
        if queue.count and self.placement_state.slots_freed:
            return None
        if self.may_place is not None and not self.may_place():
            return None
        available = available_rows(self.placement_state, queued)
        if available is None:
            return None
        rows = available.rows
        row = rows[0] if len(rows) == 1 else self._choose(available, queued, now, self._rng)
        penalties = queued.penalties
        if self.placement_state.exploring and self._policy.by_cost:
            row = explore(available, queued, row, now, self._rng)
        if (queued.cached or queued.pending) and self._policy.by_cost:
            queued.find_warmest_rows()
            cost = row_cost(row, queued, now)
            if self._holds.defer(queued, available.candidate_set, cost, now):
                if not keep_deferral:
                    self._holds.drop(queued)
                queued.set_penalties(penalties)
                return None
        counters = queue.levels[queued.priority].counters
        account = counters.account(queued.fairness_key)
        return self._start(queued, counters, account, row, available, now)

    def match(self, now: float, most: float = math.inf) -> list[QueuedRequest]:
        """Give free slots to waiting requests; to be called when capacity has changed.

        After `most` of those with a slot it stops: `slots_freed` says that others may follow.
        """
        placements: list[QueuedRequest] = []
        if self.may_place is not None and not self.may_place():
            return placements
        self.placement_state.set_slots_freed(freed=False)
        self._holds.clear()
        while (
            self._slotless_queue.count
            and (match := self._slotless_matcher.next_match(now)) is not None
        ):
            placements.append(self._start_match(match, now))
        while self._wait_queue.count and self.placement_state.free_rows:
            match = self._matcher.next_match(now)
            if match is None:
                break
            placements.append(self._start_match(match, now))
            if (most := most - 1) <= 0:
                self.placement_state.set_slots_freed(freed=True)
                break
        deferred = self._holds.deferred
        self.wake_at = min([queued.deferred_until for queued in deferred], default=math.inf)
        return placements

    def withdraw(self, queued: QueuedRequest) -> bool:
        """Take a request out of the queue; whether it was in it. Then call `match`."""
        self._holds.drop(queued)
        if queued.account is None:
            return False
        self._queue_of(queued).remove(queued)
        self.waiting -= 1
        return True

    def pool_tokens_changed(self, queued: QueuedRequest) -> None:
        """The `pool_tokens` of a request that waits were estimated anew."""
        if queued.slots:
            self._wait_queue.set_fills_pool(queued, fills=self._fills_pool(queued))

    def finished(
        self, placement: QueuedRequest, now: float, read_tokens: float, written_tokens: float
    ) -> None:
        """The placement has ended: free its slots, and charge its caller. Then call `match`."""
        placement.row.end(placement, now)
        self.settled(placement, read_tokens, written_tokens)

    def settled(self, placement: QueuedRequest, read_tokens: float, written_tokens: float) -> None:
        """Charge its caller for the tokens that it took instead of those expected.

        `read_tokens`: those of its prompt that were not cached.
        """
        used = read_tokens
        if not 0.0 <= used <= MOST_TOKENS_PER_REQUEST:
            used = clamp(used, 0.0, MOST_TOKENS_PER_REQUEST, 0.0)
        if written_tokens:
            if not 0.0 <= written_tokens <= MOST_TOKENS_PER_REQUEST:
                written_tokens = clamp(written_tokens, 0.0, MOST_TOKENS_PER_REQUEST, 0.0)
            used += written_tokens * placement.token_weight
        account = placement.take_payer()
        if account is None:
            return
        correction = used - placement.charge
        if account.fifos:
            queue = self._queue_of(placement)
            queue.levels[placement.priority].counters.settled(account, correction)
        else:
            account.settled(correction)

    def cancelled(self, placement: QueuedRequest, now: float) -> None:
        """The placement was never used: it costs its caller nothing."""
        self.finished(placement, now, 0.0, 0.0)

    # Predictions and counts.

    def depths(self) -> dict[Priority, int]:
        """How many requests of each class wait."""
        levels = zip(Priority, self._wait_queue.levels, self._slotless_queue.levels, strict=True)
        return {priority: level.count + slotless.count for priority, level, slotless in levels}

    def count_ahead(self, queued: QueuedRequest) -> int:
        """About how many go before a request, which waits or arrives now."""
        forecast = self._forecast if queued.slots else self._slotless_forecast
        return forecast.count_ahead(queued)

    def predicted_wait(self, queued: QueuedRequest, now: float) -> float:
        """Seconds that a request would wait if it arrived now."""
        if available_rows(self.placement_state, queued):
            return 0.0
        return self._forecast.predicted_wait(queued, now)

    def predicted_waits(self, now: float) -> Iterator[tuple[QueuedRequest, float]]:
        """Waiting requests in about the order in which they will go, and how long each will wait.

        Seconds; infinity for requests without a slot, of which it is not known. One pass, during
        which the queue must not change.
        """
        yield from self._forecast.predicted_waits(now)
        for queued in self._slotless_forecast.likely_order():
            yield queued, math.inf

    # Inside.

    def _enqueue(self, queued: QueuedRequest, now: float) -> None:
        if not self.waiting:
            # `place` has just looked at every free slot.
            self.placement_state.set_slots_freed(freed=False)
        if queued.slots and self.placement_state.pools:
            queued.set_fills_pool(fills=self._fills_pool(queued))
        self.waiting += 1
        self._queue_of(queued).add(queued, now)
        if queued.deferred_to is not None:
            self.wake_at = min(self.wake_at, queued.deferred_until)

    def _start_match(self, match: Match, now: float) -> QueuedRequest:
        queued, account = match.queued, match.queued.account
        assert account is not None
        queue = self._queue_of(queued)
        queue.remove(queued)
        self.waiting -= 1
        self._holds.drop(queued)
        counters = queue.levels[queued.priority].counters
        return self._start(queued, counters, account, match.row, match.available, now)

    def _start(
        self,
        queued: QueuedRequest,
        counters: VirtualTokenCounters,
        account: FairnessAccount,
        row: NodeSlots,
        available: AvailableRows,
        now: float,
    ) -> QueuedRequest:
        state, forecast = self.placement_state, self._forecast
        number = state.placement_count + 1
        if number >= forecast.refresh_at or state.speed_changes:
            forecast.refresh_if_due(number)
        comparison, policy = None, self._compared_by
        if policy is not None:
            comparison = compare(available, queued, row, policy, now)
        row.start(queued, now)
        charge = queued.placed(available.group, comparison, account, forecast.token_weight)
        counters.started(account, charge)
        return queued

    def _queue_of(self, queued: QueuedRequest) -> WaitQueue:
        return self._wait_queue if queued.slots else self._slotless_queue

    def _fills_pool(self, queued: QueuedRequest) -> bool:
        """Whether it needs more than half of a shared pool that it may be given room in."""
        needed = queued.tokens_needed
        return any(needed > one.pools()[0] / 2 for one in queued.groups[0])


def dispatch_rules(settings: Settings) -> DispatchRules:
    """The dispatcher's part of the settings. Every word of `policy` means `least_finish`."""
    classes = settings.classes
    overdue_after = {}
    for priority in Priority:
        rule = classes.get(priority.label)  # type: ignore[call-overload]
        own = None if rule is None else rule.patience
        overdue_after[priority] = DEFAULT_PATIENCE[priority.label] if own is None else own
    batch = classes.get("batch")
    reserve = None if batch is None else batch.reserve_slots
    return DispatchRules(
        overdue_after=overdue_after,
        batch_reserve=reserve or 0.0,
        slotless_limit=settings.queue.slotless,
    )
