"""Machines in network namespaces of their own, behind one switch, whose traffic can be cut.

All of it lies in one namespace of the drill's own, which goes with its last process: so do all
processes that were started in it. Linux, as root, with iproute2 and nftables.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.processes import ran

SWITCH = "10.88.0.1"
"""The address by which machines reach what runs outside of them: database, nodes, clients."""
_INSIDE = "TESTS_CLUSTER_INSIDE"
_PROGRAMS = ("unshare", "ip", "nft")


def missing() -> str:
    """Why there can be no such network here; empty: there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"not installed here: {', '.join(absent)}" if absent else ""


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def enter(module: str, arguments: Sequence[str]) -> None:
    """Go on as `python -m module` in namespaces of its own; returns there."""
    if os.environ.pop(_INSIDE, ""):
        return
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    os.environ |= {_INSIDE: "1", "PATH": _path()}
    os.execvp("unshare", [*command, sys.executable, "-m", module, *arguments])


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine: a namespace with an address."""

    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, str, str, str]:
        """What a command begins with that runs there."""
        return ("ip", "netns", "exec", self.name)

    def cut(self, addresses: Iterable[str] = (), ports: Iterable[int] = ()) -> None:
        """Lose all packets from and to these addresses, and those of these ports elsewhere."""
        self.mend()
        rules = []
        for address in addresses:
            rules += [f"add rule inet cut in ip saddr {address} drop"]
            rules += [f"add rule inet cut out ip daddr {address} drop"]
        for port in ports:
            rules += [f"add rule inet cut in tcp sport {port} drop"]
            rules += [f"add rule inet cut out tcp dport {port} drop"]
        chains = [
            f"add chain inet cut {name} {{ type filter hook {hook} priority 0; }}"
            for name, hook in (("in", "input"), ("out", "output"))
        ]
        ran(*self.prefix, "nft", "; ".join(["add table inet cut", *chains, *rules]))

    def mend(self) -> None:
        ran(*self.prefix, "nft", "add table inet cut; delete table inet cut")


def switch() -> None:
    # `ip netns` keeps names as files, which would outlive the namespaces.
    Path("/run/netns").mkdir(exist_ok=True)
    ran("mount", "-t", "tmpfs", "none", "/run/netns")
    ran("ip", "link", "set", "lo", "up")
    ran("ip", "link", "add", "switch", "type", "bridge")
    ran("ip", "address", "add", f"{SWITCH}/24", "dev", "switch")
    ran("ip", "link", "set", "switch", "up")


def machine(number: int, name: str) -> Machine:
    made = Machine(name, f"{SWITCH.rpartition('.')[0]}.{10 + number}")
    port = f"port{number}"
    ran("ip", "netns", "add", name)
    ran("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
    ran("ip", "link", "set", port, "master", "switch", "up")
    for command in (
        ("link", "set", "lo", "up"),
        ("address", "add", f"{made.address}/24", "dev", "eth0"),
        ("link", "set", "eth0", "up"),
    ):
        ran("ip", "-n", name, *command)
    return made


def commands() -> Iterator[tuple[int, list[str]]]:
    """All processes inside that have not ended, and their command lines."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            yield process.pid, process.cmdline()
