"""A node of the fleet and the leases on its slots: what is known of it, and what it may be given.

Node and lease are one story: a lease counts on its node when it is taken and given back, and what
the gateway saw in between is measured against the node's occupancy.

Slots in use are ours by count, and others' by what the node reports. Both are integrated over time.
For any span between two moments the difference of two sums gives the mean: how many slots were busy
during a request's decode, and for how long prompts were being read meanwhile, which delays the
other slots.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import msgspec

from gateway.config.inventory import STARTED_BY, UP, NodeSpec
from gateway.config.settings import Settings
from gateway.lease import NodeInfo
from gateway.nodes.circuit import MOST_LIMIT, Circuit, ConcurrencyLimit, KeyRejection
from gateway.nodes.lifecycle import (
    RECENT_USE,
    REST_DELAY,
    Lifecycle,
    LifecyclePhase,
    ProbeHistory,
    Sleep,
)
from gateway.nodes.router import (
    COMMAND_LAG,
    LoadChange,
    LoadPhase,
    ModelLoad,
    RouterRecord,
    Status,
    UnloadCause,
)
from gateway.nodes.server_properties import (
    MOST_SLOTS,
    ServedAs,
    ServerProperties,
    SlotTask,
    inventory_drift,
)
from gateway.nodes.speed import DegradationDetector, ObservedTiming, Speed, SpeedState, UsualSpeeds
from gateway.terms import Endpoint
from gateway.transport.pool import ConnectionPool

SLOT_LINGER = 0.25  # seconds for which a slot may still be reported busy after its answer has ended
# Minutes of which it is known whether others kept slots busy, and how many of them make others that
# use a node all the time, and not now and then.
RECENT_MINUTES, LEAST_MINUTES = 10, 5


class LeasePhase(enum.Enum):
    """How far the node has got with the request."""

    WAITING_HEAD = "waiting"
    """Sent, no head yet: the node queues it, or works on an answer that it does not stream."""
    PREFILL = "prefill"  # the head has come, content has not: the node reads the prompt
    DECODE = "decode"  # content has come
    RECLAIM = "reclaim"  # the gateway has left; the node may still be at work
    RELEASED = "over"  # the slots are free


_WAITING_HEAD, _RELEASED = LeasePhase.WAITING_HEAD, LeasePhase.RELEASED
_NO_SPAN = (0.0, 0, 0.0, 0.0)


@dataclass(slots=True, eq=False)
class SlotsQuery:
    """A request to the node's `/slots` that is under way."""

    peak_leased: int  # the most busy slots in its answer that our leases can account for
    loans_over: int  # loans of a slot that were over before; any further one is in its answer

    def leases_grew(self, leased: int) -> None:
        """Our leases hold so many slots now."""
        self.peak_leased = max(self.peak_leased, leased)


@dataclass(slots=True)
class SlotOccupancy:
    """The counts of one node's slots."""

    leased: int = 0
    foreign: int = 0  # the larger of what was seen of others, and of what they may use
    slot_seconds: float = 0.0
    """Busy slots, ours and others', integrated over time up to the last change."""
    prefill_seconds: float = 0.0  # our prompts that are being read, integrated likewise
    prefills: int = 0  # our prompts that are being read
    tokens_reading: tuple[int, ...] | None = None
    """The tokens of each busy slot, ours and others', by the last reading; None: it was taken."""
    _integrated_at: float = 0.0  # up to when the sums go
    _window: int = 0  # number of the current window of `SLOT_LINGER` seconds
    _peak: int = 0  # the most slots leased in this window
    _earlier_peak: int = 0  # the most in the window before
    _watchers: list[Callable[[int], None]] = field(default_factory=list)
    """Told of each lease: how many slots are leased now."""
    _loans: int = 0
    _loans_over: int = 0
    _minutes: tuple[int, ...] = ()  # the last ones in which others kept slots busy
    _seen: int = 0  # busy slots of others, by the last reading
    _fenced: int = 0  # slots that other members of a cluster may use, seen or not

    def integrate(self, now: float) -> None:
        """Bring the sums up to this moment."""
        elapsed = now - self._integrated_at
        if elapsed > 0:
            self._integrated_at = now
            self.slot_seconds += elapsed * (self.leased + self.foreign)
            self.prefill_seconds += elapsed * self.prefills

    def take(self, slots: int, now: float, prefilling: bool = False) -> None:  # noqa: FBT001, FBT002
        """A lease takes slots; `prefilling`: `prefill_done` will say when its prompt is read."""
        if int(now / SLOT_LINGER) != self._window:
            self._roll(now)
        self.integrate(now)
        self.leased += slots
        self.prefills += prefilling
        if self._peak < self.leased:  # noqa: PLR1730 - a call costs four times as much
            self._peak = self.leased
        for watcher in self._watchers:
            watcher(self.leased)

    def prefill_done(self, now: float) -> None:
        """One of our prompts has been read."""
        self.integrate(now)
        self.prefills -= 1

    def release(self, slots: int, now: float, prefilling: bool = False) -> None:  # noqa: FBT001, FBT002
        """A lease gives back slots; `prefilling`: its prompt had not been read yet."""
        if int(now / SLOT_LINGER) != self._window:
            self._roll(now)
        self.integrate(now)
        self.leased -= slots
        self.prefills -= prefilling

    @contextmanager
    def slots_query(self, now: float) -> Iterator[SlotsQuery]:
        """Watch our leases while the node is asked for its busy slots."""
        self._roll(now)
        query = SlotsQuery(max(self._peak, self._earlier_peak), self._loans_over)
        self._watchers.append(query.leases_grew)
        try:
            yield query
        finally:
            self._watchers.remove(query.leases_grew)

    @contextmanager
    def lend_slot(self, call_in: Callable[[], None]) -> Iterator[None]:
        """Lend a slot of an idle node; it goes on counting as free. Each lease calls `call_in`."""

        def leases_grew(leased: int) -> None:
            if leased:
                call_in()

        self._watchers.append(leases_grew)
        self._loans += 1
        try:
            yield
        finally:
            self._loans_over += 1
            self._watchers.remove(leases_grew)

    def record_busy(self, busy: tuple[int, ...], query: SlotsQuery, now: float) -> None:
        """The node reported the tokens of its busy slots.

        Those of them that our leases can't account for are others'.
        """
        self.integrate(now)
        is_one_lent, self.tokens_reading = self._loans > query.loans_over, busy
        self._seen = max(0, len(busy) - query.peak_leased - is_one_lent)
        self.foreign = max(self._seen, self._fenced)
        if self._seen and (minute := int(now / 60)) not in self._minutes:
            self._minutes = (*self._minutes[1 - RECENT_MINUTES :], minute)

    def fence(self, slots: int, now: float) -> bool:
        """Leave so many slots to others, whether they are seen busy or not; False: it did."""
        if slots == self._fenced:
            return False
        self.integrate(now)
        self._fenced = slots
        self.foreign = max(self._seen, slots)
        return True

    def take_over(self, slots: int, now: float) -> None:
        """These of others' busy slots are to be leases' of ours, which `take` them now."""
        self.integrate(now)
        self._seen = max(0, self._seen - slots)
        self.foreign = max(self._seen, self._fenced)

    def forget_others(self) -> None:
        """Others that were seen belong to us by now, or did."""
        self._minutes = ()

    def minutes_of_others(self, now: float) -> int:
        """In how many of the last `RECENT_MINUTES` others kept slots busy, as far as was seen."""
        return sum(minute > int(now / 60) - RECENT_MINUTES for minute in self._minutes)

    def take_tokens_reading(self) -> tuple[int, ...] | None:
        """The last reading of the busy slots' tokens, the first time; then None."""
        reading, self.tokens_reading = self.tokens_reading, None
        return reading

    def clear_foreign(self) -> None:
        """The node reports no slots: nothing is known of others' work."""
        self._seen, self.foreign, self.tokens_reading = 0, self._fenced, ()

    def _roll(self, now: float) -> None:
        window = int(now / SLOT_LINGER)
        if window != self._window:
            self._earlier_peak = self._peak if window == self._window + 1 else self.leased
            self._peak = self.leased
            self._window = window


@dataclass(frozen=True, slots=True)
class SlotsReader:
    """Who is told of each reading of `/slots`."""

    clock: Callable[[], float]
    read: Callable[[Node, frozenset[SlotTask], float], None]
    """Gets the node, what its busy slots work on, and when it was asked, by `clock`."""


# A model that was closed for one of these reasons stays so, though its server still holds it.
_OWN_CAUSES: frozenset[UnloadCause] = frozenset({"idle", "replicas", "operator"})
# Least seconds and events of a span of a decode that shows how fast it goes.
SPAN_SECONDS, SPAN_TOKENS = 2.5, 4


class NodeState(enum.Enum):
    """The states of a node, in the order in which `judge_state` tests for them."""

    STANDBY = "standby"
    DRAINING = "draining"
    DOWN = "down"
    UNLOADED = "unloaded"
    """Its router has not loaded it, and does so for a request (`router.py`)."""
    UNLOADING = "unloading"  # it ends its requests and is unloaded then
    FAILED = "failed"  # its router could not load it
    SLEEPING = "sleeping"
    """It has unloaded its model while it was idle (`lifecycle.py`). The next request wakes it."""
    LOADING = "loading"
    STARTING = "starting"
    EJECTED = "ejected"
    MUTE = "mute"
    DEGRADED = "degraded"
    """Far slower than it used to be (`speed.py`). It gets work, chosen by its speed."""
    READY = "ready"


# States of a node that is worth the ordinary wait; for any other, `wait_for_node` holds.
ALIVE_STATES = frozenset(
    {
        NodeState.READY,
        NodeState.DEGRADED,
        NodeState.MUTE,
        NodeState.SLEEPING,
        NodeState.UNLOADED,
        NodeState.UNLOADING,
    }
)


class LearntOfServer(msgspec.Struct, frozen=True):
    """What was learnt of a server, as it outlives the process."""

    served_as: ServedAs  # the model and build of which it was learnt
    speed: SpeedState
    usual: UsualSpeeds
    wake_seconds: float | None


# Seconds for which a node that has answered a request for a stream plainly is asked for none.
# Plain requests can't be cancelled, so it is tried again.
PLAIN_SECONDS = 600.0
MOST_CALIBRATIONS = 5  # calibrations of one server that may fail, or be given up
# Seconds after the first of them until the next; four times as many after each further one.
CALIBRATION_PAUSE = 5.0


@dataclass(slots=True)
class CalibrationRecord:
    """A node's calibrations (`calibration.py`). Times are monotonic seconds."""

    tries: int = 0  # those in a row that were in vain
    due_at: float = -math.inf  # when the next one may begin
    loaded_at: int = -1
    """The node's `requests` when its server loaded its model: no request has warmed it until they
    are more."""
    penalty: float = 0.0
    """While one runs: seconds until its prompt has been read, and the slot can be free."""
    outcome: str | None = None  # how the last one ended; None: there was none
    ended_at: float = 0.0
    prefill_tps: float | None = None  # what the last good one showed
    decode_tps: float | None = None

    def delay(self, penalty: float) -> None:
        """One begins, which delays requests so; 0: its slot is free."""
        self.penalty = penalty

    def end(
        self,
        outcome: str,
        now: float,
        *,
        warm: bool,
        again: bool,
        shown: tuple[float | None, float | None] | None = None,
    ) -> None:
        """It has ended. `warm`: the model has worked; `again`: another one is needed.

        `shown`: the speeds of reading and writing that it has shown.
        """
        self.outcome, self.ended_at = outcome, now
        self.prefill_tps, self.decode_tps = shown or (self.prefill_tps, self.decode_tps)
        self.tries = self.tries + 1 if again else 0
        self.due_at = now + CALIBRATION_PAUSE * 4.0 ** (self.tries - 1)
        if warm:
            self.loaded_at = -1

    def postpone(self, until: float) -> None:
        """None may begin before."""
        self.due_at = until

    def server_started(self, requests: int, *, replaced: bool = False) -> None:
        """The server has loaded its model anew, after so many requests; `replaced`: another one.

        What failed before is not tried sooner for that: the server may die of it each time.
        """
        self.loaded_at = requests
        if replaced or self.outcome != "failed":
            self.tries, self.due_at = 0, -math.inf


@dataclass(slots=True, eq=False)
class Node:
    """One node. The fleet decides its `state` and `reason` (`Fleet.refresh_state`).

    A router is a node without slots, and each of its models is a node (`router.py`).
    """

    spec: NodeSpec
    upstream: ConnectionPool
    settings: Settings
    clock: Callable[[], float]
    circuit: Circuit
    properties: ServerProperties = field(default_factory=ServerProperties)
    speed: Speed = field(default_factory=Speed)
    degradation: DegradationDetector = field(default_factory=DegradationDetector)
    plain_until: float = -math.inf
    """Until when it is not asked for streams, since it has answered one plainly; monotonic."""
    measured: ServedAs = (None,) * 6
    """The model and build of which the speed was learnt, as far as the server has said."""
    replacements: int = 0
    """How often the server came to have another model, build or number of slots."""
    calibration: CalibrationRecord = field(default_factory=CalibrationRecord)
    concurrency_limit: ConcurrencyLimit | None = None
    """Requests at once, learnt from answers: for OpenAI-compatible endpoints only."""
    probe_history: ProbeHistory = field(default_factory=ProbeHistory)
    sleep: Sleep = field(default_factory=Sleep)
    state: NodeState = NodeState.STARTING
    reason: str = ""
    draining: bool = False
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    """Of a standby node with hooks: whether it runs."""
    key_rejection: KeyRejection = field(default_factory=KeyRejection)
    router: Node | None = None  # of which it is one model
    load: ModelLoad | None = None  # of a router's model: whether it is loaded
    instances: dict[str, Node] = field(default_factory=dict)  # a router's models
    router_record: RouterRecord = field(default_factory=RouterRecord)
    removed: bool = False  # out of the inventory: it gets no new work and ends what it runs
    refusal_hints: dict[str, str] = field(default_factory=dict)
    """For endpoints that it has refused: the reason that it gave."""
    endpoint_refused_at: float = math.inf
    """When it last refused an endpoint; infinity: never, to this process."""
    drift: tuple[str, ...] = ()  # how the server differs from the inventory, as last published
    indexed_models: frozenset[str] = frozenset()  # its public models, as the fleet's index has them
    indexed_aliases: dict[str, str] = field(default_factory=dict)
    """Which of them are further names of others, likewise."""
    leases: set[Lease] = field(default_factory=set)
    """Of our requests on it, abandoned ones whose slot it still uses included."""
    occupancy: SlotOccupancy = field(default_factory=SlotOccupancy)
    released_at: float = -math.inf  # when the last lease ended
    requests: int = 0  # leases taken since the start
    failures: int = 0
    slots_reader: SlotsReader | None = None
    on_lease_released: Callable[[Lease, bool], None] = lambda _lease, _counted: None
    on_lease_abandoned: Callable[[Node], None] = lambda _: None
    name: str = field(init=False)
    info: NodeInfo = field(init=False)  # what those who send requests to it may know of it
    is_priced: bool = field(init=False)  # whether its hours or its tokens cost anything

    def __post_init__(self) -> None:
        self.name = self.spec.name
        if self.spec.kind == "openai":
            self.concurrency_limit = ConcurrencyLimit()
        self._renew_info()
        if self.slots_reader is not None:
            # Others may use it, until the reader says which of its slots they do.
            self.occupancy.fence(MOST_SLOTS, self.clock())

    # What it may be given.

    @property
    def host(self) -> str:
        """Its failure domain."""
        return self.spec.host

    @property
    def is_router(self) -> bool:
        """Whether it loads models on demand, each of which is a node."""
        on_demand = self.properties.is_router or self.spec.models_on_demand is True
        return on_demand and self.router is None

    @property
    def most_loaded(self) -> int:
        """Models that a router holds at once, as it says or was seen to; 0: as many as fit."""
        return self.properties.most_loaded or self.router_record.most_loaded

    @property
    def takes_commands(self) -> bool:
        """Whether it is a router that may be told to load and unload its models."""
        return self.properties.is_router and self.spec.models_on_demand is not False

    @property
    def routed(self) -> tuple[Node, ModelLoad]:
        """The router of which it is one model, and whether that is loaded; of such a node alone."""
        assert self.router is not None
        assert self.load is not None
        return self.router, self.load

    @property
    def is_alive(self) -> bool:
        """Whether it is worth the ordinary wait."""
        if self.load is None:
            return self.state in ALIVE_STATES
        may_load = self.state in ALIVE_STATES or self.state is NodeState.LOADING
        return may_load and not self.load.hindrance

    @property
    def slots_total(self) -> int:
        """Requests it works on at once: declared, else reported, else learnt, else one."""
        if self.is_router:
            return 0
        if known := self.spec.slots or self.properties.slots:
            return known
        return 1 if self.concurrency_limit is None else self.concurrency_limit.slots

    @property
    def slots_now(self) -> int:
        """`slots_total`, but none of a router's model that is not loaded: for sums over nodes."""
        if self.load is not None and not self.load.loaded:
            return self.leased
        return self.slots_total

    @property
    def most_slots(self) -> int:
        """The most that `slots_total` can become: no wider request can ever run here."""
        is_known = self.spec.slots or self.properties.slots or self.concurrency_limit is None
        return self.slots_total if is_known else MOST_LIMIT

    @property
    def context(self) -> int | None:
        """Tokens of one slot: declared, else reported; None: unknown."""
        return self.spec.context if self.spec.context is not None else self.properties.context

    @property
    def pool(self) -> int:
        """Tokens that its slots share; 0: each slot has its own, as far as is known."""
        kv = self.spec.kv
        if kv == "split" or (kv == "auto" and not self.properties.shared_pool):
            return 0
        return self.context or 0

    def answered_plain(self, now: float) -> None:
        """It does not stream."""
        self.plain_until = now + PLAIN_SECONDS

    @property
    def silence_timeout(self) -> float:
        """Seconds that a stream of this node may be silent."""
        own = self.spec.timeouts.silence
        return own if own is not None else self.settings.timeouts.silence

    @property
    def public_models(self) -> frozenset[str]:
        """The public names of the models it serves: declared, else reported."""
        if self.is_router:
            return frozenset()
        return frozenset(self.properties.names if self.spec.models is None else self.spec.models)

    @property
    def models_unknown(self) -> bool:
        """Whether it may serve any model: neither the inventory nor the server has named one."""
        return (
            self.in_service and not self.public_models and self.probe_history.discovered_at is None
        )

    def served_name(self, model: str) -> str | None:
        """The node's own name for this public model name; None if it does not serve it."""
        if self.router is not None:
            return self.spec.instance if model in self.public_models else None
        if self.spec.models is not None:
            return self.spec.models.get(model)
        properties = self.properties
        return model if model in properties.models or model in properties.aliases else None

    def may_resume(self, resume_key: tuple[object, ...]) -> bool:
        """Whether it can go on with a stream of a server that has this key, as far as is known.

        Of a model that a router has never loaded too little is known; who resumes it looks again.
        """
        properties = self.properties
        return properties.resume_key() == resume_key or (
            self.load is not None and properties.build is None
        )

    def supports(self, endpoint: Endpoint, *, vision: bool = False) -> bool:
        """Whether it serves this endpoint: as declared, else unless it has refused it."""
        if self.spec.endpoints is not None:
            wanted = {endpoint, "vision"} if vision else {endpoint}
            return wanted <= self.spec.endpoints
        properties = self.properties
        if endpoint in properties.refused or endpoint in properties.refused_for_purpose:
            return False
        return not vision or (properties.vision is not False and "vision" not in properties.refused)

    @property
    def is_for_chat(self) -> bool:
        """Whether chats belong here; False: its server is for embeddings or reranking."""
        return self.spec.endpoints is not None or self.properties.purpose not in {
            "embeddings",
            "rerank",
        }

    @property
    def is_purpose_unknown(self) -> bool:
        """Whether its server was never asked what it is for: at the first chance it is."""
        return (
            self.spec.kind == "llama.cpp"
            and self.properties.purpose is None
            and not self.is_router
            and (self.load is None or self.load.loaded)
        )

    @property
    def in_service(self) -> bool:
        """Whether the inventory allows probes and work; a standby node: while it may run."""
        if not self.spec.enabled or self.removed:
            return False
        if self.router is not None:
            return self.router.in_service
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
        """Whether it answers `/slots`, as far as is known."""
        if self.is_router or (self.load is not None and not self.load.loaded):
            return False
        return self.spec.kind == "llama.cpp" and self.properties.slots_endpoint is not False

    def load_endpoint(
        self, now: float, *, comes_up: bool = False, fleet_works: bool = False
    ) -> str | None:
        """Where a probe may ask how many slots are busy; None: nowhere.

        A server that may sleep is asked only by what keeps no idle one awake: `/slots` while it
        works, else `/metrics`. Without that it is left alone, but for one reading when it
        `comes_up`, and until it is seen asleep while it was in use of late and the `fleet_works`:
        then others' load on it matters.
        """
        sleep = self.sleep
        if not self.reports_slots or sleep.asleep:
            return None
        if self.router is not None:
            return "/slots" if self.leases or self.foreign else None
        if not sleep.possible or self.leases:
            return "/slots"
        if self.properties.metrics_endpoint:
            return "/metrics"
        idle = now - self.released_at
        wanted = fleet_works and not sleep.seen and idle < RECENT_USE
        used = comes_up or wanted or self.foreign > 0 or idle < REST_DELAY
        return None if sleep.may_rest(now, used=used) else "/slots"

    @property
    def leased(self) -> int:
        """Slots that our leases hold; the sum over `leases`."""
        return self.occupancy.leased

    @property
    def foreign(self) -> int:
        """Slots that other clients of the server keep busy, by the last reading of `/slots`."""
        return self.occupancy.foreign

    def others_take_slots(self, now: float) -> bool:
        """Whether others keep slots of it, or of a router's models, busy again and again.

        Our requests are none of theirs, nor are those that we have left and that it still works on.
        """
        rows = self.instances.values() if self.is_router else (self,)
        return any(one.occupancy.minutes_of_others(now) >= LEAST_MINUTES for one in rows)

    @property
    def slots_busy(self) -> int:
        """Slots in use: the larger of our leases and the node's own count."""
        return max(self.leased, min(self.slots_total, self.leased + self.foreign))

    @property
    def live_leases(self) -> list[Lease]:
        """Those whose requests were not abandoned."""
        return [lease for lease in self.leases if lease.abandoned_phase is None]

    def paused(self, now: float) -> bool:
        """Whether the endpoint has asked for no new work at this moment (429, `Retry-After`)."""
        return self.concurrency_limit is not None and self.concurrency_limit.paused(now)

    def capacity(self, now: float) -> int:
        """Slots that work may use at this moment, those in use included."""
        if self.removed or self.paused(now):
            return 0
        sleeping = self.state is NodeState.SLEEPING
        if (
            self.state is NodeState.READY
            or self.state is NodeState.DEGRADED
            or (sleeping and self.circuit.open_until is None)
        ):
            return self.circuit.slow_start_slots(self.slots_total, now)
        if (
            (sleeping or self.state is NodeState.EJECTED)
            and self.circuit.wants_trial(now)
            and not self.probe_history.silent
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
            if self.removed or self.properties.is_router:
                return 0
            # `slots_total`, inlined: this runs for each request.
            total = self.spec.slots or self.properties.slots or 1
            left = total - self.occupancy.leased - self.occupancy.foreign
            return left if left > 0 else 0  # noqa: FURB136 - a call costs four times as much
        capacity = self.capacity(now)
        if not capacity:
            return 0
        used = self.leased + self.foreign
        if self.circuit.open_until is not None:
            return 1 if used < self.slots_total else 0
        return max(0, capacity - used)

    def calibration_due(self, now: float) -> bool:
        """Whether a calibration may begin, as far as is known: it is idle and its speed unknown.

        Or its server has just loaded its model, and is to be warmed up.
        """
        record, speed = self.calibration, self.speed
        known = speed.samples or speed.calibrated is not None
        if (known and record.loaded_at != self.requests) or now < record.due_at:
            return False
        return (
            record.tries < MOST_CALIBRATIONS
            and self.spec.calibrate
            and (self.state is NodeState.READY or self.state is NodeState.DEGRADED)
            and self.reports_slots
            and not (self.leases or self.foreign)
            and self.capacity(now) > 0
        )

    def wake_price(self, now: float) -> float:
        """Seconds until it could begin a request, while it sleeps and none of ours wakes it."""
        if self.state is not NodeState.SLEEPING or any(lease.wakes for lease in self.leases):
            return 0.0
        return self.seconds_asleep(now)

    def seconds_asleep(self, now: float) -> float:
        """Seconds until it is awake, if a request wakes it now or has done so; 0: it is awake."""
        if self.state is not NodeState.SLEEPING:
            return 0.0
        return self.sleep.seconds_left(self.properties.size, now)

    def load_price(self, now: float) -> float:
        """Seconds until its model can be loaded, if it is not; of a router's model."""
        if self.load is None:
            return 0.0
        return self.load.expected_in(self.sleep.wake_seconds(self.properties.size), now)

    def next_change(self, now: float) -> float:
        """When time alone may change what work it takes; infinity: never."""
        due = self.circuit.next_change(now)
        if self.load is not None and self.load.phase is LoadPhase.FAILED:
            due = min(due, self.load.retry_at)
        if self.concurrency_limit is not None and self.concurrency_limit.paused(now):
            due = min(due, self.concurrency_limit.paused_until)
        return due

    def take(self, lease: Lease, now: float, wake: float = 0.0) -> None:
        """Count the slots of a lease as used. The caller has checked `free_slots`.

        The lease's `expected_prefill` and `expected_total` hold `wake`, the seconds in which its
        server wakes up. A request that needs no slot takes 0.
        """
        slots = lease.slots
        circuit, occupancy = self.circuit, self.occupancy
        wakes = wake > 0.0 and self.sleep.begin_wake(now)
        trial = circuit.open_until is not None and circuit.wants_trial(now)
        if trial:
            circuit.begin_trial(lease)
        self.leases.add(lease)
        if self.concurrency_limit is not None:
            self.concurrency_limit.record_in_flight(occupancy.leased + slots)
        occupancy.take(slots, now, lease.prefilling)
        lease.counted(occupancy, wake, wakes, trial)
        self.requests += 1

    def take_calibration_lease(self, now: float) -> Lease:
        """A lease on no slot, since no request may wait for it, and none of the `requests`."""
        lease = Lease(self, 0, now, stream=False)
        self.leases.add(lease)
        return lease

    def follow_held(
        self, status: Status | None, asked_at: float, *, restarted: bool
    ) -> LoadChange | None:
        """Take in whether the server of a router's model holds it; what that changes, or None.

        `restarted`: the server was away since the last list.
        """
        (router, load), sleep, now = self.routed, self.sleep, self.clock()
        if status == "loading" or (status is None and not restarted):
            return None
        before = None if restarted else load.held
        load.tell_held(None if status is None else status == "loaded")
        if load.phase is LoadPhase.UNLOADED or load.phase is LoadPhase.FAILED:
            if before and not load.held:
                return LoadChange("unloaded")
            # What was just closed is held until another one is loaded.
            stays = before and (load.cause in _OWN_CAUSES or now - load.since <= COMMAND_LAG)
            models = router.instances.values()
            opened = sum(one.load is not None and one.load.loaded for one in models)
            is_full = opened >= max(1, router.router_record.most_loaded)
            if not load.held or stays or is_full:
                return None
            load.enter(LoadPhase.READY, "found so", now)
            load.load_ended(None)
            sleep.props_read(True, now, asked=False)  # It may be unloaded at any time.
            sleep.woke()
            return LoadChange("loaded", None, by_others=before is False)
        if load.phase is not LoadPhase.READY or self.live_leases:
            return None  # What its requests meet is seen in their responses.
        if asked_at <= max(load.since, self.released_at):
            return None
        if load.held:
            sleep.woke()
        elif sleep.sleeping:
            sleep.props_read(True, now, asked=False)  # Whoever was to load it has left.
        else:
            reason = "its server was restarted" if restarted else "its server has unloaded it"
            load.enter(LoadPhase.UNLOADED, reason, now, "restart" if restarted else "others")
            sleep.restarted()
            return LoadChange("unloaded")
        return None

    def lease_released(self, lease: Lease, counted: bool) -> None:  # noqa: FBT001
        """The lease's slots are free: called by the lease, once.

        `counted`: it has told the scheduler that they are free.
        """
        self.leases.remove(lease)
        self.released_at = lease.released_at or 0.0
        if lease.trial:
            self.circuit.end_trial(lease)
        self.on_lease_released(lease, counted)

    def read_slots_for(self, reader: SlotsReader | None) -> None:
        """Tell this reader of each reading of `/slots`; None: nobody."""
        self.slots_reader = reader

    def slots_asked(self) -> float:
        """The node is asked for its slots now, by the clock of those who are told."""
        return 0.0 if self.slots_reader is None else self.slots_reader.clock()

    def slots_told(self, busy: frozenset[SlotTask], asked_at: float) -> None:
        """These of its slots were busy, as it was asked at that time (`slots_asked`)."""
        if self.slots_reader is not None:
            self.slots_reader.read(self, busy, asked_at)

    # What the inventory, the settings and the operator decide.

    def configure(self, settings: Settings) -> None:
        """Put changed settings in force."""
        self.settings = settings
        self.circuit.configure(settings.health)

    def respecify(self, spec: NodeSpec, now: float) -> None:
        """Take in a changed entry of the inventory; probe soon if that puts it into service."""
        was_in_service = self.in_service
        self.spec = spec
        self._renew_info()
        if not was_in_service:
            self.reset_probes(now)

    def replace_upstream(self, upstream: ConnectionPool, now: float) -> ConnectionPool:
        """Use new connections, perhaps with another key; the old ones, for its last leases."""
        replaced, self.upstream = self.upstream, upstream
        self._renew_info()
        self.key_rejection.clear()
        self.probe_history.probe_by(now)
        return replaced

    def leave(self) -> None:
        """It is out of the inventory, for good: at its return it is another one."""
        self.removed = True

    def drain(self, *, draining: bool) -> None:
        """No new work, or new work again."""
        self.draining = draining

    def set_instances(self, instances: dict[str, Node]) -> None:
        """It lists these models."""
        self.instances = instances

    def set_state(self, state: NodeState, reason: str) -> None:
        """The fleet has judged the node anew."""
        self.state, self.reason = state, reason

    def reset_probes(self, now: float) -> None:
        """Forget earlier probes, and probe now: the server may be another process."""
        self.probe_history = ProbeHistory(next_probe_at=now)
        self.sleep.restarted()

    # What requests and probes find out.

    def request_failed(self) -> None:
        """A request failed, and the node is to blame."""
        self.failures += 1

    def endpoint_refused(self, endpoint: Endpoint, hint: str | None, now: float) -> None:
        """It refused this endpoint (501), and gave `hint` as the reason."""
        self.properties.refused.add(endpoint)
        self.endpoint_refused_at = now
        if hint is not None:
            self.refusal_hints[endpoint] = hint

    def forget_replaced_model(self) -> None:
        """Forget the learnt speed if the server has another model, build or number of slots now."""
        now = self.properties.served_as()
        if not _may_be_same(self.measured, now):
            self.speed.forget()
            self.degradation.forget()
            self.sleep.forget()
            self.calibration.server_started(self.requests, replaced=True)
            self.replacements += 1
            self.measured = now
        else:
            self.measured = _together(now, self.measured)

    def export(self) -> LearntOfServer | None:
        """What was learnt of its server; None: nothing was."""
        if (speed := self.speed.export()) is None:
            return None
        usual = self.degradation.export()
        return LearntOfServer(self.measured, speed, usual, self.sleep.measured)

    def restore(self, learnt: LearntOfServer, kept: float) -> None:
        """Go on from what was learnt, unless it was of another model or build.

        `kept`: the share that its evidence still counts. If the server has not said yet what it
        has, it gets no work either, and `forget_replaced_model` looks again when it has.
        """
        now = self.properties.served_as()
        if _may_be_same(learnt.served_as, now):
            self.measured = _together(now, learnt.served_as)
            self.speed.restore(learnt.speed, kept)
            self.degradation.restore(learnt.usual, kept, self.clock())
            if learnt.wake_seconds is not None:
                self.sleep.learn_wake(learnt.wake_seconds)

    def _renew_info(self) -> None:
        spec, own = self.spec, self.spec.timeouts
        self.is_priced = bool(spec.cost_per_hour) or spec.cost_per_million_tokens is not None
        self.info = NodeInfo(
            spec.name,
            spec.tier,
            spec.kind,
            connect_timeout=own.connect,
            first_byte_timeout=own.first_byte,
            silence_timeout=own.silence,
            total_timeout=own.total,
            context=self.context,
            resume_key=self.properties.resume_key(),
            started_by_up=spec.labels.get(STARTED_BY) == UP,
            query="autoload=false" if spec.instance and spec.kind == "llama.cpp" else "",
            connections=self.upstream,
        )

    def update_info(self) -> None:
        """Make `info` anew if the server's properties have changed it."""
        info, properties = self.info, self.properties
        if info.context != self.context or info.resume_key != properties.resume_key():
            self._renew_info()

    def models_changed(self) -> bool:
        """Whether its public models differ from those of the last call (`indexed_models`)."""
        before = self.indexed_models, self.indexed_aliases
        self.indexed_models, self.indexed_aliases = self.public_models, self.properties.aliases
        return (self.indexed_models, self.indexed_aliases) != before

    def drift_changed(self) -> bool:
        """Whether its `drift` differs from that of the last call."""
        before, self.drift = self.drift, inventory_drift(self.spec, self.properties)
        return self.drift != before


def _may_be_same(before: ServedAs, now: ServedAs) -> bool:
    """Whether they agree wherever both say something."""
    return all(old in {None, new} or new is None for old, new in zip(before, now, strict=True))


def _together(now: ServedAs, before: ServedAs) -> ServedAs:
    """All that is known: a server that leaves something out still has it."""
    known = (old if new is None else new for old, new in zip(before, now, strict=True))
    return cast("ServedAs", tuple(known))


class Lease:
    """Slots held on a node: counted by `Node.take`, ended by `release`.

    After `abandon` the reclaimer releases them, once the node shows them idle. Times are monotonic
    seconds. The scheduler's leases override what their own counts follow.
    """

    __slots__ = (
        "abandoned_at", "abandoned_phase", "expected_prefill", "expected_total",
        "first_content_at", "last_content_at", "mean_prefills", "node", "phase",
        "prefill_began_at", "prefill_seconds", "prefilling", "released_at", "slot_seconds", "slots",
        "span", "stream", "taken_at", "trial", "upstream", "wake", "wakes",
    )  # fmt: skip

    def __init__(self, node: Node, slots: int, taken_at: float, stream: bool) -> None:  # noqa: FBT001 - each call costs
        """`stream`: the node streams its answer, and so stops soon after the gateway leaves."""
        self.node, self.slots, self.taken_at, self.stream = node, slots, taken_at, stream
        self.expected_prefill: float | None = None
        self.expected_total: float | None = None
        """Predicted seconds from dispatch to the first content and to the end; None: unknown."""
        self.upstream = node.upstream  # it stays open until the lease has ended
        self.wake = 0.0  # the part of `expected_prefill` in which its server, which slept, wakes up
        self.wakes = self.trial = False
        """Whether it was the first request to a server that slept, and no content has come; and
        whether its outcome closes or reopens the node's circuit."""
        self.phase = _WAITING_HEAD
        self.prefill_began_at = taken_at
        self.prefilling = stream and slots > 0
        """Whether the node's occupancy counts its prompt as being read."""
        self.last_content_at: float | None = None  # when the last byte of content came
        self.first_content_at: float | None = None
        self.released_at: float | None = None  # when the slots became free
        self.abandoned_at = 0.0
        self.abandoned_phase: LeasePhase | None = None
        self.mean_prefills = 1.0  # mean number of prompts read on the node while its own was
        self.slot_seconds = self.prefill_seconds = 0.0
        """The node's sums (`SlotOccupancy`) when the lease was taken, then when its prompt was
        read; after the release the difference since then."""
        self.span = _NO_SPAN
        """The span of its decode that goes on: when it began, the events before it (0: none goes
        on), and the node's `slot_seconds` and `prefill_seconds` then."""

    def expect(self, prefill: float | None, total: float | None) -> None:
        """Set `expected_prefill` and `expected_total`."""
        self.expected_prefill, self.expected_total = prefill, total

    def counted(
        self,
        occupancy: SlotOccupancy,
        wake: float,
        wakes: bool,  # noqa: FBT001 - each call costs
        trial: bool,  # noqa: FBT001 - as above
    ) -> None:
        """Its node counts it from now on."""
        self.slot_seconds, self.prefill_seconds = occupancy.slot_seconds, occupancy.prefill_seconds
        self.wake, self.wakes, self.trial = wake, wakes, trial

    def prefill_ended(self, now: float) -> None:
        """The first content came: the prompt has been read."""

    def slots_freed(self, _now: float) -> bool:
        """The slots are free; told before anyone else. Returns whether others' counts follow."""
        return False

    def head_received(self, now: float) -> None:
        """The head of a streamed answer has come: a slot reads the prompt."""
        if self.phase is LeasePhase.WAITING_HEAD:
            self.phase = LeasePhase.PREFILL
            self.prefill_began_at = now

    def content_received(self, now: float) -> None:
        """Content came from the node."""
        self.last_content_at = now
        if self.phase is LeasePhase.WAITING_HEAD or self.phase is LeasePhase.PREFILL:
            self.phase = LeasePhase.DECODE
            if self.prefilling:
                # What the node does from here on is measured apart from its prefill.
                occupancy = self.node.occupancy
                occupancy.prefill_done(now)
                self.prefilling = False
                self.first_content_at = now
                if now > self.taken_at:
                    read_meanwhile = occupancy.prefill_seconds - self.prefill_seconds
                    self.mean_prefills = read_meanwhile / (now - self.taken_at)
                self.slot_seconds = occupancy.slot_seconds
                self.prefill_seconds = occupancy.prefill_seconds
            self.prefill_ended(now)

    def next_span(self, tokens: int, now: float) -> tuple[int, ObservedTiming] | None:
        """More of a response came: the events of a span that ends now, and what was seen in it.

        None: no span of its decode ends now.

        `tokens`: events that have come by now; 0: unknown. What others' requests do to the node is
        unknown too.
        """
        self.last_content_at = now
        occupancy = self.node.occupancy
        occupancy.integrate(now)
        began, before, slot_seconds, prefill_seconds = self.span
        if occupancy.foreign or self.slots != 1:
            tokens = 0
        seconds, count = now - began, tokens - before
        if before and tokens and (seconds < SPAN_SECONDS or count < SPAN_TOKENS):
            return None
        self.span = now, tokens, occupancy.slot_seconds, occupancy.prefill_seconds
        if not (before and tokens):
            return None
        busy = (occupancy.slot_seconds - slot_seconds) / seconds
        stalled = min(seconds, occupancy.prefill_seconds - prefill_seconds)
        return count, ObservedTiming(seconds, 0.0, busy, stalled)

    def woke(self) -> None:
        """Its server has shown that it is awake."""
        self.wakes = False

    def release(self) -> None:
        """The slots are free. Calling it again does nothing."""
        if self.phase is _RELEASED:
            return
        self.phase = _RELEASED
        node = self.node
        self.released_at = now = node.clock()
        counted = self.slots_freed(now)
        occupancy = node.occupancy
        occupancy.release(self.slots, now, self.prefilling)
        self.slot_seconds = occupancy.slot_seconds - self.slot_seconds
        self.prefill_seconds = occupancy.prefill_seconds - self.prefill_seconds
        node.lease_released(self, counted)

    def abandon(self) -> None:
        """The gateway leaves, the node may still be at work: hold the slots until they are idle."""
        if self.phase is LeasePhase.RELEASED or self.phase is LeasePhase.RECLAIM:
            return
        self.abandoned_phase = self.phase
        self.phase = LeasePhase.RECLAIM
        self.abandoned_at = self.node.clock()
        self.node.on_lease_abandoned(self.node)

    def observed_timing(self) -> ObservedTiming | None:
        """What the gateway saw of the request and its node; None until the release."""
        if self.released_at is None or not self.slots:
            return None
        seconds = decode_seconds = self.released_at - self.taken_at
        ttft = None
        if self.first_content_at is not None:
            ttft = self.first_content_at - self.taken_at
            decode_seconds = self.released_at - self.first_content_at
        busy = self.slot_seconds / decode_seconds if decode_seconds > 0 else float(self.slots)
        stalled = min(decode_seconds, self.prefill_seconds)
        return ObservedTiming(seconds, ttft, busy, stalled, self.mean_prefills)
