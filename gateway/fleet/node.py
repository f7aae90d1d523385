"""A node: what the inventory says of it, what it says itself, and what it is doing for us."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.fleet.circuit import Circuit
from gateway.fleet.facts import Facts
from gateway.fleet.lease import Lease
from gateway.fleet.limit import MOST, Limit
from gateway.fleet.occupancy import Occupancy
from gateway.fleet.pace import Pace
from gateway.fleet.power import Phase, Power
from gateway.fleet.probing import Probing
from gateway.fleet.speed import Speed
from gateway.fleet.states import State

if TYPE_CHECKING:
    from gateway.config.inventory import NodeSpec
    from gateway.config.routing import HealthSettings, TimeoutSettings
    from gateway.request import Endpoint, Priority
    from gateway.transport.upstream import Upstream

LOCKED = 300.0
"""Seconds for which a node that told a request that our key is wrong gets no other."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings in force that nodes read; replaced as a whole."""

    health: HealthSettings
    timeouts: TimeoutSettings


def _nothing(_: object) -> None:
    pass


@dataclass(slots=True, eq=False)
class Node:
    """One node. `state` and `reason` are kept by the fleet (`Fleet.settle`)."""

    spec: NodeSpec
    upstream: Upstream
    rules: Rules
    clock: Callable[[], float]
    circuit: Circuit
    facts: Facts = field(default_factory=Facts)
    speed: Speed = field(default_factory=Speed)
    pace: Pace = field(default_factory=Pace)
    measured: tuple[object, ...] = (None, None, None)
    """What makes its model: the one whose speed was learnt."""
    limit: Limit | None = None
    """Of another OpenAI-compatible endpoint: how much it takes, as far as was found by trying."""
    probing: Probing = field(default_factory=Probing)
    state: State = State.STARTING
    reason: str = ""
    draining: bool = False
    power: Power = field(default_factory=Power)
    """Of a standby node with hooks: whether it runs."""
    locked: str = ""
    """How a request was told that our key is not the right one; believed until `locked_until`."""
    locked_until: float = -math.inf
    accepted: bool = False
    """Whether a request has gone well since our key was last refused."""
    removed: bool = False
    """Out of the inventory: it gets nothing and ends what it runs."""
    hints: dict[str, str] = field(default_factory=dict)
    """What it said about the endpoints that it has refused."""
    refused_at: float = math.inf
    """When it last refused one; infinity: it has not, since this process watches it."""
    drift: tuple[str, ...] = ()
    """How the server differs from the inventory, as last told."""
    listed: frozenset[str] = frozenset()
    """Its public models, as the fleet's index has them."""
    leases: set[Lease] = field(default_factory=set)
    occupancy: Occupancy = field(default_factory=Occupancy)
    requests: int = 0
    """Leases taken since the start."""
    failures: int = 0
    """Failures reported since the start."""
    announced: int = 0
    """Free slots as the scheduler was last told."""
    on_return: Callable[[Lease], None] = _nothing
    on_abandon: Callable[[Node], None] = _nothing
    name: str = field(init=False)
    """Its name in the inventory."""

    def __post_init__(self) -> None:
        self.name = self.spec.name
        self.speed.relative = self.spec.speed_hint
        if self.spec.kind == "openai":
            self.limit = Limit()

    @property
    def slots_total(self) -> int:
        """Requests it works on at once: declared, else said, else found by trying, else one."""
        if self.spec.slots is not None:
            return self.spec.slots
        if self.facts.slots is not None:
            return self.facts.slots
        return 1 if self.limit is None else self.limit.slots

    @property
    def slots_most(self) -> int:
        """The same, or what trying may yet find: no request wider than this can ever go there."""
        tried = self.limit is not None and self.spec.slots is None and self.facts.slots is None
        return MOST if tried else self.slots_total

    def paused(self, now: float) -> bool:
        """Whether the endpoint has asked for no new work at this moment (429, `Retry-After`)."""
        return self.limit is not None and self.limit.paused(now)

    @property
    def wanted(self) -> bool:
        """Whether the inventory lets it be probed and used; a standby node: while it may run."""
        if not self.spec.enabled or self.removed:
            return False
        return not self.spec.standby or (self.spec.elastic and self.power.phase is not Phase.OFF)

    @property
    def on_demand(self) -> bool:
        """Whether it is a standby node that is being started, or would be for a request."""
        return (
            self.spec.enabled
            and self.spec.elastic
            and not (self.removed or self.draining or self.power.failures)
            and self.power.phase is not Phase.STOPPING
            and not (self.power.barred and self.power.phase is Phase.OFF)
        )

    @property
    def tells_slots(self) -> bool:
        """Whether it can be asked which slots are busy, as far as is known."""
        return self.spec.kind == "llama.cpp" and self.facts.slots_endpoint is not False

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
        return self.spec.context if self.spec.context is not None else self.facts.context

    @property
    def silence(self) -> float:
        """Seconds that a stream of this node may stand still."""
        own = self.spec.timeouts.silence
        return own if own is not None else self.rules.timeouts.silence

    @property
    def public_models(self) -> frozenset[str]:
        """The public names it serves, as declared or as it has said."""
        return frozenset(self.facts.models if self.spec.models is None else self.spec.models)

    @property
    def silent(self) -> bool:
        """Whether it may serve anything: neither it nor the inventory has ever said what."""
        return self.wanted and not self.public_models and self.probing.discovered is None

    def note_model(self) -> None:
        """Forget the speed of what the server served before, if it has another model now."""
        facts = self.facts
        model = (facts.models or None, facts.n_params, facts.size)
        if model != self.measured:
            if any(old not in {None, new} for old, new in zip(self.measured, model, strict=True)):
                self.speed.forget()
                self.pace.forget()
            self.measured = model

    def serves(self, model: str) -> str | None:
        """The node's own name for this public model name; None if it does not serve it."""
        if self.spec.models is not None:
            return self.spec.models.get(model)
        return model if model in self.facts.models else None

    def offers(self, endpoint: Endpoint, *, vision: bool = False) -> bool:
        """Whether it may be asked this: as declared, else unless it refuses."""
        if self.spec.endpoints is not None:
            wanted = {endpoint, "vision"} if vision else {endpoint}
            return wanted <= self.spec.endpoints
        if endpoint in self.facts.refused:
            return False
        return not vision or (self.facts.vision is not False and "vision" not in self.facts.refused)

    def capacity(self, now: float) -> int:
        """Slots that work may use at this moment, whatever is in use already."""
        if self.removed or (self.limit is not None and self.limit.paused(now)):
            return 0
        if self.state is State.READY or self.state is State.DEGRADED:
            return self.circuit.allowed(self.slots_total, now)
        if self.state is State.EJECTED and self.circuit.wants_trial(now) and not self.probing.mute:
            return 1
        return 0

    def free(self, now: float) -> int:
        """Slots that new work may take at this moment."""
        if self.state is State.READY and self.limit is None and self.circuit.steady:
            if self.removed:
                return 0
            # `slots_total`, spelt out: this is asked for each request.
            total = self.spec.slots or self.facts.slots or 1
            left = total - self.occupancy.leased - self.occupancy.foreign
            return left if left > 0 else 0  # noqa: FURB136 - a call costs four times as much
        capacity = self.capacity(now)
        if not capacity:
            return 0
        used = self.leased + self.foreign
        if self.state is State.EJECTED:
            return 1 if used < self.slots_total else 0
        return max(0, capacity - used)

    def lock(self, why: str, now: float) -> None:
        """It refuses our key, so it gets nothing until somebody may have seen to it.

        Some proxies refuse a model so: where a request has gone well since, it takes a second one.
        """
        if not self.accepted:
            self.locked, self.locked_until = why, now + LOCKED
        self.accepted = False

    def unlock(self) -> None:
        """There may be another key now."""
        self.locked_until = -math.inf

    def learn_refusal(self, lease: Lease, now: float, retry_after: float | None) -> bool:
        """Take in a 429 or 503; whether the node is now thought to take less, or nothing."""
        return self.limit is not None and self.limit.refused(lease.taken, now, retry_after)

    def learn_limit(self, lease: Lease, prompt: float, completion: float) -> bool:
        """Take in a whole answer; whether the node is now thought to take more or less at once.

        `prompt`: tokens that it had to read; `completion`: tokens that it wrote, on all slots.
        """
        seen = None if self.limit is None else lease.seen()
        if self.limit is None or seen is None:
            return False
        return self.limit.answered(
            lease.taken,
            lease.taken + seen.duration,
            first=seen.ttft,
            prompt=prompt,
            completion=completion / lease.slots,
        )

    def next_change(self, now: float) -> float:
        """When time alone may change what work it takes; infinity: never."""
        due = self.circuit.next_change(now)
        if self.limit is not None and self.limit.paused(now):
            due = min(due, self.limit.paused_until)
        return due

    def take(
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
        lease.prefill_began = now
        lease.reads = stream and slots > 0
        circuit, occupancy = self.circuit, self.occupancy
        if circuit.open_until is not None and circuit.wants_trial(now):
            lease.trial = True
            circuit.begin_trial(lease)
        self.leases.add(lease)
        if self.limit is not None:
            self.limit.took(occupancy.leased + slots)
        occupancy.take(slots, now, lease.reads)
        lease.slot_seconds = occupancy.slot_seconds
        lease.reader_seconds = occupancy.reader_seconds
        self.requests += 1
        self.announced = self.announced - slots if self.announced > slots else 0
        return lease

    def returned(self, lease: Lease) -> None:
        """Count the slots of a lease as free: called by the lease, once."""
        self.leases.remove(lease)
        occupancy = self.occupancy
        lease.ended = now = self.clock()
        occupancy.give_back(lease.slots, now, lease.reads)
        lease.slot_seconds = occupancy.slot_seconds - lease.slot_seconds
        lease.reader_seconds = occupancy.reader_seconds - lease.reader_seconds
        if lease.trial:
            self.circuit.end_trial(lease)
        self.on_return(lease)
