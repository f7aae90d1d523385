from __future__ import annotations

import math

import pytest

from gateway.tools.plan.queueing import allen_cunneen, busy_probability, erlang_c, lognormal_scv


def test_erlang_c_of_one_server_is_its_use() -> None:
    assert erlang_c(1, 0.3) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("servers", "offered", "probability"),
    [
        # By the definition: a^c/c! c/(c-a) over the sum of the states.
        (2, 1.0, 1 / 3),
        (3, 2.0, 4 / 9),
        (10, 8.0, 0.40918),
    ],
)
def test_erlang_c_is_that_of_the_tables(servers: int, offered: float, probability: float) -> None:
    assert erlang_c(servers, offered) == pytest.approx(probability, rel=1e-4)


def test_an_overloaded_queue_makes_everybody_wait() -> None:
    assert erlang_c(3, 3.0) == erlang_c(3, 70.0) == 1.0
    assert busy_probability(3, 1.0, lambda busy: busy / 3) == 1.0


def test_many_servers_do_not_overflow() -> None:
    assert 0 < erlang_c(100_000, 99_900.0) < 1
    assert 0 < busy_probability(20_000, 19_900.0, float) < 1


def test_constant_speeds_make_erlang_c_of_the_birth_death_process() -> None:
    for servers, offered in ((1, 0.5), (4, 3.0), (20, 17.0)):
        assert busy_probability(servers, offered, float) == pytest.approx(
            erlang_c(servers, offered)
        )


def test_servers_that_are_faster_alone_are_less_often_all_busy() -> None:
    slow = busy_probability(4, 2.0, float)
    # As fast when all are busy, faster when not.
    assert busy_probability(4, 2.0, lambda busy: 4.0 if busy == 4 else busy * 1.2) < slow


def test_allen_cunneen_is_exact_for_one_server() -> None:
    # Pollaczek-Khinchine: wait = rho / (mu - lambda) (1 + Cs²) / 2.
    assert allen_cunneen(0.8, 0.8, 1.0) == pytest.approx(4.0)
    assert allen_cunneen(0.8, 0.8, 1.0, service_scv=0.0) == pytest.approx(2.0)
    assert allen_cunneen(1.0, 1.0, 1.0) == math.inf


def test_lengths_that_are_cut_vary_less() -> None:
    mean, scv = lognormal_scv(0.8)
    assert (mean, scv) == (1.0, math.exp(0.8**2) - 1)
    mean, scv = lognormal_scv(0.8, 8.0)
    assert 0.99 < mean < 1.0
    assert 0.8 < scv < math.exp(0.64) - 1
    assert lognormal_scv(0.0, 8.0) == (1.0, 0.0)


@pytest.mark.parametrize("servers", [0, -1, 10_000_000])
def test_a_number_of_servers_that_is_none_is_refused(servers: int) -> None:
    with pytest.raises(ValueError, match="servers must be from 1"):
        erlang_c(servers, 0.5)


@pytest.mark.parametrize("offered", [-1.0, math.nan, math.inf])
def test_a_load_that_is_none_is_refused(offered: float) -> None:
    with pytest.raises(ValueError, match="finite number of erlangs"):
        erlang_c(2, offered)
