from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.local.cache import cache_folder, ensure_file, file_lock, models_in_use
from gateway.local.cache_contents import (
    CacheEntry,
    cache_contents,
    remove_entry,
)
from gateway.local.download import SourceRecord, part_path, write_record
from tests.each_case import each_case
from tests.known import known


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


# What is in it.


KEYS = ("00112233445566ff", "aabbccddeeff0011")


@pytest.fixture
def full_cache(tmp_path: Path) -> Path:
    """A full_cache with one of each."""
    full_cache = tmp_path / "full_cache"
    add(full_cache, KEYS[0], "big.gguf", 5000)
    partial = add(full_cache, KEYS[1], "half.gguf", 0)
    partial.unlink()
    part_path(partial).write_bytes(b"x" * 3000)
    write_record(partial, SourceRecord("https://h/half.gguf?...", total=9000))
    for name, size in (
        ("models/demo-small-v1.gguf", 1000),
        ("models/demo-small-v1.gguf.lock", 0),
        ("models/somebodys.gguf", 1000),
        ("logs/local-0.log", 30),
        ("logs/local-0.log.1", 40),
        ("tuning.jsonl", 20),
        ("photos/a.jpg", 1000),
        ("downloads/notes/a.gguf", 1000),
        ("downloads/0123456789abcdef/readme.txt", 1000),
    ):
        path = full_cache / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    return full_cache


def add(full_cache: Path, key: str, name: str, size: int) -> Path:
    path = full_cache / "downloads" / key / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    write_record(path, SourceRecord(f"https://h/{name}", total=size, sha256="a" * 64))
    return path


def by_name(full_cache: Path) -> dict[str, CacheEntry]:
    return {entry.name: entry for entry in cache_contents(full_cache)}


def test_models_parts_and_the_rest_are_told_apart_and_strange_files_left_alone(
    full_cache: Path, tmp_path: Path
) -> None:
    # A link in the place of a download's folder is not followed.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.gguf").write_bytes(b"x")
    (full_cache / "downloads" / ("f" * 16)).symlink_to(tmp_path / "elsewhere")
    found = by_name(full_cache)
    assert {name: entry.kind for name, entry in found.items()} == {
        "big.gguf": "model",
        "half.gguf": "partial",
        "demo-small-v1.gguf": "demo",
        "logs": "logs",
        "measurements": "measurements",
    }
    assert found["big.gguf"].source == "https://h/big.gguf"
    assert found["big.gguf"].sha256 == "a" * 64
    assert found["half.gguf"].expected == 9000
    assert found["half.gguf"].size > 3000  # with its record
    assert found["logs"].size == 70
    assert not any(entry.in_use for entry in found.values())
    sizes = [entry.size for entry in cache_contents(full_cache)]
    assert sizes == sorted(sizes, reverse=True)
    # All of them can be removed, and nothing else goes.
    for entry in cache_contents(full_cache):
        remove_entry(entry)
    assert cache_contents(full_cache) == []
    left = {str(path.relative_to(full_cache)) for path in full_cache.rglob("*") if path.is_file()}
    assert {name for name in left if not name.endswith(".lock")} == {
        "models/somebodys.gguf",
        "photos/a.jpg",
        "downloads/notes/a.gguf",
        "downloads/0123456789abcdef/readme.txt",
    }


def test_a_split_model_is_partial_until_all_its_files_are_there(full_cache: Path) -> None:
    key = "0" * 16
    for number, kind in ((1, "partial"), (2, "model")):
        add(full_cache, key, f"s-0000{number}-of-00002.gguf", 100)
        assert by_name(full_cache)["s-00001-of-00002.gguf"].kind == kind
    remove_entry(by_name(full_cache)["s-00001-of-00002.gguf"])
    assert not (full_cache / "downloads" / key).exists()


class TestInUse:
    @contextmanager
    def reader(self, path: Path, mapped: bool = False) -> Iterator[int]:
        """Another process with the file open, or mapped as llama.cpp does."""
        code = "import sys, mmap\nf = open(sys.argv[1], 'rb')\n"
        if mapped:
            code += "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\nf.close()\n"
        code += "print('ready', flush=True)\nsys.stdin.read()"
        with subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            try:
                assert known(process.stdout).readline() == b"ready\n"
                yield process.pid
            finally:
                process.kill()

    @pytest.mark.parametrize("mapped", [False, True])
    def test_a_model_that_a_process_has_open_or_mapped_is_in_use(
        self, full_cache: Path, mapped: bool
    ) -> None:
        path = by_name(full_cache)["big.gguf"].files[0]
        with self.reader(path, mapped) as pid:
            entry = by_name(full_cache)["big.gguf"]
            assert entry.users == (pid,)
            assert not remove_entry(entry)
        assert path.exists()
        with self.reader(full_cache / "logs/local-0.log"):
            assert not remove_entry(by_name(full_cache)["logs"])
        # Use counts as last use.
        os.utime(path, (1e9, 1e9))
        assert by_name(full_cache)["big.gguf"].last_used == 1e9
        with models_in_use([path]):
            pass
        assert by_name(full_cache)["big.gguf"].last_used > 1e9
        assert path.stat().st_mtime == 1e9

    @pytest.mark.parametrize("name", ["big.gguf", "half.gguf"], ids=["served", "downloading"])
    def test_what_is_locked_is_in_use_though_no_file_is_open(
        self, full_cache: Path, name: str
    ) -> None:
        """With several NUMA nodes the servers of `up` read a model into memory of their own."""
        entry = by_name(full_cache)[name]
        folder = entry.files[0].parent
        with models_in_use(entry.files) if name == "big.gguf" else file_lock(folder, timeout=1):
            assert by_name(full_cache)[name].in_use
            assert not remove_entry(entry)
            assert entry.files[0].exists()
        remove_entry(entry)
        assert not folder.exists()
