"""Earlier texts of the two files: what is kept, how it is compared, and how it comes back."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gateway.config import versions
from gateway.config.versions import FileHistory, VersionError, difference, find_version
from tests.each_case import each_case

MORNING = 1_796_025_600.0  # 2026-11-30T08:00:00Z
FIRST = "gateway-20261130T080000Z"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "etc" / "gateway.yaml"
    path.parent.mkdir()
    path.write_text("queue: {max: 1}\n")
    return path


@pytest.fixture
def history(file: Path, tmp_path: Path) -> FileHistory:
    return FileHistory.of("gateway", file, [tmp_path / "state"])


def names(history: FileHistory) -> list[str]:
    return [one.name for one in history.versions()]


def test_a_text_is_kept_once_until_another_one_is_in_force(history: FileHistory) -> None:
    assert history.keep("a\n", MORNING) is not None
    assert history.keep("a\n", MORNING + 60) is None
    assert history.keep("b\n", MORNING + 120) is not None
    assert history.keep("a\n", MORNING + 180) is not None
    assert [one.read() for one in history.versions()] == ["a\n", "b\n", "a\n"]
    assert names(history)[:2] == [FIRST, "gateway-20261130T080200Z"]


def test_only_the_owner_can_read_versions_which_are_beside_the_file(
    history: FileHistory, file: Path
) -> None:
    kept = history.keep("store: {url: postgresql://u:secret@h/d}\n", MORNING)
    assert kept is not None
    folder = file.parent / ".gateway.yaml.history"
    assert kept.path.parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(kept.path.stat().st_mode) == 0o600


def test_without_a_place_beside_the_file_versions_go_to_the_state_folder(
    history: FileHistory, file: Path, tmp_path: Path
) -> None:
    # A file is where the folder would be: that keeps root out, too.
    (file.parent / ".gateway.yaml.history").write_text("")
    assert history.keep("a", MORNING) is not None
    assert history.versions()[0].path.parent.parent == tmp_path / "state/history"
    # Files of other folders have others.
    other = FileHistory.of("gateway", tmp_path / "gateway.yaml", [tmp_path / "state"])
    assert set(other.folders).isdisjoint(history.folders)
    # What is beside the file later is a part of the same history, and new ones stay together.
    (file.parent / ".gateway.yaml.history").unlink()
    assert names(history) == [FIRST]
    assert history.keep("b", MORNING + 1) is not None
    assert history.versions()[1].path.parent == history.versions()[0].path.parent


def test_the_oldest_versions_make_room(
    history: FileHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "MOST_VERSIONS", 3)
    for number in range(5):
        history.keep(f"n: {number}", MORNING + number)
    assert [one.read() for one in history.versions()] == ["n: 2", "n: 3", "n: 4"]
    monkeypatch.setattr(versions, "MOST_BYTES", 97)
    history.keep("#" * 90, MORNING + 10)
    assert [one.size for one in history.versions()] == [4, 90]
    history.keep("#" * 400, MORNING + 11)
    assert [one.size for one in history.versions()] == [400]


def test_a_version_is_found_by_its_name_and_as_the_newest(
    history: FileHistory, tmp_path: Path
) -> None:
    nodes = FileHistory.of("nodes", tmp_path / "nodes.yaml", [])
    for text, at in (("a", MORNING), ("b", MORNING + 86_400)):
        history.keep(text, at)
    known = [history, nodes]
    assert find_version(known, FIRST)[1].read() == "a"
    assert find_version(known, "gateway") == (history, history.versions()[1])
    for name in ("", "gateway-2026", "nodes", "../../etc/passwd", "gateway/../x", "x" * 10_000):
        with pytest.raises(
            VersionError, match=rf"the latest are gateway-20261201T080000Z, {FIRST}"
        ):
            find_version(known, name)


# The way back.


def test_a_text_comes_back_with_owner_and_mode_and_what_was_there_is_kept(
    history: FileHistory, file: Path
) -> None:
    history.keep("queue: {max: 1}\n", MORNING)
    file.write_text("queue: {max: edited}\n")
    file.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(file, 12345, 54321)
    before = file.stat()
    kept = history.put_back("queue: {max: 1}\n", MORNING + 60)
    after = file.stat()
    assert file.read_text() == "queue: {max: 1}\n"
    for one in ("st_mode", "st_uid", "st_gid"):
        assert getattr(after, one) == getattr(before, one)
    assert after.st_ino != before.st_ino  # Whoever reads the old one reads it to its end.
    assert kept is not None
    assert kept.read() == "queue: {max: edited}\n"
    assert {one.name for one in file.parent.iterdir()} == {file.name, ".gateway.yaml.history"}


def test_a_file_that_is_gone_comes_back_for_its_owner_alone(
    history: FileHistory, file: Path
) -> None:
    file.unlink()
    assert history.put_back("a: 1\n", MORNING) is None
    assert file.read_text() == "a: 1\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_link_stays_one_and_its_target_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "real" / "settings.yaml"
    target.parent.mkdir()
    target.write_text("new\n")
    link = tmp_path / "gateway.yaml"
    link.symlink_to(target)
    history = FileHistory.of("gateway", link, [])
    history.put_back("old\n", MORNING)
    assert link.is_symlink()
    assert target.read_text() == "old\n"
    # Wherever the link leads later, its history goes on.
    link.unlink()
    link.symlink_to(tmp_path / "elsewhere")
    assert [one.read() for one in history.versions()] == ["new\n"]


# What has changed.


def test_a_difference_of_large_files_is_bounded() -> None:
    before = "\n".join(f"a: {number % 7}" for number in range(100_000))
    after = "\n".join(f"b: {number % 5}" for number in range(100_000))
    shown = difference(before, after)
    assert shown["cut"]
    assert len(shown["lines"]) == versions.MOST_SHOWN
    assert (shown["added"], shown["removed"]) == (100_000, 100_000)
    assert len(difference("", "x" * 1_000_000)["lines"][1]) < 3000


HASH = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


@each_case(
    ("line", "secret"),
    [
        (f"    sha256: {HASH}", HASH),
        (f"# the old one was {HASH}", HASH),
        (f"keys: [{{id: a, sha256: '{HASH}', name: x}}]", HASH),
        ("  url: postgresql://gateway:hunter2@db/gateway", "hunter2"),
        ("  url: 'postgresql://db/g?user=u&password=hunter2'", "hunter2"),
        ("  - url: https://hooks.example.org/services/T0/B0/abc", "T0/B0"),
        ("start: [/bin/up, --token, s3cr3t]", "s3cr3t"),
        ("  'Client_Secret' : quite a secret", "quite a secret"),
        ("x: whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "MfKQ9r8G"),
        ("# lg_web_3q2uVbnM41sKd93jfLqpeTsr4K01", "3q2uVbnM41s"),
    ],
)
def test_secrets_are_masked_unless_asked_for(line: str, secret: str) -> None:
    shown = difference("", line)
    assert secret not in "\n".join(shown["lines"])
    assert "********" in "\n".join(shown["lines"])
    assert secret in "\n".join(difference("", line, with_secrets=True)["lines"])
    changed = difference(line, line.replace(secret, secret[::-1]))["lines"]
    assert len(changed) == 3
    assert secret not in "\n".join(changed)


def test_what_is_no_secret_is_shown() -> None:
    for line in ("max_tokens: 2048", "api_key_file: /etc/keys/a.key", "api_key_env: NODE_KEY_OF_A"):
        assert difference("", f"  {line}")["lines"][-1] == f"+  {line}"
