from __future__ import annotations

import random

import pytest

from gateway.terms import Traceparent
from gateway.watch.request_tracing import Allowance, Sampler
from tests.nodes.build import Clock

CLIENT = Traceparent("1" * 32, "1" * 16, sampled=True)
SILENT = Traceparent("1" * 32, "1" * 16, sampled=False)


def sampler(share: float, beyond: float = 0.0, clock: Clock | None = None) -> Sampler:
    return Sampler(share, beyond, draw=random.Random(7).random, clock=clock or Clock())


@pytest.mark.parametrize(
    ("share", "least", "most"), [(0, 0, 0), (0.05, 400, 600), (1, 10**4, 10**4)]
)
def test_the_share_is_traced(share: float, least: int, most: int) -> None:
    one = sampler(share)
    assert least <= sum(one.takes(None) for _ in range(10_000)) <= most


def test_a_trace_that_the_client_has_not_recorded_is_left_alone() -> None:
    assert not any(sampler(1.0, 1.0).takes(SILENT) for _ in range(100))


def test_a_trace_that_the_client_has_recorded_has_the_chance_of_any_and_an_allowance() -> None:
    clock = Clock()
    one = sampler(0.0, 2.0, clock)
    assert sum(one.takes(CLIENT) for _ in range(1000)) == 2
    clock.now += 1.0
    assert sum(one.takes(CLIENT) for _ in range(1000)) == 2
    one = sampler(0.05)
    assert 400 <= sum(one.takes(CLIENT) for _ in range(10_000)) <= 600


def test_failures_have_an_allowance_of_their_own() -> None:
    one = sampler(0.0, 1.0)
    assert one.takes(CLIENT)
    assert not one.takes(CLIENT)
    assert one.takes_failed()
    assert not one.takes_failed()


def test_an_allowance_below_one_a_second_is_saved_up() -> None:
    clock = Clock()
    allowance = Allowance(0.1, clock)
    taken = 0
    for _ in range(1000):
        taken += allowance.take()
        clock.now += 0.1
    assert 10 <= taken <= 12
    assert not Allowance(0.0, clock).take()


def test_an_idle_hour_saves_up_no_more_than_a_second_does() -> None:
    clock = Clock()
    allowance = Allowance(5.0, clock)
    clock.now += 3600
    assert sum(allowance.take() for _ in range(100)) == 5
