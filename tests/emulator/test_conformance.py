"""The emulated node compared with a real server: the same responses, and each state.

What a server says of itself is the same in builds 11549 (the wheel's) and 11669, and does not tell
its kind: `architecture` in `/v1/models` is text to text, `modalities` in `/props` all false;
`/slots`, `/metrics`, the template and every `endpoint_*` are alike. An empty question tells it.

| started with | chat | embeddings, `{}` | rerank, `{}` |
| --- | --- | --- | --- |
| nothing more, `--pooling mean` | 200 | 501, 501 | 501, 501 |
| `--embedding --pooling mean` | 200 | 200, 400 | 501, 501 |
| `--embedding --pooling rank`, `--reranking` | 200 | 200 (all zeros), 400 | 200, 400 |

The question takes no slot, 0.4 ms when idle and 8 ms while all slots are busy; but it wakes a
sleeping server, and begins its idle time anew.

With `--embedding` alone, build 11669 dies of SIGSEGV at the first chat to a model without a pooling
of its own, as the demo model is.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from gateway.local.server import claim_port, claimed_port
from tests.emulator import EmulatedNode
from tests.emulator.language_model import WORDS
from tests.emulator.raw_connection import chat, post, raw_connection
from tests.emulator.shapes import Pair, alike, clients, heads
from tests.polling import eventually
from tests.servers import demo_servers, spawn_demo_server, start_demo_servers, stop_demo_server

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


@asynccontextmanager
async def beside(node: EmulatedNode, **options: Any) -> AsyncIterator[Pair]:
    """Clients of a server with these options, and of the node."""
    async with (
        start_demo_servers(1, **options) as [url],
        node,
        clients(url, node.url) as pair,
    ):
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
    sizes: dict[str, Any] = {"slots": 2, "context": 1024}
    node = EmulatedNode(**sizes, embeddings=True)
    async with beside(node, **sizes, embedding=True) as pair:
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


# States.


binary_only = pytest.mark.binary_only("the wheel's server has no option for it")
CHAT = "/v1/chat/completions"
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 100_000}
IDLE_LIMIT = 5.0  # seconds


@pytest.mark.parametrize("kinds", [(), ("embeddings",), ("embeddings", "rerank")], ids=str)
async def test_what_a_server_says_of_itself_does_not_tell_its_kind(kinds: tuple[str, ...]) -> None:
    options: dict[str, Any] = {"embedding": True} if kinds else {}
    options |= {"extra": ("--pooling", "rank")} if "rerank" in kinds else {}
    statuses = (200, *(200 if kind in kinds else 501 for kind in ("embeddings", "rerank")))
    own: dict[str, Any] = {kind: kind in kinds for kind in ("embeddings", "rerank")}
    node = EmulatedNode(slots=1, context=512, **own)
    async with beside(node, slots=1, context=512, **options) as pair:
        for client in pair:
            [model] = (await client.get("/v1/models")).json()["data"]
            assert set(map(str, model["architecture"].values())) == {"['text']"}
            assert model["meta"]["n_ctx"] == 512
            props = (await client.get("/props")).json()
            assert not any(props["modalities"].values())
        bodies = {
            CHAT: chat(stream=False, max_tokens=1),
            "/v1/embeddings": {"input": "a"},
            "/v1/rerank": {"query": "a", "documents": ["b"]},
        }
        for (path, body), status in zip(bodies.items(), statuses, strict=True):
            assert (await alike(pair, "POST", path, json=body)).status_code == status
            if path != CHAT:
                question = await alike(pair, "POST", path, json={})
                assert question.status_code == (400 if status == 200 else 501)
        assert node.requests == len(bodies)


@binary_only
async def test_aliases_and_endpoints_that_are_off_show_alike() -> None:
    """The first alias of the alphabet names the model."""
    node = EmulatedNode(slots=1, endpoint_slots=False, model="small", aliases=("demo", "tiny"))
    options: dict[str, Any] = {"alias": "small,demo,tiny", "extra": ("--no-slots",)}
    async with beside(node, slots=1, context=512, **options) as pair:
        assert (await alike(pair, "GET", "/slots")).status_code == 501
        for client in pair:
            assert (await client.get("/props")).json()["endpoint_slots"] is False
            [model] = (await client.get("/v1/models")).json()["data"]
            assert (model["id"], model["aliases"]) == ("demo", ["demo", "small", "tiny"])
            assert (await client.get("/props")).json()["model_alias"] == "demo"
            for asked in ("tiny", "another"):
                answer = await client.post(CHAT, json=chat(stream=False, model=asked))
                assert answer.json()["model"] == "demo"


async def test_a_server_with_a_key_answers_alike(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    sizes: dict[str, Any] = {"slots": 1, "context": 512}
    node, extra = EmulatedNode(**sizes, api_key="secret"), ("--api-key-file", f"{tmp_path}/keys")
    public = {"/health", "/v1/health", "/"}
    paths = [*sorted(public), "/props", "/slots", "/metrics", "/v1/models", "/nothing"]
    async with beside(node, **sizes, extra=extra) as pair:
        for path in paths:
            answer = await alike(pair, "GET", path)
            assert (answer.status_code == 401) is (path not in public), path
        assert (await alike(pair, "POST", CHAT, json=chat())).status_code == 401
        for name, value in (("authorization", "Bearer secret"), ("x-api-key", "secret")):
            answer = await alike(pair, "GET", "/props", headers={name: value})
            assert answer.status_code == 200
        wrong = await alike(pair, "GET", "/props", headers={"authorization": "Bearer no"})
        assert wrong.status_code == 401


async def test_a_busy_slot_is_shown_alike() -> None:
    node = EmulatedNode(slots=1, context=16_128, decode_tps=100)
    async with beside(node, slots=1, context=16_128) as pair:
        for client in pair:
            async with client.stream("POST", CHAT, json=chat(**ENDLESS)) as running:
                chunks = running.aiter_raw()  # the stream ends with it
                await anext(chunks)
                [slot] = (await client.get("/slots")).json()
                assert slot["is_processing"] is True
                assert slot["n_prompt_tokens"] > 0
                assert slot["next_token"][0]["n_decoded"] >= 1
                assert (await client.get("/health")).status_code == 200
                figures = (await client.get("/metrics")).text
                assert "llamacpp:requests_processing 1\n" in figures


async def test_a_server_that_loads_its_model_says_so_on_every_path() -> None:
    paths = ("/health", "/props", "/slots", "/v1/models", "/nothing", CHAT)
    async with EmulatedNode() as node, httpx.AsyncClient() as client:
        node.loading = True
        expected = [await client.get(node.url + path) for path in paths]
        assert {answer.status_code for answer in expected} == {503}
    seen: dict[str, httpx.Response] = {}
    while len(seen) < len(paths):  # it loads within milliseconds: of one start some are seen
        with claim_port("127.0.0.1") as claim:
            started = spawn_demo_server(size="medium", port=claimed_port(claim))
            try:
                await look_while_loading(f"http://127.0.0.1:{claimed_port(claim)}", paths, seen)
            finally:
                await asyncio.to_thread(stop_demo_server, started)
    for path, answer in zip(paths, expected, strict=True):
        assert (seen[path].json(), heads(seen[path])) == (answer.json(), heads(answer))


async def look_while_loading(
    url: str, paths: tuple[str, ...], seen: dict[str, httpx.Response]
) -> None:
    async with clients(url, url) as (client, _), asyncio.timeout(60):
        while True:
            for path in paths:
                try:
                    answer = await client.get(path)
                except httpx.TransportError:
                    await asyncio.sleep(0.001)
                    break
                if answer.status_code == 503:
                    seen[path] = answer
                elif path == "/health":
                    return


async def test_an_idle_connection_is_closed_after_five_seconds_and_a_refused_one_at_once() -> None:
    async with beside(EmulatedNode(), slots=1, context=512) as pair:

        async def seconds_open(where: str) -> float:
            async with raw_connection(where) as wire:
                await wire.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                await wire.some()
                began = asyncio.get_running_loop().time()
                assert await wire.rest() == b""
                return asyncio.get_running_loop().time() - began

        for where in (str(client.base_url) for client in pair):
            assert await seconds_open(where) >= IDLE_LIMIT - 0.5
            # Without a limit of its own: a machine may stand still for seconds.
            async with raw_connection(where) as wire:
                await wire.send(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
                assert b"Connection: close" in await wire.rest()


@binary_only
@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", "/completion", "/v1/messages", "/v1/responses"]
)
async def test_a_full_pool_ends_every_request_alike(path: str) -> None:
    """Without `--parallel`: four slots, each with the whole context by its own words."""
    body = chat() | {"prompt": "hello", "input": "hello", "n_predict": 200, "ignore_eos": True}
    node = EmulatedNode(slots=4, context=256, unified=True, decode_tps=1000)
    async with beside(node, slots=1, context=256, extra=("--parallel", "-1")) as pair:
        props = (await alike(pair, "GET", "/props")).json()
        assert props["total_slots"] == 4
        assert props["default_generation_settings"]["n_ctx"] == 256
        assert [slot["n_ctx"] for slot in (await pair[0].get("/slots")).json()] == [256] * 4
        ends = []
        for client in pair:
            # Twice what fits, of which some are streams.
            answers = await asyncio.gather(
                *(client.post(path, json=body | {"stream": i % 2 == 0}) for i in range(4))
            )
            failed = [answer for answer in answers if "exceeded" in answer.text]
            assert len(failed) >= 2
            # The whole plain answer, or the last event of a stream.
            last = {(a.status_code, a.text.strip().rpartition("\n\n")[2]) for a in failed}
            ends.append(sorted((status, order_keys(text)) for status, text in last))
        assert ends[0] == ends[1]
        alone = body | {"prompt": "hello " * 40, "n_predict": 1}
        assert (await alike(pair, "POST", "/completion", json=alone)).status_code == 200
        long = {"prompt": "hello " * 300}
        too_long = await alike(pair, "POST", "/completion", exact=False, json=long)
        error = too_long.json()["error"]
        assert (error["type"], error["n_ctx"]) == ("exceed_context_size_error", 256)


def order_keys(text: str) -> str:
    """An error or error event with its keys in order."""
    start = text.index("{")
    value = httpx.Response(200, text=text[start:]).json()
    error = value.get("error", value)
    return f"{text[:start]} {'error' in value} {sorted(error.items(), key=str)}"


@binary_only
async def test_a_server_sleeps_and_is_woken_alike() -> None:
    node = EmulatedNode(slots=1, context=512, sleep_idle_seconds=1)
    async with beside(node, slots=1, context=512, extra=("--sleep-idle-seconds", "1")) as pair:
        for client in pair:

            async def sleeps(client: httpx.AsyncClient = client) -> bool | None:
                return (await client.get("/props")).json()["is_sleeping"] or None

            for path in ("/health", "/v1/models", "/metrics", "/props"):
                await eventually(sleeps)
                assert (await client.get(path)).status_code == 200
                assert await sleeps(), path
            for method, path, body in (
                ("GET", "/slots", None),
                ("POST", "/tokenize", {"content": "a"}),
                ("POST", "/apply-template", chat()),
                ("POST", CHAT, chat(stream=False, max_tokens=1)),
            ):
                await eventually(sleeps)
                assert (await client.request(method, path, json=body)).status_code == 200
                assert not await sleeps(), path
            for path, keeps_awake in (("/metrics", None), ("/slots", True)):
                await eventually(sleeps)
                await client.post(CHAT, json=chat(stream=False, max_tokens=1))
                for _ in range(6):
                    await asyncio.sleep(0.3)
                    assert (await client.get(path)).status_code == 200
                assert (not await sleeps() or None) is keeps_awake, path


@binary_only
async def test_the_server_s_own_comments_in_a_stream_agree() -> None:
    node = EmulatedNode(slots=1, context=16_128, ping_interval=1, prefill_tps=4000)
    extra = ("--sse-ping-interval", "1", "-b", "8", "-ub", "8")
    async with beside(node, slots=1, context=16_128, extra=extra) as pair:
        for client in pair:
            async with raw_connection(str(client.base_url)) as wire:
                await wire.send(post(CHAT, chat("hello there " * 3000, max_tokens=1)))
                await wire.head()
                assert await wire.until(b"\n\n\r\n") == b"3\r\n:\n\n\r\n"
