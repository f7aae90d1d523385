"""The fleet in the placement state: a row for each node, candidate sets for what nodes serve."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from gateway.config.cache_privacy import NodeLabels, has_labels
from gateway.fleet.fleet import Fleet
from gateway.fleet.health import ALIVE_STATES
from gateway.fleet.model_index import CapableNodes
from gateway.fleet.node import Node
from gateway.fleet.prompt_cache import CacheContents, FleetPromptCache
from gateway.fleet.speed import Speed
from gateway.request import Endpoint
from gateway.scheduling.node_slots import (
    EXPLORING_REQUESTS,
    NEGLIGIBLE_COMPLETION,
    NO_ROWS,
    CandidateSet,
    NodeSlots,
    QueuedRequest,
    TierSets,
)
from gateway.scheduling.placement_state import PlacementState
from gateway.scheduling.tier_policy import TierRoute

FAILURE_PENALTY = 5.0
"""Seconds by which a node looks slower for each failure in a row: one that fails fast is always
free, and would get every next attempt until its circuit opens."""

TRIAL_BONUS = 5.0
"""Seconds by which a node looks faster once its ejection's time is over and it needs one request on
trial: else it would get none while others are idle, and be missing when they are not. A request
that would end there later by more than this goes elsewhere."""

MOST_SERVICES = 10_000

MOST_COUNTED_AT_ONCE, RECOUNT_SECONDS = 64, 0.5
"""Rows whose states are counted whenever any has changed; of more, only so often."""

HOPE_UNKNOWN, HOPE_GUESSED, HOPE_MEASURED, HOPE_AWAITED = 0.5, 1.25, 2 / 3, math.inf
"""Factors of the expected cost of a row that may be explored. Nothing is known of it: it may be
twice as fast as the best. It has a calibration or a hint: it must look better by a quarter. It was
measured once, perhaps while its server read the model from disk: it may be better by a half. It is
about to be calibrated: no request need find out."""

ModelGroups = tuple[TierSets, ...]
"""For each model name of a request: its candidate sets, by tier."""

NodesByModel = Sequence[tuple[str, Sequence[Node]]]
"""For each model name of a request that some node serves: the nodes."""

ServiceKey = tuple[str, Endpoint, bool, bool, NodeLabels]
"""Public model name, endpoint, whether it must read images, whether it must be llama.cpp's, and
the labels of the pool."""


def show_speed(
    state: PlacementState, row: NodeSlots, speed: Speed, *, awaited: bool = False
) -> None:
    """Bring a row up to date with what is known of its node's speed.

    `awaited`: it is about to be calibrated.
    """
    state.set_speed(row, speed.expected_prefill_tps, speed.token_base, speed.token_step)
    samples = speed.samples
    if samples > EXPLORING_REQUESTS or (samples and speed.calibrated):
        samples = EXPLORING_REQUESTS  # A calibration has read the model from disk.
    measured = speed.prefill_tps is not None and speed.decode_tps is not None
    if samples:
        hope = HOPE_MEASURED
    elif speed.hinted or speed.calibrated:
        hope = HOPE_GUESSED
    else:
        hope = HOPE_AWAITED if awaited else HOPE_UNKNOWN
    if samples != row.samples or hope != row.hope or measured is not row.measured:
        state.set_learnt(row, samples, hope, measured=measured)


def is_alive(node: Node) -> bool:
    """Whether it is worth the ordinary wait; one on trial is, since its ejection may end so."""
    return node.state in ALIVE_STATES or node.circuit.trial is not None


@dataclass(frozen=True, slots=True)
class NodeCandidates:
    """Where a request may go; rows by their indexes."""

    by_model: NodesByModel
    groups: ModelGroups
    excluded: Collection[int] = ()
    """Rows that can't serve it."""
    failed: Collection[int] = ()
    """Rows that have failed it."""
    penalties: Mapping[int, float] = field(default_factory=lambda: NO_ROWS)
    """Seconds by which a row looks slower to it; negative: faster."""
    tier_route: TierRoute | None = None
    """The choice between tiers, where it could go to either (`TierRouter.narrow`)."""
    fallback_at: float = math.inf
    """When the other tiers of the route open too; infinity: they are open, or never will be."""

    def same_targets(self, other: NodeCandidates) -> bool:
        """Whether a request that waits for the `other` may stay in the queue as it is."""
        return (
            self.groups == other.groups
            and self.excluded == other.excluded
            and self.failed == other.failed
        )

    def any_alive(self) -> bool:
        """Whether one of its nodes, in the tiers open to it, is worth the ordinary wait."""
        return any(
            row.alive and row.index not in self.excluded
            for tiers in self.groups
            for candidates in tiers
            for row in candidates.rows
        )


@dataclass(slots=True)
class Service:
    """The nodes that serve one thing, as candidate sets."""

    cpu: CandidateSet
    gpu: CandidateSet
    capable_nodes: CapableNodes | None = None
    """The model index's nodes, when the candidate sets were filled; None: fill them anew."""
    groups: ModelGroups = ()
    """Where a request for it may go while no rule says otherwise."""
    candidates: NodeCandidates | None = None
    """The candidates of a request that every node of the service can take."""
    version: int = -1
    """The model index's version when they were last checked."""

    def invalidate(self) -> None:
        """The rows are others now."""
        self.capable_nodes, self.version = None, -1

    def update(
        self,
        capable_nodes: CapableNodes,
        rows_of: Callable[[Iterable[Node]], tuple[NodeSlots, ...]],
        version: int,
    ) -> None:
        """These are its nodes, as of that version of the model index."""
        if self.capable_nodes is not capable_nodes:
            self.capable_nodes = capable_nodes
            self._fill(rows_of(capable_nodes.nodes))
            self.candidates = NodeCandidates(capable_nodes.by_model, self.groups)
        self.version = version

    def _fill(self, rows: tuple[NodeSlots, ...]) -> None:
        gpu = tuple(row for row in rows if row.gpu)
        cpu = tuple(row for row in rows if not row.gpu) if gpu else rows
        for candidates, members in ((self.gpu, gpu), (self.cpu, cpu)):
            if candidates.rows != members:
                candidates.replace_rows(members)
        tiers = tuple(candidates for candidates in (self.gpu, self.cpu) if candidates.rows)
        if not self.groups or self.groups[0] != tiers:
            self.groups = (tiers,)


class _OutOfService(NamedTuple):
    """`FleetSync.out_of_service` of one candidate set."""

    by_state: Mapping[str, int]
    version: int
    """The `PlacementState.slots_version` for which it was counted."""
    counted_at: float


@dataclass(slots=True, eq=False)
class FleetSync:
    """Keeps a placement state in step with a fleet, which calls `node_changed`.

    Leases without a placement count as others' work (`foreign`).
    """

    fleet: Fleet
    placement_state: PlacementState
    prompt_cache: FleetPromptCache
    clock: Callable[[], float]
    has_gpu_tier: bool = False
    """Whether the inventory has nodes of tier `gpu`."""
    rows_version: int = 0
    """Changes with the set of rows: then an index may stand for another node. Also when the slots
    of one begin or cease to share a pool."""
    _rows: dict[Node, NodeSlots] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)
    """By row index."""
    services: dict[ServiceKey, Service] = field(default_factory=dict)
    """Those asked for; one whose `version` is not the model index's is out of date (`service`)."""
    _pools: set[NodeLabels] = field(default_factory=set)
    """The labels of the pools that requests have asked for."""
    _speed_versions: dict[NodeSlots, int] = field(default_factory=dict)
    """The version of the node's speed that a row has."""
    _out_of_service: WeakKeyDictionary[CandidateSet, _OutOfService] = field(
        default_factory=WeakKeyDictionary
    )
    _cached_models: dict[NodeSlots, tuple[int, frozenset[str] | None, int]] = field(
        default_factory=dict
    )
    """The slots, the models (None: not probed yet) and the server for which a row's prompt cache is
    indexed."""

    def cache_contents(self, node: Node) -> CacheContents:
        """What a node is believed to cache."""
        row = self._rows.get(node)
        return CacheContents(0, 0) if row is None else self.prompt_cache.contents(row.index)

    # Called by the fleet.

    def node_changed(self, node: Node | None) -> None:
        """Something about this node has changed; None: about any, or which nodes there are."""
        if node is None:
            self.sync()
        elif (row := self._rows.get(node)) is not None:
            self._refresh(node, row, self.clock())

    def speed_learnt(self, node: Node) -> None:
        """The node's speed has been learnt from a response, and nothing else has changed."""
        row = self._rows.get(node)
        if row is not None:
            self._refresh_speed(node, row)

    def sync(self) -> None:
        """Bring the set of rows and every row up to date."""
        nodes, rows = self.fleet.nodes.values(), self._rows
        rows_changed = len(nodes) != len(rows) or any(
            node not in rows or rows[node].gpu is not (node.spec.tier == "gpu") for node in nodes
        )
        if rows_changed:
            self._replace_rows(set(nodes))
        now = self.clock()
        for node, row in rows.items():
            self._refresh(node, row, now)
        if rows_changed:
            for key in self.services:
                self.service(key)

    def _replace_rows(self, nodes: set[Node]) -> None:
        """Add and remove rows. What runs on a removed one still ends there."""
        self.rows_version += 1
        for node in [node for node in self._rows if node not in nodes]:
            row = self._rows.pop(node)
            del self.nodes[row.index]
            self._speed_versions.pop(row, None)
            self._cached_models.pop(row, None)
            self.prompt_cache.forget_node(row.index)
            self.placement_state.remove(row)
        for node in self.fleet.nodes.values():
            gpu = node.spec.tier == "gpu"
            if node not in self._rows:
                row = self._rows[node] = self.placement_state.add(node.name, gpu=gpu)
                self.nodes[row.index] = node
            self.placement_state.set_tier(self._rows[node], gpu=gpu)
        self.has_gpu_tier = any(node.spec.tier == "gpu" for node in nodes)
        for service in self.services.values():
            service.invalidate()

    def _refresh(self, node: Node, row: NodeSlots, now: float) -> None:
        """Bring one row up to date."""
        total, occupancy = node.slots_total, node.occupancy
        foreign = occupancy.foreign + occupancy.leased - row.ours
        capacity = node.capacity(now)
        wake = node.wake_price(now)
        penalty = FAILURE_PENALTY * node.circuit.failures + node.calibration.penalty
        if capacity and node.circuit.open_until is not None:
            # One request on trial, beside whatever still runs.
            capacity = row.ours + foreign + 1 if row.ours + foreign < total else 0
            penalty = -TRIAL_BONUS
        alive, paused = is_alive(node), not capacity and node.paused(now)
        if (
            capacity != row.capacity
            or foreign != row.foreign
            or total != row.total
            or alive is not row.alive
            or paused is not row.paused
        ):
            self.placement_state.set_slots(
                row, total, capacity, foreign, alive=alive, paused=paused
            )
        if (pool := node.pool) or row.pool:
            self._refresh_pool(node, row, pool)
        if self._speed_versions.get(row) != node.speed.version or row.exploring:
            self._refresh_speed(node, row)
        if penalty + wake != row.penalty or wake != row.wake:
            self.placement_state.set_penalty(row, penalty + wake, wake=wake)
        if self.placement_state.batch_reserve:
            self._refresh_reserve_group(node, row)
        self._sync_prompt_cache(node, row, total)

    def _refresh_pool(self, node: Node, row: NodeSlots, pool: int) -> None:
        """Take in whether the node's slots share a pool, and what others use of it.

        Of the busy slots those with most tokens are taken for others'. So are tokens for which no
        request of ours has a reservation: one that writes more than was expected.
        """
        reading, foreign = node.occupancy.take_tokens_reading(), row.pool_foreign
        if reading is not None:
            others = sum(heapq.nlargest(node.foreign, reading))
            foreign = int(max(others, sum(reading) - row.pool_reserved, 0.0))
        if bool(pool) is not bool(row.pool):
            self.rows_version += 1  # What waits is to be estimated anew.
        if pool != row.pool or foreign != row.pool_foreign:
            self.placement_state.set_pool(row, pool, foreign if pool else 0)

    def _refresh_speed(self, node: Node, row: NodeSlots) -> None:
        speed = node.speed
        self._speed_versions[row] = speed.version
        awaited = not speed.samples and (
            node.calibration.penalty > 0 or node.calibration_due(self.clock())
        )
        show_speed(self.placement_state, row, speed, awaited=awaited)

    def _refresh_reserve_group(self, node: Node, row: NodeSlots) -> None:
        """Nodes share a reserve if they serve the same models and belong to the same pools."""
        labels = node.spec.labels
        pools = frozenset(pool for pool in self._pools if has_labels(labels, pool))
        self.placement_state.set_reserve_group(row, (node.public_models, pools))

    def _sync_prompt_cache(self, node: Node, row: NodeSlots, total: int) -> None:
        """Forget a node's cached prompts when its server goes or serves other models."""
        if node.spec.kind != "llama.cpp":
            return
        history = node.probe_history
        gone = history.down or history.loading or node.sleep.asleep or not node.in_service
        models = node.indexed_models if history.probed else None
        current = None if gone else (total, models, node.replacements)
        indexed = self._cached_models.get(row)
        if indexed == current:
            return
        if indexed is not None and (
            current is None
            or indexed[2] != current[2]
            # What was restored before the first probe is of the server as it was then known.
            or (indexed[1] != models and indexed[1] is not None)
        ):
            self.prompt_cache.forget_node(row.index)
        if current is None:
            del self._cached_models[row]
        else:
            self._cached_models[row] = current
            self.prompt_cache.resize(row.index, total)

    # Asked by the scheduler.

    def rows(self, nodes: Iterable[Node]) -> tuple[NodeSlots, ...]:
        """The rows of these nodes, as far as they are in the inventory."""
        rows = (self._rows.get(node) for node in nodes)
        return tuple(row for row in rows if row is not None)

    def service(self, key: ServiceKey) -> Service:
        """The candidate sets of the nodes that serve this, up to date."""
        model_index = self.fleet.model_index
        service = self.services.get(key)
        if service is not None and service.version == model_index.version:
            return service
        model, endpoint, vision, native, labels = key
        capable = model_index.capable_nodes(
            model, endpoint, vision=vision, native=native, labels=labels
        )
        if service is None:
            if len(self.services) >= MOST_SERVICES:
                self.services.clear()
                self._pools.clear()
            if labels and labels not in self._pools:
                self._pools.add(labels)
                if self.placement_state.batch_reserve:
                    for node, row in self._rows.items():
                        self._refresh_reserve_group(node, row)
            state = self.placement_state
            service = self.services[key] = Service(state.candidate_set(), state.candidate_set())
        service.update(capable, self.rows, model_index.version)
        return service

    def is_measured(self, queued: QueuedRequest) -> bool:
        """Whether a node of the request's first group has shown how fast it is.

        In prefill and, if the request decodes, in decoding, with a sample for each of its slots:
        the first answers of a burst are its shortest.
        """
        decodes = queued.completion_tokens > NEGLIGIBLE_COMPLETION
        for candidates in queued.groups[0]:
            for row in candidates.rows:
                node = self.nodes.get(row.index)
                if node is not None and node.speed.samples >= max(1, row.total):
                    speed = node.speed
                    if speed.prefill_tps is not None and (not decodes or speed.decode_tps):
                        return True
        return False

    def out_of_service(self, candidates: CandidateSet, now: float) -> Mapping[str, int]:
        """How many of these rows take no work, by their nodes' state; `paused`: as asked for (429).

        For more than `MOST_COUNTED_AT_ONCE` rows it may be `RECOUNT_SECONDS` old.
        """
        version, known = self.placement_state.slots_version, self._out_of_service.get(candidates)
        if known is not None and (
            known.version == version
            or (
                now - known.counted_at < RECOUNT_SECONDS
                and len(candidates.rows) > MOST_COUNTED_AT_ONCE
            )
        ):
            return known.by_state
        states = Counter(self._state_word(row, now) for row in candidates.rows if not row.capacity)
        self._out_of_service[candidates] = _OutOfService(states, version, now)
        return states

    def _state_word(self, row: NodeSlots, now: float) -> str:
        node = self.nodes.get(row.index)
        if node is None:
            return "removed"
        return "paused" if node.paused(now) else node.state.value

    def slots(self, queued: QueuedRequest) -> int:
        """Slots of the nodes of the request's first group."""
        version = self.placement_state.slots_version
        return sum(candidates.slots(version) for candidates in queued.groups[0])
