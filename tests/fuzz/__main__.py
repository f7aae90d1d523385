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
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.fuzz.inputs import Target, dictionary_of, read_corpus, write_corpus

MODULES = {"chunks": "tests.fuzz.head"} | {
    name: f"tests.fuzz.{name}"
    for name in ("head", "sse", "body", "config", "identity", "limits", "replies")
}
"""Where each target is. They are imported late: what they import is instrumented then."""
NAMES = (*MODULES, "api")

_STATISTICS = re.compile(r"^stat::(\w+): +(\d+)", re.MULTILINE)
_EDGES = re.compile(r"^#\d+\t.*? cov: (\d+) ", re.MULTILINE)


def target_of(name: str) -> Target:
    """The target of this name."""
    found: Target = getattr(importlib.import_module(MODULES[name]), name.upper())
    return found


def fuzz_here(name: str, options: list[str]) -> None:
    """Fuzz a target in this process, as libFuzzer's options say."""
    import atheris

    with atheris.instrument_imports(include=["gateway"]):
        target = target_of(name)
    # By this command libFuzzer starts itself again to merge corpora.
    again = f"{sys.executable} -m tests.fuzz --here {name}"
    atheris.Setup([again, *options], target.try_input)
    atheris.Fuzz()


def _libfuzzer(name: str, *options: object) -> list[str]:
    return [sys.executable, "-m", "tests.fuzz", "--here", name, *map(str, options)]


def fuzz(target: Target, options: argparse.Namespace, folder: Path) -> tuple[str, bool]:
    """Fuzz one target until it has had enough inputs or time; a text, and whether it failed."""
    name, own = target.name, folder / target.name
    for place in (own / "corpus", own / "fresh"):
        place.mkdir(parents=True)
    for number, data in enumerate((*target.seeds, *read_corpus(name))):
        (own / "corpus" / f"kept-{number}").write_bytes(data)
    limits = [f"-runs={options.runs}"] if options.runs else []
    limits += [f"-max_total_time={options.seconds}"] if options.seconds else []
    command = _libfuzzer(
        name, *limits, f"-dict={dictionary_of(name)}", f"-max_len={target.longest}",
        "-rss_limit_mb=512", "-timeout=10", f"-artifact_prefix={own}/", f"-seed={options.seed}",
        "-print_final_stats=1", "-len_control=20", "-use_value_profile=0",
        own / "fresh", own / "corpus",
    )  # fmt: skip
    began = time.monotonic()
    done = subprocess.run(command, stdout=-1, stderr=-2, text=True, errors="replace", check=False)
    seconds, failed = time.monotonic() - began, done.returncode != 0
    if options.keep and not failed:
        _keep(own, target)
    told = {found[1]: int(found[2]) for found in _STATISTICS.finditer(done.stdout)}
    inputs = told.get("number_of_executed_units", 0)
    line = (
        f"{name:<10}{inputs:>10} inputs {seconds:>7.0f} s {inputs / seconds:>7.0f}/s "
        f"{max(map(int, _EDGES.findall(done.stdout)), default=0):>6} edges "
        f"{told.get('peak_rss_mb', 0):>5} MiB  {'FAILED' if failed else 'ok'}"
    )
    return f"{line}\n{_failure(done.stdout, own)}" if failed else line, failed


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
    command = _libfuzzer(target.name, "-merge=1", fewest, folder / "corpus", folder / "fresh")
    subprocess.run(command, capture_output=True, check=True)
    write_corpus(target.name, {file.read_bytes() for file in fewest.iterdir()} - {*target.seeds})


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
    failures = []
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-") as folder,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        # The longest begins first. Targets are imported one by one, before there are threads.
        targets = [target_of(name) for name in names if name != "api"]
        running = [pool.submit(fuzz_api, options)] if "api" in names else []
        running += [pool.submit(fuzz, target, options, Path(folder)) for target in targets]
        for done in as_completed(running):
            text, failed = done.result()
            failures.append(failed)
            print(text.rstrip(), flush=True)
    return int(any(failures))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        fuzz_here(sys.argv[2], sys.argv[3:])
    sys.exit(main())
