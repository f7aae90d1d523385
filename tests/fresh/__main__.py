"""Runs README's two commands on bare systems: `make test-fresh`, before a release.

Each system is a root of its own with the packages that README's Start names, and a clone of this
checkout's last commit. There a plain user runs `make run` until it has answered a chat, ends it
by Ctrl-C, and runs `make test`. Systems and the commands' logs are kept for a week in
~/.cache/llama-gateway-tests (or DEPLOY_TEST_CACHE).

Exit status: 0 if all commands succeeded, 1 if not, 2 if they can't be run here.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from tests.deploy.base_image import cache_folder
from tests.fresh.systems import (
    CHECKOUT_PATH,
    LEFT_BEHIND,
    NEWCOMER,
    SYSTEMS,
    System,
    bare_root,
    copy_network_settings,
    running_command,
    unsupported_reason,
)

CHECKOUT = Path(__file__).resolve().parents[2]
DEFAULT_SYSTEMS = ("bookworm", "trixie", "testing")
RUN_FOLDER_PREFIX = "fresh-run-"
LINES_OF_A_LOG = 30  # printed of a failed command
PORTS = (8000, 8001)  # the gateway's default ports
ANY_PORTS = "ARGS=--port 0 --admin-port 0"
SERVING = re.compile(r"OpenAI-compatible API at (http://\S+)/v1")
COUNTED = re.compile(r"^.* passed.* in \d+\.\d+s\b.*$", re.MULTILINE)
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
RUN_LIMIT = 1800.0  # seconds until it serves; it usually takes a minute
ANSWER_LIMIT = 120.0
END_LIMIT = 60.0  # seconds from Ctrl-C to the end
TEST_LIMIT = 7200.0  # it usually takes a quarter of an hour
# Statuses of make after Ctrl-C: its command has succeeded, or ended with the status of SIGINT.
INTERRUPTED = frozenset({0, 2, 130})


class FreshError(Exception):
    """A command failed; the message has the reason."""


def make_run(root: Path, log: Path) -> str:
    """Run `make run` until it has answered a chat, then send Ctrl-C."""
    command = ["make", "run", *([] if all(map(_is_free, PORTS)) else [ANY_PORTS])]
    begun = time.monotonic()
    with running_command(root, command, log) as process:
        while (serving := SERVING.search(log.read_text(errors="replace"))) is None:
            if process.poll() is not None:
                raise FreshError(f"it ended with status {process.returncode}")
            if time.monotonic() > begun + RUN_LIMIT:
                raise FreshError(f"it does not serve within {RUN_LIMIT:.0f} s")
            time.sleep(0.2)
        seconds = time.monotonic() - begun
        with httpx.Client(base_url=serving[1], trust_env=False, timeout=ANSWER_LIMIT) as client:
            for path in ("/health", "/v1/models"):
                client.get(path).raise_for_status()
            answer = client.post("/v1/chat/completions", json=CHAT).raise_for_status().json()
        if not answer["choices"][0]["message"]["content"]:
            raise FreshError(f"its answer to a chat has no text: {answer}")
        os.killpg(process.pid, signal.SIGINT)  # to each process of the group, as a terminal does
        status = process.wait(END_LIMIT)
    output = log.read_text(errors="replace")
    if "Traceback (most recent call last)" in output:
        raise FreshError("it ends with a traceback")
    if left := re.findall(f"^{LEFT_BEHIND}(.*)$", output, re.MULTILINE):
        raise FreshError(f"after Ctrl-C these processes still run: {'; '.join(left)}")
    if status not in INTERRUPTED:
        raise FreshError(f"after Ctrl-C it ended with status {status}")
    return f"it serves after {seconds:.0f} s"


def make_test(root: Path, log: Path) -> str:
    """Run `make test` to its end."""
    with running_command(root, ["make", "test"], log) as process:
        if (status := process.wait(TEST_LIMIT)) != 0:
            raise FreshError(f"it ended with status {status}")
    counted = COUNTED.findall(log.read_text(errors="replace"))
    if not counted:
        raise FreshError("no test has passed")
    return str(counted[-1].strip("= "))


COMMANDS = {"run": make_run, "test": make_test}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make test-fresh",
        usage='make test-fresh [ARGS="[--only COMMAND] [SYSTEM ...]"]',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = ", ".join(f"{suite} ({system.title})" for suite, system in SYSTEMS.items())
    usual = [*DEFAULT_SYSTEMS]
    parser.add_argument("systems", nargs="*", metavar="SYSTEM", default=usual, help=known)
    parser.add_argument("--only", choices=[*COMMANDS], help="run only one of the two commands")
    options = parser.parse_args(arguments)
    if unknown := set(options.systems) - set(SYSTEMS):
        parser.error(f"unknown: {', '.join(unknown)} (there are {known})")
    if reason := unsupported_reason():
        parser.error(reason)
    results = []
    commands = [options.only] if options.only else [*COMMANDS]
    with _locked(cache_folder()) as cache:
        for suite in options.systems:
            try:
                said, passed = _try_system(SYSTEMS[suite], commands, cache)
            except subprocess.SubprocessError as error:
                said, passed = f"{suite}: the system can't be made: {error}", False
            results.append((f"{'passed' if passed else 'FAILED'}  {said}", passed))
    print("\n".join(line for line, _ in results))
    return int(not all(passed for _, passed in results))


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[Path]:
    """Lock the cache for this run, and remove what a killed run has left."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "fresh-lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another run uses {cache}. Remedy: wait for it, or set DEPLOY_TEST_CACHE")
            raise SystemExit(2) from None
        for left in cache.glob(f"{RUN_FOLDER_PREFIX}*"):
            shutil.rmtree(left)
        yield cache


def _try_system(system: System, commands: Sequence[str], cache: Path) -> tuple[str, bool]:
    """What is to be said of the commands on a system, and whether all succeeded."""
    passed = True
    with tempfile.TemporaryDirectory(prefix=RUN_FOLDER_PREFIX, dir=cache) as folder:
        root = Path(folder) / "root"
        print(f"{system.title}: making a bare system, or using this week's", flush=True)
        subprocess.run(["cp", "-a", str(bare_root(cache, system)), str(root)], check=True)
        copy_network_settings(root)
        checkout = root / CHECKOUT_PATH.lstrip("/")
        # Root may clone another user's checkout.
        git = ("git", "-c", "safe.directory=*", "clone", "--quiet", "--no-hardlinks")
        _out(*git, str(CHECKOUT), str(checkout))
        _out("chroot", str(root), "chown", "-R", f"{NEWCOMER}:", CHECKOUT_PATH)
        parts = [f"{system.title}, {_out('chroot', str(root), 'python3', '--version')}"]
        for command in commands:
            log = cache / f"fresh-log-{system.suite}-{command}"
            print(f"{system.title}: make {command}; its output: {log}", flush=True)
            try:
                said = COMMANDS[command](root, log)
            except (FreshError, httpx.HTTPError, subprocess.TimeoutExpired) as problem:
                passed, said = False, f"FAILED: {problem}"
                lines = log.read_text(errors="replace").splitlines()[-LINES_OF_A_LOG:]
                print(f"make {command}: {problem}", *lines, sep="\n  ", flush=True)
            mib = _out("du", "-sm", str(checkout / ".venv")).split()[0]
            parts.append(f"make {command}: {said}, .venv {mib} MiB")
    return "; ".join(parts), passed


def _out(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return done.stdout.strip()


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return tried.connect_ex(("127.0.0.1", port)) != 0


if __name__ == "__main__":
    # SIGTERM ends it as Ctrl-C does, and Ctrl-C works even if the shell ignores SIGINT.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
