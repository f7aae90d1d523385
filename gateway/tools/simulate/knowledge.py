"""What the simulated gateway knows when it places a request: the truth, or what it has learnt."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from gateway.fleet.calibration import (
    LOOK_SECONDS,
    READ_WORDS,
    WARM_UP_TOKENS,
    WARM_UP_WORDS,
    WRITE_TOKENS,
    due,
)
from gateway.fleet.fleet import COMPARE_SPEEDS_EVERY
from gateway.fleet.node import MOST_CALIBRATIONS, CalibrationRecord, Node, SlotOccupancy
from gateway.fleet.prompt_cache import FleetPromptCache
from gateway.fleet.speed import ObservedTiming, Speed, compare_speeds
from gateway.lease import PromptKey
from gateway.scheduling.candidates import show_speed
from gateway.scheduling.demand_model import TokenEstimates
from gateway.scheduling.placement_state import NodeSlots, Placement, PlacementState
from gateway.tools.simulate.server import SimulatedMachine
from gateway.tools.simulate.simulation import SimulatedFleet
from gateway.tools.simulate.trace import Job, common_tokens

UNKNOWN_COMPLETION_TOKENS = 256
"""Tokens expected of an answer of unknown length."""


@dataclass(slots=True)
class ExpectedRequest:
    """What is known of one request, and its placement."""

    prompt_tokens: float
    """Expected prompt tokens."""
    completion_tokens: float
    """Expected tokens of the answer."""
    cached: Mapping[int, float]
    """Prompt tokens believed cached, by row index."""
    pending: Mapping[int, float] = field(default_factory=dict)
    """Prompt tokens believed to be cached once what runs there has ended, by row index."""
    affinity_hash: int = 0
    """Hash of the prompt's shared beginning."""
    placement: Placement | None = None

    def place(self, placement: Placement) -> None:
        """It has this placement."""
        self.placement = placement

    def set_cached(
        self, prompt_tokens: float, cached: Mapping[int, float], pending: Mapping[int, float]
    ) -> None:
        """Replace what is believed of its prompt."""
        self.prompt_tokens, self.cached, self.pending = prompt_tokens, cached, pending


class Knowledge(Protocol):
    """Where the figures of requests and of rows come from."""

    def start(self, machines: Sequence[SimulatedMachine], placement_state: PlacementState) -> None:
        """Set the speeds of the rows; each machine has the row of its index."""

    def expect(self, job: Job, fleet: SimulatedFleet) -> ExpectedRequest:
        """What to expect of a request that has arrived."""

    def refresh_cached(self, job: Job, expected: ExpectedRequest, fleet: SimulatedFleet) -> None:
        """It has waited: look up anew what is cached of it."""

    def placed(self, job: Job, expected: ExpectedRequest, now: float) -> None:
        """It goes to the node of `expected.placement`."""

    def prefill_done(self, job: Job, expected: ExpectedRequest, now: float) -> None:
        """Its first token has come."""

    def ended(self, job: Job, expected: ExpectedRequest, now: float) -> None:
        """It has ended; the job has the figures that llama.cpp reports."""

    def restarted(self, node: int) -> None:
        """That node was stopped: its caches are gone."""


class ExactKnowledge:
    """Knows the truth: speeds, lengths, and what every node has cached.

    The difference of results to `LearntKnowledge` is the cost of learning. It looks into every node
    where a prompt may be cached, so it is for fleets of some dozens of nodes.
    """

    def __init__(self, *, lengths: bool = True, caches: bool = True) -> None:
        self._lengths = lengths
        self._caches = caches
        # By stream, or minus prefix: the nodes where a prompt of it may be cached.
        self._nodes_by_text: dict[int, set[int]] = {}

    def start(self, machines: Sequence[SimulatedMachine], placement_state: PlacementState) -> None:
        """Set the real speeds."""
        for machine, row in zip(machines, placement_state.rows, strict=True):
            placement_state.set_speed(
                row, machine.prefill_tps, machine.token_base, machine.token_step
            )

    def expect(self, job: Job, fleet: SimulatedFleet) -> ExpectedRequest:
        """The truth."""
        prompt = job.prompt
        completion = (
            job.output
            if self._lengths
            else min(job.max_tokens or UNKNOWN_COMPLETION_TOKENS, UNKNOWN_COMPLETION_TOKENS)
        )
        expected = ExpectedRequest(
            prompt.tokens, completion, {}, affinity_hash=prompt.prefix or prompt.stream
        )
        self.refresh_cached(job, expected, fleet)
        return expected

    def refresh_cached(self, job: Job, expected: ExpectedRequest, fleet: SimulatedFleet) -> None:
        """What is cached now."""
        if not self._caches:
            return
        prompt = job.prompt
        cached: dict[int, float] = {}
        pending: dict[int, float] = {}
        nodes = self._nodes_by_text
        for node in nodes.get(prompt.stream, set()) | nodes.get(-prompt.prefix, set()):
            server = fleet.servers[node]
            # A busy slot's old prompt is being overwritten.
            idle = [
                held
                for held, job in zip(server.cache.slot_prompts, server.slots, strict=True)
                if job is None
            ]
            prompts = (*idle, *server.cache.host_prompts)
            if held := max((common_tokens(one, prompt) for one in prompts), default=0):
                cached[node] = held
            running = [one.final_prompt for one in server.slots if one is not None]
            if tokens := max((common_tokens(one, prompt) for one in running), default=0):
                pending[node] = tokens
        expected.set_cached(expected.prompt_tokens, cached, pending)

    def placed(self, job: Job, expected: ExpectedRequest, now: float) -> None:
        """Remember where to look."""
        self._nodes_by_text.setdefault(job.prompt.stream, set()).add(job.node)
        if job.prompt.prefix:
            self._nodes_by_text.setdefault(-job.prompt.prefix, set()).add(job.node)

    def prefill_done(self, job: Job, expected: ExpectedRequest, now: float) -> None:
        """Nothing to learn."""

    def ended(self, job: Job, expected: ExpectedRequest, now: float) -> None:
        """Nothing to learn."""

    def restarted(self, node: int) -> None:
        """Nothing to forget: the caches are looked into."""


BYTES_PER_TOKEN = 4

BLOCK_TOKENS = 128
"""Tokens of a prompt key's block: 512 bytes (`proxy/inbound/prompt_key.py`)."""

MOST_STREAMS = 30_000
"""Conversations whose blocks are kept; a client would send the whole text again."""

SIMULATED_MODEL = "model"

_Numbers = tuple[int, ...]


class _NodeStub:
    """As much of a node as `compare_speeds` and the choice of those to calibrate read."""

    public_models = frozenset({SIMULATED_MODEL})

    class _Spec:
        tier = "cpu"
        kind = "llama.cpp"
        written_hint = None

    def __init__(self, machine: SimulatedMachine, row: NodeSlots) -> None:
        self.spec = self._Spec()
        self.speed = Speed()
        self.machine = machine
        self.row = row
        self.host = machine.host or machine.name
        self.calibration = CalibrationRecord()
        self.calibrated_at = math.inf
        """When the calibration that runs has shown the speed; infinity: none runs."""

    def calibration_due(self, now: float) -> bool:
        """Whether it is idle and its speed unknown."""
        return not (
            self.speed.samples
            or self.speed.calibrated
            or now < self.calibration.due_at
            or self.calibration.tries >= MOST_CALIBRATIONS
            or self.row.ours
            or not (self.row.capacity and self.machine.calibrated)
        )

    def begin_calibration(self, now: float) -> None:
        """It reads and writes as much as the gateway's two requests do."""
        machine = self.machine
        read = (WARM_UP_WORDS + READ_WORDS) / machine.prefill_tps
        self.calibrated_at = now + read + (WARM_UP_TOKENS + WRITE_TOKENS) * machine.token_base

    def end_calibration(self, now: float, *, given_up: bool) -> None:
        """It has ended: its speed is known, unless a request took the slot."""
        if not given_up:
            read, wrote = READ_WORDS / self.machine.prefill_tps, self.machine.token_base
            wrote *= WRITE_TOKENS - 1
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
                self.speed.learn_timings(
                    _timings(WARM_TOKENS, read, WARM_TOKENS, wrote),
                    ObservedTiming(read + wrote, read, busy),
                )


WARM_ANSWERS, WARM_TOKENS = 8, 512
"""Answers for each number of busy slots that a gateway which starts warm has learnt from, and the
tokens read and written for each."""


def _timings(read: int, read_s: float, wrote: int, wrote_s: float) -> dict[str, object]:
    """What llama.cpp reports of so many tokens and seconds."""
    return {
        "prompt_n": read,
        "prompt_ms": read_s * 1000,
        "predicted_n": wrote,
        "predicted_ms": wrote_s * 1000,
    }


class _Measured:
    """A running request: its prompt key, and its node's occupancy since the last event."""

    __slots__ = ("mean_prefills", "prefill_seconds", "prompt_key", "slot_seconds")

    def __init__(self, prompt_key: PromptKey) -> None:
        self.prompt_key = prompt_key
        self.slot_seconds = 0.0
        self.prefill_seconds = 0.0
        self.mean_prefills = 1.0

    def note(self, occupancy: SlotOccupancy) -> None:
        """Measure from now on."""
        self.slot_seconds = occupancy.slot_seconds
        self.prefill_seconds = occupancy.prefill_seconds

    def prefill_done(self, occupancy: SlotOccupancy, seconds: float) -> None:
        """Its prompt was read in `seconds`; measure its decoding from now on."""
        prefills = occupancy.prefill_seconds - self.prefill_seconds
        self.mean_prefills = prefills / seconds if seconds else 1.0
        self.note(occupancy)


class LearntKnowledge:
    """Learns as the gateway does: of speeds from nothing (`warm`: it knows them), else too.

    Idle nodes are calibrated. Their slots are free meanwhile, and a request ends it.
    """

    def __init__(self, *, warm: bool = False) -> None:
        self._warm = warm
        self.prompt_cache = FleetPromptCache()
        self.token_estimates = TokenEstimates()
        self._state = PlacementState()
        self._stubs: list[_NodeStub] = []
        self._occupancies: list[SlotOccupancy] = []
        self._slots: list[int] = []
        self._compared_at = 0.0
        self._looked_at: float | None = None
        """When calibrations were last begun."""
        self._unknown: list[_NodeStub] = []
        """Those that may have to be calibrated."""
        self._measured: dict[int, _Measured] = {}
        """By the id of each job that has arrived and not ended."""
        # By conversation: its blocks, and where each of them ends.
        self._blocks_by_stream: OrderedDict[int, tuple[_Numbers, _Numbers]] = OrderedDict()

    def start(self, machines: Sequence[SimulatedMachine], placement_state: PlacementState) -> None:
        """Every node has the default speed, or its own."""
        self._state = placement_state
        self._stubs = [
            _NodeStub(machine, row)
            for machine, row in zip(machines, placement_state.rows, strict=True)
        ]
        self._occupancies = [SlotOccupancy() for _ in machines]
        self._slots = [machine.slots for machine in machines]
        if self._warm:
            for stub in self._stubs:
                stub.know_speed()
        else:
            self._unknown = list(self._stubs)
        for machine, row in zip(machines, placement_state.rows, strict=True):
            self.prompt_cache.resize(row.index, machine.slots)
        self._set_all_speeds(0.0)

    def expect(self, job: Job, fleet: SimulatedFleet) -> ExpectedRequest:
        """What to expect of it, by what was learnt so far."""
        if self._unknown:
            self._calibrate(fleet.now)
        text = job.prompt.tokens * BYTES_PER_TOKEN
        tokens, completion = self.token_estimates.expected_tokens(
            SIMULATED_MODEL, job.caller, text, job.max_tokens
        )
        prompt_key = self._prompt_key(job, tokens)
        affinity = prompt_key.blocks[0]
        expected = ExpectedRequest(tokens, completion, {}, affinity_hash=affinity)
        self._measured[job.id] = _Measured(prompt_key)
        self.refresh_cached(job, expected, fleet)
        return expected

    def refresh_cached(self, job: Job, expected: ExpectedRequest, fleet: SimulatedFleet) -> None:
        """What is believed to be cached now."""
        measured = self._measured[job.id]
        found = self.prompt_cache.lookup(measured.prompt_key)
        expected.set_cached(found.tokens, found.cached, found.pending)

    def placed(self, job: Job, expected: ExpectedRequest, now: float) -> None:
        """Count it on its node, and expect its prompt to be cached there."""
        measured = self._measured[job.id]
        self.prompt_cache.request_placed(job.node, measured.prompt_key)
        occupancy = self._occupancies[job.node]
        occupancy.take(1, now, prefilling=True)
        measured.note(occupancy)
        stub = self._stubs[job.node]
        if stub.calibrated_at < math.inf:
            stub.end_calibration(now, given_up=True)

    def prefill_done(self, job: Job, expected: ExpectedRequest, now: float) -> None:
        """Its prompt has been read."""
        measured = self._measured[job.id]
        occupancy = self._occupancies[job.node]
        occupancy.prefill_done(now)
        read = now - job.sent
        measured.prefill_done(occupancy, read)

    def ended(self, job: Job, expected: ExpectedRequest, now: float) -> None:
        """Learn from its figures."""
        measured = self._measured.pop(job.id)
        node = job.node
        occupancy = self._occupancies[node]
        occupancy.release(1, now)
        wrote = now - job.first
        busy = (occupancy.slot_seconds - measured.slot_seconds) / wrote if wrote else 1.0
        stalled = min(wrote, occupancy.prefill_seconds - measured.prefill_seconds)
        unread = job.prompt.tokens - job.cached
        timings = _timings(unread, job.first - job.began, job.output, wrote)
        timings["cache_n"] = job.cached
        seen = ObservedTiming(
            now - job.sent, job.first - job.sent, busy, stalled, measured.mean_prefills
        )
        self._learn_speed(node, timings, seen, now)
        prompt = job.prompt.tokens
        text = prompt * BYTES_PER_TOKEN
        self.token_estimates.learn(
            SIMULATED_MODEL, job.caller, text, prompt, job.output, job.max_tokens
        )
        self.prompt_cache.request_finished(
            node, measured.prompt_key, prompt, job.cached, job.output
        )

    def restarted(self, node: int) -> None:
        """Forget what it had cached, but not its speed."""
        self.prompt_cache.forget_node(node)
        self.prompt_cache.resize(node, self._slots[node])

    def _learn_speed(
        self, node: int, timings: Mapping[str, object], seen: ObservedTiming, now: float
    ) -> None:
        self._stubs[node].speed.learn_timings(timings, seen)
        if self._state.exploring and now >= self._compared_at + COMPARE_SPEEDS_EVERY:
            self._set_all_speeds(now)
        else:
            show_speed(self._state, self._state.rows[node], self._stubs[node].speed)

    def _calibrate(self, now: float) -> None:
        """Take in the calibrations that have ended by now, in their order, and begin others."""
        at = now if self._looked_at is None else self._looked_at
        if 0 < now - at < LOOK_SECONDS:
            return
        self._looked_at = now
        self._unknown = [stub for stub in self._unknown if not stub.speed.samples]
        running = [stub for stub in self._unknown if stub.calibrated_at < math.inf]
        ended = False
        while True:
            for stub in due(self._unknown, running, at):
                stub.begin_calibration(at)
                running.append(stub)
            if not running:
                break
            first = min(running, key=lambda stub: stub.calibrated_at)
            if first.calibrated_at > now:
                break
            at = first.calibrated_at
            first.end_calibration(at, given_up=False)
            running.remove(first)
            self._unknown.remove(first)
            ended = True
        if ended:
            self._set_all_speeds(now)

    def _set_all_speeds(self, now: float) -> None:
        """Compare the nodes' speeds: those not measured are taken to be as fast as the best."""
        self._compared_at = now
        compare_speeds(cast("list[Node]", self._stubs))
        for stub, row in zip(self._stubs, self._state.rows, strict=True):
            awaited = stub.calibrated_at < math.inf or stub.calibration_due(now)
            show_speed(self._state, row, stub.speed, awaited=awaited)

    def _prompt_key(self, job: Job, expected_tokens: float) -> PromptKey:
        """The prompt in blocks; a new block begins where a turn or an answer does."""
        stream, tokens, prefix, shared = job.prompt
        blocks: list[int]
        ends: list[int]
        if stream in self._blocks_by_stream:
            expected, known_ends = self._blocks_by_stream.pop(stream)
            blocks, ends = list(expected), list(known_ends)
            while ends and ends[-1] > tokens:
                blocks.pop()
                ends.pop()
        else:
            blocks, ends = [], []
            if prefix:
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
