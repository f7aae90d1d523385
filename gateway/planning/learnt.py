"""What the gateway really knows: speeds, lengths and caches as its own code learns them.

The same classes as in the running gateway take in what a node would have told: `timings` as
llama.cpp counts them, `cached_tokens`, `usage`. A prompt is fingerprinted in blocks of as many
tokens as the gateway's blocks have in the mean.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from gateway.fleet.memory import Memory, Prompt
from gateway.fleet.occupancy import Occupancy
from gateway.fleet.speed import Speed, weigh
from gateway.fleet.timings import Seen
from gateway.planning.job import Job
from gateway.planning.knowledge import Known
from gateway.planning.machine import Machine
from gateway.planning.simulation import Fleet
from gateway.scheduling.board import Board
from gateway.scheduling.estimates import Estimates

if TYPE_CHECKING:
    from gateway.fleet.node import Node

BYTES_PER_TOKEN = 4
BLOCK = 128
"""Tokens of a block of the fingerprint: 512 bytes (`relay/fingerprint.py`)."""
WEIGHED_EVERY = 10.0
"""Seconds between two comparisons of the nodes, while some are not measured."""
MOST_STREAMS = 30_000
"""Conversations whose fingerprint is kept; a client would send the whole text again."""
MODEL = "model"


class _Stand:
    """As much of a node as `weigh` looks at."""

    public_models = frozenset({MODEL})

    class _Spec:
        tier = "cpu"
        speed_hint = 1.0

    def __init__(self) -> None:
        self.spec = self._Spec()
        self.speed = Speed()


class _Memo:
    """What is kept of a request beside it."""

    __slots__ = ("fingerprint", "reader_seconds", "readers", "slot_seconds")

    def __init__(self, fingerprint: Prompt) -> None:
        self.fingerprint = fingerprint
        self.slot_seconds = 0.0
        self.reader_seconds = 0.0
        self.readers = 1.0


class Learnt:
    """Learns as the gateway does, from nothing."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.estimates = Estimates()
        self._board = Board()
        self._stands: list[_Stand] = []
        self._occupancies: list[Occupancy] = []
        self._slots: list[int] = []
        self._unmeasured = 0
        self._weighed = 0.0
        # The blocks of each conversation, and where each of them ends.
        self._said: OrderedDict[int, tuple[tuple[int, ...], tuple[int, ...]]] = OrderedDict()

    def begin(self, machines: Sequence[Machine], board: Board) -> None:
        """Every node has the first guess of a speed."""
        self._board = board
        self._stands = [_Stand() for _ in machines]
        self._occupancies = [Occupancy() for _ in machines]
        self._slots = [machine.slots for machine in machines]
        self._unmeasured = len(machines)
        for machine, row in zip(machines, board.rows, strict=True):
            self.memory.resize(row.index, machine.slots)
        self._tell_all()

    def of(self, job: Job, fleet: Fleet) -> Known:
        """What to expect of it by now."""
        fingerprint = self._fingerprint(job)
        text = job.prompt.tokens * BYTES_PER_TOKEN
        tokens, completion = self.estimates.ask_sizes(MODEL, job.caller, text, job.limit)
        fingerprint.tokens = tokens
        affinity = fingerprint.blocks[0]
        known = Known(tokens, completion, {}, affinity=affinity, memo=_Memo(fingerprint))
        self.recall(job, known, fleet)
        return known

    def recall(self, job: Job, known: Known, fleet: Fleet) -> None:
        """What is believed by now."""
        memo: _Memo = known.memo
        recall = self.memory.recall(memo.fingerprint)
        known.prompt = recall.tokens
        known.cached, known.coming = recall.cached, recall.coming

    def placed(self, job: Job, known: Known, now: float) -> None:
        """Count it, and believe it where it goes."""
        memo: _Memo = known.memo
        self.memory.placed(job.node, memo.fingerprint)
        occupancy = self._occupancies[job.node]
        occupancy.take(1, now, reads=True)
        memo.slot_seconds = occupancy.slot_seconds
        memo.reader_seconds = occupancy.reader_seconds

    def began(self, job: Job, known: Known, now: float) -> None:
        """Its prompt has been read."""
        memo: _Memo = known.memo
        occupancy = self._occupancies[job.node]
        occupancy.has_read(now)
        read = now - job.sent
        memo.readers = (occupancy.reader_seconds - memo.reader_seconds) / read if read else 1.0
        memo.slot_seconds = occupancy.slot_seconds
        memo.reader_seconds = occupancy.reader_seconds

    def ended(self, job: Job, known: Known, now: float) -> None:
        """Learn from its figures."""
        memo: _Memo = known.memo
        node = job.node
        occupancy = self._occupancies[node]
        occupancy.give_back(1, now)
        wrote = now - job.first
        busy = (occupancy.slot_seconds - memo.slot_seconds) / wrote if wrote else 1.0
        stalled = min(wrote, occupancy.reader_seconds - memo.reader_seconds)
        timings = {
            "cache_n": job.cached,
            "prompt_n": job.prompt.tokens - job.cached,
            "prompt_ms": (job.first - job.began) * 1000,
            "predicted_n": job.output,
            "predicted_ms": wrote * 1000,
        }
        seen = Seen(now - job.sent, job.first - job.sent, busy, stalled, memo.readers)
        self._learn_speed(node, timings, seen, now)
        prompt = job.prompt.tokens
        text = prompt * BYTES_PER_TOKEN
        self.estimates.learn(MODEL, job.caller, text, prompt, job.output, job.limit)
        self.memory.finished(node, memo.fingerprint, prompt, job.cached, job.output)

    def restarted(self, node: int) -> None:
        """What it had cached is gone; its speed is not."""
        self.memory.forget(node)
        self.memory.resize(node, self._slots[node])

    def _learn_speed(
        self, node: int, timings: Mapping[str, object], seen: Seen, now: float
    ) -> None:
        speed = self._stands[node].speed
        fresh = speed.prefill_tps is None or speed.decode_tps is None
        speed.learn(timings, seen)
        if fresh and speed.prefill_tps is not None and speed.decode_tps is not None:
            self._unmeasured -= 1
            fresh = False
            if not self._unmeasured:
                self._tell_all()
        if self._unmeasured and now >= self._weighed + WEIGHED_EVERY:
            self._weighed = now
            self._tell_all()
        row = self._board.rows[node]
        self._board.set_speed(row, speed.reading, speed.token_base, speed.token_step)

    def _tell_all(self) -> None:
        """Compare the nodes: those not measured are taken to be as fast as the others."""
        weigh(cast("list[Node]", self._stands))
        for stand, row in zip(self._stands, self._board.rows, strict=True):
            speed = stand.speed
            self._board.set_speed(row, speed.reading, speed.token_base, speed.token_step)

    def _fingerprint(self, job: Job) -> Prompt:
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
        return Prompt(
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
        at = min(at + BLOCK, tokens)
        last = hash((last, text, at))
        blocks.append(last)
        ends.append(at)
