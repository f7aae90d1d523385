"""What the simulated gateway knows when it places a request: everything, or what it has learnt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from gateway.fleet.node import Node
from gateway.fleet.prompt_cache import FleetPromptCache, PromptKey
from gateway.fleet.slot_occupancy import SlotOccupancy
from gateway.fleet.speed import ObservedTiming, Speed, compare_speeds
from gateway.scheduling.placement_state import Placement, PlacementState
from gateway.scheduling.token_estimates import TokenEstimates
from gateway.tools.simulate.server import SimulatedMachine
from gateway.tools.simulate.simulation import SimulatedFleet
from gateway.tools.simulate.trace import Job, common_tokens

UNKNOWN_COMPLETION_TOKENS = 256
"""Tokens expected of an answer of unknown length."""


@dataclass(slots=True)
class ExpectedRequest:
    """What is known of one request, and where it is."""

    prompt_tokens: float
    """Expected prompt tokens."""
    completion_tokens: float
    """Expected tokens of the answer."""
    cached: Mapping[int, float]
    """Tokens believed cached, by row."""
    pending: Mapping[int, float] = field(default_factory=dict)
    """Tokens believed to be cached there when what runs has ended, by row."""
    affinity_hash: int = 0
    """What it shares with its like, hashed."""
    placement: Placement | None = None
    source_data: Any = None
    """Whatever the source keeps beside it."""


class Knowledge(Protocol):
    """Where the numbers of an ask and of a row come from."""

    def start(self, machines: Sequence[SimulatedMachine], placement_state: PlacementState) -> None:
        """The board has a row for each machine, by its place: tell it the speeds."""

    def expect(self, job: Job, fleet: SimulatedFleet) -> ExpectedRequest:
        """What to expect of a request that has come."""

    def refresh_cached(self, job: Job, expected: ExpectedRequest, fleet: SimulatedFleet) -> None:
        """It has waited: look again what is cached of it, and write it into `known`."""

    def placed(self, job: Job, expected: ExpectedRequest, now: float) -> None:
        """It goes to the node of `known.placement`."""

    def prefill_done(self, job: Job, expected: ExpectedRequest, now: float) -> None:
        """Its first token is there."""

    def ended(self, job: Job, expected: ExpectedRequest, now: float) -> None:
        """It has ended there, with figures as llama.cpp tells them."""

    def restarted(self, node: int) -> None:
        """That node has been stopped: its caches are gone."""


class ExactKnowledge:
    """Knows everything: speeds, lengths, and what every node has cached.

    What learning costs is the distance to this. It looks into every node where a prompt may be
    cached, so it is for fleets of some dozens of nodes.
    """

    def __init__(self, *, lengths: bool = True, caches: bool = True) -> None:
        self._lengths = lengths
        self._caches = caches
        # Where a stream, or what it begins with, has been: the nodes worth looking into.
        self._seen: dict[int, set[int]] = {}

    def start(self, machines: Sequence[SimulatedMachine], placement_state: PlacementState) -> None:
        """Tell the board the speeds as they are."""
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
        known = ExpectedRequest(
            prompt.tokens, completion, {}, affinity_hash=prompt.prefix or prompt.stream
        )
        self.refresh_cached(job, known, fleet)
        return known

    def refresh_cached(self, job: Job, expected: ExpectedRequest, fleet: SimulatedFleet) -> None:
        """The truth of now."""
        if not self._caches:
            return
        prompt = job.prompt
        cached: dict[int, float] = {}
        coming: dict[int, float] = {}
        for node in self._seen.get(prompt.stream, set()) | self._seen.get(-prompt.prefix, set()):
            server = fleet.servers[node]
            # What a busy slot held is being written over.
            idle = [
                held
                for held, job in zip(server.cache.slot_prompts, server.slots, strict=True)
                if job is None
            ]
            kept = (*idle, *server.cache.host_prompts)
            if held := max((common_tokens(one, prompt) for one in kept), default=0):
                cached[node] = held
            running = [one.final_prompt for one in server.slots if one is not None]
            if will := max((common_tokens(one, prompt) for one in running), default=0):
                coming[node] = will
        expected.cached, expected.pending = cached, coming

    def placed(self, job: Job, expected: ExpectedRequest, now: float) -> None:
        """Remember where to look."""
        self._seen.setdefault(job.prompt.stream, set()).add(job.node)
        if job.prompt.prefix:
            self._seen.setdefault(-job.prompt.prefix, set()).add(job.node)

    def prefill_done(self, job: Job, expected: ExpectedRequest, now: float) -> None:
        """Nothing is left to learn."""

    def ended(self, job: Job, expected: ExpectedRequest, now: float) -> None:
        """Nothing is left to learn."""

    def restarted(self, node: int) -> None:
        """It looks into the caches anyway."""


BYTES_PER_TOKEN = 4

BLOCK_TOKENS = 128
"""Tokens of a block of the fingerprint: 512 bytes (`proxy/inbound/prompt_key.py`)."""

COMPARE_NODES_EVERY = 10.0
"""Seconds between two comparisons of the nodes, while some are not measured."""

MOST_STREAMS = 30_000
"""Conversations whose fingerprint is kept; a client would send the whole text again."""

SIMULATED_MODEL = "model"


class _NodeStub:
    """As much of a node as `weigh` looks at."""

    public_models = frozenset({SIMULATED_MODEL})

    class _Spec:
        tier = "cpu"
        speed_hint = 1.0

    def __init__(self) -> None:
        self.spec = self._Spec()
        self.speed = Speed()


class _Measured:
    """What is kept of a request beside it."""

    __slots__ = ("fingerprint", "reader_seconds", "readers", "slot_seconds")

    def __init__(self, fingerprint: PromptKey) -> None:
        self.fingerprint = fingerprint
        self.slot_seconds = 0.0
        self.reader_seconds = 0.0
        self.readers = 1.0


class LearntKnowledge:
    """Learns as the gateway does, from nothing."""

    def __init__(self) -> None:
        self.prompt_cache = FleetPromptCache()
        self.token_estimates = TokenEstimates()
        self._board = PlacementState()
        self._stands: list[_NodeStub] = []
        self._occupancies: list[SlotOccupancy] = []
        self._slots: list[int] = []
        self._unmeasured = 0
        self._weighed = 0.0
        # The blocks of each conversation, and where each of them ends.
        self._said: OrderedDict[int, tuple[tuple[int, ...], tuple[int, ...]]] = OrderedDict()

    def start(self, machines: Sequence[SimulatedMachine], placement_state: PlacementState) -> None:
        """Every node has the first guess of a speed."""
        self._board = placement_state
        self._stands = [_NodeStub() for _ in machines]
        self._occupancies = [SlotOccupancy() for _ in machines]
        self._slots = [machine.slots for machine in machines]
        self._unmeasured = len(machines)
        for machine, row in zip(machines, placement_state.rows, strict=True):
            self.prompt_cache.resize(row.index, machine.slots)
        self._tell_all()

    def expect(self, job: Job, fleet: SimulatedFleet) -> ExpectedRequest:
        """What to expect of it by now."""
        fingerprint = self._fingerprint(job)
        text = job.prompt.tokens * BYTES_PER_TOKEN
        tokens, completion = self.token_estimates.expected_tokens(
            SIMULATED_MODEL, job.caller, text, job.max_tokens
        )
        fingerprint.tokens = tokens
        affinity = fingerprint.blocks[0]
        known = ExpectedRequest(
            tokens, completion, {}, affinity_hash=affinity, source_data=_Measured(fingerprint)
        )
        self.refresh_cached(job, known, fleet)
        return known

    def refresh_cached(self, job: Job, expected: ExpectedRequest, fleet: SimulatedFleet) -> None:
        """What is believed by now."""
        memo: _Measured = expected.source_data
        recall = self.prompt_cache.lookup(memo.fingerprint)
        expected.prompt_tokens = recall.tokens
        expected.cached, expected.pending = recall.cached, recall.pending

    def placed(self, job: Job, expected: ExpectedRequest, now: float) -> None:
        """Count it, and believe it where it goes."""
        memo: _Measured = expected.source_data
        self.prompt_cache.request_placed(job.node, memo.fingerprint)
        occupancy = self._occupancies[job.node]
        occupancy.take(1, now, prefilling=True)
        memo.slot_seconds = occupancy.slot_seconds
        memo.reader_seconds = occupancy.prefill_seconds

    def prefill_done(self, job: Job, expected: ExpectedRequest, now: float) -> None:
        """Its prompt has been read."""
        memo: _Measured = expected.source_data
        occupancy = self._occupancies[job.node]
        occupancy.prefill_done(now)
        read = now - job.sent
        memo.readers = (occupancy.prefill_seconds - memo.reader_seconds) / read if read else 1.0
        memo.slot_seconds = occupancy.slot_seconds
        memo.reader_seconds = occupancy.prefill_seconds

    def ended(self, job: Job, expected: ExpectedRequest, now: float) -> None:
        """Learn from its figures."""
        memo: _Measured = expected.source_data
        node = job.node
        occupancy = self._occupancies[node]
        occupancy.release(1, now)
        wrote = now - job.first
        busy = (occupancy.slot_seconds - memo.slot_seconds) / wrote if wrote else 1.0
        stalled = min(wrote, occupancy.prefill_seconds - memo.reader_seconds)
        timings = {
            "cache_n": job.cached,
            "prompt_n": job.prompt.tokens - job.cached,
            "prompt_ms": (job.first - job.began) * 1000,
            "predicted_n": job.output,
            "predicted_ms": wrote * 1000,
        }
        seen = ObservedTiming(now - job.sent, job.first - job.sent, busy, stalled, memo.readers)
        self._learn_speed(node, timings, seen, now)
        prompt = job.prompt.tokens
        text = prompt * BYTES_PER_TOKEN
        self.token_estimates.learn(
            SIMULATED_MODEL, job.caller, text, prompt, job.output, job.max_tokens
        )
        self.prompt_cache.request_finished(node, memo.fingerprint, prompt, job.cached, job.output)

    def restarted(self, node: int) -> None:
        """What it had cached is gone; its speed is not."""
        self.prompt_cache.forget_node(node)
        self.prompt_cache.resize(node, self._slots[node])

    def _learn_speed(
        self, node: int, timings: Mapping[str, object], seen: ObservedTiming, now: float
    ) -> None:
        speed = self._stands[node].speed
        fresh = speed.prefill_tps is None or speed.decode_tps is None
        speed.learn_timings(timings, seen)
        if fresh and speed.prefill_tps is not None and speed.decode_tps is not None:
            self._unmeasured -= 1
            fresh = False
            if not self._unmeasured:
                self._tell_all()
        if self._unmeasured and now >= self._weighed + COMPARE_NODES_EVERY:
            self._weighed = now
            self._tell_all()
        row = self._board.rows[node]
        self._board.set_speed(row, speed.expected_prefill_tps, speed.token_base, speed.token_step)

    def _tell_all(self) -> None:
        """Compare the nodes: those not measured are taken to be as fast as the others."""
        compare_speeds(cast("list[Node]", self._stands))
        for stand, row in zip(self._stands, self._board.rows, strict=True):
            speed = stand.speed
            self._board.set_speed(
                row, speed.expected_prefill_tps, speed.token_base, speed.token_step
            )

    def _fingerprint(self, job: Job) -> PromptKey:
        """The prompt in blocks: a new one begins where a turn or an answer does."""
        stream, tokens, head, shared = job.prompt
        blocks: list[int]
        ends: list[int]
        if stream in self._said:
            known, known_ends = self._said.pop(stream)
            blocks, ends = list(known), list(known_ends)
            while ends and ends[-1] > tokens:
                blocks.pop()
                ends.pop()
        else:
            blocks, ends = [], []
            if head:
                _extend(blocks, ends, -head, min(shared, tokens))
        _extend(blocks, ends, stream, tokens)
        prompt, places = tuple(blocks), tuple(ends)
        # What it answers stands in the next turn's prompt, and ends where a block does.
        _extend(blocks, ends, stream, tokens + job.output)
        self._said[stream] = tuple(blocks), tuple(ends)
        if len(self._said) > MOST_STREAMS:
            self._said.popitem(last=False)
        return PromptKey(
            prompt,
            float(tokens),
            tuple([end * BYTES_PER_TOKEN for end in places]),
            tokens * BYTES_PER_TOKEN,
        )


def _extend(blocks: list[int], ends: list[int], text: int, tokens: int) -> None:
    """Add blocks of one text until so many tokens are covered."""
    at = ends[-1] if ends else 0
    last = blocks[-1] if blocks else 0
    while at < tokens:
        at = min(at + BLOCK_TOKENS, tokens)
        last = hash((last, text, at))
        blocks.append(last)
        ends.append(at)
