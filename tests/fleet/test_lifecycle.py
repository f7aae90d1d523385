"""When a standby node that starts, or is to be started, can be expected to work."""

from __future__ import annotations

import pytest

from gateway.fleet.lifecycle import ASSUMED_STARTUP, Lifecycle, LifecyclePhase

NOW = 1000.0


def test_a_node_that_was_never_started_is_expected_after_an_assumed_time() -> None:
    lifecycle = Lifecycle(LifecyclePhase.OFF)
    assert lifecycle.ready_in(NOW, cooldown=30.0) == ASSUMED_STARTUP


def test_the_last_start_and_a_cooldown_decide_when_a_stopped_node_can_work() -> None:
    lifecycle = Lifecycle(LifecyclePhase.OFF, startup_seconds=8.0, stopped_at=NOW - 10.0)
    assert lifecycle.ready_in(NOW, cooldown=30.0) == pytest.approx(8.0 + 20.0)


def test_a_start_that_takes_longer_than_the_last_one_takes_some_more() -> None:
    lifecycle = Lifecycle(startup_seconds=8.0)
    lifecycle.enter(LifecyclePhase.STARTING, "a request waits", NOW)
    assert lifecycle.ready_in(NOW + 3.0, cooldown=30.0) == pytest.approx(5.0)
    assert lifecycle.ready_in(NOW + 20.0, cooldown=30.0) == pytest.approx(5.0)


def test_failures_in_a_row_wait_twice_as_long_each_time_up_to_a_limit() -> None:
    lifecycle = Lifecycle(LifecyclePhase.OFF, startup_seconds=8.0)
    waits = []
    for _ in range(5):
        lifecycle.record_failure(NOW, initial=5.0, longest=30.0)
        waits.append(lifecycle.ready_in(NOW, cooldown=0.0) - 8.0)
    assert waits == [5.0, 10.0, 20.0, 30.0, 30.0]


def test_another_phase_ends_the_time_that_a_node_was_down() -> None:
    lifecycle = Lifecycle(LifecyclePhase.ON, down_since=NOW)
    lifecycle.enter(LifecyclePhase.STOPPING, "it is down", NOW + 1.0)
    assert (lifecycle.phase, lifecycle.since) == (LifecyclePhase.STOPPING, NOW + 1.0)
    assert lifecycle.down_since is None
