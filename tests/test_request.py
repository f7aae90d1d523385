"""A request as a plain value."""

from __future__ import annotations

import pytest

from gateway.request import Caller, Priority


def test_better_classes_come_first() -> None:
    assert sorted(Priority) == list(Priority)
    assert Priority.URGENT < Priority.PREMIUM < Priority.NORMAL < Priority.BATCH


@pytest.mark.parametrize("priority", list(Priority))
def test_a_class_is_read_as_it_is_written(priority: Priority) -> None:
    assert Priority.parse(priority.label) is priority
    assert Priority.parse(f"  {priority.label.upper()} ") is priority


@pytest.mark.parametrize("word", ["", "high", "0", "urgent,normal", "normal\0"])
def test_an_unknown_class_is_none(word: str) -> None:
    assert Priority.parse(word) is None


def test_a_caller_may_use_all_models_or_those_named() -> None:
    assert Caller("a", "a", Priority.NORMAL).may_use("anything")
    some = Caller("a", "a", Priority.NORMAL, frozenset({"x"}))
    assert some.may_use("x")
    assert not some.may_use("y")
    assert not Caller("a", "a", Priority.NORMAL, frozenset()).may_use("x")
