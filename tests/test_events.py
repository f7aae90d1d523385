"""The bus hands events to their subscribers, in order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.events import AttemptEnded, EventBus, NodeChanged


def changed(name: str) -> NodeChanged:
    return NodeChanged(name, None, "ready", "")


def test_each_subscriber_gets_its_own_kind_of_event_in_order() -> None:
    bus = EventBus()
    first: list[object] = []
    second: list[object] = []
    bus.subscribe(NodeChanged, first.append)
    bus.subscribe(NodeChanged, second.append)
    events = [changed("a"), changed("b")]
    for event in events:
        bus.publish(event)
    bus.publish(AttemptEnded("r", "a", "ok", 1.0))
    assert first == second == events


def test_an_event_without_subscribers_is_dropped() -> None:
    bus = EventBus()
    bus.publish(changed("a"))
    late: list[object] = []
    bus.subscribe(NodeChanged, late.append)
    assert late == []


def test_deferred_work_is_done_though_other_work_fails() -> None:
    timers: list[Callable[[], None]] = []
    bus = EventBus(lambda _, work: timers.append(work))
    done: list[str] = []

    def fail() -> None:
        raise ValueError("broken")

    bus.defer(done.append, "first")
    bus.defer(fail)
    bus.defer(done.append, "second")
    bus.defer(done.append, "third")
    with pytest.raises(ValueError, match="broken"):
        timers.pop()()
    assert done == ["first"]
    timers.pop()()
    assert done == ["first", "second", "third"]
    assert not timers
