"""What is learnt of a node's speed, and when it counts as far slower than usual."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path
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
    ObservedTiming,
    Speed,
    SpeedSample,
    TokenTime,
    sample_from_clock,
    sample_from_timings,
)
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway, until
from tests.nodes.build import Clock, Running, a_fleet, a_node, learn_timings, take
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import CHAT


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


def test_decode_is_learnt_by_busy_slots() -> None:
    speed = Speed()
    for _ in range(20):
        for busy in (1, 2, 4):
            each = 0.05 + 0.02 * (busy - 1)
            told = {"predicted_n": 40, "predicted_ms": 40_000 * each}
            learn_timings(speed, told, ObservedTiming(40 * each + 1, 1, busy_slots=busy))
    assert speed.decode_tps == pytest.approx(20, rel=0.02)
    assert speed.token_base == pytest.approx(0.05, rel=0.02)
    assert speed.token_step == pytest.approx(0.02, rel=0.1)


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


# Samples from a node's timings_of and from the gateway's clock.


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
        ({"predicted_ms": 1}, None, (2, 2), (0.001, 0.001)),
        # Those that are far too short are only the lower end, those far too long are bounded.
        ({"prompt_ms": 2, "predicted_ms": 8}, ObservedTiming(10, 2), (0.002, 2), (0.008, 8)),
        ({"predicted_ms": 8}, ObservedTiming(10), (2, 2), (0.008, 8)),
        ({"prompt_ms": 2e6, "predicted_ms": 8e6}, ObservedTiming(10, 2), (2, 2), (10, 10)),
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
    milliseconds: dict[str, object] = {"prompt_ms": 2000, "predicted_ms": 8000, **told}
    counts: dict[str, object] = {"cache_n": 50, "prompt_n": 200, "predicted_n": 80}
    sample = sample_from_timings(counts | milliseconds, seen)
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
seconds = st.floats(0, 1e4)
KEYS = ["cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms"]


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from(KEYS), anything | st.floats(1e-9, 1e12)),
            st.none()
            | st.builds(ObservedTiming, seconds, st.none() | seconds, seconds, seconds, seconds),
        )
    )
)
def test_any_timings_make_positive_intervals_and_a_finite_expected_speed(
    told: list[tuple[dict[str, object], ObservedTiming | None]],
) -> None:
    speed = Speed()
    for one, seen in told:
        sample = sample_from_timings(one, seen)
        for rate in (sample.prefill, sample.decode):
            if rate is not None:
                assert 0 < rate.low <= rate.high < math.inf
                assert 2 <= rate.tokens < math.inf
        assert sample.busy_slots is None or 1 <= sample.busy_slots < math.inf
        assert 0 <= sample.context_tokens < math.inf
        speed.learn(sample)
        assert 0 < speed.expected_prefill_tps < math.inf
        assert 0 < speed.token_base < math.inf
        assert 0 <= speed.token_step < math.inf


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
    # A new process keeps the usual speeds, another model none.
    work.pace.server_restarted()
    assert work.does(10, speed=0.25)[-1]
    work.pace.forget()
    assert not any(work.does(20, speed=0.25))


def test_what_proves_nothing_is_no_degradation() -> None:
    work = Work()
    work.does(30)
    short = TokenTime(20, 1, 1), TokenTime(4, 5, 5)
    perhaps_by_others = TokenTime(500, 0.01, 1), TokenTime(40, 0.1, 5)
    for prefill, decode in [short, perhaps_by_others] * 50:
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
    server = EmulatedNode()
    async with a_fleet(server, clock=clock, interval=600_000) as fleet:
        assert works(fleet, clock, 20, 0.1) is NodeState.READY
        assert works(fleet, clock, 12, 0.5) is NodeState.DEGRADED
        assert fleet["a"].free_slots(clock()) == fleet["a"].slots_total
        change = fleet.changes[-1]
        assert (change.old_state, change.new_state) == ("ready", "degraded")
        assert change.reason.startswith("writes at 20% of its usual speed (2 tokens/s instead of")
        assert works(fleet, clock, 12, 0.1) is NodeState.READY
        assert fleet.states("a")[-2:] == ["degraded", "ready"]


def test_kinds_of_requests_are_bounded() -> None:
    pace = DegradationDetector()
    for busy in range(1, 200):
        for context in range(20):
            pace.learn(SpeedSample(None, TokenTime(9, 1, 1), busy, 4.0**context), 0.0)
    assert len(pace.decode.baselines) == MOST_BASELINES


def spans(pace: DegradationDetector, now: float, events: float, times: int = 8) -> list[bool]:
    """A stream writes so many events in each span of three seconds; degraded after each?"""
    states = []
    for _ in range(times):
        now += 3.0
        pace.watch(events, ObservedTiming(3.0, 0.0), 500, now)
        states.append(pace.degraded)
    return states


def test_events_that_hold_several_tokens_are_no_degradation() -> None:
    work = Work()
    work.does(30)
    assert spans(work.pace, work.now, 8)[-1]
    work.pace.learn_events(600, 200)
    assert not work.pace.degraded, "the end of the stream takes its blame back"
    assert not any(spans(work.pace, work.now + 30, 10))
    assert spans(work.pace, work.now + 60, 2)[-1]


@pytest.mark.slow
@in_virtual_time
async def test_a_node_that_becomes_five_times_slower_behind_a_gateway_is_degraded_soon(
    tmp_path: Path,
) -> None:
    speed: dict[str, Any] = {"prefill_tps": 500, "decode_tps": 25, "decode_step": 0.006}
    server = EmulatedNode(slots=4, context=16384, prefill_stalls=True, **speed)
    async with running_gateway(tmp_path, [server], rng=random.Random(2)) as site:
        node, rng = site.gateway.fleet.nodes["node-0"], random.Random(1)

        async def client() -> None:
            while True:
                await asyncio.sleep(rng.uniform(0.0, 2.0))
                text = " ".join(str(rng.randrange(10**6)) for _ in range(100))
                messages = [{"role": "user", "content": text}]
                body = {"messages": messages, "stream": True, "max_tokens": rng.randint(15, 45)}
                assert (await site.client.post(CHAT, json=body)).status_code == 200

        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(client()) for _ in range(2)]
            for _ in range(200):
                await asyncio.sleep(1)
                assert node.state is NodeState.READY, node.reason
            compute = server.engine.compute
            assert compute is not None
            compute.decode_tps, compute.prefill_tps, compute.step = 5, 100, 0.03
            await until(lambda: node.state is NodeState.DEGRADED, 30)
            for one in clients:
                one.cancel()
