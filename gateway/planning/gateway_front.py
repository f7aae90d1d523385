"""The gateway itself as a front: the very dispatcher, policies and queue that it runs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from gateway.planning.job import Job
from gateway.planning.knowledge import Exact, Knowledge, Known
from gateway.planning.machine import Machine
from gateway.planning.simulation import Fleet
from gateway.request import Priority
from gateway.scheduling.ask import Ask
from gateway.scheduling.board import Board
from gateway.scheduling.dispatch import Dispatcher, LineRules, Placement

SOONEST = 1e-3
"""Seconds until an alarm at the earliest: a clock that stood still would ring for ever."""

PRIORITIES = {priority.label: priority for priority in Priority}


class GatewayFront:
    """Runs the gateway's dispatcher over simulated nodes.

    `knowledge` says what it may know of speeds, lengths and caches. Raises KeyError for a policy
    that does not exist.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        rules: LineRules | None = None,
        seed: int = 0,
        knowledge: Knowledge | None = None,
    ) -> None:
        self.alarm = math.inf
        self.board = Board()
        self.dispatcher = Dispatcher(self.board, rules or LineRules(), random.Random(seed))
        self.knowledge: Knowledge = knowledge or Exact()
        for machine in machines:
            self.board.add(machine.name, total=machine.slots)
        self.knowledge.begin(machines, self.board)
        self._fleet: Fleet | None = None
        self.dispatcher.recall = self._recall
        self._groups = ((self.board.pool(self.board.rows),),)

    def arrive(self, job: Job, fleet: Fleet) -> None:
        """Ask the dispatcher for a slot, with what is known of the request."""
        now = fleet.now
        self._fleet = fleet
        known = self.knowledge.of(job, fleet)
        job.front = known
        ask = Ask(
            str(job.id),
            self._groups,
            PRIORITIES[job.klass],
            job.caller,
            now,
            prompt=known.prompt,
            completion=known.completion,
            cached=known.cached,
            coming=known.coming,
            affinity=known.affinity,
        )
        placement = self.dispatcher.arrive(ask, now)
        if placement is not None:
            self._send(placement, fleet)
        self._set_alarm(now)

    def started(self, job: Job, fleet: Fleet) -> None:
        """Its first token came."""
        known: Known = job.front
        assert known.placement is not None
        self.dispatcher.began(known.placement, fleet.now)
        self.knowledge.began(job, known, fleet.now)

    def ended(self, job: Job, fleet: Fleet) -> None:
        """Settle it, learn from it, and see who is next."""
        known: Known = job.front
        assert known.placement is not None
        now = fleet.now
        self.dispatcher.finished(known.placement, now, job.prompt.tokens, job.cached, job.output)
        self.knowledge.ended(job, known, now)
        job.front = None
        self._match(fleet)

    def wake(self, fleet: Fleet) -> None:
        """See who may go now."""
        self._match(fleet)

    def _recall(self, ask: Ask) -> None:
        """It has waited: what is cached of it may have changed."""
        assert self._fleet is not None
        job = self._fleet.jobs[int(ask.id)]
        known: Known = job.front
        self.knowledge.recall(job, known, self._fleet)
        ask.cached, ask.coming = known.cached, known.coming

    def _match(self, fleet: Fleet) -> None:
        for placement in self.dispatcher.match(fleet.now):
            self._send(placement, fleet)
        self._set_alarm(fleet.now)

    def _send(self, placement: Placement, fleet: Fleet) -> None:
        job = fleet.jobs[int(placement.ask.id)]
        known: Known = job.front
        known.placement = placement
        fleet.send(job, placement.row.index)
        self.knowledge.placed(job, known, fleet.now)

    def _set_alarm(self, now: float) -> None:
        wake = self.dispatcher.wake_at(now)
        self.alarm = math.inf if wake is None else max(wake, now + SOONEST)
