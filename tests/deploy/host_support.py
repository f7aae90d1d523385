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

# Program: the Debian package that has it.
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


def why_not() -> str:
    """The reason with its remedy, or nothing."""
    if os.geteuid() != 0:
        return "root is needed. Remedy: run it as root, or in a virtual machine"
    if missing := sorted({PROGRAMS[name] for name in PROGRAMS if not shutil.which(name)}):
        return f"programs are missing. Remedy: apt-get install {' '.join(missing)}"
    told = Path("/etc/os-release").read_text()
    if not re.search(rf"^VERSION_CODENAME={RELEASE}$", told, re.MULTILINE):
        return f"hosts are made from this machine's package sources, and it is not Debian {RELEASE}"
    return rights_missing()


def rights_missing() -> str:
    """What a container that this runs in may withhold, tried: nothing of it stays."""
    with tempfile.TemporaryDirectory() as name:
        layers = f"lowerdir={name}/lower,upperdir={name}/upper,workdir={name}/work"
        inside = (
            f"mount -t tmpfs tmpfs {name}; cd {name}; mkdir lower upper work root; "
            f"mount -t overlay overlay -o {layers} root; "
            f"ip link add {BRIDGE} type bridge; nft list tables"
        )
        unshared = ["unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork"]
        done = subprocess.run(
            [*unshared, "sh", "-ec", inside],
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
    if reason := why_not():
        print(reason)
        sys.exit(1)
