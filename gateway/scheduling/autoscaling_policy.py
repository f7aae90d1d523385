"""Which standby nodes to start and to stop: a pure policy, for the gateway and the simulator.

Started: one that serves a model which nothing else serves now; one more when the predicted wait,
with what is being started counted as if it worked already, has stayed above a limit; and up to the
minimum. Stopped: what has idled long enough, and what the others could have done as well all that
time, one after the other. It ends what it runs first, and goes on if it is needed again meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gateway.fleet.lifecycle import LifecyclePhase

MOST_UTILISATION = 0.75
"""How much of the other nodes' slots work may fill for a node to count as not needed."""

SERVING_PHASES = frozenset({LifecyclePhase.UNKNOWN, LifecyclePhase.STARTING, LifecyclePhase.ON})


@dataclass(frozen=True, slots=True)
class AutoscalingRules:
    """`elastic` of the settings, as far as it is the policy's. Seconds, nodes."""

    start_above: float = 10.0
    start_after: float = 5.0
    stop_after: float = 600.0
    min: int = 0
    max: int | None = None
    cooldown: float = 60.0


@dataclass(frozen=True, slots=True)
class StandbyNode:
    """One standby node at this moment. Times are monotonic seconds."""

    name: str
    phase: LifecyclePhase
    slots: int = 1
    busy: float = 0
    """Slots in use."""
    other_slots: tuple[float, float] = (0, 0)
    """Slots that the other working nodes have for its models, and how many of them are in use."""
    started_at: float = -math.inf
    stopped_at: float = -math.inf
    retry_at: float = -math.inf
    drained: bool = False
    """Drained by an operator: it is left alone."""
    cost: float = 0.0
    """Of an hour."""


@dataclass(frozen=True, slots=True)
class WaitingDemand:
    """Requests that wait for the same nodes."""

    names: frozenset[str]
    """The standby nodes that could serve them."""
    wait: float
    """Predicted seconds of wait, or those that have passed; 0 where it does not count."""
    slots: int
    """Slots that work for them now; 0: nothing serves them."""


class ScalingAction(NamedTuple):
    """What to do with one node. `why` is for an operator."""

    verb: Literal["start", "retire", "keep", "stop"]
    name: str
    reason: str


@dataclass(slots=True)
class AutoscalingPolicy:
    """Decides at each look; remembers since when what has held."""

    _above: dict[frozenset[str], float] = field(default_factory=dict)
    _idle: dict[str, float] = field(default_factory=dict)
    _spare: dict[str, float] = field(default_factory=dict)

    def decide(
        self,
        nodes: Sequence[StandbyNode],
        demands: Iterable[WaitingDemand],
        rules: AutoscalingRules,
        now: float,
    ) -> list[ScalingAction]:
        """What to do now. A unit with work is never told to stop."""
        look = _Look(nodes, rules, now)
        pressed = self._press(look, demands)
        while look.serving < rules.min and look.more(None, "fewer run than `elastic.min`"):
            pass
        self._watch(nodes, now)
        self._retire(look, pressed)
        for unit in nodes:
            if look.phases[unit.name] is LifecyclePhase.RETIRING is unit.phase and not unit.busy:
                look.act("stop", unit, "it runs nothing any more", LifecyclePhase.STOPPING)
        return look.actions

    def _press(self, look: _Look, demands: Iterable[WaitingDemand]) -> set[str]:
        """Start what waits for it; the units that must not be retired now."""
        now, rules = look.now, look.rules
        above: dict[frozenset[str], float] = {}
        pressed: set[str] = set()
        for demand in demands:
            coming = look.coming(demand.names)
            if not demand.slots:
                pressed |= demand.names
                if not coming:
                    look.more(demand.names, "nothing else serves what waits for it")
                continue
            wait = demand.wait * demand.slots / (demand.slots + coming)
            if wait <= rules.start_above:
                continue
            pressed |= demand.names
            since = above[demand.names] = self._above.get(demand.names, now)
            why = f"the predicted wait was above {rules.start_above:g} s for {now - since:.0f} s"
            if now - since >= rules.start_after and look.more(demand.names, why):
                above[demand.names] = now
        self._above = above
        return pressed

    def _watch(self, units: Iterable[StandbyNode], now: float) -> None:
        """Note since when units have idled, or have not been needed."""
        idle: dict[str, float] = {}
        spare: dict[str, float] = {}
        for unit in units:
            if unit.phase is not LifecyclePhase.ON:
                continue
            slots, busy = unit.other_slots
            if not unit.busy:
                idle[unit.name] = self._idle.get(unit.name, now)
            if slots and unit.busy + busy <= MOST_UTILISATION * slots:
                spare[unit.name] = self._spare.get(unit.name, now)
        self._idle, self._spare = idle, spare

    def _retire(self, look: _Look, pressed: set[str]) -> None:
        rules, now = look.rules, look.now
        if now - look.last_start < rules.cooldown:
            return
        leaving = any(phase is LifecyclePhase.RETIRING for phase in look.phases.values())
        for unit in sorted(look.units, key=_worth, reverse=True):
            if (
                look.phases[unit.name] is not LifecyclePhase.ON
                or unit.drained
                or look.serving <= rules.min
            ):
                continue
            if rules.max is not None and look.serving > rules.max:
                look.act("retire", unit, "more run than `elastic.max`", LifecyclePhase.RETIRING)
            elif unit.name in pressed:
                continue
            elif now - self._idle.get(unit.name, now) >= rules.stop_after:
                why = f"it has idled for {now - self._idle[unit.name]:.0f} s"
                look.act("retire", unit, why, LifecyclePhase.RETIRING)
            elif not leaving and now - self._spare.get(unit.name, now) >= rules.stop_after:
                why = f"the others could do its work for {now - self._spare[unit.name]:.0f} s"
                look.act("retire", unit, why, LifecyclePhase.RETIRING)
                leaving = True
                # The others were judged with this one beside them.
                self._spare.clear()


class _Look:
    """One look at the units, and what has been decided in it so far."""

    def __init__(self, units: Sequence[StandbyNode], rules: AutoscalingRules, now: float) -> None:
        self.units = units
        self.rules = rules
        self.now = now
        self.actions: list[ScalingAction] = []
        self.phases = {unit.name: unit.phase for unit in units}
        self.last_start = max((unit.started_at for unit in units), default=-math.inf)

    @property
    def serving(self) -> int:
        return sum(phase in SERVING_PHASES for phase in self.phases.values())

    def coming(self, names: frozenset[str]) -> int:
        """Slots of these that will work soon."""
        soon = (LifecyclePhase.STARTING, LifecyclePhase.UNKNOWN)
        return sum(
            unit.slots
            for unit in self.units
            if unit.name in names and self.phases[unit.name] in soon
        )

    def more(self, names: frozenset[str] | None, why: str) -> bool:
        """Let one more of these work, by keeping or starting it; whether there was one."""
        now, most = self.now, self.rules.max
        best: StandbyNode | None = None
        running = sum(phase is not LifecyclePhase.OFF for phase in self.phases.values())
        for unit in self.units:
            if (names is not None and unit.name not in names) or unit.drained:
                continue
            phase = self.phases[unit.name]
            if phase is LifecyclePhase.RETIRING and (most is None or self.serving < most):
                self.act("keep", unit, "it is needed again", LifecyclePhase.ON)
                return True
            ready = now >= unit.retry_at and now - unit.stopped_at >= self.rules.cooldown
            if (
                phase is not LifecyclePhase.OFF
                or not ready
                or (most is not None and running >= most)
            ):
                continue
            if best is None or _worth(unit) < _worth(best):
                best = unit
        if best is None:
            return False
        self.act("start", best, why, LifecyclePhase.STARTING)
        self.last_start = now
        return True

    def act(
        self,
        verb: Literal["start", "retire", "keep", "stop"],
        unit: StandbyNode,
        why: str,
        phase: LifecyclePhase,
    ) -> None:
        self.actions.append(ScalingAction(verb, unit.name, why))
        self.phases[unit.name] = phase


def _worth(unit: StandbyNode) -> float:
    return unit.cost / unit.slots
