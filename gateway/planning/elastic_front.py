"""The gateway as a front whose standby machines are started and stopped by the very policy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.fleet.power import Phase
from gateway.planning.gateway_front import SOONEST, GatewayFront
from gateway.planning.job import Job
from gateway.planning.machine import Machine
from gateway.planning.prompt_cache import PromptCache
from gateway.planning.simulation import Fleet
from gateway.scheduling.elastic import Demand, Policy, Rules, Unit

TICK = 1.0
"""Seconds between two looks at the load."""


class _Standby:
    """One standby machine."""

    __slots__ = ("name", "phase", "place", "ready_at", "seconds", "slots", "started", "stopped")

    def __init__(self, place: int, machine: Machine) -> None:
        self.place = place
        self.name = str(place)
        self.slots = machine.slots
        self.phase = Phase.OFF
        self.started = self.stopped = -math.inf
        self.ready_at = math.inf
        self.seconds = 0.0
        """In which it ran, up to its last stop."""


class ElasticFront:
    """Wraps a gateway; the machines from place `base` on are standby machines.

    One takes `startup` seconds from its start to work, and comes with empty caches.
    """

    def __init__(
        self,
        gateway: GatewayFront,
        machines: Sequence[Machine],
        base: int,
        rules: Rules,
        startup: float,
    ) -> None:
        self.alarm = math.inf
        self.starts = 0
        self._gateway = gateway
        self._machines = machines
        self._base = base
        self._rules = rules
        self._startup = startup
        self._policy = Policy()
        self._tick = 0.0
        self._standby = [
            _Standby(place, machine) for place, machine in enumerate(machines) if place >= base
        ]
        self._by_name = {one.name: one for one in self._standby}
        self._names = frozenset(self._by_name)
        for one in self._standby:
            self._open(one, works=False)

    def standby_seconds(self, until: float) -> float:
        """Seconds in which standby machines ran, in all."""
        return sum(
            one.seconds + (0.0 if one.phase is Phase.OFF else max(0.0, until - one.started))
            for one in self._standby
        )

    # What happens.

    def arrive(self, job: Job, fleet: Fleet) -> None:
        """Hand it to the gateway."""
        self._gateway.arrive(job, fleet)
        self._set_alarm(fleet.now)

    def started(self, job: Job, fleet: Fleet) -> None:
        """Its first token came."""
        self._gateway.started(job, fleet)

    def ended(self, job: Job, fleet: Fleet) -> None:
        """Its slot is free."""
        self._gateway.ended(job, fleet)
        self._set_alarm(fleet.now)

    def wake(self, fleet: Fleet) -> None:
        """Look at the load, or let the gateway look at what it holds back."""
        now = fleet.now
        if now >= self._tick:
            self._tick = now + TICK
            self._look(fleet)
        self._gateway.wake(fleet)
        self._set_alarm(now)

    # One look.

    def _look(self, fleet: Fleet) -> None:
        now = fleet.now
        for one in self._standby:
            if one.phase is Phase.STARTING and now >= one.ready_at:
                one.phase = Phase.ON
                self._open(one, works=True)
        for action in self._policy.decide(self._units(), self._demands(now), self._rules, now):
            one = self._by_name[action.name]
            if action.verb == "start":
                one.phase, one.started, one.ready_at = Phase.STARTING, now, now + self._startup
                self.starts += 1
            elif action.verb == "retire":
                one.phase = Phase.RETIRING
                self._open(one, works=False)
            elif action.verb == "keep":
                one.phase = Phase.ON
                self._open(one, works=True)
            else:
                one.phase, one.stopped = Phase.OFF, now
                one.seconds += now - one.started
                machine = self._machines[one.place]
                cache = PromptCache(machine.slots, machine.cache_tokens)
                fleet.servers[one.place].cache = cache
                self._gateway.knowledge.restarted(one.place)

    def _units(self) -> list[Unit]:
        rows = self._gateway.board.rows
        slots = sum(row.capacity for row in rows)
        busy = sum(row.ours for row in rows if row.capacity)
        units = []
        for one in self._standby:
            row = rows[one.place]
            others = (slots - row.capacity, busy - (row.ours if row.capacity else 0))
            units.append(
                Unit(one.name, one.phase, one.slots, row.ours, others, one.started, one.stopped)
            )
        return units

    def _demands(self, now: float) -> list[Demand]:
        dispatcher = self._gateway.dispatcher
        if not dispatcher.waiting:
            return []
        wait = max(max(wait, now - ask.entered) for ask, wait in dispatcher.places(now))
        slots = sum(row.total for row in self._gateway.board.rows if row.alive)
        return [Demand(self._names, wait, slots)]

    def _open(self, one: _Standby, *, works: bool) -> None:
        board = self._gateway.board
        board.set_slots(board.rows[one.place], one.slots, one.slots if works else 0, 0, alive=works)

    def _set_alarm(self, now: float) -> None:
        serving = sum(one.phase in {Phase.STARTING, Phase.ON} for one in self._standby)
        changing = any(one.phase in {Phase.STARTING, Phase.RETIRING} for one in self._standby)
        rules = self._rules
        if not (changing or serving != rules.min or self._gateway.dispatcher.waiting):
            self.alarm = self._gateway.alarm
            return
        self._tick = max(self._tick, now + SOONEST)
        self.alarm = min(self._gateway.alarm, self._tick)
