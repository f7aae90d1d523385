"""A node's state, the first of the contract's list that holds, with a reason to act on."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from gateway.config.inventory import NodeSpec
from gateway.config.routing import HealthSettings, TimeoutSettings
from gateway.fleet.circuit import Circuit
from gateway.fleet.concurrency_limit import MOST_LIMIT, ConcurrencyLimit
from gateway.fleet.degradation import DegradationDetector
from gateway.fleet.lifecycle import Lifecycle, LifecyclePhase
from gateway.fleet.probe_history import ProbeHistory
from gateway.fleet.server_properties import ServerProperties
from gateway.fleet.slot_occupancy import SlotOccupancy
from gateway.fleet.speed import ObservedTiming, Speed
from gateway.request import Endpoint, Priority
from gateway.transport.node_client import NodeClient


class NodeState(enum.Enum):
    """The contract's states, in its order."""

    STANDBY = "standby"
    DRAINING = "draining"
    DOWN = "down"
    LOADING = "loading"
    STARTING = "starting"
    EJECTED = "ejected"
    MUTE = "mute"
    DEGRADED = "degraded"
    """Far below its own past (`pace.py`). It goes on working: its speed is what it is chosen by."""
    READY = "ready"


class LeasePhase(enum.Enum):
    """How far the node has got with the request."""

    WAITING_HEAD = "waiting"
    """Sent; the node has not begun to answer: it is queued there, or a plain request runs."""
    PREFILL = "prefill"
    """The head is here, the first content is not: the node reads the prompt."""
    DECODE = "decode"
    """Content has come."""
    RECLAIM = "reclaim"
    """We have left, the node may still be at work."""
    RELEASED = "over"
    """Given back."""


class CostReservation(Protocol):
    """Who is to be told, once, what a lease came to cost."""

    def settle(self, cost: float, *, happened: bool, now: float) -> None:
        """It cost so much; `happened`: the node worked for it."""


KEY_REJECTED_SECONDS = 300.0
"""Seconds for which a node that told a request that our key is wrong gets no other."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """The settings in force that nodes read; replaced as a whole."""

    health: HealthSettings
    timeouts: TimeoutSettings


def _nothing(_: object) -> None:
    pass


def server_identity(spec: NodeSpec) -> tuple[object, ...]:
    """What makes it another server when it changes."""
    return (spec.url, spec.kind)


def connection_key(spec: NodeSpec) -> tuple[object, ...]:
    """What makes new connections necessary when it changes."""
    return (spec.url, spec.kind, spec.tls, spec.api_key)


@dataclass(slots=True, eq=False)
class Lease:
    """Slots held on a node. Made by `Node.take`, ended by `give_back`; a context manager.

    Leaving the `with` block gives the slots back, unless `abandon` was called: then the
    reclaimer does, when the node shows them free. Times are monotonic seconds.
    """

    node: Node
    upstream: NodeClient
    """The ways to the node when the lease was taken; they stay open until it has ended."""
    slots: int
    request_id: str
    priority: Priority
    taken_at: float
    stream: bool
    """Whether the node streams its answer: if so it stops soon after we leave."""
    expected_prefill: float | None
    """Predicted seconds from dispatch to the first content; None: no idea."""
    expected_total: float | None
    """Predicted seconds from dispatch to the end; None: no idea."""
    trial: bool = False
    """Its outcome closes or reopens the node's circuit."""
    phase: LeasePhase = LeasePhase.WAITING_HEAD
    prefill_began_at: float = 0.0
    last_content_at: float | None = None
    """When the last byte of content came from the node."""
    abandoned_at: float = 0.0
    """When it was abandoned, if it was."""
    abandoned_phase: LeasePhase | None = None
    """How far the node had got then."""
    prefilling: bool = False
    """Whether it counts as one whose prompt is being read."""
    released_at: float | None = None
    """When it was given back."""
    mean_prefills: float = 1.0
    """Mean number of prompts read on the node while its own was."""
    slot_seconds: float = 0.0
    """The node's sum when it was taken, then when its prompt was read, in the end the difference
    (`Occupancy`)."""
    prefill_seconds: float = 0.0
    """Likewise."""
    first_content_at: float | None = None
    """When its first content came."""
    reservation: CostReservation | None = None
    """The share of a budget that it holds."""
    fallback: str | None = None
    """Why it is not of the tier that the request's class belongs to."""
    placement: Any = None
    """What the scheduler keeps of it."""
    on_first_content: Callable[[Lease], None] | None = None
    """Called when its prompt has been read: the first content came."""
    on_release: Callable[[Lease], None] | None = None
    """Called when the slots are free, before anybody else is told."""

    @property
    def held(self) -> bool:
        """Whether the slots still count against the node."""
        return self.phase is not LeasePhase.RELEASED

    def head_received(self, now: float) -> None:
        """The head of a streamed answer is here: a slot has begun to read the prompt."""
        if self.phase is LeasePhase.WAITING_HEAD:
            self.phase = LeasePhase.PREFILL
            self.prefill_began_at = now

    def content_received(self, now: float) -> None:
        """Content came from the node."""
        self.last_content_at = now
        if self.phase is LeasePhase.WAITING_HEAD or self.phase is LeasePhase.PREFILL:
            self.phase = LeasePhase.DECODE
            if self.prefilling:
                self._has_read(now)
            if self.on_first_content is not None:
                self.on_first_content(self)

    def bytes_received(self, now: float) -> None:
        """More of a response came whose first content was noted, or that comes in one piece."""
        self.last_content_at = now

    def observed_timing(self) -> ObservedTiming | None:
        """What the gateway saw of its node meanwhile; None until it is given back."""
        if self.released_at is None or not self.slots:
            return None
        began = self.taken_at if self.first_content_at is None else self.first_content_at
        wrote = self.released_at - began
        busy = self.slot_seconds / wrote if wrote > 0 else float(self.slots)
        if self.first_content_at is None:
            return ObservedTiming(wrote, None, busy, min(wrote, self.prefill_seconds))
        stalled = min(wrote, self.prefill_seconds)
        return ObservedTiming(
            self.released_at - self.taken_at,
            began - self.taken_at,
            busy,
            stalled,
            self.mean_prefills,
        )

    def release(self) -> None:
        """The slots are free. Calling it again does nothing."""
        if self.phase is not LeasePhase.RELEASED:
            self.phase = LeasePhase.RELEASED
            if self.on_release is not None:
                self.on_release(self)
            self.node.lease_released(self)

    def abandon(self) -> None:
        """We have left, the node may still be at work: hold the slots until it shows them free."""
        if self.phase is LeasePhase.RELEASED or self.phase is LeasePhase.RECLAIM:
            return
        self.abandoned_phase = self.phase
        self.phase = LeasePhase.RECLAIM
        self.abandoned_at = self.node.clock()
        self.node.on_lease_abandoned(self.node)

    def _has_read(self, now: float) -> None:
        """Its own prompt is read: what it sees of its node counts anew from here."""
        occupancy = self.node.occupancy
        occupancy.prefill_done(now)
        self.prefilling = False
        self.first_content_at = now
        if now > self.taken_at:
            self.mean_prefills = (occupancy.prefill_seconds - self.prefill_seconds) / (
                now - self.taken_at
            )
        self.slot_seconds = occupancy.slot_seconds
        self.prefill_seconds = occupancy.prefill_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.phase is not LeasePhase.RECLAIM:
            self.release()


@dataclass(slots=True, eq=False)
class Node:
    """One node. `state` and `reason` are kept by the fleet (`Fleet.settle`)."""

    spec: NodeSpec
    upstream: NodeClient
    settings: NodeSettings
    clock: Callable[[], float]
    circuit: Circuit
    properties: ServerProperties = field(default_factory=ServerProperties)
    speed: Speed = field(default_factory=Speed)
    degradation: DegradationDetector = field(default_factory=DegradationDetector)
    measured_model: tuple[object, ...] = (None, None, None)
    """What makes its model: the one whose speed was learnt."""
    concurrency_limit: ConcurrencyLimit | None = None
    """Of another OpenAI-compatible endpoint: how much it takes, as far as was found by trying."""
    probe_history: ProbeHistory = field(default_factory=ProbeHistory)
    state: NodeState = NodeState.STARTING
    reason: str = ""
    draining: bool = False
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    """Of a standby node with hooks: whether it runs."""
    key_rejection: str = ""
    """How a request was told that our key is not the right one; believed until `locked_until`."""
    key_rejected_until: float = -math.inf
    key_accepted: bool = False
    """Whether a request has gone well since our key was last refused."""
    removed: bool = False
    """Out of the inventory: it gets nothing and ends what it runs."""
    refusal_hints: dict[str, str] = field(default_factory=dict)
    """What it said about the endpoints that it has refused."""
    endpoint_refused_at: float = math.inf
    """When it last refused one; infinity: it has not, since this process watches it."""
    drift: tuple[str, ...] = ()
    """How the server differs from the inventory, as last told."""
    indexed_models: frozenset[str] = frozenset()
    """Its public models, as the fleet's index has them."""
    leases: set[Lease] = field(default_factory=set)
    occupancy: SlotOccupancy = field(default_factory=SlotOccupancy)
    requests: int = 0
    """Leases taken since the start."""
    failures: int = 0
    """Failures reported since the start."""
    announced_free: int = 0
    """Free slots as the scheduler was last told."""
    on_lease_released: Callable[[Lease], None] = _nothing
    on_lease_abandoned: Callable[[Node], None] = _nothing
    name: str = field(init=False)
    """Its name in the inventory."""

    def __post_init__(self) -> None:
        self.name = self.spec.name
        self.speed.relative = self.spec.speed_hint
        if self.spec.kind == "openai":
            self.concurrency_limit = ConcurrencyLimit()

    @property
    def slots_total(self) -> int:
        """Requests it works on at once: declared, else said, else found by trying, else one."""
        if self.spec.slots is not None:
            return self.spec.slots
        if self.properties.slots is not None:
            return self.properties.slots
        return 1 if self.concurrency_limit is None else self.concurrency_limit.slots

    @property
    def most_slots(self) -> int:
        """The same, or what trying may yet find: no request wider than this can ever go there."""
        tried = (
            self.concurrency_limit is not None
            and self.spec.slots is None
            and self.properties.slots is None
        )
        return MOST_LIMIT if tried else self.slots_total

    def paused(self, now: float) -> bool:
        """Whether the endpoint has asked for no new work at this moment (429, `Retry-After`)."""
        return self.concurrency_limit is not None and self.concurrency_limit.paused(now)

    @property
    def in_service(self) -> bool:
        """Whether the inventory lets it be probed and used; a standby node: while it may run."""
        if not self.spec.enabled or self.removed:
            return False
        return not self.spec.standby or (
            self.spec.autoscaled and self.lifecycle.phase is not LifecyclePhase.OFF
        )

    @property
    def startable(self) -> bool:
        """Whether it is a standby node that is being started, or would be for a request."""
        return (
            self.spec.enabled
            and self.spec.autoscaled
            and not (self.removed or self.draining or self.lifecycle.failures)
            and self.lifecycle.phase is not LifecyclePhase.STOPPING
            and not (self.lifecycle.at_max_running and self.lifecycle.phase is LifecyclePhase.OFF)
        )

    @property
    def reports_slots(self) -> bool:
        """Whether it can be asked which slots are busy, as far as is known."""
        return self.spec.kind == "llama.cpp" and self.properties.slots_endpoint is not False

    @property
    def leased(self) -> int:
        """Slots that our leases hold; the sum over `leases`."""
        return self.occupancy.leased

    @property
    def foreign(self) -> int:
        """Slots that others keep busy, by the last reading of `/slots`."""
        return self.occupancy.foreign

    @property
    def slots_busy(self) -> int:
        """The larger of our leases and what the node reports."""
        return max(self.leased, min(self.slots_total, self.leased + self.foreign))

    @property
    def in_flight(self) -> int:
        """Requests of ours that it runs, abandoned ones that it has not let go of included."""
        return len(self.leases)

    @property
    def context(self) -> int | None:
        """Tokens of one slot: declared, else said; None: unknown."""
        return self.spec.context if self.spec.context is not None else self.properties.context

    @property
    def silence_timeout(self) -> float:
        """Seconds that a stream of this node may stand still."""
        own = self.spec.timeouts.silence
        return own if own is not None else self.settings.timeouts.silence

    @property
    def public_models(self) -> frozenset[str]:
        """The public names it serves, as declared or as it has said."""
        return frozenset(self.properties.models if self.spec.models is None else self.spec.models)

    @property
    def models_unknown(self) -> bool:
        """Whether it may serve anything: neither it nor the inventory has ever said what."""
        return (
            self.in_service and not self.public_models and self.probe_history.discovered_at is None
        )

    def forget_replaced_model(self) -> None:
        """Forget the speed of what the server served before, if it has another model now."""
        facts = self.properties
        model = (facts.models or None, facts.n_params, facts.size)
        if model != self.measured_model:
            if any(
                old not in {None, new} for old, new in zip(self.measured_model, model, strict=True)
            ):
                self.speed.forget()
                self.degradation.forget()
            self.measured_model = model

    def served_name(self, model: str) -> str | None:
        """The node's own name for this public model name; None if it does not serve it."""
        if self.spec.models is not None:
            return self.spec.models.get(model)
        return model if model in self.properties.models else None

    def supports(self, endpoint: Endpoint, *, vision: bool = False) -> bool:
        """Whether it may be asked this: as declared, else unless it refuses."""
        if self.spec.endpoints is not None:
            wanted = {endpoint, "vision"} if vision else {endpoint}
            return wanted <= self.spec.endpoints
        if endpoint in self.properties.refused:
            return False
        return not vision or (
            self.properties.vision is not False and "vision" not in self.properties.refused
        )

    def capacity(self, now: float) -> int:
        """Slots that work may use at this moment, whatever is in use already."""
        if self.removed or (
            self.concurrency_limit is not None and self.concurrency_limit.paused(now)
        ):
            return 0
        if self.state is NodeState.READY or self.state is NodeState.DEGRADED:
            return self.circuit.slow_start_slots(self.slots_total, now)
        if (
            self.state is NodeState.EJECTED
            and self.circuit.wants_trial(now)
            and not self.probe_history.mute
        ):
            return 1
        return 0

    def free_slots(self, now: float) -> int:
        """Slots that new work may take at this moment."""
        if (
            self.state is NodeState.READY
            and self.concurrency_limit is None
            and self.circuit.fully_closed
        ):
            if self.removed:
                return 0
            # `slots_total`, spelt out: this is asked for each request.
            total = self.spec.slots or self.properties.slots or 1
            left = total - self.occupancy.leased - self.occupancy.foreign
            return left if left > 0 else 0  # noqa: FURB136 - a call costs four times as much
        capacity = self.capacity(now)
        if not capacity:
            return 0
        used = self.leased + self.foreign
        if self.state is NodeState.EJECTED:
            return 1 if used < self.slots_total else 0
        return max(0, capacity - used)

    def key_rejected(self, reason: str, now: float) -> None:
        """It refuses our key, so it gets nothing until somebody may have seen to it.

        Some proxies refuse a model so: where a request has gone well since, it takes a second one.
        """
        if not self.key_accepted:
            self.key_rejection, self.key_rejected_until = reason, now + KEY_REJECTED_SECONDS
        self.key_accepted = False

    def clear_key_rejection(self) -> None:
        """There may be another key now."""
        self.key_rejected_until = -math.inf

    def record_refusal(self, lease: Lease, now: float, retry_after: float | None) -> bool:
        """Take in a 429 or 503; whether the node is now thought to take less, or nothing."""
        return self.concurrency_limit is not None and self.concurrency_limit.record_refusal(
            lease.taken_at, now, retry_after
        )

    def record_answer(self, lease: Lease, prompt_tokens: float, completion_tokens: float) -> bool:
        """Take in a whole answer; whether the node is now thought to take more or less at once.

        `prompt`: tokens that it had to read; `completion`: tokens that it wrote, on all slots.
        """
        seen = None if self.concurrency_limit is None else lease.observed_timing()
        if self.concurrency_limit is None or seen is None:
            return False
        return self.concurrency_limit.record_success(
            lease.taken_at,
            lease.taken_at + seen.duration,
            ttft=seen.ttft,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens / lease.slots,
        )

    def next_change(self, now: float) -> float:
        """When time alone may change what work it takes; infinity: never."""
        due = self.circuit.next_change(now)
        if self.concurrency_limit is not None and self.concurrency_limit.paused(now):
            due = min(due, self.concurrency_limit.paused_until)
        return due

    def take_lease(
        self,
        slots: int,
        request_id: str,
        priority: Priority,
        now: float,
        *,
        stream: bool = True,
        expected_prefill: float | None = None,
        expected_total: float | None = None,
    ) -> Lease:
        """Count `slots` as used, at once. The caller has looked at `free`.

        `expected_prefill` and `expected_total` are seconds from now. Raises ValueError for a
        negative number of slots; none is fine for what needs no slot.
        """
        if slots < 0:
            raise ValueError(f"{slots} slots")
        # By place, since it is made for each request.
        lease = Lease(
            self,
            self.upstream,
            slots,
            request_id,
            priority,
            now,
            stream,
            expected_prefill,
            expected_total,
        )
        lease.prefill_began_at = now
        lease.prefilling = stream and slots > 0
        circuit, occupancy = self.circuit, self.occupancy
        if circuit.open_until is not None and circuit.wants_trial(now):
            lease.trial = True
            circuit.begin_trial(lease)
        self.leases.add(lease)
        if self.concurrency_limit is not None:
            self.concurrency_limit.record_in_flight(occupancy.leased + slots)
        occupancy.take(slots, now, lease.prefilling)
        lease.slot_seconds = occupancy.slot_seconds
        lease.prefill_seconds = occupancy.prefill_seconds
        self.requests += 1
        self.announced_free = self.announced_free - slots if self.announced_free > slots else 0
        return lease

    def lease_released(self, lease: Lease) -> None:
        """Count the slots of a lease as free: called by the lease, once."""
        self.leases.remove(lease)
        occupancy = self.occupancy
        lease.released_at = now = self.clock()
        occupancy.release(lease.slots, now, lease.prefilling)
        lease.slot_seconds = occupancy.slot_seconds - lease.slot_seconds
        lease.prefill_seconds = occupancy.prefill_seconds - lease.prefill_seconds
        if lease.trial:
            self.circuit.end_trial(lease)
        self.on_lease_released(lease)
