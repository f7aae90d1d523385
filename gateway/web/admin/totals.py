"""What has been done since the start, in a few numbers for people; Prometheus has the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gateway.events import Bus, RequestFinished

LEFT = 499


@dataclass(slots=True)
class Totals:
    """Counts requests as they end."""

    flush: Callable[[], None]
    requests: int = 0
    codes: Counter[int] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @classmethod
    def of(cls, bus: Bus) -> Totals:
        """Totals that count what `bus` tells from now on."""
        totals = cls(bus.flush)
        bus.subscribe(RequestFinished, totals.finished)
        return totals

    def finished(self, event: RequestFinished) -> None:
        """Count one more."""
        self.requests += 1
        self.codes[event.code] += 1
        self.prompt_tokens += event.prompt_tokens
        self.completion_tokens += event.completion_tokens

    def shown(self) -> dict[str, Any]:
        """As `/admin/status` has them. A client that left is no failure of ours."""
        self.flush()
        failures = {
            str(code): count
            for code, count in sorted(self.codes.items())
            if code >= 400 and code != LEFT
        }
        return {
            "requests": self.requests,
            "failures": sum(failures.values()),
            "failures_by_code": failures,
            "clients_left": self.codes[LEFT],
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }
