"""The count of a node's slots, under any order of events."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.fleet.node import Lease, LeasePhase
from tests.fleet.build import Clock, a_node, a_spec, is_held, no_upstream, take


class Counting(RuleBasedStateMachine):
    """Takes, releases, abandons and reloads in any order; the counts must match the leases."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.node = a_node(self.clock, slots=4)
        self.node.on_lease_released = self.released
        self.leases: list[Lease] = []
        self.callbacks = 0
        self.ended = 0

    def released(self, _: Lease, counted: bool) -> None:
        assert not counted
        self.callbacks += 1

    @initialize(slots=st.integers(1, 8))
    def begin(self, slots: int) -> None:
        self.node.spec = a_spec(slots=slots)

    @rule(slots=st.integers(0, 4))
    def takes(self, slots: int) -> None:
        self.leases.append(take(self.node, slots))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), how=st.sampled_from(["release", "abandon"]))
    def ends(self, data: st.DataObject, how: str) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        held = is_held(lease)
        if how == "release":
            lease.release()
            assert not is_held(lease)
        else:
            lease.abandon()
            assert is_held(lease) is held
            assert lease.phase is (LeasePhase.RECLAIM if held else LeasePhase.RELEASED)
        if held and not is_held(lease):
            self.ended += 1

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def moves(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        phase = lease.phase
        lease.head_received(self.clock())
        lease.content_received(self.clock())
        if phase in {LeasePhase.RECLAIM, LeasePhase.RELEASED}:
            assert lease.phase is phase
        else:
            assert lease.phase is LeasePhase.DECODE

    @rule(slots=st.none() | st.integers(1, 8), removed=st.booleans(), fresh=st.booleans())
    def reloads(self, slots: int | None, removed: bool, fresh: bool) -> None:
        self.node.spec = a_spec(slots=slots)
        self.node.removed = removed
        if fresh:
            self.node.upstream = no_upstream()

    @rule(busy=st.integers(0, 9), seconds=st.floats(0, 2))
    def slots_are_read(self, busy: int, seconds: float) -> None:
        occupancy = self.node.occupancy
        with occupancy.slots_query(self.clock()) as query:
            self.clock.passes(seconds)
        occupancy.record_busy(busy, query)
        assert self.node.foreign <= busy

    @invariant()
    def counts_agree(self) -> None:
        node = self.node
        held = [lease for lease in self.leases if is_held(lease)]
        assert node.leased == sum(lease.slots for lease in held) >= 0
        assert node.leases == set(held)
        assert node.in_flight == len(held)
        assert node.foreign >= 0
        assert node.free_slots(self.clock()) >= 0
        assert node.free_slots(self.clock()) + node.leased <= max(node.slots_total, node.leased)
        assert node.slots_busy >= node.leased
        assert self.callbacks == self.ended


TestCounting = Counting.TestCase
TestCounting.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_lease_is_released_once() -> None:
    node = a_node(slots=2)
    lease = take(node, 2)
    assert (node.leased, node.free_slots(node.clock())) == (2, 0)
    lease.release()
    lease.release()
    lease.abandon()
    assert (node.leased, node.free_slots(node.clock())) == (0, 2)


class CountedLease(Lease):
    """Writes down how often its own counts are told."""

    told: ClassVar[list[str]] = []

    def prefill_ended(self) -> None:
        self.told.append("prefill ended")

    def slots_freed(self) -> bool:
        self.told.append("slots freed")
        return True


def test_a_lease_is_told_once_of_the_prefill_and_of_the_release() -> None:
    node = a_node(slots=2)
    lease = CountedLease(node, 1, node.clock(), True, None, None)
    node.take(lease, node.clock())
    for _ in range(2):
        lease.content_received(node.clock())
    for _ in range(2):
        lease.release()
    assert lease.told == ["prefill ended", "slots freed"]


def test_a_negative_number_of_slots_is_refused() -> None:
    node = a_node()
    with pytest.raises(ValueError, match="-1"):
        take(node, -1)
    assert node.leased == 0
