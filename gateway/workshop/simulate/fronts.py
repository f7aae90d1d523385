"""Fronts: the gateway's own dispatcher, with or without autoscaling, and two other proxies.

Those of routers have models placed by hand, by each router itself, or by the gateway's policy.

What the simulated gateway knows when it places a request is the truth, or what it has learnt.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

from gateway.config.scheduling import ElasticSettings
from gateway.lease import PromptKey, RequestSize
from gateway.nodes.calibration import (
    LOOK_SECONDS,
    READ_WORDS,
    WARM_UP_TOKENS,
    WARM_UP_WORDS,
    WRITE_TOKENS,
    due,
)
from gateway.nodes.fleet import COMPARE_SPEEDS_EVERY, compare_speeds
from gateway.nodes.lifecycle import Lifecycle, LifecyclePhase
from gateway.nodes.node import MOST_CALIBRATIONS, CalibrationRecord, Lease, Node, SlotOccupancy
from gateway.nodes.prompt_cache import CacheLookup, FleetPromptCache
from gateway.nodes.router import LoadPhase
from gateway.nodes.speed import ObservedTiming, Speed, sample_from_timings
from gateway.schedule.candidates import show_speed
from gateway.schedule.core.autoscaling_policy import (
    AutoscalingPolicy,
    StandbyNode,
    WaitingDemand,
)
from gateway.schedule.core.demand_model import TokenEstimates
from gateway.schedule.core.dispatcher import Dispatcher, DispatchRules
from gateway.schedule.core.model_placement import (
    Instance,
    InstanceUsage,
    ModelDemand,
    ModelPlacementPolicy,
    RouterNode,
)
from gateway.schedule.core.requests import NodeSlots, PlacementState, QueuedRequest, TierSets
from gateway.terms import Priority
from gateway.workshop.simulate.fleets import RouterFleet
from gateway.workshop.simulate.simulation import (
    Front,
    Job,
    SimulatedFleet,
    SimulatedMachine,
    common_tokens,
)


class ExactKnowledge:
    """Knows the truth: speeds, lengths, and what every node has cached.

    The difference of results to `LearntKnowledge` is the cost of learning. It looks into every node
    where a prompt may be cached, so it is for fleets of some dozens of nodes.
    """

    def __init__(self, fleet: SimulatedFleet, state: PlacementState) -> None:
        """Each machine has the row of its index."""
        self._fleet = fleet
        # By stream, or minus prefix: the nodes where a prompt of it may be cached.
        self._nodes_by_text = defaultdict[int, set[int]](set)
        for machine, row in zip(fleet.machines, state.rows, strict=True):
            row.set_speed(machine.prefill_tps, machine.token_base, machine.token_step)

    def expect(self, job: Job) -> tuple[float, int]:
        """Tokens of its answer, and a hash of its prompt's shared beginning."""
        return job.output, job.prompt.prefix or job.prompt.stream

    def look_up(self, job: Job) -> CacheLookup:
        """What is cached of its prompt now."""
        prompt = job.prompt
        cached, pending = dict[int, float](), dict[int, float]()
        nodes = self._nodes_by_text
        for node in nodes[prompt.stream] | nodes[-prompt.prefix]:
            server = self._fleet.servers[node]
            prompts, running = list(server.cache.host_prompts), []
            for held, runs in zip(server.cache.slot_prompts, server.slots, strict=True):
                if runs is None:
                    prompts.append(held)
                else:  # its old prompt is being overwritten
                    running.append(runs.final_prompt)
            for found, texts in ((cached, prompts), (pending, running)):
                if tokens := max((common_tokens(one, prompt) for one in texts), default=0):
                    found[node] = tokens
        return CacheLookup(prompt.tokens, cached, pending)

    def placed(self, job: Job) -> None:
        """It goes to the node `job.node`: remember where to look."""
        self._nodes_by_text[job.prompt.stream].add(job.node)
        if job.prompt.prefix:
            self._nodes_by_text[-job.prompt.prefix].add(job.node)

    def prefill_done(self, job: Job) -> None:
        """Its first token has come: nothing new."""

    def ended(self, job: Job) -> None:
        """It has ended: nothing new."""

    def restarted(self, node: int) -> None:
        """A node was stopped: its caches show that."""


BYTES_PER_TOKEN = 4
BLOCK_TOKENS = 128  # tokens of a prompt key's block: 512 bytes (`request/prompt_key.py`)
# Conversations whose blocks are kept; a client would send the whole text again.
MOST_STREAMS = 30_000
_Numbers = tuple[int, ...]


def _size(job: Job) -> RequestSize:
    """As much of a request's size as its tokens are estimated by."""
    return RequestSize(text_bytes=job.prompt.tokens * BYTES_PER_TOKEN, max_tokens=job.max_tokens)


class _NodeStub:
    """As much of a node as leases, `compare_speeds` and the choice of those to calibrate need."""

    spec = SimpleNamespace(tier="cpu", kind="llama.cpp", written_hint=None)
    upstream = None

    def __init__(
        self, machine: SimulatedMachine, row: NodeSlots, clock: Callable[[], float]
    ) -> None:
        self.machine, self.row, self.clock = machine, row, clock
        self.host, self.public_models = machine.host or machine.name, machine.models
        self.occupancy, self.speed, self.calibration = SlotOccupancy(), Speed(), CalibrationRecord()
        self.calibrated_at = math.inf
        """When the calibration that runs has shown the speed; infinity: none runs."""

    def take_lease(self) -> Lease:
        """Count a request that it gets, and measure it."""
        now = self.clock()
        lease = Lease(cast("Node", self), 1, now, stream=True)
        self.occupancy.take(1, now, prefilling=True)
        lease.counted(self.occupancy, 0.0, wakes=False, trial=False)
        return lease

    def lease_released(self, lease: Lease, counted: bool) -> None:  # noqa: FBT001 - a node's
        """The dispatcher has heard of it."""

    def calibration_due(self, now: float) -> bool:
        """Whether it is idle and its speed unknown."""
        is_known = self.speed.samples or self.speed.calibrated
        record = self.calibration
        is_due = now >= record.due_at and record.tries < MOST_CALIBRATIONS
        is_idle = self.row.capacity and not self.row.ours
        return bool(is_due and is_idle and self.machine.calibrated and not is_known)

    def begin_calibration(self, now: float) -> None:
        """It reads and writes as much as the gateway's two requests do."""
        machine = self.machine
        read = (WARM_UP_WORDS + READ_WORDS) / machine.prefill_tps
        self.calibrated_at = now + read + (WARM_UP_TOKENS + WRITE_TOKENS) * machine.token_base

    def end_calibration(self, now: float, *, given_up: bool) -> None:
        """It has ended: its speed is known, unless a request took the slot."""
        if not given_up:
            read = READ_WORDS / self.machine.prefill_tps
            wrote = (WRITE_TOKENS - 1) * self.machine.token_base
            self.speed.calibrate(_timings(READ_WORDS, read, WRITE_TOKENS, wrote))
        self.calibration.end("", now, warm=True, again=given_up)
        self.calibrated_at = math.inf

    def know_speed(self) -> None:
        """Learn the real speed, as from many answers, alone and beside others."""
        machine = self.machine
        read = WARM_TOKENS / machine.prefill_tps
        for _ in range(WARM_ANSWERS):
            for busy in {1, machine.slots}:
                wrote = WARM_TOKENS * (machine.token_base + machine.token_step * (busy - 1))
                shown = _timings(WARM_TOKENS, read, WARM_TOKENS, wrote)
                seen = ObservedTiming(read + wrote, read, busy)
                self.speed.learn(sample_from_timings(shown, seen))


# Answers for each number of busy slots that a gateway which starts warm has learnt from, and the
# tokens read and written for each.
WARM_ANSWERS, WARM_TOKENS = 8, 512


def _timings(read: int, read_s: float, wrote: int, wrote_s: float) -> dict[str, object]:
    """What llama.cpp reports of so many tokens and seconds."""
    return {
        "prompt_n": read,
        "prompt_ms": read_s * 1000,
        "predicted_n": wrote,
        "predicted_ms": wrote_s * 1000,
    }


class LearntKnowledge:
    """Learns as the gateway does: of speeds from nothing (`warm`: it knows them), else too.

    Idle nodes are calibrated. Their slots are free meanwhile, and a request ends it.
    """

    def __init__(self, fleet: SimulatedFleet, state: PlacementState, *, warm: bool = False) -> None:
        self.prompt_cache = FleetPromptCache()
        self.token_estimates = TokenEstimates()
        self._fleet, self._state = fleet, state
        self._stubs = [
            _NodeStub(machine, row, lambda: fleet.now)
            for machine, row in zip(fleet.machines, state.rows, strict=True)
        ]
        self._looked_at: float | None = None  # when calibrations were last begun
        self._unknown = [] if warm else list(self._stubs)  # those that may have to be calibrated
        # By the id of each job that has arrived and not ended.
        self._prompt_keys: dict[int, PromptKey] = {}
        self._leases: dict[int, Lease] = {}
        # By conversation: its blocks, and where each of them ends.
        self._blocks_by_stream: OrderedDict[int, tuple[_Numbers, _Numbers]] = OrderedDict()
        for stub in self._stubs:
            if warm:
                stub.know_speed()
            self.prompt_cache.resize(stub.row.index, stub.machine.slots)
        self._set_all_speeds()

    def expect(self, job: Job) -> tuple[float, int]:
        """Tokens of its answer by what was learnt, and a hash of its prompt's beginning."""
        if self._unknown:
            self._calibrate()
        tokens, completion = self.token_estimates.expected_tokens(job.model, job.caller, _size(job))
        key = self._prompt_keys[job.id] = self._prompt_key(job, tokens)
        return completion, key.blocks[0]

    def look_up(self, job: Job) -> CacheLookup:
        """What is believed to be cached of its prompt now."""
        return self.prompt_cache.lookup(self._prompt_keys[job.id])

    def placed(self, job: Job) -> None:
        """Count it on its node, and expect its prompt to be cached there."""
        self.prompt_cache.request_placed(job.node, self._prompt_keys[job.id])
        stub = self._stubs[job.node]
        self._leases[job.id] = stub.take_lease()
        if stub.calibrated_at < math.inf:
            stub.end_calibration(self._fleet.now, given_up=True)

    def prefill_done(self, job: Job) -> None:
        """Measure its decoding from now on."""
        self._leases[job.id].content_received(self._fleet.now)

    def ended(self, job: Job) -> None:
        """Learn from its figures."""
        prompt_key, lease = self._prompt_keys.pop(job.id), self._leases.pop(job.id)
        node, now = job.node, self._fleet.now
        lease.release()
        unread = job.prompt.tokens - job.cached
        timings = _timings(unread, job.first - job.began, job.output, now - job.first)
        timings["cache_n"] = job.cached
        seen = lease.observed_timing()
        self._stubs[node].speed.learn(sample_from_timings(timings, seen))
        if self._state.exploring and now >= self._compared_at + COMPARE_SPEEDS_EVERY:
            self._set_all_speeds()
        else:
            show_speed(self._state.rows[node], self._stubs[node].speed)
        prompt = job.prompt.tokens
        self.token_estimates.learn(job.model, job.caller, _size(job), prompt, job.output)
        self.prompt_cache.request_finished(node, prompt_key, prompt, job.cached, job.output)

    def restarted(self, node: int) -> None:
        """Forget what it had cached, but not its speed."""
        self.prompt_cache.forget_node(node)
        self.prompt_cache.resize(node, self._stubs[node].machine.slots)

    def _calibrate(self) -> None:
        """Take in the calibrations that have ended by now, in their order, and begin others."""
        now = self._fleet.now
        at = now if self._looked_at is None else self._looked_at
        if 0 < now - at < LOOK_SECONDS:
            return
        self._looked_at = now
        self._unknown = [stub for stub in self._unknown if not stub.speed.samples]
        running = [stub for stub in self._unknown if stub.calibrated_at < math.inf]
        before = len(self._unknown)
        while True:
            unknown, others = cast("list[Node]", self._unknown), cast("list[Node]", running)
            for stub in cast("list[_NodeStub]", due(unknown, others, at)):
                stub.begin_calibration(at)
                running.append(stub)
            first = min(running, key=lambda stub: stub.calibrated_at, default=None)
            if first is None or first.calibrated_at > now:
                break
            at = first.calibrated_at
            first.end_calibration(at, given_up=False)
            running.remove(first)
            self._unknown.remove(first)
        if len(self._unknown) < before:
            self._set_all_speeds()

    def _set_all_speeds(self) -> None:
        """Compare the nodes' speeds: those not measured are taken to be as fast as the best."""
        self._compared_at = now = self._fleet.now
        compare_speeds(cast("list[Node]", self._stubs))
        for stub, row in zip(self._stubs, self._state.rows, strict=True):
            awaited = stub.calibrated_at < math.inf or stub.calibration_due(now)
            show_speed(row, stub.speed, awaited=awaited)

    def _prompt_key(self, job: Job, expected_tokens: float) -> PromptKey:
        """The prompt in blocks; a new block begins where a turn or an answer does."""
        stream, tokens, prefix, shared = job.prompt
        known = self._blocks_by_stream.pop(stream, None)
        blocks, ends = map(list, known or ((), ()))
        while ends and ends[-1] > tokens:
            blocks.pop()
            ends.pop()
        if known is None and prefix:
            _extend(blocks, ends, -prefix, min(shared, tokens))
        _extend(blocks, ends, stream, tokens)
        prompt, places = tuple(blocks), tuple(ends)
        # Its answer is part of the next turn's prompt, and ends where a block does.
        _extend(blocks, ends, stream, tokens + job.output)
        self._blocks_by_stream[stream] = tuple(blocks), tuple(ends)
        if len(self._blocks_by_stream) > MOST_STREAMS:
            self._blocks_by_stream.popitem(last=False)
        return PromptKey(
            prompt,
            expected_tokens,
            tuple([end * BYTES_PER_TOKEN for end in places]),
            tokens * BYTES_PER_TOKEN,
        )


def _extend(blocks: list[int], ends: list[int], text: int, tokens: int) -> None:
    """Add blocks of one text until `tokens` tokens are covered."""
    at = ends[-1] if ends else 0
    last = blocks[-1] if blocks else 0
    while at < tokens:
        at = min(at + BLOCK_TOKENS, tokens)
        last = hash((last, text, at))
        blocks.append(last)
        ends.append(at)


# Where the figures of requests and of rows come from.
Knowledge = Callable[[SimulatedFleet, PlacementState], ExactKnowledge | LearntKnowledge]
# Least seconds to an alarm: at a clock that stands still it would go off for ever.
LEAST_ALARM_DELAY = 1e-3
PRIORITY_BY_LABEL = {priority.label: priority for priority in Priority}


class GatewayFront(Front):
    """The gateway's dispatcher over simulated nodes.

    `knowledge` says what it knows of speeds, lengths and caches. Raises KeyError for a policy that
    does not exist.
    """

    def __init__(
        self,
        fleet: SimulatedFleet,
        seed: int = 0,
        knowledge: Knowledge = ExactKnowledge,
        policy: str = "least_finish",
    ) -> None:
        super().__init__(fleet)
        self.state = PlacementState()
        self.dispatcher = Dispatcher(self.state, DispatchRules(policy), random.Random(seed))
        for machine in fleet.machines:
            self.state.add(machine.name, total=machine.slots)
        self.knowledge = knowledge(fleet, self.state)
        for row in self.state.rows:
            if row.index not in fleet.loaded:
                row.set_slots(row.total, 0, 0, alive=False)
        self._queued: dict[int, QueuedRequest] = {}
        """By the id of each job that has arrived and not ended."""
        self.dispatcher.set_cache_refresh(self._refresh_cached)
        self._groups: dict[str, tuple[TierSets, ...]] = {}  # by model: the nodes that serve it

    def arrive(self, job: Job) -> None:
        """Place or queue the request, with what is known of it."""
        now = self.fleet.now
        completion, affinity = self.knowledge.expect(job)
        found = self.knowledge.look_up(job)
        if job.model not in self._groups:
            serving = [self.state.rows[index] for index in self.fleet.able(job.model)]
            self._groups[job.model] = ((self.state.candidate_set(serving),),)
        queued = self._queued[job.id] = QueuedRequest(
            str(job.id),
            self._groups[job.model],
            PRIORITY_BY_LABEL[job.priority_label],
            job.caller,
            now,
            prompt_tokens=found.tokens,
            completion_tokens=completion,
            cached=found.cached,
            pending=found.pending,
            affinity_hash=affinity,
        )
        placement = self.dispatcher.place_or_queue(queued, now)
        if placement is not None:
            self._send(placement)
        self._set_alarm()

    def started(self, job: Job) -> None:
        """The prompt has been read."""
        self._queued[job.id].row.prefill_done(self._queued[job.id], self.fleet.now)
        self.knowledge.prefill_done(job)

    def ended(self, job: Job) -> None:
        """Settle it, learn from it, and give its slot to the next."""
        placement, now = self._queued.pop(job.id), self.fleet.now
        self.dispatcher.finished(placement, now, job.prompt.tokens - job.cached, job.output)
        self.knowledge.ended(job)
        self._match()

    def wake(self) -> None:
        """Give free slots to waiting requests."""
        self._match()

    def _refresh_cached(self, queued: QueuedRequest) -> None:
        """Look up anew what is cached of a request that has waited."""
        found = self.knowledge.look_up(self.fleet.jobs[int(queued.id)])
        queued.set_cached(queued.prompt_tokens, found.cached, found.pending)

    def _match(self) -> None:
        for placement in self.dispatcher.match(self.fleet.now):
            self._send(placement)
        self._set_alarm()

    def _send(self, placement: QueuedRequest) -> None:
        job = self.fleet.jobs[int(placement.id)]
        self.fleet.send(job, placement.row.index)
        self.knowledge.placed(job)

    def _set_alarm(self) -> None:
        self.alarm = max(self.dispatcher.wake_at, self.fleet.now + LEAST_ALARM_DELAY)


AUTOSCALER_TICK = 1.0  # seconds between two looks at the load


class AutoscalingFront(GatewayFront):
    """A gateway with standby machines: those that are not loaded at first.

    A standby machine works `startup` seconds after its start, with empty caches.
    """

    def __init__(
        self,
        fleet: SimulatedFleet,
        rules: ElasticSettings,
        startup: float,
        seed: int,
        knowledge: Knowledge,
    ) -> None:
        super().__init__(fleet, seed, knowledge)
        self.starts = 0
        self._rules = rules
        self._startup = startup
        self._policy = AutoscalingPolicy()
        self._tick = 0.0
        self._standby = {
            row.index: Lifecycle(LifecyclePhase.OFF)
            for row in self.state.rows
            if row.index not in fleet.loaded
        }
        self._seconds = 0.0  # that they ran, in all, up to the last stop of each

    @property
    def standby_seconds(self) -> float:
        """Seconds that standby machines ran, in all."""
        return self._seconds + sum(
            max(0.0, self.fleet.ended - one.started_at)
            for one in self._standby.values()
            if one.phase is not LifecyclePhase.OFF
        )

    def wake(self) -> None:
        """Start and stop machines once a tick, and give free slots to waiting requests."""
        if self.fleet.now >= self._tick:
            self._tick = self.fleet.now + AUTOSCALER_TICK
            self._scale(self.fleet.now)
        super().wake()

    def _scale(self, now: float) -> None:
        for index, one in self._standby.items():
            starting = one.phase is LifecyclePhase.STARTING
            if starting and now >= one.started_at + self._startup:
                self._enter(index, LifecyclePhase.ON, now)
        for action in self._policy.decide(
            self._standby_nodes(), self._demands(now), self._rules, now
        ):
            index = int(action.name)
            one = self._standby[index]
            if action.verb == "start":
                one.start(action.reason, now)
                self.starts += 1
            elif action.verb == "retire":
                self._enter(index, LifecyclePhase.RETIRING, now)
            elif action.verb == "keep":
                self._enter(index, LifecyclePhase.ON, now)
            else:
                one.enter(LifecyclePhase.STOPPING, action.reason, now)
                one.enter(LifecyclePhase.OFF, action.reason, now)
                self._seconds += now - one.started_at
                self.fleet.servers[index].restart()
                self.knowledge.restarted(index)

    def _enter(self, index: int, phase: LifecyclePhase, now: float) -> None:
        self._standby[index].enter(phase, "", now)
        row, works = self.state.rows[index], phase is LifecyclePhase.ON
        row.set_slots(row.total, row.total if works else 0, 0, alive=works)

    def _standby_nodes(self) -> list[StandbyNode]:
        rows = self.state.rows
        slots = sum(row.capacity for row in rows)
        busy = sum(row.ours for row in rows if row.capacity)
        nodes = []
        for index, one in self._standby.items():
            row = rows[index]
            others = (slots - row.capacity, busy - (row.ours if row.capacity else 0))
            times = one.started_at, one.stopped_at
            nodes.append(StandbyNode(str(index), one.phase, row.total, row.ours, others, *times))
        return nodes

    def _demands(self, now: float) -> list[WaitingDemand]:
        dispatcher = self.dispatcher
        if not dispatcher.waiting:
            return []
        wait = max(
            max(wait, now - queued.received_at) for queued, wait in dispatcher.predicted_waits(now)
        )
        slots = sum(row.total for row in self.state.rows if row.alive)
        return [WaitingDemand(frozenset(map(str, self._standby)), wait, slots)]

    def _set_alarm(self) -> None:
        super()._set_alarm()
        phases = Counter(one.phase for one in self._standby.values())
        starting = phases[LifecyclePhase.STARTING]
        changing = starting or phases[LifecyclePhase.RETIRING]
        serving = starting + phases[LifecyclePhase.ON]
        if changing or serving != self._rules.min or self.dispatcher.waiting:
            self._tick = max(self._tick, self.fleet.now + LEAST_ALARM_DELAY)
            self.alarm = min(self.alarm, self._tick)


class LeastConn(Front):
    """Sends to the server with the fewest connections, ties in turn: one proxy or the other.

    It is nginx's `least_conn`, which sends at once: requests beyond a node's slots wait inside the
    node, and can't be moved any more. `capped`: it is HAProxy's `leastconn` with a `maxconn` of
    each node's slots, which lets the rest wait, first in, first out.
    """

    def __init__(self, fleet: SimulatedFleet, *, capped: bool = False) -> None:
        super().__init__(fleet)
        self._most = [one.slots if capped else math.inf for one in fleet.machines]
        self._connections = [0] * len(fleet.machines)
        self._ranks: list[float] = [0] * len(fleet.machines)  # connections; infinity: it is full
        self._queue: deque[Job] = deque()
        self._turn = 0

    def arrive(self, job: Job) -> None:
        """Send it, or queue it while every server is full."""
        least = min(self._ranks)
        if least == math.inf:
            self._queue.append(job)
            return
        start = self._turn if least in self._ranks[self._turn :] else 0
        node = self._ranks.index(least, start)
        self._turn = node + 1
        self._count(node, 1)
        self.fleet.send(job, node)

    def ended(self, job: Job) -> None:
        """Give the room to the oldest of the queue."""
        if self._queue:
            self.fleet.send(self._queue.popleft(), job.node)
        else:
            self._count(job.node, -1)

    def _count(self, node: int, more: int) -> None:
        count = self._connections[node] = self._connections[node] + more
        self._ranks[node] = math.inf if count >= self._most[node] else count


class FewestConnections(Front):
    """A proxy that knows which nodes have which models, and takes the one with fewest requests."""

    fleet: RouterFleet

    def __init__(self, fleet: RouterFleet) -> None:
        super().__init__(fleet)
        self._connections = [0] * len(fleet.nodes)

    def arrive(self, job: Job) -> None:
        """Send it at once."""
        able = [one for one in self.fleet.able(job.model) if one in self.fleet.loaded]
        node = min(able, key=lambda one: self._connections[self.fleet.routers[one]])
        self._connections[self.fleet.routers[node]] += 1
        self.fleet.send(job, node)

    def ended(self, job: Job) -> None:
        """Count it off."""
        self._connections[self.fleet.routers[job.node]] -= 1


class LeastRecentlyUsed(Front):
    """Fewest connections over all nodes; each router loads by itself.

    For a model that it lacks a router unloads those of its host that were used least recently.
    llama.cpp's does so amid their requests; here they end first, while later ones for them wait.
    """

    fleet: RouterFleet

    def __init__(self, fleet: RouterFleet) -> None:
        super().__init__(fleet)
        self._connections = [0] * len(fleet.nodes)
        self._turn = 0
        self._waiting: list[deque[tuple[Job, int]]] = [deque() for _ in fleet.nodes]
        """Of each node, with the instance that each job is for."""
        self._last_used: dict[int, float] = {}  # by instance: of those loaded, or being loaded
        self._retiring: set[int] = set()
        """Those that take no jobs any more, until they are unloaded."""
        self._memory = fleet.host_memory

    def arrive(self, job: Job) -> None:
        """Choose its node."""
        fleet = self.fleet
        able = {
            fleet.routers[one]: one
            for one in fleet.able(job.model)
            if one in fleet.loaded or fleet.model_of(one).memory <= self._memory[fleet.host_of(one)]
        }
        nodes = len(self._connections)
        node = min(able, key=lambda one: (self._connections[one], (one - self._turn) % nodes))
        self._turn = node + 1
        self._connections[node] += 1
        self._waiting[node].append((job, able[node]))
        self._serve(node)

    def ended(self, job: Job) -> None:
        """What waits for its memory may go on."""
        node = self.fleet.routers[job.node]
        self._connections[node] -= 1
        self._serve(node)

    def wake(self) -> None:
        """Loads and unloads have ended."""
        for index, _ in self.fleet.end_loads():
            self._retiring.discard(index)
            own, host = self.fleet.routers[index], self.fleet.host_of(index)
            # First what waits for it, else a neighbour would have it unloaded before its first use.
            self._serve(own)
            for node, other in enumerate(self.fleet.hosts):
                if other == host and node != own:
                    self._serve(node)

    def _serve(self, node: int) -> None:
        """Send what can be sent, and make room for the rest in the order of their arrival."""
        fleet, waiting, host = self.fleet, self._waiting[node], self.fleet.hosts[node]
        needed: list[int] = []
        for _ in range(len(waiting)):
            job, index = waiting.popleft()
            if index in fleet.loaded and index not in self._retiring:
                self._last_used[index] = fleet.now
                fleet.send(job, index)
            else:
                waiting.append((job, index))
                loading = index in fleet.held and index not in self._retiring
                if index not in needed and not loading:
                    needed.append(index)
        for index in needed:
            if fleet.fits(index):
                self._last_used[index] = fleet.now
                fleet.load(index)
        lacking = next((one for one in needed if one not in fleet.held), None)
        if lacking is not None:
            self._make_room(host, fleet.model_of(lacking).memory)
        for index in sorted(self._retiring):
            if index in fleet.loaded and fleet.servers[index].next_end < 0:
                fleet.unload(index)
        self.alarm = fleet.next_load_end

    def _make_room(self, host: str, memory: int) -> None:
        """Retire those used least recently until so much memory will be free."""
        fleet = self.fleet
        held = [index for index in fleet.held if fleet.host_of(index) == host]
        leaving = sum(fleet.model_of(index).memory for index in held if index in self._retiring)
        short = memory - fleet.free[host] - leaving
        ready = [index for index in held if index in fleet.loaded and index not in self._retiring]
        for index in sorted(ready, key=lambda index: self._last_used.get(index, 0.0)):
            if short <= 0:
                break
            self._retiring.add(index)
            short -= fleet.model_of(index).memory


# Seconds between two looks at what waits, and at least, where the first did not reach all of it.
PLACE_SECONDS, LEAST_PAUSE = 0.5, 0.02
USUAL_SECONDS = 10.0  # of a request for a model that has answered none
LEARNT_OF = 16  # answers of which the mean of a model's requests is
REFRESH_SECONDS = 5.0  # seconds after which the policy is told of what was learnt


class ModelPlacingFront(GatewayFront):
    """The gateway with its own model placement. Loads and memory are known; speeds are learnt."""

    fleet: RouterFleet

    def __init__(
        self,
        fleet: RouterFleet,
        seed: int = 0,
        knowledge: Knowledge = ExactKnowledge,
        placement: ModelPlacementPolicy | None = None,
    ) -> None:
        super().__init__(fleet, seed, knowledge)
        self.policy = placement or ModelPlacementPolicy()
        self._shown: dict[int, Instance] = {}  # as the policy knows them
        self._last_used = [-math.inf] * len(fleet.machines)
        self._waiting: dict[str, dict[int, Job]] = {model.name: {} for model in fleet.models}
        self._seconds: dict[str, float] = {}  # by model: a usual request's
        self._look_at = math.inf
        self._refreshed_at = -math.inf
        self._instances: dict[tuple[str, str], int] = {}
        memory = fleet.host_memory
        for node, host in zip(fleet.nodes, fleet.hosts, strict=True):
            if node.memory:
                self.policy.fleet.put_node(RouterNode(node.name, host, memory[host]))
        for index, one in enumerate(fleet.instances):
            if (model := one.model) is not None:
                name, slots = fleet.nodes[one.router].name, one.machine.slots
                self._instances[name, model.name] = index
                self._shown[index] = Instance(
                    name,
                    model.name,
                    memory=model.memory,
                    load_seconds=model.load_seconds,
                    slots=slots,
                )
                self._enter(index, LoadPhase.UNLOADED, -math.inf)

    def arrive(self, job: Job) -> None:
        """Place or queue the request; where it must wait, see what to load for it."""
        if job.priority_label != "batch":
            self.policy.rates.note(job.model, self.fleet.now)
        super().arrive(job)
        if job.model not in self._waiting:
            return  # Plain servers alone have it.
        if job.model not in self._seconds:
            able = self.fleet.able(job.model)
            queued, row = self._queued[job.id], self.state.rows[able[0]]
            seconds = queued.prompt_tokens / row.prefill_tps
            self._seconds[job.model] = seconds + queued.completion_tokens * row.token_base
        if job.sent < 0:
            self._waiting[job.model][job.id] = job
            self._look()
        self._set_alarm()

    def ended(self, job: Job) -> None:
        """Learn from it, and see what its slot is for."""
        self._last_used[job.node] = self.fleet.now
        seconds = self._seconds.get(job.model, job.ended - job.sent)
        self._seconds[job.model] = seconds + (job.ended - job.sent - seconds) / LEARNT_OF
        super().ended(job)
        if self._look_at < math.inf:
            self._look()
        self._set_alarm()

    def wake(self) -> None:
        """Loads and unloads have ended, or it is time for a look."""
        for index, loaded in self.fleet.end_loads():
            self._enter(index, LoadPhase.READY if loaded else LoadPhase.UNLOADED, self.fleet.now)
            self._look_at = self.fleet.now
        super().wake()
        if self.fleet.now >= self._look_at:
            self._look()
        self._set_alarm()

    def _send(self, placement: QueuedRequest) -> None:
        super()._send(placement)
        job = self.fleet.jobs[int(placement.id)]
        self._last_used[job.node] = self.fleet.now
        self._waiting.get(job.model, {}).pop(job.id, None)

    def _look(self) -> None:
        now = self.fleet.now
        if now - self._refreshed_at >= REFRESH_SECONDS:
            self._refreshed_at = now
            for index, one in self._shown.items():
                if one.phase is not LoadPhase.UNLOADED:
                    self._show(index, one)
        for action in self.policy.decide(self._demands(now), self._usage, now):
            index = self._instances[action.node, action.model]
            if action.verb == "load":
                self._enter(index, LoadPhase.LOADING, now)
                self.fleet.load(index)
            elif action.verb == "retire":
                self._enter(index, LoadPhase.RETIRING, now)
            elif action.verb == "keep":
                self._enter(index, LoadPhase.READY, now)
                self._match()
            else:
                self._enter(index, LoadPhase.UNLOADING, now)
                self.fleet.unload(index)
                self.knowledge.restarted(index)
        waits = any(self._waiting.values()) or self.policy.plans
        pause = LEAST_PAUSE if self.policy.left else PLACE_SECONDS
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

    def _usage(self, instance: Instance) -> InstanceUsage:
        index, now = self._instances[instance.node, instance.model], self.fleet.now
        row = self.state.rows[index]
        busy = max((one.seconds_left(now) for one in row.running), default=0.0)
        return InstanceUsage(row.ours, busy, self._last_used[index])

    def _enter(self, index: int, phase: LoadPhase, now: float) -> None:
        row = self.state.rows[index]
        capacity = row.total if phase is LoadPhase.READY else 0
        row.set_slots(row.total, capacity, 0, alive=True)
        self._show(index, replace(self._shown[index], phase=phase, since=now))

    def _show(self, index: int, one: Instance) -> None:
        """Show the policy an instance, with what was learnt of its model's requests."""
        seconds = self._seconds.get(one.model, USUAL_SECONDS)
        self._shown[index] = shown = replace(one, request_seconds=seconds)
        self.policy.fleet.put(shown)

    def _set_alarm(self) -> None:
        super()._set_alarm()
        self.alarm = min(self.alarm, self.fleet.next_load_end, self._look_at)
