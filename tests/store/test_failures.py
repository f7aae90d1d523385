"""Real failures: of a file, its file system and its locks; of a PostgreSQL server."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.store.database import connect, locate_store
from gateway.store.failures import (
    StoreCorrupt,
    StoreError,
    StoreGone,
    StoreLocked,
    StoreReadOnly,
    StoreUnavailable,
)
from gateway.store.store import Store
from tests.postgres import PostgresServer, needs_postgres, running_postgres
from tests.small_disk import run_on_small_disk
from tests.store.stores import LIMIT, add, count, locked, names, opened, wait_until

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
