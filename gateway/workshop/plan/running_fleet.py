"""A fleet that runs: its measured nodes, its busiest hour, and what a change of either would do.

The requests of the busiest hour are played as the ledger has them. Of a prompt a node reads what it
read then: what a node more or less would have in its cache is not known.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from statistics import fmean
from typing import Any

from pydantic import Field

from gateway.workshop.plan import search
from gateway.workshop.plan.catalogue import (
    MOST_SLOTS_OF_A_SERVER,
    PRICES,
    FleetPrice,
    NodeType,
)
from gateway.workshop.plan.search import (
    FleetPart,
    FleetTrial,
    Goal,
    OutOfTimeError,
    PlanQuestion,
    TimeLimit,
    Workload,
)
from gateway.workshop.simulate import fleets
from gateway.workshop.simulate.fleets import FleetError, SimulatedModel
from gateway.workshop.simulate.fronts import PRIORITY_BY_LABEL
from gateway.workshop.simulate.report import Percentiles
from gateway.workshop.simulate.simulation import (
    MOST_TOKENS,
    Job,
    ModelSpeed,
    SimulatedMachine,
    Trace,
    TracePrompt,
    build_trace,
)

SAME_SPEED = 0.2  # nodes whose speeds differ by less, as a share, are of one kind
GOAL_FACTORS = (0.75, 1.5)  # to what the goal is moved, as a multiple
# Seconds over which the requests of an hour are spread at least, however few there are.
LEAST_SPAN = 10.0
# Share of the slots' time that requests held, above which no slot was ever free for long.
SATURATED = 0.95
UNSERVED_SHARE = 0.01  # share of the requests that may find no slot
MOST_NAMED = 20
MOST_ADDED = 64  # nodes that an advice adds at most
LONG_WAIT = 0.25  # seconds below which no wait is long, however short the requests are
FEW_REQUESTS = 30  # fewer in the busiest hour tell little


class UnmeasuredFleetError(Exception):
    """The fleet's answers hold too little to plan with; the message has the remedy."""


class MeasuredType(NodeType):
    """Nodes of about equal speed that serve the same models; no model: all.

    With memory they are routers, which load them on demand.
    """

    models: frozenset[str] = frozenset()
    model_speeds: dict[str, ModelSpeed] = Field(default_factory=dict)  # of a router
    hosts: tuple[str, ...] = ()  # of its nodes; one more has a host of its own

    def machine(self, name: str) -> SimulatedMachine:
        """One of them."""
        made = super().machine(name)
        return replace(made, models=self.models, model_speeds=self.model_speeds)

    def machines(self, count: int) -> list[SimulatedMachine]:
        """So many of them: routers of one host share its memory."""
        hosts = [*self.hosts[:count], *[""] * count]
        return [
            replace(one, host=host)
            for one, host in zip(super().machines(count), hosts, strict=False)
        ]


@dataclass(frozen=True, slots=True)
class MeasuredFleet:
    """The nodes of a gateway that get work, in kinds."""

    parts: tuple[FleetPart, ...]
    notes: tuple[str, ...]
    names: tuple[tuple[str, frozenset[str]], ...] = ()
    """Of each node, with the models that it serves."""
    models: tuple[SimulatedModel, ...] = ()  # that its routers load on demand
    aliases: Mapping[str, str] = field(default_factory=dict)
    """By each public name of these models: the one that `models` has."""

    @property
    def known_models(self) -> dict[str, str]:
        """By each name that a request may ask for: the model."""
        found = {model: model for part in self.parts for model in _models(part)}
        return {**found, **self.aliases}


def measured_fleet(
    nodes: Sequence[Mapping[str, Any]], placed: Mapping[str, Any] | None = None
) -> MeasuredFleet:
    """Sort the nodes of `GET /admin/nodes` into kinds of about equal speed.

    `placed`: what `GET /admin/placements` tells of the models of routers. Nodes that get no work
    (disabled, standby, draining, down) are left out; one without a measured speed is taken to be
    like the others of its tier. Raises UnmeasuredFleetError.
    """
    routers = _Routers(nodes, placed or {})
    nodes = [routers.as_one(node) for node in nodes if node.get("router") is None]
    notes, working = [], []
    for node in nodes:
        if node.get("state") == "down":
            notes.append(f"{node.get('name')} is down: left out")
        elif node.get("enabled", True) and not (node.get("standby") or node.get("draining")):
            working.append(node)
    if not working:
        raise UnmeasuredFleetError("the gateway has no node that gets work")
    measured = [node for node in working if _speeds(node) is not None]
    if not measured:
        raise UnmeasuredFleetError(
            "no node's speed is measured yet: send some requests, or give --tokens-per-second and "
            "--prefill-tokens-per-second"
        )
    names: list[tuple[str, frozenset[str]]] = []
    kinds: list[tuple[MeasuredType, int]] = []
    for node in working:
        source, name = node, str(node.get("name"))
        if _speeds(node) is None:
            alike = (one for one in measured if one.get("tier") == node.get("tier"))
            source = next(alike, measured[0])
            notes.append(f"{name} is not measured yet: taken to be like {source['name']}")
        kind = _kind(node, source)
        names.append((name, kind.models))
        for place, (known, count) in enumerate(kinds):
            if _is_alike(known, kind):
                kinds[place] = (_merged(known, kind, count), count + 1)
                break
        else:
            kinds.append((kind, 1))
    parts = tuple(FleetPart(kind, count) for kind, count in kinds)
    notes += routers.notes
    return MeasuredFleet(parts, tuple(notes), tuple(names), tuple(routers.models), routers.aliases)


class _Routers:
    """The routers of a fleet, each of whose models is a node of the admin API."""

    def __init__(self, nodes: Sequence[Mapping[str, Any]], placed: Mapping[str, Any]) -> None:
        self.notes: list[str] = []
        self.aliases: dict[str, str] = {}
        self.models: list[SimulatedModel] = []
        self._of: defaultdict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
        self._hosts = placed.get("hosts") or {}
        rows = placed.get("placements") or []
        if not any(node.get("router") for node in nodes):
            return
        try:
            self.models = fleets.placed_models(rows)
        except FleetError as error:
            raise UnmeasuredFleetError(f"{error}") from None
        keys = {row.get("name"): str(row["model"]) for row in rows}
        for node in nodes:
            if (router := node.get("router")) is not None:
                key = keys.get(node["name"], str(node["name"]).partition("/")[2])
                self._of[router][key] = node
                self.aliases |= dict.fromkeys([key, *map(str, node.get("models") or ())], key)
        machines = []
        for router, found in self._of.items():
            told = {key: _speeds(node) for key, node in found.items()}
            known = {key: speeds for key, speeds in told.items() if speeds is not None}
            if known:
                machine = SimulatedMachine(router, 1, *next(iter(known.values())))
                models = frozenset(found)
                machines.append(replace(machine, models=models, memory=1, model_speeds=known))
        # Those of which a model is measured.
        self._machines = {one.name: one for one in fleets.with_all_speeds(machines, self.models)}

    def as_one(self, node: Mapping[str, Any]) -> Mapping[str, Any]:
        """A router as one node that has its models' slots and speeds; any other as it is."""
        name = str(node.get("name"))
        if (found := self._of.get(name)) is None:
            return node
        machine, host = self._machines.get(name), str(node.get("host") or name)
        memory = (self._hosts.get(host) or {}).get("memory")
        if not memory:
            memory = max(one.memory for one in self.models)
            self.notes.append(f"the memory of {host} is unknown: taken to hold one model at a time")
        costs = [one["batch_cost"] for one in found.values() if one.get("batch_cost") is not None]
        return {
            **node,
            "slots_total": max(one.get("slots_total") or 0 for one in found.values()),
            "prefill_tps": machine and machine.prefill_tps,
            "decode_tps": machine and machine.decode_tps,
            "batch_cost": fmean(costs) if costs else None,
            "models": sorted(found),
            "memory_gib": memory / fleets.GIB,
            "model_speeds": machine.model_speeds if machine else {},
            "hosts": (host,),
        }


def _speeds(node: Mapping[str, Any]) -> tuple[float, float] | None:
    found: list[Any] = [node.get("prefill_tps"), node.get("decode_tps")]
    # NaN is in no range.
    if all(type(one) in {int, float} and 1e-3 <= one <= 1e7 for one in found):
        return found[0], found[1]
    return None


def _kind(node: Mapping[str, Any], measured: Mapping[str, Any]) -> MeasuredType:
    """The kind of a node, with the speeds of one that is measured."""
    slots, models = node.get("slots_total"), node.get("models")
    per_token = node.get("cost_per_million_tokens")
    fields: dict[str, Any] = {
        "name": str(node.get("name", "node"))[:64],
        "tier": "gpu" if node.get("tier") == "gpu" else "cpu",
        "slots": max(1, min(int(slots), MOST_SLOTS_OF_A_SERVER)) if isinstance(slots, int) else 1,
        "prefill_tps": measured["prefill_tps"],
        "decode_tps": measured["decode_tps"],
        "models": frozenset(map(str, models)) if isinstance(models, list) else frozenset(),
    }
    if "memory_gib" in node:
        fields |= {name: node[name] for name in ("memory_gib", "hosts")}
        fields["model_speeds"] = measured.get("model_speeds") or {}
    # Older gateways don't tell it.
    if isinstance(cost := node.get("batch_cost"), int | float) and 0 <= cost <= 100:
        fields["batch_cost"] = float(cost)
    if isinstance(per_token, Mapping):
        fields["price_per_million_tokens"] = dict(per_token)
    else:
        # 0 is the inventory's default: nobody has said what it costs.
        fields["price_per_hour"] = node.get("cost_per_hour") or None
    return MeasuredType.model_validate(fields)


def _is_alike(one: MeasuredType, other: MeasuredType) -> bool:
    same = {"tier", "slots", *PRICES, "models", "memory_gib"}
    if one.model_dump(include=same) != other.model_dump(include=same):
        return False
    speeds, others = (
        (kind.prefill_tps, kind.decode_tps, 1 + kind.batch_cost) for kind in (one, other)
    )
    return all(
        abs(mine - theirs) <= SAME_SPEED * max(mine, theirs)
        for mine, theirs in zip(speeds, others, strict=True)
    )


def _merged(known: MeasuredType, other: MeasuredType, count: int) -> MeasuredType:
    """The kind with one node more: mean speeds, and those of models as they are."""
    means = {
        name: (getattr(known, name) * count + getattr(other, name)) / (count + 1)
        for name in ("prefill_tps", "decode_tps", "batch_cost")
    }
    return known.model_copy(update={"hosts": known.hosts + other.hosts, **means})


@dataclass(frozen=True, slots=True)
class BusiestHour:
    """What the ledger shows of the hour that asked most of the fleet."""

    start: str
    end: str
    requests: int
    found_no_slot: int
    slots_busy: float  # share of the slots' time that requests held
    wait_p95: float  # seconds that requests lasted beyond those in their slots
    service: float  # mean seconds in a slot
    nodes_added_since: tuple[str, ...] = ()
    """They did not serve then: its waits are not those of this fleet."""
    nodes_removed_since: tuple[str, ...] = ()
    """They served then and are no more: its slots are not those of this fleet."""

    on_demand: bool = False  # routers' slots are those of the models that they had loaded then

    @property
    def was_full(self) -> bool:
        """Whether this fleet had no free slot for long."""
        changed = self.nodes_added_since or self.nodes_removed_since or self.on_demand
        return not changed and self.slots_busy >= SATURATED

    @property
    def name(self) -> str:
        """Such as `its busiest hour (2026-11-28T14:00:00Z to 15:00:00Z)`."""
        day, _, time = self.end.partition("T")
        return f"its busiest hour ({self.start} to {time if day in self.start else self.end})"

    def as_dict(self) -> dict[str, object]:
        """For scripts."""
        figures = asdict(self)
        del figures["on_demand"]
        return {"from": figures.pop("start"), "to": figures.pop("end"), **figures}


@dataclass(frozen=True, slots=True)
class FleetTraffic:
    """What a running fleet is asked to do."""

    workload: Workload
    by_model: Mapping[str, Workload]  # the busiest hour by model; an empty name: all nodes serve it
    recorded: Trace | None = None  # requests to play; None: they are made up
    hour: BusiestHour | None = None
    notes: tuple[str, ...] = ()


def traffic_of(
    workload: Workload, fleet: MeasuredFleet, recorded: Trace | None = None, seed: int = 1
) -> FleetTraffic:
    """Traffic in figures, or of a recorded trace, which all nodes serve.

    Where routers load models on demand, a trace names them; else they are asked for by Zipf's law.
    Raises UnmeasuredFleetError.
    """
    if not fleet.models:
        return FleetTraffic(workload, {"": workload}, recorded)
    models = tuple(fleets.with_shares(fleet.models, seed))
    if recorded is not None:
        known = fleet.known_models
        for job in recorded.jobs:
            if job.model not in known:
                asked = f"no node has {job.model}" if job.model else "a request names no model"
                raise UnmeasuredFleetError(f"{asked}: the trace is not of this fleet's models")
        recorded = build_trace([replace(job, model=known[job.model]) for job in recorded.jobs])
        models = search.asked_models(recorded.jobs, fleet.models)
    total = sum(one.share or 0.0 for one in models)
    by_model = {
        one.name: workload.with_requests(workload.requests_per_hour * one.share / total)
        for one in models
        if one.share
    }
    return FleetTraffic(replace(workload, models=models), by_model, recorded)


_Tokens = tuple[float, float, float]  # of a prompt, of them cached, and of a completion


@dataclass(frozen=True, slots=True)
class _Arrival:
    at: float
    model: str  # empty: all nodes serve it, as far as is known
    priority_label: str
    node: str
    tokens: _Tokens | None  # None: it has not been served
    slot_seconds: float
    lasted: float
    unserved: bool


def busiest_hour(told: Mapping[str, Any], fleet: MeasuredFleet, peak: float) -> FleetTraffic:
    """The traffic that `GET /admin/usage/arrivals` tells, at `peak` times its rate.

    Raises UnmeasuredFleetError.
    """
    models = fleet.known_models
    try:
        columns = told["columns"]
        told_all = [_read(dict(zip(columns, row, strict=True)), models) for row in told["arrivals"]]
        start, end, requests = told["hour"]["from"], told["hour"]["to"], float(told["requests"])
        began = datetime.fromisoformat(told["first"] or told["until"])
        since_first = (datetime.fromisoformat(told["until"]) - began).total_seconds()
    except (KeyError, TypeError, ValueError):
        raise UnmeasuredFleetError("the gateway's answer is of another version") from None
    others = sum(not one.model for one in told_all) if models else 0
    arrivals = [one for one in told_all if one.model or not fleet.models]
    known = [one for one in arrivals if one.tokens is not None]
    if not known:
        raise UnmeasuredFleetError(
            "the ledger has no request with tokens in that time: give --requests-per-hour, "
            "--prompt and --completion, or --trace"
        )
    first, last = min(one.at for one in arrivals), max(one.at for one in arrivals)
    service = fmean(one.slot_seconds for one in known)
    # One request keeps its slot busy all of its own time: that is no use of a fleet.
    span = max(LEAST_SPAN, 2 * service, last - first)
    tokens: defaultdict[str, list[_Tokens]] = defaultdict(list)
    for one in known:
        tokens[one.model].append(one.tokens or (0.0, 0.0, 0.0))
    overall = _mean([one for found in tokens.values() for one in found])
    means = {model: _mean(found) for model, found in tokens.items()}
    jobs, counts = [], Counter(one.model for one in arrivals)
    for number, one in enumerate(arrivals):
        prompt, cached, completion = one.tokens or means.get(one.model, overall)
        read = min(MOST_TOKENS, max(1, round(prompt - cached)))
        written = min(MOST_TOKENS, max(1, round(completion)))
        at = (one.at - first) / peak
        text = TracePrompt(-1 - number, read)
        jobs.append(Job(0, at, text, written, None, one.priority_label, model=one.model))
    hourly = peak * search.SECONDS_PER_HOUR / span
    by_model = {
        model: _workload(count * hourly, means.get(model, overall))
        for model, count in counts.items()
    }
    # Prices are those of the mean hour, waits those of the busiest one.
    rate = len(arrivals) * hourly
    mean = max(requests / max(since_first, span) * search.SECONDS_PER_HOUR, rate / search.MOST_PEAK)
    factor = min(search.MOST_PEAK, max(1.0, rate / mean))
    asked = search.asked_models(jobs, fleet.models)
    workload = replace(_workload(min(mean, rate), overall), peak=factor, models=asked)
    slots = sum(part.servers * part.node_type.slots for part in fleet.parts)
    nodes = {one.node for one in known}

    def serves(models: frozenset[str]) -> bool:
        return not models or not models.isdisjoint(counts)

    hour = BusiestHour(
        start=start,
        end=end,
        requests=len(arrivals),
        found_no_slot=sum(one.unserved for one in arrivals),
        slots_busy=sum(_held(one, first, first + span) for one in known) / (slots * span),
        wait_p95=Percentiles.of([max(0.0, one.lasted - one.slot_seconds) for one in known]).p95,
        service=service,
        nodes_added_since=_some(
            name for name, models in fleet.names if name not in nodes and serves(models)
        ),
        nodes_removed_since=_some(nodes - {name for name, _ in fleet.names}),
        on_demand=bool(fleet.models),
    )
    notes = [f"from the ledger: {requests:,.0f} requests, {len(arrivals):,} of them in {hour.name}"]
    if hour.nodes_added_since:
        names = ", ".join(hour.nodes_added_since)
        notes.append(f"{names} did not serve in that hour: its waits then tell nothing")
    if others:
        what = "they are left out" if fleet.models else "all are taken to serve them"
        notes.append(f"{others:,} are of models that no node names: {what}")
    if len(arrivals) < FEW_REQUESTS:
        notes.append("so few requests tell little of what the fleet can do")
    return FleetTraffic(workload, by_model, build_trace(jobs), hour, tuple(notes))


def _some(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names)[:MOST_NAMED])


def _models(part: FleetPart) -> frozenset[str]:
    return part.node_type.models if isinstance(part.node_type, MeasuredType) else frozenset()


def _read(row: Mapping[str, Any], models: Mapping[str, str]) -> _Arrival:
    prompt, completion = row["prompt_tokens"], row["completion_tokens"]
    served = completion is not None
    tokens = (float(prompt), float(row["cached_tokens"]), float(completion)) if served else None
    return _Arrival(
        at=float(row["seconds"]),
        model=models.get(row["model"], ""),
        priority_label=row["class"] if row["class"] in PRIORITY_BY_LABEL else "normal",
        node=str(row["node"] or "").partition("/")[0],  # a router's model is one of its node
        tokens=tokens,
        slot_seconds=float(row["slot_seconds"]),
        lasted=float(row["lasted"] or 0.0),
        unserved=bool(row["unserved"]),
    )


def _mean(tokens: Sequence[_Tokens]) -> _Tokens:
    prompt, cached, completion = map(fmean, zip(*tokens, strict=True))
    return prompt, cached, completion


def _workload(requests_per_hour: float, tokens: _Tokens) -> Workload:
    prompt, cached, completion = tokens
    repeat = min(0.999, max(0.0, cached / prompt)) if prompt else 0.0
    return Workload(requests_per_hour, prompt, max(1.0, completion), repeat=repeat)


def _held(one: _Arrival, start: float, end: float) -> float:
    """Slot seconds of a request from `start` to `end`: it held its slots up to its end."""
    seconds = min(one.slot_seconds, one.lasted)
    ended = one.at + one.lasted
    within = max(0.0, min(ended, end) - max(ended - seconds, start))
    return within * one.slot_seconds / seconds if seconds else 0.0


def fleet_use(parts: Sequence[FleetPart], by_model: Mapping[str, Workload]) -> float:
    """Share of the capacity that is used, where it is used most; infinite: no node serves a model.

    The nodes that serve one model are such a place, and all nodes are.
    """
    everyone, serving = frozenset(range(len(parts))), dict[str, frozenset[int]]()
    for model in by_model:
        of_parts = enumerate(map(_models, parts))
        serving[model] = frozenset(n for n, own in of_parts if not (model and own) or model in own)
    if not all(serving.values()):
        return math.inf
    return max(
        math.fsum(
            workload.arrivals / math.fsum(_capacity(parts[n], model, workload) for n in places)
            for model, workload in by_model.items()
            if serving[model] <= places
        )
        for places in {everyone, *serving.values()}
    )


def _capacity(part: FleetPart, model: str, workload: Workload) -> float:
    """Most requests for a model that a part ends per second, while it has it loaded."""
    node_type = part.node_type
    if isinstance(node_type, MeasuredType) and model in node_type.model_speeds:
        prefill, decode = node_type.model_speeds[model]
        speeds = {"prefill_tps": prefill, "decode_tps": decode}
        part = FleetPart(node_type.model_copy(update=speeds), part.count)
    return part.capacity(workload)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A change, and what comes of it."""

    change: str
    fleet: str
    use: float  # in the busiest hour; infinite: no node serves a model
    trial: FleetTrial | None
    price: FleetPrice
    missed: tuple[str, ...]  # what is missed of the goal; empty: nothing

    def as_dict(self) -> dict[str, object]:
        """For scripts."""
        return {
            "change": self.change,
            "fleet": self.fleet,
            "utilisation": self.use if math.isfinite(self.use) else None,
            "simulated": None if self.trial is None else self.trial.as_dict(),
            "price": self.price.as_dict(),
            "missed": list(self.missed),
        }


@dataclass(frozen=True, slots=True)
class FleetAdvice:
    """What to do."""

    verdict: str  # `saturated`, `tight` or `enough`
    sentence: str
    add: dict[str, str | int] | None = None  # how many nodes to add, and like which one


_SHOWN = {"tier", "slots", "prefill_tps", "decode_tps", "batch_cost", "memory_gib"}


@dataclass(frozen=True, slots=True)
class FleetAnswer:
    """The fleet as it is and as it might be, and what to do."""

    fleet: MeasuredFleet  # as it was played
    traffic: FleetTraffic
    changes: tuple[WhatIf, ...]
    advice: FleetAdvice
    notes: tuple[str, ...]

    def as_dict(self, question: PlanQuestion) -> dict[str, object]:
        """For scripts."""
        hour = self.traffic.hour
        return {
            **question.as_dict(),
            "busiest_hour": None if hour is None else hour.as_dict(),
            "nodes": [
                {
                    "like": part.node_type.name,
                    "count": part.count,
                    **part.node_type.model_dump(include=_SHOWN),
                    "models": sorted(_models(part)),
                }
                for part in self.fleet.parts
            ],
            "changes": [row.as_dict() for row in self.changes],
            "advice": asdict(self.advice),
            "notes": [*self.fleet.notes, *self.traffic.notes, *self.notes],
        }


def what_if(
    question: PlanQuestion, fleet: MeasuredFleet, traffic: FleetTraffic, limit: TimeLimit
) -> FleetAnswer:
    """The fleet as it is, with one node more or less of each kind, with the goal moved, and advice.

    Raises UnmeasuredFleetError.
    """
    if sum(part.servers for part in fleet.parts) > question.most_nodes:
        raise UnmeasuredFleetError(f"more than {question.most_nodes} nodes are not simulated")
    fleet, notes = _as_slow_as_seen(fleet, traffic)
    asked = _Asked(question, traffic, limit)
    now = asked.row("as it is", fleet.parts)
    found = [now]
    for place, part in enumerate(fleet.parts):
        name = part.node_type.name
        found.append(asked.row(f"one more like {name}", _changed(fleet, place, 1), now, min))
        if less := _changed(fleet, place, -1):
            found.append(asked.row(f"one less like {name}", less, now, max))
    for factor in GOAL_FACTORS if question.goal.is_timed else ():
        ttft, completion = question.goal.ttft_p95, question.goal.completion_p95
        goal = Goal(ttft and ttft * factor, completion and completion * factor)
        missed = asked.missed(now.trial, now.use, goal)
        found.append(replace(now, change=f"goal x {factor:g}", missed=missed))
    advice = _advice(asked, fleet, found)
    return FleetAnswer(fleet, traffic, tuple(found), advice, notes)


def _changed(fleet: MeasuredFleet, place: int, more: int) -> tuple[FleetPart, ...]:
    parts = list(fleet.parts)
    parts[place] = FleetPart(parts[place].node_type, parts[place].count + more)
    return tuple(part for part in parts if part.count)


def _as_slow_as_seen(
    fleet: MeasuredFleet, traffic: FleetTraffic
) -> tuple[MeasuredFleet, tuple[str, ...]]:
    """The fleet as slow as its busiest hour shows it.

    Where slots were hardly ever free it had no capacity left, whatever its measured speeds promise.
    """
    use = fleet_use(fleet.parts, traffic.by_model)
    hour = traffic.hour
    if hour is None or not hour.was_full or use >= hour.slots_busy:
        return fleet, ()
    slower = use / hour.slots_busy
    parts = tuple(FleetPart(part.node_type.scaled(slower), part.count) for part in fleet.parts)
    note = (
        f"by the measured speeds the fleet was used to {use:.0%}, but its slots were held "
        f"{hour.slots_busy:.0%} of the time: taken to be {1 / slower:.2f} times slower"
    )
    return replace(fleet, parts=parts), (note,)


@dataclass(frozen=True, slots=True)
class _Asked:
    question: PlanQuestion
    traffic: FleetTraffic
    limit: TimeLimit

    def row(
        self,
        change: str,
        parts: Sequence[FleetPart],
        now: WhatIf | None = None,
        pick: Callable[[float, float], float] = max,
    ) -> WhatIf:
        """A fleet, played.

        A smaller one (`pick` is `max`) is no faster than `now`, and a larger one (`min`) no slower:
        where their times differ the other way, chance placed the requests so.
        """
        question, trial = self.question, None
        use = fleet_use(parts, self.traffic.by_model)
        if use < 1.0 or (question.recorded is not None and math.isfinite(use)):
            with contextlib.suppress(OutOfTimeError):
                trial = question.play(parts, question.trace(), self.limit)
        if trial is not None and now is not None and now.trial is not None:
            trial = search.bounded(trial, now.trial, pick)
        price = search.option_price(question, parts, trial)
        missed = self.missed(trial, use, question.goal)
        return WhatIf(change, search.fleet_name(parts), use, trial, price, missed)

    def missed(self, trial: FleetTrial | None, use: float, goal: Goal) -> tuple[str, ...]:
        """What is missed of the goal."""
        if math.isinf(use):
            return ("no node is left for a model",)
        if use >= 1.0:
            return (f"overloaded: {use:.2f} times what it can do",)
        if goal.is_timed:
            if trial is None:
                return ("not simulated: out of time",)
            return tuple(goal.misses(trial))
        found = []
        if use > goal.use:
            found.append(f"used to {use:.0%}, above {goal.use:.0%}")
        is_played = self.traffic.hour is not None
        # More than a few wait longer than the work of a request takes.
        if trial is not None and is_played and trial.wait.p95 > max(LONG_WAIT, trial.service):
            found.append(f"5 % of the requests wait {trial.wait.p95:.1f} s or longer")
        return tuple(found)


def _advice(asked: _Asked, fleet: MeasuredFleet, rows: Sequence[WhatIf]) -> FleetAdvice:
    now, hour = rows[0], asked.traffic.hour
    same = None if hour is None or hour.nodes_added_since else hour  # its waits are this fleet's
    where = "the busiest hour of this traffic" if hour is None else hour.name
    used = f"the fleet is {now.use:.0%} used in {where}"
    why = ""
    if now.use >= 1.0:
        why = f"{where} asked for {now.use:.0%} of what it can do"
    elif hour is not None and hour.was_full:
        why = f"its slots were held {hour.slots_busy:.0%} of the time in {where}"
    elif same is not None and same.found_no_slot > UNSERVED_SHARE * same.requests:
        why = f"{same.found_no_slot:,} of {same.requests:,} requests found no slot in {where}"
    elif same is not None and same.wait_p95 > max(LONG_WAIT, same.service):
        why = f"5 % of the requests waited {same.wait_p95:.1f} s or longer in {where}"
    elif now.trial is not None and now.trial.too_late > UNSERVED_SHARE * now.trial.requests:
        why = f"{now.trial.too_late:,} requests of {where} would wait too long to be served"
    if not why and not now.missed:
        spare = next((row for row in rows if "one less" in row.change and not row.missed), None)
        more = "" if spare is None else f", even with {spare.change} ({spare.use:.0%})"
        return FleetAdvice("enough", f"{used}: enough{more}")
    verdict = "saturated" if why else "tight"
    begin = f"the fleet is saturated: {why}" if why else f"{used}: {'; '.join(now.missed)}"
    added = _least_addition(asked, fleet, now)
    if added is None:
        return FleetAdvice(verdict, f"{begin}; more of its nodes don't help: take faster ones")
    like, count, row = added
    nodes = "one node" if count == 1 else f"{count} nodes"
    sentence = f"{begin}; add {nodes} like {like}: then it is {row.use:.0%} used"
    if row.trial is not None:
        sentence += f", and 95 % of the requests end within {row.trial.completion.p95:.1f} s"
    return FleetAdvice(verdict, sentence, {"like": like, "count": count})


def _least_addition(
    asked: _Asked, fleet: MeasuredFleet, now: WhatIf
) -> tuple[str, int, WhatIf] | None:
    """The cheapest, else the fewest nodes of one kind whose addition meets the goal."""
    goal = asked.question.goal
    choices = []
    for place, part in enumerate(fleet.parts):

        def fits(count: int, place: int = place) -> bool:
            return fleet_use(_changed(fleet, place, count), asked.traffic.by_model) <= goal.use

        if count := search.least_that(fits, 1, MOST_ADDED):
            hour = part.node_type.per_hour
            choices.append((math.inf if hour is None else hour * count, count, place))
    if not choices:
        return None
    _, least, place = min(choices)
    rows: dict[int, WhatIf] = {}

    def suffices(count: int) -> bool:
        rows[count] = asked.row(f"{count} more", _changed(fleet, place, count), now, min)
        return rows[count].trial is None or not rows[count].missed

    found = search.least_that(suffices, least, MOST_ADDED)
    return None if found is None else (fleet.parts[place].node_type.name, found, rows[found])
