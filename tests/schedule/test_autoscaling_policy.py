from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.nodes.lifecycle import LifecyclePhase
from gateway.schedule.core.autoscaling_policy import (
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


def verbs(actions: list[ScalingAction]) -> list[tuple[str, str]]:
    return [(action.verb, action.name) for action in actions]


def test_a_wait_above_the_limit_starts_a_node_only_when_it_lasts() -> None:
    policy = AutoscalingPolicy()
    assert not policy.decide([off()], [waits(11)], RULES, 0)
    assert not policy.decide([off()], [waits(11)], RULES, 4)
    assert verbs(policy.decide([off()], [waits(11)], RULES, 5)) == [("start", "a")]


def test_a_wait_that_falls_below_the_limit_starts_over() -> None:
    policy = AutoscalingPolicy()
    policy.decide([off()], [waits(11)], RULES, 0)
    policy.decide([off()], [waits(9)], RULES, 3)
    assert not policy.decide([off()], [waits(11)], RULES, 6)


def test_a_node_that_is_starting_counts_as_if_it_worked() -> None:
    nodes = [StandbyNode("a", LifecyclePhase.STARTING, slots=4), off("b")]
    policy = AutoscalingPolicy()
    for now in (0, 6):
        assert not policy.decide(nodes, [waits(19, slots=4)], RULES, now)
    policy.decide(nodes, [waits(21, slots=4)], RULES, 7)
    assert verbs(policy.decide(nodes, [waits(21, slots=4)], RULES, 13)) == [("start", "b")]


def test_a_model_that_nothing_serves_starts_one_node_at_once() -> None:
    policy = AutoscalingPolicy()
    assert verbs(policy.decide([off(), off("b")], [waits(0, slots=0)], RULES, 0)) == [
        ("start", "a")
    ]
    nodes = [StandbyNode("a", LifecyclePhase.STARTING), off("b")]
    assert not policy.decide(nodes, [waits(0, slots=0)], RULES, 1)


def test_the_cheapest_node_is_started_first() -> None:
    nodes = [off("a", cost=0.4), off("b", cost=0.2)]
    assert verbs(AutoscalingPolicy().decide(nodes, [waits(0, slots=0)], RULES, 0)) == [
        ("start", "b")
    ]


def test_the_minimum_runs_whatever_the_load_is() -> None:
    rules = replace(RULES, min=1)
    assert verbs(AutoscalingPolicy().decide([off(), off("b")], [], rules, 0)) == [("start", "a")]
    policy = AutoscalingPolicy()
    for now in (0, 100):
        assert not policy.decide([on(), off("b")], [], rules, now)


def test_an_idle_node_is_retired_and_then_stopped() -> None:
    policy = AutoscalingPolicy()
    assert not policy.decide([on()], [], RULES, 0)
    assert not policy.decide([on()], [], RULES, 59)
    assert verbs(policy.decide([on()], [], RULES, 60)) == [("retire", "a")]
    leaving = StandbyNode("a", LifecyclePhase.RETIRING)
    assert not policy.decide([replace(leaving, busy=1)], [], RULES, 61)
    assert verbs(policy.decide([leaving], [], RULES, 62)) == [("stop", "a")]


def test_a_node_whose_work_the_others_could_do_is_retired_one_after_the_other() -> None:
    nodes = [on(busy=1, other_slots=(8, 1)), on("b", busy=1, other_slots=(8, 1), cost=1.0)]
    policy = AutoscalingPolicy()
    policy.decide(nodes, [], RULES, 0)
    assert verbs(policy.decide(nodes, [], RULES, 60)) == [("retire", "b")]
    nodes[1] = replace(nodes[1], phase=LifecyclePhase.RETIRING)
    assert not policy.decide(nodes, [], RULES, 61)


def test_a_node_that_is_needed_stays() -> None:
    policy = AutoscalingPolicy()
    for now in (0, 100):
        assert not policy.decide([on(busy=1, other_slots=(2, 1))], [], RULES, now)
        assert not policy.decide([on(busy=1, other_slots=(0, 0))], [], RULES, now)


def test_a_retiring_node_is_kept_when_it_is_needed_again() -> None:
    nodes = [off("b"), StandbyNode("a", LifecyclePhase.RETIRING, busy=1)]
    assert verbs(AutoscalingPolicy().decide(nodes, [waits(0, slots=0)], RULES, 0)) == [
        ("keep", "a")
    ]


def test_a_drained_node_is_left_alone() -> None:
    policy = AutoscalingPolicy()
    for now in (0, 100):
        assert not policy.decide([on(drained=True)], [], RULES, now)
    assert not policy.decide([off(drained=True)], [waits(0, slots=0)], RULES, 0)


def test_a_failed_hook_is_not_run_again_before_its_retry_time() -> None:
    node = off(retry_at=50)
    assert not AutoscalingPolicy().decide([node], [waits(0, slots=0)], RULES, 49)
    assert AutoscalingPolicy().decide([node], [waits(0, slots=0)], RULES, 50)


def test_a_lower_maximum_retires_the_surplus() -> None:
    nodes = [on(busy=1), on("b", busy=1)]
    assert verbs(AutoscalingPolicy().decide(nodes, [], replace(RULES, max=1), 0)) == [
        ("retire", "a")
    ]


@dataclass
class World:
    """Nodes that carry out each action, under a random load."""

    rng: random.Random
    rules: AutoscalingRules
    nodes: dict[str, StandbyNode]
    policy: AutoscalingPolicy = field(default_factory=AutoscalingPolicy)
    now: float = 0.0
    stopped: dict[str, float] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)

    def running(self) -> int:
        return sum(node.phase is not LifecyclePhase.OFF for node in self.nodes.values())

    def serving(self) -> int:
        return sum(
            node.phase in {LifecyclePhase.STARTING, LifecyclePhase.ON}
            for node in self.nodes.values()
        )

    def step(self) -> None:
        rng = self.rng
        self.now += rng.choice([0.5, 1, 5, 20, 70])
        for name, node in self.nodes.items():
            phase = node.phase
            if phase is LifecyclePhase.STARTING and rng.random() < 0.4:
                phase = LifecyclePhase.ON
            busy = node.busy
            if phase is LifecyclePhase.ON:
                busy = rng.choice([0, 0, 0, 1, 2])
            elif phase is LifecyclePhase.RETIRING and busy and rng.random() < 0.5:
                busy -= 1
            held = rng.random() < 0.05
            others = (rng.choice([0, 4, 8]), rng.choice([0, 2, 4]))
            self.nodes[name] = replace(
                node, phase=phase, busy=busy, other_slots=others, drained=held
            )
        names = list(self.nodes)
        demands = [
            WaitingDemand(
                frozenset(rng.sample(names, rng.randint(1, len(names)))),
                rng.choice([0, 5, 11, 40, 400]),
                rng.choice([0, 2, 4]),
            )
            for _ in range(rng.choice([0, 0, 1, 2]))
        ]
        for action in self.policy.decide(list(self.nodes.values()), demands, self.rules, self.now):
            self.carry_out(action)

    def carry_out(self, action: ScalingAction) -> None:
        node, rules, now = self.nodes[action.name], self.rules, self.now
        match action.verb:
            case "start":
                assert node.phase is LifecyclePhase.OFF
                assert not node.drained
                assert now - self.stopped.get(node.name, -1e9) >= rules.cooldown
                self.started[node.name] = now
                node = replace(node, phase=LifecyclePhase.STARTING, started_at=now)
            case "retire":
                assert node.phase is LifecyclePhase.ON
                assert not node.drained
                assert all(now - at >= rules.cooldown for at in self.started.values())
                node = replace(node, phase=LifecyclePhase.RETIRING)
            case "keep":
                assert node.phase is LifecyclePhase.RETIRING
                node = replace(node, phase=LifecyclePhase.ON)
            case "stop":
                assert node.phase is LifecyclePhase.RETIRING
                assert node.busy == 0
                self.stopped[node.name] = now
                node = replace(node, phase=LifecyclePhase.OFF, stopped_at=now)
        before = self.serving()
        self.nodes[action.name] = node
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
def test_any_load_keeps_the_bounds_and_the_cooldown_and_stops_no_busy_node(
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
    nodes = {name: StandbyNode(name, LifecyclePhase.OFF, slots=2) for name in "abcdef"[:count]}
    world = World(random.Random(seed), rules, nodes)
    for _ in range(120):
        world.step()
        startable = any(
            node.phase is LifecyclePhase.OFF
            and not node.drained
            and world.now - node.stopped_at >= cooldown
            for node in world.nodes.values()
        )
        at_most = rules.max is not None and world.running() >= rules.max
        assert world.serving() >= rules.min or at_most or not startable
