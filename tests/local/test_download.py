from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.local import LocalFleetError, MemoryShortError, ModelFileError
from gateway.local.download import (
    MOST_FAILURES,
    DigestError,
    DownloadHooks,
    DownloadWish,
    download,
    part_path,
    read_record,
    record_path,
)
from tests.known import known
from tests.local.file_server import Fault, FileServer, digest

MIB = 1 << 20


@dataclass
class Told:
    """What a download told."""

    notes: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    progress: list[tuple[int, int | None]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


class Downloads:
    """Downloads from a server to one target."""

    def __init__(self, client: httpx.Client, server: FileServer, folder: Path) -> None:
        self.target = folder / "models" / "m.gguf"
        self.told = Told()
        self._client = client
        self._server = server

    def run(
        self,
        *,
        sha256: str | None = None,
        most_bytes: int | None = None,
        space_beside: int = 0,
        check_size: Callable[[int], None] | None = None,
        clock: Callable[[], float] | None = None,
        free: Callable[[], int] = lambda: 1 << 40,
    ) -> str:
        told = self.told = Told()
        hooks = DownloadHooks(
            check_size=check_size or told.sizes.append,
            progress=lambda done, total: told.progress.append((done, total)),
            note=told.notes.append,
            sleep=told.pauses.append,
            free_space=lambda _: free(),
            **({} if clock is None else {"clock": clock}),
        )
        wish = DownloadWish(
            httpx.URL(f"{self._server.origin}/m.gguf?sig=hunter2"),
            self.target,
            sha256=sha256,
            most_bytes=most_bytes,
            space_beside=space_beside,
        )
        return download(self._client, wish, hooks)

    def break_off(self, **options: Any) -> None:
        """Let a run end after its first MiB."""
        self._server.faults.extend([Fault(cut=MIB), Fault(404)])
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


class TestWhole:
    def test_a_file_arrives_with_its_digest_and_source(
        self, downloads: Downloads, content: bytes
    ) -> None:
        assert downloads.run(sha256=digest(content)) == digest(content)
        assert downloads.target.read_bytes() == content
        assert downloads.left() == ["m.gguf", "m.gguf.source.json"]
        assert stat.S_IMODE(downloads.target.stat().st_mode) == 0o644
        record = known(read_record(downloads.target))
        assert (record.total, record.sha256) == (len(content), digest(content))
        assert record.url.endswith("/m.gguf?...")
        assert "hunter2" not in record_path(downloads.target).read_text()
        assert downloads.told.sizes == [len(content)]
        assert downloads.told.progress[0] == (0, len(content))
        assert downloads.told.progress[-1] == (len(content), len(content))

    def test_a_file_without_a_length_arrives(
        self, downloads: Downloads, server: FileServer, content: bytes
    ) -> None:
        server.faults.append(Fault(chunked=True))
        assert downloads.run() == digest(content)
        (asked,) = downloads.told.sizes  # by the head of the model
        assert 0.9 * len(content) < asked <= len(content)


class TestBreaks:
    def test_a_download_goes_on_where_the_connection_broke(
        self, downloads: Downloads, server: FileServer, content: bytes
    ) -> None:
        server.faults.extend([Fault(cut=MIB), Fault(cut=MIB), Fault(status=503)])
        assert downloads.run() == digest(content)
        assert server.ranges_asked == [None, f"bytes={MIB}-", *[f"bytes={2 * MIB}-"] * 2]
        assert [headers.get("if-range") for _, headers in server.requests] == [
            None, '"v1"', '"v1"', '"v1"',
        ]  # fmt: skip
        assert downloads.told.pauses == [1.0, 1.0, 2.0]  # the first two made progress
        assert "hunter2" not in "".join(downloads.told.notes)

    def test_tries_end_and_the_part_is_kept_and_the_same_command_goes_on(
        self, downloads: Downloads, server: FileServer, content: bytes
    ) -> None:
        server.faults.extend([Fault(cut=MIB), *[Fault(cut=0)] * MOST_FAILURES])
        with pytest.raises(LocalFleetError, match="the same command goes on from there"):
            downloads.run()
        assert downloads.told.pauses == [1.0, 2.0, 4.0, 8.0, 16.0]
        assert downloads.part == MIB
        assert not downloads.target.exists()
        server.faults.clear()
        assert downloads.run() == digest(content)
        assert server.ranges_asked[-1] == f"bytes={MIB}-"
        assert downloads.told.notes == ["Resuming after 1 MiB"]

    def test_a_broken_download_never_has_the_models_name_and_is_of_its_owner_alone(
        self, downloads: Downloads, server: FileServer
    ) -> None:
        server.always = Fault(cut=MIB)
        server.ranges = False
        with pytest.raises(LocalFleetError):
            downloads.run()
        assert downloads.left() == ["m.gguf.part", "m.gguf.source.json"]
        assert stat.S_IMODE(part_path(downloads.target).stat().st_mode) == 0o600

    @pytest.mark.parametrize("seed", range(5))
    def test_any_run_of_breaks_ends_in_the_same_bytes(
        self, downloads: Downloads, server: FileServer, content: bytes, seed: int
    ) -> None:
        rng = random.Random(seed)
        for _ in range(4):
            server.faults.extend(
                [Fault(cut=rng.randrange(len(content))), rng.choice([Fault(500), Fault(429)])]
            )
        assert downloads.run() == digest(content)
        assert downloads.target.read_bytes() == content

    def test_a_server_says_how_long_to_wait(self, downloads: Downloads, server: FileServer) -> None:
        server.faults.append(Fault(503, {"Retry-After": "17"}))
        downloads.run()
        assert downloads.told.pauses == [17.0]

    def test_a_missing_file_is_not_asked_for_again(
        self, downloads: Downloads, server: FileServer
    ) -> None:
        server.always = Fault(404)
        with pytest.raises(LocalFleetError, match="HTTP 404 Not Found"):
            downloads.run()
        assert len(server.requests) == 1
        assert downloads.left() == []

    def test_a_server_that_only_drips_is_left(
        self, downloads: Downloads, server: FileServer, content: bytes
    ) -> None:
        times = chain([0.0], repeat(61.0))
        server.faults.append(Fault(cut=40_000))
        downloads.run(clock=lambda: next(times))
        assert "sent only" in downloads.told.notes[0]
        assert "in 61 s" in downloads.told.notes[0]
        assert downloads.target.read_bytes() == content


class TestChanges:
    def test_a_part_of_an_older_file_is_thrown_away(
        self, downloads: Downloads, server: FileServer, content: bytes
    ) -> None:
        downloads.break_off()
        server.etag, server.content = '"v2"', content + b"more"
        assert downloads.run() == digest(content + b"more")
        assert "Starting over" in downloads.told.notes[1]

    def test_a_range_of_another_file_is_not_appended(
        self, downloads: Downloads, server: FileServer, content: bytes
    ) -> None:
        """A server that ignores If-Range, but whose ETag tells."""
        server.faults.extend([Fault(cut=MIB), Fault(headers={"ETag": '"v2"'})])
        assert downloads.run() == digest(content)
        assert any("has changed" in note for note in downloads.told.notes)

    def test_a_server_without_ranges_sends_all_again(
        self, downloads: Downloads, server: FileServer, content: bytes
    ) -> None:
        server.ranges = False
        server.faults.append(Fault(cut=MIB))
        assert downloads.run() == digest(content)
        assert downloads.told.progress[-1] == (len(content), len(content))

    def test_a_server_that_never_gets_to_the_end_is_given_up(
        self, downloads: Downloads, server: FileServer
    ) -> None:
        server.ranges = False
        server.always = Fault(cut=2 * MIB)
        with pytest.raises(LocalFleetError, match="given up"):
            downloads.run()
        assert len(server.requests) < 10

    def test_a_part_whose_server_tells_no_version_is_not_trusted(
        self, downloads: Downloads, server: FileServer, content: bytes
    ) -> None:
        server.etag = None
        downloads.break_off()
        assert downloads.run() == digest(content)
        assert "with --sha256 it could be resumed" in downloads.told.notes[0]
        assert server.ranges_asked[-1] is None

    def test_with_a_digest_it_is_resumed_all_the_same(
        self, downloads: Downloads, server: FileServer, content: bytes
    ) -> None:
        server.etag = None
        downloads.break_off(sha256=digest(content))
        assert downloads.run(sha256=digest(content)) == digest(content)
        assert server.ranges_asked[-1] == f"bytes={MIB}-"

    def test_a_wrong_digest_removes_the_file(self, downloads: Downloads, content: bytes) -> None:
        with pytest.raises(DigestError, match=digest(content)) as refused:
            downloads.run(sha256="0" * 64)
        assert "hunter2" not in str(refused.value)
        assert downloads.left() == []

    def test_a_damaged_part_is_found_by_the_digest(
        self, downloads: Downloads, content: bytes
    ) -> None:
        downloads.break_off(sha256=digest(content))
        with part_path(downloads.target).open("r+b") as file:
            file.seek(MIB - 10)
            file.write(b"damaged")
        with pytest.raises(DigestError):
            downloads.run(sha256=digest(content))
        assert downloads.run(sha256=digest(content)) == digest(content)


class TestLies:
    def test_a_length_that_is_too_long_ends_with_what_the_server_has(
        self, downloads: Downloads, server: FileServer, content: bytes
    ) -> None:
        """The further try asks for what is missing, and the server says that it has no more."""
        server.faults.append(Fault(announce=len(content) + 1000))
        assert downloads.run() == digest(content)
        assert "ended" in downloads.told.notes[0] or "closed" in downloads.told.notes[0]

    def test_a_length_that_stays_too_long_is_given_up(
        self, downloads: Downloads, server: FileServer, content: bytes
    ) -> None:
        server.ranges = False
        server.always = Fault(announce=len(content) + 1000)
        with pytest.raises(LocalFleetError, match="given up"):
            downloads.run()
        assert not downloads.target.exists()

    def test_a_length_that_is_too_short_for_the_models_own_head_is_refused_early(
        self, downloads: Downloads, server: FileServer, content: bytes
    ) -> None:
        server.faults.append(Fault(announce=len(content) // 2))
        with pytest.raises(ModelFileError, match="its head asks for at least"):
            downloads.run()
        assert downloads.left() == []

    def test_a_file_that_ends_within_its_head_is_refused(
        self, downloads: Downloads, server: FileServer, content: bytes
    ) -> None:
        server.faults.append(Fault(body=content[:5000]))
        with pytest.raises(ModelFileError, match="cut short, after 5,000 bytes"):
            downloads.run()
        assert downloads.left() == []

    def test_a_chunked_body_that_ends_early_is_resumed(
        self, downloads: Downloads, server: FileServer, content: bytes
    ) -> None:
        server.faults.append(Fault(chunked=True, end=3 * MIB))
        assert downloads.run() == digest(content)
        assert server.ranges_asked == [None, f"bytes={3 * MIB}-"]

    def test_a_range_that_sends_more_than_there_is_is_refused(
        self, downloads: Downloads, server: FileServer, content: bytes
    ) -> None:
        server.faults.extend([Fault(cut=MIB), Fault(body=content, announce=len(content))])
        with pytest.raises(LocalFleetError, match="more than the"):
            downloads.run()
        assert downloads.left() == []

    def test_an_endless_body_without_a_length_ends_at_the_limit(
        self, downloads: Downloads, server: FileServer
    ) -> None:
        server.faults.append(Fault(chunked=True))
        with pytest.raises(LocalFleetError, match="--max-bytes") as refused:
            downloads.run(most_bytes=MIB)
        assert "1,048,576" in str(refused.value)
        assert downloads.left() == []

    def test_and_where_the_disk_is_nearly_full(
        self, downloads: Downloads, server: FileServer, content: bytes, tmp_path: Path
    ) -> None:
        server.content = content + bytes(80 * MIB)
        server.faults.append(Fault(chunked=True))
        room = iter([1 << 40, 1 << 40, 1 << 20])
        with pytest.raises(LocalFleetError, match="not enough space"):
            downloads.run(free=lambda: next(room))
        assert (downloads.part or 0) >= 64 * MIB


def refuse(size: int) -> None:
    raise MemoryShortError(f"{size} do not fit")


class TestRefusedEarly:
    @pytest.mark.parametrize(
        ("body", "problem"),
        [
            (b"<!doctype html>" + bytes(5 * MIB), "a web page"),
            (b"version https://git-lfs.github.com/spec/v1\n" + bytes(5 * MIB), "Git LFS pointer"),
            (b"PK\x03\x04" + bytes(5 * MIB), "does not begin with GGUF"),
            (b"GGUF\xff\xff\xff\x7f" + bytes(5 * MIB), "not a GGUF model"),
        ],
    )
    def test_what_is_no_model_is_left_after_its_first_bytes(
        self, downloads: Downloads, server: FileServer, body: bytes, problem: str
    ) -> None:
        server.content = body
        with pytest.raises(ModelFileError, match=problem):
            downloads.run()
        assert downloads.told.progress == [(0, len(body))]
        assert downloads.left() == []

    @pytest.mark.parametrize(
        ("limits", "problem"),
        [
            ({"check_size": refuse}, "do not fit"),
            ({"free": lambda: 257 * MIB}, r"has 0\.3 GiB.*LLAMA_GATEWAY_CACHE"),
            ({"space_beside": 1 << 40}, "not enough space"),
            ({"most_bytes": 1000}, "--max-bytes"),
        ],
        ids=["memory", "disk", "room for other files", "--max-bytes"],
    )
    def test_what_does_not_fit_is_not_read_at_all(
        self, downloads: Downloads, limits: dict[str, Any], problem: str
    ) -> None:
        with pytest.raises(LocalFleetError, match=problem):
            downloads.run(**limits)
        assert downloads.told.progress == []
        assert downloads.left() == []


def test_a_disk_that_is_full_is_told_and_the_part_kept(downloads: Downloads) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    downloads.target.parent.mkdir()
    part_path(downloads.target).symlink_to("/dev/full")
    with pytest.raises(LocalFleetError, match="no space left on device"):
        downloads.run()
    assert not downloads.target.exists()


def test_a_record_that_is_damaged_counts_as_none(tmp_path: Path) -> None:
    target = tmp_path / "m.gguf"
    for text in ("", "{", "[]", '{"url": 5}', '{"url": "x", "total": "y"}', "\udcff"):
        record_path(target).write_bytes(os.fsencode(text))
        assert read_record(target) is None
