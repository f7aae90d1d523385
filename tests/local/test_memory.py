from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.local import MemoryShortError
from gateway.local.gguf import ModelFile, read_model
from gateway.local.memory import (
    PlacedServer,
    ServerSettings,
    check_memory,
    format_gib,
    server_memory,
    server_needs,
)
from gateway.local.topology import Topology, read_topology
from tests.known import known
from tests.local.machine import make_machine, two_sockets_with_smt
from tests.workshop.fit.random_models import Recipe, write

GIB = 1 << 30
REPOSITORY = Path(__file__).parents[2]
ALONE = """
import sys, runpy
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("gateway.local.memory", run_name="__main__", alter_sys=True)
"""
SETTINGS = ServerSettings(2, 4096)
MODEL = ModelFile(Path("big.gguf"), "big", size=10 * GIB, trained_context=None)


def bound(nodes: list[int | None]) -> list[PlacedServer]:
    """Servers of the model whose memory is bound to these NUMA nodes."""
    return [(MODEL, SETTINGS, node) for node in nodes]


@pytest.fixture
def machine(tmp_path: Path) -> Topology:
    return read_topology(make_machine(tmp_path, two_sockets_with_smt(), memory_gib=64))


def test_servers_must_leave_two_gib_or_are_refused_with_figures_and_the_remedy(
    machine: Topology,
) -> None:
    check_memory(replace(machine, memory_available=32 * GIB), bound([None, None]))
    with pytest.raises(MemoryShortError) as caught:
        check_memory(replace(machine, memory_available=32 * GIB - 1), bound([None, None]))
    figures = ("10.0 GiB", "2 servers", "30.0 GiB", "2.0 GiB", "32.0 GiB")
    for part in ("big.gguf", *figures, "--force-memory", "fewer --servers"):
        assert part in str(caught.value)
    with pytest.raises(MemoryShortError) as caught:
        check_memory(replace(machine, memory_available=GIB), bound([None]))
    assert "fewer" not in str(caught.value), "it is no remedy for one"


def test_a_bound_server_must_fit_into_its_node(machine: Topology) -> None:
    check_memory(machine, bound([0, 1]))  # 15 of 24 GiB on each
    with pytest.raises(MemoryShortError, match="NUMA node 1"):
        check_memory(machine, bound([1, 1]))
    low = replace(machine.nodes[0], memory_available=16 * GIB)
    with pytest.raises(MemoryShortError, match="NUMA node 0 has 16"):
        check_memory(replace(machine, nodes=(low, machine.nodes[1])), bound([0, 1]))


def test_sizes_for_people() -> None:
    assert (format_gib(3_892_256), format_gib(3 * GIB // 2)) == ("4 MiB", "1.5 GiB")


def test_a_known_shape_tells_what_a_server_needs_else_the_rule_of_thumb(
    machine: Topology, tmp_path: Path
) -> None:
    assert server_needs(MODEL, ServerSettings(2, 4096)) == (15 * GIB, "1.5 x model")
    recipe = Recipe("m", 2, 256, 4, 4, 512)
    model = read_model(write(recipe, tmp_path, hollow=True))
    settings = ServerSettings(2, 4096)
    needed, why = server_needs(model, settings)
    assert needed == server_memory(known(model.shape), settings).needed
    assert "2 slots of 4096 tokens 16 MiB" in why
    with pytest.raises(MemoryShortError, match="2 slots of 4096 tokens 16 MiB"):
        check_memory(replace(machine, memory_available=2 * GIB), [(model, settings, None)])
    check_memory(replace(machine, memory_available=2 * GIB + needed), [(model, settings, None)])


def test_the_module_says_what_a_server_needs_without_any_package(tmp_path: Path) -> None:
    path = write(Recipe("m", 2, 256, 4, 4, 512), tmp_path, hollow=True)
    module = [sys.executable, "-I", "-S", "-c", ALONE, str(REPOSITORY)]
    settings = ["--slots", "2", "--context", "4096", "--ubatch", "256", "--cache-ram", "1"]
    done = subprocess.run(
        [*module, str(path), *settings], capture_output=True, text=True, check=True
    )
    shape = read_model(path).shape
    needed = server_memory(known(shape), ServerSettings(2, 4096, prompt_cache_bytes=1 << 20)).needed
    assert json.loads(done.stdout)["needed"] == needed
    path.write_bytes(b"<html>")
    failed = subprocess.run([*module, str(path), *settings], capture_output=True, check=False)
    assert failed.returncode == 1
    assert b"web page" in failed.stderr
