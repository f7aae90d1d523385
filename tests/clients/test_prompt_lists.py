"""Several prompts in one request are answered as by the server, however many slots there are."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError

from tests.clients.conftest import CONTEXT
from tests.clients.site import FIXED, UNCACHED, Site
from tests.clients.test_llama_cpp_paths import settled

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

WORDS = ["river", "stone", "hand", "gold", "one two", "silver bell", "plant", "iro", "again"]
"""More prompts than the server has slots (four)."""
ASK: dict[str, Any] = {"prompt": WORDS, "max_tokens": 5, **FIXED, **UNCACHED}


def texts(answer: Any) -> dict[int, str]:
    return {choice["index"]: choice["text"] for choice in answer["choices"]}


@pytest.mark.smoke
@pytest.mark.parametrize("prompts", [WORDS, [[400, 500], [600]] * 3, ["a", [400, 401], "b"] * 2])
async def test_more_prompts_than_slots_are_one_answer_in_order(
    site: Site, chat_node: httpx.AsyncClient, prompts: list[Any]
) -> None:
    ask = ASK | {"prompt": prompts}
    direct = (await chat_node.post("/v1/completions", json=ask)).json()
    ours = (await site.http.post("/v1/completions", json=ask | {"model": "demo"})).json()
    assert [choice["index"] for choice in ours["choices"]] == list(range(len(prompts)))
    assert settled(ours["choices"]) == settled(direct["choices"])
    singles = [
        (await chat_node.post("/v1/completions", json=ask | {"prompt": one})).json()["usage"]
        for one in prompts
    ]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert ours["usage"][name] == sum(usage[name] for usage in singles)
    (record,) = site.records
    assert (record.status, record.attempts) == (200, 1)
    assert record.prompt_tokens == ours["usage"]["prompt_tokens"]
    assert record.completion_tokens == ours["usage"]["completion_tokens"]


@pytest.mark.parametrize("counts", [False, True])
async def test_a_stream_of_several_prompts_is_one_stream(
    site: Site, openai: AsyncOpenAI, counts: bool
) -> None:
    plain = (await site.http.post("/v1/completions", json=ASK | {"model": "demo"})).json()
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if counts else {}
    stream = await openai.completions.create(
        model="demo", prompt=WORDS, max_tokens=5, stream=True, extra_body=FIXED | UNCACHED, **more
    )
    texts_by_index: dict[int, str] = {}
    finished, ids, usages = [], set(), []
    async for chunk in stream:
        ids.add(chunk.id)
        if chunk.usage:
            usages.append(chunk.usage.total_tokens)
        for choice in chunk.choices:
            texts_by_index[choice.index] = texts_by_index.get(choice.index, "") + choice.text
            if choice.finish_reason:
                finished.append(choice.index)
    assert texts_by_index == texts(plain)
    assert sorted(finished) == list(range(len(WORDS)))
    assert len(ids) == 1
    assert usages == ([plain["usage"]["total_tokens"]] if counts else [])


@pytest.mark.parametrize("stream", [False, True])
async def test_one_prompt_that_is_too_long_is_the_error_of_all(
    openai: AsyncOpenAI, site: Site, stream: bool
) -> None:
    prompts = [*WORDS[:2], "zq" * CONTEXT, *WORDS[2:]]

    async def send() -> None:
        answer: Any = await openai.completions.create(
            model="demo", prompt=prompts, max_tokens=400, stream=stream
        )
        _ = [chunk async for chunk in answer]

    with pytest.raises(APIError, match="prompt is too long") as caught:
        await send()
    if isinstance(caught.value, BadRequestError):
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "prompt"
    await site.until_idle()
    assert [record.status for record in site.records] == [400]
