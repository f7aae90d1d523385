from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil

from tests.bench.machine import cpu_seconds, resident_bytes, waited_seconds

BURN = "import time\nend = time.process_time() + {seconds}\nwhile time.process_time() < end: pass\n"
WITH_CHILDREN = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {BURN.format(seconds=0.2)!r}], check=True)
living = subprocess.Popen([sys.executable, "-c", {BURN.format(seconds=0.2)!r} + "input()"],
                          stdin=subprocess.PIPE)
print("ready", flush=True)
sys.stdin.read()
living.communicate(b"\\n")
"""
WITH_A_LARGE_CHILD = """
import subprocess, sys
code = "x = b'1' * 50_000_000; print('ready', flush=True); input()"
subprocess.run([sys.executable, "-c", code], check=True)
"""
LIMIT = 40.0
TICK = 0.01  # seconds; the time of ended children is known in whole ticks


def test_cpu_time_holds_living_and_ended_children() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WITH_CHILDREN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        end = time.monotonic() + LIMIT
        while (seen := cpu_seconds(parent.pid)) < 0.4 and time.monotonic() < end:
            time.sleep(0.02)
        parent.communicate()
    # In ticks it would be 40; that machines take time to start interpreters is no fault.
    assert 0.4 <= seen < 30


def test_the_own_cpu_time_is_that_of_the_process_clock() -> None:
    ended, before = os.times().children_user, time.process_time()
    assert cpu_seconds(os.getpid()) >= before + ended - TICK


def test_resident_memory_is_that_of_the_tree() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WITH_A_LARGE_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        (child,) = psutil.Process(parent.pid).children()
        assert resident_bytes(child.pid) > 50e6
        assert resident_bytes(parent.pid) > resident_bytes(child.pid) + 1e6
        parent.communicate(b"\n")


def test_waiting_time_grows_when_another_process_has_the_core() -> None:
    core = str(min(os.sched_getaffinity(0)))
    burn = ["taskset", "-c", core, sys.executable, "-c", "while True: pass"]
    before = waited_seconds(os.getpid())
    with subprocess.Popen(burn) as one, subprocess.Popen(burn) as two:
        try:
            end = time.monotonic() + LIMIT
            while (waited := waited_seconds(os.getpid()) - before) < 0.1 and time.monotonic() < end:
                time.sleep(0.02)
        finally:
            one.kill()
            two.kill()
    assert waited >= 0.1
