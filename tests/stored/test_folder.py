"""Files of a folder: whole, bounded, its own; and the threads that work on it."""

from __future__ import annotations

import asyncio
import math
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gateway.stored.folder import (
    ID_FILE,
    DiskThreads,
    Folder,
    FolderError,
    FolderFull,
    is_file_name,
)
from tests.small_disk import run_on_small_disk

LIMIT = 60.0


def a_folder(path: Path, *, most: int = 1 << 40, spare: int = 0) -> Folder:
    folder = Folder(path / "kept", most_bytes=lambda: most, spare_bytes=spare)
    folder.open()
    return folder


def names(folder: Folder) -> list[str]:
    return sorted(path.name for path in folder.location.iterdir() if path.name != ID_FILE)


def test_a_file_appears_whole_under_its_name_and_for_its_owner_alone(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    new = folder.open_new("file")
    new.write(b"one ")
    assert not folder.path(new.name).exists()
    new.write(b"two")
    assert new.finish() == new.name
    assert is_file_name(new.name)
    assert names(folder) == [new.name]
    assert folder.path(new.name).read_bytes() == b"one two"
    assert stat.S_IMODE(folder.path(new.name).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.location.stat().st_mode) == 0o700
    assert folder.read(new.name, 4, 2) == b"tw"
    assert folder.old_files("file", math.inf) == [new.name]
    assert folder.old_files("spool", math.inf) == folder.old_files("file", 0.0) == []
    new.discard()  # It is finished already.
    assert folder.delete(new.name)
    assert not folder.delete(new.name)


@pytest.mark.parametrize("name", ["..", "file-x", "/etc/passwd", "file-" + "0" * 31, ID_FILE, ""])
def test_nothing_but_its_files_is_reached(tmp_path: Path, name: str) -> None:
    folder = a_folder(tmp_path)
    for reach in (folder.open_to_read, folder.delete, folder.path):
        with pytest.raises(ValueError, match="not a file's name"):
            reach(name)


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir(mode=0o755)
    with pytest.raises(FolderError, match="chmod 700"):
        a_folder(tmp_path)


def test_nothing_is_written_into_another_folder_that_takes_its_place(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    folder.location.rename(tmp_path / "unmounted")
    folder.location.mkdir(mode=0o700)
    with pytest.raises(FolderError, match="another folder"):
        folder.open_new("file")
    assert list(folder.location.iterdir()) == []
    folder.open()
    folder.open_new("file").discard()


WRITER = """
import sys
from pathlib import Path
from gateway.stored.folder import Folder
folder = Folder(Path(sys.argv[1]), most_bytes=lambda: 1 << 40, spare_bytes=0)
folder.open()
new = folder.open_new("file")
new.write(b"half")
print(new.name, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_was_writing_is_removed_and_nothing_else(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    mine = folder.open_new("file")
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, folder.location],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        try:
            assert writer.stdout is not None
            theirs = writer.stdout.readline().strip()
            a_folder(tmp_path)  # A process that starts while both write.
            assert names(folder) == sorted(f".new-{name}" for name in (mine.name, theirs))
        finally:
            writer.kill()
    a_folder(tmp_path)
    assert names(folder) == [f".new-{mine.name}"]
    mine.write(b"whole")
    mine.finish()
    a_folder(tmp_path)
    assert names(folder) == [mine.name]


def test_all_files_together_stay_within_the_limit(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, most=1000)
    used = folder.used_bytes()  # Its id.
    first = folder.open_new("file", 600)
    # What the first one will have counts, although nothing of it has come.
    with pytest.raises(FolderFull, match="1000 bytes together"):
        folder.open_new("file", 1000 - 600 - used + 1)
    second = folder.open_new("file", 1000 - 600 - used)
    first.discard()
    third = folder.open_new("file", 600)
    for new in (second, third):
        new.discard()
    assert folder.used_bytes() == used


ON_A_FULL_DISK = """
import sys
from pathlib import Path
from gateway.stored.folder import Folder, FolderFull
place = Path(sys.argv[1])
folder = Folder(place / "kept", most_bytes=lambda: 1 << 40, spare_bytes=0)
folder.open()
new = folder.open_new("file")
try:
    while True:
        new.write(bytes(100_000))
except FolderFull as error:
    assert "free space" in error.remedy, error
new.discard()
assert [path.name for path in folder.location.iterdir()] == ["folder-id"]
file, written = folder.open_appended("results"), 0
try:
    while True:
        written = file.append(bytes(9_999)) + 9_999
except FolderFull:
    pass
assert folder.path(file.name).stat().st_size == file.size == written > 0
print("done", end="")
"""


def test_a_disk_that_fills_in_the_middle_is_told_and_nothing_stays_in_part(tmp_path: Path) -> None:
    assert run_on_small_disk(ON_A_FULL_DISK, "1m", tmp_path) == "done"


def test_a_discard_waits_for_a_write_that_runs(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    new = folder.open_new("file")
    stopped = threading.Event()

    def write() -> None:
        try:
            while True:
                new.write(bytes(1 << 16))
        except ValueError:
            stopped.set()

    thread = threading.Thread(target=write)
    thread.start()
    until = time.monotonic() + LIMIT
    while not new.size:
        assert time.monotonic() < until
    new.discard()
    assert stopped.wait(LIMIT)
    thread.join()
    assert names(folder) == []


def test_an_appended_file_has_its_name_from_the_start_and_grows(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    file = folder.open_appended("results")
    assert names(folder) == [file.name]
    assert stat.S_IMODE(folder.path(file.name).stat().st_mode) == 0o600
    assert [file.append(data) for data in (b"one\n", b"", b"two\n")] == [0, 4, 4]
    assert folder.read(file.name, 4, 4) == b"two\n"
    assert file.size == 8
    assert folder.is_written(file.name)
    file.close()
    file.close()
    assert not folder.is_written(file.name)
    with pytest.raises(ValueError, match="closed"):
        file.append(b"three\n")
    # A restart removes nothing of it.
    a_folder(tmp_path)
    assert folder.read(file.name, 0, 8) == b"one\ntwo\n"
    with pytest.raises(FileNotFoundError):
        folder.is_written("results-" + "0" * 32)


async def test_a_disk_that_hangs_is_told_and_does_not_hold_its_caller() -> None:
    threads, release = DiskThreads(1, seconds=0.05), threading.Event()
    with pytest.raises(FolderError, match="has not answered"):
        await threads.run(release.wait)
    release.set()
    threads.close()


async def test_what_a_lost_caller_has_opened_is_closed() -> None:
    threads, begun, release = DiskThreads(1), threading.Event(), threading.Event()
    closed: list[str] = []

    def work() -> str:
        begun.set()
        release.wait(60)
        return "opened"

    caller = asyncio.create_task(threads.open(work, close=closed.append))
    await asyncio.to_thread(begun.wait, 60)
    caller.cancel()
    await asyncio.wait([caller])
    release.set()
    assert await threads.open(lambda: "kept", close=closed.append) == "kept"
    assert closed == ["opened"]
    threads.close()
