"""CPU of one choice in a large fleet: 1,000 nodes of two slots, 500 requests in line.

One request placed costs the release of a slot, the match that gives it to one of those who wait,
and the arrival of another. Run with `python -m tests.bench.choosing`; the small fleet's figure,
four nodes and nobody in line, comes with it.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import time
from dataclasses import dataclass, field

from gateway.request import Priority
from gateway.scheduling.dispatcher import Dispatcher
from gateway.scheduling.matching import DispatchRules
from gateway.scheduling.node_slots import Placement, QueuedRequest, TierSets
from gateway.scheduling.placement_state import PlacementState

SYSTEM_TOKENS = 1500.0
WARM_NODES = 20
"""Nodes that have a request's system prompt; one of them has its conversation too."""


@dataclass(slots=True)
class Crowd:
    """A fleet with all slots taken and a line that stays as long as it is."""

    nodes: int
    waiting: int
    seed: int = 0
    callers: int = 50
    now: float = 0.0
    dispatcher: Dispatcher = field(init=False)
    _rng: random.Random = field(init=False)
    _groups: tuple[TierSets, ...] = field(init=False)
    _running: list[tuple[float, int, Placement]] = field(default_factory=list)
    _asked: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        board = PlacementState()
        rows = [
            board.add(
                f"node-{i}",
                total=2,
                prefill_tps=600 if i % 3 else 250,
                token_base=1 / 40 if i % 3 else 1 / 16,
                token_step=0.1 / 40,
            )
            for i in range(self.nodes)
        ]
        self._groups = ((board.candidate_set(rows),),)
        self.dispatcher = Dispatcher(board, DispatchRules(), random.Random(self.seed))
        for _ in range(2 * self.nodes if self.waiting else 0):
            ask = self.ask()
            ask.cached = {}  # so that none waits for a warm node while slots are free
            self._begin(self.dispatcher.place_or_queue(ask, self.now))
        while self.dispatcher.waiting < self.waiting:
            self._begin(self.dispatcher.place_or_queue(self.ask(), self.now))

    def ask(self) -> QueuedRequest:
        """One more request, with its conversation on one node and its beginning on some."""
        rng = self._rng
        self._asked += 1
        warm = dict.fromkeys(rng.sample(range(self.nodes), min(WARM_NODES, self.nodes)), 1500.0)
        said = SYSTEM_TOKENS + rng.expovariate(1 / 800)
        warm[rng.randrange(self.nodes)] = said
        return QueuedRequest(
            f"{self._asked}",
            self._groups,
            Priority.NORMAL,
            f"caller {rng.randrange(self.callers)}",
            self.now,
            prompt_tokens=said + rng.expovariate(1 / 100),
            completion_tokens=1 + rng.expovariate(1 / 180),
            cached=warm,
        )

    def step(self) -> float:
        """The next request ends, one that waits gets its slot, one more comes: CPU seconds."""
        self.now, _, placement = heapq.heappop(self._running)
        ask = self.ask()
        begin = time.process_time()
        self.dispatcher.finished(placement, self.now, ask.prompt_tokens, 0.0, ask.completion_tokens)
        placements = self.dispatcher.match(self.now)
        placed = self.dispatcher.place_or_queue(ask, self.now)
        took = time.process_time() - begin
        for one in (*placements, placed):
            self._begin(one)
        return took / max(1, len(placements) + (placed is not None))

    def _begin(self, placement: Placement | None) -> None:
        if placement is not None:
            # Lengths are not what they were expected to be.
            seconds = (placement.ends - self.now) * self._rng.uniform(0.3, 2.0)
            item = (self.now + seconds, int(placement.queued.id), placement)
            heapq.heappush(self._running, item)


def small_fleet(rounds: int) -> float:
    """CPU seconds of an arrival and an end with four nodes and nobody in line."""
    crowd = Crowd(nodes=4, waiting=0)
    dispatcher = crowd.dispatcher
    asks = [crowd.ask() for _ in range(rounds)]
    for ask in asks:
        ask.cached = {}
    begin = time.process_time()
    for ask in asks:
        placement = dispatcher.place_or_queue(ask, ask.received_at)
        assert placement is not None
        dispatcher.finished(placement, ask.received_at, 100.0, 0.0, 100.0)
    return (time.process_time() - begin) / rounds


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--waiting", type=int, default=500)
    parser.add_argument("--steps", type=int, default=5000)
    options = parser.parse_args()
    crowd = Crowd(options.nodes, options.waiting)
    taken = sorted(crowd.step() for _ in range(options.steps))
    print(
        f"{options.nodes} nodes, {options.waiting} waiting: CPU per request placed "
        f"{statistics.median(taken) * 1e6:.0f} us at the median, "
        f"{taken[int(0.99 * len(taken))] * 1e6:.0f} us at the 99th percentile, "
        f"{statistics.fmean(taken) * 1e6:.0f} us in the mean"
    )
    open_fleet = Crowd(options.nodes, 0)
    asks = [open_fleet.ask() for _ in range(options.nodes)]
    begin = time.process_time()
    for ask in asks:
        open_fleet.dispatcher.place_or_queue(ask, 0.0)
    took = (time.process_time() - begin) / len(asks)
    print(f"{options.nodes} nodes, nobody waiting: {took * 1e6:.0f} us an arrival")
    print(f"4 nodes, nobody waiting: {small_fleet(20_000) * 1e6:.1f} us an arrival and its end")


if __name__ == "__main__":
    main()
