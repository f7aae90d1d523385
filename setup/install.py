"""Install a set of pinned packages and the checkout itself into the environment that runs this.

    .venv/bin/python setup/install.py local --checkout

On a terminal one line shows the progress; elsewhere a line is printed now and then. Packages that
are installed already are kept. Status 1, with pip's output, when pip fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;]+)", re.MULTILINE)
COLLECTING = re.compile(r"^Collecting ([\w.-]+)==(\S+)")
INSTALLING = re.compile(r"^Installing collected packages: (.+)")
IGNORING = re.compile(r"^Ignoring ([\w.-]+):")  # a pin for another system
RETRYING = re.compile(r"^WARNING: Retrying")  # the index does not answer: that takes a minute
ROUTINE = re.compile(
    r"Collecting|Requirement already|Ignoring|Looking in|WARNING: Location|\s+(Using|Downloading) "
)
KEPT_LINES = 200
A_LINE_EVERY = 10.0  # seconds, without a terminal
POLL_EVERY = 0.2  # seconds


class Progress:
    """One line that is overwritten; without a terminal, a line every ten seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._last = time.monotonic()

    def show(self, text: str) -> None:
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            sys.stdout.write(f"\r{text[:width]}\x1b[K")
            sys.stdout.flush()
        elif time.monotonic() - self._last >= A_LINE_EVERY:
            self.line(text)

    def line(self, text: str) -> None:
        """Write a line that stays."""
        sys.stdout.write(f"\r\x1b[K{text}\n" if self._terminal else f"{text}\n")
        sys.stdout.flush()
        self._last = time.monotonic()


def canonical(name: str) -> str:
    """A distribution's name in the form that indexes compare."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(files: list[Path]) -> dict[str, str]:
    """Name -> version of all packages that the files pin."""
    return {
        canonical(name): version
        for file in files
        for name, version in PIN.findall(file.read_text())
    }


def installed() -> dict[str, str]:
    """Name -> version of the installed packages; INSTALLER is among the last files written."""
    site = Path(sysconfig.get_path("purelib"))
    found = {}
    for marker in site.glob("*.dist-info/INSTALLER"):
        name, _, version = marker.parent.name.removesuffix(".dist-info").partition("-")
        found[canonical(name)] = version
    return found


def missing(wanted: dict[str, str]) -> dict[str, str]:
    """The pins that this environment lacks or has in another version."""
    found = installed()
    return {name: version for name, version in wanted.items() if found.get(name) != version}


def install(files: list[Path], progress: Progress) -> bool:
    """Install the packages that the files pin. Returns whether pip succeeded."""
    todo = missing(pinned(files))
    if not todo:
        return True
    began = time.monotonic()
    of = f"of {files[0].relative_to(ROOT)}"
    progress.line(f"Getting {len(todo)} packages {of}")
    # The pins are complete. Resolving them again fails in pip 23 (Debian 12's) as soon as a pin
    # that another package wants with an extra, as coverage[toml], is not the newest release.
    command = [sys.executable, "-m", "pip", "install", "--require-hashes", "--no-deps"]
    command += ["--progress-bar", "off"]
    command += [word for file in files for word in ("-r", str(file))]
    if not _run_pip(command, todo, progress):
        return False
    progress.line(f"Installed {len(todo)} packages {of} in {time.monotonic() - began:.0f} s")
    return True


@dataclass(slots=True)
class Pip:
    """Progress of a run of pip, by its output and, while it installs silently, by the folder."""

    todo: dict[str, str]
    got: int = 0
    getting: str = ""
    installing: list[str] = field(default_factory=list)
    output: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))

    def read(self, line: str) -> None:
        """Process a line of pip's output."""
        self.output.append(line)
        if found := COLLECTING.match(line):
            self.got += 1
            self.getting = f"{found[1]} {found[2]}"
        elif found := INSTALLING.match(line):
            self.installing = [canonical(name) for name in found[1].split(", ")]
        elif found := IGNORING.match(line):
            self.todo.pop(canonical(found[1]), None)

    def __str__(self) -> str:
        if not self.installing:
            return f"[{self.got}/{len(self.todo)}] getting {self.getting or 'the list'}"
        found = installed()
        left = [name for name in self.installing if found.get(name) != self.todo.get(name)]
        done = len(self.installing) - len(left)
        now = f"installing {left[0]}" if left else "finishing"
        return f"[{done}/{len(self.installing)}] {now}"


def _run_pip(command: list[str], todo: dict[str, str], progress: Progress) -> bool:
    """Run pip and show its progress; print its output when it fails."""
    state, over = Pip(todo), threading.Event()

    def watch() -> None:
        while not over.wait(POLL_EVERY):
            progress.show(str(state))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as pip:
            assert pip.stdout is not None
            for line in pip.stdout:
                state.read(line.rstrip())
                if RETRYING.match(line):
                    progress.line(line.rstrip())
    finally:
        over.set()
        watcher.join()
    if pip.returncode:
        progress.line("\n".join(line for line in state.output if line and not ROUTINE.match(line)))
        progress.line(
            f"pip failed with status {pip.returncode}; its output is above. Remedy: make sure that "
            "the package index can be reached, and run the same command again: it continues from "
            "the packages that are installed"
        )
    return pip.returncode == 0


def install_checkout() -> bool:
    """Make the command `llama-gateway` run this checkout. Returns whether pip succeeded."""
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-build-isolation", "--no-deps"]
    return subprocess.run([*command, "-e", str(ROOT)], check=False).returncode == 0


def main() -> int:
    """Install the named set; the exit status."""
    parser = argparse.ArgumentParser(description="Install a set of requirements/ with progress.")
    sets = sorted(file.stem for file in (ROOT / "requirements").glob("*.txt"))
    parser.add_argument("set", choices=sets)
    parser.add_argument(
        "--checkout", action="store_true", help="install the checkout too, editable"
    )
    options = parser.parse_args()
    names = dict.fromkeys([options.set, "build"])
    files = [ROOT / "requirements" / f"{name}.txt" for name in names]
    try:
        succeeded = install(files, Progress()) and (not options.checkout or install_checkout())
    except KeyboardInterrupt:
        return 130
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
