from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.local import LocalFleetError
from gateway.local.embedded import OPENMP_LIBRARY, openmp_folder, packaged_openmp, system_has_openmp
from gateway.local.plan import plan_local_fleet
from gateway.local.server import server_environment
from tests.known import known
from tests.local.server_requests import post
from tests.servers import running_demo_servers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the wheel brings its own there")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without the OpenMP runtime."""

    def load(name: str | None, **options: Any) -> ctypes.CDLL:
        return load_library("libgomp.so.none" if name == OPENMP_LIBRARY else name, **options)

    load_library = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert not system_has_openmp()


@pytest.mark.usefixtures("bare")
def test_elsewhere_a_server_finds_the_copy_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "lib" / OPENMP_LIBRARY
    link.parent.mkdir()
    link.symlink_to("/no/such/file")  # a stale one is replaced
    assert openmp_folder(tmp_path) == link.parent
    assert link.resolve() == known(packaged_openmp()).resolve()
    assert list(link.parent.iterdir()) == [link]
    given = {"LLAMA_GATEWAY_CACHE": str(tmp_path)}
    assert server_environment(given)["LD_LIBRARY_PATH"] == str(tmp_path / "lib")
    other = server_environment({**given, "LD_LIBRARY_PATH": "/other"})["LD_LIBRARY_PATH"]
    assert other == f"/other:{tmp_path / 'lib'}"
    monkeypatch.setattr(importlib.metadata, "files", lambda package: None)
    monkeypatch.setenv("PATH", "/nowhere")  # no llama-server, which would do without
    with pytest.raises(LocalFleetError, match="apt-get install libgomp1"):
        plan_local_fleet(cache=tmp_path / "other")


@pytest.mark.real
@pytest.mark.wheel_only("the binary has its own OpenMP runtime")
@pytest.mark.usefixtures("bare")
def test_a_server_runs_on_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_GATEWAY_CACHE", str(tmp_path))
    with running_demo_servers(1) as (server,):
        mapped = Path(f"/proc/{server.pid}/maps").read_text()
        runtimes = {line.split()[-1] for line in mapped.splitlines() if "libgomp" in line}
        assert runtimes == {str(packaged_openmp())}
        answer = post(f"{server.url}/completion", json={"prompt": "on", "n_predict": 5})
        assert answer.json()["tokens_predicted"] == 5
