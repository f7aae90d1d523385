from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.emulator import (
    EmulatedNode,
    expected_chat_text,
    expected_embedding,
    expected_score,
    expected_text,
)
from tests.emulator.raw_connection import chat, events, stream_bytes
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
async def test_a_stop_that_is_no_text_is_ignored_as_by_a_real_server() -> None:
    async with EmulatedNode() as node:
        reply = await post(node, "/completion", {"prompt": "hello", "stop": 5, "n_predict": 3})
    assert reply.json()["content"] == expected_text("hello", 3)


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


@in_virtual_time
async def test_several_answers_take_several_slots() -> None:
    async with EmulatedNode(slots=2) as node:
        body = {"messages": HELLO, "max_tokens": 2, "n": 2}
        reply = (await post(node, "/v1/chat/completions", body)).json()
        assert [choice["index"] for choice in reply["choices"]] == [0, 1]
        assert node.peak_busy == 2
        too_many = await post(node, "/v1/chat/completions", {"messages": HELLO, "n": 3})
        assert too_many.status_code == 400
        prompts = {"prompt": ["a", "b", "c"], "max_tokens": 2}
        texts = (await post(node, "/v1/completions", prompts)).json()["choices"]
    assert [choice["text"] for choice in texts] == [expected_text(p, 2) for p in "abc"]


@in_virtual_time
async def test_progress_is_reported_during_the_prefill() -> None:
    async with EmulatedNode(batch=16) as node:
        body = chat("the " * 40, return_progress=True, max_tokens=1)
        found = events(await stream_bytes(node.url, "/v1/chat/completions", body))
    progress = [e["prompt_progress"] for e in found if "prompt_progress" in e]
    total = progress[0]["total"]
    assert [p["processed"] for p in progress] == [*range(0, total, 16), total]


@in_virtual_time
async def test_embeddings_and_scores_depend_on_the_text_alone() -> None:
    async with EmulatedNode(embeddings=True, rerank=True, context=32) as node:
        vectors = (await post(node, "/v1/embeddings", {"input": ["a", "b"]})).json()["data"]
        documents = ["one", "two", "three"]
        ranked = await post(node, "/v1/rerank", {"query": "q", "documents": documents})
        too_long = await post(node, "/v1/embeddings", {"input": "the " * 100})
    assert [v["embedding"] for v in vectors] == [
        pytest.approx(expected_embedding("a")),
        pytest.approx(expected_embedding("b")),
    ]
    scores = {documents[r["index"]]: r["relevance_score"] for r in ranked.json()["results"]}
    assert scores == {d: pytest.approx(expected_score("q", d)) for d in documents}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert too_long.status_code == 500


@in_virtual_time
async def test_the_last_requests_are_recorded() -> None:
    async with EmulatedNode(remember=2) as node:
        for i in range(3):
            await post(node, "/v1/completions", {"prompt": f"p{i}", "max_tokens": 1})
        async with httpx.AsyncClient(base_url=node.url) as client:
            await client.get("/health")
        assert node.requests == 3
        assert [b"p1" in request.body for request in node.seen] == [True, False]
        assert node.seen[-1].headers["content-type"] == "application/json"
