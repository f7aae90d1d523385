"""Which models to load and unload on which nodes: a pure policy, for the gateway and the simulator.

Everything is priced in seconds of waiting. For a model that requests wait for, each node is worth
the time until it could serve them there: until the leases of what must go have ended, its unload,
and the load; then the queue is served as fast as that node does. What must go costs a load for each
caller who is expected to miss it before long, so a model that nobody asks for goes first. A model
that is loaded nowhere is loaded once its requests have waited as many seconds as that loss, so a
queue is served together before its model makes room for another; or in time for the starvation
bound. One more copy is loaded where it shortens the queue by more than it costs, in free memory
also where it spares random arrivals their waits.

A look compares a bounded number of nodes, however large the fleet is; models that are not reached
are looked at first in the next one. Times are monotonic seconds and memory is bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Literal, NamedTuple

from gateway.nodes.router import LoadPhase, UnloadCause

ORDERED = "an operator has ordered it"
ASSUMED_LOAD = 30.0  # seconds of a load that was never seen
UNLOAD_SECONDS = 1.0
# A model stays at least so many times as long as its load took, up to `hysteresis`.
HYSTERESIS_LOADS = 20.0
LOOK_MARGIN = 1.0  # seconds by which a load begins before the bound wants it
# Seconds ahead that are compared: what callers miss later, they miss under any placement.
HORIZON = 60.0
# Of the loads that callers then miss: each displaces other models in its turn.
MISS_FACTOR = 1.5
NEAR_BOUND = 0.5  # share of the bound from which the oldest request goes first
# One more copy must shorten the waits by so many times what it costs others.
COPY_MARGIN = 1.2
# Share of the seconds of a load that it costs the others of its host.
LOAD_SHARE = 0.3
# A load that waits for leases is given up for another node that is better by this factor.
CHANGE_MARGIN = 1.5
# A model whose callers are expected to miss so little of its load may go for batch rows.
UNUSED_SHARE = 0.05
# With so many callers expected within the horizon, a model's last copy stays, whatever others' more
# copies would save.
NEEDED = 20.0
FULLEST = 0.9  # share of its copies' time up to which the waits of random arrivals are computed
LEAST_SPEED = 0.1  # share of a host's speed that a model gets beside others, at the least
ROOM_SECONDS = 1.0  # between two looks at whether a model can have room at all
MOST_LOADS_OF_HOST = 2  # at one time: they share its disk
# Nodes compared for one model in a look, and for all of them about.
MOST_COMPARED, MOST_EVALUATIONS = 16, 24
# Time constants of the two means of a model's rate: one follows bursts, one remembers.
FAST_SECONDS, SLOW_SECONDS = 40.0, 900.0
# Requests that a model's silence may lack: random arrivals lack five once in 150 times.
MOST_MISSED = 5.0

SERVING_PHASES = frozenset({LoadPhase.LOADING, LoadPhase.READY})
LEAVING_PHASES = frozenset({LoadPhase.RETIRING, LoadPhase.UNLOADING})
HELD_PHASES = SERVING_PHASES | LEAVING_PHASES  # those that take memory
LoadVerb = Literal["load", "retire", "keep", "unload"]
_Key = tuple[str, str]  # node and model
_Copy = tuple[float, float, float]  # in how long it serves, its requests a second, seconds of one


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
    slots: int = 1  # 0: it is loaded, and does not answer
    request_seconds: float = 10.0  # of a usual request there
    since: float = -math.inf  # when the phase began
    retry_at: float = -math.inf  # after a load has failed: when it may be tried again
    pinned: bool = False  # it is to be loaded, and is never unloaded
    failures: int = 0  # loads in a row that failed there

    @property
    def key(self) -> _Key:
        """Its node and its model."""
        return self.node, self.model


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
    hysteresis: float = 10.0
    """Seconds that a model stays once it is loaded; less where its loads take far less."""
    models: Mapping[str, ModelRules] = field(default_factory=dict)


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
        self.evaluations = 0  # nodes that were compared so far
        self._rates = RequestRates()
        self._index = FleetIndex()
        self._plans: dict[_Key, _Plan] = {}
        self._cursors: dict[str, int] = {}  # by model: the node that is compared next
        self._served_at: dict[str, float] = {}
        """By model that requests wait for: when it was last loaded somewhere."""
        self._left: list[str] = []  # models that the last look did not reach
        self._room_looked_at: dict[str, float] = {}
        self.without_room: dict[str, list[Instance]] = {}
        """By model that no node could load when requests last waited for it: where it never can."""

    # What there is.

    def set_rules(self, rules: ModelPlacementRules) -> None:
        """Go by these from now on."""
        self.rules = rules

    def put_node(self, node: RouterNode) -> None:
        """There is this router, or it has changed."""
        self._index.put_node(node)

    def remove_node(self, name: str) -> None:
        """There is no such router any more; its instances go with it."""
        self._index.remove_node(name)

    def put_instance(self, instance: Instance) -> None:
        """A router, which is known, can serve this model; or the instance has changed."""
        self._index.put(instance)

    def remove_instance(self, node: str, model: str) -> None:
        """The router can't serve that model any more."""
        self._index.remove(node, model)

    def note_request(self, model: str, now: float) -> None:
        """A caller has sent a request for this model; batch rows are not told."""
        self._rates.note(model, now)

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
        by_model = {demand.model: demand for demand in demands if demand.waiting}
        look = _Look(self._index, self.rules, self._rates, by_model, usage, now)
        most = self.evaluations + MOST_EVALUATIONS
        self._follow_plans(look)
        self._serve_demands(look, most)
        self._keep_wanted(look, most)
        for instance in self._index.retiring.values():
            if instance.key not in look.acted and not look.usage(instance).leases:
                look.act("unload", instance, "it runs nothing any more")
        return look.actions

    def order_load(
        self, node: str, model: str, usage: Usage, now: float
    ) -> list[LoadAction] | None:
        """What to do so that an operator gets a model loaded there; None: it can't have room."""
        look = _Look(self._index, self.rules, self._rates, {}, usage, now)
        instance = self._index.instance((node, model))
        if instance is None or (node, model) in self._plans:
            return []
        if instance.phase is LoadPhase.RETIRING and instance.key not in self._victims():
            look.act("keep", instance, ORDERED)
        elif look.is_loadable(instance):
            option = self._price(look, instance, _NO_QUEUE)
            if option is None:
                return None
            self._carry_out(look, option, ORDERED, standing=True)
        return look.actions

    def _follow_plans(self, look: _Look) -> None:
        """Load what has room now; give up what nobody waits for any more."""
        for key, plan in list(self._plans.items()):
            instance = self._index.instance(key)
            wanted = plan.standing or key[1] in look.demands
            if instance is None or not wanted or not look.is_loadable(instance):
                self._give_up(look, key)
                continue
            host = self._index.host_of(instance)
            if self._lack(look, instance).is_met():
                if look.loads_of(host) < MOST_LOADS_OF_HOST:
                    look.act("load", instance, plan.reason)
                    del self._plans[key]
            elif not any(map(look.is_leaving, host.held.values())):
                # Those who were to go have stayed: it is looked at anew.
                self._give_up(look, key)

    def _give_up(self, look: _Look, key: _Key) -> None:
        for victim in self._plans.pop(key).victims:
            instance = self._index.instance(victim)
            if instance is not None and instance.phase is LoadPhase.RETIRING:
                look.act("keep", instance, "its memory is not needed any more")

    def _serve_demands(self, look: _Look, most: int) -> None:
        """Find nodes for what waits, first for those that the last look did not reach."""
        self._served_at = {
            model: look.now if look.capacity(model).slots else self._served_at.get(model, -math.inf)
            for model in look.demands
        }
        left = {model: place for place, model in enumerate(self._left)}

        def order(demand: ModelDemand) -> tuple[float, ...]:
            share = self._without(demand, look) / max(1.0, self._patience(demand))
            late = share if share > NEAR_BOUND else 0.0
            return left.get(demand.model, len(left)), demand.batch, -late, -demand.waited

        ordered = sorted(look.demands.values(), key=order)
        self._left = []
        for place, demand in enumerate(ordered):
            if self.evaluations >= most:
                self._left = [one.model for one in ordered[place:]]
                break
            self._serve(look, demand)

    def _serve(self, look: _Look, demand: ModelDemand) -> None:
        model = demand.model
        if any(one.model == model for one in look.loads):
            return
        queue = look.queue(demand)
        planned = next((key for key in self._plans if key[1] == model), None)
        if planned is None:
            if not queue.has_copies and self._keep_retiring(look, demand):
                return
            most = self.rules.models.get(model, _NO_RULES).max
            if most is not None and look.capacity(model).copies >= most:
                return
        best = self._best(look, model, queue, demand.nodes)
        if best is None:
            if not queue.has_copies and planned is None:
                self._find_hopeless(look, demand)
            return
        self.without_room.pop(model, None)
        if planned is not None:
            plan = self._plans[planned]
            if (
                best.cost * CHANGE_MARGIN >= plan.cost
                or best.ready_in >= plan.ready_at - look.now
                or best.instance.node == planned[0]
            ):
                return
        if self._is_worth(look, demand, queue, best):
            if planned is not None:
                self._give_up(look, planned)
            more = "one more copy" if queue.has_copies else "it"
            self._carry_out(look, best, f"{demand.waiting} requests wait for {more}")

    def _find_hopeless(self, look: _Look, demand: ModelDemand) -> None:
        """Find out, now and then, if a model can have room nowhere, whatever goes that may go."""
        model = demand.model
        if look.now - self._room_looked_at.get(model, -math.inf) < ROOM_SECONDS:
            return
        self._room_looked_at[model] = look.now
        instances = self._index.by_model.get(model, {})
        names = instances if demand.nodes is None else demand.nodes & instances.keys()
        found = [instances[name] for name in names]
        self.without_room[model] = [] if any(map(look.may_fit, found)) else found

    def _keep_retiring(self, look: _Look, demand: ModelDemand) -> bool:
        """Keep an instance that was to go, where no load that is planned needs its memory."""
        needed = self._victims()
        for one in self._index.held(demand.model).values():
            allowed = demand.nodes is None or one.node in demand.nodes
            if one.phase is LoadPhase.RETIRING and allowed and one.key not in needed:
                look.act("keep", one, "requests wait for it again")
                return True
        return False

    def _victims(self) -> set[_Key]:
        """What is to go for the loads that are planned."""
        return set(chain.from_iterable(plan.victims for plan in self._plans.values()))

    def _is_worth(self, look: _Look, demand: ModelDemand, queue: _Queue, option: _Option) -> bool:
        """Whether a load there is worth what it costs others."""
        loss, load_seconds = option.room.loss, option.instance.load_seconds
        if demand.batch and loss > UNUSED_SHARE * option.room.reload_seconds:
            return False
        if queue.has_copies:
            if any(map(look.is_needed, option.room.victims)):
                return False
            saved = queue.cost() - (option.cost - loss)
            if look.capacity(demand.model).slots and not option.room.victims:
                # Memory that is free is best used by those that are asked for most.
                saved += queue.queueing() - queue.queueing(option.copy)
            return saved > COPY_MARGIN * loss + LOAD_SHARE * load_seconds
        without = self._without(demand, look)
        if without + option.ready_in + LOOK_MARGIN >= self._patience(demand):
            return True
        return demand.waited + demand.waiting * load_seconds >= loss

    def _patience(self, demand: ModelDemand) -> float:
        return self.rules.starvation if demand.patience is None else demand.patience

    def _without(self, demand: ModelDemand, look: _Look) -> float:
        """Seconds that the oldest has waited while the model was loaded nowhere."""
        return min(demand.oldest_wait, look.now - self._served_at.get(demand.model, -math.inf))

    def _carry_out(
        self, look: _Look, option: _Option, reason: str, *, standing: bool = False
    ) -> None:
        """Load it, or make room for it first."""
        instance, room = option.instance, option.room
        for victim in room.victims:
            look.dismiss(victim, f"{instance.model} needs its memory: {reason}")
        crowded = look.loads_of(self._index.host_of(instance)) >= MOST_LOADS_OF_HOST
        if room.must_wait or crowded:
            victims = tuple(victim.key for victim in room.victims)
            ready_at = look.now + option.ready_in
            self._plans[instance.key] = _Plan(victims, reason, option.cost, ready_at, standing)
        else:
            look.act("load", instance, reason)

    def _best(
        self, look: _Look, model: str, queue: _Queue, nodes: frozenset[str] | None = None
    ) -> _Option | None:
        """The best node for one more copy; None: there is none."""
        options = [
            option
            for instance in self._candidates(look, model, nodes)
            if (option := self._price(look, instance, queue)) is not None
        ]
        return min(options, key=lambda option: option.cost, default=None)

    def _candidates(
        self, look: _Look, model: str, nodes: frozenset[str] | None
    ) -> Iterator[Instance]:
        """The nodes to compare for a model: all, or some with room and some others in turn."""
        instances = self._index.by_model.get(model, {})
        names: Iterable[str] = instances
        if len(instances) > MOST_COMPARED:
            roomy = self._index.roomiest(next(iter(instances.values())).memory)
            first = self._cursors.get(model, 0) % len(instances)
            self._cursors[model] = first + MOST_COMPARED
            ring = islice(chain(instances, instances), first, first + MOST_COMPARED)
            names = dict.fromkeys(chain(islice(roomy, MOST_COMPARED // 2), ring))
        possible = (
            instances[name]
            for name in names
            if name in instances and (nodes is None or name in nodes)
        )
        loadable = (one for one in possible if look.is_loadable(one) and one.key not in self._plans)
        return islice(loadable, MOST_COMPARED)

    def _price(self, look: _Look, instance: Instance, queue: _Queue) -> _Option | None:
        """What a load there would bring and cost; None: it can't be loaded there."""
        self.evaluations += 1
        host = self._index.host_of(instance)
        room = look.make_room(host, self._lack(look, instance))
        if room is None or look.now < instance.retry_at + instance.failures * room.loss:
            # One that may be broken takes no room from others before as long as they would miss.
            return None
        ready_in = room.wait + instance.load_seconds + UNLOAD_SECONDS * room.must_wait
        speed = max(LEAST_SPEED, 1.0 - look.utilisation(host, room.victims))
        service = instance.request_seconds / speed
        copy = ready_in, instance.slots / service, service
        return _Option(instance, room, copy, queue.cost(copy) + room.loss)

    def _lack(self, look: _Look, instance: Instance) -> _Lack:
        """What it lacks on its host, beside the loads that are planned and decided on."""
        host = self._index.host_of(instance)
        keys = [key for key in self._plans if key[0] in host.nodes and key != instance.key]
        coming = [one for one in look.loads if one.node in host.nodes]
        coming += [one for one in map(self._index.instance, keys) if one is not None]
        return _Lack(instance, self._index.nodes[instance.node], host, coming)

    # What operators want, whoever waits.

    def _keep_wanted(self, look: _Look, most: int) -> None:
        """Load pinned models and the least copies; unload idle ones, and those above the most."""
        for instance in list(self._index.pinned_unloaded.values()):
            if self.evaluations >= most:
                return
            if look.is_loadable(instance) and instance.key not in self._plans:
                self._load_standing(look, self._price(look, instance, _NO_QUEUE), "it is pinned")
        for model, rules in self.rules.models.items():
            serving = self._index.serving(model)
            planned = any(key[1] == model for key in chain(self._plans, look.acted))
            if len(serving) < rules.min and not planned and self.evaluations < most:
                best = self._best(look, model, _NO_QUEUE)
                self._load_standing(look, best, f"fewer than {rules.min} copies are loaded")
            if rules.max is not None or rules.idle_unload is not None:
                self._unload_needless(look, rules, serving)

    def _load_standing(self, look: _Look, option: _Option | None, reason: str) -> None:
        if option is not None:
            self._carry_out(look, option, reason, standing=True)

    def _unload_needless(self, look: _Look, rules: ModelRules, serving: list[Instance]) -> None:
        """Unload copies above the most, and those that nobody has used for long."""
        count = len(serving)
        ready = [
            one
            for one in serving
            if one.phase is LoadPhase.READY and not (one.pinned or one.key in look.acted)
        ]
        ready.sort(key=lambda one: (look.usage(one).leases, look.usage(one).last_used))
        for one in ready:
            usage = look.usage(one)
            idle = 0.0 if usage.leases else look.now - max(usage.last_used, one.since)
            if rules.max is not None and count > rules.max:
                look.dismiss(one, f"more than {rules.max} copies are loaded", "replicas")
            elif rules.idle_unload is None or idle < rules.idle_unload or count <= rules.min:
                continue
            elif one.model not in look.demands:
                look.act("unload", one, f"it has idled for {idle:.0f} s", "idle")
            count -= 1


class RequestRates:
    """How often callers ask for each model: a long mean, or a short one that differs clearly."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._means: dict[str, tuple[float, float, float]] = {}  # when; the short; the long

    def note(self, model: str, now: float) -> None:
        """Count a request."""
        if self._began is None:
            self._began = now
        short, long = self._decayed(model, now)
        self._means[model] = now, short + 1.0, long + 1.0

    def rate(self, model: str, now: float) -> float:
        """Requests a second."""
        counts = self._decayed(model, now)
        if self._began is None or not counts[1]:
            return 0.0
        passed = max(FAST_SECONDS, now - self._began)
        short, long = (
            count / seconds / (1.0 - math.exp(-passed / seconds))
            for count, seconds in zip(counts, (FAST_SECONDS, SLOW_SECONDS), strict=True)
        )
        silent = now - self._means[model][0]
        short = min(short, MOST_MISSED / silent) if silent > 0.0 else short
        # The standard deviation of such a mean of random arrivals is the root of rate / 2 seconds.
        by_chance = 2.0 * math.sqrt(max(long, 1.0 / FAST_SECONDS) / (2.0 * FAST_SECONDS))
        return short if abs(short - long) > by_chance else long

    def _decayed(self, model: str, now: float) -> tuple[float, float]:
        when, short, long = self._means.get(model, (now, 0.0, 0.0))
        passed = max(0.0, now - when)
        return short * math.exp(-passed / FAST_SECONDS), long * math.exp(-passed / SLOW_SECONDS)


@dataclass(slots=True, eq=False)
class ModelHost:
    """The memory that some nodes share, and what is loaded in it."""

    name: str
    memory: int | None = None
    nodes: set[str] = field(default_factory=set)
    held: dict[_Key, Instance] = field(default_factory=dict)
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

    def count(self, instance: Instance, sign: int) -> None:
        """An instance takes memory here from now on, or does not any more."""
        if sign > 0:
            self.held[instance.key] = instance
        else:
            del self.held[instance.key]
        self.used += sign * (instance.memory or 0)
        self.unknown += sign * (instance.memory is None)
        self.loading += sign * (instance.phase is LoadPhase.LOADING)


class Capacity(NamedTuple):
    """What the instances of one model can do that serve, or soon will."""

    copies: int = 0
    slots: int = 0  # of those that serve now
    rate: float = 0.0  # requests a second that those can serve

    def plus(self, instance: Instance, sign: int) -> Capacity:
        """With one more instance, or one less."""
        if instance.phase not in SERVING_PHASES:
            return self
        slots = sign * instance.slots * (instance.phase is LoadPhase.READY)
        rate = self.rate + slots / instance.request_seconds
        return Capacity(self.copies + sign, self.slots + slots, rate)


class FleetIndex:
    """Nodes, hosts and instances, found by model and by free memory."""

    def __init__(self) -> None:
        self.nodes: dict[str, RouterNode] = {}
        self.hosts: dict[str, ModelHost] = {}
        self.by_model: dict[str, dict[str, Instance]] = {}  # and by node
        self.capacities: dict[str, Capacity] = {}  # by model: on nodes that work
        self.loading: dict[str, dict[_Key, Instance]] = {}  # by model
        self.retiring: dict[_Key, Instance] = {}
        self.pinned_unloaded: dict[_Key, Instance] = {}
        self._held: dict[str, dict[str, Instance]] = {}  # as `by_model`: those that take memory
        self._by_free: list[tuple[float, str]] = []  # hosts, by free bytes

    def put_node(self, node: RouterNode) -> None:
        """Add a node, or replace it."""
        old = self.nodes.get(node.name)
        moved: list[Instance] = []
        if old is not None and (old.host, old.usable) != (node.host, node.usable):
            moved = self._instances_of(node.name)
            self.remove_node(node.name)
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
            self.put(instance)

    def remove_node(self, name: str) -> None:
        """Remove a node with its instances."""
        for instance in self._instances_of(name):
            self.remove(*instance.key)
        node = self.nodes.pop(name, None)
        if node is not None:
            host = self.hosts[node.host]
            host.nodes.discard(name)
            if not host.nodes:
                self._unsort(host)
                del self.hosts[node.host]

    def put(self, instance: Instance) -> None:
        """Add an instance of a known node, or replace it."""
        instances = self.by_model.setdefault(instance.model, {})
        self._replace(instances.get(instance.node), instance)
        instances[instance.node] = instance

    def remove(self, node: str, model: str) -> None:
        """Remove an instance."""
        instance = self.by_model.get(model, {}).pop(node, None)
        if instance is not None:
            self._replace(instance, None)

    def _replace(self, old: Instance | None, new: Instance | None) -> None:
        one = new or old
        assert one is not None
        host, held = self.host_of(one), self._held.setdefault(one.model, {})
        if self.nodes[one.node].usable:
            capacity = self.capacities.get(one.model, Capacity())
            capacity = capacity.plus(old, -1) if old is not None else capacity
            capacity = capacity.plus(new, 1) if new is not None else capacity
            self.capacities[one.model] = capacity
        was = old is not None and old.phase in HELD_PHASES
        now = new is not None and new.phase in HELD_PHASES
        if was or now:
            self._unsort(host)
            if old is not None and was:
                host.count(old, -1)
                del held[old.node]
            if new is not None and now:
                host.count(new, 1)
                held[new.node] = new
            insort(self._by_free, (host.free, host.name))
        self.loading.get(one.model, {}).pop(one.key, None)
        self.retiring.pop(one.key, None)
        self.pinned_unloaded.pop(one.key, None)
        if new is not None and new.phase is LoadPhase.LOADING:
            self.loading.setdefault(new.model, {})[new.key] = new
        elif new is not None and new.phase is LoadPhase.RETIRING:
            self.retiring[new.key] = new
        elif new is not None and new.pinned and not now:
            self.pinned_unloaded[new.key] = new

    def instance(self, key: _Key) -> Instance | None:
        """One instance; None: there is none."""
        return self.by_model.get(key[1], {}).get(key[0])

    def host_of(self, instance: Instance) -> ModelHost:
        """The host of its node."""
        return self.hosts[self.nodes[instance.node].host]

    def held(self, model: str) -> Mapping[str, Instance]:
        """By node: the instances of a model that take memory."""
        return self._held.get(model, {})

    def serving(self, model: str) -> list[Instance]:
        """Those of them that serve, or soon will."""
        return [one for one in self.held(model).values() if one.phase in SERVING_PHASES]

    def roomiest(self, need: int | None) -> Iterator[str]:
        """Nodes of hosts with so many bytes free, the least first; None: the emptiest first."""
        hosts = self._by_free
        first = 0 if need is None else bisect_left(hosts, (need, ""))
        places = range(first, len(hosts))
        for place in reversed(places) if need is None else places:
            yield from self.hosts[hosts[place][1]].nodes

    def _instances_of(self, node: str) -> list[Instance]:
        return [one[node] for one in self.by_model.values() if node in one]

    def _unsort(self, host: ModelHost) -> None:
        del self._by_free[bisect_left(self._by_free, (host.free, host.name))]


class _Plan(NamedTuple):
    """A load that waits for room."""

    victims: tuple[_Key, ...]
    reason: str
    cost: float
    ready_at: float
    standing: bool  # it is wanted though nobody waits


class _Room(NamedTuple):
    """How room is made for a load."""

    victims: Sequence[Instance] = ()
    wait: float = 0.0  # until those that leave have ended their requests
    loss: float = 0.0
    must_wait: bool = False  # something is still to go

    @property
    def reload_seconds(self) -> float:
        """Seconds that it takes to load all victims again."""
        return sum(one.load_seconds for one in self.victims)


class _Option(NamedTuple):
    """A load that could be begun."""

    instance: Instance
    room: _Room
    copy: _Copy
    cost: float

    @property
    def ready_in(self) -> float:
        """Seconds until it could serve."""
        return self.copy[0]


class _Lack:
    """What one more model lacks on a host: bytes, a place, to be alone."""

    def __init__(
        self, instance: Instance, node: RouterNode, host: ModelHost, coming: Sequence[Instance]
    ) -> None:
        """`coming`: others that are about to be loaded there."""
        planned = sum(one.node == node.name for one in coming)
        held = sum(one.node == node.name for one in host.held.values())
        self._node = node.name
        self._places = held + planned + 1 - node.count_limit
        self._packed = host.memory is not None
        self._alone = self._packed and instance.memory is None
        self._bytes, self._unknown, self._held = 0, host.unknown, len(host.held)
        self.hopeless = planned >= node.count_limit
        if host.memory is not None:
            needed = sum(one.memory or 0 for one in (instance, *coming))
            self._bytes = host.used + needed - host.memory
            apart = self._alone or any(one.memory is None for one in coming)
            self.hopeless |= needed > host.memory or (apart and bool(coming))

    def is_met(self) -> bool:
        """Whether nothing is lacking."""
        if self.hopeless or self._places > 0:
            return False
        if not self._packed:
            return True
        return not self._held if self._alone else self._bytes <= 0 and not self._unknown

    def is_less_without(self, one: Instance) -> bool:
        """Whether it would help if this one went."""
        if self._places > 0 and one.node == self._node:
            return True
        unknown = self._unknown > 0 and one.memory is None
        return self._packed and (self._alone or self._bytes > 0 or unknown)

    def count(self, one: Instance, sign: int) -> None:
        """Another instance comes, or goes."""
        self._places += sign * (one.node == self._node)
        self._bytes += sign * (one.memory or 0)
        self._unknown += sign * (one.memory is None)
        self._held += sign


def queueing_seconds(rate: float, slots: float, service: float) -> float:
    """The mean wait of random arrivals for one of so many slots (Sakasegawa, 1977).

    At most that where `FULLEST` of their time is used: more is a queue that only grows.
    """
    load = min(FULLEST, rate * service / slots)
    power = math.sqrt(2.0 * (slots + 1.0)) - 1.0
    return service * math.pow(load, power) / (slots * (1.0 - load))


class _Queue:
    """A model's queue, as a fluid: how long its requests take within the horizon."""

    def __init__(self, waiting: float, rate: float, copies: list[_Copy]) -> None:
        self._waiting, self._rate, self._copies = waiting, rate, copies
        self.has_copies = bool(copies)

    def cost(self, more: _Copy | None = None) -> float:
        """Seconds that its requests take in all, with its copies or one more."""
        copies = sorted([*self._copies, more] if more else self._copies)
        total = self._waiting + self._rate * HORIZON
        if not total:
            return copies[0][0] if copies else 0.0
        served = sum([rate for _, rate, _ in copies])
        slots = sum([rate * seconds for _, rate, seconds in copies])
        return self._area(copies) + total * slots / served

    def queueing(self, more: _Copy | None = None) -> float:
        """Seconds that random arrivals are expected to wait within the horizon beside all that."""
        copies = [*self._copies, more] if more else self._copies
        slots = sum([rate * seconds for _, rate, seconds in copies])
        served = sum([rate for _, rate, _ in copies])
        return self._rate * HORIZON * queueing_seconds(self._rate, slots, slots / served)

    def _area(self, copies: list[_Copy]) -> float:
        """The length of the queue over time."""
        length, growth, area, at = self._waiting, self._rate, 0.0, 0.0
        for begins, rate, _ in [*copies, (HORIZON, 0.0, 0.0)]:
            seconds = min(begins, HORIZON) - at
            if seconds > 0.0:
                end = length + growth * seconds
                if end >= 0.0:
                    area += (length + end) / 2 * seconds
                else:
                    area += length * length / (-2 * growth)
                length = max(0.0, end)
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
        demands: Mapping[str, ModelDemand],
        usage: Usage,
        now: float,
    ) -> None:
        self.now = now
        self.actions: list[LoadAction] = []
        self.acted: dict[_Key, LoadVerb] = {}
        self.loads: list[Instance] = []  # that were decided on
        self.demands = demands
        self._index, self._rules, self._rates, self._read_usage = index, rules, rates, usage
        self._usages: dict[_Key, InstanceUsage] = {}
        self._losses: dict[_Key, float] = {}
        self._rate_of: dict[str, float] = {}
        self._dismissed: dict[str, list[Instance]] = {}  # by model

    def act(
        self, verb: LoadVerb, instance: Instance, reason: str, cause: UnloadCause = "memory"
    ) -> None:
        """Decide on an action."""
        self.actions.append(LoadAction(verb, instance.node, instance.model, reason, cause))
        self.acted[instance.key] = verb
        if verb == "load":
            self.loads.append(instance)
        elif verb != "keep":
            self._dismissed.setdefault(instance.model, []).append(instance)

    def dismiss(self, instance: Instance, reason: str, cause: UnloadCause = "memory") -> None:
        """Unload it, once it runs nothing any more."""
        verb: LoadVerb = "retire" if self.usage(instance).leases else "unload"
        self.act(verb, instance, reason, cause)

    def loads_of(self, host: ModelHost) -> int:
        """Loads that run on a host, with those decided on."""
        return host.loading + sum(one.node in host.nodes for one in self.loads)

    def is_leaving(self, instance: Instance) -> bool:
        """Whether it is about to be unloaded."""
        verb = self.acted.get(instance.key)
        return verb in {"retire", "unload"} or (verb is None and instance.phase in LEAVING_PHASES)

    def is_loadable(self, instance: Instance) -> bool:
        """Whether it is unloaded and may be tried."""
        return (
            instance.phase not in HELD_PHASES
            and instance.retry_at <= self.now
            and instance.key not in self.acted
            and self._index.nodes[instance.node].usable
        )

    def usage(self, instance: Instance) -> InstanceUsage:
        """What it does now."""
        found = self._usages.get(instance.key)
        if found is None:
            found = self._usages[instance.key] = self._read_usage(instance)
        return found

    def rate(self, model: str) -> float:
        """Requests a second that callers send for a model."""
        found = self._rate_of.get(model)
        if found is None:
            found = self._rate_of[model] = self._rates.rate(model, self.now)
        return found

    def capacity(self, model: str) -> Capacity:
        """What those instances of a model can do that are to stay."""
        found = self._index.capacities.get(model, Capacity())
        for one in self._dismissed.get(model, ()):
            found = found.plus(one, -1) if self._index.nodes[one.node].usable else found
        return found

    def is_needed(self, instance: Instance) -> bool:
        """Whether callers are expected who would find no other copy."""
        others = self.capacity(instance.model).plus(instance, -1).slots
        return others <= 0 and self.rate(instance.model) * HORIZON > NEEDED

    def queue(self, demand: ModelDemand) -> _Queue:
        """What waits for a model, and who serves it."""
        model, nodes = demand.model, demand.nodes
        found = self.capacity(model)
        if nodes is not None and len(nodes) < len(self._index.by_model.get(model, ())):
            found = Capacity()
            for one in self._index.held(model).values():
                stays = one.node in nodes and not self.is_leaving(one)
                found = found.plus(one, stays and self._index.nodes[one.node].usable)
        copies: list[_Copy] = []
        service = found.slots / found.rate if found.slots else 0.0
        if found.slots:
            copies.append((0.0, found.rate, service))
        for one in self._index.loading.get(model, {}).values():
            if nodes is None or one.node in nodes:
                begins = max(1.0, one.since + one.load_seconds - self.now)
                copies.append((begins, one.slots / one.request_seconds, one.request_seconds))
        waiting = demand.work / service if demand.work > 0.0 and service else demand.waiting
        return _Queue(waiting, self.rate(model), copies)

    def utilisation(self, host: ModelHost, but: Sequence[Instance]) -> float:
        """The share of a host's time that the others on it are expected to take."""
        busy = 0.0
        for one in host.held.values():
            if one.phase in SERVING_PHASES and one not in but:
                share = self.rate(one.model) / len(self._index.held(one.model))
                busy += share * one.request_seconds / max(1, one.slots)
        return min(busy, 1.0)

    def make_room(self, host: ModelHost, lack: _Lack) -> _Room | None:
        """What has to go, the least loss for its memory first; None: there can't be room."""
        if lack.hopeless:
            return None
        if lack.is_met():
            return _Room()
        leaving = [one for one in host.held.values() if self.is_leaving(one)]
        for one in leaving:
            lack.count(one, -1)
        victims = self._victims(host, lack)
        if victims is None:
            return None
        wait = max(self.usage(one).busy_seconds for one in (*leaving, *victims))
        loss = sum(map(self._loss, victims))
        return _Room(victims, wait, loss, must_wait=True)

    def may_fit(self, instance: Instance) -> bool:
        """Whether it could have room beside what always stays."""
        node = self._index.nodes[instance.node]
        host = self._index.hosts[node.host]
        lack = _Lack(instance, node, host, ())
        for one in host.held.values():
            least = self._rules.models.get(one.model, _NO_RULES).min
            if not (one.pinned or self.capacity(one.model).copies <= least):
                lack.count(one, -1)
        return lack.is_met()

    def _victims(self, host: ModelHost, lack: _Lack) -> list[Instance] | None:
        candidates = [
            one
            for one in host.held.values()
            if one.phase is LoadPhase.READY
            and not (one.pinned or self.is_leaving(one))
            and self._loss(one) < math.inf
        ]
        candidates.sort(key=lambda one: self._loss(one) / (one.memory or 1))
        victims: list[Instance] = []
        for one in candidates:
            if lack.is_met():
                break
            if lack.is_less_without(one):
                victims.append(one)
                lack.count(one, -1)
        if not lack.is_met():
            return None
        # What was taken first may be needless beside what came later.
        for one in sorted(victims, key=self._loss, reverse=True):
            lack.count(one, 1)
            if lack.is_met():
                victims.remove(one)
            else:
                lack.count(one, -1)
        return victims

    def _loss(self, instance: Instance) -> float:
        """Seconds that requests are expected to wait for it if it goes; infinity: it must not."""
        found = self._losses.get(instance.key)
        if found is None:
            found = self._losses[instance.key] = self._compute_loss(instance)
        return found

    def _compute_loss(self, instance: Instance) -> float:
        model = instance.model
        left = self.capacity(model)
        if self._index.nodes[instance.node].usable:
            left = left.plus(instance, -1)
        least = self._rules.models.get(model, _NO_RULES).min
        stays = min(self._rules.hysteresis, HYSTERESIS_LOADS * instance.load_seconds)
        if self.now - instance.since < stays or left.copies < least:
            return math.inf
        waiting = self.demands[model].waiting if model in self.demands else 0
        rate = self.rate(model)
        reload = instance.load_seconds + UNLOAD_SECONDS
        missed = MISS_FACTOR * (1.0 - math.exp(-rate * HORIZON))
        gone = (missed * (1.0 + rate * reload / 2) + waiting) * reload
        if not left.slots or rate >= FULLEST * left.rate:
            return gone
        # Its callers have the other copies, which are fuller then.
        load, seconds = rate / left.rate, instance.request_seconds
        slower = rate * HORIZON * seconds * load**2 / (1.0 - load) / 2
        return min(gone, slower + waiting * seconds)
