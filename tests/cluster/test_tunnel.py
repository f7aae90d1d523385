"""Tunnels over loopback, with real certificates."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ipaddress
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from gateway.cluster import tunnel
from gateway.cluster.tunnel import (
    MOST_GREETING_BYTES,
    VERSION,
    Greeting,
    TunnelError,
    Tunnels,
    Welcome,
    member_certificate,
)
from gateway.config.settings import Address, ClusterSettings, ClusterTls
from gateway.http.certificates import CertificateError, ServerCertificate
from gateway.http.exchange import ConnectionOrigin
from tests.cluster.certificates import CLUSTER, Authority, authority
from tests.gateways import until

LIMIT = 20.0  # seconds that a thing may take where its time is not the matter


class Node:
    """A member with a port, which keeps what others open to it."""

    def __init__(self, settings: ClusterSettings, certificate: ServerCertificate) -> None:
        self.settings = settings
        self.answer = Welcome(f"process of {settings.member_name}")
        self.came: asyncio.Queue[tuple[Greeting, socket.socket]] = asyncio.Queue()
        self.tunnels = Tunnels(
            settings,
            self.answer.process,
            certificate,
            admit=lambda _: self.answer,
            on_tunnel=lambda greeting, sock: self.came.put_nowait((greeting, sock)),
        )
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.tunnels.serve(self.listening)

    @property
    def address(self) -> Address:
        return Address(*self.listening.getsockname())

    async def pair(self, other: Node, **more: Any) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a tunnel that the other one has opened to this one."""
        name = self.settings.member_name
        origin = ConnectionOrigin(("192.0.2.1", 5), ("192.0.2.9", 443), tls=True)
        to, process = self.answer.process, other.answer.process
        opened = await other.tunnels.open(
            name, self.address, "public", to=to, name="x", origin=origin, **more
        )
        greeting, taken = await self.came.get()
        member = other.settings.member_name
        assert greeting == Greeting(VERSION, CLUSTER, member, process, to, "public", "x", origin)
        return opened, taken


MakeNode = Callable[..., Node]


@contextlib.asynccontextmanager
async def making() -> AsyncIterator[MakeNode]:
    made: list[Node] = []

    def one(member: str, tls: ClusterTls | None = None, **more: object) -> Node:
        settings = authority().settings(member, **{"tls": tls or authority().files(member), **more})
        try:
            certificate = member_certificate(settings.tls, member)
        except CertificateError:  # One that no honest member would use.
            certificate = member_certificate(settings.tls, settings.tls.cert.stem)
        made.append(Node(settings, certificate))
        return made[-1]

    yield one
    for node in made:
        await node.tunnels.aclose()
        node.listening.close()
        while not node.came.empty():
            node.came.get_nowait()[1].close()


@pytest.fixture
async def make() -> AsyncIterator[MakeNode]:
    async with making() as one:
        yield one


@pytest.fixture
async def a(make: MakeNode) -> Node:
    return make("gw-a")


@pytest.fixture
async def b(make: MakeNode) -> Node:
    return make("gw-b")


async def received(sock: socket.socket, count: int) -> bytes:
    loop, found = asyncio.get_running_loop(), b""
    async with asyncio.timeout(LIMIT):
        while len(found) < count and (data := await loop.sock_recv(sock, 1 << 16)):
            found += data
    return found


async def send(sock: socket.socket, data: bytes) -> None:
    async with asyncio.timeout(LIMIT):
        await asyncio.get_running_loop().sock_sendall(sock, data)


def test_what_one_side_writes_the_other_reads_until_each_direction_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        async with making() as make:
            a, b = make("gw-a"), make("gw-b")
            opened, taken = await a.pair(b)
            await send(opened, b"request")
            assert await received(taken, 7) == b"request"
            opened.shutdown(socket.SHUT_WR)
            assert await received(taken, 1) == b""
            await send(taken, b"answer")
            assert await received(opened, 6) == b"answer"
            taken.close()
            assert await received(opened, 1) == b""
            await until(lambda: not a.tunnels._open and not b.tunnels._open)
            # A given socket is joined in place of a new pair.
            own, other = socket.socketpair()
            own.setblocking(False)
            joined, taken = await a.pair(b, sock=other)
            assert joined is other
            await send(own, b"x")
            assert await received(taken, 1) == b"x"
            # Who sends faster than the other one reads waits in bounded memory.
            loop, sent, block = asyncio.get_running_loop(), 0, bytes(range(256)) * 256
            with contextlib.suppress(TimeoutError):
                while sent < 256 << 20:
                    async with asyncio.timeout(1):
                        await loop.sock_sendall(own, block)
                    sent += len(block)
            assert sent < 32 << 20
            own.shutdown(socket.SHUT_WR)
            found = await received(taken, 1 << 40)
            assert found[:sent] == block * (sent // len(block))
            assert block.startswith(found[sent:])
            for one in (opened, own, taken):
                one.close()
            # Who reads nothing for long loses the tunnel, and so does who dies.
            monkeypatch.setattr(tunnel, "STALL_SECONDS", 0.2)
            opened, taken = await a.pair(b)
            with pytest.raises(OSError):
                await send(opened, bytes(256 << 20))
            await until(lambda: not a.tunnels._open)
            ends = await a.pair(b)
            await b.tunnels.aclose()
            assert [await received(one, 1) for one in ends] == [b"", b""]
            for one in (opened, taken, *ends):
                one.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the gateway's own
        runner.run(run())


async def refused(attempt: Awaitable[socket.socket]) -> TunnelError:
    with pytest.raises(TunnelError) as raised:
        async with asyncio.timeout(LIMIT):
            await attempt
    return raised.value


@pytest.mark.parametrize(
    ("reason", "given"),
    [("cluster", {"name": "another"}), ("address", {}), ("certificate", {})],
)
async def test_who_is_no_such_member_is_refused(
    make: MakeNode, reason: str, given: dict[str, str]
) -> None:
    allow = (ipaddress.ip_network("192.0.2.0/24"),) if reason == "address" else ()
    a = make("gw-a", allow=allow)
    tls = authority().files("gw-x") if reason == "certificate" else None
    b = make("gw-b", tls=tls, **given)
    await refused(b.tunnels.open("gw-a", a.address, "control"))
    assert a.tunnels.refused == {reason: 1}
    assert a.came.empty()


async def test_a_refusal_comes_with_its_reason_and_is_counted(a: Node, b: Node) -> None:
    await refused(b.tunnels.open("gw-a", a.address, "control", to="one that has ended"))
    assert a.tunnels.refused == {"other_process": 1}
    a.answer = Welcome("pa", "not_leader", "gw-c")
    error = await refused(b.tunnels.open("gw-a", a.address, "control"))
    assert error.welcome == a.answer
    assert str(error) == f"gw-a at {a.address} refuses: not_leader"
    assert a.tunnels.refused["not_leader"] == 1
    # A server that is another member is not greeted.
    assert "gw-c" in str(await refused(b.tunnels.open("gw-c", a.address, "control")))
    assert a.came.empty()


async def test_certificates_of_another_authority_are_refused_by_both_sides(
    make: MakeNode, tmp_path: Path
) -> None:
    a, b = make("gw-a"), make("gw-b", tls=Authority(tmp_path).files("gw-b"))
    error = await refused(b.tunnels.open("gw-a", a.address, "control"))
    assert "certificate" in str(error)
    await refused(a.tunnels.open("gw-b", b.address, "control"))
    await until(lambda: bool(a.tunnels.refused["handshake"] and b.tunnels.refused["handshake"]))


async def test_nobody_answers(make: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "OPEN_SECONDS", 0.5)
    b = make("gw-b")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(*silent.getsockname())
        error = await refused(b.tunnels.open("gw-a", address, "control"))
        assert "no answer within 0.5 s" in str(error)
    error = await refused(b.tunnels.open("gw-a", address, "control"))
    assert str(error).startswith(f"gw-a at {address}")


LENGTH = struct.Struct(">I")
GREETING, LATER_GREETING = (
    LENGTH.pack(len(data)) + data
    for data in (
        msgspec.msgpack.encode(Greeting(version, CLUSTER, "gw-b", "p", "", "control"))
        for version in (VERSION, VERSION + 1)
    )
)


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n" * 100, "greeting", id="HTTP"),
        pytest.param(LENGTH.pack(MOST_GREETING_BYTES + 1), "greeting", id="too long"),
        pytest.param(LENGTH.pack(3) + b"abc", "greeting", id="no message"),
        pytest.param(GREETING[:-1], "greeting", id="incomplete, and then nothing"),
        pytest.param(LATER_GREETING, "version", id="of a later version"),
    ],
)
async def test_what_is_no_greeting_is_refused_in_time(
    a: Node, b: Node, monkeypatch: pytest.MonkeyPatch, first: bytes, reason: str
) -> None:
    monkeypatch.setattr(tunnel, "OPEN_SECONDS", 2.0)
    await spoken_to(a, b, first)
    await until(lambda: a.tunnels.refused == {reason: 1})
    assert a.came.empty()


async def spoken_to(a: Node, b: Node, data: bytes) -> None:
    """Say this to a member as another one, until the connection ends."""
    context = b.tunnels._certificate.loaded.client_context
    reader, writer = await asyncio.open_connection(*a.address, ssl=context, server_hostname="gw-a")
    writer.write(data)
    async with asyncio.timeout(LIMIT):
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await reader.read()
    writer.close()


async def test_a_chunk_of_a_wrong_length_ends_the_tunnel(a: Node, b: Node) -> None:
    await spoken_to(a, b, GREETING + LENGTH.pack(3) + b"abc" + b"\xff" * 64)
    _, taken = await a.came.get()
    assert await received(taken, 100) == b"abc"
    taken.close()


async def test_handshakes_that_do_not_end_are_bounded_and_given_up(
    a: Node, b: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "OPEN_SECONDS", 1.5)
    monkeypatch.setattr(tunnel, "MOST_HANDSHAKES", 4)  # 2 of one address
    slow = [socket.create_connection(a.address) for _ in range(4)]
    await until(lambda: a.tunnels.refused["too_many"] == 2)
    await until(lambda: a.tunnels.refused["handshake"] == 2)
    opened, taken = await a.pair(b)
    for one in (*slow, opened, taken):
        one.close()


async def test_a_tunnel_that_can_not_be_taken_is_closed(
    a: Node, b: Node, monkeypatch: pytest.MonkeyPatch
) -> None:

    async def fail(*_: object) -> socket.socket:
        raise OSError("Too many open files")

    monkeypatch.setattr(a.tunnels, "_join", fail)
    opened = await b.tunnels.open("gw-a", a.address, "link")
    assert await received(opened, 1) == b""
    opened.close()
    await until(lambda: not a.tunnels._open)


async def test_tunnels_of_one_member_are_bounded(
    a: Node, b: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = await a.pair(b)
    monkeypatch.setattr(tunnel, "MOST_TUNNELS", 1)
    error = await refused(b.tunnels.open("gw-a", a.address, "link"))
    assert str(error) == "1 tunnels are open already"
    b.tunnels._open.clear()  # One that does not count its own.
    error = await refused(b.tunnels.open("gw-a", a.address, "link"))
    assert error.welcome is not None
    assert error.welcome.refused == "too_many"
    for one in ends:
        one.close()


# Certificates.


def test_a_certificate_is_tried_as_others_will(tmp_path: Path) -> None:
    good = member_certificate(authority().files("gw-a", "10.0.0.1"), "gw-a")
    assert good.loaded.client_context is not None
    with pytest.raises(CertificateError, match="for the name gw-b"):
        member_certificate(authority().files("gw-a"), "gw-b")
    with pytest.raises(CertificateError, match=r"names \*\.example\.org and not this member"):
        member_certificate(authority().files("*.example.org"), "gw-a.example.org")
    other = Authority(tmp_path).folder / "ca.pem"
    foreign = authority().files("gw-a").model_copy(update={"ca": other})
    with pytest.raises(CertificateError, match="would be refused"):
        member_certificate(foreign, "gw-a")
    over = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    with pytest.raises(CertificateError, match="expired"):
        member_certificate(authority().files("gw-a", not_after=over), "gw-a")
    other.write_text("nothing")
    with pytest.raises(CertificateError):
        member_certificate(foreign, "gw-a")
