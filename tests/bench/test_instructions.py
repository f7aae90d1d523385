from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import instructions


def test_the_sums_of_the_loops_thread_and_of_all_are_read_from_dumps(tmp_path: Path) -> None:
    dumps = [tmp_path / "counted.1-01", tmp_path / "counted.1-03"]
    for dump, number in zip(dumps, (12345, 100), strict=True):
        dump.write_text(f"version: 1\nsummary: {number}\n\nfn=(1) main\n16 400\ntotals: {number}\n")
    assert instructions.instructions_of(dumps) == (12345, 12445)


def test_a_dump_without_a_sum_is_no_count(tmp_path: Path) -> None:
    dump = tmp_path / "counted.1-01"
    dump.write_text("version: 1\n")
    with pytest.raises(RuntimeError, match="no sum"):
        instructions.instructions_of([dump])
    with pytest.raises(RuntimeError, match="nothing"):
        instructions.instructions_of([])


PASSES = """
from gateway.store.store import StoreWorker
async def main(passes):
    async def one_pass():
        passes.append(1)
    signal.raise_signal(signal.SIGUSR1)
    worker = StoreWorker(one_pass, 0.2)
    working = asyncio.create_task(worker.run())
    await sleep(0.5)
    worker.wake()
    await sleep(0.05)
    print(len(passes))
asyncio.run(main([]))
"""


def test_nothing_looks_into_the_store_by_the_clock_while_requests_are_counted() -> None:
    command = [sys.executable, "-c", instructions.STOP_CLOCKS + PASSES]
    assert subprocess.check_output(command, text=True, timeout=60) == "1\n"
