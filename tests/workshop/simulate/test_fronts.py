from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

import pytest

from gateway.nodes.prompt_cache import CacheLookup
from gateway.schedule.candidates import HOPE_GUESSED
from gateway.schedule.core.requests import PlacementState
from gateway.workshop.simulate.fronts import (
    ExactKnowledge,
    GatewayFront,
    Knowledge,
    LearntKnowledge,
    LeastConn,
)
from gateway.workshop.simulate.simulation import Job, SimulatedFleet, SimulatedMachine, simulate
from tests.lease_requests import expected
from tests.workshop.simulate.build import job, machine, play, trace


def test_least_conn_sends_at_once_and_takes_turns_among_equals() -> None:
    jobs = [job(time=i / 1000, output=100) for i in range(7)]
    play(jobs, [machine(1, str(i)) for i in range(3)])
    assert [one.node for one in jobs] == [0, 1, 2, 0, 1, 2, 0]
    assert all(one.sent == one.arrived for one in jobs)


def test_maxconn_keeps_the_rest_in_one_queue() -> None:
    jobs = [job(time=i / 1000, output=100 if i % 2 else 30) for i in range(6)]
    play(jobs, [machine(1, str(i)) for i in range(2)], partial(LeastConn, capped=True))
    assert [one.node for one in jobs[:2]] == [0, 1]
    # The first node is free earlier and gets the next two in their order.
    assert jobs[2].node == jobs[3].node == 0
    assert all(one.began == one.sent for one in jobs)


class Recording(ExactKnowledge):
    """Exact knowledge that keeps what it predicted."""

    def __init__(self, fleet: SimulatedFleet, state: PlacementState) -> None:
        super().__init__(fleet, state)
        self.found: dict[int, CacheLookup] = {}

    def look_up(self, job: Job) -> CacheLookup:
        self.found[job.id] = found = super().look_up(job)
        return found


Known = TypeVar("Known", bound=ExactKnowledge | LearntKnowledge)


def known_after(
    jobs: list[Job],
    machines: list[SimulatedMachine],
    knowledge: Callable[[SimulatedFleet, PlacementState], Known],
) -> Known:
    """What the gateway knows when it has served these."""
    front = GatewayFront(SimulatedFleet(machines, trace(jobs)), knowledge=knowledge)
    simulate(front)
    return cast("Known", front.knowledge)


def test_exact_knowledge_has_what_is_cached_and_what_will_be() -> None:
    first = job(prompt=1000, output=100, stream=1, head=5, shared=400)
    then = job(time=2.0, prompt=600, output=5, stream=2, head=5, shared=400)
    later = job(time=60.0, prompt=1200, output=5, stream=1, head=5, shared=400)
    recording = known_after([first, then, later], [machine(2)], Recording)
    assert recording.found == {0: (1000, {}, {}), 1: (600, {}, {0: 400}), 2: (1200, {0: 1099}, {})}
    assert recording.expect(first) == (100, 5)
    assert recording.expect(then) == (5, 5)
    # The old prompt of a busy slot is not cached.
    busy = job(time=60.0, prompt=1200, output=500, stream=1, head=5, shared=400)
    after = job(time=61.0, prompt=600, output=5, stream=2, head=5, shared=400)
    recording = known_after([first, busy, after], [machine(2)], Recording)
    assert recording.found[2] == CacheLookup(600, {}, {0: 400})
    assert (busy.cached, after.cached) == (1099, 0)


@pytest.mark.parametrize("knowledge", [ExactKnowledge, LearntKnowledge])
def test_a_request_that_waited_finds_what_was_cached_meanwhile(knowledge: Knowledge) -> None:
    """One slot: the second turn of a conversation arrives while the first one runs."""
    jobs = [
        job(prompt=1000, output=100, stream=1, head=5, shared=900),
        job(time=0.5, prompt=1100, output=5, stream=2, head=5, shared=900),
    ]
    play(jobs, [machine(1)], partial(GatewayFront, knowledge=knowledge))
    assert jobs[1].began == jobs[0].ended
    assert jobs[1].cached == 900


def test_learnt_lengths_are_those_of_each_caller() -> None:
    jobs = [
        job(time=i * 20.0, output=150 if i % 2 else 15, caller="long" if i % 2 else "short")
        for i in range(60)
    ]
    learnt = known_after(jobs, [machine(2, "a"), machine(2, "b")], LearntKnowledge)
    for caller, output in (("long", 150), ("short", 15)):
        _, completion = expected(learnt.token_estimates, "", caller, 400, None)
        assert completion == pytest.approx(output, rel=0.35)


def test_a_conversation_returns_to_its_node() -> None:
    """Four nodes, four conversations one after the other: each turn goes to the last one's node."""
    machines = [machine(1, str(number)) for number in range(4)]
    jobs = [
        job(turn * 100.0 + stream * 10, prompt=800 * (turn + 1), output=20, stream=stream)
        for turn in range(6)
        for stream in (1, 2, 3, 4)
    ]
    known_after(jobs, machines, LearntKnowledge)
    later = [one for one in jobs if one.is_later_turn]
    assert len(later) == 20
    assert all(one.cached >= one.prompt.tokens - 800 - 1 for one in later)


FLEET = [
    machine(2, f"n{decode}", decode=decode, prefill=15 * decode) for decode in (5.0, 12.0, 60.0)
]


def served_by(machines: list[SimulatedMachine], *, warm: bool = False) -> list[int]:
    """The nodes of twenty chats with one system prompt, that come one by one."""
    chats = [
        job(time=60.0 * place, prompt=1600, output=40, head=5, shared=1500) for place in range(20)
    ]
    known_after(chats, machines, partial(LearntKnowledge, warm=warm))
    return [chat.node for chat in chats]


def test_a_warm_gateway_knows_the_speeds_and_a_cold_one_calibrates_and_explores() -> None:
    assert served_by(FLEET, warm=True) == [2] * 20
    # Calibrated between the first chat and the second.
    assert served_by(FLEET)[1:] == [2] * 19
    alone = [replace(one, calibrated=False) for one in FLEET]
    found = served_by(alone)
    assert set(found) == {0, 1, 2}
    assert found[8:] == [2] * 12


def test_machines_of_one_host_are_calibrated_one_after_the_other() -> None:
    def known(machines: list[SimulatedMachine], seconds: float) -> int:
        later = [job(time=seconds * place) for place in range(2)]
        front = GatewayFront(SimulatedFleet(machines, trace(later)), knowledge=LearntKnowledge)
        simulate(front)
        return sum(row.hope == HOPE_GUESSED for row in front.state.rows)

    machines = [machine(2, f"n{place}", prefill=100.0) for place in range(12)]
    # Each takes two seconds or so; at most eight at once.
    assert known(machines, 3.0) == 8
    assert known([replace(one, host="one") for one in machines], 7.0) == 3
