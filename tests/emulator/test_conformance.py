"""The emulated node compared with a real server: the same responses, field by field."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import suppress
from typing import Any, cast

import httpx
import pytest

from tests.emulator import EmulatedNode
from tests.emulator.language_model import WORDS
from tests.emulator.shapes import Pair, alike, clients
from tests.servers import demo_servers, start_demo_servers

pytestmark = [pytest.mark.real, pytest.mark.slow]

HELLO = {"messages": [{"role": "user", "content": "hello there"}]}
USAGE = {"stream_options": {"include_usage": True}}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", HELLO | {"max_tokens": 3}),
    ("/v1/chat/completions", HELLO | {"max_tokens": 3, "n": 2}),
    ("/v1/chat/completions", HELLO | {"max_tokens": 3, "timings_per_token": True}),
    ("/v1/chat/completions", HELLO | {"max_tokens": 3, **USAGE}),
    ("/v1/chat/completions", HELLO | {"max_tokens": 3, "timings_per_token": True, **USAGE}),
    ("/v1/completions", {"prompt": "hello there", "max_tokens": 3}),
    ("/v1/completions", {"prompt": ["hello", "there"], "max_tokens": 3}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 3, "timings_per_token": True}),
    ("/completion", {"prompt": "hello there", "n_predict": 3}),
    ("/v1/messages", HELLO | {"max_tokens": 3}),
    ("/v1/responses", {"input": "hello there", "max_output_tokens": 3}),
    ("/tokenize", {"content": "hello there"}),
    ("/tokenize", {"content": "hello there", "with_pieces": True}),
    ("/tokenize", {"content": "hello there", "with_pieces": True, "add_special": True}),
    ("/apply-template", HELLO),
    ("/v1/messages/count_tokens", HELLO),
    ("/v1/chat/completions/input_tokens", HELLO),
]
BAD: list[tuple[str, bytes]] = [
    ("/v1/chat/completions", b"{}"),
    ("/v1/chat/completions", b'{"messages":'),
    ("/v1/chat/completions", b'{"messages":"x"}'),
    ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"a"}],"n":3}'),
    ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"a"}],"max_tokens":"a"}'),
    ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"%b"}]}' % (b"x " * 5000)),
    ("/v1/completions", b"{}"),
    ("/completion", b"{}"),
    ("/v1/messages", b"{}"),
    ("/v1/responses", b"{}"),
    ("/v1/embeddings", b'{"input":"a"}'),
    ("/v1/rerank", b'{"query":"a","documents":["b"]}'),
    ("/infill", b'{"input_prefix":"a","input_suffix":"b"}'),
    ("/v1/nothing", b"{}"),
]


@pytest.fixture(scope="module")
def real() -> Iterator[str]:
    with demo_servers(1, slots=2, context=1024) as [url]:
        yield url


@pytest.fixture
async def pair(real: str) -> AsyncIterator[Pair]:
    async with EmulatedNode(slots=2, context=1024) as node, clients(real, node.url) as pair:
        yield pair


@pytest.mark.parametrize(("path", "body"), CASES)
async def test_answers_and_streams_agree(pair: Pair, path: str, body: dict[str, Any]) -> None:
    await alike(pair, "POST", path, json=body)
    if path.endswith(("/completions", "/completion", "/messages", "/responses")):
        several = body.get("n") or isinstance(body.get("prompt"), list)
        streamed = body | {"stream": True}
        await alike(pair, "POST", path, in_order=not several, json=streamed)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
async def test_progress_agrees(pair: Pair, path: str) -> None:
    body = HELLO | {"prompt": "hello", "stream": True, "return_progress": True, "n_predict": 2}
    await alike(pair, "POST", path, json=body)


@pytest.mark.parametrize(("path", "body"), BAD)
async def test_errors_agree(pair: Pair, path: str, body: bytes) -> None:
    await alike(pair, "POST", path, exact=False, content=body)


async def test_info_endpoints_agree(pair: Pair) -> None:
    for path in ("/health", "/props", "/v1/models", "/nothing"):
        await alike(pair, "GET", path)
    slots = [(await client.get("/slots")).json() for client in pair]  # some may be used already
    assert all(set(slot) <= set(slots[0][0]) for slot in slots[1])
    metrics = [await client.get("/metrics") for client in pair]
    assert metrics[1].headers["content-type"] == metrics[0].headers["content-type"]
    real, emulated = [set(re.findall(r"^# TYPE (\S+)", one.text, re.MULTILINE)) for one in metrics]
    assert emulated
    assert emulated <= real


async def test_embeddings_agree() -> None:
    with demo_servers(1, slots=2, context=1024, embedding=True) as [url]:
        async with (
            EmulatedNode(slots=2, context=1024, embeddings=True) as node,
            clients(url, node.url) as pair,
        ):
            several = {"input": ["hello", "there"], "encoding_format": "base64"}
            for body in ({"input": "hello"}, several, {}):
                await alike(pair, "POST", "/v1/embeddings", exact=False, json=body)
            await alike(pair, "POST", "/embedding", json={"content": "hello"})


@pytest.mark.parametrize("stream", [True, False])
async def test_connections_end_alike(real: str, stream: bool) -> None:
    async with EmulatedNode() as node, httpx.AsyncClient(timeout=30) as client:
        for url in (real, node.url):
            body = HELLO | {"max_tokens": 2, "stream": stream}
            local = [await local_address(client, url, body)]
            # The server may end the connection just after it was used again.
            with suppress(httpx.RemoteProtocolError):
                local.append(await local_address(client, url, body))
            if len(local) < 2:
                local.append(await local_address(client, url, body))
            assert len(set(local)) == (2 if stream else 1)


async def local_address(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> object:
    """Our end of the connection over which a whole response came."""
    async with client.stream("POST", url + "/v1/chat/completions", json=body) as reply:
        found: object = reply.extensions["network_stream"].get_extra_info("client_addr")
        await reply.aread()
    return found


async def cached_shares(url: str) -> list[float]:
    """The cached share of each prompt, in six conversations of three tenants that alternate."""
    rng = random.Random(3)

    def words(count: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(count))

    systems = [words(300) for _ in range(3)]
    sessions = [[{"role": "system", "content": systems[i % 3]}] for i in range(6)]
    shares = []
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for which in (0, 1, 2, 0, 1, 3, 0, 4, 5, 2, 1, 3, 0, 4, 2, 5, 1, 0):
            messages = sessions[which]
            messages.append({"role": "user", "content": words(80)})
            body = {"messages": messages, "max_tokens": 10, "temperature": 0}
            reply = (await client.post("/v1/chat/completions", json=body)).json()
            messages.append(reply["choices"][0]["message"])
            timings = reply["timings"]
            shares.append(timings["cache_n"] / (timings["cache_n"] + timings["prompt_n"]))
    return shares


async def cached_beside(url: str) -> float:
    """The cached share of a prompt while another request with the same prefix is running."""
    rng = random.Random(1)

    def body(system: str, tokens: int) -> dict[str, Any]:
        user = " ".join(rng.choice(WORDS) for _ in range(30))
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return {"messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": True}

    one, other = (" ".join(rng.choice(WORDS) for _ in range(400)) for _ in range(2))
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for system in (one, other):
            await client.post("/v1/chat/completions", json=body(system, 5) | {"stream": False})
        async with client.stream("POST", "/v1/chat/completions", json=body(one, LONG)) as busy:
            begun = cast("AsyncGenerator[bytes, None]", busy.aiter_raw())
            await anext(begun)  # its prompt has been read, its slot is taken
            plain = body(one, 5) | {"stream": False}
            reply = (await client.post("/v1/chat/completions", json=plain)).json()
            slots = (await client.get("/slots")).json()
            assert [slot["is_processing"] for slot in slots].count(True) == 1
            await begun.aclose()
    timings = reply["timings"]
    return float(timings["cache_n"] / (timings["cache_n"] + timings["prompt_n"]))


LONG = 30_000  # tokens that take any server longer than the other request takes


@pytest.mark.parametrize("memory", [True, False])
async def test_the_same_share_of_every_prompt_is_cached(memory: bool) -> None:
    extra, cache_ram = ((), 64_000) if memory else (("--cache-ram", "0"), 0)
    speed: dict[str, Any] = {"decode_tps": 500, "answer_tokens": 10**6}
    async with start_demo_servers(1, slots=2, extra=extra) as [url]:
        beside, real = await cached_beside(url), await cached_shares(url)
    async with EmulatedNode(slots=2, cache_ram=cache_ram, **speed) as node:
        assert await cached_beside(node.url) == pytest.approx(beside, abs=0.03)
        assert await cached_shares(node.url) == pytest.approx(real, abs=0.03)
    assert (beside > 0.5) is memory
    assert max(real) > 0.5
