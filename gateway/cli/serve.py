"""`llama-gateway serve` runs the gateway; `check` tells whether it would start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gateway.cli import options
from gateway.cli.options import examples_epilog
from gateway.cli.terminal import (
    CommandFailed,
    print_config_error,
    print_error,
    print_json,
    print_note,
    print_table,
)

if TYPE_CHECKING:
    from gateway.app.startup import StartProblem
    from gateway.cli.node_checks import NodeCheck
    from gateway.config.errors import Problem
    from gateway.config.inventory import Inventory

SERVE_EXAMPLES = examples_epilog(
    ("llama-gateway serve", "config/nodes.yaml and config/gateway.yaml, on 127.0.0.1:8000"),
    ("llama-gateway serve --nodes fleet.yaml --port 9000", "another inventory, another port"),
    (
        "llama-gateway serve --host 0.0.0.0 --allow-anonymous",
        "for everybody who can reach this machine, without keys",
    ),
)

CHECK_EXAMPLES = examples_epilog(
    ("llama-gateway check", "both files; starts nothing, sends nothing"),
    ("llama-gateway check --host 0.0.0.0", "would serve start with this flag?"),
    ("llama-gateway check --probe", "and asks every node for its properties"),
    ("llama-gateway check --nodes new.yaml && mv new.yaml config/nodes.yaml", "before a change"),
)

_CHECK_COLUMNS = ("NAME", "ANSWER", "SLOTS", "CONTEXT", "MODELS", "BUILD", "LATENCY", "REMARKS")


@options.takes(process=options.ProcessFlags)
def serve(
    *,
    nodes: options.NodesFile = options.DEFAULT_NODES,
    process: options.ProcessFlags,
) -> None:
    """Run the gateway over the nodes of the inventory, in the foreground.

    Both files are read again when they change and on SIGHUP. SIGTERM ends it: requests may finish
    within `shutdown.grace`; a second SIGTERM ends it at once. SIGUSR2 starts the same command
    again, perhaps of a newer version, which takes over without a refused connection.
    """
    from gateway.app.handover import restart_command
    from gateway.app.process import run
    from gateway.app.startup import StartError

    given = replace(process.startup(nodes), restart_command=restart_command())
    try:
        status = run(given)
    except StartError as error:
        raise CommandFailed(str(error), error.status) from None
    raise typer.Exit(status)


@options.takes(process=options.ProcessFlags)
def check(
    *,
    nodes: options.NodesFile = options.DEFAULT_NODES,
    process: options.ProcessFlags,
    probe: bool = typer.Option(False, "--probe", help="Ask every node for its properties as well."),
    as_json: options.Json = False,
) -> None:
    """Check whether serve would start with these files and flags, and list the problems if not.

    Give it the flags of serve. Every problem of both files is listed with its line and its remedy.
    Exit status 2 if serve would refuse to start, 1 for a node that does not answer.
    """
    import asyncio

    from gateway.app.startup import check_startup, empty_pools
    from gateway.config.errors import ConfigError

    given = process.startup(nodes)
    found = check_startup(given)
    if found.problems or found.start_problems or found.settings is None or found.inventory is None:
        if as_json:
            problems = [*map(_problem, found.problems), *map(_start_problem, found.start_problems)]
            print_json({"valid": False, "problems": problems})
        else:
            if found.problems:
                print_config_error(ConfigError(found.problems))
            for problem in found.start_problems:
                print_error(problem.message)
        raise typer.Exit(2)
    labels = (node.labels for node in found.inventory.nodes)
    warnings = [str(warning) for warning in found.inventory.warnings]
    warnings += empty_pools(found.settings, labels)
    if (policy := found.settings.policy) != "least_finish":
        warnings.append(
            f"policy: {policy} means least_finish now, and the next release refuses it; remove it"
        )
    checks: list[NodeCheck] = []
    differing: list[str] = []
    if probe:
        from gateway.cli.node_checks import check_nodes, differences

        checks = asyncio.run(check_nodes(found.inventory, found.settings))
        differing = differences(checks)
    if as_json:
        result: dict[str, Any] = {"valid": True, "problems": [], "warnings": warnings}
        if probe:
            result |= {"nodes": [one.as_dict() for one in checks], "differences": differing}
        print_json(result)
    else:
        _report(nodes, found.inventory, given.settings_file, warnings, checks)
        for difference in differing:
            print_note(f"warning: nodes of one model differ: {difference}")
    if any(one.fails for one in checks):
        raise typer.Exit(1)


def _problem(problem: Problem) -> dict[str, object]:
    return {
        "file": str(problem.file),
        "line": problem.line,
        "key": problem.key,
        "message": problem.message,
        "remedy": problem.remedy,
        "lines": list(problem.lines),
    }


def _start_problem(problem: StartProblem) -> dict[str, object]:
    return {
        "file": None,
        "line": 0,
        "key": problem.key,
        "message": problem.message,
        "remedy": "",
        "lines": [],
    }


def _report(
    nodes: Path,
    inventory: Inventory,
    settings: Path | None,
    warnings: list[str],
    checks: list[NodeCheck],
) -> None:
    count = len(inventory.nodes)
    print(f"{nodes}: valid, {count} {'node' if count == 1 else 'nodes'}")
    if settings is None:
        print(f"{options.DEFAULT_CONFIG}: not there, every setting has its default")
    else:
        print(f"{settings}: valid")
    for warning in warnings:
        print_note(f"warning: {warning}")
    if checks:
        print()
        print_table(_CHECK_COLUMNS, (one.table_row() for one in checks), state_column=1)
