"""A machine that hooks start and stop: an emulated node as a process that outlives its hook.

`python machine.py start FOLDER PORT [OPTIONS OF THE EMULATOR]` and `stop FOLDER PORT`; FOLDER gets
a line for each call.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 50.0


def _start(folder: Path, port: str, options: list[str]) -> None:
    holder = subprocess.Popen(
        [sys.executable, __file__, "hold", str(folder), port, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    (folder / f"{port}.pid").write_text(str(holder.pid))


def _hold(port: str, options: list[str]) -> None:
    """The emulated node ends with its parent, and its parent is this process, not the hook."""
    command = [sys.executable, "-m", "tests.emulator", "--port", port, *options]
    subprocess.run(command, cwd=ROOT, check=False, timeout=300)


def end(folder: Path, port: str) -> None:
    """Stop it, and wait until its port is closed."""
    pid = folder / f"{port}.pid"
    if pid.exists():
        # Kill both: a node that has just started might not notice the end of its parent.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(pid.read_text()), signal.SIGTERM)
        pid.unlink()
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", int(port))):
                return
        time.sleep(0.02)
    sys.exit(f"port {port} is still open")


def main(order: str, folder: str, port: str, *options: str) -> None:
    """Do what one call asks for."""
    place = Path(folder)
    if order == "hold":
        _hold(port, list(options))
        return
    with (place / "orders").open("a") as log:
        log.write(f"{order} {port}\n")
    if order == "start":
        _start(place, port, list(options))
    else:
        end(place, port)


if __name__ == "__main__":
    main(*sys.argv[1:])
