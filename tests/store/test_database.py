from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from gateway.store.database import act_as_owner, locate_store
from gateway.store.store import Store
from tests.store.stores import LIMIT, add, count, names, opened


def test_without_a_url_the_store_is_a_file_in_the_state_folder(tmp_path: Path) -> None:
    location = locate_store(None, tmp_path / "state")
    assert location.path == tmp_path / "state" / "gateway.db"
    assert location.shown == f"sqlite:///{tmp_path}/state/gateway.db"


@pytest.mark.parametrize("name", ["with space.db", "100%41.db", "ä?b.db", "#.db"])
def test_any_name_of_a_file_will_do(tmp_path: Path, name: str) -> None:
    with opened(f"sqlite:///{tmp_path / name}") as store:
        store.run_now(add("a"))
    assert (tmp_path / name).exists()


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_postgresql_is_spoken_to_by_psycopg_and_its_password_is_masked(scheme: str) -> None:
    location = locate_store(f"{scheme}://ann:pass%40word@db.example.org/x", Path("unused"))
    assert location.path is None
    assert location.url.drivername == "postgresql+psycopg"
    assert location.url.password == "pass@word"
    assert location.shown == "postgresql://ann:***@db.example.org/x"
    assert "pass" not in repr(location)


@pytest.mark.parametrize("url", ["mysql://ann:secret@a/b", "ann", "sqlite://", "http://ann"])
def test_other_urls_are_refused_without_showing_them(url: str) -> None:
    with pytest.raises(ValueError, match=r"must begin with sqlite:///|no URL") as caught:
        locate_store(url, Path("unused"))
    assert "ann" not in str(caught.value)


def test_sqlite_is_set_up_for_several_processes(tmp_path: Path) -> None:
    with opened(f"sqlite:///{tmp_path}/gateway.db") as store:
        pragmas = {
            name: store.run_now(lambda c, name=name: c.execute(text(f"PRAGMA {name}")).scalar())  # type: ignore[misc]
            for name in (
                "journal_mode",
                "synchronous",
                "foreign_keys",
                "busy_timeout",
                "auto_vacuum",
            )
        }
    assert pragmas == {
        "journal_mode": "wal",
        "synchronous": 1,  # NORMAL
        "foreign_keys": 1,
        "busy_timeout": 2000,
        "auto_vacuum": 2,  # INCREMENTAL
    }


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
    file = strangers_folder / "gateway.db"
    with opened(f"sqlite:///{file}") as store:
        store.run_now(add("root"))
        assert {path.stat().st_uid for path in strangers_folder.iterdir()} == {NOBODY}
        assert {path.stat().st_gid for path in strangers_folder.iterdir()} == {NOBODY}
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


def test_root_makes_missing_folders_as_the_owner_of_the_folder_above(
    strangers_folder: Path,
) -> None:
    with opened(f"sqlite:///{strangers_folder}/a/b/gateway.db") as store:
        assert store.status().up
    assert (strangers_folder / "a" / "b").stat().st_uid == NOBODY
    assert (strangers_folder / "a" / "b" / "gateway.db").stat().st_uid == NOBODY


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


WRITER = """
import sys
from pathlib import Path
from gateway.store.database import locate_store
from gateway.store.store import Store
from tests.store.stores import add
store = Store(locate_store(sys.argv[1], Path("unused")))
store.start()
for number in range(100):
    store.run_now(add(f"{sys.argv[2]}-{number}"))
assert store.close(30)
"""


@pytest.mark.slow
def test_processes_that_start_at_once_migrate_once_and_share_the_store(store_url: str) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, store_url, str(number)])
        for number in range(4)
    ]
    try:
        assert [process.wait(120) for process in processes] == [0, 0, 0, 0]
    finally:
        for process in processes:
            process.kill()
    with opened(store_url) as store:
        assert store.run_now(count) == 400


KILLED = """
import itertools, sys
from pathlib import Path
from gateway.store.database import locate_store
from gateway.store.store import Store
from tests.store.stores import add
store = Store(locate_store(sys.argv[1], Path("unused")))
store.start()
for number in itertools.count():
    store.run_now(add(f"{sys.argv[2]}-{number:06}"))
    print(number, flush=True)
"""


@pytest.mark.smoke
@pytest.mark.slow
def test_what_was_committed_outlives_a_kill(store_url: str) -> None:
    for run in range(3):
        command = [sys.executable, "-c", KILLED, store_url, str(run)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            told = []
            for line in process.stdout:
                told.append(int(line))
                if len(told) == 50:
                    process.kill()
        with opened(store_url) as store:
            kept = [int(name.split("-")[1]) for name in store.run_now(names) if name[0] == str(run)]
        # The one that was under way may have been committed.
        assert kept in (told, [*told, told[-1] + 1])


def test_a_store_can_be_given_without_a_thread_being_started(tmp_path: Path) -> None:
    began = time.monotonic()
    store = Store(locate_store(f"sqlite:///{tmp_path}/gateway.db", tmp_path))
    assert store.status().state == "opening"
    assert store.close(LIMIT)
    assert time.monotonic() - began < LIMIT
    assert list(tmp_path.iterdir()) == []
