"""`make fuzz ARGS="--runs 1000000 --only head"`: fuzz what reads strangers' bytes.

Each target runs in a process of its own, `--jobs` of them at a time. An input fails if it raises
anything undeclared, breaks an oracle, takes more than a second of CPU time or ten on the clock, or
makes the process larger than `--rss` MiB; a leak of a few hundred bytes for each input does that
within a million. `--keep` adds what was found to the corpus, as small as it can be.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.fuzz.inputs import Target, read_corpus, write_corpus
from tests.fuzz.modules import MODULES

_DONE = re.compile(r"^Done (\d+) runs in", re.MULTILINE)

_PROGRESS = re.compile(r"^#(\d+)\t.*? cov: (\d+) .*?rss: (\d+)Mb", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Report:
    """One target's run."""

    target: str
    inputs: int
    seconds: float
    covered: int
    """Edges of the gateway's code."""
    rss_mb: int
    """The most that the process took."""
    failure: str
    """Why the run failed, with the input in base64; empty: it did not."""

    @property
    def line(self) -> str:
        rate = self.inputs / self.seconds if self.seconds else 0.0
        return (
            f"{self.target:<10}{self.inputs:>10} inputs {self.seconds:>7.0f} s {rate:>7.0f}/s "
            f"{self.covered:>6} edges {self.rss_mb:>5} MiB  {'FAILED' if self.failure else 'ok'}"
        )


def target_of(name: str) -> Target:
    """The target of this name."""
    found: Target = getattr(importlib.import_module(MODULES[name]), name.upper())
    return found


def fuzz(target: Target, options: argparse.Namespace, folder: Path) -> Report:
    """Fuzz one target until it has had enough inputs or time, or fails."""
    name = target.name
    corpus, fresh = folder / name / "corpus", folder / name / "fresh"
    for place in (corpus, fresh):
        place.mkdir(parents=True)
    for number, data in enumerate((*target.seeds, *read_corpus(name))):
        (corpus / f"kept-{number}").write_bytes(data)
    words = folder / name / "words"
    words.write_text("".join(f'"{_escaped(token)}"\n' for token in target.tokens))
    limits = [f"-runs={options.runs}"] if options.runs else []
    limits += [f"-max_total_time={options.seconds}"] if options.seconds else []
    command = [
        sys.executable, "-m", "tests.fuzz.run_target", name, *limits, f"-dict={words}",
        f"-max_len={target.longest}", f"-rss_limit_mb={options.rss}", "-timeout=10",
        f"-artifact_prefix={folder / name}/", f"-seed={options.seed}", "-print_final_stats=1",
        "-len_control=20", "-use_value_profile=0", str(fresh), str(corpus),
    ]  # fmt: skip
    began = time.monotonic()
    log = folder / name / "log"
    with log.open("wb") as out:
        status = subprocess.run(command, stdout=out, stderr=out, check=False).returncode
    seconds = time.monotonic() - began
    text = log.read_text(errors="replace")
    progress = _PROGRESS.findall(text)
    done = _DONE.search(text)
    failure = "" if not status else _failure(text, folder / name)
    if options.keep and not failure:
        _keep(folder / name, target)
    return Report(
        name,
        int(done[1]) if done else int(progress[-1][0]) if progress else 0,
        seconds,
        max((int(edges) for _, edges, _ in progress), default=0),
        max((int(rss) for *_, rss in progress), default=0),
        failure,
    )


def _failure(log: str, folder: Path) -> str:
    """The end of the log, and the input that failed."""
    lines = [line for line in log.splitlines() if not line.startswith(("#", "stat::", "MS: "))]
    found = [file for file in folder.iterdir() if file.name.startswith(("crash", "timeout", "oom"))]
    return "\n".join([*lines[-40:], *(f"{file.name}: {file.read_bytes()!r}" for file in found)])


def _keep(folder: Path, target: Target) -> None:
    """Keep the fewest inputs that cover what all of them cover."""
    small = folder / "small"
    small.mkdir()
    command = [
        sys.executable, "-m", "tests.fuzz.run_target", target.name, "-merge=1", "-timeout=10",
        f"-max_len={target.longest}", str(small), str(folder / "corpus"), str(folder / "fresh"),
    ]  # fmt: skip
    subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, timeout=1800
    )
    write_corpus(target.name, [file.read_bytes() for file in small.iterdir()])


def _escaped(token: bytes) -> str:
    return "".join(
        chr(byte) if 32 < byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in token
    )


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, default=0, help="inputs of each target")
    parser.add_argument("--seconds", type=int, default=0, help="seconds of each target")
    parser.add_argument("--only", default=",".join(MODULES), help="targets, with commas between")
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time")
    parser.add_argument("--rss", type=int, default=512, help="MiB that a process may take")
    parser.add_argument("--seed", type=int, default=0, help="0: another one in each run")
    parser.add_argument("--keep", action="store_true", help="add what was found to the corpus")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser


def main() -> int:
    """Fuzz. Exit status 1 if an input failed, 2 for a wrong option."""
    options = _options().parse_args()
    names = options.only.split(",")
    unknown = [name for name in names if name not in MODULES]
    if unknown or not (options.runs or options.seconds):
        problem = f"no target {unknown[0]}: {', '.join(MODULES)}" if unknown else "how long?"
        print(f"{problem} (--runs N, --seconds N)", file=sys.stderr)
        return 2
    if importlib.util.find_spec("atheris") is None:
        version = ".".join(map(str, sys.version_info[:2]))
        print(f"SKIPPED: atheris is not installed; on Python {version} it can't be from 3.14 on")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    lock, reports = threading.Lock(), []

    def run(target: Target) -> None:
        report = fuzz(target, options, folder)
        with lock:
            reports.append(report)
            print(report.line, report.failure, sep="\n" if report.failure else "", flush=True)

    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(run, [target_of(name) for name in names]))
    finally:
        shutil.rmtree(folder)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(report) for report in reports], indent=2))
    return int(any(report.failure for report in reports))


if __name__ == "__main__":
    sys.exit(main())
