"""Fronts to compare with, as the simulator knows them: nginx and HAProxy.

They count connections and know nothing else of a node.
"""

from __future__ import annotations

import math
from collections import deque

from gateway.planning.job import Job
from gateway.planning.simulation import Fleet

_FULL = 1 << 30


class LeastConn:
    """nginx `least_conn`: sends at once to the server with fewest connections, ties in turn.

    What is too much for a node waits inside it, where nobody can move it any more.
    """

    def __init__(self, nodes: int) -> None:
        self.alarm = math.inf
        self._connections = [0] * nodes
        self._turn = 0

    def arrive(self, job: Job, fleet: Fleet) -> None:
        """Send it."""
        node = _next_least(self._connections, self._turn)
        self._turn = node + 1
        self._connections[node] += 1
        fleet.send(job, node)

    def started(self, job: Job, fleet: Fleet) -> None:
        """Tell nothing: a byte that passes does not change the count."""

    def ended(self, job: Job, fleet: Fleet) -> None:
        """Count it off."""
        self._connections[job.node] -= 1

    def wake(self, fleet: Fleet) -> None:
        """No alarm is ever set."""


class LeastConnQueued:
    """HAProxy `leastconn` with `maxconn` of a server's slots: the rest wait, first in first out."""

    def __init__(self, slots: list[int]) -> None:
        self.alarm = math.inf
        self._slots = slots
        # A full server's count is lifted out of the comparison.
        self._connections = [0] * len(slots)
        self._line: deque[Job] = deque()
        self._turn = 0

    def arrive(self, job: Job, fleet: Fleet) -> None:
        """Send it, or keep it while every server is full."""
        node = _next_least(self._connections, self._turn)
        if self._connections[node] >= _FULL:
            self._line.append(job)
            return
        self._turn = node + 1
        self._send(job, node, fleet)

    def started(self, job: Job, fleet: Fleet) -> None:
        """Tell nothing."""

    def ended(self, job: Job, fleet: Fleet) -> None:
        """The server that has room takes the oldest of the line."""
        node = job.node
        count = self._connections[node]
        self._connections[node] = (count - _FULL if count >= _FULL else count) - 1
        if self._line:
            self._send(self._line.popleft(), node, fleet)

    def wake(self, fleet: Fleet) -> None:
        """No alarm is ever set."""

    def _send(self, job: Job, node: int, fleet: Fleet) -> None:
        count = self._connections[node] + 1
        self._connections[node] = count + _FULL if count >= self._slots[node] else count
        fleet.send(job, node)


def _next_least(counts: list[int], turn: int) -> int:
    """The next place, from `turn` on and round, of the least count."""
    least = min(counts)
    try:
        return counts.index(least, turn)
    except ValueError:
        return counts.index(least)
