"""How fast the fleet gets work done, as far as it was measured: the source of `Retry-After`."""

from __future__ import annotations

import math
from collections import deque

WINDOW = 60.0
"""Seconds that are looked back."""

UNKNOWN = 5.0
"""Seconds to advise while nothing has been measured yet."""

LONGEST = 600.0
"""Seconds; nobody is told to wait longer."""


class CompletionRate:
    """Completed requests per second over the last minute."""

    def __init__(self) -> None:
        self.seen = 0
        """All that were ever completed."""
        self._ends: deque[float] = deque(maxlen=1024)

    def completed(self, now: float) -> None:
        """A request has given its slot back."""
        self.seen += 1
        self._ends.append(now)

    def per_second(self, now: float) -> float | None:
        """Completions per second, or None while too few were seen to tell."""
        ends = self._ends
        while ends and ends[0] < now - WINDOW:
            ends.popleft()
        if len(ends) < 2:
            return None
        return len(ends) / max(now - ends[0], 1e-3)

    def wait(self, ahead: int, now: float) -> float | None:
        """Seconds until `ahead` more requests are done, or None while unknown."""
        rate = self.per_second(now)
        return None if rate is None else ahead / rate

    def retry_after(self, ahead: int, now: float) -> float:
        """Whole seconds to advise a caller who would be behind `ahead` others."""
        wait = self.wait(ahead, now)
        return float(min(LONGEST, max(1, math.ceil(UNKNOWN if wait is None else wait))))
