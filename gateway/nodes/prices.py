"""What nodes cost: the hours of those that are alive, and the price of the GPU tier's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gateway.callers.money import MILLION, AliveNode, GpuPrice, gpu_cost
from gateway.nodes.fleet import Fleet
from gateway.nodes.node import Node, NodeState

# States in which no hour of a node is counted: nobody has heard of its machine.
NOT_RUNNING = frozenset({NodeState.STANDBY, NodeState.DOWN, NodeState.STARTING})
PRICES_AGE = 10.0  # seconds for which the prices of a model are kept: speeds change slowly
MOST_MODELS = 1000


def alive_nodes(fleet: Fleet) -> Iterator[AliveNode]:
    """The nodes that are alive now, whether they get work or not."""
    for node in fleet.nodes.values():
        if node.state not in NOT_RUNNING and node.router is None:
            yield AliveNode(node.name, node.spec.tier, node.spec.cost_per_hour)


def gpu_price(node: Node) -> GpuPrice | None:
    """What work costs on this node; None: it is no GPU node, or has no price."""
    spec = node.spec
    if spec.tier != "gpu":
        return None
    rate = spec.cost_per_million_tokens
    if rate is not None:
        return GpuPrice(rate.prompt / MILLION, rate.completion / MILLION)
    if not spec.cost_per_hour or not node.slots_total:
        return None
    return GpuPrice(
        per_slot_second=spec.cost_per_hour / 3600 / node.slots_total,
        prefill_tps=node.speed.prefill_tps,
        decode_tps=node.speed.decode_tps,
    )


@dataclass(slots=True, eq=False)
class GpuCosts:
    """What requests would have cost on the GPU nodes that serve their models."""

    fleet: Fleet
    clock: Callable[[], float]
    _prices: dict[str, tuple[float, list[GpuPrice]]] = field(default_factory=dict)
    """By model, and until when they hold."""

    def of(self, model: str, prompt: int, cached: int, completion: int) -> float | None:
        """The cost of these tokens on the cheapest of them; None: it is not known."""
        now = self.clock()
        kept = self._prices.get(model)
        if kept is None or now >= kept[0]:
            if len(self._prices) >= MOST_MODELS:
                self._prices.clear()
            nodes = self.fleet.model_index.nodes_for(model)
            prices = [price for node in nodes if (price := gpu_price(node)) is not None]
            kept = self._prices[model] = now + PRICES_AGE, prices
        return gpu_cost(kept[1], prompt, cached, completion) if kept[1] else None
