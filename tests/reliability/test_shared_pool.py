"""Servers whose slots share one pool of tokens, as without `-np`: every answer comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.events import AttemptEnded
from gateway.local.server import find_binary
from gateway.nodes.node import NodeState
from setup.llama_server import PROGRAM, build_of, cache_folder
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway
from tests.nodes.build import a_spec
from tests.servers import demo_servers
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import CHAT, BareGateway, bare_gateway

POOL, SLOTS, CLIENTS = 512, 4, 8


def chat(number: int, *, words: int = 80, answer: int | None = 80, **more: Any) -> dict[str, Any]:
    """A chat of about twice as many tokens as words, of which every other is a stream."""
    text = f"chat {number}: " + "hello " * words
    body = {"messages": [{"role": "user", "content": text}], "stream": number % 2 == 0}
    return body | {"max_tokens": answer, "temperature": 0, "ignore_eos": True} | more


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("application/json"):
        return str(response.json()["choices"][0]["message"]["content"])
    *events, done = [line for line in response.text.split("\n") if line.startswith("data: ")]
    assert done == "data: [DONE]", response.text[-500:]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def burst(client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]]) -> list[str]:
    answers = await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))
    return [text_of(answer) for answer in answers]


def pooled(**options: Any) -> EmulatedNode:
    speeds = {"decode_tps": 100, "prefill_tps": 4000}
    return EmulatedNode(slots=SLOTS, context=POOL, unified=True, **speeds | options)


@contextlib.asynccontextmanager
async def over(
    *nodes: EmulatedNode, kv: str = "shared"
) -> AsyncIterator[tuple[BareGateway, list[str]]]:
    """A gateway over these nodes, `a` and `b`, and the outcomes of its attempts."""
    async with contextlib.AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(node)
        specs = [a_spec(name, one.url, kv=kv) for name, one in zip("ab", nodes, strict=False)]
        gateway = await stack.enter_async_context(bare_gateway(*specs))
        outcomes: list[str] = []
        gateway.public.timeout = httpx.Timeout(3600)
        gateway.bus.subscribe(AttemptEnded, lambda event: outcomes.append(event.outcome))
        yield gateway, outcomes


def blameless(gateway: BareGateway) -> bool:
    nodes = gateway.fleet.nodes.values()
    return all(node.failures == 0 and node.state is NodeState.READY for node in nodes)


@in_virtual_time
async def test_every_answer_comes_though_the_pools_overflow_and_nobody_is_blamed() -> None:
    async with (
        EmulatedNode(slots=8, context=POOL) as alone,
        over(pooled(), pooled(), kv="auto") as (gateway, outcomes),
        httpx.AsyncClient() as direct,
    ):
        for first in (0, CLIENTS):
            bodies = [chat(first + number) for number in range(CLIENTS)]
            texts = await burst(gateway.public, bodies)
            expected = [text_of(await direct.post(alone.url + CHAT, json=one)) for one in bodies]
            assert texts == expected
            gateway.bus.flush()
            # The first burst teaches both nodes' pools; the second waits for room.
            assert outcomes.count("pool_full") == CLIENTS
        assert blameless(gateway)
        assert [node.pool for node in gateway.fleet.nodes.values()] == [POOL, POOL]


@in_virtual_time
async def test_a_declared_pool_never_overflows() -> None:
    async with over(pooled(), pooled()) as (gateway, outcomes):
        bodies = [chat(number, words=9 * number, answer=25 + 10 * number) for number in range(16)]
        await burst(gateway.public, bodies)
        gateway.bus.flush()
        assert outcomes == ["ok"] * len(bodies)
        assert (await gateway.admin.get("/admin/nodes/a")).json()["pool"] == {
            "tokens": POOL,
            "reserved": 0,
            "foreign": 0,
        }


@in_virtual_time
async def test_a_large_request_waits_for_the_pool_and_is_not_passed_over_for_ever() -> None:
    async with over(node := pooled()) as (gateway, _):
        ended: list[str] = []

        async def ask(name: str, body: dict[str, Any]) -> None:
            text_of(await gateway.public.post(CHAT, json=body | {"stream": False}))
            ended.append(name)

        small = chat(0, words=12, answer=50)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(SLOTS):
                tasks.create_task(ask("small", small))
            await gateway.until(lambda: node.busy == SLOTS)
            tasks.create_task(ask("large", chat(1, words=200, answer=100)))
            await gateway.until(lambda: gateway.scheduler.dispatcher.waiting == 1)
            for _ in range(8):
                tasks.create_task(ask("small", small))
        assert ended.index("large") == SLOTS


POOL_ERROR = {"message": "Context size has been exceeded.", "type": "server_error", "code": 500}


@in_virtual_time
@pytest.mark.parametrize("stream", [True, False])
async def test_a_node_that_always_overflows_gets_a_request_five_times(stream: bool) -> None:
    event = f"data: {json.dumps({'error': POOL_ERROR})}\n\n"
    async with over(node := pooled()) as (gateway, outcomes):
        node.faults.set("insert", after_events=3, data=event.encode())
        answer = await gateway.public.post(CHAT, json=chat(0) | {"stream": stream})
        assert "node_failed" in answer.text
        gateway.bus.flush()
        assert outcomes == ["pool_full"] * 5
        assert blameless(gateway)


@in_virtual_time
async def test_a_request_that_must_run_alone_runs_beside_others_that_never_end() -> None:
    """Without `max_tokens` it needs the whole pool, by what is known."""
    async with (
        pooled(answer_tokens=8) as node,
        httpx.AsyncClient(base_url=node.url, timeout=600) as other,
    ):
        body = chat(0, words=10, answer=200)
        foreign = asyncio.create_task(other.post(CHAT, json=body))
        await node.until(lambda: node.busy == 1)
        async with bare_gateway(a_spec("a", node.url, kv="shared")) as gateway:
            answers = [asyncio.create_task(gateway.chat("hello")) for _ in range(2)]
            await gateway.until(lambda: node.busy == 2)
            await gateway.until(lambda: any(answer.done() for answer in answers))
            assert not foreign.done()
            assert [answer.status_code for answer in await asyncio.gather(*answers)] == [200] * 2
            text_of(await foreign)
            assert gateway["a"].pool == POOL


@contextlib.contextmanager
def real_server(*extra: str, context: int = POOL, port: int = 0) -> Iterator[str]:
    """By `-np -1`, as without it: four slots that say that each has the whole context."""
    if build_of(cache_folder() / PROGRAM) is None:
        pytest.skip("make llama-server")
    binary = find_binary(cache_folder() / PROGRAM)
    options: dict[str, Any] = {"context": context, "extra": extra, "port": port}
    with demo_servers(1, slots=1, binary=binary, **options) as [url]:
        yield url


def pools(running: Running) -> list[int]:
    return [node.pool for node in running.gateway.fleet.nodes.values()]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.smoke
async def test_every_answer_of_stock_servers_comes_and_what_is_learnt_lasts(tmp_path: Path) -> None:
    stock = ("--parallel", "-1", "--exact")
    with real_server(*stock) as one, real_server(*stock) as two, real_server("--exact") as alone:
        limits = httpx.Limits(max_keepalive_connections=0)
        bodies = [chat(number, words=20) for number in range(2 * CLIENTS)]
        async with httpx.AsyncClient(limits=limits, timeout=120) as direct:
            expected = [text_of(await direct.post(alone + CHAT, json=body)) for body in bodies]
        async with running_gateway(tmp_path, [one, two], {"resume": "exact"}) as running:
            # On a busy machine the second has little to do once the first has overflowed.
            for _ in range(4):
                assert await burst(running.client, bodies[:CLIENTS]) == expected[:CLIENTS]
                if pools(running) == [POOL, POOL]:
                    break
            assert pools(running) == [POOL, POOL]
            assert await burst(running.client, bodies[CLIENTS:]) == expected[CLIENTS:]
            nodes = running.gateway.fleet.nodes.values()
            assert [(node.failures, node.state) for node in nodes] == [(0, NodeState.READY)] * 2
        async with running_gateway(tmp_path, [one, two]) as running:
            assert pools(running) == [POOL, POOL]
