"""What the watch of event loops records, and that its list of exceptions is no longer than needed.

Loops are watched in processes of their own: what holds one belongs into no process of tests.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.loop_watch.plugin import Children, environment, is_known, known, problems
from tests.loop_watch.watch import Record

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import asyncio, gateway.app.assembly, os, sys, threading, time, uvloop

def busy(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

async def main():
    for seconds in map(float, sys.argv[2].split(",")):
        busy(seconds)
        await asyncio.sleep(float(sys.argv[3]))
    time.sleep(0.12)

loop = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}[sys.argv[1]]
with asyncio.Runner(loop_factory=loop) as runner:
    runner.run(main())
"""


def turns_of(tmp_path: Path, loop: str, seconds: str, pause: str, **more: str) -> list[Record]:
    """The turns that are recorded of a loop that is busy for these seconds, with pauses between."""
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    reports = tmp_path / "reports"
    reports.mkdir()
    variables = environment(reports, str(ROOT)) | more
    command = [sys.executable, str(script), loop, seconds, pause]
    subprocess.run(command, env=variables, check=True, timeout=100)
    return [one for one in Children(reports).take() if one.kind == "turn"]


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_one_long_turn_of_a_gateway_s_process_is_recorded_by_cpu_time(
    tmp_path: Path, loop: str
) -> None:
    (turn,) = turns_of(tmp_path, loop, "0.3,0.001,0.001", "0.05")
    assert 0.2 < turn.cpu < 0.4, "time.sleep takes no CPU time"
    assert turn.wall >= turn.cpu - 0.01


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_where_only_turns_are_watched_each_turn_of_a_busy_loop_is_recorded(
    tmp_path: Path, loop: str
) -> None:
    turns = turns_of(tmp_path, loop, "0.3,0.12,0.08,0.03", "0", LOOP_WATCH_ONLY="turns")
    assert [one.cpu for one in turns[-3:]] == pytest.approx([0.12, 0.08, 0.03], abs=0.015)


def test_a_turn_above_50_ms_and_any_wait_fail_unless_they_are_known() -> None:
    stack = ["gateway/callers/ledger.py:_work:1", "gateway/callers/ledger.py:run:2"]
    short, long = (Record("turn", cpu, 1.0, 0.0, stack) for cpu in (0.049, 0.051))
    wait = Record("fsync", 0.0, 0.0, 0.0, stack)
    at_start = Record(
        "open", 0.0, 0.0, 0.0, ["gateway/x.py:f:1", "gateway/app/assembly.py:running:300"]
    )
    found = problems([short, long, wait, at_start])
    assert len(found) == 2
    assert "51 ms of CPU time, 1000 ms on the clock" in found[0]
    assert "the event loop waited: fsync at gateway/callers/ledger.py:_work" in found[1]
    assert is_known(at_start)


def test_what_is_known_exists_and_has_a_reason() -> None:
    for one in known():
        path, _, function = one["at"].partition(":")
        defined = {
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert function in defined, f"{one['at']} is gone: remove it from known.toml"
        assert one["reason"]


async def test_what_a_test_does_itself_is_not_the_gateway_s() -> None:
    end = time.thread_time() + 0.08
    while time.thread_time() < end:
        pass
    open(__file__).close()  # noqa: ASYNC230, PTH123 - as a test may
