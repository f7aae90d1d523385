"""llama.cpp from an archive of binaries, a package and source; each serves a chat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.deploy import llama_archives
from tests.deploy.conftest import DeployedFleet
from tests.deploy.control import PlaybookResult
from tests.deploy.release_files import ReleaseFiles

pytestmark = [pytest.mark.net, pytest.mark.timeout(3000)]


def play(
    fleet: DeployedFleet, archive: Path | None, *, good: bool = True, **more: Any
) -> PlaybookResult:
    """Install llama.cpp on one node, if no other way is named from this archive of binaries."""
    named = {"llama_node_install": "release"}
    if archive is not None:
        named["llama_node_archive_file"] = str(archive)
        named["llama_node_archive_sha256"] = llama_archives.sha256(archive)
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
    archive = llama_archives.release_archive(tmp_path, release_files.wheelhouse())
    wrong = play(fleet, archive, good=False, llama_node_archive_sha256="2" * 64)
    assert "not the one in llama_node_archive_sha256" in wrong.text
    unit = install(fleet, "release", archive)
    assert "/unpacked/llama-b1/llama-server" in unit
    assert "--metrics --slots --jinja --no-webui" in unit


def test_a_package(fleet: DeployedFleet, release_files: ReleaseFiles, tmp_path: Path) -> None:
    package = llama_archives.package(tmp_path, release_files.wheelhouse())
    unit = install(fleet, "package", None, llama_node_package_file=str(package))
    assert "ExecStart=/usr/bin/llama-server" in unit


def test_source(fleet: DeployedFleet, release_files: ReleaseFiles, tmp_path: Path) -> None:
    archive = llama_archives.source_archive(tmp_path, release_files.wheelhouse())
    unit = install(fleet, "source", archive)
    assert "/build/bin/llama-server" in unit
    host = fleet.hosts["n1"]
    switches = host.run("cat /opt/llama-node/llama.cpp-*/build/switches").stdout.split()
    flags = set(host.run("grep -m1 -E '^(flags|Features)' /proc/cpuinfo").stdout.split())
    if "avx" in flags:
        assert f"GGML_AVX2={'ON' if 'avx2' in flags else 'OFF'}" in switches
        assert f"GGML_AVX512_VNNI={'ON' if 'avx512_vnni' in flags else 'OFF'}" in switches
    assert "GGML_NATIVE=OFF" in switches
