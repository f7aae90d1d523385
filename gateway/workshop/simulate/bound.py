"""A lower bound of the mean completion under any schedule, even one that knows everything.

It holds for the nodes of `simulation.py` and the arrivals of one run. Each assumption is in favour
of the schedule:

- every request finds cached all that could be: its conversation's last turn and its shared prefix,
  if an earlier request has read them;
- on a node it is as fast as if it were alone there: `s`, seconds;
- a node's work per second is limited. A step with p prompt tokens and k decoding slots takes
  max(base, p / prefill) + step x k, and k is at most the number of slots. So for any share a of
  0..1 a request costs its node at least
  `w` = (1 - a) u / prefill + (o - 1) (a (base - step) / slots + step) seconds,
  for u uncached tokens and o output tokens.

**By capacity.** A request that ends more than D seconds after the last arrival took D seconds or
more. All others share the nodes' time until then, T seconds each. With a price l >= 0 for a second
of each kind of node, by weak duality the sum of all completions is at least

    sum over requests of min(D, min over kinds of (s + l w)) - T x sum over nodes of l

for any D, a and prices: good ones are searched for on a sample, and the sum is taken over all.

**By queueing.** All nodes together are no better than one server of their summed speed that always
serves the request with the least work left, the best order for a single server (Schrage, 1968).
This one matters above capacity.

The result is the larger of the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from gateway.workshop.simulate.simulation import (
    Job,
    SimulatedFleet,
    SimulatedMachine,
    unread_tokens,
)

Needs = NDArray[np.float64]  # of each request: uncached tokens; tokens behind the first one
SAMPLE_REQUESTS = 400  # requests in the sample
MOST_NODE_KINDS = 6  # more kinds of nodes than this are merged into bands, each as fast as its best
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
PRICES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
PRICE_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class _Kind:
    """Equal nodes, or nodes that are at most as fast as this. Seconds per token."""

    nodes: int
    read: float
    base: float
    step: float
    slots: int

    def alone(self, needs: Needs) -> Needs:
        """Seconds of each request, if it is alone there."""
        seconds: Needs = np.maximum(self.base, needs[0] * self.read) + needs[1] * self.base
        return seconds

    def rates(self, share: float) -> tuple[float, float]:
        """Least seconds that an uncached token and an output token cost the node."""
        writing = share * (self.base - self.step) / self.slots + self.step
        return (1.0 - share) * self.read, writing


def lower_bound(fleet: SimulatedFleet) -> float:
    """Least possible mean completion of the arrivals that were played on a fleet, seconds."""
    jobs = fleet.jobs
    if not jobs:
        return 0.0
    kinds = _kinds(fleet.machines)
    unread = unread_tokens(sorted(jobs, key=lambda job: job.began))
    needs = np.array([unread, [job.output - 1 for job in jobs]], dtype=float)
    capacity = _by_capacity(kinds, needs, max(job.arrived for job in jobs) - fleet.began)
    queueing = max(_by_queueing(kinds, jobs, needs, share) for share in SHARES)
    return max(capacity, queueing) / len(jobs)


def _kinds(machines: Iterable[SimulatedMachine]) -> list[_Kind]:
    counted: dict[tuple[float, float, float, int], int] = {}
    for machine in machines:
        step = min(machine.token_step, machine.token_base)
        key = (machine.token_base, 1.0 / machine.prefill_tps, step, machine.slots)
        counted[key] = counted.get(key, 0) + 1
    ranked = sorted(counted.items())
    band = -(-len(ranked) // MOST_NODE_KINDS)
    kinds = []
    for place in range(0, len(ranked), band):
        part = ranked[place : place + band]
        base, read, step = (min(key[i] for key, _ in part) for i in range(3))
        most = max(key[3] for key, _ in part)
        kinds.append(_Kind(sum(count for _, count in part), read, base, step, most))
    return kinds


def _by_capacity(kinds: list[_Kind], needs: Needs, span: float) -> float:
    """A lower bound of the sum of all completions."""
    count = needs.shape[1]
    sample = needs[:, :: max(1, count // SAMPLE_REQUESTS)]
    scale = count / sample.shape[1]
    slowest = sorted(np.max([kind.alone(sample) for kind in kinds], axis=0))
    best = (0.0, 0.0, 0.0, [0.0] * len(kinds))
    for late in {slowest[len(slowest) // 2], slowest[-1], 2 * slowest[-1]}:
        for share in SHARES:
            prices = [0.0] * len(kinds)
            value = _dual(kinds, sample, span, late, share, prices, scale)
            for _ in range(PRICE_ROUNDS):
                for place in range(len(kinds)):
                    for price in PRICES:
                        tried = [*prices[:place], price, *prices[place + 1 :]]
                        found = _dual(kinds, sample, span, late, share, tried, scale)
                        if found > value:
                            value, prices = found, tried
            if value > best[0]:
                best = (value, late, share, prices)
    _, late, share, prices = best
    return _dual(kinds, needs, span, late, share, prices)


def _dual(
    kinds: list[_Kind],
    needs: Needs,
    span: float,
    late: float,
    share: float,
    prices: list[float],
    scale: float = 1.0,
) -> float:
    costs, paid = [np.full(needs.shape[1], late)], 0.0
    for kind, price in zip(kinds, prices, strict=True):
        paid += price * kind.nodes
        costs.append(kind.alone(needs) + price * np.dot(kind.rates(share), needs))
    return float(np.min(costs, axis=0).sum()) * scale - paid * (span + late)


def _by_queueing(kinds: list[_Kind], jobs: Sequence[Job], needs: Needs, share: float) -> float:
    """The sum of all completions on one server of the summed speed, least work left first."""
    rates = [kind.rates(share) for kind in kinds]
    read, write = (max(rate[i] for rate in rates) for i in range(2))
    # The most that a node of each kind can be worth, in nodes of the highest costs.
    speed = 0.0
    for kind, (own_read, own_write) in zip(kinds, rates, strict=True):
        ratios = [
            slowest / own for slowest, own in ((read, own_read), (write, own_write)) if slowest > 0
        ]
        speed += kind.nodes * max(ratios)
    work = np.dot((read, write), needs) / speed
    left: list[float] = []
    total = 0.0
    now = 0.0
    for arrived, seconds in sorted(zip([job.arrived for job in jobs], work.tolist(), strict=True)):
        while left and now + left[0] <= arrived:
            now += heappop(left)
            total += now
        if left:
            # The smallest stays the smallest, so the heap stays valid.
            left[0] -= max(0.0, arrived - now)
        now = max(now, arrived)
        heappush(left, seconds)
        total -= arrived
    while left:
        now += heappop(left)
        total += now
    return total
