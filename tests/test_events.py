"""What happened is told at once, in order, to those who asked."""

from __future__ import annotations

from gateway.events import AttemptEnded, EventBus, NodeChanged


def changed(name: str) -> NodeChanged:
    return NodeChanged(name, None, "ready", "")


def test_every_subscriber_hears_of_its_own_kind_in_order() -> None:
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


def test_what_nobody_asked_for_is_forgotten() -> None:
    bus = EventBus()
    bus.publish(changed("a"))
    late: list[object] = []
    bus.subscribe(NodeChanged, late.append)
    assert late == []
