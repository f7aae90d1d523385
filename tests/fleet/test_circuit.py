from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.routing import HealthSettings
from gateway.fleet.circuit import OPEN_JITTER, Circuit, CircuitPhase

RULES = HealthSettings(failures=3, open=30, open_max=300, slow_start=30)


def a_circuit(rules: HealthSettings = RULES) -> Circuit:
    return Circuit(rules, random.Random(1))


def opened(now: float = 0.0) -> Circuit:
    circuit = a_circuit()
    for _ in range(RULES.failures):
        circuit.record_failure(now)
    return circuit


def end_of_open(circuit: Circuit) -> float:
    assert circuit.open_until is not None
    return circuit.open_until


def test_failures_in_a_row_open_it() -> None:
    circuit = a_circuit()
    assert [circuit.record_failure(t) for t in (1.0, 1.0, 1.0)] == [False, False, True]
    assert circuit.phase(1.0) is CircuitPhase.OPEN


def test_a_success_between_failures_keeps_it_closed() -> None:
    circuit = a_circuit()
    for now in range(20):
        circuit.record_failure(now)
        circuit.record_failure(now)
        circuit.record_success(now)
    assert circuit.phase(20) is CircuitPhase.CLOSED


def test_it_stays_open_for_about_the_set_time_then_wants_one_trial() -> None:
    circuit = opened(now=100.0)
    until = end_of_open(circuit)
    assert 100 + 30 * (1 - OPEN_JITTER) <= until <= 100 + 30 * (1 + OPEN_JITTER)
    assert circuit.next_change(100.0) == until
    assert not circuit.wants_trial(until - 0.001)
    assert circuit.phase(until) is CircuitPhase.HALF_OPEN
    assert circuit.wants_trial(until)
    circuit.begin_trial("lease")
    assert not circuit.wants_trial(until + 100)


def test_a_trial_that_fails_opens_it_for_twice_as_long_up_to_the_maximum() -> None:
    circuit = opened()
    lengths = [circuit.open_seconds]
    for _ in range(6):
        now = end_of_open(circuit)
        circuit.begin_trial("lease")
        assert circuit.record_failure(now + 1, began=now)
        lengths.append(circuit.open_seconds)
    assert lengths == [30, 60, 120, 240, 300, 300, 300]


def test_a_trial_that_succeeds_closes_it() -> None:
    circuit = opened()
    now = end_of_open(circuit)
    circuit.begin_trial("lease")
    assert circuit.record_success(now + 1, began=now)
    assert circuit.phase(now + 1) is CircuitPhase.CLOSED
    assert circuit.failures == 0


def test_a_node_that_was_killed_gets_work_when_it_is_back() -> None:
    circuit = opened(now=10.0)
    circuit.server_restarted(11.0)
    assert circuit.phase(11.0) is CircuitPhase.CLOSED
    assert circuit.slow_start_slots(10, 11.0) == 1  # step by step
    assert not circuit.record_failure(11.5, began=9.0)  # another request that the crash ended
    assert circuit.phase(11.5) is CircuitPhase.CLOSED


def test_a_node_that_keeps_dying_stays_out_though_it_comes_back() -> None:
    circuit = opened(now=10.0)
    circuit.server_restarted(11.0)
    for _ in range(RULES.failures):
        circuit.record_failure(20.0)
    circuit.server_restarted(21.0)
    assert circuit.open_seconds == 60
    assert circuit.phase(21.0) is CircuitPhase.OPEN


def test_a_few_failures_are_not_forgotten_when_a_node_comes_back() -> None:
    circuit = a_circuit()
    for now in range(RULES.failures - 1):
        circuit.record_failure(now)
        circuit.server_restarted(now + 0.5)
    assert circuit.record_failure(RULES.failures)


def test_a_trial_that_proves_nothing_makes_room_for_the_next() -> None:
    circuit = opened()
    now = end_of_open(circuit)
    circuit.begin_trial("first")
    circuit.end_trial("first")
    assert circuit.wants_trial(now)


def test_the_end_of_an_old_trial_does_not_end_the_new_one() -> None:
    circuit = opened()
    now = end_of_open(circuit)
    circuit.begin_trial("first")
    circuit.record_failure(now + 1, began=now)
    again = end_of_open(circuit)
    circuit.begin_trial("second")
    circuit.end_trial("first")
    assert not circuit.wants_trial(again)


def test_requests_that_began_before_it_opened_neither_extend_nor_close_it() -> None:
    circuit = opened(now=100.0)
    until = end_of_open(circuit)
    assert not circuit.record_failure(110.0, began=90.0)
    assert not circuit.record_failure(until + 1, began=90.0)
    assert not circuit.record_success(until + 1, began=90.0)
    assert circuit.open_until == until


def test_an_old_failure_does_not_count_against_a_node_that_has_come_back() -> None:
    circuit = opened(now=100.0)
    now = end_of_open(circuit)
    circuit.record_success(now, began=now)
    circuit.record_failure(now + 1, began=99.0)
    assert circuit.failures == 0


@pytest.mark.parametrize(("calm", "length"), [(10.0, 60.0), (301.0, 30.0)])
def test_the_doubling_is_forgotten_after_it_stayed_closed_for_long(
    calm: float, length: float
) -> None:
    circuit = opened()
    now = end_of_open(circuit)
    circuit.record_success(now, began=now)
    for _ in range(RULES.failures):
        circuit.record_failure(now + calm)
    assert circuit.open_seconds == length


def test_after_it_closed_it_has_a_slow_start() -> None:
    circuit = opened()
    now = end_of_open(circuit)
    circuit.record_success(now, began=now)
    allowed = [circuit.slow_start_slots(8, now + t) for t in (0, 10, 15, 20, 29, 30, 31)]
    assert allowed == [1, 3, 4, 6, 8, 8, 8]
    assert circuit.next_change(now + 31) == float("inf")


def test_a_slow_start_ends_without_any_call() -> None:
    circuit = opened()
    now = end_of_open(circuit)
    circuit.record_success(now, began=now)
    assert circuit.next_change(now + 29.5) == now + 30
    assert circuit.next_change(now + 30) == float("inf")
    assert circuit.fully_closed


def test_a_node_that_never_failed_has_no_slow_start() -> None:
    assert a_circuit().slow_start_slots(8, 0.0) == 8


def test_an_operator_can_close_it() -> None:
    circuit = opened()
    assert circuit.close(1.0)
    assert circuit.phase(1.0) is CircuitPhase.CLOSED
    assert not circuit.close(1.0)


steps = st.lists(
    st.tuples(
        st.sampled_from(["failed", "succeeded", "trial", "end"]),
        st.floats(0, 50),
        st.floats(0, 100),
    )
)


@given(steps)
def test_any_events_leave_at_most_one_trial_and_bounded_openings(
    story: list[tuple[str, float, float]],
) -> None:
    circuit, now, out = a_circuit(), 1000.0, None
    for n, (what, passes, ago) in enumerate(story):
        now += passes
        if what == "failed":
            was = circuit.open_until
            if circuit.record_failure(now, began=now - ago):
                assert circuit.phase(now) is CircuitPhase.OPEN
                assert 30 <= circuit.open_seconds <= 300
                assert end_of_open(circuit) - now <= 300 * (1 + OPEN_JITTER)
            else:
                assert circuit.open_until == was
        elif what == "succeeded":
            circuit.record_success(now, began=now - ago)
        elif what == "trial" and circuit.wants_trial(now):
            out = n
            circuit.begin_trial(out)
            assert not circuit.wants_trial(now)
        elif what == "end":
            circuit.end_trial(out)
        assert circuit.next_change(now) > now
        assert 0 < circuit.slow_start_share(now) <= 1
        assert 1 <= circuit.slow_start_slots(4, now) <= 4
