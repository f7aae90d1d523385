"""`/admin/requests`: what waits and runs, never its text, and how to end one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import GatewayError
from gateway.relay.live import Live, Registry
from gateway.scheduling.scheduler import Scheduler
from gateway.scheduling.ticket import Waiting
from gateway.web.public.answers import Json, echoed


@dataclass(frozen=True, slots=True)
class Requests:
    """The endpoints."""

    registry: Registry
    scheduler: Scheduler

    async def list(self, _: Request) -> Response:
        """All of them, oldest first."""
        queued = {waiting.request.id: waiting for waiting in self.scheduler.waiting()}
        now = self.scheduler.clock()
        shown = [described(live, queued.get(live.request.id), now) for live in self.registry]
        return Json({"requests": shown})

    async def cancel(self, request: Request) -> Response:
        """End one, by its own id or by its `X-Request-ID` if no other has the same."""
        name = request.path_params["id"]
        live = self.registry.find(name)
        if live is None:
            raise GatewayError(
                404,
                "request_not_found",
                f"No request '{echoed(name)}' waits or runs, or several have this X-Request-ID. "
                "GET /admin/requests lists them.",
                param="id",
            )
        if not self.scheduler.refuse(live.request.id, cancelled()):
            live.end(cancelled())
        return Json({"id": live.request.id, "request_id": live.request.tag, "cancelled": True})


def described(live: Live, waiting: Waiting | None, now: float) -> dict[str, Any]:
    """One request as the admin API shows it. Seconds, tokens."""
    request, record = live.request, live.record
    queued = record.queue + (0.0 if waiting is None else waiting.seconds)
    return {
        "id": request.id,
        "request_id": request.tag,
        "path": request.path,
        "class": request.priority.label,
        "model": request.model,
        "caller": request.caller.id,
        "state": "running" if waiting is None else "waiting",
        "position": None if waiting is None else waiting.position,
        "expected_start": None if waiting is None else _rounded(waiting.expected),
        "node": record.node,
        "attempts": record.attempts,
        "slots": request.slots,
        "stream": request.stream,
        "seconds": round(now - request.received, 3),
        "queue_seconds": round(queued, 3),
        "prompt_tokens_estimate": request.prompt_tokens,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def cancelled() -> GatewayError:
    """503: not to be repeated, whoever sent it should not send it again by itself."""
    return GatewayError(
        503,
        "cancelled",
        "An operator of the gateway has cancelled this request.",
        retry_after=5.0,
        retryable=False,
    )
