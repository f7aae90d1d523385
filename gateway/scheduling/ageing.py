"""Ageing by share, so that a strict order of classes starves nobody.

A request that has waited longer than its class's patience is overdue. While there are overdue
requests, at least a share of the placements (one in ten, unless set otherwise) goes to the class of
the oldest of them, and in it to whoever is next by fair shares. So with `n` requests of its class
before it and slots that come free at a rate of `r` a second, a request of the lowest class waits at
most

    patience + (n + 1) / (share · r)

seconds for a slot that it can use, and a class above loses no more than that share.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Turns:
    """Whose turn the next placement is: the strict order's, or an overdue class's."""

    share: float
    _credit: float = 0.0

    @property
    def due(self) -> bool:
        """Whether the next placement belongs to an overdue class, if there is one."""
        return self._credit + self.share >= 1.0 - 1e-9

    def went(self, *, to_overdue: bool) -> None:
        """A placement went to the class of the oldest overdue request, or to another."""
        credit = self._credit + self.share
        self._credit = max(0.0, credit - 1.0) if to_overdue else min(1.0, credit)
