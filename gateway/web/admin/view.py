"""The fleet as Prometheus sees it at a scrape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gateway.fleet.fleet import Fleet
from gateway.observe.metrics import NodeSample, Snapshot
from gateway.relay.live import Registry
from gateway.scheduling.scheduler import Scheduler


class Seen(Protocol):
    """The rest that a scrape tells."""

    @property
    def registry(self) -> Registry:
        """What waits and runs."""

    @property
    def inventory_error(self) -> str | None:
        """What is wrong with the inventory on disk, while an older one is in force."""


def fleet_view(fleet: Fleet, scheduler: Scheduler, seen: Seen) -> Callable[[], Snapshot]:
    """What `Metrics` calls at each scrape: the state of things then."""

    def snapshot() -> Snapshot:
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
                for node in fleet.nodes.values()
            ],
            queue=scheduler.depths(),
            in_flight=len(seen.registry),
            inventory_error=seen.inventory_error is not None,
        )

    return snapshot
