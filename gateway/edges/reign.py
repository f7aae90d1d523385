"""A reign: the time for which a brain of a cluster grants slots, and by which rules it does.

The rules are those of `gateway.cluster.fencing`: a leader's `Tenure` has an account of what others
may run, one that is alone has a `Fence`. A reign brings them to the scheduler: as a number of slots
of each node that count as busy with others' work (`SlotOccupancy.fence`). What the brain itself has
granted counts there by its leases; the account knows only those that were granted before the reign.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from gateway.cluster.fencing import Fence, Tenure
from gateway.nodes.fleet import Fleet
from gateway.nodes.node import Node, SlotsReader
from gateway.nodes.server_properties import SlotTask
from gateway.web.asgi import in_steps

LOOK_SECONDS = 0.25  # between two looks at what time alone changes
log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Reign:
    """One reign, which `begin` starts and `end` ends. It ends for good.

    `may_grant`: whether this member leads, or is alone, at this moment of the boot `clock`.
    `fleet`: its nodes are fenced. `heard`: an edge knows a later leader, of this epoch. `begun_at`:
    by the boot clock.
    """

    member: str
    epoch: int
    rules: Tenure | Fence
    may_grant: Callable[[], bool]
    clock: Callable[[], float]
    begun_at: float
    fleet: Fleet
    heard: Callable[[int], None] = lambda _: None
    _known: dict[str, tuple[Node, int]] = field(default_factory=dict)
    """The nodes that the rules know by these names, and their slots."""
    _shared_by: object = None
    _is_fenced: bool = False  # whether all nodes were looked at once
    _watching: asyncio.Task[None] | None = None

    # Its time.

    def begin(self) -> None:
        """Fence the nodes from now on."""
        for node in self.fleet.nodes.values():
            node.occupancy.forget_others()
        if isinstance(self.rules, Fence):
            self.rules.go_alone(self.clock())
        else:
            self.fleet.take_over()
        self.fleet.read_slots_for(SlotsReader(self.clock, self._read))
        self._watching = asyncio.create_task(self._watch(), name="fence the nodes")

    def grants(self) -> bool:
        """Whether slots may be granted at this moment."""
        return self._is_fenced and self.may_grant()

    async def end(self) -> None:
        """Fence no more: nothing is granted."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        self.fleet.read_slots_for(None)
        self.fleet.hand_over()
        async for node in in_steps([*self.fleet.nodes.values()]):
            self._fence(node, 0)

    async def _watch(self) -> None:
        """Bring all nodes up to date now and then, until cancelled."""
        while True:
            try:
                if not await self._look():
                    continue
                self._is_fenced = True
            except Exception:
                # Else no slot would be granted, or too many, and nobody would know why.
                log.exception("cluster: nodes can't be brought up to date")
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> bool:
        """Bring all nodes up to date, and have those asked that were not read yet.

        False: the rules have not known all of them until now.
        """
        before, self._shared_by = self._shared_by, self.rules.shared_by(self.clock())
        found: dict[str, tuple[Node, int]] = {}
        async for node in in_steps([*self.fleet.nodes.values()]):
            if node.is_router:
                continue
            found[node.name] = node, node.slots_total
            now = self.clock()
            if self._knows(node) and self.rules.is_unread(node.name):
                if self._is_idle_unasked(node, now):
                    self.rules.read(node.name, frozenset(), now)
                elif not node.probe_history.down:
                    self.fleet.read_load(node)
            elif before == self._shared_by:
                continue  # What else changes it is noticed at once.
            self._refresh(node, now)
        if found == self._known:
            return True
        if isinstance(self.rules, Tenure):
            slots = {name: count for name, (_, count) in found.items()}
            # Nothing is known of a node that has the name of another one.
            others = [
                name
                for name, (node, _) in found.items()
                if name in self._known and not self._knows(node)
            ]
            if others:
                kept = {name: slots[name] for name in slots.keys() - others}
                self.rules.set_nodes(kept, self.clock())
            self.rules.set_nodes(slots, self.clock())
        self._known, self._shared_by = found, None
        return False

    def _is_idle_unasked(self, node: Node, now: float) -> bool:
        """Whether the node runs nothing of a former leader's, or cares for its limits itself."""
        if node.spec.kind != "llama.cpp" or (node.load is not None and not node.load.loaded):
            return True
        # Of one that does not tell, all slots are busy until the longest request has ended.
        longest = node.spec.timeouts.total or node.settings.timeouts.total
        return not node.reports_slots and now >= self.begun_at + longest

    # Nodes.

    def _knows(self, node: Node) -> bool:
        """Whether the rules know this node by its name. One that is new is fenced as a whole."""
        return self._known.get(node.name, (None,))[0] is node

    def _read(self, node: Node, busy: frozenset[SlotTask], asked_at: float) -> None:
        """The node was asked for its slots at that time; these are busy."""
        if self._knows(node):
            self.rules.read(node.name, busy, asked_at)
            self._refresh(node, self.clock())

    def _refresh(self, node: Node, now: float) -> None:
        if self._knows(node):
            slots = node.slots_total
            self._fence(node, max(0, min(slots, self.rules.others(node.name, now))))

    def _fence(self, node: Node, slots: int) -> None:
        if node.occupancy.fence(slots, node.clock()):
            self.fleet.capacity_changed(node)

    # Edges and what they carry.

    def adopted(self, edge: str, lease_id: int, node: Node) -> None:
        """This edge holds a lease that was granted before."""
        self.rules.adopted(edge, lease_id, node.name)
        self._refresh(node, self.clock())

    def ended(self, lease_id: int) -> None:
        """A lease has ended, or its slot is the reclaimer's. Only of adopted ones it is news."""
        name = self.rules.ended(lease_id)
        node = None if name is None else self.fleet.nodes.get(name)
        if node is not None:
            self._refresh(node, self.clock())

    def carried(self, edge: str) -> None:
        """The edge has told all that it carries."""
        if isinstance(self.rules, Tenure):
            self.rules.carried(edge, self.clock())

    def lost(self, edge: str) -> None:
        """The edge's link is lost."""
        if isinstance(self.rules, Tenure):
            self.rules.lost(edge)
