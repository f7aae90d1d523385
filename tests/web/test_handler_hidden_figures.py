"""No path tells a caller what was cached of its prompt, where the settings hide it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.callers.keys import new_key
from gateway.config.settings import Settings
from gateway.request.routes import routes_of
from tests.gateways import Running, running_gateway
from tests.transport.raw import raw_server
from tests.web.telling_node import ALL, TELLING, plain, serve_telling

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROUTES = routes_of(Settings(ollama=True))
HIDDEN, SEEN = new_key("hidden"), new_key("seen")
TEXT = "What is the code? " * 40
BODIES: dict[str, dict[str, Any]] = {
    "messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 3},
    "prompt": {"prompt": TEXT},
    "input": {"input": TEXT},
    "documents": {"query": "x", "documents": [TEXT]},
    "input_prefix": {"input_prefix": TEXT, "input_suffix": ""},
    "tokens": {"tokens": [1, 2]},
}
OLLAMA: dict[str, dict[str, Any]] = {
    "/api/chat": BODIES["messages"],
    "/api/generate": BODIES["prompt"],
    "/api/embed": BODIES["input"],
    "/api/embeddings": BODIES["prompt"],
}
FORM: dict[str, Any] = {"file": ("sound.wav", b"RIFF"), "model": (None, "demo")}


@asynccontextmanager
async def a_site(folder: Path) -> AsyncIterator[Running]:
    keys = [
        {"id": HIDDEN.id, "sha256": HIDDEN.sha256, "group": "tenants"},
        {"id": SEEN.id, "sha256": SEEN.sha256, "cache": {"hide": False}, "group": "tenants"},
    ]
    groups = {"tenants": {"cache": {"hide": True}}}
    settings = {"keys": keys, "groups": groups, "ollama": True, "heartbeat": 0.01}
    endpoints = ["chat", "embeddings", "rerank", "infill", "audio", "vision"]
    async with raw_server(serve_telling) as server:
        node = {"name": "a", "url": f"http://127.0.0.1:{server.port}", "endpoints": endpoints}
        async with running_gateway(folder, [node], settings) as running:
            yield running


async def ask(site: Running, path: str, key: str, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", "x-gateway-progress": "1"}
    if ROUTES[path].multipart:
        reply = await site.client.post(path, files=FORM, headers=headers)
    else:
        body = OLLAMA.get(path) or BODIES.get(ROUTES[path].prompt_field or "", {"content": TEXT})
        sent = {"model": "demo", "stream": False, **body, **more}
        reply = await site.client.post(path, json=sent, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply


def told(reply: httpx.Response) -> list[str]:
    whole = f"{reply.text} {reply.headers}"
    return [text for text in TELLING if text in whole]


def asked_of(path: str) -> list[dict[str, Any]]:
    """What is asked for beside the prompt, one request each."""
    found: list[dict[str, Any]] = [{}]
    if ROUTES[path].generates:
        found += [{"stream": True}, {"stream": True, "return_progress": True}]
    if ROUTES[path].api.merger is not None:
        found += [{"prompt": [TEXT, TEXT]}, {"prompt": [TEXT, TEXT], "stream": True}]
    return found


ASKED = [(path, more) for path in ROUTES if ROUTES[path].takes_slot for more in asked_of(path)]


async def test_every_path_hides_what_was_cached_and_only_where_it_must(tmp_path: Path) -> None:
    async with a_site(tmp_path) as site:
        telling = set()
        for path, more in ASKED:
            hidden = await ask(site, path, HIDDEN.text, **more)
            assert told(hidden) == [], (path, more)
            seen = await ask(site, path, SEEN.text, **more)
            assert hidden.headers["content-type"] == seen.headers["content-type"]
            assert ("ok" in hidden.text) == ("ok" in seen.text)
            if ROUTES[path].generates and not more:
                assert str(ALL) in hidden.text, "the prompt's tokens are still told"
            if told(seen):
                telling.add(path)
        assert {path for path, _ in ASKED} - telling <= {"/api/embed", "/api/embeddings"}


async def test_header_fields_of_other_matters_are_forwarded(tmp_path: Path) -> None:
    async with a_site(tmp_path) as site:
        path = "/v1/embeddings"
        hidden, seen = await ask(site, path, HIDDEN.text), await ask(site, path, SEEN.text)
        own = set(seen.headers) - set(hidden.headers)
        assert own == {"openai-processing-ms", "anthropic-ratelimit-input-tokens-remaining"}
        assert hidden.headers["openai-model"] == "demo"


async def test_paths_that_take_no_slot_pass_as_they_are(tmp_path: Path) -> None:
    async with a_site(tmp_path) as site:
        for path, route in ROUTES.items():
            if not route.takes_slot:
                assert (await ask(site, path, HIDDEN.text)).json() == plain(path, {})
