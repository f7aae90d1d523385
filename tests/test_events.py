"""The bus hands events to their subscribers, in order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.events import MOST_KINDS, AttemptEnded, EndedKind, EventBus, NodeChanged, RequestRecord


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


def test_no_more_work_waits_than_may() -> None:
    bus, done = EventBus(lambda _, __: None, 3), list[int]()
    for number in range(7):
        bus.defer(done.append, number)
    assert done == [0, 1, 2, 3, 4, 5]


def test_each_record_is_read_once_by_each_reader_of_its_kind_and_added_up() -> None:
    bus = EventBus()
    bus.publish(RequestRecord("early", "/x"))  # of which no later reader gets a sum
    read: list[tuple[int, str]] = []
    sums: list[tuple[str, int, int, float]] = []

    def make_reader(kind: EndedKind) -> Callable[[RequestRecord], None]:
        return lambda record: read.append((kind.status, record.x_request_id))

    bus.ended.read_by(
        make_reader, lambda kind: sums.append((kind.caller, kind.requests, kind.prompt, kind.cost))
    )
    for name, caller in (("a", "ann"), ("b", "bob"), ("c", "ann")):
        bus.publish(RequestRecord(name, "/x", caller=caller, prompt_tokens=2, cost=0.5))
    assert read == [(200, "a"), (200, "b"), (200, "c")]
    assert sums == []
    bus.catch_up()
    bus.catch_up()
    assert sums == [("ann", 2, 4, 1.0), ("bob", 1, 2, 0.5)]


def test_kinds_of_strangers_take_bounded_memory_and_no_sum_is_lost() -> None:
    bus = EventBus()
    counts: list[int] = []
    bus.ended.read_by(lambda _: lambda _: None, lambda kind: counts.append(kind.requests))
    for number in range(MOST_KINDS + 1):
        bus.publish(RequestRecord("r", "/x", caller=f"c{number}"))
    assert counts == [1], "the oldest alone: all at once would take long"
    bus.catch_up()
    assert sum(counts) == MOST_KINDS + 1
