from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.speed import Speed, weigh
from tests.fleet.build import a_node


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
    speed.learn(timings(tps=50))
    assert speed.prefill_tps == pytest.approx(500)
    assert speed.decode_tps == pytest.approx(50)


def test_one_odd_measurement_moves_it_little_and_a_lasting_change_fully() -> None:
    speed = Speed()
    for _ in range(20):
        speed.learn(timings(tps=50))
    speed.learn(timings(tps=0.01))
    assert speed.decode_tps is not None
    assert speed.decode_tps > 40
    for _ in range(100):
        speed.learn(timings(tps=10))
    assert speed.decode_tps == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize(
    "bad",
    [0, -5, math.nan, math.inf, -math.inf, None, "32", True, 10**400, [], 1e-300],
)
@pytest.mark.parametrize("key", ["prompt_n", "prompt_ms", "predicted_n", "predicted_ms"])
def test_nonsense_is_ignored(key: str, bad: Any) -> None:
    speed = Speed()
    speed.learn(timings(tps=50))
    before = (speed.prefill_tps, speed.decode_tps)
    speed.learn(timings(tps=50) | {key: bad})
    assert (speed.prefill_tps, speed.decode_tps) == pytest.approx(before)


def test_missing_figures_are_ignored() -> None:
    speed = Speed()
    speed.learn({})
    assert (speed.prefill_tps, speed.decode_tps) == (None, None)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["prompt_n", "prompt_ms", "predicted_n", "predicted_ms"]),
            st.floats() | st.integers() | st.none() | st.text(),
        )
    )
)
def test_whatever_it_is_told_a_speed_stays_a_positive_number(told: list[dict[str, object]]) -> None:
    speed = Speed()
    for one in told:
        speed.learn(one)
        for rate in (speed.prefill_tps, speed.decode_tps):
            assert rate is None or 0 < rate < math.inf


def test_until_it_is_measured_the_hint_holds() -> None:
    node = a_node(speed_hint=2.5)
    assert node.speed.relative == 2.5
    weigh([node])
    assert node.speed.relative == 2.5


def test_measured_and_guessed_nodes_stand_on_one_scale() -> None:
    slow, fast, guessed = a_node(speed_hint=1), a_node(speed_hint=2), a_node(speed_hint=4)
    slow.speed.learn(timings(tps=10))
    fast.speed.learn(timings(tps=20))
    weigh([slow, fast, guessed])
    assert slow.speed.relative == pytest.approx(1)
    assert fast.speed.relative == pytest.approx(2)
    assert guessed.speed.relative == 4


def test_a_wrong_hint_is_overruled_by_the_measurement() -> None:
    boast, honest, other = a_node(speed_hint=10), a_node(), a_node()
    for node in (boast, honest, other):
        node.speed.learn(timings(tps=10))
    weigh([boast, honest, other])
    assert boast.speed.relative == pytest.approx(honest.speed.relative)


def test_nodes_of_different_models_are_not_compared() -> None:
    small, large = a_node(model="small"), a_node(model="large")
    small.speed.learn(timings(tps=100))
    large.speed.learn(timings(tps=2))
    weigh([small, large])
    assert small.speed.relative == large.speed.relative == pytest.approx(1)


def test_nodes_that_only_embed_are_weighed_by_their_prefill() -> None:
    slow, fast = a_node(), a_node()
    slow.speed.learn({"prompt_n": 100, "prompt_ms": 1000})
    fast.speed.learn({"prompt_n": 300, "prompt_ms": 1000})
    weigh([slow, fast])
    assert fast.speed.relative == pytest.approx(3 * slow.speed.relative)
