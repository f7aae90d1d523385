"""The fleet as the board sees it: a row for each node, a pool for each thing that nodes serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from gateway.fleet.catalogue import Offering
from gateway.fleet.fleet import Fleet
from gateway.fleet.memory import Memory
from gateway.fleet.node import Node
from gateway.fleet.states import State
from gateway.request import Endpoint
from gateway.scheduling.ask import Ask
from gateway.scheduling.board import Board, Pool, Row
from gateway.scheduling.forecast import NO_ANSWER

ALIVE = frozenset({State.READY, State.DEGRADED, State.MUTE})
"""States of a node that is worth the ordinary wait; for any other, `wait_for_node` holds."""

FAILURE_DOUBT = 5.0
"""Seconds that each failure in a row makes a node look slower: one that fails fast is always free,
and would get everybody's next attempt until its circuit opens."""

TRIAL_WORTH = 5.0
"""Seconds by which a node looks faster once its ejection's time is over and it needs one request on
trial: else it would get none while others are idle, and be missing when they are not. A request
that would end later there by more than this goes elsewhere."""

MOST_POOLS = 10_000

Groups = tuple[tuple[Pool, ...], ...]
Key = tuple[str, Endpoint, bool, bool]
"""Public model name, endpoint, whether it must read images, whether it must be llama.cpp's."""


def is_alive(node: Node) -> bool:
    """Whether it is worth the ordinary wait; a trial that is out may be the end of its ejection."""
    return node.state in ALIVE or node.circuit.trial is not None


@dataclass(slots=True)
class Service:
    """The nodes that serve one thing, as pools of rows."""

    offering: Offering | None
    """What the catalogue offered when the pools were filled."""
    cpu: Pool
    gpu: Pool
    groups: Groups
    """Where a request for it may go while no rule says otherwise."""
    version: int = -1
    """The catalogue's version then."""
    plan: Any = None
    """The plan of such a request, once one has come (`eligible.py`)."""


@dataclass(slots=True, eq=False)
class Mirror:
    """Keeps a board in line with a fleet; the fleet calls `changed`.

    What the board does not know of, leases that nobody placed, it sees as others' work.
    """

    fleet: Fleet
    board: Board
    memory: Memory
    clock: Callable[[], float]
    hybrid: bool = False
    """Whether the inventory has nodes of tier `gpu`."""
    version: int = 0
    """Goes up when there are other rows than before: an index may mean another node."""
    _rows: dict[Node, Row] = field(default_factory=dict)
    _nodes: dict[int, Node] = field(default_factory=dict)
    _services: dict[Key, Service] = field(default_factory=dict)
    _speeds: dict[Row, int] = field(default_factory=dict)
    """Version of the speed that a row has."""
    _sizes: dict[Row, tuple[int, frozenset[str]]] = field(default_factory=dict)
    """Slots and models that the memory of a row was made for."""

    # What the fleet tells.

    def changed(self, node: Node | None) -> None:
        """Something of this node has changed; None: of any, or which nodes there are."""
        if node is None:
            self.renew()
        elif (row := self._rows.get(node)) is not None:
            self._refresh(node, row, self.clock())

    def renew(self) -> None:
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
        self.version += 1
        for node in [node for node in self._rows if node not in nodes]:
            row = self._rows.pop(node)
            del self._nodes[row.index]
            self._speeds.pop(row, None)
            self._sizes.pop(row, None)
            self.memory.forget(row.index)
            self.board.remove(row)
        for node in self.fleet.nodes.values():
            gpu = node.spec.tier == "gpu"
            if node not in self._rows:
                row = self._rows[node] = self.board.add(node.name, gpu=gpu)
                self._nodes[row.index] = node
            self._rows[node].gpu = gpu
        self.hybrid = any(node.spec.tier == "gpu" for node in nodes)
        for service in self._services.values():
            service.offering, service.version = None, -1

    def _refresh(self, node: Node, row: Row, now: float) -> None:
        """Tell the board what holds now."""
        total = node.slots_total
        foreign = node.foreign + node.leased - row.ours
        capacity = node.capacity(now)
        doubt = FAILURE_DOUBT * node.circuit.failures
        if capacity and node.state is State.EJECTED:
            # One request on trial, beside whatever still runs.
            capacity = row.ours + foreign + 1 if row.ours + foreign < total else 0
            doubt = -TRIAL_WORTH
        alive = is_alive(node)
        if (
            capacity != row.capacity
            or foreign != row.foreign
            or total != row.total
            or alive is not row.alive
        ):
            self.board.set_slots(row, total, capacity, foreign, alive=alive)
        speed = node.speed
        if self._speeds.get(row) != speed.version:
            self._speeds[row] = speed.version
            self.board.set_speed(row, speed.reading, speed.token_base, speed.token_step)
        if doubt != row.doubt:
            self.board.set_doubt(row, doubt)
        self._note_memory(node, row, total)

    def _note_memory(self, node: Node, row: Row, total: int) -> None:
        """What a node remembers goes with its server, and with its model."""
        if node.spec.kind != "llama.cpp":
            return
        gone = node.probing.down or node.probing.loading or not node.wanted
        kept = None if gone else (total, node.listed)
        known = self._sizes.get(row)
        if known == kept:
            return
        if known is not None and (kept is None or known[1] != kept[1]):
            self.memory.forget(row.index)
        if kept is None:
            del self._sizes[row]
        else:
            self._sizes[row] = kept
            self.memory.resize(row.index, total)

    # What the scheduler asks.

    def node(self, row: Row) -> Node:
        """The node of a row on the board. Raises KeyError."""
        return self._nodes[row.index]

    def measured(self, ask: Ask) -> bool:
        """Whether one of the nodes that could serve it first has shown how fast it is.

        In both, reading and writing, where it does, and with all its slots: the first answers of a
        burst are its shortest.
        """
        writes = ask.completion > NO_ANSWER
        for pool in ask.groups[0]:
            for row in pool.rows:
                node = self._nodes.get(row.index)
                if node is not None and node.speed.answers >= max(1, row.total):
                    speed = node.speed
                    if speed.prefill_tps is not None and (not writes or speed.decode_tps):
                        return True
        return False

    def slots(self, ask: Ask) -> int:
        """Slots of the nodes that could serve it first."""
        return sum(pool.slots(self.board) for pool in ask.groups[0])

    def rows(self, nodes: Iterable[Node]) -> tuple[Row, ...]:
        """The rows of these nodes, as far as they are in the inventory."""
        found = (self._rows.get(node) for node in nodes)
        return tuple(row for row in found if row is not None)

    def service(self, key: Key) -> Service:
        """The pools of the nodes that the catalogue has for this, brought up to date."""
        catalogue = self.fleet.catalogue
        service = self._services.get(key)
        if service is not None and service.version == catalogue.version:
            return service
        model, endpoint, vision, native = key
        offering = catalogue.offering(model, endpoint, vision=vision, native=native)
        if service is None:
            if len(self._services) >= MOST_POOLS:
                self._services.clear()
            service = self._services[key] = Service(None, self.board.pool(), self.board.pool(), ())
        if service.offering is not offering:
            service.offering = offering
            self._fill(service, self.rows(offering.nodes))
        service.version = catalogue.version
        return service

    def _fill(self, service: Service, rows: tuple[Row, ...]) -> None:
        gpu = tuple(row for row in rows if row.gpu)
        cpu = tuple(row for row in rows if not row.gpu) if gpu else rows
        for pool, chosen in ((service.gpu, gpu), (service.cpu, cpu)):
            if pool.rows != chosen:
                pool.set(chosen)
        pools = tuple(pool for pool in (service.gpu, service.cpu) if pool.rows)
        if not service.groups or service.groups[0] != pools:
            service.groups = (pools,)
            service.plan = None
