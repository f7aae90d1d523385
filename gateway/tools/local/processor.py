"""Reads the processor's name, instruction sets, caches and efficiency cores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.tools.local.system_files import (
    parse_kernel_list,
    parse_kernel_size,
    read_kernel_list,
    read_number,
    read_text,
)

# The instruction sets that llama.cpp's CPU code is built for (ggml's GGML_AVX512_VNNI and so on):
# the kernel's flags, and the usual names. Later ones are faster.
X86_INSTRUCTIONS = {
    "avx": "AVX",
    "f16c": "F16C",
    "fma": "FMA",
    "avx2": "AVX2",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx512vbmi": "AVX-512 VBMI",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_tile": "AMX",
    "amx_int8": "AMX INT8",
    "amx_bf16": "AMX BF16",
}

ARM_INSTRUCTIONS = {
    "asimd": "NEON",
    "asimdhp": "FP16",
    "asimddp": "dot product",
    "i8mm": "i8mm",
    "bf16": "BF16",
    "sve": "SVE",
    "sve2": "SVE2",
    "sme": "SME",
}

EFFICIENCY_CAPACITY = 0.8
"""A core with less than this share of the highest capacity is an efficiency core."""


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor; all of a machine are alike."""

    architecture: str
    """`x86_64`, `aarch64`, or empty for unknown."""
    name: str
    instructions: tuple[str, ...]
    """The instruction sets that llama.cpp can use, by their usual names."""
    flags: frozenset[str]
    """The kernel's names of all its features."""


UNKNOWN_PROCESSOR = Processor("", "", (), frozenset())


@dataclass(frozen=True, slots=True)
class CpuCache:
    """One cache: its size in bytes, and the CPUs that share it."""

    level: int
    kind: str
    size: int
    cpus: tuple[int, ...]


def read_processor(sysroot: Path) -> Processor:
    """Read the processor from `/proc/cpuinfo` under `sysroot`."""
    names: dict[str, str] = {}
    for line in read_text(sysroot / "proc/cpuinfo").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            names.setdefault(key.strip().lower(), value.strip())
    if "features" in names:  # Arm
        flags = frozenset(names["features"].split())
        wide = "asimd" in flags or names.get("cpu architecture", "") >= "8"
        architecture = "aarch64" if wide else "arm"
        return Processor(architecture, _arm_name(names), _named(ARM_INSTRUCTIONS, flags), flags)
    flags = frozenset(names.get("flags", "").split())
    architecture = "x86_64" if "lm" in flags else "x86" if flags else ""
    return Processor(
        architecture, names.get("model name", ""), _named(X86_INSTRUCTIONS, flags), flags
    )


def read_caches(sysroot: Path, cpus: set[int]) -> tuple[CpuCache, ...]:
    """Return each data or unified cache of these CPUs once, L1 first."""
    found: set[CpuCache] = set()
    for cpu in cpus:
        folder = sysroot / f"sys/devices/system/cpu/cpu{cpu}/cache"
        for index in range(8):
            entry = folder / f"index{index}"
            level = read_number(entry / "level")
            kind = read_text(entry / "type").strip()
            if level is None or kind == "Instruction":
                continue
            shared = (parse_kernel_list(read_text(entry / "shared_cpu_list")) | {cpu}) & cpus
            size = parse_kernel_size(read_text(entry / "size"))
            found.add(CpuCache(level, kind.lower(), size, tuple(sorted(shared))))
    return tuple(sorted(found, key=lambda cache: (cache.level, cache.cpus)))


def efficiency_cpus(sysroot: Path, cpus: set[int]) -> frozenset[int]:
    """Return the CPUs that are much slower than the fastest, on machines that mix them.

    llama.cpp divides its work evenly, so all threads wait for the slowest one.
    """
    atoms = read_kernel_list(sysroot / "sys/devices/cpu_atom/cpus")
    if atoms and read_kernel_list(sysroot / "sys/devices/cpu_core/cpus"):
        return frozenset(atoms & cpus)
    capacities = {
        cpu: capacity
        for cpu in cpus
        if (capacity := read_number(sysroot / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity"))
    }
    highest = max(capacities.values(), default=0)
    return frozenset(cpu for cpu, own in capacities.items() if own < EFFICIENCY_CAPACITY * highest)


def _named(known: dict[str, str], flags: frozenset[str]) -> tuple[str, ...]:
    return tuple(name for flag, name in known.items() if flag in flags)


_ARM_MAKERS = {"0x41": "Arm", "0xc0": "Ampere", "0x61": "Apple", "0x51": "Qualcomm"}

# The cores of common servers: Graviton 2 to 4, Altra and AmpereOne.
_ARM_CORES = {
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0c"): "Neoverse N1",
    ("0x41", "0xd40"): "Neoverse V1",
    ("0x41", "0xd49"): "Neoverse N2",
    ("0x41", "0xd4f"): "Neoverse V2",
    ("0xc0", "0xac3"): "Ampere-1",
    ("0xc0", "0xac4"): "Ampere-1a",
}


def _arm_name(names: dict[str, str]) -> str:
    maker, part = names.get("cpu implementer", ""), names.get("cpu part", "")
    known = _ARM_CORES.get((maker, part))
    if known:
        return known
    if "model name" in names:
        return names["model name"]
    return f"{_ARM_MAKERS.get(maker, f'maker {maker}')} part {part}" if part else ""
