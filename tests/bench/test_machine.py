from __future__ import annotations

import subprocess
import sys
import time

from tests.bench.machine import cpu_seconds

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
LIMIT = 40.0


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
