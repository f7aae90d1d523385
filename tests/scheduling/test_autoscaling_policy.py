from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.lifecycle import LifecyclePhase
from gateway.scheduling.autoscaling_policy import (
    AutoscalingPolicy,
    AutoscalingRules,
    ScalingAction,
    StandbyNode,
    WaitingDemand,
)

RULES = AutoscalingRules(start_above=10, start_after=5, stop_after=60, cooldown=30)
ALL = frozenset({"a", "b"})


def off(name: str = "a", **keys: object) -> StandbyNode:
    return replace(StandbyNode(name, LifecyclePhase.OFF, slots=2), **keys)  # type: ignore[arg-type]


def on(name: str = "a", **keys: object) -> StandbyNode:
    return replace(StandbyNode(name, LifecyclePhase.ON, slots=2), **keys)  # type: ignore[arg-type]


def waits(seconds: float, slots: int = 4) -> WaitingDemand:
    return WaitingDemand(ALL, seconds, slots)


def done(actions: list[ScalingAction]) -> list[tuple[str, str]]:
    return [(action.verb, action.name) for action in actions]


def test_a_wait_above_the_limit_starts_a_node_only_when_it_lasts() -> None:
    policy = AutoscalingPolicy()
    assert not policy.decide([off()], [waits(11)], RULES, 0)
    assert not policy.decide([off()], [waits(11)], RULES, 4)
    assert done(policy.decide([off()], [waits(11)], RULES, 5)) == [("start", "a")]


def test_a_wait_that_falls_below_meanwhile_begins_anew() -> None:
    policy = AutoscalingPolicy()
    policy.decide([off()], [waits(11)], RULES, 0)
    policy.decide([off()], [waits(9)], RULES, 3)
    assert not policy.decide([off()], [waits(11)], RULES, 6)


def test_what_is_being_started_counts_as_if_it_worked() -> None:
    units = [StandbyNode("a", LifecyclePhase.STARTING, slots=4), off("b")]
    policy = AutoscalingPolicy()
    for now in (0, 6):
        assert not policy.decide(units, [waits(19, slots=4)], RULES, now)
    policy.decide(units, [waits(21, slots=4)], RULES, 7)
    assert done(policy.decide(units, [waits(21, slots=4)], RULES, 13)) == [("start", "b")]


def test_what_nothing_serves_starts_a_node_at_once_and_only_one() -> None:
    policy = AutoscalingPolicy()
    assert done(policy.decide([off(), off("b")], [waits(0, slots=0)], RULES, 0)) == [("start", "a")]
    units = [StandbyNode("a", LifecyclePhase.STARTING), off("b")]
    assert not policy.decide(units, [waits(0, slots=0)], RULES, 1)


def test_the_cheapest_is_started_first() -> None:
    units = [off("a", cost=0.4), off("b", cost=0.2)]
    assert done(AutoscalingPolicy().decide(units, [waits(0, slots=0)], RULES, 0)) == [
        ("start", "b")
    ]


def test_the_minimum_runs_whatever_the_load() -> None:
    rules = replace(RULES, min=1)
    assert done(AutoscalingPolicy().decide([off(), off("b")], [], rules, 0)) == [("start", "a")]
    policy = AutoscalingPolicy()
    for now in (0, 100):
        assert not policy.decide([on(), off("b")], [], rules, now)


def test_an_idle_node_is_retired_and_then_stopped() -> None:
    policy = AutoscalingPolicy()
    assert not policy.decide([on()], [], RULES, 0)
    assert not policy.decide([on()], [], RULES, 59)
    assert done(policy.decide([on()], [], RULES, 60)) == [("retire", "a")]
    leaving = StandbyNode("a", LifecyclePhase.RETIRING)
    assert not policy.decide([replace(leaving, busy=1)], [], RULES, 61)
    assert done(policy.decide([leaving], [], RULES, 62)) == [("stop", "a")]


def test_a_node_whose_work_the_others_could_do_is_retired_one_after_the_other() -> None:
    units = [on(busy=1, other_slots=(8, 1)), on("b", busy=1, other_slots=(8, 1), cost=1.0)]
    policy = AutoscalingPolicy()
    policy.decide(units, [], RULES, 0)
    assert done(policy.decide(units, [], RULES, 60)) == [("retire", "b")]
    units[1] = replace(units[1], phase=LifecyclePhase.RETIRING)
    assert not policy.decide(units, [], RULES, 61)


def test_a_node_that_is_needed_stays() -> None:
    policy = AutoscalingPolicy()
    for now in (0, 100):
        assert not policy.decide([on(busy=1, other_slots=(2, 1))], [], RULES, now)
        assert not policy.decide([on(busy=1, other_slots=(0, 0))], [], RULES, now)


def test_one_that_is_leaving_is_kept_when_it_is_needed_again() -> None:
    units = [off("b"), StandbyNode("a", LifecyclePhase.RETIRING, busy=1)]
    assert done(AutoscalingPolicy().decide(units, [waits(0, slots=0)], RULES, 0)) == [("keep", "a")]


def test_what_an_operator_has_drained_is_left_alone() -> None:
    policy = AutoscalingPolicy()
    for now in (0, 100):
        assert not policy.decide([on(drained=True)], [], RULES, now)
    assert not policy.decide([off(drained=True)], [waits(0, slots=0)], RULES, 0)


def test_a_hook_that_failed_is_not_tried_before_its_time() -> None:
    unit = off(retry_at=50)
    assert not AutoscalingPolicy().decide([unit], [waits(0, slots=0)], RULES, 49)
    assert AutoscalingPolicy().decide([unit], [waits(0, slots=0)], RULES, 50)


def test_a_lower_maximum_retires_what_is_too_much() -> None:
    units = [on(busy=1), on("b", busy=1)]
    assert done(AutoscalingPolicy().decide(units, [], replace(RULES, max=1), 0)) == [
        ("retire", "a")
    ]


@dataclass
class World:
    """Nodes that do as they are told, with a load that comes and goes as it likes."""

    rng: random.Random
    rules: AutoscalingRules
    units: dict[str, StandbyNode]
    policy: AutoscalingPolicy = field(default_factory=AutoscalingPolicy)
    now: float = 0.0
    stopped: dict[str, float] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)

    def running(self) -> int:
        return sum(unit.phase is not LifecyclePhase.OFF for unit in self.units.values())

    def serving(self) -> int:
        return sum(
            unit.phase in {LifecyclePhase.STARTING, LifecyclePhase.ON}
            for unit in self.units.values()
        )

    def step(self) -> None:
        rng = self.rng
        self.now += rng.choice([0.5, 1, 5, 20, 70])
        for name, unit in self.units.items():
            phase = unit.phase
            if phase is LifecyclePhase.STARTING and rng.random() < 0.4:
                phase = LifecyclePhase.ON
            busy = unit.busy
            if phase is LifecyclePhase.ON:
                busy = rng.choice([0, 0, 0, 1, 2])
            elif phase is LifecyclePhase.RETIRING and busy and rng.random() < 0.5:
                busy -= 1
            held = rng.random() < 0.05
            others = (rng.choice([0, 4, 8]), rng.choice([0, 2, 4]))
            self.units[name] = replace(
                unit, phase=phase, busy=busy, other_slots=others, drained=held
            )
        names = list(self.units)
        demands = [
            WaitingDemand(
                frozenset(rng.sample(names, rng.randint(1, len(names)))),
                rng.choice([0, 5, 11, 40, 400]),
                rng.choice([0, 2, 4]),
            )
            for _ in range(rng.choice([0, 0, 1, 2]))
        ]
        for action in self.policy.decide(list(self.units.values()), demands, self.rules, self.now):
            self.obey(action)

    def obey(self, action: ScalingAction) -> None:
        unit, rules, now = self.units[action.name], self.rules, self.now
        match action.verb:
            case "start":
                assert unit.phase is LifecyclePhase.OFF
                assert not unit.drained
                assert now - self.stopped.get(unit.name, -1e9) >= rules.cooldown
                self.started[unit.name] = now
                unit = replace(unit, phase=LifecyclePhase.STARTING, started_at=now)
            case "retire":
                assert unit.phase is LifecyclePhase.ON
                assert not unit.drained
                assert all(now - at >= rules.cooldown for at in self.started.values())
                unit = replace(unit, phase=LifecyclePhase.RETIRING)
            case "keep":
                assert unit.phase is LifecyclePhase.RETIRING
                unit = replace(unit, phase=LifecyclePhase.ON)
            case "stop":
                assert unit.phase is LifecyclePhase.RETIRING
                assert unit.busy == 0
                self.stopped[unit.name] = now
                unit = replace(unit, phase=LifecyclePhase.OFF, stopped_at=now)
        before = self.serving()
        self.units[action.name] = unit
        if rules.max is not None:
            assert self.running() <= rules.max
        if action.verb == "retire":
            assert before > rules.min


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    count=st.integers(1, 6),
    least=st.integers(0, 3),
    more=st.none() | st.integers(0, 3),
    cooldown=st.sampled_from([0.0, 10.0, 60.0]),
    stop_after=st.sampled_from([1.0, 30.0, 120.0]),
)
def test_whatever_comes_it_keeps_the_bounds_and_the_cooldown_and_stops_nothing_with_work(
    seed: int, count: int, least: int, more: int | None, cooldown: float, stop_after: float
) -> None:
    rules = AutoscalingRules(
        10,
        5,
        stop_after,
        min=least,
        max=None if more is None else max(1, least + more),
        cooldown=cooldown,
    )
    units = {name: StandbyNode(name, LifecyclePhase.OFF, slots=2) for name in "abcdef"[:count]}
    world = World(random.Random(seed), rules, units)
    for _ in range(120):
        world.step()
        startable = any(
            unit.phase is LifecyclePhase.OFF
            and not unit.drained
            and world.now - unit.stopped_at >= cooldown
            for unit in world.units.values()
        )
        at_most = rules.max is not None and world.running() >= rules.max
        assert world.serving() >= rules.min or at_most or not startable
