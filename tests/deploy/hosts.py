"""Real hosts for a playbook: Debian under systemd in containers of systemd-nspawn, with sshd.

`with running_hosts(["h1", "h2"]) as hosts:` starts them and in any case removes everything at the
end. First it removes what a killed earlier run has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.deploy.base_image import AUTHORITIES, RELEASE, base_image, cache_folder
from tests.processes import ran

BRIDGE = "lgtest0"
TABLE = "llama_gateway_tests"
NETWORK = "10.213.0"
ADMIN = "admin"  # the user that Ansible logs in as; may become root
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
START_LIMIT = 60.0  # seconds until a host answers ssh; it took 5
STOP_LIMIT = 20.0
TMPFS_BYTES = (
    8 << 30
)  # bytes of memory, with which what the hosts write is kept there; 1.1 GB were seen


# Required programs, each with its Debian package.
PROGRAMS = {
    "mmdebstrap": "mmdebstrap",
    "systemd-nspawn": "systemd-container",
    "nft": "nftables",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "setpriv": "util-linux",
}


@dataclass(slots=True)
class Host:
    """One host. `root` is its file system as this machine sees it."""

    name: str
    address: str
    root: Path
    key: Path
    process: subprocess.Popen[bytes]

    def ssh(self) -> list[str]:
        """The ssh command, to which `run` adds the remote command."""
        return ["ssh", "-i", str(self.key), *ssh_options(), f"root@{self.address}"]

    def run(
        self, command: str, *, check: bool = True, limit: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a line of shell on the host, as root."""
        return ran(*self.ssh(), command, status=0 if check else None, limit=limit)

    def fetch(self, url: str) -> str:
        """The body of the answer to a GET on the host itself."""
        code = f"import urllib.request as r; print(r.urlopen({url!r}, timeout=20).read().decode())"
        return self.run(f'python3 -c "{code}"').stdout

    @property
    def up(self) -> bool:
        """Whether it is running."""
        return self.process.poll() is None


def ssh_options() -> list[str]:
    """Options for hosts that are made anew in every run."""
    return [
        *("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"),
        *("-o", "LogLevel=ERROR", "-o", "ConnectTimeout=5", "-o", "BatchMode=yes"),
        *("-o", "ControlMaster=no"),
    ]


@dataclass(slots=True)
class HostNetwork:
    """The hosts of a run, their bridge and their key."""

    folder: Path
    base: Path
    key: Path
    hosts: dict[str, Host] = field(default_factory=dict)
    _next: int = 11

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def add(self, *names: str) -> None:
        """Start more hosts, all at once, and wait until each answers ssh."""
        started = [self._start(name) for name in names]
        for host in started:
            self._wait(host)

    def stop(self, name: str) -> None:
        """Stop a host at once, as by a power failure."""
        _end(self.hosts[name].process)

    def _start(self, name: str) -> Host:
        home = self.folder / name
        root, upper, work = home / "root", home / "upper", home / "work"
        for folder in (root, upper, work):
            folder.mkdir(parents=True)
        layers = f"lowerdir={self.base},upperdir={upper},workdir={work}"
        ran("mount", "-t", "overlay", "overlay", "-o", layers, str(root))
        address = f"{NETWORK}.{self._next}"
        self._next += 1
        configure_root(root, name, address, self.key.with_suffix(".pub").read_text())
        with (home / "console").open("wb") as console:
            process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "TERM"),
                    *("systemd-nspawn", "-q", "-D", str(root), "-M", f"lgtest-{name}", "-b"),
                    *("--register=no", "--keep-unit", f"--network-bridge={BRIDGE}"),
                    *("--capability=CAP_IPC_LOCK", "--resolv-conf=off", "--timezone=off"),
                    *("--kill-signal=SIGRTMIN+3", "--console=pipe"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        host = Host(name, address, root, self.key, process)
        self.hosts[name] = host
        began = psutil.Process(process.pid).create_time()
        (home / "pid.json").write_text(json.dumps([process.pid, began]))
        return host

    def _wait(self, host: Host) -> None:
        end = time.monotonic() + START_LIMIT
        while time.monotonic() < end:
            if not host.up:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                if host.run("true", check=False, limit=10).returncode == 0:
                    return
            time.sleep(0.2)
        console = (self.folder / host.name / "console").read_text(errors="replace")
        raise AssertionError(f"{host.name} does not answer ssh:\n{console[-3000:]}")


@contextlib.contextmanager
def running_hosts(names: Iterable[str], cache: Path | None = None) -> Iterator[HostNetwork]:
    """Start hosts of these names, on a bridge with masquerading through this machine.

    Only one run at a time: another one waits. SIGTERM ends the run as Ctrl-C does, so that
    everything is removed.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cache = cache or cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _clear(cache)
        base = base_image(cache)
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=cache))
        forwarding = FORWARDING.read_text()
        (folder / "forwarding").write_text(forwarding)
        network = HostNetwork(folder, base, folder / "key")
        try:
            if psutil.virtual_memory().available > TMPFS_BYTES:
                options = f"size={TMPFS_BYTES},mode=0700"
                ran("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))
                (folder / "forwarding").write_text(forwarding)
            _open_network()
            ran("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
            network.add(*names)
            yield network
        finally:
            for host in network.hosts.values():
                _end(host.process)
            _clear(cache)


def configure_root(
    root: Path,
    name: str,
    address: str,
    key: str,
    *,
    interface: str = "host0",
    gateway: str = f"{NETWORK}.1",
) -> None:
    """Give a root its host name, its address and its users, who log in with the run's key."""
    (root / "etc/hostname").write_text(f"{name}\n")
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost\n{address} {name}\n")
    network = root / f"etc/systemd/network/10-{interface}.network"
    network.write_text(
        f"[Match]\nName={interface}\n\n[Network]\nAddress={address}/24\nGateway={gateway}\n"
        "LinkLocalAddressing=no\n"
    )
    ran("chroot", str(root), "useradd", "--create-home", "--shell=/bin/bash", ADMIN)
    (root / "etc/sudoers.d" / ADMIN).write_text(f"{ADMIN} ALL=(ALL) NOPASSWD: ALL\n")
    for home in (root / "root", root / "home" / ADMIN):
        (home / ".ssh").mkdir(mode=0o700, exist_ok=True)
        (home / ".ssh/authorized_keys").write_text(key)
    ran("chroot", str(root), "chown", "-R", f"{ADMIN}:", f"/home/{ADMIN}/.ssh")
    for found in ("/etc/resolv.conf", str(AUTHORITIES)):
        if Path(found).exists():
            shutil.copyfile(found, root / found.lstrip("/"))


def _open_network() -> None:
    ran("ip", "link", "add", BRIDGE, "type", "bridge")
    ran("ip", "address", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
    ran("ip", "link", "set", BRIDGE, "up")
    FORWARDING.write_text("1\n")
    rules = f"""table ip {TABLE} {{
      chain out {{
        type nat hook postrouting priority srcnat;
        ip saddr {NETWORK}.0/24 ip daddr != {NETWORK}.0/24 masquerade
      }}
    }}"""
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True, timeout=20)


def _clear(cache: Path) -> None:
    """Remove everything that a run has made: this one, or one that was killed."""
    for folder in cache.glob("run-*"):
        for home in folder.iterdir():
            if (home / "pid.json").is_file():
                pid, began = json.loads((home / "pid.json").read_text())
                with contextlib.suppress(psutil.NoSuchProcess):
                    if psutil.Process(pid).create_time() == began:  # its id may be reused
                        _kill(pid)
        for root in folder.glob("*/root"):
            if os.path.ismount(root):
                ran("umount", "--lazy", str(root), status=None)
        if (folder / "forwarding").is_file():
            FORWARDING.write_text((folder / "forwarding").read_text())
        if os.path.ismount(folder):
            ran("umount", "--lazy", str(folder), status=None)
        shutil.rmtree(folder, ignore_errors=True)
    ran("ip", "link", "del", BRIDGE, status=None)
    ran("nft", "delete", "table", "ip", TABLE, status=None)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        _kill(process.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_LIMIT)


def _kill(pid: int) -> None:
    """Kill the first process of a container, which ends all others, then systemd-nspawn."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for child in process.children():
            child.kill()
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(5)
            return
        process.kill()


def unsupported_reason() -> str:
    """Why this machine can't run hosts, with the remedy; empty if it can."""
    if os.geteuid() != 0:
        return "root is needed. Remedy: run it as root, or in a virtual machine"
    if missing := sorted({PROGRAMS[name] for name in PROGRAMS if not shutil.which(name)}):
        return f"programs are missing. Remedy: apt-get install {' '.join(missing)}"
    release = Path("/etc/os-release").read_text()
    if not re.search(rf"^VERSION_CODENAME={RELEASE}$", release, re.MULTILINE):
        return f"hosts are made from this machine's package sources, and it is not Debian {RELEASE}"
    return _missing_rights()


def _missing_rights() -> str:
    """Rights that a container around this process may lack; they are tried without a trace."""
    with tempfile.TemporaryDirectory() as name:
        layers = f"lowerdir={name}/lower,upperdir={name}/upper,workdir={name}/work"
        commands = (
            f"mount -t tmpfs tmpfs {name}; cd {name}; mkdir lower upper work root; "
            f"mount -t overlay overlay -o {layers} root; "
            f"ip link add lgtest-try type bridge; nft list tables"
        )
        unshare = ["unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork"]
        done = ran(*unshare, "sh", "-ec", commands, status=None)
    if done.returncode != 0:
        return f"mounts, namespaces or bridges are not allowed here: {done.stderr.strip()}"
    if not os.access(FORWARDING, os.W_OK):
        return f"{FORWARDING} can't be written here"
    return ""
