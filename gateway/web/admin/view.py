"""The fleet as Prometheus sees it at a scrape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.fleet.fleet import Fleet
from gateway.observe.metrics import NodeSample, Snapshot
from gateway.relay.live import Registry
from gateway.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class View:
    """What `Metrics` calls at each scrape."""

    fleet: Fleet
    scheduler: Scheduler
    registry: Registry
    inventory_error: Callable[[], str | None]
    retries_left: Callable[[], int]

    def __call__(self) -> Snapshot:
        """The state of things now."""
        return Snapshot(
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
