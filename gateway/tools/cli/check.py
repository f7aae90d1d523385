"""`llama-gateway check`: what is wrong with the files, and what the nodes say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.tools.cli import options
from gateway.tools.cli.options import examples_epilog
from gateway.tools.cli.terminal import format_cell, print_error, print_json, print_note, print_table

if TYPE_CHECKING:
    from gateway.config.errors import Problem
    from gateway.config.inventory import Inventory
    from gateway.config.settings import Settings
    from gateway.startup import StartProblem
    from gateway.tools.cli.node_checks import NodeCheck


EXAMPLES = examples_epilog(
    ("llama-gateway check", "both files; nothing is started, nothing is sent"),
    ("llama-gateway check --host 0.0.0.0", "would serve start with this flag?"),
    ("llama-gateway check --probe", "and ask every node what it is"),
    ("llama-gateway check --nodes new.yaml && mv new.yaml config/nodes.yaml", "before a change"),
)


def check(
    nodes: options.NodesFile = options.DEFAULT_NODES,
    config: options.ConfigFile = None,
    host: options.Host = None,
    port: options.Port = None,
    admin_host: options.AdminHost = None,
    admin_port: options.AdminPort = None,
    admin_key_file: options.AdminKeyFile = None,
    allow_anonymous: options.AllowAnonymous = False,
    probe: Annotated[bool, typer.Option("--probe", help="Ask every node as well.")] = False,
    as_json: options.Json = False,
) -> None:
    """Tell whether serve would start with these files and flags, and what is wrong if not.

    Give it the flags that serve gets. Every problem of both files has its line and its remedy.
    Exit status 2 where serve would refuse to start, 1 for a node that does not answer.
    """
    from gateway.config.errors import ConfigError
    from gateway.startup import Options, check_startup

    given = Options(
        inventory_file=nodes,
        settings_file=options.settings_file(config),
        host=host,
        port=port,
        admin_host=admin_host,
        admin_port=admin_port,
        admin_key_file=admin_key_file,
        allow_anonymous=allow_anonymous,
    )
    found = check_startup(given)
    if found.problems or found.start_problems or found.settings is None or found.inventory is None:
        if as_json:
            problems = [_problem(one) for one in found.problems]
            print_json(
                {"valid": False, "problems": [*problems, *map(_refusal, found.start_problems)]}
            )
        else:
            if found.problems:
                print_error(str(ConfigError(found.problems)))
            for refusal in found.start_problems:
                print_error(refusal.message)
        raise typer.Exit(2)
    warnings = [str(warning) for warning in found.inventory.warnings]
    asked = _check_nodes(found.inventory, found.settings) if probe else None
    if as_json:
        answer: dict[str, Any] = {"valid": True, "problems": [], "warnings": warnings}
        if asked is not None:
            answer["nodes"] = [one.as_dict() for one in asked]
        print_json(answer)
    else:
        _report(nodes, found.inventory, given.settings_file, warnings, asked)
    if asked is not None and any(one.should_be_up and not one.up for one in asked):
        raise typer.Exit(1)


def _problem(problem: Problem) -> dict[str, object]:
    return {
        "file": str(problem.file),
        "line": problem.line,
        "key": problem.key,
        "message": problem.message,
        "remedy": problem.remedy,
    }


def _refusal(refusal: StartProblem) -> dict[str, object]:
    return {
        "file": None,
        "line": 0,
        "key": refusal.key,
        "message": refusal.message,
        "remedy": "",
    }


def _check_nodes(inventory: Inventory, settings: Settings) -> list[NodeCheck]:
    import asyncio

    from gateway.tools.cli.node_checks import check_nodes

    return asyncio.run(check_nodes(inventory, settings))


def _report(
    nodes: Path,
    inventory: Inventory,
    settings_path: Path | None,
    warnings: list[str],
    asked: list[NodeCheck] | None,
) -> None:
    count = len(inventory.nodes)
    print(f"{nodes}: valid, {count} {'node' if count == 1 else 'nodes'}")
    if settings_path is None:
        print(f"{options.DEFAULT_CONFIG}: not there, every setting has its default")
    else:
        print(f"{settings_path}: valid")
    for warning in warnings:
        print_note(f"warning: {warning}")
    if asked:
        print()
        columns = ("NAME", "ANSWER", "SLOTS", "CONTEXT", "MODELS", "BUILD", "LATENCY", "REMARKS")
        print_table(columns, (one.table_row(format_cell) for one in asked), state_column=1)
