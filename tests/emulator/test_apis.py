from __future__ import annotations

from typing import Any

import httpx

from tests.emulator import (
    EmulatedNode,
    expected_chat_text,
    expected_text,
)
from tests.virtual import in_virtual_time

HELLO = [{"role": "user", "content": "hello"}]


async def post(node: EmulatedNode, path: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=node.url) as client:
        return await client.post(path, json=body)


@in_virtual_time
async def test_the_model_ends_its_answer_unless_limited_or_ignoring_its_end() -> None:
    async with EmulatedNode(answer_tokens=7, context=64) as node:
        for more, tokens, reason in (
            ({}, 7, "stop"),
            ({"max_tokens": 3}, 3, "length"),
            ({"max_tokens": 20, "ignore_eos": True}, 20, "length"),
        ):
            reply = await post(node, "/v1/chat/completions", {"messages": HELLO, **more})
            choice = reply.json()["choices"][0]
            assert choice["message"]["content"] == expected_chat_text(HELLO, tokens)
            assert choice["finish_reason"] == reason


@in_virtual_time
async def test_a_stop_string_ends_the_answer_before_itself() -> None:
    words = expected_text("hello", 6)
    stop = words.split()[3]
    async with EmulatedNode() as node:
        reply = await post(node, "/completion", {"prompt": "hello", "stop": [stop]})
    assert reply.json()["content"] == words[: words.index(stop)]
    assert (reply.json()["stop_type"], reply.json()["stopping_word"]) == ("word", stop)


@in_virtual_time
async def test_a_chat_with_an_open_answer_is_continued_to_the_same_end() -> None:
    whole = expected_chat_text(HELLO, 10)
    so_far = expected_chat_text(HELLO, 4)
    async with EmulatedNode(answer_tokens=10) as node:
        messages = [*HELLO, {"role": "assistant", "content": so_far}]
        chat_reply = await post(node, "/v1/chat/completions", {"messages": messages})
        template = await post(node, "/apply-template", {"messages": messages})
        raw = await post(node, "/completion", template.json())
        ids = (await post(node, "/tokenize", {"content": template.json()["prompt"]})).json()
        by_ids = await post(node, "/completion", {"prompt": ids["tokens"]})
    assert so_far + chat_reply.json()["choices"][0]["message"]["content"] == whole
    assert so_far + raw.json()["content"] == whole
    assert so_far + by_ids.json()["content"] == whole
