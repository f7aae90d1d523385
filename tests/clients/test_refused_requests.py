"""Requests that real servers refuse with 500, though they alone are wrong: 400, and one node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from gateway.local.demo_model import CHAT_TEMPLATE, DEMO_SHAPES, write_model
from tests.clients.site import Site, running_site
from tests.each_case import each_case
from tests.servers import start_demo_servers

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

ROLES = "Roles must alternate"
TEMPLATE = (
    # The mark makes the server take its own parser for GPT-OSS, which tells errors by 500.
    "{# <|channel|> #}{%- for m in messages %}{%- if not loop.first and m.role == 'user' "
    f"and loop.previtem.role == 'user' %}}{{{{ raise_exception('{ROLES}') }}}}{{%- endif %}}"
    "{%- endfor %}"
) + CHAT_TEMPLATE
HELLO = {"role": "user", "content": "Hello"}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ARGUMENTS = "Failed to parse tool call arguments as JSON: "


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("refused")
    model = folder / "model.gguf"
    write_model(model, DEMO_SHAPES["small"], chat_template=TEMPLATE)
    async with (
        start_demo_servers(2, extra=("--model", str(model))) as urls,
        running_site(folder, urls, {"ollama": True}) as site,
    ):
        yield site


def chat_with(arguments: object) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [HELLO, asks, answer], "max_tokens": 4}


def response_with(arguments: str) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments}
    answer = {"type": "function_call_output", "call_id": "c1", "output": "done"}
    return {"input": [HELLO, call, answer], "max_output_tokens": 4}


@pytest.mark.smoke
async def test_a_history_that_no_server_can_read_is_a_bad_request(shared: Site) -> None:
    @each_case(
        ("path", "body", "words"),
        [
            *(
                (path, {**make(arguments), "stream": stream}, ARGUMENTS)
                for path, make in ((CHAT, chat_with), (RESPONSES, response_with))
                for arguments in ('{"city": "Ber', "", "{'city': 1}", "[1] and more", '{"a":"\n"}')
                for stream in (False, True)
            ),
            (CHAT, chat_with('{"x') | {"metadata": {"filler": "x" * 70_000}}, ARGUMENTS),
            ("/apply-template", chat_with('{"x'), ARGUMENTS),
            ("/v1/chat/completions/input_tokens", chat_with('{"x'), ARGUMENTS),
            (CHAT, {"messages": [{"content": "Hello"}]}, "Failed to parse messages: "),
            (CHAT, {"messages": [{"role": 5, "content": "a"}]}, "Failed to parse messages: "),
            (CHAT, {"messages": [HELLO], "tools": [{"type": "function"}]}, "Failed to parse tools"),
            (CHAT, {"messages": [HELLO, HELLO], "stream": True}, ROLES),
            (MESSAGES, {"messages": [HELLO, HELLO], "max_tokens": 4}, ROLES),
            (RESPONSES, {"input": [HELLO, HELLO]}, ROLES),
            ("/api/chat", {"model": "demo", "messages": [HELLO, HELLO]}, ROLES),
        ],
    )
    async def check(path: str, body: dict[str, Any], words: str) -> None:
        client = shared.running.client
        reply = await client.post(path, json=body, headers={"anthropic-version": "2023-06-01"})
        assert reply.status_code == 400, reply.text
        assert reply.headers["x-gateway-reason"] == "invalid_request"
        assert reply.headers["x-gateway-attempts"] == "1"
        error = reply.json()["error"]
        assert words in (error if isinstance(error, str) else error["message"])
        if not isinstance(error, str):
            assert error["type"] == "invalid_request_error"

    await check()
    nodes = shared.gateway.fleet.nodes.values()
    assert [node.failures for node in nodes] == [0, 0]
