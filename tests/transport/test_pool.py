"""Pools of connections to nodes, and how nodes are reached."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from pydantic import SecretStr

from gateway.config.inventory import NodeSpec
from gateway.nodes.node import NodeState
from gateway.transport.connection import NodeConnection
from gateway.transport.errors import (
    ConnectFailed,
    ConnectionReset,
    ConnectTimedOut,
    LocalResourcesExhausted,
    UpstreamError,
)
from gateway.transport.pool import (
    IDLE_SECONDS,
    ConnectionPool,
    NodeAddress,
    node_address,
    open_node_pool,
)
from gateway.transport.resolver import MOST_ADDRESSES, Resolver
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway, until
from tests.http.authority import server_side
from tests.transport.raw import (
    HOWEVER_SLOW,
    Peer,
    RawServer,
    always,
    full_backlog,
    nobody_listens,
    raw_server,
)

ASK = b"GET /health HTTP/1.1\r\nhost: n\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
LIMIT = 30.0


class LoopWithClock:
    """The event loop with a clock that stands still until a test advances it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time()

    def time(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


def pool_of(node: EmulatedNode | RawServer, **options: Any) -> ConnectionPool:
    return ConnectionPool(NodeAddress("127.0.0.1", node.port, b"", b"host: n\r\n"), **options)


async def exchanged(pool: ConnectionPool, **options: Any) -> NodeConnection:
    """One whole exchange, on an idle connection if there is one."""
    async with asyncio.timeout(LIMIT):
        connection = await pool.exchange(ASK, dial=lambda: pool.connect(LIMIT), **options)
        await connection.read_all(1000)
        return connection


async def answered(pool: ConnectionPool) -> bytes:
    """The body of the answer to a request of the node's own address."""
    head = pool.address.request_head(b"GET", b"/health")
    async with pool.response(head, connect_timeout=LIMIT) as connection:
        return await connection.read_all(1000)


async def ask(pool: ConnectionPool) -> None:
    pool.release(await exchanged(pool))


async def test_a_connection_that_was_idle_for_too_long_is_not_used_and_closed_in_time() -> None:
    async with raw_server(always(OK)) as server:
        loop = LoopWithClock()
        pool = pool_of(server, loop=loop)
        await ask(pool)
        loop.now += IDLE_SECONDS - 0.5
        await ask(pool)
        assert server.opened == 1
        loop.now += IDLE_SECONDS
        assert pool.take_idle() is None
        await until(lambda: server.open == 0)
        pool.close()
        pool = pool_of(server, idle_seconds=0.05)
        await asyncio.gather(*(ask(pool) for _ in range(3)))
        assert server.opened == 4
        await until(lambda: server.open == 0)


async def test_a_request_on_stale_connections_is_sent_again_until_one_is_not() -> None:
    async with EmulatedNode() as node:
        pool = pool_of(node, stale_seconds=HOWEVER_SLOW)
        connections = [await exchanged(pool) for _ in range(5)]
        for connection in connections:
            pool.release(connection)
        node.faults.set("stale", path="*")
        await ask(pool)
        assert node.faults.fired == 5
        assert node.connections_opened == 6
        pool.close()


@pytest.mark.parametrize("spoilt", ["closed", "unfinished", "too many"])
async def test_a_connection_that_can_not_be_used_again_is_closed(spoilt: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK if spoilt != "unfinished" else OK[:-1])
        await peer.reader.read()

    async with raw_server(script) as server:
        pool = pool_of(server, most_idle=0 if spoilt == "too many" else 10)
        connection = await pool.connect(LIMIT)
        connection.send(ASK)
        await connection.read_status()
        await connection.read()
        if spoilt == "closed":
            pool.close()
        pool.release(connection)
        assert pool.take_idle() is None
        await until(lambda: server.open == 0)
        pool.close()


async def test_a_closed_pool_closes_idle_connections_and_leaves_used_ones() -> None:
    async with raw_server(always(OK)) as server:
        pool = pool_of(server)
        idle, used = await exchanged(pool), await exchanged(pool)
        pool.release(idle)
        pool.close()
        await until(lambda: server.open == 1)
        used.send(ASK)
        assert await used.read_status() == 200
        pool.release(used)
        await until(lambda: server.open == 0)


async def test_a_request_on_a_new_connection_that_breaks_is_not_sent_again() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.reset()

    async with raw_server(script) as server:
        pool = pool_of(server)
        with pytest.raises(ConnectionReset):
            await exchanged(pool)
        assert server.opened == 1


@pytest.mark.parametrize("unused", [False, True], ids=["closed", "kept for the next"])
async def test_a_connection_whose_caller_gives_up_before_sending_is(unused: bool) -> None:
    def give_up(connection: NodeConnection) -> None:
        if unused:
            connection.keep_unused()
        raise ConnectTimedOut

    async with raw_server(always(OK)) as server:
        pool = pool_of(server)
        with pytest.raises(ConnectTimedOut):
            await exchanged(pool, on_connected=give_up)
        await until(lambda: server.open == unused)
        await ask(pool)
        assert pool.connections_opened == 2 - unused
        pool.close()


# Connecting.


async def test_a_connect_that_takes_too_long_or_is_cancelled_leaves_no_socket_open() -> None:
    with full_backlog() as port:
        pool = ConnectionPool(NodeAddress("127.0.0.1", port, b"", b""))
        with pytest.raises(ConnectTimedOut, match=r"0\.05 s"):
            await pool.connect(0.05)
        connecting = asyncio.create_task(pool.connect(LIMIT))
        await asyncio.sleep(0.02)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
    # An open socket would cause a ResourceWarning, which is an error in tests.


async def test_a_machine_without_descriptors_is_not_the_nodes_fault() -> None:
    class FullLoop(LoopWithClock):
        async def create_connection(self, *_: Any, **__: Any) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

    loop: Any = FullLoop()
    pool = ConnectionPool(NodeAddress("127.0.0.1", 1, b"", b""), loop=loop)
    with pytest.raises(LocalResourcesExhausted, match="Too many open files"):
        await pool.connect(LIMIT)


OKAY = b"HTTP/1.1 200 OKAY\r\nContent-Length: 5\r\n\r\nhello"


def spec(url: str, **more: Any) -> NodeSpec:
    return NodeSpec.model_validate({"name": "n", "url": url, **more})


@each_case(
    ("url", "host", "port", "prefix", "authority"),
    [
        ("http://10.0.0.1:8080", "10.0.0.1", 8080, b"", b"10.0.0.1:8080"),
        ("http://node", "node", 80, b"", b"node"),
        ("https://node", "node", 443, b"", b"node"),
        ("http://node:81/llama/a", "node", 81, b"/llama/a", b"node:81"),
        ("http://node/llama/", "node", 80, b"/llama", b"node"),
        ("http://[::1]:8080", "::1", 8080, b"", b"[::1]:8080"),
    ],
)
def test_a_nodes_address_comes_from_its_url(
    url: str, host: str, port: int, prefix: bytes, authority: bytes
) -> None:
    found = node_address(spec(url))
    assert (found.host, found.port, found.path_prefix) == (host, port, prefix)
    assert found.header_lines == b"host: " + authority + b"\r\n"
    assert (found.tls is not None) == url.startswith("https")


async def test_a_path_prefix_and_the_nodes_own_key_are_sent_and_no_proxy_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    heard: list[bytes] = []

    async def script(peer: Peer) -> None:
        heard.append(await peer.request())
        await peer.say(OKAY)

    async with raw_server(script) as server:
        given = spec(f"http://127.0.0.1:{server.port}/llama/a")
        upstream = open_node_pool(given.model_copy(update={"api_key": SecretStr("s3cret")}))
        assert await answered(upstream) == b"hello"
        upstream.close()
    assert heard[0].startswith(b"GET /llama/a/health HTTP/1.1\r\n")
    assert b"authorization: Bearer s3cret\r\n" in heard[0]


# TLS.


@pytest.fixture
def ca(authority: trustme.CA, tmp_path: Path) -> Path:
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return path


NAMES = ("node.test", "127.0.0.1")
OpenPool = Callable[..., ConnectionPool]


@pytest.fixture
def tls_pool() -> Iterator[OpenPool]:
    """Opens a pool of a server behind TLS with these settings; closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def open_pool(server: RawServer, **tls: Any) -> ConnectionPool:
            more = {"tls": tls} if tls else {}
            upstream = open_node_pool(spec(f"https://127.0.0.1:{server.port}", **more))
            stack.callback(upstream.close)
            return upstream

        yield open_pool


@pytest.mark.parametrize(
    "tls", [{"ca": True}, {"ca": True, "server_name": "node.test"}, {"verify": False}]
)
async def test_a_certificate_is_accepted_by_its_authority_and_name_or_unverified(
    ca: Path, authority: trustme.CA, tls_pool: OpenPool, tls: dict[str, Any]
) -> None:
    tls = tls | ({"ca": str(ca)} if "ca" in tls else {})
    async with raw_server(always(OKAY), server_side(authority, *NAMES)) as server:
        upstream = tls_pool(server, **tls)
        for _ in range(3):
            assert await answered(upstream) == b"hello"
        assert server.opened == 1


@pytest.mark.parametrize("known", [False, True], ids=["authority", "name"])
async def test_a_certificate_of_an_unknown_authority_or_another_name_is_rejected(
    ca: Path, authority: trustme.CA, tls_pool: OpenPool, known: bool
) -> None:
    tls = {"ca": str(ca), "server_name": "other.test"} if known else {}
    async with raw_server(always(OKAY), server_side(authority, *NAMES)) as server:
        with pytest.raises(ConnectFailed, match="certificate"):
            await tls_pool(server, **tls).connect(LIMIT)
        await until(lambda: server.open == 0)


@pytest.mark.parametrize(
    ("answers", "limit", "error"), [(True, LIMIT, ConnectFailed), (False, 0.1, ConnectTimedOut)]
)
async def test_a_server_behind_an_https_url_that_answers_in_plain_or_not_at_all_is_reported(
    tls_pool: OpenPool, answers: bool, limit: float, error: type[UpstreamError]
) -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.readexactly(8)
        if answers:
            await peer.say(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        else:
            await peer.reader.read()

    async with raw_server(script) as server:
        with pytest.raises(error):
            await tls_pool(server, verify=False).connect(limit)
        await until(lambda: server.opened == 1 and server.open == 0)


# A resolver that hangs or fails affects only nodes whose names have never been resolved.


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
