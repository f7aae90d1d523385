"""Requests that nodes die on: tried on one more node, and then on none.

A grammar can crash llama.cpp's server, and a retry would take one node after the other down with
it. What two nodes died on, without having been answered in between, is refused for a while.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from gateway import errors
from gateway.errors import GatewayError
from gateway.request import Request

DEATHS = 2
"""Nodes that may be lost over one request."""

MOST_SUSPECTS = 4096
"""Bodies that are remembered; the oldest is forgotten first."""


@dataclass(slots=True)
class Suspect:
    """A request that a node has died on."""

    nodes: set[str] = field(default_factory=set)
    last: float = 0.0
    """When a node last died on it; monotonic seconds."""


class Quarantine:
    """Remembers them by a hash of their body, which is never kept itself."""

    __slots__ = ("_suspects",)

    def __init__(self) -> None:
        self._suspects: OrderedDict[int, Suspect] = OrderedDict()

    def __len__(self) -> int:
        return len(self._suspects)

    def refusal(self, request: Request, now: float, seconds: float) -> GatewayError | None:
        """Why this request goes to no node any more; None: it may.

        Suspicion lasts `seconds` from the last death; 0: nothing is refused.
        """
        suspect = self._suspects.get(_mark(request)) if self._suspects and seconds else None
        if suspect is None or len(suspect.nodes) < DEATHS:
            return None
        left = suspect.last + seconds - now
        if left <= 0:
            del self._suspects[_mark(request)]
            return None
        return errors.node_failed(
            f"{len(suspect.nodes)} nodes died while they served this very request, so it is "
            f"refused for {left:.0f} s more. A grammar or schema may be what they died on."
        )

    def died(self, request: Request, node: str, began: float, now: float) -> None:
        """The node was lost while it served this request, which it had since `began`.

        Nodes that are lost together, as those of one host, count as one.
        """
        mark = _mark(request)
        suspect = self._suspects.setdefault(mark, Suspect())
        self._suspects.move_to_end(mark)
        if suspect.nodes and began < suspect.last:
            return
        suspect.nodes.add(node)
        suspect.last = now
        if len(self._suspects) > MOST_SUSPECTS:
            self._suspects.popitem(last=False)

    def lived(self, request: Request) -> None:
        """A node has answered it: it is not what the others died on."""
        if self._suspects:
            self._suspects.pop(_mark(request), None)


def _mark(request: Request) -> int:
    return hash((request.path, *request.bodies.values()))
