"""Facts about the machine and the programs, which are printed with the figures."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console

from setup import python_build
from tests.bench.targets import TARGETS


def facts(targets: Sequence[str]) -> dict[str, str]:
    """The facts that a reader needs to judge the figures."""
    known = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text()),
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.2f} (one minute, before the run)",
        "kernel": platform.release(),
        "python": f"{platform.python_version()}, {python_build.described()}",
        "uvloop": _installed("uvloop"),
        "gateway": " ".join(filter(None, (_installed("llama-gateway"), commit()))),
    }
    for name in targets:
        program = TARGETS[name].program()
        if name in known or not program:
            continue
        known[name] = _output_of([program, *TARGETS[name].version]).splitlines()[0]
    return known


def print_facts(known: dict[str, str], progress: Console) -> None:
    """Print the facts before a run, with a warning if this Python is not optimised."""
    for name, value in known.items():
        progress.print(f"{name}: {value}")
    if warning := python_build.warning():
        progress.print(warning, style="yellow")


def cpu_model(cpuinfo: str) -> str:
    """The model name in /proc/cpuinfo; without one, the machine's architecture."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The checked-out commit, marked when files of the gateway have changed since."""
    commit = _output_of(["git", "rev-parse", "--short", "HEAD"])
    changed = _output_of(["git", "status", "--porcelain", "--", "gateway"])
    return f"{commit}{' with changes' if changed else ''}" if commit else ""


def _output_of(command: list[str]) -> str:
    """The output of a command; empty when it fails."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
