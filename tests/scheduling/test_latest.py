from __future__ import annotations

from gateway.scheduling.latest import Latest


def test_the_newest_replaces_the_one_before_it() -> None:
    latest = Latest[object]()
    first, second, other = object(), object(), object()
    assert latest.enter("a", first) is None
    assert latest.enter("b", other) is None
    assert latest.enter("a", second) is first


def test_what_is_over_is_not_replaced() -> None:
    latest = Latest[object]()
    first, second = object(), object()
    latest.enter("a", first)
    latest.leave("a", first)
    assert latest.enter("a", second) is None


def test_the_end_of_what_was_replaced_leaves_its_successor() -> None:
    latest = Latest[object]()
    first, second, third = object(), object(), object()
    latest.enter("a", first)
    latest.enter("a", second)
    latest.leave("a", first)
    assert latest.enter("a", third) is second
    latest.leave("a", third)
    assert len(latest) == 0
