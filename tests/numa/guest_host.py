"""The machine of two sockets as a host for a playbook, with systemd and sshd.

The guest reaches no network but this machine, and this machine reaches the guest's forwarded ports.
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

THREADS = 1  # per core; cores with two threads are tested with `up`
ADDRESS = "10.0.2.15"  # the guest's address, to which qemu forwards
GATEWAY = "10.0.2.2"
SERVERS = (8080, 8081)  # ports of llama.cpp
SSH_TIMEOUT = 60  # seconds for a handshake of ssh
START_LIMIT = 900.0  # seconds until it answers ssh; on a quiet machine it takes a minute
PACKAGES = (
    *base_image.PACKAGES,
    # Packages that the role installs, which can't be fetched without a network.
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
    """The guest; `ports`: the guest's port -> this machine's forwarded port."""

    ports: dict[int, int]

    def ssh(self) -> list[str]:
        options = ("-o", f"ConnectTimeout={SSH_TIMEOUT}", "-p", str(self.ports[22]))
        return ["ssh", *options, "-i", str(self.key), *ssh_options(), f"root@{self.address}"]


@contextlib.contextmanager
def guest(name: str, cache: Path, folder: Path) -> Iterator[tuple[HostNetwork, Guest]]:
    """Run the machine; yields once it answers ssh. Its files are made in `folder`."""
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
    with (folder / "qemu").open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        host = Guest(name, "127.0.0.1", base, key, process, ports)
        _wait_for_ssh(host, folder)
        yield HostNetwork(folder, base, key, {name: host}), host
    finally:
        process.kill()
        process.wait()
        disk.unlink()


def _disk(base: Path, name: str, key: str, folder: Path) -> Path:
    root = folder / "root"
    subprocess.run(["cp", "-a", str(base), str(root)], check=True, timeout=300)
    configure_root(root, name, ADDRESS, key, interface="eth0", gateway=GATEWAY)
    # The package lists must count as fresh, since newer ones can't be fetched.
    os.utime(root / "var/lib/apt/lists")
    stamp = root / "var/lib/apt/periodic/update-success-stamp"
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.touch()
    return machine.disk_of(root, folder / "disk")


def _wait_for_ssh(host: Guest, folder: Path) -> None:
    end = time.monotonic() + START_LIMIT
    while host.up and time.monotonic() < end:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if host.run("true", check=False, limit=2 * SSH_TIMEOUT).returncode == 0:
                return
        time.sleep(1)
    logs = "".join((folder / n).read_text(errors="replace")[-3000:] for n in ("qemu", "console"))
    raise machine.MachineError(f"{host.name} does not answer ssh:\n{logs}")


def _free_ports(*guest_ports: int) -> dict[int, int]:
    with contextlib.ExitStack() as stack:
        ports = {}
        for port in guest_ports:
            taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports[port] = taken.getsockname()[1]
        return ports
