"""Builds `/sys` and `/proc` of other machines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from gateway.local.topology import format_kernel_list, read_fields

GIB_IN_KIB = 1 << 20

EPYC = """processor\t: 0
model name\t: AMD EPYC 9554 64-Core Processor
flags\t\t: fpu sse2 lm avx f16c fma avx2 avx512f avx512dq avx512bw avx512vl avx512vbmi avx512_vnni avx512_bf16
"""  # noqa: E501 - as the kernel writes it
SAPPHIRE_RAPIDS = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu lm avx f16c fma avx2 avx_vnni avx512f avx512dq avx512bw avx512vl avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8
"""  # noqa: E501 - as the kernel writes it
GRAVITON_3 = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd evtstrm aes crc32 atomics fphp asimdhp asimddp sve i8mm bf16
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
"""
ALTRA = """processor\t: 0
Features\t: fp asimd evtstrm aes crc32 atomics fphp asimdhp asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU part\t: 0xd0c
"""


def make_machine(
    root: Path,
    nodes: Sequence[Sequence[Sequence[int]]],
    *,
    memory_gib: int = 64,
    offline: Iterable[int] = (),
    cpus_allowed: str | None = None,
    memory_nodes_allowed: str | None = None,
    nodes_per_socket: int = 1,
    cpuinfo: str = EPYC,
) -> Path:
    """Build a machine whose NUMA nodes are lists of cores, which are lists of CPUs.

    Each node has an equal share of the memory, three quarters of it free, and a cache of its own.
    """
    all_cpus = [cpu for node in nodes for core in node for cpu in core]
    online = sorted(set(all_cpus) - set(offline))
    write(root, "sys/devices/system/cpu/online", listed(online))
    write(root, "sys/devices/system/node/online", f"0-{len(nodes) - 1}")
    share = memory_gib * GIB_IN_KIB // len(nodes)
    for number, cores in enumerate(nodes):
        folder = f"sys/devices/system/node/node{number}"
        write(root, f"{folder}/cpulist", listed(c for core in cores for c in core if c in online))
        memory = {"MemTotal": share, "MemFree": share // 2, "Inactive(file)": share // 8}
        lines = [
            f"{name}: {kib} kB" for name, kib in {**memory, "SReclaimable": share // 8}.items()
        ]
        lines.append("HugePages_Total:     0")
        write(root, f"{folder}/meminfo", "".join(f"\nNode {number} {line}" for line in lines))
        for core in cores:
            for cpu in core:
                if cpu in online:
                    siblings = listed(c for c in core if c in online)
                    folder = f"sys/devices/system/cpu/cpu{cpu}"
                    write(root, f"{folder}/topology/thread_siblings_list", siblings)
                    socket = number // nodes_per_socket
                    write(root, f"{folder}/topology/physical_package_id", f"{socket}\n")
                    write_cache(root, cpu, 0, 1, "Data", "32K", siblings)
                    write_cache(root, cpu, 1, 1, "Instruction", "32K", siblings)
                    shared = listed(c for other in cores for c in other if c in online)
                    write_cache(root, cpu, 2, 3, "Unified", "16384K", shared)
        apart = (10 if n == number else 32 for n in range(len(nodes)))
        write(root, f"sys/devices/system/node/node{number}/distance", " ".join(map(str, apart)))
    write(root, "proc/cpuinfo", cpuinfo)
    write(
        root,
        "proc/meminfo",
        f"MemTotal:       {memory_gib * GIB_IN_KIB} kB\n"
        f"MemFree:        {memory_gib * GIB_IN_KIB // 2} kB\n"
        f"MemAvailable:   {memory_gib * GIB_IN_KIB * 3 // 4} kB\n",
    )
    write(
        root,
        "proc/self/status",
        "Name:\tpython\n"
        f"Cpus_allowed_list:\t{cpus_allowed or listed(all_cpus)}\n"
        f"Mems_allowed_list:\t{memory_nodes_allowed or f'0-{len(nodes) - 1}'}\n",
    )
    return root


def two_sockets_with_smt() -> list[list[list[int]]]:
    """Two nodes of four cores with two threads each, numbered as in Linux."""
    return [[[core, core + 8] for core in range(first, first + 4)] for first in (0, 4)]


def write_cache(
    root: Path, cpu: int, index: int, level: int, kind: str, size: str, shared: str
) -> None:
    """Write one cache of a CPU."""
    folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
    values = {"level": str(level), "type": kind, "size": size, "shared_cpu_list": shared}
    for name, value in values.items():
        write(root, f"{folder}/{name}", value.strip() + "\n")


def listed(numbers: Iterable[int]) -> str:
    """Format a kernel list, with ranges."""
    return format_kernel_list(set(numbers)) + "\n"


def write(root: Path, place: str, text: str) -> None:
    """Write one file of the machine."""
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


ALONE = """
import sys, runpy
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def run_alone(root: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a module below this folder, with arguments, by a Python without any package."""
    words = [sys.executable, "-I", "-S", "-c", ALONE, *map(str, (root, *command))]
    return subprocess.run(words, capture_output=True, check=False, text=True, timeout=120)


def is_locked(pid: int, model: Path) -> bool:
    """Whether a process has locked as much memory as the model's file, but for the vocabulary."""
    locked = read_fields(Path(f"/proc/{pid}/status"))["VmLck"].split()[0]
    return int(locked) * 1024 >= 0.9 * model.stat().st_size
