"""Routers: servers that hold many models and load them on demand, as they tell of themselves.

llama.cpp's router (`llama-server --models-dir`) runs a server of its own for each model in use. One
model on a router is an instance: a `Node` with a `ModelLoad`, which says whether it is loaded. A
plain server is a node with one instance, which is always loaded.

`/v1/models` lists the models with their status; `/models/sse` tells of each change. Neither loads,
wakes or keeps awake a model, nor does any path with `model` and `autoload=false` in its query
(measured with build 11669).

An endpoint of kind `openai` that loads models by itself lists names alone. llama-swap tells what it
holds at `/running`, Ollama at `/api/ps`. Neither path loads a model or keeps one (by their
sources). They get no commands: which models may get requests is decided here (a model is opened and
closed, `ModelLoad`), and the first request for an opened one loads it. What such a server holds
besides, loads for others or unloads by its own rules is followed (`Node.follow_held`).
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeGuard, TypeVar, get_args

import msgspec

from gateway.nodes.server_properties import (
    MOST_CONTEXT,
    MOST_SLOTS,
    UNREADABLE,
    memory_told,
    number_given,
)

T = TypeVar("T", dict[str, Any], list[Any])
# Seconds after a failed load until the next try for that model on that node; doubles each time.
FIRST_RETRY, MOST_RETRY = 10.0, 600.0
# Seconds for which a list that was under way may contradict an unload that was ordered.
COMMAND_LAG = 2.0
# Seconds until a load is tried again that the router had no room for, or could not be told of.
REFUSED_RETRY = 2.0
# Seconds after which an unload that was ordered is no longer believed.
MOST_UNLOAD = 60.0
# Loads and unloads by others within so many seconds after which a router gets no more commands.
MOST_BY_OTHERS, BY_OTHERS_SECONDS = 6, 600.0
OTHERS_PAUSE = 1800.0  # seconds for which it gets none
LONGEST_EVENT = 64 * 1024  # bytes of a line of `/models/sse`

# Where endpoints of kind `openai` may tell what they hold: llama-swap, Ollama.
RUNNING_PATHS = ("/running", "/api/ps")
LARGEST_RUNNING = 256 * 1024  # bytes of an answer to one of them
MOST_RUNNING = 100  # models that are read of it
DEFAULT_TAG = ":latest"  # Ollama's, which clients may leave out
_STATES = {"ready": True, "starting": False}  # llama-swap's of models that run, and go on running

# Why a model was unloaded, for metrics: another one needs its memory, it idled for as long as its
# rules say, there are more copies than they allow, an operator has ordered it, it was not by this
# gateway, its router was restarted, or its server ended by itself.
UnloadCause = Literal["memory", "idle", "replicas", "operator", "others", "restart", "died"]
UNLOAD_CAUSES: tuple[str, ...] = get_args(UnloadCause)

# A model's status as a router lists it. `downloading` counts as unloaded.
Status = Literal["unloaded", "loading", "loaded", "sleeping"]
_STATUSES: dict[str, Status] = {one: one for one in get_args(Status)} | {"downloading": "unloaded"}


class LoadPhase(enum.Enum):
    """Whether a router has loaded one of its models; in the words of `NodeState`."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    RETIRING = "retiring"  # it ends its requests, gets no new ones, and is unloaded then
    UNLOADING = "unloading"
    FAILED = "failed"  # its load failed: it is not tried again before `retry_at`


_STEADY_PHASES = frozenset({LoadPhase.UNLOADED, LoadPhase.READY, LoadPhase.FAILED})


class RoutedModel(NamedTuple):
    """One entry of a router's list."""

    name: str
    names: frozenset[str]  # all names that it answers to
    entry: dict[str, Any]  # the fields of interest, as `server_properties.parse_models` has them
    status: Status | None  # None: the list has none, as that of an endpoint of kind `openai`
    failed: bool  # its last load failed, or its server died
    exit_code: int | None
    slots: int | None
    context: int | None  # tokens of one slot, by the arguments; None: they don't say
    file: str | None = None  # the path of its file on the router's machine
    memory: int | None = None  # bytes that it takes, told of one that is loaded
    args: tuple[str, ...] = ()  # of its server


def _as(kind: type[T], value: object) -> T:
    """A value of this kind; an empty one, if it is of another."""
    return value if isinstance(value, kind) else kind()


def read_list(listed: object) -> list[RoutedModel]:
    """The models of a list that `parse_models` has read, each name once; no malformed ones."""
    found: dict[str, RoutedModel] = {}
    for entry in _as(list, _as(dict, listed).get("data")):
        name = entry.get("id")
        if not is_model_name(name):
            continue
        aliases = _as(list, entry.get("aliases"))[:MOST_ALIASES]
        status = _as(dict, entry.get("status"))
        value, code = status.get("value"), status.get("exit_code")
        args = [one for one in _as(list, status.get("args")) if isinstance(one, str)]
        given = dict(pairwise(args))
        slots = number_given(given, "--parallel", MOST_SLOTS)
        context = number_given(given, "--ctx-size", MOST_CONTEXT)
        found.setdefault(
            name,
            RoutedModel(
                name,
                frozenset((name, *filter(is_model_name, aliases))),
                entry,
                _STATUSES.get(value) if isinstance(value, str) else None,
                status.get("failed") is True,
                code if isinstance(code, int) else None,
                slots,
                context // slots if slots and context else None,
                given.get("--model"),
                memory_told(entry.get("meta"), args),
                tuple(args),
            ),
        )
    return list(found.values())


# Characters of a model's name on a router, which is part of metrics and logs; and further names.
MOST_NAME, MOST_ALIASES = 256, 64


def is_model_name(name: object) -> TypeGuard[str]:
    """Whether a router may have a model of this name."""
    return isinstance(name, str) and 0 < len(name) <= MOST_NAME and name.isprintable()


def read_running(answer: object) -> dict[str, bool] | None:
    """By its name: whether a model is loaded, or is being so; None: the answer is no such list."""
    told = _as(dict, answer)
    listed = told.get("running", told.get("models"))
    if not isinstance(listed, list):
        return None
    found = {}
    for entry in listed[:MOST_RUNNING]:
        if isinstance(entry, dict) and is_model_name(name := entry.get("model")):
            # Ollama's have no state: they are loaded, or soon will be.
            state = entry.get("state", "ready")
            is_loaded = _STATES.get(state) if isinstance(state, str) else None
            if is_loaded is not None:
                found[name] = is_loaded
    return found


def read_endpoint(
    listed: object, declared: Iterable[str], running: Mapping[str, bool] | None
) -> list[RoutedModel]:
    """The models of an endpoint, by its list and by the inventory; those that it holds come last.

    `declared`: its own names of models, by the inventory. `running`: what it has told, if it has.
    """
    models = read_list(_with_aliases(listed))
    known = set[str]().union(*(model.names for model in models))
    unlisted = [{"id": name} for name in declared if name not in known]
    models += read_list({"data": unlisted})
    told = [model._replace(status=_status(model, running)) for model in models]
    return sorted(told, key=lambda model: model.status == "loaded")


def _status(model: RoutedModel, running: Mapping[str, bool] | None) -> Status | None:
    if running is None:
        return None
    states = [running[name] for name in model.names & running.keys()]
    return "unloaded" if not states else "loaded" if any(states) else "loading"


def _with_aliases(listed: object) -> dict[str, object]:
    """The list, in which each model has its further names: llama-swap lists these as models too."""
    data = _as(list, _as(dict, listed).get("data"))
    entries = {name: one for one in data if is_model_name(name := one.get("id"))}
    found: dict[str, list[object]] = {name: [] for name in entries}
    for name, entry in entries.items():
        about = _as(dict, entry.get("meta")).get("llamaswap")
        owner = _as(dict, about).get("modelID")
        if isinstance(owner, str) and owner in found and owner != name:
            found[owner].append(name)
            found.pop(name, None)
        elif isinstance(about, dict) and isinstance(own := about.get("aliases"), list):
            found[name] += own[:MOST_ALIASES]
        elif name.endswith(DEFAULT_TAG):
            found[name].append(name.removesuffix(DEFAULT_TAG))
    return {"data": [entries[name] | {"aliases": names} for name, names in found.items()]}


class ModelEvent(NamedTuple):
    """One event of `/models/sse`."""

    model: str | None  # None: of the whole list
    progress: float | None  # share of the load that is done; None: it tells of a status


_EVENTS = msgspec.json.Decoder(dict[str, Any])


class EventLines:
    """Cuts `/models/sse` into events. A line that is too long is passed over."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, part: bytes) -> Iterator[ModelEvent]:
        """More bytes came; the events that end in them."""
        *lines, rest = (self._rest + part).split(b"\n")
        # As a comment, a line that is too long says nothing up to its end.
        self._rest = rest if len(rest) <= LONGEST_EVENT else b":"
        for line in lines:
            if (event := _read_event(line)) is not None:
                yield event


def _read_event(line: bytes) -> ModelEvent | None:
    if not line.startswith(b"data:") or len(line) > LONGEST_EVENT:
        return None
    try:
        event = _EVENTS.decode(line[5:])
    except UNREADABLE:
        return None
    model, data = event.get("model"), _as(dict, event.get("data"))
    value = _as(dict, data.get("progress")).get("value")
    is_share = isinstance(value, (int, float)) and 0.0 <= value <= 1.0
    return ModelEvent(model if isinstance(model, str) else None, value if is_share else None)


@dataclass(slots=True)
class ModelLoad:
    """Whether one model of a router is loaded, and how its loads went. Times are monotonic."""

    phase: LoadPhase = LoadPhase.UNLOADED
    reason: str = ""  # for an operator: why it is in this phase
    since: float = -math.inf
    progress: float | None = None  # share of the load that is done, as the router tells it
    ordered: Literal["load", "unload"] | None = None
    """The command of ours whose end has not been seen."""
    taken_at: float = math.inf  # when the router answered that command; infinity: it has not
    listed_at: float = -math.inf  # when the last list was asked for that told of it
    by_others_at: float = -math.inf
    """When a load or unload was seen that was not ours, or an operator ordered an unload."""
    failures: int = 0  # loads in a row that failed
    retry_at: float = -math.inf
    cause: UnloadCause = "others"  # why it is being unloaded, or was the last time
    loads: int = 0
    load_seconds: float = 0.0  # of all these loads together
    memory: int | None = None  # bytes that it takes when it is loaded, as learnt from a load
    file: str | None = None  # the path of its file on the router's machine
    listed: RoutedModel | None = None  # as its router listed it last
    saved: int = 0  # prompts that are saved for its next load
    no_room: str = ""  # why it can't be loaded beside what always stays there; empty: it can
    restoring: bool = False  # it is loaded, and gets no requests before they are restored
    held: bool | None = None
    """Whether its server holds it, whatever the phase is; of kind `openai`, where that is told."""
    doubted: bool = False
    """Whether a request has found it not loaded: it gets no other before its server has answered.
    Of a model that another one unloads the list says for ten seconds that it is loaded."""

    def expected_in(self, seconds: float, now: float) -> float:
        """Seconds until it can be loaded, if a load takes so many and is ordered now at latest."""
        if self.held:
            return 0.0
        if self.phase is LoadPhase.LOADING:
            elapsed = now - self.since
            # A load that takes longer than usual is likely to take some more.
            return max(seconds - elapsed, 0.5 + 0.2 * elapsed)
        if self.phase is LoadPhase.FAILED:
            return seconds + max(0.0, self.retry_at - now)
        return 0.0 if self.phase is LoadPhase.READY else seconds

    @property
    def loaded(self) -> bool:
        """Whether its server runs with the model."""
        return self.phase is LoadPhase.READY or self.phase is LoadPhase.RETIRING

    def enter(
        self, phase: LoadPhase, reason: str, now: float, cause: UnloadCause | None = None
    ) -> None:
        """Begin another phase, without a command of ours; `cause`: why it is unloaded, if it is."""
        self.phase, self.reason, self.since, self.ordered = phase, reason, now, None
        self.progress, self.doubted = None, False
        self.cause = cause or self.cause

    def order(self, command: Literal["load", "unload"], reason: str, now: float) -> None:
        """The router is told to load it, or to unload it."""
        self.enter(LoadPhase.LOADING if command == "load" else LoadPhase.UNLOADING, reason, now)
        self.ordered, self.taken_at = command, math.inf

    def retire(self, reason: str, cause: UnloadCause, now: float) -> None:
        """It gets no new requests, and is unloaded when it has none."""
        if self.phase is not LoadPhase.RETIRING:
            self.enter(LoadPhase.RETIRING, reason, now, cause)

    def keep(self, reason: str, now: float) -> None:
        """It is not unloaded after all."""
        if self.phase is LoadPhase.RETIRING:
            self.enter(LoadPhase.READY, reason, now)

    def tell_held(self, held: bool | None) -> None:  # noqa: FBT001 - a value
        """Its server holds it, or does not; None: unknown."""
        self.held = held

    def woke(self, seconds: float, now: float) -> None:
        """The first request has loaded it: from now on it is used."""
        self.held, self.since = self.held if self.held is None else True, now
        self.load_ended(seconds)

    def progressed(self, share: float) -> None:
        """So much of it is loaded."""
        if self.phase is LoadPhase.LOADING:
            self.progress = share

    def tell_room(self, no_room: str) -> None:
        """Why it can't have room beside what always stays there; empty: it can."""
        self.no_room = no_room

    @property
    def hindrance(self) -> str:
        """Why a request for it may wait in vain; empty: it is loaded, or a load may come."""
        return "" if self.loaded else self.reason if self.failures else self.no_room

    def prompts_saved(self, count: int) -> None:
        """So many of its prompts are saved for its next load."""
        self.saved = count

    def restores(self, *, restoring: bool) -> None:
        """Its saved prompts are restored from now on, or no more."""
        self.restoring = restoring

    def wanted(self, command: Literal["load", "unload"], now: float) -> None:
        """An operator orders it: a load whatever came before, or an unload that lasts a while."""
        self.by_others_at = now if command == "unload" else -math.inf
        self.retry_at = -math.inf if command == "load" else self.retry_at

    def load_ended(self, seconds: float | None) -> None:
        """It is loaded; None: its begin was not seen."""
        self.failures = 0
        if seconds is not None:
            self.loads += 1
            self.load_seconds += seconds

    def failed(self, why: str, now: float) -> None:
        """A load failed, or the command for it: it is tried again later, each time after longer."""
        self.retry_at = now + min(MOST_RETRY, FIRST_RETRY * 2.0 ** min(self.failures, 16))
        self.failures += 1
        self.enter(LoadPhase.FAILED, why, now)

    def command_taken(self, now: float) -> None:
        """The router has answered the command: lists that are asked for from now on show it."""
        self.taken_at = now

    def load_refused(self, why: str, now: float) -> None:
        """The router had no room for it, or did not hear of it: that says nothing of the model."""
        self.retry_at = now + REFUSED_RETRY
        self.enter(LoadPhase.UNLOADED, why, now)

    def retry_due(self, now: float) -> bool:
        """Its load failed and may be tried again; then it counts as unloaded."""
        if self.phase is not LoadPhase.FAILED or now < self.retry_at:
            return False
        self.enter(LoadPhase.UNLOADED, f"its last load failed: {self.reason}", now)
        return True

    def is_news(self, model: RoutedModel, asked_at: float) -> bool:
        """Whether the router lists it otherwise than before, or it is not as listed."""
        before, self.listed, self.listed_at = self.listed, model, asked_at
        is_steady = not self.unsettled and self.phase in _STEADY_PHASES
        return before != model or not is_steady

    @property
    def unsettled(self) -> bool:
        """Whether it is looked at soon again."""
        return self.ordered is not None or self.doubted

    def doubt(self, *, doubted: bool) -> None:
        """A request has found it not loaded; or its server has answered since."""
        self.doubted = doubted

    def reported(
        self, model: RoutedModel, asked_at: float, now: float, *, followed: bool | None
    ) -> LoadChange | None:
        """The router lists it so; what that changes, or None.

        `followed`: whether its events were followed since its last list, so that it is still the
        process that it was; None: it tells of none.
        """
        self.file, self.memory = model.file, model.memory or self.memory
        status, phase = model.status, self.phase
        if status is None or (self.ordered is not None and self._may_lag(status, asked_at)):
            return None
        if status == "loading":
            known = phase is LoadPhase.LOADING
            return None if known else self._changed("loading", now, followed=followed)
        if status == "unloaded":
            known = phase is LoadPhase.UNLOADED or phase is LoadPhase.FAILED
            return None if known else self._not_loaded(model, now, followed=followed)
        unloads = phase is LoadPhase.UNLOADING and now - self.since <= MOST_UNLOAD
        return None if self.loaded or unloads else self._changed("loaded", now, followed=followed)

    def _may_lag(self, status: Status, asked_at: float) -> bool:
        """Whether the list may be older than the command that it contradicts."""
        if self.ordered == "load":
            return status == "unloaded" and asked_at < self.taken_at
        return status != "unloaded" and asked_at - self.since < COMMAND_LAG

    def _not_loaded(self, model: RoutedModel, now: float, *, followed: bool | None) -> LoadChange:
        if self.phase is LoadPhase.LOADING and (model.failed or followed is not False):
            # One that is told to unload it meanwhile shows the same, and a list that was read
            # anew shows no failure at all.
            code = "" if model.exit_code is None else f" (exit code {model.exit_code})"
            self.failed(f"the router could not load it{code}: its log says why", now)
            return LoadChange("failed")
        if model.failed and self.phase is not LoadPhase.UNLOADING:
            self.enter(LoadPhase.UNLOADED, "its server ended by itself", now, "died")
            return LoadChange("died")
        return self._changed("unloaded", now, followed=followed)

    def _changed(
        self, change: Literal["loading", "loaded", "unloaded"], now: float, *, followed: bool | None
    ) -> LoadChange:
        """The phase follows what the router shows."""
        ended = change == "loaded" and self.phase is LoadPhase.LOADING
        ours = ended or self.ordered == ("unload" if change == "unloaded" else "load")
        reason, cause, seconds = self.reason, self.cause, now - self.since if ended else None
        by_others = not ours and followed is True
        if by_others:
            self.by_others_at = now
        if not ours and change != "unloaded" and not followed:
            reason = "found so"
        elif not ours and followed is False:
            reason, cause = "the router was restarted", "restart"
        elif not ours:
            reason, cause = "not by this gateway", "others"
        if change == "loaded":
            self.load_ended(seconds)
        self.enter(_PHASES[change], reason, now, cause)
        return LoadChange(change, seconds, by_others)


_PHASES = {"loading": LoadPhase.LOADING, "loaded": LoadPhase.READY, "unloaded": LoadPhase.UNLOADED}


class LoadChange(NamedTuple):
    """What a list has changed for one model."""

    change: Literal["loading", "loaded", "unloaded", "failed", "died"]
    seconds: float | None = None  # that a load took, if its begin was seen
    by_others: bool = False  # it was neither ours nor the end of a process


@dataclass(slots=True)
class RouterRecord:
    """What is known of a router besides its models. Times are monotonic."""

    most_loaded: int = 0  # models that it was seen to hold at once; 0: it tells none
    running_paths: tuple[str, ...] = RUNNING_PATHS
    followed_since: float | None = math.inf
    """Since when its events are followed; infinity: they aren't; None: it is an old one, without
    `/models/sse`."""
    stopped_until: float = -math.inf
    """Until when it gets no commands, since others load and unload its models too."""
    _held: frozenset[str] = frozenset()  # models that it held, as it told last
    _by_others: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_BY_OTHERS))

    def tells_running(self, paths: tuple[str, ...]) -> None:
        """It may tell what it holds at one of these paths."""
        self.running_paths = paths

    def holds(self, models: frozenset[str]) -> None:
        """It holds these models now, which shows how many it holds at once."""
        made_room = bool(self._held - models and models - self._held)
        if len(models) > self.most_loaded or made_room:
            self.most_loaded = len(models)
        self._held = models

    def following(self, since: float | None) -> None:
        """Its events are followed since then; infinity: no more; None: it has none."""
        self.followed_since = since

    def followed(self, listed_at: float) -> bool | None:
        """Whether its events were followed since a list was asked for; None: it has none."""
        return None if self.followed_since is None else self.followed_since <= listed_at

    def changed_by_others(self, now: float) -> bool:
        """Another one has loaded or unloaded a model; whether that was once too often."""
        self._by_others.append(now)
        many = len(self._by_others) == MOST_BY_OTHERS
        stops = many and now - self._by_others[0] <= BY_OTHERS_SECONDS and not self.stopped(now)
        if stops:
            self.stopped_until = now + OTHERS_PAUSE
        return stops

    def trust(self) -> None:
        """An operator says that it may be commanded again."""
        self.stopped_until = -math.inf
        self._by_others.clear()

    def stopped(self, now: float) -> bool:
        """Whether it gets no commands for now."""
        return now < self.stopped_until
