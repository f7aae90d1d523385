from __future__ import annotations

from pathlib import Path

import pytest

from gateway.tools.local.cache import cache_folder, file_lock


def test_the_gateways_own_variable_comes_first() -> None:
    env = {"LLAMA_GATEWAY_CACHE": "/a/b", "XDG_CACHE_HOME": "/x", "HOME": "/home/me"}
    assert cache_folder(env) == Path("/a/b")


def test_a_relative_one_counts_from_the_working_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cache_folder({"LLAMA_GATEWAY_CACHE": "c"}) == tmp_path / "c"


def test_then_the_xdg_folder_if_it_is_absolute() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/llama-gateway")
    home = Path("/h/.cache/llama-gateway")
    assert cache_folder({"XDG_CACHE_HOME": "x", "HOME": "/h"}) == home
    assert cache_folder({"HOME": "/h"}) == home


def test_a_lock_is_waited_for_no_longer_than_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.lock"
    with (
        file_lock(path, timeout=1),
        pytest.raises(TimeoutError, match=r"x\.lock"),
        file_lock(path, timeout=0),
    ):
        pass
    with file_lock(path, timeout=0):
        pass
