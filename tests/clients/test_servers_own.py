"""What the gateway passes on equals what the server itself answers: streams, and plain answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from gateway.app.assembly import Timings
from tests.clients.conftest import CONTEXT
from tests.clients.site import FIXED, HELLO, UNCACHED, Site, running_site
from tests.each_case import each_case

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

CHAT: dict[str, Any] = {"messages": HELLO, "max_tokens": 40, **FIXED, **UNCACHED}
TEXT: dict[str, Any] = {"prompt": "hello there", "max_tokens": 40, **FIXED, **UNCACHED}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}

STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", CHAT | {"timings_per_token": True, "logprobs": True}),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "required"}),
    ("/chat/completions", CHAT | {"max_tokens": 1}),
    ("/v1/completions", TEXT),
    ("/completion", TEXT | {"n_predict": 40}),
    ("/completion", TEXT | {"n_predict": 40, "return_progress": True}),
    ("/v1/messages", CHAT),
]

ASKING = {"X-Gateway-Progress": "1"}

# Fields that the server makes anew for each answer; nothing else may differ.
_CHANGING = re.compile(
    rb'"(?:id|item_id|response_id)":"[^"]*"'
    rb'|"(?:created|created_at|completed_at|id_slot|time_ms)":[0-9.]+'
    rb'|"[a-z_]*_(?:ms|per_second)":[0-9.e+-]+'
)


def without_changing_fields(data: bytes) -> bytes:
    return _CHANGING.sub(b"-", data)


async def streamed(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str
) -> bytes:
    body = body | {"stream": True}
    async with client.stream("POST", path, json=body, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        return await answer.aread()


@pytest.mark.smoke
@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_a_stream_is_the_servers_own(
    site: Site, chat_node: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    direct = await streamed(chat_node, path, body | {"model": "demo"})
    ours = await streamed(site.http, path, body | {"model": "demo"})
    assert direct.count(b"\n\n") > 3 or body.get("max_tokens") == 1
    assert without_changing_fields(ours) == without_changing_fields(direct)
    await site.until_idle()
    assert [record.status for record in site.records] == [200]


async def test_progress_of_a_long_prefill_is_reported(tmp_path: Path, narrow_url: str) -> None:
    # A prefill of seconds, so that no stall of the machine hides all of its progress.
    body = {"messages": [{"role": "user", "content": "river stone " * 2000}], "max_tokens": 3}
    async with running_site(tmp_path, [narrow_url], timings=Timings(progress=0.02)) as site:
        ours = await streamed(site.http, "/v1/chat/completions", body | UNCACHED, **ASKING)
    progress = [tuple(map(int, one)) for one in _READ.findall(ours)]
    assert progress == sorted(progress)
    assert any(0 < processed < total for _, processed, total in progress)
    assert all(percent == 100 * processed // total for percent, processed, total in progress)
    assert all(total > 4000 for _, _, total in progress)
    assert ours.count(b'"role"') == 1


_READ = re.compile(rb": prefill percent=(\d+) processed=(\d+) total=(\d+)\n")


# Plain answers.


PLAIN: dict[str, Any] = {"messages": HELLO, "max_tokens": 12, **FIXED, **UNCACHED}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
LOOK_TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
LOOK = {"tools": [{"name": "look", "input_schema": PARAMETERS}], "tool_choice": {"type": "any"}}
INTEGER = {"type": "json_object", "schema": {"type": "integer"}}

SAME: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"content": "hello there, \u00fcber", "with_pieces": True}),
    ("/detokenize", {"tokens": [400, 500, 600]}),
    ("/apply-template", {"messages": HELLO}),
    ("/v1/chat/completions/input_tokens", {"messages": HELLO}),
    ("/v1/messages/count_tokens", {"messages": HELLO}),
    ("/v1/responses/input_tokens", {"input": "hello there"}),
    ("/completion", {"prompt": "hello there", "n_predict": 12, **FIXED, **UNCACHED}),
    ("/completion", {"prompt": "hello there", "n_predict": 4, "n_probs": 2, **FIXED, **UNCACHED}),
    ("/completion", {"prompt": ["one", "two"], "n_predict": 4, **FIXED, **UNCACHED}),
    # Plain responses are assembled from the server's stream.
    ("/v1/chat/completions", PLAIN),
    ("/v1/chat/completions", PLAIN | {"max_tokens": 60, "stop": ["e"]}),
    ("/v1/chat/completions", PLAIN | {"max_tokens": 4, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", PLAIN | {"max_tokens": 4, "n": 2}),
    ("/v1/chat/completions", PLAIN | {"max_tokens": 40, "response_format": INTEGER}),
    (
        "/v1/chat/completions",
        PLAIN | {"max_tokens": 40, "tools": [LOOK_TOOL], "tool_choice": "required"},
    ),
    ("/v1/completions", {"prompt": "hello there", "max_tokens": 12, **FIXED, **UNCACHED}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 3, "logprobs": 2, **FIXED, **UNCACHED}),
    (
        "/completion",
        {"prompt": "hello", "n_predict": 3, "return_tokens": True, **FIXED, **UNCACHED},
    ),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 12, "temperature": 0, **UNCACHED}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 60, "temperature": 0, **UNCACHED, **LOOK}),
    # The server's own errors pass unchanged.
    ("/tokenize", {"content": 5}),
    ("/detokenize", {"tokens": "x"}),
    ("/apply-template", {}),
    ("/completion", {}),
]
EMBED: list[tuple[str, dict[str, Any]]] = [
    ("/embedding", {"content": "hello there"}),
    ("/v1/embeddings", {"input": ["hello there", "stone"]}),
    ("/v1/embeddings", {"input": "stone", "encoding_format": "base64"}),
]


RANK = {"query": "a", "documents": ["b"]}
CHANGING = {
    *("id", "id_slot", "item_id", "created", "created_at", "completed_at", "timings", "model")
}


def settled(value: Any) -> Any:
    """A value without the fields that differ from one answer to the next."""
    if isinstance(value, dict):
        return {name: settled(inner) for name, inner in value.items() if name not in CHANGING}
    if isinstance(value, list):
        return [settled(item) for item in value]
    return value


@pytest.mark.smoke
@pytest.mark.parametrize(("path", "body"), SAME)
async def test_a_path_answers_as_the_server_does(
    site: Site, chat_node: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    direct = await chat_node.post(path, json=body)
    ours = await site.http.post(path, json=body | {"model": "demo"})
    assert ours.status_code == direct.status_code
    assert ours.headers["content-type"] == direct.headers["content-type"]
    assert settled(ours.json()) == settled(direct.json())


@pytest.mark.parametrize("path", ["/responses", "/v1/responses"])
async def test_a_response_is_the_servers_own_but_for_its_status(
    site: Site, unrepaired: Site, chat_node: httpx.AsyncClient, path: str
) -> None:
    body = {"input": "hello", "max_output_tokens": 12, "temperature": 0, **UNCACHED}
    direct = settled((await chat_node.post(path, json=body)).json())
    assert settled((await unrepaired.http.post(path, json=body)).json()) == direct
    repaired = settled((await site.http.post(path, json=body | {"model": "demo"})).json())
    assert repaired.pop("incomplete_details") == {"reason": "max_output_tokens"}
    for one in (repaired, *repaired["output"]):
        assert one["status"] == "incomplete"
        one["status"] = "completed"
    assert repaired == direct


@pytest.mark.smoke
@pytest.mark.parametrize(("path", "body"), EMBED)
async def test_numbers_are_the_servers_own(
    site: Site, embed_node: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    direct = await embed_node.post(path, json=body)
    ours = await site.http.post(path, json=body | {"model": "demo-embed"})
    assert ours.status_code == direct.status_code == 200
    assert settled(ours.json()) == settled(direct.json())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        *(
            (f"{version}/{path}", RANK)
            for version in ("", "/v1")
            for path in ("rerank", "reranking")
        ),
        ("/embedding", {"content": "a"}),
    ],
)
async def test_an_unsupported_request_is_sent_once_and_the_node_is_not_blamed(
    site: Site, chat_node: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    direct = await chat_node.post(path, json=body)
    assert direct.status_code == 501
    for _ in range(2):  # the second is refused without a request to the node
        answer = await site.http.post(path, json=body | {"model": "demo"})
        assert answer.status_code == 501
        assert answer.json()["error"]["code"] == "not_supported"
        assert direct.json()["error"]["message"] in answer.json()["error"]["message"]
        assert answer.headers["x-gateway-reason"] == "not_supported"
        assert answer.headers["x-should-retry"] == "false"
    assert site.records[-1].attempts == 0
    assert site.gateway.fleet.nodes["chat"].failures == 0
    assert (await site.http.post("/tokenize", json={"content": "a", "model": "demo"})).is_success


@pytest.mark.smoke
async def test_properties_show_sizes_and_nothing_else(
    site: Site, chat_node: httpx.AsyncClient
) -> None:
    own = (await chat_node.get("/props")).json()
    assert {"model_path", "chat_template"} <= set(own)
    ours = await site.http.get("/props", params={"model": "demo"})
    assert ours.json() == {
        "default_generation_settings": {"n_ctx": CONTEXT},
        "total_slots": own["total_slots"],
        "modalities": {"vision": False, "audio": False, "video": False},
    }


@each_case("path", ["/slots", "/metrics", "/slots/0", "/lora-adapters"])
async def test_no_other_path_reaches_a_node(site: Site, path: str) -> None:
    for method in ("GET", "POST"):
        answer = await site.http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert (await site.http.post("/props", json={})).status_code == 405


@pytest.mark.smoke
async def test_clients_cannot_choose_a_slot(site: Site, chat_url: str) -> None:
    body = {"prompt": "hello", "n_predict": 2, "model": "demo"}
    free = await site.http.post("/completion", json=body)
    for slot in range(4):
        answer = await site.http.post("/completion", json=body | {"id_slot": slot})
        assert answer.json()["id_slot"] == free.json()["id_slot"]


# Several prompts in one request.


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
