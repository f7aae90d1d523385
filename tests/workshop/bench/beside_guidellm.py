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
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gateway.workshop.bench.exchange import WORDS, PromptWriter, fit, random_words
from gateway.workshop.simulate.simulation import TracePrompt
from tests.emulator.language_model import count_tokens
from tests.emulator.process import emulator_process
from tests.emulator.request_body import render_chat

LIMIT = 300.0  # seconds of one run
FIGURES = ("TTFT", "inter-token", "completion", "tokens/s of all")

Measured = dict[tuple[int, str], float]  # seconds, or tokens/s, by requests at a time and figure


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--guidellm", type=Path, help="the program; without it: bench alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--levels", default="1,4,8")
    parser.add_argument("--requests", type=int, default=16, help="of each load")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prefill-tps", type=float, default=500.0)
    parser.add_argument("--decode-tps", type=float, default=50.0)
    return parser


@contextmanager
def emulated_node(slots: int, prefill_tps: float, decode_tps: float) -> Iterator[str]:
    """A node of these speeds in a process of its own; its URL."""
    options = (
        *("--slots", str(slots), "--prefill-tps", str(prefill_tps)),
        *("--decode-tps", str(decode_tps), "--answer-tokens", "1000000"),
    )
    with emulator_process(*options) as node:
        yield node.url


def true_figures(
    level: int, requests: int, prompt: float, tokens: int, prefill_tps: float, decode_tps: float
) -> Measured:
    """The truth, where each request has a slot. They run in rounds, of which the last may be
    smaller.
    """
    ttft, gap = prompt / prefill_tps, 1 / decode_tps
    completion = ttft + (tokens - 1) * gap
    seconds = math.ceil(requests / level) * completion
    found = (ttft, gap, completion, requests * tokens / seconds)
    return dict(zip(((level, name) for name in FIGURES), found, strict=True))


def run_bench(
    url: str, levels: Sequence[int], requests: int, prompt: int, max_tokens: int
) -> tuple[Measured, float]:
    """Medians as `llama-gateway bench` measures them, and the prompts' mean length."""
    command = [
        *(sys.executable, "-m", "gateway", "bench", url, "--json"),
        *("--concurrency", ",".join(map(str, levels)), "--requests", str(requests)),
        *("--prompt", str(prompt), "--max-tokens", str(max_tokens)),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    found: Measured = {}
    loads = json.loads(ended.stdout)["loads"]
    for load in loads:
        level = int(load["load"]["level"])
        found[level, "TTFT"] = load["ttft"]["p50"]
        found[level, "inter-token"] = load["inter_token"]["p50"]
        found[level, "completion"] = load["completion"]["p50"]
        found[level, "tokens/s of all"] = load["total_tokens_per_second"]
    return found, statistics.mean(load["prompt_tokens"] for load in loads)


def run_guidellm(
    program: Path, url: str, levels: Sequence[int], requests: int, prompts: Path, folder: Path
) -> Measured:
    """Medians as GuideLLM measures them. Its tokens/s are the mean over a load."""
    report = folder / "guidellm.json"
    report.unlink(missing_ok=True)
    command = [
        *(str(program), "run", "--backend", f"kind=openai_http,target={url},model=demo"),
        *("--profile", json.dumps({"kind": "concurrent", "streams": list(levels)})),
        *("--constraint", f"kind=max_requests,count={requests}"),
        *("--data", f"kind=json_file,path={prompts}"),
        *("--output", f"kind=json,path={report}", "--disable-console"),
    ]
    subprocess.run(command, capture_output=True, timeout=LIMIT, check=True, cwd=folder)
    found: Measured = {}
    for level, one in zip(levels, json.loads(report.read_text())["benchmarks"], strict=True):
        metrics = one["metrics"]
        middle = {
            name: metrics[name]["successful"]["median"]
            for name in ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency")
        }
        found[level, "TTFT"] = middle["time_to_first_token_ms"] / 1000
        found[level, "inter-token"] = middle["inter_token_latency_ms"] / 1000
        found[level, "completion"] = middle["request_latency"]
        speed = metrics["output_tokens_per_second"]["successful"]
        found[level, "tokens/s of all"] = speed["mean"]
    return found


def write_prompts(path: Path, count: int, prompt: int, max_tokens: int) -> None:
    """A data set of GuideLLM: prompts as bench writes them, each with its answer's length."""

    def counted(text: str) -> int:
        return count_tokens(render_chat([{"role": "user", "content": text}]))

    once, twice = len(WORDS), 2 * len(WORDS)
    few, many = (random_words("calibration", words) for words in (once, twice))
    calibration = fit((once, counted(few)), (twice, counted(many)), "the emulator")
    writer = PromptWriter(2, calibration)
    with path.open("w") as file:
        for number in range(count):
            row = {
                "prompt": writer.write(TracePrompt(number, prompt)),
                "output_tokens_count": max_tokens,
            }
            file.write(json.dumps(row) + "\n")


def median_of(rounds: Sequence[Measured]) -> Measured:
    """The median of each figure."""
    values: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for one in rounds:
        for name, value in one.items():
            values[name].append(value)
    return {name: statistics.median(found) for name, found in values.items()}


def print_table(truth: Measured, ours: Measured, theirs: Measured) -> None:
    """As Markdown."""
    print(
        "| at a time | figure | by the node's speeds | bench | off | GuideLLM | bench against "
        "it |\n"
        "| --- | --- | --- | --- | --- | --- | --- |"
    )
    for (level, figure), true in truth.items():
        mine, other = ours[level, figure], theirs.get((level, figure))
        show = "{:.1f}" if figure == FIGURES[-1] else "{:.4f} s"
        cells = [
            str(level),
            figure,
            show.format(true),
            show.format(mine),
            f"{mine / true - 1:+.1%}",
            "" if other is None else show.format(other),
            "" if other is None else f"{mine / other - 1:+.1%}",
        ]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    chosen = _options().parse_args()
    levels = [int(level) for level in chosen.levels.split(",")]
    ours: list[Measured] = []
    theirs: list[Measured] = []
    lengths: list[float] = []
    with (
        tempfile.TemporaryDirectory() as name,
        emulated_node(chosen.slots, chosen.prefill_tps, chosen.decode_tps) as url,
    ):
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        rows = chosen.requests * len(levels) + 100
        write_prompts(prompts, rows, chosen.prompt, chosen.max_tokens)
        for number in range(chosen.rounds):
            found, length = run_bench(
                url, levels, chosen.requests, chosen.prompt, chosen.max_tokens
            )
            ours.append(found)
            lengths.append(length)
            if chosen.guidellm is not None:
                theirs.append(
                    run_guidellm(
                        chosen.guidellm.absolute(), url, levels, chosen.requests, prompts, folder
                    )
                )
            # After each round, so that a run that is cut short leaves something.
            length = statistics.mean(lengths)
            print(
                f"\n{number + 1} rounds, prompts of {length:.0f} tokens, "
                f"Python {platform.python_version()}:\n"
            )
            truth: Measured = {}
            for level in levels:
                truth |= true_figures(
                    level,
                    chosen.requests,
                    length,
                    chosen.max_tokens,
                    chosen.prefill_tps,
                    chosen.decode_tps,
                )
            print_table(truth, median_of(ours), median_of(theirs) if theirs else {})
            sys.stdout.flush()


if __name__ == "__main__":
    main()
