"""What nodes cost: their hours, and what requests take of them, or would on the GPU tier."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gateway.callers.money import AliveNode
from gateway.config.inventory import NodeSpec
from gateway.nodes.fleet import Fleet
from gateway.nodes.node import Node, NodeState

# States in which no hour of a node is counted: nobody has heard of its machine.
NOT_RUNNING = frozenset({NodeState.STANDBY, NodeState.DOWN, NodeState.STARTING})
PRICES_AGE = 10.0  # seconds for which the nodes of a model that have a price are kept
MOST_MODELS = 1000
# Tokens that a chat template may add to a prompt by itself. A prompt has no more tokens than bytes
# (byte-level vocabularies), and the JSON around each message has more bytes than its role has
# tokens.
TEMPLATE_TOKENS = 512


def alive_nodes(fleet: Fleet) -> Iterator[AliveNode]:
    """The nodes that are alive now, whether they get work or not."""
    for node in fleet.nodes.values():
        if node.state not in NOT_RUNNING and node.router is None:
            yield AliveNode(node.name, node.spec.tier, node.spec.cost_per_hour)


def cost_of(
    spec: NodeSpec, total: int, *, prompt: float, completion: float, slots: int, seconds: float
) -> float:
    """The price of tokens, or of a share of the node's time, in the settings' currency.

    `slots` of the node's `total` were held for `seconds`.
    """
    if (rate := spec.cost_per_million_tokens) is not None:
        return (prompt * rate.prompt + completion * rate.completion) / 1_000_000
    return spec.cost_per_hour * min(1.0, slots / max(1, total)) * max(0.0, seconds) / 3600


def most_cost(
    spec: NodeSpec,
    total: int,
    *,
    prompt_bytes: int,
    max_tokens: int | None,
    context: int | None,
    slots: int,
    seconds: float,
) -> float:
    """The most that a request can cost on a node; infinity where nothing bounds it.

    `max_tokens` and `context` are of one slot; `seconds` is the longest that it may run.
    """
    if (rate := spec.cost_per_million_tokens) is None:
        return cost_of(spec, total, prompt=0, completion=0, slots=slots, seconds=seconds)
    answers = max(1, slots)
    most_context = math.inf if context is None else float(context)
    completion = min(math.inf if max_tokens is None else float(max_tokens), most_context)
    prompt = min(float(prompt_bytes + TEMPLATE_TOKENS), most_context * answers)
    # 0 times infinity is 0 here: an answer that costs nothing may be of any length.
    completion_cost = completion * answers * rate.completion if rate.completion else 0.0
    prompt_cost = prompt * rate.prompt if rate.prompt else 0.0
    return (prompt_cost + completion_cost) / 1_000_000


SLOW_TOKENS_PER_SECOND = 5.0  # of one slot of a node whose speed is not measured yet


def dearest_token(node: Node) -> float:
    """The most that one token is likely to cost on a node."""
    spec = node.spec
    if (rate := spec.cost_per_million_tokens) is not None:
        return max(rate.prompt, rate.completion) / 1_000_000
    seconds = 1 / (node.speed.decode_tps or SLOW_TOKENS_PER_SECOND)
    return cost_of(spec, node.slots_total, prompt=0, completion=0, slots=1, seconds=seconds)


def cost_there(node: Node, prompt: int, cached: int, completion: int) -> float | None:
    """What tokens that ran elsewhere would have cost on this node; None: its speed is unknown.

    Paid by tokens: all of the prompt, since endpoints bill what a cache of theirs has, unlike a
    node of ours, in full. Paid by the hour: the time of a slot that its speeds make. That assumes
    that its prompt cache would have had the same tokens, and that no request would have waited.
    1,000 prompt and 500 completion tokens at 0.10 and 0.40 a million: 0.0003; at 2.00 an hour on 4
    slots that read 2,000 and write 50 tokens a second: 10.5 s, 0.00146.
    """
    spec, speed, seconds = node.spec, node.speed, 0.0
    if spec.cost_per_million_tokens is None:
        parts = (max(0, prompt - cached), speed.prefill_tps), (completion, speed.decode_tps)
        for tokens, per_second in parts:
            if tokens > 0 and not per_second:
                return None
            seconds += tokens / (per_second or 1.0)
    total = node.slots_total
    return cost_of(spec, total, prompt=prompt, completion=completion, slots=1, seconds=seconds)


@dataclass(slots=True, eq=False)
class GpuCosts:
    """What requests would have cost on the GPU nodes that serve their models."""

    fleet: Fleet
    clock: Callable[[], float]
    _nodes: dict[str, tuple[float, list[Node]]] = field(default_factory=dict)
    """By model: those that have a price, and until when that holds."""

    def of(self, model: str, prompt: int, cached: int, completion: int) -> float | None:
        """The cost of these tokens on the cheapest of them; None: it is not known."""
        now = self.clock()
        kept = self._nodes.get(model)
        if kept is None or now >= kept[0]:
            if len(self._nodes) >= MOST_MODELS:
                self._nodes.clear()
            nodes = self.fleet.model_index.nodes_for(model)
            priced = [one for one in nodes if one.spec.tier == "gpu" and one.is_priced]
            kept = self._nodes[model] = now + PRICES_AGE, priced
        if not kept[1]:
            return None
        costs = (cost_there(node, prompt, cached, completion) for node in kept[1])
        return min((cost for cost in costs if cost is not None), default=None)
