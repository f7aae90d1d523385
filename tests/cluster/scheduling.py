"""What stands for a leader's scheduler in tests of the rules: it counts what it has granted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.cluster.fencing import Session, Tenure


def free(tenure: Tenure, node: str, now: float) -> int:
    """Slots of a node that a leader may grant; below 0: more may be taken than it has."""
    account, others = tenure._nodes[node], tenure.others(node, now)
    granted = sum(
        where == node and (name, number) not in account.early
        for name, edge in tenure._edges.items()
        for number, where in edge.leases.items()
    )
    return account.slots - granted - len(account.early) - others


def grant(tenure: Tenure, session: Session, number: int, node: str, now: float) -> bool:
    """Grant a slot, if one is free for this edge. What is granted is in the leader's account."""
    edge = tenure._edges[session.edge] if tenure.has(session) else None
    if edge is None or not edge.present or number in edge.leases:
        return False
    if now >= edge.lent_until or free(tenure, node, now) < 1:
        return False
    edge.leases[number] = node
    return True
