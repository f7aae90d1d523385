"""What is learnt of a node's speed, and what is assumed until then."""

from __future__ import annotations

import asyncio
import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.speed import CPU_PRIOR, ObservedTiming, Speed, compare_speeds
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.fleet.build import Running, a_fleet, a_node, a_spec, seconds_per_token, take
from tests.transport.pool_client import pool_client
from tests.virtual import in_virtual_time, now


def timings(prompt: float = 100, tps: float = 50.0, predicted: float = 32) -> dict[str, object]:
    return {
        "cache_n": 5,
        "prompt_n": prompt,
        "prompt_ms": prompt / (10 * tps) * 1000,
        "predicted_n": predicted,
        "predicted_ms": predicted / tps * 1000,
    }


def test_the_first_measurement_is_believed() -> None:
    speed = Speed()
    assert (speed.prefill_tps, speed.decode_tps) == (None, None)
    speed.learn_timings(timings(tps=50))
    assert speed.prefill_tps == pytest.approx(500)
    assert speed.decode_tps == pytest.approx(50)


def test_one_surprise_moves_it_little_and_a_lasting_change_fully() -> None:
    speed = Speed()
    for _ in range(20):
        speed.learn_timings(timings(tps=50))
    speed.learn_timings(timings(tps=0.01))
    assert speed.decode_tps is not None
    assert speed.decode_tps > 40
    for _ in range(100):
        speed.learn_timings(timings(tps=10))
    assert speed.decode_tps == pytest.approx(10, rel=0.05)


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
    speed.learn_timings(timings(prompt=50, tps=5))
    assert (speed.prefill_tps, speed.decode_tps) == pytest.approx((50, 5))
    assert (speed.expected_prefill_tps, speed.token_base) == pytest.approx((50, 0.2))
    speed.forget()
    assert speed.calibrated is None
    assert speed.expected_prefill_tps == CPU_PRIOR.scaled(3).prefill_tps


def test_a_calibration_that_wrote_nothing_leaves_the_assumed_decode() -> None:
    speed = Speed()
    assert speed.calibrate({"prompt_n": 100, "prompt_ms": 500.0})
    assert speed.expected_prefill_tps == pytest.approx(200)
    assert speed.token_base == CPU_PRIOR.token_base


@each_case("bad", [0, -5, math.nan, math.inf, -math.inf, None, "32", True, 10**400, [], 1e-300])
def test_nonsense_is_ignored(bad: Any) -> None:
    for key in ("prompt_n", "prompt_ms", "predicted_n", "predicted_ms"):
        speed = Speed()
        speed.learn_timings(timings(tps=50))
        before = (speed.prefill_tps, speed.decode_tps)
        speed.learn_timings(timings(tps=50) | {key: bad})
        assert (speed.prefill_tps, speed.decode_tps) == pytest.approx(before), key


def test_missing_figures_are_ignored() -> None:
    speed = Speed()
    speed.learn_timings({})
    assert (speed.prefill_tps, speed.decode_tps) == (None, None)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["prompt_n", "prompt_ms", "predicted_n", "predicted_ms"]),
            st.floats() | st.integers() | st.none() | st.text(),
        )
    )
)
def test_any_timings_leave_a_speed_a_positive_number(told: list[dict[str, object]]) -> None:
    speed = Speed()
    for one in told:
        speed.learn_timings(one)
        for rate in (speed.prefill_tps, speed.decode_tps):
            assert rate is None or 0 < rate < math.inf


def test_until_it_is_measured_the_hint_holds() -> None:
    node = a_node(speed_hint=2.5)
    assert node.speed.relative == 2.5
    compare_speeds([node])
    assert node.speed.relative == 2.5


def test_measured_and_assumed_speeds_are_on_one_scale() -> None:
    slow, fast, guessed = a_node(speed_hint=1), a_node(speed_hint=2), a_node(speed_hint=4)
    slow.speed.learn_timings(timings(tps=10))
    fast.speed.learn_timings(timings(tps=20))
    compare_speeds([slow, fast, guessed])
    assert slow.speed.relative == pytest.approx(1)
    assert fast.speed.relative == pytest.approx(2)
    assert guessed.speed.relative == 4


def test_a_wrong_hint_is_overruled_by_the_measurement() -> None:
    boast, honest, other = a_node(speed_hint=10), a_node(), a_node()
    for node in (boast, honest, other):
        node.speed.learn_timings(timings(tps=10))
    compare_speeds([boast, honest, other])
    assert boast.speed.relative == pytest.approx(honest.speed.relative)


def test_nodes_of_different_models_are_not_compared() -> None:
    small, large = a_node(model="small"), a_node(model="large")
    small.speed.learn_timings(timings(tps=100))
    large.speed.learn_timings(timings(tps=2))
    compare_speeds([small, large])
    assert small.speed.relative == large.speed.relative == pytest.approx(1)


def test_nodes_that_only_embed_are_compared_by_their_prefill() -> None:
    slow, fast = a_node(), a_node()
    slow.speed.learn_timings({"prompt_n": 100, "prompt_ms": 1000})
    fast.speed.learn_timings({"prompt_n": 300, "prompt_ms": 1000})
    compare_speeds([slow, fast])
    assert fast.speed.relative == pytest.approx(3 * slow.speed.relative)


def learn_at(speed: Speed, busy: int, per_token: float, times: int = 30) -> None:
    told = {"predicted_n": 40, "predicted_ms": 40_000 * per_token}
    for _ in range(times):
        speed.learn_timings(told, ObservedTiming(40 * per_token + 1, 1, busy_slots=busy))


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
            speed.learn_timings({"prompt_n": tokens, "prompt_ms": 100 + tokens / 0.6})
    assert speed.prefill_tps == pytest.approx(600, rel=0.05)


def test_concurrent_prefills_count_at_their_best() -> None:
    speed = Speed()
    for _ in range(5):
        speed.learn_timings({"prompt_n": 600, "prompt_ms": 1000}, ObservedTiming(2, 1))
    for _ in range(50):
        speed.learn_timings(
            {"prompt_n": 600, "prompt_ms": 2000},
            ObservedTiming(3, 2, busy_slots=2, mean_prefills=2),
        )
    assert speed.prefill_tps == pytest.approx(600, rel=0.05)


def test_a_decode_stalled_by_other_prefills_does_not_make_a_node_slow() -> None:
    speed = Speed()
    for _ in range(50):
        told = {"predicted_n": 40, "predicted_ms": 6000}
        speed.learn_timings(told, ObservedTiming(7, 1, busy_slots=2, stalled_seconds=4))
    assert seconds_per_token(speed, 2) == pytest.approx(0.05, rel=0.1)


def test_a_node_with_false_timings_gets_no_more_than_its_hint() -> None:
    """Its timings are a thousand times too short; our clock shows 10 s for a hundred tokens."""
    liar, honest = a_node(), a_node()
    for _ in range(20):
        liar.speed.learn_timings(
            {"prompt_n": 500, "prompt_ms": 1, "predicted_n": 100, "predicted_ms": 10},
            ObservedTiming(15, 5),
        )
        honest.speed.learn_timings(timings(tps=10), ObservedTiming(4.3, 1))
    compare_speeds([liar, honest])
    assert liar.speed.relative == pytest.approx(honest.speed.relative)
    assert liar.speed.token_base == pytest.approx(honest.speed.token_base)
    assert liar.speed.expected_prefill_tps == pytest.approx(honest.speed.expected_prefill_tps)


def test_a_node_whose_timings_become_false_keeps_its_true_speed() -> None:
    speed = Speed()
    learn_at(speed, 1, 0.1)
    for _ in range(50):
        speed.learn_timings({"predicted_n": 100, "predicted_ms": 10}, ObservedTiming(11, 1))
    assert speed.decode_tps == pytest.approx(10, rel=0.1)


def test_an_endpoint_without_timings_is_learnt_by_our_clock() -> None:
    speed = Speed()
    speed.learn_clocked(1000, 200, 101, ObservedTiming(7.0, 2.0))
    assert speed.prefill_tps == pytest.approx(400)
    assert speed.decode_tps == pytest.approx(20)


def test_the_assumed_speed_of_an_unmeasured_node_follows_its_hint() -> None:
    cpu, fast, gpu = a_node(), a_node(speed_hint=2), a_node(tier="gpu")
    compare_speeds([cpu, fast, gpu])
    assert cpu.speed.expected_prefill_tps == CPU_PRIOR.prefill_tps
    assert fast.speed.token_base == CPU_PRIOR.token_base / 2
    assert gpu.speed.expected_prefill_tps > 10 * cpu.speed.expected_prefill_tps
    measured = a_node(speed_hint=0.5)
    learn_at(measured.speed, 1, 0.04)
    measured.speed.learn_timings({"prompt_n": 1000, "prompt_ms": 5000})
    compare_speeds([cpu, fast, measured])
    assert cpu.speed.token_base == pytest.approx(measured.speed.token_base / 2, rel=0.01)
    assert fast.speed.expected_prefill_tps == pytest.approx(
        4 * measured.speed.expected_prefill_tps, rel=0.01
    )


def test_a_change_of_the_assumed_speed_changes_the_version() -> None:
    node, other = a_node(), a_node()
    compare_speeds([node, other])
    before = node.speed.version
    compare_speeds([node, other])
    assert node.speed.version == before
    other.speed.learn_timings(timings())
    compare_speeds([node, other])
    assert node.speed.version > before


def test_a_server_with_another_model_is_measured_from_scratch() -> None:
    node = a_node()
    node.properties.models = ("small",)
    node.forget_replaced_model()
    node.properties.n_params = 1_000_000
    node.forget_replaced_model()
    node.speed.learn_timings(timings())
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
        speed.learn_timings(one, seen)
        assert 0 < speed.expected_prefill_tps < math.inf
        assert 0 < speed.token_base < math.inf
        assert 0 <= speed.token_step < math.inf
        assert 0 < seconds_per_token(speed, 8) < math.inf


@pytest.mark.slow
@in_virtual_time
async def test_the_true_speed_is_learnt_though_prefills_stall_the_decodes() -> None:
    """First one client, then four at once; plain ratios of the timings would be wrong by a half."""
    rng, prefill, decode, step = random.Random(3), 3000, 200, 0.001
    server = EmulatedNode(
        slots=4,
        prefill_tps=prefill,
        decode_tps=decode,
        decode_step=step,
        batch=256,
        prefill_stalls=True,
        answer_tokens=lambda _: rng.randint(10, 120),
    )

    async def ask(fleet: Running) -> None:
        node, told = fleet["a"], ""
        lease = take(node)
        words = " ".join(str(rng.random()) for _ in range(rng.choice([2, 5, 20, 60])))
        body = {"messages": [{"role": "user", "content": words}], "stream": True}
        path, client = "/v1/chat/completions", pool_client(lease.upstream)
        async with client.stream("POST", path, json=body, timeout=60) as response:
            async for line in response.aiter_lines():
                if '"content":"' in line and lease.last_content_at is None:
                    lease.content_received(now())
                if '"timings"' in line:
                    told = line.removeprefix("data: ")
        lease.release()
        fleet.fleet.learn_timings(node, json.loads(told)["timings"], lease)

    async def client(fleet: Running, requests: int) -> None:
        for _ in range(requests):
            await ask(fleet)

    async with server, a_fleet(a_spec(url=server.url), interval=600) as fleet:
        await client(fleet, 6)
        await asyncio.gather(*(client(fleet, 8) for _ in range(4)))
        speed = fleet["a"].speed
        assert speed.expected_prefill_tps == pytest.approx(prefill, rel=0.3)
        assert speed.token_base == pytest.approx(1 / decode, rel=0.25)
        assert seconds_per_token(speed, 4) == pytest.approx(1 / decode + 3 * step, rel=0.3)
        assert "degraded" not in fleet.states("a")
