"""The wait queue: requests in an order that finds the next without a look at all of them.

Each class has a `PriorityLevel`. In it a request stands in two FIFOs, sorted by age: that of its
caller's account, which fairness goes by, and that of its requirements, which the guard against
starvation goes by. Requests with equal requirements can go to the same nodes, so where one finds no
room, its whole FIFO is passed over.

Fairness between the callers of a class goes by virtual token counters. Each caller has a counter of
the work it was served; the lowest counter goes first. A caller that was idle starts at the lowest
counter of those that wait, so no caller saves up credit (Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024). Among callers within a small slack of the lowest counter, the one
whose request fits the free node goes (Cao et al., "Locality-aware Fair Scheduling in LLM Serving",
2025); the slack bounds what that costs the others.

`WaitForecast` predicts how long requests will wait, and what an output token costs.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from gateway.schedule.core.requests import (
    CandidateSet,
    FairnessAccount,
    NodeSlots,
    PlacementState,
    QueuedRequest,
    Requirements,
    alive_rows,
)
from gateway.schedule.core.selection import row_cost_after
from gateway.terms import Priority

Fifos = dict[Requirements, list[QueuedRequest]]
by_age = attrgetter("arrival_key")
# Bounds of an output token's price, in prompt tokens.
LEAST_TOKEN_WEIGHT, MOST_TOKEN_WEIGHT = 1.0, 32.0
# By how many mean charges of a request a caller may be above the lowest counter and still go.
COUNTER_SLACK = 2.0
MOST_ACCOUNTS = 4096  # accounts; when there are more, those of idle callers are dropped
# Sorts accounts: counter, serial number, the account.
CounterKey = tuple[float, int, FairnessAccount]


@dataclass(slots=True, eq=False)
class VirtualTokenCounters:
    """The accounts of one class."""

    accounts: dict[str, FairnessAccount] = field(default_factory=dict)
    by_counter: list[CounterKey] = field(default_factory=list)
    """Accounts with waiting requests, the least served first."""
    start_counter: float = 0.0
    """Where a caller starts while nobody waits: at the counter of the one served last."""
    mean_charge: float = 1.0
    _serial: int = 0

    def account(self, fairness_key: str) -> FairnessAccount:
        """The account of a caller, which has just sent a request."""
        account = self.accounts.get(fairness_key)
        if account is None:
            if len(self.accounts) >= MOST_ACCOUNTS:
                self._drop_idle()
            self._serial += 1
            account = self.accounts[fairness_key] = FairnessAccount(fairness_key, self._serial)
        if not account.fifos:
            least = self.by_counter[0][0] if self.by_counter else self.start_counter
            if account.counter < least:
                account.raise_to(least)
        return account

    def add_waiting(self, account: FairnessAccount) -> None:
        """The account has waiting requests now."""
        insort(self.by_counter, (account.counter, account.serial, account))

    def remove_waiting(self, account: FairnessAccount) -> None:
        """The account has no waiting requests any more."""
        del self.by_counter[bisect_left(self.by_counter, (account.counter, account.serial))]

    def started(self, account: FairnessAccount, charge: float) -> None:
        """Charge the account for a request that has started."""
        self.start_counter = self.by_counter[0][0] if self.by_counter else account.counter
        self.mean_charge += (charge - self.mean_charge) / 32
        if account.fifos:
            self.remove_waiting(account)
            account.started(charge)
            self.add_waiting(account)
        else:
            account.started(charge)

    def settled(self, account: FairnessAccount, correction: float) -> None:
        """A request of a caller that waits has ended; its price is its charge and `correction`."""
        self.remove_waiting(account)
        account.settled(correction)
        self.add_waiting(account)

    def _drop_idle(self) -> None:
        """Drop the lower half of the idle accounts: they would start anew at the same counter."""
        idle = [one for one in self.accounts.values() if not one.fifos and not one.running]
        idle.sort(key=lambda account: account.counter)
        for account in idle[: max(len(idle) // 2, 1)]:
            del self.accounts[account.fairness_key]


@dataclass(slots=True, eq=False)
class PriorityLevel:
    """The waiting requests of one class."""

    counters: VirtualTokenCounters = field(default_factory=VirtualTokenCounters)
    fifos: Fifos = field(default_factory=dict)
    count: int = 0

    def add(self, queued: QueuedRequest, account: FairnessAccount) -> None:
        """Put a request into both FIFOs."""
        if not account.fifos:
            self.counters.add_waiting(account)
        _insert(account.fifos, queued)
        _insert(self.fifos, queued)
        self.count += 1

    def remove(self, queued: QueuedRequest, account: FairnessAccount) -> None:
        """Take it out of both."""
        _drop(account.fifos, queued)
        _drop(self.fifos, queued)
        if not account.fifos:
            self.counters.remove_waiting(account)
        self.count -= 1


@dataclass(slots=True, eq=False)
class WaitQueue:
    """Everything that waits."""

    levels: tuple[PriorityLevel, ...] = field(
        default_factory=lambda: tuple(PriorityLevel() for _ in Priority)
    )
    count: int = 0
    wide_count: int = 0  # how many need several slots, or most of a shared pool
    _arrivals: int = 0
    _warm: dict[int, dict[QueuedRequest, None]] = field(default_factory=dict)
    """By row index: the requests that have that row among their warmest."""

    def add(self, queued: QueuedRequest, now: float) -> None:
        """Let a request wait, on its caller's account."""
        self._arrivals += 1
        level = self.levels[queued.priority]
        account = level.counters.account(queued.fairness_key)
        queued.enter(account, self._arrivals, now)
        level.add(queued, account)
        self.count += 1
        self.wide_count += queued.is_wide
        if queued.slots:
            for sums, tokens in zip(
                queued.groups[0][0].queued_tokens, queued.work_tokens, strict=True
            ):
                sums[queued.priority] += tokens
        self._add_warm(queued)

    def remove(self, queued: QueuedRequest) -> None:
        """Take out a request that waits."""
        level, account = self.levels[queued.priority], queued.account
        assert account is not None
        level.remove(queued, account)
        queued.leave()
        self.count -= 1
        self.wide_count -= queued.is_wide
        if queued.slots:
            for sums, tokens in zip(
                queued.groups[0][0].queued_tokens, queued.work_tokens, strict=True
            ):
                left = sums[queued.priority] - tokens
                sums[queued.priority] = max(0.0, left) if level.count else 0.0
        self._remove_warm(queued)

    def set_fills_pool(self, queued: QueuedRequest, *, fills: bool) -> None:
        """Whether a waiting request needs most of a shared pool has been found out anew."""
        self.wide_count -= queued.is_wide
        queued.set_fills_pool(fills=fills)
        self.wide_count += queued.is_wide

    def cached_changed(self, queued: QueuedRequest) -> None:
        """The `cached` of a waiting request has been looked up anew."""
        self._remove_warm(queued)
        self._add_warm(queued)

    def _add_warm(self, queued: QueuedRequest) -> None:
        queued.find_warmest_rows()
        for index in queued.warmest_rows:
            self._warm.setdefault(index, {})[queued] = None

    def _remove_warm(self, queued: QueuedRequest) -> None:
        for index in queued.warmest_rows:
            warm = self._warm[index]
            del warm[queued]
            if not warm:
                del self._warm[index]

    def warm_for_row(self, index: int) -> dict[QueuedRequest, None]:
        """Requests that have the row of that index among their warmest, in the order of arrival."""
        return self._warm.get(index, {})


def _insert(fifos: Fifos, queued: QueuedRequest) -> None:
    fifo = fifos.get(queued.requirements)
    if fifo is None:
        fifos[queued.requirements] = [queued]
    elif fifo[-1].arrival_key <= queued.arrival_key:
        fifo.append(queued)
    else:
        insort(fifo, queued, key=by_age)


def _drop(fifos: Fifos, queued: QueuedRequest) -> None:
    fifo = fifos[queued.requirements]
    del fifo[0 if fifo[0] is queued else bisect_left(fifo, queued.arrival_key, key=by_age)]
    if not fifo:
        del fifos[queued.requirements]


# Placements after which the fleet's mean speeds are computed anew: a quarter of the number of its
# nodes within these bounds, so that what a small fleet has measured counts soon.
LEAST_REFRESH_PLACEMENTS, MOST_REFRESH_PLACEMENTS = 8, 256
# Rows whose expected ends are looked at, and about as many callers whose FIFOs are.
SAMPLED_ROWS = 64


@dataclass(slots=True, eq=False)
class WaitForecast:
    """Predicts waits from a placement state and a wait queue."""

    placement_state: PlacementState
    wait_queue: WaitQueue
    token_weight: float = LEAST_TOKEN_WEIGHT
    """Price of an output token in prompt tokens, by the speeds at the last refresh."""
    refresh_at: int = 0  # the number of placements at which the means are computed anew
    _prompt_token_seconds: float = 0.0
    _output_token_seconds: float = 0.0

    def predicted_wait(self, queued: QueuedRequest, now: float) -> float:
        """Seconds until a request has its slots; for one that does not wait: if it arrived now."""
        candidates = self._candidates(queued)
        first = self._next_free_slot(queued, candidates, now)
        return self._wait_behind(self.count_ahead(queued), queued, candidates, first)

    def predicted_waits(self, now: float) -> Iterator[tuple[QueuedRequest, float]]:
        """Every waiting request in the likely order, with its `predicted_wait`."""
        first: dict[tuple[CandidateSet, bool], float] = {}
        for ahead, queued in enumerate(self.likely_order()):
            candidates = self._candidates(queued)
            key = candidates, queued.keeps_batch_reserve
            if key not in first:
                first[key] = self._next_free_slot(queued, candidates, now)
            yield queued, self._wait_behind(ahead, queued, candidates, first[key])

    def likely_order(self) -> Iterator[QueuedRequest]:
        """Every waiting request in the order in which they are likely to be placed."""
        for level in self.wait_queue.levels:
            callers = deque(
                heapq.merge(*account.fifos.values(), key=by_age)
                for _, _, account in level.counters.by_counter
            )
            while callers:
                caller = callers.popleft()
                queued = next(caller, None)
                if queued is None:
                    continue
                callers.append(caller)
                yield queued

    def count_ahead(self, queued: QueuedRequest) -> int:
        """About how many go before a request, which waits or arrives now.

        Higher classes go first; within a class callers alternate, each with its oldest first.
        """
        levels = self.wait_queue.levels
        counters = levels[queued.priority].counters
        order = counters.by_counter
        own = counters.accounts.get(queued.fairness_key)
        older = 0
        """The caller's own requests that go first."""
        position = (order[0][0] if order else counters.start_counter, math.inf)
        if own is not None:
            age = (
                queued.arrival_key if queued.account is not None else (queued.received_at, math.inf)
            )
            older = sum([bisect_left(fifo, age, key=by_age) for fifo in own.fifos.values()])
            position = (max(own.counter, position[0]), own.serial)
        ahead = sum([level.count for level in levels[: queued.priority]]) + older
        if not older:
            return ahead + bisect_left(order, position)
        sample = order[:: 1 + len(order) // SAMPLED_ROWS]
        others = 0
        for counter, serial, account in sample:
            if account is not own:
                waiting = sum(map(len, account.fifos.values()))
                others += min(waiting, older + ((counter, serial) < position))
        return ahead + others * len(order) // len(sample)

    def _candidates(self, queued: QueuedRequest) -> CandidateSet:
        """Where it will probably go: the first candidate set with a node that is worth a wait."""
        for tiers in queued.groups:
            for candidates in tiers:
                if candidates.slots() and not all(row.paused for row in candidates.rows):
                    return candidates
        return queued.groups[0][0]

    def _next_free_slot(self, queued: QueuedRequest, candidates: CandidateSet, now: float) -> float:
        """Seconds until the next slot comes free that such a request may take."""
        waits = [
            wait
            for row in candidates.rows[:SAMPLED_ROWS]
            if row.running
            and not (queued.keeps_batch_reserve and row.kept_from_batch)
            and (
                wait := row.seconds_until_free(
                    _slots_short_of_reserve(row) if queued.keeps_batch_reserve else 1, now
                )
            )
            is not None
        ]
        if not waits:
            return 0.0
        return min(waits) * min(1.0, SAMPLED_ROWS / len(candidates.rows))

    def _wait_behind(
        self, ahead: int, queued: QueuedRequest, candidates: CandidateSet, first: float
    ) -> float:
        """Seconds until the `ahead` others have started and one more slot is free.

        `first`: seconds until the next slot comes free. Infinity: no node is alive.
        """
        slots = candidates.slots(for_batch=queued.keeps_batch_reserve)
        if not slots:
            return math.inf
        self.refresh_if_due(self.placement_state.placement_count)
        prompt_tokens, output_tokens = map(sum, queued.groups[0][0].queued_tokens)
        seconds = (
            prompt_tokens * self._prompt_token_seconds + output_tokens * self._output_token_seconds
        )
        work = ahead * seconds / max(1, self.wait_queue.count)
        return first + work * max(1, queued.slots) / slots

    def refresh_if_due(self, placement: int) -> None:
        """Compute the means anew after some placements, or when enough speeds have changed.

        `placement`: the number of the last placement, or of the one under way.
        """
        state = self.placement_state
        if placement >= self.refresh_at or state.speed_changes > len(state.by_name) // 8:
            self._refresh(placement)

    def _refresh(self, placement: int) -> None:
        state = self.placement_state
        state.clear_speed_changes()
        rows = [row for row in state.by_name.values() if row.alive]
        interval = min(max(LEAST_REFRESH_PLACEMENTS, len(rows) // 4), MOST_REFRESH_PLACEMENTS)
        self.refresh_at = placement + interval
        if not rows:
            return
        self._prompt_token_seconds = sum(1.0 / row.prefill_tps for row in rows) / len(rows)
        self._output_token_seconds = sum(
            row.token_base + row.token_step * max(0, row.total - 1) for row in rows
        ) / len(rows)
        weight = self._output_token_seconds / self._prompt_token_seconds
        self.token_weight = min(max(weight, LEAST_TOKEN_WEIGHT), MOST_TOKEN_WEIGHT)


class Prospect(NamedTuple):
    """A row that a waiting request may go to, as it is now."""

    row: NodeSlots
    wait: float | None
    """Seconds until it is expected to have room for this request alone; None: unknown."""
    cost: float
    """The request's expected cost there, that wait included, in seconds; infinity: unknown."""


def prospects(queued: QueuedRequest, now: float) -> list[Prospect]:
    """The rows that a waiting request may go to, the least cost first; others wait for them too."""
    found = []
    for row in alive_rows(queued.groups, queued.excluded):
        wait = row.seconds_until_room(queued, now)
        cost = math.inf if wait is None else row_cost_after(row, queued, wait)
        found.append(Prospect(row, wait, cost))
    return sorted(found, key=lambda one: (one.cost, one.row.name))


def _slots_short_of_reserve(row: NodeSlots) -> int:
    """Slots that must come free on a row before a batch request leaves its reserve free."""
    return max(1, min(row.ours, row.batch_reserve + 1 - row.free))
