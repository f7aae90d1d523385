"""Which requests are traced: a share of them, and a few a second beyond it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.trace_context import Traceparent


@dataclass(slots=True)
class Allowance:
    """So many a second, saved up for one second at most."""

    rate: float
    clock: Callable[[], float]
    _left: float = field(init=False)
    _at: float = field(init=False)

    def __post_init__(self) -> None:
        self._left, self._at = max(1.0, self.rate), self.clock()

    def take(self) -> bool:
        """Take one, if one is left."""
        now = self.clock()
        most = max(1.0, self.rate)
        self._left = min(most, self._left + (now - self._at) * self.rate)
        self._at = now
        if self._left < 1 or not self.rate:
            return False
        self._left -= 1
        return True


class Sampler:
    """Decides by its own draws: no client can have more traced than the allowance.

    A client that has recorded its part of a trace (`traceparent` with the flag) is followed as far
    as the allowance goes, and else has the chance of any other. One that says that it has not is
    believed: the gateway's part alone would tell nobody anything.
    """

    __slots__ = ("_clients", "_draw", "_failures", "_share")

    def __init__(
        self,
        share: float,
        beyond_share: float,
        *,
        draw: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        """`draw`: a number from 0 up to 1, below it. `beyond_share`: a second, of each kind."""
        self._share = share
        self._draw = draw
        self._clients = Allowance(beyond_share, clock)
        self._failures = Allowance(beyond_share, clock)

    def takes(self, parent: Traceparent | None) -> bool:
        """Whether a request that has come is traced."""
        if parent is None:
            return self._draw() < self._share
        return parent.sampled and (self._draw() < self._share or self._clients.take())

    def takes_failed(self) -> bool:
        """Whether a request is traced that was not meant to be, and has failed."""
        return self._failures.take()
