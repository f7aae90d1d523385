"""Ageing by share, so that a strict order of classes starves nobody.

A request that has waited longer than its class's patience is overdue. While there are overdue
requests, at least a share of the placements (one in ten, unless set otherwise) goes to the oldest
of them, whatever its class. So with `n` overdue requests ahead of it and slots that come free at
a rate of `r` a second, a request of the lowest class waits at most

    patience + (n + 1) / (share · r)

seconds for a slot that it can use, and a class above loses no more than that share.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Turns:
    """Whose turn the next placement is: the order's, or the oldest overdue request's."""

    share: float
    _credit: float = 0.0

    @property
    def due(self) -> bool:
        """Whether the next placement belongs to the oldest overdue request, if there is one."""
        return self._credit + self.share >= 1.0 - 1e-9

    def passed(self) -> None:
        """Somebody else was placed while a request was overdue."""
        self._credit = min(1.0, self._credit + self.share)

    def taken(self) -> None:
        """The oldest overdue request was placed."""
        self._credit = max(0.0, self._credit + self.share - 1.0)
