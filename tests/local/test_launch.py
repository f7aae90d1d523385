from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

from gateway.local.launch import bind_memory
from tests.processes import gone, wait_until_gone

LAUNCH = [sys.executable, "-m", "gateway.local.launch"]
PRINT_PLACE = (
    "import os; print(os.getpid(), sorted(os.sched_getaffinity(0)));"
    "print(open('/proc/self/numa_maps').read())"
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCH, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def memory_can_be_bound() -> bool:
    pid = os.fork()  # the policy of this process must stay as it is
    if pid == 0:
        try:
            bind_memory(0)
        except OSError as error:
            os._exit(1 if error.errno in {errno.EPERM, errno.ENOSYS, None} else 2)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status != 2, "set_mempolicy was called wrongly"
    return status == 0


def test_launch_execs_the_command_unless_its_parent_has_ended() -> None:
    command = ["--", sys.executable, "-c", "import os; print(os.getpid())"]
    with subprocess.Popen([*LAUNCH, *command], stdout=subprocess.PIPE, text=True) as process:
        assert int(process.communicate(timeout=120)[0]) == process.pid
    assert process.returncode == 0
    done = run("--parent", "1", *command)
    assert (done.returncode, done.stdout) == (1, "")


def test_cpus_and_memory_survive_exec() -> None:
    cpu = min(os.sched_getaffinity(0))
    bound = memory_can_be_bound()
    wanted = ["--cpus", str(cpu), *(["--memory-node", "0"] if bound else [])]
    done = run(*wanted, "--", sys.executable, "-c", PRINT_PLACE)
    assert done.stderr == ""
    assert done.stdout.split("\n")[0].endswith(f"[{cpu}]")
    if bound and Path("/proc/self/numa_maps").stat():
        assert " bind:0 " in done.stdout


def test_a_command_that_cannot_be_pinned_runs_and_one_that_cannot_run_exits_as_in_a_shell() -> None:
    done = run("--memory-node", "1000", "--", "/bin/echo", "runs")
    assert (done.stdout, "not pinned" in done.stderr) == ("runs\n", True)
    for command, status in (("/no/such", 127), ("/etc/hostname", 126)):
        done = run("--", command)
        assert done.returncode == status
        assert done.stderr.startswith(f"launch: {command}: ")


def test_the_command_dies_when_its_parent_is_killed() -> None:
    inner = (
        "import os, subprocess\n"
        f"command = {LAUNCH!r} + ['--parent', str(os.getpid()), '--', 'sleep', '600']\n"
        "p = subprocess.Popen(command); print(p.pid, flush=True); p.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", inner], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not gone(child)
    parent.kill()
    parent.wait(60)
    parent.stdout.close()
    wait_until_gone([child])
