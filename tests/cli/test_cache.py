from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from gateway.local.cache import models_in_use
from gateway.local.download import SourceRecord, part_path, write_record
from tests.cli.running import refusal, run


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("LLAMA_GATEWAY_CACHE", str(cache))
    for key, name, size, days in (("0", "big.gguf", 3 << 20, 40), ("1", "new.gguf", 2 << 20, 1)):
        path = cache / "downloads" / (key * 16) / name
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(size))
        write_record(path, SourceRecord(f"https://h/{name}", total=size, sha256="a" * 64))
        used = time.time() - days * 86400
        os.utime(path, (used, used))
    return cache


def names() -> list[str]:
    listed = json.loads(run("cache", "list", "--json").out)
    return [entry["name"] for entry in listed["entries"]]


def test_the_list_names_sizes_use_and_source(cache: Path) -> None:
    partial = cache / "downloads" / ("2" * 16) / "half.gguf"
    partial.parent.mkdir()
    part_path(partial).write_bytes(bytes(1 << 20))
    write_record(partial, SourceRecord("https://h/half.gguf?...", total=4 << 20))
    with models_in_use([cache / "downloads" / ("1" * 16) / "new.gguf"]):
        ran = run("cache", "list")
        in_use = json.loads(run("cache", "list", "--json").out)
    assert ran.status == 0
    head, big, new, half = ran.out.splitlines()
    assert head.split() == ["NAME", "KIND", "SIZE", "LAST", "USED", "IN", "USE", "SOURCE"]
    assert big.split()[:4] == ["big.gguf", "model", "3", "MiB"]
    assert big.split()[-2:] == ["-", "https://h/big.gguf"]
    assert "yes" in new
    assert "1 MiB of 4 MiB" in half
    assert "partial" in half
    assert "6 MiB in" in ran.err
    assert in_use["folder"] == str(cache)
    assert [entry["in_use"] for entry in in_use["entries"]] == [False, True, False]
    assert in_use["entries"][0]["sha256"] == "a" * 64
    assert in_use["entries"][2]["expected_bytes"] == 4 << 20


def test_models_are_removed_by_their_name_or_their_last_use(cache: Path) -> None:
    assert "would remove big.gguf" in run("cache", "remove", "--older-than", "30d", "--dry-run").out
    assert names() == ["big.gguf", "new.gguf"]
    assert run("cache", "remove", "--older-than", "30d").out == "removed big.gguf (3 MiB)\n"
    for key in "35":
        path = cache / "downloads" / (key * 16) / "big.gguf"
        path.parent.mkdir()
        path.write_bytes(b"x")
    assert "nothing of that name, or several" in refusal("cache", "remove", "big.gguf")
    assert run("cache", "remove", "big.gguf@33333333").status == 0
    assert sorted(names()) == ["big.gguf", "new.gguf"]
    assert run("cache", "remove", "--all").status == 0
    assert "the cache is empty" in run("cache", "list").err


def test_what_is_in_use_stays(cache: Path) -> None:
    with models_in_use([cache / "downloads" / ("0" * 16) / "big.gguf"]):
        named = run("cache", "remove", "big.gguf", "new.gguf")
        assert named.status == 1
        assert "big.gguf is in use and stays" in named.err
        assert "removed new.gguf" in named.out
        everything = run("cache", "remove", "--all", "--json")
    assert everything.status == 0
    found = json.loads(everything.out)
    assert found["removed"] == []
    assert [entry["name"] for entry in found["in_use"]] == ["big.gguf"]
    assert names() == ["big.gguf"]


@pytest.mark.parametrize(
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
    assert names() == ["big.gguf", "new.gguf"]
