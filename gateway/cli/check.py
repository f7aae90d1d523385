"""`llama-gateway check`: what is wrong with the files, and what the nodes say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gateway.cli import options
from gateway.cli.options import examples
from gateway.cli.terminal import cell, complain, note, put_json, put_table

if TYPE_CHECKING:
    from gateway.cli.asking import Asked
    from gateway.config.inventory import Inventory
    from gateway.config.problems import Problem
    from gateway.config.settings import Settings

EXAMPLES = examples(
    ("llama-gateway check", "both files; nothing is started, nothing is sent"),
    ("llama-gateway check --probe", "and ask every node what it is"),
    ("llama-gateway check --nodes new.yaml && mv new.yaml config/nodes.yaml", "before a change"),
)

T = TypeVar("T")


def check(
    nodes: options.NodesFile = options.DEFAULT_NODES,
    config: options.ConfigFile = None,
    probe: Annotated[bool, typer.Option("--probe", help="Ask every node as well.")] = False,
    as_json: options.Json = False,
) -> None:
    """Validate the inventory and the settings; every problem has its file, line and remedy.

    Exit status 2 for a problem in a file, 1 for a node that does not answer or would be refused.
    """
    from gateway.config.inventory import load_inventory
    from gateway.config.problems import ConfigError
    from gateway.config.settings import load_settings
    from gateway.options import refusals

    settings_path = options.settings_file(config)
    problems: list[Problem] = []
    inventory = _loaded(lambda: load_inventory(nodes), problems)
    settings = _loaded(lambda: load_settings(settings_path), problems)
    if inventory is None or settings is None:
        if as_json:
            put_json({"valid": False, "problems": [_problem(problem) for problem in problems]})
        else:
            complain(str(ConfigError(problems)))
        raise typer.Exit(2)
    warnings = refusals(settings)  # unless a flag says otherwise
    asked = _ask(inventory, settings) if probe else None
    if as_json:
        answer: dict[str, Any] = {"valid": True, "problems": [], "warnings": warnings}
        if asked is not None:
            answer["nodes"] = [one.as_dict() for one in asked]
        put_json(answer)
    else:
        _report(nodes, inventory, settings_path, warnings, asked)
    if asked is not None and any(one.wanted and not one.up for one in asked):
        raise typer.Exit(1)


def _loaded(load: Callable[[], T], problems: list[Problem]) -> T | None:
    from gateway.config.problems import ConfigError

    try:
        return load()
    except ConfigError as error:
        problems += error.problems
        return None


def _problem(problem: Problem) -> dict[str, object]:
    return {
        "file": str(problem.file),
        "line": problem.line,
        "key": problem.key,
        "message": problem.message,
        "remedy": problem.remedy,
    }


def _ask(inventory: Inventory, settings: Settings) -> list[Asked]:
    import asyncio

    from gateway.cli.asking import ask_all

    return asyncio.run(ask_all(inventory, settings))


def _report(
    nodes: Path,
    inventory: Inventory,
    settings_path: Path | None,
    warnings: list[str],
    asked: list[Asked] | None,
) -> None:
    count = len(inventory.nodes)
    print(f"{nodes}: valid, {count} {'node' if count == 1 else 'nodes'}")
    if settings_path is None:
        print(f"{options.DEFAULT_CONFIG}: not there, every setting has its default")
    else:
        print(f"{settings_path}: valid")
    for warning in warnings:
        note(f"warning: {warning}")
    if asked:
        print()
        columns = ("NAME", "ANSWER", "SLOTS", "CONTEXT", "MODELS", "BUILD", "LATENCY", "REMARKS")
        put_table(columns, (one.row(cell) for one in asked), state=1)
