"""`/admin/status`: the gateway on one page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import GatewayError
from gateway.fleet.fleet import Fleet
from gateway.proxy.in_flight import InFlightRegistry
from gateway.request import Priority
from gateway.scheduling.scheduler import Scheduler
from gateway.web.admin.control import GatewayControl
from gateway.web.admin.metrics_source import Totals
from gateway.web.asgi import JsonResponse
from gateway.web.readiness import readiness_error

MOST_LISTED_WAITING = 100
"""Waiting requests that are listed; `queue` counts them all."""


@dataclass(frozen=True, slots=True)
class StatusEndpoints:
    """The endpoints."""

    fleet: Fleet
    scheduler: Scheduler
    registry: InFlightRegistry
    gateway: GatewayControl
    totals: Totals

    async def health(self, _: Request) -> Response:
        """While the process lives."""
        return JsonResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """While work may be sent here."""
        error = self._unreadiness()
        if error is not None:
            raise error
        return JsonResponse({"status": "ready"})

    async def status(self, _: Request) -> Response:
        """Everything at a glance."""
        control, nodes = self.gateway, self.fleet.nodes.values()
        scheduler = self.scheduler
        has_gpu = scheduler.fleet_sync.has_gpu_tier
        depths, error = scheduler.depths(), self._unreadiness()
        uptime = control.clock() - control.started_at
        started = datetime.now(UTC) - timedelta(seconds=uptime)
        return JsonResponse(
            {
                "version": control.version,
                "started_at": started.isoformat(timespec="seconds").replace("+00:00", "Z"),
                "uptime": round(uptime, 3),
                "ready": error is None,
                "reason": None if error is None else error.code,
                "in_flight": len(self.registry),
                "queue": {priority.label: depths[priority] for priority in Priority},
                "waiting": self._waiting(),
                "hybrid": scheduler.tier_policy.view(control.clock()) if has_gpu else None,
                "totals": self.totals.as_json(),
                "nodes": dict(Counter(node.state.value for node in nodes)),
                "slots_total": sum(node.slots_total for node in nodes),
                "slots_busy": sum(node.slots_busy for node in nodes),
                "inventory_error": control.inventory_error,
                "settings_error": control.settings_error,
                "keys_lost": control.keys_lost,
            }
        )

    def _waiting(self) -> list[dict[str, Any]]:
        return [
            {
                "position": waiting.position,
                "seconds": round(waiting.waited_seconds, 3),
                "class": waiting.request.priority.label,
                "model": waiting.request.model,
                "expected_start": _rounded(waiting.expected_seconds),
            }
            for waiting in self.scheduler.queue_positions(MOST_LISTED_WAITING)
        ]

    def _unreadiness(self) -> GatewayError | None:
        return readiness_error(self.fleet, self.scheduler, closing=self.gateway.closing)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
