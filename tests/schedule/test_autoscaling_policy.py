"""Which standby nodes the autoscaling policy starts, keeps, retires and stops."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.scheduling import ElasticSettings
from gateway.nodes.lifecycle import LifecyclePhase
from gateway.schedule.core.autoscaling_policy import (
    AutoscalingPolicy,
    ScalingAction,
    StandbyNode,
    WaitingDemand,
)
from tests.each_case import each_case

RULES = ElasticSettings(start_above=10, start_after=5, stop_after=60, cooldown=30)
ALL = frozenset({"a", "b"})


def off(name: str = "a", **keys: object) -> StandbyNode:
    return replace(StandbyNode(name, LifecyclePhase.OFF, slots=2), **keys)  # type: ignore[arg-type]


def on(name: str = "a", **keys: object) -> StandbyNode:
    return replace(StandbyNode(name, LifecyclePhase.ON, slots=2), **keys)  # type: ignore[arg-type]


def waits(seconds: float, slots: int = 4) -> WaitingDemand:
    return WaitingDemand(ALL, seconds, slots)


def verbs(actions: list[ScalingAction]) -> list[tuple[str, str]]:
    return [(action.verb, action.name) for action in actions]


def phase(phase: LifecyclePhase, name: str = "a", **keys: object) -> StandbyNode:
    return replace(StandbyNode(name, phase), **keys)  # type: ignore[arg-type]


STARTING, RETIRING = LifecyclePhase.STARTING, LifecyclePhase.RETIRING
UNSERVED = waits(0, slots=0)
CHEAP: dict[str, Any] = {"other_slots": (8, 1)}
NEEDED: dict[str, Any] = {"other_slots": (2, 1)}

Step = tuple[float, list[StandbyNode], list[WaitingDemand], str]
"""Seconds, the nodes and what waits, and the action that is decided, or none."""
STORIES: dict[str, list[Step]] = {
    "a wait above the limit starts a node only when it lasts": [
        (0, [off()], [waits(11)], ""),
        (4, [off()], [waits(11)], ""),
        (5, [off()], [waits(11)], "start a"),
    ],
    "a wait that falls below the limit starts over": [
        (0, [off()], [waits(11)], ""),
        (3, [off()], [waits(9)], ""),
        (6, [off()], [waits(11)], ""),
    ],
    "a node that is starting counts as if it worked": [
        (0, [phase(STARTING, slots=4), off("b")], [waits(19)], ""),
        (6, [phase(STARTING, slots=4), off("b")], [waits(19)], ""),
        (7, [phase(STARTING, slots=4), off("b")], [waits(21)], ""),
        (13, [phase(STARTING, slots=4), off("b")], [waits(21)], "start b"),
    ],
    "a model that nothing serves starts one node at once": [
        (0, [off(), off("b")], [UNSERVED], "start a"),
        (1, [phase(STARTING), off("b")], [UNSERVED], ""),
    ],
    "the cheapest node is started first": [
        (0, [off(cost=0.4), off("b", cost=0.2)], [UNSERVED], "start b")
    ],
    "an idle node is retired and then stopped": [
        (0, [on()], [], ""),
        (59, [on()], [], ""),
        (60, [on()], [], "retire a"),
        (61, [phase(RETIRING, busy=1)], [], ""),
        (62, [phase(RETIRING)], [], "stop a"),
    ],
    "a node whose work the others could do is retired, the dearest first, one after the other": [
        (0, [on(busy=1, **CHEAP), on("b", busy=1, cost=1.0, **CHEAP)], [], ""),
        (60, [on(busy=1, **CHEAP), on("b", busy=1, cost=1.0, **CHEAP)], [], "retire b"),
        (61, [on(busy=1, **CHEAP), phase(RETIRING, "b", busy=1, **CHEAP)], [], ""),
    ],
    "a node that is needed stays": [
        (0, [on(busy=1, **NEEDED)], [], ""),
        (50, [on(busy=1, other_slots=(0, 0))], [], ""),
        (100, [on(busy=1, **NEEDED)], [], ""),
        (150, [on(busy=1, other_slots=(0, 0))], [], ""),
    ],
    "a retiring node is kept when it is needed again": [
        (0, [off("b"), phase(RETIRING, busy=1)], [UNSERVED], "keep a")
    ],
    "a drained node is left alone": [
        (0, [on(drained=True)], [], ""),
        (100, [on(drained=True)], [], ""),
        (101, [off(drained=True)], [UNSERVED], ""),
    ],
    "a failed hook is not run again before its retry time": [
        (49, [off(retry_at=50)], [UNSERVED], ""),
        (50, [off(retry_at=50)], [UNSERVED], "start a"),
    ],
}


@each_case("story", STORIES)
def test_what_is_decided_as_load_and_nodes_change(story: str) -> None:
    policy = AutoscalingPolicy()
    for now, nodes, demands, action in STORIES[story]:
        decided = policy.decide(nodes, demands, RULES, now)
        assert [f"{one.verb} {one.name}" for one in decided] == [action] * bool(action), now


def test_the_minimum_runs_whatever_the_load_is_and_a_lower_maximum_retires_the_surplus() -> None:
    least, most = (RULES.model_copy(update={name: 1}) for name in ("min", "max"))
    policy = AutoscalingPolicy()
    assert verbs(policy.decide([off(), off("b")], [], least, 0)) == [("start", "a")]
    for now in (0, 100):
        assert not policy.decide([on(), off("b")], [], least, now)
    surplus = [on(busy=1), on("b", busy=1)]
    assert verbs(AutoscalingPolicy().decide(surplus, [], most, 0)) == [("retire", "a")]


@dataclass
class World:
    """Nodes that carry out each action, under a random load."""

    rng: random.Random
    rules: ElasticSettings
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
    rules = ElasticSettings(
        start_above=10,
        start_after=5,
        stop_after=stop_after,
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
