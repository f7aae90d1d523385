from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gateway.local import LocalFleetError, MemoryShortError
from gateway.local.cache import DOWNLOADS, file_lock
from gateway.local.download import (
    MOST_FAILURES,
    MOST_REDIRECTS,
    DigestError,
    DownloadHooks,
    ModelUrlError,
    ModelWish,
    RangeRefusedError,
    RemoteError,
    cache_key,
    fetch_model,
    file_name,
    is_url,
    open_client,
    open_remote,
    parse_model_url,
    part_path,
    part_urls,
    printable,
    read_record,
    record_path,
    same_origin,
)
from gateway.local.gguf import ModelFile, read_model
from tests.each_case import each_case
from tests.known import known
from tests.local.file_server import Fault, FileServer, digest
from tests.local.gguf_files import gguf_writer
from tests.servers import demo_model

MIB = 1 << 20
FETCH = """
import sys, httpx
from pathlib import Path
from gateway.local.download import DownloadHooks, ModelWish, fetch_model
wish = ModelWish(httpx.URL(sys.argv[1]))
print(fetch_model(wish, Path(sys.argv[2]), DownloadHooks(), check_fits=lambda _: None))
"""


class Downloads:
    """Downloads from a server into one cache, and what the last of them told."""

    def __init__(self, server: FileServer, cache: Path) -> None:
        self.cache = cache
        self.server = server
        self.content = server.content
        self.digest = digest(server.content)
        self.notes: list[str] = []
        self.pauses: list[float] = []
        self.progress: list[tuple[int, int | None]] = []
        self.asked: list[ModelFile] = []

    def fetch(
        self,
        path: str = "/m.gguf?sig=hunter2",
        *sha256: str,
        free: Callable[[], int] = lambda: 1 << 40,
        most: int | None = None,
        check_fits: Callable[[ModelFile], None] | None = None,
        **hooks: Any,
    ) -> Path:
        for told in (self.notes, self.pauses, self.progress, self.asked):
            told.clear()
        usual: dict[str, Any] = {
            "progress": lambda done, total: self.progress.append((done, total)),
            "note": self.notes.append,
            "sleep": self.pauses.append,
            "free_space": lambda _: free(),
        }
        wish = ModelWish(httpx.URL(self.server.origin + path), sha256, most_bytes=most)
        check_fits = check_fits or self.asked.append
        return fetch_model(wish, self.cache, DownloadHooks(**usual | hooks), check_fits=check_fits)

    def run(self, *sha256: str, **options: Any) -> str:
        """Fetch the usual file; its digest."""
        return digest(self.fetch("/m.gguf?sig=hunter2", *sha256, **options).read_bytes())

    def break_off(self, *sha256: str) -> None:
        """Let a run end after its first MiB."""
        self.server.faults.extend([Fault(cut=MIB), Fault(404)])
        with pytest.raises(LocalFleetError):
            self.run(*sha256)
        assert self.part == MIB

    def place(self, path: str = "/m.gguf?sig=hunter2") -> Path:
        url = httpx.URL(self.server.origin + path)
        return self.cache / DOWNLOADS / cache_key(url) / file_name(url)

    @property
    def target(self) -> Path:
        return self.place()

    @property
    def part(self) -> int | None:
        path = part_path(self.target)
        return path.stat().st_size if path.exists() else None

    def left(self) -> list[str]:
        return sorted(path.name for path in self.target.parent.iterdir())


@pytest.fixture
def server() -> Iterator[FileServer]:
    """A server of a whole model, of some 4 MiB."""
    with FileServer(demo_model().read_bytes()).serving() as server:
        yield server


@pytest.fixture
def downloads(server: FileServer, tmp_path: Path) -> Downloads:
    return Downloads(server, tmp_path / "cache")


def test_a_model_arrives_once_with_its_digest_and_source(downloads: Downloads) -> None:
    size = len(downloads.content)
    path = downloads.fetch()
    assert path == downloads.target
    assert read_model(path).size == size
    assert path.read_bytes() == downloads.content
    assert downloads.left() == ["m.gguf", "m.gguf.source.json"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    record = known(read_record(path))
    assert (record.total, record.sha256) == (size, downloads.digest)
    assert record.url.endswith("/m.gguf?...")
    assert "hunter2" not in record_path(path).read_text()
    assert [(one.name, one.size) for one in downloads.asked] == [("m", size)]
    assert (downloads.progress[0], downloads.progress[-1]) == ((0, size), (size, size))
    assert f"m.gguf has the SHA-256 {downloads.digest}" in downloads.notes[-1]
    assert downloads.run() == downloads.run(downloads.digest) == downloads.digest
    assert len(downloads.server.requests) == 1

    for text in ("", "{", "[]", '{"url": 5}', '{"url": "x", "total": "y"}', "\udcff"):
        record_path(path).write_bytes(os.fsencode(text))
        assert read_record(path) is None, "a damaged record counts as none"


def test_a_file_in_the_cache_with_another_digest_is_refused(downloads: Downloads) -> None:
    path = downloads.fetch()
    with pytest.raises(DigestError, match=r"llama-gateway cache remove m\.gguf"):
        downloads.run("0" * 64)
    record_path(path).unlink()  # then the file itself is read
    with pytest.raises(DigestError, match=downloads.digest):
        downloads.run("0" * 64)


def test_a_signed_address_that_changes_finds_the_file_by_its_digest(downloads: Downloads) -> None:
    first = downloads.fetch("/m.gguf?sig=1", downloads.digest)
    assert downloads.fetch("/m.gguf?sig=2", downloads.digest) == first
    assert len(downloads.server.requests) == 1
    assert downloads.fetch("/m.gguf?sig=2") != first


def test_files_of_a_split_model_are_counted_together_and_a_missing_one_costs_no_other(
    downloads: Downloads, tmp_path: Path
) -> None:
    parts, server = [], downloads.server
    for number in (1, 2, 3):
        path = tmp_path / f"s-0000{number}-of-00003.gguf"
        with gguf_writer(path) as writer:
            writer.add_context_length(512)
            writer.add_tensor(f"t{number}", np.ones(1000 * number, dtype=np.float32))
        parts.append(path.read_bytes())
        server.paths[f"/{path.name}"] = parts[-1]
    first, total = "/s-00001-of-00003.gguf", sum(map(len, parts))
    with pytest.raises(LocalFleetError, match="--max-bytes"):
        downloads.fetch(first, most=total - 1)
    with pytest.raises(LocalFleetError, match="not enough space"):
        downloads.fetch(first, free=lambda: 256 * MIB + total - 1)
    server.faults.extend([Fault(), Fault(), Fault(), Fault(), Fault(404)])
    with pytest.raises(LocalFleetError, match=r"s-00002-of-00003\.gguf: HTTP 404"):
        downloads.fetch(first)
    before = len(server.requests)
    path = downloads.fetch(first, *map(digest, parts))
    assert first not in [target for target, _ in server.requests[before:]]
    assert [file.read_bytes() for file in sorted(path.parent.glob("*.gguf"))] == parts
    assert read_model(path).size == total
    assert {one.size for one in downloads.asked} == {total}


def test_one_process_downloads_and_another_waits_for_it_but_not_for_ever(
    downloads: Downloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, notes, server = threading.Event(), [], downloads.server
    server.faults.append(Fault(hold=go_on))

    def note(text: str) -> None:
        notes.append(text)
        go_on.set()

    command = [sys.executable, "-c", FETCH, f"{server.origin}/m.gguf", str(downloads.cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert server.half_way.wait(60)
            path = downloads.fetch("/m.gguf", note=note)
            assert process.communicate(timeout=60)[0].strip() == str(path)
        finally:
            go_on.set()
            process.kill()
    assert path.read_bytes() == downloads.content
    assert notes[0].startswith("Another process is downloading")
    assert len(server.requests) == 1
    monkeypatch.setattr("gateway.local.download.WAIT_ROUND", 0.005)
    folder = downloads.place("/other.gguf").parent
    with file_lock(folder, timeout=1), pytest.raises(LocalFleetError, match="made no progress"):
        downloads.fetch("/other.gguf")


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
    assert downloads.notes[0] == "Resuming after 1 MiB"


@pytest.mark.parametrize("fault", [Fault(announce=1 << 23), Fault(cut=2 * MIB)], ids=str)
def test_a_server_that_never_gets_to_the_end_is_given_up(
    downloads: Downloads, fault: Fault
) -> None:
    downloads.server.ranges = False
    downloads.server.always = fault
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
    assert downloads.run(clock=lambda: next(times)) == downloads.digest
    assert "sent only" in downloads.notes[0]
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
    size = len(downloads.content)
    assert 0.9 * size < downloads.asked[0].size <= size


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
    downloads.break_off(downloads.digest)
    assert downloads.run(downloads.digest) == downloads.digest
    assert server.ranges_asked[-1] == f"bytes={MIB}-"


def test_a_wrong_digest_removes_the_file_and_finds_a_damaged_part(downloads: Downloads) -> None:
    with pytest.raises(DigestError, match=downloads.digest) as refused:
        downloads.run("0" * 64)
    assert "hunter2" not in str(refused.value)
    assert downloads.left() == []
    downloads.break_off(downloads.digest)
    part_path(downloads.target).write_bytes(downloads.content[: MIB - 7] + b"damaged")
    with pytest.raises(DigestError):
        downloads.run(downloads.digest)
    assert downloads.run(downloads.digest) == downloads.digest


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
        downloads.run(most=MIB if "max-bytes" in problem else None)
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


def refuse(model: ModelFile) -> None:
    raise MemoryShortError(f"{model.size} do not fit")


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"check_fits": refuse}, "do not fit"),
        ({"free": lambda: 257 * MIB}, r"has 0\.3 GiB.*LLAMA_GATEWAY_CACHE"),
        ({"most": 1000}, "--max-bytes"),
    ],
    ids=["memory", "disk", "--max-bytes"],
)
def test_what_does_not_fit_is_not_read_at_all(
    downloads: Downloads, limits: dict[str, Any], problem: str
) -> None:
    with pytest.raises(LocalFleetError, match=problem):
        downloads.run(**limits)
    assert downloads.progress == []
    assert downloads.left() == []


# Responses: redirects and refusals.


def read(url: str, start: int = 0, token: str | None = None) -> int:
    """Read a file to its end; where it began."""
    with (
        open_client() as client,
        open_remote(client, httpx.URL(url), start=start, token=token) as body,
    ):
        assert list(body.chunks)
        return body.start


def refused(server: FileServer, start: int = 0) -> RemoteError:
    """Why a file can't be read; the reason holds no secret of its address."""
    with pytest.raises(RemoteError) as error:
        read(f"{server.origin}/m?sig=hunter2", start)
    assert "hunter2" not in str(error.value)
    return error.value


@pytest.mark.parametrize(
    ("user", "token", "sent"), [("", "secret", "Bearer secret"), ("me:hunter2@", None, "Basic ")]
)
def test_a_secret_stays_with_its_host_and_the_range_goes_along(
    server: FileServer, user: str, token: str | None, sent: str
) -> None:
    with FileServer(bytes(6000)).serving() as other:
        server.faults.append(Fault(307, {"Location": "/elsewhere"}))
        server.faults.append(Fault(302, {"Location": f"{other.origin}/cdn"}))
        url = server.origin.replace("//", f"//{user}") + "/m"
        assert read(url, 5000, token) == 5000
    assert len(server.requests) == 2
    assert all(headers["authorization"].startswith(sent) for _, headers in server.requests)
    ((target, headers),) = other.requests
    assert (target, "authorization" in headers) == ("/cdn", False)


def test_redirects_are_bounded_and_a_server_that_is_away_may_come_back(server: FileServer) -> None:
    server.always = Fault(301, {"Location": "/again"})
    error = refused(server)
    assert "more than 8 redirects" in str(error)
    assert not error.retryable
    assert len(server.requests) == MOST_REDIRECTS + 1
    server.always = Fault(302, {"Location": "ftp://x/y"})
    with pytest.raises(ModelUrlError, match="redirects"):
        read(f"{server.origin}/m")
    with FileServer(b"").serving() as gone:
        pass
    assert refused(gone).retryable


@each_case("sent", ["bytes 0-9/10", "bytes 5-9", "pages 1-2/3", "", "bytes " + "9" * 40])
def test_another_range_than_the_one_asked_is_not_taken(server: FileServer, sent: str) -> None:
    server.faults.append(Fault(headers={"Content-Range": sent}))
    assert isinstance(refused(server, 1000), RangeRefusedError)
    assert isinstance(refused(server, len(server.content)), RangeRefusedError)
    server.faults.append(Fault(headers={"Content-Encoding": "gzip"}))
    assert "sends the file as gzip" in str(refused(server))


# Addresses.


SECRET = "https://user:hunter2@models.example:8443/a/m.gguf?X-Signature=hunter2#hunter2"


@each_case(
    "text",
    [
        "http://models.example/m.gguf", "http://192.168.1.5/m.gguf", "ftp://models.example/m.gguf",
        "file:///etc/passwd", "https://", "https:///m.gguf", "https://h:0/m.gguf",
        "https://h:99999/m.gguf", "https://h:port/m.gguf", "https://h/m\n.gguf",
        "https://h/" + "x" * 9000,
    ],
)  # fmt: skip
def test_addresses_that_are_not_https_or_not_valid_are_refused(text: str) -> None:
    assert is_url(text)
    assert not is_url(text.replace("://", "/"))
    with pytest.raises(ModelUrlError):
        parse_model_url(text)


def test_what_is_printed_holds_no_secret() -> None:
    url = parse_model_url(SECRET)
    assert printable(url) == "https://models.example:8443/a/m.gguf?..."
    assert "hunter2" not in cache_key(url)
    for text in (SECRET.replace("https", "http"), SECRET.replace(":8443", ":84430")):
        with pytest.raises(ModelUrlError) as refused:
            parse_model_url(text)
        assert "hunter2" not in str(refused.value)


@each_case(
    ("path", "name"),
    [
        ("/a/Model-Q4_K_M.gguf", "Model-Q4_K_M.gguf"),
        ("/a/Model.GGUF?download=true", "Model.gguf"),
        ("/a/..%2F..%2Fetc%2Fpasswd", "passwd.gguf"),
        ("/", "model.gguf"),
        ("/%00%1b[31m.gguf", "31m.gguf"),
        ("/" + "x" * 500 + ".gguf", "x" * 120 + ".gguf"),
    ],
)
def test_the_files_name_is_safe(path: str, name: str) -> None:
    assert file_name(parse_model_url(f"https://h{path}")) == name


HERE, LOOPBACK = "https://models.example/m.gguf?token=hunter2", "http://127.0.0.1:81/m.gguf"


@each_case(
    ("here", "location", "target", "is_same"),
    [
        (HERE, "/cdn/m.gguf", "https://models.example/cdn/m.gguf", True),
        (HERE, "https://models.example:443/m", "https://models.example/m", True),
        (HERE, "https://models.example:444/m", "https://models.example:444/m", False),
        (HERE, "//other.example/m", "https://other.example/m", False),
        (LOOPBACK, "http://[::1]:82/m.gguf", "http://[::1]:82/m.gguf", False),
        (HERE, "http://cdn.example/m?key=hunter2", None, False),
        (HERE, "http://127.0.0.1/m", None, False),
        (HERE, "file:///x", None, False),
        (HERE, "", None, False),
    ],
)
def test_a_redirect_stays_at_https_and_another_host_or_port_is_another_origin(
    here: str, location: str, target: str | None, is_same: bool
) -> None:
    base = httpx.URL(here)
    if target is None:
        with pytest.raises(ModelUrlError) as refused:
            parse_model_url(location, base)
        assert "hunter2" not in str(refused.value)
    else:
        found = parse_model_url(location, base)
        assert (str(found), same_origin(base, found)) == (target, is_same)


def test_two_addresses_share_a_folder_only_where_they_are_one() -> None:
    key = cache_key(parse_model_url("https://h/m.gguf"))
    assert key == cache_key(parse_model_url("https://me:pw@h/m.gguf#x"))
    assert key != cache_key(parse_model_url("https://h/m.gguf?version=2"))
    for parts in ("00000", "99999"):
        with pytest.raises(ModelUrlError, match="files"):
            part_urls(parse_model_url(f"https://h/m-00001-of-{parts}.gguf"))
