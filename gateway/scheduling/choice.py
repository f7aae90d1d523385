"""The choice of a node: pure functions of what can be seen.

`least_loaded`: slots in use (the newcomer's included) against slots owned, weighted by the
node's relative speed, as in Envoy's weighted least-request; ties at random.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from gateway.fleet.node import Node
from gateway.fleet.states import State
from gateway.request import Request

TAKING = frozenset({State.READY, State.DEGRADED})
"""States of a node that takes new work."""


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
    best_rank = (0, 0.0)
    ties = 0
    slots = request.slots
    failed = request.failed
    failed_hosts = {node.spec.host for node in nodes if node.name in failed} if failed else ()
    for node in nodes:
        if (node.free(now) < slots if slots else not node.capacity(now)) or node.name in held:
            continue
        doubt = 0
        if failed:
            doubt = 2 if node.name in failed else int(node.spec.host in failed_hosts)
        load = (node.leased + node.foreign + slots) / (node.slots_total * node.speed.relative)
        rank = (doubt, load)
        if best is None or rank < best_rank:
            best, best_rank, ties = node, rank, 1
        elif rank == best_rank:
            ties += 1
            if rng.random() * ties < 1.0:
                best = node
    return best


def untried(
    able: Sequence[tuple[str, Sequence[Node]]], failed: Collection[str]
) -> Sequence[tuple[str, Sequence[Node]]]:
    """What a request may go to after some nodes have failed it: others, while one is in.

    Else a node that fails fast, and so is always free, would get every second attempt too.
    """
    others = [(name, [node for node in nodes if node.name not in failed]) for name, nodes in able]
    if any(node.state in TAKING for _, nodes in others for node in nodes):
        return [(name, nodes) for name, nodes in others if nodes]
    return able


def to_hold(nodes: Sequence[Node], request: Request, now: float) -> str:
    """The node whose slots a wide request waits for, so that narrow ones don't starve it.

    `nodes` are those that can hold it; one that takes no work now is only the last resort.
    """
    best = max(nodes, key=lambda node: (node.capacity(now) >= request.slots, node.free(now)))
    return best.name
