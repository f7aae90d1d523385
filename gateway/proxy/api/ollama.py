"""Ollama's API, of which only the errors are served."""

from __future__ import annotations

import msgspec

from gateway.errors import GatewayError
from gateway.proxy.api.relayed import RelayedApi


class OllamaApi(RelayedApi):
    """`/api/...`."""

    name = "ollama"

    def owns_path(self, path: str) -> bool:
        return path.startswith("/api/") and not path.startswith("/api/v1/")

    def error_body(self, error: GatewayError, x_request_id: str) -> bytes:
        # Its clients read a text, and nothing else.
        return msgspec.json.encode({"error": error.message})


OLLAMA = OllamaApi()
