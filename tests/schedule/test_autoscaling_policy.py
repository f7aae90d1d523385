"""Which standby nodes the autoscaling policy starts, keeps, retires and stops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
    "a node that was stopped is not started again within the cooldown": [
        (109, [off(stopped_at=80)], [UNSERVED], ""),
        (110, [off(stopped_at=80)], [UNSERVED], "start a"),
    ],
    "no node is retired within the cooldown after a start": [
        (0, [on()], [], ""),
        (74, [on(), on("b", started_at=45, busy=1, **NEEDED)], [], ""),
        (75, [on(), on("b", started_at=45, busy=1, **NEEDED)], [], "retire a"),
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
    assert not AutoscalingPolicy().decide([on(busy=2), off("b")], [UNSERVED], most, 0)
    surplus = [on(busy=1), on("b", busy=1)]
    assert verbs(AutoscalingPolicy().decide(surplus, [], most, 0)) == [("retire", "a")]
