"""CPU and GPU nodes in one fleet: which tier a request goes to, and why. Pure rules.

| class | nodes of its own tier | |
| --- | --- | --- |
| `gpu_first` (urgent, premium) | GPU | CPU while the GPU nodes are out or full |
| all others | CPU | GPU to spill over, within the budget |

A model that only one tier serves is served there for everybody: that is neither a fall-back nor
spill-over, and no budget counts it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gateway.config.tiers import HybridSettings
from gateway.request import Priority
from gateway.scheduling.budget import SpillBudget, SpillReservation

Tier = Literal["gpu", "cpu"]

FallbackReason = Literal[
    "gpu_full", "gpu_down", "gpu_limited", "gpu_failed", "cpu_wait", "cpu_down"
]
"""Why a request is not where its class belongs, as `X-Gateway-Fallback` says it."""


@dataclass(frozen=True, slots=True)
class TierStatus:
    """The nodes of one tier that could ever serve one request, as they stand at this moment."""

    alive: bool
    """One of them is in, and has not failed this request."""
    has_room: bool
    """One of those has the slots that it takes."""
    wait_seconds: float = math.inf
    """Predicted seconds until one has; infinity: no idea."""
    service_seconds: float = 0.0
    """Predicted seconds of the answer, from then on, on the best of them."""
    paused: bool = False
    """Those that are in take nothing for a while because the endpoint asked for it (429)."""
    failed: bool = False
    """One of them has failed this request."""


@dataclass(frozen=True, slots=True)
class TierRoute:
    """Where one request may go."""

    class_tier: Tier
    """The tier that its class belongs to."""
    tiers: tuple[Tier, ...]
    """The open ones in order of preference: each is for when those before it have no room now."""
    fallback_delay: float = 0.0
    """Seconds for which only the first is open."""
    reason: FallbackReason | None = None
    """Why it may end elsewhere than at home."""
    reservation: SpillReservation | None = None
    """What it reserved to spill over: for its lease, or to be cancelled."""

    def fallback(self, tier: Tier) -> FallbackReason | None:
        """What to tell of a request that was placed on `tier`; None where it is at home."""
        return None if tier == self.class_tier else self.reason


_GPU = TierRoute("gpu", ("gpu", "cpu"), reason="gpu_full")
"""Should the room be gone when it is placed, that is why."""

_GPU_ALONE = TierRoute("gpu", ("gpu",))

_CPU_ALONE = TierRoute("cpu", ("cpu",))


def route_gpu_first(gpu: TierStatus, cpu: TierStatus, most_wait: float) -> TierRoute:
    """The GPU while it has room; the CPU otherwise, or both where both are full.

    A full GPU is waited for, up to `wait` seconds, where that is predicted to finish sooner.
    """
    if gpu.has_room:
        return _GPU
    if not gpu.alive:
        return TierRoute("gpu", ("gpu", "cpu"), reason="gpu_failed" if gpu.failed else "gpu_down")
    reason: FallbackReason = "gpu_limited" if gpu.paused else "gpu_full"
    sooner = gpu.wait_seconds + gpu.service_seconds < cpu.wait_seconds + cpu.service_seconds
    hold = most_wait if sooner and gpu.wait_seconds <= most_wait and not gpu.paused else 0.0
    return TierRoute("gpu", ("gpu", "cpu"), hold, reason)


def spill_reason(gpu: TierStatus, cpu: TierStatus, least_wait: float) -> FallbackReason | None:
    """Why a request of the CPU's should go to the GPU now; None: it should not."""
    if cpu.has_room or not gpu.has_room:
        return None
    if not cpu.alive:
        return "cpu_down"
    return "cpu_wait" if cpu.wait_seconds > least_wait else None


class TierPolicy:
    """The rules in force and the budget; one for the process.

    `configure` takes in changed settings: what was spent stays counted, also while spill-over is
    switched off.
    """

    def __init__(self, settings: HybridSettings) -> None:
        self._budget: SpillBudget | None = None
        self.configure(settings)

    def configure(self, settings: HybridSettings) -> None:
        """Put these settings in force."""
        self._settings = settings
        self._first = _priorities(settings.gpu_first)
        spill = settings.spill
        self._spilling = frozenset[Priority]() if spill is None else _priorities(spill.classes)
        if spill is None:
            return
        if self._budget is None:
            self._budget = SpillBudget(spill)
        else:
            self._budget.configure(spill)

    def may_spill(self, priority: Priority) -> bool:
        """Whether requests of this class may spill over at all."""
        return priority in self._spilling

    def arrived(self, priority: Priority, now: float) -> None:
        """A request of this class has come: to be told once for each, retries left out."""
        if priority in self._spilling and self._budget is not None:
            self._budget.arrived(now)

    def route(
        self,
        priority: Priority,
        gpu: TierStatus | None,
        cpu: TierStatus | None,
        now: float,
        most_cost: float = math.inf,
    ) -> TierRoute:
        """Where a request may go. None for a tier: no node of it serves what is asked for.

        `most` is what it can cost on a GPU node at most; a route that spills has reserved it.
        """
        if cpu is None:
            return _GPU_ALONE
        if gpu is None:
            return _CPU_ALONE
        if priority in self._first:
            return route_gpu_first(gpu, cpu, self._settings.wait)
        spill, budget = self._settings.spill, self._budget
        if spill is None or budget is None or priority not in self._spilling:
            return _CPU_ALONE
        reason = spill_reason(gpu, cpu, spill.after)
        reservation = None if reason is None else budget.reserve(now, most_cost)
        if reservation is None:
            return _CPU_ALONE
        return TierRoute("cpu", ("gpu",), reason=reason, reservation=reservation)

    def view(self, now: float) -> dict[str, object]:
        """The rules and the state of the budget, as the admin API shows them."""
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


def _priorities(words: tuple[str, ...]) -> frozenset[Priority]:
    found = {Priority.parse(word) for word in words}
    return frozenset(priority for priority in found if priority is not None)
