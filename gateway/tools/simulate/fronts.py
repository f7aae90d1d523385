"""The gateway itself as a front: the very dispatcher, policies and queue that it runs."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence

from gateway.fleet.lifecycle import LifecyclePhase
from gateway.request import Priority
from gateway.scheduling.autoscaling_policy import (
    AutoscalingPolicy,
    AutoscalingRules,
    StandbyNode,
    WaitingDemand,
)
from gateway.scheduling.dispatcher import Dispatcher
from gateway.scheduling.matching import DispatchRules
from gateway.scheduling.placement_state import Placement, PlacementState, QueuedRequest
from gateway.tools.simulate.knowledge import ExactKnowledge, ExpectedRequest, Knowledge
from gateway.tools.simulate.server import SimulatedMachine, SimulatedPromptCache
from gateway.tools.simulate.simulation import SimulatedFleet
from gateway.tools.simulate.trace import Job

LEAST_ALARM_DELAY = 1e-3
"""Seconds until an alarm at the earliest: a clock that stood still would ring for ever."""

PRIORITY_BY_LABEL = {priority.label: priority for priority in Priority}


class GatewayFront:
    """Runs the gateway's dispatcher over simulated nodes.

    `knowledge` says what it may know of speeds, lengths and caches. Raises KeyError for a policy
    that does not exist.
    """

    def __init__(
        self,
        machines: Sequence[SimulatedMachine],
        rules: DispatchRules | None = None,
        seed: int = 0,
        knowledge: Knowledge | None = None,
    ) -> None:
        self.alarm = math.inf
        self.board = PlacementState()
        self.dispatcher = Dispatcher(self.board, rules or DispatchRules(), random.Random(seed))
        self.knowledge: Knowledge = knowledge or ExactKnowledge()
        for machine in machines:
            self.board.add(machine.name, total=machine.slots)
        self.knowledge.start(machines, self.board)
        self._fleet: SimulatedFleet | None = None
        self.dispatcher.set_cache_refresh(self._recall)
        self._groups = ((self.board.candidate_set(self.board.rows),),)

    def arrive(self, job: Job, fleet: SimulatedFleet) -> None:
        """Ask the dispatcher for a slot, with what is known of the request."""
        now = fleet.now
        self._fleet = fleet
        known = self.knowledge.expect(job, fleet)
        job.front_data = known
        ask = QueuedRequest(
            str(job.id),
            self._groups,
            PRIORITY_BY_LABEL[job.priority_label],
            job.caller,
            now,
            prompt_tokens=known.prompt_tokens,
            completion_tokens=known.completion_tokens,
            cached=known.cached,
            pending=known.pending,
            affinity_hash=known.affinity_hash,
        )
        placement = self.dispatcher.place_or_queue(ask, now)
        if placement is not None:
            self._send(placement, fleet)
        self._set_alarm(now)

    def started(self, job: Job, fleet: SimulatedFleet) -> None:
        """Its first token came."""
        known: ExpectedRequest = job.front_data
        assert known.placement is not None
        self.dispatcher.prefill_done(known.placement, fleet.now)
        self.knowledge.prefill_done(job, known, fleet.now)

    def ended(self, job: Job, fleet: SimulatedFleet) -> None:
        """Settle it, learn from it, and see who is next."""
        known: ExpectedRequest = job.front_data
        assert known.placement is not None
        now = fleet.now
        self.dispatcher.finished(known.placement, now, job.prompt.tokens, job.cached, job.output)
        self.knowledge.ended(job, known, now)
        job.front_data = None
        self._match(fleet)

    def wake(self, fleet: SimulatedFleet) -> None:
        """See who may go now."""
        self._match(fleet)

    def _recall(self, ask: QueuedRequest) -> None:
        """It has waited: what is cached of it may have changed."""
        assert self._fleet is not None
        job = self._fleet.jobs[int(ask.id)]
        known: ExpectedRequest = job.front_data
        self.knowledge.refresh_cached(job, known, self._fleet)
        ask.set_cached(ask.prompt_tokens, known.cached, known.pending)

    def _match(self, fleet: SimulatedFleet) -> None:
        for placement in self.dispatcher.match(fleet.now):
            self._send(placement, fleet)
        self._set_alarm(fleet.now)

    def _send(self, placement: Placement, fleet: SimulatedFleet) -> None:
        job = fleet.jobs[int(placement.queued.id)]
        known: ExpectedRequest = job.front_data
        known.placement = placement
        fleet.send(job, placement.row.index)
        self.knowledge.placed(job, known, fleet.now)

    def _set_alarm(self, now: float) -> None:
        wake = self.dispatcher.wake_at()
        self.alarm = math.inf if wake is None else max(wake, now + LEAST_ALARM_DELAY)


AUTOSCALER_TICK = 1.0
"""Seconds between two looks at the load."""


class _StandbyMachine:
    """One standby machine."""

    __slots__ = ("name", "phase", "place", "ready_at", "seconds", "slots", "started", "stopped")

    def __init__(self, place: int, machine: SimulatedMachine) -> None:
        self.place = place
        self.name = str(place)
        self.slots = machine.slots
        self.phase = LifecyclePhase.OFF
        self.started = self.stopped = -math.inf
        self.ready_at = math.inf
        self.seconds = 0.0
        """In which it ran, up to its last stop."""


class AutoscalingFront:
    """Wraps a gateway; the machines from place `base` on are standby machines.

    One takes `startup` seconds from its start to work, and comes with empty caches.
    """

    def __init__(
        self,
        gateway: GatewayFront,
        machines: Sequence[SimulatedMachine],
        base: int,
        rules: AutoscalingRules,
        startup: float,
    ) -> None:
        self.alarm = math.inf
        self.starts = 0
        self._gateway = gateway
        self._machines = machines
        self._base = base
        self._rules = rules
        self._startup = startup
        self._policy = AutoscalingPolicy()
        self._tick = 0.0
        self._standby = [
            _StandbyMachine(place, machine)
            for place, machine in enumerate(machines)
            if place >= base
        ]
        self._by_name = {one.name: one for one in self._standby}
        self._names = frozenset(self._by_name)
        for one in self._standby:
            self._open(one, works=False)

    def standby_seconds(self, until: float) -> float:
        """Seconds in which standby machines ran, in all."""
        return sum(
            one.seconds
            + (0.0 if one.phase is LifecyclePhase.OFF else max(0.0, until - one.started))
            for one in self._standby
        )

    # What happens.

    def arrive(self, job: Job, fleet: SimulatedFleet) -> None:
        """Hand it to the gateway."""
        self._gateway.arrive(job, fleet)
        self._set_alarm(fleet.now)

    def started(self, job: Job, fleet: SimulatedFleet) -> None:
        """Its first token came."""
        self._gateway.started(job, fleet)

    def ended(self, job: Job, fleet: SimulatedFleet) -> None:
        """Its slot is free."""
        self._gateway.ended(job, fleet)
        self._set_alarm(fleet.now)

    def wake(self, fleet: SimulatedFleet) -> None:
        """Look at the load, or let the gateway look at what it holds back."""
        now = fleet.now
        if now >= self._tick:
            self._tick = now + AUTOSCALER_TICK
            self._look(fleet)
        self._gateway.wake(fleet)
        self._set_alarm(now)

    # One look.

    def _look(self, fleet: SimulatedFleet) -> None:
        now = fleet.now
        for one in self._standby:
            if one.phase is LifecyclePhase.STARTING and now >= one.ready_at:
                one.phase = LifecyclePhase.ON
                self._open(one, works=True)
        for action in self._policy.decide(self._units(), self._demands(now), self._rules, now):
            one = self._by_name[action.name]
            if action.verb == "start":
                one.phase, one.started, one.ready_at = (
                    LifecyclePhase.STARTING,
                    now,
                    now + self._startup,
                )
                self.starts += 1
            elif action.verb == "retire":
                one.phase = LifecyclePhase.RETIRING
                self._open(one, works=False)
            elif action.verb == "keep":
                one.phase = LifecyclePhase.ON
                self._open(one, works=True)
            else:
                one.phase, one.stopped = LifecyclePhase.OFF, now
                one.seconds += now - one.started
                machine = self._machines[one.place]
                cache = SimulatedPromptCache(machine.slots, machine.cache_tokens)
                fleet.servers[one.place].cache = cache
                self._gateway.knowledge.restarted(one.place)

    def _units(self) -> list[StandbyNode]:
        rows = self._gateway.board.rows
        slots = sum(row.capacity for row in rows)
        busy = sum(row.ours for row in rows if row.capacity)
        units = []
        for one in self._standby:
            row = rows[one.place]
            others = (slots - row.capacity, busy - (row.ours if row.capacity else 0))
            units.append(
                StandbyNode(
                    one.name, one.phase, one.slots, row.ours, others, one.started, one.stopped
                )
            )
        return units

    def _demands(self, now: float) -> list[WaitingDemand]:
        dispatcher = self._gateway.dispatcher
        if not dispatcher.waiting:
            return []
        wait = max(
            max(wait, now - ask.received_at) for ask, wait in dispatcher.predicted_waits(now)
        )
        slots = sum(row.total for row in self._gateway.board.rows if row.alive)
        return [WaitingDemand(self._names, wait, slots)]

    def _open(self, one: _StandbyMachine, *, works: bool) -> None:
        board = self._gateway.board
        board.set_slots(board.rows[one.place], one.slots, one.slots if works else 0, 0, alive=works)

    def _set_alarm(self, now: float) -> None:
        serving = sum(
            one.phase in {LifecyclePhase.STARTING, LifecyclePhase.ON} for one in self._standby
        )
        changing = any(
            one.phase in {LifecyclePhase.STARTING, LifecyclePhase.RETIRING} for one in self._standby
        )
        rules = self._rules
        if not (changing or serving != rules.min or self._gateway.dispatcher.waiting):
            self.alarm = self._gateway.alarm
            return
        self._tick = max(self._tick, now + LEAST_ALARM_DELAY)
        self.alarm = min(self._gateway.alarm, self._tick)


_FULL = 1 << 30


class LeastConn:
    """nginx `least_conn`: sends at once to the server with fewest connections, ties in turn.

    What is too much for a node waits inside it, where nobody can move it any more.
    """

    def __init__(self, nodes: int) -> None:
        self.alarm = math.inf
        self._connections = [0] * nodes
        self._turn = 0

    def arrive(self, job: Job, fleet: SimulatedFleet) -> None:
        """Send it."""
        node = _next_least(self._connections, self._turn)
        self._turn = node + 1
        self._connections[node] += 1
        fleet.send(job, node)

    def started(self, job: Job, fleet: SimulatedFleet) -> None:
        """Tell nothing: a byte that passes does not change the count."""

    def ended(self, job: Job, fleet: SimulatedFleet) -> None:
        """Count it off."""
        self._connections[job.node] -= 1

    def wake(self, fleet: SimulatedFleet) -> None:
        """No alarm is ever set."""


class LeastConnQueued:
    """HAProxy `leastconn` with `maxconn` of a server's slots: the rest wait, first in first out."""

    def __init__(self, slots: list[int]) -> None:
        self.alarm = math.inf
        self._slots = slots
        # A full server's count is lifted out of the comparison.
        self._connections = [0] * len(slots)
        self._line: deque[Job] = deque()
        self._turn = 0

    def arrive(self, job: Job, fleet: SimulatedFleet) -> None:
        """Send it, or keep it while every server is full."""
        node = _next_least(self._connections, self._turn)
        if self._connections[node] >= _FULL:
            self._line.append(job)
            return
        self._turn = node + 1
        self._send(job, node, fleet)

    def started(self, job: Job, fleet: SimulatedFleet) -> None:
        """Tell nothing."""

    def ended(self, job: Job, fleet: SimulatedFleet) -> None:
        """The server that has room takes the oldest of the line."""
        node = job.node
        count = self._connections[node]
        self._connections[node] = (count - _FULL if count >= _FULL else count) - 1
        if self._line:
            self._send(self._line.popleft(), node, fleet)

    def wake(self, fleet: SimulatedFleet) -> None:
        """No alarm is ever set."""

    def _send(self, job: Job, node: int, fleet: SimulatedFleet) -> None:
        count = self._connections[node] + 1
        self._connections[node] = count + _FULL if count >= self._slots[node] else count
        fleet.send(job, node)


def _next_least(counts: list[int], turn: int) -> int:
    """The next place, from `turn` on and round, of the least count."""
    least = min(counts)
    try:
        return counts.index(least, turn)
    except ValueError:
        return counts.index(least)
