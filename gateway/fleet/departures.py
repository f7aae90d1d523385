"""Nodes and connections on their way out: kept until nothing of ours runs over them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.fleet.node import Node
    from gateway.transport.upstream import Upstream

log = logging.getLogger(__name__)


class Departures:
    """Owns what the fleet has let go of."""

    def __init__(self) -> None:
        self.nodes: set[Node] = set()
        """Removed nodes that still run something."""
        self._replaced: list[tuple[Node, Upstream]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def leave(self, node: Node) -> None:
        """Close this node when it has ended what it runs."""
        self.nodes.add(node)
        self.returned(node)

    def replace(self, node: Node, upstream: Upstream) -> None:
        """Give the node new ways; the old ones stay open for the leases that use them."""
        self._replaced.append((node, node.upstream))
        node.upstream = upstream
        self.returned(node)

    def returned(self, node: Node) -> None:
        """A lease of this node has ended: close what only it kept open."""
        if node in self.nodes and not node.leases:
            self.nodes.discard(node)
            self.close(node.upstream)
        if self._replaced:
            replaced, self._replaced = self._replaced, []
            for owner, upstream in replaced:
                if any(lease.upstream is upstream for lease in owner.leases):
                    self._replaced.append((owner, upstream))
                else:
                    self.close(upstream)

    def close(self, upstream: Upstream) -> None:
        """Close it now, in the background."""
        self.own(asyncio.create_task(_close(upstream)))

    def own(self, task: asyncio.Task[None]) -> None:
        """Wait for this task at the end."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Close everything, whatever still runs."""
        for upstream in [node.upstream for node in self.nodes] + [old for _, old in self._replaced]:
            self.close(upstream)
        self.nodes.clear()
        self._replaced.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _close(upstream: Upstream) -> None:
    try:
        await upstream.aclose()
    except Exception:
        log.exception("The connections to a node could not be closed")
