from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.schedule.candidates import HOPE_GUESSED
from gateway.schedule.core.dispatcher import DispatchRules
from gateway.workshop.simulate.fronts import (
    ExactKnowledge,
    ExpectedRequest,
    GatewayFront,
    Knowledge,
    LearntKnowledge,
    LeastConn,
)
from gateway.workshop.simulate.simulation import Job, SimulatedFleet, SimulatedMachine, simulate
from tests.lease_requests import expected
from tests.workshop.simulate.build import job, machine, trace


def test_least_conn_sends_at_once_and_takes_turns_among_equals() -> None:
    jobs = [job(time=i / 1000, output=100) for i in range(7)]
    simulate(trace(jobs), [machine(1, str(i)) for i in range(3)], LeastConn(3))
    assert [one.node for one in jobs] == [0, 1, 2, 0, 1, 2, 0]
    assert all(one.sent == one.arrived for one in jobs)


def test_maxconn_keeps_the_rest_in_one_queue() -> None:
    jobs = [job(time=i / 1000, output=100 if i % 2 else 30) for i in range(6)]
    simulate(trace(jobs), [machine(1, str(i)) for i in range(2)], LeastConn(2, [1, 1]))
    assert [one.node for one in jobs[:2]] == [0, 1]
    # The first node is free earlier and gets the next two in their order.
    assert jobs[2].node == jobs[3].node == 0
    assert all(one.began == one.sent for one in jobs)


class Recording(ExactKnowledge):
    """Exact knowledge that keeps what it predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.predicted: dict[int, ExpectedRequest] = {}

    def expect(self, job: Job, fleet: SimulatedFleet) -> ExpectedRequest:
        self.predicted[job.id] = known = super().expect(job, fleet)
        return known


def test_exact_knowledge_has_what_is_cached_and_what_will_be() -> None:
    first = job(prompt=1000, output=100, stream=1, head=5, shared=400)
    then = job(time=2.0, prompt=600, output=5, stream=2, head=5, shared=400)
    later = job(time=60.0, prompt=1200, output=5, stream=1, head=5, shared=400)
    recording = Recording()
    machines = [machine(2)]
    simulate(trace([first, then, later]), machines, GatewayFront(machines, knowledge=recording))
    assert (recording.predicted[0].cached, recording.predicted[0].pending) == ({}, {})
    assert (recording.predicted[1].cached, recording.predicted[1].pending) == ({}, {0: 400})
    assert (recording.predicted[2].cached, recording.predicted[2].pending) == ({0: 1099}, {})
    assert (recording.predicted[1].prompt_tokens, recording.predicted[1].completion_tokens) == (
        600,
        5,
    )
    assert recording.predicted[0].affinity_hash == recording.predicted[1].affinity_hash


def test_the_old_prompt_of_a_busy_slot_is_not_cached() -> None:
    first = job(prompt=1000, output=100, stream=1, head=5, shared=400)
    second = job(time=60.0, prompt=1200, output=500, stream=1, head=5, shared=400)
    then = job(time=61.0, prompt=600, output=5, stream=2, head=5, shared=400)
    recording = Recording()
    machines = [machine(2)]
    simulate(trace([first, second, then]), machines, GatewayFront(machines, knowledge=recording))
    assert second.cached == 1099
    assert (recording.predicted[2].cached, recording.predicted[2].pending) == ({}, {0: 400})
    assert then.cached == 0


@pytest.mark.parametrize(
    "knowledge", [ExactKnowledge(), LearntKnowledge()], ids=["exact", "learnt"]
)
def test_a_request_that_waited_finds_what_was_cached_meanwhile(knowledge: Knowledge) -> None:
    """One slot: the second turn of a conversation arrives while the first one runs."""
    machines = [machine(1)]
    front = GatewayFront(machines, DispatchRules(), 0, knowledge)
    jobs = [
        job(prompt=1000, output=100, stream=1, head=5, shared=900),
        job(time=0.5, prompt=1100, output=5, stream=2, head=5, shared=900),
    ]
    simulate(trace(jobs), machines, front)
    assert jobs[1].cached == 900
    assert front.dispatcher.waiting == 0


def test_learnt_lengths_are_those_of_each_caller() -> None:
    learnt = LearntKnowledge()
    machines = [machine(2, "a"), machine(2, "b")]
    jobs = [
        job(time=i * 20.0, output=150 if i % 2 else 15, caller="long" if i % 2 else "short")
        for i in range(60)
    ]
    simulate(trace(jobs), machines, GatewayFront(machines, knowledge=learnt))
    for caller, output in (("long", 150), ("short", 15)):
        _, completion = expected(learnt.token_estimates, "model", caller, 400, None)
        assert completion == pytest.approx(output, rel=0.35)


def test_a_conversation_returns_to_its_node() -> None:
    """Four nodes, four conversations one after the other: each turn goes to the last one's node."""
    machines = [machine(1, str(number)) for number in range(4)]
    jobs = [
        job(
            time=turn * 100.0 + conversation * 10,
            prompt=800 * (turn + 1),
            output=20,
            stream=conversation + 1,
        )
        for turn in range(6)
        for conversation in range(4)
    ]
    simulate(trace(jobs), machines, GatewayFront(machines, knowledge=LearntKnowledge()))
    later = [one for one in jobs if one.is_later_turn]
    assert len(later) == 20
    assert all(one.cached >= one.prompt.tokens - 800 - 1 for one in later)


FLEET = [
    machine(2, f"n{decode}", decode=decode, prefill=15 * decode) for decode in (5.0, 12.0, 60.0)
]


def served_by(knowledge: LearntKnowledge, machines: list[SimulatedMachine]) -> list[int]:
    """The nodes of twenty chats with one system prompt, that come one by one."""
    chats = [
        job(time=60.0 * place, prompt=1600, output=40, head=5, shared=1500) for place in range(20)
    ]
    simulate(trace(chats), machines, GatewayFront(machines, knowledge=knowledge))
    return [chat.node for chat in chats]


def test_a_warm_gateway_knows_the_speeds_and_a_cold_one_calibrates_and_explores() -> None:
    assert served_by(LearntKnowledge(warm=True), FLEET) == [2] * 20
    # Calibrated between the first chat and the second.
    assert served_by(LearntKnowledge(), FLEET)[1:] == [2] * 19
    alone = [replace(one, calibrated=False) for one in FLEET]
    found = served_by(LearntKnowledge(), alone)
    assert set(found) == {0, 1, 2}
    assert found[8:] == [2] * 12


def test_machines_of_one_host_are_calibrated_one_after_the_other() -> None:
    def known(machines: list[SimulatedMachine], seconds: float) -> int:
        knowledge = LearntKnowledge()
        front = GatewayFront(machines, knowledge=knowledge)
        later = [job(time=seconds * place) for place in range(2)]
        simulate(trace(later), machines, front)
        return sum(row.hope == HOPE_GUESSED for row in front.state.rows)

    machines = [machine(2, f"n{place}", prefill=100.0) for place in range(12)]
    # Each takes two seconds or so; at most eight at once.
    assert known(machines, 3.0) == 8
    assert known([replace(one, host="one") for one in machines], 7.0) == 3
