"""A dispatcher over made-up nodes, played through events at times that the test gives."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

from gateway.schedule.core.dispatcher import Dispatcher, DispatchRules
from gateway.schedule.core.requests import NodeSlots, PlacementState, QueuedRequest, TierSets
from gateway.terms import Priority

_numbers = itertools.count(1)


@dataclass
class QueueSimulation:
    """Nodes and a dispatcher. Every request takes as long as predicted, unless a test says else."""

    slots: tuple[int, ...] = (2, 2)
    rules: DispatchRules = field(default_factory=DispatchRules)
    seed: int = 0
    speeds: tuple[float, ...] = ()
    """Prompt tokens/s; output tokens come at a tenth of it."""
    state: PlacementState = field(default_factory=PlacementState)
    running: list[QueuedRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        speeds = self.speeds or (100.0,) * len(self.slots)
        self.rows: list[NodeSlots] = []
        for i, (slots, speed) in enumerate(zip(self.slots, speeds, strict=True)):
            self.rows.append(self.state.add(f"node-{i}", total=slots))
            self.rows[i].set_speed(speed, 10.0 / speed, 0.0)
        self.candidates = self.state.candidate_set(self.rows)
        self.groups: tuple[TierSets, ...] = ((self.candidates,),)
        self.dispatcher = Dispatcher(self.state, self.rules, random.Random(self.seed))

    def request(self, **options: Any) -> QueuedRequest:
        """A request; by default of class normal, for all nodes."""
        values: dict[str, Any] = {
            "id": str(next(_numbers)),
            "groups": self.groups,
            "priority": Priority.NORMAL,
            "fairness_key": "somebody",
            "received_at": 0.0,
            "prompt_tokens": 100.0,
            "completion_tokens": 10.0,
        }
        return QueuedRequest(**values | options)

    def arrive(
        self, now: float = 0.0, **options: Any
    ) -> tuple[QueuedRequest, QueuedRequest | None]:
        """A request arrives: it is placed, or queued."""
        queued = self.request(**{"received_at": now} | options)
        placement = self.dispatcher.place_or_queue(queued, now)
        if placement is not None:
            self.running.append(placement)
        return queued, placement

    def placed(self, now: float = 0.0, **options: Any) -> QueuedRequest:
        """A request arrives that must be placed at once."""
        _, placement = self.arrive(now, **options)
        assert placement is not None
        return placement

    def fill(self, now: float = 0.0, **options: Any) -> list[QueuedRequest]:
        """Take every free slot."""
        placements = []
        while self.state.free_rows:
            placements.append(self.placed(now, **options))
        return placements

    def finish(self, placement: QueuedRequest, now: float) -> list[QueuedRequest]:
        """End a placement with the tokens that were expected, and give out what is free."""
        self.running.remove(placement)
        read = placement.prompt_tokens - placement.cached.get(placement.row.index, 0.0)
        self.dispatcher.finished(placement, now, read, placement.completion_tokens)
        return self.match(now)

    def match(self, now: float) -> list[QueuedRequest]:
        """Give free slots to waiting requests."""
        placements = self.dispatcher.match(now)
        self.running += placements
        return placements

    def waiting(self, now: float = 0.0) -> list[QueuedRequest]:
        """Every request that waits."""
        return [queued for queued, _ in self.dispatcher.predicted_waits(now)]
