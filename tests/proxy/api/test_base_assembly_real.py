"""A real server's plain response and the one assembled from its stream are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.proxy.api.base import ResponseAssembler
from gateway.proxy.inbound.routes import ROUTES
from gateway.proxy.json_values import parse_object
from tests.servers import demo_servers

pytestmark = [pytest.mark.real, pytest.mark.slow]

TALK = [{"role": "user", "content": "Tell me"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look something up",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
EITHER_WAY = {"temperature": 0}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": TALK, "max_tokens": 12}),
    "stop": ("/v1/chat/completions", {"messages": TALK, "max_tokens": 60, "stop": ["e"]}),
    "logprobs": (
        "/v1/chat/completions",
        {"messages": TALK, "max_tokens": 4, "logprobs": True, "top_logprobs": 2},
    ),
    "tool": (
        "/v1/chat/completions",
        {"messages": TALK, "max_tokens": 40, "tools": [TOOL], "tool_choice": "required"},
    ),
    "one token": ("/v1/chat/completions", {"messages": TALK, "max_tokens": 1}),
    "schema": (
        "/v1/chat/completions",
        {
            "messages": TALK,
            "max_tokens": 40,
            "response_format": {"type": "json_object", "schema": {"type": "integer"}},
        },
    ),
    "two answers": ("/v1/chat/completions", {"messages": TALK, "max_tokens": 4, "n": 2}),
    "completion": ("/v1/completions", {"prompt": "Hello", "max_tokens": 8}),
    "completion logprobs": ("/v1/completions", {"prompt": "Hello", "max_tokens": 3, "logprobs": 2}),
    "native": ("/completion", {"prompt": "Hello", "n_predict": 8}),
    "native tokens": (
        "/completion",
        {"prompt": "Hello", "n_predict": 3, "return_tokens": True, "n_probs": 2},
    ),
    "message": ("/v1/messages", {"messages": TALK, "max_tokens": 8}),
    "message tool": (
        "/v1/messages",
        {
            "messages": TALK,
            "max_tokens": 60,
            "tools": [{"name": "look", "input_schema": TOOL["function"]["parameters"]}],  # type: ignore[index]
            "tool_choice": {"type": "any"},
        },
    ),
    "response": ("/v1/responses", {"input": "Hello", "max_output_tokens": 6}),
}

OF_ONE_RESPONSE = {"id", "created", "created_at", "completed_at", "timings", "id_slot", "call_id"}
"""Fields that differ between any two responses to one request."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with demo_servers(1) as (url,):
        yield url


def shown(value: Any) -> Any:
    """The response; of the fields that are its own alone, only that they exist."""
    if isinstance(value, dict):
        return {
            name: "..." if name in OF_ONE_RESPONSE else shown(inner)
            for name, inner in value.items()
        }
    return [shown(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.smoke
@pytest.mark.parametrize("name", REQUESTS)
def test_an_assembled_response_equals_the_servers_own(server: str, name: str) -> None:
    path, fields = REQUESTS[name]
    body = EITHER_WAY | fields
    api = ROUTES[path].api
    assert api.streaming_fields is not None
    streamed = body | api.streaming_fields
    with httpx.Client(base_url=server, timeout=60) as client:
        client.post(path, json=body)  # so that both find the prompt in the cache
        plain = client.post(path, json=body)
        stream = client.post(path, json=streamed)
    assert plain.status_code == stream.status_code == 200, plain.text
    assert shown(
        parse_object(ResponseAssembler(api, body, stream.content, 1 << 30).response())
    ) == shown(plain.json())
