"""Connections are shared between addresses, and health checks are always answered."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path

from gateway.http.connections import MOST_HEALTH_ONLY, ConnectionAdmission, ConnectionLimiter
from tests.emulator.raw_connection import RawConnection, raw_connection
from tests.gateways import until
from tests.virtual import in_virtual_time
from tests.web.raw_client import HELLO, Public, answer, public, request

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


def test_a_single_address_may_have_all_connections_but_a_reserve() -> None:
    limiter = ConnectionLimiter(80)
    held = entered(limiter, "192.0.2.1", 500)
    assert len(held) == 70
    assert not any(one.closed for one in held)


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
