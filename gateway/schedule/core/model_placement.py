"""Which models to load and unload on which nodes: a pure policy, for the gateway and the simulator.

Everything is priced in seconds of waiting. For a model that requests wait for, each node is worth
the time until it could serve them there: until the leases of what must go have ended, its unload,
and the load; then the queue is served as fast as that node does. What must go costs a load for each
caller who is expected to miss it before long, so a model that nobody asks for goes first. A model
that is loaded nowhere is loaded once its requests have waited as many seconds as that loss, so a
queue is served together before its model makes room for another; or in time for the starvation
bound. One more copy is loaded where it shortens the queue by more than it costs.

A look compares a bounded number of nodes, however large the fleet is; models that are not reached
are looked at first in the next one. Times are monotonic seconds and memory is bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gateway.nodes.router import LoadPhase, UnloadCause

ORDERED = "an operator has ordered it"
ASSUMED_LOAD = 30.0  # seconds of a load that was never seen
UNLOAD_SECONDS = 1.0
LOOK_MARGIN = 1.0  # seconds by which a load begins before the bound wants it
# Seconds ahead that are compared: what callers miss later, they miss under any placement.
HORIZON = 120.0
NEAR_BOUND = 0.5  # share of the bound from which the oldest request goes first
# One more copy must shorten the waits by so many times what it costs others.
COPY_MARGIN = 1.2
# A load that waits for leases is given up for another node that is better by this factor.
CHANGE_MARGIN = 1.5
# Loads missed before long that count as none: batch rows may unload such a model.
UNUSED_SHARE = 0.05
# A model needs memory for others than itself to load beside it on its host: more would be slower.
MOST_LOADS_OF_HOST = 2
# Nodes compared for one model in a look, and for all of them about.
MOST_COMPARED, MOST_EVALUATIONS = 24, 48
# Loaded instances that are looked at for having idled, in one look.
MOST_IDLE_CHECKED = 32
# Time constants of the two means of a model's rate: one follows bursts, one remembers.
FAST_SECONDS, SLOW_SECONDS = 60.0, 900.0

HELD_PHASES = frozenset(
    {LoadPhase.LOADING, LoadPhase.READY, LoadPhase.RETIRING, LoadPhase.UNLOADING}
)
LEAVING_PHASES = frozenset({LoadPhase.RETIRING, LoadPhase.UNLOADING})
SERVING_PHASES = frozenset({LoadPhase.LOADING, LoadPhase.READY})
LoadVerb = Literal["load", "retire", "keep", "unload"]


@dataclass(frozen=True, slots=True)
class RouterNode:
    """One router as it is now."""

    name: str
    host: str  # nodes of one host share its memory
    memory: int | None = None  # what the host has for models; None: unknown
    most_loaded: int = 0  # models that it holds at most; 0: no limit
    commanded: bool = True  # False: it loads by itself, and its memory is never known
    usable: bool = True  # it is up, and not drained

    @property
    def count_limit(self) -> float:
        """Models that it may hold; one where nothing else bounds them."""
        if self.most_loaded > 0:
            return self.most_loaded
        return math.inf if self.commanded and self.memory is not None else 1


@dataclass(frozen=True, slots=True)
class Instance:
    """One model on one router, whether it is loaded or not."""

    node: str
    model: str
    phase: LoadPhase = LoadPhase.UNLOADED
    memory: int | None = None  # what it takes once it is loaded; None: unknown
    load_seconds: float = ASSUMED_LOAD
    slots: int = 1
    request_seconds: float = 10.0  # of a usual request there
    since: float = -math.inf  # when the phase began
    retry_at: float = -math.inf  # after a load has failed: when it may be tried again
    pinned: bool = False  # it is to be loaded, and is never unloaded


class InstanceUsage(NamedTuple):
    """What a loaded instance does now."""

    leases: int = 0
    busy_seconds: float = 0.0  # until its leases are expected to have ended
    last_used: float = -math.inf  # when a lease last began or ended


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """Requests that wait for one model."""

    model: str
    waiting: int
    waited: float  # seconds that all of them together have waited
    oldest_wait: float
    patience: float | None = None  # the bound on their wait; None: that of the rules
    batch: bool = False  # only batch rows wait
    work: float = 0.0  # slot-seconds that they take; 0: those of usual requests
    nodes: frozenset[str] | None = None  # the only nodes that may serve them; None: all


@dataclass(frozen=True, slots=True)
class ModelRules:
    """What an operator wants of one model."""

    min: int = 0  # copies that are always loaded
    max: int | None = None
    idle_unload: float | None = None  # seconds without requests after which it is unloaded


@dataclass(frozen=True, slots=True)
class ModelPlacementRules:
    """The policy's part of the settings."""

    starvation: float = 60.0  # seconds that a model's requests wait at most, as far as possible
    hysteresis: float = 10.0  # seconds that a model stays once it is loaded
    models: Mapping[str, ModelRules] = field(default_factory=dict)
    preload: frozenset[tuple[str, str]] = frozenset()
    """Nodes and models that are loaded there once, when the node comes up, if there is room."""


class LoadAction(NamedTuple):
    """What to do with one instance; `reason` is for an operator.

    `retire`: it ends its requests and gets no new ones; `keep`: it gets requests again.
    """

    verb: LoadVerb
    node: str
    model: str
    reason: str
    cause: UnloadCause = "memory"  # of what is retired or unloaded


Usage = Callable[[Instance], InstanceUsage]
_NO_RULES = ModelRules()


class ModelPlacementPolicy:
    """Decides at each look which models go where.

    It keeps the nodes and instances that it was told of, and the loads that it has planned: tell it
    of each change, and of each caller's request.
    """

    def __init__(self, rules: ModelPlacementRules | None = None) -> None:
        self.rules = rules or ModelPlacementRules()
        self.rates = RequestRates()
        self.evaluations = 0  # nodes that were compared so far
        self._index = FleetIndex()
        self._plans: dict[tuple[str, str], _Plan] = {}
        self._cursors: dict[str, int] = {}  # by model: the node that is compared next
        self._known_best: dict[str, list[str]] = {}
        self._preloaded: set[tuple[str, str]] = set()
        self._served_at: dict[str, float] = {}
        """By model that requests wait for: when it was last loaded somewhere."""
        self._left: list[str] = []  # models that the last look did not reach
        self._idle_cursor = 0

    # What there is.

    def set_rules(self, rules: ModelPlacementRules) -> None:
        """Go by these from now on."""
        self.rules = rules

    def put_node(self, node: RouterNode) -> None:
        """There is this router, or it has changed."""
        if not node.usable:
            self._preloaded = {pair for pair in self._preloaded if pair[0] != node.name}
        self._index.put_node(node)

    def remove_node(self, name: str) -> None:
        """There is no such router any more; its instances go with it."""
        self._index.remove_node(name)
        self._preloaded = {pair for pair in self._preloaded if pair[0] != name}

    def put_instance(self, instance: Instance) -> None:
        """A router, which is known, can serve this model; or the instance has changed."""
        self._index.put_instance(instance)

    def remove_instance(self, node: str, model: str) -> None:
        """The router can't serve that model any more."""
        self._index.remove_instance(node, model)

    def note_request(self, model: str, now: float) -> None:
        """A caller has sent a request for this model; batch rows are not told."""
        self.rates.note(model, now)

    @property
    def unfinished(self) -> bool:
        """Whether the last look did not reach all models: look again at once."""
        return bool(self._left)

    @property
    def has_plans(self) -> bool:
        """Whether a load waits for room: look again before long."""
        return bool(self._plans)

    @property
    def pinned_unloaded(self) -> Iterable[Instance]:
        """Pinned instances that are not loaded."""
        return self._index.pinned_unloaded.values()

    def is_planned(self, node: str, model: str) -> bool:
        """Whether a load there waits until it has room."""
        return (node, model) in self._plans

    # Deciding.

    def decide(self, demands: Iterable[ModelDemand], usage: Usage, now: float) -> list[LoadAction]:
        """What to do now. An instance with leases is never unloaded."""
        look = _Look(self._index, self.rules, self.rates, usage, now)
        by_model = {demand.model: demand for demand in demands if demand.waiting}
        look.demands = by_model
        self._follow_plans(look)
        self._serve_demands(look)
        self._keep_wanted(look)
        self._unload_idle(look)
        self._end_retired(look)
        return look.actions

    def order_load(
        self, node: str, model: str, usage: Usage, now: float
    ) -> list[LoadAction] | None:
        """What to do so that an operator gets a model loaded there; None: it can't have room."""
        look = _Look(self._index, self.rules, self.rates, usage, now)
        instance = self._index.instance(node, model)
        if instance is None or (node, model) in self._plans:
            return []
        if instance.phase is LoadPhase.RETIRING and self._may_return(look, instance):
            look.act("keep", instance, ORDERED)
        elif look.is_loadable(instance):
            option = self._price(look, instance, None, _NO_QUEUE)
            if option is None:
                return None
            self._carry_out(look, option, ORDERED, standing=True)
        return look.actions

    def _follow_plans(self, look: _Look) -> None:
        """Load what has room now; give up what nobody waits for any more."""
        for key, plan in list(self._plans.items()):
            instance = self._index.instance(*key)
            node = self._index.nodes.get(key[0])
            demand = look.demands.get(key[1])
            wanted = demand is not None or plan.standing
            if (
                instance is None
                or node is None
                or not (node.usable and wanted)
                or not look.is_loadable(instance)
            ):
                self._give_up(look, key)
                continue
            host = self._index.hosts[node.host]
            if _Lack(instance, node, host, self._reserved(look, host, but=key)).is_met():
                if look.loads_of(host) < MOST_LOADS_OF_HOST:
                    look.act("load", instance, plan.reason)
                    del self._plans[key]
            elif not any(
                held.phase in LEAVING_PHASES or look.is_leaving(held) for held in host.held.values()
            ):
                # Those who were to go have stayed: it is looked at anew.
                self._give_up(look, key)

    def _give_up(self, look: _Look, key: tuple[str, str]) -> None:
        plan = self._plans.pop(key)
        for victim in plan.victims:
            instance = self._index.instance(*victim)
            if instance is not None and instance.phase is LoadPhase.RETIRING:
                look.act("keep", instance, "its memory is not needed any more")

    def _serve_demands(self, look: _Look) -> None:
        """Find a node for what waits, those first that the last look did not reach."""
        self._served_at = {
            model: look.now if look.is_served(model) else self._served_at.get(model, -math.inf)
            for model in look.demands
        }
        late = {model: place for place, model in enumerate(self._left)}
        order = sorted(
            look.demands.values(),
            key=lambda one: (
                late.get(one.model, len(late)),
                one.batch,
                -self._lateness(one, look.now),
                -one.waited,
            ),
        )
        most = self.evaluations + MOST_EVALUATIONS
        self._left = []
        for place, demand in enumerate(order):
            if self.evaluations >= most:
                self._left = [one.model for one in order[place:]]
                break
            self._serve(look, demand)

    def _serve(self, look: _Look, demand: ModelDemand) -> None:
        model = demand.model
        copies = look.copies(model, demand.nodes)
        planned = [key for key in self._plans if key[1] == model]
        rules = self.rules.models.get(model, _NO_RULES)
        retiring = self._retiring(model, demand)
        if retiring is not None and not copies and not planned and self._may_return(look, retiring):
            look.act("keep", retiring, "requests wait for it again")
            return
        count = len(self._index.serving(model))
        if rules.max is not None and count + len(planned) >= rules.max and not planned:
            return
        best: _Option | None = None
        queue = look.queue(model, demand, copies)
        for instance in self._candidates(look, model, demand):
            option = self._price(look, instance, demand, queue)
            if option is not None and (best is None or option.cost < best.cost):
                best = option
        if best is None:
            return
        if planned:
            current = self._plans[planned[0]]
            if (
                (best.instance.node, model) == planned[0]
                or best.cost * CHANGE_MARGIN >= current.cost
                or best.ready_in >= current.ready_at - look.now
            ):
                return
            for key in planned:
                self._give_up(look, key)
        self._remember(model, best.instance.node)
        if not self._is_worth(look, demand, queue, best):
            return
        if copies:
            reason = f"{demand.waiting} requests wait for one more copy"
        else:
            reason = f"{demand.waiting} requests wait for it"
        self._carry_out(look, best, reason)

    def _is_worth(self, look: _Look, demand: ModelDemand, queue: _Queue, option: _Option) -> bool:
        """Whether a load there is worth what it costs others."""
        if demand.batch and option.victims and option.loss > UNUSED_SHARE * option.reload_seconds:
            return False
        if queue.has_copies:
            saved = queue.cost_as_it_is() - (option.cost - option.loss)
            return saved > COPY_MARGIN * option.loss + option.instance.load_seconds
        without = self._wait_without(demand, look.now)
        if without + option.ready_in + LOOK_MARGIN >= self._patience(demand):
            return True
        return demand.waited + demand.waiting * option.instance.load_seconds >= option.loss

    def _patience(self, demand: ModelDemand) -> float:
        return self.rules.starvation if demand.patience is None else demand.patience

    def _wait_without(self, demand: ModelDemand, now: float) -> float:
        """Seconds that the oldest has waited while the model was loaded nowhere."""
        return min(demand.oldest_wait, now - self._served_at.get(demand.model, -math.inf))

    def _lateness(self, demand: ModelDemand, now: float) -> float:
        """The share of its bound that the oldest has waited, where it is near."""
        share = self._wait_without(demand, now) / max(1.0, self._patience(demand))
        return share if share > NEAR_BOUND else 0.0

    def _carry_out(
        self, look: _Look, option: _Option, reason: str, *, standing: bool = False
    ) -> None:
        """Load it, or make room for it first."""
        instance = option.instance
        key = (instance.node, instance.model)
        for victim in option.victims:
            why = f"{instance.model} needs its memory: {reason}"
            if look.usage(victim).leases:
                look.act("retire", victim, why)
            else:
                look.act("unload", victim, why)
        node = self._index.nodes[instance.node]
        host = self._index.hosts[node.host]
        if option.must_wait or look.loads_of(host) >= MOST_LOADS_OF_HOST:
            self._plans[key] = _Plan(
                tuple((victim.node, victim.model) for victim in option.victims),
                reason,
                option.cost,
                look.now + option.ready_in,
                standing,
            )
        else:
            look.act("load", instance, reason)

    def _reserved(
        self, look: _Look, host: ModelHost, but: tuple[str, str] | None = None
    ) -> _Reserved:
        """What planned loads, and those of this look, will take of a host."""
        size, counts, alone = 0, dict[str, int](), False
        planned = [self._index.instance(*key) for key in self._plans if key != but]
        for instance in [*planned, *look.loads]:
            if instance is not None and instance.node in host.nodes:
                size += instance.memory or 0
                alone = alone or instance.memory is None
                counts[instance.node] = counts.get(instance.node, 0) + 1
        return _Reserved(size, counts, alone)

    def _retiring(self, model: str, demand: ModelDemand) -> Instance | None:
        for instance in self._index.held(model).values():
            if instance.phase is LoadPhase.RETIRING and (
                demand.nodes is None or instance.node in demand.nodes
            ):
                return instance
        return None

    def _may_return(self, look: _Look, retiring: Instance) -> bool:
        """Whether no load that is planned needs its memory."""
        key = (retiring.node, retiring.model)
        return not any(key in plan.victims for plan in self._plans.values())

    def _candidates(self, look: _Look, model: str, demand: ModelDemand) -> Iterator[Instance]:
        """The nodes to compare for a model: all, or those with room and some others in turn."""
        instances = self._index.by_model.get(model, {})
        if len(instances) <= MOST_COMPARED:
            yield from [one for one in instances.values() if self._may_load(look, one, demand)]
            return
        seen: set[str] = set()
        found = 0
        need = next(iter(instances.values())).memory
        for name in self._index.roomiest(need, MOST_COMPARED):
            instance = instances.get(name)
            if instance is not None and self._may_load(look, instance, demand):
                seen.add(name)
                found += 1
                yield instance
                if found >= MOST_COMPARED // 2:
                    return
        for name in self._known_best.get(model, ()):
            instance = instances.get(name)
            if instance is not None and name not in seen:
                seen.add(name)
                if self._may_load(look, instance, demand):
                    found += 1
                    yield instance
        names = self._index.names(model)
        cursor = self._cursors.get(model, 0) % len(names)
        for offset in range(min(len(names), MOST_COMPARED)):
            name = names[(cursor + offset) % len(names)]
            if name not in seen and self._may_load(look, instances[name], demand):
                found += 1
                yield instances[name]
            if found >= MOST_COMPARED:
                break
        self._cursors[model] = cursor + MOST_COMPARED

    def _remember(self, model: str, node: str) -> None:
        known = self._known_best.setdefault(model, [])
        if node in known:
            known.remove(node)
        known.insert(0, node)
        del known[4:]

    def _may_load(self, look: _Look, instance: Instance, demand: ModelDemand | None) -> bool:
        if not look.is_loadable(instance) or (instance.node, instance.model) in self._plans:
            return False
        if not self._index.nodes[instance.node].usable:
            return False
        return demand is None or demand.nodes is None or instance.node in demand.nodes

    def _price(
        self, look: _Look, instance: Instance, demand: ModelDemand | None, queue: _Queue
    ) -> _Option | None:
        """What a load there would bring and cost; None: it can't be loaded there."""
        self.evaluations += 1
        node = self._index.nodes[instance.node]
        host = self._index.hosts[node.host]
        room = look.make_room(instance, node, host, self._reserved(look, host))
        if room is None:
            return None
        ready_in = room.wait + instance.load_seconds
        if room.victims or room.must_wait:
            ready_in += UNLOAD_SECONDS
        service = instance.request_seconds / max(0.1, 1.0 - look.utilisation(host, room.victims))
        cost = queue.cost_with(ready_in, instance.slots / service, service) + room.loss
        return _Option(
            instance, ready_in, room.loss, cost, room.victims, room.must_wait, room.reload_seconds
        )

    # What operators want, whoever waits.

    def _keep_wanted(self, look: _Look) -> None:
        """Load pinned models, the least copies, and what is to be preloaded; retire copies."""
        for instance in list(self._index.pinned_unloaded.values()):
            if self._may_load(look, instance, None):
                option = self._price(look, instance, None, _NO_QUEUE)
                if option is not None:
                    self._carry_out(look, option, "it is pinned", standing=True)
        for model, rules in self.rules.models.items():
            serving = self._index.serving(model)
            count = len(serving) + sum(key[1] == model for key in self._plans)
            if count < rules.min and not look.acted_on(model):
                self._load_least(look, model, f"fewer than {rules.min} copies are loaded")
            elif rules.max is not None and len(serving) > rules.max:
                self._retire_one(look, model, f"more than {rules.max} copies are loaded")
        for key in self.rules.preload - self._preloaded:
            preloaded = self._index.instance(*key)
            if preloaded is None or not self._index.nodes[key[0]].usable:
                continue
            self._preloaded.add(key)
            if self._may_load(look, preloaded, None):
                option = self._price(look, preloaded, None, _NO_QUEUE)
                if option is not None and not option.victims:
                    self._carry_out(look, option, "it is preloaded", standing=True)

    def _load_least(self, look: _Look, model: str, reason: str) -> None:
        best: _Option | None = None
        demand = ModelDemand(model, 0, 0.0, 0.0)
        for instance in self._candidates(look, model, demand):
            option = self._price(look, instance, None, _NO_QUEUE)
            if option is not None and (best is None or option.cost < best.cost):
                best = option
        if best is not None:
            self._carry_out(look, best, reason, standing=True)

    def _retire_one(self, look: _Look, model: str, reason: str) -> None:
        ready = [
            one
            for one in self._index.serving(model).values()
            if one.phase is LoadPhase.READY and not one.pinned and not look.is_leaving(one)
        ]
        if ready:
            least = min(ready, key=lambda one: (look.usage(one).leases, look.usage(one).last_used))
            verb: LoadVerb = "retire" if look.usage(least).leases else "unload"
            look.act(verb, least, reason, "replicas")

    def _unload_idle(self, look: _Look) -> None:
        """Unload what nobody has used for as long as its rules say."""
        limits = {
            model: rules.idle_unload
            for model, rules in self.rules.models.items()
            if rules.idle_unload is not None
        }
        checked = 0
        for model, limit in limits.items():
            least = self.rules.models[model].min
            serving = self._index.serving(model)
            left = len(serving)
            for instance in list(serving.values()):
                checked += 1
                if checked > MOST_IDLE_CHECKED * 8 or left <= least:
                    break
                if instance.phase is not LoadPhase.READY or instance.pinned:
                    continue
                if look.is_leaving(instance) or model in look.demands:
                    continue
                usage = look.usage(instance)
                idle = look.now - max(usage.last_used, instance.since)
                if not usage.leases and idle >= limit:
                    look.act("unload", instance, f"it has idled for {idle:.0f} s", "idle")
                    left -= 1

    def _end_retired(self, look: _Look) -> None:
        """Unload those that have ended their requests."""
        for instance in list(self._index.retiring.values()):
            if not look.acted_on(instance.model, instance.node) and not look.usage(instance).leases:
                look.act("unload", instance, "it runs nothing any more")


class RequestRates:
    """How often callers ask for each model: the larger of a short and a long mean."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, float, float]] = {}  # when; the fast; the slow

    def note(self, model: str, now: float) -> None:
        """Count a request."""
        when, fast, slow = self._means.get(model, (now, 0.0, 0.0))
        passed = max(0.0, now - when)
        self._means[model] = (
            now,
            fast * math.exp(-passed / FAST_SECONDS) + 1.0 / FAST_SECONDS,
            slow * math.exp(-passed / SLOW_SECONDS) + 1.0 / SLOW_SECONDS,
        )

    def rate(self, model: str, now: float) -> float:
        """Requests a second."""
        known = self._means.get(model)
        if known is None:
            return 0.0
        when, fast, slow = known
        passed = max(0.0, now - when)
        return max(fast * math.exp(-passed / FAST_SECONDS), slow * math.exp(-passed / SLOW_SECONDS))


@dataclass(slots=True, eq=False)
class ModelHost:
    """The memory that some nodes share, and what is loaded in it."""

    name: str
    memory: int | None = None
    nodes: set[str] = field(default_factory=set)
    held: dict[tuple[str, str], Instance] = field(default_factory=dict)
    used: int = 0  # by those whose memory is known
    unknown: int = 0  # instances that are loaded and whose memory is not known
    loading: int = 0

    @property
    def free(self) -> float:
        """Bytes that are free; none beside an instance of unknown memory."""
        if self.memory is None:
            return math.inf
        return 0.0 if self.unknown else self.memory - self.used

    def set_memory(self, memory: int | None) -> None:
        """It has so much for models."""
        self.memory = memory

    def hold(self, instance: Instance) -> None:
        """An instance is loaded here, or begins to be."""
        self.held[instance.node, instance.model] = instance
        self._count(instance, 1)

    def drop(self, instance: Instance) -> None:
        """It is not any more."""
        del self.held[instance.node, instance.model]
        self._count(instance, -1)

    def _count(self, instance: Instance, sign: int) -> None:
        self.used += sign * (instance.memory or 0)
        self.unknown += sign * (instance.memory is None)
        self.loading += sign * (instance.phase is LoadPhase.LOADING)

    def count(self, node: str) -> int:
        """Models that one of its nodes holds."""
        return sum(1 for key in self.held if key[0] == node)


class FleetIndex:
    """Nodes, hosts and instances, found by model and by free memory."""

    def __init__(self) -> None:
        self.nodes: dict[str, RouterNode] = {}
        self.hosts: dict[str, ModelHost] = {}
        self.by_model: dict[str, dict[str, Instance]] = {}
        self.retiring: dict[tuple[str, str], Instance] = {}
        self.pinned_unloaded: dict[tuple[str, str], Instance] = {}
        self._held: dict[str, dict[str, Instance]] = {}  # by model and node: those loaded
        self._names: dict[str, list[str]] = {}
        self._by_free: list[tuple[float, str]] = []  # hosts, by free bytes

    def put_node(self, node: RouterNode) -> None:
        """Add a node, or replace it."""
        old = self.nodes.get(node.name)
        moved = [] if old is None else self._instances_of(node.name)
        if old is not None and old.host != node.host:
            self.remove_node(node.name)
        else:
            moved = []
        self.nodes[node.name] = node
        host = self.hosts.get(node.host)
        if host is None:
            host = self.hosts[node.host] = ModelHost(node.host)
        else:
            self._unsort(host)
        host.nodes.add(node.name)
        host.set_memory(node.memory)
        insort(self._by_free, (host.free, host.name))
        for instance in moved:
            self.put_instance(instance)

    def remove_node(self, name: str) -> None:
        """Remove a node with its instances."""
        node = self.nodes.get(name)
        if node is None:
            return
        for instance in self._instances_of(name):
            self.remove_instance(name, instance.model)
        del self.nodes[name]
        host = self.hosts[node.host]
        host.nodes.discard(name)
        if not host.nodes:
            self._unsort(host)
            del self.hosts[node.host]

    def put_instance(self, instance: Instance) -> None:
        """Add an instance of a known node, or replace it."""
        node, model = instance.node, instance.model
        host = self.hosts[self.nodes[node].host]
        instances = self.by_model.setdefault(model, {})
        old = instances.get(node)
        if old is None:
            self._names.pop(model, None)
        instances[node] = instance
        was, now = old is not None and old.phase in HELD_PHASES, instance.phase in HELD_PHASES
        if was or now:
            self._unsort(host)
            if old is not None and was:
                host.drop(old)
            if now:
                host.hold(instance)
                self._held.setdefault(model, {})[node] = instance
            else:
                del self._held[model][node]
            insort(self._by_free, (host.free, host.name))
        _put(self.retiring, instance, put=instance.phase is LoadPhase.RETIRING)
        _put(self.pinned_unloaded, instance, put=instance.pinned and not now)

    def remove_instance(self, node: str, model: str) -> None:
        """Remove an instance."""
        instance = self.by_model.get(model, {}).pop(node, None)
        if instance is None:
            return
        self._names.pop(model, None)
        if instance.phase in HELD_PHASES:
            host = self.hosts[self.nodes[node].host]
            self._unsort(host)
            host.drop(instance)
            del self._held[model][node]
            insort(self._by_free, (host.free, host.name))
        _put(self.retiring, instance, put=False)
        _put(self.pinned_unloaded, instance, put=False)

    def instance(self, node: str, model: str) -> Instance | None:
        """One instance; None: there is none."""
        return self.by_model.get(model, {}).get(node)

    def held(self, model: str) -> Mapping[str, Instance]:
        """By node: the instances of a model that take memory."""
        return self._held.get(model, {})

    def serving(self, model: str) -> Mapping[str, Instance]:
        """By node: those of them that serve, or soon will."""
        return {node: one for node, one in self.held(model).items() if one.phase in SERVING_PHASES}

    def names(self, model: str) -> list[str]:
        """The nodes of a model, in a fixed order."""
        names = self._names.get(model)
        if names is None:
            names = self._names[model] = sorted(self.by_model[model])
        return names

    def roomiest(self, need: int | None, most: int) -> Iterator[str]:
        """Nodes of hosts with so many bytes free, the least first; None: of the emptiest hosts."""
        hosts = self._by_free
        places: Iterable[int]
        if need is None:
            places = range(len(hosts) - 1, max(-1, len(hosts) - 1 - most), -1)
        else:
            first = bisect_left(hosts, (need, ""))
            places = range(first, min(len(hosts), first + most))
        for place in places:
            yield from self.hosts[hosts[place][1]].nodes

    def _instances_of(self, node: str) -> list[Instance]:
        return [one[node] for one in self.by_model.values() if node in one]

    def _unsort(self, host: ModelHost) -> None:
        place = bisect_left(self._by_free, (host.free, host.name))
        if place < len(self._by_free) and self._by_free[place][1] == host.name:
            del self._by_free[place]


def _put(table: dict[tuple[str, str], Instance], instance: Instance, *, put: bool) -> None:
    if put:
        table[instance.node, instance.model] = instance
    else:
        table.pop((instance.node, instance.model), None)


class _Plan(NamedTuple):
    """A load that waits for room."""

    victims: tuple[tuple[str, str], ...]
    reason: str
    cost: float
    ready_at: float
    standing: bool  # it is wanted though nobody waits


class _Reserved(NamedTuple):
    """What planned loads take of a host."""

    memory: int
    counts: Mapping[str, int]
    alone: bool


class _Lack:
    """What one more model lacks on a host: bytes, a place, to be alone."""

    def __init__(
        self, instance: Instance, node: RouterNode, host: ModelHost, reserved: _Reserved
    ) -> None:
        planned = reserved.counts.get(node.name, 0)
        self._node = node.name
        self._places = host.count(node.name) + planned + 1 - node.count_limit
        self._packed = host.memory is not None
        self._alone = self._packed and instance.memory is None
        self._bytes, self._unknown, self._held = 0, host.unknown, len(host.held)
        self.hopeless = reserved.alone or planned >= node.count_limit
        if host.memory is not None:
            needed = reserved.memory + (instance.memory or 0)
            self._bytes = host.used + needed - host.memory
            self.hopeless |= needed > host.memory or (self._alone and bool(reserved.counts))

    def is_met(self) -> bool:
        """Whether nothing is lacking."""
        if self._places > 0:
            return False
        if not self._packed:
            return True
        return not self._held if self._alone else self._bytes <= 0 and not self._unknown

    def is_less_without(self, one: Instance) -> bool:
        """Whether it would help if this one went."""
        if self._places > 0 and one.node == self._node:
            return True
        return self._packed and (
            self._alone or self._bytes > 0 or (self._unknown > 0 and one.memory is None)
        )

    def count(self, one: Instance, sign: int) -> None:
        """Another instance comes, or goes."""
        self._places += sign * (one.node == self._node)
        self._bytes += sign * (one.memory or 0)
        self._unknown += sign * (one.memory is None)
        self._held += sign


class _Room(NamedTuple):
    """How room is made for a load."""

    victims: tuple[Instance, ...]
    wait: float  # until those that leave have gone
    loss: float
    must_wait: bool  # something is still to go
    reload_seconds: float  # that it takes to bring all victims back


class _Option(NamedTuple):
    """A load that could be begun."""

    instance: Instance
    ready_in: float
    loss: float
    cost: float
    victims: tuple[Instance, ...]
    must_wait: bool
    reload_seconds: float


class _Queue:
    """A model's queue, as a fluid: how long its requests wait within the horizon."""

    def __init__(
        self, waiting: float, rate: float, copies: list[tuple[float, float, float]]
    ) -> None:
        """`copies`: of each, when it serves, its requests a second, and the seconds of one."""
        self._waiting = waiting
        self._rate = rate
        self._copies = sorted(copies)
        self.has_copies = bool(copies)

    def cost_as_it_is(self) -> float:
        """Seconds that its requests take in all, with the copies that it has."""
        return self._cost(self._copies)

    def cost_with(self, ready_in: float, rate: float, service: float) -> float:
        """The same with one more copy."""
        return self._cost(sorted([*self._copies, (ready_in, rate, service)]))

    def _cost(self, copies: list[tuple[float, float, float]]) -> float:
        total = self._waiting + self._rate * HORIZON
        if not total:
            return copies[0][0] if copies else 0.0
        served = sum(rate for _, rate, _ in copies)
        service = sum(rate * seconds for _, rate, seconds in copies) / served if served else 0.0
        return self._area(copies) + total * service

    def _area(self, copies: list[tuple[float, float, float]]) -> float:
        """The length of the queue over time."""
        length, growth, area, at = self._waiting, self._rate, 0.0, 0.0
        for begins, rate, _ in [*copies, (HORIZON, 0.0, 0.0)]:
            seconds = min(begins, HORIZON) - at
            if seconds > 0.0:
                end = length + growth * seconds
                if end >= 0.0:
                    area += (length + end) / 2 * seconds
                    length = end
                else:
                    area += length * length / (-2 * growth)
                    length = 0.0
                at += seconds
            growth -= rate
        return area


_NO_QUEUE = _Queue(0.0, 0.0, [])


class _Look:
    """One look at the fleet, and what has been decided in it so far."""

    def __init__(
        self,
        index: FleetIndex,
        rules: ModelPlacementRules,
        rates: RequestRates,
        usage: Usage,
        now: float,
    ) -> None:
        self.now = now
        self.actions: list[LoadAction] = []
        self.loads: list[Instance] = []  # that were decided on
        self.demands: Mapping[str, ModelDemand] = {}
        self._index = index
        self._rules = rules
        self._rates = rates
        self._read_usage = usage
        self._usages: dict[tuple[str, str], InstanceUsage] = {}
        self._rate_of: dict[str, float] = {}
        self._acted: dict[tuple[str, str], LoadVerb] = {}
        self._losses: dict[tuple[str, str], float] = {}

    def act(
        self, verb: LoadVerb, instance: Instance, reason: str, cause: UnloadCause = "memory"
    ) -> None:
        """Decide on an action. The fleet is as if it had begun."""
        self.actions.append(LoadAction(verb, instance.node, instance.model, reason, cause))
        self._acted[instance.node, instance.model] = verb
        if verb == "load":
            self.loads.append(instance)

    def loads_of(self, host: ModelHost) -> int:
        """Loads that run on a host, with those decided on."""
        return host.loading + sum(one.node in host.nodes for one in self.loads)

    def acted_on(self, model: str, node: str | None = None) -> bool:
        """Whether something was decided about a model, on one node or on any."""
        if node is not None:
            return (node, model) in self._acted
        return any(key[1] == model for key in self._acted)

    def is_leaving(self, instance: Instance) -> bool:
        """Whether it was decided to unload it."""
        return self._acted.get((instance.node, instance.model)) in {"retire", "unload"}

    def is_loadable(self, instance: Instance) -> bool:
        """Whether it is unloaded and may be tried."""
        return (
            instance.phase in {LoadPhase.UNLOADED, LoadPhase.FAILED}
            and instance.retry_at <= self.now
            and (instance.node, instance.model) not in self._acted
        )

    def usage(self, instance: Instance) -> InstanceUsage:
        """What it does now."""
        key = (instance.node, instance.model)
        found = self._usages.get(key)
        if found is None:
            found = self._usages[key] = self._read_usage(instance)
        return found

    def rate(self, model: str) -> float:
        """Requests a second that callers send for a model."""
        found = self._rate_of.get(model)
        if found is None:
            found = self._rate_of[model] = self._rates.rate(model, self.now)
        return found

    def copies(self, model: str, nodes: frozenset[str] | None) -> list[Instance]:
        """The instances of a model that serve, or soon will, on nodes that work."""
        return [
            one
            for node, one in self._index.serving(model).items()
            if self._index.nodes[node].usable
            and (nodes is None or node in nodes)
            and not self.is_leaving(one)
        ]

    def is_served(self, model: str) -> bool:
        """Whether an instance of it takes requests."""
        held = self._index.held(model).values()
        return any(one.phase is LoadPhase.READY for one in held)

    def queue(self, model: str, demand: ModelDemand, copies: list[Instance]) -> _Queue:
        """What waits for a model, and who serves it."""
        waiting = float(demand.waiting)
        found = []
        for copy in copies:
            begins = 0.0
            if copy.phase is LoadPhase.LOADING:
                begins = max(1.0, copy.since + copy.load_seconds - self.now)
            found.append((begins, copy.slots / copy.request_seconds, copy.request_seconds))
        if demand.work > 0.0 and copies:
            usual = sum(copy.request_seconds for copy in copies) / len(copies)
            waiting = demand.work / usual
        return _Queue(waiting, self.rate(model), found)

    def utilisation(self, host: ModelHost, but: Iterable[Instance]) -> float:
        """The share of a host's time that the others on it are expected to take."""
        busy = 0.0
        for instance in host.held.values():
            if instance.phase in SERVING_PHASES and instance not in but:
                rate = self.rate(instance.model)
                if rate:
                    copies = len(self._index.held(instance.model))
                    busy += rate / copies * instance.request_seconds / instance.slots
        return min(busy, 1.0)

    def make_room(
        self, instance: Instance, node: RouterNode, host: ModelHost, reserved: _Reserved
    ) -> _Room | None:
        """What has to go for it, the least loss for its memory first; None: it can't have room."""
        lack = _Lack(instance, node, host, reserved)
        if lack.hopeless:
            return None
        if lack.is_met():
            return _Room((), 0.0, 0.0, must_wait=False, reload_seconds=0.0)
        leaving = [
            one for one in host.held.values() if one.phase in LEAVING_PHASES or self.is_leaving(one)
        ]
        for one in leaving:
            lack.count(one, -1)
        victims = self._victims(host, lack)
        if victims is None:
            return None
        gone = tuple(one for _, one in victims)
        return _Room(
            gone,
            max(self.usage(one).busy_seconds for one in (*leaving, *gone)),
            sum(loss for loss, _ in victims),
            must_wait=True,
            reload_seconds=sum(one.load_seconds for one in gone),
        )

    def _victims(self, host: ModelHost, lack: _Lack) -> list[tuple[float, Instance]] | None:
        """The instances that must go with the loss of each; None: that would not be enough."""
        candidates = [
            (self._loss(one), one)
            for one in host.held.values()
            if one.phase is LoadPhase.READY and not (one.pinned or self.is_leaving(one))
        ]
        candidates.sort(key=lambda pair: pair[0] / (pair[1].memory or 1))
        victims: list[tuple[float, Instance]] = []
        for pair in candidates:
            if lack.is_met() or pair[0] == math.inf:
                break
            if lack.is_less_without(pair[1]):
                victims.append(pair)
                lack.count(pair[1], -1)
        if not lack.is_met():
            return None
        # What was taken first may be needless beside what came later.
        for pair in sorted(victims, key=lambda pair: -pair[0]):
            lack.count(pair[1], 1)
            if lack.is_met():
                victims.remove(pair)
            else:
                lack.count(pair[1], -1)
        return victims

    def _loss(self, instance: Instance) -> float:
        """Seconds that requests are expected to wait for it if it goes; infinity: it must not."""
        key = (instance.node, instance.model)
        found = self._losses.get(key)
        if found is None:
            found = self._losses[key] = self._compute_loss(instance)
        return found

    def _compute_loss(self, instance: Instance) -> float:
        model = instance.model
        if self.now - instance.since < self._rules.hysteresis:
            return math.inf
        copies = self.copies(model, None)
        if len(copies) <= self._rules.models.get(model, _NO_RULES).min:
            return math.inf
        demand = self.demands.get(model)
        waiting = demand.waiting if demand is not None else 0
        rate = self.rate(model)
        reload = instance.load_seconds + UNLOAD_SECONDS
        missed = 1.0 - math.exp(-rate * HORIZON)
        gone = (missed * (1.0 + rate * reload / 2) + waiting) * reload
        others = sum(
            one.slots / one.request_seconds
            for one in copies
            if one is not instance and one.phase is LoadPhase.READY
        )
        if not others:
            return gone
        # Its callers have the other copies, which are fuller then.
        load = rate / others
        if load >= 0.9:
            return gone
        slower = rate * HORIZON * instance.request_seconds * load**2 / (1.0 - load) / 2
        return min(gone, slower + waiting * instance.request_seconds)
