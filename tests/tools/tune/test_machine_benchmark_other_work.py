from __future__ import annotations

import os
import sys
from pathlib import Path
from subprocess import DEVNULL, Popen

import psutil
import pytest

from gateway.tools.tune.machine_benchmark import other_work_between, peak_memory, read_cpu_times
from tests.tools.local.machine import write

CPUS = {0, 1}


def machine(root: Path, busy: tuple[int, int], idle: int, **processes: int) -> Path:
    """Write `/proc` with the ticks of two usable CPUs, of a third, and of processes."""
    lines = [f"cpu{cpu} {ticks // 2} {ticks - ticks // 2} 0 {idle} 0 0 0 0 0 0" for cpu, ticks in
             enumerate(busy)]  # fmt: skip
    write(
        root, "proc/stat", "\n".join(["cpu 1 2 3 4", *lines, "cpu2 9999 0 0 1 0 0 0 0", "intr 5"])
    )
    for pid, (name, ticks) in enumerate(processes.items(), start=100):
        fields = ["S", *["0"] * 10, str(ticks), "0", *["0"] * 30]
        write(root, f"proc/{pid}/stat", f"{pid} ({name}) {' '.join(fields)}")
    return root


def test_work_is_time_that_cpus_were_not_idle(tmp_path: Path) -> None:
    before = read_cpu_times(CPUS, machine(tmp_path, (100, 100), 1000, make=50, idler=7))
    after = read_cpu_times(CPUS, machine(tmp_path, (160, 100), 1040, make=110, idler=7))
    # CPU 0 was busy for 60 of 100 ticks, CPU 1 for none of 40.
    found = other_work_between(before, after)
    assert found.busy_cpus == pytest.approx(60 / 70)
    assert found.cpus == 2
    assert [(pid, name) for pid, name, _ in found.top_processes] == [(100, "make")]
    assert str(found) == "0.9 of 2 CPUs are busy: make (100) 86%"


def test_own_work_is_not_counted(tmp_path: Path) -> None:
    before = read_cpu_times(CPUS, machine(tmp_path, (100, 100), 1000, make=50, server=0))
    after = read_cpu_times(CPUS, machine(tmp_path, (190, 110), 1005, make=60, server=90))
    found = other_work_between(before, after, own={101})
    assert found.busy_cpus == pytest.approx(10 / 55)
    assert [name for _, name, _ in found.top_processes] == ["make"]


def test_a_process_name_may_hold_brackets_and_blanks(tmp_path: Path) -> None:
    before = read_cpu_times(CPUS, machine(tmp_path, (0, 0), 0))
    after = read_cpu_times(CPUS, machine(tmp_path, (90, 90), 10, **{"a) R (b": 90}))
    assert other_work_between(before, after).top_processes[0][1] == "a) R (b"


def test_a_system_without_proc_has_no_known_work(tmp_path: Path) -> None:
    times = read_cpu_times(CPUS, tmp_path)
    assert times.cpus == 0
    assert other_work_between(times, times).busy_cpus == 0.0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_busy_process_of_this_machine_is_found() -> None:
    cpus = os.sched_getaffinity(0)
    code = "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end: pass"
    with Popen([sys.executable, "-c", code], stdout=DEVNULL) as busy:
        try:
            before, process = read_cpu_times(cpus), psutil.Process(busy.pid)
            spent = process.cpu_times().user
            while process.cpu_times().user < spent + 0.5:
                assert busy.poll() is None
            after = read_cpu_times(cpus)
            found = other_work_between(before, after, own={os.getpid()})
            seconds = (after.total - before.total) / after.cpus / os.sysconf("SC_CLK_TCK")
            assert found.busy_cpus * seconds > 0.25  # of the half that it has used
            assert (
                other_work_between(before, after, own={os.getpid(), busy.pid}).busy_cpus
                < found.busy_cpus
            )
            assert (peak_memory(busy.pid) or 0) > 1 << 20
        finally:
            busy.kill()


def test_a_process_that_has_ended_has_no_memory(tmp_path: Path) -> None:
    assert peak_memory(4711, tmp_path) is None
