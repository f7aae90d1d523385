from __future__ import annotations

from gateway.web.handler import SupersedingMap


def test_the_newest_replaces_the_one_before_it() -> None:
    latest = SupersedingMap[object]()
    first, second, other = object(), object(), object()
    assert latest.replace("a", first) is None
    assert latest.replace("b", other) is None
    assert latest.replace("a", second) is first


def test_what_is_over_is_not_replaced() -> None:
    latest = SupersedingMap[object]()
    first, second = object(), object()
    latest.replace("a", first)
    latest.discard("a", first)
    assert latest.replace("a", second) is None


def test_the_end_of_what_was_replaced_leaves_its_successor() -> None:
    latest = SupersedingMap[object]()
    first, second, third = object(), object(), object()
    latest.replace("a", first)
    latest.replace("a", second)
    latest.discard("a", first)
    assert latest.replace("a", third) is second
    latest.discard("a", third)
    assert len(latest) == 0
