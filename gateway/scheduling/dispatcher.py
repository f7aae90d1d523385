"""Who goes where, and when: the core that the gateway and the simulator both run.

Nothing here waits, sleeps or looks at a clock: time comes in with each call.

A slot never idles while a request that may use it waits, but for three reasons: a request is held
back for a node that has its prompt in its cache and is predicted to finish it sooner, though the
wait; a wide request keeps a node's slots until there are enough of them; `batch` leaves a reserve.

Requests that need no slot stand in a line of their own, in the same order: neither waits for what
the other waits for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from gateway.config.queue import DEFAULT_PATIENCE
from gateway.config.settings import Settings
from gateway.request import Priority
from gateway.scheduling import forecast
from gateway.scheduling.cost import LEAST_UNCACHED_TOKENS, row_cost
from gateway.scheduling.forecast import WaitForecast
from gateway.scheduling.matching import DispatchRules, Match, Matcher, SlotHolds
from gateway.scheduling.placement_state import (
    MOST_TOKENS_PER_REQUEST,
    FairnessAccount,
    NodeSlots,
    Placement,
    PlacementState,
    QueuedRequest,
    clamp,
)
from gateway.scheduling.selection import AvailableRows, available_rows
from gateway.scheduling.wait_queue import WaitQueue, warmest_rows

__all__ = ["DispatchRules", "Dispatcher", "Placement"]


class Dispatcher:
    """Places requests on the rows of a board, and keeps those in line that find no room."""

    def __init__(
        self, placement_state: PlacementState, rules: DispatchRules, rng: random.Random
    ) -> None:
        self.placement_state = placement_state
        self._line, self._slotless = WaitQueue(), WaitQueue()
        self._holds = SlotHolds(placement_state)
        self._matcher = Matcher(placement_state, self._line, self._holds, rules, rng)
        self._slotless_matcher = Matcher(placement_state, self._slotless, self._holds, rules, rng)
        self._outlook, self._slotless_outlook = (
            WaitForecast(placement_state, self._line),
            WaitForecast(placement_state, self._slotless),
        )
        self._waking = math.inf
        self.set_rules(rules)

    def set_rules(self, rules: DispatchRules) -> None:
        """Go by these from now on. Raises KeyError for a policy that does not exist."""
        self._matcher.set_rules(rules)
        self._slotless_matcher.set_rules(rules)
        self.rules = rules
        self.placement_state.slotless_limit = rules.slotless_limit
        self.placement_state.set_batch_reserve(rules.batch_reserve)

    @property
    def evaluations(self) -> int:
        """Requests that were compared so far, to see that it stays bounded."""
        return self._matcher.evaluations + self._slotless_matcher.evaluations

    @property
    def refresh_cached(self) -> Callable[[QueuedRequest], None] | None:
        """Looks up again what is `cached` and `coming` of a request that waits, and sets both."""
        return self._matcher.refresh_cached

    @refresh_cached.setter
    def refresh_cached(self, recall: Callable[[QueuedRequest], None] | None) -> None:
        self._matcher.refresh_cached = recall

    # What happens.

    def place_or_queue(self, queued: QueuedRequest, now: float) -> Placement | None:
        """Place `ask` at once, or put it in line: None."""
        placement = self._placed(queued, now)
        if placement is None:
            self._enter(queued, now)
        return placement

    def place(self, queued: QueuedRequest, now: float) -> Placement | None:
        """Place `ask` at once; None where it would have to wait, and it does not."""
        placement = self._placed(queued, now)
        if placement is None:
            self._holds.drop(queued)
        return placement

    def match(self, now: float) -> list[Placement]:
        """Give free slots to those who wait; to be called when capacity has changed."""
        placements: list[Placement] = []
        self.placement_state.slots_freed = False
        self._holds.clear()
        while (
            self._slotless.count and (found := self._slotless_matcher.next_match(now)) is not None
        ):
            placements.append(self._take_next(found, now))
        while self._line.count and self.placement_state.free_rows:
            found = self._matcher.next_match(now)
            if found is None:
                break
            placements.append(self._take_next(found, now))
        self._waking = min([ask.deferred_until for ask in self._holds.deferred], default=math.inf)
        return placements

    def withdraw(self, queued: QueuedRequest) -> bool:
        """Take `ask` out of the line; whether it was in it. Then call `match`."""
        self._holds.drop(queued)
        if queued.account is None:
            return False
        self._line_of(queued).remove(queued)
        return True

    def prefill_done(self, placement: Placement, now: float) -> None:
        """The first token came: the prompt has been read. Sharpens what is to be expected."""
        if not placement.released:
            forecast.prefill_done(placement, now)
            self.placement_state.mark_dirty(placement.row)

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
            placement.released = True
            row = placement.row
            forecast.end_placement(placement, now)
            if placement.queued.slots:
                row.ours -= placement.queued.slots
            else:
                self.placement_state.slotless_ended(row, placement.queued.slotless_caller)
            self.placement_state.last_release = now
            self.placement_state.recompute(row)

    def settled(
        self,
        placement: Placement,
        prompt_tokens: float,
        cached_tokens: float,
        completion_tokens: float,
    ) -> None:
        """It took so many tokens: its caller is charged for these instead of the estimate."""
        used = clamp(prompt_tokens - cached_tokens, 0.0, MOST_TOKENS_PER_REQUEST, 0.0)
        if completion_tokens:
            used += (
                clamp(completion_tokens, 0.0, MOST_TOKENS_PER_REQUEST, 0.0) * placement.token_weight
            )
        self._correct(placement, used)

    def cancelled(self, placement: Placement, now: float) -> None:
        """It was never sent: as if it had not been placed."""
        self.released(placement, now)
        self._correct(placement, 0.0)

    def _correct(self, placement: Placement, used: float) -> None:
        account = placement.account
        if account is not None:
            placement.account = None
            ask = placement.queued
            line = self._line if ask.slots else self._slotless
            shares = line.levels[ask.priority].counters
            shares.settled(account, used - placement.charge)

    # What is to be expected.

    @property
    def waiting(self) -> int:
        """How many are in line."""
        return self._line.count + self._slotless.count

    def queued_requests(self) -> list[QueuedRequest]:
        """What waits, by class and age; what needs no slot at the end."""
        return [*self._line, *self._slotless]

    def depths(self) -> dict[Priority, int]:
        """How many of each class wait."""
        ranks = zip(Priority, self._line.levels, self._slotless.levels, strict=True)
        return {priority: rank.count + other.count for priority, rank, other in ranks}

    def count_ahead(self, queued: QueuedRequest) -> int:
        """About how many go before `ask`, which waits or comes now."""
        return (self._outlook if queued.slots else self._slotless_outlook).count_ahead(queued)

    def predicted_waits(self, now: float) -> Iterator[tuple[QueuedRequest, float]]:
        """What waits in about the order in which it will go, and seconds until it has its slots.

        One pass over all of it; the line must not change meanwhile. How long what needs no slot
        will wait is not known: infinity.
        """
        yield from self._outlook.predicted_waits(now)
        for ask in self._slotless_outlook.likely_order():
            yield ask, math.inf

    def expected_start(self, queued: QueuedRequest, now: float) -> float:
        """When `ask`, which waits, is expected to get its slots; monotonic seconds."""
        return now + self._outlook.predicted_wait(queued, now)

    def predicted_wait(self, queued: QueuedRequest, now: float) -> float:
        """Seconds that `ask` would wait if it came now."""
        return (
            0.0
            if available_rows(self.placement_state, queued)
            else self._outlook.predicted_wait(queued, now)
        )

    def wake_at(self, now: float) -> float | None:
        """When `match` is to be called though nothing has changed; None: no need to."""
        return self._waking if self._waking < math.inf else None

    # Inside: what arrives.

    def _placed(self, ask: QueuedRequest, now: float) -> Placement | None:
        """Place `ask` unless it has to wait, or does better to.

        Where slots have come free that `match` has not given out yet, those who wait go first.
        """
        line = self._line if ask.slots else self._slotless
        if line.count and self.placement_state.slots_freed:
            return None
        room = available_rows(self.placement_state, ask)
        if room is None:
            return None
        row = self._matcher.choose_row(room, ask, now)
        if (ask.cached or ask.pending) and self._matcher.by_cost:
            ask.warmest_rows = warmest_rows(ask)
            if self._holds.defer(ask, room.candidate_set, row_cost(row, ask, now), now):
                return None
        account = line.levels[ask.priority].counters.account(ask.fairness_key)
        return self._take(ask, account, row, room, now)

    def _enter(self, ask: QueuedRequest, now: float) -> None:
        if not self.waiting:
            self.placement_state.slots_freed = False  # It has just looked at all there is.
        ask.cache_checked_at = now
        if ask.slots:
            ask.work_tokens = self._outlook.work_tokens(ask)
        line = self._line_of(ask)
        line.add(ask, line.levels[ask.priority].counters.account(ask.fairness_key))
        if ask.deferred_to is not None:
            self._waking = min(self._waking, ask.deferred_until)

    def _take(
        self,
        ask: QueuedRequest,
        account: FairnessAccount,
        row: NodeSlots,
        room: AvailableRows,
        now: float,
    ) -> Placement:
        board = self.placement_state
        placement = forecast.start_placement(ask, row, room.candidate_set, room.group, now)
        line = self._line
        if ask.slots:
            row.ours += ask.slots
        else:
            line = self._slotless
            board.slotless_started(row, ask.slotless_caller)
        board.placement_count = row.last_placement = board.placement_count + 1
        board.recompute(row)
        placement.account = account
        charge = ask.prompt_tokens
        if ask.cached:
            charge = max(LEAST_UNCACHED_TOKENS, charge - ask.cached.get(row.index, 0.0))
        placement.token_weight = weight = self._outlook.token_weight
        charge += ask.completion_tokens * weight
        placement.charge = charge
        line.levels[ask.priority].counters.started(account, charge)
        return placement

    def _take_next(self, found: Match, now: float) -> Placement:
        """Place what waits and is next."""
        ask, account = found.queued, found.queued.account
        assert account is not None
        self._line_of(ask).remove(ask)
        self._holds.drop(ask)
        return self._take(ask, account, found.row, found.available, now)

    def _line_of(self, ask: QueuedRequest) -> WaitQueue:
        return self._line if ask.slots else self._slotless


def dispatch_rules(settings: Settings) -> DispatchRules:
    """What the settings say to the dispatcher."""
    rules = settings.classes
    patience = {}
    for priority in Priority:
        rule = rules.get(priority.label)  # type: ignore[call-overload]
        own = None if rule is None else rule.patience
        patience[priority] = DEFAULT_PATIENCE[priority.label] if own is None else own
    batch = rules.get("batch")
    reserve = None if batch is None else batch.reserve_slots
    return DispatchRules(
        settings.policy,
        patience,
        batch_reserve=reserve or 0.0,
        slotless_limit=settings.queue.slotless,
    )
