"""README's two commands on bare systems: `make test-fresh`, before a release.

Each system is a root of its own with what README's Start asks for, and a clone of this checkout's
last commit. A plain user runs `make run` there until it has answered a chat, ends it as Ctrl-C
does, and runs `make test`. Systems are kept for a week in ~/.cache/llama-gateway-tests (or
DEPLOY_TEST_CACHE), and so is what the commands said.
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
LINES_OF_A_LOG = 30  # that are printed of what has failed
COMMANDS = {"run": make_run, "test": make_test}


@dataclass(slots=True)
class SystemResult:
    """How the commands went on a system."""

    system: str
    name: str
    commit: str
    python: str = ""
    problem: str = ""
    """Why it did not come to the commands."""
    ran: list[CommandResult] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all went well."""
        return not self.problem and not any(ran.problem for ran in self.ran)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make test-fresh",
        usage='make test-fresh [ARGS="[OPTION ...] [SYSTEM ...]"]',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="SYSTEM is "
        + ", ".join(f"{system.suite} ({system.title})" for system in SYSTEMS.values())
        + f",\nor all of them: all. Usual: {' '.join(DEFAULT_SYSTEMS)}.",
    )
    parser.add_argument(
        "systems", nargs="*", metavar="SYSTEM", type=_system, default=[*DEFAULT_SYSTEMS]
    )
    parser.add_argument("--only", choices=[*COMMANDS], help="one of the two commands")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser


def _system(text: str) -> str:
    if text != "all" and text not in SYSTEMS:
        raise argparse.ArgumentTypeError(f"unknown: {text} (there are all, {', '.join(SYSTEMS)})")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 when all went well, 1 when not, 2 when it can't be tried here."""
    given = _options().parse_args(arguments)
    chosen = [*SYSTEMS] if "all" in given.systems else list(dict.fromkeys(given.systems))
    commands = [given.only] if given.only else [*COMMANDS]
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
    if given.json:
        print(json.dumps([_as_json_object(result) for result in results], indent=2))
    else:
        print("\n".join(_summary(result) for result in results))
    return 0 if all(result.passed for result in results) else 1


class _BusyError(Exception):
    """Another run has the cache."""


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[Path]:
    """The cache, for one run at a time; what one that was killed has left is cleared."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "fresh-lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _BusyError(
                f"another one runs with {cache}. Remedy: wait for it, or set DEPLOY_TEST_CACHE"
            ) from None
        for left in cache.glob(f"{RUN_FOLDER_PREFIX}*"):
            shutil.rmtree(left)
        yield cache


def _try_system(system: System, commands: Sequence[str], cache: Path) -> SystemResult:
    result = SystemResult(system.suite, system.title, _git("rev-parse", "--short", "HEAD"))

    def tell(text: str) -> None:
        _print_progress(f"{system.title}: {text}")

    with tempfile.TemporaryDirectory(prefix=RUN_FOLDER_PREFIX, dir=cache) as folder:
        root = Path(folder) / "root"
        try:
            tell("making a bare system, or taking this week's")
            subprocess.run(["cp", "-a", str(bare_root(cache, system)), str(root)], check=True)
            copy_network_settings(root)
            place = root / CHECKOUT_PATH.lstrip("/")
            _git("clone", "--quiet", "--no-hardlinks", str(CHECKOUT), str(place))
            owner = f"{NEWCOMER}:"
            subprocess.run(["chroot", str(root), "chown", "-R", owner, CHECKOUT_PATH], check=True)
            result.python = _out("chroot", str(root), "python3", "--version").split()[1]
        except subprocess.SubprocessError as error:
            result.problem = f"it can't be made: {error}"
            return result
        environment = registry_settings()
        for command in commands:
            log = cache / f"fresh-log-{system.suite}-{command}"
            tell(f"make {command}, with Python {result.python}; its output: {log}")
            ran = COMMANDS[command](root, log, environment, tell)
            result.ran.append(ran)
            if ran.problem:
                lines = log.read_text(errors="replace").splitlines()[-LINES_OF_A_LOG:]
                tell("\n  ".join([f"{ran.command}: {ran.problem}", *lines]))
    return result


def _git(*words: str) -> str:
    # Root may clone what belongs to somebody else.
    return _out("git", "-c", "safe.directory=*", "-C", str(CHECKOUT), *words)


def _out(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return done.stdout.strip()


def _summary(result: SystemResult) -> str:
    told = [f"{result.name}, Python {result.python}" if result.python else result.name]
    told += [result.problem] if result.problem else []
    for ran in result.ran:
        counted = "".join(f", {n} {what}" for what, n in ran.counts.items())
        problem = f", FAILED: {ran.problem}" if ran.problem else ""
        told.append(f"{ran.command}: {ran.seconds:.0f} s, .venv {ran.mib} MiB{counted}{problem}")
    return f"{'passed' if result.passed else 'FAILED'}  {'; '.join(told)}"


def _as_json_object(result: SystemResult) -> dict[str, Any]:
    return {**asdict(result), "passed": result.passed}


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    # SIGTERM ends it as Ctrl-C does, and Ctrl-C does even where a shell has it ignored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
