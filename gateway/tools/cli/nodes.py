"""`llama-gateway nodes`: the running fleet, through the admin API."""

from __future__ import annotations

import enum
import sys
import time
from typing import Annotated, Any

import typer

from gateway.tools.cli import options
from gateway.tools.cli.admin_client import AdminClient, connect_admin
from gateway.tools.cli.options import examples_epilog
from gateway.tools.cli.terminal import (
    CommandFailed,
    format_cell,
    print_json,
    print_note,
    print_table,
)

EXAMPLES = examples_epilog(
    ("llama-gateway nodes", "every node, its state and the reason"),
    ("llama-gateway nodes drain epyc-a --wait", "no new work for it; ends when it runs nothing"),
    ("llama-gateway nodes drain epyc-a --deadline 60", "what still runs after 60 s is moved"),
    ("llama-gateway nodes resume epyc-a", "back to work"),
    ("llama-gateway nodes probe epyc-a", "ask it now; if it answers, trust it again"),
    ("llama-gateway nodes --json | jq -r '.nodes[].name'", "for scripts"),
)

DRAIN_POLL_INTERVAL = 0.5
"""How often a drain that is waited for is looked at."""

MOST_FAILED_POLLS = 5
"""Looks in a row that may fail before waiting is given up."""

_NOT_ANSWERING = frozenset({"down", "loading", "mute"})

_COLUMNS = (
    "NAME",
    "STATE",
    "SLOTS",
    "RUNNING",
    "MODELS",
    "CONTEXT",
    "PREFILL/S",
    "DECODE/S",
    "REQUESTS",
    "FAILURES",
    "REASON",
)


class NodeAction(enum.StrEnum):
    """What to do."""

    LIST = "list"
    DRAIN = "drain"
    RESUME = "resume"
    PROBE = "probe"


def nodes(
    action: Annotated[
        NodeAction, typer.Argument(metavar="|".join(NodeAction), help="What to do.")
    ] = NodeAction.LIST,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The node; for all but list.")
    ] = None,
    admin_url: options.AdminUrl = None,
    admin_key_file: options.AdminKeyFile = None,
    config: options.ConfigFile = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Drain: end only when the node runs nothing any more.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.0, metavar="SECONDS", help="Longest --wait.")
    ] = 3600.0,
    deadline: Annotated[
        float | None,
        typer.Option(
            "--deadline",
            min=0.0,
            metavar="SECONDS",
            show_default="none",
            help="Drain: what still runs after this time is moved to another node or ended.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show the nodes of the running gateway; drain, resume or probe one.

    A drained node gets no new work and ends what it runs; it stays drained over a restart of the
    gateway, until it is resumed.
    """
    if (name is None) != (action is NodeAction.LIST):
        need = "takes no node's name" if action is NodeAction.LIST else "needs the name of a node"
        raise typer.BadParameter(f"{action.value} {need}", param_hint="NAME")
    if action is not NodeAction.DRAIN and (wait or deadline is not None):
        raise typer.BadParameter("only a drain has it", param_hint="--wait, --deadline")
    with connect_admin(admin_url, admin_key_file, config) as admin:
        if name is None:
            _list(admin.nodes(), as_json=as_json)
            return
        admin.node_action(
            name, action.value, **({} if deadline is None else {"deadline": deadline})
        )
        node = admin.node(name)
        if wait:
            node = _wait(admin, node, timeout)
    if as_json:
        print_json(node)
    else:
        print(f"{format_cell(name)}: {_told(node)}")
    if action is NodeAction.PROBE and node.get("state") in _NOT_ANSWERING:
        raise typer.Exit(1)


def _list(nodes: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json({"nodes": nodes})
    elif nodes:
        print_table(_COLUMNS, map(_row, nodes), state_column=1)
    else:
        print_note("the gateway has no nodes")


def _row(node: dict[str, Any]) -> list[object]:
    get = node.get
    return [
        get("name"),
        get("state"),
        f"{format_cell(get('slots_busy'))}/{format_cell(get('slots_total'))}",
        get("in_flight"),
        get("models"),
        get("context"),
        get("prefill_tps"),
        get("decode_tps"),
        get("requests"),
        get("failures"),
        None if get("state") == "ready" else get("reason"),
    ]


def _told(node: dict[str, Any]) -> str:
    """State, reason and running work in a line."""
    told = format_cell(node.get("state"))
    if node.get("reason"):
        told += f" ({format_cell(node['reason'])})"
    if running := node.get("in_flight"):
        told += f", {format_cell(running)} running"
    return told


def _wait(admin: AdminClient, node: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Follow a drain until the node runs nothing.

    Raises: CommandFailed if that takes longer than `timeout` seconds, or somebody resumed it.
    """
    from rich.status import Status

    from gateway.tools.cli.terminal import console

    name = str(node.get("name"))
    end = time.monotonic() + timeout
    failed = 0
    shown = console(sys.stderr)
    with Status(f"{format_cell(name)}: {_told(node)}", console=shown) as status:
        if not shown.is_terminal:
            status.stop()
        while node.get("in_flight"):
            if time.monotonic() >= end:
                raise CommandFailed(
                    f"{name} still runs {format_cell(node.get('in_flight'))} after {timeout:g} s; "
                    "it stays drained"
                )
            time.sleep(min(DRAIN_POLL_INTERVAL, max(0.0, end - time.monotonic())))
            try:
                node = admin.node(name)
            except CommandFailed:
                failed += 1
                if failed >= MOST_FAILED_POLLS:
                    raise
                continue
            failed = 0
            if node.get("state") not in {"draining", "standby"}:
                raise CommandFailed(f"{name} is no longer drained: {_told(node)}")
            status.update(f"{format_cell(name)}: {_told(node)}")
    return node
