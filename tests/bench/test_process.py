from __future__ import annotations

import os
import subprocess
import sys
import time

from tests.bench.process import cpu_seconds, resident_bytes, waited_seconds

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


def test_cpu_time_holds_living_and_ended_children() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WITH_CHILDREN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        end = time.monotonic() + 20
        while (seen := cpu_seconds(parent.pid)) < 0.4 and time.monotonic() < end:
            time.sleep(0.02)
        parent.communicate()
    assert 0.4 <= seen < 5


def test_our_own_cpu_time_is_what_the_process_clock_says() -> None:
    mine = os.times()
    assert cpu_seconds(os.getpid()) >= time.process_time() - 0.01 + mine.children_user


def test_resident_memory_is_that_of_the_tree() -> None:
    before = resident_bytes(os.getpid())
    assert before > 10e6
    with subprocess.Popen(
        [sys.executable, "-c", "x = b'1' * 50_000_000; print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert resident_bytes(os.getpid()) > before + 45e6
        child.communicate(b"\n")


def test_waiting_is_told_when_another_process_has_the_core() -> None:
    core = str(min(os.sched_getaffinity(0)))
    burn = ["taskset", "-c", core, sys.executable, "-c", BURN.format(seconds=0.3)]
    before = waited_seconds(os.getpid())
    with subprocess.Popen(burn) as one, subprocess.Popen(burn) as two:
        end = time.monotonic() + 20
        while (waited := waited_seconds(os.getpid()) - before) < 0.1 and time.monotonic() < end:
            time.sleep(0.02)
        one.wait()
        two.wait()
    assert waited >= 0.1
