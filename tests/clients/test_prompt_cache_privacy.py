"""What a tenant learns of another's prompts from real servers, and what each setting changes."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.callers.keys import ApiKey, new_key
from tests.clients.site import Site, running_site
from tests.servers import demo_servers

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

ALICE, BOB = new_key("alice"), new_key("bob")
TIMES = {"created", "created_at", "completed_at", "eval_duration", "id", "item_id"}
SECRETS = itertools.count(1000)

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 3},
    "/v1/completions": {"max_tokens": 3},
    "/v1/messages": {"max_tokens": 3},
    "/v1/responses": {"max_output_tokens": 3},
    "/completion": {"n_predict": 3},
    "/api/chat": {"options": {"num_predict": 3}},
    "/api/generate": {"options": {"num_predict": 3}},
}
CURIOUS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "timings_per_token": True,
        "return_progress": True,
        "verbose": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"timings_per_token": True, "stream_options": {"include_usage": True}},
    "/completion": {"timings_per_token": True, "return_progress": True},
}
"""What a client may ask for to learn more, in streams."""


def secret() -> str:
    """A prompt that nobody has sent; the next one differs from it near its beginning."""
    digits = " ".join(str(next(SECRETS)))
    return f"The code is {digits}. " + "It opens the gate, and nobody else may know. " * 14


def body(path: str, prompt: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    fields: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": prompt},
        "/completion": {"prompt": prompt},
        "/v1/responses": {"input": prompt},
        "/api/generate": {"prompt": prompt, "raw": True},
    }
    field = fields.get(path, {"messages": messages})
    return {"model": "demo", "temperature": 0, "stream": False, **field, **PATHS[path], **more}


@pytest.fixture(scope="module")
def urls() -> Iterator[list[str]]:
    with demo_servers(2, slots=2, context=2048) as found:
        yield found


@asynccontextmanager
async def two_tenants(
    folder: Path, nodes: list[Any], cache: Mapping[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Site]:
    """A gateway that Alice and Bob share; `cache` holds for Bob's group."""
    keys = [
        {"id": key.id, "sha256": key.sha256, "name": key.id, "group": f"of-{key.id}"}
        for key in (ALICE, BOB)
    ]
    groups = {"of-alice": {}, "of-bob": {"cache": dict(cache or {})}}
    chosen = {"keys": keys, "groups": groups, "ollama": True, **settings}
    async with running_site(folder, nodes, chosen) as site:
        yield site


async def ask(site: Site, key: ApiKey, path: str, sent: Mapping[str, Any]) -> httpx.Response:
    headers = {"authorization": f"Bearer {key.text}", "x-gateway-progress": "1"}
    reply = await site.http.post(path, json=sent, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply


def objects(reply: httpx.Response) -> list[Any]:
    """All JSON of a response: of its body, its events, or its lines."""
    if reply.text.startswith(("{", "[")) and "\n{" not in reply.text:
        return [reply.json()]
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def figures(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """All numbers in a value but for times, with their names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in TIMES and not key.endswith(("_ms", "_second")):
                yield from figures(inner, f"{name}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from figures(inner, name)
    elif isinstance(value, (int, float)):
        yield name, value


def cached(reply: httpx.Response) -> int:
    """The most cached tokens that any field of the response tells of."""
    names = ("cached_tokens", "cache_n", "cache_read_input_tokens", "prompt_progress.cache")
    found = [
        int(figure)
        for one in objects(reply)
        for name, figure in figures(one)
        if name.endswith(names)
    ]
    return max(found, default=-1)


async def guesses(
    site: Site, path: str, more: Mapping[str, Any]
) -> tuple[httpx.Response, httpx.Response]:
    """Bob's right and his wrong guess of Alice's prompt."""
    prompt, wrong = secret(), secret()
    await ask(site, ALICE, path, body(path, prompt))
    right = await ask(site, BOB, path, body(path, prompt, **more))
    return right, await ask(site, BOB, path, body(path, wrong, **more))


FORMS = [
    *((path, {}) for path in PATHS),
    *((path, {"stream": True, **CURIOUS.get(path, {})}) for path in PATHS),
    ("/completion", {"response_fields": ["content", "timings/cache_n", "timings/prompt_n"]}),
    ("/v1/chat/completions", {"verbose": True, "timings_per_token": True}),
]
IDS = [f"{path} {'+'.join(more)}" for path, more in FORMS]


@pytest.mark.parametrize(("path", "more"), FORMS, ids=IDS)
async def test_hidden_figures_are_the_same_for_a_right_and_a_wrong_guess(
    tmp_path: Path, urls: list[str], path: str, more: dict[str, Any]
) -> None:
    async with two_tenants(tmp_path, urls[:1], {"hide": True}) as site:
        right, wrong = await guesses(site, path, more)
        assert objects(right), right.text
        for reply in (right, wrong):
            assert cached(reply) <= 0
            for word in ("cache_n", "prompt_n", "prompt_ms", "prompt_progress", "tokens_cached"):
                assert word not in reply.text
            assert "prompt_eval_duration" not in reply.text
            assert "processed=" not in reply.text
        # Whatever else there is does not depend on the guess.
        assert [name for one in objects(right) for name, _ in figures(one)] == [
            name for one in objects(wrong) for name, _ in figures(one)
        ]
        told = [
            [figure for one in objects(reply) for figure in figures(one) if "token" in figure[0]]
            for reply in (right, wrong)
        ]
        assert [figure for figure in told[0] if ".tokens" not in figure[0]] == [
            figure for figure in told[1] if ".tokens" not in figure[0]
        ]
        # The gateway's own records have them.
        assert site.records[-2].cached_tokens > 100


@pytest.mark.parametrize("path", PATHS)
async def test_without_a_prompt_cache_the_node_reads_every_prompt_anew(
    tmp_path: Path, urls: list[str], path: str
) -> None:
    async with two_tenants(tmp_path, urls[:1], {"prompt_cache": False}) as site:
        for more in ({}, {"stream": True, **CURIOUS.get(path, {})}):
            right, wrong = await guesses(site, path, more)
            assert cached(right) <= 0
            assert cached(wrong) <= 0
            await site.until_idle()
            assert [record.cached_tokens for record in site.records[-2:]] == [0, 0]
            assert all(record.prompt_tokens > 100 for record in site.records[-2:])
