"""Where a request may go: the fleet as rows, and the candidates of each request among them.

`FleetSync` keeps a row for each node, and candidate sets for what nodes serve. It finds the nodes
that could serve a request, however busy they are, or the error that says why none can. `TierRouter`
narrows candidates to the tiers that are open, where a fleet has GPU nodes.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from weakref import WeakKeyDictionary

from msgspec import structs

from gateway import errors
from gateway.config.keys import NodeLabels, has_labels
from gateway.config.settings import Settings
from gateway.lease import LeaseRequest, Tried, WantedNode
from gateway.nodes.fleet import Fleet
from gateway.nodes.model_index import DEDICATED_ENDPOINTS
from gateway.nodes.node import Node
from gateway.nodes.prices import most_cost
from gateway.nodes.prompt_cache import FleetPromptCache, NodePromptCache
from gateway.nodes.router import LoadPhase
from gateway.nodes.speed import Speed
from gateway.schedule.core.dispatcher import Dispatcher
from gateway.schedule.core.requests import (
    EXPLORING_REQUESTS,
    NEGLIGIBLE_COMPLETION,
    NO_ROWS,
    CandidateSet,
    NodeSlots,
    PlacementState,
    QueuedRequest,
    TierSets,
    alive_rows,
)
from gateway.schedule.core.selection import available_rows
from gateway.schedule.core.tiers import SpillReservation, Tier, TierPolicy, TierRoute, TierStatus
from gateway.terms import Endpoint

# Seconds by which a node looks slower for each failure in a row: one that fails fast is always
# free, and would get every next attempt until its circuit opens.
FAILURE_PENALTY = 5.0
# Seconds by which a node looks faster once its ejection's time is over and it needs one request on
# trial: else it would get none while others are idle, and be missing when they are not. A request
# that would end there later by more than this goes elsewhere.
TRIAL_BONUS = 5.0
# Seconds by which the other nodes of a host look slower to a request that failed on one: so many
# that it goes to another host that has room, however slow. So does a node that needs a request on
# trial: this request has been tried enough.
SAME_HOST_PENALTY = 1e5
MOST_SERVICES = 10_000
# Rows whose states are counted whenever any has changed; of more, only so often.
MOST_COUNTED_AT_ONCE, RECOUNT_SECONDS = 64, 0.5
# Factors of the expected cost of a row that may be explored. Nothing is known of it: it may be
# twice as fast as the best. It has a calibration or a hint: it must look better by a quarter. It
# was measured once, perhaps while its server read the model from disk: it may be better by a half.
# It is about to be calibrated: no request need find out.
HOPE_UNKNOWN, HOPE_GUESSED, HOPE_MEASURED, HOPE_AWAITED = 0.5, 1.25, 2 / 3, math.inf
ModelGroups = tuple[TierSets, ...]  # for each model name of a request: its candidate sets, by tier
# For each model name of a request that some node serves: the nodes.
NodesByModel = Sequence[tuple[str, Sequence[Node]]]
# Public model name, endpoint, whether it must read images, whether it must be llama.cpp's, and the
# labels of the pool.
ServiceKey = tuple[str, Endpoint, bool, bool, NodeLabels]


def show_speed(row: NodeSlots, speed: Speed, *, awaited: bool = False) -> None:
    """Bring a row up to date with what is known of its node's speed.

    `awaited`: it is about to be calibrated.
    """
    row.set_speed(speed.expected_prefill_tps, speed.token_base, speed.token_step)
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
        row.set_learnt(samples, hope, measured=measured)


def nodes_of(by_model: NodesByModel) -> Iterator[Node]:
    """All these nodes."""
    return chain.from_iterable(nodes for _, nodes in by_model)


def is_alive(node: Node) -> bool:
    """Whether it is worth the ordinary wait; one on trial is, since its ejection may end so."""
    router, load = node.router, node.load
    if router is not None and load is not None and router.properties.is_router:
        # One that is unloaded stays so if its router gets no commands, by its entry or for a while.
        commanded = router.takes_commands and not router.router_record.stopped(node.clock())
        if not (load.loaded or commanded):
            return False
    return node.is_alive or node.circuit.trial is not None


@dataclass(frozen=True, slots=True)
class NodeCandidates:
    """Where a request may go; rows by their indexes."""

    by_model: NodesByModel
    groups: ModelGroups
    excluded: Collection[int] = ()  # rows that can't serve it
    failed: Collection[int] = ()  # rows that have failed it
    penalties: Mapping[int, float] = field(default_factory=lambda: NO_ROWS)
    """Seconds by which a row looks slower to it; negative: faster."""
    tier_route: TierRoute | None = None
    """The choice between tiers, where it could go to either (`TierRouter.narrow`)."""
    fallback_at: float = math.inf
    """When the other tiers of the route open too; infinity: they are open, or never will be."""

    def same_targets(self, other: NodeCandidates) -> bool:
        """Whether a request that waits for the `other` may stay in the queue as it is."""
        theirs = other.groups, other.excluded, other.failed
        return (self.groups, self.excluded, self.failed) == theirs

    def any_alive(self) -> bool:
        """Whether one of its nodes, in the tiers open to it, is worth the ordinary wait."""
        return any(True for _ in alive_rows(self.groups, self.excluded))


@dataclass(slots=True)
class Service:
    """The nodes that serve one thing, as candidate sets."""

    cpu: CandidateSet
    gpu: CandidateSet
    nodes: tuple[Node, ...] = ()
    least_slots: int = 0  # of one of them
    least_context: float = math.inf  # tokens of one slot; infinity: none has reported it
    groups: ModelGroups = ()  # where a request for it may go while no rule says otherwise
    candidates: NodeCandidates = field(default_factory=lambda: NodeCandidates((), ()))
    """The candidates of a request that every node of the service can take."""
    version: int = -1  # the model index's version when all this was found; -1: find it anew

    def invalidate(self) -> None:
        """The rows are others now."""
        self.version = -1

    def update(
        self, model: str, nodes: tuple[Node, ...], rows: tuple[NodeSlots, ...], version: int
    ) -> None:
        """These are its nodes, with their rows, as of that version of the model index."""
        self.nodes, self.version = nodes, version
        self.least_slots = min((node.slots_total for node in nodes), default=0)
        self.least_context = min((node.context or math.inf for node in nodes), default=math.inf)
        gpu = tuple(row for row in rows if row.gpu)
        cpu = tuple(row for row in rows if not row.gpu) if gpu else rows
        for candidates, members in ((self.gpu, gpu), (self.cpu, cpu)):
            if candidates.rows != members:
                candidates.replace_rows(members)
        tiers = tuple(candidates for candidates in (self.gpu, self.cpu) if candidates.rows)
        if not self.groups or self.groups[0] != tiers:
            self.groups = (tiers,)
        self.candidates = NodeCandidates(((model, nodes),), self.groups)


@dataclass(slots=True, eq=False)
class FleetSync:
    """Keeps a placement state in step with a fleet, which calls `node_changed`; finds candidates.

    Leases without a placement count as others' work (`foreign`).
    """

    fleet: Fleet
    placement_state: PlacementState
    prompt_cache: FleetPromptCache
    clock: Callable[[], float]
    has_gpu_tier: bool = False  # whether the inventory has nodes of tier `gpu`
    rows_version: int = 0
    """Changes with the set of rows: then an index may stand for another node. Also when the slots
    of one begin or cease to share a pool."""
    _rows: dict[Node, NodeSlots] = field(default_factory=dict)
    _loaded: dict[Node, NodeSlots] = field(default_factory=dict)
    """Those of `_rows` that are no model which its router has not loaded."""
    nodes: dict[int, Node] = field(default_factory=dict)  # by row index
    services: dict[ServiceKey, Service] = field(default_factory=dict)
    """Those asked for; one whose `version` is not the model index's is out of date (`service`)."""
    _pools: set[NodeLabels] = field(default_factory=set)
    _speed_versions: dict[NodeSlots, int] = field(default_factory=dict)
    _out_of_service: WeakKeyDictionary[CandidateSet, tuple[int, float, Mapping[str, int]]] = field(
        default_factory=WeakKeyDictionary
    )
    """What `out_of_service` has counted; before it the `slots_version` then, and when."""
    _cached_models: dict[NodeSlots, tuple[int, frozenset[str] | None, int]] = field(
        default_factory=dict
    )
    """The slots, the models (None: not probed yet) and the server for which a row's prompt cache is
    indexed."""

    def cache_of(self, node: Node) -> NodePromptCache | None:
        """What a node is believed to cache; None: nothing, as it was not probed yet, say."""
        row = self._rows.get(node)
        return None if row is None else self.prompt_cache.nodes.get(row.index)

    def row(self, node: Node) -> NodeSlots | None:
        """A node's row; None: it has none."""
        return self._rows.get(node)

    def row_index(self, node: Node) -> int | None:
        """The number of a node's row; None: it has none."""
        row = self._rows.get(node)
        return None if row is None else row.index

    # Called by the fleet.

    def node_changed(self, node: Node | None) -> None:
        """Something about this node has changed; None: which nodes there are."""
        if node is None:
            # Routers have no rows.
            rows, nodes = self._rows, [x for x in self.fleet.nodes.values() if not x.is_router]
            if len(nodes) != len(rows) or any(
                one not in rows or rows[one].gpu is not (one.spec.tier == "gpu") for one in nodes
            ):
                self._replace_rows(nodes)
                for key in self.services:
                    self.service(key)
        elif (row := self._rows.get(node)) is not None:
            self._refresh(node, row, self.clock())

    def speed_learnt(self, node: Node) -> None:
        """The node's speed has been learnt from a response, and nothing else has changed."""
        if (row := self._rows.get(node)) is not None:
            self._refresh_speed(node, row)

    def sync(self) -> None:
        """Bring the set of rows and every row up to date."""
        self.node_changed(None)
        now = self.clock()
        for node, row in self._rows.items():
            self._refresh(node, row, now)

    def refresh(self) -> None:
        """Bring every row up to date that time alone may change; the set of rows is unchanged."""
        now = self.clock()
        for node, row in list(self._loaded.items()):
            self._refresh(node, row, now)

    def _replace_rows(self, nodes: Sequence[Node]) -> None:
        """Add and remove rows. What runs on a removed one still ends there."""
        self.rows_version += 1
        kept = set(nodes)
        for node in [node for node in self._rows if node not in kept]:
            row = self._rows.pop(node)
            self._loaded.pop(node, None)
            del self.nodes[row.index]
            self._speed_versions.pop(row, None)
            self._cached_models.pop(row, None)
            self.prompt_cache.forget_node(row.index)
            self.placement_state.remove(row)
        now = self.clock()
        for node in nodes:
            gpu = node.spec.tier == "gpu"
            if node not in self._rows:
                row = self.placement_state.add(node.name, gpu=gpu)
                self._rows[node] = self._loaded[node] = row
                self.nodes[row.index] = node
            elif (row := self._rows[node]).gpu is gpu:
                continue
            row.set_tier(gpu=gpu)
            self._refresh(node, row, now)
        self.has_gpu_tier = any(node.spec.tier == "gpu" for node in nodes)
        for service in self.services.values():
            service.invalidate()

    def _refresh(self, node: Node, row: NodeSlots, now: float) -> None:
        if node.load is not None:
            if node.load.phase is LoadPhase.UNLOADED:
                self._loaded.pop(node, None)
            else:
                self._loaded[node] = row
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
            row.set_slots(total, capacity, foreign, alive=alive, paused=paused)
        if (pool := node.pool) or row.pool:
            self._refresh_pool(node, row, pool)
        if self._speed_versions.get(row) != node.speed.version or row.exploring:
            self._refresh_speed(node, row)
        if penalty + wake != row.penalty or wake != row.wake:
            row.set_penalty(penalty + wake, wake=wake)
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
            row.set_pool(pool, foreign if pool else 0)

    def _refresh_speed(self, node: Node, row: NodeSlots) -> None:
        speed = node.speed
        self._speed_versions[row] = speed.version
        awaited = not speed.samples and (
            node.calibration.penalty > 0 or node.calibration_due(self.clock())
        )
        show_speed(row, speed, awaited=awaited)

    def _refresh_reserve_group(self, node: Node, row: NodeSlots) -> None:
        """Nodes share a reserve if they serve the same models and belong to the same pools."""
        labels = node.spec.labels
        pools = frozenset(pool for pool in self._pools if has_labels(labels, pool))
        row.set_reserve_group((node.public_models, pools))

    def _sync_prompt_cache(self, node: Node, row: NodeSlots, total: int) -> None:
        """Forget a node's cached prompts when its server goes or serves other models."""
        if node.spec.kind != "llama.cpp":
            return
        history = node.probe_history
        gone = history.down or history.loading or node.sleep.asleep or not node.in_service
        gone = gone or (node.load is not None and not node.load.loaded)
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
        return tuple(row for node in nodes if (row := self._rows.get(node)) is not None)

    def service(self, key: ServiceKey) -> Service:
        """The candidate sets of the nodes that serve this, up to date."""
        index, service = self.fleet.model_index, self.services.get(key)
        if service is not None and service.version == index.version:
            return service
        model, endpoint, vision, native, labels = key
        nodes = index.capable_nodes(model, endpoint, vision=vision, native=native, labels=labels)
        if service is None:
            state = self.placement_state
            service = Service(state.candidate_set(), state.candidate_set())
            if index.serves(model):  # else it is the client's invention, of any length: not kept
                self._keep(key, service)
        service.update(model, nodes, self.rows(nodes), index.version)
        return service

    def _keep(self, key: ServiceKey, service: Service) -> None:
        labels = key[-1]
        if len(self.services) >= MOST_SERVICES:
            self.services.clear()
            self._pools.clear()
        if labels and labels not in self._pools:
            self._pools.add(labels)
            if self.placement_state.batch_reserve:
                for node, row in self._rows.items():
                    self._refresh_reserve_group(node, row)
        self.services[key] = service

    def is_measured(self, queued: QueuedRequest) -> bool:
        """Whether a node of the request's first group has shown how fast it is.

        In prefill and, if the request decodes, in decoding, with a sample for each of its slots:
        the first answers of a burst are its shortest.
        """
        decodes = queued.completion_tokens > NEGLIGIBLE_COMPLETION
        for candidates in queued.groups[0]:
            for row in candidates.rows:
                speed = self.nodes[row.index].speed
                known = speed.prefill_tps is not None and (not decodes or speed.decode_tps)
                if known and speed.samples >= max(1, row.total):
                    return True
        return False

    def out_of_service(self, candidates: CandidateSet, now: float) -> Mapping[str, int]:
        """How many of these rows take no work, by their nodes' state; `paused`: as asked for (429).

        For more than `MOST_COUNTED_AT_ONCE` rows it may be `RECOUNT_SECONDS` old.
        """
        rows, version = candidates.rows, self.placement_state.slots_version
        counted, at, states = self._out_of_service.get(candidates, (-1, -math.inf, {}))
        is_due = len(rows) <= MOST_COUNTED_AT_ONCE or now - at >= RECOUNT_SECONDS
        if counted != version and is_due:
            out = [self.nodes[row.index] for row in rows if not row.capacity]
            states = Counter("paused" if node.paused(now) else node.state.value for node in out)
            self._out_of_service[candidates] = version, now, states
        return states

    def slots(self, queued: QueuedRequest) -> int:
        """Slots of the nodes of the request's first group."""
        return sum(candidates.slots() for candidates in queued.groups[0])

    # Where a request may go.

    def find(self, request: LeaseRequest, tried: Tried) -> NodeCandidates:
        """Where the request may go.

        Raises: GatewayError when no node serves it, or none could ever hold it.
        """
        wanted = request.wanted
        names = wanted.model_names
        if (
            len(names) == 1
            and not tried.excluded_nodes
            and not tried.failed_nodes
            and wanted.resume_key is None
        ):
            # Nearly always: one name, and every node that serves it can take the request.
            key = _key(names[0], wanted)
            service = self.services.get(key)
            if service is None or service.version != self.fleet.model_index.version:
                service = self.service(key)
            if (
                service.nodes
                and request.size.slots <= service.least_slots
                and request.size.prompt_tokens <= service.least_context >= tried.min_context
            ):
                return service.candidates
        by_model = self.nodes_by_model(request, tried)
        groups = tuple(
            tiers
            for name, _ in by_model
            for tiers in self.service(_key(name, request.wanted)).groups
        )
        able = {row.index for row in self.rows(nodes_of(by_model))}
        every = {row.index for tiers in groups for candidates in tiers for row in candidates.rows}
        excluded = frozenset(every - able)
        return NodeCandidates(by_model, groups, excluded, *self._failed(by_model, tried))

    def nodes_by_model(self, request: LeaseRequest, tried: Tried) -> NodesByModel:
        """The nodes that can serve the request, by model name. Raises: GatewayError."""
        wanted, is_served = request.wanted, False
        by_model: list[tuple[str, Sequence[Node]]] = []
        most_slots = 0
        resume_key = wanted.resume_key
        context = max(request.size.prompt_tokens, tried.min_context)
        for name in wanted.model_names:
            service = self.service(_key(name, wanted))
            nodes: Sequence[Node] = service.nodes
            is_served = (
                is_served or bool(nodes) or self.fleet.model_index.serves(name, wanted.node_labels)
            )
            if tried.excluded_nodes:
                nodes = [node for node in nodes if node.name not in tried.excluded_nodes]
            if resume_key is not None:
                nodes = [node for node in nodes if node.may_resume(resume_key)]
            if not nodes:
                continue
            if service.least_slots < request.size.slots:
                most_slots = max(most_slots, *(node.most_slots for node in nodes))
                nodes = [node for node in nodes if node.most_slots >= request.size.slots]
            if nodes and service.least_context < context:
                nodes = with_context(nodes, context)
            if nodes:
                by_model.append((name, nodes))
        if by_model:
            return by_model
        raise self._no_node_error(request, tried, is_served=is_served, most_slots=most_slots)

    def unsupported_error(self, request: LeaseRequest, tried: Tried) -> errors.GatewayError | None:
        """The 501 of a request whose endpoint no node of its models supports; else None."""
        wanted = request.wanted
        names, labels = wanted.model_names, wanted.node_labels
        nodes = [node for name in names for node in self.fleet.model_index.nodes_for(name, labels)]
        hints = [tried.unsupported_hint]
        for node in nodes:
            if node.name not in tried.unsupported_nodes and (
                node.supports(wanted.endpoint)
                and not (wanted.llama_cpp_only and node.spec.kind == "openai")
            ):
                return None
            hints.append(node.refusal_hints.get(wanted.endpoint))
        if not nodes:
            return None
        hint = next((hint for hint in hints if hint is not None), None)
        return errors.not_supported(wanted.endpoint, wanted.feature, wanted.model, hint)

    def _failed(
        self, by_model: NodesByModel, tried: Tried
    ) -> tuple[Collection[int], Mapping[int, float]]:
        """Rows that have failed it; penalties for their hosts' other nodes and for trials."""
        failed = tried.failed_nodes
        if not failed:
            return (), NO_ROWS
        nodes = set(nodes_of(by_model))
        hosts = {node.spec.host for node in nodes if node.name in failed}
        rows, penalties = set(), {}
        for node in nodes & self._rows.keys():
            row = self._rows[node]
            if node.name in failed:
                rows.add(row.index)
            elif node.spec.host in hosts or row.penalty < row.wake:
                penalties[row.index] = SAME_HOST_PENALTY
        return frozenset(rows), penalties

    def _no_node_error(
        self, request: LeaseRequest, tried: Tried, *, is_served: bool, most_slots: int
    ) -> errors.GatewayError:
        """`most_slots`: of one node, where all have fewer than the request takes; else 0."""
        wanted = request.wanted
        if most_slots:
            return errors.invalid_request(
                f"This request takes {request.size.slots} slots at once, more than any node has "
                f"({most_slots}). Ask for fewer answers.",
                wanted.slots_field,
            )
        if not is_served:
            return self._not_found(request)
        if (unsupported := self.unsupported_error(request, tried)) is not None:
            return unsupported
        chats = wanted.endpoint not in DEDICATED_ENDPOINTS
        if chats and self.fleet.model_index.awaits_chat_node(wanted.model_names):
            return self._not_found(request)
        if tried.excluded_nodes:
            return errors.node_failed("Every node that could serve this request refused it.")
        if wanted.needs_vision:
            return errors.invalid_request(
                f"No node that serves '{wanted.model}' reads images.",
                wanted.prompt_field or "messages",
            )
        return errors.node_failed(
            f"No node serves '{wanted.endpoint}' requests for '{wanted.model}'."
        )

    def _not_found(self, request: LeaseRequest) -> errors.GatewayError:
        wanted = request.wanted
        return self.fleet.model_index.not_found_error(
            wanted.model, wanted.node_labels, wanted.model_names
        )


def _key(name: str, wanted: WantedNode) -> ServiceKey:
    return (name, wanted.endpoint, wanted.needs_vision, wanted.llama_cpp_only, wanted.node_labels)


def with_context(nodes: Sequence[Node], tokens: int) -> Sequence[Node]:
    """Nodes with a context of so many tokens; if none, the largest: their error names the size."""
    if fitting := [node for node in nodes if node.context is None or node.context >= tokens]:
        return fitting
    largest = max((node.context or 0 for node in nodes), default=0)
    return [node for node in nodes if (node.context or 0) == largest]


_ORDER: tuple[Tier, ...] = ("gpu", "cpu")


@dataclass(slots=True, eq=False)
class TierRouter:
    """Narrows candidates to the tiers that are open; for fleets with nodes of tier `gpu`."""

    tier_policy: TierPolicy
    fleet_sync: FleetSync
    dispatcher: Dispatcher
    settings: Settings

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
        waits: bool = False,
    ) -> NodeCandidates:
        """The candidates in the tiers that are open now; a request that spills over has reserved.

        A model that one tier alone has keeps that.

        `waits`: it stands in the queue. Candidates that are not used must be given to
        `cancel_reservation`.
        """
        tiers = next((tiers for tiers in candidates.groups if len(tiers) > 1), None)
        if tiers is None or not queued.slots:
            return candidates
        gpu, cpu = (self._status(tier, queued, now, waits=waits) for tier in tiers)
        if gpu is None and (
            request.wanted.resume_key is not None
            or any(row.name in tried.excluded_nodes for row in tiers[0].rows)
        ):
            gpu = TierStatus(alive=False, has_room=False, failed=True)
        has_room = gpu is not None and gpu.has_room
        cost = self._most_cost(request, tiers[0], queued, now) if has_room else 0.0
        route = self.tier_policy.route(request.caller.priority, gpu, cpu, now, cost)
        # The delay counts from its arrival: a retry does not wait again.
        open_tiers, fallback_at = route.tiers, queued.received_at + route.fallback_delay
        if now < fallback_at:
            open_tiers = open_tiers[:1]
        else:
            fallback_at = math.inf
        return replace(
            candidates,
            groups=tuple(
                tuple(group[_ORDER.index(tier)] for tier in open_tiers) if len(group) > 1 else group
                for group in candidates.groups
            ),
            tier_route=route,
            fallback_at=fallback_at,
        )

    def cancel_reservation(self, candidates: NodeCandidates) -> None:
        """These candidates are not used."""
        if (route := candidates.tier_route) is not None and route.reservation is not None:
            route.reservation.cancel()

    def placed(
        self, candidates: NodeCandidates, row: NodeSlots
    ) -> tuple[str | None, SpillReservation | None]:
        """The request goes to this row: its fallback, and the reservation to be settled."""
        route = candidates.tier_route
        if route is None:
            return None, None
        if not row.gpu:
            self.cancel_reservation(candidates)
        return route.fallback("gpu" if row.gpu else "cpu"), route.reservation if row.gpu else None

    def _status(
        self, tier: CandidateSet, queued: QueuedRequest, now: float, *, waits: bool
    ) -> TierStatus | None:
        """One tier as this request sees it; None: no node of it could ever serve the request."""
        rows = [row for row in tier.rows if row.index not in queued.excluded]
        if not rows:
            return None
        alive = [row for row in rows if row.alive and row.index not in queued.failed]
        failed = any(row.index in queued.failed for row in rows)
        if not alive:
            return TierStatus(alive=False, has_room=False, failed=failed)
        alone = structs.replace(queued, groups=((tier,),))
        available = available_rows(self.dispatcher.placement_state, alone)
        has_room = available is not None and any(
            row.index not in queued.failed for row in available.rows
        )
        wait = 0.0
        if not has_room:
            waits_here = waits and queued.groups[0][0] is tier
            wait = self.dispatcher.predicted_wait(queued if waits_here else alone, now)
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
