"""What addresses and callers share, connections and memory for bodies; health is answered."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from starlette.requests import Request

from gateway.callers.fair_share import FairShare
from gateway.callers.keys import new_key
from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError, body_too_large
from gateway.http.body_memory import PART_BYTES, BodyAllocation, BodyMemory, body_parts
from gateway.http.connections import MOST_HEALTH_ONLY, ConnectionAdmission, ConnectionLimiter
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import RawConnection, raw_connection
from tests.gateway_processes import serving
from tests.gateways import until
from tests.virtual import in_virtual_time
from tests.web.raw_client import CHAT, HELLO, Public, answer, public, request

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
PROXIES = (ip_network("10.0.0.0/8"),)


@dataclass(eq=False)
class One:
    """A connection."""

    idle: bool = True
    idle_since: float = 0.0
    closed: bool = False
    reading_body: bool = False

    def evict(self) -> None:
        self.closed = True


def entered(
    limiter: ConnectionLimiter, address: str | None, count: int, *, idle: bool = True
) -> list[One]:
    """Of so many new connections, those that were admitted."""
    found = [One(idle, float(number)) for number in range(count)]
    return [one for one in found if limiter.admit(one, address) is ConnectionAdmission.ADMITTED]


def test_addresses_reach_equal_shares_and_keep_them() -> None:
    limiter = ConnectionLimiter(80)
    addresses = [f"192.0.2.{number}" for number in range(7)]
    held: dict[str, list[One]] = {address: [] for address in addresses}

    def shares() -> list[int]:
        return [sum(not one.closed for one in held[address]) for address in addresses]

    for address in addresses:
        held[address] += entered(limiter, address, 100)
    assert shares() == [10] * 7
    before = [one for ones in held.values() for one in ones if not one.closed]
    assert all(not entered(limiter, address, 5) for address in addresses)
    assert not any(one.closed for one in before), "nobody comes in by pushing out an equal"


def test_an_idle_connection_is_found_among_many_in_bounded_work() -> None:
    limiter = ConnectionLimiter(4000)
    busy = entered(limiter, "192.0.2.1", 3500, idle=False)
    busy[3000].idle = True
    tries = 0
    while not busy[3000].closed:
        assert limiter.admit(One(idle=False), "192.0.2.2") is ConnectionAdmission.ADMITTED
        tries += 1
    assert tries <= 3500 / 64 + 1


def test_addresses_of_one_ipv6_subscriber_count_together() -> None:
    limiter = ConnectionLimiter(80)
    held = [one for n in range(100) for one in entered(limiter, f"2001:db8::{n:x}", 1)]
    assert len(held) == 70
    assert len(entered(limiter, "2001:db8:0:1::1", 35)) == 35
    assert sum(one.closed for one in held) == 35


def test_a_trusted_proxy_is_not_limited_like_an_address() -> None:
    limiter = ConnectionLimiter(80, PROXIES)
    assert len(entered(limiter, "10.0.0.1", 200, idle=False)) == 80
    assert ConnectionLimiter(80).admit(One(), "10.0.0.1") is ConnectionAdmission.ADMITTED
    for address in ("::ffff:10.0.0.1", "10.255.0.1"):
        assert limiter.is_trusted_proxy(address)
    for other in ("192.0.2.1", "2001:db8::1", None, "local"):
        assert not limiter.is_trusted_proxy(other)


def test_a_proxys_idle_connections_survive_a_crowd_that_is_evicted_for_it() -> None:
    limiter = ConnectionLimiter(80, PROXIES)
    pool = entered(limiter, "10.0.0.1", 30)
    assert len(entered(limiter, "192.0.2.1", 500)) == 40
    # A small client is admitted beside both.
    assert len(entered(limiter, "192.0.2.2", 2)) == 2
    assert not any(one.closed for one in pool)
    limiter = ConnectionLimiter(80, PROXIES)
    crowd = entered(limiter, "192.0.2.1", 500)
    assert len(entered(limiter, "10.0.0.1", 20)) == 20
    assert sum(one.closed for one in crowd) == 20
    alone = ConnectionLimiter(80, PROXIES)
    pool = entered(alone, "10.0.0.1", 75)
    assert len(pool) == 75
    assert [one.closed for one in pool] == [True] * 5 + [False] * 70, "those idle for longest"


def test_beyond_the_limit_new_connections_may_ask_for_health() -> None:
    limiter = ConnectionLimiter(1)
    limiter.admit(One(), "192.0.2.1")
    extras = [One() for _ in range(3 * MOST_HEALTH_ONLY)]
    watcher = One()
    for number, one in enumerate(extras):
        assert limiter.admit(one, "192.0.2.1") is ConnectionAdmission.HEALTH_ONLY
        if number == MOST_HEALTH_ONLY:
            assert limiter.admit(watcher, "192.0.2.9") is ConnectionAdmission.HEALTH_ONLY
    assert sum(not one.closed for one in extras) == MOST_HEALTH_ONLY - 1
    assert not extras[-1].closed
    assert not watcher.closed, "the crowd makes room among its own"
    for one in extras:
        one.idle = False
    assert limiter.admit(One(), "192.0.2.1") is ConnectionAdmission.REJECTED


async def used(stack: AsyncExitStack, gate: Public, address: str, *fields: str) -> RawConnection:
    """A connection that is idle after one response."""
    wire = await stack.enter_async_context(raw_connection(gate.url, local_addr=(address, 0)))
    await wire.send(request({**HELLO, "max_tokens": 1}, *fields))
    assert (await answer(wire)).status == 200
    return wire


@in_virtual_time
async def test_health_is_answered_on_both_listeners_however_many_connections_there_are(
    tmp_path: Path,
) -> None:
    async with (
        public(tmp_path, {"limits": {"connections": 3}}, well=False) as gate,
        AsyncExitStack() as all_,
    ):
        for url in (gate.running.url, gate.running.admin_url):
            for _ in range(8):
                await all_.enter_async_context(raw_connection(url))
            for path in (b"/health", b"/ready", b"/health?a"):
                async with raw_connection(url) as wire:
                    await wire.send(HEALTH.replace(b"/health", path))
                    found = await answer(wire)
                    assert found.status == 200, found
                    if path == b"/ready":
                        assert found.headers["connection"] == "close"
                        assert await wire.rest() == b""


@in_virtual_time
async def test_beyond_the_limit_other_requests_are_429_and_silent_clients_are_closed(
    tmp_path: Path,
) -> None:
    async with public(tmp_path, {"limits": {"connections": 2}}) as gate, AsyncExitStack() as all_:
        for _ in range(2):
            await used(all_, gate, "127.0.0.1")
        for data in (
            request(),
            request(path="/v1/messages"),
            b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n",
            b"GET /heal",
        ):
            async with raw_connection(gate.url) as wire:
                await wire.send(data)
                found = await answer(wire)
                assert found.status == 429
                assert int(found.headers["retry-after"]) >= 1
                assert found.headers["connection"] == "close"
                assert await wire.rest() == b""


@in_virtual_time
async def test_idle_connections_and_unfinished_bodies_are_evicted_for_another_address(
    tmp_path: Path,
) -> None:
    async with public(tmp_path, {"limits": {"connections": 16}}) as gate, AsyncExitStack() as all_:
        body_memory = gate.running.gateway.handler.body_memory
        idle = [await used(all_, gate, "127.0.0.1") for _ in range(2)]
        slow = [await all_.enter_async_context(raw_connection(gate.url)) for _ in range(12)]
        for number, wire in enumerate(slow, 1):
            await wire.send(request(b"{", length=500))
            await until(lambda n=number: body_memory.allocation_count == n)
        for _ in range(7):
            await used(all_, gate, "127.0.0.2")
        assert [await wire.some() for wire in idle] == [b"", b""]
        result = [await wire.some(0.05) for wire in slow[9:]]
        assert all(b"HTTP/1.1 429" in data and b"retry-after" in data for data in result)
        assert body_memory.allocation_count == 9


@in_virtual_time
async def test_behind_a_proxy_the_forwarded_address_is_limited(tmp_path: Path) -> None:
    settings = {
        "listen": {"trusted_proxies": ["127.0.0.1"]},
        "limits": {"connections": 16},
        "allow_anonymous": True,
    }
    async with public(tmp_path, settings, well=False) as gate, AsyncExitStack() as all_:

        async def begun(client: str) -> RawConnection:
            wire = await all_.enter_async_context(raw_connection(gate.url))
            await wire.send(request(b"{", f"X-Forwarded-For: {client}", length=500))
            return wire

        body_memory = gate.running.gateway.handler.body_memory
        for number in range(14):
            await begun("192.0.2.1")
            await until(lambda n=number + 1: body_memory.allocation_count == n)
        refused = await begun("192.0.2.1")
        found = await answer(refused)
        assert (found.status, found.code) == (429, "queue_full")
        await refused.leave()
        # Another client behind the same proxy is served.
        wire = await used(all_, gate, "127.0.0.1", "X-Forwarded-For: 192.0.2.2")
        await wire.send(request({**HELLO, "max_tokens": 1}, "X-Forwarded-For: 192.0.2.3"))
        assert (await answer(wire)).status == 200


# Request bodies: parts, memory, and fair shares of it.


LIMIT = 800


def allocate(
    memory: BodyMemory, caller: str, size: int, user: str = "", *, runs: bool = False
) -> BodyAllocation:
    """A body of so many bytes, which can be evicted unless its request runs."""
    allocation = BodyAllocation(caller, user or caller)
    allocation.set_evict(lambda _: not runs)
    memory.allocate(allocation, size, LIMIT)
    return allocation


def test_bodies_of_running_requests_stay_and_leave_the_reserve_to_others() -> None:
    memory = BodyMemory()
    running = [allocate(memory, "a", 100, runs=True) for _ in range(7)]
    with pytest.raises(GatewayError) as raised:
        allocate(memory, "a", 1)
    assert (raised.value.code, raised.value.retry_after) == ("queue_full", 2.0)
    other = allocate(memory, "b", 100, runs=True)
    assert [body.size for body in running] == [100] * 7
    with pytest.raises(GatewayError):
        allocate(memory, "c", 1)
    for body in (*running, other):
        memory.release(body)
        memory.release(body)
    assert (memory.total_bytes, memory.fair_share, memory.allocation_count) == (
        0,
        FairShare(),
        0,
    )


def test_a_user_with_more_is_evicted_for_another_of_the_same_caller() -> None:
    memory = BodyMemory()
    anna = [allocate(memory, "web", 100, "web/anna") for _ in range(6)]
    ben = allocate(memory, "web", 100, "web/ben")
    assert allocate(memory, "web", 100, "web/carl").size == 100
    assert [body.size for body in anna] == [100] * 5 + [0]
    assert ben.size == 100


def test_small_bodies_count_for_no_caller() -> None:
    memory = BodyMemory()
    most = 1 << 20
    assert memory.allocate_small(64, most)
    assert not memory.allocate_small(65, most)
    assert (memory.total_bytes, memory.fair_share.total) == (64, 0)
    full = BodyMemory(total_bytes=most - most // 8)
    assert not full.allocate_small(1, most)


async def test_small_pieces_come_in_parts_of_some_size() -> None:
    pieces = [bytes([number % 256]) * 1000 for number in range(600)]
    left = iter([*pieces, b""])

    async def receive() -> dict[str, Any]:
        body = next(left)
        return {"type": "http.request", "body": body, "more_body": bool(body)}

    asked = Request({"type": "http", "method": "POST", "headers": []}, receive)
    most = 1 << 30
    found = body_parts(asked, LimitSettings(), most, lambda: body_too_large(most))
    parts = [part async for part in found]
    assert b"".join(parts) == b"".join(pieces)
    assert [len(part) >= PART_BYTES for part in parts] == [True, True, False]


A, B, WEB = new_key(), new_key(), new_key()
KEYS = [
    {"id": A.id, "sha256": A.sha256, "max_class": "urgent", "class": "normal"},
    {"id": B.id, "sha256": B.sha256, "max_class": "urgent", "class": "normal"},
    {"id": WEB.id, "sha256": WEB.sha256, "trust_user_headers": True},
]


def key(one: Any) -> str:
    return f"Authorization: Bearer {one.text}"


@asynccontextmanager
async def shared(
    folder: Path, node: EmulatedNode | None = None, **settings: Any
) -> AsyncIterator[Public]:
    """A gateway with keys; at the end no body is counted."""
    async with public(folder, {"keys": KEYS, **settings}, node, well=False) as gate:
        yield gate
        body_memory = gate.running.gateway.handler.body_memory
        await until(lambda: not gate.running.gateway.registry)
        await until(lambda: body_memory.fair_share == FairShare())
        assert (body_memory.total_bytes, body_memory.allocation_count) == (0, 0)


async def begun(stack: AsyncExitStack, gate: Public, size: int, *fields: str) -> RawConnection:
    """A body that stops after so many bytes."""
    wire = await stack.enter_async_context(raw_connection(gate.url))
    holdings = gate.running.gateway.handler.body_memory.fair_share
    before = dict(holdings.by_caller)
    await wire.send(request(b" " * size, *fields, length=90_000))
    await until(lambda: holdings.by_caller != before)
    return wire


async def refused(wire: RawConnection) -> bool:
    """Whether it got 429; it may have got nothing yet."""
    try:
        data = await wire.some(0.05)
    except TimeoutError:
        return False
    assert b"HTTP/1.1 429" in data
    assert b"queue_full" in data
    assert b"retry-after" in data.lower()
    return True


@in_virtual_time
async def test_bodies_of_one_key_are_evicted_for_another(tmp_path: Path) -> None:
    limits = {"buffered_bytes": 80_000, "body_bytes": 100_000}
    async with shared(tmp_path, limits=limits) as gate, AsyncExitStack() as stack:
        held = [await begun(stack, gate, 10_000, key(A)) for _ in range(7)]
        for _ in range(3):
            async with raw_connection(gate.url) as wire:
                await wire.send(request(b" " * 10_000, key(A), length=90_000))
                assert (await answer(wire)).status == 429, "a key alone leaves a reserve"
        found = await gate.ask(request({**HELLO, "max_tokens": 1, "x": "x" * 25_000}, key(B)))
        assert found.status == 200
        # The newest bodies of the other key were evicted, and no more than needed.
        assert [await refused(wire) for wire in held] == [False] * 4 + [True] * 3


@pytest.mark.parametrize("several", [False, True], ids=["a chat", "several prompts"])
@in_virtual_time
async def test_the_body_of_a_request_that_has_not_started_is_evicted_for_another_key(
    tmp_path: Path, several: bool
) -> None:
    limits = {"buffered_bytes": 80_000, "body_bytes": 100_000}
    node = EmulatedNode(slots=1, decode_tps=20)
    async with shared(tmp_path, node, limits=limits) as gate:
        asked: dict[str, Any] = {"prompt": ["a", "b"]} if several else HELLO
        body = {**asked, "max_tokens": 20, "x": "x" * 12_000}
        data = request(body, key(A), path="/v1/completions" if several else CHAT)
        theirs = [asyncio.create_task(gate.ask(data)) for _ in range(5)]
        # Of several, the second prompt of the first request waits, too.
        await until(lambda: len(gate.running.gateway.scheduler.queue_positions()) == 4 + several)
        other = {**HELLO, "max_tokens": 20, "x": "x" * 20_000}
        found = asyncio.create_task(gate.ask(request(other, key(B))))
        await until(lambda: any(task.done() for task in theirs))
        assert [task.result().status for task in theirs if task.done()] == [429]
        assert not theirs[0].done()
        assert (await found).status == 200
        assert Counter([(await task).status for task in theirs]) == {200: 4, 429: 1}


SIZE = 12_000_000


def of(item: bytes) -> bytes:
    return b",".join([item] * (SIZE // (len(item) + 1)))


def chat(content: bytes, more: bytes = b"") -> bytes:
    return b'{"messages":[{"role":"user","content":' + content + b"}]" + more + b"}"


def shapes() -> Iterator[tuple[str, bytes]]:
    """Name and body of each shape, one at a time, since each takes much memory."""
    yield "messages", b'{"messages":[' + of(b"{}") + b"]}"
    yield "parts", chat(b"[" + of(b'{"type":"text","text":"a"}') + b"]")
    yield "objects", chat(b'"a"', b',"a_url":1,"x":[' + of(b"{}") + b"]")
    yield "escapes", chat(b'"' + b"\\n" * (SIZE // 2) + b'"', b',"x":[' + b"[]," * 200 + b"1]")
    yield "ids", b'{"prompt":[' + of(b"1") + b"]}"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_a_body_of_many_values_takes_no_more_than_a_few_times_its_size(
    tmp_path: Path,
) -> None:
    """Nor does it hold the event loop of its gateway, whose watch would tell."""
    async with (
        EmulatedNode() as node,
        serving(tmp_path, node, context=1000) as line,  # no room for what is sent
        httpx.AsyncClient(base_url=line.url, timeout=120, trust_env=False) as client,
    ):
        process, proc = psutil.Process(line.first.pid), Path(f"/proc/{line.first.pid}")
        for shape, body in shapes():
            (proc / "clear_refs").write_text("5")  # it forgets its peak
            before = process.memory_info().rss
            assert (await client.post(CHAT, content=body)).status_code == 400
            lines = (proc / "status").read_text().splitlines()
            [peak] = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
            assert peak - before < 4 * SIZE, shape
