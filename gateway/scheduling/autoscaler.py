"""The owner of the standby nodes: looks at the load, and runs the hooks that the policy orders."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from gateway import errors
from gateway.config.autoscaling import ElasticSettings, Hook
from gateway.config.settings import Settings
from gateway.events import EventBus, HookEnded
from gateway.fleet.fleet import Fleet
from gateway.fleet.hooks import run_hook
from gateway.fleet.lifecycle import LifecyclePhase
from gateway.fleet.node import Node
from gateway.fleet.probes import probe_slots
from gateway.request import Request
from gateway.scheduling.autoscaling_policy import (
    AutoscalingPolicy,
    AutoscalingRules,
    ScalingAction,
    StandbyNode,
    WaitingDemand,
)
from gateway.scheduling.candidates import CandidateFinder, NodesByModel
from gateway.scheduling.fleet_sync import is_alive
from gateway.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

TICK = 0.5
"""Seconds between two looks at the load."""

OFF_REASON = "standby: it does not run"


def autoscaling_rules(settings: ElasticSettings) -> AutoscalingRules:
    """The policy's part of the settings."""
    return AutoscalingRules(
        settings.start_above,
        settings.start_after,
        settings.stop_after,
        settings.min,
        settings.max,
        settings.cooldown,
    )


@dataclass(slots=True, eq=False)
class Autoscaler:
    """Starts and stops the standby nodes of a fleet. `run` owns every task and ends them."""

    fleet: Fleet
    scheduler: Scheduler
    settings: Settings
    bus: EventBus
    clock: Callable[[], float]
    policy: AutoscalingPolicy = field(default_factory=AutoscalingPolicy)
    _work: dict[Node, asyncio.Task[None]] = field(default_factory=dict)
    """The hook that runs for a node, or the look before it."""
    _eligible: CandidateFinder = field(init=False)
    _released: bool = False

    def __post_init__(self) -> None:
        self._eligible = CandidateFinder(self.fleet.model_index, self.scheduler.fleet_sync)

    def configure(self, settings: Settings) -> None:
        """Go by these settings from now on."""
        self.settings = settings

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

    def hand_over(self) -> None:
        """Order nothing any more: a successor looks after the nodes now."""
        self._released = True

    # One look.

    def _look(self) -> None:
        nodes = [node for node in self.fleet.nodes.values() if node.spec.enabled]
        standby = [node for node in nodes if node.spec.autoscaled]
        if not standby or self._released:
            return
        now = self.clock()
        for node in standby:
            self._follow(node, now)
        units = self._units(nodes, standby)
        rules = autoscaling_rules(self.settings.elastic)
        actions = self.policy.decide(units, self._demands(), rules, now)
        for action in actions:
            self._obey(self.fleet.nodes[action.name], action, now)
        running = sum(node.lifecycle.phase is not LifecyclePhase.OFF for node in standby)
        for node in standby:
            node.lifecycle.at_max_running = rules.max is not None and running >= rules.max

    def _follow(self, node: Node, now: float) -> None:
        """Take in what the probes have found, and what is due after a failure."""
        power, probing = node.lifecycle, node.probe_history
        if node in self._work:
            return
        if power.phase is LifecyclePhase.STOPPING:
            if now >= power.retry_at:
                self._begin(node, self._stop(node, power.reason))
        elif probing.up and power.phase in {
            LifecyclePhase.UNKNOWN,
            LifecyclePhase.OFF,
            LifecyclePhase.STARTING,
        }:
            if power.phase is LifecyclePhase.STARTING:
                power.startup_seconds = now - power.since
            power.failures = 0
            power.enter(LifecyclePhase.ON, "it runs", now)
            self.fleet.lifecycle_changed(node)
        elif power.phase is LifecyclePhase.UNKNOWN and probing.loading:
            power.enter(LifecyclePhase.STARTING, "found loading its model", now)
        elif power.phase is LifecyclePhase.UNKNOWN and probing.down:
            self._off(node, OFF_REASON, now)
        elif power.phase is LifecyclePhase.STARTING:
            self._expect(node, power.since, "it took no work", now)
        elif power.phase is LifecyclePhase.ON:
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
            node.lifecycle.record_failure(now, settings.backoff, settings.backoff_max)
            self._begin(node, self._stop(node, f"{what} for {settings.ready_timeout:g} s"))

    def _obey(self, node: Node, action: ScalingAction, now: float) -> None:
        power = node.lifecycle
        if action.verb == "start":
            power.started_at = now
            power.enter(LifecyclePhase.STARTING, f"being started: {action.reason}", now)
            self.fleet.lifecycle_changed(node, reset_probes=True)
            self._begin(node, self._start(node))
        elif action.verb == "retire":
            why = f"{action.reason}: it ends what it runs and is stopped then"
            power.enter(LifecyclePhase.RETIRING, why, now)
            self.fleet.lifecycle_changed(node)
        elif action.verb == "keep":
            power.enter(LifecyclePhase.ON, action.reason, now)
            self.fleet.lifecycle_changed(node)
        elif not (node in self._work or node.leases or node.draining):
            self._begin(node, self._stop_idle(node))

    # What the policy looks at.

    def _units(self, nodes: Iterable[Node], standby: Iterable[Node]) -> list[StandbyNode]:
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
            power, own = node.lifecycle, node.capacity(now)
            mine = node.slots_busy if own else 0
            others = min(
                ((slots.get(m, 0) - own, busy.get(m, 0) - mine) for m in node.public_models),
                key=lambda pair: pair[0] - pair[1],
                default=(0, 0),
            )
            units.append(
                StandbyNode(
                    node.name,
                    power.phase,
                    node.slots_total,
                    max(node.slots_busy, len(node.leases)),
                    others,
                    power.started_at,
                    power.stopped_at,
                    power.retry_at,
                    node.draining or node in self._work,
                    node.spec.cost_per_hour,
                )
            )
        return units

    def _demands(self) -> list[WaitingDemand]:
        """What waits, by the standby nodes that could serve it."""
        found: dict[object, tuple[NodesByModel, frozenset[str]]] = {}
        demands: dict[frozenset[str], WaitingDemand] = {}
        for waiting in self.scheduler.queue_positions():
            request = waiting.request
            key = (
                *request.model_names,
                request.endpoint,
                request.needs_vision,
                request.llama_cpp_only,
                request.slots,
                request.priority,
                *(request.failed_nodes or request.excluded_nodes),
            )
            if key not in found:
                found[key] = self._able(request)
            able, names = found[key]
            if not names:
                continue
            alive = sum(node.slots_total for _, nodes in able for node in nodes if is_alive(node))
            counts = request.priority.label in self.settings.elastic.classes
            wait = max(waiting.waited_seconds, waiting.expected_seconds or 0.0) if counts else 0.0
            known = demands.get(names)
            if known is None or wait > known.wait:
                demands[names] = WaitingDemand(names, wait, alive)
        return list(demands.values())

    def _able(self, request: Request) -> tuple[NodesByModel, frozenset[str]]:
        """Which nodes could serve it, and which of them are standby nodes that it may use."""
        try:
            able = self._eligible.nodes_by_model(request)
        except errors.GatewayError:
            return (), frozenset()
        nodes = [node for _, found in able for node in found]
        hybrid, label = self.settings.hybrid, request.priority.label
        gpu = label in hybrid.gpu_first or (
            hybrid.spill is not None and label in hybrid.spill.classes
        )
        gpu = gpu or all(node.spec.tier == "gpu" for node in nodes)
        return able, frozenset(
            node.name for node in nodes if node.spec.autoscaled and (gpu or node.spec.tier != "gpu")
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
            node.lifecycle.reason = "started"
            self.fleet.lifecycle_changed(node)
            return
        settings = self.settings.elastic
        node.lifecycle.record_failure(self.clock(), settings.backoff, settings.backoff_max)
        # It may run all the same, and cost money.
        await self._stop(node, f"its start hook failed: {why}")

    async def _stop_idle(self, node: Node) -> None:
        """Stop it, unless it turns out to be busy: with others' work, which only it can tell."""
        if node.reports_slots and not node.probe_history.down:
            busy = await probe_slots(node)
            if busy or (busy is None and node.reports_slots):
                return
        power = node.lifecycle
        if power.phase is LifecyclePhase.RETIRING and not node.leases and not node.draining:
            power.failures = 0
            await self._stop(node, power.reason.partition(":")[0])

    async def _stop(self, node: Node, why: str) -> None:
        """Run the stop hook; what has failed is tried again, and counts as running till then."""
        assert node.spec.stop is not None
        power, settings = node.lifecycle, self.settings.elastic
        again = power.phase is LifecyclePhase.STOPPING
        if not again:
            power.enter(LifecyclePhase.STOPPING, f"{why}: being stopped", self.clock())
            self.fleet.lifecycle_changed(node)
        failed = await self._run(node, "stop", node.spec.stop)
        now = self.clock()
        if failed is None:
            power.stopped_at = now
            told = f"{OFF_REASON}: {why.removesuffix(': being stopped')}"
            if power.retry_at > now:
                told += f"; not started again for {power.retry_at - now:.0f} s"
            self._off(node, told, now)
            return
        power.record_failure(now, settings.backoff, settings.backoff_max)
        power.reason = (
            f"its stop hook failed: {failed}; it is tried again in {power.retry_at - now:.0f} s"
        )
        self.fleet.lifecycle_changed(node)

    def _off(self, node: Node, why: str, now: float) -> None:
        node.lifecycle.enter(LifecyclePhase.OFF, why, now)
        self.fleet.lifecycle_changed(node, reset_probes=True)

    async def _run(self, node: Node, name: str, hook: Hook) -> str | None:
        """Run a hook and tell of it; why it failed, None: it did not."""
        limit = self.settings.elastic.hook_timeout
        result = await run_hook(hook, node.spec, limit, self.clock)
        self.bus.publish(
            HookEnded(node.name, name, result.outcome, result.seconds, result.detail, result.output)
        )
        return None if result.ok else result.detail
