from __future__ import annotations

import hashlib
import http.server
import importlib.util
import os
import pwd
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from gateway.local.topology import read_topology, topology_as_dict
from tests.local.machine import make_machine, two_sockets_with_smt

LOOK = Path(__file__).parents[2] / "deploy/ansible/roles/preflight/files/look.py"
GIB = 1 << 30


@pytest.fixture(scope="module")
def look() -> ModuleType:
    spec = importlib.util.spec_from_file_location("look", LOOK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def two_sockets(tmp_path: Path) -> dict[str, Any]:
    """A machine with 64 GiB in two NUMA nodes; three quarters of each are free."""
    return topology_as_dict(read_topology(make_machine(tmp_path, two_sockets_with_smt())))


def memory_problems(
    look: ModuleType, topology: dict[str, Any], gib: float, running: int = 0, **spec: Any
) -> list[str]:
    found = {
        "topology": topology,
        "model": {"bytes": int(gib * GIB)},
        "units": {"llama-server-numa1.service": {"memory": running}},
    }
    rule = {"memory": {"factor": 1.5, "reserve": 2 * GIB}}
    problems: list[str] = look.memory_problems({**rule, **spec}, found)
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


def test_a_link_into_the_releases_may_be_replaced_and_no_other_one(
    look: ModuleType, tmp_path: Path
) -> None:
    link, releases, elsewhere = (tmp_path / name for name in ("link", "releases", "elsewhere"))
    spec = files(link, links=str(releases))
    for folder in (releases, elsewhere):
        folder.mkdir()
        (folder / "program").write_text("#!/bin/sh\n")
    link.symlink_to(releases / "program")
    assert look.file_problems(spec) == []
    link.unlink()
    link.symlink_to(elsewhere / "program")
    assert " was not written by this role" in look.file_problems(spec)[0]
    (elsewhere / "program").unlink()  # it leads nowhere
    assert look.file_problems(spec) == []


def test_a_packages_file_is_distinguished_from_one_edited_before_the_first_run(
    look: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought, edited = tmp_path / "brought", tmp_path / "edited"
    brought.write_bytes(b"global:\n")
    edited.write_bytes(b"global:\n# mine\n")
    digest = hashlib.md5(b"global:\n", usedforsecurity=False).hexdigest()
    run = Mock(return_value=f" {brought} {digest}\n {edited} {digest} obsolete\n")  # as it writes
    monkeypatch.setattr(look, "run", run)
    (problem,) = look.file_problems(files(brought, edited, packages=["prometheus"]))
    assert problem.startswith(f"{edited} was not written by this role. Remedy: ")
    run.assert_any_call("dpkg-query", "--show", "--showformat=${Conffiles}\n", "prometheus")


class _SignedForGet(http.server.BaseHTTPRequestHandler):
    """Answers as object stores do for a URL that is signed for GET."""

    def do_HEAD(self) -> None:
        self.send_error(403)

    def do_GET(self) -> None:
        if self.path != "/model.gguf":
            self.send_error(404)
            return
        assert self.headers["Range"] == "bytes=0-0"
        self.send_response(206)
        self.send_header("Content-Range", "bytes 0-0/4368438944")
        self.send_header("Content-Length", "1")
        self.end_headers()
        self.wfile.write(b"G")

    def log_message(self, *_: object) -> None:
        pass


def test_a_model_at_an_address_signed_for_get_is_measured(look: ModuleType) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _SignedForGet) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            assert look.size_of(f"{url}/model.gguf") == (4368438944, "")
            assert look.size_of(f"{url}/none.gguf") == (None, "status 404")
        finally:
            server.shutdown()
            thread.join(10)


def test_the_last_runs_publication_is_read_and_broken_ones_are_ignored(
    look: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "servers.json"
    assert look.published(path) == []
    for broken in ("", "[]", '{"servers"', '{"servers": 1}', "null"):
        path.write_text(broken)
        assert look.published(path) == []
    path.write_text('{"servers": [{"unit": "llama-server-numa0.service"}]}')
    assert look.published(path) == [{"unit": "llama-server-numa0.service"}]


def test_space_on_one_disk_is_added_up(look: ModuleType, tmp_path: Path) -> None:
    wanted = [
        {"path": str(tmp_path / "a/b"), "bytes": 1 << 59, "variable": "one", "what": "the model"},
        {"path": str(tmp_path / "c"), "bytes": 1 << 58, "variable": "two", "what": "llama.cpp"},
    ]
    (problem,) = look.disk_problems(wanted)
    assert "one or two" in problem
    assert look.disk_problems([{**wanted[0], "bytes": 1}]) == []


def test_a_model_that_is_uploaded_needs_room_in_ansibles_temporary_folder(
    look: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = pwd.getpwuid(os.getuid())
    home = me.pw_dir
    monkeypatch.setenv("SUDO_USER", me.pw_name)
    for folder, urls, missing, disks in (
        ("/proc/models", [], 7, [home, "/proc/models"]),  # another file system
        ("/proc/models", ["http://192.0.2.1/m.gguf"], 7, ["/proc/models"]),
        ("/proc/models", [], 0, ["/proc/models"]),
        (f"{home}/models", [], 7, [f"{home}/models"]),
    ):
        spec = {"model": {"path": f"{folder}/m.gguf", "urls": urls}}
        found = look.disks(spec, {"missing": missing, "bytes": 7})
        assert [one["path"] for one in found] == disks


def test_a_verified_model_is_not_read_again(look: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    stat = path.stat()
    record = Path(f"{path}.verified")
    record.write_text(f"{'a' * 64} {stat.st_size} {stat.st_mtime_ns}\n")
    model = {"path": str(path), "sha256": "a" * 64, "urls": [], "bytes": 7}
    problems: list[str] = []
    assert look.look_at_model(model, problems)["verified"]
    path.write_bytes(b"other weights")
    assert not look.look_at_model(model, problems)["verified"]
    assert problems == []


def on_demand(
    look: ModuleType, topology: dict[str, Any], *sizes: float, running: int = 0, **spec: Any
) -> list[str]:
    models = [{"name": f"m{number}", "urls": ["http://m"]} for number in range(len(sizes))]
    found = {
        "topology": topology,
        "models": [{"bytes": int(size * GIB)} for size in sizes],
        "units": {"llama-server-numa0.service": {"memory": running}},
    }
    rule = {"memory": {"factor": 1.5, "reserve": 2 * GIB}, "models": models}
    problems: list[str] = look.memory_problems_on_demand({**rule, **spec}, found)
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


def test_the_memory_that_is_said_for_models_on_demand_must_be_there(
    look: ModuleType, two_sockets: dict[str, Any]
) -> None:
    (problem,) = on_demand(look, two_sockets, 1.0, models_memory="47GiB")
    assert "llama_node_memory is 47.0 GiB, but this machine has 46.0 GiB beside 2.0" in problem
    (problem,) = on_demand(look, two_sockets, 10.0, models_memory="14 GB")
    assert problem.startswith("not enough memory: m0 needs 15.0 GiB (1.5 x file, and ")
    assert "llama_node_cache_ram), but llama_node_memory is 13.0 GiB" in problem
    assert on_demand(look, two_sockets, 10.0, models_memory="16384MiB") == []
    (problem,) = on_demand(look, two_sockets, 10.0, models_memory="15.5GiB", cache_ram=1024)
    assert "m0 needs 16.0 GiB" in problem


def test_missing_models_on_demand_need_disk_space_once_each(
    look: ModuleType, tmp_path: Path
) -> None:
    a, b = f"{tmp_path}/a.gguf", f"{tmp_path}/b.gguf"
    spec = {"models": [{"path": a, "urls": ["http://m"]}, {"path": b, "urls": ["http://m"]}]}
    seen = [
        {"path": a, "bytes": 7, "missing": 7},
        {"path": a, "bytes": 7, "missing": 7},
        {"path": b, "bytes": 9, "missing": 0},
    ]
    (wanted,) = look.disks_on_demand(spec, seen)
    assert (wanted["path"], wanted["bytes"], wanted["what"]) == (str(tmp_path), 7, "a.gguf")


def test_the_memory_of_a_server_counts_what_its_children_have(look: ModuleType) -> None:
    code = "held = bytearray(64 << 20); print(1, flush=True); input()"
    # A thread starts it, as in a router.
    parent = f"""
import subprocess, sys, threading
def start(): subprocess.run([sys.executable, "-c", {code!r}])
threading.Thread(target=start).start()
"""
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"1\n"
        assert look.own_memory(process.pid) > 64 << 20
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(30) == 0
