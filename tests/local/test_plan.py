from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.local import LocalFleetError, MemoryShortError, ModelFileError
from gateway.local.gguf import ModelFile, read_model
from gateway.local.memory import (
    MEMORY_RESERVE,
    MIB,
    ServerSettings,
    server_needs,
)
from gateway.local.plan import (
    DEFAULT_CONTEXT,
    DEFAULT_SLOTS,
    FETCHED_SERVER,
    ModelFolder,
    plan_folder_fleet,
    plan_local_fleet,
    plan_servers,
    plan_specs,
    server_settings,
)
from gateway.local.server import inventory_entry
from gateway.local.topology import Topology, read_topology
from setup.llama_server import cache_folder
from tests.each_case import each_case
from tests.known import known
from tests.local.gguf_files import gguf_writer
from tests.local.machine import make_machine, two_sockets_with_smt
from tests.local.small_models import MODELS, Published, types, weights, write_hollow
from tests.servers import demo_model
from tests.workshop.fit.random_models import Recipe, write

GIB = 1 << 30
WIDE = Recipe("wide", layers=8, width=1024, heads=8, kv_heads=8, feed_forward=4096)
MODEL = ModelFile(Path("m.gguf"), "m", size=4 * GIB, trained_context=32_768)


@pytest.fixture
def one_node(tmp_path: Path) -> Topology:
    return read_topology(make_machine(tmp_path, [[[core, core + 8] for core in range(8)]]))


@pytest.fixture(autouse=True)
def no_binary_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.fixture
def machine(tmp_path: Path) -> Topology:
    """Two NUMA nodes."""
    return read_topology(make_machine(tmp_path / "machine", two_sockets_with_smt()))


def test_each_node_gets_a_server_pinned_and_with_memory_of_its_own(machine: Topology) -> None:
    first, second = plan_servers(machine, MODEL)
    assert (first.threads, second.threads) == (4, 4)
    assert (first.cpus, second.cpus) == (machine.nodes[0].cpus, machine.nodes[1].cpus)
    assert (first.memory_node, second.memory_node) == (0, 1)
    assert (first.no_mmap, second.no_mmap) == (True, True)
    # Memory that is not allowed is not bound.
    forbidden = replace(machine.nodes[1], memory_allowed=False)
    partly = replace(machine, nodes=(machine.nodes[0], forbidden))
    assert [spec.memory_node for spec in plan_servers(partly, MODEL)] == [0, None]
    three = plan_servers(machine, MODEL, servers=3)
    assert [(spec.numa_node, spec.threads) for spec in three] == [(0, 2), (1, 4), (0, 2)]
    halves = plan_servers(replace(machine, cpu_quota=4.0), MODEL)
    assert [spec.threads for spec in halves] == [2, 2]


@each_case(
    ("servers", "quota", "threads"),
    [(1, None, 8), (2, None, 4), (3, None, 2), (20, None, 1), (1, 3.5, 3), (1, 0.5, 1)],
)
def test_several_servers_of_a_node_share_its_cores_within_a_quota(
    one_node: Topology, servers: int, quota: float | None, threads: int
) -> None:
    specs = plan_servers(replace(one_node, cpu_quota=quota), MODEL, servers=servers)
    assert [spec.name for spec in specs] == [f"local-{number}" for number in range(servers)]
    assert {(spec.threads, spec.numa_node) for spec in specs} == {(threads, 0)}
    assert {(spec.cpus, spec.memory_node, spec.no_mmap) for spec in specs} == {(None, None, False)}


@each_case(
    ("trained", "asked", "context"),
    [
        (32_768, None, DEFAULT_CONTEXT),
        (2048, None, 2048),
        (None, None, DEFAULT_CONTEXT),
        (65_536, 65_536, 65_536),
        (None, 65_536, 65_536),
    ],
)
def test_the_context_is_bounded_by_the_models_training(
    one_node: Topology, trained: int | None, asked: int | None, context: int
) -> None:
    of_model = replace(MODEL, trained_context=trained)
    assert plan_servers(one_node, of_model, context=asked)[0].context == context
    with pytest.raises(LocalFleetError, match="--context 32768 at most"):
        plan_servers(one_node, MODEL, context=65_537)


def model(name: str, gib: float) -> ModelFile:
    """A model of unknown shape, which needs half as much again."""
    return ModelFile(Path(f"/models/{name}.gguf"), name, int(gib * GIB), trained_context=32_768)


def test_models_go_to_the_numa_nodes_with_most_memory_left_the_largest_first(
    machine: Topology,
) -> None:
    models = [model("a", 3), model("b", 1), model("c", 8), model("d", 2)]
    specs = plan_specs(models, topology=machine)
    assert [spec.alias for spec in specs] == ["a", "b", "c", "d"]
    assert [(spec.memory_node, spec.threads) for spec in specs] == [(1, 1), (1, 1), (0, 4), (1, 1)]
    assert all(spec.no_mmap for spec in specs)
    with pytest.raises(MemoryShortError, match=r"NUMA node 0 has 24\.0 GiB available"):
        plan_specs([model("a", 15), model("b", 1)], topology=machine)


# The plan for a machine.


def test_without_a_model_the_demo_model_is_made(
    tmp_path: Path, machine: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_local_fleet(cache=tmp_path, topology=machine)
    assert plan.is_demo
    assert plan.model.path.parent == tmp_path / "models"
    assert plan.binary is None
    assert [(spec.alias, spec.numa_node) for spec in plan.specs] == [("demo", 0), ("demo", 1)]
    small = read_topology(make_machine(tmp_path / "small", [[[0]]], memory_gib=2))
    with pytest.raises(MemoryShortError, match="--force-memory"):
        plan_local_fleet(cache=tmp_path, topology=small)
    (spec,) = plan_local_fleet(cache=tmp_path, topology=small, force_memory=True).specs
    assert spec.prompt_cache_bytes == 0
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

    def plan(available: int, **options: Any) -> list[int | None]:
        on = replace(machine, memory_available=available)
        preset = tmp_path / "models.ini"
        planned = plan_folder_fleet(folder, preset, server_bin=router, topology=on, **options)
        assert {inventory_entry(one, "http://h:1")["host"] for one in planned.specs} == {
            "localhost"
        }
        return [spec.memory for spec in planned.specs]

    assert plan(16 * GIB, servers=2) == [16 * GIB - MEMORY_RESERVE] * 2  # they share it: one host
    with pytest.raises(ModelFileError, match=r"a.gguf: needs 64 MiB .* of the 0 MiB that"):
        plan(GIB)
    assert plan(GIB, force_memory=True) == [GIB]
    (folder / "a.gguf").unlink()
    (folder / "b.gguf").unlink()
    with pytest.raises(ModelFileError, match=r"no model here can be served\n  bad.gguf: not a"):
        plan(GIB)
    (folder / "bad.gguf").unlink()
    with pytest.raises(ModelFileError, match="it has no GGUF file"):
        plan(GIB)
    folder.rmdir()
    with pytest.raises(ModelFileError, match="name a folder of GGUF files"):
        plan(GIB)


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


# Folders of models.


SETTINGS = ServerSettings(slots=2, context=4096)


def put(path: Path) -> Path:
    """The demo model under another name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(demo_model(), path)
    return path


def put_other(path: Path, architecture: str, kind: str | None = None) -> Path:
    """A file that is no model of texts, with a tensor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gguf_writer(path, architecture) as writer:
        if kind is not None:
            writer.add_type(kind)
        writer.add_tensor("any.weight", np.zeros((32, 32), dtype=np.float32))
    return path


def reader(folder: Path, room: int = 20 * GIB, **options: Any) -> ModelFolder:
    """The folder, read once."""
    found = ModelFolder(
        folder, folder / "models.ini", options.pop("settings", SETTINGS), room, **options
    )
    found.refresh()
    return found


def test_models_are_named_by_their_files_in_the_folder_and_those_within(tmp_path: Path) -> None:
    for name in ("a.gguf", "b 2.Q4_K_M.gguf", "inner/c.gguf", "inner/d.gguf"):
        put(tmp_path / name)
    for other in ("notes.txt", ".hidden.gguf", "inner/deeper/e.gguf", "f.gguf.part"):
        put(tmp_path / other)
    found = reader(tmp_path)
    assert list(found.models) == ["a", "b 2.Q4_K_M", "c", "d"]
    assert found.passed_over == {}
    assert found.models["a"].settings.context == 4096


def test_what_can_not_be_served_is_told_with_the_reason(tmp_path: Path) -> None:
    put(tmp_path / "good.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "cut.gguf").write_bytes(demo_model().read_bytes()[:1_000_000])
    (tmp_path / "gone.gguf").symlink_to(tmp_path / "nothing")
    (tmp_path / "long.gguf").symlink_to("x" * 300)  # whatever it is, the system may not say
    os.mkfifo(tmp_path / "pipe.gguf")  # it is not even opened
    put(tmp_path / "inner/good.gguf")
    put(tmp_path / "no#te.gguf")
    put(tmp_path / "we:ird.gguf")
    put(tmp_path / "half-00002-of-00003.gguf")
    put_other(tmp_path / "vision.gguf", "clip")
    put_other(tmp_path / "lora.gguf", "llama", "adapter")
    put(tmp_path / "mmproj-liar.gguf")
    found = reader(tmp_path)
    assert list(found.models) == ["good"]
    words = {
        "text.gguf": "not a GGUF model",
        "cut.gguf": "cut short",
        "gone.gguf": "no such file",
        "long.gguf": "file name too long",
        "inner/good.gguf": "good.gguf has this name too",
        "no#te.gguf": "rename",
        "we:ird.gguf": "rename",
        "half-00002-of-00003.gguf": "00001-of-00003.gguf: no such file",
        "vision.gguf": "projector of images",
        "lora.gguf": "an adapter",
        "mmproj-liar.gguf": "but not by both",
    }
    assert found.passed_over.keys() == words.keys()
    for name, word in words.items():
        assert word in found.passed_over[name], (name, found.passed_over[name])


def test_a_projector_goes_to_the_one_model_beside_it(tmp_path: Path) -> None:
    for name in ("gemma", "plain", "own/any-model"):
        put(tmp_path / f"{name}.gguf")
    for name in ("mmproj-gemma", "own/any-mmproj-model-f16", "own/mmproj-model-f16"):
        put_other(tmp_path / f"{name}.gguf", "clip")
    found = reader(tmp_path)
    projectors = {name: model.projector for name, model in found.models.items()}
    projector = tmp_path / "own/any-mmproj-model-f16.gguf"
    assert projectors == {"gemma": None, "plain": None, "any-model": projector}
    assert found.passed_over.keys() == {"mmproj-gemma.gguf", "own/mmproj-model-f16.gguf"}
    assert all("folder of their own" in why for why in found.passed_over.values())
    plain, seeing = found.models["plain"], found.models["any-model"]
    size = projector.stat().st_size
    assert seeing.memory - plain.memory == size


def test_a_model_without_room_is_told_and_prompts_get_only_what_models_leave(
    tmp_path: Path,
) -> None:
    put(tmp_path / "small.gguf")
    write(WIDE, tmp_path, hollow=True)
    found = reader(tmp_path, room=300 * MIB)
    assert list(found.models) == ["small"]
    assert "needs 0.6 GiB (weights" in found.passed_over["wide.gguf"]
    forced = reader(tmp_path, room=300 * MIB, force=True)
    assert forced.passed_over == {}
    assert forced.models["wide"].memory == 300 * MIB  # so that it is loaded alone
    roomy = reader(tmp_path, room=20 * GIB).models.values()
    assert {one.settings.prompt_cache_bytes for one in roomy} == {20 * GIB // 16}
    assert reader(tmp_path, room=800 * MIB).models["wide"].memory <= 800 * MIB


def test_the_preset_says_how_each_model_is_started(tmp_path: Path) -> None:
    put(tmp_path / "a.gguf")
    put_other(tmp_path / "mmproj-a.gguf", "clip")
    settings = replace(SETTINGS, slots=3)
    found = reader(tmp_path, room=300 * MIB, settings=settings, embedding=True)
    preset = tmp_path / "models.ini"
    assert preset.read_text() == (
        f"[a]\nmodel = {tmp_path}/a.gguf\nmmproj = {tmp_path}/mmproj-a.gguf\n"
        "parallel = 3\nctx-size = 12288\ncache-ram = 18\npooling = mean\n"
    )
    assert len(list(tmp_path.iterdir())) == 3  # no draft is left
    told = found.memory(tmp_path / "a.gguf", 3, 4096)
    cache, projector = 18 * MIB, (tmp_path / "mmproj-a.gguf").stat().st_size
    alone, _ = server_needs(read_model(tmp_path / "a.gguf"), ServerSettings(3, 4096))
    assert told == alone + cache + projector
    with pytest.raises(ValueError, match="is not served"):
        found.memory(tmp_path / "gone.gguf", 3, 4096)


def test_what_comes_and_goes_changes_no_other_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "a.gguf")
    found, preset = reader(tmp_path), tmp_path / "models.ini"
    first = preset.read_text()
    assert found.refresh() is None
    (tmp_path / "b.gguf").write_bytes(demo_model().read_bytes()[:1_000_000])  # it is being copied
    changed = known(found.refresh())
    assert (changed["added"], changed["removed"]) == ([], [])
    (why,) = changed["not_served"]
    assert re.fullmatch("b.gguf: .*cut short.*", why)
    assert preset.read_text() == first
    put(tmp_path / "b.gguf")
    assert found.refresh() == {"added": ["b"], "removed": [], "not_served": []}
    assert preset.read_text().startswith(first)
    assert "[b]" in preset.read_text()
    (tmp_path / "b.gguf").unlink()
    assert found.refresh() == {"added": [], "removed": ["b"], "not_served": []}
    assert preset.read_text() == first
    # A file that has not changed is not read again.
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("it was read again"))
    assert found.refresh() is None


# The two models of docs/models.md.


PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.file)
def test_the_page_fetches_checks_and_tells_what_up_reads(model: Published, tmp_path: Path) -> None:
    assert types(model) == Counter(model.types), "as the published file"
    assert round(weights(model) / 2**20, 2) == pytest.approx(model.weights_mib, abs=0.006)
    file = re.escape(model.file)
    url = rf"https://huggingface\.co/Qwen/\S+-GGUF/resolve/[0-9a-f]{{40}}/{file}"
    assert re.search(rf"^\$ curl -fL .*-o {file} \\\n +{url}$", PAGE, re.MULTILINE)
    assert re.search(rf'"[0-9a-f]{{64}}  {file}" \| sha256sum -c', PAGE)
    assert f"--model {model.file}" in PAGE
    read = read_model(write_hollow(model, tmp_path))
    assert (f"{read.name}.gguf", read.size) == (model.file, model.size)
    (server,) = plan_servers(read_topology(make_machine(tmp_path / "m", [[[0], [1]]])), read)
    assert (server.slots, server.context) == (DEFAULT_SLOTS, DEFAULT_CONTEXT)
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{read.name}`"))
    needs = server_needs(read, server_settings(server))[0] / GIB
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:4] == ["Apache 2.0", f"{model.size:,}", f"{needs:.1f} GiB"]
    assert f"{DEFAULT_SLOTS} slots of {DEFAULT_CONTEXT:,} tokens" in PAGE
