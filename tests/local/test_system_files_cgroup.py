from __future__ import annotations

from pathlib import Path

from gateway.local.topology import cgroup_cpu_quota, cgroup_memory_headroom
from tests.local.machine import write

GIB = 1 << 30
V1_UNLIMITED = 0x7FFFFFFFFFFFF000


def test_no_limit_is_none(tmp_path: Path) -> None:
    assert cgroup_cpu_quota(tmp_path) is None
    assert cgroup_memory_headroom(tmp_path) is None
    write(tmp_path, "proc/self/cgroup", "0::/user.slice\n")
    write(tmp_path, "sys/fs/cgroup/user.slice/cpu.max", "max 100000\n")
    write(tmp_path, "sys/fs/cgroup/user.slice/memory.max", "max\n")
    assert cgroup_cpu_quota(tmp_path) is None
    assert cgroup_memory_headroom(tmp_path) is None


def test_version_2_quota_of_a_container(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "150000 100000\n")
    assert cgroup_cpu_quota(tmp_path) == 1.5


def test_the_tightest_limit_of_the_ancestors_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/a.slice/b.service\n")
    write(tmp_path, "sys/fs/cgroup/a.slice/b.service/cpu.max", "400000 100000\n")
    write(tmp_path, "sys/fs/cgroup/a.slice/cpu.max", "200000 100000\n")
    write(tmp_path, "sys/fs/cgroup/a.slice/b.service/memory.max", f"{6 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/a.slice/memory.max", f"{8 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/a.slice/memory.current", f"{5 * GIB}\n")
    assert cgroup_cpu_quota(tmp_path) == 2.0
    assert cgroup_memory_headroom(tmp_path) == 3 * GIB


def test_inactive_page_cache_counts_as_free(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", f"{6 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/memory.stat", f"anon {GIB}\ninactive_file {4 * GIB}\n")
    assert cgroup_memory_headroom(tmp_path) == 6 * GIB


def test_version_1_limits(tmp_path: Path) -> None:
    lines = "9:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/\n"
    write(tmp_path, "proc/self/cgroup", lines)
    cpu, memory = "sys/fs/cgroup/cpu,cpuacct/docker/x", "sys/fs/cgroup/memory/docker/x"
    write(tmp_path, f"{cpu}/cpu.cfs_quota_us", "300000\n")
    write(tmp_path, f"{cpu}/cpu.cfs_period_us", "100000\n")
    write(tmp_path, f"{memory}/memory.limit_in_bytes", f"{4 * GIB}\n")
    write(tmp_path, f"{memory}/memory.usage_in_bytes", f"{3 * GIB}\n")
    write(tmp_path, f"{memory}/memory.stat", f"total_inactive_file {GIB}\n")
    assert cgroup_cpu_quota(tmp_path) == 3.0
    assert cgroup_memory_headroom(tmp_path) == 2 * GIB


def test_version_1_in_a_container_that_shows_its_group_as_the_root(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "9:memory:/docker/x\n4:cpu:/docker/x\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{GIB}\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", "0\n")
    assert cgroup_cpu_quota(tmp_path) == 0.5
    assert cgroup_memory_headroom(tmp_path) == GIB


def test_version_1_without_limits(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "9:memory:/\n4:cpu:/\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{V1_UNLIMITED}\n")
    assert cgroup_cpu_quota(tmp_path) is None
    assert cgroup_memory_headroom(tmp_path) is None


def test_a_path_cannot_leave_the_mount(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/../../outside\n")
    write(tmp_path, "sys/fs/outside/cpu.max", "100000 100000\n")
    assert cgroup_cpu_quota(tmp_path) is None
