"""A client that leaves frees its slot or place in the queue; a slow one takes nobody else's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from gateway.transport.connection import BODY_HIGH_WATER
from tests.emulator import EmulatedNode, expected_chat_text
from tests.emulator.raw_connection import RawConnection, chat, post, raw_connection
from tests.gateways import until
from tests.proxy.proxy_over_nodes import (
    A_FIRST,
    GENERATION_PATHS,
    MESSAGES,
    ProxyOverNodes,
    proxy_over,
)
from tests.virtual import in_virtual_time, now

PATH = GENERATION_PATHS[0]
SLOW_CLIENTS = 4


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@asynccontextmanager
async def nobody_answers(port: int) -> AsyncIterator[None]:
    """A port where connections are neither accepted nor refused: the backlog is full."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        waiting = []
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
            waiting.append(one)
        try:
            await asyncio.sleep(0.05)
            yield
        finally:
            for one in waiting:
                one.close()


async def leave(proxy: ProxyOverNodes, task: asyncio.Task[httpx.Response]) -> None:
    """The client leaves, and is recorded as such."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: len(proxy.finished) == 1, 1.0)
    assert (proxy.finished[0].status, proxy.finished[0].reason) == (499, "client_closed")


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_a_client_may_leave_while_its_node_is_being_connected(
    tmp_path: Path, stream: bool
) -> None:
    one = EmulatedNode(slots=1)
    async with proxy_over(tmp_path, one, health={"interval": 60.0}) as proxy:
        await one.kill()
        node = proxy.node("a")
        async with nobody_answers(one.port):
            before = descriptors()
            asked = asyncio.create_task(proxy.ask(stream=stream))
            await until(lambda: node.leased == 1)
            await asyncio.sleep(0.1)
            assert node.leased == 1
            await leave(proxy, asked)
            # Nothing was sent: the slot is free at once.
            await until(lambda: node.leased == 0, 0.5)
            await until(lambda: descriptors() <= before, 2.0)
            assert node.failures == 0
        await one.revive()


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_a_client_may_leave_while_all_nodes_are_down(tmp_path: Path, stream: bool) -> None:
    one = EmulatedNode(slots=1)
    async with proxy_over(tmp_path, one) as proxy:
        await one.kill()
        asked = asyncio.create_task(proxy.ask(stream=stream))
        scheduler = proxy.app.scheduler
        await until(lambda: len(scheduler.queue_positions()) == 1)
        await leave(proxy, asked)
        assert scheduler.queue_positions() == []
        assert len(proxy.app.registry) == 0
        await one.revive()
        assert (await proxy.ask()).status_code == 200
        assert one.requests == 1


@in_virtual_time
async def test_a_client_may_leave_between_two_attempts(tmp_path: Path) -> None:
    one, two = EmulatedNode(slots=1), EmulatedNode(slots=1)
    retries = {"backoff": 5.0, "backoff_max": 5.0}
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST, retries=retries) as proxy:
        one.faults.set("reset")
        asked = asyncio.create_task(proxy.ask())
        await until(lambda: proxy.outcomes == [("a", "reset")])
        await leave(proxy, asked)
        assert two.requests == 0
        assert len(proxy.app.registry) == 0


@asynccontextmanager
async def slow_clients(
    proxy: ProxyOverNodes, count: int, **more: object
) -> AsyncIterator[list[RawConnection]]:
    """Clients that read nothing until the block ends."""
    async with asyncio.TaskGroup() as group:
        done = asyncio.Event()
        wires: list[RawConnection] = []

        async def one() -> None:
            async with raw_connection(proxy.running.url) as wire:
                sock = wire.writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                await wire.send(post(PATH, chat("say something", **more)))
                await wire.head()
                wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
                wires.append(wire)
                await done.wait()

        for _ in range(count):
            group.create_task(one())
        try:
            await until(lambda: len(wires) == count)
            yield wires
        finally:
            done.set()


@pytest.mark.timeout(300)
@in_virtual_time
async def test_slow_clients_take_bounded_memory_and_delay_nobody(tmp_path: Path) -> None:
    one = EmulatedNode(slots=SLOW_CLIENTS + 1, context=1_000_000, answer_tokens=100_000)
    async with proxy_over(tmp_path, one) as proxy:
        gateway = proxy.app
        async with slow_clients(proxy, SLOW_CLIENTS, timings_per_token=True):
            stood = -1
            while stood != one.engine.tokens:
                stood = one.engine.tokens
                await asyncio.sleep(0.2)
            assert stood < SLOW_CLIENTS * 100_000, "all went out, though nobody reads"
            held = [
                in_flight.attempt.unread_bytes
                for in_flight in gateway.registry
                if in_flight.attempt is not None
            ]
            assert len(held) == SLOW_CLIENTS
            assert max(held) < 2 * BODY_HIGH_WATER
            loop = asyncio.get_running_loop()
            for _ in range(5):
                began = loop.time()
                assert (await proxy.ask(max_tokens=5)).status_code == 200
                assert loop.time() - began < 0.0001
        one.engine.answer_tokens = 10
        await until(lambda: one.busy == 0)


async def until_it_lags(proxy: ProxyOverNodes) -> None:
    """Wait until the client of the only request lags."""
    (in_flight,) = proxy.app.registry
    await until(lambda: in_flight.attempt is not None and in_flight.attempt.client_lagging)


@pytest.mark.timeout(300)
@in_virtual_time
async def test_a_slow_client_holds_no_slot_once_its_response_is_received(tmp_path: Path) -> None:
    one = EmulatedNode(slots=1, context=1_000_000, decode_tps=4000, answer_tokens=100_000)
    async with proxy_over(tmp_path, one) as proxy:
        node = proxy.node("a")
        # How much the sockets' buffers take depends on the machine.
        async with slow_clients(proxy, 1, timings_per_token=True):
            await until_it_lags(proxy)
            tokens = one.engine.tokens + 200
        await proxy.settled()
        async with slow_clients(proxy, 1, timings_per_token=True, max_tokens=tokens):
            await until_it_lags(proxy)
            await until(lambda: one.busy == 0)
            await until(lambda: node.leased == 0, 2.0)
            assert len(proxy.app.registry) == 1, "it has all been sent: no test"
            quick = await proxy.ask(max_tokens=5)
            assert quick.json()["choices"][0]["message"]["content"] == expected_chat_text(
                MESSAGES, 5
            )
        await proxy.settled()
        assert [record.status for record in proxy.finished] == [499, 200, 499]
        assert node.failures == 0


@in_virtual_time
async def test_a_node_that_trickles_is_told_apart_from_a_dead_one(tmp_path: Path) -> None:
    one = EmulatedNode(answer_tokens=6)
    async with proxy_over(tmp_path, one, timeouts={"silence": 1.5}) as proxy:
        # An event takes a quarter of a second, piece by piece: slow, but it moves.
        one.faults.next("trickle", size=20, seconds=0.02)
        reply = await proxy.stream()
        assert (reply.errors, reply.text) == ([], expected_chat_text(MESSAGES, 6))
        # One large event is no silence either; after it the node is dead.
        one.faults.next("insert", what="huge", size=1 << 20, after_events=3)
        one.faults.next("hang", after_events=3)
        assert (await proxy.stream()).errors == []
        assert (await proxy.stream()).errors[0]["code"] == "node_timeout"
        assert proxy.node("a").failures == 1


@in_virtual_time
async def test_bytes_that_never_complete_an_event_do_not_prevent_the_timeout(
    tmp_path: Path,
) -> None:
    one = EmulatedNode(answer_tokens=6)
    async with proxy_over(tmp_path, one, timeouts={"silence": 0.5}) as proxy:
        # 230 bytes an event, 12 s for each: the first content has its own timeout.
        one.faults.next("trickle", size=1, seconds=0.05)
        began = now()
        reply = await proxy.ask(stream=True, headers={"X-Request-Timeout": "3"})
        assert 3.0 <= now() - began < 3.5
        assert reply.status_code in {200, 504}
        assert "node_timeout" in reply.text
        await one.kill()
