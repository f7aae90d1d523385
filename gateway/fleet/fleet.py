"""The set of nodes: kept as the inventory says, and watched."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping

from gateway.config.inventory import Inventory, NodeSpec
from gateway.config.routing import HealthSettings, TimeoutSettings
from gateway.events import EventBus, InventoryChanged, NodeChanged, NodeDrift
from gateway.fleet.circuit import Circuit
from gateway.fleet.health import HealthMonitor, judge_state
from gateway.fleet.model_index import ModelIndex
from gateway.fleet.node import Lease, Node, NodeSettings, NodeState, connection_key, server_identity
from gateway.fleet.probe_history import ProbeAnswer, ProbeHistory, ProbeResult
from gateway.fleet.probes import key_rejected_reason
from gateway.fleet.reclaim import Reclaimer
from gateway.fleet.server_properties import inventory_drift
from gateway.fleet.speed import SpeedSample, compare_speeds
from gateway.fleet.state_files import DrainedNodes, PropertiesStore
from gateway.request import Endpoint
from gateway.transport.node_client import NodeClient, OpenNodeClient

PROBES_AT_ONCE = 256
"""Nodes probed at the same moment, at most; when all are black holes a thousand take 8 s."""

COMPARE_SPEEDS_EVERY = 5.0
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
        connect: OpenNodeClient,
        health: HealthSettings,
        timeouts: TimeoutSettings,
        bus: EventBus,
        clock: Callable[[], float],
        rng: random.Random,
        drained_nodes: DrainedNodes,
        properties_store: PropertiesStore | None = None,
    ) -> None:
        self.nodes: dict[str, Node] = {}
        self.model_index = ModelIndex()
        self.first_probes_done = asyncio.Event()
        """Set when every node of the first inventory has been probed once."""
        self.on_capacity: Callable[[], None] | None = None
        self.on_change: Callable[[Node | None], None] | None = None
        self._connect = connect
        self._rules = NodeSettings(health, timeouts)
        self._bus = bus
        self._clock = clock
        self._rng = rng
        self._drains = drained_nodes
        self.properties_store = properties_store or PropertiesStore()
        self._reclaimer = Reclaimer()
        self._gate = asyncio.Semaphore(PROBES_AT_ONCE)
        self._watches: dict[Node, HealthMonitor] = {}
        self._departures = ClosingNodes()
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
            self._departures.close_upstream(node.upstream)
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
        self.model_index.set_nodes(self.nodes.values())
        compare_speeds(self.nodes.values())
        self._tell_change()
        for node in self.nodes.values():
            self.refresh_state(node)
        self._note_probed()
        self._tell_capacity()
        return change

    def configure(self, health: HealthSettings, timeouts: TimeoutSettings) -> None:
        """Put changed settings in force."""
        self._rules = NodeSettings(health, timeouts)
        for node in (*self.nodes.values(), *self._departures.nodes):
            node.settings = self._rules
            node.circuit.settings = health
        for watch in self._watches.values():
            watch.reschedule()

    def _plan(self, inventory: Inventory) -> list[tuple[NodeSpec, Node | None, NodeClient | None]]:
        """Each node with what is known of its server and, where needed, new ways to it."""
        plan: list[tuple[NodeSpec, Node | None, NodeClient | None]] = []
        try:
            for spec in inventory.nodes:
                node = self._known(spec)
                fresh = node is None or connection_key(node.spec) != connection_key(spec)
                plan.append((spec, node, self._connect(spec) if fresh else None))
        except BaseException:
            for _, _, upstream in plan:
                if upstream is not None:
                    self._departures.close_upstream(upstream)
            raise
        return plan

    def _known(self, spec: NodeSpec) -> Node | None:
        """The node of this name at the same server, also if it is on its way out."""
        here = self.nodes.get(spec.name)
        leaving = [node for node in self._departures.nodes if node.name == spec.name]
        for node in leaving if here is None else (here, *leaving):
            if server_identity(node.spec) == server_identity(spec):
                return node
        return None

    def _add(self, spec: NodeSpec, upstream: NodeClient, told: NodeState | None) -> Node:
        node = Node(
            spec=spec,
            upstream=upstream,
            settings=self._rules,
            clock=self._clock,
            circuit=Circuit(self._rules.health, self._rng),
            properties=self.properties_store.recall(spec),
            on_lease_released=self._returned,
            on_lease_abandoned=self._reclaimer.watch,
        )
        self._enter(node, told)
        return node

    def _keep(
        self, node: Node, spec: NodeSpec, upstream: NodeClient | None, told: NodeState | None
    ) -> None:
        """Go on with a node that the inventory describes anew."""
        if node.spec == spec and not node.removed:
            return
        begins = not node.in_service
        node.spec = spec
        if upstream is not None:
            node.clear_key_rejection()
            self._departures.replace_upstream(node, upstream)
        if begins:
            node.probe_history = ProbeHistory()
        if begins or upstream is not None:
            node.probe_history.next_probe_at = self._clock()
        if node.removed:
            node.removed = False
            self._departures.nodes.discard(node)
            self._enter(node, told)
        else:
            self._watches[node].wake()

    def _enter(self, node: Node, told: NodeState | None) -> None:
        """Begin to watch; `told`: the state of this name that the world knows of."""
        node.draining = node.name in self._drains
        node.state, node.reason = judge_state(node, self._clock())
        self._unprobed.add(node)
        self._watches[node] = HealthMonitor(node, self.refresh_state, self._gate, self._rng)
        if node.state is not told:
            old = None if told is None else told.value
            self._bus.publish(NodeChanged(node.name, old, node.state.value, node.reason))

    def _leave(self, node: Node) -> None:
        """Give it nothing more, and close it when it has ended what it runs."""
        node.removed = True
        self._departures.own_task(self._watches.pop(node).cancel())
        self._departures.close_when_idle(node)

    # What happens to nodes.

    def drain(self, name: str) -> None:
        """No new work for this node until it is resumed, restarts included. Raises KeyError."""
        node = self.nodes[name]
        self._drains.add(name)
        node.draining = True
        self.refresh_state(node)

    def resume(self, name: str) -> None:
        """End a drain. Raises KeyError."""
        node = self.nodes[name]
        self._drains.remove(name)
        node.draining = False
        self.refresh_state(node)

    def lifecycle_changed(self, node: Node, *, reset_probes: bool = False) -> None:
        """The power of a standby node has changed; `anew`: what its probes said is void."""
        if reset_probes:
            node.probe_history = ProbeHistory(next_probe_at=self._clock())
        self.refresh_state(node)
        if (watch := self._watches.get(node)) is not None:
            watch.wake()

    async def probe(self, name: str) -> ProbeResult:
        """Probe now; closes the node's circuit if it answers. Raises KeyError."""
        node = self.nodes[name]
        outcome = await self._watches[node].probe()
        if outcome.up:
            node.circuit.close(self._clock())
        self.refresh_state(node)
        return outcome

    def request_succeeded(self, node: Node, now: float, began: float | None = None) -> None:
        """A request that `began` then (a lease's `taken`) went well."""
        node.key_accepted = True
        doubted = node.circuit.failures
        if node.circuit.record_success(now, began):
            self._turned(node)
        elif doubted:
            self._tell_change(node)

    def request_failed(
        self,
        node: Node,
        now: float,
        began: float | None = None,
        *,
        caller: str | None = None,
        node_at_fault: bool = True,
        already_counted: bool = False,
    ) -> None:
        """A request that `began` then (a lease's `taken`) failed, and the node is to blame.

        Not `certain`: the node, or what the `caller` has asked for. `counted`: it was told
        before, as not certain.
        """
        node.failures += not already_counted
        if (watch := self._watches.get(node)) is not None:
            watch.probe_soon()
        if node.circuit.record_failure(now, began, caller=caller, node_at_fault=node_at_fault):
            self._turned(node)
        else:
            self._tell_change(node)

    def connect_failed(self, node: Node, detail: str) -> None:
        """A request found nobody there: as good as a probe that found it."""
        self._noticed(node, ProbeAnswer.CONNECTION_REFUSED, detail)

    def model_loading(self, node: Node) -> None:
        """A request was told that the model is still being loaded."""
        self._noticed(node, ProbeAnswer.LOADING, "the server is loading its model")

    def key_rejected(self, node: Node, path: str, status: int) -> None:
        """A request was told that our key is wrong (401)."""
        node.key_rejected(key_rejected_reason(path, status), self._clock())
        self.refresh_state(node)

    def node_overloaded(self, lease: Lease, now: float, retry_after: float | None) -> None:
        """A request was told 429 or 503: too much at once, or too soon."""
        if lease.node.record_refusal(lease, now, retry_after):
            self._turned(lease.node)

    def adjust_limit(self, lease: Lease, prompt_tokens: float, completion_tokens: float) -> None:
        """A whole answer after so many tokens: its node may take more at once, or less."""
        if lease.node.record_answer(lease, prompt_tokens, completion_tokens):
            self.refresh_state(lease.node)

    def endpoint_refused(self, node: Node, endpoint: Endpoint, hint: str | None = None) -> None:
        """A request was told that the node does not do this (501), and perhaps why.

        It is asked again some minutes later. Where it has written answers before, it is the
        request that was wrong.
        """
        if endpoint == "chat" and node.speed.decode_tps is not None:
            return
        node.properties.refused.add(endpoint)
        node.endpoint_refused_at = self._clock()
        if hint is not None:
            node.refusal_hints[endpoint] = hint
        self.model_index.node_changed()

    def learn_timings(
        self, node: Node, timings: Mapping[str, object], lease: Lease | None = None
    ) -> None:
        """Take in llama.cpp's `timings` of a whole answer; with the lease, our clock's word too."""
        if lease is None or lease.slots:
            seen = None if lease is None else lease.observed_timing()
            self._measured(node, node.speed.learn_timings(timings, seen))

    def learn_clocked(
        self, lease: Lease, prompt_tokens: float, cached_tokens: float, completion_tokens: float
    ) -> None:
        """The same for a whole answer without timings, by its tokens and our clock."""
        seen, node = lease.observed_timing(), lease.node
        if seen is not None:
            self._measured(
                node,
                node.speed.learn_clocked(
                    prompt_tokens, cached_tokens, completion_tokens / lease.slots, seen
                ),
            )

    def _measured(self, node: Node, sample: SpeedSample) -> None:
        if node.degradation.learn(sample, self._clock()):
            self.refresh_state(node)

    def _noticed(self, node: Node, answer: ProbeAnswer, detail: str) -> None:
        health = self._rules.health
        node.probe_history.record(
            ProbeResult(answer, detail), rise=health.rise, fall=health.fall, sign_of_life=None
        )
        if (watch := self._watches.get(node)) is not None:
            watch.probe_soon()
        self.refresh_state(node)

    def refresh_state(self, node: Node) -> None:
        """Bring the node's state in line with what is known, and tell who must know."""
        if node.removed:
            return
        now = self._clock()
        self.model_index.node_changed()
        old = node.state
        node.state, node.reason = judge_state(node, now)
        if node.state is not old:
            self._bus.publish(NodeChanged(node.name, old.value, node.state.value, node.reason))
        if node.probe_history.down:
            self._reclaimer.release_all(node)
        self._compare(node)
        if node.probe_history.probed and node in self._unprobed:
            self._unprobed.discard(node)
            if not self._unprobed:
                self.first_probes_done.set()
        self._tell_change(node)
        free = node.free_slots(now)
        if free > node.announced_free:
            self._tell_capacity()
        node.announced_free = free

    def _compare(self, node: Node) -> None:
        """See whether what the server says has changed."""
        node.forget_replaced_model()
        if (models := node.public_models) != node.indexed_models:
            node.indexed_models = models
            self.model_index.models_changed()
        self.properties_store.record(node)
        if (drift := inventory_drift(node.spec, node.properties)) != node.drift:
            node.drift = drift
            self._bus.publish(NodeDrift(node.name, drift))

    def _turned(self, node: Node) -> None:
        """The circuit has opened or closed."""
        self.lifecycle_changed(node)

    def _returned(self, lease: Lease) -> None:
        """A lease has been given back; who placed it has counted it already."""
        if lease.node.removed or lease.upstream is not lease.node.upstream:
            self._departures.lease_released(lease.node)
        if lease.placement is None or lease.trial or lease.node.state is NodeState.EJECTED:
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
        self._unprobed = {n for n in self._unprobed if n.in_service and not n.probe_history.probed}
        if not self._unprobed:
            self.first_probes_done.set()

    async def _weigh_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(COMPARE_SPEEDS_EVERY)
            compare_speeds(self.nodes.values())
            now = self._clock()
            for node in self.nodes.values():
                if node.degradation.refresh(now):
                    self.refresh_state(node)
            self._tell_change()


log = logging.getLogger(__name__)


class ClosingNodes:
    """Owns what the fleet has let go of."""

    def __init__(self) -> None:
        self.nodes: set[Node] = set()
        """Removed nodes that still run something."""
        self._replaced: list[tuple[Node, NodeClient]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def close_when_idle(self, node: Node) -> None:
        """Close this node when it has ended what it runs."""
        self.nodes.add(node)
        self.lease_released(node)

    def replace_upstream(self, node: Node, upstream: NodeClient) -> None:
        """Give the node new ways; the old ones stay open for the leases that use them."""
        self._replaced.append((node, node.upstream))
        node.upstream = upstream
        self.lease_released(node)

    def lease_released(self, node: Node) -> None:
        """A lease of this node has ended: close what only it kept open."""
        if node in self.nodes and not node.leases:
            self.nodes.discard(node)
            self.close_upstream(node.upstream)
        if self._replaced:
            replaced, self._replaced = self._replaced, []
            for owner, upstream in replaced:
                if any(lease.upstream is upstream for lease in owner.leases):
                    self._replaced.append((owner, upstream))
                else:
                    self.close_upstream(upstream)

    def close_upstream(self, upstream: NodeClient) -> None:
        """Close it now, in the background."""
        self.own_task(asyncio.create_task(_close_upstream(upstream)))

    def own_task(self, task: asyncio.Task[None]) -> None:
        """Wait for this task at the end."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Close everything, whatever still runs."""
        for upstream in [node.upstream for node in self.nodes] + [old for _, old in self._replaced]:
            self.close_upstream(upstream)
        self.nodes.clear()
        self._replaced.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _close_upstream(upstream: NodeClient) -> None:
    try:
        await upstream.aclose()
    except Exception:
        log.exception("The connections to a node could not be closed")
