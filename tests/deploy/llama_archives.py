"""Archives with a `llama-server` in them: a real server behind the command line of the binary.

The binary itself can't be had from the package registries; what stands in for it is the server of
the xllamacpp wheel, so that everything but the compiler's work is real.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

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
from gateway.tools.local.embedded import main
main(["--model", given.model, "--alias", given.alias, "--host", given.host, "--port", given.port,
      "--slots", given.parallel, "--ctx", given.c, "--threads", given.t, "--batch", given.b,
      "--ubatch", given.ub, "--cache-ram", given.cache_ram]
     + (["--api-key-file", given.api_key_file] if given.api_key_file else []))
'''

CMAKE = """cmake_minimum_required(VERSION 3.14)
project(llama NONE)
get_cmake_property(names CACHE_VARIABLES)
set(told "")
foreach(name ${names})
  if(name MATCHES "^GGML_")
    string(APPEND told "${name}=${${name}}\\n")
  endif()
endforeach()
file(WRITE ${CMAKE_BINARY_DIR}/switches ${told})
add_custom_target(llama-server
  COMMAND ${CMAKE_COMMAND} -E copy_directory ${CMAKE_SOURCE_DIR}/server ${CMAKE_BINARY_DIR}/bin)
"""


def release_archive(folder: Path, wheelhouse: Path) -> Path:
    """As llama.cpp's releases are: a folder with the binary and its libraries."""
    made = folder / "llama-b1-bin-linux.tar.gz"
    with tarfile.open(made, "w:gz") as tar:
        _add_server(tar, "llama-b1", wheelhouse)
    return made


def source_archive(folder: Path, wheelhouse: Path) -> Path:
    """As a tag's archive is: one folder with a CMakeLists.txt and a target `llama-server`."""
    made = folder / "llama.cpp-b1.tar.gz"
    with tarfile.open(made, "w:gz") as tar:
        _add(tar, "llama.cpp-b1/CMakeLists.txt", CMAKE.encode())
        _add_server(tar, "llama.cpp-b1/server", wheelhouse)
    return made


def package(folder: Path, wheelhouse: Path) -> Path:
    """A Debian package with the binary in /usr/bin."""
    tree = folder / "package"
    with tarfile.open(release_archive(folder, wheelhouse)) as tar:
        # Debian 12's Python takes no `filter=` yet; those that do want one.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(tree / "usr/lib")
    (tree / "usr/bin").mkdir(parents=True)
    (tree / "usr/bin/llama-server").symlink_to("../lib/llama-b1/llama-server")
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN/control").write_text(
        "Package: llama.cpp-test\nVersion: 1\nArchitecture: all\nDepends: libgomp1, python3\n"
        "Maintainer: nobody <nobody@example.org>\nDescription: llama-server for a test\n"
    )
    made = folder / "llama.cpp-test.deb"
    command = ["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", str(tree), str(made)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return made


def sha256(path: Path) -> str:
    """Of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _add_server(tar: tarfile.TarFile, home: str, wheelhouse: Path) -> None:
    _add(tar, f"{home}/llama-server", SERVER.encode(), mode=0o755)
    for name in ("__init__", "local/__init__", "local/embedded", "local/launch"):
        text = (ROOT / "gateway" / f"{name}.py").read_bytes()
        _add(tar, f"{home}/lib/gateway/{name}.py", text)
    with tarfile.open(wheelhouse) as wheels:
        (name,) = (one for one in wheels.getnames() if Path(one).name.startswith("xllamacpp-"))
        packed = wheels.extractfile(name)
        assert packed is not None
        with zipfile.ZipFile(io.BytesIO(packed.read())) as wheel:
            for entry in wheel.infolist():
                if not entry.is_dir():
                    _add(tar, f"{home}/lib/{entry.filename}", wheel.read(entry), mode=0o755)


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    told = tarfile.TarInfo(name)
    told.size, told.mode = len(content), mode
    tar.addfile(told, io.BytesIO(content))
