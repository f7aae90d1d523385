"""Checks whether this machine can run the test hosts: `python -m tests.deploy.host_support`.

Prints the reason and the remedy where it can't.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.deploy.base_image import RELEASE

# Required programs, each with its Debian package.
PROGRAMS = {
    "mmdebstrap": "mmdebstrap",
    "systemd-nspawn": "systemd-container",
    "nft": "nftables",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "setpriv": "util-linux",
}
BRIDGE = "lgtest-try"
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")


def unsupported_reason() -> str:
    """Why this machine can't run hosts, with the remedy; empty if it can."""
    if os.geteuid() != 0:
        return "root is needed. Remedy: run it as root, or in a virtual machine"
    if missing := sorted({PROGRAMS[name] for name in PROGRAMS if not shutil.which(name)}):
        return f"programs are missing. Remedy: apt-get install {' '.join(missing)}"
    release = Path("/etc/os-release").read_text()
    if not re.search(rf"^VERSION_CODENAME={RELEASE}$", release, re.MULTILINE):
        return f"hosts are made from this machine's package sources, and it is not Debian {RELEASE}"
    return missing_rights()


def missing_rights() -> str:
    """Rights that a container around this process may lack; they are tried without a trace."""
    with tempfile.TemporaryDirectory() as name:
        layers = f"lowerdir={name}/lower,upperdir={name}/upper,workdir={name}/work"
        commands = (
            f"mount -t tmpfs tmpfs {name}; cd {name}; mkdir lower upper work root; "
            f"mount -t overlay overlay -o {layers} root; "
            f"ip link add {BRIDGE} type bridge; nft list tables"
        )
        unshare = ["unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork"]
        done = subprocess.run(
            [*unshare, "sh", "-ec", commands],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    if done.returncode != 0:
        return f"mounts, namespaces or bridges are not allowed here: {done.stderr.strip()}"
    if not os.access(FORWARDING, os.W_OK):
        return f"{FORWARDING} can't be written here"
    return ""


if __name__ == "__main__":
    if reason := unsupported_reason():
        print(reason)
        sys.exit(1)
