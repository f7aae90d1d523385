"""Everything that users, scripts, dashboards and hosts see of the program, as texts to compare.

`python -m tests.outside.pins` writes the snapshots anew: for a change that the CHANGELOG tells.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import io
import json
import re
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer
from typer.testing import CliRunner

from gateway.__main__ import PROGRAMS
from gateway.cli import app
from gateway.config.settings import Settings
from gateway.openapi import openapi_json
from tests.emulator import EmulatedNode
from tests.gateways import new_store, running_gateway, until
from tests.house.reference import nodes_schema, settings_schema
from tests.openapi.test_reference import metrics_made

FOLDER = Path(__file__).parent / "snapshots"
ROOT = Path(__file__).parents[2]
WIDTH = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1", "LC_ALL": "C.UTF-8"}
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
"""Methods of a logger. A call of any of them with a constant text is an event."""


def helps() -> str:
    """The help of every command and of the programs that hosts start."""
    pages = [_help(app, path) for path in _paths(typer.main.get_command(app))]
    return "\n".join([*pages, *(_program_help(name) for name in sorted(PROGRAMS))])


def _paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from _paths(below, (*path, name))


def _help(command: typer.Typer, path: tuple[str, ...]) -> str:
    ran = CliRunner().invoke(command, [*path, "--help"], env=WIDTH, prog_name="llama-gateway")
    assert ran.exit_code == 0, (path, ran.output)
    return f"$ llama-gateway {' '.join((*path, '--help'))}\n{_trimmed(ran.output)}"


def _program_help(name: str) -> str:
    from gateway.__main__ import main

    written = io.StringIO()
    with (
        patch.object(sys, "argv", ["llama-gateway", name, "--help"]),
        patch.dict("os.environ", WIDTH),
        contextlib.redirect_stdout(written),
        pytest.raises(SystemExit),
    ):
        main()
    return f"$ llama-gateway {name} --help\n{_trimmed(written.getvalue())}"


def _trimmed(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def openapi() -> str:
    """The OpenAPI document of both listeners."""
    document = json.loads(openapi_json(Settings()))
    document["info"].pop("version")
    return _json(document)


def metrics() -> str:
    """Names, kinds and labels of all metrics."""
    made = sorted(metrics_made().items())
    return "".join(f"{name} {kind} {' '.join(sorted(labels))}\n" for name, (kind, labels) in made)


def settings() -> str:
    """The schema of gateway.yaml."""
    return _json(settings_schema())


def inventory() -> str:
    """The schema of nodes.yaml."""
    return _json(nodes_schema())


def log_events() -> str:
    """All events that the code logs, with their levels and constant fields."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for file in sorted((ROOT / "gateway").rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and (logged := _logged(call)) is not None:
                event, level = logged
                levels, fields = found.setdefault(event, (set(), set()))
                levels.add(level)
                fields |= {one.arg or "**" for one in call.keywords} - {"exc_info"}
    return "".join(
        f"{event}: {' '.join(sorted(levels))}: {' '.join(sorted(fields))}\n"
        for event, (levels, fields) in sorted(found.items())
    )


def _logged(call: ast.Call) -> tuple[str, str] | None:
    """The event and the level, if a call logs a constant event."""
    match call:
        case ast.Call(
            func=ast.Attribute(value=owner, attr=level), args=[ast.Constant(value=str(event)), *_]
        ) if level in LEVELS and re.search(r"\blog\b|_log\b|get_logger", ast.unparse(owner)):
            return event, level
        case ast.Call(
            func=ast.Attribute(attr="_log" | "_write"),
            args=[level, ast.Constant(value=str(event)), *_],
        ):
            return event, str(level.value) if isinstance(
                level, ast.Constant
            ) else "by what it tells"
    return None


def state_files() -> str:
    """The names and modes of the files in a state folder, and the keys of those that hold JSON."""
    return f"with a store\n{_kept({})}without\n{_kept({'store': {'url': 'off'}})}"


def _kept(settings: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_serve_once(Path(folder), settings))
        lines = []
        state = Path(folder) / "state"
        for file in sorted(path for path in state.rglob("*") if path.is_file()):
            name = re.sub(r"[0-9a-f]{8,}", "HEX", str(file.relative_to(state)))
            mode = file.stat().st_mode & 0o777
            content = json.loads(file.read_text()) if file.suffix == ".json" else {}
            lines.append(f"{name} {mode:o} {' '.join(sorted(content))}".rstrip() + "\n")
        return "".join(lines)


async def _serve_once(folder: Path, settings: dict[str, Any]) -> None:
    async with running_gateway(folder, [EmulatedNode()], settings) as running:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        answer = await running.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert (await running.admin.post("/admin/models/demo/pause")).status_code < 500
        await until(lambda: not running.gateway.registry)


def store() -> str:
    """What a new SQLite store is made of."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(new_store())
        opened = sqlite3.connect(file.name)
        rows = opened.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall()
        columns = {
            name: sorted(
                [*map(str, column[1:])] for column in opened.execute(f"PRAGMA table_info({name})")
            )
            for kind, name, _, _ in sorted(rows)
            if kind == "table"
        }
        opened.close()
    indexes = sorted(
        " ".join((sql or f"{kind} of {table}").split())
        for kind, _, table, sql in rows
        if kind == "index"
    )
    return _json({"tables": columns, "indexes": indexes})


def meaning(text: str) -> Any:
    """What a document in JSON says: references resolved, schemas that nothing uses left out."""
    document = json.loads(text)
    used = {key: value for key, value in document.items() if key not in {"components", "$defs"}}
    return _resolved(used, document, ())


def _resolved(value: Any, document: Any, within: tuple[str, ...]) -> Any:
    match value:
        case list():
            items = [_resolved(one, document, within) for one in value]
            return sorted(items) if all(isinstance(one, str) for one in items) else items
        case {"$ref": str(name)} if name in within:
            return {"again": len(within) - within.index(name)}
        case {"$ref": str(name), **more}:
            target = document
            for part in name.removeprefix("#/").split("/"):
                target = target[part]
            found = _resolved(target, document, (*within, name))
            return {**found, **_resolved(more, document, within)}
        case dict():
            return {key: _resolved(one, document, within) for key, one in value.items()}
    return value


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


PINS: dict[str, Callable[[], str]] = {
    "help.txt": helps,
    "openapi.json": openapi,
    "metrics.txt": metrics,
    "gateway.schema.json": settings,
    "nodes.schema.json": inventory,
    "log_events.txt": log_events,
    "state_files.txt": state_files,
    "store.json": store,
}
"""By the name of the snapshot, the function that makes its text."""


def main() -> None:
    """Write the snapshots that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.outside.pins", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*PINS, []], default=[])
    FOLDER.mkdir(exist_ok=True)
    for name in parser.parse_args().names or PINS:
        (FOLDER / name).write_text(PINS[name]())


if __name__ == "__main__":
    main()
