"""A resolver that hangs or fails affects only the nodes whose names have never been resolved."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.nodes.node import NodeState
from gateway.transport.errors import ConnectFailed
from gateway.transport.pool import ConnectionPool, NodeAddress
from gateway.transport.resolver import MOST_ADDRESSES, Resolver
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway, until
from tests.transport.raw import always, nobody_listens, raw_server

LIMIT = 30.0
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class FakeResolver:
    """Answers with the given addresses; hangs for names that it does not know."""

    def __init__(self, **known: list[str]) -> None:
        self.known: dict[str, list[str] | Exception] = dict(known)
        self.asked: list[str] = []
        self.released = threading.Event()

    def __call__(self, name: str) -> list[str]:
        self.asked.append(name)
        if name not in self.known:
            self.released.wait(LIMIT)
            return ["127.0.0.1"]
        answer = self.known[name]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def resolver() -> Iterator[FakeResolver]:
    resolver = FakeResolver(node=["127.0.0.1"])
    yield resolver
    resolver.released.set()


async def test_a_known_name_is_looked_up_again_in_the_background(resolver: FakeResolver) -> None:
    names = Resolver(resolver, refresh_after=0.0)
    assert await names.addresses("node", LIMIT) == ("127.0.0.1",)
    del resolver.known["node"]  # it hangs from now on
    for _ in range(3):
        assert await names.addresses("node", LIMIT) == ("127.0.0.1",)
    await until(lambda: resolver.asked == ["node", "node"])
    resolver.known["node"] = ["127.0.0.2"]
    resolver.released.set()
    await until(lambda: names.host("node").lookup is None)
    await names.addresses("node", LIMIT)
    await until(lambda: names.host("node").addresses == ("127.0.0.2",))


async def test_a_look_up_that_hangs_is_reported_and_not_begun_twice(resolver: FakeResolver) -> None:
    names = Resolver(resolver)
    for _ in range(2):
        with pytest.raises(ConnectFailed, match="'dark' can't be resolved: the resolver does not"):
            await names.addresses("dark", 0.05)
    assert resolver.asked == ["dark"]
    resolver.released.set()
    await until(lambda: bool(names.host("dark").addresses))
    assert await names.addresses("dark", LIMIT) == ("127.0.0.1",)
    assert resolver.asked == ["dark"]


async def test_a_look_up_that_never_ends_is_given_up(resolver: FakeResolver) -> None:
    names = Resolver(resolver, abandoned_after=0.0)
    with pytest.raises(ConnectFailed):
        await names.addresses("dark", 0.05)
    resolver.known["dark"] = ["127.0.0.3"]
    names.refresh("dark")
    assert await names.addresses("dark", LIMIT) == ("127.0.0.3",)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not"),
        (UnicodeError("label too long"), "label too long"),
        ([], "no address"),
    ],
)
async def test_a_failure_is_reported_and_known_addresses_are_kept(answer: Any, why: str) -> None:
    resolver = FakeResolver(node=answer)
    names = Resolver(resolver)
    with pytest.raises(ConnectFailed, match=why):
        await names.addresses("node", LIMIT)
    resolver.known["node"] = ["127.0.0.1"]
    assert await names.addresses("node", LIMIT) == ("127.0.0.1",)
    resolver.known["node"] = answer
    names.refresh("node")
    await until(lambda: names.host("node").lookup is None)
    assert await names.addresses("node", LIMIT) == ("127.0.0.1",)


async def test_threads_are_bounded_and_further_look_ups_wait(resolver: FakeResolver) -> None:
    names = Resolver(resolver, threads=2)
    waiting = [asyncio.create_task(names.addresses(f"dark-{n}", LIMIT)) for n in range(5)]
    await until(lambda: len(resolver.asked) == 2)
    resolver.released.set()
    assert await asyncio.gather(*waiting) == [("127.0.0.1",)] * 5
    assert len(resolver.asked) == 5


async def test_each_address_is_tried(resolver: FakeResolver) -> None:
    async with raw_server(always(OK)) as server:
        resolver.known["node"] = ["127.0.0.9", "127.0.0.9", "127.0.0.1"]
        names = Resolver(resolver)
        pool = ConnectionPool(NodeAddress("node", server.port, b"", b""), names)
        (await pool.connect(LIMIT)).close()
        # The address that has accepted a connection is tried first.
        assert await names.addresses("node", LIMIT) == ("127.0.0.1", "127.0.0.9")
    resolver.known["many"] = [f"127.0.1.{number}" for number in range(100)]
    assert len(await names.addresses("many", LIMIT)) == MOST_ADDRESSES


async def test_after_a_failed_connection_the_name_is_looked_up_again(
    resolver: FakeResolver,
) -> None:
    names = Resolver(resolver, least_interval=0.0)
    with nobody_listens() as port:
        pool = ConnectionPool(NodeAddress("node", port, b"", b""), names)
        with pytest.raises(ConnectFailed, match="The connection failed"):
            await pool.connect(LIMIT)
        await until(lambda: names.host("node").lookup is None)
        resolver.known["node"] = ["127.0.0.2"]
        with pytest.raises(ConnectFailed):
            await pool.connect(LIMIT)
        await until(lambda: names.host("node").addresses == ("127.0.0.2",))


async def test_a_fleet_lives_with_a_resolver_that_hangs(tmp_path: Path) -> None:
    resolver = FakeResolver(**{"known.test": ["127.0.0.1"]})
    names = Resolver(resolver, refresh_after=0.0)
    try:
        async with EmulatedNode() as one, EmulatedNode() as two:
            nodes = [
                *({"name": f"dark-{n}", "url": f"http://dark-{n}.test:1"} for n in range(20)),
                {"name": "named", "url": f"http://known.test:{one.port}"},
                {"name": "plain", "url": f"http://127.0.0.1:{two.port}"},
            ]
            settings = {"health": {"interval": 0.1, "timeout": 1.0}}
            async with running_gateway(tmp_path, nodes, settings, resolver=names) as running:
                found = running.gateway.fleet.nodes
                await until(lambda: found["named"].state is NodeState.READY)
                await until(lambda: found["plain"].state is NodeState.READY)
                await until(
                    lambda: all(found[f"dark-{n}"].state is NodeState.DOWN for n in range(20))
                )
                assert "'dark-0.test' can't be resolved" in found["dark-0"].reason
                resolver.known.clear()  # no name is resolved any more
                seen = one.control_requests, two.control_requests
                await until(lambda: one.control_requests > seen[0] + 5)
                await until(lambda: two.control_requests > seen[1] + 5)
                assert found["named"].state is NodeState.READY
                for _ in range(4):
                    body = {"messages": [{"role": "user", "content": "x"}]}
                    reply = await running.client.post("/v1/chat/completions", json=body)
                    assert reply.status_code == 200
    finally:
        resolver.released.set()


def test_the_process_ends_while_a_look_up_hangs() -> None:
    code = """
import asyncio, time
from gateway.transport.errors import ConnectFailed
from gateway.transport.resolver import Resolver

async def main():
    names = Resolver(lambda name: time.sleep(600))
    try:
        await names.addresses("dark", 0.05)
    except ConnectFailed as error:
        print(error)
    names.close()

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "can't be resolved" in ended.stdout
    assert ended.stderr == ""
