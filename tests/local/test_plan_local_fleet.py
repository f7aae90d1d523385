from __future__ import annotations

import importlib.util
from pathlib import Path

import httpx
import pytest

from gateway.local import MemoryShortError, MissingExtraError, ModelFileError
from gateway.local.plan import plan_local_fleet
from gateway.local.server import LocalFleet
from gateway.local.topology import Topology, read_topology
from tests.local.machine import make_machine, two_sockets_with_smt
from tests.servers import server_path


@pytest.fixture(autouse=True)
def no_binary_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.fixture
def machine(tmp_path: Path) -> Topology:
    return read_topology(make_machine(tmp_path / "machine", two_sockets_with_smt()))


def test_without_a_model_the_demo_model_is_made(tmp_path: Path, machine: Topology) -> None:
    plan = plan_local_fleet(cache=tmp_path, topology=machine)
    assert plan.is_demo
    assert plan.model.path.parent == tmp_path / "models"
    assert plan.log_folder == tmp_path / "logs"
    assert plan.binary is None
    assert [(spec.alias, spec.numa_node) for spec in plan.specs] == [("demo", 0), ("demo", 1)]


def test_a_named_model_is_used_as_it_is(tmp_path: Path, machine: Topology) -> None:
    path = plan_local_fleet(cache=tmp_path, topology=machine).model.path.rename(
        tmp_path / "real.gguf"
    )
    plan = plan_local_fleet(path, servers=3, slots=4, cache=tmp_path, topology=machine)
    assert not plan.is_demo
    assert [(spec.model, spec.alias, spec.slots) for spec in plan.specs] == [(path, "real", 4)] * 3


def test_a_model_that_does_not_fit_is_refused_unless_forced(tmp_path: Path) -> None:
    small = read_topology(make_machine(tmp_path / "small", [[[0]]], memory_gib=2))
    with pytest.raises(MemoryShortError, match="--force-memory"):
        plan_local_fleet(cache=tmp_path, topology=small)
    assert (
        plan_local_fleet(cache=tmp_path, topology=small, force_memory=True)
        .specs[0]
        .prompt_cache_bytes
        == 0
    )


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"none\.gguf"):
        plan_local_fleet(tmp_path / "none.gguf", cache=tmp_path)


def test_a_missing_extra_is_reported_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install .*xllamacpp"):
        plan_local_fleet(cache=tmp_path)


@pytest.mark.real
async def test_the_plan_for_this_machine_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", server_path())
    plan = plan_local_fleet(servers=2, cache=tmp_path)
    fleet = LocalFleet(plan.specs, plan.log_folder, binary=plan.binary, base_port=0)
    async with fleet, httpx.AsyncClient(timeout=60) as client:
        for url in fleet.urls:
            props = (await client.get(f"{url}/props")).json()
            assert props["default_generation_settings"]["n_ctx"] == 4096
            assert props["model_alias"] == "demo"
