"""All nodes: kept as the inventory says, watched, and judged by what requests and probes show.

Slots of abandoned requests are held until the node shows that they are idle (`Reclaimer`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Literal

from gateway.config.inventory import Inventory, NodeSpec
from gateway.config.settings import Settings
from gateway.events import (
    EventBus,
    InventoryChanged,
    ModelLoadChanged,
    ModelsDiffer,
    NodeChanged,
    NodeDrift,
)
from gateway.nodes.circuit import Circuit
from gateway.nodes.health import (
    HealthMonitor,
    count_result,
    judge_state,
    key_rejected_reason,
    prefill_grace,
    probe_slots,
)
from gateway.nodes.lifecycle import REST_DELAY, ProbeAnswer, ProbeResult
from gateway.nodes.model_index import ComparedServer, ModelDifference, ModelIndex, model_differences
from gateway.nodes.node import (
    SLOT_LINGER,
    LearntOfServer,
    Lease,
    LeasePhase,
    Node,
    NodeState,
    SlotsReader,
)
from gateway.nodes.router import LoadChange, LoadPhase, ModelLoad, RoutedModel, UnloadCause
from gateway.nodes.server_properties import ServerProperties, server_identity, server_key
from gateway.nodes.speed import CPU_PRIOR, GPU_PRIOR, Speed, SpeedPrior, SpeedSample
from gateway.nodes.state_files import OperatorOrders, PropertiesStore
from gateway.terms import Endpoint
from gateway.transport.pool import ConnectionPool, OpenNodePool, connection_key, tls_files

log = logging.getLogger(__name__)
FIRST_POLL = 0.02  # seconds: llama.cpp frees the slot of a stream in decode within 3 to 36 ms
MOST_POLL_INTERVAL = 1.0  # seconds; the interval doubles up to this
# Seconds for which an abandoned request without a slot is held: the node works on, and reports
# nothing of it.
SLOTLESS_HOLD = 1.0
BLIND_HOLD = 0.2  # seconds for which the slot of a cut stream is held if the node has no `/slots`


class Reclaimer:
    """Watches abandoned leases, with one task for each node that has any."""

    def __init__(self) -> None:
        self._watches: dict[Node, tuple[asyncio.Task[None], asyncio.Event]] = {}
        self._closed = False

    def watch(self, node: Node) -> None:
        """A lease of this node has been abandoned."""
        if self._closed:
            return
        if node in self._watches:
            self._watches[node][1].set()
            return
        another = asyncio.Event()
        task = asyncio.create_task(self._watch(node, another), name=f"reclaim {node.name}")
        self._watches[node] = (task, another)

    def release_all(self, node: Node) -> None:
        """The node is gone, and so is its work."""
        for lease in abandoned_leases(node):
            lease.release()

    async def aclose(self) -> None:
        """Stop watching."""
        self._closed = True
        tasks = [task for task, _ in self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, node: Node, another: asyncio.Event) -> None:
        """Poll until no abandoned lease is left; `another`: one more has been abandoned."""
        try:
            interval, free_before = FIRST_POLL, 0
            while abandoned_leases(node):
                with suppress(TimeoutError):
                    async with asyncio.timeout(interval):
                        await another.wait()
                if another.is_set():
                    another.clear()
                    interval = FIRST_POLL
                    await asyncio.sleep(FIRST_POLL)
                interval = min(2 * interval, MOST_POLL_INTERVAL)
                free_before = await self._poll(node, free_before)
        finally:
            del self._watches[node]

    async def _poll(self, node: Node, free_before: int) -> int:
        """Release the leases whose slots two readings in a row show free.

        Returns how many free slots this reading showed and the one before did not.
        """
        if node.probe_history.down:
            self.release_all(node)
            return 0
        began = node.clock()
        busy = await probe_slots(node) if node.reports_slots else None
        free = 0 if busy is None else released_slots(len(busy), node.leases, began)
        confirmed = min(free, free_before)
        now = node.clock()
        for lease in abandoned_leases(node):
            held = now - lease.abandoned_at
            if 0 < lease.slots <= confirmed:
                confirmed -= lease.slots
                free -= lease.slots
                lease.release()
            elif held >= most_hold(lease):
                lease.release()
                if lease.slots and node.reports_slots:
                    log.warning(
                        "Node %s has not shown the slot of an abandoned request idle for %.0f s: "
                        "counted as free now",
                        node.name,
                        held,
                    )
        return free


def abandoned_leases(node: Node) -> list[Lease]:
    """The node's abandoned leases, oldest first."""
    leases = [lease for lease in node.leases if lease.phase is LeasePhase.RECLAIM]
    return sorted(leases, key=lambda lease: lease.abandoned_at)


def released_slots(busy: int, leases: Iterable[Lease], asked_at: float) -> int:
    """How many slots of abandoned leases are free, if a reading at `asked_at` saw `busy`.

    A request counts only once it has had time to reach a slot: a live one as occupying it, an
    abandoned one as having freed it. A busy slot that no live lease accounts for may be an
    abandoned one's, so work of other clients delays the release.
    """
    abandoned = occupied = 0
    for lease in leases:
        arrived = asked_at - lease.taken_at >= SLOT_LINGER
        if lease.phase is not LeasePhase.RECLAIM:
            occupied += lease.slots if arrived else 0
        elif arrived or lease.abandoned_phase is LeasePhase.DECODE:
            abandoned += lease.slots
    return max(0, abandoned - max(0, busy - occupied))


def most_hold(lease: Lease) -> float:
    """Seconds after which an abandoned lease is released, unless the node shows its slot idle."""
    if not lease.slots:
        return SLOTLESS_HOLD
    longest = max(prefill_grace(lease), lease.node.silence_timeout)
    if lease.node.reports_slots:
        return longest
    if lease.stream and lease.abandoned_phase is LeasePhase.DECODE:
        return BLIND_HOLD
    began, expected = lease.taken_at, lease.expected_total
    if lease.stream:
        began, expected = lease.prefill_began_at, lease.expected_prefill
    if expected is None:
        return longest
    return min(longest, max(BLIND_HOLD, began + expected - lease.abandoned_at))


# Most nodes probed at the same time: if none of a thousand nodes answers, a round takes 8 s.
PROBES_AT_ONCE = 256
# Servers that the inventory does not have and of which something learnt is kept.
MOST_LEARNT = 10_000
# Seconds since the start for which loads by others may be those of a predecessor process.
PREDECESSOR_SECONDS = 60.0
# Indexing the models of many routers takes at most one part in so many of the time.
INDEXING_PAUSE = 20.0
MOST_ADDED = 100  # models of a router that are taken in at once
COMPARE_SPEEDS_EVERY = 5.0  # seconds between two comparisons of all nodes' speeds
COMPARE_SPEEDS_PAUSE = 1.0  # and at least, where other nodes have come
COMPARED_AT_ONCE = 500  # nodes that are compared in one turn of the event loop


class Fleet:
    """All nodes by name, in the inventory's order.

    Who schedules on it subscribes to its changes (`subscribe`).
    """

    def __init__(
        self,
        *,
        connect: OpenNodePool,
        settings: Settings,
        bus: EventBus,
        clock: Callable[[], float],
        rng: random.Random,
        orders: OperatorOrders,
        properties_store: PropertiesStore | None = None,
        has_predecessor: bool = False,
    ) -> None:
        self.nodes: dict[str, Node] = {}
        self.model_index = ModelIndex()
        self.first_probes_done = asyncio.Event()
        """Set when every node of the first inventory has been probed once."""
        self.properties_store = properties_store or PropertiesStore()
        self._connect, self._settings, self._orders = connect, settings, orders
        self._bus, self._clock, self._rng = bus, clock, rng
        self._shared_until = clock() + PREDECESSOR_SECONDS if has_predecessor else -math.inf
        # By then a predecessor has ended the last of its requests.
        self._alone_from = clock() + settings.timeouts.total if has_predecessor else -math.inf
        self.model_index.set_paused(self._orders.paused.names)
        self.differences_in_words: Mapping[str, tuple[str, ...]] = {}
        """By public model: how its nodes differ, as of the last `compare_models`."""
        self._learnt: dict[str, tuple[LearntOfServer, float]] = {}
        """By `server_key`: what was learnt of servers before, and what share of it counts still."""
        self._reclaimer = Reclaimer()
        self._probe_gate = asyncio.Semaphore(PROBES_AT_ONCE)
        self._monitors: dict[Node, HealthMonitor] = {}
        self._closing = ClosingPools()
        self._speed_comparison: asyncio.Task[None] | None = None
        self._nodes_differ = asyncio.Event()  # from those whose speeds were compared
        self._unprobed: set[Node] = set()
        self._has_work, self._work_looked_at, self._index_again_at = False, -math.inf, -math.inf
        self.routers: list[Node] = []  # nodes that are known as such
        self._on_models: Callable[[Node | None], None] = lambda _: None
        self._on_loaded: Callable[[Node], None] = lambda _: None
        self._indexing: asyncio.TimerHandle | None = None
        self._slots_reader: SlotsReader | None = None
        self.subscribe()

    def subscribe(
        self,
        *,
        on_capacity: Callable[[], None] = lambda: None,
        on_change: Callable[[Node | None], None] = lambda _: None,
    ) -> None:
        """Call `on_capacity` when a lease has ended.

        Call `on_change` when the capacity or the abilities of a node may have changed; with None:
        which nodes there are. Both may be called often and from within other
        calls: they must be cheap and must not raise. Only the last subscriber is called.
        """
        self._notify_capacity, self._notify_change = on_capacity, on_change

    def read_slots_for(self, reader: SlotsReader | None) -> None:
        """Tell this reader of each reading of any node's `/slots`; None: nobody."""
        self._slots_reader = reader
        for node in self.nodes.values():
            node.read_slots_for(reader)

    def watch_models(
        self, on_change: Callable[[Node | None], None], on_loaded: Callable[[Node], None]
    ) -> None:
        """Call `on_change` when one of a router's models may have changed, or has ended a request.

        With None: there may be others. Call `on_loaded` when a router has loaded one, before that
        gets work.
        """
        self._on_models, self._on_loaded = on_change, on_loaded

    async def start(self, inventory: Inventory) -> InventoryChanged:
        """Take in the first inventory and begin to watch. Raises what `connect` raises."""
        change = self.apply(inventory)
        self._speed_comparison = asyncio.create_task(
            self._compare_speeds_forever(), name="compare speeds"
        )
        return change

    async def aclose(self) -> None:
        """Stop watching and close every connection, whatever still runs."""
        tasks = [monitor.cancel() for monitor in self._monitors.values()]
        if self._speed_comparison is not None:
            self._speed_comparison.cancel()
            tasks.append(self._speed_comparison)
        self._monitors.clear()
        if self._indexing is not None:
            self._indexing.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._reclaimer.aclose()
        for node in self.nodes.values():
            node.upstream.close()
        await self._closing.aclose()

    # The inventory and the settings.

    def apply(self, inventory: Inventory) -> InventoryChanged:
        """Bring the fleet to this inventory; running requests end where they run.

        Raises what `connect` raises, and then nothing has changed. The caller publishes the
        result.
        """
        before = {name: node for name, node in self.nodes.items() if node.router is None}
        pools = self._open_pools(inventory, before)
        change = InventoryChanged(warnings=[str(one) for one in inventory.warnings])
        self.nodes = {}
        for spec in inventory.nodes:
            if (node := before.get(spec.name)) is None:
                change.added.append(spec.name)
            elif node.spec != spec:
                change.changed.append(spec.name)
            if node is None or server_identity(node.spec) != server_identity(spec):
                published = None if node is None else node.state
                node = self._make(spec, pools[spec.name], self.properties_store.recall(spec))
                self._enter(node, published)
                self._add_known_models(node)
            elif node.spec != spec:
                self._update(node, spec, pools.get(spec.name))
            self.nodes[spec.name] = node
            self.nodes.update({one.name: one for one in node.instances.values()})
        for name, node in before.items():
            if self.nodes.get(name) is not node:
                self._remove(node)
            if name not in self.nodes:
                change.removed.append(name)
                reason = "removed from the inventory"
                for one in (node, *node.instances.values()):
                    self._bus.publish(NodeChanged(one.name, one.state.value, None, reason))
        compare_speeds(self.nodes.values())
        self._index_nodes()
        for node in self.nodes.values():
            self.refresh_state(node)
        self._unprobed = {n for n in self._unprobed if n.in_service and not n.probe_history.probed}
        if not self._unprobed:
            self.first_probes_done.set()
        self._notify_capacity()
        return change

    def configure(self, settings: Settings) -> None:
        """Put changed settings in force."""
        self._settings = settings
        for node in self.nodes.values():
            node.configure(self._settings)
        for monitor in set(self._monitors.values()):
            monitor.reschedule()

    def tls_files(self) -> set[Path]:
        """The files of certificates and keys with which nodes are reached."""
        return {path for node in self.nodes.values() for path in tls_files(node.spec)}

    def renew_connections(self, changed: Collection[Path]) -> dict[str, str | None]:
        """Reach the nodes that have one of these TLS files by new connections.

        Running requests end on the old ones. Returns the names of the nodes, each with the reason
        why the files can't be used, if so: then it keeps its connections.
        """
        results: dict[str, str | None] = {}
        for name, node in self.nodes.items():
            if tls_files(node.spec).isdisjoint(changed):
                continue
            try:
                upstream = self._connect(node.spec)
            except OSError as error:
                results[name] = str(error)
                continue
            self._closing.close_when_idle(node, node.replace_upstream(upstream, self._clock()))
            self._monitors[node].wake()
            results[name] = None
        return results

    def _open_pools(
        self, inventory: Inventory, before: Mapping[str, Node]
    ) -> dict[str, ConnectionPool]:
        """A pool for each entry that is new, or needs other connections than before."""
        pools: dict[str, ConnectionPool] = {}
        with ExitStack() as opened:
            for spec in inventory.nodes:
                node = before.get(spec.name)
                if node is None or connection_key(node.spec) != connection_key(spec):
                    pools[spec.name] = pool = self._connect(spec)
                    opened.callback(pool.close)
            opened.pop_all()
        return pools

    def _make(
        self,
        spec: NodeSpec,
        upstream: ConnectionPool,
        properties: ServerProperties,
        router: Node | None = None,
    ) -> Node:
        """A node with what was learnt of it; `router`: it is one of its models."""
        node = Node(
            spec=spec,
            upstream=upstream,
            settings=self._settings,
            clock=self._clock,
            circuit=Circuit(self._settings.health, self._rng),
            properties=properties,
            router=router,
            load=None if router is None else ModelLoad(),
            draining=spec.name in self._orders.drained,
            on_lease_released=self.lease_released,
            on_lease_abandoned=self._reclaimer.watch,
            slots_reader=self._slots_reader,
        )
        if (learnt := self._learnt.get(server_key(spec))) is not None:
            node.restore(*learnt)
        return node

    # A router's models.

    def models_listed(self, router: Node, listed: list[RoutedModel], asked_at: float) -> None:
        """A router lists these models, and no others; it was asked at that time."""
        now, record = self._clock(), router.router_record
        if router.spec.kind == "openai":
            most = record.most_loaded
            record.holds(frozenset(model.name for model in listed if model.status == "loaded"))
            if record.most_loaded != most:
                self._on_models(router)
        declared = router.spec.models
        changed, added = False, 0
        kept: dict[str, Node] = {}
        for model in listed:
            if declared is not None and model.names.isdisjoint(declared.values()):
                continue
            instance = router.instances.get(model.name)
            if instance is None and added == MOST_ADDED:
                self.read_models(router)  # The rest, when other work has had its turn.
                continue
            if instance is None:
                added += 1
                instance = self._add_model(router, model.name, model.names)
                changed = True
            elif instance.spec != (spec := router.spec.of_model(model.name, model.names)):
                instance.respecify(spec, now)
                changed = True
            kept[model.name] = instance
            self._follow_model(instance, model, asked_at)
        for name, instance in router.instances.items():
            if name not in kept:
                self._remove(instance)
                reason = f"{router.name} does not list it any more"
                self._bus.publish(NodeChanged(instance.name, instance.state.value, None, reason))
                changed = True
        if changed:
            router.set_instances(kept)
            self._models_of_routers_changed()

    def _follow_model(self, instance: Node, model: RoutedModel, asked_at: float) -> None:
        (router, load), now = instance.routed, self._clock()
        followed = router.router_record.followed(load.listed_at)
        if is_news := load.is_news(model, asked_at):
            instance.properties.clear_remembered()
            instance.properties.read_routed(model.entry, model.slots, model.context)
        if instance.spec.kind == "openai":
            before = load.held, instance.sleep.sleeping
            restarted = not router.probe_history.up
            change = instance.follow_held(model.status, asked_at, restarted=restarted)
            if change is not None:
                self._tell_load(instance, change)
            if change is not None or is_news or before != (load.held, instance.sleep.sleeping):
                self.load_changed(instance)
            return
        if not is_news:
            return
        change = load.reported(model, asked_at, now, followed=followed)
        if model.status is not None:
            asked = any(lease.wake for lease in instance.leases)
            instance.sleep.props_read(model.status == "sleeping", now, asked=asked)
        if change is not None:
            self._model_changed(instance, change)
        self.refresh_state(instance)

    def _model_changed(self, instance: Node, change: LoadChange) -> None:
        (router, _), now = instance.routed, self._clock()
        if change.change == "loaded":
            instance.probe_history.rediscover()
            instance.circuit.server_restarted(now)
            instance.calibration.server_started(instance.requests)
            if change.seconds is not None:
                instance.sleep.learn_wake(change.seconds)
                self._on_loaded(instance)
        elif change.change != "loading":
            instance.properties.process_ended()
            instance.sleep.restarted()
            self._reclaimer.release_all(instance)
        self._tell_load(instance, change)
        shared = now < self._shared_until  # A predecessor commands what its last requests need.
        if change.by_others and not shared and router.router_record.changed_by_others(now):
            self._on_models(router)

    def hand_over(self) -> None:
        """From now on a successor, or another member, takes slots and commands routers."""
        self._alone_from = self._shared_until = math.inf

    def take_over(self) -> None:
        """From now on this gateway does, after another member."""
        self._alone_from = self._clock()
        self._shared_until = self._alone_from + PREDECESSOR_SECONDS

    def others_take_slots(self, node: Node) -> bool:
        """As the node's own, but for what may be a predecessor's, a successor's or a member's."""
        return (now := self._clock()) >= self._alone_from and node.others_take_slots(now)

    def _tell_load(self, node: Node, change: LoadChange) -> None:
        (router, load), (word, seconds, by_others) = node.routed, change
        cause = load.cause if word in {"unloaded", "died"} else ""
        model, reason = node.spec.instance or "", load.reason
        self._bus.publish(
            ModelLoadChanged(router.name, model, word, seconds, reason, by_others, cause)
        )
        self.refresh_state(router)  # which tells how many are loaded

    def load_refused(self, node: Node, why: str) -> None:
        """A router did not take the command to load one of its models."""
        _, load = node.routed
        load.failed(why, self._clock())
        self._tell_load(node, LoadChange("failed"))
        self.load_changed(node)

    def _add_known_models(self, router: Node) -> None:
        """Its models are known from before, until its list is read again."""
        properties, declared = router.properties, router.spec.models
        for model in properties.models if router.is_router else ():
            names = {model, *(one for one, of in properties.aliases.items() if of == model)}
            wanted = declared is None or not names.isdisjoint(declared.values())
            if wanted and model not in router.instances:
                self._add_model(router, model, names)

    def _add_model(self, router: Node, name: str, names: Collection[str]) -> Node:
        spec = router.spec.of_model(name, names or {name})
        properties = self.properties_store.recall(spec)
        if not properties.models:
            properties.read_routed({"id": name}, None, None)
        node = self._make(spec, self._connect(spec), properties, router)
        router.set_instances({**router.instances, name: node})
        self._enter(node, None)
        return node

    def _models_of_routers_changed(self) -> None:
        """Index the models of routers anew: soon, since many routers may tell of theirs at once."""
        if self._indexing is not None:
            return
        if (wait := self._index_again_at - self._clock()) > 0:
            self._indexing = asyncio.get_running_loop().call_later(wait, self._index_models)
        else:
            self._index_models()

    def _index_models(self) -> None:
        """Bring the nodes to what routers list, each router before its models."""
        if self._indexing is not None:
            self._indexing.cancel()
            self._indexing = None
        began = self._clock()
        own = [node for node in self.nodes.values() if node.router is None]
        self.nodes = {one.name: one for node in own for one in (node, *node.instances.values())}
        if len(self.nodes) > COMPARED_AT_ONCE:
            self._nodes_differ.set()
        else:
            compare_speeds(self.nodes.values())
        self._index_nodes()
        now = self._clock()
        self._index_again_at = now + INDEXING_PAUSE * (now - began)

    def _index_nodes(self) -> None:
        self.routers = [node for node in self.nodes.values() if node.is_router]
        self.model_index.set_nodes(self.nodes.values())
        self._notify_change(None)
        self._on_models(None)

    def model_not_loaded(self, node: Node) -> None:
        """A request has found that a router has not loaded this model, or has lost it."""
        if node.load is not None:
            node.load.doubt(doubted=True)
            self.refresh_state(node)
        self.read_models(node)

    def read_models(self, node: Node) -> None:
        """A router was told to load or unload this model, say: read its list soon."""
        if (monitor := self._monitors.get(node)) is not None:
            monitor.read_models()

    def load_ordered(self, node: Node, command: Literal["load", "unload"], reason: str) -> None:
        """A router is told to load one of its models, or to unload it."""
        _, load = node.routed
        load.order(command, reason, self._clock())
        if command == "unload":
            node.sleep.restarted()
        self.load_changed(node)

    def load_changed(self, node: Node) -> None:
        """A router's model is in another phase."""
        self._refresh_and_wake(node)
        self._on_models(node)

    def model_opened(self, node: Node, reason: str) -> None:
        """The next request for this model loads it: its router takes no commands."""
        (_, load), now = node.routed, self._clock()
        load.enter(LoadPhase.READY, reason, now)
        node.sleep.props_read(True, now, asked=False)
        if load.held:
            node.sleep.woke()
        self.load_changed(node)

    def model_closed(self, node: Node, reason: str, cause: UnloadCause) -> None:
        """No request is to load this model: another one has its router's memory."""
        _, load = node.routed
        load.enter(LoadPhase.UNLOADED, reason, self._clock(), cause)
        node.sleep.restarted()
        if not load.held:
            self._tell_load(node, LoadChange("unloaded"))
        self.load_changed(node)

    def _update(self, node: Node, spec: NodeSpec, upstream: ConnectionPool | None) -> None:
        """Keep a known node under a changed entry of the inventory."""
        now = self._clock()
        node.respecify(spec, now)
        if upstream is not None:
            self._closing.close_when_idle(node, node.replace_upstream(upstream, now))
        for model in node.instances.values():
            model.respecify(spec.of_model(model.spec.instance or "", model.properties.names), now)
            if upstream is not None:
                renewed = model.replace_upstream(self._connect(model.spec), now)
                self._closing.close_when_idle(model, renewed)
        self._add_known_models(node)
        if node.is_router:
            self._monitors[node].read_models()
        self._monitors[node].wake()

    def _enter(self, node: Node, published: NodeState | None) -> None:
        """Begin to watch; `published`: the last state that was published for this name."""
        node.set_state(*judge_state(node, self._clock()))
        if node.router is not None:
            self._monitors[node] = self._monitors[node.router]
        else:
            self._unprobed.add(node)
            self._monitors[node] = HealthMonitor(
                node, self.refresh_state, self._probe_gate, self._rng, self.has_work,
                self.models_listed,
            )  # fmt: skip
        if node.state is not published:
            old = None if published is None else published.value
            self._bus.publish(NodeChanged(node.name, old, node.state.value, node.reason))

    def _remove(self, node: Node) -> None:
        """Give it no new work, and close it when its leases have ended."""
        node.leave()
        for model in node.instances.values():
            self._remove(model)
        if (learnt := node.export()) is not None:
            self._learnt[server_key(node.spec)] = learnt, 1.0
            if len(self._learnt) > MOST_LEARNT:
                del self._learnt[next(iter(self._learnt))]
        monitor = self._monitors.pop(node)
        if node.router is None:
            self._closing.own_task(monitor.cancel())
        self._closing.close_when_idle(node, node.upstream)

    # What the public edge asks (`gateway.catalog`).

    @property
    def is_probed(self) -> bool:
        """Whether every node of the first inventory has been probed once."""
        return self.first_probes_done.is_set()

    def has_work(self) -> bool:
        """Whether some node has had work of ours within seconds; looked at once a second."""
        now = self._clock()
        if now - self._work_looked_at >= 1.0:
            self._work_looked_at = now
            self._has_work = any(
                node.leases or now - node.released_at < REST_DELAY for node in self.nodes.values()
            )
        return self._has_work

    def has_free_slot(self) -> bool:
        """Whether some node could begin a request now."""
        now = self._clock()
        return any(node.free_slots(now) > 0 for node in self.nodes.values())

    def has_usable_node(self) -> bool:
        """Whether some node is alive, or is a standby node that a request would start."""
        return any(node.is_alive or node.startable for node in self.nodes.values())

    # What an operator does.

    def drain(self, name: str, *, draining: bool = True) -> None:
        """No new work for this node, or new work again. Raises KeyError."""
        node = self.nodes[name]
        self._orders.drained.keep(name, kept=draining)
        node.drain(draining=draining)
        for one in (node, *node.instances.values()):
            self.refresh_state(one)

    def pause_model(self, name: str, *, paused: bool) -> None:
        """No new requests for this public model name, or new ones again."""
        self._orders.paused.keep(name, kept=paused)
        self.model_index.set_paused(self._orders.paused.names)

    def pin_model(self, node: Node, *, pinned: bool) -> None:
        """A router's model is to be always loaded, or no longer by an operator's order."""
        self._orders.pinned.keep(node.name, kept=pinned)
        self._on_models(node)

    def is_pinned(self, node: Node) -> bool:
        """Whether an operator has pinned a router's model."""
        return node.name in self._orders.pinned

    async def save_orders(self) -> None:
        """Keep over a restart which nodes are drained and which models paused or pinned."""
        await asyncio.to_thread(self._orders.save)

    def differences(self) -> tuple[ModelDifference, ...]:
        """Where nodes that serve one model differ, as their servers have reported."""
        return model_differences(
            ComparedServer(
                node.name, tuple(sorted(node.public_models)), node.context, node.properties
            )
            for node in self.nodes.values()
            if node.load is None or node.load.loaded  # few of a large fleet's models are
            if node.in_service and node.spec.kind == "llama.cpp"
        )

    def compare_models(self) -> None:
        """Tell of differences that are new, or gone."""
        words: dict[str, tuple[str, ...]] = {}
        for one in self.differences():
            words[one.model] = (*words.get(one.model, ()), one.in_words())
        if words != self.differences_in_words:
            self.differences_in_words = words
            self._bus.publish(ModelsDiffer(tuple(chain.from_iterable(words.values()))))

    async def probe(self, name: str) -> ProbeResult:
        """Probe now; closes the node's circuit if it answers. Raises KeyError."""
        node = self.nodes[name]
        result = await self._monitors[node].probe()
        if result.up:
            node.circuit.close(self._clock())
            node.router_record.trust()
        self.refresh_state(node)
        return result

    def lifecycle_changed(self, node: Node, *, reset_probes: bool = False) -> None:
        """A standby node has another phase; `reset_probes`: earlier probes prove nothing."""
        if reset_probes:
            node.reset_probes(self._clock())
        self._refresh_and_wake(node)

    # What requests show.

    def lease_released(self, lease: Lease, counted: bool) -> None:  # noqa: FBT001 - a callback
        """A lease has ended; `counted`: the scheduler counts its slots as free already."""
        node = lease.node
        if node.removed or lease.upstream is not node.upstream:
            self._closing.lease_released()
        if node.load is not None:
            self._on_models(node)
        if not counted or lease.trial or node.state is NodeState.EJECTED:
            self._notify_change(node)
        self._notify_capacity()

    def request_succeeded(self, node: Node, now: float, began: float | None = None) -> None:
        """A request whose lease was taken at `began` went well."""
        if not node.key_rejection.key_worked:
            node.key_rejection.record_success()
        circuit, had_failures = node.circuit, node.circuit.failures
        if had_failures or circuit.suspect_callers or circuit.open_until is not None:
            if circuit.record_success(now, began):
                self._refresh_and_wake(node)
            elif had_failures:
                self._notify_change(node)

    def wake_began(self, node: Node) -> None:
        """A request is to wake its server, or is on trial there."""
        if node.load is not None:
            self._on_models(node)

    def woke(self, lease: Lease, now: float, expected: float) -> None:
        """Content came from a server that had slept; awake, it would have taken `expected` s."""
        node, load, since = lease.node, lease.node.load, lease.node.sleep.waking_since
        # The request that began the load of an `openai` endpoint's model may have left.
        by_request = load is not None and node.spec.kind == "openai" and since is not None
        if lease.wakes or by_request:
            seconds = max(0.0, now - (lease.taken_at if since is None else since) - expected)
            node.sleep.learn_wake(seconds)
            if load is not None and by_request:
                load.woke(seconds, now)
                self._tell_load(node, LoadChange("loaded", seconds))
                self._on_models(node)
                self.read_models(node)
        lease.woke()
        node.sleep.woke()
        if node.is_purpose_unknown:
            self._probe_soon(node)
        self.refresh_state(node)

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
        """A request whose lease was taken at `began` failed, and the node may be to blame.

        Without `node_at_fault` the request of this `caller` itself may be. `already_counted`: this
        failure was reported before, without `node_at_fault`.
        """
        if not already_counted:
            node.request_failed()
        self._probe_soon(node)
        if node.circuit.record_failure(now, began, caller=caller, node_at_fault=node_at_fault):
            self._refresh_and_wake(node)
        else:
            self._notify_change(node)

    def pool_full(self, node: Node) -> bool:
        """The node failed a request, still leased, for lack of room in the context.

        If it is a server of llama.cpp and has more work, its slots share one pool. Returns whether
        that is known by now: the pool is full, and nobody is to blame.
        """
        shows_pool = node.spec.kind == "llama.cpp" and node.slots_busy > 1
        if shows_pool and node.properties.pool_learnt():
            log.warning(
                "Node %s: its slots share one pool of %s tokens. Requests wait for room there from "
                "now on; start the server with -np, or with a larger context",
                node.name,
                node.context,
            )
            self.refresh_state(node)
        self._probe_soon(node)
        return bool(node.pool or node.properties.shared_pool)

    def request_answered(self, node: Node, answer: ProbeAnswer, detail: str) -> None:
        """What a request has shown counts as the answer to a probe."""
        count_result(node, ProbeResult(answer, detail))
        self._probe_soon(node)
        self.refresh_state(node)

    def key_rejected(self, node: Node, path: str, status: int) -> None:
        """A request was refused because the gateway's key is wrong (401)."""
        node.key_rejection.record(key_rejected_reason(path, status), self._clock())
        self.refresh_state(node)

    def node_overloaded(
        self, lease: Lease, now: float, retry_after: float | None, *, crowded: bool = True
    ) -> None:
        """A request was refused with 429 or 503: too many at once, or too soon.

        Not `crowded`: with 402, since the account has no credit.
        """
        limit = lease.node.concurrency_limit
        if limit is not None and limit.record_refusal(
            lease.taken_at, now, retry_after, crowded=crowded
        ):
            self._refresh_and_wake(lease.node)

    def adjust_limit(self, lease: Lease, prompt_tokens: float, completion_tokens: float) -> None:
        """A whole answer came: its endpoint may take more requests, or fewer.

        `prompt_tokens` that it had to read; `completion_tokens` that it wrote, on all slots.
        """
        limit = lease.node.concurrency_limit
        seen = None if limit is None else lease.observed_timing()
        if limit is None or seen is None:
            return
        if limit.record_success(
            lease.taken_at,
            lease.taken_at + seen.duration,
            ttft=seen.ttft,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens / lease.slots,
        ):
            self.refresh_state(lease.node)

    def endpoint_refused(self, node: Node, endpoint: Endpoint, hint: str | None = None) -> None:
        """A request was refused because the node does not serve this endpoint (501); `hint`: why.

        The node is tried again some minutes later. If it has answered chats before, the request
        was at fault.
        """
        if endpoint == "chat" and node.speed.decode_tps is not None:
            return
        node.endpoint_refused(endpoint, hint, self._clock())
        self.model_index.node_changed()

    def restore(self, learnt: Mapping[str, tuple[LearntOfServer, float]]) -> None:
        """Go on from what was learnt of servers (`server_key`), and what share of it still counts.

        That of servers that the inventory does not have waits until it has them.
        """
        self._learnt.update(learnt)
        for node in self.nodes.values():
            if (known := learnt.get(server_key(node.spec))) is not None:
                node.restore(*known)
        compare_speeds(self.nodes.values())
        for node in self.nodes.values():
            self._notify_change(node)

    def learn_speed(self, node: Node, sample: SpeedSample) -> None:
        """Learn from what a whole answer has shown."""
        node.speed.learn(sample)
        if node.degradation.learn(sample, self._clock()):
            self.refresh_state(node)

    def stream_went_on(self, lease: Lease, tokens: int, context_tokens: float) -> None:
        """So many events of a stream have come by now; 0: unknown, or others' fault.

        `context_tokens`: of its prompt.
        """
        now, node = self._clock(), lease.node
        span = lease.next_span(tokens, now)
        if span is not None and node.degradation.watch(*span, context_tokens + tokens, now):
            self.refresh_state(node)

    def capacity_changed(self, node: Node) -> None:
        """Its free slots may be others than before."""
        self._notify_change(node)

    def read_load(self, node: Node) -> None:
        """The node gets work though its load was left unread: ask for it now."""
        if (monitor := self._monitors.get(node)) is not None:
            monitor.probe_by(self._clock())

    def _probe_soon(self, node: Node) -> None:
        if (monitor := self._monitors.get(node)) is not None:
            monitor.probe_soon()

    # What follows for a node's state.

    def refresh_state(self, node: Node) -> None:
        """Judge the node by what is known now, and notify of what has changed."""
        if node.removed:
            return
        self.model_index.node_changed()
        old = node.state
        node.set_state(*judge_state(node, self._clock()))
        if node.state is not old:
            self._bus.publish(NodeChanged(node.name, old.value, node.state.value, node.reason))
        router = node.router
        is_down_alone = router is not None and node.probe_history.down and router.probe_history.up
        if is_down_alone or (node.state is not old and (router is not None or node.is_router)):
            self._on_models(node)  # By now one that is down alone may be known to hang.
        if node.probe_history.down:
            self._reclaimer.release_all(node)
        if node.probe_history.down or node.probe_history.loading:
            node.properties.process_ended()
        node.forget_replaced_model()
        node.update_info()
        if node.models_changed():
            self.model_index.models_changed()
        self.properties_store.record(node.spec, node.properties)
        if node.drift_changed():
            self._bus.publish(NodeDrift(node.name, node.drift))
        if node.probe_history.probed and node in self._unprobed:
            self._unprobed.discard(node)
            if not self._unprobed:
                if self._indexing is not None:
                    self._index_models()
                self.first_probes_done.set()
        self.capacity_changed(node)

    def _refresh_and_wake(self, node: Node) -> None:
        """What the node takes may change with time from now on: its monitor must look when."""
        self.refresh_state(node)
        if (monitor := self._monitors.get(node)) is not None:
            monitor.wake()

    async def _compare_speeds_forever(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(COMPARE_SPEEDS_EVERY):
                    await asyncio.sleep(COMPARE_SPEEDS_PAUSE)
                    await self._nodes_differ.wait()
            self._nodes_differ.clear()
            # In steps, for a thousand routers with fifty models each.
            nodes = [*self.nodes.values()]
            for _ in _compare_in_steps(nodes):
                await asyncio.sleep(0)
            self.compare_models()
            for number, node in enumerate(nodes):
                if number % COMPARED_AT_ONCE == 0:
                    await asyncio.sleep(0)
                if node.degradation.refresh(self._clock()):
                    self.refresh_state(node)
                self._notify_change(node)


def compare_speeds(nodes: Iterable[Node]) -> None:
    """Set every node's assumed speed: the best that similar nodes show.

    Similar nodes serve the same models in the same tier and are of the same kind. Where none shows
    its speed, the best of the catalogue is assumed. A node with a hint is assumed to be so many
    times as fast as the best of them, each divided by its own hint, so that hints and measurements
    are on one scale.
    """
    for _ in _compare_in_steps(nodes):
        pass


def _compare_in_steps(nodes: Iterable[Node]) -> Iterator[None]:
    groups = defaultdict[tuple[frozenset[str], str, str], list[Node]](list)
    for number, node in enumerate(nodes, 1):
        groups[node.public_models, node.spec.tier, node.spec.kind].append(node)
        if number % COMPARED_AT_ONCE == 0:
            yield
    for (_, tier, _), group in groups.items():
        usual = CPU_PRIOR if tier == "cpu" else GPU_PRIOR
        best = _best_shown([(node.speed, 1.0) for node in group], usual)
        unit = _best_shown([(node.speed, node.spec.written_hint or 1.0) for node in group], usual)
        for node in group:
            hint = node.spec.written_hint
            if hint is None:
                node.speed.set_prior(best)
            else:
                node.speed.set_prior(unit.scaled(hint), hinted=True)
        yield


def _best_shown(speeds: list[tuple[Speed, float]], usual: SpeedPrior) -> SpeedPrior:
    """The best that answers or calibrations have shown, each divided by its factor."""
    read = [
        speed.expected_prefill_tps / factor
        for speed, factor in speeds
        if speed.prefill_tps or speed.calibrated
    ]
    wrote = [
        (speed.token_base * factor, speed.token_step * factor)
        for speed, factor in speeds
        if speed.decode_tps or speed.calibrated
    ]
    return SpeedPrior(
        max(read, default=usual.prefill_tps),
        *min(wrote, default=(usual.token_base, usual.token_step)),
    )


class ClosingPools:
    """Pools of removed nodes, and replaced ones: each is closed when its last lease has ended."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._pools: list[tuple[Node, ConnectionPool]] = []

    def close_when_idle(self, node: Node, pool: ConnectionPool) -> None:
        """Close this pool, of a removed node or replaced, when its leases have ended."""
        self._pools.append((node, pool))
        self.lease_released()

    def lease_released(self) -> None:
        """A lease has ended: close what no lease uses any more."""
        pools, self._pools = self._pools, []
        for node, pool in pools:
            if any(lease.upstream is pool for lease in node.leases):
                self._pools.append((node, pool))
            else:
                pool.close()

    def own_task(self, task: asyncio.Task[None]) -> None:
        """Make `aclose` wait for this task."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Close all of them, whatever still runs."""
        for _, pool in self._pools:
            pool.close()
        self._pools.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)
