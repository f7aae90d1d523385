from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gateway
from gateway.local.topology import (
    CpuCache,
    cgroup_cpu_quota,
    cgroup_memory_headroom,
    format_kernel_list,
    parse_kernel_list,
    parse_kernel_size,
    read_caches,
    read_processor,
    read_topology,
)
from tests.each_case import each_case
from tests.local.machine import (
    EPYC,
    GRAVITON_3,
    make_machine,
    run_alone,
    two_sockets_with_smt,
    write,
)

GIB = 1 << 30


def test_one_socket_without_smt_has_a_core_per_cpu(tmp_path: Path) -> None:
    machine = read_topology(make_machine(tmp_path, [[[0], [1], [2], [3]], []], memory_gib=32))
    (node,) = machine.nodes  # one without CPUs is left out
    assert (node.number, node.cpus, machine.core_count) == (0, (0, 1, 2, 3), 4)
    assert (machine.memory_total, machine.memory_available) == (32 * GIB, 24 * GIB)
    assert machine.cpu_quota is None
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "200000 100000\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", f"{GIB}\n")
    limited = read_topology(tmp_path)
    assert (limited.cpu_quota, limited.memory_available) == (2, 7 * GIB)
    assert limited.threads_per_server(limited.nodes[0]) == 2


def test_a_machine_of_which_little_is_told_is_one_node(tmp_path: Path) -> None:
    assert read_topology(tmp_path).core_count == 1
    write(tmp_path, "sys/devices/system/cpu/online", "0-1\n")
    write(tmp_path, "proc/self/status", "Cpus_allowed_list:\t0-1\n")
    write(tmp_path, "proc/meminfo", "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n")
    write(tmp_path, "sys/devices/system/cpu/cpu0/cache/index0/level", "2")
    (node,) = read_topology(tmp_path).nodes
    assert (node.number, node.cores) == (0, ((0,), (1,)))
    assert (node.memory_total, node.memory_available) == (GIB, GIB // 2)
    (cache,) = read_caches(tmp_path, {0})
    assert (cache.level, cache.size, cache.cpus) == (2, 0, (0,))


def test_two_sockets_have_their_memory_and_distances(tmp_path: Path) -> None:
    """Memory that is easily reclaimed counts as free."""
    root = make_machine(tmp_path, two_sockets_with_smt(), memory_nodes_allowed="0")
    machine = read_topology(root)
    assert machine.sockets == (0, 1)
    assert [
        (node.sockets, node.distances, node.memory_total, node.memory_available)
        for node in machine.nodes
    ] == [((0,), (10, 32), 32 * GIB, 24 * GIB), ((1,), (32, 10), 32 * GIB, 24 * GIB)]
    assert [node.memory_allowed for node in machine.nodes] == [True, False]
    # A thread for each physical core, and none for hyperthreads.
    assert [machine.threads_per_server(machine.nodes[0], servers=n) for n in (1, 2, 9)] == [4, 2, 1]


FIRST, SECOND = ((0, 8), (1, 9), (2, 10), (3, 11)), ((4, 12), (5, 13), (6, 14), (7, 15))


@pytest.mark.parametrize(
    ("machine", "cores"),
    [
        ({}, {0: FIRST, 1: SECOND}),
        ({"offline": (9, 3, 11)}, {0: ((0, 8), (1,), (2, 10)), 1: SECOND}),
        ({"cpus_allowed": "0-1,8-9"}, {0: ((0, 8), (1, 9))}),
        ({"cpus_allowed": "0,9"}, {0: ((0,), (9,))}),
    ],
    ids=["all", "some offline", "within a cpuset", "without the siblings"],
)
def test_a_core_is_its_siblings_that_are_online_and_allowed(
    tmp_path: Path, machine: dict[str, Any], cores: dict[int, object]
) -> None:
    nodes = read_topology(make_machine(tmp_path, two_sockets_with_smt(), **machine)).nodes
    assert {node.number: node.cores for node in nodes} == cores
    for node in nodes:
        assert node.cpus == tuple(sorted(cpu for core in node.cores for cpu in core))


def test_efficiency_cores_of_a_hybrid_processor_get_no_thread(tmp_path: Path) -> None:
    cores = [[0, 1], [2, 3], [4], [5], [6], [7]]
    root = make_machine(tmp_path, [cores])
    write(root, "sys/devices/cpu_core/cpus", "0-3\n")
    write(root, "sys/devices/cpu_atom/cpus", "4-7\n")
    machine = read_topology(root)
    (node,) = machine.nodes
    assert node.efficiency_cpus == {4, 5, 6, 7}
    assert node.performance_cpus == (0, 1, 2, 3)
    assert machine.threads_per_server(node) == 2
    assert len(node.cores) == 6
    # A cpuset of efficiency cores alone uses them.
    write(root, "proc/self/status", "Cpus_allowed_list:\t4-7\n")
    machine = read_topology(root)
    assert machine.threads_per_server(machine.nodes[0]) == 4


MODULES = ("local/__init__", "local/topology")
"""The modules that a playbook runs on a host, beside an empty `gateway/__init__.py`."""


def test_a_bare_python_reads_the_topology(tmp_path: Path) -> None:
    copied = tmp_path / "gateway/local"
    copied.mkdir(parents=True)
    (tmp_path / "gateway/__init__.py").touch()
    for module in MODULES:
        shutil.copy(
            Path(gateway.__file__).parent / f"{module}.py", tmp_path / f"gateway/{module}.py"
        )
    machine = make_machine(tmp_path / "machine", two_sockets_with_smt())
    found = json.loads(run_alone(tmp_path, "gateway.local.topology", machine).stdout)
    assert (found["sockets"], found["cores"]) == (2, 8)
    assert [server["threads"] for server in found["servers"]] == [4, 4]


# Processors and their caches.


X86, ARM = "x86_64", "aarch64"
AMX = {"AMX", "AMX INT8", "AMX BF16", "AVX-VNNI"}
AVX512 = {"AVX2", "AVX-512", "AVX-512 VNNI", "AVX-512 BF16"}


@pytest.mark.parametrize(
    ("cpuinfo", "architecture", "name", "has", "lacks"),
    [
        (EPYC, X86, "AMD EPYC 9554 64-Core Processor", AVX512, AMX),
        (
            GRAVITON_3,
            ARM,
            "maker 0x41 part 0xd40",
            {"NEON", "dot product", "i8mm", "SVE", "BF16"},
            {"SVE2"},
        ),
        ("", "", "", set(), AVX512),
    ],
    ids=["epyc", "graviton 3", "unknown"],
)
def test_a_processor_has_the_instructions_that_llama_cpp_can_use(
    tmp_path: Path, cpuinfo: str, architecture: str, name: str, has: set[str], lacks: set[str]
) -> None:
    root = make_machine(tmp_path, [[[0]]], cpuinfo=cpuinfo) if cpuinfo else tmp_path
    processor = read_processor(root)
    assert (processor.architecture, processor.name) == (architecture, name)
    assert has <= set(processor.instructions)
    assert not lacks & set(processor.instructions)


def test_a_shared_cache_appears_once_and_instruction_caches_do_not(tmp_path: Path) -> None:
    root = make_machine(tmp_path, two_sockets_with_smt())
    caches = read_caches(root, set(range(16)))
    assert [cache.level for cache in caches] == [1] * 8 + [3] * 2
    assert caches[0] == CpuCache(1, "data", 32 << 10, (0, 8))
    assert caches[-1] == CpuCache(3, "unified", 16 << 20, (4, 5, 6, 7, 12, 13, 14, 15))


# Limits of control groups.


V1, V1_ROOT = "4:cpu,cpuacct:/x\n1:name=systemd:/\n9:memory:/x", "9:memory:/x\n4:cpu:/x"
CPU_V1 = "cpu/cpu.cfs_period_us 100000; cpu/cpu.cfs_quota_us "
MEMORY_V1 = "memory/x/memory.limit_in_bytes 4G; memory/x/memory.usage_in_bytes 3G; "
SLICE = "a.slice/b.service/memory.max 6G; a.slice/memory.max 8G; a.slice/memory.current 5G"


@pytest.mark.parametrize(
    ("groups", "files", "quota", "headroom"),
    [
        ("", "", None, None),
        ("0::/", "cpu.max max 100000; memory.max max", None, None),
        ("0::/a.slice/b.service", SLICE, None, 3 * GIB),  # the tightest of the ancestors
        ("0::/a/b", "a/b/cpu.max 400000 100000; a/cpu.max 200000 100000", 2.0, None),
        ("0::/", "memory.max 8G; memory.current 6G; memory.stat inactive_file 4G", None, 6 * GIB),
        (V1, MEMORY_V1 + "memory/x/memory.stat total_inactive_file 1G", None, 2 * GIB),
        (V1, CPU_V1.replace("cpu/", "cpu,cpuacct/x/") + "300000", 3.0, None),
        # A container that shows its group as the root.
        (V1_ROOT, CPU_V1 + "50000; " + MEMORY_V1.replace("/x", ""), 0.5, GIB),
        (V1_ROOT, CPU_V1 + f"-1; memory/memory.limit_in_bytes {0x7FFFFFFFFFFFF000}", None, None),
        ("0::/../../outside", "../outside/cpu.max 100000 100000", None, None),  # not the mount's
    ],
)
def test_limits_of_control_groups_are_read(
    tmp_path: Path, groups: str, files: str, quota: float | None, headroom: int | None
) -> None:
    write(tmp_path, "proc/self/cgroup", f"{groups}\n")
    for file in filter(None, files.split("; ")):
        place, _, value = file.partition(" ")
        value = re.sub(r"(\d)G$", lambda gib: str(int(gib[1]) * GIB), value)
        write(tmp_path, f"sys/fs/cgroup/{place}", f"{value}\n")
    assert (cgroup_cpu_quota(tmp_path), cgroup_memory_headroom(tmp_path)) == (quota, headroom)


# The kernel's files.


@given(st.sets(st.integers(0, 512)))
def test_a_list_is_read_back_as_it_was_written(numbers: set[int]) -> None:
    assert parse_kernel_list(format_kernel_list(numbers)) == numbers
    assert format_kernel_list({0, 1, 2, 5, 7, 8}) == "0-2,5,7-8"


@each_case(
    ("text", "size"),
    [("32K\n", 32768), ("1M", 1 << 20), ("4096", 4096), ("", 0), ("none", 0), ("K", 0)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_kernel_size(text) == size
