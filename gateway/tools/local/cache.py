"""The one folder where everything lives that `llama-gateway up` keeps between runs."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

LOCK_POLL_INTERVAL = 0.05  # seconds between two tries at a lock file


def cache_folder(env: Mapping[str, str] | None = None) -> Path:
    """`$LLAMA_GATEWAY_CACHE`, else `$XDG_CACHE_HOME/llama-gateway`, else `~/.cache/llama-gateway`.

    The folder is not created. As the XDG specification says, a relative `XDG_CACHE_HOME`
    counts as unset.
    """
    env = os.environ if env is None else env
    if own := env.get("LLAMA_GATEWAY_CACHE"):
        return Path(own).expanduser().absolute()
    if (xdg := env.get("XDG_CACHE_HOME")) and Path(xdg).is_absolute():
        return Path(xdg) / "llama-gateway"
    home = Path(env["HOME"]) if env.get("HOME") else Path.home()
    return home / ".cache" / "llama-gateway"


def models_folder(cache: Path) -> Path:
    """Where generated models are kept."""
    return cache / "models"


def logs_folder(cache: Path) -> Path:
    """Where the servers of this machine write their logs."""
    return cache / "logs"


@contextmanager
def file_lock(path: Path, *, timeout: float) -> Iterator[None]:
    """Hold the lock file `path` (created where missing) against other processes.

    Raises TimeoutError when somebody else holds it for longer than `limit` seconds. The kernel
    gives the lock back when its holder dies, so a stale file never blocks anybody.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as handle:
        until = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    message = f"{path}: another process has held this lock for {timeout:.0f} s"
                    raise TimeoutError(message) from None
                time.sleep(LOCK_POLL_INTERVAL)
        yield
