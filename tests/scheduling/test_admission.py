"""Which requests are admitted to the queue, by count and by predicted wait."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.request import Priority
from gateway.scheduling.admission import Admission, CompletionRate, class_limits, combine_waits
from tests.scheduling.build import a_request

NORMAL, BATCH, URGENT = Priority.NORMAL, Priority.BATCH, Priority.URGENT


def an_admission(**settings: Any) -> Admission:
    return Admission(Settings.model_validate(settings))


def code(found: GatewayError | None) -> str | None:
    return None if found is None else found.code


def test_lower_classes_are_refused_first_as_the_queue_fills() -> None:
    admission = an_admission(queue={"max": 100})
    last = {priority: admission.limits(priority).most_waiting for priority in Priority}
    assert list(last.values()) == [100, 100, 90, 50]


@pytest.mark.parametrize(("most", "counts"), [(0, [0] * 4), (1, [1] * 4), (3, [3, 3, 3, 2])])
def test_a_short_queue_has_room_for_all_classes(most: int, counts: list[int]) -> None:
    settings = Settings.model_validate({"queue": {"max": most}})
    assert [class_limits(settings, priority).most_waiting for priority in Priority] == counts


def test_a_full_queue_advises_when_a_place_comes_free() -> None:
    found = an_admission(queue={"max": 3}).refusal(NORMAL, 3, 0.0, 7.0)
    assert found is not None
    assert (found.status, found.code, found.retry_after) == (429, "queue_full", 7.0)


def test_a_predicted_wait_beyond_the_classes_limit_is_refused_at_once() -> None:
    admission = an_admission(queue={"max_wait": 100}, classes={"batch": {"max_wait": 1000}})
    found = admission.refusal(NORMAL, 1, 101.0, 5.0)
    assert found is not None
    assert (found.status, found.code, found.retryable) == (503, "queue_timeout", False)
    # When the wait has fallen to where the class is admitted again: 0.8 x 0.9 x 100 s.
    assert found.retry_after == pytest.approx(101.0 - 72.0)
    assert admission.refusal(BATCH, 1, 101.0, 5.0) is None


def test_a_class_refused_for_the_wait_stays_refused_until_the_wait_has_fallen() -> None:
    admission = an_admission(queue={"max_wait": 100, "reopen": 0.5})
    assert admission.refusal(NORMAL, 5, 89.0, 5.0) is None
    refused = admission.refusal(NORMAL, 5, 91.0, 5.0)
    assert refused is not None
    assert refused.code == "queue_full"
    assert refused.retry_after == pytest.approx(91.0 - 45.0)
    assert code(admission.refusal(NORMAL, 5, 60.0, 5.0)) == "queue_full"
    assert admission.refusal(URGENT, 5, 60.0, 5.0) is None
    assert admission.refusal(NORMAL, 5, 45.0, 5.0) is None
    assert admission.refusal(NORMAL, 5, 60.0, 5.0) is None


def test_an_unknown_wait_does_not_count() -> None:
    admission = an_admission(queue={"max_wait": 100})
    assert code(admission.refusal(NORMAL, 5, 95.0, 5.0)) == "queue_full"
    assert admission.refusal(NORMAL, 5, None, 5.0) is None
    assert admission.refusal(NORMAL, 5, 80.0, 5.0) is None


def test_a_reload_changes_the_limits() -> None:
    admission = an_admission(queue={"max": 3})
    assert admission.limits(URGENT).most_waiting <= 3
    admission.configure(Settings.model_validate({"queue": {"max": 4}}))
    assert admission.limits(URGENT).most_waiting > 3


def test_a_deadline_bounds_the_wait_and_is_refused_at_once_if_it_cannot_be_met() -> None:
    admission = an_admission(queue={"max_wait": 100})
    request = a_request()
    assert admission.admit(request, 1, 9.0, 5.0, 1000.0, 1010.0) == 1010.0
    assert admission.admit(a_request(), 1, 9.0, 5.0, 1000.0) == 1100.0
    with pytest.raises(GatewayError) as raised:
        admission.admit(request, 1, 11.0, 5.0, 1000.0, 1010.0)
    assert (raised.value.status, raised.value.code) == (503, "queue_timeout")
    assert raised.value.retry_after == 1.0
    # A deadline in the past: a predicted wait of 0 is too long.
    with pytest.raises(GatewayError):
        admission.admit(request, 1, 0.0, 5.0, 1000.0, 999.0)


def test_an_admitted_request_is_refused_only_for_its_deadline() -> None:
    admission = an_admission(queue={"max": 1})
    assert admission.admit(a_request(), 9, None, 5.0, 0.0, retried=True) > 0
    with pytest.raises(GatewayError):
        admission.admit(a_request(), 9, 6.0, 5.0, 0.0, 5.0, retried=True)


def test_the_lower_of_two_predictions_counts() -> None:
    rate = CompletionRate()
    for moment in range(11):
        rate.completed(float(moment))
    # Eleven in ten seconds: four more take less than 4 s.
    assert combine_waits(rate, 1, 3, None, 10.0) == pytest.approx(4 / 1.1)
    assert combine_waits(rate, 1, 3, 2.0, 10.0) == 2.0
    assert combine_waits(rate, 1, 3, 9.0, 10.0) == pytest.approx(4 / 1.1)
    assert combine_waits(CompletionRate(), 1, 3, 9.0, 10.0) == 9.0
    assert combine_waits(CompletionRate(), 1, 3, None, 10.0) is None


def test_with_nobody_ahead_half_of_one_answers_length_counts() -> None:
    assert combine_waits(CompletionRate(), 1, 0, 8.0, 0.0) == 4.0
    assert combine_waits(CompletionRate(), 1, 0, None, 0.0) is None
