from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from gateway.local.embedded import DEFAULT_BATCH, DEFAULT_MICRO_BATCH
from tests.cli.running import run
from tests.processes import wait_until_gone
from tests.servers import demo_model, server_path

LIMIT = 200.0  # seconds for a command that measures
MODEL = ("--model", str(demo_model()))
QUICK = ("--prompt", "64", "--answer", "16", "--context", "512", "--max-slots", "2", "--force")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    cache = tmp_path / "cache"
    (cache / "models").mkdir(parents=True)
    model = demo_model()
    (cache / "models" / model.name).symlink_to(model)
    return {**os.environ, "LLAMA_GATEWAY_CACHE": str(cache), "PATH": server_path()}


def command(*arguments: str) -> list[str]:
    """Run on one CPU: beside other tests, two threads of a server wait for each other."""
    cpu = min(os.sched_getaffinity(0))
    launch = [sys.executable, "-m", "gateway.local.launch", "--cpus", str(cpu), "--"]
    return [*launch, sys.executable, "-m", "gateway", "tune", *arguments]


def tuned(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=environment, capture_output=True, text=True, timeout=LIMIT,
        check=False,
    )  # fmt: skip


def lines_of(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.real
@pytest.mark.slow
def test_a_short_search_writes_its_result(environment: dict[str, str], tmp_path: Path) -> None:
    host_vars, picture = tmp_path / "tuned.yml", tmp_path / "tuned.svg"
    ran = tuned(
        environment, *QUICK, "--minutes", "0.1", "--json",
        "--write", str(host_vars), "--plot", str(picture),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "results mean little" in ran.stderr
    assert "at most 0.1 minutes" in ran.stderr
    found = json.loads(ran.stdout)
    assert found["ended"] in {"time", "complete"}
    assert found["measurements"] >= 1
    start = found["rule_of_thumb"]
    assert (start["setting"]["batch"], start["setting"]["micro_batch"]) == (
        DEFAULT_BATCH,
        DEFAULT_MICRO_BATCH,
    )
    for figure in ("prefill", "decode", "decode_busy", "stall", "memory"):
        assert start["figures"][figure] > 0
    best = found["best"]["setting"]
    assert yaml.safe_load(host_vars.read_text())["llama_node_threads"] == best["threads"]
    assert "<svg" in picture.read_text()
    stored = len((tmp_path / "cache" / "tuning.jsonl").read_text().splitlines())
    assert stored == found["measurements"]


@pytest.mark.real
@pytest.mark.slow
def test_a_signal_keeps_the_measurements_and_ends_the_servers_and_the_same_command_goes_on(
    environment: dict[str, str], tmp_path: Path
) -> None:
    target, stored = tmp_path / "tuned.json", tmp_path / "stored.jsonl"
    arguments = (*QUICK, "--write", str(target), "--measurements", str(stored))
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        before = lines_of(stored)
        with subprocess.Popen(
            command(*arguments), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        ) as process:  # fmt: skip
            try:
                until = time.monotonic() + LIMIT
                while lines_of(stored) <= before:
                    assert time.monotonic() < until
                    assert process.poll() is None
                    time.sleep(0.05)
                # The next one is under way: its server runs, or is about to.
                while not (servers := psutil.Process(process.pid).children()):
                    assert time.monotonic() < until
                    time.sleep(0.05)
                process.send_signal(number)
                out, err = process.communicate(timeout=LIMIT)
            finally:
                process.kill()
        assert process.returncode == status, err
        assert "READS" in out
        assert "the same command goes on" in err
        assert "Traceback" not in err
        assert not target.exists()
        assert stored.read_text().endswith("}\n")
        wait_until_gone(server.pid for server in servers)
        assert bool(before) == (f"uses {before} earlier measurements" in err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--goal", "speed"), "is not one of 'latency', 'throughput', 'balanced'"),
        (("--write", "tuned.txt"), "must end in .yml, .yaml, .json"),
        (("--write", "missing/tuned.yml"), "there is no folder"),
        (("--plot", "tuned.doc"), "must end in .png, .svg or .pdf"),
        (("--minutes", "0"), "--minutes"),
        ((*MODEL, "--prompt", "4000", "--answer", "100"), "a larger --context, or shorter ones"),
        (("--model", "missing.gguf"), "missing.gguf: no such file"),
    ],
)
def test_wrong_usage_is_2(arguments: tuple[str, ...], message: str) -> None:
    ran = run("tune", *arguments)
    assert ran.status == (1 if "missing.gguf" in arguments else 2)
    assert message in ran.err
