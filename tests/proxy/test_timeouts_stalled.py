"""A client that stops reading: what ends its request, and that nothing is left of it."""

# ruff: noqa: SIM117 - a client stands within its proxy

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from urllib.parse import urlsplit

from gateway import errors
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import chat, post
from tests.gateways import until
from tests.proxy.proxy_over_nodes import A_FIRST, ProxyOverNodes, proxy_over
from tests.proxy.test_attempt_cancel import PATH, slow_clients, until_it_lags
from tests.virtual import in_virtual_time


def endless() -> EmulatedNode:
    """A node that writes more than the sockets' buffers take."""
    return EmulatedNode(slots=1, context=1_000_000, decode_tps=4000, answer_tokens=100_000)


HALF_A_SECOND = {"send_timeout": 0.5}
WHOLE = 8 << 20
"""Bytes of a plain response: more than the sockets' buffers take."""


def answers_at_length(node: EmulatedNode) -> None:
    answer = '{"choices": [{"message": {"role": "assistant", "content": "hi"}}]}'
    node.faults.next("status", status=200, body=answer + " " * WHOLE)


def connections(proxy: ProxyOverNodes) -> int:
    public = proxy.app.public_listener
    assert public is not None
    return len(public.protocol.connection_limiter)


async def until_over(proxy: ProxyOverNodes, code: int) -> None:
    await until(lambda: len(proxy.finished) == 1)
    assert proxy.finished[0].status == code
    await until(lambda: proxy.servers["a"].busy == 0)
    await until(lambda: proxy.node("a").leased == 0)


@in_virtual_time
async def test_the_total_timeout_ends_a_request_whose_client_stalls(tmp_path: Path) -> None:
    async with proxy_over(tmp_path, endless(), timeouts={"total": 5.0}) as proxy:
        async with slow_clients(proxy, 1, timings_per_token=True):
            await until_it_lags(proxy)
            await until_over(proxy, 504)


@in_virtual_time
async def test_an_operator_cancels_a_request_whose_client_stalls(tmp_path: Path) -> None:
    async with proxy_over(tmp_path, endless()) as proxy:
        async with slow_clients(proxy, 1, timings_per_token=True):
            await until_it_lags(proxy)
            (in_flight,) = proxy.app.registry
            in_flight.cancel(errors.shutting_down())
            await until_over(proxy, 503)


@in_virtual_time
async def test_a_drained_node_is_released_though_the_client_stalls(tmp_path: Path) -> None:
    one, two = endless(), endless()
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
        async with slow_clients(proxy, 1, timings_per_token=True, temperature=0):
            await until_it_lags(proxy)
            proxy.app.fleet.drain("a")
            proxy.app.drain_deadlines.set("a", 0.01)
            await until(lambda: proxy.node("a").leased == 0 and one.busy == 0)
            await until(lambda: two.requests == 1)


@in_virtual_time
async def test_a_client_that_stalls_for_long_is_disconnected(tmp_path: Path) -> None:
    async with proxy_over(tmp_path, endless(), limits=HALF_A_SECOND) as proxy:
        async with slow_clients(proxy, 1, timings_per_token=True):
            await until_over(proxy, 499)
            await until(lambda: connections(proxy) == 0)
        assert proxy.node("a").failures == 0


@in_virtual_time
async def test_a_client_that_stalls_behind_a_complete_response_is_disconnected(
    tmp_path: Path,
) -> None:
    one = EmulatedNode()
    async with proxy_over(tmp_path, one, limits=HALF_A_SECOND) as proxy:
        answers_at_length(one)
        async with slow_clients(proxy, 1, stream=False):
            await until_over(proxy, 200)
            await until(lambda: connections(proxy) == 0)


@in_virtual_time
async def test_a_client_that_reads_a_little_now_and_then_is_not_disconnected(
    tmp_path: Path,
) -> None:
    one = EmulatedNode()
    loop = asyncio.get_running_loop()
    async with proxy_over(tmp_path, one, limits={"send_timeout": 5.0}) as proxy:
        answers_at_length(one)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            parts = urlsplit(proxy.running.url)
            await loop.sock_connect(client, (parts.hostname, parts.port))
            await loop.sock_sendall(client, post(PATH, chat(stream=False)))
            await until_over(proxy, 200)
            end, size = loop.time() + 4 * 5.0, 0
            while loop.time() < end:
                size += len(await loop.sock_recv(client, 1024))
                await asyncio.sleep(0.1)
            # So little that the kernel has accepted nothing more.
            assert size < 1 << 18
            assert connections(proxy) == 1
