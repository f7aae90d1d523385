"""Signs of life other than probes: a CPU server can be mute for minutes while it reads a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.fleet.lease import Phase

if TYPE_CHECKING:
    from gateway.fleet.lease import Lease
    from gateway.fleet.node import Node

PREFILL_FACTOR = 4.0
"""A prefill may take so many times longer than predicted before it stops being a sign of life."""


def prefill_limit(lease: Lease) -> float:
    """Seconds for which this request's prefill speaks for its node."""
    return max(
        lease.node.rules.health.prefill_grace, PREFILL_FACTOR * (lease.expected_prefill or 0.0)
    )


def sign_of_life(node: Node, now: float) -> str | None:
    """Why a node that answers no probe is alive, in words; None if nothing says so."""
    silence = node.silence
    for lease in node.leases:
        if lease.last_moved is not None and now - lease.last_moved < silence:
            return "one of its streams moves"
        if _reads(lease) and now - lease.prefill_began < prefill_limit(lease):
            return "it reads a prompt"
    return None


def another_reads(lease: Lease, now: float) -> bool:
    """Whether the node reads another request's prompt, which holds this one up."""
    return any(
        other is not lease and _reads(other) and now - other.prefill_began < prefill_limit(other)
        for other in lease.node.leases
    )


def _reads(lease: Lease) -> bool:
    # After the client has left a prefill goes on to its end all the same.
    phase = lease.left_in if lease.phase is Phase.RECLAIM else lease.phase
    return phase is Phase.WAITING_HEAD or phase is Phase.PREFILL
