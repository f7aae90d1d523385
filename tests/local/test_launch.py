from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.local import LocalFleetError
from gateway.local.embedded import OPENMP_LIBRARY, openmp_folder, packaged_openmp, system_has_openmp
from gateway.local.launch import bind_memory
from gateway.local.plan import plan_local_fleet
from gateway.local.server import server_environment
from tests.known import known
from tests.processes import gone, wait_until_gone
from tests.servers import running_demo_servers

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


# The OpenMP runtime of a server.


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the wheel brings its own there")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without the OpenMP runtime."""

    def load(name: str | None, **options: Any) -> ctypes.CDLL:
        return load_library("libgomp.so.none" if name == OPENMP_LIBRARY else name, **options)

    load_library = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert not system_has_openmp()


@pytest.mark.usefixtures("bare")
def test_elsewhere_a_server_finds_the_copy_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "lib" / OPENMP_LIBRARY
    link.parent.mkdir()
    link.symlink_to("/no/such/file")  # a stale one is replaced
    assert openmp_folder(tmp_path) == link.parent
    assert link.resolve() == known(packaged_openmp()).resolve()
    assert list(link.parent.iterdir()) == [link]
    given = {"LLAMA_GATEWAY_CACHE": str(tmp_path)}
    assert server_environment(given)["LD_LIBRARY_PATH"] == str(tmp_path / "lib")
    other = server_environment({**given, "LD_LIBRARY_PATH": "/other"})["LD_LIBRARY_PATH"]
    assert other == f"/other:{tmp_path / 'lib'}"
    monkeypatch.setattr(importlib.metadata, "files", lambda package: None)
    monkeypatch.setenv("PATH", "/nowhere")  # no llama-server, which would do without
    with pytest.raises(LocalFleetError, match="apt-get install libgomp1"):
        plan_local_fleet(cache=tmp_path / "other")


@pytest.mark.real
@pytest.mark.wheel_only("the binary has its own OpenMP runtime")
@pytest.mark.usefixtures("bare")
def test_a_server_runs_on_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_GATEWAY_CACHE", str(tmp_path))
    with running_demo_servers(1) as (server,):
        mapped = Path(f"/proc/{server.pid}/maps").read_text()
        runtimes = {line.split()[-1] for line in mapped.splitlines() if "libgomp" in line}
        assert runtimes == {str(packaged_openmp())}
        body = {"prompt": "on", "n_predict": 5}
        answer = httpx.post(f"{server.url}/completion", json=body, timeout=120, trust_env=False)
        assert answer.json()["tokens_predicted"] == 5
