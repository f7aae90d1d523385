"""How long requests will wait, and what an output token costs, by the fleet as it is now."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gateway.scheduling.cost import row_cost_after
from gateway.scheduling.node_slots import (
    LEAST_UNCACHED_TOKENS,
    CandidateSet,
    NodeSlots,
    QueuedRequest,
)
from gateway.scheduling.placement_state import PlacementState
from gateway.scheduling.wait_queue import LEAST_TOKEN_WEIGHT, MOST_TOKEN_WEIGHT, WaitQueue, by_age

LEAST_REFRESH_PLACEMENTS, MOST_REFRESH_PLACEMENTS = 8, 256
"""Placements after which the fleet's mean speeds are computed anew: a quarter of the number of its
nodes within these bounds, so that what a small fleet has measured counts soon."""

SAMPLED_ROWS = 64
"""Rows whose expected ends are looked at, and about as many callers whose FIFOs are."""


@dataclass(slots=True, eq=False)
class WaitForecast:
    """Predicts waits from a placement state and a wait queue."""

    placement_state: PlacementState
    wait_queue: WaitQueue
    token_weight: float = LEAST_TOKEN_WEIGHT
    """Price of an output token in prompt tokens, by the speeds at the last refresh."""
    refresh_at: int = 0
    """The number of placements at which the means are computed anew."""
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

    def work_tokens(self, queued: QueuedRequest) -> tuple[float, float]:
        """Prompt tokens to be read and output tokens to be decoded for a request, as expected."""
        cached = max(queued.cached.values(), default=0.0)
        return max(LEAST_UNCACHED_TOKENS, queued.prompt_tokens - cached), queued.completion_tokens

    def _candidates(self, queued: QueuedRequest) -> CandidateSet:
        """Where it will probably go: the first candidate set with a node that is worth a wait."""
        for tiers in queued.groups:
            for candidates in tiers:
                if candidates.slots(self.placement_state.slots_version) and not all(
                    row.paused for row in candidates.rows
                ):
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
        count = candidates.unreserved_slots if queued.keeps_batch_reserve else candidates.slots
        slots = count(self.placement_state.slots_version)
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
    for tiers in queued.groups:
        for candidates in tiers:
            for row in candidates.rows:
                if not row.alive or row.index in queued.excluded:
                    continue
                wait = row.seconds_until_room(queued, now)
                cost = math.inf if wait is None else row_cost_after(row, queued, wait)
                found.append(Prospect(row, wait, cost))
    return sorted(found, key=lambda one: (one.cost, one.row.name))


def _slots_short_of_reserve(row: NodeSlots) -> int:
    """Slots that must come free on a row before a batch request leaves its reserve free."""
    return max(1, min(row.ours, row.batch_reserve + 1 - row.free))
