from __future__ import annotations

from pathlib import Path

import pytest

from gateway.local.cache import cache_folder, ensure_file, file_lock


def test_the_gateways_own_variable_comes_first() -> None:
    env = {"LLAMA_GATEWAY_CACHE": "/a/b", "XDG_CACHE_HOME": "/x", "HOME": "/home/me"}
    assert cache_folder(env) == Path("/a/b")


def test_a_relative_folder_counts_from_the_working_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cache_folder({"LLAMA_GATEWAY_CACHE": "c"}) == tmp_path / "c"


def test_the_xdg_folder_counts_if_it_is_absolute() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/llama-gateway")
    home = Path("/h/.cache/llama-gateway")
    assert cache_folder({"XDG_CACHE_HOME": "x", "HOME": "/h"}) == home
    assert cache_folder({"HOME": "/h"}) == home


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        ensure_file(tmp_path / "models/m.gguf", fail, timeout=1)
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_waiting_for_a_lock_has_a_timeout(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x"
    with (
        file_lock(path, timeout=1),
        pytest.raises(TimeoutError, match=r"x\.lock"),
        file_lock(path, timeout=0),
    ):
        pass
    with file_lock(path, timeout=0):
        pass
