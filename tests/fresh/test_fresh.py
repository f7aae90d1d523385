from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from tests.fresh import __main__ as fresh
from tests.fresh.chroot import LEFT_BEHIND, left_behind
from tests.fresh.commands import counts
from tests.fresh.systems import registry_settings, unsupported_reason


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("== 2 failed, 5482 passed in 130.25s (0:02:10) ==", {"failed": 2, "passed": 5482}),
        (
            "5867 passed, 2 skipped, 6 errors in 838.04s",
            {"passed": 5867, "skipped": 2, "error": 6},
        ),
        ("make: *** [Makefile:59: test] Error 4", {}),
    ],
)
def test_test_outcomes_are_read_from_pytests_last_line(line: str, expected: dict[str, int]) -> None:
    assert counts(f"SKIPPED [1] tests/x.py:30: nginx is not installed\n{line}\n") == expected


def test_processes_that_outlive_ctrl_c_are_reported() -> None:
    assert left_behind(f"INFO ended\n{LEFT_BEHIND}17 (llama-server) S 1 7\nmake: done\n") == [
        "17 (llama-server) S 1 7"
    ]


def test_a_missing_requirement_is_reported_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert fresh.main([]) == 2
    assert "root is needed. Remedy: run it as root" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "mmdebstrap" else name)
    assert unsupported_reason() == "programs are missing. Remedy: apt-get install mmdebstrap"


def test_the_error_for_an_unknown_system_lists_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as raised:
        fresh.main(["trixy"])
    assert raised.value.code == 2
    assert "unknown: trixy (there are all, bookworm, trixie," in capsys.readouterr().err


def test_two_runs_at_once_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEPLOY_TEST_CACHE", str(tmp_path))
    monkeypatch.setattr(fresh, "unsupported_reason", lambda: "")
    with (tmp_path / "fresh-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert fresh.main(["trixie"]) == 2
    assert "Remedy: wait for it, or set DEPLOY_TEST_CACHE" in capsys.readouterr().err


def test_a_bare_system_uses_this_machines_registry_but_not_its_folders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///srv/wheels http://127.0.0.1:10/simple")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "127.0.0.1")
    expected = registry_settings()
    assert expected["PIP_INDEX_URL"] == "http://127.0.0.1:9/simple"
    assert expected["PIP_EXTRA_INDEX_URL"] == "http://127.0.0.1:10/simple"
    assert expected["PIP_TRUSTED_HOST"] == "127.0.0.1"
