from __future__ import annotations

import pytest

from gateway.access.admin_keys import (
    KEY_FILE_NAME,
    MOST_ADMIN_KEY_CHARACTERS,
    AdminIdentity,
    AdminKeys,
    AdminRole,
)
from gateway.access.keys import new_key
from gateway.config.listeners import AdminKeySpec

WATCHER, KEEPER, OWNER = new_key("watcher"), new_key("keeper"), new_key("owner")
SPECS = [
    AdminKeySpec(id="watcher", sha256=WATCHER.sha256, role="viewer"),
    AdminKeySpec(id="keeper", sha256=KEEPER.sha256, role="operator"),
    AdminKeySpec(id="owner", sha256=OWNER.sha256, role="admin"),
]


def test_each_role_includes_the_lower_ones() -> None:
    assert AdminRole.VIEWER < AdminRole.OPERATOR < AdminRole.ADMIN
    assert [role.label for role in AdminRole] == ["viewer", "operator", "admin"]


def test_a_key_gives_its_role() -> None:
    keys = AdminKeys(SPECS)
    assert keys.find(WATCHER.text) == AdminIdentity("watcher", AdminRole.VIEWER)
    assert keys.find(KEEPER.text) == AdminIdentity("keeper", AdminRole.OPERATOR)
    assert keys.find(OWNER.text) == AdminIdentity("owner", AdminRole.ADMIN)


def test_the_key_of_the_file_is_any_text_and_gives_the_highest_role() -> None:
    for text in ("plain words", "lg_watcher_x", "café", "k" * MOST_ADMIN_KEY_CHARACTERS):
        keys = AdminKeys(SPECS, text)
        assert keys.find(text) == AdminIdentity(KEY_FILE_NAME, AdminRole.ADMIN)
        assert keys.find(WATCHER.text) == AdminIdentity("watcher", AdminRole.VIEWER)


@pytest.mark.parametrize(
    "presented",
    [
        "",
        "lg_",
        "lg_watcher_",
        f"lg_keeper_{WATCHER.text.rpartition('_')[2]}",
        f"{WATCHER.text}x",
        WATCHER.text[:-1],
        WATCHER.sha256,
        new_key("nobody").text,
        "k" * (MOST_ADMIN_KEY_CHARACTERS + 1),
        "\udcff",
    ],
    ids=[
        "empty",
        "prefix",
        "no secret",
        "another id",
        "longer",
        "shorter",
        "hash",
        "unknown",
        "too long",
        "no text",
    ],
)
def test_any_other_text_is_nobodys(presented: str) -> None:
    assert AdminKeys(SPECS, "the key").find(presented) is None
    assert AdminKeys(SPECS).find(presented) is None
    assert AdminKeys().find(presented) is None


def test_a_text_too_long_is_not_the_files_key_either() -> None:
    text = "k" * (MOST_ADMIN_KEY_CHARACTERS + 1)
    assert AdminKeys((), text).find(text) is None


def test_keys_are_needed_as_soon_as_there_is_one() -> None:
    keys = AdminKeys()
    assert (keys.needed, keys.lost) == (False, False)
    keys.configure(SPECS[:1], None)
    assert (keys.needed, keys.lost) == (True, False)
    assert AdminKeys((), "key").needed


def test_losing_the_last_key_admits_nobody() -> None:
    keys = AdminKeys(SPECS, "key")
    keys.configure((), None)
    assert (keys.needed, keys.lost) == (True, True)
    assert keys.find(OWNER.text) is None
    keys.configure(SPECS, None)
    assert not keys.lost
    assert keys.find(OWNER.text) is not None


def test_a_successor_of_a_process_with_keys_needs_some_too() -> None:
    keys = AdminKeys(had_keys=True)
    assert (keys.needed, keys.lost) == (True, True)
