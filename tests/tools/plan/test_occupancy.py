from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from gateway.tools.plan.occupancy import NodeTimes, estimate, node_times
from gateway.tools.plan.queueing import allen_cunneen, erlang_c
from gateway.tools.simulate.server import SimulatedMachine, SimulatedServer
from gateway.tools.simulate.trace import Job, TracePrompt
from tests.tools.plan.accuracy import SHAPES, USES, Shape, both


def machine(slots: int = 1, decode: float = 10, prefill: float = 100) -> SimulatedMachine:
    return SimulatedMachine("m", slots, prefill, decode)


def test_one_slot_is_the_queue_of_the_books() -> None:
    times = node_times(machine(), 300, 100)
    assert times.alone == times.full == pytest.approx(3.0 + 9.9)
    for nodes, use in ((1, 0.3), (1, 0.8), (3, 0.6)):
        arrivals = use * nodes * times.capacity
        found = estimate(times, nodes, arrivals, lengths_scv=1.0)
        books = erlang_c(nodes, arrivals * times.full)
        assert found.erlang_c == pytest.approx(books)
        # Requests have two phases here, of which Erlang's formula has one.
        assert found.waiting_share == pytest.approx(books, rel=0.02)
        scv = times.service_scv(1.0)
        wait = allen_cunneen(books, arrivals, nodes * times.capacity, service_scv=scv)
        assert found.wait == pytest.approx(wait, rel=0.02)
        assert found.completion == pytest.approx(found.wait + times.full)


def test_times_are_those_of_the_simulated_server() -> None:
    """A full node, kept full, ends as many requests as the formula says."""
    one = machine(slots=4, decode=40, prefill=600)
    prompt, output, jobs = 700, 100, 400
    times = node_times(one, prompt, output)
    server = SimulatedServer(one)
    now, ended = 0.0, 0
    rng = random.Random(3)
    for number in range(jobs):
        # Lengths differ, or all would read and write in step.
        tokens, written = rng.randrange(600, 801), rng.randrange(60, 141)
        server.take(Job(number, 0.0, TracePrompt(-1 - number, tokens), written), 0.0)
    while server.next_end >= 0:
        now = server.next_end
        ended += len(server.end_steps(now)[1])
    assert ended == jobs
    assert ended / now == pytest.approx(times.capacity, rel=0.05)


def test_slots_that_share_a_node_are_no_more_servers() -> None:
    single, double = node_times(machine(1), 300, 100), node_times(machine(2), 300, 100)
    assert single.capacity < double.capacity < 2 * single.capacity


def test_more_nodes_wait_less_and_more_traffic_waits_more() -> None:
    times = node_times(machine(2), 300, 100)
    waits = [estimate(times, nodes, 0.1).wait for nodes in (1, 2, 3, 8, 50)]
    assert all(more < less for less, more in pairwise(waits) if less > 0)
    waits = [estimate(times, 2, use * 2 * times.capacity).wait for use in (0.1, 0.5, 0.9, 0.99)]
    assert all(less < more for less, more in pairwise(waits))


def test_an_overload_has_no_mean_wait() -> None:
    times = node_times(machine(2), 300, 100)
    found = estimate(times, 1, times.capacity)
    assert (found.utilisation, found.wait, found.waiting_share) == (1.0, math.inf, 1.0)
    assert estimate(times, 1, 0.0).wait == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("slots", [33, 64, 200])
def test_many_slots_and_many_nodes_are_estimated_at_once(slots: int) -> None:
    times = node_times(SimulatedMachine("m", slots, 5000, 100, 0.02), 1000, 200)
    for nodes in (1, 40, 5000):
        found = estimate(times, nodes, 0.9 * nodes * times.capacity)
        assert 0 <= found.waiting_share < 1
        assert found.service >= times.alone * 0.99


@pytest.mark.parametrize(("nodes", "arrivals"), [(0, 1.0), (1, -1.0), (1, math.nan)])
def test_figures_that_are_no_fleet_are_refused(nodes: int, arrivals: float) -> None:
    with pytest.raises(ValueError, match="an estimate needs a node"):
        estimate(NodeTimes(1, 1.0, 0.5, 0.5, 0.1), nodes, arrivals)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES[1:5], ids=str)
@pytest.mark.parametrize("use", USES)
def test_the_estimate_of_the_mean_wait_is_within_15_per_cent_of_the_simulator(
    shape: Shape, use: float
) -> None:
    """Or nearer to it than the simulator can tell, at 95 % confidence."""
    found, trial = both(shape, use, requests=10_000, seed=11)
    assert abs(found.wait - trial.wait.mean) <= max(0.15 * trial.wait.mean, trial.wait_error)
    assert found.service == pytest.approx(trial.service, rel=0.05)
