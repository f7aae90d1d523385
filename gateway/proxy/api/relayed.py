"""Requests that the gateway only relays: their responses are plain and pass as they are."""

from __future__ import annotations

import re

from gateway.lease import Usage
from gateway.proxy.api.base import Api
from gateway.proxy.json_values import JsonObject

_EMBEDDINGS_USAGE = re.compile(rb'"usage":\s*\{"prompt_tokens":(\d{1,9}),"total_tokens":\d{1,9}\}')

EMBEDDINGS_USAGE_WITHIN = 512
"""Bytes; llama.cpp writes the usage of embeddings before the vectors."""


class RelayedApi(Api):
    """Embeddings, reranking, tokenizing and the like, with OpenAI's errors."""

    name = "relayed"

    def __init__(self, prompt_field: str | None = None) -> None:
        self.prompt_field = prompt_field

    def has_content(self, value: JsonObject) -> bool:
        return True

    def read_usage(self, tail: bytes, opening: bytes = b"") -> Usage | None:
        bare = _EMBEDDINGS_USAGE.search(tail, 0, EMBEDDINGS_USAGE_WITHIN)
        return super().read_usage(tail) if bare is None else Usage(int(bare[1]))


RELAYED = RelayedApi()
