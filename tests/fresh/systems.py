"""Bare systems: Debian or Ubuntu with the packages that README's *Start* names, and no others.

They are kept in the cache of `tests/deploy/base_image.py` and made again each week, so that they
stay current.
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
DEFAULT_SYSTEMS = ("bookworm", "trixie", "testing")
# An installed system has the last two; a root by mmdebstrap lacks them (Ubuntu's has no apt).
PACKAGES = ("git", "make", "python3", "python3-venv", "apt", "ca-certificates")
PROGRAMS = {
    "git": "git",
    "mmdebstrap": "mmdebstrap",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
NEWCOMER = "newcomer"  # the user who runs the commands, which need no root
VERSION = 1  # raise it when the steps below change
WEEK = "%G-%V"
# Settings of apt on this machine that decide how it reaches its archive.
APT_NETWORK_SETTING = re.compile(r"Acquire::(?:https?::|Check-Date |Check-Valid-Until )")
UBUNTU_KEYS = Path("usr/share/keyrings/ubuntu-archive-keyring.gpg")


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
    dump = subprocess.run(
        ["apt-config", "dump", "--no-empty", "--format", '%f "%v";%n'],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
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
