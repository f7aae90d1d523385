"""What the simulated gateway knows when it places a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gateway.planning.job import Job, in_common
from gateway.planning.machine import Machine
from gateway.planning.simulation import Fleet
from gateway.scheduling.board import Board
from gateway.scheduling.dispatch import Placement


class Knowledge(Protocol):
    """Where the numbers of an ask and of a row come from."""

    def begin(self, machines: Sequence[Machine], board: Board) -> None:
        """The board has a row for each machine, by its place: tell it the speeds."""

    def of(self, job: Job, fleet: Fleet) -> tuple[float, float, Mapping[int, float]]:
        """Expected prompt tokens, tokens of the answer, and tokens cached by row."""

    def placed(self, job: Job, placement: Placement) -> None:
        """It goes to that row."""

    def learn(self, job: Job, placement: Placement, fleet: Fleet) -> None:
        """It has ended there: everything about it is known."""


class Exact:
    """Knows everything: speeds, lengths, and what every node has cached.

    What learning costs is the distance to this. It looks into every node where a prompt may be
    cached, so it is for fleets of some dozens of nodes.
    """

    def __init__(self, *, lengths: bool = True, caches: bool = True) -> None:
        self._lengths = lengths
        self._caches = caches
        # Where a stream, or what it begins with, has been: the nodes worth looking into.
        self._seen: dict[int, set[int]] = {}

    def begin(self, machines: Sequence[Machine], board: Board) -> None:
        """Tell the board the speeds as they are."""
        for machine, row in zip(machines, board.rows, strict=True):
            board.set_speed(row, machine.prefill, machine.token_base, machine.token_step)

    def of(self, job: Job, fleet: Fleet) -> tuple[float, float, Mapping[int, float]]:
        """The truth."""
        prompt = job.prompt
        completion = job.output if self._lengths else min(job.limit, 256)
        cached: dict[int, float] = {}
        if self._caches:
            nodes = self._seen.get(prompt.stream, set()) | self._seen.get(-prompt.head, set())
            for node in nodes:
                cache = fleet.servers[node].cache
                held = max(in_common(one, prompt) for one in (*cache.held, *cache.evicted))
                if held:
                    cached[node] = held
        return prompt.tokens, completion, cached

    def placed(self, job: Job, placement: Placement) -> None:
        """Remember where to look."""
        node = placement.row.index
        self._seen.setdefault(job.prompt.stream, set()).add(node)
        if job.prompt.head:
            self._seen.setdefault(-job.prompt.head, set()).add(node)

    def learn(self, job: Job, placement: Placement, fleet: Fleet) -> None:
        """Nothing is left to learn."""
