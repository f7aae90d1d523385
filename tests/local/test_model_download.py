from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest

from gateway.local import LocalFleetError
from gateway.local.cache import downloads_folder, file_lock
from gateway.local.download import (
    DigestError,
    DownloadHooks,
    ModelWish,
    cache_key,
    fetch_model,
    record_path,
)
from gateway.local.gguf import ModelFile, read_model
from tests.local.file_server import Fault, FileServer, digest
from tests.local.gguf_files import gguf_writer

FETCH = """
import sys, httpx
from pathlib import Path
from gateway.local.download import DownloadHooks, ModelWish, fetch_model
wish = ModelWish(httpx.URL(sys.argv[1]))
print(fetch_model(wish, Path(sys.argv[2]), DownloadHooks(), check_fits=lambda _: None))
"""


class Models:
    """Models that are fetched from a server into one cache."""

    def __init__(self, server: FileServer, cache: Path) -> None:
        self.server = server
        self.cache = cache
        self.notes: list[str] = []
        self.asked: list[ModelFile] = []
        self.on_note: Callable[[], None] = lambda: None

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.on_note()

    def fetch(self, path: str = "/m.gguf", *sha256: str, most: int | None = None) -> Path:
        hooks = DownloadHooks(note=self.note, sleep=lambda _: None)
        url = httpx.URL(self.server.origin + path)
        wish = ModelWish(url, sha256, most_bytes=most)
        return fetch_model(wish, self.cache, hooks, check_fits=self.asked.append)

    def target(self, path: str = "/m.gguf") -> Path:
        key = cache_key(httpx.URL(self.server.origin + path))
        return downloads_folder(self.cache) / key / path.rpartition("/")[2]


@pytest.fixture
def models(server: FileServer, tmp_path: Path) -> Models:
    return Models(server, tmp_path / "cache")


def test_a_model_is_downloaded_once_and_is_a_model(models: Models, content: bytes) -> None:
    path = models.fetch()
    assert path == models.target()
    assert read_model(path).size == len(content)
    assert [(one.name, one.size) for one in models.asked] == [("m", len(content))]
    assert f"m.gguf has the SHA-256 {digest(content)}" in models.notes[-1]
    assert models.fetch() == path
    assert models.fetch("/m.gguf", digest(content)) == path
    assert len(models.server.requests) == 1


def test_a_file_in_the_cache_with_another_digest_is_refused(models: Models, content: bytes) -> None:
    path = models.fetch()
    with pytest.raises(DigestError, match=r"llama-gateway cache remove m\.gguf"):
        models.fetch("/m.gguf", "0" * 64)
    record_path(path).unlink()  # then the file itself is read
    with pytest.raises(DigestError, match=digest(content)):
        models.fetch("/m.gguf", "0" * 64)


def test_a_signed_address_that_changes_finds_the_file_by_its_digest(
    models: Models, content: bytes
) -> None:
    first = models.fetch("/m.gguf?sig=1", digest(content))
    assert models.fetch("/m.gguf?sig=2", digest(content)) == first
    assert len(models.server.requests) == 1
    assert models.fetch("/m.gguf?sig=2") != first


def test_files_of_a_split_model_are_counted_together_and_a_missing_one_costs_no_other(
    models: Models, tmp_path: Path
) -> None:
    parts = []
    for number in (1, 2, 3):
        path = tmp_path / f"s-0000{number}-of-00003.gguf"
        with gguf_writer(path) as writer:
            writer.add_context_length(512)
            writer.add_tensor(f"t{number}", np.ones(1000 * number, dtype=np.float32))
        parts.append(path.read_bytes())
        models.server.paths[f"/{path.name}"] = parts[-1]
    first, total = "/s-00001-of-00003.gguf", sum(map(len, parts))
    with pytest.raises(LocalFleetError, match="--max-bytes"):
        models.fetch(first, most=total - 1)
    models.asked.clear()
    models.server.faults.extend([Fault(), Fault(), Fault(), Fault(), Fault(404)])
    with pytest.raises(LocalFleetError, match=r"s-00002-of-00003\.gguf: HTTP 404"):
        models.fetch(first)
    before = len(models.server.requests)
    path = models.fetch(first, *map(digest, parts))
    assert first not in [target for target, _ in models.server.requests[before:]]
    assert [file.read_bytes() for file in sorted(path.parent.glob("*.gguf"))] == parts
    assert read_model(path).size == total
    assert {one.size for one in models.asked} == {total}


def test_one_process_downloads_and_another_waits_for_it_but_not_for_ever(
    models: Models, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    models.server.faults.append(Fault(hold=go_on))
    command = [sys.executable, "-c", FETCH, f"{models.server.origin}/m.gguf", str(models.cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert models.server.half_way.wait(60)
            models.on_note = go_on.set
            path = models.fetch()
            assert process.communicate(timeout=60)[0].strip() == str(path)
        finally:
            go_on.set()
            process.kill()
    assert path.read_bytes() == content
    assert models.notes[0].startswith("Another process is downloading")
    assert len(models.server.requests) == 1
    monkeypatch.setattr("gateway.local.download.WAIT_ROUND", 0.005)
    folder = models.target("/other.gguf").parent
    with file_lock(folder, timeout=1), pytest.raises(LocalFleetError, match="made no progress"):
        models.fetch("/other.gguf")
