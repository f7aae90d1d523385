"""The set of nodes: kept as the inventory says, and watched."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.events import Bus, InventoryChanged, NodeChanged, NodeDrift
from gateway.fleet.catalogue import Catalogue
from gateway.fleet.circuit import Circuit
from gateway.fleet.departures import Departures
from gateway.fleet.facts import differences
from gateway.fleet.health import Watch
from gateway.fleet.last_seen import LastSeen
from gateway.fleet.node import Node, Rules
from gateway.fleet.probes import refuses_our_key
from gateway.fleet.probing import Answer, Outcome, Probing
from gateway.fleet.reclaim import Reclaimer
from gateway.fleet.sameness import server, ways
from gateway.fleet.speed import weigh
from gateway.fleet.states import State, judge

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    from gateway.config.inventory import Inventory, NodeSpec
    from gateway.config.routing import HealthSettings, TimeoutSettings
    from gateway.fleet.drains import Drains
    from gateway.fleet.lease import Lease
    from gateway.fleet.timings import Sample
    from gateway.request import Endpoint
    from gateway.transport.upstream import Connect, Upstream

PROBES_AT_ONCE = 256
"""Nodes probed at the same moment, at most; when all are black holes a thousand take 8 s."""
WEIGH_EVERY = 5.0
"""Seconds between two comparisons of all nodes' speeds."""


class Fleet:
    """All nodes by name, in the inventory's order.

    `on_capacity` is called whenever a slot may have become free. It may be called often and from
    within other calls: it must be cheap and must not raise. So must `on_change`, which is called
    when what a node takes or can do may have changed; None: all nodes, or which nodes there are.
    """

    def __init__(
        self,
        *,
        connect: Connect,
        health: HealthSettings,
        timeouts: TimeoutSettings,
        bus: Bus,
        clock: Callable[[], float],
        rng: random.Random,
        drains: Drains,
        last_seen: LastSeen | None = None,
    ) -> None:
        self.nodes: dict[str, Node] = {}
        self.catalogue = Catalogue()
        self.probed = asyncio.Event()
        """Set when every node of the first inventory has been probed once."""
        self.on_capacity: Callable[[], None] | None = None
        self.on_change: Callable[[Node | None], None] | None = None
        self._connect = connect
        self._rules = Rules(health, timeouts)
        self._bus = bus
        self._clock = clock
        self._rng = rng
        self._drains = drains
        self.last_seen = last_seen or LastSeen()
        self._reclaimer = Reclaimer()
        self._gate = asyncio.Semaphore(PROBES_AT_ONCE)
        self._watches: dict[Node, Watch] = {}
        self._departures = Departures()
        self._chores: asyncio.Task[None] | None = None
        self._unprobed: set[Node] = set()

    # Life.

    async def start(self, inventory: Inventory) -> InventoryChanged:
        """Take in the first inventory and begin to watch. Raises what `connect` raises."""
        change = self.apply(inventory)
        self._chores = asyncio.create_task(self._weigh_now_and_then(), name="weigh nodes")
        return change

    async def aclose(self) -> None:
        """Stop watching and close every connection, whatever still runs."""
        tasks = [watch.cancel() for watch in self._watches.values()]
        if self._chores is not None:
            self._chores.cancel()
            tasks.append(self._chores)
        self._watches.clear()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._reclaimer.aclose()
        for node in self.nodes.values():
            self._departures.close(node.upstream)
        await self._departures.aclose()

    # The inventory and the settings.

    def apply(self, inventory: Inventory) -> InventoryChanged:
        """Bring the fleet to this inventory; running work ends where it runs.

        Raises what `connect` raises, and then nothing has changed. The caller publishes the
        result.
        """
        plan = self._plan(inventory)
        change = InventoryChanged(warnings=[str(one) for one in inventory.warnings])
        before, self.nodes = self.nodes, {}
        for spec, known, upstream in plan:
            old = before.get(spec.name)
            if old is None:
                change.added.append(spec.name)
            elif old.spec != spec:
                change.changed.append(spec.name)
            told = None if old is None else old.state
            if known is None:
                assert upstream is not None
                self.nodes[spec.name] = self._add(spec, upstream, told)
            else:
                self.nodes[spec.name] = known
                self._keep(known, spec, upstream, told)
        for name, node in before.items():
            if self.nodes.get(name) is not node:
                self._leave(node)
            if name not in self.nodes:
                change.removed.append(name)
                reason = "removed from the inventory"
                self._bus.publish(NodeChanged(name, node.state.value, None, reason))
        self.catalogue.renew(self.nodes.values())
        weigh(self.nodes.values())
        self._tell_change()
        for node in self.nodes.values():
            self.settle(node)
        self._note_probed()
        self._tell_capacity()
        return change

    def configure(self, health: HealthSettings, timeouts: TimeoutSettings) -> None:
        """Put changed settings in force."""
        self._rules = Rules(health, timeouts)
        for node in (*self.nodes.values(), *self._departures.nodes):
            node.rules = self._rules
            node.circuit.rules = health
        for watch in self._watches.values():
            watch.reschedule()

    def _plan(self, inventory: Inventory) -> list[tuple[NodeSpec, Node | None, Upstream | None]]:
        """Each node with what is known of its server and, where needed, new ways to it."""
        plan: list[tuple[NodeSpec, Node | None, Upstream | None]] = []
        try:
            for spec in inventory.nodes:
                node = self._known(spec)
                fresh = node is None or ways(node.spec) != ways(spec)
                plan.append((spec, node, self._connect(spec) if fresh else None))
        except BaseException:
            for _, _, upstream in plan:
                if upstream is not None:
                    self._departures.close(upstream)
            raise
        return plan

    def _known(self, spec: NodeSpec) -> Node | None:
        """The node of this name at the same server, also if it is on its way out."""
        here = self.nodes.get(spec.name)
        leaving = [node for node in self._departures.nodes if node.name == spec.name]
        for node in leaving if here is None else (here, *leaving):
            if server(node.spec) == server(spec):
                return node
        return None

    def _add(self, spec: NodeSpec, upstream: Upstream, told: State | None) -> Node:
        node = Node(
            spec=spec,
            upstream=upstream,
            rules=self._rules,
            clock=self._clock,
            circuit=Circuit(self._rules.health, self._rng),
            facts=self.last_seen.of(spec),
            on_return=self._returned,
            on_abandon=self._reclaimer.watch,
        )
        self._enter(node, told)
        return node

    def _keep(
        self, node: Node, spec: NodeSpec, upstream: Upstream | None, told: State | None
    ) -> None:
        """Go on with a node that the inventory describes anew."""
        if node.spec == spec and not node.removed:
            return
        begins = not node.wanted
        node.spec = spec
        if upstream is not None:
            node.unlock()
            self._departures.replace(node, upstream)
        if begins:
            node.probing = Probing()
        if begins or upstream is not None:
            node.probing.next = self._clock()
        if node.removed:
            node.removed = False
            self._departures.nodes.discard(node)
            self._enter(node, told)
        else:
            self._watches[node].wake()

    def _enter(self, node: Node, told: State | None) -> None:
        """Begin to watch; `told`: the state of this name that the world knows of."""
        node.draining = node.name in self._drains
        node.state, node.reason = judge(node, self._clock())
        self._unprobed.add(node)
        self._watches[node] = Watch(node, self.settle, self._gate, self._rng)
        if node.state is not told:
            old = None if told is None else told.value
            self._bus.publish(NodeChanged(node.name, old, node.state.value, node.reason))

    def _leave(self, node: Node) -> None:
        """Give it nothing more, and close it when it has ended what it runs."""
        node.removed = True
        self._departures.own(self._watches.pop(node).cancel())
        self._departures.leave(node)

    # What happens to nodes.

    def drain(self, name: str) -> None:
        """No new work for this node until it is resumed, restarts included. Raises KeyError."""
        node = self.nodes[name]
        self._drains.add(name)
        node.draining = True
        self.settle(node)

    def resume(self, name: str) -> None:
        """End a drain. Raises KeyError."""
        node = self.nodes[name]
        self._drains.remove(name)
        node.draining = False
        self.settle(node)

    def switched(self, node: Node, *, anew: bool = False) -> None:
        """The power of a standby node has changed; `anew`: what its probes said is void."""
        if anew:
            node.probing = Probing(next=self._clock())
        self.settle(node)
        if (watch := self._watches.get(node)) is not None:
            watch.wake()

    async def probe(self, name: str) -> Outcome:
        """Probe now; closes the node's circuit if it answers. Raises KeyError."""
        node = self.nodes[name]
        outcome = await self._watches[node].probe()
        if outcome.up:
            node.circuit.close(self._clock())
        self.settle(node)
        return outcome

    def succeeded(self, node: Node, now: float, began: float | None = None) -> None:
        """A request that `began` then (a lease's `taken`) went well."""
        node.accepted = True
        doubted = node.circuit.failures
        if node.circuit.succeeded(now, began):
            self._turned(node)
        elif doubted:
            self._tell_change(node)

    def failed(
        self,
        node: Node,
        now: float,
        began: float | None = None,
        *,
        caller: str | None = None,
        certain: bool = True,
        counted: bool = False,
    ) -> None:
        """A request that `began` then (a lease's `taken`) failed, and the node is to blame.

        Not `certain`: the node, or what the `caller` has asked for. `counted`: it was told
        before, as not certain.
        """
        node.failures += not counted
        if (watch := self._watches.get(node)) is not None:
            watch.hurry()
        if node.circuit.failed(now, began, caller=caller, certain=certain):
            self._turned(node)
        else:
            self._tell_change(node)

    def unreachable(self, node: Node, why: str) -> None:
        """A request found nobody there: as good as a probe that found it."""
        self._noticed(node, Answer.REFUSED, why)

    def loading(self, node: Node) -> None:
        """A request was told that the model is still being loaded."""
        self._noticed(node, Answer.LOADING, "the server is loading its model")

    def locked(self, node: Node, path: str, status: int) -> None:
        """A request was told that our key is wrong (401)."""
        node.lock(refuses_our_key(path, status), self._clock())
        self.settle(node)

    def overloaded(self, lease: Lease, now: float, retry_after: float | None) -> None:
        """A request was told 429 or 503: too much at once, or too soon."""
        if lease.node.learn_refusal(lease, now, retry_after):
            self._turned(lease.node)

    def answered(self, lease: Lease, prompt: float, completion: float) -> None:
        """A whole answer after so many tokens: its node may take more at once, or less."""
        if lease.node.learn_limit(lease, prompt, completion):
            self.settle(lease.node)

    def refuses(self, node: Node, endpoint: Endpoint, hint: str | None = None) -> None:
        """A request was told that the node does not do this (501), and perhaps why.

        It is asked again some minutes later. Where it has written answers before, it is the
        request that was wrong.
        """
        if endpoint == "chat" and node.speed.decode_tps is not None:
            return
        node.facts.refused.add(endpoint)
        node.refused_at = self._clock()
        if hint is not None:
            node.hints[endpoint] = hint
        self.catalogue.node_changed()

    def learn(self, node: Node, timings: Mapping[str, object], lease: Lease | None = None) -> None:
        """Take in llama.cpp's `timings` of a whole answer; with the lease, our clock's word too."""
        if lease is None or lease.slots:
            seen = None if lease is None else lease.seen()
            self._measured(node, node.speed.learn(timings, seen))

    def observe(self, lease: Lease, prompt: float, cached: float, completion: float) -> None:
        """The same for a whole answer without timings, by its tokens and our clock."""
        seen, node = lease.seen(), lease.node
        if seen is not None:
            self._measured(node, node.speed.clocked(prompt, cached, completion / lease.slots, seen))

    def _measured(self, node: Node, sample: Sample) -> None:
        if node.pace.learn(sample, self._clock()):
            self.settle(node)

    def _noticed(self, node: Node, answer: Answer, detail: str) -> None:
        health = self._rules.health
        node.probing.note(
            Outcome(answer, detail), rise=health.rise, fall=health.fall, sign_of_life=None
        )
        if (watch := self._watches.get(node)) is not None:
            watch.hurry()
        self.settle(node)

    def settle(self, node: Node) -> None:
        """Bring the node's state in line with what is known, and tell who must know."""
        if node.removed:
            return
        now = self._clock()
        self.catalogue.node_changed()
        old = node.state
        node.state, node.reason = judge(node, now)
        if node.state is not old:
            self._bus.publish(NodeChanged(node.name, old.value, node.state.value, node.reason))
        if node.probing.down:
            self._reclaimer.give_up(node)
        self._compare(node)
        if node.probing.probed and node in self._unprobed:
            self._unprobed.discard(node)
            if not self._unprobed:
                self.probed.set()
        self._tell_change(node)
        free = node.free(now)
        if free > node.announced:
            self._tell_capacity()
        node.announced = free

    def _compare(self, node: Node) -> None:
        """See whether what the server says has changed."""
        node.note_model()
        if (models := node.public_models) != node.listed:
            node.listed = models
            self.catalogue.names_changed()
        self.last_seen.note(node)
        if (drift := differences(node.spec, node.facts)) != node.drift:
            node.drift = drift
            self._bus.publish(NodeDrift(node.name, drift))

    def _turned(self, node: Node) -> None:
        """The circuit has opened or closed."""
        self.switched(node)

    def _returned(self, lease: Lease) -> None:
        """A lease has been given back; who placed it has counted it already."""
        if lease.node.removed or lease.upstream is not lease.node.upstream:
            self._departures.returned(lease.node)
        if lease.placement is None or lease.trial or lease.node.state is State.EJECTED:
            self._tell_change(lease.node)
        self._tell_capacity()

    def _tell_change(self, node: Node | None = None) -> None:
        if self.on_change is not None:
            self.on_change(node)

    def _tell_capacity(self) -> None:
        if self.on_capacity is not None:
            self.on_capacity()

    def _note_probed(self) -> None:
        """Forget the nodes that need no first probe any more; when none is left, all are."""
        self._unprobed = {n for n in self._unprobed if n.wanted and not n.probing.probed}
        if not self._unprobed:
            self.probed.set()

    async def _weigh_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(WEIGH_EVERY)
            weigh(self.nodes.values())
            now = self._clock()
            for node in self.nodes.values():
                if node.pace.refresh(now):
                    self.settle(node)
            self._tell_change()
