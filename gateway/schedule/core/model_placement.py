"""Which models to load and unload on which nodes: a pure policy, for the gateway and the simulator.

Everything is priced in seconds of waiting. For a model that requests wait for, each node is worth
the time until it could serve them there: until the leases of what must go have ended, its unload,
and the load; then the queue is served as fast as that node does. What must go costs a load for each
caller who is expected to miss it before long, so a model that nobody asks for goes first. A model
that is loaded nowhere is loaded once its requests have waited as many seconds as that loss, so a
queue is served together before its model makes room for another; or in time for the starvation
bound. Those who had waited beyond it when a model was loaded are served before it goes for others
who have. One more copy is loaded where it shortens the queue by more than it costs, in free memory
also where it spares random arrivals their waits.

A look compares a bounded number of nodes, however large the fleet is; models that are not reached
are looked at first in the next one. Times are monotonic seconds and memory is bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice
from typing import Literal, NamedTuple

from gateway.config.scheduling import ModelPlacementSettings, ModelRule
from gateway.nodes.router import LoadPhase, UnloadCause

ORDERED = "an operator has ordered it"
ASSUMED_LOAD = 30.0  # seconds of a load that was never seen
UNLOAD_SECONDS = 1.0
# A model stays so many times as long as its load took: up to `hysteresis`, or while requests wait
# beyond their bound that waited when it was loaded, so that loads take a small share of the time of
# an overloaded host.
STAY_LOADS = 20.0
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
FULLEST = 0.9  # share of its copies' time up to which the waits of random arrivals are computed
LEAST_SPEED = 0.1  # share of a host's speed that a model gets beside others, at the least
ROOM_SECONDS = 1.0  # between two looks at whether a model can have room at all
MOST_LOADS_OF_HOST = 2  # at one time: they share its disk
# Nodes compared for one model in a look, and for all of them about.
MOST_COMPARED, MOST_EVALUATIONS = 8, 16
# Time constants of the two means of a model's rate: one follows bursts, one remembers.
FAST_SECONDS, SLOW_SECONDS = 40.0, 900.0
# Requests that a model's silence may lack: random arrivals lack five once in 150 times.
MOST_MISSED = 5.0

SERVING_PHASES = LoadPhase.LOADING, LoadPhase.READY
LEAVING_PHASES = LoadPhase.RETIRING, LoadPhase.UNLOADING
HELD_PHASES = SERVING_PHASES + LEAVING_PHASES  # those that take memory
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

    def __hash__(self) -> int:
        return hash((self.node, self.model))


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
    patience: float | None = None  # the bound on their wait; None: that of the settings
    batch: bool = False  # only batch rows wait
    work: float = 0.0  # slot-seconds that they take; 0: those of usual requests
    nodes: frozenset[str] | None = None  # the only nodes that may serve them; None: all


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
_NO_RULE = ModelRule()


class ModelPlacementPolicy:
    """Decides at each look which models go where.

    Tell `fleet` of each change of a router or a model, and `rates` of each caller's request (batch
    rows are not told).
    """

    def __init__(
        self,
        settings: ModelPlacementSettings | None = None,
        rules: Mapping[str, ModelRule] | None = None,
    ) -> None:
        self.settings = settings or ModelPlacementSettings()
        self.rules = rules or {}  # by model
        self.fleet = FleetIndex()
        self.rates = RequestRates()
        self.evaluations = 0  # nodes that were compared so far
        self.plans: dict[_Key, _Plan] = {}  # loads that wait for room: look again before long
        self._cursors: dict[str, int] = {}  # by model: the node that is compared next
        self._served_at: dict[str, float] = {}
        """By model that requests wait for: when it was last loaded somewhere."""
        self.left: list[str] = []  # models that the last look did not reach: look again at once
        self._room_looked_at: dict[str, float] = {}
        self.without_room: dict[str, list[Instance]] = {}
        """By model that no node could load when requests last waited for it: where it never can."""

    def configure(self, settings: ModelPlacementSettings, rules: Mapping[str, ModelRule]) -> None:
        """Go by these from now on; `rules` by the names of models here."""
        self.settings, self.rules = settings, rules

    # Deciding.

    def decide(self, demands: Iterable[ModelDemand], usage: Usage, now: float) -> list[LoadAction]:
        """What to do now. An instance with leases is never unloaded."""
        look = _Look(self, {one.model: one for one in demands if one.waiting}, usage, now)
        most = self.evaluations + MOST_EVALUATIONS
        self._follow_plans(look)
        self._serve_demands(look, most)
        self._keep_wanted(look, most)
        for instance in self.fleet.retiring.values():
            if instance.key not in look.acted and not look.usage(instance).leases:
                look.act("unload", instance, "it runs nothing any more")
        return look.actions

    def order_load(
        self, node: str, model: str, usage: Usage, now: float
    ) -> list[LoadAction] | None:
        """What to do so that an operator gets a model loaded there; None: it can't have room."""
        look, instance = _Look(self, {}, usage, now), self.fleet.instance((node, model))
        if instance is None or instance.key in self.plans:
            return []
        going = chain.from_iterable(plan.victims for plan in self.plans.values())
        if instance.phase is LoadPhase.RETIRING and instance.key not in going:
            look.act("keep", instance, ORDERED)
        elif look.is_loadable(instance):
            option = self._price(look, instance, _NO_QUEUE)
            if option is None:
                return None
            self._carry_out(look, option, ORDERED, standing=True)
        return look.actions

    def _follow_plans(self, look: _Look) -> None:
        """Load what has room now; give up what nobody waits for any more."""
        for key, plan in list(self.plans.items()):
            instance = self.fleet.instance(key)
            wanted = plan.standing or key[1] in look.demands
            if instance is None or not wanted or not look.is_loadable(instance):
                self._give_up(look, key)
                continue
            host = self.fleet.host_of(instance)
            if self._fits(instance, [*host.held.values(), *self._coming(look, instance)]):
                if look.loads_of(host) < MOST_LOADS_OF_HOST:
                    look.act("load", instance, plan.reason)
                    del self.plans[key]
            elif not any(map(look.is_leaving, host.held.values())):
                # Those who were to go have stayed: it is looked at anew.
                self._give_up(look, key)

    def _give_up(self, look: _Look, key: _Key) -> None:
        for victim in self.plans.pop(key).victims:
            instance = self.fleet.instance(victim)
            if instance is not None and instance.phase is LoadPhase.RETIRING:
                look.act("keep", instance, "its memory is not needed any more")

    def _serve_demands(self, look: _Look, most: int) -> None:
        """Find nodes for what waits, first for those that the last look did not reach."""
        self._served_at = {
            model: look.now if look.capacity(model).slots else self._served_at.get(model, -math.inf)
            for model in look.demands
        }
        left = {model: place for place, model in enumerate(self.left)}

        def order(demand: ModelDemand) -> tuple[float, ...]:
            share = self._without(demand, look) / max(1.0, self.patience(demand))
            late = share if share > NEAR_BOUND else 0.0
            return left.get(demand.model, len(left)), demand.batch, -late, -demand.waited

        ordered = sorted(look.demands.values(), key=order)
        self.left = []
        for place, demand in enumerate(ordered):
            if self.evaluations >= most:
                self.left = [one.model for one in ordered[place:]]
                break
            self._serve(look, demand)

    def _serve(self, look: _Look, demand: ModelDemand) -> None:
        model = demand.model
        if any(one.model == model for one in look.loads):
            return
        queue = look.queue(demand)
        planned = next((key for key in self.plans if key[1] == model), None)
        if planned is None:
            most = self.rule(model).replicas.max
            if most is not None and look.capacity(model).copies >= most:
                return
        best = self._best(look, model, queue, demand.nodes)
        if best is None:
            if not queue.copies and planned is None:
                self._find_hopeless(look, demand)
            return
        self.without_room.pop(model, None)
        if planned is not None:
            plan = self.plans[planned]
            if (
                best.cost * CHANGE_MARGIN >= plan.cost
                or best.ready_in >= plan.ready_at - look.now
                or best.instance.node == planned[0]
            ):
                return
        if self._is_worth(look, demand, queue, best):
            if planned is not None:
                self._give_up(look, planned)
            more = "one more copy" if queue.copies else "it"
            self._carry_out(look, best, f"{demand.waiting} requests wait for {more}")

    def rule(self, model: str) -> ModelRule:
        """What an operator wants of a model."""
        return self.rules.get(model, _NO_RULE)

    def _find_hopeless(self, look: _Look, demand: ModelDemand) -> None:
        """Find out, now and then, if a model can have room nowhere, whatever goes that may go."""
        model = demand.model
        if look.now - self._room_looked_at.get(model, -math.inf) < ROOM_SECONDS:
            return
        self._room_looked_at[model] = look.now
        instances = self.fleet.by_model.get(model, {})
        names = instances if demand.nodes is None else demand.nodes & instances.keys()
        found = [instances[name] for name in names]
        hosts = map(self.fleet.host_of, found)
        always = ([*filter(look.always_stays, host.held.values())] for host in hosts)
        self.without_room[model] = [] if any(map(self._fits, found, always)) else found

    def _is_worth(self, look: _Look, demand: ModelDemand, queue: _Queue, option: _Option) -> bool:
        loss, load_seconds = option.loss, option.instance.load_seconds
        reloads = sum(one.load_seconds for one in option.victims)
        if demand.batch and loss > UNUSED_SHARE * reloads:
            return False
        if queue.copies:
            saved = queue.cost() - (option.cost - loss)
            if look.capacity(demand.model).slots and not option.victims:
                # Memory that is free is best used by those that are asked for most.
                saved += queue.queueing() - queue.queueing(option.copy)
            return saved > COPY_MARGIN * loss + LOAD_SHARE * load_seconds
        without = self._without(demand, look)
        if without + option.ready_in + LOOK_MARGIN >= self.patience(demand):
            return True
        return demand.waited + demand.waiting * load_seconds >= loss

    def patience(self, demand: ModelDemand) -> float:
        """The bound on its wait, in seconds."""
        return self.settings.starvation if demand.patience is None else demand.patience

    def _without(self, demand: ModelDemand, look: _Look) -> float:
        """Seconds that the oldest has waited while the model was loaded nowhere."""
        return min(demand.oldest_wait, look.now - self._served_at.get(demand.model, -math.inf))

    def _carry_out(
        self, look: _Look, option: _Option | None, reason: str, *, standing: bool = False
    ) -> None:
        """Load it, or make room for it first, if there is one."""
        if option is None:
            return
        instance = option.instance
        for victim in option.victims:
            look.dismiss(victim, f"{instance.model} needs its memory: {reason}")
        crowded = look.loads_of(self.fleet.host_of(instance)) >= MOST_LOADS_OF_HOST
        if option.must_wait or crowded:
            victims = tuple(victim.key for victim in option.victims)
            ready_at = look.now + option.ready_in
            self.plans[instance.key] = _Plan(victims, reason, option.cost, ready_at, standing)
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
        instances = self.fleet.by_model.get(model, {})
        names: Iterable[str] = instances
        if len(instances) > MOST_COMPARED:
            roomy = self.fleet.roomiest(next(iter(instances.values())).memory)
            first = self._cursors.get(model, 0) % len(instances)
            self._cursors[model] = first + MOST_COMPARED
            ring = islice(chain(instances, instances), first, first + MOST_COMPARED)
            names = dict.fromkeys(chain(islice(roomy, MOST_COMPARED // 2), ring))
        possible = (
            instances[name]
            for name in names
            if name in instances and (nodes is None or name in nodes)
        )
        loadable = (one for one in possible if look.is_loadable(one) and one.key not in self.plans)
        return islice(loadable, MOST_COMPARED)

    def _price(self, look: _Look, instance: Instance, queue: _Queue) -> _Option | None:
        """What a load there would bring and cost; None: it can't be loaded there.

        Of what has to go, the least loss for its memory goes first.
        """
        self.evaluations += 1
        host, coming = self.fleet.host_of(instance), self._coming(look, instance)
        if not self._fits(instance, coming):
            return None
        held, victims, wait = host.held.values(), list[Instance](), 0.0
        must_wait = not self._fits(instance, [*coming, *held])
        if must_wait:
            leaving = list(filter(look.is_leaving, held))
            others = coming + [one for one in held if one not in leaving]
            found = [one for one in held if one not in leaving and look.loss(one) < math.inf]
            found.sort(key=lambda one: look.loss(one) / (one.memory or 1))
            while not self._fits(instance, others):
                if not found:
                    return None
                victims.append(found.pop(0))
                others = [one for one in others if one is not victims[-1]]
            # What was taken first may be needless beside what came later.
            for one in sorted(victims[:-1], key=look.loss, reverse=True):
                if self._fits(instance, [*others, one]):
                    victims.remove(one)
                    others.append(one)
            wait = max(look.usage(one).busy_seconds for one in (*leaving, *victims))
        loss = sum(map(look.loss, victims))
        if look.now < instance.retry_at + instance.failures * loss:
            # One that may be broken takes no room from others before as long as they would miss.
            return None
        ready_in = wait + instance.load_seconds + UNLOAD_SECONDS * must_wait
        busy = sum(map(look.share, held)) - sum(map(look.share, victims))
        speed = max(LEAST_SPEED, 1.0 - busy)
        service = instance.request_seconds / speed
        copy = ready_in, instance.slots / service, service
        return _Option(instance, victims, loss, must_wait, copy, queue.cost(copy) + loss)

    def _coming(self, look: _Look, instance: Instance) -> list[Instance]:
        """The other loads on its host that are planned and decided on."""
        nodes = self.fleet.host_of(instance).nodes
        keys = [key for key in self.plans if key[0] in nodes and key != instance.key]
        found = [one for one in map(self.fleet.instance, keys) if one is not None]
        return [one for one in look.loads if one.node in nodes] + found

    def _fits(self, instance: Instance, others: Sequence[Instance]) -> bool:
        """Whether it would have room beside these on its host; unknown memory is alone there."""
        node = self.fleet.nodes[instance.node]
        limit = node.count_limit
        if limit < math.inf and sum([one.node == node.name for one in others]) >= limit:
            return False
        memory, needed = self.fleet.hosts[node.host].memory, 0
        if memory is None or not others:
            return memory is None or (instance.memory or 0) <= memory
        for one in (instance, *others):
            if one.memory is None:
                return False
            needed += one.memory
        return needed <= memory

    # What operators want, whoever waits.

    def _keep_wanted(self, look: _Look, most: int) -> None:
        """Load pinned models and the least copies; unload idle ones, and those above the most."""
        for instance in list(self.fleet.pinned_unloaded.values()):
            if self.evaluations >= most:
                return
            if look.is_loadable(instance) and instance.key not in self.plans:
                option = self._price(look, instance, _NO_QUEUE)
                self._carry_out(look, option, "it is pinned", standing=True)
        for model, rule in self.rules.items():
            serving, least = self.fleet.serving(model), rule.replicas.min
            planned = any(key[1] == model for key in chain(self.plans, look.acted))
            if len(serving) < least and not planned and self.evaluations < most:
                best, why = self._best(look, model, _NO_QUEUE), f"fewer than {least} are loaded"
                self._carry_out(look, best, why, standing=True)
            if rule.replicas.max is not None or rule.idle_unload is not None:
                self._unload_needless(look, rule, serving)

    def _unload_needless(self, look: _Look, rule: ModelRule, serving: list[Instance]) -> None:
        """Unload copies above the most, and those that nobody has used for long."""
        count, most = len(serving), rule.replicas.max
        ready = [
            one
            for one in serving
            if one.phase is LoadPhase.READY and not (one.pinned or one.key in look.acted)
        ]
        ready.sort(key=lambda one: (look.usage(one).leases, look.usage(one).last_used))
        for one in ready:
            usage = look.usage(one)
            idle = 0.0 if usage.leases else look.now - max(usage.last_used, one.since)
            if most is not None and count > most:
                look.dismiss(one, f"more than {most} copies are loaded", "replicas")
            elif rule.idle_unload is None or idle < rule.idle_unload or count <= rule.replicas.min:
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
    nodes: dict[str, RouterNode] = field(default_factory=dict)
    held: dict[_Key, Instance] = field(default_factory=dict)

    @property
    def memory(self) -> int | None:
        """Bytes that it has for models, by the node that was told last; None: unknown."""
        return next(reversed(self.nodes.values())).memory

    @property
    def free(self) -> float:
        """Bytes that are free; none beside an instance of unknown memory."""
        memory, sizes = self.memory, [one.memory for one in self.held.values()]
        if memory is None:
            return math.inf
        return 0.0 if None in sizes else memory - sum(filter(None, sizes))


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
        self.capacities = defaultdict[str, Capacity](Capacity)  # by model: on nodes that work
        # Some of the instances; the first by model.
        self.held = defaultdict[str, dict[_Key, Instance]](dict)
        self.retiring: dict[_Key, Instance] = {}
        self.pinned_unloaded: dict[_Key, Instance] = {}
        self._by_free: list[tuple[float, str]] = []  # hosts, by free bytes

    def put_node(self, node: RouterNode) -> None:
        """There is this router, or it has changed."""
        instances = self._instances_of(node.name)
        self.remove_node(node.name)
        self.nodes[node.name] = node
        host = self.hosts.setdefault(node.host, ModelHost(node.host))
        if host.nodes:
            self._unsort(host)
        host.nodes[node.name] = node
        insort(self._by_free, (host.free, host.name))
        for instance in instances:
            self.put(instance)

    def remove_node(self, name: str) -> None:
        """There is no such router any more; its instances go with it."""
        for instance in self._instances_of(name):
            self.remove(*instance.key)
        node = self.nodes.pop(name, None)
        if node is not None:
            host = self.hosts[node.host]
            self._unsort(host)
            del host.nodes[name]
            if host.nodes:
                insort(self._by_free, (host.free, host.name))
            else:
                del self.hosts[node.host]

    def put(self, instance: Instance) -> None:
        """A router, which is known, can serve this model; or the instance has changed."""
        instances = self.by_model.setdefault(instance.model, {})
        if (before := instances.get(instance.node)) is not None:
            self._count(before, -1)
        instances[instance.node] = instance
        self._count(instance, 1)

    def remove(self, node: str, model: str) -> None:
        """The router can't serve that model any more."""
        instance = self.by_model.get(model, {}).pop(node, None)
        if instance is not None:
            self._count(instance, -1)

    def _count(self, one: Instance, sign: int) -> None:
        """An instance is there from now on, or is not any more."""
        if self.nodes[one.node].usable:
            self.capacities[one.model] = self.capacities[one.model].plus(one, sign)
        if one.phase in HELD_PHASES:
            host = self.host_of(one)
            self._unsort(host)
            _keep(host.held, one, sign)
            insort(self._by_free, (host.free, host.name))
            _keep(self.held[one.model], one, sign)
        elif one.pinned:
            _keep(self.pinned_unloaded, one, sign)
        if one.phase is LoadPhase.RETIRING:
            _keep(self.retiring, one, sign)

    def instance(self, key: _Key) -> Instance | None:
        """One instance; None: there is none."""
        return self.by_model.get(key[1], {}).get(key[0])

    def host_of(self, instance: Instance) -> ModelHost:
        """The host of its node."""
        return self.hosts[self.nodes[instance.node].host]

    def serving(self, model: str) -> list[Instance]:
        """The instances of a model that serve, or soon will."""
        return [one for one in self.held[model].values() if one.phase in SERVING_PHASES]

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


def _keep(found: dict[_Key, Instance], one: Instance, sign: int) -> None:
    if sign > 0:
        found[one.key] = one
    else:
        del found[one.key]


class _Plan(NamedTuple):
    victims: tuple[_Key, ...]
    reason: str
    cost: float
    ready_at: float
    standing: bool  # it is wanted though nobody waits


class _Option(NamedTuple):
    instance: Instance
    victims: Sequence[Instance]  # that have to go
    loss: float  # what that costs
    must_wait: bool  # something is still to go
    copy: _Copy
    cost: float

    @property
    def ready_in(self) -> float:
        """Seconds until it could serve."""
        return self.copy[0]


def queueing_seconds(rate: float, slots: float, service: float) -> float:
    """The mean wait of random arrivals for one of so many slots (Sakasegawa, 1977).

    At most that where `FULLEST` of their time is used: more is a queue that only grows.
    """
    load = min(FULLEST, rate * service / slots)
    power = math.sqrt(2.0 * (slots + 1.0)) - 1.0
    return service * math.pow(load, power) / (slots * (1.0 - load))


class _Queue(NamedTuple):
    """A model's queue, as a fluid: how long its requests take within the horizon."""

    waiting: float
    rate: float
    copies: list[_Copy]

    def cost(self, more: _Copy | None = None) -> float:
        """Seconds that its requests take in all, with its copies or one more."""
        copies = sorted([*self.copies, more] if more else self.copies)
        total = self.waiting + self.rate * HORIZON
        if not total:
            return copies[0][0] if copies else 0.0
        served = sum([rate for _, rate, _ in copies])
        slots = sum([rate * seconds for _, rate, seconds in copies])
        return self._area(copies) + total * slots / served

    def queueing(self, more: _Copy | None = None) -> float:
        """Seconds that random arrivals are expected to wait within the horizon beside all that."""
        copies = [*self.copies, more] if more else self.copies
        slots = sum([rate * seconds for _, rate, seconds in copies])
        served = sum([rate for _, rate, _ in copies])
        return self.rate * HORIZON * queueing_seconds(self.rate, slots, slots / served)

    def _area(self, copies: list[_Copy]) -> float:
        """The length of the queue over time."""
        length, growth, area, at = self.waiting, self.rate, 0.0, 0.0
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
        policy: ModelPlacementPolicy,
        demands: Mapping[str, ModelDemand],
        usage: Usage,
        now: float,
    ) -> None:
        self.now = now
        self.actions: list[LoadAction] = []
        self.acted: dict[_Key, LoadVerb] = {}
        self.loads: list[Instance] = []  # that were decided on
        self.demands = demands
        self.usage = cache(usage)
        self.rate = cache(lambda model: policy.rates.rate(model, now))
        self.loss = cache(self._loss)
        self._policy, self._fleet = policy, policy.fleet
        self._dismissed: dict[str, list[Instance]] = {}  # by model

    def act(
        self, verb: LoadVerb, instance: Instance, reason: str, cause: UnloadCause = "memory"
    ) -> None:
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
        running = sum(one.phase is LoadPhase.LOADING for one in host.held.values())
        return running + sum(one.node in host.nodes for one in self.loads)

    def is_leaving(self, instance: Instance) -> bool:
        verb = self.acted.get(instance.key) if self.acted else None
        return verb in {"retire", "unload"} or (verb is None and instance.phase in LEAVING_PHASES)

    def is_loadable(self, instance: Instance) -> bool:
        """Whether it is unloaded and may be tried."""
        return (
            instance.phase not in HELD_PHASES
            and instance.retry_at <= self.now
            and instance.key not in self.acted
            and self._fleet.nodes[instance.node].usable
        )

    def always_stays(self, instance: Instance) -> bool:
        """Whether it never makes room: it is pinned, or one of the least copies."""
        least = self._policy.rule(instance.model).replicas.min
        return instance.pinned or self.capacity(instance.model).copies <= least

    def capacity(self, model: str, but: Instance | None = None) -> Capacity:
        """What those instances of a model can do that are to stay, but for this one."""
        found = self._fleet.capacities[model]
        for one in (*self._dismissed.get(model, ()), *([but] if but else ())):
            found = found.plus(one, -1) if self._fleet.nodes[one.node].usable else found
        return found

    def queue(self, demand: ModelDemand) -> _Queue:
        """What waits for a model, and who serves it."""
        model, nodes = demand.model, demand.nodes
        found = self.capacity(model)
        if nodes is not None and len(nodes) < len(self._fleet.by_model.get(model, ())):
            found = Capacity()
            for one in self._fleet.held[model].values():
                stays = one.node in nodes and not self.is_leaving(one)
                found = found.plus(one, stays and self._fleet.nodes[one.node].usable)
        copies: list[_Copy] = []
        service = found.slots / found.rate if found.slots else 0.0
        if found.slots:
            copies.append((0.0, found.rate, service))
        for one in self._fleet.held[model].values():
            if one.phase is LoadPhase.LOADING and (nodes is None or one.node in nodes):
                begins = max(1.0, one.since + one.load_seconds - self.now)
                copies.append((begins, one.slots / one.request_seconds, one.request_seconds))
        waiting = demand.work / service if demand.work > 0.0 and service else demand.waiting
        return _Queue(waiting, self.rate(model), copies)

    def share(self, instance: Instance) -> float:
        """The share of its host's time that it is expected to take."""
        if instance.phase not in SERVING_PHASES:
            return 0.0
        rate = self.rate(instance.model) / len(self._fleet.held[instance.model])
        return rate * instance.request_seconds / max(1, instance.slots)

    def _loss(self, instance: Instance) -> float:
        """Seconds that requests are expected to wait for it if it goes; infinity: it must not."""
        if instance.phase is not LoadPhase.READY or instance.pinned:
            return math.inf
        model, settings = instance.model, self._policy.settings
        left, least = self.capacity(model, instance), self._policy.rule(model).replicas.min
        rate, demand = self.rate(model), self.demands.get(model)
        waiting = demand.waiting if demand is not None else 0
        loaded_for = self.now - instance.since
        stays = STAY_LOADS * instance.load_seconds
        if (
            demand is None
            or demand.batch
            or not instance.slots
            # Those who wait have come since: who waited when it was loaded has been served.
            or waiting <= rate * loaded_for
            # Nobody has waited too long for it: it goes for those who have for another.
            or demand.oldest_wait < self._policy.patience(demand)
        ):
            stays = min(stays, settings.hysteresis)
        if loaded_for < stays or left.copies < least:
            return math.inf
        reload = instance.load_seconds + UNLOAD_SECONDS
        missed = MISS_FACTOR * (1.0 - math.exp(-rate * HORIZON))
        gone = (missed * (1.0 + rate * reload / 2) + waiting) * reload
        if not left.slots or rate >= FULLEST * left.rate:
            return gone
        # Its callers have the other copies, which are fuller then.
        load, seconds = rate / left.rate, instance.request_seconds
        slower = rate * HORIZON * seconds * load**2 / (1.0 - load) / 2
        return min(gone, slower + waiting * seconds)
