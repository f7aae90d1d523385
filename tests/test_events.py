"""The bus hands events to their subscribers, in order."""

from __future__ import annotations

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
