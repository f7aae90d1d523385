"""llama.cpp from binaries, source and a package, whose real server becomes a router of models."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from setup.llama_server import PROGRAM, cache_folder
from tests.deploy.conftest import DeployedFleet, chat
from tests.deploy.control import PlaybookResult
from tests.deploy.release_files import (
    ReleaseFiles,
    release_archive,
    source_archive,
)
from tests.deploy.release_files import (
    real_package as package_of,
)

pytestmark = [pytest.mark.net, pytest.mark.timeout(3000)]


def play(
    fleet: DeployedFleet, archive: Path | None, *, good: bool = True, **more: Any
) -> PlaybookResult:
    """Install llama.cpp on one node, if no other way is named from this archive of binaries."""
    named = {"llama_node_install": "release"}
    if archive is not None:
        named["llama_node_archive_file"] = str(archive)
        named["llama_node_archive_sha256"] = hashlib.sha256(archive.read_bytes()).hexdigest()
    return fleet.control.play("site.yml", "--limit", "n1,gw", good=good, **named | more)


def install(fleet: DeployedFleet, how: str, archive: Path | None, **more: Any) -> str:
    """Install llama.cpp on one node in this way. Returns the text of its unit."""
    play(fleet, archive, llama_node_install=how, **more)
    assert fleet.nodes()["n1-numa0"]["state"] == "ready"
    assert play(fleet, archive, llama_node_install=how, **more).changed == {}
    unit: str = fleet.hosts["n1"].run("systemctl cat llama-server-numa0").stdout
    return unit


def test_an_archive_of_binaries(
    fleet: DeployedFleet, release_files: ReleaseFiles, tmp_path: Path
) -> None:
    archive = release_archive(tmp_path, release_files.wheelhouse())
    wrong = play(fleet, archive, good=False, llama_node_archive_sha256="2" * 64)
    assert "not the one in llama_node_archive_sha256" in wrong.text
    unit = install(fleet, "release", archive)
    assert "/unpacked/llama-b1/llama-server" in unit
    assert "--metrics --slots --jinja --no-webui" in unit


def test_source(fleet: DeployedFleet, release_files: ReleaseFiles, tmp_path: Path) -> None:
    archive = source_archive(tmp_path, release_files.wheelhouse())
    unit = install(fleet, "source", archive)
    assert "/build/bin/llama-server" in unit
    host = fleet.hosts["n1"]
    switches = host.run("cat /opt/llama-node/llama.cpp-*/build/switches").stdout.split()
    flags = set(host.run("grep -m1 -E '^(flags|Features)' /proc/cpuinfo").stdout.split())
    if "avx" in flags:
        assert f"GGML_AVX2={'ON' if 'avx2' in flags else 'OFF'}" in switches
        assert f"GGML_AVX512_VNNI={'ON' if 'avx512_vnni' in flags else 'OFF'}" in switches
    assert "GGML_NATIVE=OFF" in switches


FOLDER = "/var/lib/llama-node/models"
PROMPTS = "/var/lib/llama-node-prompts"


@pytest.fixture(scope="module")
def real_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = cache_folder() / PROGRAM
    if not program.is_file():
        pytest.skip("the real llama-server is missing: make llama-server")
    return package_of(tmp_path_factory.mktemp("package"), program)


def test_a_host_becomes_a_router_whose_models_are_loaded_on_demand(
    fleet: DeployedFleet, release_files: ReleaseFiles, real_package: Path
) -> None:
    host, gateway = fleet.hosts["n1"], fleet.hosts["gw"]
    file = str(release_files.model())
    models = [
        {"name": "one", "file": file},
        {"name": "two", "file": file, "args": {"parallel": 1, "ctx-size": 1024}},
    ]
    keys = {"keys": [fleet.key.entry]}
    wanted: dict[str, Any] = {
        "llama_node_install": "package",
        "llama_node_package_file": str(real_package),
        "llama_node_model_file": "",
        "llama_node_models": models,
        "llama_node_preload": ["one"],
        "llama_node_memory": "3GiB",
        "llama_node_slot_save": True,
    }
    pinned = {**keys, "models": {"two": {"memory": "100MiB"}, "one": {"pin": ["n1-numa0"]}}}

    def play(*, good: bool = True, **more: Any) -> Any:
        return fleet.control.play("site.yml", "--limit", "n1,gw", good=good, **(wanted | more))

    # The settings name a node that comes with them.
    play(gateway_settings=pinned)
    nodes = fleet.nodes()
    assert nodes["n1-numa0"]["state"] == nodes["n1-numa0/one"]["state"] == "ready"
    assert nodes["n1-numa0/two"]["state"] == "unloaded"
    written = yaml.safe_load(gateway.run("cat /etc/llama-gateway/nodes.yaml").stdout)
    (entry,) = (one for one in written["nodes"] if one["name"] == "n1-numa0")
    assert (entry["memory"], entry["preload"]) == ("3GiB", ["one"])
    # One waits while its model is loaded.
    for model in ("one", "two"):
        assert chat(fleet.url, fleet.key.secret, model=model).status_code == 200
    assert fleet.nodes()["n1-numa0/two"]["state"] == "ready"
    assert play(gateway_settings=pinned).changed == {}
    assert host.run(f"stat -c '%U %a' {PROMPTS}/numa0").stdout.split() == ["llama-node", "700"]
    fleet.control.play("verify.yml", "--limit", "n1,gw", verify_key=fleet.key.secret)
    (presets,) = host.run(f"ls {FOLDER}/*.ini").stdout.split()

    # What can't fit is refused before one of the two files is written.
    before = gateway.run("sha256sum /etc/llama-gateway/*.yaml").stdout
    wrong = play(
        good=False, gateway_settings={**keys, "models": {"one": {"pin": ["n9"], "memory": "9GiB"}}}
    )
    assert "no node of the inventory is named n9" in wrong.text
    assert "n1 has 3GiB, and always to be loaded there are one (9GiB)" in wrong.text
    assert gateway.run("sha256sum /etc/llama-gateway/*.yaml").stdout == before

    # Another list restarts the router.
    play(gateway_settings=keys, llama_node_models=models[:1])
    (other,) = host.run(f"ls {FOLDER}/*.ini").stdout.split()
    assert other != presets
    assert {name for name in fleet.nodes() if name.startswith("n1")} == {
        "n1-numa0",
        "n1-numa0/one",
    }
    fleet.control.play("site.yml", "--limit", "n1,gw")
    assert host.run(f"ls {FOLDER}/*.ini {PROMPTS}", check=False).stdout == ""
