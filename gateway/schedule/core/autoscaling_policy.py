"""Which standby nodes to start and to stop: a pure policy, for the gateway and the simulator.

It starts a node that serves a model which no other node serves now; one more when the predicted
wait, with the nodes that are starting counted as if they worked, has stayed above a limit; and
nodes up to the minimum. It stops a node that has been idle long enough, and one whose work the
others could have done all that time, one after the other. A node ends what it runs before it is
stopped, and stays if it is needed again meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gateway.config.scheduling import ElasticSettings
from gateway.nodes.lifecycle import LifecyclePhase

# Share of the other nodes' slots that all work may fill for a node to count as not needed.
MOST_UTILISATION = 0.75
SERVING_PHASES = frozenset({LifecyclePhase.UNKNOWN, LifecyclePhase.STARTING, LifecyclePhase.ON})
ScalingVerb = Literal["start", "retire", "keep", "stop"]


@dataclass(frozen=True, slots=True)
class StandbyNode:
    """One standby node as it is now. Times are monotonic seconds."""

    name: str
    phase: LifecyclePhase
    slots: int = 1
    busy: float = 0  # slots in use
    other_slots: tuple[float, float] = (0, 0)
    """Slots that the other working nodes have for its models, and how many of them are in use."""
    started_at: float = -math.inf
    stopped_at: float = -math.inf
    retry_at: float = -math.inf
    drained: bool = False  # drained by an operator: it is left alone
    cost: float = 0.0  # of an hour


@dataclass(frozen=True, slots=True)
class WaitingDemand:
    """Requests that wait for the same nodes."""

    names: frozenset[str]  # the standby nodes that could serve them
    wait: float  # predicted seconds of wait, or those that have passed; 0 where it does not count
    slots: int  # slots that work for them now; 0: nothing serves them


class ScalingAction(NamedTuple):
    """What to do with one node; `reason` is for an operator."""

    verb: ScalingVerb
    name: str
    reason: str


@dataclass(slots=True)
class AutoscalingPolicy:
    """Decides at each look at the load; remembers since when conditions have held."""

    _above_since: dict[frozenset[str], float] = field(default_factory=dict)
    """Since when the predicted wait for these nodes has been above the limit."""
    _idle_since: dict[str, float] = field(default_factory=dict)
    _spare_since: dict[str, float] = field(default_factory=dict)
    """Since when the others could do a node's work."""

    def decide(
        self,
        nodes: Sequence[StandbyNode],
        demands: Iterable[WaitingDemand],
        rules: ElasticSettings,
        now: float,
    ) -> list[ScalingAction]:
        """What to do now. A node with work is never stopped."""
        look = _Look(nodes, rules, now)
        needed = self._start_for_demand(look, demands)
        while look.serving < rules.min and look.start_one(None, "fewer run than `elastic.min`"):
            pass
        self._note_idle(nodes, now)
        self._retire_unneeded(look, needed)
        for node in nodes:
            if look.phases[node.name] is LifecyclePhase.RETIRING is node.phase and not node.busy:
                look.act("stop", node, "it runs nothing any more", LifecyclePhase.STOPPING)
        return look.actions

    def _start_for_demand(self, look: _Look, demands: Iterable[WaitingDemand]) -> set[str]:
        """Start nodes that requests wait for; the names of those that must not be retired now."""
        now, rules = look.now, look.rules
        above_since: dict[frozenset[str], float] = {}
        needed: set[str] = set()
        for demand in demands:
            starting = look.starting_slots(demand.names)
            if not demand.slots:
                needed |= demand.names
                if not starting:
                    look.start_one(demand.names, "nothing else serves what waits for it")
                continue
            wait = demand.wait * demand.slots / (demand.slots + starting)
            if wait <= rules.start_above:
                continue
            needed |= demand.names
            since = above_since[demand.names] = self._above_since.get(demand.names, now)
            reason = f"the predicted wait was above {rules.start_above:g} s for {now - since:.0f} s"
            if now - since >= rules.start_after and look.start_one(demand.names, reason):
                above_since[demand.names] = now
        self._above_since = above_since
        return needed

    def _note_idle(self, nodes: Iterable[StandbyNode], now: float) -> None:
        """Note since when nodes have been idle, or not needed."""
        idle_since: dict[str, float] = {}
        spare_since: dict[str, float] = {}
        for node in nodes:
            if node.phase is not LifecyclePhase.ON:
                continue
            slots, busy = node.other_slots
            if not node.busy:
                idle_since[node.name] = self._idle_since.get(node.name, now)
            if slots and node.busy + busy <= MOST_UTILISATION * slots:
                spare_since[node.name] = self._spare_since.get(node.name, now)
        self._idle_since, self._spare_since = idle_since, spare_since

    def _retire_unneeded(self, look: _Look, needed: set[str]) -> None:
        """Retire nodes, the dearest first: too many, long idle, or one that is not needed."""
        rules, now = look.rules, look.now
        if now - look.last_start < rules.cooldown:
            return
        retiring = any(phase is LifecyclePhase.RETIRING for phase in look.phases.values())
        for node in sorted(look.nodes, key=_cost_per_slot, reverse=True):
            name = node.name
            if (
                look.phases[name] is not LifecyclePhase.ON
                or node.drained
                or look.serving <= rules.min
            ):
                continue
            if rules.max is not None and look.serving > rules.max:
                look.act("retire", node, "more run than `elastic.max`", LifecyclePhase.RETIRING)
            elif name in needed:
                continue
            elif now - self._idle_since.get(name, now) >= rules.stop_after:
                reason = f"it has idled for {now - self._idle_since[name]:.0f} s"
                look.act("retire", node, reason, LifecyclePhase.RETIRING)
            elif not retiring and now - self._spare_since.get(name, now) >= rules.stop_after:
                reason = f"the others could do its work for {now - self._spare_since[name]:.0f} s"
                look.act("retire", node, reason, LifecyclePhase.RETIRING)
                retiring = True
                # That the others are not needed was found with this one beside them.
                self._spare_since.clear()


class _Look:
    """One look at the nodes, and what has been decided in it so far."""

    def __init__(self, nodes: Sequence[StandbyNode], rules: ElasticSettings, now: float) -> None:
        self.nodes = nodes
        self.rules = rules
        self.now = now
        self.actions: list[ScalingAction] = []
        self.phases = {node.name: node.phase for node in nodes}  # the phases after these actions
        self.last_start = max((node.started_at for node in nodes), default=-math.inf)

    @property
    def serving(self) -> int:
        """Nodes that work or soon will."""
        return sum(phase in SERVING_PHASES for phase in self.phases.values())

    def starting_slots(self, names: frozenset[str]) -> int:
        """Slots of these nodes that will work soon."""
        starting = (LifecyclePhase.STARTING, LifecyclePhase.UNKNOWN)
        return sum(
            node.slots
            for node in self.nodes
            if node.name in names and self.phases[node.name] in starting
        )

    def start_one(self, names: frozenset[str] | None, reason: str) -> bool:
        """Keep or start one of these nodes, None: of all; whether there was one."""
        now, most = self.now, self.rules.max
        best: StandbyNode | None = None
        running = sum(phase is not LifecyclePhase.OFF for phase in self.phases.values())
        for node in self.nodes:
            if (names is not None and node.name not in names) or node.drained:
                continue
            phase = self.phases[node.name]
            if phase is LifecyclePhase.RETIRING and (most is None or self.serving < most):
                self.act("keep", node, "it is needed again", LifecyclePhase.ON)
                return True
            may_start = now >= node.retry_at and now - node.stopped_at >= self.rules.cooldown
            if (
                phase is not LifecyclePhase.OFF
                or not may_start
                or (most is not None and running >= most)
            ):
                continue
            if best is None or _cost_per_slot(node) < _cost_per_slot(best):
                best = node
        if best is None:
            return False
        self.act("start", best, reason, LifecyclePhase.STARTING)
        self.last_start = now
        return True

    def act(self, verb: ScalingVerb, node: StandbyNode, reason: str, phase: LifecyclePhase) -> None:
        """Decide on an action, after which the node is in this phase."""
        self.actions.append(ScalingAction(verb, node.name, reason))
        self.phases[node.name] = phase


def _cost_per_slot(node: StandbyNode) -> float:
    return node.cost / node.slots
