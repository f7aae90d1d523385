"""The owner of the standby nodes: looks at the load, and runs the hooks that the policy orders."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway import errors
from gateway.events import Bus, HookEnded
from gateway.fleet.fleet import Fleet
from gateway.fleet.hooks import run_hook
from gateway.fleet.node import Node
from gateway.fleet.power import Phase
from gateway.fleet.probes import read_slots
from gateway.scheduling.elastic import Action, Demand, Policy, Rules, Unit
from gateway.scheduling.eligible import Able, Eligible
from gateway.scheduling.mirror import is_alive
from gateway.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from gateway.config.elastic import ElasticSettings, Hook
    from gateway.config.settings import Settings
    from gateway.request import Request

log = logging.getLogger(__name__)

TICK = 0.5
"""Seconds between two looks at the load."""

OFF = "standby: it does not run"


def rules_of(settings: ElasticSettings) -> Rules:
    """The policy's part of the settings."""
    return Rules(
        settings.start_above,
        settings.start_after,
        settings.stop_after,
        settings.min,
        settings.max,
        settings.cooldown,
    )


@dataclass(slots=True, eq=False)
class Standby:
    """Starts and stops the standby nodes of a fleet. `run` owns every task and ends them."""

    fleet: Fleet
    scheduler: Scheduler
    settings: Settings
    bus: Bus
    clock: Callable[[], float]
    policy: Policy = field(default_factory=Policy)
    _work: dict[Node, asyncio.Task[None]] = field(default_factory=dict)
    """The hook that runs for a node, or the look before it."""
    _eligible: Eligible = field(init=False)
    _released: bool = False

    def __post_init__(self) -> None:
        self._eligible = Eligible(self.fleet.catalogue, self.scheduler.mirror)

    async def run(self) -> None:
        """Until it is cancelled. The nodes stay as they are; a hook that runs is ended."""
        try:
            while True:
                self._look()
                await asyncio.sleep(TICK)
        finally:
            for task in self._work.values():
                task.cancel()
            await asyncio.gather(*self._work.values(), return_exceptions=True)

    def release(self) -> None:
        """Order nothing any more: a successor looks after the nodes now."""
        self._released = True

    # One look.

    def _look(self) -> None:
        nodes = [node for node in self.fleet.nodes.values() if node.spec.enabled]
        standby = [node for node in nodes if node.spec.elastic]
        if not standby or self._released:
            return
        now = self.clock()
        for node in standby:
            self._follow(node, now)
        units = self._units(nodes, standby)
        rules = rules_of(self.settings.elastic)
        actions = self.policy.decide(units, self._demands(), rules, now)
        for action in actions:
            self._obey(self.fleet.nodes[action.name], action, now)
        running = sum(node.power.phase is not Phase.OFF for node in standby)
        for node in standby:
            node.power.barred = rules.max is not None and running >= rules.max

    def _follow(self, node: Node, now: float) -> None:
        """Take in what the probes have found, and what is due after a failure."""
        power, probing = node.power, node.probing
        if node in self._work:
            return
        if power.phase is Phase.STOPPING:
            if now >= power.retry_at:
                self._begin(node, self._stop(node, power.reason))
        elif probing.up and power.phase in {Phase.UNKNOWN, Phase.OFF, Phase.STARTING}:
            if power.phase is Phase.STARTING:
                power.startup = now - power.since
            power.failures = 0
            power.enter(Phase.ON, "it runs", now)
            self.fleet.switched(node)
        elif power.phase is Phase.UNKNOWN and probing.loading:
            power.enter(Phase.STARTING, "found loading its model", now)
        elif power.phase is Phase.UNKNOWN and probing.down:
            self._off(node, OFF, now)
        elif power.phase is Phase.STARTING:
            self._expect(node, power.since, "it took no work", now)
        elif power.phase is Phase.ON:
            if not probing.down:
                power.down_since = None
            elif power.down_since is None:
                power.down_since = now
            elif not node.leases:
                self._expect(node, power.down_since, "it was down", now)

    def _expect(self, node: Node, since: float, what: str, now: float) -> None:
        """Give a node up that does not come, or does not come back."""
        settings = self.settings.elastic
        if now - since >= settings.ready_timeout and not node.draining:
            node.power.failed(now, settings.backoff, settings.backoff_max)
            self._begin(node, self._stop(node, f"{what} for {settings.ready_timeout:g} s"))

    def _obey(self, node: Node, action: Action, now: float) -> None:
        power = node.power
        if action.verb == "start":
            power.started = now
            power.enter(Phase.STARTING, f"being started: {action.why}", now)
            self.fleet.switched(node, anew=True)
            self._begin(node, self._start(node))
        elif action.verb == "retire":
            why = f"{action.why}: it ends what it runs and is stopped then"
            power.enter(Phase.RETIRING, why, now)
            self.fleet.switched(node)
        elif action.verb == "keep":
            power.enter(Phase.ON, action.why, now)
            self.fleet.switched(node)
        elif not (node in self._work or node.leases or node.draining):
            self._begin(node, self._stop_idle(node))

    # What the policy looks at.

    def _units(self, nodes: Iterable[Node], standby: Iterable[Node]) -> list[Unit]:
        slots: dict[str, float] = {}
        busy: dict[str, float] = {}
        now = self.clock()
        for node in nodes:
            if capacity := node.capacity(now):
                for model in node.public_models:
                    slots[model] = slots.get(model, 0) + capacity
                    busy[model] = busy.get(model, 0) + node.slots_busy
        units = []
        for node in standby:
            power, own = node.power, node.capacity(now)
            mine = node.slots_busy if own else 0
            others = min(
                ((slots.get(m, 0) - own, busy.get(m, 0) - mine) for m in node.public_models),
                key=lambda pair: pair[0] - pair[1],
                default=(0, 0),
            )
            units.append(
                Unit(
                    node.name,
                    power.phase,
                    node.slots_total,
                    max(node.slots_busy, len(node.leases)),
                    others,
                    power.started,
                    power.stopped,
                    power.retry_at,
                    node.draining or node in self._work,
                    node.spec.cost_per_hour,
                )
            )
        return units

    def _demands(self) -> list[Demand]:
        """What waits, by the standby nodes that could serve it."""
        found: dict[object, tuple[Able, frozenset[str]]] = {}
        demands: dict[frozenset[str], Demand] = {}
        for waiting in self.scheduler.waiting():
            request = waiting.request
            key = (
                *request.candidates,
                request.endpoint,
                request.vision,
                request.native,
                request.slots,
                request.priority,
                *(request.failed or request.refused),
            )
            if key not in found:
                found[key] = self._able(request)
            able, names = found[key]
            if not names:
                continue
            alive = sum(node.slots_total for _, nodes in able for node in nodes if is_alive(node))
            counts = request.priority.label in self.settings.elastic.classes
            wait = max(waiting.seconds, waiting.expected or 0.0) if counts else 0.0
            known = demands.get(names)
            if known is None or wait > known.wait:
                demands[names] = Demand(names, wait, alive)
        return list(demands.values())

    def _able(self, request: Request) -> tuple[Able, frozenset[str]]:
        """Which nodes could serve it, and which of them are standby nodes that it may use."""
        try:
            able = self._eligible.able(request)
        except errors.GatewayError:
            return (), frozenset()
        nodes = [node for _, found in able for node in found]
        hybrid, label = self.settings.hybrid, request.priority.label
        gpu = label in hybrid.gpu_first or (
            hybrid.spill is not None and label in hybrid.spill.classes
        )
        gpu = gpu or all(node.spec.tier == "gpu" for node in nodes)
        return able, frozenset(
            node.name for node in nodes if node.spec.elastic and (gpu or node.spec.tier != "gpu")
        )

    # Hooks.

    def _begin(self, node: Node, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"hook of {node.name}")
        self._work[node] = task
        task.add_done_callback(lambda done: self._ended(node, done))

    def _ended(self, node: Node, task: asyncio.Task[None]) -> None:
        if self._work.get(node) is task:
            del self._work[node]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("A standby node could not be started or stopped", exc_info=error)

    async def _start(self, node: Node) -> None:
        assert node.spec.start is not None
        why = await self._run(node, "start", node.spec.start)
        if why is None:
            node.power.reason = "started"
            self.fleet.switched(node)
            return
        settings = self.settings.elastic
        node.power.failed(self.clock(), settings.backoff, settings.backoff_max)
        # It may run all the same, and cost money.
        await self._stop(node, f"its start hook failed: {why}")

    async def _stop_idle(self, node: Node) -> None:
        """Stop it, unless it turns out to be busy: with others' work, which only it can tell."""
        if node.tells_slots and not node.probing.down:
            busy = await read_slots(node)
            if busy or (busy is None and node.tells_slots):
                return
        power = node.power
        if power.phase is Phase.RETIRING and not node.leases and not node.draining:
            power.failures = 0
            await self._stop(node, power.reason.partition(":")[0])

    async def _stop(self, node: Node, why: str) -> None:
        """Run the stop hook; what has failed is tried again, and counts as running till then."""
        assert node.spec.stop is not None
        power, settings = node.power, self.settings.elastic
        again = power.phase is Phase.STOPPING
        if not again:
            power.enter(Phase.STOPPING, f"{why}: being stopped", self.clock())
            self.fleet.switched(node)
        failed = await self._run(node, "stop", node.spec.stop)
        now = self.clock()
        if failed is None:
            power.stopped = now
            told = f"{OFF}: {why.removesuffix(': being stopped')}"
            if power.retry_at > now:
                told += f"; not started again for {power.retry_at - now:.0f} s"
            self._off(node, told, now)
            return
        power.failed(now, settings.backoff, settings.backoff_max)
        power.reason = (
            f"its stop hook failed: {failed}; it is tried again in {power.retry_at - now:.0f} s"
        )
        self.fleet.switched(node)

    def _off(self, node: Node, why: str, now: float) -> None:
        node.power.enter(Phase.OFF, why, now)
        self.fleet.switched(node, anew=True)

    async def _run(self, node: Node, name: str, hook: Hook) -> str | None:
        """Run a hook and tell of it; why it failed, None: it did not."""
        limit = self.settings.elastic.hook_timeout
        result = await run_hook(hook, node.spec, limit, self.clock)
        self.bus.publish(
            HookEnded(node.name, name, result.outcome, result.seconds, result.detail, result.output)
        )
        return None if result.ok else result.detail
