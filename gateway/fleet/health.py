"""One node's watch: probes it when it is due and wakes when time alone changes its state."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from gateway.fleet.circuit import CircuitPhase
from gateway.fleet.lifecycle import LifecyclePhase
from gateway.fleet.node import Lease, LeasePhase, Node, NodeState
from gateway.fleet.probe_history import QUICK_PROBE_DELAY, ProbeAnswer, ProbeResult, probe_delay
from gateway.fleet.probes import check_alive, discover, probe_slots

ALIVE_BUT_UNUSABLE = frozenset({ProbeAnswer.KEY_REJECTED, ProbeAnswer.NO_MODEL})
"""What a discovery may end with though the node lives."""

MOST_SLEEP = 3600.0


class HealthMonitor:
    """Keeps one node's state true, in a task of its own.

    `settle` is called whenever the state may have changed. `gate` bounds how many nodes are
    probed at the same moment.
    """

    def __init__(
        self,
        node: Node,
        settle: Callable[[Node], None],
        gate: asyncio.Semaphore,
        rng: random.Random,
    ) -> None:
        self._node = node
        self._settle = settle
        self._gate = gate
        self._rng = rng
        self._wake = asyncio.Event()
        self._busy = asyncio.Lock()
        self._task = asyncio.create_task(self._run(), name=f"watch {node.name}")

    def cancel(self) -> asyncio.Task[None]:
        """Stop watching; the task is to be awaited."""
        self._task.cancel()
        return self._task

    def wake(self) -> None:
        """Look again at what is due."""
        self._wake.set()

    def probe_soon(self) -> None:
        """Something looks wrong: probe soon."""
        probing = self._node.probe_history
        soon = (probing.last_probe_at or 0.0) + QUICK_PROBE_DELAY
        if soon < probing.next_probe_at:
            probing.next_probe_at = soon
            self._wake.set()

    def reschedule(self) -> None:
        """The interval has changed: find a place in it."""
        probing, interval = self._node.probe_history, self._node.settings.health.interval
        probing.next_probe_at = min(
            probing.next_probe_at, self._node.clock() + self._rng.uniform(0.0, interval)
        )
        self._wake.set()

    async def probe(self) -> ProbeResult:
        """Probe now, and take in the answer; what the node is and refuses is asked anew."""
        async with self._busy:
            self._node.probe_history.discovered_at = None
            return await self._cycle()

    async def _run(self) -> None:
        node = self._node
        while True:
            if self._is_due():
                async with self._busy, self._gate:
                    # An operator's probe may have come first.
                    if self._is_due():
                        await self._cycle()
            self._settle(node)
            now = node.clock()
            due = node.probe_history.next_probe_at if node.in_service else now + MOST_SLEEP
            await self._sleep(min(due, node.next_change(now)) - now)

    def _is_due(self) -> bool:
        return (
            self._node.in_service and self._node.clock() >= self._node.probe_history.next_probe_at
        )

    async def _sleep(self, seconds: float) -> None:
        self._wake.clear()
        timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    async def _cycle(self) -> ProbeResult:
        """Ask for life, for what the node is if that is due, and for what it is busy with."""
        node, probing, health = self._node, self._node.probe_history, self._node.settings.health
        first = not probing.probed
        probing.last_probe_at = node.clock()
        outcome = await check_alive(node)
        comes_up = not probing.up
        if outcome.up and self._discovery_is_due():
            outcome = await self._discover(outcome)
        if outcome.up and comes_up:
            # Known before it gets work: the load that others have put on it.
            await self._observe()
        now = node.clock()
        sign = sign_of_life(node, now) if outcome.answer is ProbeAnswer.TIMED_OUT else None
        probing.record(outcome, rise=health.rise, fall=health.fall, sign_of_life=sign)
        if comes_up and probing.up:
            node.circuit.server_restarted(now)
            node.degradation.server_restarted()
        probing.next_probe_at = now + probe_delay(
            health.interval, self._rng, first=first, unstable=probing.unstable
        )
        self._settle(node)
        if outcome.up and not comes_up:
            await self._observe()
            self._settle(node)
        return outcome

    def _discovery_is_due(self) -> bool:
        node, said = self._node, self._node.probe_history.discovered_at
        return said is None or node.clock() - said >= node.settings.health.discover_interval

    async def _discover(self, alive: ProbeResult) -> ProbeResult:
        node = self._node
        outcome = alive if node.spec.kind == "openai" else await discover(node)
        if outcome.up:
            node.probe_history.discovered_at = node.clock()
            return alive
        # Whatever else went wrong: it lives, as /health has just said, and is asked again with
        # the next probe.
        return outcome if outcome.answer in ALIVE_BUT_UNUSABLE else alive

    async def _observe(self) -> None:
        """Read how many slots are busy."""
        node = self._node
        if not node.reports_slots:
            node.occupancy.foreign = 0
            return
        with node.occupancy.slots_query(node.clock()) as reading:
            busy = await probe_slots(node)
        if busy is not None:
            node.occupancy.record_busy(busy, reading, node.clock())


PREFILL_GRACE_FACTOR = 4.0
"""A prefill may take so many times longer than predicted before it stops being a sign of life."""


def prefill_grace(lease: Lease) -> float:
    """Seconds for which this request's prefill speaks for its node."""
    return max(
        lease.node.settings.health.prefill_grace,
        PREFILL_GRACE_FACTOR * (lease.expected_prefill or 0.0),
    )


def sign_of_life(node: Node, now: float) -> str | None:
    """Why a node that answers no probe is alive, in words; None if nothing says so."""
    silence = node.silence_timeout
    for lease in node.leases:
        if lease.last_content_at is not None and now - lease.last_content_at < silence:
            return "one of its streams moves"
        if _is_prefilling(lease) and now - lease.prefill_began_at < prefill_grace(lease):
            return "it reads a prompt"
    return None


def another_prefills(lease: Lease, now: float) -> bool:
    """Whether the node reads another request's prompt, which holds this one up."""
    return any(
        other is not lease
        and _is_prefilling(other)
        and now - other.prefill_began_at < prefill_grace(other)
        for other in lease.node.leases
    )


def _is_prefilling(lease: Lease) -> bool:
    # After the client has left a prefill goes on to its end all the same.
    phase = lease.abandoned_phase if lease.phase is LeasePhase.RECLAIM else lease.phase
    return phase is LeasePhase.WAITING_HEAD or phase is LeasePhase.PREFILL


_LEAVING_PHASES = frozenset({LifecyclePhase.RETIRING, LifecyclePhase.STOPPING})


def judge_state(node: Node, now: float) -> tuple[NodeState, str]:
    """The state and its reason."""
    probing = node.probe_history
    kept = _kept_off(node)
    if kept is not None:
        return kept
    if probing.down:
        return NodeState.DOWN, probing.detail
    if now < node.key_rejected_until:
        return NodeState.DOWN, node.key_rejection
    if probing.loading:
        return NodeState.LOADING, "the server is loading its model"
    if not probing.probed:
        return NodeState.STARTING, "not probed yet"
    match node.circuit.phase(now):
        case CircuitPhase.OPEN:
            return NodeState.EJECTED, (
                f"{node.circuit.failures} requests in a row failed; "
                f"no work for about {node.circuit.open_seconds:.0f} s, then one on trial"
            )
        case CircuitPhase.HALF_OPEN:
            return NodeState.EJECTED, (
                f"{node.circuit.failures} requests in a row failed; the next one is on trial"
            )
        case CircuitPhase.CLOSED:
            pass
    if probing.mute:
        return NodeState.MUTE, probing.detail
    if node.degradation.degraded:
        return NodeState.DEGRADED, node.degradation.reason(now, endpoint=node.spec.kind == "openai")
    return NodeState.READY, _ready_reason(node, now)


def _kept_off(node: Node) -> tuple[NodeState, str] | None:
    """What the inventory, an operator or its hooks have made of it; None: it may work."""
    spec, probing = node.spec, node.probe_history
    if not spec.enabled:
        return NodeState.STANDBY, "enabled: false in the inventory"
    if spec.standby and not spec.autoscaled:
        return NodeState.STANDBY, "standby: true in the inventory, without start and stop"
    power = node.lifecycle
    if spec.autoscaled and power.phase is LifecyclePhase.OFF:
        return NodeState.STANDBY, power.reason
    if spec.autoscaled and power.phase is LifecyclePhase.UNKNOWN and probing.down:
        return NodeState.STANDBY, "it does not run"
    if node.draining:
        return NodeState.DRAINING, "drained by an operator, until it is resumed"
    if spec.autoscaled and power.phase in _LEAVING_PHASES:
        return NodeState.DRAINING, power.reason
    if (
        spec.autoscaled
        and power.phase is LifecyclePhase.STARTING
        and not (probing.up or probing.loading)
    ):
        told = f"; not up yet: {probing.detail}" if probing.detail else ""
        return NodeState.STARTING, power.reason + told
    return None


def _ready_reason(node: Node, now: float) -> str:
    if node.concurrency_limit is not None and node.concurrency_limit.paused(now):
        left = node.concurrency_limit.paused_until - now
        return f"it refused work (429 or 503): none for about {left:.0f} s"
    return "answers its probes"
