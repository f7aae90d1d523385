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
    ("line", "told"),
    [
        ("== 2 failed, 5482 passed in 130.25s (0:02:10) ==", {"failed": 2, "passed": 5482}),
        (
            "5867 passed, 2 skipped, 6 errors in 838.04s",
            {"passed": 5867, "skipped": 2, "error": 6},
        ),
        ("make: *** [Makefile:59: test] Error 4", {}),
    ],
)
def test_tests_are_counted_by_pytests_last_line(line: str, told: dict[str, int]) -> None:
    assert counts(f"SKIPPED [1] tests/x.py:30: nginx is not installed\n{line}\n") == told


def test_what_outlives_ctrl_c_is_told() -> None:
    assert left_behind(f"INFO ended\n{LEFT_BEHIND}17 (llama-server) S 1 7\nmake: done\n") == [
        "17 (llama-server) S 1 7"
    ]


def test_what_is_missing_here_is_told_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert fresh.main([]) == 2
    assert "root is needed. Remedy: run it as root" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "mmdebstrap" else name)
    assert unsupported_reason() == "programs are missing. Remedy: apt-get install mmdebstrap"


def test_a_system_that_is_not_known_is_refused_with_those_that_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as raised:
        fresh.main(["trixy"])
    assert raised.value.code == 2
    assert "unknown: trixy (there are all, bookworm, trixie," in capsys.readouterr().err


def test_two_at_once_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEPLOY_TEST_CACHE", str(tmp_path))
    monkeypatch.setattr(fresh, "unsupported_reason", lambda: "")
    with (tmp_path / "fresh-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert fresh.main(["trixie"]) == 2
    assert "Remedy: wait for it, or set DEPLOY_TEST_CACHE" in capsys.readouterr().err


def test_a_bare_system_asks_this_machines_registry_but_no_folder_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///srv/wheels http://127.0.0.1:10/simple")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "127.0.0.1")
    told = registry_settings()
    assert told["PIP_INDEX_URL"] == "http://127.0.0.1:9/simple"
    assert told["PIP_EXTRA_INDEX_URL"] == "http://127.0.0.1:10/simple"
    assert told["PIP_TRUSTED_HOST"] == "127.0.0.1"
