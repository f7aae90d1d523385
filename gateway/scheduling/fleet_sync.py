"""The fleet as the board sees it: a row for each node, a pool for each thing that nodes serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from gateway.fleet.fleet import Fleet
from gateway.fleet.model_index import CapableNodes
from gateway.fleet.node import Node, NodeState
from gateway.fleet.prompt_cache import FleetPromptCache
from gateway.request import Endpoint
from gateway.scheduling.forecast import NEGLIGIBLE_COMPLETION
from gateway.scheduling.placement_state import (
    CandidateSet,
    NodeSlots,
    PlacementState,
    QueuedRequest,
)

ALIVE_STATES = frozenset({NodeState.READY, NodeState.DEGRADED, NodeState.MUTE})
"""States of a node that is worth the ordinary wait; for any other, `wait_for_node` holds."""

FAILURE_PENALTY = 5.0
"""Seconds that each failure in a row makes a node look slower: one that fails fast is always free,
and would get everybody's next attempt until its circuit opens."""

TRIAL_BONUS = 5.0
"""Seconds by which a node looks faster once its ejection's time is over and it needs one request on
trial: else it would get none while others are idle, and be missing when they are not. A request
that would end later there by more than this goes elsewhere."""

MOST_SERVICES = 10_000

ModelGroups = tuple[tuple[CandidateSet, ...], ...]

ServiceKey = tuple[str, Endpoint, bool, bool]
"""Public model name, endpoint, whether it must read images, whether it must be llama.cpp's."""


def is_alive(node: Node) -> bool:
    """Whether it is worth the ordinary wait; a trial that is out may be the end of its ejection."""
    return node.state in ALIVE_STATES or node.circuit.trial is not None


@dataclass(slots=True)
class Service:
    """The nodes that serve one thing, as pools of rows."""

    capable_nodes: CapableNodes | None
    """What the catalogue offered when the pools were filled."""
    cpu: CandidateSet
    gpu: CandidateSet
    groups: ModelGroups
    """Where a request for it may go while no rule says otherwise."""
    version: int = -1
    """The catalogue's version then."""
    candidates: Any = None
    """The plan of such a request, once one has come (`eligible.py`)."""


@dataclass(slots=True, eq=False)
class FleetSync:
    """Keeps a board in line with a fleet; the fleet calls `changed`.

    What the board does not know of, leases that nobody placed, it sees as others' work.
    """

    fleet: Fleet
    placement_state: PlacementState
    prompt_cache: FleetPromptCache
    clock: Callable[[], float]
    has_gpu_tier: bool = False
    """Whether the inventory has nodes of tier `gpu`."""
    rows_version: int = 0
    """Goes up when there are other rows than before: an index may mean another node."""
    _rows: dict[Node, NodeSlots] = field(default_factory=dict)
    _nodes: dict[int, Node] = field(default_factory=dict)
    _services: dict[ServiceKey, Service] = field(default_factory=dict)
    _speeds: dict[NodeSlots, int] = field(default_factory=dict)
    """Version of the speed that a row has."""
    _sizes: dict[NodeSlots, tuple[int, frozenset[str]]] = field(default_factory=dict)
    """Slots and models that the memory of a row was made for."""

    # What the fleet tells.

    def node_changed(self, node: Node | None) -> None:
        """Something of this node has changed; None: of any, or which nodes there are."""
        if node is None:
            self.sync()
        elif (row := self._rows.get(node)) is not None:
            self._refresh(node, row, self.clock())

    def sync(self) -> None:
        """Bring every row up to date, and which there are."""
        nodes, rows = self.fleet.nodes.values(), self._rows
        others = len(nodes) != len(rows) or any(
            node not in rows or rows[node].gpu is not (node.spec.tier == "gpu") for node in nodes
        )
        if others:
            self._replace(set(nodes))
        now = self.clock()
        for node, row in rows.items():
            self._refresh(node, row, now)
        if others:
            for key in self._services:
                self.service(key)

    def _replace(self, nodes: set[Node]) -> None:
        """Add and remove rows. What runs on a removed one still ends there."""
        self.rows_version += 1
        for node in [node for node in self._rows if node not in nodes]:
            row = self._rows.pop(node)
            del self._nodes[row.index]
            self._speeds.pop(row, None)
            self._sizes.pop(row, None)
            self.prompt_cache.forget_node(row.index)
            self.placement_state.remove(row)
        for node in self.fleet.nodes.values():
            gpu = node.spec.tier == "gpu"
            if node not in self._rows:
                row = self._rows[node] = self.placement_state.add(node.name, gpu=gpu)
                self._nodes[row.index] = node
            self._rows[node].gpu = gpu
        self.has_gpu_tier = any(node.spec.tier == "gpu" for node in nodes)
        for service in self._services.values():
            service.capable_nodes, service.version = None, -1

    def _refresh(self, node: Node, row: NodeSlots, now: float) -> None:
        """Tell the board what holds now."""
        total = node.slots_total
        foreign = node.foreign + node.leased - row.ours
        capacity = node.capacity(now)
        doubt = FAILURE_PENALTY * node.circuit.failures
        if capacity and node.state is NodeState.EJECTED:
            # One request on trial, beside whatever still runs.
            capacity = row.ours + foreign + 1 if row.ours + foreign < total else 0
            doubt = -TRIAL_BONUS
        alive = is_alive(node)
        if (
            capacity != row.capacity
            or foreign != row.foreign
            or total != row.total
            or alive is not row.alive
        ):
            self.placement_state.set_slots(row, total, capacity, foreign, alive=alive)
        speed = node.speed
        if self._speeds.get(row) != speed.version:
            self._speeds[row] = speed.version
            self.placement_state.set_speed(
                row, speed.expected_prefill_tps, speed.token_base, speed.token_step
            )
        if doubt != row.penalty:
            self.placement_state.set_penalty(row, doubt)
        self._note_memory(node, row, total)

    def _note_memory(self, node: Node, row: NodeSlots, total: int) -> None:
        """What a node remembers goes with its server, and with its model."""
        if node.spec.kind != "llama.cpp":
            return
        gone = node.probe_history.down or node.probe_history.loading or not node.in_service
        kept = None if gone else (total, node.indexed_models)
        known = self._sizes.get(row)
        if known == kept:
            return
        if known is not None and (kept is None or known[1] != kept[1]):
            self.prompt_cache.forget_node(row.index)
        if kept is None:
            del self._sizes[row]
        else:
            self._sizes[row] = kept
            self.prompt_cache.resize(row.index, total)

    # What the scheduler asks.

    def node(self, row: NodeSlots) -> Node:
        """The node of a row on the board. Raises KeyError."""
        return self._nodes[row.index]

    def is_measured(self, queued: QueuedRequest) -> bool:
        """Whether one of the nodes that could serve it first has shown how fast it is.

        In both, reading and writing, where it does, and with all its slots: the first answers of a
        burst are its shortest.
        """
        writes = queued.completion_tokens > NEGLIGIBLE_COMPLETION
        for pool in queued.groups[0]:
            for row in pool.rows:
                node = self._nodes.get(row.index)
                if node is not None and node.speed.samples >= max(1, row.total):
                    speed = node.speed
                    if speed.prefill_tps is not None and (not writes or speed.decode_tps):
                        return True
        return False

    def slots(self, queued: QueuedRequest) -> int:
        """Slots of the nodes that could serve it first."""
        return sum(pool.slots(self.placement_state) for pool in queued.groups[0])

    def rows(self, nodes: Iterable[Node]) -> tuple[NodeSlots, ...]:
        """The rows of these nodes, as far as they are in the inventory."""
        found = (self._rows.get(node) for node in nodes)
        return tuple(row for row in found if row is not None)

    def service(self, key: ServiceKey) -> Service:
        """The pools of the nodes that the catalogue has for this, brought up to date."""
        catalogue = self.fleet.model_index
        service = self._services.get(key)
        if service is not None and service.version == catalogue.version:
            return service
        model, endpoint, vision, native = key
        offering = catalogue.capable_nodes(model, endpoint, vision=vision, native=native)
        if service is None:
            if len(self._services) >= MOST_SERVICES:
                self._services.clear()
            service = self._services[key] = Service(
                None, self.placement_state.candidate_set(), self.placement_state.candidate_set(), ()
            )
        if service.capable_nodes is not offering:
            service.capable_nodes = offering
            self._fill(service, self.rows(offering.nodes))
        service.version = catalogue.version
        return service

    def _fill(self, service: Service, rows: tuple[NodeSlots, ...]) -> None:
        gpu = tuple(row for row in rows if row.gpu)
        cpu = tuple(row for row in rows if not row.gpu) if gpu else rows
        for pool, chosen in ((service.gpu, gpu), (service.cpu, cpu)):
            if pool.rows != chosen:
                pool.replace_rows(chosen)
        pools = tuple(pool for pool in (service.gpu, service.cpu) if pool.rows)
        if not service.groups or service.groups[0] != pools:
            service.groups = (pools,)
            service.candidates = None
