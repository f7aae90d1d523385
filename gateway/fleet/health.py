"""Watches one node: probes it when due, and judges its state from all that is known of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from gateway.fleet.circuit import CircuitPhase
from gateway.fleet.lifecycle import LifecyclePhase
from gateway.fleet.node import Lease, Node, NodeState
from gateway.fleet.probe_history import QUICK_PROBE_DELAY, ProbeAnswer, ProbeResult, probe_delay
from gateway.fleet.probes import check_alive, discover, fetch, has_changed, read_busy
from gateway.fleet.sleep import WAKE_SLACK
from gateway.fleet.slot_occupancy import LeasePhase

ALIVE_STATES = frozenset({NodeState.READY, NodeState.DEGRADED, NodeState.MUTE, NodeState.SLEEPING})
"""States of a node that is worth the ordinary wait; for any other, `wait_for_node` holds."""

ALIVE_BUT_UNUSABLE = frozenset({ProbeAnswer.KEY_REJECTED, ProbeAnswer.NO_MODEL})
"""Results of a discovery that keep a live node from getting work."""

MOST_SLEEP = 3600.0
"""Seconds; a node that is out of service is looked at again after this at the latest."""


class HealthMonitor:
    """Probes one node and keeps its state current, in a task of its own.

    `refresh_state` is called whenever the state may have changed. `gate` bounds how many nodes
    are probed at the same time. `fleet_works` tells whether any node has had work lately.
    """

    def __init__(
        self,
        node: Node,
        refresh_state: Callable[[Node], None],
        gate: asyncio.Semaphore,
        rng: random.Random,
        fleet_works: Callable[[], bool],
    ) -> None:
        self._node = node
        self._refresh_state = refresh_state
        self._gate = gate
        self._rng = rng
        self._fleet_works = fleet_works
        self._wake = asyncio.Event()
        self._probing = asyncio.Lock()
        self._task = asyncio.create_task(self._run(), name=f"watch {node.name}")

    def cancel(self) -> asyncio.Task[None]:
        """Stop watching; the caller awaits the task."""
        self._task.cancel()
        return self._task

    def wake(self) -> None:
        """Check again what is due."""
        self._wake.set()

    def probe_soon(self) -> None:
        """A request has failed: do not wait for the next regular probe.

        The server may be another process by now, with another model.
        """
        history = self._node.probe_history
        history.rediscover()
        if history.probe_by((history.last_probe_at or 0.0) + QUICK_PROBE_DELAY):
            self._wake.set()

    def read_load(self) -> None:
        """It gets work, and its load was left unread: probe now."""
        if self._node.probe_history.probe_by(self._node.clock()):
            self._wake.set()

    def reschedule(self) -> None:
        """The interval has changed: choose a random moment in it."""
        node, interval = self._node, self._node.settings.health.interval
        node.probe_history.probe_by(node.clock() + self._rng.uniform(0.0, interval))
        self._wake.set()

    async def probe(self) -> ProbeResult:
        """Probe now, and ask for the server's properties and refused endpoints anew."""
        async with self._probing:
            self._node.probe_history.rediscover()
            return await self._cycle()

    async def _run(self) -> None:
        node = self._node
        while True:
            if self._is_due():
                async with self._probing, self._gate:
                    # An operator's probe may have come first.
                    if self._is_due():
                        await self._cycle()
            self._refresh_state(node)
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
        """Probe: is it alive, what are its properties if that is due, how busy are its slots."""
        node, history, health = self._node, self._node.probe_history, self._node.settings.health
        first = not history.probed
        history.probe_began(node.clock())
        result = await check_alive(node)
        comes_up = not history.up
        if result.up and (
            history.discovery_due(node.clock(), health.discover_interval)
            or await has_changed(node)
            or (node.is_purpose_unknown and not node.sleep.sleeping)
        ):
            result = await self._discover(result)
        waking = node.sleep.waking_since is not None
        if result.up and comes_up:
            # Before it gets work, the load that other clients put on it must be known.
            await self._read_slots(comes_up=True)
        now = node.clock()
        sign = sign_of_life(node, now) if result.answer is ProbeAnswer.TIMED_OUT else None
        history.record(result, rise=health.rise, fall=health.fall, sign_of_life=sign)
        if comes_up and history.up:
            node.circuit.server_restarted(now)
            node.degradation.server_restarted()
            if not first:
                node.calibration.server_started(node.requests)
        if not history.up:
            node.sleep.restarted()
        history.schedule(
            now + probe_delay(health.interval, self._rng, first=first, unstable=history.unstable)
        )
        self._refresh_state(node)
        if result.up and not comes_up:
            await self._read_slots()
            self._refresh_state(node)
        if history.unread or waking:
            history.probe_by(node.clock() + QUICK_PROBE_DELAY)
        return result

    async def _discover(self, alive: ProbeResult) -> ProbeResult:
        node = self._node
        result = alive if node.spec.kind == "openai" else await discover(node)
        if result.up:
            node.probe_history.discovered(node.clock())
            return alive
        # After any other failure: `/health` has just shown that it lives; the next probe asks
        # for its properties again.
        return result if result.answer in ALIVE_BUT_UNUSABLE else alive

    async def _read_slots(self, *, comes_up: bool = False) -> None:
        """Ask how many slots are busy, by what does not keep an idle server from sleeping."""
        node, history, asked_at = self._node, self._node.probe_history, self._node.clock()
        path = node.load_endpoint(asked_at, comes_up=comes_up, fleet_works=self._fleet_works())
        if path is None:
            node.occupancy.clear_foreign()
            history.slots_read()
            if not node.sleep.asleep:
                node.sleep.woke()
                history.leave_load_unread()
            return
        with node.occupancy.slots_query(asked_at) as query:
            reply = await fetch(node, path)
            busy = read_busy(node, path, reply)
            if busy and path != "/slots":
                # It is awake and busy: `/slots` changes nothing, and tells more.
                reply = await fetch(node, "/slots")
                busy = read_busy(node, "/slots", reply)
        now = node.clock()
        if not isinstance(reply, ProbeResult):
            history.slots_read()
            node.sleep.woke()
        elif reply.answer is ProbeAnswer.TIMED_OUT and not is_excused(node, asked_at, now):
            history.slots_unread(asked_at, node.settings.health.fall)
        if busy is not None:
            node.occupancy.record_busy(len(busy), query, now)
            node.occupancy.record_tokens(busy)


PREFILL_GRACE_FACTOR = 4.0
"""A prefill may take so many times longer than predicted before it stops being a sign of life."""


def prefill_grace(lease: Lease) -> float:
    """Seconds for which this request's prefill is a sign of life of its node."""
    grace = max(
        lease.node.settings.health.prefill_grace,
        PREFILL_GRACE_FACTOR * (lease.expected_prefill or 0.0),
    )
    return grace + WAKE_SLACK if lease.wake else grace


def sign_of_life(node: Node, now: float) -> str | None:
    """Why a node that answers no probe is alive, in words; None if nothing shows it."""
    silence = node.silence_timeout
    for lease in node.leases:
        if lease.last_content_at is not None and now - lease.last_content_at < silence:
            return "one of its streams moves"
        if _is_prefilling(lease) and now - lease.prefill_began_at < prefill_grace(lease):
            return "it reads a prompt"
    return None


def is_excused(node: Node, asked_at: float, now: float) -> bool:
    """Whether our own work, or waking up, explains that its slots could not be read.

    A stream without a head does not: a slot that reads its prompt has sent the head.
    """
    if node.sleep.waking_since is not None:
        return not node.sleep.is_overdue(node.properties.size, now)
    return any(
        (lease.last_content_at is not None and lease.last_content_at >= asked_at)
        or (
            _is_prefilling(lease)
            and not (lease.stream and lease.phase is LeasePhase.WAITING_HEAD)
            and now - lease.prefill_began_at < prefill_grace(lease)
        )
        for lease in node.leases
    )


def another_prefills(lease: Lease, now: float) -> bool:
    """Whether the node reads another request's prompt, which delays this one."""
    return any(
        other is not lease
        and _is_prefilling(other)
        and now - other.prefill_began_at < prefill_grace(other)
        for other in lease.node.leases
    )


def _is_prefilling(lease: Lease) -> bool:
    # A prefill goes on to its end even after the client has left.
    phase = lease.abandoned_phase if lease.phase is LeasePhase.RECLAIM else lease.phase
    return phase is LeasePhase.WAITING_HEAD or phase is LeasePhase.PREFILL


def judge_state(node: Node, now: float) -> tuple[NodeState, str]:
    """The node's state and the reason for it: the first in the order of `NodeState` that holds."""
    history = node.probe_history
    kept_off = _kept_off(node)
    if kept_off is not None:
        return kept_off
    if history.down:
        return NodeState.DOWN, history.detail
    if node.key_rejection.active(now):
        return NodeState.DOWN, node.key_rejection.reason
    hangs = history.silent and node.sleep.is_overdue(node.properties.size, now)
    if node.sleep.sleeping and not hangs:
        return NodeState.SLEEPING, _sleeping_reason(node, now)
    if history.loading:
        return NodeState.LOADING, "the server is loading its model"
    if not history.probed:
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
    if history.mute:
        return NodeState.MUTE, history.detail
    if history.frozen:
        return NodeState.MUTE, (
            f"/health answers but /slots has not for {now - history.unread_since:.0f} s though "
            "nothing is being read: a request may have frozen its loop (a huge grammar?); restart "
            "the server if it lasts"
        )
    if node.degradation.degraded:
        return NodeState.DEGRADED, node.degradation.reason(now, endpoint=node.spec.kind == "openai")
    return NodeState.READY, _ready_reason(node, now)


_LEAVING_PHASES = frozenset({LifecyclePhase.RETIRING, LifecyclePhase.STOPPING})


def _kept_off(node: Node) -> tuple[NodeState, str] | None:
    """The state that the inventory, an operator or the node's hooks impose; None: it may work."""
    spec, history, lifecycle = node.spec, node.probe_history, node.lifecycle
    if not spec.enabled:
        return NodeState.STANDBY, "enabled: false in the inventory"
    if spec.standby and not spec.autoscaled:
        return NodeState.STANDBY, "standby: true in the inventory, without start and stop"
    if spec.autoscaled and lifecycle.phase is LifecyclePhase.OFF:
        return NodeState.STANDBY, lifecycle.reason
    if spec.autoscaled and lifecycle.phase is LifecyclePhase.UNKNOWN and history.down:
        return NodeState.STANDBY, "it does not run"
    if node.draining:
        return NodeState.DRAINING, "drained by an operator, until it is resumed"
    if spec.autoscaled and lifecycle.phase in _LEAVING_PHASES:
        return NodeState.DRAINING, lifecycle.reason
    if (
        spec.autoscaled
        and lifecycle.phase is LifecyclePhase.STARTING
        and not (history.up or history.loading)
    ):
        detail = f"; not up yet: {history.detail}" if history.detail else ""
        return NodeState.STARTING, lifecycle.reason + detail
    return None


def _sleeping_reason(node: Node, now: float) -> str:
    seconds = node.sleep.seconds_left(node.properties.size, now)
    if node.sleep.waking_since is not None:
        waited = now - node.sleep.waking_since
        return f"it wakes up: it has loaded its model for {waited:.0f} s"
    return (
        "it has unloaded its model while it was idle (--sleep-idle-seconds); "
        f"the next request wakes it, in about {seconds:.2g} s"
    )


def _ready_reason(node: Node, now: float) -> str:
    if node.concurrency_limit is not None and node.concurrency_limit.paused(now):
        left = node.concurrency_limit.paused_until - now
        return f"it refused work (402, 429 or 503): none for about {left:.0f} s"
    return "answers its probes"
