"""The configuration of the role balancer, in a real HAProxy on this machine."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy import proxies
from tests.deploy.control import PLAYBOOKS, wait_for
from tests.deploy.proxies import Gateway
from tests.processes import free_port

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]

CERTIFICATES = PLAYBOOKS.parent / "cluster/certificates.sh"
LIMIT = 20.0


@dataclass(slots=True)
class Balancer:
    """A running HAProxy with two members behind it."""

    url: str
    metrics: str
    members: dict[str, Gateway]

    def get(self, path: str = "/", address: str = "127.0.0.1", **headers: str) -> httpx.Response:
        """Send a request from this client address, by a connection of its own."""
        with self.client(address) as client:
            return client.get(path, headers=headers)

    def client(self, address: str = "127.0.0.1") -> httpx.Client:
        transport = httpx.HTTPTransport(local_address=address, verify=False)
        return httpx.Client(base_url=self.url, transport=transport, timeout=LIMIT)

    def until(self, **up: bool) -> None:
        """Wait until HAProxy takes these members for ready, or not."""
        wait_for(lambda: self.states() == up, LIMIT)

    def states(self) -> dict[str, bool]:
        pattern = (
            r'haproxy_server_status\{proxy="llama_gateway_ready",server="(\w+)",state="UP"\} (\d)'
        )
        text = httpx.get(f"{self.metrics}/metrics", timeout=LIMIT).text
        return {name: up == "1" for name, up in re.findall(pattern, text)}


@contextlib.contextmanager
def running(folder: Path, **variables: Any) -> Iterator[Balancer]:
    """Render the configuration with these variables of the role, and run HAProxy."""
    haproxy = proxies.program("haproxy", "haproxy")
    members = {name: Gateway(name) for name in ("a", "b")}
    port, metrics = free_port(), free_port()
    settings = {
        "balancer_port": port,
        "balancer_http_port": 0,
        "balancer_metrics_port": metrics,
        "balancer_connections": 500,
        "balancer_party_rate": 0,
        "balancer_pem": str(folder / "balancer.pem"),
        **variables,
    }
    command = [haproxy, "-db", "-f", str(folder / "haproxy.cfg")]
    with contextlib.ExitStack() as stack:
        for member in members.values():
            stack.enter_context(proxies.serving(member))
        render(folder, [member.port for member in members.values()], settings)
        stack.enter_context(proxies.running(command, ["-c"], folder / "log", port))
        balancer = Balancer(f"https://127.0.0.1:{port}", f"http://127.0.0.1:{metrics}", members)
        balancer.until(a=True, b=True)
        yield balancer


def render(folder: Path, ports: list[int], settings: dict[str, Any]) -> None:
    subprocess.run([CERTIFICATES, str(folder / "tls"), "lb"], check=True, capture_output=True)
    pem = [(folder / "tls" / name).read_text() for name in ("lb.pem", "lb.key")]
    (folder / "balancer.pem").write_text("".join(pem))
    groups = {
        "balancer": {
            "lb-a": {"balancer_reached": "10.0.0.21"},
            "lb-b": {"balancer_reached": "10.0.0.22"},
        },
        "gateway": {
            name: {"gateway_address": "127.0.0.1", "gateway_port": port}
            for name, port in zip("ab", ports, strict=True)
        },
    }
    address = {"balancer_interface": "eth0", "balancer_address": "10.0.0.100"}
    templates = ["haproxy.cfg", "keepalived.conf"]
    proxies.render("balancer", templates, folder, groups, {**address, **settings})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balancer]:
    """Two concurrent requests for each client network."""
    with running(tmp_path_factory.mktemp("balancer"), balancer_party_requests=2) as balancer:
        yield balancer


@pytest.fixture
def balancer(made: Balancer) -> Iterator[Balancer]:
    """The same, with two members that are well."""
    for member in made.members.values():
        member.seen.clear()
        member.go_on.clear()
        member.ready, member.lives, member.cut = True, True, False
    made.until(a=True, b=True)
    yield made
    for member in made.members.values():
        member.go_on.set()


def test_a_member_that_is_not_ready_gets_no_requests_and_ends_its_streams(
    balancer: Balancer,
) -> None:
    with balancer.client() as client, client.stream("GET", "/held") as answer:
        pieces = answer.iter_bytes()
        assert next(pieces) == b"first"
        draining = proxies.begun(balancer.members.values())
        draining.ready = False
        (other,) = set(balancer.members) - {draining.name}
        balancer.until(**{draining.name: False, other: True})
        assert {balancer.get().text for _ in range(10)} == {other}
        draining.go_on.set()
        assert b"".join(pieces) == b"last"


def test_a_stream_whose_member_ends_breaks_off_visibly(balancer: Balancer) -> None:
    with balancer.client() as client, client.stream("GET", "/held") as answer:
        pieces = answer.iter_bytes()
        assert next(pieces) == b"first"
        member = proxies.begun(balancer.members.values())
        member.cut = True
        member.go_on.set()
        with pytest.raises(httpx.RemoteProtocolError):
            next(pieces)


def test_a_completion_without_a_byte_of_an_answer_is_sent_to_another_member(
    balancer: Balancer,
) -> None:
    balancer.members["a"].cut = True
    with balancer.client() as client:
        answers = [client.post("/v1/chat/completions", json={"messages": []}) for _ in range(4)]
    assert [answer.text for answer in answers] == ["b"] * 4
    assert balancer.members["a"].seen


def test_what_may_change_something_is_not_sent_twice(balancer: Balancer) -> None:
    for member in balancer.members.values():
        member.cut = True
    with balancer.client() as client:
        answer = client.post("/v1/batches", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "gateway_down")
    assert answer.headers["retry-after"] == "1"
    assert sum(len(member.seen) for member in balancer.members.values()) == 1


def test_without_a_member_it_answers_503(balancer: Balancer) -> None:
    for member in balancer.members.values():
        member.ready = member.lives = False
    balancer.until(a=False, b=False)
    wait_for(lambda: balancer.get().status_code == 503, LIMIT)
    away = balancer.get()
    assert away.headers["retry-after"] == "5"
    assert away.json()["error"]["code"] == "gateway_down"
    for member in balancer.members.values():
        member.ready = member.lives = True
    wait_for(lambda: balancer.get().status_code == 200, LIMIT)


def test_concurrent_requests_of_a_client_network_are_limited_and_others_are_served(
    balancer: Balancer,
) -> None:
    with proxies.held(balancer.get, balancer.members.values(), "127.0.0.7", "127.0.0.7"):
        assert proxies.is_rate_limit_error(balancer.get(address="127.0.0.7"))
        assert balancer.get(address="127.0.0.8").status_code == 200
    assert balancer.get(address="127.0.0.7").status_code == 200


def test_address_headers_of_a_client_are_replaced(balancer: Balancer) -> None:
    claims = dict.fromkeys(("X-Forwarded-For", "X-Real-IP"), "192.0.2.1")
    served = balancer.get(
        "/", "127.0.0.5", Forwarded="for=192.0.2.1", Host="llm.example.org", **claims
    )
    (seen,) = balancer.members[served.text].seen
    assert seen["x-forwarded-for"] == "127.0.0.5"
    assert seen["x-forwarded-proto"] == "https"
    assert seen["host"] == "llm.example.org"
    assert not {"x-real-ip", "forwarded"} & set(seen)


def test_the_request_rate_of_a_client_network_is_limited(tmp_path: Path) -> None:
    with running(tmp_path, balancer_party_rate=1, balancer_party_requests=0) as balancer:
        with balancer.client("127.0.0.2") as client:
            seen = [client.get("/").status_code for _ in range(30)]
        assert seen[:10] == [200] * 10
        assert 429 in seen
        assert balancer.get(address="127.0.0.3").status_code == 200


def test_keepalived_accepts_its_configuration(tmp_path: Path) -> None:
    keepalived = proxies.program("keepalived", "keepalived")
    render(tmp_path, [8000, 8000], {})
    done = subprocess.run(
        [keepalived, "-t", "-f", str(tmp_path / "keepalived.conf")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "keepalived.conf").read_text()
    own, others = r"unicast_src_ip (\S+)", r"(?m)^ +(10.0.0.22)$"
    assert (re.findall(own, text), re.findall(others, text)) == (["10.0.0.21"], ["10.0.0.22"])
