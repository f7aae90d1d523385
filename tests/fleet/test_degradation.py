"""When a node counts as far slower than usual, and when as recovered."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.node import NodeState
from gateway.fleet.speed import (
    BASELINE_HALF_LIFE,
    DEGRADED_STALE,
    MOST_BASELINES,
    DegradationDetector,
    ObservedTiming,
    SpeedSample,
    TokenTime,
)
from tests.emulator import EmulatedNode
from tests.fleet.build import Clock, a_fleet, a_spec, take


class Work:
    """A node that answers a request every `gap` seconds."""

    def __init__(self, gap: float = 10.0) -> None:
        self.pace = DegradationDetector()
        self.now = 1000.0
        self.gap = gap
        self.rng = random.Random(7)

    def does(
        self,
        times: int,
        speed: float = 1.0,
        busy: float = 1,
        context: float = 500,
        reading: float | None = None,
    ) -> list[bool]:
        """So many requests at this share of its usual speed; whether it is degraded after each."""
        states = []
        for _ in range(times):
            self.now += self.gap
            each = 0.1 * (1 + 0.5 * (busy - 1)) / speed * self.rng.lognormvariate(0, 0.2)
            read = 0.01 / (reading or speed) * self.rng.lognormvariate(0, 0.2)
            self.pace.learn(
                SpeedSample(
                    TokenTime(context, read, read), TokenTime(40, each, each), busy, context
                ),
                self.now,
            )
            states.append(self.pace.degraded)
        return states


def test_a_node_at_a_third_of_its_speed_is_degraded_within_a_few_requests() -> None:
    work = Work()
    assert not any(work.does(30))
    states = work.does(10, speed=0.25)
    assert states[-1]
    assert not any(states[:4])


def test_a_usual_speed_learnt_beside_supposed_stalls_makes_no_node_look_degraded() -> None:
    def learn(times: int, low: float, high: float) -> list[bool]:
        states = []
        for _ in range(times):
            work.now += 10.0
            sample = SpeedSample(None, TokenTime(40, low, high), busy_slots=2, context_tokens=500)
            work.pace.learn(sample, work.now)
            states.append(work.pace.degraded)
        return states

    work = Work()
    # Neighbours seemed to take seven eighths of the time; they took nothing.
    assert not any(learn(10, low=0.0125, high=0.1))
    assert not any(learn(30, low=0.1, high=0.1))
    assert learn(10, low=0.5, high=0.5)[-1]


def test_the_reason_has_figures_and_advice() -> None:
    work = Work()
    work.does(30)
    work.does(20, speed=0.2)
    reason = work.pace.reason(work.now)
    figures = re.fullmatch(
        r"writes at (\d+)% of its usual speed \(([\d.]+) tokens/s instead of ([\d.]+)\) for 3 min"
        r" and reads at \d+% of its usual speed \(.+ tokens/s instead of .+\) for 3 min: look on "
        r"its host for swapping, other load, CPU frequency and thermal throttling",
        reason,
    )
    assert figures is not None, reason
    assert [float(figure) for figure in figures.groups()] == pytest.approx([20, 2, 10], rel=0.2)
    assert "rate limits" in work.pace.reason(work.now, endpoint=True)


def test_one_slow_request_is_no_degradation() -> None:
    work = Work()
    work.does(30)
    assert not any(work.does(1, speed=0.01) + work.does(5) + work.does(2, speed=0.01))
    assert not any(work.does(5))


def test_a_stall_that_hits_all_requests_at_once_is_no_degradation() -> None:
    work = Work()
    work.does(30)
    work.gap = 0.5
    assert not any(work.does(16, speed=0.1))


def test_slow_requests_count_from_the_first_of_them() -> None:
    work = Work()
    work.does(30)
    work.gap = 5.0
    assert work.does(5, speed=0.2) == [False, False, False, False, True]


def test_a_stall_long_after_a_slow_request_is_no_degradation() -> None:
    work = Work()
    work.does(30)
    work.does(1, speed=0.1)
    work.now += 3600
    work.gap = 0.5
    assert not any(work.does(16, speed=0.1))


def test_half_of_its_speed_is_no_degradation() -> None:
    work = Work()
    work.does(30)
    assert not any(work.does(30, speed=0.55))


def test_it_recovers_only_clearly_above_the_speed_at_which_it_was_degraded() -> None:
    work = Work()
    work.does(30)
    assert work.does(10, speed=0.25)[-1]
    assert all(work.does(20, speed=0.48))
    assert not work.does(10)[-1]


def test_more_busy_slots_and_longer_texts_are_no_degradation() -> None:
    work = Work()
    work.does(30)
    assert not any(work.does(40, speed=0.3, busy=8, reading=1))
    assert not any(work.does(40, speed=0.3, context=8000))


def test_a_node_without_a_baseline_is_not_degraded() -> None:
    assert not any(Work().does(8, speed=0.1))


def test_a_lasting_speed_becomes_the_usual_one_after_hours_of_work() -> None:
    work = Work(gap=60)
    work.does(50)
    assert all(work.does(int(0.5 * BASELINE_HALF_LIFE / 60), speed=0.3)[10:])
    assert not work.does(int(1.5 * BASELINE_HALF_LIFE / 60), speed=0.3)[-1]


def test_hours_without_work_do_not_move_the_baseline() -> None:
    work = Work()
    work.does(30)
    work.does(10, speed=0.25)
    work.now += 12 * 3600
    assert all(work.does(10, speed=0.25))


def test_the_baseline_follows_a_higher_speed_soon() -> None:
    work = Work(gap=60)
    work.does(30, speed=0.2)
    work.does(180)
    assert work.does(20, speed=0.25)[-1]


def test_a_degraded_node_without_requests_counts_as_recovered_after_a_while() -> None:
    work = Work()
    work.does(30)
    work.does(12, speed=0.25)
    assert not work.pace.refresh(work.now + DEGRADED_STALE - 1)
    work.now += DEGRADED_STALE
    assert work.pace.refresh(work.now)
    assert not work.pace.degraded
    assert work.does(3, speed=0.25)[-1]


def test_a_node_that_recovered_so_stays_so_if_it_is_fast() -> None:
    work = Work()
    work.does(30)
    work.does(12, speed=0.25)
    work.now += DEGRADED_STALE
    work.pace.refresh(work.now)
    assert not any(work.does(10))


def test_a_new_process_keeps_the_baselines_and_another_model_none() -> None:
    work = Work()
    work.does(30)
    work.does(12, speed=0.25)
    work.pace.server_restarted()
    assert not any(work.does(4, speed=0.25))
    assert work.does(6, speed=0.25)[-1]
    work.pace.forget()
    assert not any(work.does(20, speed=0.25))


def test_short_requests_prove_nothing() -> None:
    work = Work()
    work.does(30)
    for _ in range(50):
        work.now += 10
        work.pace.learn(SpeedSample(TokenTime(20, 1, 1), TokenTime(4, 5, 5), 1, 500), work.now)
    assert not work.pace.degraded


def test_slowness_that_others_may_have_caused_is_no_degradation() -> None:
    work = Work()
    work.does(30)
    for _ in range(50):
        work.now += 10
        work.pace.learn(
            SpeedSample(TokenTime(500, 0.01, 1), TokenTime(40, 0.1, 5), 1, 500), work.now
        )
    assert not work.pace.degraded


async def test_becoming_degraded_and_recovering_are_published() -> None:
    clock = Clock()
    async with (
        EmulatedNode() as server,
        a_fleet(a_spec(url=server.url), clock=clock, interval=600_000) as fleet,
    ):
        node = fleet["a"]

        def works(times: int, per_token: float) -> None:
            for _ in range(times):
                lease = take(node)
                lease.content_received(clock.passes(1))
                clock.passes(40 * per_token)
                lease.release()
                timings = {"predicted_n": 40, "predicted_ms": 40_000 * per_token}
                fleet.fleet.learn_timings(node, timings, lease)

        works(20, 0.1)
        assert fleet.state("a") is NodeState.READY
        works(12, 0.5)
        assert fleet.state("a") is NodeState.DEGRADED
        assert node.free_slots(clock()) == node.slots_total
        change = fleet.changes[-1]
        assert (change.old_state, change.new_state) == ("ready", "degraded")
        assert change.reason.startswith("writes at 20% of its usual speed (2 tokens/s instead of")
        works(12, 0.1)
        assert fleet.state("a") is NodeState.READY
        assert fleet.states("a")[-2:] == ["degraded", "ready"]


async def test_an_endpoint_without_timings_is_judged_by_our_clock() -> None:
    clock = Clock()
    async with (
        EmulatedNode() as server,
        a_fleet(a_spec(url=server.url, kind="openai"), clock=clock, interval=600_000) as fleet,
    ):
        node = fleet["a"]

        def works(times: int, per_token: float) -> None:
            for _ in range(times):
                lease = take(node)
                lease.content_received(clock.passes(1))
                clock.passes(40 * per_token)
                lease.release()
                fleet.fleet.learn_clocked(lease, 300, 100, 41)

        works(20, 0.1)
        assert node.speed.decode_tps == pytest.approx(10)
        assert node.speed.prefill_tps == pytest.approx(200)
        works(12, 0.5)
        assert fleet.state("a") is NodeState.DEGRADED
        assert node.reason.endswith("look at the endpoint's load and its rate limits")


rates = st.none() | st.builds(
    lambda tokens, low, width: TokenTime(tokens, low, low * width),
    st.floats(2, 1e8),
    st.floats(1e-6, 1e3),
    st.floats(1, 1e6),
)


@given(
    st.lists(
        st.tuples(
            st.builds(SpeedSample, rates, rates, st.none() | st.floats(1, 1e9), st.floats(0, 1e9)),
            st.floats(-10, 1e6),
        ),
        max_size=80,
    )
)
def test_any_samples_leave_it_bounded_and_with_a_reason(
    samples: list[tuple[SpeedSample, float]],
) -> None:
    pace, now = DegradationDetector(), 0.0
    for sample, elapsed in samples:
        now += elapsed
        before = pace.degraded
        assert pace.learn(sample, now) is (pace.degraded is not before)
        assert "nan" not in pace.reason(now)
    assert len(pace.decode.baselines) <= MOST_BASELINES


def test_kinds_of_requests_are_bounded() -> None:
    pace = DegradationDetector()
    for busy in range(1, 200):
        for context in range(20):
            pace.learn(SpeedSample(None, TokenTime(9, 1, 1), busy, 4.0**context), 0.0)
    assert len(pace.decode.baselines) == MOST_BASELINES


@pytest.mark.parametrize(("seconds", "words"), [(45, "45 s"), (600, "10 min"), (9000, "2.5 h")])
def test_its_duration_is_given_in_fitting_units(seconds: float, words: str) -> None:
    pace = DegradationDetector()
    pace.decode.slow_since, pace.decode.degraded = 1000.0, True
    assert f"for {words}:" in pace.reason(1000.0 + seconds)


def spans(pace: DegradationDetector, now: float, events: float, times: int = 8) -> list[bool]:
    """A stream writes so many events in each span of three seconds; degraded after each?"""
    states = []
    for _ in range(times):
        now += 3.0
        pace.watch(events, ObservedTiming(3.0, 0.0), 500, now)
        states.append(pace.degraded)
    return states


def test_a_running_stream_shows_that_the_node_is_slow_before_it_ends() -> None:
    work = Work()
    assert not any(spans(work.pace, work.now, 6))  # Nothing is usual yet.
    work.does(30)
    assert not any(spans(work.pace, work.now, 30))
    assert spans(work.pace, work.now + 30, 6)[-1]


def test_a_text_whose_events_hold_several_tokens_is_no_degradation() -> None:
    work = Work()
    work.does(30)
    work.pace.learn_events(300, 100)
    assert not any(spans(work.pace, work.now, 10))
    assert spans(work.pace, work.now + 30, 2)[-1]


def test_a_stream_whose_end_shows_several_tokens_an_event_takes_its_blame_back() -> None:
    work = Work()
    work.does(30)
    assert spans(work.pace, work.now, 8)[-1]
    work.pace.learn_events(600, 200)
    assert not work.pace.degraded


def test_a_node_that_becomes_slow_as_its_load_grows_is_found() -> None:
    work = Work()
    work.does(30)
    # Two busy slots were never seen; they can take twice as long at most.
    assert work.does(10, speed=0.12, busy=2)[-1]
    work.pace.server_restarted()
    assert not any(work.does(10, speed=0.5, busy=2))
