"""Limits that a container or a systemd slice puts on this process: cgroup version 1 and 2."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

UNLIMITED = 1 << 60  # bytes; version 1 writes a number near 2**63 for "no limit"


def cpu_quota(sysroot: Path) -> float | None:
    """CPUs' worth of time per second that this process may use; None without a limit.

    The tightest limit of the group and its ancestors counts.
    """
    quotas = [
        *(_quota(*_words(group / "cpu.max")) for group in _unified(sysroot)),
        *(
            _quota(*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us"))
            for group in _controller(sysroot, "cpu")
        ),
    ]
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_room(sysroot: Path) -> int | None:
    """Bytes that this process's groups may still take; None without a limit.

    Page cache that the kernel would drop first counts as free.
    """
    rooms = [
        *(
            _room(group, "memory.max", "memory.current", "inactive_file")
            for group in _unified(sysroot)
        ),
        *(
            _room(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            for group in _controller(sysroot, "memory")
        ),
    ]
    return min((room for room in rooms if room is not None), default=None)


def _quota(quota: str = "max", period: str = "100000") -> float | None:
    if not (quota.isdigit() and period.isdigit()) or int(period) == 0:
        return None  # "max" in version 2, -1 in version 1
    return int(quota) / int(period)


def _room(group: Path, limit_file: str, usage_file: str, cache_key: str) -> int | None:
    limit = _number(group / limit_file)
    if limit is None or limit >= UNLIMITED:
        return None
    usage = _number(group / usage_file) or 0
    cache = 0
    for line in _text(group / "memory.stat").splitlines():
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
    """The group's folder and its ancestors' up to the mount.

    In a container the path may be the host's while the mount shows the container's own group as
    its root, so folders that don't exist are passed over by whoever reads them.
    """
    for line in _text(sysroot / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            inner = PurePosixPath(path.strip().lstrip("/"))
            for group in (inner, *inner.parents):
                if ".." not in group.parts:
                    yield mount / group


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _words(path: Path) -> list[str]:
    return _text(path).split()[:2]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
