"""Plays that would fail are refused before any change, with the host, variable and remedy."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.conftest import DeployedFleet
from tests.deploy.control import ControlMachine, PlaybookResult
from tests.deploy.hosts import NETWORK

pytestmark = [pytest.mark.net, pytest.mark.timeout(3000)]


SIGNATURE = "marked-a5%2F"


def refused(control: ControlMachine, *arguments: str, **extra: Any) -> PlaybookResult:
    result = control.play("site.yml", *arguments, good=False, **extra)
    assert result.changed == {}
    assert "Traceback" not in result.output
    assert "Remedy: " in result.text
    return result


@contextlib.contextmanager
def replaced(control: ControlMachine, group: str, names: list[str]) -> Iterator[None]:
    before = control.groups[group]
    control.groups[group] = names
    try:
        yield
    finally:
        control.groups[group] = before


@dataclass(slots=True)
class Mirror:
    """A web server on this machine: its folder, and the requests that it got."""

    folder: Path
    url: str = ""
    sends_parts: bool = True
    fetched: list[tuple[str, str]] = field(default_factory=list)  # path and range of each GET


class _Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *arguments: Any, mirror: Mirror) -> None:
        self.mirror = mirror
        super().__init__(*arguments, directory=str(mirror.folder))

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        self.mirror.fetched.append((self.path, wanted))
        file = self.mirror.folder / self.path[1:].partition("?")[0]
        if not (wanted and self.mirror.sends_parts and file.is_file()):
            with contextlib.suppress(ConnectionError):  # a client that requested a part leaves
                super().do_GET()
            return
        body = file.read_bytes()
        start = int(wanted.removeprefix("bytes=").partition("-")[0])
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start:])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def mirror(fleet: DeployedFleet, tmp_path: Path) -> Iterator[Mirror]:
    mirror = Mirror(tmp_path)
    handler = partial(_Handler, mirror=mirror)
    with http.server.ThreadingHTTPServer((f"{NETWORK}.1", 0), handler) as server:
        mirror.url = f"http://{NETWORK}.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield mirror
        server.shutdown()
        thread.join(10)


def test_a_model_with_another_checksum(fleet: DeployedFleet) -> None:
    output = refused(fleet.control, llama_node_model_sha256="0" * 64).text
    assert "n1: " in output
    assert "not the one in llama_node_model_sha256" in output


def test_too_little_memory(fleet: DeployedFleet) -> None:
    output = refused(fleet.control, llama_node_memory_reserve=1 << 50).text
    assert "n1: not enough memory: the model is 4 MiB, so 1 server needs" in output


def test_a_port_in_use(fleet: DeployedFleet) -> None:
    host = fleet.hosts["n1"]
    host.run("systemd-run --unit=squatter python3 -m http.server 9099")
    try:
        output = refused(fleet.control, llama_node_port=9099).text
    finally:
        host.run("systemctl stop squatter")
    assert "n1: port 9099 (llama_node_port) is in use by python3" in output


def test_an_unreachable_host(fleet: DeployedFleet) -> None:
    fleet.control.addresses["n9"] = f"{NETWORK}.99"
    with replaced(fleet.control, "llama_nodes", ["n1", "n9"]):
        output = refused(fleet.control).text
    assert f"n9: can't be reached as {NETWORK}.99" in output


@pytest.mark.parametrize("group", ["llama_nodes", "gateway"])
def test_an_inventory_without(fleet: DeployedFleet, group: str) -> None:
    with replaced(fleet.control, group, []):
        output = refused(fleet.control).text
    assert f"has no host in group {group}" in output


@pytest.mark.parametrize(
    ("name", "path", "variable"),
    [
        ("gw", "/etc/llama-gateway/nodes.yaml", "gateway_overwrite"),
        ("gw", "/etc/llama-gateway/gateway.yaml", "gateway_overwrite"),
        ("gw", "/etc/nginx/conf.d/llama-gateway.conf", "edge_overwrite"),
        ("n1", "/etc/systemd/system/llama-server-numa0.service", "llama_node_overwrite"),
    ],
)
def test_a_file_that_was_edited_by_hand(
    fleet: DeployedFleet, name: str, path: str, variable: str
) -> None:
    host = fleet.hosts[name]
    host.run(f"cp -p {path} /var/tmp/kept && echo '# by hand' >> {path}")
    try:
        output = refused(fleet.control, "--tags", "preflight").text
    finally:
        host.run(f"mv /var/tmp/kept {path}")
    assert f"{name}: {path} was edited by hand since the last run" in output
    assert f"-e {variable}=true" in output


def test_a_listener_or_an_edge_without_keys(fleet: DeployedFleet) -> None:
    output = refused(fleet.control, gateway_settings={}, gateway_host="0.0.0.0").text
    assert (
        "gw: the gateway would listen on 0.0.0.0 (gateway_host) and ask nobody for a key" in output
    )
    output = refused(fleet.control, gateway_settings={"keys": []}).text
    assert "gw: what stands in front of it on gw would open the gateway to everybody" in output
    fleet.control.play(*("site.yml", "--tags", "preflight"), gateway_host="0.0.0.0")


def test_an_interrupted_run_continues_where_it_stopped(
    fleet: DeployedFleet, mirror: Mirror
) -> None:
    """A download with a wrong checksum, then an interrupted one that is resumed."""
    model = Path(fleet.control.variables["llama_node_model_file"]).read_bytes()
    (mirror.folder / "other.gguf").write_bytes(model)
    wanted: dict[str, Any] = {
        "llama_node_model_file": "",
        "llama_node_model_mirrors": [f"{mirror.url}/none.gguf"],
        "llama_node_model_url": f"{mirror.url}/other.gguf?signed={SIGNATURE}",
        "llama_node_model_name": "demo",
    }
    with replaced(fleet.control, "llama_nodes", ["n1"]):
        output = fleet.control.play(
            "site.yml", "-vvv", good=False, **wanted, llama_node_model_sha256="1" * 64
        ).text
        assert "it was taken away. Remedy: mend llama_node_model_sha256" in output
        # Ansible itself prints the variables of its command line.
        assert f"signed={SIGNATURE}" not in output.replace(json.dumps(wanted)[1:-1], "")
        assert fleet.chat()["model"] == "demo"  # the running server still runs
        digest = hashlib.sha256(model).hexdigest()
        partial_name = f"/var/lib/llama-node/models/{digest[:12]}-other.gguf.partial"
        n1 = fleet.hosts["n1"]
        n1.run(f"head -c 1000000 /var/lib/llama-node/models/*-demo.gguf > {partial_name}")
        mirror.fetched.clear()
        fleet.control.play("site.yml", **wanted, llama_node_model_sha256=digest)
        part = "bytes=1000000-"
        signed = f"/other.gguf?signed={SIGNATURE}"
        assert mirror.fetched == [("/none.gguf", part), (signed, part)]
        assert "other.gguf" in n1.run("systemctl cat llama-server-numa0").stdout
        assert n1.run("ls /var/lib/llama-node/models").stdout.split() == [
            f"{digest[:12]}-other.gguf",
            f"{digest[:12]}-other.gguf.verified",
        ]
        # A web server that sends no parts sends the whole file.
        (mirror.folder / "third.gguf").write_bytes(model)
        wanted["llama_node_model_url"] = f"{mirror.url}/third.gguf"
        n1.run(f"head -c 1000 {partial_name[:-8]} > {partial_name.replace('other', 'third')}")
        mirror.sends_parts = False
        fleet.control.play(
            *("site.yml", "--limit", "n1", "--tags", "install"),
            **wanted,
            llama_node_model_sha256=digest,
        )
        assert n1.run(f"sha256sum {partial_name[:-8].replace('other', 'third')}").stdout.startswith(
            digest
        )
    fleet.control.play("site.yml")
