"""A machine of two sockets, each with a NUMA node: Debian under qemu, emulated in software.

Nothing is mounted on this machine, no network is made, and the guest's disk is a copy that is
removed. The guest runs one program as root and powers off; the program prints its report to the
second serial line.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.deploy.base_image import RELEASE, debian
from tests.deploy.release_files import ReleaseFiles

SOCKETS = 2
CORES = 2  # per socket
THREADS = 2  # per core
NODE_MEMORY = "3G"  # `up` keeps 2 GiB of a node free
DISK = "3G"
LIMIT = 2700.0  # seconds, on a busy machine
PACKAGES = ("python3", "libgomp1", "iproute2", "kmod", "linux-image-cloud-amd64")
KERNEL = "root=/dev/vda rw console=ttyS0 quiet panic=-1"
HOME = "opt/llama-gateway"
HOOKS = (
    # Only two of the kernel modules are needed.
    'echo MODULES=list > "$1/etc/initramfs-tools/conf.d/modules"',
    'printf "virtio_pci\\nvirtio_blk\\n" >> "$1/etc/initramfs-tools/modules"',
    'chroot "$1" update-initramfs -u -k all',
    'rm -rf "$1"/var/cache/apt/archives/*.deb "$1"/var/lib/apt/lists/*',
)
MODULES = ("guest_report", "placement")
INIT = f"""#!/bin/sh
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
ip link set lo up
cd /tmp
export HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PYTHONPATH=/{HOME}:/{HOME}/site PYTHONDONTWRITEBYTECODE=1
stty raw -echo < /dev/ttyS1
python3 -m tests.numa.guest_report > /dev/ttyS1
echo b > /proc/sysrq-trigger
"""


class MachineError(Exception):
    """The machine ended without a report."""


def run_in_two_nodes(release_files: ReleaseFiles, folder: Path) -> str:
    """Run `guest_report` in a machine with this checkout's gateway. Returns its standard output.

    The machine's files are made in `folder`. Needs root, `mmdebstrap`, `mkfs.ext4` and
    `qemu-system-x86_64`, and the first time a network.
    """
    base = debian(
        release_files.cache, f"numa-{RELEASE}", (RELEASE, PACKAGES, HOOKS), PACKAGES, HOOKS
    )
    disk = _disk(base, release_files, folder)
    console, report = folder / "console", folder / "report"
    command = [
        *qemu(base, disk, THREADS, console, report),
        "-append",
        f"{KERNEL} init=/{HOME}/init",
    ]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        end = console.read_text(errors="replace")[-3000:]
        raise MachineError(f"no report within {LIMIT:.0f} s; its console:\n{end}") from None
    finally:
        disk.unlink()
    output = report.read_text(errors="replace") if report.exists() else ""
    if done.returncode != 0 or not output:
        end = console.read_text(errors="replace")[-3000:] if console.exists() else ""
        raise MachineError(f"qemu: status {done.returncode}: {done.stderr[-2000:]}\n{end}")
    return output


def _disk(base: Path, release_files: ReleaseFiles, folder: Path) -> Path:
    """Make a disk with Debian, the gateway's packages, the program and an init."""
    root = folder / "root"
    subprocess.run(["cp", "-a", str(base), str(root)], check=True, timeout=120)
    home = root / HOME
    wheels = folder / "wheels"
    with tarfile.open(release_files.wheelhouse()) as tar:
        # Debian 12's Python has no argument `filter`; later ones require it.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(wheels)
    shutil.copy(release_files.wheel(), wheels)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "-qq", "--no-index", "--no-deps"),
            *("--no-compile", "--target", str(home / "site")),
            *sorted(map(str, wheels.glob("*.whl"))),
        ],
        check=True,
        timeout=300,
    )
    (home / "models").mkdir()
    shutil.copy(release_files.model(), home / "models")
    (home / "tests/numa").mkdir(parents=True)
    for module in MODULES:
        shutil.copy(Path(__file__).with_name(f"{module}.py"), home / "tests/numa")
    (home / "init").write_text(INIT)
    (home / "init").chmod(0o755)
    shutil.rmtree(wheels)
    return disk_of(root, folder / "disk")


def disk_of(root: Path, disk: Path) -> Path:
    """Make an ext4 file system of the contents of `root`, which is removed."""
    command = ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-d", str(root), str(disk), DISK]
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
    shutil.rmtree(root)
    return disk


def qemu(base: Path, disk: Path, threads: int, *lines: Path) -> list[str]:
    """The command of a machine with `threads` per core; each serial line goes to a file."""
    cpus = CORES * threads
    nodes: list[str] = []
    for node in range(SOCKETS):
        nodes += ["-object", f"memory-backend-ram,id=m{node},size={NODE_MEMORY}"]
        nodes += ["-numa", f"node,nodeid={node},memdev=m{node}"]
        for cpu in range(cpus):
            place = f"socket-id={node},core-id={cpu // threads},thread-id={cpu % threads}"
            nodes += ["-numa", f"cpu,node-id={node},{place}"]
    (kernel,) = (base / "boot").glob("vmlinuz-*")
    (initrd,) = (base / "boot").glob("initrd.img-*")
    memory = SOCKETS * int(re.sub(r"G$", "", NODE_MEMORY))
    smp = f"{SOCKETS * cpus},sockets={SOCKETS},cores={CORES},threads={threads}"
    return [
        # The kernel kills qemu when the thread that started it ends.
        *("setpriv", "--pdeathsig", "KILL"),
        *("qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi"),
        # With AMD's processors qemu does not show two threads per core.
        *("-cpu", "max,vendor=GenuineIntel", "-smp", smp, "-m", f"{memory}G", *nodes),
        *("-numa", "dist,src=0,dst=1,val=21"),
        *("-kernel", str(kernel), "-initrd", str(initrd)),
        *("-drive", f"file={disk},format=raw,if=virtio"),
        *("-nodefaults", "-display", "none", "-no-reboot"),
        *(word for line in lines for word in ("-serial", f"file:{line}")),
    ]
