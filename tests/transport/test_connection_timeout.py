"""A limit counts only time in which the event loop ran: a blocked gateway blames no node."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from gateway.transport.connection import LoopTimeout
from gateway.transport.errors import ConnectTimedOut
from gateway.transport.pool import ConnectionPool, NodeAddress
from tests.virtual import in_virtual_time, now

STANDS_STILL = 0.3
LIMIT = 0.2


async def until_it_waits() -> None:
    """Until every task has gone as far as it can without the network."""
    for _ in range(3):
        await asyncio.sleep(0)


@in_virtual_time
async def test_a_limit_ends_after_its_time() -> None:
    began = now()
    with pytest.raises(TimeoutError):
        async with LoopTimeout(3.0):
            await asyncio.Event().wait()
    assert now() - began == pytest.approx(3.0)


@in_virtual_time
async def test_work_that_ends_in_time_is_not_touched() -> None:
    async with LoopTimeout(3.0):
        await asyncio.sleep(2.9)
    async with LoopTimeout(None):
        await asyncio.sleep(1e6)
    with pytest.raises(KeyError):
        async with LoopTimeout(3.0):
            raise KeyError
    await asyncio.sleep(10.0)


@in_virtual_time
async def test_a_cancelled_task_sees_no_timeout() -> None:
    async def waits() -> None:
        async with LoopTimeout(3.0):
            await asyncio.Event().wait()

    task = asyncio.create_task(waits())
    await asyncio.sleep(1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_after_standing_still_a_connection_that_was_made_meanwhile_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pool = ConnectionPool(NodeAddress("127.0.0.1", server.getsockname()[1], b"", b""))
        asyncio.get_running_loop().call_soon(time.sleep, STANDS_STILL)
        connection = await pool.connect(LIMIT)
        assert connection.alive
        connection.close()
        pool.close()


async def test_after_standing_still_bytes_that_came_meanwhile_are_read() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        reader, writer = await asyncio.open_connection(sock=ours)

        async def read() -> bytes:
            async with LoopTimeout(LIMIT):
                return await reader.readexactly(2)

        reading = asyncio.create_task(read())
        await until_it_waits()
        theirs.send(b"ok")
        time.sleep(STANDS_STILL)  # noqa: ASYNC251 - block the loop
        assert await reading == b"ok"
        writer.close()
        await writer.wait_closed()


async def test_a_node_that_accepts_no_connection_is_late_even_so() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        with socket.create_connection(address):  # the one that fits in its queue
            pool = ConnectionPool(NodeAddress("127.0.0.1", address[1], b"", b""))
            asyncio.get_running_loop().call_soon(time.sleep, STANDS_STILL)
            with pytest.raises(ConnectTimedOut):
                await pool.connect(LIMIT)
            pool.close()
