"""Runs README's two commands on bare systems: `make test-fresh`, before a release.

Each system is a root of its own with the packages that README's Start names, and a clone of this
checkout's last commit. There a plain user runs `make run` until it has answered a chat, ends it
by Ctrl-C, and runs `make test`. Systems and the commands' logs are kept for a week in
~/.cache/llama-gateway-tests (or DEPLOY_TEST_CACHE).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.base_image import cache_folder
from tests.fresh.chroot import CHECKOUT_PATH
from tests.fresh.commands import CommandResult, make_run, make_test
from tests.fresh.systems import (
    DEFAULT_SYSTEMS,
    NEWCOMER,
    SYSTEMS,
    System,
    bare_root,
    copy_network_settings,
    registry_settings,
    unsupported_reason,
)

CHECKOUT = Path(__file__).resolve().parents[2]
RUN_FOLDER_PREFIX = "fresh-run-"
LINES_OF_A_LOG = 30  # printed of a failed command
COMMANDS = {"run": make_run, "test": make_test}


@dataclass(slots=True)
class SystemResult:
    """The results of the commands on one system."""

    system: str
    name: str
    commit: str
    python: str = ""
    problem: str = ""
    """Why the commands could not be run."""
    ran: list[CommandResult] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all commands succeeded."""
        return not self.problem and not any(one.problem for one in self.ran)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make test-fresh",
        usage='make test-fresh [ARGS="[OPTION ...] [SYSTEM ...]"]',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="SYSTEM is "
        + ", ".join(f"{system.suite} ({system.title})" for system in SYSTEMS.values())
        + f",\nor all of them: all. Default: {' '.join(DEFAULT_SYSTEMS)}.",
    )
    parser.add_argument(
        "systems", nargs="*", metavar="SYSTEM", type=_system, default=[*DEFAULT_SYSTEMS]
    )
    parser.add_argument("--only", choices=[*COMMANDS], help="run only one of the two commands")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser


def _system(text: str) -> str:
    if text != "all" and text not in SYSTEMS:
        raise argparse.ArgumentTypeError(f"unknown: {text} (there are all, {', '.join(SYSTEMS)})")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 if all commands succeeded, 1 if not, 2 if they can't be run here."""
    options = _options().parse_args(arguments)
    chosen = [*SYSTEMS] if "all" in options.systems else list(dict.fromkeys(options.systems))
    commands = [options.only] if options.only else [*COMMANDS]
    if reason := unsupported_reason():
        print(f"make test-fresh: {reason}", file=sys.stderr)
        return 2
    results = []
    try:
        with _locked(cache_folder()) as cache:
            for suite in chosen:
                results.append(_try_system(SYSTEMS[suite], commands, cache))
                _print_progress(_summary(results[-1]) + "\n")
    except _BusyError as error:
        print(f"make test-fresh: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        _print_progress("Interrupted; nothing is left running.")
        return 130
    if options.json:
        print(json.dumps([_as_json_object(result) for result in results], indent=2))
    else:
        print("\n".join(_summary(result) for result in results))
    return 0 if all(result.passed for result in results) else 1


class _BusyError(Exception):
    """Another run uses the cache."""


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[Path]:
    """Lock the cache for this run, and remove what a killed run has left."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "fresh-lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _BusyError(
                f"another run uses {cache}. Remedy: wait for it, or set DEPLOY_TEST_CACHE"
            ) from None
        for left in cache.glob(f"{RUN_FOLDER_PREFIX}*"):
            shutil.rmtree(left)
        yield cache


def _try_system(system: System, commands: Sequence[str], cache: Path) -> SystemResult:
    result = SystemResult(system.suite, system.title, _git("rev-parse", "--short", "HEAD"))

    def progress(text: str) -> None:
        _print_progress(f"{system.title}: {text}")

    with tempfile.TemporaryDirectory(prefix=RUN_FOLDER_PREFIX, dir=cache) as folder:
        root = Path(folder) / "root"
        try:
            progress("making a bare system, or using this week's")
            subprocess.run(["cp", "-a", str(bare_root(cache, system)), str(root)], check=True)
            copy_network_settings(root)
            checkout = root / CHECKOUT_PATH.lstrip("/")
            _git("clone", "--quiet", "--no-hardlinks", str(CHECKOUT), str(checkout))
            owner = f"{NEWCOMER}:"
            subprocess.run(["chroot", str(root), "chown", "-R", owner, CHECKOUT_PATH], check=True)
            result.python = _out("chroot", str(root), "python3", "--version").split()[1]
        except subprocess.SubprocessError as error:
            result.problem = f"the system can't be made: {error}"
            return result
        environment = registry_settings()
        for command in commands:
            log = cache / f"fresh-log-{system.suite}-{command}"
            progress(f"make {command}, with Python {result.python}; its output: {log}")
            outcome = COMMANDS[command](root, log, environment)
            result.ran.append(outcome)
            if outcome.problem:
                lines = log.read_text(errors="replace").splitlines()[-LINES_OF_A_LOG:]
                progress("\n  ".join([f"{outcome.command}: {outcome.problem}", *lines]))
    return result


def _git(*words: str) -> str:
    # Root may clone another user's checkout.
    return _out("git", "-c", "safe.directory=*", "-C", str(CHECKOUT), *words)


def _out(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return done.stdout.strip()


def _summary(result: SystemResult) -> str:
    parts = [f"{result.name}, Python {result.python}" if result.python else result.name]
    parts += [result.problem] if result.problem else []
    for one in result.ran:
        counted = "".join(f", {n} {what}" for what, n in one.counts.items())
        problem = f", FAILED: {one.problem}" if one.problem else ""
        parts.append(f"{one.command}: {one.seconds:.0f} s, .venv {one.mib} MiB{counted}{problem}")
    return f"{'passed' if result.passed else 'FAILED'}  {'; '.join(parts)}"


def _as_json_object(result: SystemResult) -> dict[str, Any]:
    return {**asdict(result), "passed": result.passed}


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    # SIGTERM ends it as Ctrl-C does, and Ctrl-C works even if the shell ignores SIGINT.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
