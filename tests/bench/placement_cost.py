"""CPU of one placement in a large fleet: `python -m tests.bench.placement_cost`.

The fleet has 1,000 nodes of two slots each, and 500 requests wait. One placement comprises the
release of a slot, the match that gives it to a waiting request, and the arrival of another
request. The cost in a fleet of four nodes with an empty wait queue is printed as well.
"""

from __future__ import annotations

import heapq
import random
import statistics
import time

from gateway.schedule.core.dispatcher import Dispatcher, DispatchRules
from gateway.schedule.core.requests import PlacementState, QueuedRequest, TierSets
from gateway.terms import Priority
from tests.known import known

SYSTEM_TOKENS = 1500.0
NODES, WAITING, STEPS = 1000, 500, 5000
WARM_NODES = 20
"""Nodes that have cached a request's system prompt; one of them has its conversation too."""


class LoadedFleet:
    """A fleet whose slots are all taken and whose wait queue keeps its length."""

    def __init__(self, nodes: int, waiting: int) -> None:
        self.nodes = nodes
        self.now = 0.0
        self._running: list[tuple[float, int, QueuedRequest]] = []
        self._created = 0
        self._rng = random.Random(0)
        state = PlacementState()
        rows = [state.add(f"node-{i}", total=2) for i in range(nodes)]
        for i, row in enumerate(rows):
            row.set_speed(600 if i % 3 else 250, 1 / 40 if i % 3 else 1 / 16, 0.1 / 40)
        self._groups: tuple[TierSets, ...] = ((state.candidate_set(rows),),)
        self.dispatcher = Dispatcher(state, DispatchRules(), random.Random(0))
        for _ in range(2 * nodes if waiting else 0):
            request = self.next_request()
            request.cached = {}  # so that none waits for a warm node while slots are free
            self._begin(self.dispatcher.place_or_queue(request, self.now))
        while self.dispatcher.waiting < waiting:
            self._begin(self.dispatcher.place_or_queue(self.next_request(), self.now))

    def next_request(self) -> QueuedRequest:
        """A new request; one node has cached its conversation, and some have its system prompt."""
        rng = self._rng
        self._created += 1
        warm = dict.fromkeys(rng.sample(range(self.nodes), min(WARM_NODES, self.nodes)), 1500.0)
        conversation_tokens = SYSTEM_TOKENS + rng.expovariate(1 / 800)
        warm[rng.randrange(self.nodes)] = conversation_tokens
        return QueuedRequest(
            f"{self._created}",
            self._groups,
            Priority.NORMAL,
            f"caller {rng.randrange(50)}",
            self.now,
            prompt_tokens=conversation_tokens + rng.expovariate(1 / 100),
            completion_tokens=1 + rng.expovariate(1 / 180),
            cached=warm,
        )

    def step(self) -> float:
        """End one request, give its slot to a waiting one, add a new one. Returns CPU seconds."""
        self.now, _, placement = heapq.heappop(self._running)
        request = self.next_request()
        begin = time.process_time()
        tokens = (request.prompt_tokens, request.completion_tokens)
        self.dispatcher.finished(placement, self.now, *tokens)
        placements = self.dispatcher.match(self.now)
        placed = self.dispatcher.place_or_queue(request, self.now)
        took = time.process_time() - begin
        for one in (*placements, placed):
            self._begin(one)
        return took / max(1, len(placements) + (placed is not None))

    def _begin(self, placement: QueuedRequest | None) -> None:
        if placement is not None:
            # Actual lengths differ from the expected ones.
            seconds = (placement.ends - self.now) * self._rng.uniform(0.3, 2.0)
            heapq.heappush(self._running, (self.now + seconds, int(placement.id), placement))


def main() -> None:
    fleet = LoadedFleet(NODES, WAITING)
    taken = sorted(fleet.step() * 1e6 for _ in range(STEPS))
    print(
        f"{NODES} nodes, {WAITING} waiting: CPU per request placed "
        f"{statistics.median(taken):.0f} us at the median, {taken[int(0.99 * len(taken))]:.0f} us "
        f"at the 99th percentile, {statistics.fmean(taken):.0f} us in the mean"
    )
    fleet = LoadedFleet(NODES, 0)
    requests = [fleet.next_request() for _ in range(NODES)]
    begin = time.process_time()
    for request in requests:
        fleet.dispatcher.place_or_queue(request, 0.0)
    took = (time.process_time() - begin) / NODES
    print(f"{NODES} nodes, none waiting: {took * 1e6:.0f} us per arrival")
    small = LoadedFleet(4, 0)
    requests = [small.next_request() for _ in range(20_000)]
    begin = time.process_time()
    for request in requests:
        request.cached = {}
        placed = known(small.dispatcher.place_or_queue(request, 0.0))
        small.dispatcher.finished(placed, 0.0, 100.0, 100.0)
    took = (time.process_time() - begin) / len(requests)
    print(f"4 nodes, none waiting: {took * 1e6:.1f} us per arrival and its end")


if __name__ == "__main__":
    main()
