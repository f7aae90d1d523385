"""An old and a new program on one store at once, as during a hand-over."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Connection, text

from gateway.store.database import THIS_PROGRAM, Program
from gateway.store.failures import StoreTooNew
from gateway.store.schema import SCHEMA_LEVEL
from tests.store.stores import LIMIT, add, count, opened

NEXT = SCHEMA_LEVEL + 1

MIGRATION = """
import sqlalchemy as sa
from alembic import op

revision = "{level:04}"
down_revision = "{before:04}"
NEEDED_LEVEL = {needed}


def upgrade() -> None:
    {change}
"""


def later_program(folder: Path, *, needed: int = 1, change: str = "pass") -> Program:
    """Return a made-up later version, with a migration of its own."""
    shutil.copytree(THIS_PROGRAM.migrations, folder, ignore=shutil.ignore_patterns("__pycache__"))
    migration = MIGRATION.format(level=NEXT, before=SCHEMA_LEVEL, needed=needed, change=change)
    (folder / "versions" / f"level_{NEXT:04}.py").write_text(migration)
    return Program(NEXT, folder)


EXPAND = 'op.add_column("revisions", sa.Column("note", sa.Text()))'
CONTRACT = 'op.drop_column("revisions", "number")'


def note(connection: Connection) -> None:
    connection.execute(text("INSERT INTO revisions (name, number, note) VALUES ('n', 1, 'x')"))


def test_an_old_program_goes_on_with_a_store_that_a_new_one_has_expanded(
    store_url: str, tmp_path: Path
) -> None:
    newer = later_program(tmp_path / "later", change=EXPAND)
    with opened(store_url, check_seconds=0.1) as old:
        old.run_now(add("old, before"))
        with opened(store_url, program=newer) as new:
            assert new.status().level == NEXT
            new.run_now(note)
            old.run_now(add("old, after"))
            assert (old.run_now(count), new.run_now(count)) == (3, 3)
            assert (old.status().state, old.status().level) == ("up", NEXT)
        # And an old one that starts now, such as one that is put back.
        with opened(store_url) as again:
            again.run_now(add("old, again"))
            assert again.status().level == NEXT


def test_a_program_refuses_a_store_that_a_later_one_has_contracted(
    store_url: str, tmp_path: Path
) -> None:
    newer = later_program(tmp_path / "later", needed=NEXT, change=CONTRACT)
    with opened(store_url, check_seconds=0.1) as old:
        old.run_now(add("before"))
        with opened(store_url, program=newer) as new:
            # The one that runs notices before its next job touches anything.
            with pytest.raises(StoreTooNew, match="run version"):
                old.run_now(add("after"))
            assert old.status().state == "too new"
            assert new.run_now(count) == 1
    with opened(store_url) as late:
        assert late.status().state == "too new"
        assert str(NEXT) in str(late.status().error)
        assert "backup" in str(late.status().remedy)


def test_a_migration_that_fails_changes_nothing(store_url: str, tmp_path: Path) -> None:
    change = f"{EXPAND}\n    op.execute('SELECT * FROM nothing_of_this_name')"
    newer = later_program(tmp_path / "later", change=change)
    with opened(store_url, check_seconds=0.1) as old:
        old.run_now(add("before"))
        with opened(store_url, program=newer) as new:
            assert not new.status().up
            assert "nothing_of_this_name" in str(new.status().error)
            old.run_now(add("after"))
            with pytest.raises(Exception, match="note"):
                old.run_now(note)
        assert (old.status().state, old.status().level) == ("up", SCHEMA_LEVEL)


WORKER = """
import itertools, sys
from pathlib import Path
from gateway.store.database import Program, THIS_PROGRAM, locate_store
from gateway.store.failures import StoreError
from gateway.store.store import Store
from tests.store.stores import add
program = Program(int(sys.argv[3]), Path(sys.argv[4])) if sys.argv[4:] else THIS_PROGRAM
store = Store(locate_store(sys.argv[1], Path("unused")), program=program)
store.start()
written = 0
for number in itertools.count():
    try:
        store.run_now(add(f"{sys.argv[2]}-{number}"))
        written += 1
    except StoreError as error:
        # A migration may hold the lock for longer than a job waits.
        assert error.state == "locked", error
    if written == 1:
        print("begun", flush=True)
    if written >= 300 and store.status().level == int(sys.argv[3]):
        break
assert store.close(30)
print(written)
"""


@pytest.mark.slow
def test_old_and_new_processes_write_at_the_same_time(store_url: str, tmp_path: Path) -> None:
    newer = later_program(tmp_path / "later", change=EXPAND)

    def spawn(name: str, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", WORKER, store_url, name, *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
        )

    # The old one writes until it has seen the new level, and 300 rows at least.
    with spawn("old", NEXT) as old:
        try:
            assert old.stdout is not None
            assert old.stdout.readline() == "begun\n"
            with spawn("new", NEXT, newer.migrations) as new:
                try:
                    by_new = int(new.communicate(timeout=LIMIT * 2)[0].split()[-1])
                finally:
                    new.kill()
            by_old = int(old.communicate(timeout=LIMIT * 2)[0].split()[-1])
        finally:
            old.kill()
    assert (old.returncode, new.returncode) == (0, 0)
    with opened(store_url) as store:
        assert store.run_now(count) == by_old + by_new
