"""Which tiers of its candidates are open to a request: `tier_policy.py`, asked about the fleet."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import msgspec

from gateway.config.settings import Settings
from gateway.lease import LeaseRequest, Tried
from gateway.scheduling.budget import SpillReservation, most_cost
from gateway.scheduling.dispatcher import Dispatcher
from gateway.scheduling.fleet_sync import FleetSync, ModelGroups, NodeCandidates
from gateway.scheduling.node_slots import CandidateSet, NodeSlots, QueuedRequest
from gateway.scheduling.selection import available_rows
from gateway.scheduling.tier_policy import Tier, TierPolicy, TierStatus

MOST_CACHED_GROUPS = 1000
"""Combinations of groups and tiers that are kept."""

_ORDER: tuple[Tier, ...] = ("gpu", "cpu")
"""The tiers in the order in which a group holds them."""


@dataclass(slots=True, eq=False)
class TierRouter:
    """Narrows candidates to the tiers that are open; for fleets with nodes of tier `gpu`."""

    tier_policy: TierPolicy
    fleet_sync: FleetSync
    dispatcher: Dispatcher
    settings: Settings
    _open_groups: dict[tuple[ModelGroups, tuple[Tier, ...]], ModelGroups] = field(
        default_factory=dict
    )
    """Groups of the open tiers, made once: the dispatcher compares them by identity."""

    def configure(self, settings: Settings) -> None:
        """Put changed settings in force; the budget stays."""
        self.settings = settings
        self.tier_policy.configure(settings.hybrid)

    def narrow(
        self,
        request: LeaseRequest,
        tried: Tried,
        candidates: NodeCandidates,
        queued: QueuedRequest,
        now: float,
        *,
        waiting: QueuedRequest | None = None,
    ) -> NodeCandidates:
        """The candidates in the tiers that are open now; a request that spills over has reserved.

        `waiting`: the request's entry in the queue, if it waits. Candidates that are not used must
        be given to `cancel_reservation`.
        """
        tiers = next((tiers for tiers in candidates.groups if len(tiers) > 1), None)
        if tiers is None or not queued.slots:
            return candidates
        gpu, cpu = (self._status(tier, queued, now, waiting) for tier in tiers)
        if gpu is None and (
            request.wanted.resume_key is not None
            or any(row.name in tried.excluded_nodes for row in tiers[0].rows)
        ):
            gpu = TierStatus(alive=False, has_room=False, failed=True)
        cost = (
            self._most_cost(request, tiers[0], queued, now)
            if gpu is not None and gpu.has_room
            else 0.0
        )
        route = self.tier_policy.route(request.caller.priority, gpu, cpu, now, cost)
        # The delay counts from its arrival: a retry does not wait again.
        open_tiers, fallback_at = route.tiers, queued.received_at + route.fallback_delay
        if now < fallback_at:
            open_tiers = open_tiers[:1]
        else:
            fallback_at = math.inf
        return replace(
            candidates,
            groups=self._groups(candidates.groups, open_tiers),
            tier_route=route,
            fallback_at=fallback_at,
        )

    def cancel_reservation(self, candidates: NodeCandidates) -> None:
        """These candidates are not used."""
        if candidates.tier_route is not None and candidates.tier_route.reservation is not None:
            candidates.tier_route.reservation.cancel()

    def placed(
        self, candidates: NodeCandidates, row: NodeSlots
    ) -> tuple[str | None, SpillReservation | None]:
        """The request goes to this row: its fallback, and the reservation to be settled."""
        route = candidates.tier_route
        if route is None:
            return None, None
        fallback = route.fallback("gpu" if row.gpu else "cpu")
        if row.gpu:
            return fallback, route.reservation
        self.cancel_reservation(candidates)
        return fallback, None

    def _groups(self, groups: ModelGroups, tiers: tuple[Tier, ...]) -> ModelGroups:
        """The open tiers of each group; a group with one tier alone keeps that."""
        key = groups, tiers
        found = self._open_groups.get(key)
        if found is None:
            if len(self._open_groups) >= MOST_CACHED_GROUPS:
                self._open_groups.clear()
            found = self._open_groups[key] = tuple(
                tuple(group[_ORDER.index(tier)] for tier in tiers) if len(group) > 1 else group
                for group in groups
            )
        return found

    def _status(
        self,
        tier: CandidateSet,
        queued: QueuedRequest,
        now: float,
        waiting: QueuedRequest | None,
    ) -> TierStatus | None:
        """One tier as this request sees it; None: no node of it could ever serve the request."""
        rows = [row for row in tier.rows if row.index not in queued.excluded]
        if not rows:
            return None
        alive = [row for row in rows if row.alive and row.index not in queued.failed]
        failed = any(row.index in queued.failed for row in rows)
        if not alive:
            return TierStatus(alive=False, has_room=False, failed=failed)
        alone = msgspec.structs.replace(queued, groups=((tier,),))
        available = available_rows(self.dispatcher.placement_state, alone)
        has_room = available is not None and any(
            row.index not in queued.failed for row in available.rows
        )
        wait = 0.0
        if not has_room:
            waits_here = waiting is not None and waiting.groups[0][0] is tier
            wait = self.dispatcher.predicted_wait(waiting if waits_here and waiting else alone, now)
        return TierStatus(
            alive=True,
            has_room=has_room,
            wait_seconds=wait,
            service_seconds=min(_service_seconds(row, queued) for row in alive),
            paused=all(self.fleet_sync.nodes[row.index].paused(now) for row in alive),
            failed=failed,
        )

    def _most_cost(
        self, request: LeaseRequest, tier: CandidateSet, queued: QueuedRequest, now: float
    ) -> float:
        """The most that the request can cost on any node of the tier that has room."""
        costs = [0.0]
        for row in tier.rows:
            if row.free < 1 or row.index in queued.excluded or row.index in queued.failed:
                continue
            node = self.fleet_sync.nodes[row.index]
            seconds = node.spec.timeouts.total or self.settings.timeouts.total
            if queued.deadline is not None:
                seconds = min(seconds, max(0.0, queued.deadline - now))
            costs.append(
                most_cost(
                    node.spec,
                    node.slots_total,
                    prompt_bytes=request.size.body_bytes,
                    max_tokens=request.size.max_tokens if request.size.generates else 0,
                    context=node.context,
                    slots=max(request.size.slots, queued.slots),
                    seconds=seconds,
                )
            )
        return max(costs)


def _service_seconds(row: NodeSlots, queued: QueuedRequest) -> float:
    """Prefill and decoding on a row, beside what runs there."""
    token = row.token_base + row.token_step * min(row.busy, max(0, row.total - 1))
    return queued.prompt_tokens / row.prefill_tps + queued.completion_tokens * token
