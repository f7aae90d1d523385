"""The proxies that the roles configure, in a real HAProxy and a real nginx on this machine."""

from __future__ import annotations

import contextlib
import functools
import http.client
import http.server
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.control import PLAYBOOKS, play_here, wait_for
from tests.processes import free_port, ran

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]

LIMIT = 60.0
CERTIFICATES = PLAYBOOKS.parent / "cluster/certificates.sh"
RENDER = """
- hosts: "{{ host }}"
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.include_vars: {file: "{{ role }}/defaults/main.yml"}
    - ansible.builtin.include_vars: {file: "{{ role }}/vars/main.yml"}
    - ansible.builtin.set_fact: {"{{ item.key }}": "{{ item.value }}"}
      loop: "{{ settings | dict2items }}"
    - ansible.builtin.template: {src: "{{ role }}/templates/{{ item }}.j2", dest: "{{ folder }}/{{ item }}", mode: "0644"}
      loop: "{{ templates }}"
"""  # noqa: E501
# Tests send their client address in a header; nginx reads it before it applies the site's limits.
NGINX = """
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
class Gateway:
    """Replaces a gateway: `/held` is answered in two pieces, the second when it may go on."""

    name: str
    ready: bool = True
    lives: bool = True
    seen: list[dict[str, str]] = field(default_factory=list)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    go_on: threading.Event = field(default_factory=threading.Event)
    cut: bool = False
    """Requests are cut off without an answer."""
    reads_bodies: bool = True
    """Otherwise it answers 401 before a body has come, as for a wrong key."""
    port: int = 0

    def be_well(self) -> None:
        self.seen.clear()
        self.go_on.clear()
        self.ready, self.lives, self.cut = True, True, False


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    gateway: Gateway

    def do_GET(self) -> None:
        gateway = self.gateway
        if self.path in ("/ready", "/health"):
            good = gateway.ready if self.path == "/ready" else gateway.lives
            self.answer(200 if good else 503)
            return
        self.note()
        if self.path != "/held":
            self.answer(200, gateway.name.encode())
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"5\r\nfirst\r\n")
        gateway.begun.release()
        gateway.go_on.wait(LIMIT)
        if gateway.cut:
            self.close_connection = True
        else:
            self.wfile.write(b"4\r\nlast\r\n0\r\n\r\n")

    def do_POST(self) -> None:
        self.note()
        if not self.gateway.reads_bodies:
            self.close_connection = True
            self.answer(401)
            return
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.gateway.cut:
            self.close_connection = True
        else:
            self.answer(200, self.gateway.name.encode())

    def note(self) -> None:
        """Keep the head of the request."""
        self.gateway.seen.append({name.lower(): value for name, value in self.headers.items()})

    def answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving(gateway: Gateway) -> Iterator[None]:
    """Serve as this gateway, on a free port."""
    handler = type("Handler", (_Handler,), {"gateway": gateway})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        gateway.port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            gateway.go_on.set()
            server.shutdown()


@dataclass(slots=True)
class Proxy:
    """A running proxy, and the gateways behind it."""

    url: str
    metrics: str  # HAProxy's own
    gateways: dict[str, Gateway]

    def client(self, address: str = "127.0.0.1") -> httpx.Client:
        """A client of this address; HAProxy must see it, and nginx believes the header."""
        local = address if address.startswith("127.") else None
        transport = httpx.HTTPTransport(local_address=local, verify=False)
        headers = {"X-Test-Address": address}
        return httpx.Client(base_url=self.url, transport=transport, headers=headers, timeout=LIMIT)

    def get(self, path: str = "/", address: str = "127.0.0.1", **headers: str) -> httpx.Response:
        """Send a request from this client address, by a connection of its own."""
        with self.client(address) as client:
            return client.get(path, headers=headers)

    def until(self, **up: bool) -> None:
        """Wait until HAProxy takes these gateways for ready, or not."""
        wait_for(lambda: self.states() == up, LIMIT)

    def states(self) -> dict[str, bool]:
        pattern = (
            r'haproxy_server_status\{proxy="llama_gateway_ready",server="(\w+)",state="UP"\} (\d)'
        )
        text = httpx.get(f"{self.metrics}/metrics", timeout=LIMIT).text
        return {name: up == "1" for name, up in re.findall(pattern, text)}

    def begun(self) -> Gateway:
        """Wait until an answer to `/held` has begun; the gateway that gives it."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            for gateway in self.gateways.values():
                if gateway.begun.acquire(timeout=0.05):
                    return gateway
        raise AssertionError("no stream has begun")

    @contextlib.contextmanager
    def held(self, *addresses: str) -> Iterator[None]:
        """Hold a response open for each address."""
        with ThreadPoolExecutor(len(addresses)) as pool:
            waiting = [pool.submit(self.get, "/held", address) for address in addresses]
            try:
                for _ in addresses:
                    self.begun()
                yield
            finally:
                for gateway in self.gateways.values():
                    gateway.go_on.set()
            assert {one.result().text for one in waiting} == {"firstlast"}


@contextlib.contextmanager
def running(role: str, folder: Path, **variables: Any) -> Iterator[Proxy]:
    """Run the program of a role with a configuration by these of its variables."""
    port, metrics = free_port(), free_port()
    if role == "balancer":
        gateways = {name: Gateway(name) for name in ("a", "b")}
        command = [program("haproxy", "haproxy"), "-db", "-f", str(folder / "haproxy.cfg")]
        check = ["-c"]
        variables |= {"metrics_port": metrics, "connections": 500}
    else:
        gateways = {"gw": Gateway("gw", reads_bodies=False)}
        (folder / "nginx.conf").write_text(NGINX.format(folder=folder))
        nginx = program("nginx", "nginx-light")
        command = [nginx, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
        check = ["-t", "-q"]
    with contextlib.ExitStack() as stack:
        for gateway in gateways.values():
            stack.enter_context(serving(gateway))
        ports = {name: one.port for name, one in gateways.items()}
        render(role, folder, ports, {"port": port, "http_port": 0, "party_rate": 0, **variables})
        assert "WARNING" not in ran(*command, *check).stderr
        process = subprocess.Popen(command, stderr=stack.enter_context((folder / "log").open("wb")))
        stack.callback(process.wait, LIMIT)
        stack.callback(process.terminate)
        wait_for(lambda: listens(port))
        proxy = Proxy(f"https://127.0.0.1:{port}", f"http://127.0.0.1:{metrics}", gateways)
        if role == "balancer":
            proxy.until(a=True, b=True)
        yield proxy


def render(role: str, folder: Path, ports: dict[str, int], settings: dict[str, Any]) -> None:
    """Write a role's files into a folder, as for the first host of the group of its name."""
    tls = folder / "tls"
    ran(CERTIFICATES, tls, "lb")
    (folder / "balancer.pem").write_text(
        "".join((tls / name).read_text() for name in ("lb.pem", "lb.key"))
    )
    for name, copied in (("lb.pem", "certificate.pem"), ("lb.key", "key.pem")):
        shutil.copy(tls / name, tls / copied)
    limits = {"limits": {"body_bytes": "3 kB"}, "batches": {"file_bytes": "2.0 kB"}}
    groups: dict[str, Any] = {
        "balancer": {
            "lb-a": {"balancer_reached": "10.0.0.21"},
            "lb-b": {"balancer_reached": "10.0.0.22"},
        },
        "edge": {"front": {"ansible_host": "127.0.0.1"}},
        "gateway": {
            name: {
                "gateway_address": "127.0.0.1",
                "gateway_port": port,
                "gateway_settings": limits,
            }
            for name, port in ports.items()
        },
    }
    inventory: dict[str, Any] = {group: {"hosts": hosts} for group, hosts in groups.items()}
    (folder / "hosts.json").write_text(json.dumps(inventory))
    of_role = {
        "balancer": {
            "interface": "eth0", "address": "10.0.0.100", "pem": str(folder / "balancer.pem"),
        },
        "edge": {"tls": str(tls)},
    }  # fmt: skip
    templates = {
        "balancer": ["haproxy.cfg", "keepalived.conf"], "edge": ["llama-gateway.conf"],
    }  # fmt: skip
    made = {
        "host": next(iter(groups[role])),
        "role": str(PLAYBOOKS / "roles" / role),
        "folder": str(folder),
        "templates": templates[role],
        "settings": {
            f"{role}_{name}": value for name, value in {**of_role[role], **settings}.items()
        },
    }
    play_here(folder, RENDER, made, folder / "hosts.json")


def program(name: str, package: str) -> str:
    """The path of a program of this machine."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if not found:
        pytest.skip(f"no {name}. Remedy: apt-get install {package}")
    return found


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=LIMIT).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture(scope="module")
def running_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Proxy]]:
    """Start a role's proxy once: two concurrent requests for each client network."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(role: str) -> Proxy:
            made = running(role, tmp_path_factory.mktemp(role), party_requests=2)
            return stack.enter_context(made)

        yield start


@pytest.fixture
def proxy(running_once: Callable[[str], Proxy], request: pytest.FixtureRequest) -> Iterator[Proxy]:
    """The same, with gateways that are well."""
    made = running_once(request.param)
    for gateway in made.gateways.values():
        gateway.be_well()
    if request.param == "balancer":
        made.until(a=True, b=True)
    yield made
    for gateway in made.gateways.values():
        gateway.go_on.set()


def of(*roles: str) -> pytest.MarkDecorator:
    """Run a test with the proxies of these roles."""
    return pytest.mark.parametrize("proxy", roles, indirect=True)


THREE = ["127.0.0.7"] * 3


@pytest.mark.parametrize(
    ("proxy", "ours", "others"),
    [
        ("balancer", THREE, "127.0.0.8"),
        ("edge", THREE, "127.0.0.8"),
        *(
            ("edge", [f"2001:db8:{one}" for one in ours], f"2001:db8:{others}")
            for ours, others in (
                (("0:1::1", "0:1:ffff::2", "0:1::a"), "0:2::1"),
                # With bytes that look like line ends.
                (("a0a:a0a::1", "a0a:a0a:a0a::", "a0a:a0a::a"), ":"),
            )
        ),
    ],
    indirect=["proxy"],
)
def test_concurrent_requests_of_a_client_network_are_limited_and_others_are_served(
    proxy: Proxy, ours: list[str], others: str
) -> None:
    *first, third = ours
    with proxy.held(*first):
        refused = proxy.get(address=third)
        assert refused.status_code == 429
        # Each of the APIs' clients can read it.
        body = refused.json()
        assert (body["type"], body["error"]["type"]) == ("error", "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["content-type"] == "application/json"
        assert proxy.get(address=others).status_code == 200
    assert proxy.get(address=third).status_code == 200


@of("balancer", "edge")
def test_address_headers_of_a_client_are_replaced(proxy: Proxy) -> None:
    claims = dict.fromkeys(("X-Forwarded-For", "X-Real-IP"), "192.0.2.1")
    served = proxy.get(
        "/", "127.0.0.5", Forwarded="for=192.0.2.1", Host="llm.example.org", **claims
    )
    (seen,) = proxy.gateways[served.text].seen
    assert seen["x-forwarded-for"] == "127.0.0.5"
    assert seen["x-forwarded-proto"] == "https"
    assert seen["host"] == "llm.example.org"
    assert not {"x-real-ip", "forwarded"} & set(seen)


# HAProxy.


@of("balancer")
def test_a_member_that_is_not_ready_gets_no_requests_and_ends_its_streams(proxy: Proxy) -> None:
    with proxy.client() as client, client.stream("GET", "/held") as answer:
        pieces = answer.iter_bytes()
        assert next(pieces) == b"first"
        draining = proxy.begun()
        draining.ready = False
        (other,) = set(proxy.gateways) - {draining.name}
        proxy.until(**{draining.name: False, other: True})
        assert {proxy.get().text for _ in range(10)} == {other}
        draining.go_on.set()
        assert b"".join(pieces) == b"last"


@of("balancer")
def test_a_stream_whose_member_ends_breaks_off_visibly(proxy: Proxy) -> None:
    with proxy.client() as client, client.stream("GET", "/held") as answer:
        pieces = answer.iter_bytes()
        assert next(pieces) == b"first"
        member = proxy.begun()
        member.cut = True
        member.go_on.set()
        with pytest.raises(httpx.RemoteProtocolError):
            next(pieces)


@of("balancer")
def test_a_completion_without_a_byte_of_an_answer_is_sent_to_another_member(proxy: Proxy) -> None:
    proxy.gateways["a"].cut = True
    with proxy.client() as client:
        answers = [client.post("/v1/chat/completions", json={"messages": []}) for _ in range(4)]
    assert [answer.text for answer in answers] == ["b"] * 4
    assert proxy.gateways["a"].seen


@of("balancer")
def test_what_may_change_something_is_not_sent_twice(proxy: Proxy) -> None:
    for member in proxy.gateways.values():
        member.cut = True
    with proxy.client() as client:
        answer = client.post("/v1/batches", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "gateway_down")
    assert answer.headers["retry-after"] == "1"
    assert sum(len(member.seen) for member in proxy.gateways.values()) == 1


def is_away(answer: httpx.Response) -> bool:
    told = answer.headers.get("retry-after"), answer.json()["error"]["code"]
    return (answer.status_code, *told) == (503, "5", "gateway_down")


@of("balancer")
def test_without_a_member_it_answers_503(proxy: Proxy) -> None:
    for member in proxy.gateways.values():
        member.ready = member.lives = False
    proxy.until(a=False, b=False)
    wait_for(lambda: proxy.get().status_code == 503, LIMIT)
    assert is_away(proxy.get())
    for member in proxy.gateways.values():
        member.ready = member.lives = True
    wait_for(lambda: proxy.get().status_code == 200, LIMIT)


def test_the_request_rate_of_a_client_network_is_limited(tmp_path: Path) -> None:
    with running("balancer", tmp_path, party_rate=1, party_requests=0) as proxy:
        with proxy.client("127.0.0.2") as client:
            seen = [client.get("/").status_code for _ in range(30)]
        assert seen[:10] == [200] * 10
        assert 429 in seen
        assert proxy.get(address="127.0.0.3").status_code == 200


def test_keepalived_accepts_its_configuration(tmp_path: Path) -> None:
    keepalived = program("keepalived", "keepalived")
    render("balancer", tmp_path, {"a": 8000, "b": 8000}, {})
    ran(keepalived, "-t", "-f", tmp_path / "keepalived.conf")
    text = (tmp_path / "keepalived.conf").read_text()
    own, others = r"unicast_src_ip (\S+)", r"(?m)^ +(10.0.0.22)$"
    assert (re.findall(own, text), re.findall(others, text)) == (["10.0.0.21"], ["10.0.0.22"])


# nginx.


@of("edge")
def test_the_largest_body_that_the_gateway_accepts_passes(proxy: Proxy) -> None:
    with proxy.client() as client:
        # The gateway's own answer.
        assert client.post("/", content=b"x" * BODY_BYTES).status_code == 401
        refused = client.post("/", content=b"x" * (BODY_BYTES + 1))
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")


@of("edge")
def test_the_gateway_answers_before_a_body_has_come(proxy: Proxy) -> None:
    """Bodies of callers without a key are not buffered."""
    url = httpx.URL(proxy.url)
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    client = http.client.HTTPSConnection(url.host, url.port, context=trusting, timeout=60)
    with contextlib.closing(client):
        client.putrequest("POST", "/v1/chat/completions")
        client.putheader("Content-Length", str(BODY_BYTES))
        client.endheaders(b"first")
        assert client.getresponse().status == 401


@of("edge")
def test_each_piece_of_a_response_is_passed_on_at_once(proxy: Proxy) -> None:
    with proxy.client() as client, client.stream("GET", "/held") as answer:
        pieces = answer.iter_bytes()
        assert next(pieces) == b"first"
        proxy.begun().go_on.set()
        assert b"".join(pieces) == b"last"


def test_a_second_gateway_gets_nothing_while_the_first_serves(tmp_path: Path) -> None:
    own = "127.0.0.1:{{ hostvars.gw.gateway_port }}"
    with socket.create_server(("127.0.0.1", 0)) as second:
        second.settimeout(0.2)
        standby = f"127.0.0.1:{second.getsockname()[1]}"
        with running("edge", tmp_path, gateways=[own, standby]) as proxy:
            assert [proxy.get().status_code for _ in range(20)] == [200] * 20
        with pytest.raises(TimeoutError):
            second.accept()


def test_without_a_gateway_the_edge_answers_503(tmp_path: Path) -> None:
    with running("edge", tmp_path, gateways=[f"127.0.0.1:{free_port()}"]) as proxy:
        assert is_away(proxy.get())
