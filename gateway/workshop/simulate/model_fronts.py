"""Fronts of routers: models placed by hand, by each router itself, or by the gateway's policy."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from gateway.nodes.router import LoadPhase
from gateway.schedule.core.model_placement import (
    Instance,
    InstanceUsage,
    ModelDemand,
    ModelPlacementPolicy,
    RouterNode,
)
from gateway.schedule.core.requests import QueuedRequest
from gateway.workshop.simulate.fronts import GatewayFront, Knowledge
from gateway.workshop.simulate.routers import RouterFleet
from gateway.workshop.simulate.simulation import Front, SimulatedFleet
from gateway.workshop.simulate.trace import Job


class LoadEvents:
    """The loads and unloads that are under way."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, bool]] = []  # when, which, whether it is a load

    @property
    def next_end(self) -> float:
        """When the next one ends; infinity: there is none."""
        return self._ends[0][0] if self._ends else math.inf

    def load(self, index: int, fleet: RouterFleet) -> None:
        """Begin to load an instance."""
        heappush(self._ends, (fleet.begin_load(index), index, True))

    def unload(self, index: int, fleet: RouterFleet) -> None:
        """Begin to unload an instance."""
        heappush(self._ends, (fleet.begin_unload(index), index, False))

    def end_due(self, fleet: RouterFleet) -> list[tuple[int, bool]]:
        """End those that are due: which, and whether it was loaded."""
        ended = []
        while self.next_end <= fleet.now:
            _, index, loaded = heappop(self._ends)
            (fleet.end_load if loaded else fleet.end_unload)(index)
            ended.append((index, loaded))
        return ended


class FewestConnections(Front):
    """A proxy that knows which nodes have which models, and takes the one with fewest requests."""

    def __init__(self, fleet: RouterFleet) -> None:
        self.alarm = math.inf
        self._fleet = fleet
        self._able: dict[str, list[int]] = {}  # by model: the instances that are loaded
        self._connections = [0] * len(fleet.nodes)

    def arrive(self, job: Job, fleet: SimulatedFleet) -> None:
        """Send it at once."""
        able = self._able.get(job.model)
        if able is None:
            able = [one for one in self._fleet.able(job.model) if one in self._fleet.loaded]
            self._able[job.model] = able
        node = min(able, key=lambda one: self._connections[self._fleet.router_of(one)])
        self._connections[self._fleet.router_of(node)] += 1
        fleet.send(job, node)

    def ended(self, job: Job, fleet: SimulatedFleet) -> None:
        """Count it off."""
        self._connections[self._fleet.router_of(job.node)] -= 1


class LeastRecentlyUsed(Front):
    """Fewest connections over all nodes; each router loads by itself.

    For a model that it lacks a router unloads those of its host that were used least recently.
    llama.cpp's does so amid their requests; here they end first, while later ones for them wait.
    """

    def __init__(self, fleet: RouterFleet) -> None:
        self.alarm = math.inf
        self._fleet = fleet
        self._able: dict[str, dict[int, int]] = {}  # by model: the instance of each node
        self._connections = [0] * len(fleet.nodes)
        self._turn = 0
        self._waiting: list[deque[tuple[Job, int]]] = [deque() for _ in fleet.nodes]
        """Of each node, with the instance that each job is for."""
        self._last_used: dict[int, float] = {}  # by instance: of those loaded, or being loaded
        self._jobs: dict[int, int] = {}  # by instance: its jobs
        self._events = LoadEvents()
        self._retiring: set[int] = set()
        self._loading: set[int] = set()
        self._memory = fleet.host_memory

    def arrive(self, job: Job, fleet: SimulatedFleet) -> None:
        """Choose its node."""
        able = self._able.get(job.model)
        if able is None:
            able = self._able[job.model] = {
                self._fleet.router_of(one): one
                for one in self._fleet.able(job.model)
                if one in self._fleet.loaded
                or self._fleet.model_of(one).memory <= self._memory[self._fleet.host_of(one)]
            }
        nodes = len(self._connections)
        node = min(able, key=lambda one: (self._connections[one], (one - self._turn) % nodes))
        self._turn = node + 1
        self._connections[node] += 1
        self._waiting[node].append((job, able[node]))
        self._serve(node)

    def ended(self, job: Job, fleet: SimulatedFleet) -> None:
        """What waits for its memory may go on."""
        node = self._fleet.router_of(job.node)
        self._connections[node] -= 1
        self._jobs[job.node] -= 1
        self._serve(node)

    def wake(self, fleet: SimulatedFleet) -> None:
        """Loads and unloads have ended."""
        for index, loaded in self._events.end_due(self._fleet):
            (self._loading if loaded else self._retiring).discard(index)
            own, host = self._fleet.router_of(index), self._fleet.host_of(index)
            # First what waits for it, else a neighbour would have it unloaded before its first use.
            self._serve(own)
            for node, other in enumerate(self._fleet.hosts):
                if other == host and node != own:
                    self._serve(node)
        self.alarm = self._events.next_end

    def _serve(self, node: int) -> None:
        """Send what can be sent, and make room for the rest in the order of their arrival."""
        fleet, waiting, host = self._fleet, self._waiting[node], self._fleet.hosts[node]
        needed: list[int] = []
        for _ in range(len(waiting)):
            job, index = waiting.popleft()
            if index in fleet.loaded and index not in self._retiring:
                self._last_used[index] = fleet.now
                self._jobs[index] = self._jobs.get(index, 0) + 1
                fleet.send(job, index)
            else:
                waiting.append((job, index))
                if index not in needed and index not in self._loading:
                    needed.append(index)
        for index in needed:
            if index not in fleet.held and fleet.model_of(index).memory <= fleet.free(host):
                self._last_used[index] = fleet.now
                self._loading.add(index)
                self._events.load(index, fleet)
        self._make_room(host, [one for one in needed if one not in fleet.held])
        for index in sorted(self._retiring):
            if not self._jobs.get(index) and index in fleet.loaded:
                self._events.unload(index, fleet)
        self.alarm = self._events.next_end

    def _make_room(self, host: str, needed: list[int]) -> None:
        """Retire those used least recently until the first of the needed models will fit."""
        if not needed:
            return
        fleet = self._fleet
        held = [index for index in fleet.held if fleet.host_of(index) == host]
        leaving = sum(
            fleet.model_of(index).memory
            for index in held
            if index in self._retiring or index not in fleet.loaded | self._loading
        )
        short = fleet.model_of(needed[0]).memory - fleet.free(host) - leaving
        ready = [index for index in held if index in fleet.loaded and index not in self._retiring]
        for index in sorted(ready, key=lambda index: self._last_used.get(index, 0.0)):
            if short <= 0:
                break
            self._retiring.add(index)
            short -= fleet.model_of(index).memory


class HandFront(GatewayFront):
    """The gateway over instances that were loaded by hand and stay."""

    def __init__(
        self, fleet: RouterFleet, seed: int = 0, knowledge: Knowledge | None = None
    ) -> None:
        machines = [one.machine for one in fleet.instances]
        super().__init__(machines, seed=seed, knowledge=knowledge)
        for row in self.state.rows:
            if row.index not in fleet.loaded:
                self.state.set_slots(row, row.total, 0, 0, alive=False)


# Seconds between two looks at what waits, and at least, where the first did not reach all of it.
LOOK_SECONDS, LEAST_PAUSE = 0.5, 0.02
USUAL_SECONDS = 10.0  # of a request for a model that has answered none
LEARNT_OF = 16  # answers of which the mean of a model's requests is
REFRESH_SECONDS = 5.0  # seconds after which the policy is told of what was learnt


class ModelPlacingFront(GatewayFront):
    """The gateway with its own model placement. Loads and memory are known; speeds are learnt."""

    def __init__(
        self,
        fleet: RouterFleet,
        policy: ModelPlacementPolicy | None = None,
        seed: int = 0,
        knowledge: Knowledge | None = None,
    ) -> None:
        machines = [one.machine for one in fleet.instances]
        super().__init__(machines, seed=seed, knowledge=knowledge)
        self.policy = policy or ModelPlacementPolicy()
        self._router_fleet = fleet
        self._phases = [LoadPhase.UNLOADED] * len(machines)
        self._since = [-math.inf] * len(machines)
        self._last_used = [-math.inf] * len(machines)
        self._waiting: dict[str, dict[int, Job]] = {model.name: {} for model in fleet.models}
        self._seconds: dict[str, float] = {}  # by model: a usual request's
        self._events = LoadEvents()
        self._look_at = math.inf
        self._refreshed_at = -math.inf
        self._instances: dict[tuple[str, str], int] = {}
        memory = fleet.host_memory
        for node, host in zip(fleet.nodes, fleet.hosts, strict=True):
            if node.memory:
                self.policy.fleet.put_node(RouterNode(node.name, host, memory[host]))
        for index, one in enumerate(fleet.instances):
            if one.model is not None:
                self._instances[fleet.nodes[one.router].name, one.model.name] = index
                self._enter(index, LoadPhase.UNLOADED, -math.inf)

    def arrive(self, job: Job, fleet: SimulatedFleet) -> None:
        """Place or queue the request; where it must wait, see what to load for it."""
        if job.priority_label != "batch":
            self.policy.rates.note(job.model, fleet.now)
        super().arrive(job, fleet)
        if job.model not in self._waiting:
            return  # Plain servers alone have it.
        if job.model not in self._seconds:
            able = self._router_fleet.able(job.model)
            expected, row = self._expected[job.id], self.state.rows[able[0]]
            seconds = expected.prompt_tokens / row.prefill_tps
            self._seconds[job.model] = seconds + expected.completion_tokens * row.token_base
        if job.sent < 0:
            self._waiting[job.model][job.id] = job
            self._look(fleet)
        self._set_alarm(fleet.now)

    def ended(self, job: Job, fleet: SimulatedFleet) -> None:
        """Learn from it, and see what its slot is for."""
        self._last_used[job.node] = fleet.now
        seconds = self._seconds.get(job.model, job.ended - job.sent)
        self._seconds[job.model] = seconds + (job.ended - job.sent - seconds) / LEARNT_OF
        super().ended(job, fleet)
        if self._look_at < math.inf:
            self._look(fleet)
        self._set_alarm(fleet.now)

    def wake(self, fleet: SimulatedFleet) -> None:
        """Loads and unloads have ended, or it is time for a look."""
        for index, loaded in self._events.end_due(self._router_fleet):
            self._enter(index, LoadPhase.READY if loaded else LoadPhase.UNLOADED, fleet.now)
            self._look_at = fleet.now
        super().wake(fleet)
        if fleet.now >= self._look_at:
            self._look(fleet)
        self._set_alarm(fleet.now)

    def _send(self, placement: QueuedRequest, fleet: SimulatedFleet) -> None:
        super()._send(placement, fleet)
        job = fleet.jobs[int(placement.id)]
        self._last_used[job.node] = fleet.now
        self._waiting.get(job.model, {}).pop(job.id, None)

    def _look(self, fleet: SimulatedFleet) -> None:
        now = fleet.now
        if now - self._refreshed_at >= REFRESH_SECONDS:
            self._refreshed_at = now
            for index, phase in enumerate(self._phases):
                if phase is not LoadPhase.UNLOADED:
                    self._tell(index)
        for action in self.policy.decide(self._demands(now), self._usage_at(now), now):
            index = self._instances[action.node, action.model]
            if action.verb == "load":
                self._enter(index, LoadPhase.LOADING, now)
                self._events.load(index, self._router_fleet)
            elif action.verb == "retire":
                self._enter(index, LoadPhase.RETIRING, now)
            elif action.verb == "keep":
                self._enter(index, LoadPhase.READY, now)
                self._match(fleet)
            else:
                self._enter(index, LoadPhase.UNLOADING, now)
                self._events.unload(index, self._router_fleet)
                self.knowledge.restarted(index)
        waits = any(self._waiting.values()) or self.policy.plans
        pause = LEAST_PAUSE if self.policy.left else LOOK_SECONDS
        self._look_at = now + pause if waits else math.inf

    def _demands(self, now: float) -> list[ModelDemand]:
        found = []
        for model, jobs in self._waiting.items():
            if jobs:
                arrived = [job.arrived for job in jobs.values()]
                found.append(
                    ModelDemand(
                        model,
                        len(jobs),
                        now * len(jobs) - sum(arrived),
                        now - min(arrived),
                        batch=all(job.priority_label == "batch" for job in jobs.values()),
                    )
                )
        return found

    def _usage_at(self, now: float) -> Callable[[Instance], InstanceUsage]:
        def usage(instance: Instance) -> InstanceUsage:
            index = self._instances[instance.node, instance.model]
            row = self.state.rows[index]
            busy = max((one.seconds_left(now) for one in row.running), default=0.0)
            return InstanceUsage(row.ours, busy, self._last_used[index])

        return usage

    def _enter(self, index: int, phase: LoadPhase, now: float) -> None:
        self._phases[index] = phase
        self._since[index] = now
        row = self.state.rows[index]
        capacity = row.total if phase is LoadPhase.READY else 0
        self.state.set_slots(row, row.total, capacity, 0, alive=True)
        self._tell(index)

    def _tell(self, index: int) -> None:
        """Tell the policy of an instance."""
        fleet, row = self._router_fleet, self.state.rows[index]
        model = fleet.model_of(index)
        self.policy.fleet.put(
            Instance(
                fleet.nodes[fleet.router_of(index)].name,
                model.name,
                self._phases[index],
                model.memory,
                model.load_seconds,
                row.total,
                self._seconds.get(model.name, USUAL_SECONDS),
                self._since[index],
            )
        )

    def _set_alarm(self, now: float) -> None:
        super()._set_alarm(now)
        self.alarm = min(self.alarm, self._events.next_end, self._look_at)
