"""The site of the role edge, in a real nginx on this machine."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy import proxies
from tests.deploy.proxies import Gateway
from tests.processes import free_port

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]

# Tests send their client address in a header; nginx reads it before it applies the site's limits.
MAIN = """
daemon off;
worker_processes 1;
error_log stderr;
pid {folder}/pid;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/proxied;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    set_real_ip_from 127.0.0.1;
    real_ip_header X-Test-Address;
    include {folder}/llama-gateway.conf;
}}
"""
BODY_BYTES = 67_536
"""Those of an upload: a file of 2 kB, and 64 KiB of form around it."""


@dataclass(slots=True)
class Edge:
    """A running nginx with the site."""

    url: str
    upstream: Gateway

    def get(self, path: str = "/", address: str = "192.0.2.1", **headers: str) -> httpx.Response:
        """Send a request from this client address."""
        sent = {"X-Test-Address": address, **headers}
        return httpx.get(f"{self.url}{path}", headers=sent, verify=False, timeout=60)


@contextlib.contextmanager
def running(folder: Path, **variables: Any) -> Iterator[Edge]:
    """Render the site with these variables of the role, and run nginx."""
    nginx = proxies.program("nginx", "nginx-light")
    upstream, port = Gateway("gw", reads_bodies=False), free_port()
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder))
    command = [nginx, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(proxies.serving(upstream))
        render(folder, upstream.port, {"edge_port": port, "edge_http_port": 0, **variables})
        stack.enter_context(proxies.running(command, ["-t", "-q"], folder / "log", port))
        yield Edge(f"https://127.0.0.1:{port}", upstream)


def render(folder: Path, upstream: int, settings: dict[str, Any]) -> None:
    tls = folder / "tls"
    tls.mkdir()
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"),
            *("ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=edge"),
            *("-keyout", str(tls / "key.pem"), "-out", str(tls / "certificate.pem")),
        ],
        check=True,
        capture_output=True,
    )
    limits = {"limits": {"body_bytes": "3 kB"}, "batches": {"file_bytes": "2.0 kB"}}
    gateway = {
        "gateway_address": "127.0.0.1",
        "gateway_port": upstream,
        "gateway_settings": limits,
    }
    groups = {"edge": {"front": {"ansible_host": "127.0.0.1"}}, "gateway": {"gw": gateway}}
    templates = ["llama-gateway.conf"]
    proxies.render("edge", templates, folder, groups, {"edge_tls": str(tls), **settings})


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """Two concurrent requests for each client network, and no limit of the rate."""
    folder = tmp_path_factory.mktemp("edge")
    with running(folder, edge_party_requests=2, edge_party_rate=0) as edge:
        yield edge


@pytest.mark.parametrize(
    ("ours", "others"),
    [
        (["192.0.2.7"] * 3, "192.0.2.8"),
        (["2001:db8:0:1::1", "2001:db8:0:1:ffff::2", "2001:db8:0:1::a"], "2001:db8:0:2::1"),
        (["2001:db8:a0a:a0a::1", "2001:db8:a0a:a0a:a0a::", "2001:db8:a0a:a0a::a"], "2001:db8::"),
    ],
    ids=["IPv4", "IPv6", "IPv6 with bytes that look like line ends"],
)
def test_concurrent_requests_of_a_client_network_are_limited_and_others_are_served(
    edge: Edge, ours: list[str], others: str
) -> None:
    *first, third = ours
    with proxies.held(edge.get, [edge.upstream], *first):
        assert proxies.is_rate_limit_error(edge.get(address=third))
        assert edge.get(address=others).status_code == 200
    assert edge.get(address=third).status_code == 200


def test_the_largest_body_that_the_gateway_accepts_passes(edge: Edge) -> None:
    def status(size: int) -> httpx.Response:
        return httpx.post(edge.url, content=b"x" * size, verify=False, timeout=60)

    assert status(BODY_BYTES).status_code == 401  # the gateway's own answer
    refused = status(BODY_BYTES + 1)
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "request_too_large"


def test_the_gateway_answers_before_a_body_has_come(edge: Edge) -> None:
    """Bodies of callers without a key are not buffered."""
    url = httpx.URL(edge.url)
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    client = http.client.HTTPSConnection(url.host, url.port, context=trusting, timeout=60)
    with contextlib.closing(client):
        client.putrequest("POST", "/v1/chat/completions")
        client.putheader("Content-Length", str(BODY_BYTES))
        client.endheaders(b"first")
        assert client.getresponse().status == 401


def test_each_piece_of_a_response_is_passed_on_at_once(edge: Edge) -> None:
    edge.upstream.go_on.clear()
    with httpx.stream("GET", f"{edge.url}/held", verify=False, timeout=60) as answer:
        pieces = answer.iter_bytes()
        assert next(pieces) == b"first"
        edge.upstream.go_on.set()
        assert b"".join(pieces) == b"last"
    assert edge.upstream.begun.acquire(timeout=60)


def test_address_headers_of_a_client_are_replaced(edge: Edge) -> None:
    edge.upstream.seen.clear()
    claims = dict.fromkeys(("X-Forwarded-For", "X-Real-IP"), "127.0.0.1")
    edge.get(address="192.0.2.5", Forwarded="for=127.0.0.1", Host="llm.example.org", **claims)
    (seen,) = edge.upstream.seen
    assert seen["x-forwarded-for"] == "192.0.2.5"
    assert seen["host"] == "llm.example.org"
    assert not {"x-real-ip", "forwarded"} & set(seen)


OWN = "127.0.0.1:{{ hostvars.gw.gateway_port }}"


def test_a_second_gateway_gets_nothing_while_the_first_serves(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as second:
        second.settimeout(0.2)
        standby = f"127.0.0.1:{second.getsockname()[1]}"
        with running(tmp_path, edge_gateways=[OWN, standby], edge_party_rate=0) as edge:
            assert [edge.get().status_code for _ in range(20)] == [200] * 20
        with pytest.raises(TimeoutError):
            second.accept()


def test_without_a_gateway_the_edge_answers_503(tmp_path: Path) -> None:
    with running(tmp_path, edge_gateways=[f"127.0.0.1:{free_port()}"]) as edge:
        away = edge.get()
    assert away.status_code == 503
    assert away.headers["retry-after"] == "5"
    assert away.json()["error"]["code"] == "gateway_down"
