"""Compares `llama-gateway fit` with real servers, and prints tables like those of docs/fit.md.

    python -m tests.workshop.fit.measure memory|clock|rates

It writes models of some 700 MB with random weights into a folder under /tmp, one at a time, and
removes each. Each takes some minutes on two cores. `rates` measures one core by the time that it
worked, so that other work there matters little; `clock` measures all cores and needs an idle
machine.
"""

from __future__ import annotations

import argparse
import platform
import re
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from gateway.local.gguf import ModelShape, read_model
from gateway.local.memory import Place, ServerSettings, repacked_types, server_memory
from gateway.local.topology import read_meminfo, read_topology
from gateway.workshop.fit import Machine, expected_speed, instruction_set, measure_bandwidth
from tests.known import known
from tests.servers import running_demo_servers
from tests.workshop.fit.random_models import Recipe, write

MIB = 1 << 20
ANSWER_LIMIT = 420.0  # seconds
FIRST_WORD = 259  # the first token of `random_models` that is neither control token nor byte
WORDS = 900  # the vocabulary of the demo model has 1,225 tokens
LEAD_TOKENS = 4  # of a prompt where only decode is measured
LAST_TOKENS = 8  # of a slot that is filled: they are decoded
TINY = Recipe("tiny", layers=1, width=64, heads=2, kv_heads=2, feed_forward=64)


RATE_TYPES = (
    Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q6_K, Type.Q5_K, Type.Q4_K, Type.Q4_0, Type.Q3_K,
    Type.Q2_K,
)  # fmt: skip
MODELS = (
    Recipe("dense-f16", 10, 1024, 16, 4, 4096, vocabulary=32_000),
    Recipe("dense-q8_0", 12, 1536, 12, 4, 4096, weights=Type.Q8_0, vocabulary=32_000),
    Recipe(
        "dense-q4_k", 16, 2048, 16, 8, 5632, weights=Type.Q4_K, output=Type.Q6_K,
        vocabulary=32_000,
    ),
    Recipe("dense-q4_0", 16, 2048, 16, 8, 5632, weights=Type.Q4_0, vocabulary=32_000),
    Recipe(
        "moe-q4_k", 12, 1024, 16, 4, 1024, experts=32, experts_used=4, weights=Type.Q4_K,
        output=Type.Q6_K, vocabulary=32_000,
    ),
)  # fmt: skip
CLOCK_ROUNDS = 5
LEAST_PROMPT = 8
WARM_UP = 8
PROMPT = 64
ANSWER = 16


# Of a prompt's last layer only keys and values, and queries, are computed for every token.
FOR_EVERY_TOKEN = re.compile(r"blk\.([01]\.|2\.attn_[qkv]\.)")


def memory(folder: Path) -> None:
    """Print predicted against resident memory."""
    process = process_memory(folder)
    print(f"a server without a model takes {process / MIB:.0f} MiB")
    print("| model | file MiB | predicted MiB | measured MiB | error |")
    print("| --- | --- | --- | --- | --- |")
    for recipe in MODELS:
        with _written(recipe, folder) as path:
            told, measured = model_memory(path, process, 2, 512, ("f16", "q8_0"))
            size = path.stat().st_size
        print(
            f"| {recipe.name} | {size / MIB:.0f} | {told / MIB:.0f} | {measured / MIB:.0f} | "
            f"{told / measured - 1:+.1%} |",
            flush=True,
        )


def rates(folder: Path) -> None:
    """Print what one core takes up of each type of weights, with a model that fits the caches."""
    with _written(TINY, folder) as path, real_server(path, context=1024) as server:
        overhead = 1 / server.cpu_speeds(LEAST_PROMPT, 200)[1]
    print(f"a token of a tiny model takes {overhead * 1e6:.0f} us")
    print("| type | decode, GB/s of a core | prefill, 10^9 operations/s of a core |")
    print("| --- | --- | --- |")
    for kind in RATE_TYPES:
        elements = 14 * MIB * GGML_QUANT_SIZES[kind][0] // GGML_QUANT_SIZES[kind][1]
        hidden = max(256, (elements // 4 // 768 - 2560) // 3 // 256 * 256)
        with _written(Recipe("cached", 4, 768, 12, 4, hidden, weights=kind), folder) as path:
            read = sum(t.size for t in shape_of(path).tensors if t.name != "token_embd.weight")
            with real_server(path, context=512) as server:
                decode = read / (1 / server.cpu_speeds(LEAST_PROMPT, 50)[1] - overhead)
        # Prefill with matrices as wide as those of real models.
        with _written(Recipe("wide", 3, 2048, 16, 8, 5632, weights=kind), folder) as path:
            tensors = shape_of(path).tensors
            active = sum(t.elements for t in tensors if FOR_EVERY_TOKEN.match(t.name))
            with real_server(path, context=512) as server:
                prefill = 2 * active * server.cpu_speeds(256, 1)[0]
        print(f"| {kind.name.lower()} | {decode / 1e9:.1f} | {prefill / 1e9:.0f} |", flush=True)


def clock(folder: Path) -> None:
    """Print expected against measured speed of all cores by the clock. The machine must be idle."""
    topology = read_topology()
    threads = topology.threads_per_server(topology.nodes[0])
    print(f"{threads} threads")
    print("| model | file MiB | memory GB/s | decode: expected | measured | error | "
          "prefill: expected | measured | error |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for recipe in MODELS:
        with _written(recipe, folder) as path:
            shape = shape_of(path)
            bandwidth, read, wrote = 0.0, 0.0, 0.0
            with real_server(path, context=512, threads=threads) as server:
                server.complete(32, WARM_UP)
                for _ in range(CLOCK_ROUNDS):  # in turn, so that both see the same neighbours
                    bandwidth = max(bandwidth, measure_bandwidth(topology))
                    timings = server.complete(PROMPT, ANSWER)["timings"]
                    read = max(read, timings["prompt_per_second"])
                    wrote = max(wrote, timings["predicted_per_second"])
            place, flags = Place("this machine", 1, 0), topology.processor.flags
            one = Machine((place,), threads, instruction_set(flags), bandwidth, "measured")
            expected = known(expected_speed(shape, ServerSettings(1, 512), one, used=PROMPT))
            size = path.stat().st_size
        print(
            f"| {recipe.name} | {size / MIB:.0f} | {bandwidth / 1e9:.1f} | "
            f"{expected.decode:.1f} | {wrote:.1f} | {expected.decode / wrote - 1:+.0%} | "
            f"{expected.prefill:.0f} | {read:.0f} | {expected.prefill / read - 1:+.0%} |",
            flush=True,
        )


@contextmanager
def _written(recipe: Recipe, folder: Path) -> Iterator[Path]:
    path = write(recipe, folder)
    try:
        yield path
    finally:
        path.unlink()


MEASUREMENTS = {"memory": memory, "rates": rates, "clock": clock}


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=list(MEASUREMENTS))
    options = parser.parse_args()
    processor = read_topology().processor
    print(f"{processor.name} ({processor.architecture}), Python {platform.python_version()}")
    with tempfile.TemporaryDirectory(prefix="llama-gateway-fit-") as folder:
        MEASUREMENTS[options.what](Path(folder))


# One real server, as `llama-gateway up` starts it, and what it takes and does.


@dataclass(frozen=True, slots=True)
class RealServer:
    """A running server."""

    pid: int
    url: str
    slots: int
    context: int

    def resident(self) -> int:
        """Its anonymous and mapped memory, in bytes."""
        return read_meminfo(Path(f"/proc/{self.pid}/smaps_rollup"))["Rss"]

    def fill(self) -> None:
        """Use the whole context of every slot, all at once."""
        prompt = self.context - LAST_TOKENS - 1
        with ThreadPoolExecutor(self.slots) as pool:
            done = list(
                pool.map(
                    lambda slot: self.complete(prompt, LAST_TOKENS, first=slot * 7, slot=slot),
                    range(self.slots),
                )
            )
        assert [one["timings"]["prompt_n"] for one in done] == [prompt] * self.slots

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
    more: tuple[str, ...] = (),
) -> Iterator[RealServer]:
    """Start a server by the command of `up`, with `more` options; end it afterwards."""
    with running_demo_servers(
        model=model, slots=slots, context=context, threads=threads,
        extra=("--cache-ram", "0", *more),
    ) as (server,):  # fmt: skip
        yield RealServer(server.pid, server.url, slots, context)


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
) -> tuple[int, int]:
    """Bytes that a full server has resident without its process, as told and as measured.

    `process`: what `process_memory` found; `types`: of keys and of values.
    """
    settings = ServerSettings(
        slots,
        context,
        key_type=types[0],
        value_type=types[1],
        repacked=repacked(),
    )
    told = server_memory(shape_of(path), settings)
    more = ("--cache-type-k", types[0], "--cache-type-v", types[1])
    # One thread: two would wait for each other where other work takes turns.
    with real_server(path, slots=slots, context=context, more=more) as server:
        server.fill()
        return told.resident - told.process, server.resident() - process


def shape_of(path: Path) -> ModelShape:
    """The shape of the model in a file."""
    return known(read_model(path).shape)


def repacked() -> Mapping[str, int]:
    """The types of weights that a server of this machine repacks."""
    return repacked_types(read_topology().processor.flags)


if __name__ == "__main__":
    main()
