"""The first estimate: capacity and mean wait of equal nodes whose slots share their speed.

Erlang C assumes servers that are as fast beside busy neighbours as alone. The slots of a llama.cpp
node are not: prompts are read one after the other while the neighbours stand still, and each
further slot that writes makes a step longer. So each node is a part of a Markov chain here: r
requests that read and w that write, with

    reading      1 / X                          a second, one at a time, before any writing
    writing      w / (D (1 + c (w - 1)))        a second, of all w together, while none reads

for X seconds of node time that a prompt takes, D seconds that an answer takes alone, and c, the
cost of a busy slot more (`gateway/tools/simulate/server.py` computes the same step by step). The
chain of a fleet has the states of all its nodes; an arrival goes to a node with the least busy
slots. The queue makes it a quasi-birth-death process, solved by logarithmic reduction (Latouche and
Ramaswami, "A logarithmic reduction algorithm for quasi-birth-death processes", 1993). Of a larger
fleet only busy slots are counted, and what a node does with k of them is taken from its own chain.
Last, Allen-Cunneen's factor replaces the exponential lengths of the chains by those of the traffic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise

import numpy as np
import numpy.typing as npt

from gateway.tools.plan.queueing import allen_cunneen, busy_probability, erlang_c
from gateway.tools.simulate.server import SimulatedMachine

MOST_CHAIN_SLOTS = 32
"""Slots of a node up to which its chain is solved: 561 states, 50 ms."""

MOST_PHASE_STATES = 700
"""States of the exact chain of a fleet: 3 nodes of 4 slots, 6 of 2, 36 of 1. More are estimated by
their busy slots."""

MOST_FLEET_STATES = 700
"""States of the chain of busy slots; a still larger fleet is taken to be evenly busy."""

LEAST_ARRIVALS = 1e-9
"""Requests per second: the chains need some."""

LEAST_PROBABILITY = 1e-200
"""A smaller one is none, and would not survive a division."""

_ROUNDS = 2
"""Times that the nodes' chains and that of the fleet are solved with each other's results."""

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """Seconds that one request takes of a node. Slots share it."""

    slots: int
    alone: float
    """In a slot, if no other is busy."""
    reading: float
    """X: node time in which its prompt is read and no other slot writes."""
    writing: float
    """D: its answer, if no other slot writes."""
    batch_cost: float

    @property
    def full(self) -> float:
        """Mean seconds in a slot while all slots are busy all the time."""
        slots = self.slots
        return slots * self.reading + self.writing * (1.0 + self.batch_cost * (slots - 1))

    @property
    def capacity(self) -> float:
        """Most requests that the node ends per second."""
        return self.slots / self.full

    def write_rate(self, writers: int) -> float:
        """Answers that end per second while so many are written and no prompt is read."""
        if not writers:
            return 0.0
        return writers / (self.writing * (1.0 + self.batch_cost * (writers - 1)))

    def service_scv(self, lengths_scv: float) -> float:
        """Squared coefficient of variation of the time in a slot of a full node.

        Prompts and answers vary independently, each by `lengths_scv`. Neighbours' prompts come in
        while it writes, so that this part is in proportion to the answer.
        """
        rest = self.full - self.reading
        return lengths_scv * (self.reading**2 + rest**2) / self.full**2


def node_times(machine: SimulatedMachine, prompt: float, completion: float) -> NodeTimes:
    """What a mean request takes of a machine: `prompt` uncached tokens, `completion` tokens.

    A prompt is read in steps of `batch_tokens`. Such a step is one of decoding, too: it costs the
    writers only by how much it is longer than theirs.
    """
    slots = machine.slots
    base, step = machine.token_base, machine.token_step
    steps = max(1.0, math.ceil(prompt / (machine.batch_tokens - slots + 1)))
    one_step = max(base, prompt / steps / machine.prefill_tps)
    tokens = max(0.0, completion - 1.0)
    alone = steps * one_step + tokens * base
    reading = steps * one_step
    if slots > 1:
        reading = steps * (one_step - base + step)
    return NodeTimes(slots, alone, reading, max(alone - reading, 1e-9), machine.batch_cost)


@dataclass(frozen=True, slots=True)
class WaitEstimate:
    """What the formulas say of a fleet of equal nodes. Seconds; infinite when overloaded."""

    utilisation: float
    """Arrivals as a share of the capacity."""
    waiting_share: float
    """Share of the requests that find every slot busy."""
    wait: float
    """Mean seconds until a slot is free."""
    service: float
    """Mean seconds in a slot."""
    erlang_c: float
    """Probability of waiting of an M/M/c queue whose slots are always as slow as full ones."""
    service_scv: float
    """Squared coefficient of variation of the time in a slot (Allen-Cunneen's Cs²)."""

    @property
    def completion(self) -> float:
        """Mean seconds from arrival to the last token."""
        return self.wait + self.service


def estimate(
    times: NodeTimes,
    nodes: int,
    arrivals: float,
    *,
    arrival_scv: float = 1.0,
    lengths_scv: float = 1.0,
) -> WaitEstimate:
    """Estimate the waits of `nodes` equal nodes at `arrivals` requests per second.

    Raises ValueError for figures that are no fleet.
    """
    if nodes < 1 or not 0 <= arrivals < math.inf:
        raise ValueError("an estimate needs a node, and a finite rate of arrivals")
    most = nodes * times.capacity
    service_scv = times.service_scv(lengths_scv)
    full_scv = times.service_scv(1.0)
    offered = erlang_c(nodes * times.slots, arrivals * times.full)
    if arrivals >= most:
        return WaitEstimate(arrivals / most, 1.0, math.inf, times.full, offered, service_scv)
    arrivals = max(arrivals, LEAST_ARRIVALS)
    if times.slots > MOST_CHAIN_SLOTS:
        found = _evenly_busy(times, nodes, arrivals, _shared_rates(times))
    else:
        found = _by_chains(times, nodes, arrivals)
    waiting, wait, service = found
    # The chains' own lengths are exponential: Allen-Cunneen's factor without its half.
    wait *= (arrival_scv + service_scv) / (1.0 + full_scv)
    return WaitEstimate(arrivals / most, waiting, wait, service, offered, service_scv)


def _shared_rates(times: NodeTimes) -> list[float]:
    """Requests that a node ends per second with 0 to all slots busy, as a mean of their phases."""
    cost = times.batch_cost
    return [
        busy / (busy * times.reading + times.writing * (1.0 + cost * (busy - 1)))
        for busy in range(times.slots + 1)
    ]


def _evenly_busy(
    times: NodeTimes, nodes: int, arrivals: float, rates: Sequence[float]
) -> tuple[float, float, float]:
    """Share that waits, mean wait and service, if all nodes have as many busy slots."""

    def rate(busy: int) -> float:
        each, more = divmod(busy, nodes)
        return (nodes - more) * rates[each] + (more * rates[each + 1] if more else 0.0)

    servers = nodes * times.slots
    most = rate(servers)
    waiting = busy_probability(servers, arrivals, rate)
    wait = allen_cunneen(waiting, arrivals, most, service_scv=1.0)
    # In service by Little's law: a node's share of the arrivals at its own speed.
    low, high = 0.0, float(times.slots)
    for _ in range(50):
        middle = (low + high) / 2
        below = int(min(middle, times.slots - 1))
        part = middle - below
        if (1 - part) * rates[below] + part * rates[below + 1] < arrivals / nodes:
            low = middle
        else:
            high = middle
    return waiting, wait, max(times.alone, high * nodes / arrivals)


def _by_chains(times: NodeTimes, nodes: int, arrivals: float) -> tuple[float, float, float]:
    """Share that waits, mean wait and service, by the chain of a node and that of the fleet."""
    slots = times.slots
    if _PhaseChain.size(slots, nodes) <= MOST_PHASE_STATES:
        exact = _PhaseChain(times, nodes).solve(arrivals)
        return exact.waiting, exact.queued / arrivals, exact.busy / arrivals
    each = arrivals / nodes
    single = _PhaseChain(times, 1).solve(each)
    if single.waiting < LEAST_PROBABILITY:
        return 0.0, 0.0, max(times.alone, single.busy / each)
    # How much longer waits are than in a queue whose full rate never changes.
    shape = single.queued / each * (times.capacity - each) / single.waiting
    shares = single.node_busy
    rates = [
        0.0,
        *(below * each / max(above, LEAST_PROBABILITY) for below, above in pairwise(shares)),
    ]
    rates[slots] = times.capacity
    if math.comb(nodes + slots, slots) > MOST_FLEET_STATES:
        waiting, wait, service = _evenly_busy(times, nodes, arrivals, rates)
        return waiting, wait * shape, service
    fleet = _FleetChain(nodes, slots)
    replaced = arrivals / (nodes * times.capacity)
    waiting, busy = 0.0, 0.0
    for _ in range(_ROUNDS):
        waiting, busy, arriving = fleet.solve(arrivals, rates)
        rates = _rates_given_arrivals(times, arriving, replaced)
        rates[slots] = times.capacity
    wait = waiting / (nodes * times.capacity - arrivals) * shape
    return waiting, wait, busy / arrivals


@dataclass(frozen=True, slots=True)
class _Solved:
    waiting: float
    """Probability that every slot is busy."""
    queued: float
    """Mean requests that wait."""
    busy: float
    """Mean busy slots."""
    node_busy: tuple[float, ...]
    """Mean number of nodes with 0 to all slots busy."""


_NodeState = tuple[int, int]
"""Requests of a node that read, and that write."""

_FleetState = tuple[_NodeState, ...]
"""Those of all nodes, sorted: which node is which makes no difference."""


class _PhaseChain:
    """What every request of every node does; behind the states without a free slot a queue.

    Exact for exponential lengths, and for small fleets only.
    """

    def __init__(self, times: NodeTimes, nodes: int) -> None:
        self._times = times
        slots = times.slots
        of_a_node = [
            (reads, busy - reads) for busy in range(slots + 1) for reads in range(busy + 1)
        ]
        fleets = combinations_with_replacement(sorted(of_a_node), nodes)
        self._states = {fleet: place for place, fleet in enumerate(fleets)}
        self._full = [fleet for fleet in self._states if all(sum(one) == slots for one in fleet)]

    @staticmethod
    def size(slots: int, nodes: int) -> int:
        """Number of its states."""
        of_a_node = (slots + 1) * (slots + 2) // 2
        return math.comb(nodes + of_a_node - 1, nodes)

    def solve(self, arrivals: float) -> _Solved:
        """Solve it at so many arrivals per second, fewer than the capacity."""
        states, slots = self._states, self._times.slots
        full = [states[fleet] for fleet in self._full]
        phases = len(full)
        return_matrix, down = self._queue(arrivals)
        flow = np.zeros((len(states), len(states)))
        for fleet, place in states.items():
            least = min(sum(one) for one in fleet)
            if least < slots:
                free = [one for one in fleet if sum(one) == least]
                for reads, writes in free:
                    after = states[_replaced(fleet, (reads, writes), (reads + 1, writes))]
                    flow[place, after] += arrivals / len(free)
            for node, after_node, rate in self._steps(fleet):
                flow[place, states[_replaced(fleet, node, after_node)]] += rate
        # Where the queue's end is in: its rows sum to the arrivals, which leave for the queue.
        flow[np.ix_(full, full)] += return_matrix @ down
        levels = np.linalg.inv(np.eye(phases) - return_matrix)
        norm = np.ones(len(states))
        norm[full] = levels.sum(axis=1)
        found = _stationary(flow, norm)
        at_full = found[full]
        queued = float((at_full @ return_matrix @ levels @ levels).sum())
        weights = found * norm
        node_busy = [0.0] * (slots + 1)
        for fleet, place in states.items():
            for one in fleet:
                node_busy[sum(one)] += float(weights[place])
        busy = sum(number * share for number, share in enumerate(node_busy))
        return _Solved(float(weights[full].sum()), queued, busy, tuple(node_busy))

    def _steps(self, fleet: _FleetState) -> Iterator[tuple[_NodeState, _NodeState, float]]:
        """What may happen next in each node: its state, the one after, and the rate."""
        for reads, writes in fleet:
            if reads:
                yield (reads, writes), (reads - 1, writes + 1), 1.0 / self._times.reading
            elif writes:
                yield (reads, writes), (0, writes - 1), self._times.write_rate(writes)

    def _queue(self, arrivals: float) -> tuple[Matrix, Matrix]:
        """Neuts' matrix R of the levels with a queue, and the rates by which a level falls."""
        slots = self._times.slots
        places = {fleet: place for place, fleet in enumerate(self._full)}
        phases = len(places)
        up = arrivals * np.eye(phases)
        down, stay = np.zeros((phases, phases)), np.zeros((phases, phases))
        for fleet, place in places.items():
            for node, after, rate in self._steps(fleet):
                if node[0]:
                    stay[place, places[_replaced(fleet, node, after)]] += rate
                else:
                    # A request of the queue takes the slot, and reads.
                    down[place, places[_replaced(fleet, node, (1, slots - 1))]] += rate
        np.fill_diagonal(stay, -(arrivals + stay.sum(axis=1) + down.sum(axis=1)))
        inverse = np.linalg.inv(-stay)
        rise, fall = inverse @ up, inverse @ down
        goal, product = fall.copy(), rise.copy()
        one = np.eye(phases)
        for _ in range(64):
            both = rise @ fall + fall @ rise
            rise, fall = _solved(one - both, rise @ rise), _solved(one - both, fall @ fall)
            goal = goal + product @ fall
            product = product @ rise
            if np.abs(product).max() < 1e-13:
                break
        found: Matrix = np.asarray(up @ np.linalg.inv(-(stay + up @ goal)), dtype=np.float64)
        return found, down


def _replaced(fleet: _FleetState, node: _NodeState, after: _NodeState) -> _FleetState:
    """The fleet with one node in that state in another."""
    nodes = list(fleet)
    nodes.remove(node)
    nodes.append(after)
    return tuple(sorted(nodes))


class _FleetChain:
    """States: how many nodes have 0, 1, ... busy slots. An arrival goes to a least busy node."""

    def __init__(self, nodes: int, slots: int) -> None:
        self._nodes, self._slots = nodes, slots
        self._states = {state: place for place, state in enumerate(_compositions(nodes, slots + 1))}

    def solve(
        self, arrivals: float, rates: Sequence[float]
    ) -> tuple[float, float, tuple[float, ...]]:
        """Probability of waiting, mean busy slots, and arrivals at a node by its busy slots."""
        states, slots, nodes = self._states, self._slots, self._nodes
        flow = np.zeros((len(states), len(states)))
        all_full = (*([0] * slots), nodes)
        for state, place in states.items():
            least = next(busy for busy in range(slots + 1) if state[busy])
            if least < slots:
                flow[place, states[_moved(state, least, least + 1)]] += arrivals
            for busy in range(1, slots + 1):
                if state[busy]:
                    after = states[_moved(state, busy, busy - 1)]
                    flow[place, after] += state[busy] * rates[busy]
        queueing = 1.0 / (1.0 - arrivals / (nodes * rates[slots]))
        norm = np.ones(len(states))
        norm[states[all_full]] = queueing
        found = _stationary(flow, norm)
        arriving, with_busy = [0.0] * (slots + 1), [0.0] * (slots + 1)
        for state, place in states.items():
            share = float(found[place]) * (queueing if state == all_full else 1.0)
            for busy in range(slots + 1):
                with_busy[busy] += share * state[busy]
            least = next(busy for busy in range(slots + 1) if state[busy])
            if least < slots:
                arriving[least] += float(found[place]) * arrivals
        waiting = float(found[states[all_full]]) * queueing
        mean = sum(busy * count for busy, count in enumerate(with_busy))
        by_busy = (
            one / max(many, LEAST_PROBABILITY)
            for one, many in zip(arriving, with_busy, strict=True)
        )
        return waiting, mean, tuple(by_busy)


def _rates_given_arrivals(
    times: NodeTimes, arriving: Sequence[float], replaced: float
) -> list[float]:
    """Requests that a node ends per second by its busy slots, at arrivals that depend on them.

    `replaced`: probability that a request which ends in a full node is followed by one that waits.
    """
    slots = times.slots
    states = _states(slots)
    flow = np.zeros((len(states), len(states)))
    for (reads, writes), place in states.items():
        if reads + writes < slots:
            flow[place, states[reads + 1, writes]] += max(arriving[reads + writes], LEAST_ARRIVALS)
        if reads:
            flow[place, states[reads - 1, writes + 1]] += 1.0 / times.reading
        elif writes:
            rate = times.write_rate(writes)
            follows = replaced if writes == slots else 0.0
            flow[place, states[0, writes - 1]] += rate * (1.0 - follows)
            flow[place, states[1, writes - 1]] += rate * follows
    found = _stationary(flow, np.ones(len(states)))
    rates = [0.0]
    for busy in range(1, slots + 1):
        share = sum(float(found[states[reads, busy - reads]]) for reads in range(busy + 1))
        ending = float(found[states[0, busy]]) * times.write_rate(busy)
        # A state that never occurs has no mean; its phases don't matter either.
        rates.append(ending / share if share > LEAST_PROBABILITY else _shared_rates(times)[busy])
    return rates


def _states(slots: int) -> dict[tuple[int, int], int]:
    """Number the states (reading, writing) of a node."""
    pairs = [(reads, busy - reads) for busy in range(slots + 1) for reads in range(busy + 1)]
    return {pair: place for place, pair in enumerate(pairs)}


def _compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to write `total` as a sum of so many whole numbers."""
    if parts == 1:
        return [(total,)]
    return [
        (first, *rest)
        for first in range(total + 1)
        for rest in _compositions(total - first, parts - 1)
    ]


def _moved(state: tuple[int, ...], source: int, target: int) -> tuple[int, ...]:
    """The state after one node has changed its number of busy slots."""
    counts = list(state)
    counts[source] -= 1
    counts[target] += 1
    return tuple(counts)


def _stationary(flow: Matrix, norm: Matrix) -> Matrix:
    """Stationary probabilities of a chain with these rates, weighted by `norm` to sum to 1."""
    rates = flow.copy()
    np.fill_diagonal(rates, rates.diagonal() - rates.sum(axis=1))
    system = rates.T.copy()
    system[0] = norm
    right = np.zeros(len(norm))
    right[0] = 1.0
    return np.maximum(_solved(system, right), 0.0)


def _solved(system: Matrix, right: Matrix) -> Matrix:
    return np.asarray(np.linalg.solve(system, right), dtype=np.float64)
