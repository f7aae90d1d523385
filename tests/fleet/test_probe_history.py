from __future__ import annotations

import pytest

from gateway.fleet.lifecycle import ProbeAnswer, ProbeHistory, ProbeResult


def after(
    history: ProbeHistory,
    *answers: ProbeAnswer,
    rise: int = 1,
    fall: int = 3,
    sign: str | None = None,
) -> ProbeHistory:
    for answer in answers:
        history.record(ProbeResult(answer, answer.value), rise=rise, fall=fall, sign_of_life=sign)
    return history


UP, LOADING, REFUSED = ProbeAnswer.UP, ProbeAnswer.LOADING, ProbeAnswer.CONNECTION_REFUSED
TIMED_OUT, FAILED, LOCKED = ProbeAnswer.TIMED_OUT, ProbeAnswer.FAILED, ProbeAnswer.KEY_REJECTED


def test_the_first_answer_brings_a_new_node_up() -> None:
    assert after(ProbeHistory(), UP, rise=3).up


def test_a_node_that_was_never_up_is_down_at_its_first_failure() -> None:
    history = after(ProbeHistory(), REFUSED)
    assert history.down
    assert history.detail == "refused"


def test_a_refused_connection_takes_a_node_that_works_down_at_once() -> None:
    assert after(ProbeHistory(), UP, REFUSED).down


def test_a_node_that_went_down_is_probed_often_for_a_while() -> None:
    history = after(ProbeHistory(), UP, REFUSED)
    assert history.unstable
    assert not after(history, *[REFUSED] * 30).unstable


@pytest.mark.parametrize("failure", [TIMED_OUT, FAILED, LOCKED])
def test_a_node_that_works_goes_down_at_the_third_failure_in_a_row(failure: ProbeAnswer) -> None:
    history = after(ProbeHistory(), UP, failure, failure)
    assert history.up
    assert history.unstable
    assert after(history, failure).down


def test_an_answer_between_failures_starts_the_count_anew() -> None:
    assert after(ProbeHistory(), UP, FAILED, FAILED, UP, FAILED, FAILED).up


def test_a_node_that_was_down_must_answer_as_often_as_rise_says() -> None:
    history = after(ProbeHistory(), FAILED)
    assert not after(history, UP, rise=2).up
    assert not after(history, FAILED, UP, rise=2).up
    assert after(history, UP, rise=2).up


def test_loading_is_believed_at_once_and_is_not_down() -> None:
    history = after(ProbeHistory(), UP, LOADING)
    assert history.loading
    assert not history.up
    assert not history.down
    assert history.unstable
    assert after(history, UP, rise=3).up


def test_a_server_that_dies_while_loading_is_down_at_once() -> None:
    assert after(ProbeHistory(), LOADING, REFUSED).down


def test_time_outs_do_not_count_while_there_is_a_sign_of_life() -> None:
    history = after(ProbeHistory(), UP, *[TIMED_OUT] * 50, sign="it reads a prompt")
    assert history.up
    assert history.mute
    assert "it reads a prompt" in history.detail
    assert not after(history, UP).mute


def test_refusals_count_despite_signs_of_life() -> None:
    assert after(ProbeHistory(), UP, *[REFUSED] * 3, sign="one of its streams moves").down


def test_time_outs_count_again_when_the_sign_of_life_ends() -> None:
    history = after(ProbeHistory(), UP, TIMED_OUT, TIMED_OUT, sign="it reads a prompt")
    after(history, TIMED_OUT, TIMED_OUT)
    assert history.mute
    assert not history.down
    assert "2 of 3" in history.detail
    assert after(history, TIMED_OUT).down
    assert not history.mute


def test_a_node_that_is_down_does_not_become_mute() -> None:
    assert after(ProbeHistory(), REFUSED, TIMED_OUT, sign="one of its streams moves").down


def test_what_a_server_is_must_be_asked_again_when_it_comes_back() -> None:
    history = after(ProbeHistory(), UP)
    history.discovered_at = 5.0
    after(history, FAILED, FAILED)
    assert history.discovered_at == 5.0
    after(history, FAILED)
    assert history.discovered_at is None
