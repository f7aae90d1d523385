"""Bare systems: Debian or Ubuntu with the packages that README's *Start* names, and no others.

They are kept in the cache of `tests/deploy/base_image.py` and made again each week, so that they
stay current. Commands in them see this machine's network, devices and processors, but not its files
and processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.base_image import AUTHORITIES, CONTAINED_COMMAND, debian


@dataclass(frozen=True, slots=True)
class System:
    """A release, by its name in the archive."""

    suite: str
    title: str
    ubuntu: bool = False


SYSTEMS = {
    system.suite: system
    for system in (
        System("bookworm", "Debian 12"),
        System("trixie", "Debian 13"),
        System("testing", "Debian testing"),
        System("noble", "Ubuntu 24.04", ubuntu=True),
        System("resolute", "Ubuntu 26.04", ubuntu=True),
    )
}
# An installed system has the last two; a root by mmdebstrap lacks them (Ubuntu's has no apt).
PACKAGES = ("git", "make", "python3", "python3-venv", "apt", "ca-certificates")
PROGRAMS = {
    "git": "git",
    "mmdebstrap": "mmdebstrap",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
NEWCOMER = "newcomer"  # the user who runs the commands, which need no root
CHECKOUT_PATH = f"/home/{NEWCOMER}/llama-gateway"
LEFT_BEHIND = "LEFT BEHIND: "
"""Begins the lines that name processes which were still running when a command ended."""
VERSION = 1  # raise it when the steps below change
WEEK = "%G-%V"
# Settings of apt on this machine that decide how it reaches its archive.
APT_NETWORK_SETTING = re.compile(r"Acquire::(?:https?::|Check-Date |Check-Valid-Until )")
UBUNTU_KEYS = Path("usr/share/keyrings/ubuntu-archive-keyring.gpg")
# The mounts end with the namespace.
_ENTER_ROOT = """
root=$1 user=$2 place=$3; shift 3
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
exec /usr/sbin/chroot "$root" sh -c '
  user=$1 place=$2; shift 2
  cd "$place"
  setpriv --reuid="$user" --regid="$user" --init-groups "$@"
  status=$?
  for one in /proc/[0-9]*; do
    if [ "$one" != /proc/1 ] && read -r stat 2>/dev/null <"$one/stat"; then
      case $stat in *") Z "*) ;; *) echo "LEFT BEHIND: $stat" ;; esac
    fi
  done
  exit "$status"
' sh "$user" "$place" "$@"
"""


def unsupported_reason() -> str:
    """Why no system can be made here, with the remedy; empty if it can."""
    if os.geteuid() != 0:
        return "root is needed. Remedy: run it as root, or in a virtual machine"
    if missing := sorted({PROGRAMS[name] for name in PROGRAMS if not shutil.which(name)}):
        return f"programs are missing. Remedy: apt-get install {' '.join(missing)}"
    return ""


def bare_root(cache: Path, system: System) -> Path:
    """The root of a bare system; fetched if there is none from this week.

    Raises: subprocess.SubprocessError; mmdebstrap prints the reason to standard error.
    """
    options = [f"--aptopt={setting}" for setting in _apt_network_settings()]
    if system.ubuntu:
        # The package python3-venv is in `universe`.
        options += ["--components=main,universe", f"--keyring={_ubuntu_keys(cache, options)}"]
    hooks = [
        'rm -f "$1"/var/cache/apt/archives/*.deb',
        f'chroot "$1" useradd --create-home --shell=/bin/bash {NEWCOMER}',
    ]
    name, made_of = f"fresh-{system.suite}", (system, PACKAGES, VERSION, time.strftime(WEEK))
    return debian(cache, name, made_of, PACKAGES, hooks, suite=system.suite, options=options)


def _ubuntu_keys(cache: Path, options: Sequence[str]) -> Path:
    """Ubuntu's archive keys: this machine's, or those of Debian's package."""
    here = Path("/") / UBUNTU_KEYS
    if here.exists():
        return here
    extracted = ("--variant=extract", *options)
    name, package = "fresh-ubuntu-keys", "ubuntu-keyring"
    # Debian 12 no longer has this package.
    folder = debian(cache, name, VERSION, (package,), (), suite="trixie", options=extracted)
    return folder / UBUNTU_KEYS


def _apt_network_settings() -> list[str]:
    """This machine's network settings of apt, such as proxies."""
    command = ["apt-config", "dump", "--no-empty", "--format", '%f "%v";%n']
    dump = subprocess.check_output(command, text=True, timeout=60)
    return [line for line in dump.splitlines() if APT_NETWORK_SETTING.match(line)]


def registry_settings() -> dict[str, str]:
    """Environment variables with which programs reach this machine's package registries.

    The bare system has this machine's certificate authorities (`copy_network_settings`), but node
    brings its own.
    """
    found = {
        name: value
        for name, value in os.environ.items()
        if name.lower() in {"http_proxy", "https_proxy", "no_proxy", "npm_config_registry"}
    }
    found["NODE_EXTRA_CA_CERTS"] = str(AUTHORITIES)
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    for line in done.stdout.splitlines():
        setting, _, value = line.partition("=")
        name = setting.rpartition(".")[2]
        # The bare system has no folders of this machine.
        places = " ".join(
            place for place in value.strip("'\"").split() if not place.startswith(("file:", "/"))
        )
        if name in {"index-url", "extra-index-url", "trusted-host", "proxy"} and places:
            found[f"PIP_{name.upper().replace('-', '_')}"] = places
    return found


def copy_network_settings(root: Path) -> None:
    """Copy this machine's name service settings and certificate authorities to a root."""
    for file in (Path("/etc/resolv.conf"), Path("/etc/hosts"), AUTHORITIES):
        if file.exists():
            there = root / file.relative_to("/")
            there.unlink(missing_ok=True)
            shutil.copyfile(file, there)


@contextlib.contextmanager
def running_command(
    root: Path, command: list[str], output: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in the checkout as a plain user; it and its children end with the block."""
    variables = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(Path(CHECKOUT_PATH).parent),
        "USER": NEWCOMER,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        **registry_settings(),
    }
    arguments = [str(root), NEWCOMER, CHECKOUT_PATH, *command]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*CONTAINED_COMMAND, "--", "sh", "-euc", _ENTER_ROOT, "sh", *arguments],
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True, env=variables,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
