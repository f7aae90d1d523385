"""`make fuzz ARGS="--runs 1000000 --only head"`: fuzz what reads strangers' bytes.

`api` is schemathesis on a running gateway (`api.py`), all other targets are atheris'.

Each target runs in a process of its own, `--jobs` of them at a time. An input fails if it raises
anything undeclared, breaks an oracle, takes more than a second of CPU time or ten on the clock, or
makes the process larger than 512 MiB; a leak of a few hundred bytes for each input does that
within a million. `--keep` adds what was found to the corpus, as small as it can be.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz import MODULES
from tests.fuzz.inputs import Target, read_corpus, write_corpus

NAMES = (*MODULES, "api")

_DONE = re.compile(r"^Done (\d+) runs in", re.MULTILINE)

_PROGRESS = re.compile(r"^#(\d+)\t.*? cov: (\d+) .*?rss: (\d+)Mb", re.MULTILINE)


def target_of(name: str) -> Target:
    """The target of this name."""
    found: Target = getattr(importlib.import_module(MODULES[name]), name.upper())
    return found


def fuzz(target: Target, options: argparse.Namespace, folder: Path) -> tuple[str, bool]:
    """Fuzz one target until it has had enough inputs or time; a text, and whether it failed."""
    name, own = target.name, folder / target.name
    for place in (own / "corpus", own / "fresh"):
        place.mkdir(parents=True)
    for number, data in enumerate((*target.seeds, *read_corpus(name))):
        (own / "corpus" / f"kept-{number}").write_bytes(data)
    (own / "words").write_text("".join(f'"{_escaped(token)}"\n' for token in target.tokens))
    limits = [f"-runs={options.runs}"] if options.runs else []
    limits += [f"-max_total_time={options.seconds}"] if options.seconds else []
    command = [
        sys.executable, "-m", "tests.fuzz.run_target", name, *limits, f"-dict={own / 'words'}",
        f"-max_len={target.longest}", "-rss_limit_mb=512", "-timeout=10",
        f"-artifact_prefix={own}/", f"-seed={options.seed}", "-print_final_stats=1",
        "-len_control=20", "-use_value_profile=0", str(own / "fresh"), str(own / "corpus"),
    ]  # fmt: skip
    began = time.monotonic()
    with (own / "log").open("wb") as out:
        failed = subprocess.run(command, stdout=out, stderr=out, check=False).returncode != 0
    seconds = time.monotonic() - began
    text = (own / "log").read_text(errors="replace")
    progress, done = _PROGRESS.findall(text), _DONE.search(text)
    if options.keep and not failed:
        _keep(own, target)
    inputs = int(done[1]) if done else int(progress[-1][0]) if progress else 0
    covered = max((int(edges) for _, edges, _ in progress), default=0)
    rss = max((int(rss) for *_, rss in progress), default=0)
    line = (
        f"{name:<10}{inputs:>10} inputs {seconds:>7.0f} s {inputs / seconds:>7.0f}/s "
        f"{covered:>6} edges {rss:>5} MiB  {'FAILED' if failed else 'ok'}"
    )
    return f"{line}\n{_failure(text, own)}" if failed else line, failed


def fuzz_api(options: argparse.Namespace) -> tuple[str, bool]:
    """Fuzz the API of both listeners; returns a text for people, and whether anything failed."""
    from tests.fuzz import api

    cases = options.cases or (1 << 30 if options.seconds else api.CASES)
    figures, problems = api.fuzz_api(cases, options.seconds or 1e9, seed=options.seed)
    return api.report(figures, problems), bool(problems)


def _failure(log: str, folder: Path) -> str:
    """The end of the log, and the input that failed."""
    lines = [line for line in log.splitlines() if not line.startswith(("#", "stat::", "MS: "))]
    found = [file for file in folder.iterdir() if file.name.startswith(("crash", "timeout", "oom"))]
    return "\n".join([*lines[-40:], *(f"{file.name}: {file.read_bytes()!r}" for file in found)])


def _keep(folder: Path, target: Target) -> None:
    """Keep the fewest inputs that reach what all of them reach, short ones first."""
    fewest = folder / "fewest"
    fewest.mkdir()
    places = (fewest, folder / "corpus", folder / "fresh")
    command = [sys.executable, "-m", "tests.fuzz.run_target", target.name, "-merge=1"]
    subprocess.run([*command, *map(str, places)], capture_output=True, check=True)
    write_corpus(target.name, {file.read_bytes() for file in fewest.iterdir()} - {*target.seeds})


def _escaped(token: bytes) -> str:
    return "".join(
        chr(byte) if 32 < byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in token
    )


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, default=0, help="inputs of each target")
    parser.add_argument("--seconds", type=int, default=0, help="seconds of each target")
    parser.add_argument("--cases", type=int, default=0, help="requests of `api`")
    parser.add_argument("--only", default=",".join(NAMES), help="targets, with commas between")
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time")
    parser.add_argument("--seed", type=int, default=0, help="0: another one in each run")
    parser.add_argument("--keep", action="store_true", help="add what was found to the corpus")
    return parser


def main() -> int:
    """Fuzz. Exit status 1 if an input failed, 2 for a wrong option."""
    options = _options().parse_args()
    names = options.only.split(",")
    unknown = [name for name in names if name not in NAMES]
    if unknown or not (options.runs or options.seconds or options.cases):
        problem = f"no target {unknown[0]}: {', '.join(NAMES)}" if unknown else "how long?"
        print(f"{problem} (--runs N, --seconds N, --cases N)", file=sys.stderr)
        return 2
    for tool, needing in (("atheris", set(MODULES)), ("schemathesis", {"api"})):
        if needing & set(names) and importlib.util.find_spec(tool) is None:
            version = ".".join(map(str, sys.version_info[:2]))
            print(f"SKIPPED: {tool} is not installed on this Python {version}: make dev")
            names = [name for name in names if name not in needing]
    lock = threading.Lock()
    failures: list[bool] = []

    def run(target: Target | None) -> None:
        text, failed = fuzz_api(options) if target is None else fuzz(target, options, Path(folder))
        with lock:
            failures.append(failed)
            print(text.rstrip(), flush=True)

    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        # The longest begins first. Targets are imported one by one, before there are threads.
        targets = [None if name == "api" else target_of(name) for name in names]
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(run, sorted(targets, key=lambda target: target is not None)))
    return int(any(failures))


if __name__ == "__main__":
    sys.exit(main())
