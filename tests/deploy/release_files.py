"""The files that a control machine sends to its hosts, made from this checkout."""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from gateway.local.demo_model import ensure_demo_model
from tests.processes import ran

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
    ran(sys.executable, "-m", "pip", *arguments, "-qq", limit=LIMIT)


# Archives with a `llama-server`: a real server with the command line of llama.cpp's binary. Package
# registries don't have the binary itself. The server of the xllamacpp wheel replaces it, so that
# everything but the compilation is real.

EMBEDDED_SERVER = (
    "gateway/__init__.py",
    "gateway/workshop/__init__.py",
    "gateway/local/__init__.py",
    "gateway/local/embedded.py",
    "gateway/local/launch.py",
)
"""The modules of the embedded server; they import nothing else of the gateway."""

SERVER = '''#!/usr/bin/python3
"""llama-server's command line over the embedded server."""
import argparse, ctypes, os, sys
home = os.path.dirname(os.path.realpath(__file__))
sys.path[:0] = [home + "/lib"]
parser = argparse.ArgumentParser(prog="llama-server", allow_abbrev=False)
for flag in ("--model", "--alias", "--host", "--port", "--parallel", "--cache-ram"):
    parser.add_argument(flag)
for flag in ("--api-key-file", "-c", "-t", "-tb", "-b", "-ub"):
    parser.add_argument(flag)
for flag in ("--metrics", "--slots", "--jinja", "--no-webui", "--no-mmap", "--mlock"):
    parser.add_argument(flag, action="store_true")
given = parser.parse_args()
if given.mlock and ctypes.CDLL(None, use_errno=True).mlockall(1 | 2) != 0:  # now and later
    sys.exit(f"mlockall: {os.strerror(ctypes.get_errno())}")
from gateway.local.embedded import main
main(["--model", given.model, "--alias", given.alias, "--host", given.host, "--port", given.port,
      "--slots", given.parallel, "--ctx", given.c, "--threads", given.t, "--batch", given.b,
      "--ubatch", given.ub, "--cache-ram", given.cache_ram]
     + (["--api-key-file", given.api_key_file] if given.api_key_file else []))
'''

CMAKE = """cmake_minimum_required(VERSION 3.14)
project(llama NONE)
get_cmake_property(names CACHE_VARIABLES)
set(switches "")
foreach(name ${names})
  if(name MATCHES "^GGML_")
    string(APPEND switches "${name}=${${name}}\\n")
  endif()
endforeach()
file(WRITE ${CMAKE_BINARY_DIR}/switches ${switches})
add_custom_target(llama-server
  COMMAND ${CMAKE_COMMAND} -E copy_directory ${CMAKE_SOURCE_DIR}/server ${CMAKE_BINARY_DIR}/bin)
"""


def release_archive(folder: Path, wheelhouse: Path) -> Path:
    """An archive like llama.cpp's releases: a folder with the binary and its libraries."""
    archive = folder / "llama-b1-bin-linux.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        _add_server(tar, "llama-b1", wheelhouse)
    return archive


def source_archive(folder: Path, wheelhouse: Path) -> Path:
    """An archive like that of a tag: a folder with a CMakeLists.txt and a target `llama-server`."""
    archive = folder / "llama.cpp-b1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        _add(tar, "llama.cpp-b1/CMakeLists.txt", CMAKE.encode())
        _add_server(tar, "llama.cpp-b1/server", wheelhouse)
    return archive


def real_package(folder: Path, program: Path) -> Path:
    """A Debian package with the real llama-server, and all that it loads, at another place.

    Its loader's path, which `make llama-server` writes into it, is replaced by a shorter one.
    """
    place = "/usr/lib/llama-server"
    tree = folder / "real-package"
    shutil.copytree(program.parent, tree / place[1:], symlinks=True)
    there = tree / place[1:] / program.name
    loader = f"{program.parent}/ld-linux-x86-64.so.2".encode()
    moved = f"{place}/ld-linux-x86-64.so.2".encode().ljust(len(loader), b"\0")
    content = there.read_bytes()
    assert content.count(loader) == 1
    assert len(moved) == len(loader)
    there.write_bytes(content.replace(loader, moved))
    (tree / "usr/bin").mkdir()
    (tree / "usr/bin/llama-server").symlink_to(f"..{place[4:]}/{program.name}")
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN/control").write_text(
        "Package: llama.cpp-test\nVersion: 1\nArchitecture: amd64\nDepends: libgomp1\n"
        "Maintainer: nobody <nobody@example.org>\nDescription: llama-server for a test\n"
    )
    archive = folder / "llama.cpp-real.deb"
    options = ("--root-owner-group", "-Zgzip", "-z1", "--build")
    ran("dpkg-deb", *options, tree, archive, limit=LIMIT)
    return archive


def _add_server(tar: tarfile.TarFile, home: str, wheelhouse: Path) -> None:
    _add(tar, f"{home}/llama-server", SERVER.encode(), mode=0o755)
    for path in EMBEDDED_SERVER:
        _add(tar, f"{home}/lib/{path}", (ROOT / path).read_bytes())
    with tarfile.open(wheelhouse) as wheels:
        (name,) = (one for one in wheels.getnames() if Path(one).name.startswith("xllamacpp-"))
        packed = wheels.extractfile(name)
        assert packed is not None
        with zipfile.ZipFile(io.BytesIO(packed.read())) as wheel:
            for entry in wheel.infolist():
                if not entry.is_dir():
                    _add(tar, f"{home}/lib/{entry.filename}", wheel.read(entry), mode=0o755)


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), mode
    tar.addfile(info, io.BytesIO(content))
