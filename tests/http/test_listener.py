"""Listeners: TLS, connections that do not end, and certificates and keys that change."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from gateway.app.assembly import Timings
from gateway.app.handover import open_listeners
from gateway.app.startup import StartError
from gateway.callers.keys import new_key
from gateway.config.listeners import LimitSettings
from gateway.http.certificates import load_certificate
from gateway.http.listener import Listener, bind_socket
from gateway.http.protocol import protocol_class
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import raw_connection
from tests.gateways import NO_TLS, running_gateway, until
from tests.http.authority import issue, server_side, shown, trusting
from tests.transport.raw import Peer, always, raw_server
from tests.virtual import in_virtual_time, now
from tests.web.raw_client import CHAT, HELLO, answer, public, request

pytestmark = pytest.mark.usefixtures("hurried")


def tls_of(authority: trustme.CA, folder: Path, name: str) -> dict[str, str]:
    """The settings for a new certificate."""
    files = issue(authority, folder, name)
    return {"cert": str(files.cert), "key": str(files.key)}


@pytest.fixture
def tls(authority: trustme.CA, tmp_path: Path) -> dict[str, str]:
    return tls_of(authority, tmp_path / "tls", "127.0.0.1")


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
        for data, status in ((b"POST /v1", 408), (b"garbage\r\n\r\n", 400)):
            async with raw_connection(gate.url, ssl=trusting(authority)) as wire:
                await wire.send(data)
                assert (await answer(wire)).status == status
        async with raw_connection(gate.url) as wire:
            await wire.send(request())
            await wire.rest()  # plain HTTP is closed
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
    on_ipv6 = Listener(_nothing, bind_socket("::1", 0), protocol=protocol, keep_alive=0.5)
    assert on_ipv6.url.startswith("http://[::1]:")
    for listener in (first, second, on_ipv6):
        await listener.close()


@in_virtual_time
async def test_an_idle_connection_is_closed_in_time(tmp_path: Path) -> None:
    async with (
        public(tmp_path, {"listen": {"keep_alive": 1}}) as gate,
        raw_connection(gate.url) as wire,
    ):
        for _ in range(2):
            await wire.send(request({**HELLO, "max_tokens": 1}))
            assert (await answer(wire)).status == 200
            await asyncio.sleep(0.1)
        began = now()
        assert await wire.rest() == b""
        assert now() - began == pytest.approx(0.9)


async def _nothing(scope: object, receive: object, send: object) -> None:
    raise AssertionError


SHORT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


def client(
    url: str, authority: trustme.CA | None = None, key: str | None = None
) -> httpx.AsyncClient:
    """A client that keeps one connection; without an authority it speaks no TLS."""
    return httpx.AsyncClient(
        base_url=url,
        verify=NO_TLS if authority is None else trusting(authority),
        trust_env=False,
        timeout=30.0,
        limits=httpx.Limits(max_connections=1),
        headers={} if key is None else {"authorization": f"Bearer {key}"},
    )


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def until_shown(url: str, authority: trustme.CA, name: str) -> None:
    """Wait until new connections are shown the certificate of this name."""
    async with asyncio.timeout(30):
        while await shown(port_of(url), authority) != name:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.05)


def connection_of(response: httpx.Response) -> object:
    return response.extensions["network_stream"].get_extra_info("client_addr")


async def test_both_listeners_show_a_renewed_certificate_and_drop_no_connection(
    tmp_path: Path, authority: trustme.CA
) -> None:
    settings = {
        "listen": {"tls": tls_of(authority, tmp_path / "public", "public-1")},
        "admin": {"tls": tls_of(authority, tmp_path / "admin", "admin-1")},
    }
    async with (
        EmulatedNode() as node,
        running_gateway(tmp_path, [node.url], settings) as running,
        client(running.url, authority) as public,
        client(running.admin_url, authority) as admin,
    ):
        before = (await public.get("/health"), await admin.get("/health"))
        assert await shown(port_of(running.url), authority) == "public-1"
        issue(authority, tmp_path / "public", "public-2")
        issue(authority, tmp_path / "admin", "admin-2")
        await until_shown(running.url, authority, "public-2")
        await until_shown(running.admin_url, authority, "admin-2")
        reply = await public.post("/v1/chat/completions", json=SHORT)
        status = await admin.get("/admin/status")
        assert reply.status_code == 200
        assert [connection_of(one) for one in before] == [
            connection_of(one) for one in (reply, status)
        ]
        certificates = status.json()["certificates"]
        assert set(certificates) == {"listen.tls", "admin.tls"}
        assert certificates["admin.tls"]["days_left"] > 0
        metrics = (await admin.get("/metrics")).text
        assert 'llama_gateway_certificate_days_left{certificate="admin.tls"} ' in metrics
        entries = (await admin.get("/admin/audit")).json()["entries"]
    renewed = {(one["actor"], one["target"], one["outcome"]) for one in entries}
    assert {("file", "listen.tls", "done"), ("file", "admin.tls", "done")} <= renewed


def spoilt(cert: Path, key: Path) -> Iterator[str]:
    """Spoil these files, each time in another way."""
    key.write_bytes(key.read_bytes()[:100])
    yield "half"
    trustme.CA().issue_cert("x").private_key_pem.write_to_path(key)
    yield "of another certificate"
    cert.unlink()
    yield "gone"
    key.write_text("")
    yield "empty"
    key.write_text(ENCRYPTED_KEY)
    yield "encrypted"


async def test_a_broken_renewal_changes_nothing_and_is_told(
    tmp_path: Path, authority: trustme.CA
) -> None:
    folder = tmp_path / "admin"
    settings = {"admin": {"tls": tls_of(authority, folder, "renewed-0")}}
    async with (
        EmulatedNode() as node,
        running_gateway(tmp_path, [node.url], settings) as running,
        client(running.admin_url, authority) as admin,
    ):
        certificates, port = running.gateway.certificates, port_of(running.admin_url)
        for number, how in enumerate(spoilt(folder / "cert.pem", folder / "key.pem")):
            if number % 2:
                answer = await admin.post("/admin/reload")
                assert answer.status_code == 422, how
                assert answer.json()["problems"][0]["key"] == "admin.tls"
            await until(lambda: certificates.error is not None)
            assert await shown(port, authority) == f"renewed-{number}", how
            told = (await admin.get("/admin/status")).json()["certificate_error"]
            assert told.startswith("admin.tls: ")
            assert f"{folder}" in told, how
            issue(authority, folder, f"renewed-{number + 1}")
            await until(lambda: certificates.error is None)
            assert await shown(port, authority) == f"renewed-{number + 1}"
            assert (await admin.get("/admin/status")).json()["certificate_error"] is None


async def test_a_certificate_behind_an_atomically_switched_link_is_renewed(
    tmp_path: Path, authority: trustme.CA
) -> None:
    """As Kubernetes mounts a secret, and as certbot's `live` folder."""
    issue(authority, tmp_path / "..1", "first")
    (tmp_path / "..data").symlink_to("..1")
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    tls = {"cert": str(tmp_path / "cert.pem"), "key": str(tmp_path / "key.pem")}
    async with (
        EmulatedNode() as node,
        running_gateway(tmp_path, [node.url], {"listen": {"tls": tls}}) as running,
    ):
        issue(authority, tmp_path / "..2", "second")
        (tmp_path / "..new").symlink_to("..2")
        (tmp_path / "..new").rename(tmp_path / "..data")
        await until_shown(running.url, authority, "second")
        assert running.gateway.certificates.error is None


# Certificates with which the gateway itself goes to nodes.


SAID = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"yes"}}]}'
ANSWERED = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(SAID), SAID)


async def test_a_node_is_reached_with_the_renewed_client_certificate(
    tmp_path: Path, authority: trustme.CA
) -> None:
    context = server_side(authority, "127.0.0.1")
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    own = tls_of(authority, tmp_path / "own", "gateway-1")
    names: list[str] = []

    async def script(peer: Peer) -> None:
        subject = peer.writer.get_extra_info("peercert")["subject"]
        names.append(dict(pair for (pair,) in subject)["commonName"])
        await always(ANSWERED)(peer)

    async with raw_server(script, context) as node:
        tls = {"ca": str(tmp_path / "ca.pem"), **own}
        url = f"https://127.0.0.1:{node.port}"
        spec = {"name": "a", "url": url, "kind": "openai", "model": "m", "tls": tls}
        async with running_gateway(tmp_path, [spec]) as running:
            assert (await running.client.post("/v1/chat/completions", json=SHORT)).is_success
            assert set(names) == {"gateway-1"}
            (tmp_path / "own" / "cert.pem").write_text("-----BEGIN CERT")
            certificates = running.gateway.certificates
            await until(lambda: certificates.error is not None)
            assert "node 'a'" in str(certificates.error)
            assert (await running.client.post("/v1/chat/completions", json=SHORT)).is_success
            issue(authority, tmp_path / "own", "gateway-2")
            await until(lambda: "gateway-2" in names)
            await until(lambda: certificates.error is None)
            assert (await running.client.post("/v1/chat/completions", json=SHORT)).is_success


# Admin keys.


def with_admin_keys(*keys: tuple[Any, str], **more: Any) -> dict[str, Any]:
    specs = [{"id": key.id, "sha256": key.sha256, "role": role} for key, role in keys]
    return {"admin": {"keys": specs, **more}}


async def until_status(admin: httpx.AsyncClient, status: int, path: str = "/admin/nodes") -> None:
    """Wait for this status."""
    async with asyncio.timeout(30):
        while (await admin.get(path)).status_code != status:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_admin_keys_change_on_a_connection_that_is_open(tmp_path: Path) -> None:
    alice, bob = new_key("alice"), new_key("bob")
    async with (
        EmulatedNode() as node,
        running_gateway(tmp_path, [node.url]) as running,
        client(running.admin_url) as nobody,
        client(running.admin_url, key=alice.text) as first,
        client(running.admin_url, key=bob.text) as second,
    ):
        assert (await nobody.get("/admin/config")).status_code == 200
        assert (await nobody.post("/admin/reload")).status_code == 200
        running.write_settings(with_admin_keys((alice, "operator"), (bob, "viewer")))
        await until_status(nobody, 401)
        assert (await first.get("/admin/requests")).status_code == 200
        assert (await second.get("/admin/requests")).status_code == 403
        # The roles change places, and a key leaves.
        running.write_settings(with_admin_keys((bob, "admin")))
        await until_status(first, 401)
        assert (await second.get("/admin/config")).status_code == 200
        # Without any key nobody is admitted: it may have gone by mistake.
        running.write_settings({"queue": {"max": 7}})
        await until_status(second, 401)
        assert (await nobody.get("/admin/nodes")).status_code == 401
        assert (await nobody.get("/health")).status_code == 200
    assert "last admin key" in (tmp_path / "gateway.log").read_text()


async def test_the_key_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "admin.key"
    file.write_text("first\n")
    async with (
        EmulatedNode() as node,
        running_gateway(tmp_path, [node.url], {"admin": {"key_file": str(file)}}) as running,
        client(running.admin_url, key="first") as old,
        client(running.admin_url, key="second") as new,
    ):
        file.write_text("second\n")
        assert (await old.post("/admin/reload")).status_code == 200
        assert (await old.get("/admin/nodes")).status_code == 401
        assert (await new.get("/admin/nodes")).status_code == 200
        file.write_text("")
        failed = await new.post("/admin/reload")
        assert failed.status_code == 422
        assert failed.json()["problems"][0]["key"] == "admin.key_file"
        assert (await new.get("/admin/nodes")).status_code == 200


def test_the_expiry_is_that_of_the_first_certificate(tmp_path: Path, authority: trustme.CA) -> None:
    for date in (datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC), datetime(2061, 5, 6, tzinfo=UTC)):
        files = issue(authority, tmp_path, "one", not_after=date)
        assert load_certificate(files).expires_at == date.timestamp()


ENCRYPTED_KEY = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAhZzP7Lk6tH7gICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEPQwXkTHmj8UHk5PkX0V2PwEgZD3
-----END ENCRYPTED PRIVATE KEY-----
"""
