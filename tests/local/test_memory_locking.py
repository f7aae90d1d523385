from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.local import LocalFleetError
from gateway.local.gguf import ModelFile
from gateway.local.memory import check_memlock, memlock_limit, memlock_warning
from gateway.local.plan import LocalFleetPlan, plan_local_fleet
from gateway.local.topology import read_topology
from tests.local.machine import make_machine

LOCK = 1 << 14  # CAP_IPC_LOCK
ALL_BUT_IT = (1 << 41) - 1 - LOCK
MODEL = ModelFile(Path("/models/m.gguf"), "m", 8 << 30, None)


def machine(
    root: Path, *, hard: str = "8388608", uid: int = 1000, effective: int = 0, ambient: int = 0
) -> Path:
    home = root / "proc/self"
    home.mkdir(parents=True)
    (home / "status").write_text(
        f"Name:\tpython3\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n"
        f"CapEff:\t{effective:016x}\nCapAmb:\t{ambient:016x}\n"
    )
    (home / "limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max open files            1024                 1048576              files     \n"
        f"Max locked memory         65536                {hard:<21}bytes     \n"
    )
    return root


def test_without_the_capability_the_hard_limit_holds_if_there_is_one(tmp_path: Path) -> None:
    assert memlock_limit(machine(tmp_path / "limited")) == 8 << 20
    assert memlock_limit(machine(tmp_path / "free", hard="unlimited")) is None
    assert memlock_limit(tmp_path / "no proc") is None


@pytest.mark.parametrize(
    ("uid", "effective", "ambient", "free"),
    [
        (0, LOCK, 0, True),
        (0, ALL_BUT_IT, 0, False),  # a container's root
        (1000, LOCK, LOCK, True),  # a unit's AmbientCapabilities
        (1000, LOCK, 0, False),  # a file's capabilities end with exec
    ],
)
def test_the_capability_counts_where_a_server_will_have_it(
    tmp_path: Path, uid: int, effective: int, ambient: int, free: bool
) -> None:
    root = machine(tmp_path, uid=uid, effective=effective, ambient=ambient)
    assert (memlock_limit(root) is None) == free


def test_a_limit_below_the_model_is_refused_with_the_remedy() -> None:
    with pytest.raises(LocalFleetError) as caught:
        check_memlock(MODEL, 8 << 20)
    for word in ("/models/m.gguf", "8 MiB", "8.0 GiB", "prlimit", "CAP_IPC_LOCK", "--mlock"):
        assert word in str(caught.value)
    check_memlock(MODEL, MODEL.size)
    check_memlock(MODEL, None)


@pytest.mark.parametrize(
    ("locked", "warning"),
    [
        (8 << 20, None),
        (0, "only 0 MiB of 8.0 GiB is locked in memory; its log may say why"),
        (4 << 20, "only 4.0 GiB of 8.0 GiB is locked in memory; its log may say why"),
    ],
)
def test_a_server_with_too_little_locked_memory_is_warned_of(
    tmp_path: Path, locked: int, warning: str | None
) -> None:
    home = tmp_path / "proc/7"
    home.mkdir(parents=True)
    (home / "status").write_text(f"Name:\tllama-server\nVmLck:\t{locked:8} kB\n")
    assert memlock_warning(MODEL, 7, tmp_path) == warning
    assert memlock_warning(MODEL, 8, tmp_path) is None


def test_the_real_limits_of_a_process_are_read() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 8192));"
        "from gateway.local.memory import memlock_limit; print(memlock_limit())"
    )
    command = [sys.executable, "-c", code]
    if os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-ipc_lock", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "8192\n"


def test_launch_lets_a_server_lock_what_the_hard_limit_allows() -> None:
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_MEMLOCK))"
    launch = [sys.executable, "-m", "gateway.local.launch", "--mlock", "--"]
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    done = subprocess.run(
        [*("prlimit", f"--memlock=4096:{hard}"), *launch, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == f"({hard}, {hard})\n"


def test_a_model_that_may_not_be_locked_starts_nothing(tmp_path: Path) -> None:
    topology = read_topology(make_machine(tmp_path / "machine", [[[0]]]))

    def plan(limit: int | None) -> LocalFleetPlan:
        return plan_local_fleet(
            cache=tmp_path, topology=topology, mlock=True, read_memlock_limit=lambda: limit
        )

    with pytest.raises(LocalFleetError, match="1 MiB"):
        plan(1 << 20)
    assert plan(None).specs[0].mlock
    assert not plan_local_fleet(cache=tmp_path, topology=topology).specs[0].mlock
