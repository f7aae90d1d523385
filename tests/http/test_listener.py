from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trustme

from gateway.app.assembly import Timings
from gateway.app.handover import open_listeners
from gateway.app.startup import StartError
from gateway.config.listeners import LimitSettings
from gateway.http.listener import Listener, bind_socket
from gateway.http.protocol import protocol_class
from tests.emulator.raw_connection import RawConnection
from tests.gateways import until
from tests.http.authority import trusting
from tests.virtual import in_virtual_time, now
from tests.web.raw_client import CHAT, HELLO, answer, public, request


@pytest.fixture
def tls(authority: trustme.CA, tmp_path: Path) -> dict[str, str]:
    own = authority.issue_cert("127.0.0.1")
    own.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    own.private_key_pem.write_to_path(tmp_path / "key.pem")
    return {"cert": str(tmp_path / "cert.pem"), "key": str(tmp_path / "key.pem")}


@in_virtual_time
async def test_the_public_listener_can_use_tls(
    tmp_path: Path, authority: trustme.CA, tls: dict[str, str]
) -> None:
    settings = {"listen": {"tls": tls}, "limits": {"header_timeout": 0.5, "body_bytes": 1_000_000}}
    async with public(tmp_path, settings, well=False) as gate:
        assert gate.url.startswith("https://127.0.0.1:")
        async with httpx.AsyncClient(verify=trusting(authority), trust_env=False) as client:
            url = f"{gate.url}/v1/chat/completions"
            for stream in (False, True):
                reply = await client.post(url, json={**HELLO, "max_tokens": 2, "stream": stream})
                assert reply.status_code == 200
            reply = await client.post(url, json={**HELLO, "padding": "x" * 900_000})
            assert reply.status_code == 200
            reply = await client.post(url, json={**HELLO, "padding": "x" * 1_500_000})
            assert reply.status_code == 413
        port = int(gate.url.rpartition(":")[2])
        for data, status in ((b"POST /v1", 408), (b"garbage\r\n\r\n", 400)):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=trusting(authority)
            )
            wire = RawConnection(reader, writer)
            await wire.send(data)
            assert (await answer(wire)).status == status
            await wire.leave()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request())
        async with asyncio.timeout(30.0):
            await reader.read()  # plain HTTP is closed
        writer.close()
        await gate.all_disconnected()


@asynccontextmanager
async def half_open(url: str, count: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    """So many connections that begin no handshake."""
    port = int(url.rpartition(":")[2])
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    yield [reader for reader, _ in opened]
    for _, writer in opened:
        writer.close()


@pytest.mark.parametrize("listener", ["listen", "admin"])
async def test_connections_count_before_their_tls_handshake_and_get_no_longer_than_a_head(
    tmp_path: Path, authority: trustme.CA, tls: dict[str, str], listener: str
) -> None:
    settings = {listener: {"tls": tls}, "limits": {"header_timeout": 0.5, "connections": 16}}
    async with public(tmp_path, settings, well=False) as gate:
        gateway = gate.running.gateway
        of = {"listen": gateway.public_listener, "admin": gateway.admin_listener}[listener]
        assert of is not None
        limiter = of.protocol.connection_limiter
        async with half_open(of.url, 10) as readers:
            await until(lambda: len(limiter) == 10)
            for reader in readers:
                async with asyncio.timeout(20.0):
                    await reader.read()
            await until(lambda: len(limiter) == 0)


async def test_an_address_with_many_half_open_tls_connections_keeps_no_other_out(
    tmp_path: Path, authority: trustme.CA, tls: dict[str, str]
) -> None:
    settings = {"listen": {"tls": tls}, "limits": {"connections": 16}}
    async with public(tmp_path, settings, well=False) as gate:
        listener = gate.running.gateway.public_listener
        assert listener is not None
        limiter = listener.protocol.connection_limiter
        transport = httpx.AsyncHTTPTransport(
            verify=trusting(authority), local_address="127.0.0.2", retries=0
        )
        async with half_open(gate.url, 100), httpx.AsyncClient(transport=transport) as client:
            await until(lambda: len(limiter) >= 70)
            assert len(limiter.fair_share.by_caller) == 1
            assert limiter.fair_share.total == 14, "an eighth is a reserve for others"
            for _ in range(4):
                reply = await client.post(f"{gate.url}/v1/chat/completions", json=HELLO)
                assert reply.status_code == 200
        await gate.all_disconnected()
        await until(lambda: len(limiter) == 0)


@pytest.mark.parametrize("paths", [[CHAT], [CHAT, "last " + CHAT], [CHAT, "last /admin"]])
async def test_clients_that_leave_the_end_of_tls_unanswered_delay_no_shutdown(
    tmp_path: Path, authority: trustme.CA, tls: dict[str, str], paths: list[str]
) -> None:
    settings, timings = {"listen": {"tls": tls}}, Timings(linger=0.2)
    async with public(tmp_path, settings, well=False, timings=timings) as gate:
        listener = gate.running.gateway.public_listener
        assert listener is not None
        raw = socket.create_connection((listener.host, listener.port))
        wrap, name = trusting(authority).wrap_socket, "127.0.0.1"
        with await asyncio.to_thread(wrap, raw, server_hostname=name) as client:
            for words in paths:
                last, _, path = words.rpartition(" ")
                line = "connection: close" if last else "connection: keep-alive"
                await asyncio.to_thread(client.sendall, request(HELLO, line, path=path))
                assert await asyncio.to_thread(client.recv, 9)
            async with asyncio.timeout(15.0):  # not ssl_shutdown_timeout
                await listener.close()


async def test_of_two_sockets_bound_at_once_the_later_can_not_listen() -> None:
    protocol = protocol_class(LimitSettings())
    first = Listener(_nothing, bind_socket("127.0.0.1", 0), protocol=protocol, keep_alive=0.5)
    sock = bind_socket("127.0.0.1", first.port)
    second = Listener(_nothing, sock, protocol=protocol, keep_alive=0.5)
    result = rf"127\.0\.0\.1:{first.port} can't be listened on: .*--admin-port"
    with pytest.raises(StartError, match=result):
        open_listeners(first, second)
    await first.close()
    await second.close()


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:"), ("::1", "http://[::1]:")]
)
async def test_a_listener_knows_its_url(host: str, url: str) -> None:
    listener = Listener(
        _nothing, bind_socket(host, 0), protocol=protocol_class(LimitSettings()), keep_alive=0.5
    )
    assert listener.url.startswith(url)
    await listener.close()


@in_virtual_time
async def test_an_idle_connection_is_closed_in_time(tmp_path: Path) -> None:
    async with public(tmp_path, {"listen": {"keep_alive": 1}}) as gate:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(gate.url.rpartition(":")[2])
        )
        wire = RawConnection(reader, writer)
        for _ in range(2):
            await wire.send(request({**HELLO, "max_tokens": 1}))
            assert (await answer(wire)).status == 200
            await asyncio.sleep(0.1)
        began = now()
        assert await wire.rest() == b""
        assert now() - began == pytest.approx(0.9)
        await wire.leave()


async def _nothing(scope: object, receive: object, send: object) -> None:
    raise AssertionError
