"""Keys in a real store: SQLite's file, and PostgreSQL."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, update

from gateway.callers import stored_keys
from gateway.callers.key_desk import checked_specs, expiry
from gateway.callers.keys import KeyRing, new_key
from gateway.callers.stored_keys import (
    KeysRefused,
    StoredKey,
    add_keys,
    change_key,
    find_key,
    keys_revision,
    read_keys,
    revoke_key,
    rotate_key,
)
from gateway.config.keys import CacheSpec, KeySpec, LimitSpec
from gateway.errors import GatewayError
from gateway.store.schema import keys as keys_table
from gateway.store.store import Store
from tests.store.stores import opened

T = TypeVar("T")

NOW = 1_800_000_000.0

ALICE, BOB, OTHER = new_key("alice-1"), new_key("bob-1"), new_key("other")

Job = Callable[[Connection], T]


def spec(name: str = "alice", **fields: Any) -> KeySpec:
    return KeySpec(**{"id": ALICE.id, "sha256": ALICE.sha256, "name": name, **fields})


BOBS = KeySpec(id=BOB.id, sha256=BOB.sha256, name="bob")

FULL = spec(
    class_="premium",
    max_class="urgent",
    models=("mistral-7b", "phi-4-mini"),
    group="team",
    trust_user_headers=True,
    limits=LimitSpec(rpm=60, budget="20/month"),
    user_limits=LimitSpec(rpm=6),
    cache=CacheSpec(),
    expires=datetime.fromtimestamp(NOW + 90 * 86400, UTC),
)


def test_a_key_comes_back_as_it_was_stored(store: Store) -> None:
    store.run_now(lambda connection: add_keys(connection, [FULL], NOW))
    [found] = store.run_now(read_keys)
    assert found == StoredKey(FULL, NOW)
    ring = KeyRing(clock=lambda: NOW)
    ring.replace_stored([found.held()])
    caller = ring.find(ALICE.text)
    assert caller is not None
    assert (caller.name, caller.group, caller.limits) == ("alice", "team", FULL.limits)


def _find(name: str) -> Job[StoredKey]:
    return lambda connection: find_key(connection, name)


def test_a_key_is_found_by_its_name_and_by_its_id(store: Store) -> None:
    store.run_now(lambda connection: add_keys(connection, [FULL, BOBS], NOW))
    for name in ("alice", ALICE.id):
        assert store.run_now(_find(name)).spec == FULL
    with pytest.raises(GatewayError) as caught:
        store.run_now(lambda connection: find_key(connection, "carol"))
    assert (caught.value.status, caught.value.code) == (404, "key_not_found")


def changes() -> list[tuple[str, Job[object]]]:
    return [
        ("create", lambda connection: add_keys(connection, [BOBS], NOW)),
        (
            "change",
            lambda connection: change_key(connection, "alice", spec("alice", group="x"), NOW),
        ),
        ("rotate", lambda connection: rotate_key(connection, "alice", OTHER.sha256, 60.0, NOW)),
        ("revoke", lambda connection: revoke_key(connection, "alice", NOW)),
    ]


@pytest.mark.parametrize(("_name", "change"), changes())
def test_a_change_raises_the_revision_once_though_it_is_made_twice(
    store: Store, _name: str, change: Job[object]
) -> None:
    store.run_now(lambda connection: add_keys(connection, [FULL], NOW))
    before = store.run_now(keys_revision)
    store.run_now(change)
    after = store.run_now(keys_revision)
    assert after > before > 0
    keys = store.run_now(lambda connection: read_keys(connection, ()))
    store.run_now(change)
    assert store.run_now(keys_revision) == after
    assert store.run_now(lambda connection: read_keys(connection, ())) == keys


def test_a_refused_change_changes_nothing(store: Store) -> None:
    store.run_now(lambda connection: add_keys(connection, [FULL], NOW))
    before = store.run_now(keys_revision)
    with pytest.raises(KeysRefused):
        store.run_now(lambda connection: add_keys(connection, [BOBS, spec("alice", id="x")], NOW))
    assert store.run_now(keys_revision) == before
    assert len(store.run_now(read_keys)) == 1


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (spec("alice", id="other"), "the key alice-1 is called 'alice' already"),
        (spec("carol", sha256=BOB.sha256), "another key has the id 'alice-1' already"),
        (spec("alice-1", id="other"), "the key alice-1 is called 'alice' already"),
        (spec("carol", id="alice"), "the key alice-1 is called 'alice' already"),
    ],
)
def test_names_and_ids_of_stored_keys_are_unique_together(
    store: Store, second: KeySpec, said: str
) -> None:
    store.run_now(lambda connection: add_keys(connection, [spec()], NOW))
    with pytest.raises(KeysRefused) as caught:
        store.run_now(lambda connection: add_keys(connection, [second], NOW))
    assert caught.value.status == 409
    assert said in caught.value.message


def test_every_key_of_an_import_that_clashes_is_named(store: Store) -> None:
    store.run_now(lambda connection: add_keys(connection, [spec(), BOBS], NOW))
    wanted = [spec("a", id="a"), spec("alice", id="b"), spec("c", id="c"), spec("bob", id="d")]
    with pytest.raises(KeysRefused) as caught:
        store.run_now(lambda connection: add_keys(connection, wanted, NOW))
    assert [problem.index for problem in caught.value.problems] == [1, 3]


def test_a_revoked_keys_name_can_be_used_again_but_not_its_id(store: Store) -> None:
    store.run_now(lambda connection: add_keys(connection, [spec()], NOW))
    revoked = store.run_now(lambda connection: revoke_key(connection, "alice", NOW + 5))
    assert revoked.revoked_at == NOW + 5
    assert store.run_now(read_keys) == []
    with pytest.raises(KeysRefused, match="a revoked key has the id"):
        store.run_now(lambda connection: add_keys(connection, [spec()], NOW))
    again = spec(id="alice-2")
    store.run_now(lambda connection: add_keys(connection, [again], NOW + 9))
    assert store.run_now(lambda connection: find_key(connection, "alice")).spec == again
    every = store.run_now(lambda connection: read_keys(connection, ()))
    assert [(key.spec.id, key.revoked_at) for key in every] == [
        ("alice-1", NOW + 5),
        ("alice-2", None),
    ]


def test_a_rotation_keeps_the_old_secret_for_the_grace(store: Store) -> None:
    store.run_now(lambda connection: add_keys(connection, [FULL], NOW))
    rotated = store.run_now(
        lambda connection: rotate_key(connection, "alice", OTHER.sha256, 3600.0, NOW)
    )
    assert (rotated.spec.sha256, rotated.previous_sha256) == (OTHER.sha256, ALICE.sha256)
    assert rotated.previous_until == NOW + 3600
    assert rotated.spec.limits == FULL.limits
    at_once = store.run_now(
        lambda connection: rotate_key(connection, "alice", BOB.sha256, 0.0, NOW)
    )
    assert (at_once.previous_sha256, at_once.previous_until) == (None, None)
    assert store.run_now(read_keys) == [at_once]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda connection: rotate_key(connection, "alice", OTHER.sha256, 1.0, NOW), "key_revoked"),
        (lambda connection: change_key(connection, "alice", spec(), NOW), "key_revoked"),
        (lambda connection: rotate_key(connection, "bob", OTHER.sha256, 1.0, NOW), "key_expired"),
    ],
)
def test_a_key_that_ended_is_not_revived(store: Store, change: Job[object], code: str) -> None:
    past = BOBS.model_copy(update={"expires": datetime.fromtimestamp(NOW - 1, UTC)})
    store.run_now(lambda connection: add_keys(connection, [spec(), past], NOW))
    store.run_now(lambda connection: revoke_key(connection, "alice", NOW))
    with pytest.raises(GatewayError) as caught:
        store.run_now(change)
    assert (caught.value.status, caught.value.code) == (409, code)


def test_a_key_can_not_take_anothers_name(store: Store) -> None:
    store.run_now(lambda connection: add_keys(connection, [spec(), BOBS], NOW))
    with pytest.raises(KeysRefused) as caught:
        store.run_now(lambda connection: change_key(connection, "bob", spec("alice"), NOW))
    assert caught.value.status == 409
    changed = store.run_now(
        lambda connection: change_key(connection, "bob", spec("robert", group="g"), NOW)
    )
    assert (changed.spec.id, changed.spec.sha256) == (BOB.id, BOB.sha256)
    assert (changed.spec.name, changed.spec.group) == ("robert", "g")


def test_a_key_that_a_later_version_wrote_has_no_rights(store: Store) -> None:
    store.run_now(lambda connection: add_keys(connection, [spec(), BOBS], NOW))

    def spoil(connection: Connection) -> None:
        odd = json.dumps({"fortnightly": 3})
        connection.execute(
            update(keys_table).where(keys_table.c.name == "alice").values(limits=odd)
        )

    store.run_now(spoil)
    assert [key.spec.name for key in store.run_now(read_keys)] == ["bob"]


def test_the_revision_of_a_store_from_a_backup_is_another(store: Store) -> None:
    store.run_now(lambda connection: add_keys(connection, [spec()], NOW))
    first = store.run_now(keys_revision)
    store.run_now(lambda connection: stored_keys.raise_revision(connection, NOW - 1000))
    assert store.run_now(keys_revision) == first + 1  # never back, though the clock was
    store.run_now(lambda connection: stored_keys.raise_revision(connection, NOW + 1))
    assert store.run_now(keys_revision) == int((NOW + 1) * 1000)


def test_a_store_holds_a_bounded_number_of_keys(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_keys, "MOST_STORED_KEYS", 2)
    store.run_now(lambda connection: add_keys(connection, [spec(), BOBS], NOW))
    with pytest.raises(KeysRefused, match="at most 2 keys"):
        store.run_now(lambda connection: add_keys(connection, [spec("c", id="c")], NOW))


def test_thousands_of_keys_are_imported_at_once(store: Store) -> None:
    many = [spec(f"name {n}", id=f"id-{n}") for n in range(12_000)]
    store.run_now(lambda connection: add_keys(connection, many, NOW), seconds=60)
    assert len(store.run_now(read_keys)) == len(many)


def test_the_file_holds_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "gateway.db"
    with opened(f"sqlite:///{path}") as store:
        store.run_now(lambda connection: add_keys(connection, [FULL], NOW))
    secret = ALICE.text.split("_")[2]
    assert secret.encode() not in path.read_bytes()
    with closing(sqlite3.connect(path)) as reader:
        assert reader.execute("SELECT sha256 FROM keys").fetchall() == [(ALICE.sha256,)]


# What somebody wants, checked before the store is asked.


def checked(*entries: object, settings: tuple[KeySpec, ...] = ()) -> list[KeySpec]:
    return checked_specs(entries, settings, ("team",), NOW)


def entry(**fields: object) -> dict[str, object]:
    return {"id": ALICE.id, "sha256": ALICE.sha256, **fields}


def test_a_key_without_a_name_is_called_by_its_id() -> None:
    assert checked(entry())[0].name == ALICE.id


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"limits": {"rpm": 0}}, "limits.rpm"),
        ({"limits": {"tpm": -1}}, "limits.tpm"),
        ({"limits": {"budget": "0/month"}}, "limits.budget"),
        ({"limits": {"concurrency": 0}}, "limits.concurrency"),
        ({"id": "a_b"}, "id"),
        ({"sha256": "lg_alice_secret"}, "sha256"),
        ({"class": "vip"}, "class"),
        ({"class": "premium", "max_class": "batch"}, "max_class"),
        ({"colour": "red"}, "colour"),
        ({"group": "nobody"}, "there is no group 'nobody' (there are team"),
        ({"name": " alice"}, "white space"),
        ({"name": "a\nb"}, "printable"),
        ({"name": "x" * 300}, "name"),
        ({"expires": "2020-01-01"}, "is over"),
        ({"expires": "0d"}, "is over"),
        ({"expires": "soon"}, "expires: must be a duration such as 90d"),
        ({"expires": 5}, "expires"),
    ],
)
def test_a_bad_entry_is_refused_with_its_field(fields: dict[str, object], said: str) -> None:
    with pytest.raises(KeysRefused) as caught:
        checked(entry(**fields))
    assert caught.value.status == 400
    assert said in caught.value.message


def test_no_refusal_repeats_a_secret_that_was_pasted_as_a_hash() -> None:
    with pytest.raises(KeysRefused) as caught:
        checked(entry(sha256=ALICE.text, expires=ALICE.text))
    assert ALICE.text.split("_")[2] not in caught.value.message


@pytest.mark.parametrize("value", [None, 5, "text", [], ["id"]])
def test_an_entry_that_is_no_mapping_is_refused(value: object) -> None:
    with pytest.raises(KeysRefused):
        checked(value)


@pytest.mark.parametrize("clash", [{"name": "team a"}, {"id": "team-a"}, {"name": "team-a"}])
def test_a_key_of_the_settings_keeps_its_name_and_id(clash: dict[str, str]) -> None:
    own = KeySpec(id="team-a", sha256=BOB.sha256, name="team a")
    with pytest.raises(KeysRefused, match="a key of the settings is called"):
        checked(entry(**clash), settings=(own,))


def test_two_keys_of_one_name_in_a_list_are_refused() -> None:
    with pytest.raises(KeysRefused, match="key 1 of the list is called 'alice' already"):
        checked(entry(name="alice"), entry(id="b", name="alice"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90d", 90 * 86400.0), ("12h", 43200.0), ("1h30m", 5400.0), ("250ms", 0.25)],
)
def test_an_expiry_may_be_a_duration(text: str, seconds: float) -> None:
    assert expiry(text, NOW).timestamp() == pytest.approx(NOW + seconds, abs=1e-3)


def test_an_expiry_may_be_a_time() -> None:
    assert expiry("2027-01-31", NOW) == datetime(2027, 1, 31, tzinfo=UTC)
    assert expiry("2027-01-31T18:00:00+01:00", NOW) == datetime(2027, 1, 31, 17, tzinfo=UTC)


@pytest.mark.parametrize("text", ["", "later", "90", "90x", "-5d", "9" * 30 + "d", "d", "T"])
def test_another_text_is_no_expiry(text: str) -> None:
    with pytest.raises(ValueError, match="must be a duration"):
        expiry(text, NOW)
