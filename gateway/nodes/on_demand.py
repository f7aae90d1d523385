"""Endpoints of kind `openai` that load models by themselves: what they tell of what they hold.

llama-swap tells it at `/running`, Ollama at `/api/ps`. Neither path loads a model or keeps one (by
their sources). They get no commands: which models may get requests is decided here (a model is
opened and closed, `ModelLoad`), and the first request for an opened one loads it. What such a
server holds besides, loads for others or unloads by its own rules is followed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.nodes.node import Node
from gateway.nodes.router import (
    COMMAND_LAG,
    MOST_ALIASES,
    LoadChange,
    LoadPhase,
    RoutedModel,
    Status,
    UnloadCause,
    is_model_name,
    read_list,
)

LARGEST_RUNNING = 256 * 1024  # bytes of an answer to one of them
MOST_RUNNING = 100  # models that are read of it
DEFAULT_TAG = ":latest"  # Ollama's, which clients may leave out
_STATES = {"ready": True, "starting": False}  # llama-swap's of models that run, and go on running
# A model that was closed for one of these reasons stays so, though its server still holds it.
_OWN_CAUSES: frozenset[UnloadCause] = frozenset({"idle", "replicas", "operator"})


def read_running(answer: object) -> dict[str, bool] | None:
    """By its name: whether a model is loaded, or is being so; None: the answer is no such list."""
    listed = answer.get("running", answer.get("models")) if isinstance(answer, dict) else None
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
    data = listed.get("data") if isinstance(listed, dict) else None
    entries = {name: one for one in data or () if is_model_name(name := one.get("id"))}
    found: dict[str, list[object]] = {name: [] for name in entries}
    for name, entry in entries.items():
        meta = entry.get("meta")
        about = meta.get("llamaswap") if isinstance(meta, dict) else None
        owner = about.get("modelID") if isinstance(about, dict) else None
        if isinstance(owner, str) and owner in found and owner != name:
            found[owner].append(name)
            found.pop(name, None)
        elif isinstance(about, dict) and isinstance(own := about.get("aliases"), list):
            found[name] += own[:MOST_ALIASES]
        elif name.endswith(DEFAULT_TAG):
            found[name].append(name.removesuffix(DEFAULT_TAG))
    return {"data": [entries[name] | {"aliases": names} for name, names in found.items()]}


def follow_held(
    node: Node, status: Status | None, asked_at: float, *, restarted: bool
) -> LoadChange | None:
    """Take in whether the server of a router's model holds it; what that changes, or None.

    `restarted`: the server was away since the last list.
    """
    (router, load), sleep, now = node.routed, node.sleep, node.clock()
    if status == "loading" or (status is None and not restarted):
        return None
    before = None if restarted else load.held
    load.tell_held(None if status is None else status == "loaded")
    if load.phase is LoadPhase.UNLOADED or load.phase is LoadPhase.FAILED:
        if before and not load.held:
            return LoadChange("unloaded")
        # What was just closed is held until another one is loaded.
        stays = before and (load.cause in _OWN_CAUSES or now - load.since <= COMMAND_LAG)
        opened = sum(one.load is not None and one.load.loaded for one in router.instances.values())
        is_full = opened >= max(1, router.router_record.most_loaded)
        if not load.held or stays or is_full:
            return None
        load.enter(LoadPhase.READY, "found so", now)
        load.load_ended(None)
        sleep.props_read(True, now, asked=False)  # It may be unloaded at any time.
        sleep.woke()
        return LoadChange("loaded", None, by_others=before is False)
    if load.phase is not LoadPhase.READY or node.live_leases:
        return None  # What its requests meet is seen in their responses.
    if asked_at <= max(load.since, node.released_at):
        return None
    if load.held:
        sleep.woke()
    elif sleep.sleeping:
        sleep.props_read(True, now, asked=False)  # Whoever was to load it has left.
    else:
        reason = "its server was restarted" if restarted else "its server has unloaded it"
        load.enter(LoadPhase.UNLOADED, reason, now, "restart" if restarted else "others")
        sleep.restarted()
        return LoadChange("unloaded")
    return None
