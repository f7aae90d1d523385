"""A path that is not served says what to use instead, in the form of the API that it looks like."""

from __future__ import annotations

import pytest

from gateway.errors import LONGEST_ECHO
from gateway.proxy.inbound.routes import ROUTES
from gateway.web.site import suggest_path
from tests.web.bare_gateway import bare_gateway, error_of

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "use"),
    [
        ("/v1/v1/chat/completions", CHAT),
        ("/v1/v1/v1/models", "/v1/models"),
        ("/v1/chat/completions/", CHAT),
        ("/v1/chat/completions///", CHAT),
        ("//v1/chat/completions", CHAT),
        ("/v1//chat//completions", CHAT),
        ("/v1/chat/completions/chat/completions", CHAT),
        ("/openai/v1/chat/completions", CHAT),
        ("/api/v1/chat/completions", CHAT),
        ("/chat/v1/completions", "/v1/completions"),
        ("/openai/deployments/gpt-4o/chat/completions", CHAT),
        ("/openai/deployments/a b/embeddings", "/v1/embeddings"),
        ("/openai/deployments/a/images/generations", CHAT),
        ("/api/chat", CHAT),
        ("/api/generate", "/v1/completions"),
        ("/api/tags", "/v1/models"),
        ("/api/embed", "/v1/embeddings"),
        ("/v1beta/models/gemini-pro:generateContent", CHAT),
        ("/chat", CHAT),
        ("/v1/chat", CHAT),
        ("/v1", CHAT),
        ("/", CHAT),
        ("/v1/engines/davinci/completions", "/v1/completions"),
        ("/v1/models/", "/v1/models"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/infill/", "/infill"),
        ("/messages", "/v1/messages"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/messages/count_tokens/", "/v1/messages/count_tokens"),
        ("/v1/file", "/v1/files"),
        ("/files", "/v1/files"),
        ("/v1/files/", "/v1/files"),
    ],
)
def test_the_suggestion_names_the_path_that_was_meant(path: str, use: str) -> None:
    assert f"Use {use}" in suggest_path(path)
    assert "http://HOST:PORT" in suggest_path(path)


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_every_served_path_is_suggested_however_it_is_spelt(path: str) -> None:
    use = ROUTES[path].path
    for spelt in (f"{path}/", f"/{path}", f"//{path}//"):
        assert f"Use {use}:" in suggest_path(spelt) or f"Use {use} at" in suggest_path(spelt)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/v1/images/generations", "Images are not made"),
        ("/v1/audio/speech", "Speech is not made"),
        ("/v1/fine_tuning/jobs", "Models are not trained"),
        ("/v1/assistants", "There are no assistants"),
        ("/v1/threads/t1/messages", "No conversation is kept"),
        ("/v1/moderations", "Nothing is moderated"),
        ("/v1/realtime", "no realtime"),
        ("/v1/uploads", "POST /v1/files"),
        ("/v1/batches/b1/retry", "A batch has only /cancel, /pause"),
        ("/v1/messages/batches/b1/retry", "A message batch has only /results, /cancel"),
        ("/v1/responses/resp_1/input", "A stored response has only"),
        ("/v1/chat/completions/id/messages", "No chat is kept"),
        ("/slots", "other people's requests"),
        ("/anything", "Served are"),
    ],
)
def test_unsupported_apis_are_named_with_the_supported_ones(path: str, why: str) -> None:
    assert why in suggest_path(path)
    assert path == "/slots" or CHAT in suggest_path(path)


@pytest.mark.parametrize(
    "path", ["/" * 100_000, "/v1" * 50_000, "/openai/deployments/" + "a/" * 50_000]
)
def test_the_suggestion_repeats_nothing_of_the_path(path: str) -> None:
    assert len(suggest_path(path)) < 400


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/v1/chat/completions"),
        ("POST", "/openai/deployments/gpt/chat/completions?api-version=2024-10-21"),
        ("GET", "/api/v1/tags"),
        ("GET", "/v1/models/"),
        ("POST", "/v1/images/generations"),
        ("GET", "/"),
    ],
)
async def test_a_404_contains_the_suggestion(method: str, path: str) -> None:
    async with bare_gateway() as gateway:
        response = await gateway.public.request(method, path, json={})
    assert (response.status_code, response.headers["x-gateway-reason"]) == (404, "not_found")
    assert suggest_path(path.partition("?")[0]) in error_of(response)["message"]
    assert len(error_of(response)["message"]) < LONGEST_ECHO + 600


@pytest.mark.parametrize("path", ["/v1/v1/messages", "/v1/messages/", "//v1/messages", "/messages"])
async def test_paths_that_look_like_anthropics_get_its_error_form(path: str) -> None:
    async with bare_gateway() as gateway:
        response = await gateway.public.post(path, json={})
    assert response.status_code == 404
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "not_found_error"
    assert "Use /v1/messages" in response.json()["error"]["message"]


async def test_ollamas_clients_get_the_error_as_a_text() -> None:
    async with bare_gateway() as gateway:
        response = await gateway.public.get("/api/tags")
    assert response.status_code == 404
    assert "Use /v1/models" in response.json()["error"]


async def test_a_served_path_is_405_for_other_methods() -> None:
    async with bare_gateway() as gateway:
        for path in ROUTES:
            response = await gateway.public.get(path)
            assert (response.status_code, response.headers["allow"]) == (405, "POST")


def test_the_paths_of_ollama_are_named_once_they_are_served() -> None:
    assert "'ollama' turns it on" in suggest_path("/api/chat")
    assert suggest_path("/api//chat/", ollama=True) == "Use /api/chat."
