"""Ask every node of an inventory what it is, as the gateway itself would."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.config.inventory import Inventory, NodeSpec
from gateway.config.settings import Settings
from gateway.fleet.circuit import Circuit
from gateway.fleet.node import Node, NodeSettings
from gateway.fleet.probes import check_alive, discover
from gateway.fleet.server_properties import ServerProperties, inventory_drift
from gateway.transport.node_client import open_node_client

MOST_CONCURRENT_CHECKS = 32


@dataclass(frozen=True, slots=True)
class NodeCheck:
    """What one node answered."""

    spec: NodeSpec
    answer: str
    detail: str
    seconds: float
    facts: ServerProperties
    drift: tuple[str, ...] = ()

    @property
    def should_be_up(self) -> bool:
        """Whether it should answer: the inventory lets it work."""
        return self.spec.enabled and not self.spec.standby

    @property
    def up(self) -> bool:
        """Whether it can take work."""
        return self.answer == "up"

    @property
    def remarks(self) -> str:
        """What an operator has to know."""
        return "; ".join(part for part in (self.detail, *self.drift) if part)

    def table_row(self, cell: Callable[[object], str]) -> list[object]:
        """A line of the table."""
        facts = self.facts
        return [
            self.spec.name,
            self.answer,
            facts.slots,
            facts.context,
            cell(facts.models),
            facts.build,
            f"{self.seconds * 1000:.0f} ms" if self.seconds else None,
            self.remarks,
        ]

    def as_dict(self) -> dict[str, object]:
        """The same for a script."""
        return {
            "name": self.spec.name,
            "url": self.spec.url,
            "answer": self.answer,
            "detail": self.detail,
            "latency_seconds": round(self.seconds, 4),
            "slots": self.facts.slots,
            "context": self.facts.context,
            "models": list(self.facts.models),
            "build": self.facts.build,
            "drift": list(self.drift),
        }


async def check_nodes(inventory: Inventory, settings: Settings) -> list[NodeCheck]:
    """Ask all nodes, `AT_ONCE` at a time; each question has the limit of `health.timeout`."""
    gate = asyncio.Semaphore(MOST_CONCURRENT_CHECKS)

    async def ask(spec: NodeSpec) -> NodeCheck:
        async with gate:
            return await _check_node(spec, settings)

    return await asyncio.gather(*map(ask, inventory.nodes))


async def _check_node(spec: NodeSpec, settings: Settings) -> NodeCheck:
    if not spec.enabled or spec.standby:
        why = "standby: true" if spec.enabled else "enabled: false"
        return NodeCheck(
            spec, "standby", f"{why} in the inventory, not asked", 0.0, ServerProperties()
        )
    try:
        upstream = open_node_client(spec)
    except OSError as error:
        return NodeCheck(
            spec, "failed", f"its TLS files can't be used ({error})", 0.0, ServerProperties()
        )
    try:
        rules = NodeSettings(settings.health, settings.timeouts)
        circuit = Circuit(settings.health, random.Random())
        node = Node(spec, upstream, rules, time.monotonic, circuit)
        outcome = await check_alive(node)
        seconds = outcome.seconds
        if outcome.up and spec.kind == "llama.cpp":
            outcome = await discover(node)
        drift = inventory_drift(spec, node.properties)
        return NodeCheck(
            spec, outcome.answer.value, outcome.detail, seconds, node.properties, drift
        )
    finally:
        await upstream.aclose()
