"""Deadlines of drains: what a drained node still runs then goes on elsewhere, or is ended."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from gateway.errors import GatewayError
from gateway.fleet.lease import Phase
from gateway.relay.live import Live, Registry

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Deadlines:
    """At most one deadline for each node. Owns its timers: `close` must be called."""

    registry: Registry
    _timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)

    def set(self, name: str, seconds: float) -> None:
        """Have what it runs leave it in so many seconds; takes the place of an earlier one."""
        self.cancel(name)
        loop = asyncio.get_running_loop()
        self._timers[name] = loop.call_later(seconds, self._over, name)

    def cancel(self, name: str) -> None:
        """Let what it runs end by itself."""
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def left(self, name: str) -> float | None:
        """Seconds until the node's deadline; None: it has none."""
        timer = self._timers.get(name)
        if timer is None:
            return None
        return max(0.0, timer.when() - asyncio.get_running_loop().time())

    def close(self) -> None:
        """Forget all of them."""
        for name in list(self._timers):
            self.cancel(name)

    def _over(self, name: str) -> None:
        self._timers.pop(name, None)
        left = [live for live in self.registry if runs_on(live, name)]
        for live in left:
            live.move(drained(name))
        if left:
            log.warning("Node %s is drained: %d requests leave it at its deadline", name, len(left))


def runs_on(live: Live, name: str) -> bool:
    """Whether a request is at work on the node of this name."""
    if live.attempt is None:
        return False
    lease = live.attempt.lease
    return lease.node.name == name and lease.phase not in {Phase.RECLAIM, Phase.OVER}


def drained(name: str) -> GatewayError:
    """503: worth repeating, since another node gets it then."""
    return GatewayError(
        503,
        "node_drained",
        f"The node '{name}' was taken out of service before it had answered. Try again.",
        retry_after=1.0,
    )
