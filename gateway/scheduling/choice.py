"""The choice of a node: pure functions of what can be seen.

`least_loaded`: slots in use (the newcomer's included) against slots owned, weighted by the
node's relative speed, as in Envoy's weighted least-request; ties at random.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from gateway.fleet.node import Node
from gateway.request import Request


def load(node: Node, slots: int) -> float:
    """Share of the node in use if it took `slots` more, over its relative speed."""
    return (node.slots_busy + slots) / (node.slots_total * node.speed.relative)


def fits(node: Node, request: Request) -> bool:
    """Whether the prompt, as far as it is known, fits into one slot's context."""
    return node.context is None or node.context >= max(
        request.prompt_tokens, request.smallest_context
    )


def narrowed(nodes: Sequence[Node], request: Request) -> Sequence[Node]:
    """The nodes whose context fits; if none does, those with the largest, which can say so."""
    fitting = [node for node in nodes if fits(node, request)]
    if fitting:
        return fitting
    largest = max((node.context or 0 for node in nodes), default=0)
    return [node for node in nodes if (node.context or 0) == largest]


def least_loaded(
    nodes: Sequence[Node],
    request: Request,
    now: float,
    rng: random.Random,
    held: Collection[str] = (),
) -> Node | None:
    """The node to send `request` to now, or None while none has room.

    A node that failed this request comes after all others, then its host's other nodes.
    """
    best: Node | None = None
    best_rank = (2, 2, 0.0)
    ties = 0
    failed = request.failed
    failed_hosts = {node.spec.host for node in nodes if node.name in failed} if failed else set()
    slots = request.slots
    for node in nodes:
        if node.free(now) < slots or node.name in held:
            continue
        rank = (
            int(node.name in failed),
            int(node.spec.host in failed_hosts),
            load(node, slots),
        )
        if best is None or rank < best_rank:
            best, best_rank, ties = node, rank, 1
        elif rank == best_rank:
            ties += 1
            if rng.random() * ties < 1.0:
                best = node
    return best


def to_hold(nodes: Sequence[Node], request: Request, now: float) -> str | None:
    """The node whose slots a wide request waits for, so that narrow ones don't starve it."""
    able = [node for node in nodes if node.slots_total >= request.slots]
    if request.slots < 2 or not able:
        return None
    return max(able, key=lambda node: (node.free(now), -node.slots_busy)).name
