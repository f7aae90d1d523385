"""The OpenAPI document of both listeners."""

from __future__ import annotations

import json

from gateway.config.settings import Settings


def openapi_json(settings: Settings, listener: str | None = None) -> bytes:
    """The document."""
    return json.dumps({}).encode()
