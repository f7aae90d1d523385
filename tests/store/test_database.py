from __future__ import annotations

import os
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from gateway.store.database import act_as_owner, locate_store
from tests.store.stores import LIMIT, add, names, opened


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
