"""`python -m tests.workshop.bench.beside_guidellm --guidellm PROGRAM`: bench, GuideLLM and truth.

Both measure an emulated node, a process of its own with known speeds, in turns: the same number of
requests, prompts of the same length, the same loads. Printed are medians over the rounds, beside
what the node's speeds make of them, as a table for a page.

GuideLLM is no dependency: install it into an environment of its own.

    python3 -m venv guidellm && guidellm/bin/pip install guidellm
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gateway.workshop.bench.exchange import PROBE_WORDS, Calibration, PromptWriter, random_words
from gateway.workshop.simulate.simulation import TracePrompt
from tests.emulator.language_model import count_tokens
from tests.emulator.process import emulator_process
from tests.emulator.request_body import render_chat

LIMIT = 300.0  # seconds of one run
LEVELS = (1, 4, 8)  # requests at a time
SLOTS = 8
PROMPT, ANSWER = 256, 64  # tokens
PREFILL_TPS, DECODE_TPS = 500.0, 50.0
FIGURES = ("TTFT", "inter-token", "completion", "tokens/s of all")

Measured = dict[tuple[int, str], float]  # seconds, or tokens/s, by requests at a time and figure


@contextmanager
def emulated_node(slots: int, prefill_tps: float, decode_tps: float) -> Iterator[str]:
    """A node of these speeds in a process of its own; its URL."""
    options = (
        *("--slots", str(slots), "--prefill-tps", str(prefill_tps)),
        *("--decode-tps", str(decode_tps), "--answer-tokens", "1000000"),
    )
    with emulator_process(*options) as node:
        yield node.url


def named(level: int, *figures: float) -> Measured:
    return dict(zip(((level, name) for name in FIGURES), figures, strict=True))


def true_figures(requests: int, prompt: float) -> Measured:
    """The truth, where each request has a slot. They run in rounds, of which the last may be
    smaller.
    """
    ttft, gap = prompt / PREFILL_TPS, 1 / DECODE_TPS
    completion = ttft + (ANSWER - 1) * gap
    found: Measured = {}
    for level in LEVELS:
        seconds = math.ceil(requests / level) * completion
        found |= named(level, ttft, gap, completion, requests * ANSWER / seconds)
    return found


def run_bench(url: str, requests: int) -> tuple[Measured, float]:
    """Medians as `llama-gateway bench` measures them, and the prompts' mean length."""
    command = [
        *(sys.executable, "-m", "gateway", "bench", url, "--json"),
        *("--concurrency", ",".join(map(str, LEVELS)), "--requests", str(requests)),
        *("--prompt", str(PROMPT), "--max-tokens", str(ANSWER)),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    found: Measured = {}
    loads = json.loads(ended.stdout)["loads"]
    for load in loads:
        middle = (load[name]["p50"] for name in ("ttft", "inter_token", "completion"))
        found |= named(int(load["load"]["level"]), *middle, load["total_tokens_per_second"])
    return found, statistics.mean(load["prompt_tokens"] for load in loads)


def run_guidellm(program: Path, url: str, requests: int, folder: Path) -> Measured:
    """Medians as GuideLLM measures them. Its tokens/s are the mean over a load."""
    report = folder / "guidellm.json"
    report.unlink(missing_ok=True)
    command = [
        *(str(program), "run", "--backend", f"kind=openai_http,target={url},model=demo"),
        *("--profile", json.dumps({"kind": "concurrent", "streams": LEVELS})),
        *("--constraint", f"kind=max_requests,count={requests}"),
        *("--data", f"kind=json_file,path={write_prompts(folder, requests)}"),
        *("--output", f"kind=json,path={report}", "--disable-console"),
    ]
    subprocess.run(command, capture_output=True, timeout=LIMIT, check=True, cwd=folder)
    found: Measured = {}
    for level, one in zip(LEVELS, json.loads(report.read_text())["benchmarks"], strict=True):
        of = {name: metric["successful"] for name, metric in one["metrics"].items()}
        found |= named(
            level,
            of["time_to_first_token_ms"]["median"] / 1000,
            of["inter_token_latency_ms"]["median"] / 1000,
            of["request_latency"]["median"],
            of["output_tokens_per_second"]["mean"],
        )
    return found


def write_prompts(folder: Path, requests: int) -> Path:
    """A data set of GuideLLM: prompts as bench writes them, each with its answer's length."""

    def counted(text: str) -> int:
        return count_tokens(render_chat([{"role": "user", "content": text}]))

    few, many = (random_words("calibration", times * PROBE_WORDS) for times in (1, 2))
    writer = PromptWriter(2, Calibration.of(counted(few), counted(many)))
    path = folder / "prompts.jsonl"
    with path.open("w") as file:
        for number in range(requests * len(LEVELS) + 100):
            prompt = writer.write(TracePrompt(number, PROMPT))
            file.write(json.dumps({"prompt": prompt, "output_tokens_count": ANSWER}) + "\n")
    return path


def median_of(rounds: Sequence[Measured]) -> Measured:
    """The median of each figure."""
    names = rounds[0] if rounds else ()
    return {name: statistics.median(found[name] for found in rounds) for name in names}


def print_table(truth: Measured, ours: Measured, theirs: Measured) -> None:
    """As Markdown."""
    print(
        "| at a time | figure | by the node's speeds | bench | off | GuideLLM | bench against it |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (level, figure), true in truth.items():
        mine, other = ours[level, figure], theirs.get((level, figure))
        show = "{:.1f}" if figure == FIGURES[-1] else "{:.4f} s"
        cells = [
            str(level),
            figure,
            show.format(true),
            show.format(mine),
            f"{mine / true - 1:+.1%}",
        ]
        cells += ["", ""] if other is None else [show.format(other), f"{mine / other - 1:+.1%}"]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--guidellm", type=Path, help="the program; without it: bench alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16, help="of each load")
    chosen = parser.parse_args()
    ours: list[Measured] = []
    theirs: list[Measured] = []
    lengths: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        emulated_node(SLOTS, PREFILL_TPS, DECODE_TPS) as url,
    ):
        for number in range(chosen.rounds):
            found, length = run_bench(url, chosen.requests)
            ours.append(found)
            lengths.append(length)
            if chosen.guidellm is not None:
                program = chosen.guidellm.absolute()
                theirs.append(run_guidellm(program, url, chosen.requests, Path(folder)))
            # After each round, so that a run that is cut short leaves something.
            length = statistics.mean(lengths)
            print(f"\n{number + 1} rounds, prompts of {length:.0f} tokens,")
            print(f"Python {platform.python_version()}:\n")
            truth = true_figures(chosen.requests, length)
            print_table(truth, median_of(ours), median_of(theirs))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
