"""The root that every test host is an overlay of: Debian with systemd and sshd, made once.

Kept outside the tree, in `~/.cache/llama-gateway-tests` or where `DEPLOY_TEST_CACHE` says.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

RELEASE = "bookworm"
PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "openssh-server", "sudo"),
    *("python3", "python3-apt"),
    *("iproute2", "ca-certificates", "procps", "kmod"),
)
# What the roles install by themselves is only laid ready, so that a run needs no network.
LAID_READY = (
    "nginx-light",
    "nftables",
    "logrotate",
    "prometheus",
    "python3-venv",
    "libgomp1",
    "curl",
    "openssl",
)
VERSION = 6  # raise it when what is done below changes
LIMIT = 600.0  # seconds to make it; 100 s were seen
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
CONTAINED = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--pid", "--kill-child"),
)
"""What a command's words go behind: no process and no mount of it outlives it, or this process."""


def cache_folder() -> Path:
    """Where the base and the runs live."""
    named = os.environ.get("DEPLOY_TEST_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "llama-gateway-tests"


def base_image(cache: Path) -> Path:
    """The base's folder, made when it isn't there: root, a network and `mmdebstrap` are needed."""
    laid_ready = (
        f"apt-get -qq -y --no-install-recommends --download-only install {' '.join(LAID_READY)}"
    )
    hooks = [
        # Services are started by what installs them, as on any machine.
        'rm -f "$1/usr/sbin/policy-rc.d"',
        'chroot "$1" apt-get -qq update',
        f'chroot "$1" {laid_ready}',
        'chroot "$1" systemctl enable systemd-networkd.service ssh.service',
        'chroot "$1" systemctl mask systemd-networkd-wait-online.service',
        'rm -f "$1/etc/machine-id" "$1/etc/resolv.conf" && touch "$1/etc/machine-id"',
    ]
    told = (RELEASE, PACKAGES, LAID_READY, VERSION)
    return debian(cache, f"base-{RELEASE}", told, PACKAGES, hooks)


def debian(
    cache: Path,
    name: str,
    made_of: object,
    packages: Sequence[str],
    hooks: Sequence[str],
    *,
    suite: str = RELEASE,
    options: Sequence[str] = (),
) -> Path:
    """The folder of a Debian, made anew when what it is `made_of` has changed.

    `suite` and `options` are mmdebstrap's.
    """
    base = cache / f"{name}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:10]}"
    if base.is_dir():
        return base
    cache.mkdir(parents=True, exist_ok=True)
    for old in cache.glob(f"{name}-*"):
        shutil.rmtree(old)
    draft = base.with_suffix(".draft")
    subprocess.run(
        [
            *CONTAINED,
            *("--mount-proc", "--"),
            *("mmdebstrap", "--quiet", "--variant=minbase", "--skip=cleanup/apt"),
            "--dpkgopt=force-unsafe-io",
            f"--include={','.join(packages)}",
            *(f"--customize-hook={hook}" for hook in hooks),
            *options,
            *(suite, str(draft)),
        ],
        check=True,
        timeout=LIMIT,
    )
    draft.rename(base)
    return base


if __name__ == "__main__":
    base_image(cache_folder())
