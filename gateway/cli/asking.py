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
from gateway.fleet.facts import Facts, differences
from gateway.fleet.node import Node, Rules
from gateway.fleet.probes import check_alive, discover
from gateway.transport.upstream import connect

AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Asked:
    """What one node answered."""

    spec: NodeSpec
    answer: str
    detail: str
    seconds: float
    facts: Facts
    drift: tuple[str, ...] = ()

    @property
    def wanted(self) -> bool:
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

    def row(self, cell: Callable[[object], str]) -> list[object]:
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


async def ask_all(inventory: Inventory, settings: Settings) -> list[Asked]:
    """Ask all nodes, `AT_ONCE` at a time; each question has the limit of `health.timeout`."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def ask(spec: NodeSpec) -> Asked:
        async with gate:
            return await _ask(spec, settings)

    return await asyncio.gather(*map(ask, inventory.nodes))


async def _ask(spec: NodeSpec, settings: Settings) -> Asked:
    if not spec.enabled or spec.standby:
        why = "standby: true" if spec.enabled else "enabled: false"
        return Asked(spec, "standby", f"{why} in the inventory, not asked", 0.0, Facts())
    try:
        upstream = connect(spec)
    except OSError as error:
        return Asked(spec, "failed", f"its TLS files can't be used ({error})", 0.0, Facts())
    try:
        rules = Rules(settings.health, settings.timeouts)
        circuit = Circuit(settings.health, random.Random())
        node = Node(spec, upstream, rules, time.monotonic, circuit)
        outcome = await check_alive(node)
        seconds = outcome.seconds
        if outcome.up and spec.kind == "llama.cpp":
            outcome = await discover(node)
        drift = differences(spec, node.facts)
        return Asked(spec, outcome.answer.value, outcome.detail, seconds, node.facts, drift)
    finally:
        await upstream.aclose()
