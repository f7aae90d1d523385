"""The machine of two sockets as a host for a playbook: systemd and sshd, at a port of this machine.

The guest sees no network but this machine, and this machine sees the ports of the guest that are
forwarded to it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.deploy import base_image
from tests.deploy.base_image import RELEASE, debian
from tests.deploy.hosts import Host, HostNetwork, configure_root, ssh_options
from tests.numa import machine

THREADS = 1  # of a core: those of two are looked at where `up` is
ADDRESS = "10.0.2.15"  # what qemu forwards to
GATEWAY = "10.0.2.2"
SERVERS = (8080, 8081)  # ports of llama.cpp
SSH_TIMEOUT = 60  # seconds that ssh may take to shake hands
START_LIMIT = 900.0  # seconds until it answers ssh; a minute is enough on a quiet machine
PACKAGES = (
    *base_image.PACKAGES,
    # What the role asks apt for is there: without a network it can't be fetched.
    *("python3-venv", "libgomp1", "linux-image-cloud-amd64"),
)
HOOKS = (
    *machine.HOOKS[:-1],
    'rm -f "$1"/var/cache/apt/archives/*.deb',
    'chroot "$1" systemctl enable systemd-networkd.service ssh.service',
    (
        'chroot "$1" systemctl mask systemd-networkd-wait-online.service'
        " apt-daily.timer apt-daily-upgrade.timer"
    ),
    'rm -f "$1/etc/machine-id" "$1/etc/resolv.conf" && touch "$1/etc/machine-id"',
)


@dataclass(slots=True)
class Guest(Host):
    """`ports` are this machine's, by those of the guest."""

    ports: dict[int, int]

    def ssh(self) -> list[str]:
        patience = ("-o", f"ConnectTimeout={SSH_TIMEOUT}", "-p", str(self.ports[22]))
        return ["ssh", *patience, "-i", str(self.key), *ssh_options(), f"root@{self.address}"]


@contextlib.contextmanager
def guest(name: str, cache: Path, folder: Path) -> Iterator[tuple[HostNetwork, Guest]]:
    """The machine, once it answers ssh; `folder` is filled with what it is made of."""
    made_of = (RELEASE, PACKAGES, HOOKS)
    base = debian(cache, f"numa-host-{RELEASE}", made_of, PACKAGES, HOOKS)
    key, console = folder / "key", folder / "console"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=60
    )
    disk = _disk(base, name, key.with_suffix(".pub").read_text(), folder)
    ports = _free_ports(22, *SERVERS)
    forwards = [f"hostfwd=tcp:127.0.0.1:{here}-:{there}" for there, here in ports.items()]
    command = [
        *machine.qemu(base, disk, THREADS, console),
        *("-append", f"{machine.KERNEL} net.ifnames=0"),
        *("-netdev", ",".join(["user", "id=net", "restrict=on", *forwards])),
        *("-device", "virtio-net-pci,netdev=net,romfile="),
    ]
    with (folder / "qemu").open("wb") as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        made = Guest(name, "127.0.0.1", base, key, process, ports)
        _wait_for_ssh(made, folder)
        yield HostNetwork(folder, base, key, {name: made}), made
    finally:
        process.kill()
        process.wait()
        disk.unlink()


def _disk(base: Path, name: str, key: str, folder: Path) -> Path:
    root = folder / "root"
    subprocess.run(["cp", "-a", str(base), str(root)], check=True, timeout=300)
    configure_root(root, name, ADDRESS, key, interface="eth0", gateway=GATEWAY)
    # Its lists of packages count as fresh: there is nowhere to fetch newer ones from.
    os.utime(root / "var/lib/apt/lists")
    stamp = root / "var/lib/apt/periodic/update-success-stamp"
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.touch()
    return machine.disk_of(root, folder / "disk")


def _wait_for_ssh(made: Guest, folder: Path) -> None:
    end = time.monotonic() + START_LIMIT
    while made.up and time.monotonic() < end:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if made.run("true", check=False, limit=2 * SSH_TIMEOUT).returncode == 0:
                return
        time.sleep(1)
    told = "".join((folder / n).read_text(errors="replace")[-3000:] for n in ("qemu", "console"))
    raise machine.MachineError(f"{made.name} does not answer ssh:\n{told}")


def _free_ports(*wanted: int) -> dict[int, int]:
    with contextlib.ExitStack() as stack:
        ports = {}
        for port in wanted:
            taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports[port] = taken.getsockname()[1]
        return ports
