"""`llama-gateway serve` runs the gateway; `check` tells whether it would start."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gateway.cli import options, terminal
from gateway.cli.options import examples_epilog, flag
from gateway.cli.terminal import CommandFailed
from gateway.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from gateway.app.startup import StartProblem
    from gateway.config.inventory import Inventory, NodeSpec
    from gateway.config.settings import Settings
    from gateway.nodes.node import Node
    from gateway.nodes.server_properties import ServerProperties

SERVE_EXAMPLES = examples_epilog(
    ("llama-gateway serve", "config/nodes.yaml and config/gateway.yaml, on 127.0.0.1:8000"),
    ("llama-gateway serve --nodes fleet.yaml --port 9000", "another inventory, another port"),
    (
        "llama-gateway serve --host 0.0.0.0 --allow-anonymous",
        "for everybody who can reach this machine, without keys",
    ),
    ("llama-gateway serve --edges auto", "on all cores: one process decides, the others relay"),
)

CHECK_EXAMPLES = examples_epilog(
    ("llama-gateway check", "both files; starts nothing, sends nothing"),
    ("llama-gateway check --host 0.0.0.0", "would serve start with this flag?"),
    ("llama-gateway check --probe", "and asks every node for its properties"),
    ("llama-gateway check --nodes new.yaml && mv new.yaml config/nodes.yaml", "before a change"),
)


def serve(
    *,
    nodes: Path = options.NODES,
    process: options.ProcessFlags,
    edges: str | None = options.EDGES,
) -> None:
    """Run the gateway over the nodes of the inventory, in the foreground.

    Both files are read again when they change and on SIGHUP. SIGTERM ends it: requests may finish
    within `shutdown.grace`; a second SIGTERM ends it at once. SIGUSR2 starts the same command
    again, perhaps of a newer version, which takes over without a refused connection.
    """
    from gateway.app.assembly import run
    from gateway.app.handover import restart_command
    from gateway.app.startup import StartError

    given = replace(
        process.startup(nodes),
        restart_command=restart_command(),
        edges=options.read_edges(edges),
    )
    try:
        status = run(given)
    except StartError as error:
        raise CommandFailed(str(error), error.status) from None
    raise typer.Exit(status)


def check(
    *,
    nodes: Path = options.NODES,
    process: options.ProcessFlags,
    edges: str | None = options.EDGES,
    probe: bool = flag.switch("--probe", "Ask every node for its properties as well."),
    as_json: bool = options.JSON,
) -> None:
    """Check whether serve would start with these files and flags, and list the problems if not.

    Give it the flags of serve. Every problem of both files is listed with its line and its remedy.
    Exit status 2 if serve would refuse to start, 1 for a node that does not answer.
    """
    import asyncio

    from gateway.app.startup import check_startup, cluster_warnings, empty_pools

    given = replace(process.startup(nodes), edges=options.read_edges(edges))
    found = check_startup(given)
    if found.problems or found.start_problems or found.settings is None or found.inventory is None:
        if as_json:
            told: list[Problem | StartProblem] = [*found.problems, *found.start_problems]
            terminal.print_json({"valid": False, "problems": [_as_dict(one) for one in told]})
        else:
            if found.problems:
                terminal.print_config_error(ConfigError(found.problems))
            for problem in found.start_problems:
                terminal.print_error(problem.message)
        raise typer.Exit(2)
    labels = (node.labels for node in found.inventory.nodes)
    warnings = [str(warning) for warning in found.inventory.warnings]
    warnings += (*empty_pools(found.settings, labels), *cluster_warnings(found.settings))
    if (policy := found.settings.policy) != "least_finish":
        warnings.append(
            f"policy: {policy} means least_finish now, and the next release refuses it; remove it"
        )
    checks = asyncio.run(check_nodes(found.inventory, found.settings)) if probe else []
    differing = differences(checks)
    if as_json:
        result: dict[str, Any] = {"valid": True, "problems": [], "warnings": warnings}
        if probe:
            result |= {"nodes": [one.as_dict() for one in checks], "differences": differing}
        terminal.print_json(result)
    else:
        count, settings = len(found.inventory.nodes), given.settings_file
        print(f"{nodes}: valid, {count} {'node' if count == 1 else 'nodes'}")
        missing = f"{options.DEFAULT_CONFIG}: not there, every setting has its default"
        print(missing if settings is None else f"{settings}: valid")
        terminal.print_note(*(f"warning: {one}" for one in warnings))
        if checks:
            print()
            terminal.print_rows((one.table_row() for one in checks), state_column=1)
        for difference in differing:
            terminal.print_note(f"warning: nodes of one model differ: {difference}")
    if any(one.fails for one in checks):
        raise typer.Exit(1)


def _as_dict(problem: Problem | StartProblem) -> dict[str, object]:
    """Return a problem for scripts: of a file, or what else keeps a gateway from starting."""
    if isinstance(problem, Problem):
        return {name: value for name, value in asdict(problem).items() if name != "column"}
    return {"file": None, "line": 0, **problem._asdict(), "remedy": "", "lines": []}


# `check --probe`: every node is asked for its properties, as the gateway itself does.

MOST_CONCURRENT_CHECKS = 32
MOST_TOOLS, MOST_NAMED_TOOLS = 100, 3


@dataclass(frozen=True, slots=True)
class NodeCheck:
    """The result of one node."""

    spec: NodeSpec
    answer: str
    detail: str
    seconds: float
    properties: ServerProperties
    drift: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()  # what the server does not say, and the inventory could
    tools: tuple[str, ...] = ()
    """What its server runs on its host for whoever asks (`--tools`, `--agent`)."""

    @property
    def fails(self) -> bool:
        """Whether the node can't take requests, though the inventory lets it work."""
        return self.spec.enabled and not self.spec.standby and self.answer != "up"

    def table_row(self) -> list[tuple[str, object]]:
        """Return the row of the table; its remarks have the tools, as a danger."""
        properties = self.properties
        remarks = [self.detail, *self.drift, *self.hints]
        if self.tools:
            remarks.append(
                f"its server was started with --tools or --agent: whoever reaches it can run "
                f"{', '.join(self.tools[:MOST_NAMED_TOOLS])} on its host; start it without"
            )
        return [
            ("NAME", self.spec.name),
            ("ANSWER", self.answer),
            ("SLOTS", properties.slots),
            ("CONTEXT", properties.context),
            ("MODELS", properties.names),
            ("BUILD", properties.build),
            ("LATENCY", f"{self.seconds * 1000:.0f} ms" if self.seconds else None),
            ("REMARKS", "; ".join(filter(None, remarks))),
        ]

    def as_dict(self) -> dict[str, object]:
        """Return the result as JSON values."""
        return {
            "name": self.spec.name,
            "url": self.spec.url,
            "answer": self.answer,
            "detail": self.detail,
            "latency_seconds": round(self.seconds, 4),
            "slots": self.properties.slots,
            "context": self.properties.context,
            "models": list(self.properties.names),
            "build": self.properties.build,
            "quantisation": self.properties.ftype,
            "template": self.properties.template,
            "drift": list(self.drift),
            "hints": list(self.hints),
            "purpose": self.properties.purpose,
            "tools": list(self.tools),
        }


def differences(checks: Iterable[NodeCheck]) -> list[str]:
    """Where nodes that serve one model differ, a sentence each."""
    from gateway.nodes.model_index import ComparedServer, model_differences

    servers = []
    purposes: dict[str, dict[str, list[str]]] = {}
    for one in checks:
        spec, properties = one.spec, one.properties
        if one.answer == "up" and spec.kind == "llama.cpp":
            models = properties.names if spec.models is None else tuple(spec.models)
            context = properties.context if spec.context is None else spec.context
            servers.append(ComparedServer(spec.name, models, context, properties))
            for model in models if spec.endpoints is None else ():
                by_purpose = purposes.setdefault(model, {})
                by_purpose.setdefault(properties.purpose or "unknown", []).append(spec.name)
    found = [one.in_words() for one in model_differences(servers)]
    for model, by_purpose in purposes.items():
        if len(by_purpose) > 1:
            told = "; ".join(f"{one} on {', '.join(on)}" for one, on in by_purpose.items())
            found.append(f"{model}: purpose: {told}: say the `endpoints` of each in the inventory")
    return found


async def check_nodes(inventory: Inventory, settings: Settings) -> list[NodeCheck]:
    """Check all nodes, MOST_CONCURRENT_CHECKS at a time; each query has `health.timeout`."""
    import asyncio

    semaphore = asyncio.Semaphore(MOST_CONCURRENT_CHECKS)

    async def check(spec: NodeSpec) -> NodeCheck:
        async with semaphore:
            return await _check_node(spec, settings)

    return await asyncio.gather(*map(check, inventory.nodes))


# Slots of a llama.cpp server that was started without `-np`: then all share one context.
SLOTS_OF_A_SHARED_POOL = 4


async def _check_node(spec: NodeSpec, settings: Settings) -> NodeCheck:
    import random

    from gateway.nodes.circuit import Circuit
    from gateway.nodes.health import check_alive, discover
    from gateway.nodes.node import Node
    from gateway.nodes.server_properties import ServerProperties, inventory_drift
    from gateway.transport.pool import open_node_pool

    unknown = ServerProperties()
    if not spec.enabled or spec.standby:
        reason = "standby: true" if spec.enabled else "enabled: false"
        return NodeCheck(spec, "standby", f"{reason} in the inventory, not asked", 0.0, unknown)
    try:
        pool = open_node_pool(spec)
    except OSError as error:
        return NodeCheck(spec, "failed", f"its TLS files can't be used ({error})", 0.0, unknown)
    try:
        circuit = Circuit(settings.health, random.Random())
        node = Node(spec, pool, settings, time.monotonic, circuit)
        began = node.clock()
        outcome = await check_alive(node)
        seconds = node.clock() - began
        if outcome.up and spec.kind == "llama.cpp":
            outcome = await discover(node)
        properties, hints = node.properties, []
        slots, context = properties.slots, properties.context
        if spec.kv == "auto" and slots == SLOTS_OF_A_SHARED_POOL and context is not None:
            hints.append(
                f"{slots} slots of {context} tokens each, by its own words: started without -np "
                f"they share {context} tokens; say so in the inventory (kv: shared, else kv: split)"
            )
        return NodeCheck(
            spec,
            outcome.answer.value,
            outcome.detail,
            seconds,
            properties,
            drift=inventory_drift(spec, properties),
            hints=tuple(hints),
            tools=await _read_tools(node) if outcome.up and spec.kind == "llama.cpp" else (),
        )
    finally:
        pool.close()


async def _read_tools(node: Node) -> tuple[str, ...]:
    """The tools that its server runs for whoever asks. Without such it answers 403 or 404."""
    from gateway.nodes.health import fetch
    from gateway.nodes.lifecycle import ProbeResult

    reply = await fetch(node, "/tools")
    if isinstance(reply, ProbeResult) or reply.status != HTTPStatus.OK:
        return ()
    listed = reply.json()
    names = [
        one["tool"][:64]
        for one in (listed[:MOST_TOOLS] if isinstance(listed, list) else ())
        if isinstance(one, dict) and isinstance(one.get("tool"), str)
    ]
    # What can change something, first.
    return tuple(sorted(names, key=lambda name: name not in _WORST_TOOLS))


_WORST_TOOLS = frozenset({"exec_shell_command", "write_file", "edit_file"})
