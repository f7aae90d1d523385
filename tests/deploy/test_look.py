from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gateway.local.topology import read_topology, topology_as_dict
from tests.local.machine import make_machine, two_sockets_with_smt

ROLES = Path(__file__).parents[2] / "deploy/ansible/roles"
GIB = 1 << 30


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def look() -> ModuleType:
    return load("preflight/files/look.py")


@pytest.fixture(scope="module")
def keys() -> ModuleType:
    return load("llama_node/files/keys.py")


@pytest.fixture
def two_sockets(tmp_path: Path) -> dict[str, Any]:
    """A machine with 64 GiB in two NUMA nodes; three quarters of each are free."""
    return topology_as_dict(read_topology(make_machine(tmp_path, two_sockets_with_smt())))


RULE = {"memory": {"factor": 1.5, "reserve": 2 * GIB}}


def memory_problems(
    look: ModuleType, topology: dict[str, Any], gib: float, running: int = 0, **spec: Any
) -> list[str]:
    units = {"llama-server-numa1.service": {"memory": running}}
    found = {"topology": topology, "model": {"bytes": int(gib * GIB)}, "units": units}
    problems: list[str] = look.memory_problems({**RULE, **spec}, found)
    return problems


def test_each_numa_node_must_hold_its_server(look: ModuleType, two_sockets: dict[str, Any]) -> None:
    def short(**more: Any) -> list[str]:
        problems = memory_problems(look, two_sockets, gib=15, **more)
        return [problem.split(" has ")[0].rpartition("but ")[2] for problem in problems]

    assert memory_problems(look, two_sockets, gib=14) == []
    assert short() == ["NUMA node 0", "NUMA node 1"]  # 22.5 + 2 of 24 GiB, on each node
    assert short(running=4 * GIB) == ["NUMA node 0"], "memory of our own server counts as free"
    # What a server needs counts where it is known.
    known = {"factor": 1.5, "reserve": 2 * GIB, "needed": 22 * GIB, "why": "weights and all"}
    assert short(memory=known) == []
    problems = memory_problems(look, two_sockets, gib=15, memory={**known, "needed": 23 * GIB})
    assert len(problems) == 2
    assert "1 server needs 23.0 GiB (weights and all each)" in problems[0]


def test_only_the_requested_numa_nodes_count(look: ModuleType, two_sockets: dict[str, Any]) -> None:
    assert len(memory_problems(look, two_sockets, gib=15, numa_nodes=[1])) == 1
    (problem,) = look.numa_problems({"numa_nodes": [0, 2, 3]}, two_sockets)
    assert "no NUMA node 2, 3 (llama_node_numa_nodes)" in problem
    assert "there are 0, 1" in problem


def files(*paths: Path, **more: Any) -> dict[str, Any]:
    """What is asked about files that a role is about to write."""
    names = {"files_variable": "some_variable", "overwrite_variable": "overwrite"}
    return {"files": [str(path) for path in paths], **names, **more}


def test_an_edited_file_is_distinguished_from_ours_and_from_a_foreign_one(
    look: ModuleType, tmp_path: Path
) -> None:
    body = b"nodes: []\n"
    digest = hashlib.sha256(body).hexdigest().encode()
    header = b"# Managed by Ansible (gateway): ... sha256:" + digest + b"\n"
    ours, script, edited, strange = (
        tmp_path / name for name in ("ours", "script", "edited", "strange")
    )
    ours.write_bytes(header + body)
    # The first line of a script is for the kernel.
    script.write_bytes(b"#!/usr/bin/python3\n" + header + body)
    edited.write_bytes(header + body + b"# by hand\n")
    strange.write_bytes(body)
    spec = files(ours, script, edited, strange, tmp_path / "missing")
    first, second = look.file_problems(spec)
    assert first.startswith(f"{edited} was edited by hand since the last run. Remedy: ")
    assert second.startswith(f"{strange} was not written by this role. Remedy: ")
    assert look.file_problems({**spec, "overwrite": True}) == []
    script.write_bytes(script.read_bytes() + b"# by hand\n")
    assert look.file_problems(spec)[0].startswith(f"{script} was edited by hand ")


def on_demand(
    look: ModuleType, topology: dict[str, Any], *sizes: float, running: int = 0, **spec: Any
) -> list[str]:
    models = [{"name": f"m{number}", "urls": ["http://m"]} for number in range(len(sizes))]
    units = {"llama-server-numa0.service": {"memory": running}}
    files = [{"bytes": int(size * GIB)} for size in sizes]
    found = {"topology": topology, "models": files, "units": units}
    asked = {**RULE, "models": models, **spec}
    problems: list[str] = look.memory_problems_on_demand(asked, found)
    return problems


def test_models_on_demand_need_room_for_the_largest_and_for_the_preloaded(
    look: ModuleType, two_sockets: dict[str, Any]
) -> None:
    # 48 GiB are free.
    assert on_demand(look, two_sockets, 30.0, 30.0, 30.0) == []
    (problem,) = on_demand(look, two_sockets, 1.0, 31.0)
    assert problem.startswith(
        "not enough memory: m1 needs 46.5 GiB (1.5 x file, and llama_node_cache_ram), but this "
    )
    assert on_demand(look, two_sockets, 31.0, running=GIB) == []
    assert on_demand(look, two_sockets, 15.0, preload=["m0"]) == []
    (problem,) = on_demand(look, two_sockets, 16.0, preload=["m0"])
    assert "what 2 servers have preloaded needs 48.0 GiB" in problem
    assert on_demand(look, two_sockets, 16.0, preload=["m0"], numa_nodes=[1]) == []


def test_a_renewed_key_is_known_to_every_server_before_the_gateway_sends_it(
    keys: ModuleType,
) -> None:
    """The play may stop after each of two servers; the gateway sends the first key of the file."""
    file = keys.wanted([], rotate=False, running=[])
    servers = [file, file]

    def play(*, rotate: bool, restarted: int) -> None:
        nonlocal file
        running = [keys.fingerprint(known) for known in servers]
        file = keys.wanted(file, rotate=rotate, running=running)
        for number in range(len(servers)):
            assert file[0] in servers[number]
            if number < restarted:
                servers[number] = file

    (old,) = file
    play(rotate=True, restarted=1)  # it stopped after the first server
    play(rotate=False, restarted=1)
    assert file[0] == old
    play(rotate=True, restarted=2)
    assert len(file) == 2  # a renewal begins once, however often it is requested
    play(rotate=False, restarted=1)
    assert file[0] != old
    play(rotate=False, restarted=2)
    assert servers == [file, file]
    assert len(file) == 1
    assert old not in file
