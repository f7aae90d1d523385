"""A store: its files and their owner, its jobs, the worker that comes again, and real failures.

These are of a file, its file system and its locks, and of a PostgreSQL server.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError

from gateway.store.database import act_as_owner, connect, locate_store
from gateway.store.failures import (
    StoreCorrupt,
    StoreError,
    StoreGone,
    StoreLocked,
    StoreReadOnly,
    StoreUnavailable,
)
from gateway.store.store import LONGEST_PAUSE, Store, StoreWorker
from tests.postgres import PostgresServer, needs_postgres, running_postgres
from tests.small_disk import run_on_small_disk
from tests.store.stores import LIMIT, add, count, locked, names, opened, wait_until
from tests.virtual import in_virtual_time, now


def test_postgresql_is_spoken_to_by_psycopg_and_no_password_is_shown() -> None:
    for scheme in ("postgresql", "postgres", "postgresql+psycopg"):
        location = locate_store(f"{scheme}://ann:pass%40word@db.example.org/x", Path("unused"))
        assert location.url.drivername == "postgresql+psycopg"
        assert location.url.password == "pass@word"
        assert location.shown == "postgresql://ann:***@db.example.org/x"
        assert "pass" not in repr(location)
    for url in ("mysql://ann:secret@a/b", "ann", "sqlite://", "http://ann"):
        with pytest.raises(ValueError, match=r"must begin with sqlite:///|no URL") as caught:
            locate_store(url, Path("unused"))
        assert "ann" not in str(caught.value)


def test_all_files_of_a_store_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    old = os.umask(0o000)
    try:
        with opened(f"sqlite:///{folder}/gateway.db") as store:
            store.run_now(add("a"))
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    finally:
        os.umask(old)
    assert modes == {"gateway.db": 0o600, "gateway.db-wal": 0o600, "gateway.db-shm": 0o600}


def test_a_file_that_everybody_could_read_is_closed_to_them(tmp_path: Path) -> None:
    file = tmp_path / "gateway.db"
    with opened(f"sqlite:///{file}"):
        pass
    file.chmod(0o664)
    with opened(f"sqlite:///{file}"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o660


NOBODY = 65534


@pytest.fixture
def strangers_folder() -> Iterator[Path]:
    """Return a folder of another user, which that user can reach."""
    if os.geteuid() != 0:
        pytest.skip("only root has to do with folders of others")
    with tempfile.TemporaryDirectory(prefix="llama-gateway-tests-") as made:
        Path(made).chmod(0o711)
        folder = Path(made) / "state"
        folder.mkdir(mode=0o700)
        os.chown(folder, NOBODY, NOBODY)
        yield folder


AS_ITS_OWNER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("INSERT INTO revisions VALUES ('owner', 1)")
connection.commit()
print(connection.execute("SELECT count(*) FROM revisions").fetchone()[0])
"""


def test_what_root_writes_into_a_services_folder_the_service_can_open(
    strangers_folder: Path,
) -> None:
    file = strangers_folder / "missing" / "gateway.db"
    with opened(f"sqlite:///{file}") as store:
        store.run_now(add("root"))
        for path in (file.parent, *file.parent.iterdir()):
            assert (path.stat().st_uid, path.stat().st_gid) == (NOBODY, NOBODY)
        # While root has it open.
        done = subprocess.run(
            ["/usr/bin/python3", "-c", AS_ITS_OWNER, file],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            cwd="/",
            check=False,
        )
        assert done.stdout == "2\n", done.stderr
        assert store.run_now(names) == ["owner", "root"]


def test_root_follows_no_link_to_a_file_that_the_folders_owner_may_not_open(
    strangers_folder: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("")
    precious.chmod(0o600)
    (strangers_folder / "gateway.db").symlink_to(precious)
    with opened(f"sqlite:///{strangers_folder}/gateway.db") as store:
        assert not store.status().up
    assert precious.read_text() == ""


def test_root_opens_a_folder_itself_that_its_owner_cannot_reach(strangers_folder: Path) -> None:
    strangers_folder.parent.chmod(0o700)
    with opened(f"sqlite:///{strangers_folder}/gateway.db") as store:
        assert store.status().up


def test_only_the_stores_thread_acts_as_the_owner(strangers_folder: Path, tmp_path: Path) -> None:
    def act() -> None:
        act_as_owner(strangers_folder / "gateway.db")
        (strangers_folder / "theirs").touch()

    thread = threading.Thread(target=act)
    thread.start()
    thread.join(LIMIT)
    (tmp_path / "ours").touch()
    assert (strangers_folder / "theirs").stat().st_uid == NOBODY
    assert (tmp_path / "ours").stat().st_uid == 0


class Blocker:
    """A job that has begun at some time, and ends when it is let go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, _: Connection) -> None:
        self.begun.set()
        self.go_on.wait(LIMIT)


@contextlib.asynccontextmanager
async def blocked(store: Store) -> AsyncIterator[None]:
    """A job of the store goes on inside this context."""
    block = Blocker()
    job = asyncio.create_task(store.run(block))
    await asyncio.to_thread(block.begun.wait, LIMIT)
    try:
        yield
    finally:
        block.go_on.set()
        await job


def add_and_fail(connection: Connection) -> None:
    add("half")(connection)
    raise LookupError("the job's own")


async def test_a_job_is_done_wholly_or_not_at_all_and_its_error_is_its_own(store_url: str) -> None:
    with opened(store_url) as store:
        with pytest.raises(LookupError, match="the job's own"):
            await store.run(add_and_fail)
        await store.run(add("whole"))
        with pytest.raises(IntegrityError):
            await store.run(add("whole"))
        assert await store.run(names) == ["whole"]
        assert store.status().up
        assert "secret-of-tests" not in str(store.status())


async def test_a_store_notices_what_others_commit_and_not_its_own(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'gateway.db'}"
    with opened(url, look_seconds=0.01) as store, opened(url) as other:
        before = await changes_after_a_look(store)
        await store.run(add("own"))
        assert await changes_after_a_look(store) == before
        await other.run(add("another's"))
        wait_until(lambda: store.changes == before + 1, store)


async def changes_after_a_look(store: Store) -> int:
    """The number of changes when the store has looked once more."""
    await store.run(lambda _: time.sleep(0.02))  # longer than the time between two looks
    return await store.run(lambda _: store.changes)


async def test_a_job_that_only_reads_sees_one_state_of_the_store(store_url: str) -> None:
    with opened(store_url) as store, opened(store_url) as other:
        await store.run(add("before"))

        def read_twice(connection: Connection) -> tuple[list[str], list[str]]:
            first = names(connection)
            other.run_now(add("meanwhile"))
            return first, names(connection)

        assert await store.run(read_twice, write=False) == (["before"], ["before"])
        assert await store.run(names, write=False) == ["before", "meanwhile"]


async def test_a_cancellation_that_comes_with_the_result_is_obeyed(store_url: str) -> None:
    job = Blocker()
    with opened(store_url) as store:
        waiting = asyncio.create_task(store.run(job, write=False))
        await asyncio.to_thread(job.begun.wait, LIMIT)
        job.go_on.set()
        # The loop stands still until the job is done, and then takes its result in one step.
        store.run_now(names, write=False)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_the_queue_is_bounded_and_says_so(store_url: str) -> None:
    with opened(store_url, most_jobs=3) as store:
        async with blocked(store):
            waiting = [asyncio.create_task(store.run(add(str(number)))) for number in range(3)]
            await asyncio.sleep(0)
            assert store.status().waiting == 3
            with pytest.raises(StoreUnavailable, match="3 jobs wait"):
                await store.run(add("too much"))
        await asyncio.gather(*waiting)
        assert await store.run(names) == ["0", "1", "2"]


async def test_a_job_whose_caller_has_given_up_before_it_began_is_never_done(
    store_url: str,
) -> None:
    with opened(store_url) as store:
        async with blocked(store):
            with pytest.raises(StoreUnavailable, match="does not answer"):
                await store.run(add("late"), seconds=0.05)
            cancelled = asyncio.create_task(store.run(add("cancelled")))
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait([cancelled])
        assert await store.run(names) == []


async def test_a_statement_that_takes_too_long_is_cut_and_the_store_is_opened_again(
    store_url: str,
) -> None:
    endless = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000000000)"
        " SELECT count(*) FROM n"
    )
    # It is away for a tenth of a second, which nobody need see who looks now and then.
    states: list[str] = []
    with opened(store_url, on_change=lambda status: states.append(status.state)) as store:
        with pytest.raises(StoreUnavailable, match="does not answer"):
            await store.run(lambda c: c.execute(text(endless)).scalar(), seconds=0.3)
        await asyncio.to_thread(wait_until, lambda: len(states) >= 3, store)
        assert states == ["up", "unavailable", "up"]
        await store.run(add("after"))
        assert await store.run(names) == ["after"]


async def test_closing_does_what_waits(store_url: str) -> None:
    with opened(store_url) as store:
        jobs = [asyncio.create_task(store.run(add(str(number)))) for number in range(50)]
        await asyncio.sleep(0)
        assert await store.aclose(LIMIT)
        await asyncio.gather(*jobs)
        assert store.status().state == "closed"
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.run(names)
    with opened(store_url) as store:
        assert store.run_now(count) == 50


def test_closing_takes_no_longer_than_it_may(tmp_path: Path) -> None:
    block = Blocker()
    store = Store(locate_store(None, tmp_path))
    store.start()
    thread = threading.Thread(target=store.run_now, args=(block,))
    thread.start()
    try:
        assert block.begun.wait(LIMIT)
        began = time.monotonic()
        assert not store.close(0.2)
        assert time.monotonic() - began < LIMIT / 2
    finally:
        block.go_on.set()
        thread.join(LIMIT)
    assert store.close(LIMIT)


class Passes:
    """Passes of a worker, and when each began."""

    def __init__(self, period: float, first: float | None = None) -> None:
        self.began: list[float] = []
        self.lasts = 0.0
        self.is_away = False
        self.told: list[str] = []
        self.worker = StoreWorker(self, period, first=first, on_away=self.told.append, clock=now)

    async def __call__(self) -> None:
        self.began.append(round(now() - self.start, 3))
        await asyncio.sleep(self.lasts)
        if self.is_away:
            raise StoreUnavailable("gone", "wait")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.start = now()
        task = asyncio.create_task(self.worker.run())
        yield
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


@in_virtual_time
async def test_passes_begin_by_the_clock_however_long_they_take() -> None:
    passes = Passes(1.0, first=0.5)
    passes.lasts = 0.4
    async with passes.running():
        await asyncio.sleep(3.0)
        passes.lasts = 1.75
        await asyncio.sleep(3.0)
    assert passes.began == [0.5, 1.5, 2.5, 3.5, 5.25]


@in_virtual_time
async def test_a_store_that_is_away_is_told_of_once_and_tried_at_growing_distances() -> None:
    passes = Passes(1.0)
    async with passes.running():
        passes.is_away = True
        await asyncio.sleep(20.5)
        assert passes.began == [1.0, 2.0, 4.0, 8.0, 8.0 + LONGEST_PAUSE, 8.0 + 2 * LONGEST_PAUSE]
        assert (passes.worker.problem, passes.worker.failures) == ("gone; wait", 6)
        passes.worker.wake()
        passes.is_away = False
        await asyncio.sleep(5.0)
        assert passes.began[6:] == [23.0, 24.0, 25.0]
        assert passes.worker.problem is None
        passes.is_away = True
        await asyncio.sleep(1.0)
    assert passes.told == ["gone; wait"] * 2


@in_virtual_time
async def test_a_store_that_takes_too_long_before_the_first_pass_is_away() -> None:
    passes = Passes(1.0)
    passes.start, passes.lasts = now(), 3.0
    await passes.worker.attempt_within(2.0, passes)
    assert now() - passes.start == 2.0
    passes.lasts, passes.is_away = 0.0, True
    await passes.worker.attempt_within(2.0, passes)
    assert passes.told == ["the store has not answered yet"]
    assert (passes.worker.problem, passes.worker.failures) == ("gone; wait", 2)


NEVER = 3600.0
"""Seconds between two looks of a store's own, where a test's next job must find the failure."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "gateway.db"


def fails(store: Store, kind: type[StoreError], *, write: bool = True) -> StoreError:
    """The next job must fail like this, and the status must tell it with a remedy."""
    with pytest.raises(kind) as caught:
        store.run_now(add("failed") if write else names, write=write)
    status = store.status()
    assert (status.state, status.up) == (kind.state, False)
    assert status.error
    assert status.remedy
    assert caught.value.remedy in str(caught.value)
    return caught.value


def comes_back(store: Store) -> None:
    wait_until(lambda: store.status().up, store)
    status = store.status()
    assert (status.error, status.remedy) == (None, None)
    store.run_now(add("afterwards"))


def test_a_lock_of_another_is_waited_for_and_then_told(file: Path) -> None:
    with opened(f"sqlite:///{file}", check_seconds=0.1) as store:
        store.run_now(add("before"))
        with locked(f"sqlite:///{file}", "revisions"):
            assert "locked" in str(fails(store, StoreLocked))
            # Reading goes on, and a problem of writing stays a problem.
            assert store.run_now(names, write=False) == ["before"]
            assert store.status().state == "locked"
        comes_back(store)
        assert store.run_now(names) == ["afterwards", "before"]


FULL = """
import resource, signal, sys
from pathlib import Path
from gateway.store.failures import StoreFull
from tests.store.stores import add, count, opened, wait_until
folder, most_bytes = Path(sys.argv[1]), int("".join(sys.argv[2:]) or 0)
ballast, states = folder / "ballast", []
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
notice = lambda status: states.append(status.state)
with opened(f"sqlite:///{folder}/gateway.db", check_seconds=0.1, on_change=notice) as store:
    written = 0
    ballast.write_bytes(b"0" * (1 << 19))
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes or hard, hard))
    try:
        while True:
            store.run_now(add(str(written) + "x" * 10000))
            written += 1
    except StoreFull as error:
        assert ("quota" if most_bytes else "free space") in error.remedy
    # The store tries by itself to write something small, and may be up again.
    assert "full" in states
    assert store.run_now(count, write=False) == written > 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    ballast.unlink()
    wait_until(lambda: store.status().up, store)
    store.run_now(add("afterwards"))
    assert store.run_now(count) == written + 1
print("done", end="")
"""


def test_a_full_disk_is_told_and_nothing_that_was_written_is_lost(tmp_path: Path) -> None:
    assert run_on_small_disk(FULL, "1m", tmp_path).endswith("done")


def test_a_file_that_may_not_grow_is_full(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path, "400000"],
        capture_output=True, text=True, timeout=LIMIT * 4, check=False,
    )  # fmt: skip
    assert done.stdout.endswith("done"), done.stdout + done.stderr


READ_ONLY = """
import sys
from pathlib import Path
from gateway.store.failures import StoreReadOnly
from tests.store.stores import add, names, opened
with opened(f"sqlite:///{sys.argv[1]}") as store:
    assert store.status().state == "read-only", store.status()
    try:
        store.run_now(add("x"))
    except StoreReadOnly as error:
        print(error, end="")
"""


@pytest.mark.parametrize("what", ["file", "folder", "new file"])
def test_what_may_not_be_written_is_told_with_the_remedy(file: Path, what: str) -> None:
    if what != "new file":
        with opened(f"sqlite:///{file}") as store:
            store.run_now(add("before"))
    (file if what == "file" else file.parent).chmod(0o400 if what == "file" else 0o500)
    try:
        command: list[str | Path] = [sys.executable, "-c", READ_ONLY, file]
        if os.geteuid() == 0:
            # Root may write everything, unless it gives that power up.
            if shutil.which("setpriv") is None:
                pytest.skip("root can't give up its power over files here (setpriv)")
            command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *command]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT * 2, check=False
        )
    finally:
        file.parent.chmod(0o700)
    assert "let the gateway's user write the file and its folder" in done.stdout, done.stderr


def test_a_file_that_takes_the_place_of_the_store_is_opened(file: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup.db"
    with opened(f"sqlite:///{backup}") as store:
        store.run_now(add("of the backup"))
    with opened(f"sqlite:///{file}", check_seconds=NEVER) as store:
        store.run_now(add("kept aside"))
        aside = file.rename(tmp_path / "aside.db")
        backup.replace(file)
        with pytest.raises(StoreGone):
            store.run_now(add("neither here nor there"))
        comes_back(store)
        assert store.run_now(names) == ["afterwards", "of the backup"]
    with opened(f"sqlite:///{aside}") as store:
        assert store.run_now(names) == ["kept aside"]


@pytest.mark.parametrize(
    "content", [b"no database at all" * 100, b"SQLite format 3\0" + b"x" * 999]
)
def test_a_damaged_file_is_told_and_left_as_it_is(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with opened(f"sqlite:///{file}") as store:
        assert "backup" in fails(store, StoreCorrupt).remedy
    assert file.read_bytes() == content


@pytest.mark.slow
@needs_postgres
def test_a_server_that_is_halted_costs_its_callers_a_bounded_time() -> None:
    with running_postgres() as server, opened(server.new_database()) as store:
        store.run_now(add("before"))
        with server.halted():
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="has not answered for"):
                store.run_now(add("unanswered"), seconds=1.0)
            # That cut the connection: the next ones learn it at once, or wait for their own time.
            for _ in range(5):
                with pytest.raises(StoreUnavailable):
                    store.run_now(add("refused"), seconds=1.0)
            assert time.monotonic() - began < LIMIT
            wait_until(lambda: not store.status().up, store)
        comes_back(store)
        assert set(store.run_now(names)) <= {"afterwards", "before", "unanswered"}
        with server.halted():
            began = time.monotonic()
            store.close(1.0)
            assert time.monotonic() - began < LIMIT / 2


def test_a_database_that_takes_no_writes_is_told(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    with opened(url) as store:
        store.run_now(add("before"))
    database = url.rpartition("/")[2]
    postgres.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    with opened(url, check_seconds=0.1) as store:
        assert "standby" in fails(store, StoreReadOnly).remedy
        assert store.run_now(names, write=False) == ["before"]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can have a connection vanish")
def test_what_a_vanished_gateway_has_locked_in_the_midst_of_many_rows_comes_free(
    postgres: PostgresServer,
) -> None:
    url = postgres.new_database()
    with opened(url, check_seconds=0.1) as store:
        vanishes = connect(locate_store(url, Path("unused")), lambda _: None)
        driver: Any = vanishes.connection.driver_connection
        driver.execute("LOCK TABLE revisions, store_levels IN EXCLUSIVE MODE")
        # As in `executemany`: the server waits for what else the pipeline has.
        driver.pgconn.enter_pipeline_mode()
        driver.pgconn.send_query_params(b"SELECT 1", [])
        driver.pgconn.flush()
        wait_until(lambda: _waits_for_more(postgres), store)
        wait_until(lambda: not _unconfirmed(driver.fileno()), store)
        _vanish(driver.fileno())
        vanishes.invalidate()
        fails(store, StoreLocked)
        comes_back(store)


def _waits_for_more(server: PostgresServer) -> bool:
    return bool(
        server.execute(
            "SELECT 1 FROM pg_stat_activity WHERE state = 'active' AND wait_event = 'ClientRead'"
        )
    )


def _unconfirmed(descriptor: int) -> int:
    """Bytes that the other side has not confirmed: for those it would answer later."""
    return int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def _vanish(descriptor: int) -> None:
    """Close a connection of which the other side is told nothing."""
    tcp_repair = 19
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, tcp_repair, 1)
        with socket.socket() as closed:
            os.dup2(closed.fileno(), descriptor)


def test_a_wrong_name_is_told_with_the_remedy(postgres: PostgresServer) -> None:
    for wrong, remedy in (
        (postgres.url("nothing"), "the database in store.url"),
        (postgres.url().replace("gateway:", "nobody:"), "correct the role"),
    ):
        with opened(wrong) as store:
            error = fails(store, StoreUnavailable)
        assert remedy in error.remedy
        assert "secret-of-tests" not in str(error)


def test_a_session_that_the_server_ends_is_opened_anew(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    with opened(url, check_seconds=NEVER) as store:
        store.run_now(add("before"))
        postgres.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            f" WHERE datname = '{url.rpartition('/')[2]}'"
        )
        with pytest.raises(StoreUnavailable):
            store.run_now(add("lost"))
        comes_back(store)
        assert store.run_now(count) == 2


def test_sqlite_is_set_up_for_several_processes(tmp_path: Path) -> None:
    with opened(f"sqlite:///{tmp_path}/gateway.db") as store:
        pragmas = {
            name: store.run_now(lambda c, name=name: c.execute(text(f"PRAGMA {name}")).scalar())  # type: ignore[misc]
            for name in ("journal_mode", "synchronous", "busy_timeout", "auto_vacuum")
        }
    assert pragmas == {
        "journal_mode": "wal",
        "synchronous": 1,  # NORMAL
        "busy_timeout": 2000,
        "auto_vacuum": 2,  # INCREMENTAL
    }
