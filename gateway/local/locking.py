"""Whether servers may keep their model in memory (`mlock`), and whether they did.

llama.cpp only writes a warning into its log when it was not allowed to, and goes on unlocked.
"""

from __future__ import annotations

from pathlib import Path

from gateway.local.errors import MemoryLockError
from gateway.local.gguf_file import Model
from gateway.local.memory import gib
from gateway.local.sysfs import read_text

ROOT = Path("/")
CAP_IPC_LOCK = 14  # linux/capability.h
MOST = 0.9  # of the file that must be locked; its vocabulary is not


def lock_limit(sysroot: Path = ROOT) -> int | None:
    """Bytes that each server this process starts may lock; None: any, or nothing tells.

    The limit is the hard one, up to which `gateway.local.launch` raises it. The capability does
    without one, where it outlives exec: root's, or an ambient one.
    """
    told = dict(_pairs(sysroot / "proc/self/status"))
    is_root = told.get("Uid", "").split()[1:2] == ["0"]
    capabilities = int(told.get("CapEff" if is_root else "CapAmb", "0"), 16)
    if capabilities >> CAP_IPC_LOCK & 1:
        return None
    for line in read_text(sysroot / "proc/self/limits").splitlines():
        if line.startswith("Max locked memory"):
            hard = line.split()[4]
            return int(hard) if hard.isdecimal() else None
    return None


def check_lock(model: Model, limit: int | None) -> None:
    """Raise MemoryLockError when the limit does not let a server lock the model."""
    if limit is not None and limit < model.size:
        raise MemoryLockError(
            f"{model.path}: --mlock: a server may lock {gib(limit)} of memory here, and the model "
            f"is {gib(model.size)}. Remedy: `sudo prlimit --pid $$ --memlock=unlimited` in this "
            "shell; in a systemd unit LimitMEMLOCK=infinity and AmbientCapabilities=CAP_IPC_LOCK; "
            "for a container --ulimit memlock=-1; or leave --mlock out"
        )


def not_locked(model: Model, pid: int, sysroot: Path = ROOT) -> str | None:
    """What to tell of a server that has loaded its model, but has not locked all of it."""
    words = dict(_pairs(sysroot / f"proc/{pid}/status")).get("VmLck", "").split()
    if not words:
        return None  # gone, or not Linux
    locked = int(words[0]) * 1024
    if locked >= MOST * model.size:
        return None
    return f"only {gib(locked)} of {gib(model.size)} is locked in memory; its log may tell why"


def _pairs(path: Path) -> list[tuple[str, str]]:
    lines = [line.partition(":") for line in read_text(path).splitlines()]
    return [(key, value.strip()) for key, _, value in lines]
