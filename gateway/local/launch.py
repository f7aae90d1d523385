"""`python -m gateway.local.launch [options] -- COMMAND`: set up this process, then exec.

The command dies with its parent, stays on its CPUs and takes its memory from its NUMA node: all
three survive exec.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h

MPOL_BIND = 2  # linux/mempolicy.h

SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 270}


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    `parent`: the PID of the parent process. If it has ended already, this process exits now, since
    no signal would come. Does nothing outside Linux.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def bind_memory(node: int) -> None:
    """Allocate memory on this NUMA node only. Raises OSError where the kernel refuses it."""
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(f"set_mempolicy is not known on {platform.machine()}")
    word_bits = ctypes.sizeof(ctypes.c_ulong) * 8
    words = node // word_bits + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // word_bits] = 1 << (node % word_bits)
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than `maxnode` says.
    if libc.syscall(number, MPOL_BIND, mask, ctypes.c_ulong(words * word_bits + 1)) != 0:
        raise OSError(ctypes.get_errno(), f"set_mempolicy(MPOL_BIND, node {node})")


def main(arguments: list[str] | None = None) -> None:
    """Exec the command, or exit with 126 or 127 as a shell does."""
    parser = argparse.ArgumentParser(prog="python -m gateway.local.launch", description=__doc__)
    parser.add_argument("--parent", type=int, metavar="PID", help="die with this process")
    parser.add_argument("--cpus", metavar="0,1,2", help="run on these CPUs only")
    parser.add_argument("--memory-node", type=int, metavar="N", help="take memory from this node")
    parser.add_argument("--mlock", action="store_true", help="lock as much as the limit allows")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    if options.parent is not None:
        die_with_parent(options.parent)
    if options.mlock:
        hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    try:
        if options.cpus is not None:
            os.sched_setaffinity(0, {int(cpu) for cpu in options.cpus.split(",")})
        if options.memory_node is not None:
            bind_memory(options.memory_node)
    except OSError as error:
        # A container may forbid either: run unpinned then, slower.
        sys.stderr.write(f"launch: not pinned: {error}\n")
        sys.stderr.flush()
    try:
        os.execvp(options.command[0], options.command)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"launch: {options.command[0]}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
