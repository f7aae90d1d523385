"""The model placer: has routers load and unload models, as the policy decides for what waits.

It tells the policy what there is: routers, their models, what waits for which, and how often each
is asked for. A router is told by `POST /models/load` and `/models/unload`; that a load has ended is
seen in its list. A router that takes no commands loads a model for the first request that comes: it
is let through.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from gateway.callers.callers import is_loopback
from gateway.config.inventory import host_memory, url_host
from gateway.config.scheduling import DEFAULT_PATIENCE, ModelRule
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.events import EventBus
from gateway.nodes.fleet import Fleet
from gateway.nodes.health import LARGEST_REFUSAL, ProbeResponse, fetch, probe_slots
from gateway.nodes.lifecycle import LEAST_WAKE, ProbeAnswer
from gateway.nodes.node import Node, NodeState
from gateway.nodes.router import LoadPhase, ModelLoad
from gateway.nodes.saved_prompts import SavedPrompts
from gateway.nodes.speed import Speed
from gateway.schedule.admission import Waiter
from gateway.schedule.candidates import nodes_of
from gateway.schedule.core.model_placement import (
    HELD_PHASES,
    ORDERED,
    SERVING_PHASES,
    Instance,
    InstanceUsage,
    LoadAction,
    ModelDemand,
    ModelPlacementPolicy,
    RouterNode,
)
from gateway.schedule.core.requests import QueuedRequest
from gateway.schedule.scheduler import Scheduler
from gateway.terms import Priority

log = logging.getLogger(__name__)
Pinner = Literal["settings", "preload", "operator"]  # who says that a model is always loaded
ReadMemory = Callable[[Path, int, int], int]
"""The bytes that a model takes, by its file, slots and tokens of a slot. It raises OSError or
ValueError for a file that can't be read."""
TICK = 0.5  # seconds between two looks, if nothing has changed
UNHURRIED_TICK = 5.0  # seconds between two looks at a fleet without routers
STEP_SECONDS = 0.005  # seconds after which other work runs while the policy is told of the fleet
UNKEPT_SECONDS = 60.0  # for which a pin must not have been kept to be told
LEAST_PAUSE = 0.02  # seconds between two looks, however much changes
MOST_FILES = 10_000  # files of models that are read for what they take
PROMPTS_SAVED_FACTOR = 0.8  # of the seconds of a load, where prompts are restored after it
_UNKNOWN = None, None  # bytes and seconds of a load
_HUNG = frozenset({NodeState.MUTE, NodeState.DOWN})
USUAL_SECONDS = 10.0  # of a request for a model that none has waited for


@dataclass(slots=True, eq=False)
class ModelPlacer:
    """Places the models of a fleet's routers. `run` owns every task."""

    fleet: Fleet
    scheduler: Scheduler
    settings: Settings
    bus: EventBus
    clock: Callable[[], float]
    file_memory: ReadMemory | None = None
    """Reads what a model takes from its file, where that is on this machine; in a thread."""
    policy: ModelPlacementPolicy = field(default_factory=ModelPlacementPolicy)
    saved_prompts: SavedPrompts = field(init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: dict[Node, asyncio.Task[None]] = field(default_factory=dict)
    """By instance: the command for it that is under way."""
    _routers: dict[str, _ShownRouter] = field(default_factory=dict)  # as the policy knows them
    _changed: dict[Node, None] = field(default_factory=dict)
    """Routers, and models of routers, of which the policy is to be told anew."""
    _all_changed: bool = True
    _left_alone: set[Node] = field(default_factory=set)
    """Routers that get no commands for now, since others command them too."""
    _without_room: set[Node] = field(default_factory=set)
    """Models of routers that can't have room beside what always stays there."""
    _host_memory: dict[str, int] = field(default_factory=dict)
    _learnt: dict[str, tuple[int | None, float | None]] = field(default_factory=dict)
    """By model: its bytes, and the seconds of its load, on the node that loaded it last."""
    _request_seconds: dict[str, float] = field(default_factory=dict)
    """By model: a usual request's, as those that waited last were expected to take."""
    _file_memory: dict[tuple[str, int, int], int | None] = field(default_factory=dict)
    """By file, slots and context; None: it is being read, or can't be."""
    _unread: list[tuple[str, int, int]] = field(default_factory=list)
    _reading: asyncio.Task[None] | None = None
    _handed_over: bool = False
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()
        self.configure(self.settings)
        cache, sync = self.scheduler.prompt_cache, self.scheduler.fleet_sync
        self.saved_prompts = SavedPrompts(cache, sync.row_index, self.bus.publish)
        self.fleet.watch_models(self._models_differ, self._loaded)
        self.scheduler.watch_models(self._asked_for)

    def configure(self, settings: Settings) -> None:
        """Go by these settings from now on."""
        self.settings = settings
        self._models_differ(None)

    def _show_rules(self) -> None:
        """Tell the policy of the settings; an alias of a model may have its rule."""
        # The successor sees to these after a hand-over.
        rules = {} if self._handed_over else self.settings.models
        by_key = {self._key_of(name) or name: rule for name, rule in rules.items()}
        self.policy.configure(self.settings.model_placement, by_key)

    async def run(self) -> None:
        """Run until cancelled. Commands that are under way end at their routers."""
        try:
            while True:
                self._wake.clear()
                placing = bool(self.fleet.routers)
                if placing:
                    await self._show_changes()
                    self._look()
                    await asyncio.sleep(LEAST_PAUSE)
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK if placing else UNHURRIED_TICK):
                        await self._wake.wait()
        finally:
            tasks = [*self._tasks.values(), *([self._reading] if self._reading else ())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def hand_over(self) -> None:
        """Command nothing but what requests that wait here need: the successor has the others."""
        self._handed_over = True
        self._show_rules()

    def _asked_for(self, model: str, *, waits: bool) -> None:
        """A caller's request for this public model came; or a request `waits` from now on."""
        if waits:
            self._wake.set()
        elif (key := self._key_of(model)) is not None:
            self.policy.rates.note(key, self.clock())

    def _models_differ(self, node: Node | None) -> None:
        """A router or one of its models has changed, or ended a request; None: any of them."""
        if node is None:
            self._all_changed = True
        else:
            self._changed[node] = None
        self._wake.set()

    def _look(self) -> None:
        self.scheduler.match()  # What is loaded by now serves first.
        now = self.clock()
        demands = self._demands(now)
        if self._handed_over and not demands:
            return
        for action in self.policy.decide(demands, self._usage, now):
            self._carry_out(action, now)
        self._tell_room()
        if self.policy.left:
            self._wake.set()

    def _tell_room(self) -> None:
        """Tell which models can't have room: who waits for one is told after a while."""
        found = {
            router.models[one.model].node
            for one in chain.from_iterable(self.policy.without_room.values())
            if (router := self._routers.get(one.node)) and one.model in router.models
        }
        for node in found ^ self._without_room:
            _, load = node.routed
            load.tell_room(self._no_room(node) if node in found else "")
            self.fleet.load_changed(node)
        self._without_room = found

    # The policy's view.

    def _key_of(self, model: str) -> str | None:
        """The name by which the policy knows a public model; None: no router has it."""
        nodes = self.fleet.model_index.nodes_for(model)
        return next((model_key(node) for node in nodes if node.load is not None), None)

    async def _show_changes(self) -> None:
        """Tell the policy of what has changed in the fleet; of all of it in steps."""
        if self._all_changed:
            self._all_changed = False
            self._show_rules()
            self._changed.clear()
            routers = self.fleet.routers
            self._host_memory = host_memory(node.spec for node in routers)
            gone = self._routers.keys() - {node.name for node in routers}
            self._changed.update(dict.fromkeys(self._routers[name].node for name in gone))
            self._changed.update(dict.fromkeys(routers))
        self._changed.update(dict.fromkeys(self._left_alone))
        until = time.perf_counter() + STEP_SECONDS
        while self._changed:
            node = next(iter(self._changed))
            del self._changed[node]
            if node.router is None:
                self._show_router(node)
            else:
                self._show_model(node, node.router)
            if time.perf_counter() >= until:
                await asyncio.sleep(0)
                until = time.perf_counter() + STEP_SECONDS

    def _show_router(self, router: Node) -> None:
        known, index = self._routers.get(router.name), self.policy.fleet
        is_there = self.fleet.nodes.get(router.name) is router and router.is_router
        is_placed = is_there and self._is_placed(router)
        if known is not None and (known.node is not router or not is_placed):
            index.remove_node(router.name)
            del self._routers[router.name]
            known = None
        if not is_placed:
            return
        # What an `openai` endpoint takes of its host is not known, nor counted.
        is_endpoint = router.spec.kind == "openai"
        shown = RouterNode(
            router.name,
            f"/{router.name}" if is_endpoint else router.host,
            None if is_endpoint else self._host_memory.get(router.host),
            router.most_loaded,
            commanded=router.takes_commands,
            usable=router.state is NodeState.READY,
        )
        if known is None:
            known = self._routers[router.name] = _ShownRouter(router, {})
        if index.nodes.get(router.name) != shown:
            index.put_node(shown)
        shown_before = [model.node for model in known.models.values()]
        for node in dict.fromkeys((*shown_before, *router.instances.values())):
            self._show_model(node, router)

    def _show_model(self, node: Node, router: Node) -> None:
        known, model = self._routers.get(router.name), model_key(node)
        if known is None or known.node is not router:
            return
        if node.removed or router.instances.get(node.spec.instance or "") is not node:
            if known.models.pop(model, None) is not None:
                self.policy.fleet.remove(router.name, model)
            return
        _, load = node.routed
        before, own = known.models.get(model), (load.memory, node.sleep.measured)
        if before is None or before.own != own:
            # Other nodes that have not loaded it are taken to be like this one.
            memory, seconds = self._learnt.get(model, _UNKNOWN)
            learnt = own[0] or memory, own[1] or seconds
            if learnt != (memory, seconds):
                self._learnt[model] = learnt
                self._models_changed(model)
        known.models[model] = _ShownModel(node, own)
        instance = self._instance(router, node)
        if self.policy.fleet.instance(instance.key) != instance:
            self.policy.fleet.put(instance)
        history = node.probe_history
        if (
            load.phase is LoadPhase.READY
            # Its server has not answered for long, though its router does: that ends it, and the
            # next request loads it anew.
            and history.down
            and history.failures_in_a_row >= node.settings.health.fall
            and router.takes_commands
            and router.state is NodeState.READY
            and not (node.leases or self._handed_over)
        ):
            words = f"its server hangs: {node.reason}"
            action = LoadAction("unload", router.name, model, words, "died")
            self._carry_out(action, self.clock())

    def _models_changed(self, model: str) -> None:
        others = self.fleet.model_index.nodes_for(model)
        self._changed.update(dict.fromkeys(one for one in others if one.load is not None))

    def _is_placed(self, router: Node) -> bool:
        """Whether the router's models are placed; else they are used as they are."""
        if not router.properties.is_router:
            return True  # of kind `openai`
        self._left_alone.discard(router)
        if router.router_record.stopped(self.clock()):
            self._left_alone.add(router)
            return False
        return router.takes_commands and self.settings.model_placement.commands

    def _instance(self, router: Node, node: Node) -> Instance:
        (_, load), model = node.routed, model_key(node)
        load.prompts_saved(self.saved_prompts.count(node))
        phase, since = load.phase, load.since
        waking_since = node.sleep.waking_since if node.spec.kind == "openai" else None
        if waking_since is not None and phase is LoadPhase.READY and node.live_leases:
            phase, since = LoadPhase.LOADING, waking_since
        # What others have unloaded stays so for a while.
        retry_at = max(load.retry_at, load.by_others_at + self.settings.model_placement.hysteresis)
        return Instance(
            router.name,
            model,
            phase,
            self.memory_of(node),
            # Of nodes that are alike it is better loaded where its prompts are.
            self.load_seconds(node) * (PROMPTS_SAVED_FACTOR if load.saved else 1.0),
            # One whose server hangs serves nobody, and takes its memory all the same.
            0 if load.loaded and node.state in _HUNG else max(1, node.slots_total),
            self._request_seconds.get(model, USUAL_SECONDS),
            since,
            retry_at,
            self.pinner(node) is not None,
            load.failures,
        )

    def rules_of(self, node: Node) -> list[ModelRule]:
        """The rules of a router's model, by its public names."""
        models = self.settings.models
        return [models[name] for name in node.public_models & models.keys()]

    def pinner(self, node: Node) -> Pinner | None:
        """Who has pinned a router's model there; None: nobody has."""
        router, _ = node.routed
        if any(router.name in rule.pin for rule in self.rules_of(node)):
            return "settings"
        if not node.public_models.isdisjoint(router.spec.preload):
            return "preload"
        return "operator" if self.fleet.is_pinned(node) else None

    def memory_of(self, node: Node) -> int | None:
        """Bytes: as the settings say, its file, or a load has shown on this node or on another."""
        _, load = node.routed
        written = next((rule.memory for rule in self.rules_of(node) if rule.memory), None)
        # Its file says it exactly, where what a load shows is a bound.
        known = written or self._by_file(node, load.file) or load.memory
        return known or self._learnt.get(model_key(node), _UNKNOWN)[0]

    def _by_file(self, node: Node, file: str | None) -> int | None:
        """Bytes by the model's file; None: it is not here, or not read yet."""
        slots, context = node.slots_total, node.context
        if not (self.file_memory and file and slots and context):
            return None
        if not is_loopback(url_host(node.spec.url)):
            return None
        key = file, slots, context
        if key not in self._file_memory and len(self._file_memory) < MOST_FILES:
            self._file_memory[key] = None
            self._unread.append(key)
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read_files(), name="read model files")
        return self._file_memory.get(key)

    async def _read_files(self) -> None:
        """Read what the models take whose files were not read, one after the other."""
        assert self.file_memory is not None
        while self._unread:
            file, slots, context = key = self._unread.pop()
            with suppress(OSError, ValueError):
                memory = await asyncio.to_thread(self.file_memory, Path(file), slots, context)
                self._file_memory[key] = memory
                self._models_differ(None)

    def host_use(self, host: str | None = None) -> dict[str, HostUse]:
        """What this host, or each one, has for models on its routers, and what they take of it."""
        found: dict[str, HostUse] = {}
        routers = [node for node in self.fleet.routers if host in {None, node.host}]
        memory = host_memory(node.spec for node in routers)
        for router in routers:
            sizes = [
                self.memory_of(node)
                for node in router.instances.values()
                if node.load is not None and node.load.phase in HELD_PHASES
            ]
            before = found.get(router.host, HostUse(memory.get(router.host), 0, 0))
            used = before.used + sum(size or 0 for size in sizes)
            found[router.host] = HostUse(before.memory, used, before.unknown + sizes.count(None))
        return found

    def load_seconds(self, node: Node) -> float:
        """Seconds that a load takes: as measured there, else on another node, else by its size."""
        if node.load is not None and node.load.held and not node.load.loaded:
            return LEAST_WAKE  # It was closed, and its server has it all the same.
        _, learnt = self._learnt.get(model_key(node), _UNKNOWN)
        if node.sleep.measured is None and learnt is not None:
            return learnt
        return node.sleep.wake_seconds(node.properties.size)

    def _demands(self, now: float) -> list[ModelDemand]:
        found: dict[str, list[tuple[Waiter, Node]]] = {}
        routers: dict[str, set[str]] = {}
        # Nearly all that wait for one model have the same candidates.
        places: dict[tuple[int, Collection[str]], list[Node]] = {}
        for waiter in self.scheduler.waiters:
            if waiter.granted.done():
                continue
            place = id(waiter.candidates), waiter.tried.failed_nodes
            nodes = places.get(place)
            if nodes is None:
                nodes = places[place] = _may_load(waiter)
                if nodes:
                    names = {one.router.name for one in nodes if one.router is not None}
                    routers.setdefault(model_key(nodes[0]), set()).update(names)
            if nodes:
                found.setdefault(model_key(nodes[0]), []).append((waiter, nodes[0]))
        demands = [self._demand(one, found[one], routers[one], now) for one in found]
        for demand in demands:
            model, usual = demand.model, max(0.01, demand.work / demand.waiting)
            if abs(usual - self._request_seconds.get(model, USUAL_SECONDS)) > usual / 4:
                self._request_seconds[model] = usual
                self._models_changed(model)
        return demands

    def _demand(
        self, model: str, waiting: list[tuple[Waiter, Node]], routers: set[str], now: float
    ) -> ModelDemand:
        """What waits for one model: requests, each with a node; and the routers for any of them."""
        priorities = [waiter.request.caller.priority for waiter, _ in waiting]
        waits = [now - waiter.queued_at for waiter, _ in waiting]
        # The bound of each class is in proportion to its `patience`.
        share = self.settings.model_placement.starvation / DEFAULT_PATIENCE["normal"]
        patience = self.scheduler.dispatcher.rules.overdue_after
        bounds = [share * patience[priority] for priority in priorities]
        # That which has waited the largest share of its bound.
        pressing = max(zip(waits, bounds, strict=True), key=lambda one: one[0] / one[1])
        return ModelDemand(
            model,
            len(waiting),
            sum(waits),
            *pressing,
            batch=all(priority is Priority.BATCH for priority in priorities),
            work=sum(_service_seconds(waiter.queued, node.speed) for waiter, node in waiting),
            nodes=frozenset(routers),
        )

    def _usage(self, instance: Instance) -> InstanceUsage:
        node = self._routers[instance.node].models[instance.model].node
        now, busy = self.clock(), 0.0
        for row in self.scheduler.fleet_sync.rows((node,)):
            busy = max((one.seconds_left(now) for one in row.running), default=0.0)
        leases = len(node.leases) + node.foreign
        if node.spec.kind == "openai":
            leases = len(node.live_leases)  # It waits itself for what was abandoned.
        return InstanceUsage(leases, busy, now if node.leases else node.released_at)

    # Operators' orders.

    def order(self, node: Node, verb: Literal["load", "unload"]) -> None:
        """Load or unload a router's model now, as an operator wants it. Raises: GatewayError."""
        (router, load), now = node.routed, self.clock()
        self._check_commanded(router)
        key, pinner = (router.name, model_key(node)), self.pinner(node)
        actions: list[LoadAction] | None = []
        if load.phase is LoadPhase.UNLOADING:
            raise order_refused(f"{node.name} is being unloaded. Repeat the order in a moment.")
        if verb == "load":
            load.wanted("load", now)
            self._show_router(router)
            actions = self.policy.order_load(*key, self._usage, now)
        elif pinner is not None:
            raise order_refused(f"{node.name} is pinned {PINNED_BY[pinner]}: take the pin out.")
        elif load.phase is LoadPhase.LOADING:
            raise order_refused(f"{node.name} is being loaded. Unload it when it is ready.")
        elif load.phase is LoadPhase.READY:
            self._show_router(router)
            load.wanted("unload", now)
            actions = [LoadAction("retire" if node.leases else "unload", *key, ORDERED, "operator")]
        if actions is None:
            raise order_refused(self._no_room(node))
        for action in actions:
            self._carry_out(action, now)
        self._wake.set()

    def _check_commanded(self, router: Node) -> None:
        name, why = router.name, ""
        if router.draining:
            why = f"is drained. llama-gateway nodes resume {name} ends that."
        elif router.state is not NodeState.READY:
            why = f"is {router.state.value}: {router.reason}. llama-gateway nodes shows it."
        elif router.router_record.stopped(self.clock()) and router.properties.is_router:
            why = "gets no commands, since others load and unload its models too. "
            why += f"llama-gateway nodes probe {name} begins again, once they do not."
        elif not self._is_placed(router):
            why = "gets no commands by the settings: models_on_demand of the node, or "
            why += "model_placement.commands, is false."
        if why:
            raise order_refused(f"{name} {why}")

    def _no_room(self, node: Node) -> str:
        """Why a model can't be loaded, with the figures."""
        router, _ = node.routed
        most = router.most_loaded
        # A router that has just been recognised may not be among the fleet's.
        use = self.host_use(router.host).get(router.host, HostUse(None, 0, 0))
        text = f"{node.name} does not fit: it takes {_gib(self.memory_of(node))}"
        if use.memory is not None:
            text += f", and {router.host} has {_gib(use.memory)} for models, {_gib(use.used)} of"
            text += " them taken"
        if most:
            text += f"; {router.name} holds {most} models at most"
        elif use.memory is None:
            text += f"; {router.name} holds one at a time, as its memory is unknown (`memory`)"
        return (
            f"{text}. What is pinned there, has just been loaded, or is the last of its least "
            "copies makes no room. Unpin or unload another one: llama-gateway models shows them."
        )

    def unkept_wishes(self) -> Iterator[UnkeptWish]:
        """Pins and least copies that have not been kept; a load that failed is told for itself."""
        since = self.clock() - UNKEPT_SECONDS
        if self._began > since:
            return
        for (where, model), instance in self.policy.fleet.pinned_unloaded.items():
            node = self._routers[where].models[model].node
            if node.state is NodeState.UNLOADED and instance.since < since:
                planned = (where, model) in self.policy.plans
                why = "it waits until others there have ended their requests"
                yield UnkeptWish(model, where, why if planned else self._no_room(node))
        for model, rule in self.settings.models.items():
            if not (rule.pin or rule.replicas.min):
                continue
            found = self.fleet.model_index.nodes_for(model)
            copies = {one.router.name: one.load for one in found if one.router is not None}
            for name in rule.pin:
                router = self.fleet.nodes.get(name)
                if name not in copies and router is not None and router.state is NodeState.READY:
                    yield UnkeptWish(model, name, f"{name} does not have it")
            loads = [load for load in copies.values() if load is not None]
            held = sum(load.phase in SERVING_PHASES for load in loads)
            if held < rule.replicas.min and all(load.since < since for load in loads):
                why = f"{held} are loaded, and replicas.min is {rule.replicas.min}"
                yield UnkeptWish(model, "", why)

    # Actions.

    def _carry_out(self, action: LoadAction, now: float) -> None:
        node = self._routers[action.node].models[action.model].node
        router, load = node.routed
        if node in self._tasks or node.removed:
            return
        if action.verb == "keep":
            load.keep(action.reason, now)
        elif action.verb == "retire":
            load.retire(action.reason, action.cause, now)
        elif not router.takes_commands:
            if action.verb == "load":
                self.fleet.model_opened(node, action.reason)
            else:
                self.fleet.model_closed(node, action.reason, action.cause)
            return
        elif action.verb == "load":
            self.fleet.load_ordered(node, "load", action.reason)
            self._start_task(node, self._load(node))
            return
        else:
            load.retire(action.reason, action.cause, now)
            self._start_task(node, self._unload(node))
        self.fleet.load_changed(node)

    def _start_task(self, node: Node, command: Coroutine[None, None, None]) -> None:
        task = self._tasks[node] = asyncio.create_task(command, name=f"command for {node.name}")
        task.add_done_callback(lambda done: self._task_ended(node, done))

    def _task_ended(self, node: Node, task: asyncio.Task[None]) -> None:
        if self._tasks.get(node) is task:
            del self._tasks[node]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("A model could not be loaded or unloaded", exc_info=error)
        self._wake.set()

    async def _load(self, node: Node) -> None:
        _, load = node.routed
        why, of_model = await self._command(node, "load") or ("", False)
        if of_model:
            self.fleet.load_refused(node, why)
            return
        if why:
            load.load_refused(why, self.clock())
        self.fleet.load_changed(node)

    async def _unload(self, node: Node) -> None:
        """Unload it, unless it has work: ours, or that of others."""
        _, load = node.routed
        if node.spec.slot_save and not node.leases:
            await self.saved_prompts.save(node)
        # A router cuts what runs.
        busy = None if node.sleep.asleep else await probe_slots(node)
        if load.phase is not LoadPhase.RETIRING or node.leases:
            return
        if busy:
            load.keep("others use it", self.clock())
        else:
            self.fleet.load_ordered(node, "unload", load.reason)
            if refused := await self._command(node, "unload"):
                load.enter(LoadPhase.READY, refused[0], self.clock())
        self.fleet.load_changed(node)

    def _loaded(self, node: Node) -> None:
        """A router has loaded this model: it gets no work before its prompts are restored."""
        load, before = node.load, self._tasks.get(node)
        if load is not None and self.saved_prompts.count(node) and not self._handed_over:
            load.restores(restoring=True)
            self._start_task(node, self._restore(node, load, before))

    async def _restore(
        self, node: Node, load: ModelLoad, before: asyncio.Task[None] | None
    ) -> None:
        """Restore a model's prompts, after the command for it that may be under way."""
        try:
            if before is not None:
                await asyncio.wait([before])
            if not await self.saved_prompts.restore(node):
                self.fleet.load_ordered(node, "unload", "a slot of it could not be emptied")
                await self._command(node, "unload")
        finally:
            if before is not None:
                before.cancel()
            load.restores(restoring=False)
            self.fleet.load_changed(node)

    async def _command(self, node: Node, command: str) -> tuple[str, bool] | None:
        """Send a command; None, or why the router did not take it, and if the model is to blame."""
        router, load = node.routed
        body = msgspec.json.encode({"model": node.spec.instance})
        reply = await fetch(router, f"/models/{command}", body=body, largest=LARGEST_REFUSAL)
        self.fleet.read_models(node)
        if not isinstance(reply, ProbeResponse) and reply.answer is not ProbeAnswer.TIMED_OUT:
            return reply.detail, False
        load.command_taken(self.clock())
        if not isinstance(reply, ProbeResponse) or reply.status == HTTPStatus.OK:
            return None  # One without an answer may carry it out: the list will show it.
        if b"already running" in reply.body or b"not running" in reply.body:
            return None  # It is so already.
        words = reply.error_words() or f"it answers {reply.status}"
        is_full = b"model limit reached" in reply.body
        return f"the router refused: {words}", not is_full


class _ShownModel(NamedTuple):
    node: Node
    own: tuple[int | None, float | None]  # bytes and seconds that it has shown on this node


class _ShownRouter(NamedTuple):
    node: Node
    models: dict[str, _ShownModel]  # by their names there


def order_refused(why: str) -> GatewayError:
    """An operator's order can't be followed: why, and what to do."""
    return GatewayError(409, "placement_refused", why, param="model")


PINNED_BY: dict[Pinner, str] = {
    "settings": "by the settings (`pin` of its rule in gateway.yaml)",
    "preload": "by the inventory (`preload` of the node in nodes.yaml)",
    "operator": "by an operator",
}


class UnkeptWish(NamedTuple):
    """A pin, or a least number of copies, that has not been kept for a while."""

    model: str
    node: str  # to which it is pinned; "": it has too few copies
    why: str


class HostUse(NamedTuple):
    """The memory of a host for models, in bytes."""

    memory: int | None  # None: unknown
    used: int  # by what is loaded, as far as is known
    unknown: int  # loaded models whose memory is unknown


def _gib(size: int | None) -> str:
    if size is None:
        return "an unknown size, and is first loaded alone"
    return f"{size / (1 << 30):.3g} GiB"


def model_key(node: Node) -> str:
    """The name by which the policy knows a router's model on all nodes: a public one."""
    declared = node.spec.models
    return min(declared) if declared else node.spec.instance or node.name


def _service_seconds(queued: QueuedRequest, speed: Speed) -> float:
    read = queued.prompt_tokens / speed.expected_prefill_tps
    return read + queued.completion_tokens * (speed.token_base + speed.token_step)


def _may_load(waiter: Waiter) -> list[Node]:
    """The models of routers that may serve a request: one model on several nodes."""
    failed = waiter.tried.failed_nodes
    nodes = [node for node in nodes_of(waiter.candidates.by_model) if node.load]
    # Another node is better, and if there is none, the same one.
    nodes = [node for node in nodes if node.name not in failed] or nodes
    return [one for one in nodes if model_key(one) == model_key(nodes[0])]
