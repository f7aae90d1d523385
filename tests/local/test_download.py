from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.local import LocalFleetError, MemoryShortError
from gateway.local.download import (
    MOST_FAILURES,
    DigestError,
    Download,
    DownloadHooks,
    part_path,
    read_record,
    record_path,
)
from tests.known import known
from tests.local.file_server import Fault, FileServer, digest

MIB = 1 << 20


class Downloads:
    """Downloads from a server to one target, and what the last of them told."""

    def __init__(self, client: httpx.Client, server: FileServer, folder: Path) -> None:
        self.target = folder / "models" / "m.gguf"
        self.server = server
        self.content = server.content
        self.digest = digest(server.content)
        self._client = client
        self.notes: list[str] = []
        self.pauses: list[float] = []
        self.progress: list[tuple[int, int | None]] = []
        self.sizes: list[int] = []

    def run(
        self, *, free: Callable[[], int] = lambda: 1 << 40, hooks: Any = None, **options: Any
    ) -> str:
        for told in (self.notes, self.pauses, self.progress, self.sizes):
            told.clear()
        given = DownloadHooks(
            check_size=self.sizes.append,
            progress=lambda done, total: self.progress.append((done, total)),
            note=self.notes.append,
            sleep=self.pauses.append,
            free_space=lambda _: free(),
        )
        url = httpx.URL(f"{self.server.origin}/m.gguf?sig=hunter2")
        given = replace(given, **(hooks or {}))
        return Download(self._client, url, self.target, given, **options).run()

    def break_off(self, **options: Any) -> None:
        """Let a run end after its first MiB."""
        self.server.faults.extend([Fault(cut=MIB), Fault(404)])
        with pytest.raises(LocalFleetError):
            self.run(**options)
        assert self.part == MIB

    @property
    def part(self) -> int | None:
        path = part_path(self.target)
        return path.stat().st_size if path.exists() else None

    def left(self) -> list[str]:
        return sorted(path.name for path in self.target.parent.iterdir())


@pytest.fixture
def downloads(client: httpx.Client, server: FileServer, tmp_path: Path) -> Downloads:
    return Downloads(client, server, tmp_path)


def test_a_file_arrives_with_its_digest_and_source(downloads: Downloads) -> None:
    size = len(downloads.content)
    assert downloads.run(sha256=downloads.digest) == downloads.digest
    assert downloads.target.read_bytes() == downloads.content
    assert downloads.left() == ["m.gguf", "m.gguf.source.json"]
    assert stat.S_IMODE(downloads.target.stat().st_mode) == 0o644
    record = known(read_record(downloads.target))
    assert (record.total, record.sha256) == (size, downloads.digest)
    assert record.url.endswith("/m.gguf?...")
    assert "hunter2" not in record_path(downloads.target).read_text()
    assert downloads.sizes == [size]
    assert downloads.progress[0] == (0, size)
    assert downloads.progress[-1] == (size, size)

    for text in ("", "{", "[]", '{"url": 5}', '{"url": "x", "total": "y"}', "\udcff"):
        record_path(downloads.target).write_bytes(os.fsencode(text))
        assert read_record(downloads.target) is None, "a damaged record counts as none"


# Downloads that break off.


def test_a_download_goes_on_where_the_connection_broke(downloads: Downloads) -> None:
    server = downloads.server
    server.faults.extend([Fault(cut=MIB), Fault(cut=MIB), Fault(status=503)])
    assert downloads.run() == downloads.digest
    assert server.ranges_asked == [None, f"bytes={MIB}-", *[f"bytes={2 * MIB}-"] * 2]
    versions = [headers.get("if-range") for _, headers in server.requests]
    assert versions == [None, '"v1"', '"v1"', '"v1"']
    assert downloads.pauses == [1.0, 1.0, 2.0]  # the first two made progress
    assert "hunter2" not in "".join(downloads.notes)


def test_tries_end_and_the_part_is_kept_and_the_same_command_goes_on(downloads: Downloads) -> None:
    server = downloads.server
    server.faults.extend([Fault(cut=MIB), *[Fault(cut=0)] * MOST_FAILURES])
    with pytest.raises(LocalFleetError, match="the same command goes on from there"):
        downloads.run()
    assert downloads.pauses == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert downloads.part == MIB
    # It never has the model's name, and is its owner's alone.
    assert downloads.left() == ["m.gguf.part", "m.gguf.source.json"]
    assert stat.S_IMODE(part_path(downloads.target).stat().st_mode) == 0o600
    server.faults.clear()
    assert downloads.run() == downloads.digest
    assert server.ranges_asked[-1] == f"bytes={MIB}-"
    assert downloads.notes == ["Resuming after 1 MiB"]


@pytest.mark.parametrize("more", [{"announce": 1 << 23}, {"cut": 2 * MIB}], ids=str)
def test_a_server_that_never_gets_to_the_end_is_given_up(
    downloads: Downloads, more: dict[str, int]
) -> None:
    downloads.server.ranges = False
    downloads.server.always = Fault(**more)  # type: ignore[arg-type]
    with pytest.raises(LocalFleetError, match="given up"):
        downloads.run()
    assert len(downloads.server.requests) < 10
    assert not downloads.target.exists()


def test_a_server_that_says_when_or_only_drips_is_asked_again_and_one_without_it_is_not(
    downloads: Downloads,
) -> None:
    downloads.server.faults.append(Fault(503, {"Retry-After": "17"}))
    downloads.run()
    assert downloads.pauses == [17.0]
    downloads.target.unlink()
    times = chain([0.0], repeat(61.0))
    downloads.server.faults.append(Fault(cut=40_000))
    downloads.run(hooks={"clock": lambda: next(times)})
    assert "sent only" in downloads.notes[0]
    assert downloads.target.read_bytes() == downloads.content
    downloads.target.unlink()
    asked = len(downloads.server.requests)
    downloads.server.always = Fault(404)
    with pytest.raises(LocalFleetError, match="HTTP 404 Not Found"):
        downloads.run()
    assert len(downloads.server.requests) == asked + 1


def test_a_chunked_body_has_no_length_and_is_resumed_where_it_ends_early(
    downloads: Downloads,
) -> None:
    downloads.server.faults.extend([Fault(chunked=True, end=3 * MIB), Fault(chunked=True)])
    assert downloads.run() == downloads.digest
    assert downloads.server.ranges_asked == [None, f"bytes={3 * MIB}-"]
    # What fits is decided by the head of the model.
    assert 0.9 * len(downloads.content) < downloads.sizes[0] <= len(downloads.content)


# Files that change.


def test_a_part_of_an_older_file_is_thrown_away(downloads: Downloads) -> None:
    downloads.break_off()
    downloads.server.etag, downloads.server.content = '"v2"', downloads.content + b"more"
    assert downloads.run() == digest(downloads.content + b"more")
    assert "Starting over" in downloads.notes[1]
    # Without ranges all is sent again.
    downloads.target.unlink()
    downloads.server.ranges = False
    downloads.server.faults.append(Fault(cut=MIB))
    assert downloads.run() == digest(downloads.content + b"more")


def test_a_range_of_another_file_is_not_appended(downloads: Downloads) -> None:
    """A server that ignores If-Range, but whose ETag tells."""
    downloads.server.faults.extend([Fault(cut=MIB), Fault(headers={"ETag": '"v2"'})])
    assert downloads.run() == downloads.digest
    assert any("has changed" in note for note in downloads.notes)


@pytest.mark.parametrize("etag", [None, 'W/"1"'], ids=["no version", "a weak one"])
def test_a_part_without_a_version_is_trusted_only_with_a_digest(
    downloads: Downloads, etag: str | None
) -> None:
    server = downloads.server
    server.etag = etag
    downloads.break_off()
    assert downloads.run() == downloads.digest
    assert "with --sha256 it could be resumed" in downloads.notes[0]
    assert server.ranges_asked[-1] is None
    downloads.target.unlink()
    downloads.break_off(sha256=downloads.digest)
    assert downloads.run(sha256=downloads.digest) == downloads.digest
    assert server.ranges_asked[-1] == f"bytes={MIB}-"


def test_a_wrong_digest_removes_the_file_and_finds_a_damaged_part(downloads: Downloads) -> None:
    with pytest.raises(DigestError, match=downloads.digest) as refused:
        downloads.run(sha256="0" * 64)
    assert "hunter2" not in str(refused.value)
    assert downloads.left() == []
    downloads.break_off(sha256=downloads.digest)
    part_path(downloads.target).write_bytes(downloads.content[: MIB - 7] + b"damaged")
    with pytest.raises(DigestError):
        downloads.run(sha256=downloads.digest)
    assert downloads.run(sha256=downloads.digest) == downloads.digest


# What can't be the file, or has no room.


@pytest.mark.parametrize(
    ("faults", "problem"),
    [
        (lambda content: [Fault(announce=len(content) // 2)], "its head asks for at least"),
        (lambda content: [Fault(body=content[:5000])], "cut short: it has 5,000 bytes"),
        (lambda content: [Fault(cut=MIB), Fault(body=content, announce=len(content))], "more than"),
        (lambda _: [Fault(chunked=True)], r"--max-bytes allows \(1,048,576"),
    ],
    ids=["a length too short", "an end within the head", "a range too long", "endless"],
)
def test_a_lie_is_refused_and_nothing_is_left_of_it(
    downloads: Downloads, faults: Callable[[bytes], list[Fault]], problem: str
) -> None:
    downloads.server.faults.extend(faults(downloads.content))
    with pytest.raises(LocalFleetError, match=problem):
        downloads.run(most_bytes=MIB if "max-bytes" in problem else None)
    assert downloads.left() == []


def test_a_body_without_a_length_ends_where_the_disk_is_nearly_full(downloads: Downloads) -> None:
    downloads.server.content += bytes(80 * MIB)
    downloads.server.faults.append(Fault(chunked=True))
    room = 300 * MIB
    with pytest.raises(LocalFleetError, match="not enough space"):
        downloads.run(free=lambda: room - (downloads.part or 0))
    assert 40 * MIB < (downloads.part or 0) <= 44 * MIB
    part_path(downloads.target).unlink()
    part_path(downloads.target).symlink_to("/dev/full")
    with pytest.raises(LocalFleetError, match="no space left on device"):
        downloads.run()
    assert not downloads.target.exists()


def refuse(size: int) -> None:
    raise MemoryShortError(f"{size} do not fit")


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"hooks": {"check_size": refuse}}, "do not fit"),
        ({"free": lambda: 257 * MIB}, r"has 0\.3 GiB.*LLAMA_GATEWAY_CACHE"),
        ({"space_beside": 1 << 40}, "not enough space"),
        ({"most_bytes": 1000}, "--max-bytes"),
    ],
    ids=["memory", "disk", "room for other files", "--max-bytes"],
)
def test_what_does_not_fit_is_not_read_at_all(
    downloads: Downloads, limits: dict[str, Any], problem: str
) -> None:
    with pytest.raises(LocalFleetError, match=problem):
        downloads.run(**limits)
    assert downloads.progress == []
    assert downloads.left() == []
