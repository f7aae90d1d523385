"""The root file system below every test host's overlay: Debian with systemd and sshd.

It is made once and kept in `~/.cache/llama-gateway-tests`, or in `$DEPLOY_TEST_CACHE`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.processes import ran

RELEASE = "bookworm"
PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "openssh-server", "sudo"),
    *("python3", "python3-apt"),
    *("iproute2", "ca-certificates", "procps", "kmod"),
)
# Packages that the roles install: they are downloaded only, so that a run needs no network.
PREDOWNLOADED = (
    *("nginx-light", "nftables", "logrotate", "prometheus", "python3-venv", "libgomp1", "curl"),
    *("openssl", "haproxy", "keepalived", "postgresql"),
)
VERSION = 7  # raise it when the steps below change
LIMIT = 600.0  # seconds to make it; it took 100 s
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
CONTAINED_COMMAND = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--pid", "--kill-child"),
)
"""Prefix of a command: none of its processes and mounts outlives it, or this process."""


def cache_folder() -> Path:
    """The folder of the base image and of the runs."""
    named = os.environ.get("DEPLOY_TEST_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "llama-gateway-tests"


def base_image(cache: Path) -> Path:
    """The base image's folder; made if missing, which needs root, a network and `mmdebstrap`."""
    laid_ready = (
        f"apt-get -qq -y --no-install-recommends --download-only install {' '.join(PREDOWNLOADED)}"
    )
    hooks = [
        # Installing a package starts its services, as on any machine.
        'rm -f "$1/usr/sbin/policy-rc.d"',
        'chroot "$1" apt-get -qq update',
        f'chroot "$1" {laid_ready}',
        'chroot "$1" systemctl enable systemd-networkd.service ssh.service',
        'chroot "$1" systemctl mask systemd-networkd-wait-online.service',
        'rm -f "$1/etc/machine-id" "$1/etc/resolv.conf" && touch "$1/etc/machine-id"',
    ]
    made_of = (RELEASE, PACKAGES, PREDOWNLOADED, VERSION)
    return debian(cache, f"base-{RELEASE}", made_of, PACKAGES, hooks)


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
    """The folder of a Debian system; made again when `made_of` has changed.

    `suite` and `options` are those of mmdebstrap.
    """
    base = cache / f"{name}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:10]}"
    if base.is_dir():
        return base
    cache.mkdir(parents=True, exist_ok=True)
    for old in cache.glob(f"{name}-*"):
        shutil.rmtree(old)
    draft = base.with_suffix(".draft")
    ran(
        *(*CONTAINED_COMMAND, "--mount-proc", "--"),
        *("mmdebstrap", "--quiet", "--variant=minbase", "--skip=cleanup/apt"),
        *("--dpkgopt=force-unsafe-io", f"--include={','.join(packages)}"),
        *(f"--customize-hook={hook}" for hook in hooks),
        *options,
        suite,
        draft,
        limit=LIMIT,
    )
    draft.rename(base)
    return base
