"""One real llama.cpp server, as `llama-gateway up` starts it, and what it takes and does."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gateway.local.server import ServerSpec, server_command, server_environment
from gateway.local.topology import read_meminfo

START_LIMIT = 120.0  # seconds
ANSWER_LIMIT = 420.0
FIRST_WORD = 259  # the first token of `random_models` that is neither control token nor byte
WORDS = 900  # the vocabulary of the demo model has 1,225 tokens
LEAD_TOKENS = 4  # of a prompt where only decode is measured
LAST_TOKENS = 8  # of a slot that is filled: they are decoded
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class RealServer:
    """A running server."""

    pid: int
    url: str
    spec: ServerSpec

    def resident(self) -> int:
        """Its anonymous and mapped memory, in bytes."""
        return read_meminfo(Path(f"/proc/{self.pid}/smaps_rollup"))["Rss"]

    def fill(self) -> None:
        """Use the whole context of every slot, all at once."""
        prompt = self.spec.context - LAST_TOKENS - 1
        with ThreadPoolExecutor(self.spec.slots) as pool:
            done = list(
                pool.map(
                    lambda slot: self.complete(prompt, LAST_TOKENS, first=slot * 7, slot=slot),
                    range(self.spec.slots),
                )
            )
        assert [one["timings"]["prompt_n"] for one in done] == [prompt] * self.spec.slots

    def speeds(self, prompt: int, answer: int) -> tuple[float, float]:
        """Tokens per second of prefill and of decode, one request alone, by the clock."""
        timings = self.complete(prompt, answer)["timings"]
        return timings["prompt_per_second"], timings["predicted_per_second"]

    def cpu_speeds(self, prompt: int, answer: int, rounds: int = 3) -> tuple[float, float]:
        """The same, by the time that the server had a CPU: other work takes turns with it.

        It is that of the clock on an idle machine if the server has one thread. Other work makes a
        round slower alone, by what it does to the caches, so that the fastest of each counts.
        """
        reading = min(self._cpu_seconds_of(prompt, 1) for _ in range(rounds))
        first = min(self._cpu_seconds_of(LEAD_TOKENS, 1) for _ in range(rounds))
        more = min(self._cpu_seconds_of(LEAD_TOKENS, 1 + answer) for _ in range(rounds))
        return prompt / reading, answer / (more - first)

    def _cpu_seconds_of(self, prompt: int, answer: int) -> float:
        before = self._cpu_seconds()
        self.complete(prompt, answer)
        return self._cpu_seconds() - before

    def _cpu_seconds(self) -> float:
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    def complete(
        self, prompt: int, answer: int, *, first: int = 0, slot: int = 0
    ) -> dict[str, Any]:
        """Send a prompt of so many tokens; return the server's answer."""
        ids = [FIRST_WORD + (first + 31 * number) % WORDS for number in range(prompt)]
        body = {
            "prompt": ids,
            "n_predict": answer,
            "ignore_eos": True,
            "cache_prompt": False,
            "temperature": 0,
            "id_slot": slot,
        }
        response = httpx.post(f"{self.url}/completion", json=body, timeout=ANSWER_LIMIT)
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found


@contextmanager
def real_server(
    model: Path,
    *,
    slots: int = 1,
    context: int = 256,
    threads: int = 1,
    no_mmap: bool = False,
    prompt_cache_bytes: int = 0,
    more: tuple[str, ...] = (),
) -> Iterator[RealServer]:
    """Start a server by the command of `up`, with `more` options; end it afterwards."""
    spec = ServerSpec(
        name="fit",
        model=model,
        alias="fit",
        slots=slots,
        context=context,
        threads=threads,
        numa_node=0,
        no_mmap=no_mmap,
        prompt_cache_bytes=prompt_cache_bytes,
    )
    command = [*server_command(spec, 0, parent=os.getpid()), *more]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=server_environment(),
        )
        try:
            url = _first_line(process)
            if not url.startswith("http://"):
                log.seek(0)
                raise AssertionError(log.read().decode(errors="replace")[-2000:])
            yield RealServer(process.pid, url, spec)
        finally:
            process.kill()
            process.communicate()


def _first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START_LIMIT)
    return process.stdout.readline().decode().strip() if ready else ""


def python() -> str:
    """The interpreter's version, for the tables of docs."""
    return sys.version.split()[0]
