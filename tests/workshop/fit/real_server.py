"""One real llama.cpp server, as `llama-gateway up` starts it, and what it takes and does."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gateway.local.gguf import ModelShape, read_model
from gateway.local.memory import ServerSettings, repacked_types, server_memory
from gateway.local.server import ServerSpec, server_command, server_environment
from gateway.local.topology import read_meminfo, read_topology
from tests.known import known
from tests.servers import DemoServer, stop_demo_server, wait_for_demo_server
from tests.workshop.fit.random_models import Recipe, write

START_LIMIT = 120.0  # seconds
ANSWER_LIMIT = 420.0
FIRST_WORD = 259  # the first token of `random_models` that is neither control token nor byte
WORDS = 900  # the vocabulary of the demo model has 1,225 tokens
LEAD_TOKENS = 4  # of a prompt where only decode is measured
LAST_TOKENS = 8  # of a slot that is filled: they are decoded
TINY = Recipe("tiny", layers=1, width=64, heads=2, kv_heads=2, feed_forward=64)


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

    def cpu_speeds(self, prompt: int, answer: int, rounds: int = 3) -> tuple[float, float]:
        """Tokens per second of prefill and of decode, by the time that the server had a CPU.

        Other work takes turns with it. It is that of the clock on an idle machine if the server has
        one thread. Other work makes a round slower alone, by what it does to the caches, so that
        the fastest of each counts.
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
        body: dict[str, Any] = {
            "prompt": ids,
            "n_predict": answer,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        body |= {"temperature": 0, "id_slot": slot}
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
        prompt_cache_bytes=0,
    )
    command = [*server_command(spec, 0, parent=os.getpid()), *more]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=server_environment()
        )
        server = DemoServer(process, log)
        try:
            yield RealServer(process.pid, wait_for_demo_server(server, START_LIMIT), spec)
        finally:
            stop_demo_server(server)


def process_memory(folder: Path) -> int:
    """Bytes that a server takes that has next to no model."""
    path = write(TINY, folder)
    with real_server(path) as server:
        server.fill()
        found = server_memory(shape_of(path), ServerSettings(1, 256, repacked=repacked()))
        return server.resident() - (found.resident - found.process)


def model_memory(
    path: Path,
    process: int,
    slots: int,
    context: int,
    types: tuple[str, str],
    no_mmap: bool = False,
) -> tuple[int, int]:
    """Bytes that a full server has resident without its process, as told and as measured.

    `process`: what `process_memory` found; `types`: of keys and of values.
    """
    settings = ServerSettings(
        slots,
        context,
        key_type=types[0],
        value_type=types[1],
        mapped=not no_mmap,
        repacked=repacked(),
    )
    told = server_memory(shape_of(path), settings)
    more = ("--cache-type-k", types[0], "--cache-type-v", types[1])
    # One thread: two would wait for each other where other work takes turns.
    with real_server(path, slots=slots, context=context, no_mmap=no_mmap, more=more) as server:
        server.fill()
        return told.resident - told.process, server.resident() - process


def shape_of(path: Path) -> ModelShape:
    """The shape of the model in a file."""
    return known(read_model(path).shape)


def repacked() -> Mapping[str, int]:
    """The types of weights that a server of this machine repacks."""
    return repacked_types(read_topology().processor.flags)
