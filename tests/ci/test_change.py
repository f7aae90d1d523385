from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.ci.change import Change, change


def git(folder: Path, *words: str, when: int = 1_700_000_000) -> None:
    named = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    stamp = dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), f"{when} +0000")
    subprocess.run(["git", *named, *words], cwd=folder, check=True, env=os.environ | stamp)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    for name in ("old.py", "moved.py", "edited.py"):
        (tmp_path / name).write_text(f"print('{name}')\n" * 9)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "Before")
    git(tmp_path, "mv", "moved.py", "here.py")
    (tmp_path / "edited.py").write_text("print('other')\n")
    git(tmp_path, "commit", "-q", "-a", "-m", "Change", when=1_700_000_000 + 5 * 3600)
    return tmp_path


def test_the_change_is_that_of_the_last_hours(repository: Path) -> None:
    assert change(None, repository) == {"edited.py": {1}}
    (repository / "new.py").write_text("a\nb\n")
    assert change("HEAD", repository) == {"new.py": {1, 2}}


def test_without_an_older_commit_everything_counts(repository: Path) -> None:
    git(repository, "commit", "-q", "--amend", "-m", "Change", when=1_700_000_001)
    found: Change = change(None, repository)
    assert set(found) == {"old.py", "here.py", "edited.py"}
    assert found["old.py"] == set(range(1, 10))


def test_a_deletion_touches_the_lines_around_it_and_a_gone_file_counts(repository: Path) -> None:
    lines = (repository / "old.py").read_text().splitlines(keepends=True)
    (repository / "old.py").write_text("".join(lines[:4] + lines[5:]))
    assert change("HEAD", repository) == {"old.py": {8, 9}}
    git(repository, "rm", "-q", "-f", "old.py")
    assert set(change("HEAD", repository)) == {"old.py"}
