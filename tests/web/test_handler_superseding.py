from __future__ import annotations

from gateway.web.handler import SupersedingMap


def test_a_newer_item_replaces_the_older_one() -> None:
    latest = SupersedingMap[object]()
    first, second, other = object(), object(), object()
    assert latest.replace("a", first) is None
    assert latest.replace("b", other) is None
    assert latest.replace("a", second) is first


def test_a_discarded_item_is_not_replaced() -> None:
    latest = SupersedingMap[object]()
    first, second = object(), object()
    latest.replace("a", first)
    latest.discard("a", first)
    assert latest.replace("a", second) is None


def test_discarding_a_replaced_item_leaves_the_newer_one() -> None:
    latest = SupersedingMap[object]()
    first, second, third = object(), object(), object()
    latest.replace("a", first)
    latest.replace("a", second)
    latest.discard("a", first)
    assert latest.replace("a", third) is second
    latest.discard("a", third)
    assert len(latest) == 0
