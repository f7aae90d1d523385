"""Bare systems: Debian or Ubuntu with what README's *Start* asks for, and nothing else.

They are kept in the cache of `tests/deploy/base_image.py` and made anew each week, so that they
are today's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.base_image import AUTHORITIES, debian


@dataclass(frozen=True, slots=True)
class System:
    """A release, by the name that its archive has for it."""

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
DEFAULT_SYSTEMS = ("bookworm", "trixie", "testing")
# An installed system has the last two; a bare root of mmdebstrap doesn't (Ubuntu's has no apt).
PACKAGES = ("git", "make", "python3", "python3-venv", "apt", "ca-certificates")
PROGRAMS = {
    "git": "git",
    "mmdebstrap": "mmdebstrap",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
NEWCOMER = "newcomer"  # who runs the commands: they need no root
VERSION = 1  # raise it when what is done below changes
WEEK = "%G-%V"
# Settings of this machine's apt, of those that decide how it reaches its archive.
APT_NETWORK_SETTING = re.compile(r"Acquire::(?:https?::|Check-Date |Check-Valid-Until )")
UBUNTU_KEYS = Path("usr/share/keyrings/ubuntu-archive-keyring.gpg")


def unsupported_reason() -> str:
    """Why no system can be made here, with the remedy; or nothing."""
    if os.geteuid() != 0:
        return "root is needed. Remedy: run it as root, or in a virtual machine"
    if missing := sorted({PROGRAMS[name] for name in PROGRAMS if not shutil.which(name)}):
        return f"programs are missing. Remedy: apt-get install {' '.join(missing)}"
    return ""


def bare_root(cache: Path, system: System) -> Path:
    """The root of a bare system; fetched when there is none of this week.

    Raises: subprocess.SubprocessError; what mmdebstrap has against it stands on standard error.
    """
    options = [f"--aptopt={setting}" for setting in _apt_network_settings()]
    if system.ubuntu:
        # Its archive has what it makes venvs with in `universe`.
        options += ["--components=main,universe", f"--keyring={_ubuntu_keys(cache, options)}"]
    hooks = [
        'rm -f "$1"/var/cache/apt/archives/*.deb',
        f'chroot "$1" useradd --create-home --shell=/bin/bash {NEWCOMER}',
    ]
    made_of = (system, PACKAGES, VERSION, time.strftime(WEEK))
    return debian(
        cache,
        f"fresh-{system.suite}",
        made_of,
        PACKAGES,
        hooks,
        suite=system.suite,
        options=options,
    )


def _ubuntu_keys(cache: Path, options: Sequence[str]) -> Path:
    """Ubuntu's keys: of this machine, or of Debian's package of them."""
    here = Path("/") / UBUNTU_KEYS
    if here.exists():
        return here
    extracted = ("--variant=extract", *options)
    name, package = "fresh-ubuntu-keys", "ubuntu-keyring"
    # Debian 12 has no such package any more.
    folder = debian(cache, name, VERSION, (package,), (), suite="trixie", options=extracted)
    return folder / UBUNTU_KEYS


def _apt_network_settings() -> list[str]:
    """Proxies and the like: this machine's settings of apt."""
    told = subprocess.run(
        ["apt-config", "dump", "--no-empty", "--format", '%f "%v";%n'],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    return [line for line in told.splitlines() if APT_NETWORK_SETTING.match(line)]


def registry_settings() -> dict[str, str]:
    """How programs reach the package registries that this machine uses, as environment variables.

    The bare system has this machine's certificate authorities (`furnish`); node brings its own.
    """
    found = {
        name: value
        for name, value in os.environ.items()
        if name.lower() in {"http_proxy", "https_proxy", "no_proxy", "npm_config_registry"}
    }
    found["NODE_EXTRA_CA_CERTS"] = str(AUTHORITIES)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    for line in done.stdout.splitlines():
        setting, _, value = line.partition("=")
        name = setting.rpartition(".")[2]
        # A folder of this machine is none of the bare one.
        places = " ".join(
            place for place in value.strip("'\"").split() if not place.startswith(("file:", "/"))
        )
        if name in {"index-url", "extra-index-url", "trusted-host", "proxy"} and places:
            found[f"PIP_{name.upper().replace('-', '_')}"] = places
    return found


def copy_network_settings(root: Path) -> None:
    """Give a root this machine's name service and certificate authorities."""
    for file in (Path("/etc/resolv.conf"), Path("/etc/hosts"), AUTHORITIES):
        if file.exists():
            there = root / file.relative_to("/")
            there.unlink(missing_ok=True)
            shutil.copyfile(file, there)
