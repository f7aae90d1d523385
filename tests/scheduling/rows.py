"""Boards, asks and a small loop of events for the tests of the core."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

from gateway.request import Priority
from gateway.scheduling.dispatcher import Dispatcher, Placement
from gateway.scheduling.matching import DispatchRules
from gateway.scheduling.placement_state import NodeSlots, PlacementState, QueuedRequest, TierSets

_numbers = itertools.count(1)


@dataclass
class Desk:
    """A board of nodes and a dispatcher, played with times that the test gives."""

    slots: tuple[int, ...] = (2, 2)
    rules: DispatchRules = field(default_factory=DispatchRules)
    seed: int = 0
    speeds: tuple[float, ...] = ()
    """Prompt tokens/s; tokens are written at a tenth of it."""
    board: PlacementState = field(default_factory=PlacementState)
    running: list[Placement] = field(default_factory=list)

    def __post_init__(self) -> None:
        speeds = self.speeds or (100.0,) * len(self.slots)
        self.rows: list[NodeSlots] = [
            self.board.add(f"node-{i}", total=slots, prefill_tps=speed, token_base=10.0 / speed)
            for i, (slots, speed) in enumerate(zip(self.slots, speeds, strict=True))
        ]
        self.pool = self.board.candidate_set(self.rows)
        self.groups: tuple[TierSets, ...] = ((self.pool,),)
        self.dispatcher = Dispatcher(self.board, self.rules, random.Random(self.seed))

    def ask(self, **options: Any) -> QueuedRequest:
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

    def arrive(self, now: float = 0.0, **options: Any) -> tuple[QueuedRequest, Placement | None]:
        ask = self.ask(**{"received_at": now} | options)
        placement = self.dispatcher.place_or_queue(ask, now)
        if placement is not None:
            self.running.append(placement)
        return ask, placement

    def fill(self, now: float = 0.0, **options: Any) -> list[Placement]:
        """Takes every slot."""
        placements = []
        while self.board.free_rows:
            _, placement = self.arrive(now, **options)
            assert placement is not None
            placements.append(placement)
        return placements

    def finish(self, placement: Placement, now: float) -> list[Placement]:
        """Ends it as it was expected to be, and gives out what is free."""
        ask = placement.queued
        self.running.remove(placement)
        cached = ask.cached.get(placement.row.index, 0.0)
        self.dispatcher.finished(placement, now, ask.prompt_tokens, cached, ask.completion_tokens)
        return self.match(now)

    def match(self, now: float) -> list[Placement]:
        placements = self.dispatcher.match(now)
        self.running += placements
        return placements

    def play(
        self,
        arrivals: list[tuple[float, QueuedRequest]],
        *,
        until: float = 1e9,
        lengths: float = 1.0,
    ) -> dict[QueuedRequest, Placement]:
        """Plays arrivals to their end; everything takes `lengths` of what is expected."""
        placed: dict[QueuedRequest, Placement] = {}
        ends: list[tuple[float, int, Placement]] = []
        waiting = sorted(((at, i, ask) for i, (at, ask) in enumerate(arrivals)), reverse=True)

        def note(placements: list[Placement], now: float) -> None:
            for one in placements:
                placed[one.queued] = one
                heapq.heappush(ends, (now + (one.ends - now) * lengths, id(one), one))

        for _ in range(1_000_000):
            wake = self.dispatcher.wake_at(0.0)
            times = [waiting[-1][0] if waiting else 1e9, ends[0][0] if ends else 1e9, wake or 1e9]
            now = min(times)
            if now >= until:
                break
            if now == times[0]:
                ask = waiting.pop()[2]
                placement = self.dispatcher.place_or_queue(ask, now)
                if placement is not None:
                    self.running.append(placement)
                    note([placement], now)
            elif now == times[1]:
                note(self.finish(heapq.heappop(ends)[2], now), now)
            else:
                note(self.match(now), now)
        else:
            raise AssertionError("it never ends")
        return placed
