from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from pydantic import SecretStr

from gateway.config.node import NodeSpec
from gateway.transport.errors import ConnectFailed, ConnectTimedOut
from gateway.transport.pool import ConnectionPool, node_address, open_node_pool
from tests.transport.pool_client import pool_client
from tests.transport.raw import Peer, always, raw_server

LIMIT = 30.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


def spec(url: str, **more: Any) -> NodeSpec:
    return NodeSpec.model_validate({"name": "n", "url": url, **more})


@pytest.mark.parametrize(
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


def test_the_nodes_own_key_is_in_every_head() -> None:
    given = spec("http://node").model_copy(update={"api_key": SecretStr("s3cret")})
    assert b"authorization: Bearer s3cret\r\n" in node_address(given).header_lines


async def test_a_path_prefix_is_kept() -> None:
    heard: list[bytes] = []

    async def script(peer: Peer) -> None:
        heard.append(await peer.request())
        await peer.say(OK)

    async with raw_server(script) as server:
        upstream = open_node_pool(spec(f"http://127.0.0.1:{server.port}/llama/a"))
        assert (await pool_client(upstream).get("/health")).text == "hello"
        upstream.close()
    assert heard[0].startswith(b"GET /llama/a/health HTTP/1.1\r\n")


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    async with raw_server(always(OK)) as server:
        upstream = open_node_pool(spec(f"http://127.0.0.1:{server.port}"))
        assert (await pool_client(upstream).get("/health")).text == "hello"
        upstream.close()
        await server.until(lambda: server.open == 0)


# TLS.


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca(authority: trustme.CA, tmp_path: Path) -> Path:
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return path


@pytest.fixture
def server_side(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("node.test", "127.0.0.1").configure_cert(context)
    return context


@pytest.fixture
def pools() -> Iterator[list[ConnectionPool]]:
    """Pools of a test, closed at its end."""
    made: list[ConnectionPool] = []
    yield made
    for upstream in made:
        upstream.close()


async def test_a_certificate_of_a_configured_authority_is_accepted(
    ca: Path, server_side: ssl.SSLContext, pools: list[ConnectionPool]
) -> None:
    async with raw_server(always(OK), server_side) as server:
        upstream = open_node_pool(spec(f"https://127.0.0.1:{server.port}", tls={"ca": str(ca)}))
        pools.append(upstream)
        for _ in range(3):
            assert (await pool_client(upstream).get("/health")).text == "hello"
        assert server.opened == 1


async def test_a_large_body_passes_tls_in_both_directions(
    ca: Path, server_side: ssl.SSLContext, pools: list[ConnectionPool]
) -> None:
    body = bytes(range(256)) * 20_000

    async def echo(peer: Peer) -> None:
        while True:
            _, _, got = (await peer.request()).partition(b"\r\n\r\n")
            await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(got) + got)

    async with raw_server(echo, server_side) as server:
        upstream = open_node_pool(spec(f"https://127.0.0.1:{server.port}", tls={"ca": str(ca)}))
        pools.append(upstream)
        for _ in range(2):
            assert (await pool_client(upstream).post("/x", content=body)).content == body
        assert server.opened == 1


async def test_the_name_to_verify_may_differ_from_the_urls(
    ca: Path, server_side: ssl.SSLContext, pools: list[ConnectionPool]
) -> None:
    async with raw_server(always(OK), server_side) as server:
        tls = {"ca": str(ca), "server_name": "node.test"}
        upstream = open_node_pool(spec(f"https://127.0.0.1:{server.port}", tls=tls))
        pools.append(upstream)
        assert (await pool_client(upstream).get("/health")).text == "hello"


async def test_a_certificate_of_another_name_is_rejected(
    ca: Path, server_side: ssl.SSLContext, pools: list[ConnectionPool]
) -> None:
    async with raw_server(always(OK), server_side) as server:
        tls = {"ca": str(ca), "server_name": "other.test"}
        upstream = open_node_pool(spec(f"https://127.0.0.1:{server.port}", tls=tls))
        pools.append(upstream)
        with pytest.raises(ConnectFailed, match="certificate"):
            await upstream.connect(LIMIT)


async def test_a_certificate_of_an_unknown_authority_is_rejected(
    server_side: ssl.SSLContext, pools: list[ConnectionPool]
) -> None:
    async with raw_server(always(OK), server_side) as server:
        upstream = open_node_pool(spec(f"https://127.0.0.1:{server.port}"))
        pools.append(upstream)
        with pytest.raises(ConnectFailed, match="certificate"):
            await upstream.connect(LIMIT)
        with pytest.raises(httpx.ConnectError):
            await pool_client(upstream).get("/health")
        await server.until(lambda: server.open == 0)


async def test_verification_can_be_switched_off(
    server_side: ssl.SSLContext, pools: list[ConnectionPool]
) -> None:
    async with raw_server(always(OK), server_side) as server:
        upstream = open_node_pool(spec(f"https://127.0.0.1:{server.port}", tls={"verify": False}))
        pools.append(upstream)
        assert (await pool_client(upstream).get("/health")).text == "hello"


async def test_a_client_certificate_is_sent_to_a_node_that_asks_for_it(
    ca: Path,
    authority: trustme.CA,
    server_side: ssl.SSLContext,
    pools: list[ConnectionPool],
    tmp_path: Path,
) -> None:
    own = authority.issue_cert("gateway.test")
    own.cert_chain_pems[0].write_to_path(tmp_path / "own.pem")
    own.private_key_pem.write_to_path(tmp_path / "own.key")
    server_side.verify_mode = ssl.CERT_REQUIRED
    authority.configure_trust(server_side)
    async with raw_server(always(OK), server_side) as server:
        tls = {"ca": str(ca), "cert": str(tmp_path / "own.pem"), "key": str(tmp_path / "own.key")}
        upstream = open_node_pool(spec(f"https://127.0.0.1:{server.port}", tls=tls))
        pools.append(upstream)
        assert (await pool_client(upstream).get("/health")).text == "hello"


async def test_a_plain_server_behind_an_https_url_is_reported(
    pools: list[ConnectionPool],
) -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.readexactly(8)
        await peer.say(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    async with raw_server(script) as server:
        upstream = open_node_pool(spec(f"https://127.0.0.1:{server.port}", tls={"verify": False}))
        pools.append(upstream)
        with pytest.raises(ConnectFailed):
            await upstream.connect(LIMIT)


async def test_a_handshake_that_takes_too_long_is_reported_and_given_up(
    pools: list[ConnectionPool],
) -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.read()

    async with raw_server(script) as server:
        upstream = open_node_pool(spec(f"https://127.0.0.1:{server.port}", tls={"verify": False}))
        pools.append(upstream)
        with pytest.raises(ConnectTimedOut):
            await upstream.connect(0.1)
        await server.until(lambda: server.opened == 1 and server.open == 0)
