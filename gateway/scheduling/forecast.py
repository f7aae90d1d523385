"""When what runs on a node is expected to end: kept on its row as work comes, moves on and goes."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from gateway.scheduling.cost import LEAST_UNCACHED_TOKENS
from gateway.scheduling.fairness import LEAST_TOKEN_WEIGHT, MOST_TOKEN_WEIGHT
from gateway.scheduling.placement_state import (
    CandidateSet,
    NodeSlots,
    Placement,
    PlacementState,
    QueuedRequest,
)
from gateway.scheduling.wait_queue import WaitQueue

NEGLIGIBLE_COMPLETION = 1.0
"""Tokens of an answer that is not written, as of embeddings, or next to nothing."""

OVERRUN_SHARE = 0.5
"""What outlives its forecast is expected to take this share of its time so far once more."""


def start_placement(
    queued: QueuedRequest, row: NodeSlots, candidate_set: CandidateSet, group: int, now: float
) -> Placement:
    """Let `ask` begin on `row`: its reading holds up those who write, its writing slows them down.

    Where nobody writes it is one prompt after the other, and nobody's end moves.
    """
    uncached = queued.prompt_tokens
    if queued.cached:
        uncached = max(LEAST_UNCACHED_TOKENS, uncached - queued.cached.get(row.index, 0.0))
    reading = uncached / row.prefill_tps
    running = row.running
    writes = queued.completion_tokens > NEGLIGIBLE_COMPLETION
    if not (writes or row.decoding):
        start = max(now, row.prefill_until)
    elif running:
        start = max(now, row.prefill_until)
        drag = row.decode_slowdown
        total = 0.0
        for other in running:
            left = other.ends - now
            other.ends += reading + (left * drag if left > 0.0 else 0.0)
            total += other.ends
        row.ends_sum = total
    else:
        start, row.ends_sum = now, 0.0
    row.prefill_until = read_by = start + reading
    ends = read_by + queued.completion_tokens * row.per_output_token
    placement = Placement(queued, row, candidate_set, group, now, read_by, ends)
    running.append(placement)
    row.decoding += writes
    row.ends_sum += ends
    return placement


def prefill_done(placement: Placement, now: float) -> None:
    """Its prompt has been read at `now`."""
    row = placement.row
    shift = now - placement.prefill_ends
    placement.prefill_ends = now
    placement.ends += shift
    row.ends_sum += shift
    row.prefill_until = max([one.prefill_ends for one in row.running])


def end_placement(placement: Placement, now: float) -> None:
    """It has gone: what it held up or slowed down goes faster."""
    row = placement.row
    running = row.running
    running.remove(placement)
    writes = placement.queued.completion_tokens > NEGLIGIBLE_COMPLETION
    row.decoding -= writes
    if not running:
        row.ends_sum = row.prefill_until = 0.0
        return
    if not (writes or row.decoding):
        row.ends_sum -= placement.ends
        row.prefill_until = running[-1].prefill_ends
        return
    gain = row.token_step / row.per_output_token
    read_by = placement.prefill_ends
    unread = read_by - now
    total, latest = 0.0, -math.inf
    for other in running:
        ends = other.ends
        if unread > 0.0 and other.prefill_ends < read_by:
            ends -= unread
        if gain and ends > now:
            ends -= (ends - now) * gain
        other.ends = ends
        total += ends
        if other.prefill_ends > latest:  # noqa: PLR1730 - a call costs four times as much
            latest = other.prefill_ends
    row.ends_sum, row.prefill_until = total, latest


def seconds_until_free(row: NodeSlots, slots: int, now: float) -> float | None:
    """Seconds until `slots` more than are free now are free on `row`; None: no telling."""
    if slots <= 0:
        return 0.0
    running = row.running
    if slots == 1:
        return min([_left(one, now) for one in running if one.queued.slots], default=None)
    for wait, count in sorted([(_left(one, now), one.queued.slots) for one in running]):
        slots -= count
        if slots <= 0:
            return wait
    return None


def _left(placement: Placement, now: float) -> float:
    left = placement.ends - now
    outlived = (now - placement.placed_at) * OVERRUN_SHARE
    # One that is late is not expected any second: the longer it has taken, the longer it takes.
    return left if left > 0.0 else outlived


LEAST_REFRESH_PLACEMENTS, MOST_REFRESH_PLACEMENTS = 8, 256
"""Placements after which the means over the fleet are taken again: about as many as a quarter of
its nodes, so that what a small one has measured counts soon."""

SAMPLED_ROWS = 64
"""Rows whose forecasts are looked at, and about so many callers' lines."""

_age = attrgetter("arrival_key")


@dataclass(slots=True, eq=False)
class WaitForecast:
    """What a board and a line let expect."""

    placement_state: PlacementState
    wait_queue: WaitQueue
    _weight: float = LEAST_TOKEN_WEIGHT
    _per_prompt: float = 0.0
    _per_token: float = 0.0
    _renewal: int = 0
    """The placement with which the means are taken again."""

    @property
    def token_weight(self) -> float:
        """What a written token costs, in prompt tokens: by the fleet's measured speeds."""
        self._keep_up()
        return self._weight

    def work_tokens(self, queued: QueuedRequest) -> tuple[float, float]:
        """Tokens that are likely to be read and written for `ask`."""
        cached = max(queued.cached.values(), default=0.0)
        return max(LEAST_UNCACHED_TOKENS, queued.prompt_tokens - cached), queued.completion_tokens

    def count_ahead(self, queued: QueuedRequest) -> int:
        """About how many go before `ask`, which waits or comes now.

        Classes above go first; within its class callers take turns, each its oldest first.
        """
        ranks = self.wait_queue.levels
        shares = ranks[queued.priority].counters
        order = shares.by_counter
        own = shares.accounts.get(queued.fairness_key)
        turns = 0
        mine = (order[0][0] if order else shares.start_counter, math.inf)
        if own is not None:
            age = (
                queued.arrival_key if queued.account is not None else (queued.received_at, math.inf)
            )
            turns = sum([bisect_left(lane, age, key=_age) for lane in own.fifos.values()])
            mine = (max(own.counter, mine[0]), own.serial)
        ahead = sum([rank.count for rank in ranks[: queued.priority]]) + turns
        if not turns:
            return ahead + bisect_left(order, mine)
        some = order[:: 1 + len(order) // SAMPLED_ROWS]
        theirs = 0
        for counter, number, account in some:
            if account is not own:
                waiting = sum(map(len, account.fifos.values()))
                theirs += min(waiting, turns + ((counter, number) < mine))
        return ahead + theirs * len(order) // len(some)

    def predicted_wait(self, queued: QueuedRequest, now: float) -> float:
        """Seconds until `ask` has its slots; for one that does not wait yet: if it came now."""
        pool = self._pool(queued)
        return self._after(self.count_ahead(queued), queued, pool, self._first(queued, pool, now))

    def predicted_waits(self, now: float) -> Iterator[tuple[QueuedRequest, float]]:
        """All that waits in the order in which it is likely to go, and `wait_of` it."""
        first: dict[tuple[CandidateSet, bool], float] = {}
        for place, ask in enumerate(self.likely_order()):
            pool = self._pool(ask)
            kind = pool, ask.keeps_batch_reserve
            if kind not in first:
                first[kind] = self._first(ask, pool, now)
            yield ask, self._after(place, ask, pool, first[kind])

    def likely_order(self) -> Iterator[QueuedRequest]:
        """All that waits in the order in which it is likely to go."""
        for rank in self.wait_queue.levels:
            turns = deque(
                heapq.merge(*account.fifos.values(), key=_age)
                for _, _, account in rank.counters.by_counter
            )
            while turns:
                own = turns.popleft()
                ask = next(own, None)
                if ask is None:
                    continue
                turns.append(own)
                yield ask

    def _pool(self, ask: QueuedRequest) -> CandidateSet:
        """Where it is to be expected: the first pool with a node that is alive."""
        for tiers in ask.groups:
            for pool in tiers:
                if pool.slots(self.placement_state):
                    return pool
        return ask.groups[0][0]

    def _first(self, ask: QueuedRequest, pool: CandidateSet, now: float) -> float:
        """Seconds until the next slot comes free to such as `ask`."""
        waits = [
            wait
            for row in pool.rows[:SAMPLED_ROWS]
            if row.running
            and (
                wait := seconds_until_free(row, _short(row) if ask.keeps_batch_reserve else 1, now)
            )
            is not None
        ]
        return min(waits) * min(1.0, SAMPLED_ROWS / len(pool.rows)) if waits else 0.0

    def _after(self, ahead: int, ask: QueuedRequest, pool: CandidateSet, first: float) -> float:
        """Seconds until so many others have begun, and one slot more is free; inf: no telling."""
        slots = (pool.unreserved_slots if ask.keeps_batch_reserve else pool.slots)(
            self.placement_state
        )
        if not slots:
            return math.inf
        self._keep_up()
        read, written = map(sum, ask.groups[0][0].queued_tokens)
        queued = read * self._per_prompt + written * self._per_token
        work = ahead * queued / max(1, self.wait_queue.count)
        return first + work * max(1, ask.slots) / slots

    def _keep_up(self) -> None:
        """Take the means again after some placements, or when enough rows have other speeds."""
        board = self.placement_state
        if board.placement_count >= self._renewal or board.speed_changes > len(board.by_name) // 8:
            self._renew()

    def _renew(self) -> None:
        self.placement_state.speed_changes = 0
        rows = [row for row in self.placement_state.by_name.values() if row.alive]
        renewal = min(max(LEAST_REFRESH_PLACEMENTS, len(rows) // 4), MOST_REFRESH_PLACEMENTS)
        self._renewal = self.placement_state.placement_count + renewal
        if not rows:
            return
        self._per_prompt = sum(1.0 / row.prefill_tps for row in rows) / len(rows)
        self._per_token = sum(
            row.token_base + row.token_step * max(0, row.total - 1) for row in rows
        ) / len(rows)
        weight = self._per_token / self._per_prompt
        self._weight = min(max(weight, LEAST_TOKEN_WEIGHT), MOST_TOKEN_WEIGHT)


def _short(row: NodeSlots) -> int:
    """Slots that must come free on a row before it may take what leaves its reserve alone."""
    return max(1, min(row.ours, row.batch_reserve + 1 - row.free))
