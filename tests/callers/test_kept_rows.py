"""Rows of the ledger on the disk, while the store is away."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from gateway.callers.ledger import ROW_COLUMNS, KeptRows, Ledger, read_rows
from gateway.store.schema import usage
from tests.callers.build import FlakyStore
from tests.callers.test_ledger import World, a_row, a_world
from tests.gateways import until

COLUMNS = len(ROW_COLUMNS)


def rows_in(path: Path) -> list[str]:
    return [row[0] for some in read_rows(path, COLUMNS, 2) for row in some]


def test_rows_are_private_and_read_by_who_comes_when_their_process_has_ended(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "rows"
    first, second = KeptRows(folder, "p1"), KeptRows(folder, "p2")
    assert second.left() == []
    first.keep([a_row("r1"), a_row("r2")])
    first.keep([a_row("r3")])
    assert (folder.stat().st_mode & 0o777, (folder / "p1.rows").stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )
    assert second.left() == []
    first.close()
    assert [rows_in(path) for path in second.left()] == [["r1", "r2", "r3"]]


def test_the_file_goes_when_the_store_has_all_and_its_rows_have_a_bound(tmp_path: Path) -> None:
    kept = KeptRows(tmp_path, "p1", most_bytes=1000)
    for id_ in ("r1", "r2"):
        kept.keep([a_row(id_)])
        assert rows_in(tmp_path / "p1.rows") == [id_]
        kept.clear()
        assert list(tmp_path.iterdir()) == []
        assert kept.is_empty
    kept.keep([a_row("r1")])
    with pytest.raises(OSError, match="rows already"):
        kept.keep([a_row(f"r{number}") for number in range(2, 8)])
    kept.close()
    assert rows_in(tmp_path / "p1.rows") == ["r1"]


def test_what_a_full_disk_left_of_rows_is_cut_off(tmp_path: Path) -> None:
    program = f"""
import resource, signal
from pathlib import Path
from gateway.callers.ledger import KeptRows
from tests.callers.test_ledger import a_row
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
kept = KeptRows(Path({str(tmp_path)!r}), "p1")
kept.keep([a_row("r1")])
try:
    kept.keep([a_row(f"r{{number}}") for number in range(2, 8)])
except OSError:
    kept.keep([a_row("r8")])
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert done.stdout == b"refused\n"
    assert rows_in(tmp_path / "p1.rows") == ["r1", "r8"]


def test_a_file_of_the_version_before_is_read_and_that_one_reads_a_file_of_ours(
    tmp_path: Path,
) -> None:
    before, ours = tmp_path / "before.rows", tmp_path / "p1.rows"
    rows = [a_row(f"r{number}", client_request_id=f"mine-{number}") for number in range(5)]
    before.write_bytes(b"".join(msgspec.json.encode(row[:22]) + b"\n" for row in rows))
    kept = KeptRows(tmp_path, "p1")
    kept.keep(rows)
    kept.close()
    for path, expected in (
        (before, [(*row[:22], *([None] * 6)) for row in rows]),
        (ours, rows),
    ):
        assert [row for some in read_rows(path, COLUMNS, 2) for row in some] == expected
    lines = [tuple(msgspec.json.decode(line)) for line in ours.read_bytes().splitlines()]
    assert [line for line in lines if len(line) == 22] == [row[:22] for row in rows]


def test_lines_that_are_no_rows_are_skipped(tmp_path: Path) -> None:
    kept = KeptRows(tmp_path, "p1")
    kept.keep([a_row("r1")])
    kept.close()
    path = tmp_path / "p1.rows"
    # A row whose first line is damaged does not give its second one to the row before.
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second + b"[" + first + second + b'\xff\n{"a": 1}\n["r2"]\n["r3", "p1')
    assert rows_in(path) == ["r1"]


@contextlib.asynccontextmanager
async def running(ledger: Ledger) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(ledger.worker.run()), asyncio.create_task(ledger.keep_rows())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ids_of(world: World) -> list[str]:
    return [row["id"] for row in await world.all(usage)]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/gateway.db"


async def test_rows_of_a_process_that_was_killed_without_a_store_are_booked_by_the_next_one(
    url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "rows"
    async with a_world(url) as world:
        killed = world.ledger(FlakyStore(world.store, is_away=True), kept=KeptRows(folder, "p1.0"))
        async with running(killed):
            for number in range(3):
                killed.add(a_row(f"r{number}"))
            # They are written by one write, behind the file's creation.
            await until(lambda: [*folder.glob("*.rows")] and rows_in(folder / "p1.0.rows"))
        assert killed.kept is not None
        killed.kept.close()
        following = world.ledger(kept=KeptRows(folder, "p2.0"))
        await following.start(10.0)
        assert await ids_of(world) == ["r0", "r1", "r2"]
        assert following.recovered == 3
        assert list(folder.iterdir()) == []


async def test_rows_are_booked_once_when_the_store_is_back_and_those_that_memory_had_no_room_for(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.callers.ledger.MOST_ROWS_AT_ONCE", 2)
    folder = tmp_path / "rows"
    async with a_world(url) as world:
        store = FlakyStore(world.store, is_away=True)
        ledger = world.ledger(store, kept=KeptRows(folder, "p1.0"), most_pending=8, flush_rows=99)
        async with running(ledger):
            for batch in range(4):
                for number in range(4):
                    ledger.add(a_row(f"r{batch}{number}"))
                await until(lambda: ledger.pending == ledger._on_disk)
            assert ledger.dropped == 0
            world.clock.now += 100
            store.is_away = False
            await until(lambda: not any(folder.iterdir()) and not ledger.pending)
        assert await ids_of(world) == [
            f"r{batch}{number}" for batch in range(4) for number in range(4)
        ]


async def test_a_process_that_ends_without_a_store_leaves_its_rows_on_the_disk(
    url: str, tmp_path: Path
) -> None:
    async with a_world(url) as world:
        ledger = world.ledger(
            FlakyStore(world.store, is_away=True), kept=KeptRows(tmp_path, "p1.0")
        )
        ledger.add(a_row("r1"))
        await ledger.close(5.0)
        assert rows_in(tmp_path / "p1.0.rows") == ["r1"]
