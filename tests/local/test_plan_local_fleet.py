from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from gateway.local import LocalFleetError, MemoryShortError, ModelFileError
from gateway.local.memory import MEMORY_RESERVE
from gateway.local.plan import FETCHED_SERVER, plan_folder_fleet, plan_local_fleet
from gateway.local.server import LocalFleet, inventory_entry
from gateway.local.topology import Topology, read_topology
from setup.llama_server import cache_folder
from tests.local.machine import make_machine, two_sockets_with_smt
from tests.servers import demo_model, server_path

GIB = 1 << 30


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
    path = tmp_path / "real.gguf"
    path.symlink_to(demo_model())
    plan = plan_local_fleet(path, servers=3, slots=4, cache=tmp_path, topology=machine)
    assert not plan.is_demo
    assert [(spec.model, spec.alias, spec.slots) for spec in plan.specs] == [(path, "real", 4)] * 3


def test_a_model_that_does_not_fit_is_refused_unless_forced(tmp_path: Path) -> None:
    small = read_topology(make_machine(tmp_path / "small", [[[0]]], memory_gib=2))
    with pytest.raises(MemoryShortError, match="--force-memory"):
        plan_local_fleet(cache=tmp_path, topology=small)
    (spec,) = plan_local_fleet(cache=tmp_path, topology=small, force_memory=True).specs
    assert spec.prompt_cache_bytes == 0


def test_a_missing_extra_is_reported_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LocalFleetError, match=r"pip install .*xllamacpp"):
        plan_local_fleet(cache=tmp_path)


@pytest.fixture
def router(tmp_path: Path) -> Path:
    """A llama-server with router mode, as far as its help says it."""
    program = tmp_path / "bin/llama-server"
    program.parent.mkdir()
    flags = "--model --port --parallel --models-preset --models-max"
    program.write_text(f"#!/bin/sh\necho {flags}\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two models, and of a file that is none."""
    made = tmp_path / "models"
    made.mkdir()
    for name in "ab":
        (made / f"{name}.gguf").symlink_to(demo_model())
    (made / "bad.gguf").write_text("no model")
    return made


def test_a_folder_gets_a_router_for_each_numa_node_with_the_memory_that_it_has(
    tmp_path: Path, machine: Topology, folder: Path, router: Path
) -> None:
    plan = plan_folder_fleet(
        folder, tmp_path / "models.ini", slots=3, server_bin=router, topology=machine
    )
    assert plan.folder is not None
    assert list(plan.folder.models) == ["a", "b"]
    assert list(plan.folder.passed_over) == ["bad.gguf"]
    specs = plan.specs
    assert {(spec.is_router, spec.model.name, spec.slots) for spec in specs} == {
        (True, "models.ini", 3)
    }
    assert [spec.memory_node for spec in specs] == [0, 1]
    rooms = [node.memory_available - MEMORY_RESERVE for node in machine.nodes]
    share = (machine.memory_available - MEMORY_RESERVE) // 2
    assert [spec.memory for spec in specs] == [min(room, share) for room in rooms]
    assert plan.folder.room == min(spec.memory or 0 for spec in specs)
    first, second = [inventory_entry(spec, "http://127.0.0.1:1") for spec in specs]
    assert (first["host"], second["host"]) == ("localhost-numa0", "localhost-numa1")
    assert (first["memory"], first["labels"]["numa"]) == (specs[0].memory, "0")


def test_routers_of_one_memory_are_planned_with_all_of_it(
    tmp_path: Path, folder: Path, router: Path
) -> None:
    machine = read_topology(make_machine(tmp_path / "one", [[[0], [1]]], memory_gib=16))
    plan = plan_folder_fleet(
        folder, tmp_path / "models.ini", servers=2, server_bin=router, topology=machine
    )
    left = machine.memory_available - MEMORY_RESERVE
    assert [spec.memory for spec in plan.specs] == [left, left]  # they share it: one host
    hosts = {inventory_entry(spec, "http://127.0.0.1:1")["host"] for spec in plan.specs}
    assert hosts == {"localhost"}
    full = replace(machine, memory_available=GIB)
    with pytest.raises(ModelFileError, match=r"a.gguf: needs 64 MiB .* of the 0 MiB that"):
        plan_folder_fleet(folder, tmp_path / "models.ini", server_bin=router, topology=full)
    forced = plan_folder_fleet(
        folder, tmp_path / "x.ini", server_bin=router, topology=full, force_memory=True
    )
    assert [spec.memory for spec in forced.specs] == [GIB]


def test_a_folder_without_a_model_is_refused_with_the_reasons(
    tmp_path: Path, machine: Topology, folder: Path, router: Path
) -> None:
    for name in "ab":
        (folder / f"{name}.gguf").unlink()
    preset = tmp_path / "models.ini"
    with pytest.raises(ModelFileError, match=r"no model here can be served\n  bad.gguf: not a"):
        plan_folder_fleet(folder, preset, server_bin=router, topology=machine)
    (folder / "bad.gguf").unlink()
    with pytest.raises(ModelFileError, match="it has no GGUF file"):
        plan_folder_fleet(folder, preset, server_bin=router, topology=machine)
    for missing in (folder / "none", demo_model()):
        with pytest.raises(ModelFileError, match="name a folder of GGUF files"):
            plan_folder_fleet(missing, preset, server_bin=router, topology=machine)


def test_a_folder_needs_a_llama_server_with_router_mode(
    tmp_path: Path, folder: Path, router: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    preset = tmp_path / "models.ini"
    with pytest.raises(LocalFleetError, match=r"no router mode.*make llama-server.*--model FILE"):
        plan_folder_fleet(folder, preset)
    fetched = tmp_path / FETCHED_SERVER  # where `make llama-server` puts it
    fetched.parent.mkdir(parents=True)
    fetched.symlink_to(router)
    assert cache_folder() / "llama-server" == fetched
    assert plan_folder_fleet(folder, preset).binary is not None
    router.write_text("#!/bin/sh\necho --model --port --parallel --models-max\n")
    with pytest.raises(LocalFleetError, match=r"has no --models-preset, .*newer llama-server"):
        plan_folder_fleet(folder, preset)


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
