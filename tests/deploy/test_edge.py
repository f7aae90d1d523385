"""The site of the role edge, in a real nginx on this machine."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.control import PLAYBOOKS, ansible_programs
from tests.processes import free_port

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]

ROLE = PLAYBOOKS / "roles/edge"
RENDER = """
- hosts: edge
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.include_vars: {file: "{{ role }}/defaults/main.yml"}
    - ansible.builtin.include_vars: {file: "{{ role }}/vars/main.yml"}
    - ansible.builtin.set_fact: {"{{ item.key }}": "{{ item.value }}"}
      loop: "{{ settings | dict2items }}"
    - ansible.builtin.template:
        src: "{{ role }}/templates/llama-gateway.conf.j2"
        dest: "{{ folder }}/site.conf"
        mode: "0644"
"""
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
    include {folder}/site.conf;
}}
"""
BODY_BYTES = 67_536
"""Those of an upload: a file of 2 kB, and 64 KiB of form around it."""


@dataclass(slots=True)
class Upstream:
    """Replaces the gateway: it records requests, and does not finish the response to /held."""

    port: int = 0
    seen: list[dict[str, str]] = field(default_factory=list)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    go_on: threading.Event = field(default_factory=threading.Event)


def upstream_handler(upstream: Upstream) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            upstream.seen.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(200)
            if self.path == "/held":
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"5\r\nfirst\r\n")
                upstream.begun.release()
                upstream.go_on.wait(60)
                self.wfile.write(b"4\r\nlast\r\n0\r\n\r\n")
                return
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def do_POST(self) -> None:
            """Answer before the body has come, as the gateway does for a wrong key."""
            upstream.seen.append({name.lower(): value for name, value in self.headers.items()})
            self.close_connection = True
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@dataclass(slots=True)
class Edge:
    """A running nginx with the site."""

    url: str
    upstream: Upstream

    def get(self, path: str = "/", address: str = "192.0.2.1", **headers: str) -> httpx.Response:
        """Send a request from this client address."""
        sent = {"X-Test-Address": address, **headers}
        return httpx.get(f"{self.url}{path}", headers=sent, verify=False, timeout=60)


@contextlib.contextmanager
def running(folder: Path, **variables: Any) -> Iterator[Edge]:
    """Render the site with these variables of the role, and run nginx."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if not nginx:
        pytest.skip("no nginx. Remedy: apt-get install nginx-light")
    upstream = Upstream()
    handler = upstream_handler(upstream)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        upstream.port = server.server_port
        port = free_port()
        render(folder, upstream.port, {"edge_port": port, "edge_http_port": 0, **variables})
        (folder / "nginx.conf").write_text(MAIN.format(folder=folder))
        command = [nginx, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
        checked = subprocess.run(
            [*command, "-t", "-q"], capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stderr
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            wait_for_port(port)
            yield Edge(f"https://127.0.0.1:{port}", upstream)
        finally:
            upstream.go_on.set()
            process.terminate()
            process.wait(60)
            server.shutdown()
            thread.join(60)


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
    inventory = {
        "all": {"vars": {"ansible_python_interpreter": "/usr/bin/python3"}},
        "edge": {"hosts": {"front": {"ansible_host": "127.0.0.1"}}},
        "gateway": {
            "hosts": {
                "gw": {
                    "gateway_address": "127.0.0.1",
                    "gateway_port": upstream,
                    "gateway_settings": {
                        "limits": {"body_bytes": "3 kB"},
                        "batches": {"file_bytes": "2.0 kB"},
                    },
                }
            }
        },
    }
    (folder / "hosts.json").write_text(json.dumps(inventory))
    (folder / "render.yml").write_text(RENDER)
    body = {
        "role": str(ROLE),
        "folder": str(folder),
        "settings": {"edge_tls": str(tls), **settings},
    }
    subprocess.run(
        [
            *(str(ansible_programs() / "ansible-playbook"), "-i", str(folder / "hosts.json")),
            *(str(folder / "render.yml"), "-e", json.dumps(body)),
        ],
        cwd=PLAYBOOKS,
        check=True,
        timeout=200,
    )


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=60).close()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "nginx does not listen"
            time.sleep(0.02)
        else:
            return


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """Two concurrent requests for each client network, and no limit of the rate."""
    folder = tmp_path_factory.mktemp("edge")
    with running(folder, edge_party_requests=2, edge_party_rate=0) as edge:
        yield edge


@contextlib.contextmanager
def held(edge: Edge, *addresses: str) -> Iterator[None]:
    """Hold a response open for each address."""
    edge.upstream.go_on.clear()
    with ThreadPoolExecutor(len(addresses)) as pool:
        waiting = [pool.submit(edge.get, "/held", address) for address in addresses]
        try:
            for _ in addresses:
                assert edge.upstream.begun.acquire(timeout=60)
            yield
        finally:
            edge.upstream.go_on.set()
        assert {one.result().text for one in waiting} == {"firstlast"}


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
    with held(edge, *first):
        refused = edge.get(address=third)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["content-type"] == "application/json"
        body = refused.json()
        assert (body["type"], body["error"]["type"]) == ("error", "rate_limit_error")
        assert edge.get(address=others).status_code == 200
    assert edge.get(address=third).status_code == 200


def test_the_request_rate_of_a_client_network_is_limited(tmp_path: Path) -> None:
    with running(tmp_path, edge_party_rate=1, edge_party_burst=3) as edge:
        with httpx.Client(verify=False, headers={"X-Test-Address": "192.0.2.1"}) as client:
            seen = [client.get(edge.url).status_code for _ in range(40)]
        assert seen[:4] == [200] * 4
        assert 429 in seen
        assert edge.get(address="192.0.2.2").status_code == 200


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


def test_a_second_gateway_serves_while_the_first_is_down(tmp_path: Path) -> None:
    down = f"127.0.0.1:{free_port()}"
    with running(tmp_path, edge_gateways=[down, OWN], edge_party_rate=0) as edge:
        assert [edge.get().status_code for _ in range(20)] == [200] * 20


def test_without_a_gateway_the_edge_answers_503(tmp_path: Path) -> None:
    with running(tmp_path, edge_gateways=[f"127.0.0.1:{free_port()}"]) as edge:
        away = edge.get()
    assert away.status_code == 503
    assert away.headers["retry-after"] == "5"
    assert away.json()["error"]["code"] == "gateway_down"
