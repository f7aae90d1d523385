"""`llama-gateway cache`: what is in it, and what is removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.local.cache import file_lock, models_in_use
from gateway.local.download import SourceRecord, part_path, write_record
from tests.cli.running import output, refusal, run
from tests.each_case import each_case
from tests.known import known

STRANGE = {
    "models/somebodys.gguf", "photos/a.jpg", "downloads/notes/a.gguf",
    "downloads/0123456789abcdef/readme.txt",
}  # fmt: skip
ALL = ["big.gguf", "new.gguf", "half.gguf", "demo-small-v1.gguf", "logs", "measurements"]


def add(cache: Path, key: str, name: str, size: int, days: float = 0.0) -> Path:
    path = cache / "downloads" / (key * 16) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    write_record(path, SourceRecord(f"https://h/{name}", total=size, sha256="a" * 64))
    used = time.time() - days * 86400
    os.utime(path, (used, used))
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one of each, and with strange files."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("LLAMA_GATEWAY_CACHE", str(cache))
    add(cache, "0", "big.gguf", 3 << 20, days=40)
    add(cache, "1", "new.gguf", 2 << 20, days=1)
    partial = add(cache, "2", "half.gguf", 0)
    partial.unlink()
    part_path(partial).write_bytes(bytes(1 << 20))
    write_record(partial, SourceRecord("https://h/half.gguf?...", total=4 << 20))
    sizes = {"logs/local-0.log": 30, "logs/local-0.log.1": 40, "tuning.jsonl": 20}
    sizes |= {"models/demo-small-v1.gguf": 1000, "models/demo-small-v1.gguf.lock": 0}
    for name, size in (sizes | dict.fromkeys(STRANGE, 1000)).items():
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(bytes(size))
    return cache


def entries() -> dict[str, dict[str, Any]]:
    """What is in the cache, the largest first."""
    return {
        entry["name"]: entry for entry in json.loads(output("cache", "list", "--json"))["entries"]
    }


def test_the_list_names_kinds_sizes_use_and_source(cache: Path, tmp_path: Path) -> None:
    # A link in the place of a download's folder is not followed.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.gguf").write_bytes(b"x")
    (cache / "downloads" / ("f" * 16)).symlink_to(tmp_path / "elsewhere")
    with models_in_use([cache / "downloads" / ("1" * 16) / "new.gguf"]):
        ran, found = run("cache", "list"), entries()
    assert ran.status == 0
    head, big, new, half, *_ = ran.out.splitlines()
    assert head.split() == ["NAME", "KIND", "SIZE", "LAST", "USED", "IN", "USE", "SOURCE"]
    assert big.split()[:4] == ["big.gguf", "model", "3", "MiB"]
    assert big.split()[-2:] == ["-", "https://h/big.gguf"]
    assert "yes" in new
    assert "1 MiB of 4 MiB" in half
    assert f"6 MiB in {cache}" in ran.err
    assert list(found) == ALL
    kinds = ["model", "model", "partial", "demo", "logs", "measurements"]
    assert [entry["kind"] for entry in found.values()] == kinds
    assert [name for name, entry in found.items() if entry["in_use"]] == ["new.gguf"]
    assert found["big.gguf"]["sha256"] == "a" * 64
    assert found["half.gguf"]["expected_bytes"] == 4 << 20
    assert found["half.gguf"]["bytes"] > 1 << 20  # with its record
    assert found["logs"]["bytes"] == 70


def test_models_are_removed_by_their_name_or_their_last_use_and_strange_files_stay(
    cache: Path,
) -> None:
    old = ("cache", "remove", "--older-than", "30d")
    assert "would remove big.gguf" in run(*old, "--dry-run").out
    assert list(entries()) == ALL
    assert run(*old).out == "removed big.gguf (3 MiB)\n"
    for key in "35":
        add(cache, key, "big.gguf", 1)
    assert "nothing of that name, or several" in refusal("cache", "remove", "big.gguf")
    assert run("cache", "remove", "big.gguf@33333333").status == 0
    assert sorted(entries()) == sorted(ALL)
    assert run("cache", "remove", "--all").status == 0
    assert "the cache is empty" in run("cache", "list").err
    left = {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()}
    assert {name for name in left if not name.endswith(".lock")} == STRANGE


def test_a_split_model_is_partial_until_all_its_files_are_there(cache: Path) -> None:
    name = "s-00001-of-00002.gguf"
    for number, kind in ((1, "partial"), (2, "model")):
        add(cache, "9", f"s-0000{number}-of-00002.gguf", 100)
        assert entries()[name]["kind"] == kind
    assert run("cache", "remove", name).status == 0
    assert not (cache / "downloads" / ("9" * 16)).exists()


@contextmanager
def reading(path: Path, mapped: bool) -> Iterator[int]:
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
def test_what_a_process_has_open_or_mapped_is_in_use(cache: Path, mapped: bool) -> None:
    path = cache / "downloads" / ("0" * 16) / "big.gguf"
    with reading(path, mapped) as pid, reading(cache / "logs/local-0.log", False):
        found = entries()
        assert (found["big.gguf"]["pids"], found["logs"]["in_use"]) == ([pid], True)
        named = run("cache", "remove", "big.gguf", "new.gguf")
        assert named.status == 1
        assert f"big.gguf is in use by process {pid} and stays" in named.err
        assert "removed new.gguf" in named.out
        everything = run("cache", "remove", "--all", "--json")
    assert everything.status == 0
    assert [entry["name"] for entry in json.loads(everything.out)["in_use"]] == ["big.gguf", "logs"]
    assert path.exists()
    # Use counts as last use.
    os.utime(path, (1e9, 1e9))
    assert entries()["big.gguf"]["last_used"] == 1e9
    with models_in_use([path]):
        pass
    assert entries()["big.gguf"]["last_used"] > 1e9
    assert path.stat().st_mtime == 1e9


def test_what_is_locked_is_in_use_though_no_file_is_open(cache: Path) -> None:
    """With several NUMA nodes the servers of `up` read a model into memory of their own."""
    served, loading = (cache / "downloads" / (key * 16) for key in "02")
    with models_in_use([served / "big.gguf"]), file_lock(loading, timeout=1):
        assert [name for name, entry in entries().items() if entry["in_use"]] == [
            "big.gguf",
            "half.gguf",
        ]
        assert run("cache", "remove", "--all").status == 0
        assert list(entries()) == ["big.gguf", "half.gguf"]
    assert run("cache", "remove", "--all").status == 0
    assert not served.exists()
    assert not loading.exists()


@each_case(
    ("arguments", "text"),
    [
        ((), "give one of"),
        (("--older-than", "soon"), "not a time"),
        (("../../etc/passwd",), "nothing of that name"),
        (("big.gguf", "none.gguf"), "nothing of that name"),
    ],
)
def test_wrong_usage_is_2_and_removes_nothing(
    cache: Path, arguments: tuple[str, ...], text: str
) -> None:
    assert text in refusal("cache", "remove", *arguments)
    assert list(entries()) == ALL
