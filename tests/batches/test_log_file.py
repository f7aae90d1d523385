"""The file of an event log: what is found in it, whatever a crash has left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.batches import response_log
from gateway.batches.folder import Folder, FolderError
from gateway.batches.response_log import Extent, LogTaken, Write
from gateway.proxy.api.resuming import named_event


def a_folder(path: Path) -> Folder:
    folder = Folder(path / "folder", most_bytes=lambda: 1 << 30, spare_bytes=0)
    folder.open()
    return folder


def events(first: int, count: int, size: int = 10, last: str = "x") -> bytes:
    kinds = ["x"] * (count - 1) + [last]
    return b"".join(
        named_event({"type": f"response.{kind}", "sequence_number": first + at, "d": "a" * size})
        for at, kind in enumerate(kinds)
    )


def put(folder: Folder, name: str, parts: Sequence[bytes]) -> Extent:
    extent = Extent()
    for part in parts:
        response_log.write_log(folder, Write(name, extent.size, part))
        extent.add(part)
    return extent


def test_a_scan_finds_what_was_written(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    name = response_log.create_log(folder)
    assert response_log.scan_log(folder, name) == Extent()
    parts = [events(0, 3), events(3, 2000, 100), events(2003, 1, 600_000), events(2004, 2)]
    extent = put(folder, name, [*parts, events(2006, 1, last="completed")])
    found = response_log.scan_log(folder, name)
    assert (found.events, found.size, found.ended) == (2007, extent.size, True)
    assert found.last_offset == extent.last_offset
    path = folder.path(name)
    assert path.stat().st_mode & 0o777 == 0o600
    for index in (found.index, extent.index):
        for number, offset in index:
            event = path.read_bytes()[offset:].split(b"\n\n")[0]
            assert b'"sequence_number":%d,' % number in event


def test_each_event_is_found_from_each_entry_of_the_index(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    name = response_log.create_log(folder)
    put(
        folder, name, [events(0, 40), events(40, 1, 700_000), events(41, 1, 300_000), events(42, 9)]
    )
    data = folder.path(name).read_bytes()
    for number in (0, 1, 39, 40, 41, 42, 50):
        offset = response_log.find_event(folder, name, 0, number)
        assert data[offset:].split(b"\n")[1].find(b'"sequence_number":%d,' % number) > 0


def test_whatever_is_torn_off_the_whole_events_before_it_stay(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    name = response_log.create_log(folder)
    whole = events(0, 4)
    ends = [0, *(at + 2 for at in range(len(whole)) if whole.startswith(b"\n\n", at))]
    for size in range(len(whole) + 1):
        folder.path(name).write_bytes(whole[:size])
        found = response_log.scan_log(folder, name)
        assert found.size == max(end for end in ends if end <= size)
        assert found.events == ends.index(found.size)


@pytest.mark.parametrize("junk", [b"\0" * 5000, b"junk\n\n", events(9, 1), b": note\n\n"])
def test_what_is_no_next_event_ends_the_log(tmp_path: Path, junk: bytes) -> None:
    folder = a_folder(tmp_path)
    name = response_log.create_log(folder)
    folder.path(name).write_bytes(events(0, 3) + junk + events(3, 3))
    found = response_log.scan_log(folder, name)
    assert (found.events, found.size) == (3, len(events(0, 3)))


def test_a_comment_may_precede_an_event(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    name = response_log.create_log(folder)
    folder.path(name).write_bytes(events(0, 1) + b": run {}\n" + events(1, 2))
    assert response_log.scan_log(folder, name).events == 3


def test_what_another_process_adds_is_seen(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    name = response_log.create_log(folder)
    extent = put(folder, name, [events(0, 3)])
    with folder.path(name).open("ab") as file:
        file.write(events(3, 3, last="failed")[:-4])
        file.flush()
        response_log.grow_log(folder, name, extent)
        assert (extent.events, extent.ended) == (5, False)
        file.write(events(3, 3, last="failed")[-4:])
        file.flush()
    response_log.grow_log(folder, name, extent)
    assert (extent.events, extent.ended) == (6, True)


def test_two_writers_are_noticed(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    name = response_log.create_log(folder)
    put(folder, name, [events(0, 3)])
    with pytest.raises(LogTaken):
        response_log.write_log(folder, Write(name, 0, events(0, 1)))
    results = response_log.write_logs(
        folder, [Write(name, 0, b"x"), Write(f"events-{'0' * 32}", 0, b"")]
    )
    assert [type(result) for result in results] == [LogTaken, FileNotFoundError]
    assert response_log.scan_log(folder, name).events == 3


def test_a_full_folder_takes_no_new_log(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "folder", most_bytes=lambda: 10, spare_bytes=0)
    folder.open()
    with pytest.raises(FolderError, match="folder_bytes"):
        response_log.create_log(folder)
