"""Which tier, GPU or CPU nodes, a request goes to, and why. Pure rules.

| class | its own tier | the other tier |
| --- | --- | --- |
| `gpu_first` (urgent, premium) | GPU | CPU, while the GPU nodes are down or full |
| all others | CPU | GPU, to spill over, within the budget |

A model that one tier alone serves is served there for every class: that is neither a fallback nor
spill-over, and no budget counts it.

**Budget.** A request reserves the most that it can cost, and pays what it did cost. It is admitted
while what was paid within the window plus what is reserved is below the budget. So the last one
admitted may exceed the budget, by its own cost and no more: all others were counted at their cost,
or at more. A request whose cost has no bound reserves infinity, and no other is admitted beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from gateway.callers.windows import SlidingSum
from gateway.config.scheduling import HybridSettings, SpillSettings
from gateway.terms import Priority


@dataclass(frozen=True, slots=True, eq=False)
class SpillReservation:
    """The part of the budget that one request holds until it has ended."""

    budget: SpillBudget
    most_cost: float

    def settle(self, cost: float, *, happened: bool, now: float) -> None:
        """Pay `cost`; `happened`: it counts as a request that spilled over.

        Only the first call of this or `cancel` counts.
        """
        self.budget.settled(self, cost, happened=happened, now=now)

    def cancel(self) -> None:
        """The request was never sent."""
        self.settle(0.0, happened=False, now=-math.inf)


@dataclass(slots=True)
class SpillBudget:
    """The budget of one gateway. It outlives reloads: `configure` changes its limits alone.

    `share` holds whenever a request is admitted: of the requests within the window that ends then,
    this one included, no more than that share spilled over. `money_per_hour` holds over every
    window: what was paid in it is at most the budget and one request.
    """

    settings: SpillSettings
    arrivals: SlidingSum = field(init=False)
    spilled: SlidingSum = field(init=False)
    paid: SlidingSum = field(init=False)
    _held: dict[SpillReservation, None] = field(default_factory=dict)  # not settled yet

    def __post_init__(self) -> None:
        span = self.settings.window
        self.arrivals = SlidingSum(span, overestimate=False)
        self.spilled = SlidingSum(span, overestimate=True)
        self.paid = SlidingSum(span, overestimate=True)

    def configure(self, settings: SpillSettings) -> None:
        """Put other limits in force; what was paid and what is reserved stays counted."""
        self.settings = settings
        for total in (self.arrivals, self.spilled, self.paid):
            total.resize(settings.window)

    @property
    def money_limit(self) -> float:
        """What may be paid within one window; infinity: no limit."""
        settings = self.settings
        if settings.money_per_hour is None:
            return math.inf
        return settings.money_per_hour * settings.window / 3600

    @property
    def outstanding(self) -> int:
        """How many requests have a reservation."""
        return len(self._held)

    @property
    def reserved(self) -> float:
        """The most that they can cost together."""
        return sum([one.most_cost for one in self._held], 0.0)

    def arrived(self, now: float) -> None:
        """A request of a class that may spill over has arrived: `share` is counted of these."""
        self.arrivals.add(now, 1.0)

    def reserve(self, now: float, most_cost: float) -> SpillReservation | None:
        """Admit one more that costs `most_cost` at most; None: the budget is used up."""
        share, money = self.settings.share, self.money_limit
        if share is not None:
            spilled = self.spilled.value(now) + self.outstanding + 1
            if spilled > share * self.arrivals.value(now) + 1e-9:
                return None
        if money < math.inf and self.paid.value(now) + self.reserved >= money:
            return None
        if math.isnan(most_cost) or most_cost < 0:
            most_cost = math.inf
        reservation = SpillReservation(self, most_cost)
        self._held[reservation] = None
        return reservation

    def settled(
        self, reservation: SpillReservation, cost: float, *, happened: bool, now: float
    ) -> None:
        """A reservation has ended; if it had before, nothing happens."""
        if reservation not in self._held:
            return
        del self._held[reservation]
        if happened:
            self.spilled.add(now, 1.0)
        if cost > 0:
            self.paid.add(now, cost)


Tier = Literal["gpu", "cpu"]

# Why a request is not in its class's own tier; the values of `X-Gateway-Fallback`.
FallbackReason = Literal[
    "gpu_full", "gpu_down", "gpu_limited", "gpu_failed", "cpu_wait", "cpu_down"
]


@dataclass(frozen=True, slots=True)
class TierStatus:
    """The nodes of one tier that could ever serve one request, as they are now."""

    alive: bool  # one of them is up and has not failed this request
    has_room: bool  # one of those has the slots that the request takes
    wait_seconds: float = math.inf  # predicted seconds until one has; infinity: unknown
    service_seconds: float = 0.0
    """Predicted seconds from then to the end of the answer, on the best of them."""
    paused: bool = False
    """Those that are up take nothing for a while because the endpoint asked for it (429)."""
    failed: bool = False  # one of them has failed this request


@dataclass(frozen=True, slots=True)
class TierRoute:
    """Where one request may go."""

    class_tier: Tier  # its class's own tier
    tiers: tuple[Tier, ...]
    """The open tiers in order of preference: each is for when those before it are full."""
    fallback_delay: float = 0.0  # seconds for which only the first is open
    reason: FallbackReason | None = None  # why it may go to the other tier
    reservation: SpillReservation | None = None
    """The share of the budget that it reserved to spill over; its lease settles it."""

    def fallback(self, tier: Tier) -> FallbackReason | None:
        """Why a request that was placed on `tier` is there; None: it is its own tier."""
        return None if tier == self.class_tier else self.reason


# The reason holds if the GPU has filled up by the time the request is placed.
_GPU = TierRoute("gpu", ("gpu", "cpu"), reason="gpu_full")
_GPU_ALONE = TierRoute("gpu", ("gpu",))
_CPU_ALONE = TierRoute("cpu", ("cpu",))


def route_gpu_first(gpu: TierStatus, cpu: TierStatus, most_wait: float) -> TierRoute:
    """The GPU while it has room; else the CPU, or whichever has room first.

    If waiting for a full GPU is predicted to finish sooner, the request waits for it alone, up to
    `most_wait` seconds.
    """
    if gpu.has_room:
        return _GPU
    if not gpu.alive:
        return TierRoute("gpu", ("gpu", "cpu"), reason="gpu_failed" if gpu.failed else "gpu_down")
    reason: FallbackReason = "gpu_limited" if gpu.paused else "gpu_full"
    sooner = gpu.wait_seconds + gpu.service_seconds < cpu.wait_seconds + cpu.service_seconds
    delay = most_wait if sooner and gpu.wait_seconds <= most_wait and not gpu.paused else 0.0
    return TierRoute("gpu", ("gpu", "cpu"), delay, reason)


def spill_reason(gpu: TierStatus, cpu: TierStatus, least_wait: float) -> FallbackReason | None:
    """Why a request of the CPU tier should go to the GPU now; None: it should not."""
    if cpu.has_room or not gpu.has_room:
        return None
    if not cpu.alive:
        return "cpu_down"
    return "cpu_wait" if cpu.wait_seconds > least_wait else None


class TierPolicy:
    """The rules in force and the budget; one for each process.

    Over `configure` what was spent stays counted, even while spill-over is switched off.
    """

    def __init__(self, settings: HybridSettings) -> None:
        self._budget: SpillBudget | None = None
        self.configure(settings)

    def configure(self, settings: HybridSettings) -> None:
        """Put these settings in force."""
        self._settings = settings
        self._gpu_first = _priorities(settings.gpu_first)
        spill = settings.spill
        self._may_spill = frozenset[Priority]() if spill is None else _priorities(spill.classes)
        if spill is None:
            return
        if self._budget is None:
            self._budget = SpillBudget(spill)
        else:
            self._budget.configure(spill)

    def arrived(self, priority: Priority, now: float) -> None:
        """A request of this class has arrived; to be called once for each, not for retries."""
        if priority in self._may_spill and self._budget is not None:
            self._budget.arrived(now)

    def route(
        self,
        priority: Priority,
        gpu: TierStatus | None,
        cpu: TierStatus | None,
        now: float,
        most_cost: float = math.inf,
    ) -> TierRoute:
        """Where a request may go. None for a tier: no node of it can serve the request.

        `most_cost`: the most that it can cost on a GPU node; a route that spills has reserved it.
        """
        if cpu is None:
            return _GPU_ALONE
        if gpu is None:
            return _CPU_ALONE
        if priority in self._gpu_first:
            return route_gpu_first(gpu, cpu, self._settings.wait)
        spill, budget = self._settings.spill, self._budget
        if spill is None or budget is None or priority not in self._may_spill:
            return _CPU_ALONE
        reason = spill_reason(gpu, cpu, spill.after)
        reservation = None if reason is None else budget.reserve(now, most_cost)
        if reservation is None:
            return _CPU_ALONE
        return TierRoute("cpu", ("gpu",), reason=reason, reservation=reservation)

    def money_left(self, now: float) -> float | None:
        """What spill-over may still cost in its window; None: money does not limit it."""
        budget = self._budget
        if self._settings.spill is None or budget is None or math.isinf(budget.money_limit):
            return None
        return max(0.0, budget.money_limit - budget.paid.value(now) - budget.reserved)

    def view(self, now: float) -> dict[str, object]:
        """The rules and the budget's state, for the admin API."""
        spill, budget = self._settings.spill, self._budget
        shown: dict[str, object] = {"gpu_first": list(self._settings.gpu_first), "spill": None}
        if spill is not None and budget is not None:
            money, reserved = budget.money_limit, budget.reserved
            shown["spill"] = {
                "classes": list(spill.classes),
                "after": spill.after,
                "window": spill.window,
                "requests": int(budget.arrivals.value(now)),
                "spilled": int(budget.spilled.value(now)),
                "running": budget.outstanding,
                "share": spill.share,
                "paid": round(budget.paid.value(now), 6),
                "reserved": None if math.isinf(reserved) else round(reserved, 6),
                "money": None if math.isinf(money) else round(money, 6),
            }
        return shown


def _priorities(labels: tuple[str, ...]) -> frozenset[Priority]:
    parsed = {Priority.parse(label) for label in labels}
    return frozenset(priority for priority in parsed if priority is not None)
