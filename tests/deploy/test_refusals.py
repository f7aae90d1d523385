"""What would not end well is refused before anything is changed, with host, variable, remedy."""

from __future__ import annotations

import hashlib
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.conftest import Fleet
from tests.deploy.control import Control, Played
from tests.deploy.hosts import NETWORK

pytestmark = [pytest.mark.net, pytest.mark.timeout(1000)]


def refused(control: Control, *arguments: str, **extra: Any) -> Played:
    played = control.play("site.yml", *arguments, good=False, **extra)
    assert played.changed == {}
    assert "Traceback" not in played.output
    assert "Remedy: " in played.text
    return played


@contextmanager
def replaced(control: Control, group: str, names: list[str]) -> Iterator[None]:
    before = control.groups[group]
    control.groups[group] = names
    try:
        yield
    finally:
        control.groups[group] = before


class _Server(http.server.SimpleHTTPRequestHandler):
    def do_HEAD(self) -> None:
        if self.path != "/huge.gguf":
            super().do_HEAD()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(900 << 30))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def mirror(fleet: Fleet, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server on this machine, and the folder it serves."""
    handler = partial(_Server, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer((f"{NETWORK}.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://{NETWORK}.1:{server.server_port}", tmp_path
        server.shutdown()
        thread.join(10)


def test_a_model_with_another_checksum(fleet: Fleet) -> None:
    told = refused(fleet.control, llama_node_model_sha256="0" * 64).text
    assert "n1: " in told
    assert "not the one in llama_node_model_sha256" in told


def test_too_little_memory_and_disk(fleet: Fleet, mirror: tuple[str, Path]) -> None:
    told = refused(
        fleet.control,
        llama_node_model_file="",
        llama_node_model_url=f"{mirror[0]}/huge.gguf",
        llama_node_model_sha256="0" * 64,
    ).text
    assert (
        "n1: not enough disk space: the model in /var/lib/llama-node/models needs 900.0 GiB" in told
    )
    told = refused(fleet.control, llama_node_memory_reserve=1 << 50).text
    assert "n1: not enough memory: the model is 4 MiB, so 1 server needs" in told


def test_a_url_that_has_no_model(fleet: Fleet, mirror: tuple[str, Path]) -> None:
    told = refused(
        fleet.control,
        llama_node_model_file="",
        llama_node_model_url=f"{mirror[0]}/none.gguf",
        llama_node_model_sha256="0" * 64,
    ).text
    assert "status 404" in told
    assert "llama_node_model_mirrors" in told


def test_no_such_numa_node(fleet: Fleet) -> None:
    told = refused(fleet.control, llama_node_numa_nodes=[7]).text
    assert "n1: no NUMA node 7 (llama_node_numa_nodes)" in told


def test_a_port_in_use(fleet: Fleet) -> None:
    host = fleet.hosts["n1"]
    host.run("systemd-run --unit=squatter python3 -m http.server 9099")
    try:
        told = refused(fleet.control, llama_node_port=9099).text
    finally:
        host.run("systemctl stop squatter")
    assert "n1: port 9099 (llama_node_port) is in use by python3" in told


def test_a_full_disk(fleet: Fleet) -> None:
    host = fleet.hosts["n3"]
    host.run("rm -rf /var/lib/llama-node; mkdir /var/lib/llama-node")
    host.run("mount -t tmpfs -o size=2M tmpfs /var/lib/llama-node")
    try:
        with replaced(fleet.control, "llama_nodes", ["n1", "n3"]):
            told = refused(fleet.control).text
    finally:
        host.run("umount /var/lib/llama-node")
    assert "n3: not enough disk space: the model" in told
    assert "llama_node_models_folder" in told


def test_an_unreachable_host(fleet: Fleet) -> None:
    fleet.control.addresses["n9"] = f"{NETWORK}.99"
    with replaced(fleet.control, "llama_nodes", ["n1", "n9"]):
        told = refused(fleet.control).text
    assert f"n9: can't be reached as {NETWORK}.99" in told


@pytest.mark.parametrize("group", ["llama_nodes", "gateway"])
def test_an_inventory_without(fleet: Fleet, group: str) -> None:
    with replaced(fleet.control, group, []):
        told = refused(fleet.control).text
    assert f"has no host in group {group}" in told


@pytest.mark.parametrize(
    ("name", "path", "variable"),
    [
        ("gw", "/etc/llama-gateway/nodes.yaml", "gateway_overwrite"),
        ("gw", "/etc/llama-gateway/gateway.yaml", "gateway_overwrite"),
        ("gw", "/etc/nginx/conf.d/llama-gateway.conf", "edge_overwrite"),
        ("n1", "/etc/systemd/system/llama-server-numa0.service", "llama_node_overwrite"),
    ],
)
def test_a_file_that_was_edited_by_hand(fleet: Fleet, name: str, path: str, variable: str) -> None:
    host = fleet.hosts[name]
    host.run(f"cp -p {path} /var/tmp/kept && echo '# by hand' >> {path}")
    try:
        told = refused(fleet.control, "--tags", "preflight").text
    finally:
        host.run(f"mv /var/tmp/kept {path}")
    assert f"{name}: {path} was edited by hand since the last run" in told
    assert f"-e {variable}=true" in told


def test_a_public_listener_without_keys(fleet: Fleet) -> None:
    told = refused(fleet.control, gateway_host="0.0.0.0").text
    assert "gw: the gateway would listen on 0.0.0.0 (gateway_host) and ask nobody for a key" in told


def test_a_half_done_run_goes_on_where_it_stopped(fleet: Fleet, mirror: tuple[str, Path]) -> None:
    """A download that turns out wrong, then one that broke off half-way and is resumed."""
    url, folder = mirror
    model = Path(fleet.control.variables["llama_node_model_file"]).read_bytes()
    (folder / "other.gguf").write_bytes(model)
    wanted: dict[str, Any] = {
        "llama_node_model_file": "",
        "llama_node_model_url": f"{url}/other.gguf",
        "llama_node_model_name": "demo",
    }
    with replaced(fleet.control, "llama_nodes", ["n1"]):
        told = fleet.control.play(
            "site.yml", good=False, **wanted, llama_node_model_sha256="1" * 64
        ).text
        assert "it was taken away. Remedy: mend llama_node_model_sha256" in told
        assert fleet.chat()["model"] == "demo"  # what ran still runs
        digest = hashlib.sha256(model).hexdigest()
        partial_name = f"/var/lib/llama-node/models/{digest[:12]}-other.gguf.partial"
        n1 = fleet.hosts["n1"]
        n1.run(f"head -c 1000000 /var/lib/llama-node/models/*-demo.gguf > {partial_name}")
        fleet.control.play("site.yml", **wanted, llama_node_model_sha256=digest)
        assert "other.gguf" in n1.run("systemctl cat llama-server-numa0").stdout
        assert n1.run("ls /var/lib/llama-node/models").stdout.split() == [
            f"{digest[:12]}-other.gguf",
            f"{digest[:12]}-other.gguf.verified",
        ]
    fleet.control.play("site.yml")
