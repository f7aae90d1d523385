"""README's two commands, as a newcomer types them, and what came of them."""

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.fresh.chroot import CHECKOUT_PATH, interrupt, left_behind, running_command

PORTS = (8000, 8001)  # of the gateway, unless it is told others
PORT_TAKEN = "Address already in use"
ANY_PORTS = "ARGS=--port 0 --admin-port 0"
SERVING = re.compile(r"OpenAI-compatible API at (http://\S+)/v1")
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)\b")
ENDED = re.compile(r" in \d+\.\d+s\b")
SHARE = re.compile(r"\[ *\d+%\]")
CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 32,
}
RUN_LIMIT = 1800.0  # seconds until it serves; a minute is usual
ANSWER_LIMIT = 120.0
END_LIMIT = 60.0  # from Ctrl-C on
TEST_LIMIT = 7200.0  # a quarter of an hour is usual
POLL_EVERY = 0.2  # seconds between two looks
PROGRESS_EVERY = 60.0  # seconds between two words of how far it is
# What make itself says after Ctrl-C: its command has ended well, or with the status of SIGINT.
INTERRUPTED = frozenset({0, 2, 130})

PrintProgress = Callable[[str], None]


@dataclass(slots=True)
class CommandResult:
    """What came of a command. `problem` is empty when all went well."""

    command: str
    problem: str = ""
    seconds: float = 0.0
    """Until `make run` served; until `make test` ended."""
    mib: int = 0
    """What .venv takes on the disk afterwards."""
    counts: dict[str, int] = field(default_factory=dict)
    """Tests, by how they ended."""


class _CommandError(Exception):
    """Why a command has failed."""


def make_run(
    root: Path, log: Path, environment: Mapping[str, str], tell: PrintProgress
) -> CommandResult:
    """`make run` until it has answered a chat, and Ctrl-C."""
    if not all(_is_free(port) for port in PORTS):
        return _run(root, log, environment, tell, ["make", "run", ANY_PORTS])
    ran = _run(root, log, environment, tell, ["make", "run"])
    if ran.problem and PORT_TAKEN in log.read_text(errors="replace"):
        # Somebody took a port while it installed.
        return _run(root, log, environment, tell, ["make", "run", ANY_PORTS])
    return ran


def _run(
    root: Path, log: Path, environment: Mapping[str, str], tell: PrintProgress, command: list[str]
) -> CommandResult:
    ran = CommandResult(shlex.join(command))
    begun = time.monotonic()
    with running_command(root, command, log, environment) as process:
        try:
            url = _wait_until_serving(process, log, tell)
            ran.seconds = time.monotonic() - begun
            _check_gateway(url)
            interrupt(process)
            _wait(process, log, END_LIMIT, tell, what="its end after Ctrl-C")
            _check_end(process.returncode, log.read_text(errors="replace"))
        except _CommandError as problem:
            ran.problem = str(problem)
    ran.mib = _venv_mib(root)
    return ran


def make_test(
    root: Path, log: Path, environment: Mapping[str, str], tell: PrintProgress
) -> CommandResult:
    """`make test`, to its end."""
    ran = CommandResult("make test")
    begun = time.monotonic()
    with running_command(root, ["make", "test"], log, environment) as process:
        try:
            _wait(process, log, TEST_LIMIT, tell)
        except _CommandError as problem:
            ran.problem = str(problem)
        status = process.returncode
    ran.seconds = time.monotonic() - begun
    ran.counts = counts(log.read_text(errors="replace"))
    if not ran.problem and status != 0:
        ran.problem = f"it ended with status {status}"
    if not ran.problem and not ran.counts.get("passed"):
        ran.problem = "no test has passed"
    ran.mib = _venv_mib(root)
    return ran


def counts(output: str) -> dict[str, int]:
    """How many tests ended in which way, by pytest's last line."""
    for line in reversed(output.splitlines()):
        if ENDED.search(line):
            found = COUNTED.findall(line)
            return {what.rstrip("s") if what == "errors" else what: int(n) for n, what in found}
    return {}


def _wait(
    process: subprocess.Popen[bytes],
    log: Path,
    limit: float,
    tell: PrintProgress,
    *,
    until: re.Pattern[str] | None = None,
    what: str = "it",
) -> re.Match[str] | None:
    """Wait for what `until` looks for in the log, or for the end."""
    begun = told = time.monotonic()
    while True:
        ended = process.poll() is not None
        text = (
            log.read_text(errors="replace")
            if until or time.monotonic() - told >= PROGRESS_EVERY
            else ""
        )
        if until and (found := until.search(text)):
            return found
        if ended:
            return None
        now = time.monotonic()
        if now - begun >= limit:
            raise _CommandError(f"{what} takes longer than {limit:.0f} s")
        if now - told >= PROGRESS_EVERY:
            told = now
            tell(f"{now - begun:.0f} s: {_progress(text)}")
        time.sleep(POLL_EVERY)


def _progress(text: str) -> str:
    if shares := SHARE.findall(text):
        return f"tests {shares[-1]}"
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:100] if lines else "nothing said yet"


def _wait_until_serving(process: subprocess.Popen[bytes], log: Path, tell: PrintProgress) -> str:
    found = _wait(process, log, RUN_LIMIT, tell, until=SERVING)
    if found is None:
        raise _CommandError(f"it ended with status {process.returncode}")
    return found[1]


def _check_gateway(url: str) -> None:
    """Ask a gateway how it is, for its models, and for a chat."""
    _fetch(f"{url}/health")
    _fetch(f"{url}/v1/models")
    answer = _fetch(f"{url}/v1/chat/completions", CHAT)
    try:
        said = json.loads(answer)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        said = None
    if not isinstance(said, str) or not said:
        raise _CommandError(f"its answer to a chat has no text: {answer[:300]!r}")


def _fetch(url: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    # A proxy of this machine has no part in what is on it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ANSWER_LIMIT) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        with error:
            told = error.read(300)
        raise _CommandError(f"{url} answers {error.code}: {told!r}") from None
    except OSError as error:
        raise _CommandError(f"{url} does not answer: {error}") from None


def _check_end(status: int, output: str) -> None:
    if "Traceback (most recent call last)" in output:
        raise _CommandError("it ends with a traceback")
    if left := left_behind(output):
        raise _CommandError(f"after Ctrl-C these processes live on: {'; '.join(left)}")
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
    """MiB of disk that .venv takes."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, files in os.walk(root / CHECKOUT_PATH.lstrip("/") / ".venv"):
        for name in (".", *files):
            told = os.lstat(Path(folder) / name)
            seen[told.st_dev, told.st_ino] = told.st_blocks * 512
    return sum(seen.values()) >> 20
