"""What stands for an edge that sends requests to nodes, and for a leader's scheduler, in tests of
the rules.

The edge starts by what leaders grant, as `gateway.edges.edge` does, and alone by what its fence
leaves. The scheduler counts what it has granted.
"""

from __future__ import annotations

import math
from typing import Literal

from gateway.cluster.fencing import GRANT_SECONDS, Fence, Session, Tenure, Term


class Sender:
    """One process of an edge.

    Each asking for a slot has a number, which is the name of the lease that it may become. Who
    waits longer than `GRANT_SECONDS` asks again. What a leader says names its epoch and session.
    """

    def __init__(self, fence: Fence) -> None:
        self.fence = fence
        self.leases: dict[int, str] = {}  # requests that have been started, and their nodes
        self._number = 0
        self._asked: dict[int, float] = {}
        self._granted: dict[int, tuple[str, int, int]] = {}  # with epoch and session
        self._alone: set[int] = set()  # those started since it went alone

    def told(self, epoch: int, term: Term, *, asked_at: float, now: float) -> bool:
        """As `Fence.told`."""
        obeys = self.fence.told(epoch, term, asked_at=asked_at, now=now)
        if obeys:
            for number in self._alone:
                self.fence.adopted(self.fence.edge, number, self.leases[number])
            self._alone.clear()
        return obeys

    def ask(self, now: float) -> int:
        while self._asked and now - next(iter(self._asked.values())) > GRANT_SECONDS:
            del self._asked[next(iter(self._asked))]
        self._number += 1
        self._asked[self._number] = now
        return self._number

    def granted(
        self, epoch: int, session: int, number: int, node: str
    ) -> Literal["start", "give back", "ignore"]:
        """The leader grants a slot of this node: what to do."""
        if self.fence.obeys(epoch, session):
            if number in self._asked:
                self._granted[number] = node, epoch, session
                return "start"
            if number in self.leases:
                return "ignore"  # it has come twice
        return "give back"

    def start(self, number: int, now: float) -> bool:
        """Start the request, which is written right after this. False: give the slot back."""
        node, epoch, session = self._granted.pop(number, ("", -1, -1))
        asked_at = self._asked.pop(number, -math.inf)
        if not self.fence.obeys(epoch, session) or now - asked_at > GRANT_SECONDS:
            return False
        self.leases[number] = node
        self.fence.adopted(self.fence.edge, number, node)
        return True

    def start_alone(self, node: str, now: float) -> int | None:
        """Start a request, which is written right after this; its number, or None: it may not."""
        slots, others = self.fence.slots_of(node), self.fence.others(node, now)
        if sum(other == node for other in self.leases.values()) + others >= slots:
            return None
        self.fence.leave()
        self._number += 1
        self.leases[self._number] = node
        self._alone.add(self._number)
        return self._number

    def ended(self, number: int) -> bool:
        if self.leases.pop(number, None) is None:
            return False
        self._alone.discard(number)
        self.fence.ended(number)
        return True


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
