"""`/admin/config` and `/admin/reload`: the settings in force, and reading the files again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.config.masking import masked
from gateway.config.problems import ConfigError, Problem, printable
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.relay.dialects.base import error_fields
from gateway.web.admin.control import Control
from gateway.web.public.answers import Json

LISTED = 50
"""Problems that are told one by one."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The endpoints."""

    control: Control

    async def show(self, _: Request) -> Response:
        """The settings in force, secrets masked."""
        return Json(masked(self.control.settings))

    async def reload(self, _: Request) -> Response:
        """Read both files again: what has changed, or every problem of the one that is invalid."""
        before = self.control.settings
        try:
            done = await self.control.reload()
        except ConfigError as error:
            return _invalid(str(error.problems[0]), error.problems)
        except OSError as error:
            return _invalid(printable(str(error)), ())
        nodes = done.inventory
        return Json(
            {
                "nodes": {
                    "added": nodes.added,
                    "changed": nodes.changed,
                    "removed": nodes.removed,
                },
                "settings": {
                    "changed": changed(before, self.control.settings),
                    "needs_restart": done.settings.needs_restart,
                },
            }
        )


def changed(before: Settings, after: Settings) -> list[str]:
    """The top-level keys of the settings that differ."""
    return [
        name for name in type(after).model_fields if getattr(before, name) != getattr(after, name)
    ]


def _invalid(first: str, problems: Sequence[Problem]) -> Response:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    error = GatewayError(
        422, "invalid_configuration", f"A file is invalid and has changed nothing: {first}{more}"
    )
    listed = [
        {
            "file": str(problem.file),
            "line": problem.line or None,
            "key": problem.key,
            "message": printable(problem.message),
            "remedy": printable(problem.remedy),
        }
        for problem in problems[:LISTED]
    ]
    body = msgspec.json.encode({"error": error_fields(error), "problems": listed})
    headers = {"x-gateway-reason": error.code}
    return Response(body, error.status, headers, media_type="application/json")
