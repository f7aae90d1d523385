"""The fleet as Prometheus sees it at a scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.fleet.fleet import Fleet
from gateway.observe.metrics import Metrics, MetricsSnapshot, NodeSample
from gateway.proxy.in_flight import InFlightRegistry
from gateway.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class MetricsSource:
    """What `Metrics` calls at each scrape."""

    fleet: Fleet
    scheduler: Scheduler
    registry: InFlightRegistry
    inventory_error: Callable[[], str | None]
    retries_left: Callable[[], int]

    def __call__(self) -> MetricsSnapshot:
        """The state of things now."""
        return MetricsSnapshot(
            nodes=[
                NodeSample(
                    name=node.name,
                    state=node.state.value,
                    slots_total=node.slots_total,
                    slots_busy=node.slots_busy,
                    decode_tps=node.speed.decode_tps,
                    prefill_tps=node.speed.prefill_tps,
                )
                for node in self.fleet.nodes.values()
            ],
            queue=self.scheduler.depths(),
            in_flight=len(self.registry),
            inventory_error=self.inventory_error() is not None,
            retry_budget=self.retries_left(),
        )


CLIENT_CLOSED_STATUS = 499


@dataclass(slots=True)
class Totals:
    """Adds up what the metrics have counted."""

    metrics: Metrics

    def as_json(self) -> dict[str, Any]:
        """As `/admin/status` has them. A client that left is no failure of ours."""
        codes: Counter[int] = Counter()
        prompt = completion = 0
        for code, counts in self.metrics.counts_by_status():
            codes[code] += counts.requests
            prompt += counts.prompt
            completion += counts.completion
        failures = {
            str(code): count
            for code, count in sorted(codes.items())
            if code >= 400 and code != CLIENT_CLOSED_STATUS
        }
        return {
            "requests": codes.total(),
            "failures": sum(failures.values()),
            "failures_by_code": failures,
            "clients_left": codes[CLIENT_CLOSED_STATUS],
            "prompt_tokens": prompt,
            "completion_tokens": completion,
        }
