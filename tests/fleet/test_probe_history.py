from __future__ import annotations

import pytest

from gateway.fleet.probe_history import ProbeAnswer, ProbeHistory, ProbeResult


def told(
    probing: ProbeHistory,
    *answers: ProbeAnswer,
    rise: int = 1,
    fall: int = 3,
    sign: str | None = None,
) -> ProbeHistory:
    for answer in answers:
        probing.record(ProbeResult(answer, answer.value), rise=rise, fall=fall, sign_of_life=sign)
    return probing


UP, LOADING, REFUSED = ProbeAnswer.UP, ProbeAnswer.LOADING, ProbeAnswer.CONNECTION_REFUSED
TIMED_OUT, FAILED, LOCKED = ProbeAnswer.TIMED_OUT, ProbeAnswer.FAILED, ProbeAnswer.KEY_REJECTED


def test_the_first_answer_brings_a_new_node_up() -> None:
    assert told(ProbeHistory(), UP, rise=3).up


def test_a_node_that_was_never_up_is_down_at_its_first_failure() -> None:
    probing = told(ProbeHistory(), REFUSED)
    assert probing.down
    assert probing.detail == "refused"


def test_a_refused_connection_takes_a_node_that_works_down_at_once() -> None:
    assert told(ProbeHistory(), UP, REFUSED).down


def test_a_node_that_went_down_is_probed_often_for_a_while() -> None:
    probing = told(ProbeHistory(), UP, REFUSED)
    assert probing.unstable
    assert not told(probing, *[REFUSED] * 30).unstable


@pytest.mark.parametrize("failure", [TIMED_OUT, FAILED, LOCKED])
def test_a_node_that_works_goes_down_at_the_third_failure_in_a_row(failure: ProbeAnswer) -> None:
    probing = told(ProbeHistory(), UP, failure, failure)
    assert probing.up
    assert probing.unstable
    assert told(probing, failure).down


def test_an_answer_between_failures_starts_the_count_anew() -> None:
    assert told(ProbeHistory(), UP, FAILED, FAILED, UP, FAILED, FAILED).up


def test_a_node_that_was_down_must_answer_as_often_as_rise_says() -> None:
    probing = told(ProbeHistory(), FAILED)
    assert not told(probing, UP, rise=2).up
    assert not told(probing, FAILED, UP, rise=2).up
    assert told(probing, UP, rise=2).up


def test_loading_is_believed_at_once_and_is_not_down() -> None:
    probing = told(ProbeHistory(), UP, LOADING)
    assert probing.loading
    assert not probing.up
    assert not probing.down
    assert probing.unstable
    assert told(probing, UP, rise=3).up


def test_a_server_that_dies_while_loading_is_down_at_once() -> None:
    assert told(ProbeHistory(), LOADING, REFUSED).down


def test_time_outs_do_not_count_while_there_is_a_sign_of_life() -> None:
    probing = told(ProbeHistory(), UP, *[TIMED_OUT] * 50, sign="it reads a prompt")
    assert probing.up
    assert probing.mute
    assert "it reads a prompt" in probing.detail
    assert not told(probing, UP).mute


def test_refusals_count_despite_signs_of_life() -> None:
    assert told(ProbeHistory(), UP, *[REFUSED] * 3, sign="one of its streams moves").down


def test_time_outs_count_again_when_the_sign_of_life_ends() -> None:
    probing = told(ProbeHistory(), UP, TIMED_OUT, TIMED_OUT, sign="it reads a prompt")
    told(probing, TIMED_OUT, TIMED_OUT)
    assert probing.mute
    assert not probing.down
    assert "2 of 3" in probing.detail
    assert told(probing, TIMED_OUT).down
    assert not probing.mute


def test_a_node_that_is_down_does_not_become_mute() -> None:
    assert told(ProbeHistory(), REFUSED, TIMED_OUT, sign="one of its streams moves").down


def test_what_a_server_is_must_be_asked_again_when_it_comes_back() -> None:
    probing = told(ProbeHistory(), UP)
    probing.discovered_at = 5.0
    told(probing, FAILED, FAILED)
    assert probing.discovered_at == 5.0
    told(probing, FAILED)
    assert probing.discovered_at is None
