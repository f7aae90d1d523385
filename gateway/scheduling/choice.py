"""The choice of a node: pure functions of what can be seen.

`least_loaded`: slots in use (the newcomer's included) against slots owned, weighted by the
node's relative speed, as in Envoy's weighted least-request; ties at random.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence

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
    closed: Collection[str] = (),
) -> Node | None:
    """The node to send `request` to now, or None while none has room that is not `closed` to it.

    A node that failed this request comes after all others, then its host's other nodes.
    """
    best: Node | None = None
    best_rank = (0, 0.0)
    ties = 0
    slots = request.slots
    failed = request.failed
    failed_hosts = {node.spec.host for node in nodes if node.name in failed} if failed else ()
    for node in nodes:
        if (node.free(now) < slots if slots else not node.capacity(now)) or node.name in closed:
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


def to_avoid(
    able: Iterable[tuple[str, Sequence[Node]]], failed: Collection[str]
) -> Collection[str]:
    """The nodes that a request does not go to again: those that failed it, while another is in.

    Else a node that fails fast, and so is always free, would get every second attempt too.
    """
    if failed and any(
        node.state in TAKING and node.name not in failed for _, nodes in able for node in nodes
    ):
        return failed
    return ()


def to_hold(nodes: Sequence[Node], request: Request, now: float) -> str:
    """The node whose slots a wide request waits for, so that narrow ones don't starve it.

    `nodes` are those that can hold it; one that takes no work now is only the last resort.
    """

    def nearness(node: Node) -> tuple[bool, bool, int]:
        wide = node.capacity(now) >= request.slots
        return wide, node.name not in request.failed, node.free(now)

    return max(nodes, key=nearness).name
