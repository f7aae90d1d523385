"""What has been done since the start, in a few numbers for people; Prometheus has the rest."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from gateway.observe.metrics import Metrics

LEFT = 499


@dataclass(slots=True)
class Totals:
    """Adds up what the metrics have counted."""

    metrics: Metrics

    def shown(self) -> dict[str, Any]:
        """As `/admin/status` has them. A client that left is no failure of ours."""
        codes: Counter[int] = Counter()
        prompt = completion = 0
        for code, counts in self.metrics.counted():
            codes[code] += counts.requests
            prompt += counts.prompt
            completion += counts.completion
        failures = {
            str(code): count
            for code, count in sorted(codes.items())
            if code >= 400 and code != LEFT
        }
        return {
            "requests": codes.total(),
            "failures": sum(failures.values()),
            "failures_by_code": failures,
            "clients_left": codes[LEFT],
            "prompt_tokens": prompt,
            "completion_tokens": completion,
        }
