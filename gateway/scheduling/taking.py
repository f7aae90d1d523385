"""From a placement on the board to a lease on a node's slots."""

from __future__ import annotations

from gateway.fleet.lease import Lease
from gateway.fleet.node import Node
from gateway.request import Request
from gateway.scheduling.forecast import Placement

UNMEASURED_PREFILL = 25.0
"""Prompt tokens/s to expect of a node that has not shown its speed: slow on purpose, since it
bounds a wait (one busy thread read 140 tokens/s of a 768 wide model when measured)."""


def taken(node: Node, request: Request, placement: Placement, now: float) -> Lease:
    """The lease, with what it should take: it bounds how long the node may be silent."""
    speed = node.speed
    tokens = max(request.prompt_tokens, placement.ask.prompt)
    prefill = tokens / (speed.prefill_tps or UNMEASURED_PREFILL)
    total = None
    if request.max_tokens is not None and (decode_tps := speed.decode_tps) is not None:
        total = prefill + request.max_tokens / decode_tps
    return node.take(
        placement.ask.slots,
        request.id,
        request.priority,
        now,
        stream=request.stream,
        expected_prefill=prefill,
        expected_total=total,
    )
