from __future__ import annotations

from pathlib import Path

import pytest

from gateway.local.cache import cache_folder, ensure_file
from tests.each_case import each_case


@each_case(
    ("env", "folder"),
    [
        ({"LLAMA_GATEWAY_CACHE": "/a/b", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, Path("/a/b")),
        ({"LLAMA_GATEWAY_CACHE": "c"}, Path.cwd() / "c"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, Path("/x/llama-gateway")),
        ({"XDG_CACHE_HOME": "x", "HOME": "/h"}, Path("/h/.cache/llama-gateway")),
        ({"HOME": "/h"}, Path("/h/.cache/llama-gateway")),
    ],
)
def test_the_gateways_own_variable_goes_before_xdgs_if_that_is_absolute(
    env: dict[str, str], folder: Path
) -> None:
    assert cache_folder(env) == folder


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        ensure_file(tmp_path / "models/m.gguf", fail, timeout=1)
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]
