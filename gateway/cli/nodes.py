"""`llama-gateway nodes` and `models`: show both, and act on them through the admin API."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal, get_args
from urllib.parse import quote

import typer

from gateway.cli import options, terminal
from gateway.cli.client import AdminClient, AdminFlags, NoGateway, objects
from gateway.cli.options import Panel, argument, examples_epilog, flag
from gateway.cli.terminal import CommandFailed, WrongUsage, format_cell

NODES_EXAMPLES = examples_epilog(
    ("llama-gateway nodes", "every node, its state and the reason"),
    ("llama-gateway nodes drain epyc-a --wait", "no new requests for it; ends when it is idle"),
    (
        "llama-gateway nodes drain epyc-a --deadline 60",
        "requests that still run after 60 s are moved",
    ),
    ("llama-gateway nodes resume epyc-a", "new requests for it again"),
    ("llama-gateway nodes probe epyc-a", "probe it now; a good probe closes its circuit"),
    ("llama-gateway nodes drain --host epyc-a --dry-run", "what a drain of a host would touch"),
    ("llama-gateway nodes drain --label rack=b --wait", "a rack, until it is idle"),
    ("llama-gateway nodes resume --all-but epyc-b", "all the others again"),
    ("llama-gateway nodes --json | jq -r '.nodes[].name'", "for scripts"),
)

FIRST_POLL_INTERVAL = 0.02  # seconds; it doubles with each poll of a drain
LONGEST_POLL_INTERVAL = 0.5
MOST_FAILED_POLLS = 5  # polls in a row that may fail before the command gives up
MOST_NAMED = 8  # models of a warning
_which = Panel("Which nodes")
# States of nodes that serve their models, or will in a moment.
SERVING_STATES = frozenset(
    {*("ready", "degraded", "mute", "sleeping", "loading", "starting"), "unloaded", "unloading"}
)
_NOT_ANSWERING = frozenset({"down", "loading", "mute"})
NodeAction = Literal["list", "drain", "resume", "probe"]


class NodeSelection(options.FlagGroup):
    """What a command line says of nodes. Raises: CommandFailed, for a label that is none."""

    names: list[str] = argument("NAME", "The nodes; or choose them by the options below.", None)
    hosts: list[str] = _which(
        "HOST", "Nodes of this host, as the inventory says; repeat it for several.", name="--host"
    )
    labels: list[str] = _which(
        "KEY=VALUE", "Nodes with this label; of several they must have all.", name="--label"
    )
    all_but: list[str] = _which("NAME", "All nodes but this one; repeat it for several.")

    def __init__(self, **values: Any) -> None:
        super().__init__(**{name: value or [] for name, value in values.items()})
        self._labels = set[tuple[str, str]]()
        for text in self.labels:
            key, equals, value = text.partition("=")
            if not key or not equals:
                raise WrongUsage(f"--label {text}: must be like rack=b")
            self._labels.add((key, value))

    @property
    def is_filter(self) -> bool:
        """Whether nodes are chosen by what they have."""
        return bool(self.hosts or self.labels or self.all_but)

    def choose(self, nodes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of the nodes that are meant. Raises: CommandFailed, if a name or all fit none."""
        known = {str(node.get("name")): node for node in nodes}
        unknown = [name for name in (*self.names, *self.all_but) if name not in known]
        if unknown:
            raise CommandFailed(
                f"there is no node {', '.join(map(repr, unknown))}: llama-gateway nodes lists them"
            )
        found = [
            node
            for name, node in known.items()
            if (name in self.names if self.names else not node.get("router"))
            and (not self.hosts or node.get("host") in self.hosts)
            and self._labels <= (node.get("labels") or {}).items()
            and name not in self.all_but
        ]
        if not found:
            raise CommandFailed("no node fits: llama-gateway nodes --json shows hosts and labels")
        return found


def nodes(
    *,
    action: NodeAction = argument("|".join(get_args(NodeAction)), "What to do.", "list"),
    selection: NodeSelection,
    dry_run: bool = flag.switch("--dry-run", "Only show the nodes that it would touch."),
    yes: bool = flag.switch(
        "--yes", "Drain a group though nobody else serves a model of it; do not ask."
    ),
    gateway: AdminFlags,
    wait: bool = flag.switch("--wait", "Drain: end only when the nodes are idle."),
    timeout: float = flag("SECONDS", "Longest --wait.", 3600.0, min=0.0),
    deadline: float | None = flag(
        "SECONDS",
        "Drain: requests that still run after this time are moved to another node or ended.",
        min=0.0,
        show_default="none",
    ),
    as_json: bool = options.JSON,
) -> None:
    """Show the nodes of the running gateway; drain, resume or probe some.

    A drained node gets no new requests and finishes those that it has; it stays drained, over
    restarts of the gateway too, until it is resumed.
    """
    listing = action == "list"
    names, is_empty = selection.names, not (selection.names or selection.is_filter)
    problem = None
    if listing and names:
        problem = "list takes no node's name"
    elif not listing and is_empty:
        problem = f"{action} needs the name of a node, --host, --label or --all-but"
    elif names and selection.is_filter:
        problem = "name the nodes, or choose them by --host, --label and --all-but"
    if problem is not None:
        raise typer.BadParameter(problem, param_hint="NAME")
    if action != "drain" and (wait or deadline is not None):
        raise typer.BadParameter("only a drain has it", param_hint="--wait, --deadline")
    parameters = {} if deadline is None else {"deadline": deadline}
    longest = timeout if wait else None
    with gateway.connect() as admin:
        if listing:
            found = admin.nodes()
            _list(found if is_empty else selection.choose(found), as_json=as_json)
            if is_empty and not as_json:
                _list_members(admin)
            return
        alone = len(names) == 1
        if dry_run or not alone:
            everything = admin.nodes()
            chosen = selection.choose(everything)
            if not as_json or dry_run:
                _list(chosen, as_json=as_json)
            if dry_run:
                return
            if action == "drain" and not yes:
                _confirm(models_left_without(chosen, everything))
            names = [str(node.get("name")) for node in chosen]
        _act(admin, names, action, parameters, longest, as_json=as_json, alone=alone)


def _act(
    admin: AdminClient,
    names: list[str],
    action: NodeAction,
    parameters: dict[str, float],
    wait: float | None,
    *,
    as_json: bool,
    alone: bool,
) -> None:
    """Do it to each node, whatever becomes of the others; one that is named alone is shown alone.

    `wait`: most seconds until drained nodes are idle; None: do not wait. Raises: CommandFailed.
    """
    done, failed = dict[str, dict[str, Any]](), dict[str, str]()
    for name in names:
        try:
            admin.node_action(name, action, **parameters)
            done[name] = admin.node(name)
        except CommandFailed as error:
            if alone or isinstance(error, NoGateway):
                raise
            failed[name] = str(error)
    end = time.monotonic() + (wait or 0.0)
    for name, node in done.items():
        try:
            if wait is not None:
                done[name] = _wait(admin, node, max(0.0, end - time.monotonic()))
        except CommandFailed as error:
            if alone:
                raise
            failed[name] = str(error)
            continue
        if action == "probe" and node.get("state") in _NOT_ANSWERING:
            failed[name] = f"it does not answer: {_summary(node)}"
        if not as_json:
            print(f"{format_cell(name)}: {_summary(done[name])}")
    if as_json:
        errors = [{"name": name, "error": error} for name, error in failed.items()]
        all_of_them = {"nodes": list(done.values()), "failed": errors}
        terminal.print_json(done[names[0]] if alone else all_of_them)
    if failed and alone:
        raise typer.Exit(1)
    if failed:
        told = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise CommandFailed(f"{len(failed)} of {len(names)} nodes failed: {told}")


def _confirm(models: list[str]) -> None:
    """Ask before models are left without a node. Raises: CommandFailed."""
    if not models:
        return
    shown = ", ".join(map(format_cell, models[:MOST_NAMED]))
    if (more := len(models) - MOST_NAMED) > 0:
        shown += f" and {more} more"
    problem = f"no other node serves {shown}: requests would wait, and then fail"
    if not sys.stdin.isatty():
        raise CommandFailed(f"{problem}; --yes drains them all the same")
    terminal.print_note(f"warning: {problem}")
    if not typer.confirm("Drain them all the same?", err=True):
        raise CommandFailed("nothing was drained")


def _list(nodes: list[dict[str, Any]], *, as_json: bool) -> None:
    # Of a router's models those that it could load stand in `models`.
    shown = [one for one in nodes if one.get("state") != "unloaded" or not one.get("router")]
    nothing, told = "the gateway has no nodes", {"nodes": nodes}
    rows = map(_row, shown or nodes)
    terminal.print_listing(told, rows, nothing, as_json=as_json, state_column=1)


def _row(node: dict[str, Any]) -> list[tuple[str, object]]:
    get = node.get
    return [
        ("NAME", get("name")),
        ("STATE", terminal.state_in_words(node)),
        ("SLOTS", f"{format_cell(get('slots_busy'))}/{format_cell(get('slots_total'))}"),
        ("RUNNING", get("in_flight")),
        ("MODELS", get("models")),
        ("CONTEXT", _context(get("context"), get("pool"))),
        ("PREFILL/S", _speed(node, "prefill_tps")),
        ("DECODE/S", _speed(node, "decode_tps")),
        ("REQUESTS", get("requests")),
        ("FAILURES", get("failures")),
        ("REASON", get("reason") if get("state") != "ready" else _dedicated(node)),
    ]


def _list_members(admin: AdminClient) -> None:
    """The machines of the gateway's cluster, if it is a member of one."""
    with suppress(CommandFailed):
        if cluster := admin.request("GET", "/admin/status").get("cluster"):
            print()
            terminal.print_rows(map(_member_row, objects(cluster, "members")))


def _member_row(member: dict[str, Any]) -> list[tuple[str, object]]:
    """A machine of the cluster, with what its edges do together."""
    get, edges = member.get, objects(member, "edges")
    ready = sum(bool(one.get("ready")) for one in edges)
    heard = get("heard_seconds")
    return [
        ("MEMBER", get("name")),
        ("ROLE", get("role")),
        ("ADDRESS", get("address")),
        ("HEARD", None if heard is None else f"{heard:.1f} s ago"),
        ("EDGES", f"{ready}/{len(edges)}"),
        ("STREAMS", sum(one.get("streams", 0) for one in edges)),
        ("CPU", f"{sum(one.get('cpu_share', 0) for one in edges):.2f}/{format_cell(get('cores'))}"),
        ("VERSION", get("version")),
    ]


def _dedicated(node: dict[str, Any]) -> str | None:
    """What a ready node is for, if not for chats."""
    if node.get("slots_total") == 0:
        return node.get("reason")  # a router
    purpose = node.get("purpose")
    return f"for {purpose}" if purpose in {"embeddings", "rerank"} else None


def _context(tokens: object, pool: dict[str, int] | None) -> str:
    """Tokens of a slot; or how many are taken of those that all slots share."""
    if not pool:
        return format_cell(tokens)
    return f"{pool.get('reserved', 0) + pool.get('foreign', 0)}/{pool.get('tokens')} shared"


def _speed(node: dict[str, Any], key: str) -> object:
    """The measured speed, else the first guess of a calibration."""
    calibration = node.get("calibration") or {}
    if node.get(key) is None and calibration.get("in_use") and calibration.get(key):
        return f"~{format_cell(calibration[key])}"
    return node.get(key)


def _summary(node: dict[str, Any]) -> str:
    state, reason, running = (format_cell(node.get(x)) for x in ("state", "reason", "in_flight"))
    told = state + (f" ({reason})" if node.get("reason") else "")
    return told + (f", {running} running" if node.get("in_flight") else "")


def _wait(admin: AdminClient, node: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Poll a draining node until it is idle.

    Raises CommandFailed after `timeout` seconds, or when the node has been resumed.
    """
    from rich.status import Status

    name, end = str(node.get("name")), time.monotonic() + timeout
    failed, interval = 0, FIRST_POLL_INTERVAL
    shown = terminal.console(sys.stderr)
    with Status(f"{format_cell(name)}: {_summary(node)}", console=shown) as status:
        if not shown.is_terminal:
            status.stop()
        while node.get("in_flight"):
            if time.monotonic() >= end:
                raise CommandFailed(
                    f"{name} still runs {format_cell(node.get('in_flight'))} after "
                    f"{timeout:.3g} s; it stays drained"
                )
            time.sleep(min(interval, max(0.0, end - time.monotonic())))
            interval = min(2 * interval, LONGEST_POLL_INTERVAL)
            try:
                node, failed = admin.node(name), 0
            except CommandFailed:
                failed += 1
                if failed >= MOST_FAILED_POLLS:
                    raise
                continue
            if node.get("state") not in {"draining", "standby"}:
                raise CommandFailed(f"{name} is no longer drained: {_summary(node)}")
            status.update(f"{format_cell(name)}: {_summary(node)}")
    return node


def models_left_without(
    chosen: Iterable[dict[str, Any]], nodes: Iterable[dict[str, Any]]
) -> list[str]:
    """Return the models that the chosen nodes serve now, and no other node does."""
    taken = {node.get("name") for node in chosen}
    by_others, by_chosen = set[str](), set[str]()
    for node in nodes:
        if node.get("state") in SERVING_STATES:
            is_taken = node.get("name") in taken or node.get("router") in taken - {None}
            served = by_chosen if is_taken else by_others
            served.update(map(str, node.get("models") or ()))
    return sorted(by_chosen - by_others)


# `llama-gateway models`.


MODELS_EXAMPLES = examples_epilog(
    ("llama-gateway models", "every public name, its nodes, and whether it is paused"),
    ("llama-gateway models pause mistral-7b", "no new requests for it: 503 with Retry-After"),
    ("llama-gateway models resume mistral-7b", "requests for it again"),
    ("llama-gateway models load mistral-7b epyc-a", "the router epyc-a loads it now"),
    ("llama-gateway models pin mistral-7b epyc-a", "and keeps it, over restarts too"),
    ("llama-gateway models --json | jq -r '.models[] | select(.paused) | .name'", "for scripts"),
)

ModelAction = Literal["list", "pause", "resume", "load", "unload", "pin", "unpin"]
# Those about one node; the others are about a name.
_ORDERS = frozenset({"load", "unload", "pin", "unpin"})


def models(
    *,
    action: ModelAction = argument("|".join(get_args(ModelAction)), "What to do.", "list"),
    name: str | None = argument("NAME", "The public name; needed for all but list.", None),
    node: str | None = argument(
        "NODE", "The router; needed for load, unload, pin and unpin.", None
    ),
    gateway: AdminFlags,
    as_json: bool = options.JSON,
) -> None:
    """Show the models of the running gateway; pause, resume, load, unload or pin one.

    Requests for a paused name get 503 model_paused with Retry-After, and those that wait for it
    too; what runs ends by itself, and lines of batches wait. An alias of which every model is
    paused is paused as well; others of its models go on. A pause lasts over restarts of the
    gateway, until it is resumed. Paused models stay in /v1/models.

    A router (llama-server --models-dir) loads models on demand, as the gateway tells it. An order
    to unload one lets its requests end first; it is loaded again when requests wait for it. One
    that is pinned to a node is always loaded there; a pin lasts over restarts, until unpin.
    """
    if (name is None) != (action == "list"):
        need = "takes no model's name" if action == "list" else "needs a model's name"
        raise typer.BadParameter(f"{action} {need}", param_hint="NAME")
    if (node is None) == (action in _ORDERS):
        need = "needs a router's name" if action in _ORDERS else "takes no node's name"
        raise typer.BadParameter(f"{action} {need}", param_hint="NODE")
    with gateway.connect() as admin:
        if name is None:
            found = admin.request("GET", "/admin/models")
            found |= admin.request("GET", "/admin/placements")
            _list_models(found, as_json=as_json)
            return
        if action in _ORDERS:
            order = {"order": action, "model": name, "node": node}
            model = admin.request("POST", "/admin/placements", body=order)
        else:
            model = admin.request("POST", f"/admin/models/{quote(name, safe='')}/{action}")
    if action in _ORDERS:
        state = terminal.state_in_words(model) + (", pinned" if model.get("pinned_by") else "")
        told = f"{format_cell(model.get('name'))}: {state}; {format_cell(model.get('reason'))}"
    else:
        told = f"{format_cell(name)}: {_state_of(model)}"
    terminal.print_answer(model, told, as_json=as_json)
    if action == "resume" and model.get("paused") and not as_json:
        terminal.print_note("note: every model that it stands for is paused: resume one of them")


def _list_models(found: dict[str, Any], *, as_json: bool) -> None:
    shown = objects(found, "models")
    nothing = "no node has said yet what it serves"
    terminal.print_listing(found, map(_model_row, shown), nothing, as_json=as_json)
    if as_json or not shown:
        return
    placements = found.get("placements", ())
    held = [one for one in placements if one["state"] != "unloaded" or one["load_failures"]]
    if held:
        print()
        terminal.print_rows(map(_placement_row, held), state_column=2)
    for host, use in found.get("hosts", {}).items():
        terminal.print_note(
            f"{format_cell(host)}: {_size(use['used'])} of {_size(use['memory'])} taken"
        )
    told = dict.fromkeys(difference for one in shown for difference in one["differences"])
    for difference in told:
        terminal.print_note(f"warning: nodes of one model differ: {difference}")


def _model_row(model: dict[str, Any]) -> list[tuple[str, object]]:
    return [
        ("NAME", model["name"]),
        ("STATE", _state_of(model)),
        ("NODES", ", ".join(f"{count} {state}" for state, count in model["nodes"].items())),
        ("SLOTS", f"{model['slots_busy']}/{model['slots_total']}"),
        ("WAITING", model["waiting"]),
        ("STANDS FOR", model["stands_for"]),
    ]


def _state_of(model: dict[str, Any]) -> str:
    states = {state for state, count in model["nodes"].items() if count}
    if model["paused"]:
        return "paused"
    if states & {"ready", "degraded", "mute", "sleeping"}:
        return "served"
    return "on demand" if states & {"unloaded", "unloading", "loading"} else "no node"


def _placement_row(one: dict[str, Any]) -> list[tuple[str, object]]:
    return [
        ("MODEL", one["model"]),
        ("NODE", one["node"]),
        ("STATE", terminal.state_in_words(one)),
        ("SINCE", one["since"]),
        ("REQUESTS", one["requests"]),
        ("LOADS", one["loads"]),
        ("LOAD S", one["expected_load_seconds"]),
        ("MEMORY", _size(one["memory"])),
        ("PINNED", one["pinned_by"]),
        ("REASON", one["reason"] if one["state"] != "ready" else None),
    ]


def _size(value: int | None) -> str:
    from gateway.local.memory import format_gib

    return "-" if value is None else format_gib(value)
