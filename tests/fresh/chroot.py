"""Runs commands in the root of a bare system, and finds processes that they leave behind.

Commands see this machine's network, devices and processors, but not its files and processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.deploy.base_image import CONTAINED_COMMAND
from tests.fresh.systems import NEWCOMER

CHECKOUT_PATH = "/home/" + NEWCOMER + "/llama-gateway"
LEFT_BEHIND = "LEFT BEHIND: "
STOP_LIMIT = 20.0
# The mounts end with the namespace.
_ENTER_ROOT = """
root=$1 user=$2 place=$3; shift 3
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
exec /usr/sbin/chroot "$root" sh -c '
  user=$1 place=$2; shift 2
  cd "$place"
  setpriv --reuid="$user" --regid="$user" --init-groups "$@"
  status=$?
  for one in /proc/[0-9]*; do
    if [ "$one" != /proc/1 ] && read -r stat 2>/dev/null <"$one/stat"; then
      case $stat in *") Z "*) ;; *) echo "LEFT BEHIND: $stat" ;; esac
    fi
  done
  exit "$status"
' sh "$user" "$place" "$@"
"""


@contextlib.contextmanager
def running_command(
    root: Path, command: list[str], output: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in the checkout as a plain user; it and its children end with the block."""
    variables = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(Path(CHECKOUT_PATH).parent),
        "USER": NEWCOMER,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        **environment,
    }
    arguments = [str(root), NEWCOMER, CHECKOUT_PATH, *command]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*CONTAINED_COMMAND, "--", "sh", "-euc", _ENTER_ROOT, "sh", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=variables,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(STOP_LIMIT)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT to each process of the group, as Ctrl-C does in a terminal."""
    os.killpg(process.pid, signal.SIGINT)


def left_behind(output: str) -> list[str]:
    """The processes that were still running when a command ended."""
    return [
        line.removeprefix(LEFT_BEHIND)
        for line in output.splitlines()
        if line.startswith(LEFT_BEHIND)
    ]
