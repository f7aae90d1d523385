"""Runs README's two commands as a new user does, and checks their results."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.fresh.chroot import CHECKOUT_PATH, interrupt, left_behind, running_command

PORTS = (8000, 8001)  # the gateway's default ports
PORT_TAKEN = "Address already in use"
ANY_PORTS = "ARGS=--port 0 --admin-port 0"
SERVING = re.compile(r"OpenAI-compatible API at (http://\S+)/v1")
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)\b")
ENDED = re.compile(r" in \d+\.\d+s\b")
CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 32,
}
RUN_LIMIT = 1800.0  # seconds until it serves; it usually takes a minute
ANSWER_LIMIT = 120.0
END_LIMIT = 60.0  # seconds from Ctrl-C to the end
TEST_LIMIT = 7200.0  # it usually takes a quarter of an hour
POLL_EVERY = 0.2  # seconds
# Statuses of make after Ctrl-C: its command has succeeded, or ended with the status of SIGINT.
INTERRUPTED = frozenset({0, 2, 130})


@dataclass(slots=True)
class CommandResult:
    """The result of a command. `problem` is empty when it succeeded."""

    command: str
    problem: str = ""
    seconds: float = 0.0
    """Until `make run` served; until `make test` ended."""
    mib: int = 0
    """Disk space of .venv afterwards."""
    counts: dict[str, int] = field(default_factory=dict)
    """Numbers of tests by their outcome."""


class _CommandError(Exception):
    """A command failed; the message has the reason."""


def make_run(root: Path, log: Path, environment: Mapping[str, str]) -> CommandResult:
    """Run `make run` until it has answered a chat, then send Ctrl-C."""
    if not all(_is_free(port) for port in PORTS):
        return _run(root, log, environment, ["make", "run", ANY_PORTS])
    result = _run(root, log, environment, ["make", "run"])
    if result.problem and PORT_TAKEN in log.read_text(errors="replace"):
        # Another process took a port during the installation.
        return _run(root, log, environment, ["make", "run", ANY_PORTS])
    return result


def _run(
    root: Path, log: Path, environment: Mapping[str, str], command: list[str]
) -> CommandResult:
    result = CommandResult(shlex.join(command))
    begun = time.monotonic()
    with running_command(root, command, log, environment) as process:
        try:
            url = _wait_until_serving(process, log)
            result.seconds = time.monotonic() - begun
            _check_gateway(url)
            interrupt(process)
            _wait(process, log, END_LIMIT, what="its end after Ctrl-C")
            _check_end(process.returncode, log.read_text(errors="replace"))
        except _CommandError as problem:
            result.problem = str(problem)
    result.mib = _venv_mib(root)
    return result


def make_test(root: Path, log: Path, environment: Mapping[str, str]) -> CommandResult:
    """Run `make test` to its end."""
    result = CommandResult("make test")
    begun = time.monotonic()
    with running_command(root, ["make", "test"], log, environment) as process:
        try:
            _wait(process, log, TEST_LIMIT)
        except _CommandError as problem:
            result.problem = str(problem)
        status = process.returncode
    result.seconds = time.monotonic() - begun
    result.counts = counts(log.read_text(errors="replace"))
    if not result.problem and status != 0:
        result.problem = f"it ended with status {status}"
    if not result.problem and not result.counts.get("passed"):
        result.problem = "no test has passed"
    result.mib = _venv_mib(root)
    return result


def counts(output: str) -> dict[str, int]:
    """The numbers of tests by outcome, from pytest's last line."""
    for line in reversed(output.splitlines()):
        if ENDED.search(line):
            found = COUNTED.findall(line)
            return {what.rstrip("s") if what == "errors" else what: int(n) for n, what in found}
    return {}


def _wait(
    process: subprocess.Popen[bytes],
    log: Path,
    limit: float,
    *,
    until: re.Pattern[str] | None = None,
    what: str = "it",
) -> re.Match[str] | None:
    """Wait for a match of `until` in the log, or for the end of the process."""
    end = time.monotonic() + limit
    while True:
        ended = process.poll() is not None
        if until and (found := until.search(log.read_text(errors="replace"))):
            return found
        if ended:
            return None
        if time.monotonic() >= end:
            raise _CommandError(f"{what} takes longer than {limit:.0f} s")
        time.sleep(POLL_EVERY)


def _wait_until_serving(process: subprocess.Popen[bytes], log: Path) -> str:
    found = _wait(process, log, RUN_LIMIT, until=SERVING)
    if found is None:
        raise _CommandError(f"it ended with status {process.returncode}")
    return found[1]


def _check_gateway(url: str) -> None:
    """Request a gateway's health, its models, and a chat."""
    _fetch(f"{url}/health")
    _fetch(f"{url}/v1/models")
    answer = _fetch(f"{url}/v1/chat/completions", CHAT)
    try:
        text = json.loads(answer)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        text = None
    if not isinstance(text, str) or not text:
        raise _CommandError(f"its answer to a chat has no text: {answer[:300]!r}")


def _fetch(url: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    # Requests to this machine must not go through its proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ANSWER_LIMIT) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        with error:
            body = error.read(300)
        raise _CommandError(f"{url} answers {error.code}: {body!r}") from None
    except OSError as error:
        raise _CommandError(f"{url} does not answer: {error}") from None


def _check_end(status: int, output: str) -> None:
    if "Traceback (most recent call last)" in output:
        raise _CommandError("it ends with a traceback")
    if left := left_behind(output):
        raise _CommandError(f"after Ctrl-C these processes still run: {'; '.join(left)}")
    if status not in INTERRUPTED:
        raise _CommandError(f"after Ctrl-C it ended with status {status}")


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _venv_mib(root: Path) -> int:
    """Disk space of .venv, in MiB."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, files in os.walk(root / CHECKOUT_PATH.lstrip("/") / ".venv"):
        for name in (".", *files):
            status = os.lstat(Path(folder) / name)
            seen[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(seen.values()) >> 20
