"""What is learnt of a node's speed, and when it counts as far slower than usual."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.nodes.fleet import compare_speeds
from gateway.nodes.node import NodeState
from gateway.nodes.speed import (
    BASELINE_HALF_LIFE,
    CPU_PRIOR,
    DEGRADED_STALE,
    GPU_PRIOR,
    MOST_BASELINES,
    DegradationDetector,
    LinearTrend,
    ObservedTiming,
    Speed,
    SpeedSample,
    TokenTime,
    TrendLine,
    sample_from_clock,
    sample_from_timings,
)
from gateway.workshop.plan.catalogue import packaged_catalogue
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.nodes.build import (
    Clock,
    Running,
    a_fleet,
    a_node,
    a_spec,
    learn_timings,
    seconds_per_token,
    take,
)


def timings(prompt: float = 100, tps: float = 50.0, predicted: float = 32) -> dict[str, object]:
    return {
        "cache_n": 5,
        "prompt_n": prompt,
        "prompt_ms": prompt / (10 * tps) * 1000,
        "predicted_n": predicted,
        "predicted_ms": predicted / tps * 1000,
    }


def test_a_calibration_is_assumed_until_an_answer_shows_the_speed() -> None:
    speed = Speed()
    # Eight tokens take seven decodes: 20 tokens/s.
    assert speed.calibrate(timings(prompt=100, tps=20, predicted=8) | {"predicted_ms": 350.0})
    assert (speed.samples, speed.prefill_tps, speed.decode_tps) == (0, None, None)
    assert speed.expected_prefill_tps == pytest.approx(200)
    assert speed.token_base == pytest.approx(0.05)
    # Neither other nodes' speeds nor timings without figures change it.
    version = speed.version
    speed.set_prior(CPU_PRIOR.scaled(3))
    assert not speed.calibrate({"prompt_n": math.nan, "predicted_n": 1, "predicted_ms": 5})
    assert (speed.expected_prefill_tps, speed.token_base) == pytest.approx((200, 0.05))
    assert speed.version == version + 1  # The prior's own.
    learn_timings(speed, timings(prompt=50, tps=5))
    assert (speed.prefill_tps, speed.decode_tps) == pytest.approx((50, 5))
    assert (speed.expected_prefill_tps, speed.token_base) == pytest.approx((50, 0.2))
    speed.forget()
    assert (speed.calibrated, speed.prefill_tps, speed.decode_tps) == (None, None, None)
    assert speed.expected_prefill_tps == CPU_PRIOR.scaled(3).prefill_tps
    # One that wrote nothing leaves the assumed decode.
    assert speed.calibrate({"prompt_n": 100, "prompt_ms": 500.0})
    assert speed.expected_prefill_tps == pytest.approx(200)
    assert speed.token_base == CPU_PRIOR.scaled(3).token_base


@each_case("bad", [0, -5, math.nan, math.inf, -math.inf, None, "32", True, 10**400, [], 1e-300])
def test_nonsense_is_ignored(bad: Any) -> None:
    for key in ("prompt_n", "prompt_ms", "predicted_n", "predicted_ms"):
        speed = Speed()
        learn_timings(speed, timings(tps=50))
        before = (speed.prefill_tps, speed.decode_tps)
        learn_timings(speed, timings(tps=50) | {key: bad})
        assert (speed.prefill_tps, speed.decode_tps) == pytest.approx(before), key


def test_an_unmeasured_node_is_assumed_to_be_as_fast_as_the_best_of_its_like() -> None:
    slow, fast, calibrated, unknown = a_node(), a_node(), a_node(), a_node()
    others = [a_node(tier="gpu"), a_node(kind="openai"), a_node(model="another")]
    learn_timings(slow.speed, timings(tps=5) | {"prompt_ms": 100.0})
    learn_timings(fast.speed, timings(tps=60))
    compare_speeds([slow, fast, calibrated, unknown, *others])
    assert unknown.speed.expected_prefill_tps == pytest.approx(1000)
    assert unknown.speed.token_base == pytest.approx(1 / 60)
    assert calibrated.speed.calibrate(timings(tps=70))
    compare_speeds([slow, fast, calibrated, unknown, *others])
    assert unknown.speed.expected_prefill_tps == pytest.approx(1000)
    assert unknown.speed.token_base == calibrated.speed.token_base
    assert [node.speed.prior for node in others] == [GPU_PRIOR, CPU_PRIOR, CPU_PRIOR]


def test_where_no_node_is_measured_the_best_of_the_catalogue_is_assumed() -> None:
    for tier, prior in (("cpu", CPU_PRIOR), ("gpu", GPU_PRIOR)):
        node = a_node(tier=tier)
        compare_speeds([node])
        assert node.speed.prior == prior
        types = [one for one in packaged_catalogue().types if one.tier == tier]
        best = max(types, key=lambda one: one.decode_tps)
        assert prior.prefill_tps == best.prefill_tps
        assert prior.token_base == pytest.approx(1 / best.decode_tps)
        assert prior.token_step == pytest.approx(best.batch_cost / best.decode_tps)


def test_a_hint_that_is_written_beats_what_others_show() -> None:
    measured, hinted, written, silent = (
        a_node(speed_hint=2),
        a_node(speed_hint=0.5),
        a_node(speed_hint=1),
        a_node(),
    )
    learn_timings(measured.speed, timings(tps=20))
    compare_speeds([measured, hinted, written, silent])
    # The measured one is twice as fast as a usual one, as its own hint says.
    assert hinted.speed.token_base == pytest.approx(1 / 5)
    assert written.speed.expected_prefill_tps == pytest.approx(100)
    assert silent.speed.expected_prefill_tps == pytest.approx(200)
    assert [node.speed.hinted for node in (hinted, written, silent)] == [True, True, False]
    learn_timings(hinted.speed, timings(tps=50))
    assert hinted.speed.expected_prefill_tps == pytest.approx(500)


def learn_at(speed: Speed, busy: int, per_token: float, times: int = 30) -> None:
    told = {"predicted_n": 40, "predicted_ms": 40_000 * per_token}
    for _ in range(times):
        learn_timings(speed, told, ObservedTiming(40 * per_token + 1, 1, busy_slots=busy))


def test_decode_is_learnt_by_busy_slots() -> None:
    speed = Speed()
    for _ in range(5):
        for busy in (1, 2, 4):
            learn_at(speed, busy, 0.05 + 0.02 * (busy - 1), times=4)
    assert speed.decode_tps == pytest.approx(20, rel=0.02)
    assert speed.token_base == pytest.approx(0.05, rel=0.02)
    assert speed.token_step == pytest.approx(0.02, rel=0.1)
    assert seconds_per_token(speed, 4) == pytest.approx(0.11, rel=0.05)


def test_a_node_measured_only_when_full_is_predicted_faster_when_alone() -> None:
    speed = Speed()
    learn_at(speed, 4, 0.1)
    assert seconds_per_token(speed, 4) == pytest.approx(0.1)
    assert 0.05 < speed.token_base < 0.1


def test_more_neighbours_never_make_it_faster() -> None:
    speed = Speed()
    learn_at(speed, 1, 0.1)
    learn_at(speed, 2, 0.09)
    assert speed.token_step >= 0
    assert seconds_per_token(speed, 0) == seconds_per_token(speed, 1)


def test_short_prefills_do_not_make_a_node_look_slow_for_long_ones() -> None:
    speed = Speed()
    for _ in range(40):
        for tokens in (20, 1500):
            learn_timings(speed, {"prompt_n": tokens, "prompt_ms": 100 + tokens / 0.6})
    assert speed.prefill_tps == pytest.approx(600, rel=0.05)


def test_concurrent_prefills_count_at_their_best() -> None:
    speed = Speed()
    for _ in range(5):
        learn_timings(speed, {"prompt_n": 600, "prompt_ms": 1000}, ObservedTiming(2, 1))
    for _ in range(50):
        learn_timings(
            speed,
            {"prompt_n": 600, "prompt_ms": 2000},
            ObservedTiming(3, 2, busy_slots=2, mean_prefills=2),
        )
    assert speed.prefill_tps == pytest.approx(600, rel=0.05)


def test_a_node_with_false_timings_gets_no_more_than_its_hint() -> None:
    """Its timings are a thousand times too short; our clock shows 10 s for a hundred tokens."""
    liar, honest = a_node(), a_node()
    for _ in range(20):
        learn_timings(
            liar.speed,
            {"prompt_n": 500, "prompt_ms": 1, "predicted_n": 100, "predicted_ms": 10},
            ObservedTiming(15, 5),
        )
        learn_timings(honest.speed, timings(tps=10), ObservedTiming(4.3, 1))
    compare_speeds([liar, honest])
    assert liar.speed.token_base == pytest.approx(honest.speed.token_base)
    assert liar.speed.expected_prefill_tps == pytest.approx(honest.speed.expected_prefill_tps)


def test_a_change_of_the_assumed_speed_changes_the_version() -> None:
    node, other = a_node(), a_node()
    compare_speeds([node, other])
    before = node.speed.version
    compare_speeds([node, other])
    assert node.speed.version == before
    learn_timings(other.speed, timings())
    compare_speeds([node, other])
    assert node.speed.version > before


def test_a_server_with_another_model_is_measured_from_scratch() -> None:
    node = a_node()
    node.properties.models = ("small",)
    node.forget_replaced_model()
    node.properties.n_params = 1_000_000
    node.forget_replaced_model()
    learn_timings(node.speed, timings())
    node.forget_replaced_model()
    assert node.speed.decode_tps is not None
    node.properties.n_params = 7_000_000
    node.forget_replaced_model()
    assert [node.speed.prefill_tps, node.speed.decode_tps].count(None) == 2


@given(
    st.lists(
        st.tuples(
            st.dictionaries(
                st.sampled_from(["prompt_n", "prompt_ms", "predicted_n", "predicted_ms"]),
                st.floats(1e-9, 1e12) | st.integers(1, 10**12),
            ),
            st.builds(
                ObservedTiming,
                st.floats(0, 1e6),
                st.none() | st.floats(0, 1e6),
                st.floats(0, 100),
                st.floats(0, 1e6),
                st.floats(0, 100),
            ),
        )
    )
)
def test_the_expected_speed_stays_finite_and_positive(
    told: list[tuple[dict[str, object], ObservedTiming]],
) -> None:
    speed = Speed()
    for one, seen in told:
        learn_timings(speed, one, seen)
        assert 0 < speed.expected_prefill_tps < math.inf
        assert 0 < speed.token_base < math.inf
        assert 0 <= speed.token_step < math.inf
        assert 0 < seconds_per_token(speed, 8) < math.inf


# A line through noisy measurements.


def a_trend() -> LinearTrend:
    return LinearTrend(half_life=1000, slope_prior=0.2, prior_strength=50, most_slope=2)


def exactly(trend: LinearTrend, x: float, y: float, weight: float = 40) -> bool:
    return trend.learn(x, y, y, weight)


def line_of(trend: LinearTrend) -> TrendLine:
    assert trend.line is not None
    return trend.line


def test_the_first_measurement_is_believed_with_the_usual_slope() -> None:
    trend = a_trend()
    assert trend.line is None
    exactly(trend, 1, 1.2)
    line = line_of(trend)
    assert (line.level, line.slope) == pytest.approx((1.0, 0.2))


@each_case(
    ("before", "learnt", "times", "level", "within"),
    [
        # Two surprises move it little.
        (20, (0.001, 0.001), 2, 1, 0.15),
        (20, (1000, 1000), 2, 1, 0.15),
        # A lasting change is believed within a few measurements.
        (200, (0.25, 0.25), 8, 0.25, 0.2),
        (200, (4, 4), 8, 4, 0.2),
        # An interval around the line leaves it nearly as it was.
        (20, (0.001, 10), 1, 1, 0.01),
    ],
)
def test_what_differs_moves_it_when_it_lasts(
    before: int, learnt: tuple[float, float], times: int, level: float, within: float
) -> None:
    trend = a_trend()
    for low, high in [(1, 1)] * before + [learnt] * times:
        trend.learn(0, low, high, 40)
    assert line_of(trend).level == pytest.approx(level, rel=within)


def test_a_first_interval_that_is_too_wide_is_ignored() -> None:
    trend = a_trend()
    assert not trend.learn(0, 0.001, 1000, 40)
    assert trend.line is None
    assert trend.learn(0, 1, 4, 40)
    assert line_of(trend).level == pytest.approx(2)


positive = st.floats(1e-6, 1e6)


@given(st.lists(st.tuples(st.floats(0, 100), positive, st.floats(1, 1e6), st.floats(0.1, 1e8))))
def test_it_stays_positive(
    told: list[tuple[float, float, float, float]],
) -> None:
    trend = a_trend()
    for x, low, width, weight in told:
        trend.learn(x, low, low * width, weight)
        if (line := trend.line) is not None:
            for at in (0, 1, 64):
                assert 0 <= line.level + line.slope * at < math.inf
            assert line.level > 0 or line.slope == 0
            assert line.slope <= trend.most_slope * line.level * 1.001


# Samples from a node's timings_of and from the gateway's clock.


def timings_of(read: float = 2.0, wrote: float = 8.0) -> dict[str, object]:
    return {
        "cache_n": 50,
        "prompt_n": 200,
        "prompt_ms": read * 1000,
        "predicted_n": 80,
        "predicted_ms": wrote * 1000,
    }


def bounds(rate: TokenTime | None) -> tuple[float, float]:
    """The least and the most seconds that it may have taken."""
    assert rate is not None
    return rate.low * rate.tokens, rate.high * rate.tokens


@each_case(
    ("told", "seen", "prefill", "decode"),
    [
        # Plausible ones are taken as they are, and without our clock all.
        ({}, ObservedTiming(10.1, 2.05), (2, 2), (8, 8)),
        ({}, ObservedTiming(10.2), (2, 2), (8, 8)),
        ({"wrote": 0.001}, None, (2, 2), (0.001, 0.001)),
        # Those that are far too short are only the lower end, those far too long are bounded.
        ({"read": 0.002, "wrote": 0.008}, ObservedTiming(10, 2), (0.002, 2), (0.008, 8)),
        ({"wrote": 0.008}, ObservedTiming(10.0), (2, 2), (0.008, 8)),
        ({"read": 2000, "wrote": 8000}, ObservedTiming(10, 2), (2, 2), (10, 10)),
        # The time that other prefills may have taken stays open; but a decode is never all stall.
        ({}, ObservedTiming(10, 2, 2, 3, 2), (1, 2), (5, 8)),
        ({}, ObservedTiming(10, 2, stalled_seconds=100), (2, 2), (1, 8)),
        # Neighbours of an answer in one piece are assumed to prefill as long: a fifth of the time.
        ({}, ObservedTiming(10, None, busy_slots=3), (2 / 1.4, 2), (8 * 0.6, 8)),
    ],
)
def test_timings_are_believed_as_far_as_our_clock_allows(
    told: dict[str, float],
    seen: ObservedTiming | None,
    prefill: tuple[float, float],
    decode: tuple[float, float],
) -> None:
    sample = sample_from_timings(timings_of(**told), seen)
    assert bounds(sample.prefill) == pytest.approx(prefill)
    assert bounds(sample.decode) == pytest.approx(decode)
    assert (sample.busy_slots, sample.context_tokens) == (seen and seen.busy_slots, 250)


def test_an_endpoint_without_timings_is_measured_by_our_clock() -> None:
    sample = sample_from_clock(250, 50, 81, ObservedTiming(10, 2))
    assert sample.prefill == TokenTime(200, 0.01, 0.01)
    assert sample.decode == TokenTime(80, 0.1, 0.1)
    in_one_piece = sample_from_clock(250, 50, 80, ObservedTiming(10))
    assert in_one_piece.prefill is None
    assert bounds(in_one_piece.decode) == pytest.approx((5, 10))
    embedding = sample_from_clock(250, 0, 0, ObservedTiming(2))
    assert embedding.decode is None
    assert bounds(embedding.prefill) == pytest.approx((2, 2))


anything: Any = st.floats() | st.integers() | st.none() | st.text(max_size=3) | st.booleans()
seconds = st.floats() | st.floats(0, 1e4)
KEYS = ["cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms"]


@given(
    st.dictionaries(st.sampled_from(KEYS), anything),
    st.none() | st.builds(ObservedTiming, seconds, st.none() | seconds, seconds, seconds, seconds),
)
def test_any_timings_make_an_interval_of_positive_numbers(
    told: dict[str, object], seen: ObservedTiming | None
) -> None:
    sample = sample_from_timings(told, seen)
    for rate in (sample.prefill, sample.decode):
        if rate is not None:
            assert 0 < rate.low <= rate.high < math.inf
            assert 2 <= rate.tokens < math.inf
    assert sample.busy_slots is None or 1 <= sample.busy_slots < math.inf
    assert 0 <= sample.context_tokens < math.inf


# When a node counts as far slower than usual, and when as recovered.


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


@each_case(
    "story",
    [
        # So few requests have no usual speed.
        [(0, 10, 8, {"speed": 0.1}, "no")],
        # A third of its speed shows within a few requests: not in four.
        [(0, 10, 30, {}, "no"), (0, 10, 4, {"speed": 0.25}, "no"), (0, 10, 6, {"speed": 0.25}, "")],
        # One slow request, now and then.
        [(0, 10, 30, {}, "no"), (0, 10, 1, {"speed": 0.01}, "no"), (0, 10, 5, {}, "no"),
         (0, 10, 2, {"speed": 0.01}, "no"), (0, 10, 5, {}, "no")],
        # A stall that hits all requests at once, also long after a slow one.
        [(0, 10, 30, {}, "no"), (0, 0.5, 16, {"speed": 0.1}, "no")],
        [(0, 10, 30, {}, "no"), (0, 10, 1, {"speed": 0.1}, "no"),
         (3600, 0.5, 16, {"speed": 0.1}, "no")],
        # Slow ones count from the first of them.
        [(0, 10, 30, {}, "no"), (0, 5, 4, {"speed": 0.2}, "no"), (0, 5, 1, {"speed": 0.2}, "yes")],
        # Half of its speed, more busy slots and longer texts.
        [(0, 10, 30, {}, "no"), (0, 10, 30, {"speed": 0.55}, "no")],
        [(0, 10, 30, {}, "no"), (0, 10, 40, {"speed": 0.3, "busy": 8, "reading": 1}, "no"),
         (0, 10, 40, {"speed": 0.3, "context": 8000}, "no")],
        # It recovers only clearly above the speed at which it was degraded.
        [(0, 10, 30, {}, "no"), (0, 10, 10, {"speed": 0.25}, ""),
         (0, 10, 20, {"speed": 0.48}, "yes"), (0, 10, 9, {}, ""), (0, 10, 1, {}, "no")],
        # Hours without work do not move its usual speed.
        [(0, 10, 30, {}, "no"), (0, 10, 10, {"speed": 0.25}, ""),
         (12 * 3600, 10, 10, {"speed": 0.25}, "yes")],
    ],
)  # fmt: skip
def test_a_node_is_degraded_when_like_requests_stay_far_slower_than_usual(
    story: list[tuple[float, float, int, dict[str, float], str]],
) -> None:
    work = Work()
    for pause, gap, times, keys, degraded in story:
        work.now += pause
        work.gap = gap
        states = work.does(times, **keys)
        if degraded:
            assert set(states) == {degraded == "yes"}, (keys, states)
        else:
            assert states[-1] or not keys, (keys, states)


def test_a_lasting_speed_becomes_the_usual_one_after_hours_of_work() -> None:
    work = Work(gap=60)
    work.does(50)
    assert all(work.does(int(0.5 * BASELINE_HALF_LIFE / 60), speed=0.3)[10:])
    assert not work.does(int(1.5 * BASELINE_HALF_LIFE / 60), speed=0.3)[-1]


def test_a_degraded_node_without_requests_counts_as_recovered_after_a_while() -> None:
    work = Work()
    work.does(30)
    work.does(12, speed=0.25)
    assert not work.pace.refresh(work.now + DEGRADED_STALE - 1)
    work.now += DEGRADED_STALE
    assert work.pace.refresh(work.now)
    assert not work.pace.degraded
    assert work.does(3, speed=0.25)[-1]


def test_a_new_process_keeps_the_baselines_and_another_model_none() -> None:
    work = Work()
    work.does(30)
    work.does(12, speed=0.25)
    work.pace.server_restarted()
    assert not any(work.does(4, speed=0.25))
    assert work.does(6, speed=0.25)[-1]
    work.pace.forget()
    assert not any(work.does(20, speed=0.25))


@each_case(
    ("prefill", "decode"),
    [
        # Short requests.
        (TokenTime(20, 1, 1), TokenTime(4, 5, 5)),
        # Slowness that others may have caused.
        (TokenTime(500, 0.01, 1), TokenTime(40, 0.1, 5)),
    ],
)
def test_what_proves_nothing_is_no_degradation(prefill: TokenTime, decode: TokenTime) -> None:
    work = Work()
    work.does(30)
    for _ in range(50):
        work.now += 10
        work.pace.learn(SpeedSample(prefill, decode, 1, 500), work.now)
    assert not work.pace.degraded


def works(fleet: Running, clock: Clock, times: int, per_token: float) -> NodeState:
    """So many answers take so long a token; the node's state then."""
    node = fleet["a"]
    for _ in range(times):
        lease = take(node)
        lease.content_received(clock.passes(1))
        clock.passes(40 * per_token)
        lease.release()
        timings = {"predicted_n": 40, "predicted_ms": 40_000 * per_token}
        fleet.fleet.learn_speed(node, sample_from_timings(timings, lease.observed_timing()))
    return fleet.state("a")


async def test_becoming_degraded_and_recovering_are_published() -> None:
    clock = Clock()
    async with (
        EmulatedNode() as server,
        a_fleet(a_spec(url=server.url), clock=clock, interval=600_000) as fleet,
    ):
        assert works(fleet, clock, 20, 0.1) is NodeState.READY
        assert works(fleet, clock, 12, 0.5) is NodeState.DEGRADED
        assert fleet["a"].free_slots(clock()) == fleet["a"].slots_total
        change = fleet.changes[-1]
        assert (change.old_state, change.new_state) == ("ready", "degraded")
        assert change.reason.startswith("writes at 20% of its usual speed (2 tokens/s instead of")
        assert works(fleet, clock, 12, 0.1) is NodeState.READY
        assert fleet.states("a")[-2:] == ["degraded", "ready"]


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
