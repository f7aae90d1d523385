"""`/admin/requests`: what waits and runs, never its text, and how to end one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import GatewayError
from gateway.proxy.in_flight import InFlightRegistry, InFlightRequest
from gateway.scheduling.scheduler import Scheduler
from gateway.scheduling.waiters import QueuePosition
from gateway.web.asgi import JsonResponse, truncate_echo


@dataclass(frozen=True, slots=True)
class RequestEndpoints:
    """The endpoints."""

    registry: InFlightRegistry
    scheduler: Scheduler

    async def list(self, _: Request) -> Response:
        """All of them, oldest first."""
        queued = {waiting.request.id: waiting for waiting in self.scheduler.queue_positions()}
        now = self.scheduler.clock()
        shown = [request_json(live, queued.get(live.request.id), now) for live in self.registry]
        return JsonResponse({"requests": shown})

    async def cancel(self, request: Request) -> Response:
        """End one, by its own id or by its `X-Request-ID` if no other has the same."""
        name = request.path_params["id"]
        live = self.registry.find(name)
        if live is None:
            raise GatewayError(
                404,
                "request_not_found",
                f"No request '{truncate_echo(name)}' waits or runs, or several have this "
                f"X-Request-ID. "
                "GET /admin/requests lists them.",
                param="id",
            )
        if not self.scheduler.refuse(live.request.id, cancelled_by_operator()):
            live.cancel(cancelled_by_operator())
        return JsonResponse(
            {"id": live.request.id, "request_id": live.request.x_request_id, "cancelled": True}
        )


def request_json(
    live: InFlightRequest, waiting: QueuePosition | None, now: float
) -> dict[str, Any]:
    """One request as the admin API shows it. Seconds, tokens."""
    request, record = live.request, live.record
    queued = record.queue_seconds + (0.0 if waiting is None else waiting.waited_seconds)
    return {
        "id": request.id,
        "request_id": request.x_request_id,
        "path": request.path,
        "class": request.priority.label,
        "model": request.model,
        "caller": request.caller.id,
        "state": "running" if waiting is None else "waiting",
        "position": None if waiting is None else waiting.position,
        "expected_start": None if waiting is None else _rounded(waiting.expected_seconds),
        "node": record.node,
        "attempts": record.attempts,
        "slots": request.slots,
        "stream": request.stream,
        "seconds": round(now - request.received_at, 3),
        "queue_seconds": round(queued, 3),
        "prompt_tokens_estimate": request.prompt_tokens,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def cancelled_by_operator() -> GatewayError:
    """503: not to be repeated, whoever sent it should not send it again by itself."""
    return GatewayError(
        503,
        "cancelled",
        "An operator of the gateway has cancelled this request.",
        retry_after=5.0,
        retryable=False,
    )
