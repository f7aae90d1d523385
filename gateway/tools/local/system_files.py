"""Reads `/sys`, `/proc` and cgroups under any root; a missing file is empty, not an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

KIB = 1024

_UNITS = {"K": KIB, "M": KIB**2, "G": KIB**3}


def read_text(path: Path) -> str:
    """Return the content of a file; empty where it can't be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """Return the integer in a file, or None."""
    text = read_text(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def read_kernel_list(path: Path) -> set[int] | None:
    """Return the numbers of the kernel list in a file; None where it is missing or empty."""
    text = read_text(path)
    return parse_kernel_list(text) if text.strip() else None


def parse_kernel_list(text: str) -> set[int]:
    """Parse a kernel list such as `0-3,8`."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def format_kernel_list(numbers: set[int] | tuple[int, ...]) -> str:
    """Format numbers as a kernel list, which systemd's `CPUAffinity=` and taskset accept too."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def parse_kernel_size(text: str) -> int:
    """Parse a size such as `32768K` to bytes; 0 if it is none."""
    text = text.strip()
    unit = _UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    return int(digits) * unit if digits.isdecimal() else 0


def read_meminfo(path: Path) -> dict[str, int]:
    """Return the bytes of each entry by name. A NUMA node's file has `Node 0` before each name."""
    sizes: dict[str, int] = {}
    for line in read_text(path).splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if name and words and words[0].isdigit():
            sizes[name.split()[-1]] = int(words[0]) * KIB
    return sizes


UNLIMITED = 1 << 60  # bytes; version 1 writes a number near 2**63 for "no limit"


def cgroup_cpu_quota(sysroot: Path) -> float | None:
    """Return the CPUs' worth of time that this process may use; None without a limit.

    The lowest limit of its cgroup and the ancestors counts.
    """
    quotas = [
        *(_quota(*_words(group / "cpu.max")) for group in _unified(sysroot)),
        *(
            _quota(*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us"))
            for group in _controller(sysroot, "cpu")
        ),
    ]
    return min((quota for quota in quotas if quota is not None), default=None)


def cgroup_memory_headroom(sysroot: Path) -> int | None:
    """Return the bytes that this process's cgroups may still allocate; None without a limit.

    Inactive page cache counts as free, since the kernel drops it first.
    """
    headrooms = [
        *(
            _headroom(group, "memory.max", "memory.current", "inactive_file")
            for group in _unified(sysroot)
        ),
        *(
            _headroom(
                group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )
            for group in _controller(sysroot, "memory")
        ),
    ]
    return min((free for free in headrooms if free is not None), default=None)


def _quota(quota: str = "max", period: str = "100000") -> float | None:
    if not (quota.isdigit() and period.isdigit()) or int(period) == 0:
        return None  # "max" in version 2, -1 in version 1
    return int(quota) / int(period)


def _headroom(group: Path, limit_file: str, usage_file: str, cache_key: str) -> int | None:
    limit = read_number(group / limit_file)
    if limit is None or not 0 <= limit < UNLIMITED:
        return None
    usage = read_number(group / usage_file) or 0
    cache = 0
    for line in read_text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == cache_key and value.strip().isdigit():
            cache = int(value)
    return max(0, limit - max(0, usage - cache))


def _unified(sysroot: Path) -> Iterator[Path]:
    return _groups(sysroot, "", sysroot / "sys/fs/cgroup")


def _controller(sysroot: Path, name: str) -> Iterator[Path]:
    for mount in (name, f"{name},cpuacct") if name == "cpu" else (name,):
        yield from _groups(sysroot, name, sysroot / "sys/fs/cgroup" / mount)


def _groups(sysroot: Path, controller: str, mount: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its ancestors, up to the mount.

    Some may not exist: in a container the path may be the host's, while the mount's root is the
    container's own cgroup.
    """
    for line in read_text(sysroot / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            inner = PurePosixPath(path.strip().lstrip("/"))
            for group in (inner, *inner.parents):
                if ".." not in group.parts:
                    yield mount / group


def _words(path: Path) -> list[str]:
    return read_text(path).split()[:2]
