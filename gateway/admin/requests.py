"""`/admin/requests`: list requests in flight, without their text, and cancel one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import GatewayError, truncate_echo
from gateway.forward.in_flight import InFlightRegistry, InFlightRequest
from gateway.lease import QueuePosition
from gateway.schedule.scheduler import Scheduler
from gateway.web.asgi import JsonResponse


@dataclass(frozen=True, slots=True)
class RequestEndpoints:
    """The endpoints of requests in flight."""

    registry: InFlightRegistry
    scheduler: Scheduler

    async def list(self, _: Request) -> Response:
        """All requests, queued and running, the oldest first."""
        queued = {place.request_id: place for place in self.scheduler.queue_positions()}
        now = self.scheduler.clock()
        expected = self.scheduler.demand_model.expected_prompt_tokens
        requests = [
            request_object(
                in_flight,
                queued.get(in_flight.request.id),
                now,
                expected(in_flight.request.lease_request),
            )
            for in_flight in self.registry
        ]
        return JsonResponse({"requests": requests})

    async def cancel(self, request: Request) -> Response:
        """Cancel a request by its id, or by its `X-Request-ID` if no other request has the same."""
        name = request.path_params["id"]
        in_flight = self.registry.find(name)
        if in_flight is None:
            raise GatewayError(
                404,
                "request_not_found",
                f"No request '{truncate_echo(name)}' waits or runs, or several have this "
                "X-Request-ID. GET /admin/requests lists them.",
                param="id",
            )
        request_id, x_request_id = in_flight.request.id, in_flight.request.x_request_id
        if not self.scheduler.refuse(request_id, cancelled_by_operator()):
            in_flight.cancel(cancelled_by_operator())
        return JsonResponse({"id": request_id, "request_id": x_request_id, "cancelled": True})


class RequestObject(msgspec.Struct, kw_only=True, rename={"class_": "class"}):
    """A request as the admin API shows it. Times are in seconds, sizes in tokens."""

    id: Annotated[str, "inside the gateway"]
    request_id: Annotated[str, "`X-Request-ID`"]
    path: Annotated[str, "asked for"]
    class_: Annotated[str, "in force"]
    model: Annotated[str | None, "its public name"]
    caller: Annotated[str, "the key's id, or the address of one without a key"]
    state: Annotated[str, "`waiting` or `running`"]
    position: Annotated[int | None, "in the queue"]
    expected_start: Annotated[float | None, "seconds from now"]
    node: Annotated[str | None, "where it runs or ran last"]
    attempts: Annotated[int, "nodes tried"]
    slots: Annotated[int, "that it takes"]
    stream: Annotated[bool, "asked for"]
    seconds: Annotated[float, "since it came"]
    queue_seconds: Annotated[float, "of these in the queue"]
    prompt_tokens_estimate: Annotated[int, "tokens of its prompt"]


def request_object(
    in_flight: InFlightRequest, place: QueuePosition | None, now: float, prompt_tokens: int
) -> RequestObject:
    """The request as it is now; `place` in the queue is None if it runs."""
    request, record = in_flight.request, in_flight.record
    lease_request = request.lease_request
    queued = record.queue_seconds + (0.0 if place is None else place.waited_seconds)
    return RequestObject(
        id=request.id,
        request_id=request.x_request_id,
        path=request.path,
        class_=lease_request.caller.priority.label,
        model=lease_request.wanted.model,
        caller=request.caller.id,
        state="running" if place is None else "waiting",
        position=None if place is None else place.position,
        expected_start=None if place is None else _rounded(place.expected_seconds),
        node=record.node,
        attempts=record.attempts,
        slots=lease_request.size.slots,
        stream=request.stream,
        seconds=round(now - request.received_at, 3),
        queue_seconds=round(queued, 3),
        prompt_tokens_estimate=prompt_tokens,
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def cancelled_by_operator() -> GatewayError:
    """503: an operator has cancelled the request; clients should not retry by themselves."""
    return GatewayError(
        503,
        "cancelled",
        "An operator of the gateway has cancelled this request.",
        retry_after=5.0,
        retryable=False,
    )
