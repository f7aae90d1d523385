"""The dispatcher: places requests on nodes, or queues them. The gateway and the simulator run it.

It is a pure core: nothing here waits, sleeps or reads a clock; time comes in with each call.

A slot stays idle while a request that may use it waits for three reasons only: the request is
deferred to a busy node that has its prompt cached and is predicted to finish it sooner; a wide
request reserves a node's slots until there are enough of them; `batch` leaves its reserve free.
Where the slots of a node share one pool of tokens, a request also waits for room in it.

Requests without a slot have a wait queue of their own, in the same order: neither queue waits for
the other.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from gateway.config.scheduling import DEFAULT_PATIENCE
from gateway.config.settings import Settings
from gateway.request import Priority
from gateway.scheduling.cost import row_cost
from gateway.scheduling.forecast import WaitForecast
from gateway.scheduling.matching import DispatchRules, Match, Matcher, SlotHolds
from gateway.scheduling.node_slots import (
    MOST_TOKENS_PER_REQUEST,
    AvailableRows,
    FairnessAccount,
    NodeSlots,
    Placement,
    QueuedRequest,
    clamp,
)
from gateway.scheduling.placement_state import PlacementState
from gateway.scheduling.selection import POLICIES, available_rows, compare, explore
from gateway.scheduling.wait_queue import VirtualTokenCounters, WaitQueue


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
        self._wait_queue, self._slotless_queue = WaitQueue(), WaitQueue()
        self._holds = SlotHolds(placement_state)
        self._matcher = Matcher(placement_state, self._wait_queue, self._holds, rng)
        self._slotless_matcher = Matcher(placement_state, self._slotless_queue, self._holds, rng)
        self._forecast = WaitForecast(placement_state, self._wait_queue)
        self._slotless_forecast = WaitForecast(placement_state, self._slotless_queue)
        self._wake_at = math.inf
        self.waiting = 0
        """How many requests wait."""
        self.set_rules(rules)

    def set_rules(self, rules: DispatchRules) -> None:
        """Go by these from now on. Raises KeyError for a policy that does not exist."""
        self._policy = POLICIES[rules.policy](self.placement_state)
        self._choose = self._policy.choose
        self.rules = rules
        self._matcher.set_rules(rules, self._policy)
        self._slotless_matcher.set_rules(rules, self._policy)
        self.placement_state.set_limits(rules.batch_reserve, rules.slotless_limit)

    def set_cache_refresh(self, refresh: Callable[[QueuedRequest], None]) -> None:
        """Call `refresh` to look up anew what is `cached` and `pending` of a waiting request."""
        self._matcher.set_cache_refresh(refresh)

    # Placing.

    def place_or_queue(self, queued: QueuedRequest, now: float) -> Placement | None:
        """Place a request at once, or queue it: None."""
        placement = self.place(queued, now, keep_deferral=True)
        if placement is None:
            self._enqueue(queued, now)
        return placement

    def place(
        self, queued: QueuedRequest, now: float, *, keep_deferral: bool = False
    ) -> Placement | None:
        """Place a request at once; None: it would have to wait, and is not queued.

        Where slots have come free that `match` has not given out yet, waiting requests go first.
        `keep_deferral`: let a request that would rather wait for a busy node remain deferred to it.
        """
        queue = self._wait_queue if queued.slots else self._slotless_queue
        if queue.count and self.placement_state.slots_freed:
            return None
        available = available_rows(self.placement_state, queued)
        if available is None:
            return None
        rows = available.rows
        row = rows[0] if len(rows) == 1 else self._choose(available, queued, now, self._rng)
        penalties = queued.penalties
        if self.placement_state.exploring and self._policy.by_cost:
            row = explore(self.placement_state, available, queued, row, now, self._rng)
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

    def match(self, now: float, most: float = math.inf) -> list[Placement]:
        """Give free slots to waiting requests; to be called when capacity has changed.

        After `most` of those with a slot it stops: `slots_freed` says that others may follow.
        """
        placements: list[Placement] = []
        self.placement_state.clear_slots_freed()
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
                self.placement_state.note_slots_freed()
                break
        deferred = self._holds.deferred
        self._wake_at = min([queued.deferred_until for queued in deferred], default=math.inf)
        return placements

    def wake_at(self) -> float | None:
        """When `match` is to be called though nothing has changed; None: no need to."""
        return self._wake_at if self._wake_at < math.inf else None

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

    def prefill_done(self, placement: Placement, now: float) -> None:
        """The first token came: the prompt has been read. Sharpens the predictions."""
        if not placement.released:
            self.placement_state.prefill_done(placement, now)

    def finished(
        self,
        placement: Placement,
        now: float,
        prompt_tokens: float,
        cached_tokens: float,
        completion_tokens: float,
    ) -> None:
        """Both `released` and `settled`."""
        self.released(placement, now)
        self.settled(placement, prompt_tokens, cached_tokens, completion_tokens)

    def released(self, placement: Placement, now: float) -> None:
        """The slots of `placement` are free again. Then call `match`."""
        if not placement.released:
            self.placement_state.end(placement, now)

    def settled(
        self,
        placement: Placement,
        prompt_tokens: float,
        cached_tokens: float,
        completion_tokens: float,
    ) -> None:
        """Charge its caller for the tokens that it took instead of those expected."""
        used = prompt_tokens - cached_tokens
        if not 0.0 <= used <= MOST_TOKENS_PER_REQUEST:
            used = clamp(used, 0.0, MOST_TOKENS_PER_REQUEST, 0.0)
        if completion_tokens:
            if not 0.0 <= completion_tokens <= MOST_TOKENS_PER_REQUEST:
                completion_tokens = clamp(completion_tokens, 0.0, MOST_TOKENS_PER_REQUEST, 0.0)
            used += completion_tokens * placement.token_weight
        self._settle(placement, used)

    def cancelled(self, placement: Placement, now: float) -> None:
        """The placement was never used: it costs its caller nothing."""
        self.released(placement, now)
        self._settle(placement, 0.0)

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

    @property
    def evaluations(self) -> int:
        """Waiting requests that were compared so far: a bounded number for each placement."""
        return self._matcher.evaluations + self._slotless_matcher.evaluations

    # Inside.

    def _enqueue(self, queued: QueuedRequest, now: float) -> None:
        if not self.waiting:
            self.placement_state.clear_slots_freed()  # `place` has just looked at every free slot.
        queued.looked_up(now)
        if queued.slots:
            queued.expect_work(*self._forecast.work_tokens(queued))
            if self.placement_state.pools:
                queued.set_fills_pool(fills=self._fills_pool(queued))
        self.waiting += 1
        queue = self._queue_of(queued)
        queue.add(queued, queue.levels[queued.priority].counters.account(queued.fairness_key))
        if queued.deferred_to is not None:
            self._wake_at = min(self._wake_at, queued.deferred_until)

    def _start_match(self, match: Match, now: float) -> Placement:
        """Place a request that waits."""
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
    ) -> Placement:
        state, forecast = self.placement_state, self._forecast
        number = state.placement_count + 1
        if number >= forecast.refresh_at or state.speed_changes:
            forecast.refresh_if_due(number)
        comparison = None
        if self._keeps_comparisons:
            comparison = compare(available, queued, row, self._policy, now)
        placement = state.start(
            queued, row, available.group, now, account, forecast.token_weight, comparison
        )
        counters.started(account, placement.charge)
        return placement

    def _settle(self, placement: Placement, used: float) -> None:
        account = placement.take_account()
        if account is not None:
            queued = placement.queued
            queue = self._wait_queue if queued.slots else self._slotless_queue
            queue.levels[queued.priority].counters.settled(account, used - placement.charge)

    def _queue_of(self, queued: QueuedRequest) -> WaitQueue:
        return self._wait_queue if queued.slots else self._slotless_queue

    def _fills_pool(self, queued: QueuedRequest) -> bool:
        """Whether it needs more than half of a shared pool that it may be given room in."""
        needed, version = queued.tokens_needed, self.placement_state.pools_version
        return any(needed > one.pools(version)[0] / 2 for one in queued.groups[0])


def dispatch_rules(settings: Settings) -> DispatchRules:
    """The dispatcher's part of the settings."""
    classes = settings.classes
    overdue_after = {}
    for priority in Priority:
        rule = classes.get(priority.label)  # type: ignore[call-overload]
        own = None if rule is None else rule.patience
        overdue_after[priority] = DEFAULT_PATIENCE[priority.label] if own is None else own
    batch = classes.get("batch")
    reserve = None if batch is None else batch.reserve_slots
    return DispatchRules(
        settings.policy,
        overdue_after,
        batch_reserve=reserve or 0.0,
        slotless_limit=settings.queue.slotless,
    )
