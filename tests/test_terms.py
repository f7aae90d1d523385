"""A request as a plain value."""

from __future__ import annotations

import pytest

from gateway.terms import Caller, Priority


def test_higher_classes_come_first() -> None:
    assert sorted(Priority) == list(Priority)
    assert Priority.URGENT < Priority.PREMIUM < Priority.NORMAL < Priority.BATCH


@pytest.mark.parametrize("priority", list(Priority))
def test_a_class_is_parsed_by_its_label(priority: Priority) -> None:
    assert Priority.parse(priority.label) is priority
    assert Priority.parse(f"  {priority.label.upper()} ") is priority


@pytest.mark.parametrize("word", ["", "high", "0", "urgent,normal", "normal\0"])
def test_an_unknown_label_is_no_class(word: str) -> None:
    assert Priority.parse(word) is None


def test_a_caller_may_use_all_models_or_the_listed_ones() -> None:
    assert Caller("a", "a", Priority.NORMAL).may_use("anything")
    some = Caller("a", "a", Priority.NORMAL, frozenset({"x"}))
    assert some.may_use("x")
    assert not some.may_use("y")
    assert not Caller("a", "a", Priority.NORMAL, frozenset()).may_use("x")


@pytest.mark.parametrize(
    ("highest", "usual", "late"),
    [
        (Priority.BATCH, Priority.BATCH, Priority.BATCH),
        (Priority.NORMAL, Priority.BATCH, Priority.NORMAL),
        (Priority.URGENT, Priority.BATCH, Priority.NORMAL),
        (Priority.URGENT, Priority.NORMAL, Priority.NORMAL),
        (Priority.URGENT, Priority.PREMIUM, Priority.PREMIUM),
        (Priority.NORMAL, Priority.URGENT, Priority.NORMAL),
    ],
)
def test_late_work_has_the_class_that_its_callers_requests_have(
    highest: Priority, usual: Priority, late: Priority
) -> None:
    assert Caller("a", "a", highest, default_priority=usual).late_priority is late
