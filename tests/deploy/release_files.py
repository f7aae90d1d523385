"""The files that a control machine sends to its hosts, made from this checkout."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from gateway.local.demo_model import ensure_demo_model

ROOT = Path(__file__).parents[2]
PINS = ROOT / "requirements/local.txt"
LIMIT = 300.0


@dataclass(frozen=True, slots=True)
class ReleaseFiles:
    """Makes the files; `folder` belongs to this run, `cache` is shared by many."""

    folder: Path
    cache: Path

    def wheel(self) -> Path:
        """The wheel of this checkout."""
        return self._built(ROOT, self.folder / "wheel")

    def newer_wheel(self) -> Path:
        """The same with a higher version."""
        tree = self.folder / "newer-tree"
        shutil.copytree(ROOT / "gateway", tree / "gateway")
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tree)
        init = tree / "gateway/__init__.py"
        text, count = re.subn(r'__version__ = ".*"', '__version__ = "99.0.0"', init.read_text())
        if count != 1:
            raise AssertionError(f"{init}: no version")
        init.write_text(text)
        return self._built(tree, self.folder / "newer")

    def wheelhouse(self) -> Path:
        """A tar of all pinned packages, as `make wheelhouse` makes it."""
        known = hashlib.sha256(PINS.read_bytes()).hexdigest()[:10]
        made = self.cache / f"wheelhouse-{known}.tar"
        if made.is_file():
            return made
        wheels = self.folder / "wheelhouse"
        _pip("download", "--require-hashes", "--only-binary=:all:", "-r", PINS, "-d", wheels)
        draft = self.folder / "wheelhouse.tar"
        with tarfile.open(draft, "w") as tar:
            for wheel in sorted(wheels.iterdir()):
                tar.add(wheel, wheel.name)
        self.cache.mkdir(parents=True, exist_ok=True)
        for old in self.cache.glob("wheelhouse-*.tar"):
            old.unlink()
        shutil.move(draft, made)
        return made

    def model(self) -> Path:
        """The demo model, as `demo.gguf`."""
        named = self.folder / "demo.gguf"
        shutil.copy(ensure_demo_model(self.cache / "models"), named)
        return named

    @staticmethod
    def _built(tree: Path, folder: Path) -> Path:
        _pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, tree)
        (wheel,) = folder.glob("*.whl")
        return wheel


def _pip(*arguments: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "-qq"],
        check=True,
        timeout=LIMIT,
        stdin=subprocess.DEVNULL,
    )
