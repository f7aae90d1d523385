"""TODO."""

from __future__ import annotations

import msgspec

from gateway.errors import GatewayError
from gateway.proxy.api.base import Api
from gateway.proxy.api.chat import CHAT
from gateway.proxy.api.messages import MESSAGES


class OllamaApi(Api):
    """Ollama's API, of which there are only errors."""

    def error_body(self, error: GatewayError, tag: str) -> bytes:
        """A text, which is all that its clients read."""
        return msgspec.json.encode({"error": error.message})


_OLLAMA = OllamaApi()


def api_of_path(path: str) -> Api:
    """Whose form the errors of a path have: Ollama's, Anthropic's, else OpenAI's."""
    if path.startswith("/api/") and not path.startswith("/api/v1/"):
        return _OLLAMA
    return MESSAGES if "/v1/messages" in path or path == "/messages" else CHAT
