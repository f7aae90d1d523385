"""The folder that `llama-gateway up` and `tune` keep between runs, and files made in it once."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

# In the cache folder: demo models, downloads (a folder for each address), the servers' logs.
DEMO_MODELS, DOWNLOADS, LOGS = "models", "downloads", "logs"
LOCK_POLL_INTERVAL = 0.05  # seconds between two tries at a lock file
SHARE_TIMEOUT = 5.0  # seconds; `cache list` and `cache remove` hold a file for a moment


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


def ensure_file(path: Path, write: Callable[[Path], None], *, timeout: float) -> Path:
    """Return the file at `path`, which `write` makes unless it exists.

    Of several processes one writes, under another name until the file is whole, and the others
    wait for it. Raises TimeoutError after `timeout` seconds, OSError where the folder can't be
    written, and whatever `write` raises.
    """
    if path.is_file():
        return path
    with file_lock(path, timeout=timeout):
        if not path.is_file():
            part = path.with_name(f"{path.name}.part")
            try:
                write(part)
                part.chmod(0o644)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
    return path


@contextmanager
def file_lock(path: Path, *, timeout: float) -> Iterator[None]:
    """Hold the lock file beside `path` (`NAME.lock`, made if missing) against other processes.

    Raises TimeoutError when another process holds it for longer than `timeout` seconds. The kernel
    releases the lock when its holder dies, so a stale file blocks nobody.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("a+b") as handle:
        if not _lock(handle, fcntl.LOCK_EX, timeout):
            held = f"another process has held this lock for {timeout:.0f} s"
            raise TimeoutError(f"{handle.name}: {held}")
        yield


@contextmanager
def models_in_use(paths: Sequence[Path]) -> Iterator[None]:
    """Keep models from `cache remove` within this context, and note that they are used now.

    The kernel releases the locks however this process ends. Raises OSError for a file that is
    missing.
    """
    with ExitStack() as stack:
        for path in paths:
            # Where another program keeps it locked, go without.
            _lock(stack.enter_context(path.open("rb")), fcntl.LOCK_SH, SHARE_TIMEOUT)
            with suppress(OSError):  # another user's file
                os.utime(path, (time.time(), path.stat().st_mtime))
        yield


@contextmanager
def unused_file(path: Path) -> Iterator[bool]:
    """Hold a file against `models_in_use`; yield False where some process uses it already."""
    with path.open("rb") as handle:
        yield _lock(handle, fcntl.LOCK_EX, 0.0)


def _lock(handle: BinaryIO, kind: int, timeout: float) -> bool:
    """Lock an open file, within `timeout` seconds; return whether that came about."""
    until = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(LOCK_POLL_INTERVAL)
        else:
            return True
