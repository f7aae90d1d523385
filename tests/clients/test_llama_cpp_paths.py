"""llama.cpp's own paths: the gateway answers as the server itself does, or not at all."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.clients.conftest import CONTEXT
from tests.clients.site import FIXED, HELLO, UNCACHED, Site
from tests.each_case import each_case

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

CHAT: dict[str, Any] = {"messages": HELLO, "max_tokens": 12, **FIXED, **UNCACHED}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
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
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"max_tokens": 60, "stop": ["e"]}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 4, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 4, "n": 2}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 40, "response_format": INTEGER}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 40, "tools": [TOOL], "tool_choice": "required"}),
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


@each_case("path", ["/slots", "/metrics", "/slots/0", "/lora-adapters", "/"])
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
