"""Fetch the real llama-server, from Debian's unstable packages, for tests of the real thing.

    python3 setup/llama_server.py            # where it is there already: in a moment
    python3 setup/llama_server.py --renew    # the newest build

It needs no root, neither to fetch nor to run, and leaves the system alone: apt-get keeps its lists
in a folder of their own. The program is built for a newer Debian. So its folder has every library
that it loads, the C library and its loader too, and patchelf writes their place into the program.
It can be started by its path, starts itself again as a router does, reads models anywhere, and
finds GGML's CPU backends, which it looks for beside itself. The folder can't be moved.

Checkouts share it: it is in the user's cache, so that a clean clone needs no network for it.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

EXPECTED_BUILD = 11669
"""The build that the tests were last seen to pass with. Unstable has its newest build only."""

PACKAGES = (
    *("llama.cpp-tools", "libllama0", "libggml0"),
    *("libc6", "libgcc-s1", "libgomp1", "libssl3t64", "libstdc++6", "libzstd1", "zlib1g"),
    "patchelf",
)
PROGRAM = "llama-server"
SUITE = "sid"
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
BUILD = re.compile(r"^version: .*\bbuild (\d+)|^version: (\d+) ", re.MULTILINE)
COMMAND_LIMIT = 300.0  # seconds; each takes a few
VERSION_LIMIT = 30.0  # seconds
LOCK_LIMIT = 900.0  # seconds, for another process that fetches
LOCK_POLL = 0.1  # seconds


class FetchError(Exception):
    """The server can't be fetched here. The text, for people, names the problem and the remedy."""


def cache_folder(env: Mapping[str, str] | None = None) -> Path:
    """Where the server is kept: `llama-gateway-tests/llama-server` in the user's cache folder."""
    env = os.environ if env is None else env
    xdg = Path(env.get("XDG_CACHE_HOME", ""))
    cache = xdg if xdg.is_absolute() else Path.home() / ".cache"
    return cache / "llama-gateway-tests" / PROGRAM


def build_of(program: Path) -> int | None:
    """The build that a llama-server tells; None where it is missing or does not run."""
    try:
        told = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_LIMIT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = BUILD.search(told.stdout + told.stderr)
    return int(found[1] or found[2]) if found else None


def ensure_server(folder: Path, *, renew: bool = False) -> int:
    """Fetch the server into `folder` unless one that runs is there; `renew`: in any case.

    Returns its build. Several processes may call this at once: one fetches, the others wait. The
    folder appears whole or not at all. Raises FetchError.
    """
    if not renew and (build := build_of(folder / PROGRAM)) is not None:
        return build
    with _lock(folder.with_name(f"{folder.name}.lock")):
        if not renew and (build := build_of(folder / PROGRAM)) is not None:
            return build
        for rest in folder.parent.glob(f"{folder.name}.*.part"):  # of a fetch that was killed
            shutil.rmtree(rest, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            prefix=f"{folder.name}.", suffix=".part", dir=folder.parent, ignore_cleanup_errors=True
        ) as work:
            new = _assemble(_fetched_packages(Path(work)), Path(work) / "new", folder)
            if folder.exists():
                folder.rename(Path(work) / "old")
            new.rename(folder)
    if (build := build_of(folder / PROGRAM)) is None:
        raise FetchError(
            f"{folder / PROGRAM} does not run: see what it says to --version; a library may be "
            "missing in PACKAGES of setup/llama_server.py"
        )
    return build


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock file; the kernel releases it when its holder dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("a")
    except OSError as error:
        raise FetchError(f"{error}; name another folder with --folder") from None
    with handle:
        until = time.monotonic() + LOCK_LIMIT
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise FetchError(
                        f"{path}: another process has held this lock for {LOCK_LIMIT:.0f} s"
                    ) from None
                time.sleep(LOCK_POLL)
        yield


def _fetched_packages(work: Path) -> Path:
    """Fetch and unpack the packages below `work`. Returns the root of their files."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise FetchError(
                f"{tool} is missing: the server comes from Debian's packages. Run it on Debian, or "
                f"put a llama-server with all that it loads into {cache_folder()}"
            )
    mirror = _mirror()
    lists, archives, root = work / "apt", work / "archives", work / "root"
    for made in (lists / "lists/partial", lists / "archives/partial", archives, root):
        made.mkdir(parents=True)
    signed = f"[signed-by={KEYS}] " if KEYS.exists() else ""
    (lists / "sources.list").write_text(f"deb {signed}{mirror} {SUITE} main\n")
    # The machine's own settings hold too: how the mirror is reached is its affair.
    settings = {
        "Dir::State": lists,
        "Dir::State::status": "/dev/null",
        "Dir::Cache": lists,
        "Dir::Etc::sourcelist": lists / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "APT::Sandbox::User": "root",
        "APT::Update::Error-Mode": "any",
        "Acquire::Languages": "none",
        "Acquire::Retries": 2,
        "Acquire::http::Timeout": 30,
        "Acquire::https::Timeout": 30,
    }
    config = lists / "apt.conf"
    config.write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    env = {**os.environ, "APT_CONFIG": str(config)}
    _run("apt-get", "-qq", "update", env=env)
    _run("apt-get", "-qq", "download", *PACKAGES, env=env, cwd=archives)
    for archive in sorted(archives.glob("*.deb")):
        _run("dpkg-deb", "-x", str(archive), str(root))
    return root


def _mirror() -> str:
    """The Debian archive that this machine's own sources name."""
    named = _run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages")
    for uri in named.splitlines():
        if re.search(r"/debian/*$", uri):
            return uri
    raise FetchError(
        "this machine's apt sources name no Debian archive: run it on Debian, or add one "
        "(`apt-get indextargets` shows what they name)"
    )


def _assemble(root: Path, new: Path, final: Path) -> Path:
    """Put the program and its libraries side by side into the folder `new`, to run as `final`."""
    libraries = next(path for path in root.glob("usr/lib/*-linux-gnu*") if path.is_dir())
    # patchelf, too, is built for a newer Debian.
    loader = next(libraries.glob("ld-linux*"))
    patch = (str(loader), "--library-path", str(libraries), str(root / "usr/bin/patchelf"))
    new.mkdir()
    for folder in (libraries, libraries / "llama", libraries / "ggml/backends0"):
        for path in folder.glob("*.so*"):
            shutil.copy2(path, new, follow_symlinks=False)
    for library in new.iterdir():
        if not library.is_symlink():  # its own search path would come before the program's
            _run(*patch, "--remove-rpath", str(library))
    program = shutil.copy2(root / "usr/bin" / PROGRAM, new)
    places = (
        "--set-interpreter",
        str(final / loader.name),
        "--force-rpath",
        "--set-rpath",
        "$ORIGIN",
    )
    _run(*patch, *places, str(program))
    return new


def _run(*command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a command. Returns its output; raises FetchError with it when it fails."""
    try:
        done = subprocess.run(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FetchError(f"`{' '.join(command)}` took longer than {COMMAND_LIMIT:.0f} s") from None
    if done.returncode:
        raise FetchError(
            f"`{' '.join(command)}` failed with status {done.returncode}:\n{done.stderr.strip()}\n"
            "Remedy: make sure that `apt-get update` works here, and run this again"
        )
    return done.stdout


def main() -> int:
    """Fetch the server; the exit status."""
    parser = argparse.ArgumentParser(description="Fetch the real llama-server for tests.")
    parser.add_argument("--folder", type=Path, default=cache_folder(), help="where it is kept")
    parser.add_argument("--renew", action="store_true", help="fetch the newest build")
    options = parser.parse_args()
    try:
        build = ensure_server(options.folder.absolute(), renew=options.renew)
    except FetchError as error:
        sys.stderr.write(f"llama-server: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    drift = "" if build == EXPECTED_BUILD else f"; the tests expect build {EXPECTED_BUILD}"
    sys.stdout.write(f"Ready: {options.folder / PROGRAM} (build {build}{drift})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
