"""Probes every node of an inventory and reads its properties, as the gateway itself does."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus

from gateway.config.inventory import Inventory, NodeSpec
from gateway.config.settings import Settings
from gateway.nodes.circuit import Circuit
from gateway.nodes.health import check_alive, discover, fetch
from gateway.nodes.lifecycle import ProbeResult
from gateway.nodes.model_index import ComparedServer, model_differences
from gateway.nodes.node import Node, NodeSettings
from gateway.nodes.server_properties import ServerProperties, inventory_drift
from gateway.transport.pool import open_node_pool

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
    def up(self) -> bool:
        """Whether the node can take requests."""
        return self.answer == "up"

    @property
    def fails(self) -> bool:
        """Whether the node can't take requests, though the inventory lets it work."""
        return self.spec.enabled and not self.spec.standby and not self.up

    def table_row(self) -> list[object]:
        """Return the row of the table; its remarks have the tools, as a danger."""
        properties = self.properties
        danger = ""
        if self.tools:
            danger = (
                f"its server was started with --tools or --agent: whoever reaches it can run "
                f"{', '.join(self.tools[:MOST_NAMED_TOOLS])} on its host; start it without"
            )
        remarks = (self.detail, *self.drift, *self.hints, danger)
        return [
            self.spec.name,
            self.answer,
            properties.slots,
            properties.context,
            properties.names,
            properties.build,
            f"{self.seconds * 1000:.0f} ms" if self.seconds else None,
            "; ".join(filter(None, remarks)),
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
    servers = []
    purposes: dict[str, dict[str, list[str]]] = {}
    for one in checks:
        spec, properties = one.spec, one.properties
        if one.up and spec.kind == "llama.cpp":
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
    semaphore = asyncio.Semaphore(MOST_CONCURRENT_CHECKS)

    async def check(spec: NodeSpec) -> NodeCheck:
        async with semaphore:
            return await _check_node(spec, settings)

    return await asyncio.gather(*map(check, inventory.nodes))


# Slots of a llama.cpp server that was started without `-np`: then all share one context.
SLOTS_OF_A_SHARED_POOL = 4


def _hints(spec: NodeSpec, properties: ServerProperties) -> tuple[str, ...]:
    slots, context = properties.slots, properties.context
    if spec.kv != "auto" or slots != SLOTS_OF_A_SHARED_POOL or context is None:
        return ()
    hint = (
        f"{slots} slots of {context} tokens each, by its own words: started without -np they share "
        f"{context} tokens; say so in the inventory (kv: shared, else kv: split)"
    )
    return (hint,)


async def _check_node(spec: NodeSpec, settings: Settings) -> NodeCheck:
    if not spec.enabled or spec.standby:
        reason = "standby: true" if spec.enabled else "enabled: false"
        return NodeCheck(
            spec, "standby", f"{reason} in the inventory, not asked", 0.0, ServerProperties()
        )
    try:
        pool = open_node_pool(spec)
    except OSError as error:
        return NodeCheck(
            spec, "failed", f"its TLS files can't be used ({error})", 0.0, ServerProperties()
        )
    try:
        node_settings = NodeSettings(settings.health, settings.timeouts)
        circuit = Circuit(settings.health, random.Random())
        node = Node(spec, pool, node_settings, time.monotonic, circuit)
        outcome = await check_alive(node)
        seconds = outcome.seconds
        if outcome.up and spec.kind == "llama.cpp":
            outcome = await discover(node)
        properties = node.properties
        drift, hints = inventory_drift(spec, properties), _hints(spec, properties)
        tools = await _read_tools(node) if outcome.up and spec.kind == "llama.cpp" else ()
        return NodeCheck(
            spec, outcome.answer.value, outcome.detail, seconds, properties, drift, hints, tools
        )
    finally:
        pool.close()


async def _read_tools(node: Node) -> tuple[str, ...]:
    """The tools that its server runs for whoever asks. Without such it answers 403 or 404."""
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
