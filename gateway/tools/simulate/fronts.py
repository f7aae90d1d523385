"""Fronts: the gateway's own dispatcher, with or without autoscaling, and two other proxies."""

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
from gateway.scheduling.dispatcher import Dispatcher, DispatchRules
from gateway.scheduling.placement_state import Placement, PlacementState, QueuedRequest, TierSets
from gateway.tools.simulate.knowledge import ExactKnowledge, ExpectedRequest, Knowledge
from gateway.tools.simulate.server import SimulatedMachine
from gateway.tools.simulate.simulation import SimulatedFleet
from gateway.tools.simulate.trace import Job

LEAST_ALARM_DELAY = 1e-3
"""Least seconds to an alarm: at a clock that stands still it would go off for ever."""

PRIORITY_BY_LABEL = {priority.label: priority for priority in Priority}


class GatewayFront:
    """The gateway's dispatcher over simulated nodes.

    `knowledge` says what it knows of speeds, lengths and caches. Raises KeyError for a policy that
    does not exist.
    """

    def __init__(
        self,
        machines: Sequence[SimulatedMachine],
        rules: DispatchRules | None = None,
        seed: int = 0,
        knowledge: Knowledge | None = None,
    ) -> None:
        self.alarm = math.inf
        self.state = PlacementState()
        self.dispatcher = Dispatcher(self.state, rules or DispatchRules(), random.Random(seed))
        self.knowledge: Knowledge = knowledge or ExactKnowledge()
        for machine in machines:
            self.state.add(machine.name, total=machine.slots)
        self.knowledge.start(machines, self.state)
        self._fleet: SimulatedFleet | None = None
        self._expected: dict[int, ExpectedRequest] = {}
        """By the id of each job that has arrived and not ended."""
        self.dispatcher.set_cache_refresh(self._refresh_cached)
        self._machines = machines
        self._groups: dict[str, tuple[TierSets, ...]] = {}
        """By model: the nodes that serve it."""

    def arrive(self, job: Job, fleet: SimulatedFleet) -> None:
        """Place or queue the request, with what is known of it."""
        now = fleet.now
        self._fleet = fleet
        expected = self.knowledge.expect(job, fleet)
        self._expected[job.id] = expected
        queued = QueuedRequest(
            str(job.id),
            self._groups.get(job.model) or self._add_groups(job.model),
            PRIORITY_BY_LABEL[job.priority_label],
            job.caller,
            now,
            prompt_tokens=expected.prompt_tokens,
            completion_tokens=expected.completion_tokens,
            cached=expected.cached,
            pending=expected.pending,
            affinity_hash=expected.affinity_hash,
        )
        placement = self.dispatcher.place_or_queue(queued, now)
        if placement is not None:
            self._send(placement, fleet)
        self._set_alarm(now)

    def _add_groups(self, model: str) -> tuple[TierSets, ...]:
        serving = [
            row
            for row, machine in zip(self.state.rows, self._machines, strict=True)
            if not (model and machine.models) or model in machine.models
        ]
        self._groups[model] = groups = ((self.state.candidate_set(serving),),)
        return groups

    def started(self, job: Job, fleet: SimulatedFleet) -> None:
        """The prompt has been read."""
        expected = self._expected[job.id]
        assert expected.placement is not None
        self.dispatcher.prefill_done(expected.placement, fleet.now)
        self.knowledge.prefill_done(job, expected, fleet.now)

    def ended(self, job: Job, fleet: SimulatedFleet) -> None:
        """Settle it, learn from it, and give its slot to the next."""
        expected = self._expected.pop(job.id)
        assert expected.placement is not None
        now = fleet.now
        self.dispatcher.finished(expected.placement, now, job.prompt.tokens, job.cached, job.output)
        self.knowledge.ended(job, expected, now)
        self._match(fleet)

    def wake(self, fleet: SimulatedFleet) -> None:
        """Give free slots to waiting requests."""
        self._match(fleet)

    def _refresh_cached(self, queued: QueuedRequest) -> None:
        """Look up anew what is cached of a request that has waited."""
        assert self._fleet is not None
        job = self._fleet.jobs[int(queued.id)]
        expected = self._expected[job.id]
        self.knowledge.refresh_cached(job, expected, self._fleet)
        queued.set_cached(queued.prompt_tokens, expected.cached, expected.pending)

    def _match(self, fleet: SimulatedFleet) -> None:
        for placement in self.dispatcher.match(fleet.now):
            self._send(placement, fleet)
        self._set_alarm(fleet.now)

    def _send(self, placement: Placement, fleet: SimulatedFleet) -> None:
        job = fleet.jobs[int(placement.queued.id)]
        expected = self._expected[job.id]
        expected.place(placement)
        fleet.send(job, placement.row.index)
        self.knowledge.placed(job, expected, fleet.now)

    def _set_alarm(self, now: float) -> None:
        wake = self.dispatcher.wake_at()
        self.alarm = math.inf if wake is None else max(wake, now + LEAST_ALARM_DELAY)


AUTOSCALER_TICK = 1.0
"""Seconds between two looks at the load."""


class _StandbyMachine:
    """One standby machine. Times are seconds of the simulation."""

    __slots__ = ("index", "name", "phase", "ready_at", "seconds", "slots", "started", "stopped")

    def __init__(self, index: int, machine: SimulatedMachine) -> None:
        self.index = index
        self.name = str(index)
        self.slots = machine.slots
        self.phase = LifecyclePhase.OFF
        self.started = self.stopped = -math.inf
        self.ready_at = math.inf
        self.seconds = 0.0
        """Seconds that it ran, up to its last stop."""

    def enter(self, phase: LifecyclePhase) -> None:
        """Begin another phase."""
        self.phase = phase

    def start(self, now: float, ready_at: float) -> None:
        """Start it; it works from `ready_at` on."""
        self.phase, self.started, self.ready_at = LifecyclePhase.STARTING, now, ready_at

    def stop(self, now: float) -> None:
        """Stop it."""
        self.phase, self.stopped = LifecyclePhase.OFF, now
        self.seconds += now - self.started


class AutoscalingFront:
    """A gateway with standby machines: those with an index from `base` on.

    A standby machine works `startup` seconds after its start, with empty caches.
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
        self._base = base
        self._rules = rules
        self._startup = startup
        self._policy = AutoscalingPolicy()
        self._tick = 0.0
        self._standby = [
            _StandbyMachine(index, machine)
            for index, machine in enumerate(machines)
            if index >= base
        ]
        self._by_name = {one.name: one for one in self._standby}
        self._names = frozenset(self._by_name)
        for one in self._standby:
            self._set_working(one, works=False)

    def standby_seconds(self, until: float) -> float:
        """Seconds that standby machines ran, in all."""
        return sum(
            one.seconds
            + (0.0 if one.phase is LifecyclePhase.OFF else max(0.0, until - one.started))
            for one in self._standby
        )

    def arrive(self, job: Job, fleet: SimulatedFleet) -> None:
        """Leave it to the gateway."""
        self._gateway.arrive(job, fleet)
        self._set_alarm(fleet.now)

    def started(self, job: Job, fleet: SimulatedFleet) -> None:
        """The prompt has been read."""
        self._gateway.started(job, fleet)

    def ended(self, job: Job, fleet: SimulatedFleet) -> None:
        """Its slot is free."""
        self._gateway.ended(job, fleet)
        self._set_alarm(fleet.now)

    def wake(self, fleet: SimulatedFleet) -> None:
        """Start and stop machines once a tick, and wake the gateway."""
        now = fleet.now
        if now >= self._tick:
            self._tick = now + AUTOSCALER_TICK
            self._scale(fleet)
        self._gateway.wake(fleet)
        self._set_alarm(now)

    def _scale(self, fleet: SimulatedFleet) -> None:
        now = fleet.now
        for one in self._standby:
            if one.phase is LifecyclePhase.STARTING and now >= one.ready_at:
                one.enter(LifecyclePhase.ON)
                self._set_working(one, works=True)
        for action in self._policy.decide(
            self._standby_nodes(), self._demands(now), self._rules, now
        ):
            one = self._by_name[action.name]
            if action.verb == "start":
                one.start(now, now + self._startup)
                self.starts += 1
            elif action.verb == "retire":
                one.enter(LifecyclePhase.RETIRING)
                self._set_working(one, works=False)
            elif action.verb == "keep":
                one.enter(LifecyclePhase.ON)
                self._set_working(one, works=True)
            else:
                one.stop(now)
                fleet.servers[one.index].restart()
                self._gateway.knowledge.restarted(one.index)

    def _standby_nodes(self) -> list[StandbyNode]:
        rows = self._gateway.state.rows
        slots = sum(row.capacity for row in rows)
        busy = sum(row.ours for row in rows if row.capacity)
        nodes = []
        for one in self._standby:
            row = rows[one.index]
            others = (slots - row.capacity, busy - (row.ours if row.capacity else 0))
            nodes.append(
                StandbyNode(
                    one.name, one.phase, one.slots, row.ours, others, one.started, one.stopped
                )
            )
        return nodes

    def _demands(self, now: float) -> list[WaitingDemand]:
        dispatcher = self._gateway.dispatcher
        if not dispatcher.waiting:
            return []
        wait = max(
            max(wait, now - queued.received_at) for queued, wait in dispatcher.predicted_waits(now)
        )
        slots = sum(row.total for row in self._gateway.state.rows if row.alive)
        return [WaitingDemand(self._names, wait, slots)]

    def _set_working(self, one: _StandbyMachine, *, works: bool) -> None:
        state = self._gateway.state
        state.set_slots(state.rows[one.index], one.slots, one.slots if works else 0, 0, alive=works)

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

    Requests beyond a node's slots wait inside the node, and can't be moved any more.
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
        """Do nothing: a first byte does not change the count."""

    def ended(self, job: Job, fleet: SimulatedFleet) -> None:
        """Decrement the node's count."""
        self._connections[job.node] -= 1

    def wake(self, fleet: SimulatedFleet) -> None:
        """No alarm is ever set."""


class LeastConnQueued:
    """HAProxy `leastconn` with `maxconn` = a server's slots: the rest wait, first in, first out."""

    def __init__(self, slots: list[int]) -> None:
        self.alarm = math.inf
        self._slots = slots
        # A full server's count is raised by `_FULL`, so that it never is the least.
        self._connections = [0] * len(slots)
        self._queue: deque[Job] = deque()
        self._turn = 0

    def arrive(self, job: Job, fleet: SimulatedFleet) -> None:
        """Send it, or queue it while every server is full."""
        node = _next_least(self._connections, self._turn)
        if self._connections[node] >= _FULL:
            self._queue.append(job)
            return
        self._turn = node + 1
        self._send(job, node, fleet)

    def started(self, job: Job, fleet: SimulatedFleet) -> None:
        """Do nothing."""

    def ended(self, job: Job, fleet: SimulatedFleet) -> None:
        """The server that has room gets the oldest of the queue."""
        node = job.node
        count = self._connections[node]
        self._connections[node] = (count - _FULL if count >= _FULL else count) - 1
        if self._queue:
            self._send(self._queue.popleft(), node, fleet)

    def wake(self, fleet: SimulatedFleet) -> None:
        """No alarm is ever set."""

    def _send(self, job: Job, node: int, fleet: SimulatedFleet) -> None:
        count = self._connections[node] + 1
        self._connections[node] = count + _FULL if count >= self._slots[node] else count
        fleet.send(job, node)


def _next_least(counts: list[int], turn: int) -> int:
    """The index of the least count: the first from `turn` on, else the first of all."""
    least = min(counts)
    try:
        return counts.index(least, turn)
    except ValueError:
        return counts.index(least)
