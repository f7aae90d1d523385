"""What the simulated gateway knows when it places a request: everything, or what it has learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.planning.job import Job, in_common
from gateway.planning.machine import Machine
from gateway.planning.simulation import Fleet
from gateway.scheduling.board import Board
from gateway.scheduling.dispatch import Placement

UNKNOWN = 256
"""Tokens expected of an answer of unknown length."""


@dataclass(slots=True)
class Known:
    """What is known of one request, and where it is."""

    prompt: float
    """Expected prompt tokens."""
    completion: float
    """Expected tokens of the answer."""
    cached: Mapping[int, float]
    """Tokens believed cached, by row."""
    coming: Mapping[int, float] = field(default_factory=dict)
    """Tokens believed to be cached there when what runs has ended, by row."""
    affinity: int = 0
    """What it shares with its like, hashed."""
    placement: Placement | None = None
    memo: Any = None
    """Whatever the source keeps beside it."""


class Knowledge(Protocol):
    """Where the numbers of an ask and of a row come from."""

    def begin(self, machines: Sequence[Machine], board: Board) -> None:
        """The board has a row for each machine, by its place: tell it the speeds."""

    def of(self, job: Job, fleet: Fleet) -> Known:
        """What to expect of a request that has come."""

    def recall(self, job: Job, known: Known, fleet: Fleet) -> None:
        """It has waited: look again what is cached of it, and write it into `known`."""

    def placed(self, job: Job, known: Known, now: float) -> None:
        """It goes to the node of `known.placement`."""

    def began(self, job: Job, known: Known, now: float) -> None:
        """Its first token is there."""

    def ended(self, job: Job, known: Known, now: float) -> None:
        """It has ended there, with figures as llama.cpp tells them."""

    def restarted(self, node: int) -> None:
        """That node has been stopped: its caches are gone."""


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

    def of(self, job: Job, fleet: Fleet) -> Known:
        """The truth."""
        prompt = job.prompt
        completion = job.output if self._lengths else min(job.limit or UNKNOWN, UNKNOWN)
        known = Known(prompt.tokens, completion, {}, affinity=prompt.head or prompt.stream)
        self.recall(job, known, fleet)
        return known

    def recall(self, job: Job, known: Known, fleet: Fleet) -> None:
        """The truth of now."""
        if not self._caches:
            return
        prompt = job.prompt
        cached: dict[int, float] = {}
        coming: dict[int, float] = {}
        for node in self._seen.get(prompt.stream, set()) | self._seen.get(-prompt.head, set()):
            server = fleet.servers[node]
            # What a busy slot held is being written over.
            idle = [
                held
                for held, job in zip(server.cache.held, server.slots, strict=True)
                if job is None
            ]
            kept = (*idle, *server.cache.evicted)
            if held := max((in_common(one, prompt) for one in kept), default=0):
                cached[node] = held
            running = [one.whole for one in server.slots if one is not None]
            if will := max((in_common(one, prompt) for one in running), default=0):
                coming[node] = will
        known.cached, known.coming = cached, coming

    def placed(self, job: Job, known: Known, now: float) -> None:
        """Remember where to look."""
        self._seen.setdefault(job.prompt.stream, set()).add(job.node)
        if job.prompt.head:
            self._seen.setdefault(-job.prompt.head, set()).add(job.node)

    def began(self, job: Job, known: Known, now: float) -> None:
        """Nothing is left to learn."""

    def ended(self, job: Job, known: Known, now: float) -> None:
        """Nothing is left to learn."""

    def restarted(self, node: int) -> None:
        """It looks into the caches anyway."""
